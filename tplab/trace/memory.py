"""The memory of each rank while a program ran, by kind: parameters, gradients, activations, ..."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tplab.errors import TraceError
from tplab.mesh import Mesh

KINDS = ("parameters", "optimizer", "gradients", "gathered", "activations", "other")
"""The kinds of memory, from those that stay longest to those that are freed first.

parameters    trained or frozen parameters, whole or only this rank's pieces
optimizer     the states of an optimizer, and its master copies of parameters
gradients     `.grad` of the parameters, and gradients on their way there
gathered      whole parameters, gathered from pieces for a layer that needs them (ZeRO stage 3)
activations   what a forward pass has saved for the backward pass, until it is freed
other         the rest: inputs, results, and what an operation leaves for the next one
"""


@dataclass(frozen=True, eq=False)
class RankMemory:
    """The memory of one rank: one row for every change, and one for the end.

    times        [n] when the row begins, in the run's unit; it lasts until the next one
    operations   [n] how many operations of the rank come before it
    num_bytes    [n, kinds] in the order of KINDS
    ops          [n] the operation that caused the change: "mm", "all_gather"
    where        [n] the operation's line in the program
    phases       [n] "forward" or "backward"
    leaves_out   whether there were tensors that were not counted, because they have shapes and no memory
    """

    times: np.ndarray
    operations: np.ndarray
    num_bytes: np.ndarray
    ops: Sequence[str]
    where: Sequence[str]
    phases: Sequence[str]
    leaves_out: bool = False

    def __len__(self) -> int:
        return len(self.times)

    def at_times(self, times: np.ndarray) -> RankMemory:
        """The same, at these times, of which the first counts as 0."""
        return replace(self, times=times - times[0])

    @property
    def totals(self) -> np.ndarray:
        """[n] bytes of all kinds together."""
        return self.num_bytes.sum(axis=1)

    @property
    def peak(self) -> int:
        """The most bytes at any moment."""
        return int(self.totals.max(initial=0))

    @property
    def peak_row(self) -> int:
        """The row in which the peak is first reached."""
        return int(self.totals.argmax())

    def of(self, kind: str) -> np.ndarray:
        """[n] bytes of one kind."""
        if kind not in KINDS:
            raise TraceError(f"there is no kind {kind!r} of memory; kinds are {', '.join(KINDS)}")
        return self.num_bytes[:, KINDS.index(kind)]

    def at(self, row: int) -> dict[str, int]:
        """kind -> bytes in one row; row -1 is the end."""
        return dict(zip(KINDS, self.num_bytes[row].tolist()))


class Memory(Sequence[RankMemory]):
    """The memory of every rank of `mesh` while a program ran: `memory[rank]`.

    clock, unit, cluster   of the times, as in `Trace`. If the unit is "steps", computing takes no time, and only the
                           number of operations distinguishes one moment from the next
    peaks                  the most bytes that each rank held
    """

    def __init__(
        self,
        mesh: Mesh,
        ranks: Sequence[RankMemory],
        *,
        title: str = "",
        clock: str = "modelled",
        unit: str = "s",
        cluster: str | None = None,
    ):
        if len(ranks) != mesh.size:
            raise TraceError(f"{mesh} has {mesh.size} ranks, and there is memory of {len(ranks)}; give one per rank")
        self.mesh, self._ranks = mesh, list(ranks)
        self.title, self.clock, self.unit, self.cluster = title, clock, unit, cluster

    @property
    def peaks(self) -> list[int]:
        return [held.peak for held in self._ranks]

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, rank):  # type: ignore[override]  # a rank's, or a list of several
        return self._ranks[rank]

    def __repr__(self) -> str:
        return f"Memory of {self.title or 'a program'}: {self.mesh.size} ranks, peak {max(self.peaks):,} B"


class Ledger:
    """Records what one rank holds while its program runs, and makes a `RankMemory` of it.

    A row is opened for every operation, at a moment, which is a time or the number of one. An allocation is booked when
    it is freed: its bytes, and its kinds with the row from which each applies.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[float, str, str, str]] = []
        self._booked: list[tuple[int, int, int]] = []  # row, kind, change in bytes from there on

    def __len__(self) -> int:
        return len(self._rows)

    def open_row(self, moment: float, op: str, where: str, phase: str) -> None:
        self._rows.append((moment, op, where, phase))

    def book(self, num_bytes: int, kinds: Sequence[tuple[int, str]], end: int) -> None:
        """Book `num_bytes` from the first of `kinds` (row, kind) up to row `end`, exclusive."""
        for (start, kind), (following, _) in pairwise([*kinds, (end, "")]):
            if start < following:
                place = KINDS.index(kind)
                self._booked += [(start, place, num_bytes), (following, place, -num_bytes)]

    def closed(self, begin: float | None = None) -> RankMemory:
        """The rows in which something changed, and the last one. Times count from `begin`, or from the first row."""
        num_rows = len(self._rows)
        changes = np.zeros((num_rows + 1, len(KINDS)), np.int64)
        if self._booked:
            rows, kinds, amounts = zip(*self._booked)
            np.add.at(changes, (np.array(rows, np.intp), np.array(kinds, np.intp)), np.array(amounts, np.int64))
        held = changes[:num_rows].cumsum(axis=0)
        changing = np.flatnonzero(changes[:num_rows].any(axis=1))
        places = np.union1d(changing, [0, num_rows - 1])
        moments, ops, where, phases = zip(*(self._rows[place] for place in places))
        times = np.array(moments) - (moments[0] if begin is None else begin)
        return RankMemory(times, places, held[places], ops, where, phases)
