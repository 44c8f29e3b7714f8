"""Torch's text for schedules: one CSV row a rank, one cell an action."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tplab.errors import ScheduleError
from tplab.schedules.action import Action
from tplab.schedules.schedule import Schedule

FORMS = ("compute_only", "compute_comms")
_PAIR = "OVERLAP_F_B"


def to_csv(schedule: Schedule, form: str = "compute_only") -> str:
    """The text that torch.distributed.pipelining reads.

    compute_only    one cell a tick, blank where a rank idles: "2F0" is stage 2, forward, microbatch 0
    compute_comms   no blanks, with sends, receives and gradient sums, for example "2F0,2SEND_F0,2RECV_B0"

    An overlapped pair is one cell, "(0F3;7B1)OVERLAP_F_B". Torch has no word for an optimizer step: it is left out.
    """
    if form not in FORMS:
        raise ScheduleError(f"the form is 'compute_only' or 'compute_comms', not {form!r}")
    rows: list[list[str]] = []
    if form == "compute_comms":
        schedule = schedule if schedule.has_communication else schedule.with_communication()
        rows = [_cells(row) for row in schedule.by_rank()]
    else:
        schedule = schedule.compute_only()
        for number, row in enumerate(schedule.by_rank()):
            ticks = iter(schedule.ticks[schedule.offsets[number] : schedule.offsets[number + 1]].tolist())
            cells: list[str] = []
            for cell, pair in zip(_cells(row), _pair_sizes(row)):
                tick = next(ticks)
                cells += [""] * (tick - len(cells)) + [cell]
                if pair == 2:  # one cell for two ticks; the second tick stays blank
                    next(ticks)
            rows.append(cells)
    width = max(map(len, rows)) if form == "compute_only" else 0
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(row + [""] * (width - len(row)) for row in rows)
    return text.getvalue()


def from_csv(text: str, name: str = "") -> Schedule:
    """Read either form. Blank cells are idle ticks; the order is what counts."""
    return Schedule([_actions(row) for row in csv.reader(io.StringIO(text)) if row], None, name)


def from_torch(source: Any, name: str = "") -> Schedule:
    """From a torch schedule object, its `pipeline_order`, or rows of torch's actions (None where idle).

    Nothing is mended: torch 2.13's Schedule1F1B, for one, writes no microbatch 0 on its last rank, and `check` says so.
    """
    order = source
    for attribute in ("pipeline_order", "_get_pipeline_order"):
        if hasattr(source, attribute):
            found = getattr(source, attribute)
            order = found() if callable(found) else found
            name = name or type(source).__name__
            break
    if isinstance(order, Mapping):
        order = [order[rank] for rank in sorted(order)]
    if not isinstance(order, Sequence) or isinstance(order, str):
        raise ScheduleError(
            f"{type(source).__name__} is not a schedule of torch.distributed.pipelining; give such a schedule, or its "
            "pipeline_order: rank -> list of actions"
        )
    return Schedule([_actions("" if action is None else str(action) for action in row) for row in order], None, name)


def _actions(cells: Iterable[str]) -> list[Action]:
    row: list[Action] = []
    for cell in map(str.strip, cells):
        if cell.startswith("("):
            inner, _, word = cell[1:].partition(")")
            if word != _PAIR:
                raise ScheduleError(f"{cell!r} is no overlapped pair; write (0F3;7B1){_PAIR}")
            parts = [Action.parse(part) for part in inner.split(";")]
            row += [Action(a.kind, a.stage, a.microbatch, joined=place > 0) for place, a in enumerate(parts)]
        elif cell:
            row.append(Action.parse(cell))
    return row


def _cells(row: Sequence[Action]) -> list[str]:
    cells: list[str] = []
    for action in row:
        if action.joined:
            cells[-1] = f"({cells[-1]};{action}){_PAIR}"
        elif action.kind != "STEP":
            cells.append(str(action))
    return cells


def _pair_sizes(row: Sequence[Action]) -> list[int]:
    """For each cell, how many actions it stands for."""
    sizes: list[int] = []
    for action in row:
        if action.joined:
            sizes[-1] += 1
        else:
            sizes.append(1)
    return sizes
