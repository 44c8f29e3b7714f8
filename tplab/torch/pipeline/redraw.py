"""Random numbers that depend on their purpose, not on when they are drawn: the same in any order, and repeatable."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tplab.mesh import Axis
from tplab.torch.ranks.process_state import first_state, generators, put_states
from tplab.torch.ranks.rank import Rank

_REDRAW = (1 << 31) + 1  # sets these numbers apart from others that derive from the run's seed

Mark = tuple[list[Tensor], dict[Any, int]]
"""A position in the numbers: the states of torch's generators, and the numbers of draws shared with other ranks."""


class Redraw:
    """`with redraw: ...` draws from the seed of the run and `key` alone. Entered again, it continues where it stopped.

    It covers torch's default generator and `tplab.torch.dropout`. Along `axis` it does not matter which rank draws, so
    the numbers are the same on any mesh; ranks that differ along another axis draw different numbers, as always.
    """

    def __init__(self, rank: Rank, key: tuple[int, ...], axis: Axis, device: torch.device):
        self._rank, self._generators = rank, generators(device)
        source = np.random.SeedSequence(rank.seed, spawn_key=(_REDRAW, *key))
        self._seed = int(source.generate_state(1, np.uint64)[0])
        here = {**rank.mesh.coordinates(rank.rank), **dict.fromkeys(rank.mesh.names(axis), 0)}
        self._states = [first_state(one, self._seed, rank.mesh.rank(**here)) for one in self._generators]
        self._draws: dict[Any, int] = {}

    def mark(self) -> Mark:
        """The current position of the draws, for `go_back`. It may be called inside the context."""
        return [one.get_state() for one in self._generators], dict(self._draws)

    def go_back(self, mark: Mark) -> None:
        """Draw again what was drawn after `mark`. Call it before the context is entered again."""
        self._states, self._draws = mark

    def __enter__(self) -> None:
        rank = self._rank
        self._others = [one.get_state() for one in self._generators], rank.seed, rank.draws
        put_states(self._generators, self._states)
        rank.seed, rank.draws = self._seed, self._draws

    def __exit__(self, *_: object) -> None:
        self._states = self.mark()[0]
        states, self._rank.seed, self._rank.draws = self._others
        put_states(self._generators, states)
