"""Rings: all_gather, reduce_scatter and all_reduce built from hops between neighbours.

With R ranks, at index i: "up" passes pieces on to i + 1, "down" to i - 1; "both" sends half of the pieces each way, and
"split" half of every piece each way. All are differentiable, because a hop is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tplab.comm import dim_of
from tplab.errors import one_of
from tplab.mesh import Axis
from tplab.rings import DIRECTIONS, Direction, rings_over
from tplab.torch.comm.collectives import axis_index, axis_size, ring_shift, start
from tplab.torch.private import pytree
from tplab.torch.ranks.meter import mark_sum
from tplab.torch.ranks.rank import this_rank


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


def _halves(x: Any, dim: int) -> tuple[Any, Any]:
    """Every tensor of x cut in two along `dim`; if the size is odd, the first half is larger."""
    leaves, structure = pytree.tree_flatten(x)
    dims = [dim_of(leaf.shape, dim, "direction='split'") for leaf in leaves]
    cut = [x.split([x.shape[at] - x.shape[at] // 2, x.shape[at] // 2], at) for x, at in zip(leaves, dims)]
    return tuple(pytree.tree_unflatten([pair[side] for pair in cut], structure) for side in (0, 1))  # type: ignore


ring_all_gather, ring_reduce_scatter = rings_over(
    __name__,
    axis_size=axis_size,
    ready=lambda x, axis: x,
    starts=lambda parts: pytree.tree_map(this_rank().starts_with, parts),
    hop=lambda x, axis, shift: pytree.tree_map(lambda leaf: start(ring_shift, leaf, axis, shift), x),
    landed=lambda flights: pytree.tree_map(lambda flight: flight.wait(), flights),
    add=lambda received, part: pytree.tree_map(lambda a, b: mark_sum(a + b, a, b), received, part),
    halves=_halves,
    join=lambda first, second, dim: pytree.tree_map(lambda a, b: torch.cat([a, b], dim), first, second),
    split="x.chunk({}, dim)",
)
