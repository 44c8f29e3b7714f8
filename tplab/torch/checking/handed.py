"""How ranks are watched: for how many steps, and with which weights and samples. Those of ranks that draw their own are
handed to the reference in place of its draws; or the reference's, to ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tplab.checking.recording import Arrays, Seen, checksum
from tplab.checking.repairs import Groups, Repair
from tplab.torch.checking.pieces import array_of
from tplab.torch.ranks.rank import this_rank


class NotEnough(Exception):
    """The reference asks for other samples than the ranks have drawn."""


class Handed:
    """The inputs of all ranks' models and the targets of their losses, in one queue per kind of data: by microbatch,
    and within each by rank. Ranks that saw the same count once.

    is_drawn   whether the reference gets all ranks' samples together in place of its own draws: it may draw fewer
    why        the reason for handing them over
    groups     if given, each group of ranks gets an equal part of all, in one piece, and all of its ranks the same
    """

    def __init__(self, seen: Sequence[Seen], groups: Groups = ()):
        count = min(one.num_steps for one in seen)
        self.is_drawn, self.why, self._groups = False, "", groups
        self._steps = [_Queues([one.steps[number] for one in seen], groups) for number in range(count)]

    @property
    def fits(self) -> bool:
        return all(step.data for step in self._steps)

    @property
    def regroups(self) -> bool:
        """Whether the reference's microbatches may have other samples than those of all ranks, though a step has the
        same: if they are handed over, each of its values can be compared with the ranks'."""
        return self.fits and not self.is_drawn and all(step.regroups for step in self._steps)

    @property
    def can_be_drawn(self) -> bool:
        """Whether the ranks' scripts draw the inputs of their models."""
        return bool(self._steps) and all(step.can_be_drawn for step in self._steps)

    def again(self, num_ranks: int) -> Handed:
        """Start again, for this many ranks: each gets a share of its own if the shares can be equal."""
        for step in self._steps:
            step.taken, step.num_shares = Counter(), num_ranks if step.count % num_ranks == 0 else 1
        return self

    def data(self, step: int, asked: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the ranks' data in place of `asked`, as many rows."""
        if self.is_drawn or step >= len(self._steps):
            return asked
        queues = self._steps[step]
        return {name: queues.take(queues.data, slot, x) for slot, (name, x) in enumerate(asked.items())}

    def drawn(self, step: int, key: tuple[str, int], found: Tensor) -> Tensor:
        """Return the draws of all ranks in place of the reference's."""
        parts = self._steps[step].draws.get(key) if self.is_drawn and step < len(self._steps) else None
        if parts is None or any(part.shape[1:] != found.shape[1:] for part in parts):
            return found
        return torch.from_numpy(np.concatenate(parts)).to(found)

    def target(self, step: int, asked: Tensor) -> Tensor:
        if self.is_drawn or step >= len(self._steps):
            return asked
        return self._steps[step].take(self._steps[step].targets, 0, asked)

    def check_end(self) -> None:
        """Raise NotEnough if the reference has left samples out."""
        for step in () if self.is_drawn or self._groups else self._steps:
            step.check_end()


class _Queues:
    """The samples of one step."""

    def __init__(self, steps: Sequence, groups: Groups) -> None:
        self._groups = groups
        distinct = {
            tuple(checksum(x) for data in step.samples for x in data.values()): step for step in steps if step.samples
        }
        chosen = list(distinct.values())
        batches = min((len(step.samples) for step in chosen), default=0)
        self.regroups = batches > 1 and all(len(step.targets) == len(step.samples) for step in chosen)
        slots = min((len(data) for step in chosen for data in step.samples), default=0)
        self.data = [
            [list(step.samples[batch].values())[slot] for batch in range(batches) for step in chosen]
            for slot in range(slots)
        ]
        targets = min((len(step.targets) for step in chosen), default=0)
        self.targets = [[step.targets[batch][0] for batch in range(targets) for step in chosen]] if targets else []
        keys = set.intersection(*(set(step.draws) for step in chosen)) if chosen else ()
        self.draws = {key: [step.draws[key] for step in chosen] for key in keys}
        self.can_be_drawn = bool(chosen) and all(
            any(next(iter(data.values())) is x for x in step.draws.values()) for step in chosen for data in step.samples
        )
        self.count, self.num_shares, self.taken = len(chosen), 1, Counter[tuple[int, int]]()

    def check_end(self) -> None:
        has = sum(map(len, self.data[0]))
        if (used := sum(count for (slot, _), count in self.taken.items() if slot == 0)) < has:
            raise NotEnough(f"the ranks drew {has} samples in a step, and the reference has used {used}")

    def take(self, rows: list[list[np.ndarray]], slot: int, asked: Tensor) -> Tensor:
        """Return the next rows of a kind of data, as many as are asked for."""
        if slot >= len(rows) or not asked.dim():
            return asked
        share = this_rank().rank % self.num_shares
        mine = [x for place, x in enumerate(rows[slot]) if place % self.count * self.num_shares // self.count == share]
        if self._groups:
            share, mine = this_rank().rank, rows[slot]
        whole, key = np.concatenate(mine), (slot if rows is self.data else -1, share)
        if self._groups:
            place = next(place for place, group in enumerate(self._groups) if share in group)
            whole = np.array_split(whole, len(self._groups))[place]
            if whole.shape[1:] != tuple(asked.shape[1:]):
                return asked  # such as a mask, which may be cut in another way
        start = self.taken[key]
        end = self.taken[key] = start + len(asked)
        if end > len(whole) or whole.shape[1:] != tuple(asked.shape[1:]):
            raise NotEnough(
                f"the reference asks for {end} samples of shape {list(asked.shape[1:])} in a step, and the ranks drew "
                f"{len(whole)} of shape {list(whole.shape[1:])}"
            )
        return torch.from_numpy(np.array(whole[start:end])).to(asked)


class Enough(BaseException):
    """A rank has made as many steps as were asked for. Scripts that catch exceptions do not catch this one."""


@dataclass(frozen=True)
class Plan:
    """How ranks are watched.

    steps    after this many steps of its optimizer a rank ends, before the next one begins
    feed     the samples to use in place of the program's draws
    weights  the weights to begin with in place of the program's, by name
    ends     whether ranks end after these steps; otherwise they continue, unwatched, and dropout is not changed
    nudges   whether weights and samples are changed in their last digit
    traced   the step of which every operation is recorded; None for none
    repairs  changes of the run; board: the exchange between ranks for them
    arrays   all arrays that are kept
    """

    steps: int
    feed: Handed | None = None
    weights: Mapping[str, np.ndarray] | None = None
    ends: bool = True
    nudges: bool = False
    traced: int | None = None
    repairs: tuple[Repair, ...] = ()
    board: dict[Any, dict[int, Any]] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=Arrays)

    def once(self, x: Tensor) -> np.ndarray:
        return self.arrays.once(array_of(x))
