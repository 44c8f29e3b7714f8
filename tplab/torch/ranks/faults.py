"""What went wrong among simulated ranks, in words."""

from __future__ import annotations

from collections.abc import Iterable

from tplab.errors import CollectiveMismatchError, DeadlockError, RankError, TplabError
from tplab.mesh import Mesh
from tplab.torch.ranks.meeting import Group
from tplab.torch.ranks.rank import Lines, rule, unmet_text
from tplab.torch.ranks.simulated import SimulatedRank

_OF_A_RUN = (RankError, DeadlockError, CollectiveMismatchError)


def named(
    rank: int, error: BaseException, failure: BaseException | None, mesh: Mesh, lines: Lines, advice: str | None = None
) -> BaseException:
    """What a rank raised, saying which rank it was, and `advice`. tplab's own errors stay what they are; but not those
    of another run, which the rank has made inside its program. That of this run, `failure`, names its ranks already."""
    if error is failure:
        return error
    line = lines.of(error)
    at = f" at {line}" if line else ""
    if isinstance(error, TplabError) and not isinstance(error, _OF_A_RUN):
        error.add_note(f"on rank {rank} {mesh.coordinates(rank)}{at}")
        return error
    said = "; ".join(filter(None, (str(error), advice)))
    found = RankError(f"rank {rank} raised {type(error).__name__}{at}: {said}", rank)
    found.__cause__ = error
    return found


def unmet(groups: Iterable[Group]) -> CollectiveMismatchError | None:
    """The error for a collective to which some of its group have not come, though all ranks have returned."""
    for group in groups:
        for meeting in group.open.values():
            rank, site = meeting.first
            return CollectiveMismatchError(unmet_text(site.call.key, meeting.number, rank, site.where, meeting.absent))
    return None


def deadlock(ranks: Iterable[SimulatedRank]) -> DeadlockError:
    """The error that says of every rank what it waits for."""
    lines, ops = [], []
    for rank in ranks:
        if rank.waits_in is None:
            lines.append(f"  rank {rank.rank} has returned")
            continue
        if isinstance(rank.waits_in, str):
            lines.append(f"  rank {rank.rank} waits in {rank.waits_in}")
            continue
        site, meeting = rank.waits_in
        ops.append(site.call.op)
        missing = meeting.absent if site.source is None else f"a message from rank {site.source}"
        lines.append(f"  rank {rank.rank} waits in {site.call} at {site.where} for {missing}")
    return DeadlockError("no rank can go on:\n" + "\n".join(lines) + f"\n{rule(ops)}")
