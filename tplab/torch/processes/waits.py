"""Which rank waits for which: what waiting ranks report, and what follows from all reports together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tplab.errors import CollectiveMismatchError, TplabError
from tplab.mesh import Mesh
from tplab.torch.processes.frames import Side, with_tuples
from tplab.torch.ranks import texts

REMEMBERED = 256
"""How many of its last collectives a rank can name."""

Group = tuple[int, ...]


class Wait(NamedTuple):
    """A rank that waits in its group's collective number `number` for the ranks in `missing`."""

    side: Side
    group: Group
    number: int
    missing: tuple[int, ...]


class Report(NamedTuple):
    """What one rank has started so far, and what it waits for; `wait` is None if its program has returned.

    begun   for each group, the number of its collectives that were started
    calls   (group, number) -> how the rank called it; only for the last ones
    """

    rank: int
    wait: Wait | None
    begun: Mapping[Group, int]
    calls: Mapping[tuple[Group, int], Side]

    def to_text(self) -> bytes:
        return json.dumps([self.rank, self.wait, list(self.begun.items()), list(self.calls.items())]).encode()

    @classmethod
    def from_text(cls, text: bytes) -> Report:
        rank, wait, begun, calls = with_tuples(json.loads(text))
        sides = {place: Side(*side) for place, side in calls}
        return cls(rank, None if wait is None else Wait(Side(*wait[0]), *wait[1:]), dict(begun), sides)

    def has_begun(self, group: Group, number: int) -> bool:
        return self.begun.get(group, 0) > number


def verdict(reports: Mapping[int, Report], mesh: Mesh) -> TplabError | None:
    """The error that explains why ranks are stuck, if that is certain; ranks without a report are running.

    A report may be old: the rank may have continued since. But then a rank that it waited for had started the
    collective, and that rank, if it was waiting too, first had to continue itself. So if no rank can be the first to
    continue according to the reports, then no rank has.
    """
    for report in reports.values():
        if report.wait is not None and (error := _mismatch_at(report, report.wait, reports)):
            return error
    alive = {rank for rank in mesh.ranks if rank not in reports}
    waiting = {rank: report.wait for rank, report in reports.items() if report.wait is not None}
    while freed := {
        rank
        for rank, wait in waiting.items()
        if rank not in alive and all(source in alive for source in _unbegun(wait, reports))
    }:
        alive |= freed
    return None if alive or not waiting else deadlock(reports)


def _unbegun(wait: Wait, reports: Mapping[int, Report]) -> list[int]:
    """The ranks that are waited for and have not started the collective. What the others have started is in flight."""
    return [
        rank for rank in wait.missing if rank not in reports or not reports[rank].has_begun(wait.group, wait.number)
    ]


def _mismatch_at(report: Report, wait: Wait, reports: Mapping[int, Report]) -> TplabError | None:
    for rank in wait.group:
        if rank in reports:
            other = reports[rank].calls.get((wait.group, wait.number))
            if other is not None and not other.agrees(wait.side):
                return mismatch(wait.group, wait.number, [wait.side, other])
    return None


def mismatch(group: Group, number: int, sides: Sequence[Side]) -> TplabError:
    """The error for ranks that differ in the collective number `number` of `group`."""
    said = texts.mismatch(number, sides[0].key[1], group, [(side.rank, side.text) for side in sides])
    return _behind(sides, said)


def _behind(sides: Iterable[Side], error: TplabError) -> TplabError:
    return texts.behind([(side.rank, side.held) for side in sides if side.held], error)


def unmet(reports: Sequence[Report]) -> CollectiveMismatchError | None:
    """The error for a collective that some of its group never reached, though all ranks have returned."""
    for group in dict.fromkeys(group for report in reports for group in report.begun):
        members = [report for report in reports if report.rank in group]
        number = min(report.begun.get(group, 0) for report in members)
        came = [report for report in members if report.has_begun(group, number)]
        if came:
            side = came[0].calls.get((group, number))
            absent = sorted(report.rank for report in members if report not in came)
            key, where = (side.key, side.where) if side else (None, None)
            return texts.unmet(key, number, came[0].rank, where, absent)
    return None


def deadlock(reports: Mapping[int, Report]) -> TplabError:
    """The error that says what every rank waits for."""
    doing, ops = {}, []
    for rank, report in sorted(reports.items()):
        if (wait := report.wait) is None:
            doing[rank] = texts.HAS_RETURNED
            continue
        ops.append(wait.side.key[0])
        absent = sorted(_unbegun(wait, reports) or wait.missing)
        is_message = wait.side.key[0] in ("ppermute", "ring_shift", "receive")
        doing[rank] = texts.waits_text(wait.side.key, wait.side.where, absent, is_message)
    sides = [report.wait.side for _, report in sorted(reports.items()) if report.wait is not None]
    return _behind(sides, texts.deadlock(doing, ops))
