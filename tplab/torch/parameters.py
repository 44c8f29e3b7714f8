"""How parameters begin: drawn as those of the whole model, of which a rank keeps its piece.

So a model that is made with one seed is the same on every mesh, up to the last bit, and data-parallel copies agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tplab.sharding import P
from tplab.torch.draws import next_generator
from tplab.torch.rank import this_rank


def drawn_uniform(shape: Sequence[int], spec: P, bound: float) -> Tensor:
    """This rank's piece of numbers spread evenly over [-bound, bound]."""
    generator = next_generator()
    return piece_of(torch.rand(tuple(shape), generator=generator, device="cpu") * (2 * bound) - bound, spec)


def drawn_normal(shape: Sequence[int], spec: P, deviation: float) -> Tensor:
    """This rank's piece of normal numbers."""
    return piece_of(torch.randn(tuple(shape), generator=next_generator(), device="cpu") * deviation, spec)


def piece_of(whole: Tensor, spec: P) -> Tensor:
    """This rank's piece. A dim that does not divide is cut into pieces of ceil(n / R); the last ones are smaller."""
    rank = this_rank()
    piece = whole
    for dim, entry in enumerate(spec):
        if entry is not None:
            place = rank.place(entry)
            size = -(-whole.shape[dim] // len(place.group))
            begin = min(place.index * size, whole.shape[dim])
            piece = piece.narrow(dim, begin, min(size, whole.shape[dim] - begin))
    return piece.clone(memory_format=torch.contiguous_format).to(torch.empty(0).device)
