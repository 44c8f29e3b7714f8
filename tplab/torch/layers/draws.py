"""Random numbers that are the same on some ranks and differ on others: for dropout, and for the first parameters.

torch's default generator is this rank's own, unlike any other rank's. Where ranks must agree, as on the dropout mask of
a tensor that all of them hold, they draw from a generator made of the seed of the run and a count, which all of them
know.
"""

from __future__ import annotations

from collections import OrderedDict
from zlib import crc32

import numpy as np
import torch

from tplab.mesh import Axis
from tplab.torch.ranks.rank import Rank, this_rank

_SHARED = 1 << 31  # sets these numbers apart from the ranks' own, whose key is the rank
_MOST_REMEMBERED = 1 << 14  # draws; those of one step must be remembered until its backward pass


class _Draws:
    """The draws that a rank has made along one axis: how many, and at which state of the rank's own generator."""

    def __init__(self) -> None:
        self.count = 0
        self.number_at: OrderedDict[int, int] = OrderedDict()

    def number(self, at: int) -> int:
        """The number of the draw made `at` a state: that of the earlier one, if it was made there before."""
        found = self.number_at.get(at)
        if found is None:
            found = self.number_at[at] = self.count
            self.count += 1
            if len(self.number_at) > _MOST_REMEMBERED:
                self.number_at.popitem(last=False)
        return found


def next_generator(axis: Axis | None = None, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for the next draw: others on ranks that differ along `axis`, the same along every other axis.

    Ranks that are to agree must draw equally often. `torch.utils.checkpoint` computes a forward pass again, from the
    state that the rank's own generator had: a draw that is made again there is given the same generator again.
    """
    rank = this_rank()
    names = () if axis is None else rank.mesh.names(axis)
    at = int(torch.randint(1 << 62, (), device="cpu"))  # moves the rank's own generator on by one
    number = _draws_of(rank, names).number(at)
    coordinates = rank.mesh.coordinates(rank.rank)
    # not of the mesh's shape: the numbers are the same on every mesh
    along = [value for name in sorted(names) for value in (crc32(name.encode()), coordinates[name])]
    source = np.random.SeedSequence(rank.seed, spawn_key=(_SHARED, number, *along))
    return torch.Generator(device).manual_seed(int(source.generate_state(1, np.uint64)[0]) >> 1)


def _draws_of(rank: Rank, names: tuple[str, ...]) -> _Draws:
    return rank.draws.setdefault(frozenset(names), _Draws())
