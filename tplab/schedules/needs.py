"""What each action of a schedule waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tplab.schedules.action import CODE, MESSAGES, B, F, I, W

NOTHING, MISSING = -1, -2
"""Mark an action that needs nothing, and one whose need is missing from the schedule."""


@dataclass(frozen=True)
class Needs:
    """The dependencies of a schedule, as indices into its columns (or NOTHING, or MISSING).

    Stage s of S, microbatch k:
        F(s, k)  receives F(s-1, k)                   nothing at stage 0
        B(s, k)  receives B(s+1, k) or I(s+1, k)      nothing at stage S-1; and its own rank must have run F(s, k)
        I(s, k)  the same
        W(s, k)  its own rank must have run I(s, k)
    Where sends and receives are written out, an input from another rank is the *send*, and the action's own rank must
    have posted the receive. A posted receive does not wait by itself.

    message     the action's input, from whichever rank ran it [actions]
    partner     for the first of an overlapped pair, the second one's input: a pair begins when both can [actions]
    own         what the same rank must have run before: two arrays [actions]
    forward, backward, weight
                where F, where B or I, and where W of each stage and microbatch are [stages, microbatches]; -1: nowhere
    """

    message: np.ndarray
    partner: np.ndarray
    own: tuple[np.ndarray, np.ndarray]
    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray


def find_needs(
    kind: np.ndarray,
    stage: np.ndarray,
    microbatch: np.ndarray,
    rank: np.ndarray,
    joined: np.ndarray,
    num_stages: int,
    num_microbatches: int,
) -> Needs:
    """The dependencies of every action, given the columns, looked up in tables over all (stage, microbatch) pairs."""
    indices = np.arange(len(kind), dtype=np.intp)
    rows_of = {code: np.flatnonzero(kind == code) for code in np.flatnonzero(np.bincount(kind)).tolist()}
    valid = (stage >= 0) & (microbatch >= 0)

    def where(*kinds: int) -> np.ndarray:
        table = np.full((num_stages, num_microbatches), -1, np.intp)
        for code in kinds:
            rows = rows_of.get(code, indices[:0])
            rows = rows[valid[rows]]
            table[stage[rows], microbatch[rows]] = indices[rows]
        return table

    forward, backward, weight = where(F), where(B, I), where(W)
    message, own_first, own_second = (np.full(len(kind), NOTHING, np.intp) for _ in range(3))

    def look_up(target: np.ndarray, rows: np.ndarray, table: np.ndarray, shift: int) -> None:
        """target[row] = the entry of `table` for the row's microbatch at its stage + shift; MISSING if it has none."""
        rows = rows[valid[rows]]
        found = table[np.clip(stage[rows] + shift, 0, num_stages - 1), microbatch[rows]]
        target[rows] = np.where(found < 0, MISSING, found)

    def rows(*kinds: int) -> np.ndarray:
        parts = [rows_of[code] for code in kinds if code in rows_of]
        return np.concatenate(parts) if parts else indices[:0]

    forwards, backs = rows(F), rows(B, I)
    look_up(message, forwards[stage[forwards] > 0], forward, -1)
    look_up(message, backs[stage[backs] < num_stages - 1], backward, +1)
    look_up(own_first, backs, forward, 0)
    look_up(own_first, rows(W), backward, 0)

    if any(code in rows_of for code in MESSAGES):
        for letter, table, actions, shift in (("F", forward, forwards, -1), ("B", backward, backs, +1)):
            sent, received = where(CODE[f"SEND_{letter}"]), where(CODE[f"RECV_{letter}"])
            look_up(own_first, rows(CODE[f"SEND_{letter}"]), table, 0)
            inner = actions[message[actions] != NOTHING]
            crosses = rank[np.maximum(message[inner], 0)] != rank[inner]
            inner = inner[crosses | (message[inner] == MISSING)]
            look_up(own_second, inner, received, 0)
            look_up(message, inner, sent, shift)

    second = np.flatnonzero(joined)
    partner = np.full(len(kind), NOTHING, np.intp)
    partner[second - 1] = message[second]
    return Needs(message, partner, (own_first, own_second), forward, backward, weight)
