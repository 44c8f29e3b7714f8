"""Meetings: which operations of the ranks form one collective or one message, and in which round it took place."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tplab.trace.recorded.rank_file import ANY, Operation, RankFile


@dataclass(slots=True, eq=False)
class Meeting:
    """A collective or a message, with the ranks that have reached it.

    members   the ranks that belong to it
    sides     rank -> its side; `step`: how many rounds of communication come before it
    """

    name: str
    number: int
    members: tuple[int, ...]
    is_message: bool
    sides: dict[int, Operation] = field(default_factory=dict)
    step: int = -1


def meetings_of(files: Sequence[RankFile]) -> list[Meeting]:
    """The collectives and messages: the k-th call of each rank of a group belongs to the k-th collective, and between
    two ranks the k-th send meets the k-th receive of the same tag."""
    found: dict[tuple[object, ...], Meeting] = {}
    for rank, file in enumerate(files):
        counts: dict[tuple[object, ...], int] = defaultdict(int)
        for operation in file.operations:
            _, members = file.groups[operation.group]
            tag = None
            if (peer := operation.peer) is not None:
                if peer == ANY:
                    continue  # a receive from any rank, for which no message came
                members = (rank, peer) if operation.op == "send" else (peer, rank)
                tag = operation.tag
            key = operation.group, members, tag
            meeting = found.setdefault(
                (*key, counts[key]), Meeting(operation.group, len(found), members, peer is not None)
            )
            counts[key] += 1
            meeting.sides[rank] = operation
    meetings = list(found.values())
    _number_steps(len(files), meetings)
    return meetings


def _number_steps(num_ranks: int, meetings: Sequence[Meeting]) -> None:
    """Count the rounds of communication before each meeting, in the same way as simulated ranks do.

    A rank that has waited for something of round k continues in round k + 1, and messages that take the same way from
    one rank to another are in successive rounds. A collective is in the latest round in which one of its ranks arrives.
    """
    steps: list[list[tuple[float, bool, Meeting]]] = [[] for _ in range(num_ranks)]
    for meeting in meetings:
        for rank, side in meeting.sides.items():
            steps[rank].append((side.begin, False, meeting))
            taken = side.end if side.taken is None else side.taken
            if taken is not None:
                steps[rank].append((taken, True, meeting))
    queues = [deque(step[1:] for step in sorted(mine, key=lambda step: step[:2])) for mine in steps]
    hops, ways = [0] * num_ranks, defaultdict[tuple[int, ...], int](int)
    ready, num_here = defaultdict[int, int](int), defaultdict[int, int](int)
    blocked: dict[int, list[int]] = defaultdict(list)  # by number of the meeting that ranks wait for

    def number(meeting: Meeting) -> list[int]:
        """Give the meeting its round. Returns the ranks that were waiting for that."""
        ranks = meeting.members
        taken = [ranks] if meeting.is_message else [(one, ranks[i - len(ranks) + 1]) for i, one in enumerate(ranks)]
        meeting.step = max([ready[meeting.number], *(ways[pair] for pair in taken)])
        for pair in taken:
            ways[pair] = meeting.step + 1
        return blocked.pop(meeting.number, [])

    going = list(range(num_ranks))
    while going or blocked:
        if not going:  # a rank ended its part before others began theirs, as the root of a broadcast can
            earliest = min(blocked, key=lambda number: min(side.begin for side in meetings[number].sides.values()))
            going += number(meetings[earliest])
        rank = going.pop()
        queue = queues[rank]
        while queue:
            is_taken, meeting = queue[0]
            if is_taken and meeting.step < 0:
                blocked[meeting.number].append(rank)
                break
            queue.popleft()
            if is_taken:
                if not meeting.is_message or rank == meeting.members[1]:
                    hops[rank] = max(hops[rank], meeting.step + 1)
            elif not meeting.is_message or rank == meeting.members[0]:
                ready[meeting.number] = max(ready[meeting.number], hops[rank])
                num_here[meeting.number] += 1
                expected = 1 if meeting.is_message else len(meeting.sides)
                if num_here[meeting.number] == expected and meeting.step < 0:
                    going += number(meeting)
