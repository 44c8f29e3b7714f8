"""What had not finished when the files of a real run end, in words: the reason why it hung."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tplab.mesh import Mesh, label_of
from tplab.trace.recorded.meetings import Meeting
from tplab.trace.recorded.rank_file import ANY, RankFile
from tplab.units import ranks_text


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
