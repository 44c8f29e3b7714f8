"""The plan of a batch: what each rank does at each tick, what it sends, and where everything is stored, in NumPy.

A schedule is known before the program runs. So everything is decided here, and the program only looks numbers up: which
pass, which slot of which buffer, which ranks exchange. A slot is free again once its contents have been used, so a
buffer has only as many slots as the schedule needs at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from tplab.jax.pipeline.flat import Kind
from tplab.schedules import Action, Schedule

Pairs = tuple[tuple[int, int], ...]
"""(source, target) of each message in one exchange."""


class Buffer(NamedTuple):
    """Part of the stash: arrays of one shape and kind, one per slot. `number` distinguishes those of one pass."""

    shape: tuple[int, ...]
    kind: Kind
    number: int

    @property
    def num_bytes(self) -> int:
        """The bytes of one slot."""
        return math.prod(self.shape) * self.kind.itemsize


class Keeping(NamedTuple):
    """The buffers of a program's passes: those that F fills, those that W needs too, and the buffers that I fills."""

    saved: tuple[Buffer, ...]
    outlasting: frozenset[Buffer]
    left: tuple[Buffer, ...]

    def change(self, kind: str) -> int:
        """The bytes that a pass of this kind adds to those kept; negative if it frees some."""
        saved, outlasting, left = (sum(buffer.num_bytes for buffer in buffers) for buffers in self)
        return {"F": saved, "B": -saved, "I": left + outlasting - saved, "W": -left - outlasting}[kind]


class Plan:
    """The work of each tick, for a schedule of computations.

    program_of   which program each stage runs          keeping   what each program keeps

    table     column -> [ticks, ranks]:
              "action"           the number of the pass in `passes`, counted from 1; 0 where the rank idles
              "stage", "microbatch", "home"   those of the action; home is the rank where the microbatch begins
              "takes"            the slot of the inbox that holds the action's input
              ("arrives", n)     the slot of the inbox for the message of exchange n after the tick; -1: none
              a Buffer           the slot of it that the action fills or reads
    passes    the (kind, program) pairs that are run
    rounds    all distinct exchanges, as pairs of ranks; in the first, no rank sends
    round_of  [ticks, exchanges]: the round of each exchange after each tick
    inbox     the number of slots of the inbox
    stash     buffer -> its number of slots
    """

    def __init__(self, schedule: Schedule, program_of: Sequence[int], keeping: Sequence[Keeping]):
        self.schedule, self.program_of, self.keeping = schedule, program_of, keeping
        self.shape = schedule.num_ticks, schedule.num_ranks
        self.ticks, self.ranks = schedule.ticks.tolist(), schedule.rank.tolist()
        self.table: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(self.shape, np.int32))
        self.places = {}  # (kind, stage, microbatch) -> place in the schedule's columns
        self.actions = [action for row in schedule.by_rank() for action in row]
        for place, action in enumerate(self.actions):
            self.places[action.kind, action.stage, action.microbatch] = place
        self.passes = self._actions()
        self.rounds, self.round_of, self.inbox = self._messages()
        self.stash = self._stash()

    def _actions(self) -> tuple[tuple[str, int], ...]:
        """Note what each rank does."""
        passes: dict[tuple[str, int], int] = {}
        for place, action in enumerate(self.actions):
            cell = self.ticks[place], self.ranks[place]
            key = action.kind, self.program_of[action.stage]
            self.table["action"][cell] = passes.setdefault(key, len(passes) + 1)
            self.table["stage"][cell], self.table["microbatch"][cell] = action.stage, action.microbatch
            self.table["home"][cell] = self.schedule.rank_of(0, action.microbatch)
        return tuple(passes)

    def _messages(self) -> tuple[tuple[Pairs, ...], np.ndarray, int]:
        """Note what is sent and where it arrives: (rounds, round_of, slots of the inbox).

        At each tick a rank sends at most one message, but it may receive several: the number of exchanges after a tick
        is the largest number of messages that any rank receives.
        """
        message = self.schedule.needs.message
        sent: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        lies = _Slots(self.shape[1])
        for consumer in sorted(np.flatnonzero(message >= 0).tolist(), key=lambda c: self.ticks[message[c]]):
            producer = int(message[consumer])
            tick, rank = self.ticks[producer], self.ranks[consumer]
            # read at the beginning of a tick, filled at the end of one
            slot = lies.take(rank, tick, self.ticks[consumer] - 1)
            self.table["takes"][self.ticks[consumer], rank] = slot
            sent[tick][rank].append((self.ranks[producer], slot))
        most = max((len(messages) for by_rank in sent.values() for messages in by_rank.values()), default=0)
        rounds: dict[Pairs, int] = {(): 0}
        round_of = np.zeros((self.shape[0], most), np.int32)
        for number in range(most):
            arrives = self.table["arrives", number] = np.full(self.shape, -1, np.int32)
            for tick, by_rank in sent.items():
                pairs = []
                for rank, messages in by_rank.items():
                    if number < len(messages):
                        source, arrives[tick, rank] = messages[number]
                        pairs.append((source, rank))
                round_of[tick, number] = rounds.setdefault(tuple(sorted(pairs)), len(rounds))
        return tuple(rounds), round_of, lies.most

    def _stash(self) -> dict[Buffer, int]:
        """Note the slots of everything that is kept. Returns buffer -> how many slots it needs."""
        lies: dict[Buffer, _Slots] = {}
        for action in sorted(self.actions, key=lambda a: self.ticks[self._place(a.kind, a)]):
            keeping = self.keeping[self.program_of[action.stage]]
            if action.kind not in ("F", "I"):
                continue
            for buffer in keeping.saved if action.kind == "F" else keeping.left:
                used = self._users(action, buffer in keeping.outlasting)
                rank = self.ranks[used[0]]
                slots = lies.setdefault(buffer, _Slots(self.shape[1]))
                slot = slots.take(rank, self.ticks[used[0]], self.ticks[used[-1]])
                for place in used:
                    self.table[buffer][self.ticks[place], rank] = slot
        return {buffer: slots.most for buffer, slots in lies.items()}

    def _users(self, action: Action, outlasts: bool) -> list[int]:
        """The places of the actions that fill or read what this action keeps, in order."""
        first = self._place(action.kind, action)
        if action.kind == "I":
            return [first, self._place("W", action)]
        if (whole := self.places.get(("B", action.stage, action.microbatch))) is not None:
            return [first, whole]
        return [first, self._place("I", action)] + ([self._place("W", action)] if outlasts else [])

    def _place(self, kind: str, action: Action) -> int:
        return self.places[kind, action.stage, action.microbatch]


class _Slots:
    """The slots of one buffer, on each rank. Call `take` in the order of time."""

    def __init__(self, num_ranks: int):
        self._free: list[list[int]] = [[] for _ in range(num_ranks)]
        self._taken: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        self._count = [0] * num_ranks

    @property
    def most(self) -> int:
        """The number of slots that the busiest rank needs."""
        return max(self._count)

    def take(self, rank: int, begin: int, end: int) -> int:
        """The lowest slot that is free from tick `begin` to tick `end`."""
        taken, free = self._taken[rank], self._free[rank]
        while taken and taken[0][0] < begin:
            heappush(free, heappop(taken)[1])
        if not free:
            heappush(free, self._count[rank])
            self._count[rank] += 1
        slot = heappop(free)
        heappush(taken, (end, slot))
        return slot
