"""The picture of a schedule as text: a row a rank, a cell a tick."""

from __future__ import annotations

from tplab.errors import ScheduleError
from tplab.schedules.action import Action
from tplab.schedules.schedule import Schedule


def draw(schedule: Schedule) -> str:
    """One row a rank, one cell a tick, dots where it idles.

    F0 F1 .. B0 .. B1        B1 is the backward of microbatch 1. Where a rank is not just its stage, torch's text is
    .. F0 B0 F1 B1 ..        used: 2F0 is stage 2. A plus joins an overlapped pair: 3F3+4B1
    """
    plain = schedule.placement == tuple((rank,) for rank in range(schedule.num_ranks))
    rows = [[(action.label if plain else str(action), action.joined) for action in row] for row in schedule.by_rank()]
    width = max((len(text) for row in rows for text, _ in row), default=0)
    try:
        ticks = [schedule.ticks[a:b].tolist() for a, b in zip(schedule.offsets[:-1], schedule.offsets[1:])]
    except ScheduleError as error:  # no time to draw: the rows one behind the other, and why
        packed = [" ".join(text.ljust(width) for text, _ in row).rstrip() for row in rows]
        return "\n".join([*packed, f"({error})"])
    lines = []
    for row, when in zip(rows, ticks):
        cells, joints = ["." * width] * schedule.num_ticks, [" "] * schedule.num_ticks
        for (text, joined), tick in zip(row, when):
            cells[tick] = text.ljust(width)
            if joined:
                joints[tick - 1] = "+"
        lines.append("".join(cell + joint for cell, joint in zip(cells, joints)).rstrip())
    return "\n".join(lines)


def parse(picture: str, name: str = "") -> Schedule:
    """The schedule of a picture. An action without a stage, as F0, is on the stage that has its rank's number."""
    rows: list[list[Action]] = []
    ticks: list[int] = []
    for rank, line in enumerate(filter(None, map(str.strip, picture.splitlines()))):
        row, tick = [], 0
        for cell in line.split():
            for place, text in enumerate(cell.split("+")):
                if set(text) != {"."}:
                    action = Action.parse(text)
                    stage = rank if action.stage < 0 and action.kind != "STEP" else action.stage
                    row.append(Action(action.kind, stage, action.microbatch, joined=place > 0))
                    ticks.append(tick)
                tick += 1
        rows.append(row)
    if not rows:
        raise ScheduleError("the picture is empty; write one line a rank, for example 'F0 F1 .. B0 .. B1'")
    return Schedule(rows, None, name, ticks)
