"""What went wrong among simulated ranks, worked out from where each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
