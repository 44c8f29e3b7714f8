"""Rings: all_gather, reduce_scatter and all_reduce built from hops between neighbours.

With R ranks, at index i: "up" passes pieces on to i + 1, "down" to i - 1; "both" sends half of the pieces each way, and
"split" half of every piece each way. All are differentiable, because a hop is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tplab.comm import dim_of
from tplab.errors import one_of
from tplab.mesh import Axis
from tplab.rings import DIRECTIONS, Direction, check_parts, gather_lanes, scatter_lanes
from tplab.torch.comm.collectives import axis_index, axis_size, ring_shift, start
from tplab.torch.private import pytree
from tplab.torch.ranks.meter import mark_sum
from tplab.torch.ranks.rank import this_rank


def ring_all_gather(x: Any, axis: Axis, direction: Direction = "up", dim: int = -1) -> list[Any]:
    """Every rank's x, in the order in which they arrive around a ring.

    x          a tensor, or any structure of tensors
    "up"       R pieces, place k from index i - k;  R-1 hops
    "down"     R pieces, place k from index i + k;  R-1 hops
    "both"     R pieces in the order of "up"; ceil((R-1)/2) hops up while floor((R-1)/2) go down
    "split"    2R halves, cut in two along `dim`: the first halves as "up", then the second halves as "down"
    cost       (R-1) x is sent by each rank
    """
    num_ranks = axis_size(axis)
    lanes = gather_lanes(0, num_ranks, 1, direction)  # whose pieces they are does not matter here
    if direction == "split":
        first, second = _halves(x, dim)
        up, down = _gathered(first, second, axis, len(lanes.up), len(lanes.down))
        return [first, *up, second, *down]
    return [x, *lanes.in_places(*_gathered(x, x, axis, len(lanes.up), len(lanes.down)))]


def _gathered(first: Any, second: Any, axis: Axis, hops_up: int, hops_down: int) -> tuple[list[Any], list[Any]]:
    """The pieces that arrive in these numbers of hops up and down, both at once."""
    up, down = [first], [second]
    for hop in range(max(hops_up, hops_down)):
        rising = _hop(up[-1], axis, 1) if hop < hops_up else None
        sinking = _hop(down[-1], axis, -1) if hop < hops_down else None
        if rising is not None:
            up.append(_landed(rising))
        if sinking is not None:
            down.append(_landed(sinking))
    return up[1:], down[1:]


def ring_reduce_scatter(parts: Sequence[Any], axis: Axis, direction: Direction = "up", dim: int = -1) -> Any:
    """Add up one part of every rank's list: each rank ends with one sum.

    parts      R tensors (or structures of them), in the order in which ring_all_gather returns them
    "up"       index i gets sum_j parts_j[(j-1-i) mod R];  R-1 hops to i + 1
    "down"     index i gets sum_j parts_j[(i-j-1) mod R];  R-1 hops to i - 1
    "both"     the sums of "up"; ceil((R-1)/2) hops up while floor((R-1)/2) go down
    "split"    parts cut in two along `dim`: the first halves as "up", the second as "down", joined again
    cost       (R-1)/R of all parts is sent by each rank
    """
    num_ranks, parts = axis_size(axis), list(parts)
    check_parts(len(parts), num_ranks, axis, f"x.chunk({num_ranks}, dim)")
    lanes = scatter_lanes(0, num_ranks, 1, direction)  # the part at place k is for the rank at distance k + 1
    is_split, first, second = direction == "split", parts, parts
    if is_split:
        first, second = zip(*(_halves(part, dim) for part in parts), strict=True)
    rising, sinking = [first[p.distance - 1] for p in lanes.up], [second[p.distance - 1] for p in lanes.down]
    up, down = _collected(rising, sinking, axis)
    if not is_split:
        return _plus(down, _plus(up, parts[-1]))
    return pytree.tree_map(lambda a, b: torch.cat([a, b], dim), _plus(up, first[-1]), _plus(down, second[-1]))


def ring_all_reduce(x: Tensor, axis: Axis, direction: Direction = "up") -> Tensor:
    """Add up every rank's x: a ring reduce-scatter of its pieces, then a ring all-gather of the sums.

    x [...]   ->   y [...] = sum_j x_j, the same bits on every rank
    cost      2(R-1)/R of x is sent by each rank, in 2(R-1) hops; no algorithm sends less (Patarasuk & Yuan 2009).
              x is padded to R equal pieces ("split": 2R)
    """
    num_ranks, index = axis_size(axis), axis_index(axis)
    one_of("direction", direction, DIRECTIONS)
    multiple = 2 * num_ranks if direction == "split" else num_ranks
    flat, missing = x.reshape(-1), -x.numel() % multiple
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    pieces = flat.chunk(num_ranks) if flat.numel() else [flat] * num_ranks
    rising = [pieces[(index - 1 - place) % num_ranks] for place in range(num_ranks)]  # so that index i sums piece i
    sinking = [pieces[(index + 1 + place) % num_ranks] for place in range(num_ranks)]
    if direction == "split":
        parts = [torch.cat([_halves(a, 0)[0], _halves(b, 0)[1]]) for a, b in zip(rising, sinking, strict=True)]
    else:
        parts = sinking if direction == "down" else rising
    arrived = ring_all_gather(ring_reduce_scatter(parts, axis, direction, 0), axis, direction, 0)
    up = [arrived[(index - place) % num_ranks] for place in range(num_ranks)]
    down = [arrived[-num_ranks:][(place - index) % num_ranks] for place in range(num_ranks)]
    if direction == "split":
        ordered = [half for pair in zip(up, down, strict=True) for half in pair]
    else:
        ordered = down if direction == "down" else up
    return torch.cat(ordered)[: x.numel()].reshape(x.shape)


def _collected(rising: list[Any], sinking: list[Any], axis: Axis) -> tuple[Any, Any]:
    """Two sums that travel at once, to which each rank adds a part before each hop; None for a sum without parts."""
    pytree.tree_map(this_rank().starts_with, [parts[:1] for parts in (rising, sinking)])
    up = down = None
    for hop in range(max(len(rising), len(sinking))):
        going_up = _hop(_plus(up, rising[hop]), axis, 1) if hop < len(rising) else None
        going_down = _hop(_plus(down, sinking[hop]), axis, -1) if hop < len(sinking) else None
        up = up if going_up is None else _landed(going_up)
        down = down if going_down is None else _landed(going_down)
    return up, down


def _hop(x: Any, axis: Axis, shift: int) -> Any:
    """Start one hop of every tensor of x."""
    return pytree.tree_map(lambda leaf: start(ring_shift, leaf, axis, shift), x)


def _landed(flights: Any) -> Any:
    return pytree.tree_map(lambda flight: flight.wait(), flights)


def _plus(received: Any, part: Any) -> Any:
    """received + part, marked in the trace as holding the data of both."""
    if received is None:
        return part
    return pytree.tree_map(lambda a, b: mark_sum(a + b, a, b), received, part)


def _halves(x: Any, dim: int) -> tuple[Any, Any]:
    """Every tensor of x cut in two along `dim`; if the size is odd, the first half is larger."""
    leaves, structure = pytree.tree_flatten(x)
    dims = [dim_of(leaf.shape, dim, "direction='split'") for leaf in leaves]
    cut = [x.split([x.shape[at] - x.shape[at] // 2, x.shape[at] // 2], at) for x, at in zip(leaves, dims)]
    return tuple(pytree.tree_unflatten([pair[side] for pair in cut], structure) for side in (0, 1))  # type: ignore
