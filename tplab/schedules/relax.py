"""What each action of a schedule waits for, and when it ends: one loop, for both the ticks and the simulation."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True)
class Links:
    """Links that carry one message at a time.

    link    which link the message of each action takes [actions]
    hold    how long it occupies that link [actions]
    """

    link: np.ndarray
    hold: np.ndarray


def relax(
    offsets: np.ndarray,
    needs: Sequence[np.ndarray],
    lags: Sequence[np.ndarray],
    duration: np.ndarray,
    links: Links | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(end, sent) of each action if every rank runs its row in order, each action as early as it can.

    offsets     rank r's row is offsets[r] to offsets[r + 1]
    needs       arrays [actions] of indices: what must have ended; or NOTHING, or MISSING
    lags        for each array of needs, how long after that end its result is available [actions]
    duration    of each action [actions], or in several cases [actions, cases], as the results then are
    links       if given, messages queue: a message is sent when its action has ended and its link is free

        start  = max(end of the one before on the rank, sent(need) + lag)      end = start + duration
        sent   = end, or with links max(end, link is free) + hold

    An action that can never run (it waits for something that waits for it) ends at infinity.

    One round advances each rank by one action if what it needs has ended, all ranks in one NumPy operation. The number
    of rounds is therefore the number of ticks, and a rank that cannot move yet computes an infinite end, which is
    harmless. Each row is followed by a sentinel that needs itself, so it never runs.
    """
    num_actions, num_ranks = int(offsets[-1]), len(offsets) - 1
    gap = np.repeat(np.arange(num_ranks), np.diff(offsets))  # the sentinels in front of each action
    nothing = num_actions + num_ranks  # one more index, for what had ended before the start
    sentinels = offsets[1:] + np.arange(num_ranks)
    at, never = np.arange(num_actions) + gap, sentinels[gap]

    def spread(column: np.ndarray, fill: float) -> np.ndarray:
        padded = np.full((nothing + 1, *column.shape[1:]), fill, column.dtype)
        padded[at] = column
        return padded

    wants = []
    for need in needs:
        placed = np.where(need < 0, nothing, at[np.maximum(need, 0)] if num_actions else need)
        wanted = spread(np.where(need == MISSING, never, placed), nothing)
        wanted[sentinels] = sentinels
        wants.append(wanted)
    delays = [spread(np.asarray(lag, float), 0.0) for lag in lags]
    lasting = spread(np.asarray(duration, float), 0.0)
    end = np.full(lasting.shape, np.inf)
    end[nothing] = -np.inf
    sent = end if links is None else end.copy()
    if links is not None:
        link, hold = spread(links.link, 0), spread(np.asarray(links.hold, float), 0.0)
        free = np.full(int(link.max(initial=0)) + 1, -np.inf)

    head = offsets[:-1] + np.arange(num_ranks)
    shape = (num_ranks, *lasting.shape[1:])
    clock, index, now, part = np.zeros(shape), np.empty(num_ranks, np.intp), np.empty(shape), np.empty(shape)
    ready = np.ones(num_ranks, bool)
    each = (...,) if now.ndim == 1 else (..., None)  # a rank, in all cases
    first = now if now.ndim == 1 else now[:, 0]  # what can run in one case can run in all
    while ready.any():
        np.copyto(now, clock)
        for wanted, delay in zip(wants, delays):
            wanted.take(head, out=index, mode="clip")
            sent.take(index, axis=0, out=part, mode="clip")
            np.add(part, delay.take(head, mode="clip")[each], out=part)
            np.maximum(now, part, out=now)
        np.add(now, lasting.take(head, axis=0, mode="clip"), out=now)
        end[head] = now
        np.less(first, np.inf, out=ready)
        if links is not None:
            through = head[ready]
            carried = np.maximum(now[ready], free[link[through]]) + hold[through]
            sent[through] = carried
            free[link[through]] = carried
        np.copyto(clock, now, where=ready[each])
        np.add(head, ready, out=head)
    return (found := end[at]), found if sent is end else sent[at]


def earliest_ticks(offsets: np.ndarray, needs: Needs) -> np.ndarray:
    """The first tick at which each action can run when each takes one tick; -1 where it never can.

    An overlapped pair takes two consecutive ticks, and begins when both actions have what they need.
    """
    awaited = [needs.message]
    if bool(np.any(needs.partner != NOTHING)):
        awaited.append(needs.partner)
    no_lag = np.zeros(len(needs.message))
    end, _ = relax(offsets, awaited, [no_lag] * len(awaited), no_lag + 1)
    return np.where(np.isfinite(end), end - 1, -1).astype(np.intp)
