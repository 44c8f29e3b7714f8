"""Random numbers that are the same on some ranks and differ on others: for dropout, and for initial parameters.

torch's default generator is this rank's own, and differs from every other rank's. Where ranks must agree, as on the
dropout mask of a tensor that all of them hold, they draw from a generator seeded with the seed of the run and a count
that all of them share. Changes to a rank's own generator, such as `torch.manual_seed` on one rank, do not affect it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from zlib import crc32

import numpy as np
import torch

from tplab.mesh import Axis
from tplab.torch.private import graph_task
from tplab.torch.ranks.rank import Rank, this_rank

_SHARED = 1 << 31  # sets these numbers apart from the ranks' own, whose key is the rank
_MOST_STATES, _MOST_AT_ONE_STATE = 1 << 14, 1 << 10  # draws of one step are remembered until its backward pass


class Drawn:
    """The seeds of this rank's draws, by the state that its own generator had at the time.

    A checkpoint restores that state and computes the forward pass again, inside the backward pass: so repeated draws
    are recognised by it. Of several draws made in one state, the backward pass reaches the last one first.
    """

    def __init__(self) -> None:
        self._at: OrderedDict[tuple[frozenset[str], int], deque[int]] = OrderedDict()
        self._num_again: dict[tuple[frozenset[str], int], int] = {}  # in this backward pass
        self._task = -1

    def note(self, key: tuple[frozenset[str], int], seed: int) -> None:
        self._at.setdefault(key, deque(maxlen=_MOST_AT_ONE_STATE)).append(seed)
        self._at.move_to_end(key)
        if len(self._at) > _MOST_STATES:
            self._at.popitem(last=False)

    def again(self, key: tuple[frozenset[str], int], task: int) -> int | None:
        """The seed of a draw that the backward pass `task` repeats; None for a new draw."""
        seeds = self._at.get(key)
        if seeds is None:
            return None
        if task != self._task:
            self._task = task
            self._num_again.clear()
        number = self._num_again[key] = self._num_again.get(key, 0) + 1
        return seeds[-1 - (number - 1) % len(seeds)]


def next_generator(axis: Axis | None = None, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for the next draw: different on ranks that differ along `axis`, the same along every other axis.

    Ranks that must agree have to make the same number of draws. If `torch.utils.checkpoint` computes a forward pass
    again, each draw gets the same generator again.
    """
    rank = this_rank()
    names = frozenset(() if axis is None else rank.mesh.names(axis))
    key = names, int(torch.randint(1 << 62, (), device="cpu"))  # moves the rank's own generator on by one
    drawn = rank.drawn = rank.drawn or Drawn()
    task = graph_task()
    seed = None if task < 0 else drawn.again(key, task)
    if seed is None:
        seed = _next_seed(rank, names)
        drawn.note(key, seed)
    return torch.Generator(device).manual_seed(seed)


def _next_seed(rank: Rank, names: frozenset[str]) -> int:
    number = rank.draws.get(names, 0)
    rank.draws[names] = number + 1
    coordinates = rank.mesh.coordinates(rank.rank)
    # independent of the mesh's shape: the numbers are the same on every mesh
    along = [value for name in sorted(names) for value in (crc32(name.encode()), coordinates[name])]
    source = np.random.SeedSequence(rank.seed, spawn_key=(_SHARED, number, *along))
    return int(source.generate_state(1, np.uint64)[0]) >> 1
