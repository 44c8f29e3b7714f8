"""Schedules as text, one row of actions per rank: the picture that is printed, and torch's CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tplab.errors import ScheduleError
from tplab.schedules.action import Action

Row = Sequence[Action]
_PAIR = "OVERLAP_F_B"
_LINE_END = re.compile(r"\r\n?|\n")
"""The line ends of Unix, Windows, old Macs and some spreadsheets."""


def draw(rows: Sequence[Row], ticks: Sequence[Sequence[int]] | None, with_stages: bool) -> str:
    """One line per rank, one cell per tick, dots where the rank is idle.

    F0 F1 .. B0 .. B1        B1 is the backward of microbatch 1
    .. F0 B0 F1 B1 ..

    with_stages   write torch's text, for ranks that hold several stages: 2F0 is F0 of stage 2. A plus joins an
                  overlapped pair: 3F3+4B1
    ticks         of each action; None writes each row without gaps
    """
    texts = [[str(action) if with_stages else action.label for action in row] for row in rows]
    width = max((len(text) for row in texts for text in row), default=0)
    if ticks is None:
        return "\n".join(" ".join(text.ljust(width) for text in row).rstrip() for row in texts)
    num_ticks = max((tick for row in ticks for tick in row), default=-1) + 1
    lines = []
    for row, text, when in zip(rows, texts, ticks):
        cells, joints = ["." * width] * num_ticks, [" "] * num_ticks
        for action, cell, tick in zip(row, text, when):
            cells[tick] = cell.ljust(width)
            if action.joined:
                joints[tick - 1] = "+"
        lines.append("".join(cell + joint for cell, joint in zip(cells, joints)).rstrip())
    return "\n".join(lines)


def read_picture(picture: str) -> tuple[list[list[Action]], list[int]]:
    """(rows, the tick of each action) of what `draw` draws. An action without a stage, such as F0, belongs to the stage
    with its rank's number."""
    rows: list[list[Action]] = []
    ticks: list[int] = []
    for rank, line in enumerate(filter(None, map(str.strip, picture.splitlines()))):
        row, tick = [], 0
        for cell in line.split():
            for index, text in enumerate(cell.split("+")):
                if set(text) != {"."}:
                    action = Action.parse(text)
                    stage = rank if action.stage < 0 and action.kind != "STEP" else action.stage
                    row.append(Action(action.kind, stage, action.microbatch, joined=index > 0))
                    ticks.append(tick)
                tick += 1
        rows.append(row)
    if not rows:
        raise ScheduleError("the picture is empty; write one line per rank, for example 'F0 F1 .. B0 .. B1'")
    return rows, ticks


def write_csv(rows: Sequence[Row], ticks: Sequence[Sequence[int]] | None) -> str:
    """One line per rank. With ticks, one cell per tick, blank where the rank is idle; otherwise one cell per action.

    An overlapped pair is one cell, "(0F3;7B1)OVERLAP_F_B". Torch has no word for an optimizer step, so it is left out.
    """
    lines = []
    for rank, row in enumerate(rows):
        cells: list[str] = []
        for index, cell in _cells(row):
            cells += [""] * (0 if ticks is None else ticks[rank][index] - len(cells))
            cells.append(cell)
        lines.append(cells)
    width = 0 if ticks is None else max(map(len, lines))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(cells + [""] * (width - len(cells)) for cells in lines)
    return text.getvalue()


def read_csv(text: str) -> list[list[Action]]:
    """The rows of either of torch's forms. Blank cells are idle ticks; only the order counts."""
    try:
        return [_actions(row) for row in csv.reader(_LINE_END.split(text)) if row]
    except csv.Error as error:
        raise ScheduleError(
            f"this is not a table of torch's ({error}); write one line per rank: 0F0,0F1,0B0,0B1"
        ) from None


def read_torch(source: Any) -> tuple[list[list[Action]], str]:
    """(rows, name) of a torch schedule, its `pipeline_order`, or rows of torch's actions (None where idle).

    Nothing is repaired: torch 2.13's Schedule1F1B, for example, omits microbatch 0 on its last rank; `check` says so.
    """
    order, name = source, ""
    for attribute in ("pipeline_order", "_get_pipeline_order"):
        if hasattr(source, attribute):
            found = getattr(source, attribute)
            order = found() if callable(found) else found
            name = type(source).__name__
            break
    if isinstance(order, Mapping):
        order = [order[rank] for rank in sorted(order)]
    if not isinstance(order, Sequence) or isinstance(order, str):
        raise ScheduleError(
            f"{type(source).__name__} is not a schedule of torch.distributed.pipelining; give such a schedule, or its "
            "pipeline_order: rank -> list of actions"
        )
    return [_actions("" if action is None else str(action) for action in row) for row in order], name


def _actions(cells: Iterable[str]) -> list[Action]:
    row: list[Action] = []
    for cell in map(str.strip, cells):
        if cell.startswith("("):
            inner, _, word = cell[1:].partition(")")
            if word != _PAIR:
                raise ScheduleError(f"{cell!r} is not an overlapped pair; write (0F3;7B1){_PAIR}")
            parts = [Action.parse(part) for part in inner.split(";")]
            row += [Action(a.kind, a.stage, a.microbatch, joined=index > 0) for index, a in enumerate(parts)]
        elif cell:
            row.append(Action.parse(cell))
    return row


def _cells(row: Row) -> Iterator[tuple[int, str]]:
    """(index of its first action, text) of each cell: a pair is one."""
    pairs = {index - 1 for index, action in enumerate(row) if action.joined}
    for index, action in enumerate(row):
        if index in pairs:
            yield index, f"({action};{row[index + 1]}){_PAIR}"
        elif not action.joined and action.kind != "STEP":
            yield index, str(action)
