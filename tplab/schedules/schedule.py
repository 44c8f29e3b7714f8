"""A schedule: what each rank of a pipeline does, in order. The same object is printed, checked, simulated and run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from tplab.errors import ScheduleError
from tplab.schedules.action import CODE, COMPUTE, KINDS, Action, draw, in_words, read_csv, read_picture, read_torch
from tplab.schedules.placement import Placement, name_of
from tplab.schedules.relax import Needs, earliest_ticks, find_needs
from tplab.units import counted

_FEW = 1_000_000
"""A table of up to this many cells is never too large, however few of them are filled."""

Row: TypeAlias = np.ndarray
"""What a rank does, as ints [actions, 4]: kind, stage, microbatch, and whether it is joined to the one before."""


class Schedule:
    """A pipeline schedule: ranks x time.

    rows        what each rank does, in order: one sequence of `Action` per rank
    placement   the stages each rank holds; by default those that appear in its row
    name        for titles
    ticks       the tick of each action, rank after rank, if time is part of the schedule. By default every action
                runs as early as its rank and its inputs allow, and takes one tick

    A schedule never changes. It is stored as columns (`kind`, `stage`, `microbatch`, `joined`), rank after rank: rank r
    has `offsets[r]` to `offsets[r + 1]`. So a schedule of a million actions is fine.
    """

    def __init__(
        self,
        rows: Sequence[Iterable[Action] | Row],
        placement: Placement | None = None,
        name: str = "",
        ticks: Sequence[int] | np.ndarray | None = None,
    ):
        arrays = [_as_array(row) for row in rows]
        if not arrays:
            raise ScheduleError("a schedule needs at least one rank")
        self.name = name
        self.offsets = np.concatenate([[0], np.cumsum([len(row) for row in arrays])])
        columns = np.concatenate(arrays).T
        self.kind = columns[0].astype(np.int8)
        self.stage = np.ascontiguousarray(columns[1])
        self.microbatch = np.ascontiguousarray(columns[2])
        self.joined = columns[3].astype(bool)
        self.rank = np.repeat(np.arange(len(arrays), dtype=np.int32), np.diff(self.offsets))
        self.placement = self._placed() if placement is None else tuple(tuple(map(int, held)) for held in placement)
        if len(self.placement) != self.num_ranks:
            raise ScheduleError(f"the placement names {len(self.placement)} ranks, but there are {self.num_ranks} rows")
        if bool(np.any(self.joined[self.offsets[:-1][np.diff(self.offsets) > 0]])):
            raise ScheduleError("the first action of a row is joined to the one before it, but there is none")
        self.given_ticks = None if ticks is None else np.asarray(ticks, np.intp)
        if self.given_ticks is not None and self.given_ticks.shape != self.kind.shape:
            raise ScheduleError(f"{len(self.given_ticks)} ticks for {len(self)} actions; each action needs one")
        self._refuse_gaps()
        for column in (self.offsets, self.kind, self.stage, self.microbatch, self.joined, self.rank):
            column.flags.writeable = False

    # --- size ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many actions there are."""
        return len(self.kind)

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def num_stages(self) -> int:
        held = max((stage for stages in self.placement for stage in stages), default=-1)
        return max(held, int(self.stage.max(initial=-1))) + 1

    @cached_property
    def num_microbatches(self) -> int:
        return int(self.microbatch.max(initial=-1)) + 1

    @property
    def stages_per_rank(self) -> float:
        """v: how many stages of a rank one microbatch passes. A stage is 1/v of a rank's share of the work.

        With two directions a rank holds two stages, and a microbatch passes one of them: v = 1.
        """
        return max(self.num_stages, 1) / self.num_ranks

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return bool(np.any((self.kind == CODE["I"]) | (self.kind == CODE["W"])))

    @property
    def has_communication(self) -> bool:
        """Whether sends and receives are written out."""
        return bool(np.any((self.kind >= CODE["SEND_F"]) & (self.kind <= CODE["RECV_B"])))

    @cached_property
    def rows(self) -> list[slice]:
        """Where the actions of each rank are in the columns."""
        return [slice(a, b) for a, b in pairwise(self.offsets.tolist())]

    # --- reading -------------------------------------------------------------------------------------------------

    def index_in_row(self, index: int) -> int:
        """The position within its rank's row, counted from 0, of the action at this index of the columns."""
        return int(index - self.offsets[self.rank[index]])

    def action(self, index: int) -> Action:
        """The action at this index of the columns."""
        return Action(
            KINDS[self.kind[index]], int(self.stage[index]), int(self.microbatch[index]), bool(self.joined[index])
        )

    def in_words(self, index: int) -> str:
        """ "F3 of stage 2": the action at this index of the columns."""
        return in_words(self.action(index))

    def by_rank(self) -> list[tuple[Action, ...]]:
        """The actions of each rank, in order, for an executor."""
        columns = zip(self.kind.tolist(), self.stage.tolist(), self.microbatch.tolist(), self.joined.tolist())
        actions = [Action(KINDS[kind], stage, microbatch, joined) for kind, stage, microbatch, joined in columns]
        return [tuple(actions[row]) for row in self.rows]

    def by_tick(self) -> list[tuple[Action | None, ...]]:
        """The actions of each tick: one per rank, None where it is idle. Every action takes one tick."""
        grid: list[list[Action | None]] = [[None] * self.num_ranks for _ in range(self.num_ticks)]
        for rank, (actions, ticks) in enumerate(zip(self.by_rank(), self.ticks_by_rank())):
            for action, tick in zip(actions, ticks):
                grid[tick][rank] = action
        return [tuple(cells) for cells in grid]

    def table(self) -> np.ndarray:
        """`by_tick` as numbers: [ticks, ranks, 3] of kind (its index in KINDS), stage, microbatch; -1 where idle."""
        table = np.full((self.num_ticks, self.num_ranks, 3), -1, np.int32)
        table[self.ticks, self.rank] = np.stack([self.kind, self.stage, self.microbatch], axis=1)
        return table

    @cached_property
    def slot(self) -> np.ndarray:
        """Which of its rank's stages each action belongs to, counted from 0; -1 if it has no stage [actions]."""
        slot = np.full(len(self), -1, np.int32)
        for row, held in zip(self.rows, self.placement):
            for index, stage in enumerate(held):
                slot[row][self.stage[row] == stage] = index
        return slot

    @cached_property
    def needs(self) -> Needs:
        """What each action waits for, as indices into the columns."""
        return find_needs(
            self.kind, self.stage, self.microbatch, self.rank, self.joined, self.num_stages, self.num_microbatches
        )

    def crosses(self, needs: np.ndarray) -> np.ndarray:
        """Whether what each action needs, an index into the columns or below 0, is run by another rank [actions]."""
        return (needs >= 0) & (self.rank[np.maximum(needs, 0)] != self.rank)

    @cached_property
    def earliest(self) -> np.ndarray:
        """The first tick at which each action can run, regardless of any given ticks; -1 if it never can."""
        return earliest_ticks(self.offsets, self.needs)

    @property
    def ticks(self) -> np.ndarray:
        """The tick of each action. Raises ScheduleError if some action can never run; `check` says why."""
        if self.given_ticks is not None:
            return self.given_ticks
        stuck = np.flatnonzero(self.earliest < 0)
        if stuck.size:
            index = int(stuck[0])
            raise ScheduleError(
                f"{self.name or 'the schedule'} cannot run: rank {self.rank[index]} (index {self.index_in_row(index)}) "
                f"waits for what {self.in_words(index)} needs, which never comes; tplab.schedules.check says what"
            )
        return self.earliest

    @property
    def num_ticks(self) -> int:
        return int(self.ticks.max(initial=-1)) + 1

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """The rank that runs `stage` for `microbatch`; with two directions it depends on the microbatch."""
        if 0 <= stage < self.num_stages and 0 <= microbatch < self.num_microbatches:
            index = int(self.needs.forward[stage, microbatch])
            if index >= 0:
                return int(self.rank[index])
        raise ScheduleError(
            f"no rank runs F{microbatch} of stage {stage}; there are {self.num_stages} stages "
            f"and {self.num_microbatches} microbatches"
        )

    # --- other forms ---------------------------------------------------------------------------------------------

    def select(self, keep: np.ndarray, name: str | None = None) -> Schedule:
        """The schedule of the actions where `keep` is true, in the same order."""
        columns = self._array()
        rows = [columns[row][keep[row]] for row in self.rows]
        ticks = None if self.given_ticks is None else self.given_ticks[keep]
        return Schedule(rows, self.placement, self.name if name is None else name, ticks)

    def named(self, name: str) -> Schedule:
        """The same schedule under another name."""
        return self.select(np.ones(len(self), bool), name)

    def compute_only(self) -> Schedule:
        """The schedule without sends, receives, gradient sums and optimizer steps."""
        keep = self.kind <= max(COMPUTE)
        return self if keep.all() else self.select(keep)

    def forward_only(self) -> Schedule:
        """The forward passes, each as early as its rank and its input allow: an evaluation."""
        rows = [[action.alone() for action in row if action.kind == "F"] for row in self.by_rank()]
        return Schedule(rows, self.placement, self.name)

    def moved(self, rank: int, index: int, to: int) -> Schedule:
        """The schedule with one action of `rank`'s row moved from `index` to `to`; `check` says if that is legal."""
        rows = [list(row) for row in self.by_rank()]
        if not (0 <= rank < self.num_ranks and 0 <= index < len(rows[rank]) and 0 <= to < len(rows[rank])):
            raise ScheduleError(f"rank {rank} has no actions {index} and {to}; there are {self.num_ranks} ranks")
        rows[rank].insert(to, rows[rank].pop(index).alone())
        for after in (index, index + 1):  # what was joined to the moved action is no longer joined to anything
            if after < len(rows[rank]):
                rows[rank][after] = rows[rank][after].alone()
        return Schedule(rows, self.placement, self.name)

    @classmethod
    def from_csv(cls, text: str) -> Schedule:
        """Read either of torch's forms. Blanks are idle cells; only the order counts, and the ticks follow from it."""
        return cls(read_csv(text))

    @classmethod
    def from_torch(cls, schedule: Any) -> Schedule:
        """From a schedule of torch.distributed.pipelining, or its `pipeline_order` (rank -> list of actions)."""
        rows, name = read_torch(schedule)
        return cls(rows, None, name)

    @classmethod
    def parse(cls, picture: str) -> Schedule:
        """Read what `str` prints. The dots fix the ticks, so `check` can say where an action comes too early."""
        rows, ticks = read_picture(picture)
        return cls(rows, ticks=ticks)

    def __str__(self) -> str:
        """One line per rank, one cell per tick. A schedule that has no ticks prints its rows, and the reason."""
        with_stages = self.placement != tuple((rank,) for rank in range(self.num_ranks))
        try:
            return draw(self.by_rank(), self.ticks_by_rank(), with_stages)
        except ScheduleError as error:
            return f"{draw(self.by_rank(), None, with_stages)}\n({error})"

    def __repr__(self) -> str:
        return (
            f"Schedule {self.name or 'without a name'}: {counted(self.num_ranks, 'rank')}, "
            f"{counted(self.num_microbatches, 'microbatch')}, {counted(self.num_stages, 'stage')} "
            f"({name_of(self.placement)}), {counted(len(self), 'action')}"
        )

    def __eq__(self, other: object) -> bool:
        """Whether both have the same actions in the same order on the same ranks; names and ticks do not count."""
        return (
            isinstance(other, Schedule)
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self._array(), other._array())
        )

    def __hash__(self) -> int:
        return hash((self.offsets.tobytes(), self._array().tobytes()))

    def ticks_by_rank(self) -> list[list[int]]:
        """The tick of each action, in the order of `by_rank`."""
        ticks = self.ticks
        return [ticks[row].tolist() for row in self.rows]

    def _array(self) -> np.ndarray:
        return np.stack([self.kind, self.stage, self.microbatch, self.joined], axis=1).astype(np.int32)

    def _refuse_gaps(self) -> None:
        """Raise if a number is so far from the others that a table over stages, microbatches or ticks would be almost
        empty."""
        room, actions = max(_FEW, 4 * len(self)), counted(len(self), "action")
        if self.num_stages * self.num_microbatches > room:
            raise ScheduleError(
                f"the schedule names stage {self.num_stages - 1:,} and microbatch {self.num_microbatches - 1:,}, and "
                f"has {actions}; the numbers of stages and microbatches begin at 0 and leave none out"
            )
        last = 0 if self.given_ticks is None else int(self.given_ticks.max(initial=0))
        if last > room:
            raise ScheduleError(f"the schedule names tick {last:,}, and has {actions}; ticks begin at 0")

    def _placed(self) -> Placement:
        """The stages of each row, in the order in which they appear."""
        rows = [self.stage[row] for row in self.rows]
        return tuple(tuple(dict.fromkeys(row[row >= 0].tolist())) for row in rows)


def row(kind: ArrayLike, stage: ArrayLike, microbatch: ArrayLike) -> Row:
    """The actions of these columns, joined to nothing; numbers are repeated to the length of the others."""
    columns = np.broadcast_arrays(kind, stage, microbatch, 0)
    return np.stack(columns, axis=-1).astype(np.int32).reshape(-1, 4)


def _as_array(actions: Iterable[Action] | Row) -> Row:
    if isinstance(actions, np.ndarray):
        return actions.reshape(-1, 4).astype(np.int32, copy=False)
    cells = [(CODE[action.kind], action.stage, action.microbatch, action.joined) for action in actions]
    return np.array(cells, np.int32).reshape(-1, 4)
