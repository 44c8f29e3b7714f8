"""What went wrong among simulated ranks, worked out from where each of them is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tplab.errors import CollectiveMismatchError, DeadlockError
from tplab.mesh import Mesh
from tplab.torch.ranks import texts
from tplab.torch.ranks.meeting import Group
from tplab.torch.ranks.rank import Lines
from tplab.torch.ranks.simulated import SimulatedRank


def named(
    rank: int, error: BaseException, failure: BaseException | None, mesh: Mesh, lines: Lines, advice: str | None = None
) -> BaseException:
    """What a rank raised, with the rank's number and `advice`. The error of this run, `failure`, already names its
    ranks."""
    if error is failure:
        return error
    said = "; ".join(filter(None, (str(error), advice)))
    return texts.raised(rank, error, type(error).__name__, said, lines.of(error), mesh)


def told(error: BaseException, ranks: Iterable[SimulatedRank], lines: Lines) -> BaseException:
    """A mismatch or a deadlock, behind what ranks have raised and could not say yet, because a collective in their
    `finally` or `except` meets no other rank. Any other error as it is."""
    if not isinstance(error, CollectiveMismatchError | DeadlockError):
        return error
    held = [*_held(ranks, lines)]
    found = texts.behind([(rank, said) for rank, said, _ in held], error)
    if held:
        found.__cause__ = held[0][2]
    return found


def _held(ranks: Iterable[SimulatedRank], lines: Lines) -> Iterator[tuple[int, str, BaseException]]:
    """The ranks that wait in a collective while they handle an error: the rank, both in a sentence, and the error."""
    caught: dict[int, Any] = sys._current_exceptions()
    for rank in ranks:
        own = caught.get(rank.seat.thread.ident or 0) if rank.seat.thread else None
        own = own[1] if isinstance(own, tuple) else own  # as Python 3.11 says it
        if own is None or rank.waits_in is None or (line := lines.of(own)) is None:
            continue
        calls = rank.waits_in if isinstance(rank.waits_in, str) else "{0.call} at {0.where}".format(rank.waits_in[0])
        yield rank.rank, texts.while_handling(rank.rank, own, line, calls), own


def unmet(groups: Iterable[Group]) -> CollectiveMismatchError | None:
    """The error for a collective that some of its group have not reached, though all ranks have returned."""
    for group in groups:
        for meeting in group.open.values():
            if meeting.waiting and all(seat.home is not seat and seat.is_daemon for seat in meeting.waiting):
                continue  # threads that end with their process
            rank, site = meeting.first
            return texts.unmet(site.call.key, meeting.number, rank, site.where, meeting.absent)
    return None


def not_received(groups: Iterable[Group]) -> Iterator[int]:
    """The messages of a failed run whose receivers have not come, by their numbers in the trace."""
    for group in groups:
        for meeting in group.open.values():
            for *_, number, _ in meeting.messages.values():
                yield number


def deadlock(ranks: Iterable[SimulatedRank], others: Iterable[SimulatedRank] = ()) -> DeadlockError:
    """The error that says what every rank waits for, and what the `others` do: threads that ranks have started."""
    members = [*ranks, *others]
    doing = {rank.rank: _doing(rank) for rank in members if rank.home is rank}
    for rank in members:
        if rank.home is not rank and rank.seat.thread is not None:
            doing[rank.rank] += f"\n    its thread {rank.seat.thread.name!r} {_doing(rank)}"
    for rank in members:
        doing[rank.rank] += "".join(f"\n    {text}" for text in rank.raised)
    return texts.deadlock(doing, [rank.waits_in[0].call.op for rank in members if isinstance(rank.waits_in, tuple)])


def _doing(rank: SimulatedRank) -> str:
    if rank.waits_in is None:
        return texts.HAS_RETURNED
    if isinstance(rank.waits_in, str):
        return f"waits in {rank.waits_in}"
    site, meeting = rank.waits_in
    missing = meeting.absent if site.source is None else [site.source]
    return texts.waits_text(site.call.key, site.where, missing, site.source is not None)
