"""Rings: all_gather, reduce_scatter and all_reduce built from hops between neighbours.

Over R ranks, index i. "up" passes pieces on to i + 1, "down" to i - 1; "both" sends half of the pieces each way, and
"split" half of every piece each way. All are differentiable, since a hop is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tplab.comm import dim_of
from tplab.errors import one_of
from tplab.jax.comm.collectives import axis_index, axis_size, ring_shift
from tplab.jax.ranks.context import vary
from tplab.mesh import Axis
from tplab.rings import DIRECTIONS, Direction, check_parts, gather_lanes, scatter_lanes


def ring_all_gather(x: Any, axis: Axis, direction: Direction = "up", dim: int = -1) -> list[Any]:
    """Every rank's x, in the order in which they arrive around a ring.

    x          an array, or any pytree of arrays
    "up"       R pieces, place k from index i - k;  R-1 hops
    "down"     R pieces, place k from index i + k;  R-1 hops
    "both"     R pieces in the order of "up"; ceil((R-1)/2) hops up while floor((R-1)/2) go down
    "split"    2R halves, cut in two along `dim`: the first halves as "up", then the second halves as "down"
    cost       (R-1) x is sent by each rank
    """
    num_ranks = axis_size(axis)
    x = jax.tree.map(lambda leaf: varying(leaf, axis), x)
    lanes = gather_lanes(0, num_ranks, 1, direction)  # the rank's index does not matter here
    if direction == "split":
        first, second = halved(x, dim)
        up, down = _gathered(first, second, axis, len(lanes.up), len(lanes.down))
        return [first, *up, second, *down]
    return [x, *lanes.in_places(*_gathered(x, x, axis, len(lanes.up), len(lanes.down)))]


def _gathered(first: Any, second: Any, axis: Axis, hops_up: int, hops_down: int) -> tuple[list[Any], list[Any]]:
    """What arrives in these numbers of hops up and down, in both directions at once."""
    up, down = [first], [second]
    for hop in range(max(hops_up, hops_down)):
        if hop < hops_up:
            up.append(_hop(up[-1], axis, 1))
        if hop < hops_down:
            down.append(_hop(down[-1], axis, -1))
    return up[1:], down[1:]


def ring_reduce_scatter(parts: Sequence[Any], axis: Axis, direction: Direction = "up", dim: int = -1) -> Any:
    """Add up one part of every rank's list: each rank ends with one sum.

    parts      R arrays (or pytrees of them), in the order in which ring_all_gather returns them
    "up"       index i gets sum_j parts_j[(j-1-i) mod R];  R-1 hops to i + 1
    "down"     index i gets sum_j parts_j[(i-j-1) mod R];  R-1 hops to i - 1
    "both"     the sums of "up"; ceil((R-1)/2) hops up while floor((R-1)/2) go down
    "split"    parts cut in two along `dim`: the first halves as "up", the second as "down", joined again
    cost       (R-1)/R of all parts is sent by each rank
    """
    num_ranks = axis_size(axis)
    check_parts(len(parts), num_ranks, axis, f"jnp.split(x, {num_ranks}, dim)")
    parts = jax.tree.map(lambda leaf: varying(leaf, axis), list(parts))
    lanes = scatter_lanes(0, num_ranks, 1, direction)  # the part at place k is for the rank at distance k + 1
    is_split, first, second = direction == "split", parts, parts
    if is_split:
        first, second = zip(*(halved(part, dim) for part in parts), strict=True)
    rising, sinking = [first[p.distance - 1] for p in lanes.up], [second[p.distance - 1] for p in lanes.down]
    up, down = _collected(rising, sinking, axis)
    if not is_split:
        return _plus(down, _plus(up, parts[-1]))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], dim), _plus(up, first[-1]), _plus(down, second[-1]))


def ring_all_reduce(x: Any, axis: Axis, direction: Direction = "up") -> Array:
    """Add up every rank's x: a ring reduce-scatter of its pieces, then a ring all-gather of the sums.

    x [...]   ->   y [...] = sum_j x_j, the same bits on every rank, though JAX's types do not know it
    cost      2(R-1)/R of x is sent by each rank, in 2(R-1) hops; no algorithm sends less (Patarasuk & Yuan 2009).
              x is padded to R equal pieces ("split": 2R)
    """
    num_ranks, index = axis_size(axis), axis_index(axis)
    one_of("direction", direction, DIRECTIONS)
    multiple = 2 * num_ranks if direction == "split" else num_ranks
    x = varying(x, axis)
    flat = x.reshape(-1)
    if -x.size % multiple:
        flat = jnp.pad(flat, (0, -x.size % multiple))
    pieces = flat.reshape(num_ranks, -1)
    rising = [_piece(pieces, index - 1 - place) for place in range(num_ranks)]  # so that index i sums piece i
    sinking = [_piece(pieces, index + 1 + place) for place in range(num_ranks)]
    if direction == "split":
        parts = [jnp.concatenate([halved(a, 0)[0], halved(b, 0)[1]]) for a, b in zip(rising, sinking, strict=True)]
    else:
        parts = sinking if direction == "down" else rising
    arrived = ring_all_gather(ring_reduce_scatter(parts, axis, direction, 0), axis, direction, 0)
    places = jnp.arange(num_ranks)
    up = jnp.stack(arrived[:num_ranks])[(index - places) % num_ranks]
    down = jnp.stack(arrived[-num_ranks:])[(places - index) % num_ranks]
    if direction == "split":
        ordered = jnp.stack([up, down], 1)
    else:
        ordered = down if direction == "down" else up
    return ordered.reshape(-1)[: x.size].reshape(x.shape)


def _piece(pieces: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(pieces, index % pieces.shape[0], keepdims=False)


def _collected(rising: Sequence[Any], sinking: Sequence[Any], axis: Axis) -> tuple[Any, Any]:
    """Two sums that travel at once; each rank adds one part before each hop. Returns what arrives; None: no parts."""
    up = down = None
    for hop in range(max(len(rising), len(sinking))):
        if hop < len(rising):
            up = _hop(_plus(up, rising[hop]), axis, 1)
        if hop < len(sinking):
            down = _hop(_plus(down, sinking[hop]), axis, -1)
    return up, down


def _hop(x: Any, axis: Axis, shift: int) -> Any:
    """Pass every array of x on by one place."""
    return jax.tree.map(lambda leaf: ring_shift(leaf, axis, shift), x)


def _plus(received: Any, part: Any) -> Any:
    return part if received is None else jax.tree.map(jnp.add, received, part)


def halved(x: Any, dim: int) -> tuple[Any, Any]:
    """Every array of x cut in two along `dim`; if the size is odd, the first half is larger."""

    def cut(leaf: Array) -> list[Array]:
        along = dim_of(leaf.shape, dim, "direction='split'")
        middle = leaf.shape[along] - leaf.shape[along] // 2
        return [lax.slice_in_dim(leaf, *ends, axis=along) for ends in ((0, middle), (middle, None))]

    leaves, structure = jax.tree.flatten(x)
    halves = [cut(leaf) for leaf in leaves]
    return structure.unflatten([first for first, _ in halves]), structure.unflatten([second for _, second in halves])


def varying(x: Any, axis: Axis) -> Array:
    """x with the type that all pieces of a ring share. The rank's own piece needs it too, though it is never sent."""
    return vary(jnp.asarray(x), (axis,) if isinstance(axis, str) else tuple(axis))
