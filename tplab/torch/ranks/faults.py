"""What went wrong among simulated ranks: it is seen from where they stand."""

from __future__ import annotations

from collections.abc import Iterable

from tplab.errors import CollectiveMismatchError, DeadlockError
from tplab.mesh import Mesh
from tplab.torch.ranks import texts
from tplab.torch.ranks.meeting import Group
from tplab.torch.ranks.rank import Lines
from tplab.torch.ranks.simulated import SimulatedRank


def named(
    rank: int, error: BaseException, failure: BaseException | None, mesh: Mesh, lines: Lines, advice: str | None = None
) -> BaseException:
    """What a rank raised, saying which rank it was, and `advice`. The error of this run, `failure`, names its ranks
    already."""
    if error is failure:
        return error
    said = "; ".join(filter(None, (str(error), advice)))
    return texts.raised(rank, error, type(error).__name__, said, lines.of(error), mesh)


def unmet(groups: Iterable[Group]) -> CollectiveMismatchError | None:
    """The error for a collective to which some of its group have not come, though all ranks have returned."""
    for group in groups:
        for meeting in group.open.values():
            rank, site = meeting.first
            return texts.unmet(site.call.key, meeting.number, rank, site.where, meeting.absent)
    return None


def deadlock(ranks: Iterable[SimulatedRank]) -> DeadlockError:
    """The error that says of every rank what it waits for."""
    doing, ops = {}, []
    for rank in ranks:
        if rank.waits_in is None:
            doing[rank.rank] = texts.HAS_RETURNED
        elif isinstance(rank.waits_in, str):
            doing[rank.rank] = f"waits in {rank.waits_in}"
        else:
            site, meeting = rank.waits_in
            ops.append(site.call.op)
            missing = meeting.absent if site.source is None else [site.source]
            doing[rank.rank] = texts.waits_text(site.call.key, site.where, missing, site.source is not None)
    return texts.deadlock(doing, ops)
