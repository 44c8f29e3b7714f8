"""An action: one thing one rank does in a pipeline schedule; rows of them as text: a picture, and torch's CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tplab.errors import ScheduleError
from tplab.mesh import whole_or_none

KINDS = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD", "UNSHARD", "RESHARD", "STEP")
"""The kinds of actions; the names are those of torch's text form, and STEP is the optimizer's.

F            forward of one microbatch through one stage
B            its full backward (I and W at once)
I            the gradient of the stage's input; the zero-bubble papers call this B
W            the gradient of the stage's weights
SEND_F       send a stage's output to the next stage           RECV_F   receive it there
SEND_B       send the gradient of a stage's input back         RECV_B   receive it there
REDUCE_GRAD  sum a stage's gradients over the data-parallel ranks, once all its microbatches are done
UNSHARD      gather a stage's sharded weights                  RESHARD  free them again
STEP         the rank's optimizer step
"""
CODE = {kind: code for code, kind in enumerate(KINDS)}
F, B, I, W = range(4)
COMPUTE = (F, B, I, W)
MESSAGES = tuple(CODE[kind] for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"))

LARGEST = 2**31 - 1
"""The largest number that a stage or a microbatch may have: columns have 32 bits."""

_TEXT = re.compile(rf"(\d*)({'|'.join(sorted(KINDS, key=len, reverse=True))})(\d*)")


@dataclass(frozen=True, slots=True)
class Action:
    """`kind` (one of KINDS) on `stage` for `microbatch`; -1 where there is none, as in a STEP.

    joined   runs overlapped with the action before it in its rank's row: for example a forward and a backward of two
             microbatches at once, as in DualPipe. An executor that cannot overlap them runs one after the other.
    """

    kind: str
    stage: int = -1
    microbatch: int = -1
    joined: bool = False

    def __post_init__(self):
        if self.kind not in CODE:
            raise ScheduleError(f"an action's kind is one of {', '.join(KINDS)}, not {self.kind!r}")
        for name, number in (("stage", self.stage), ("microbatch", self.microbatch)):
            if type(number) is not int or not -1 <= number <= LARGEST:
                whole = whole_or_none(number)
                if whole is None or not -1 <= whole <= LARGEST:
                    raise ScheduleError(
                        f"an action has {name} {number!r}; it must be a whole number from 0 to {LARGEST:,} (-1: none)"
                    )
                object.__setattr__(self, name, whole)

    def __str__(self) -> str:
        """Torch's text: "2F0" is the forward of microbatch 0 through stage 2."""
        return f"{_number(self.stage)}{self.kind}{_number(self.microbatch)}"

    @property
    def label(self) -> str:
        """The text without its stage: "F0"."""
        return f"{self.kind}{_number(self.microbatch)}"

    @property
    def is_compute(self) -> bool:
        return CODE[self.kind] in COMPUTE

    def alone(self) -> Action:
        """The same action, joined to nothing."""
        return replace(self, joined=False)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read "2F0", "3SEND_F1", "0REDUCE_GRAD" or "STEP". Raises ScheduleError."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            shown = text if len(text) <= 100 else f"{text[:100]}..."
            raise ScheduleError(f"{shown!r} is not an action; write stage, kind, microbatch, such as 2F0 or 3SEND_F1")
        stage, kind, microbatch = match.groups()
        return cls(kind, _read("stage", stage), _read("microbatch", microbatch))


def _read(name: str, digits: str) -> int:
    """The number; -1 if there are no digits. Python refuses to read thousands of them."""
    significant = digits.lstrip("0")
    if len(significant) > len(str(LARGEST)):
        raise ScheduleError(
            f"an action has {name} {significant[:10]}..., a number of {len(significant):,} digits; it must be a whole "
            f"number from 0 to {LARGEST:,}"
        )
    return int(significant or "0") if digits else -1


def in_words(action: Action) -> str:
    """ "F3 of stage 2", for messages."""
    return action.label if action.stage < 0 else f"{action.label} of stage {action.stage}"


def _number(value: int) -> str:
    return "" if value < 0 else str(value)


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
