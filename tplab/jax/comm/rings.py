"""Rings: all_gather, reduce_scatter and all_reduce built from hops between neighbours.

Over R ranks, index i. "up" passes pieces on to i + 1, "down" to i - 1; "both" sends half of the pieces each way, and
"split" half of every piece each way. All are differentiable, since a hop is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tplab.comm import dim_of
from tplab.errors import one_of
from tplab.jax.comm.collectives import axis_index, axis_size, ring_shift
from tplab.jax.ranks.context import vary
from tplab.mesh import Axis
from tplab.rings import DIRECTIONS, Direction, rings_over


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


ring_all_gather, ring_reduce_scatter = rings_over(
    __name__,
    axis_size=axis_size,
    ready=lambda x, axis: jax.tree.map(lambda leaf: varying(leaf, axis), x),
    starts=lambda parts: None,
    hop=lambda x, axis, shift: jax.tree.map(lambda leaf: ring_shift(leaf, axis, shift), x),
    landed=lambda arrived: arrived,
    add=lambda received, part: jax.tree.map(jnp.add, received, part),
    halves=halved,
    join=lambda first, second, dim: jax.tree.map(lambda a, b: jnp.concatenate([a, b], dim), first, second),
    split="jnp.split(x, {}, dim)",
)
