"""What each action of a schedule waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tplab.schedules.action import CODE, B, F, I, W

if TYPE_CHECKING:
    from tplab.schedules.schedule import Schedule

NOTHING, MISSING = -1, -2
"""An action that needs nothing, and one whose need is nowhere in the schedule."""


@dataclass(frozen=True)
class Needs:
    """The dependencies of a schedule, as places in its columns (NOTHING, or MISSING).

    Stage s of S, microbatch k:
        F(s, k)  takes in F(s-1, k)                   nothing at stage 0
        B(s, k)  takes in B(s+1, k) or I(s+1, k)      nothing at stage S-1; and its own rank must have run F(s, k)
        I(s, k)  the same
        W(s, k)  its own rank must have run I(s, k)
    Where sends and receives are written out, what comes in from another rank is the *send*, and the own rank must have
    posted its receive. A posted receive does not wait by itself.

    message     what comes in, from whichever rank ran it [actions]
    own         what the same rank must have run before: a list of arrays [actions]
    forward, backward, weight
                where F, where B or I, and where W of each stage and microbatch are [stages, microbatches]; -1: nowhere
    """

    message: np.ndarray
    own: tuple[np.ndarray, ...]
    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray


def find_needs(schedule: Schedule) -> Needs:
    """The dependencies of every action, by looking up each (stage, microbatch) in tables."""
    kind, stage, microbatch = schedule.kind, schedule.stage, schedule.microbatch
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    places = np.arange(len(schedule), dtype=np.int64)
    row_of = {code: np.flatnonzero(kind == code) for code in np.flatnonzero(np.bincount(kind)).tolist()}
    valid = (stage >= 0) & (microbatch >= 0)

    def where(*kinds: int) -> np.ndarray:
        table = np.full((num_stages, num_microbatches), -1, np.int64)
        for code in kinds:
            rows = row_of.get(code, places[:0])
            rows = rows[valid[rows]]
            table[stage[rows], microbatch[rows]] = places[rows]
        return table

    forward, backward, weight = where(F), where(B, I), where(W)
    message = np.full(len(schedule), NOTHING, np.int64)
    own = (np.full(len(schedule), NOTHING, np.int64), np.full(len(schedule), NOTHING, np.int64))

    def look_up(target: np.ndarray, rows: np.ndarray, table: np.ndarray, shift: int) -> None:
        """target[row] = where `table` has the row's microbatch at its stage + shift; MISSING where it has none."""
        rows = rows[valid[rows]]
        found = table[np.clip(stage[rows] + shift, 0, num_stages - 1), microbatch[rows]]
        target[rows] = np.where(found < 0, MISSING, found)

    def rows(*kinds: int) -> np.ndarray:
        parts = [row_of[code] for code in kinds if code in row_of]
        return np.concatenate(parts) if parts else places[:0]

    forwards, backs = rows(F), rows(B, I)
    look_up(message, forwards[stage[forwards] > 0], forward, -1)
    look_up(message, backs[stage[backs] < num_stages - 1], backward, +1)
    look_up(own[0], backs, forward, 0)
    look_up(own[0], rows(W), backward, 0)

    if schedule.has_communication:
        for letter, table, actions, shift in (("F", forward, forwards, -1), ("B", backward, backs, +1)):
            sent, received = where(CODE[f"SEND_{letter}"]), where(CODE[f"RECV_{letter}"])
            look_up(own[0], rows(CODE[f"SEND_{letter}"]), table, 0)
            inner = actions[message[actions] != NOTHING]
            crosses = schedule.rank[np.maximum(message[inner], 0)] != schedule.rank[inner]
            inner = inner[crosses | (message[inner] == MISSING)]
            look_up(own[1], inner, received, 0)
            look_up(message, inner, sent, shift)

    return Needs(message, own, forward, backward, weight)
