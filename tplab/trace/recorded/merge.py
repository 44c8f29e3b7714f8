"""Merging: turns the files that the ranks of a real run have written into one measured trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from tplab.comm import ROWS
from tplab.errors import TraceError
from tplab.mesh import Mesh, label_of, mesh_of_dims
from tplab.trace.journal import Journal, trace_of
from tplab.trace.recorded.clocks import advances
from tplab.trace.recorded.meetings import Meeting, meetings_of
from tplab.trace.recorded.rank_file import ANY, RankFile, read
from tplab.trace.trace import Trace
from tplab.units import ranks_text, time_text

_MOST_NAMED = 8
_ALL_WAIT_FOR_ALL = [name for name, row in ROWS.items() if "root" not in (row.takes, row.gives) and row.gives != "one"]


@dataclass(frozen=True, slots=True)
class Merged:
    """A real run.

    trace        what all ranks did, in seconds from the first operation
    doubt        by how many seconds the clocks of two ranks may still differ at some time in the run; 0 on one machine
    unfinished   what had not finished when the files end, and which ranks take part in it: the reason why a run hung.
                 Also, where ranks called different collectives, and which files break off. The trace's warnings, too
    """

    trace: Trace
    doubt: float
    unfinished: list[str]

    @property
    def clocks(self) -> str:
        """How well the clocks agree, in words."""
        if not self.doubt:
            return "all ranks read one clock"
        return f"after alignment, the clocks of two machines may still be off by up to {time_text(self.doubt, 's')}"

    def __str__(self) -> str:
        return "\n".join([f"{self.trace!r}; {self.clocks}", *self.unfinished])


def merge(folder: str | Path, mesh: Mesh | None = None) -> Merged:
    """One trace of a real run, from the folder in which each of its ranks has left a file (`tplab.torch.record`).

    mesh   names the groups of ranks in the trace; without it, the program's DeviceMesh does, if it had one

    The ranks' clocks are aligned as described in `tplab.trace.recorded.clocks`. On each rank, a collective lasts from
    the moment its last rank arrives until this rank has its result; between its waits, a rank computes. The trace
    begins with the first operation. Raises TraceError if files are missing, or belong to several runs.
    """
    files = _read_all(Path(folder))
    world = len(files)
    groups = (group for file in files for group in file.groups.values())
    mesh = mesh or mesh_of_dims(groups, world) or Mesh(world=world)
    if mesh.size != world:
        raise TraceError(f"{folder} has the files of {world} ranks, and {mesh} has {mesh.size}; give a mesh of {world}")
    meetings = meetings_of(files)
    offsets, doubt = _aligned(files, meetings)
    _leave_out_the_start(files, offsets)
    journals = _journals(files, meetings, mesh)
    for journal, offset in zip(journals, offsets, strict=True):
        journal.behind = offset
    found = [*unfinished(files, meetings, mesh)]
    return Merged(trace_of(journals, mesh, files[0].about.title, found), doubt, found)


# --- the files -------------------------------------------------------------------------------------------------------


def _read_all(folder: Path) -> list[RankFile]:
    """The files of all ranks, by rank. Raises TraceError if they do not belong to one run."""
    paths = sorted(folder.glob("rank*.jsonl"))
    if not paths:
        what = f"there is no folder {folder}" if not folder.is_dir() else f"{folder} has no files rank*.jsonl"
        raise TraceError(f"{what}; tplab.record writes one for each rank of a run")
    files = [read(path) for path in paths]
    _, newest = max(zip(paths, files, strict=True), key=lambda pair: pair[0].stat().st_mtime)
    for path, file in zip(paths, files, strict=True):
        if (file.about.run, file.about.world) != (newest.about.run, newest.about.world):
            raise TraceError(
                f"{folder} has files of several runs: {path.name} is of one with {file.about.world} ranks, and the "
                f"newest file, rank{newest.about.rank}.jsonl, of another one with {newest.about.world}; delete the old "
                "ones, or record each run into a folder of its own"
            )
    by_rank = {file.about.rank: file for file in files}
    world = newest.about.world
    if len(by_rank) < world:
        missing = islice((rank for rank in range(world) if rank not in by_rank), _MOST_NAMED)
        names = ", ".join(f"rank{rank}.jsonl" for rank in missing)
        names += ", ..." if world - len(by_rank) > _MOST_NAMED else ""
        raise TraceError(
            f"{folder} has the files of {len(by_rank)} of {world} ranks, without {names}; "
            "copy the files of all nodes into one folder"
        )
    return [by_rank[rank] for rank in range(world)]


# --- clocks ----------------------------------------------------------------------------------------------------------


def _aligned(files: Sequence[RankFile], meetings: Sequence[Meeting]) -> tuple[list[float], float]:
    """How much each rank's clock must be advanced, and how far apart two of them may still be."""
    machines = list(dict.fromkeys(file.about.machine for file in files))
    if len(machines) == 1:
        return [0.0] * len(files), 0.0
    place = [machines.index(file.about.machine) for file in files]
    bounds: list[dict[tuple[int, int], float]] = []
    for meeting in sorted(meetings, key=lambda meeting: meeting.step):
        bounds.append({})
        for here, there in _after(meeting):
            mine, other = meeting.sides[here], meeting.sides[there]
            if mine.end is not None and place[here] != place[there]:
                pair = place[there], place[here]
                bounds[-1][pair] = min(bounds[-1].get(pair, float("inf")), mine.end - other.begin)
    hosts = [next(file.about.host for file in files if file.about.machine == machine) for machine in machines]
    found, doubts = advances(bounds, hosts)
    furthest = sorted(doubts)[-2:]
    return [float(found[machine]) for machine in place], float(sum(furthest))


def _after(meeting: Meeting) -> Iterator[tuple[int, int]]:
    """(i, j): the meeting ended on rank i after it had begun on rank j."""
    sides = meeting.sides
    if meeting.is_message:
        source, target = meeting.members
        if len(sides) == 2:
            yield target, source
    elif all(side.op in _ALL_WAIT_FOR_ALL for side in sides.values()):
        yield from ((here, there) for here in sides for there in sides if here != there)


def _leave_out_the_start(files: Sequence[RankFile], offsets: Sequence[float]) -> None:
    """Let every rank begin with the first operation: before that, modules are imported and models are built."""
    firsts = [file.operations[0].begin + offset for file, offset in zip(files, offsets, strict=True) if file.operations]
    for file, offset in zip(files, offsets, strict=True):
        first = min(firsts, default=file.about.start + offset) - offset
        file.about = file.about._replace(start=min(max(first, file.about.start), file.stop))


# --- the journals ----------------------------------------------------------------------------------------------------


def _journals(files: Sequence[RankFile], meetings: Sequence[Meeting], mesh: Mesh) -> list[Journal]:
    journals = []
    for rank, file in enumerate(files):
        journal = Journal(rank)
        journal.start, journal.end = file.about.start, file.stop
        labels = {name: label_of(ranks, mesh) for name, (_, ranks) in file.groups.items()}
        for wait in file.waits:
            about: dict[str, Any] = {"op": wait.operation.op, "axis": labels[wait.operation.group], "where": wait.where}
            journal.note("wait", wait.start, wait.end, **about)
        times = [journal.start, *(time for wait in _apart(file) for time in wait), journal.end]
        for start, end in list(pairwise(times))[::2]:
            journal.note("compute", start, end, op="compute")
        journals.append(journal)
    for meeting in meetings:
        name, ranks = meeting.name, meeting.members
        for rank, side in meeting.sides.items():
            journal, group = journals[rank], files[rank].groups[name][1]
            axis, end = label_of(group, mesh), side.end if side.end is not None else files[rank].stop
            about = {"op": side.op, "axis": axis, "bytes": side.num_bytes, "shape": side.shape, "dtype": side.dtype}
            about |= {"step": meeting.step, "where": side.where, "phase": side.phase, "reduction": side.reduction}
            kind = "collective"
            if meeting.is_message:
                about["peer"] = ranks[1] if rank == ranks[0] else ranks[0]
                kind = "message" if rank == ranks[0] else "taken"
            journal.note(kind, side.begin, end, key=(ranks, meeting.number), **about)
    return journals


def _apart(file: RankFile) -> Iterator[tuple[float, float]]:
    """The spans in which the rank was waiting, with overlaps removed."""
    until = file.about.start
    for wait in sorted(file.waits, key=lambda wait: wait.start):
        if wait.end > until:
            yield max(wait.start, until), wait.end
            until = wait.end


# --- what had not finished --------------------------------------------------------------------------------------------


def unfinished(files: Sequence[RankFile], meetings: Sequence[Meeting], mesh: Mesh) -> Iterator[str]:
    """What some rank did not finish, and which ranks take part in it; where ranks called different collectives; and
    which ranks' files break off."""

    def over(rank: int, group: str) -> str:
        return f"over {label_of(files[rank].groups[group][1], mesh)!r}:"

    for meeting in meetings:
        sides = meeting.sides
        is_mismatch = len({side.op for side in sides.values()}) > 1 and not meeting.is_message
        is_waiting = any(side.end is None for side in sides.values()) and not _has_arrived(meeting)
        if not is_mismatch and not is_waiting:
            continue
        what = "the ranks called different collectives" if is_mismatch else "never finished"
        lines = [f"{what}, {over(next(iter(sides)), meeting.name)}"]
        for rank, side in sorted(sides.items()):
            is_done = is_waiting and side.end is not None
            lines.append(f"  rank {rank}: {side.op} at {side.where}{', which it finished' if is_done else ''}")
        if absent := [rank for rank in meeting.members if rank not in sides]:
            lines.append(f"  {ranks_text(absent)} never reached it")
        yield "\n".join(lines)
    for rank, file in enumerate(files):
        for one in file.operations:
            if one.peer == ANY and one.end is None:
                what = f"never finished, {over(rank, one.group)}"
                yield f"{what}\n  rank {rank}: {one.op} from any rank at {one.where}"
    broken = [rank for rank, file in enumerate(files) if not file.has_ended]
    if len(broken) == 1:
        yield f"the file of {ranks_text(broken)} breaks off: its process was killed, or was still running"
    elif broken:
        yield f"the files of {ranks_text(broken)} break off: their processes were killed, or were still running"


def _has_arrived(meeting: Meeting) -> bool:
    """Whether the meeting is a message that has arrived. Then it was sent, even if the program did not wait for it."""
    target = meeting.sides.get(meeting.members[1]) if meeting.is_message else None
    return target is not None and target.end is not None
