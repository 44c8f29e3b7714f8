"""A trace of an executed pipeline schedule over its prediction: when each action ran, and when it was predicted.

`now(over, step)` is the state at one moment; `drawn(over, width)` draws all of it, as a scene over time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tplab.errors import ScheduleError
from tplab.mesh import Axis
from tplab.schedules import Comparison, Simulation, compare
from tplab.schedules.action import in_words
from tplab.trace.trace import Trace
from tplab.units import counted, plain, time_text
from tplab.widgets.paper.action import draw_action
from tplab.widgets.paper.frame import MARGIN, rests
from tplab.widgets.paper.lanes import TOP, draw_lane, lanes
from tplab.widgets.paper.legend import IDLE, OTHER_WORK, Key, actions
from tplab.widgets.paper.palette import HATCH, KINDS, PAPER, WORK, mix
from tplab.widgets.paper.scene import Scene, packed
from tplab.widgets.paper.shown import a
from tplab.widgets.paper.still import run_picture
from tplab.widgets.paper.wire import pack
from tplab.widgets.schedule.facts import Fact, paper_name
from tplab.widgets.schedule.lanes import halves
from tplab.widgets.score import words
from tplab.widgets.score.names import name_of

WIDTH = 860


@dataclass(frozen=True, eq=False)
class Overlay:
    """One batch of a schedule in a trace. Times are counted from its first start; predicted times from theirs.

    times     times[k] is the k-th distinct moment at which some action ends; the last one is the end of both. The
              playhead is a position in these
    actions   one row per action, in the order of the schedule's columns: rank (the row of the schedule), kind; start,
              end and busy as executed; due_start and due_end as predicted
    others    other computations of the ranks in that time: rank, op (an index into `ops`), start, end
    """

    trace: Trace
    comparison: Comparison
    times: np.ndarray
    actions: dict[str, np.ndarray]
    others: dict[str, np.ndarray]
    ops: list[str]

    @property
    def num_steps(self) -> int:
        return len(self.times) - 1

    @property
    def predicted(self) -> Simulation:
        return self.comparison.predicted

    @property
    def word(self) -> str:
        """The word for the times of the trace, such as "measured"."""
        return "measured" if self.trace.clock == "measured" else "executed"

    def time(self, position: float) -> float:
        """The time at which the playhead is, given its position."""
        return float(np.interp(position, np.arange(len(self.times)), self.times))

    @cached_property
    def tolerance(self) -> float:
        """Times closer together than this count as equal."""
        return 1e-9 * float(self.times[-1])

    @cached_property
    def names(self) -> list[str]:
        """Of each action: "F3"; or "F3 of stage 5" if a rank holds several stages."""
        schedule = self.predicted.schedule
        actions = map(schedule.action, range(len(schedule)))
        return [one.label if schedule.num_stages == schedule.num_ranks else in_words(one) for one in actions]


@dataclass(frozen=True)
class Now:
    """The state with the playhead at `time`.

    runs, due       the actions that each rank runs, and those it was predicted to run (an overlapped pair is two)
    done, were_due  how many actions are done, and how many were predicted to be done
    """

    time: float
    runs: list[list[int]]
    due: list[list[int]]
    done: int
    were_due: int


def overlay(
    trace: Trace, predicted: Simulation | Comparison, axis: Axis | None = None, batch: int | None = None
) -> Overlay:
    """Find the batch in the trace. Raises ScheduleError if the prediction is not of this trace."""
    if isinstance(predicted, Simulation):
        beside = compare(predicted, trace, axis="pp" if axis is None else axis, batch=-1 if batch is None else batch)
    elif isinstance(predicted, Comparison):
        axis, batch = predicted.axis if axis is None else axis, predicted.batch if batch is None else batch
        beside = compare(predicted.predicted, trace, axis=axis, batch=batch)
        is_same = (axis, batch) == (predicted.axis, predicted.batch)
        if is_same and not (np.array_equal(beside.start, predicted.start) and beside.origin == predicted.origin):
            raise ScheduleError("the comparison is of another trace: its actions ran at other times than in this one")
    else:
        raise TypeError(
            f"predicted is {a(type(predicted))}; give a run, simulate(schedule, costs), or compare(schedule, trace)"
        )
    run, schedule = beside.predicted, beside.predicted.schedule
    begin = float(run.start.min())
    actions = {
        "rank": schedule.rank,
        "kind": schedule.kind,
        "start": beside.start,
        "end": beside.end,
        "busy": beside.busy,
        "due_start": run.start - begin,
        "due_end": run.end - begin,
    }
    ops, others = _others(trace, beside)
    times = rests(actions["end"], float(max(actions["end"].max(), actions["due_end"].max())))
    return Overlay(trace, beside, times, actions, others, ops)


def now(over: Overlay, position: float) -> Now:
    """The state at `position`, in steps: step k is the k-th distinct moment at which an action ends."""
    return at(over, over.time(position))


def at(over: Overlay, time: float) -> Now:
    """The state at a time."""
    near, rank = over.tolerance, over.actions["rank"]

    def under_way(start: np.ndarray, end: np.ndarray) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(over.predicted.schedule.num_ranks)]
        for row in np.flatnonzero((start <= time + near) & (time < end - near)).tolist():
            found[rank[row]].append(row)
        return found

    start, end, due_start, due_end = (over.actions[name] for name in ("start", "end", "due_start", "due_end"))
    done, were_due = (int(np.count_nonzero(ends <= time + near)) for ends in (end, due_end))
    return Now(time, under_way(start, end), under_way(due_start, due_end), done, were_due)


def say(over: Overlay, moment: Now) -> tuple[str, str, str]:
    """The position of the playhead, what the ranks do there and were predicted to do, and how far they have come."""
    unit, ranks, texts = over.trace.unit, over.comparison.ranks, {}
    for index, (runs, due) in enumerate(zip(moment.runs, moment.due)):
        does, was = (" + ".join(over.names[row] for row in rows) for rows in (runs, due))
        text = f"rank {ranks[index]} runs {does or 'no action'}"
        texts[index] = text if runs == due else f"{text} ({was or 'nothing'} was due)"
    num_actions = len(over.actions["rank"])
    far = f"{moment.done} of {num_actions} actions done, {moment.were_due} due"
    head = f"t = {time_text(moment.time, unit, float(over.times[-1]))}"
    if moment.done == moment.were_due == num_actions:
        return head, "all ranks are done", far
    apart = [index for index in texts if moment.runs[index] != moment.due[index]]
    if apart:
        others = "; the others run as predicted" if len(apart) < len(texts) else ""
        return head, _few([texts[index] for index in apart]) + others, far
    busy = [text for index, text in texts.items() if moment.runs[index]]
    return head, f"{_few(busy)}, as predicted" if busy else "no rank runs an action, as predicted", far


# --- words ------------------------------------------------------------------------------------------------------------


def title(over: Overlay) -> str:
    return paper_name(over.predicted.schedule.name, over.trace.title or "schedule")


def about(over: Overlay) -> str:
    """The headline: both makespans, and their difference."""
    beside, unit = over.comparison, over.trace.unit
    batch = f"batch {beside.batch + 1} of {beside.num_batches} · " if beside.num_batches > 1 else ""
    return (
        f"{batch}{over.word} {time_text(beside.makespan, unit)} · predicted "
        f"{time_text(over.predicted.makespan, unit)} · residual {signed(over, beside.residual)}"
    )


def signed(over: Overlay, time: float) -> str:
    """ "+1.2 ms"; a rounding error is 0."""
    if abs(time) <= over.tolerance:
        return "0"
    return ("+" if time > 0 else "") + time_text(time, over.trace.unit)


def sentence(over: Overlay) -> str:
    """One plain sentence, the same for the same program. It has no measured times, because they differ from run to
    run."""
    beside, trace, schedule = over.comparison, over.trace, over.predicted.schedule
    clock = trace.clock + (", unit times" if trace.unit == "steps" else f", {trace.place}" if trace.cluster else "")
    figures = about(over).replace(" · ", ", ")
    if trace.clock == "measured":
        batch = f"batch {beside.batch + 1} of {beside.num_batches}, " if beside.num_batches > 1 else ""
        figures = f"{batch}each where it was measured and where it was predicted"
    return (
        f"Timeline of {title(over)} on {trace.mesh}: {schedule.num_ranks} ranks, {len(schedule)} actions, {figures} "
        f"({clock})."
    )


def facts(over: Overlay) -> list[Fact]:
    """The figures under the picture."""
    beside, run, unit = over.comparison, over.predicted, over.trace.unit
    ranks, makespan = run.schedule.num_ranks, beside.makespan
    share = f"{plain(round(100 * beside.residual / run.makespan, 1))}%" if run.makespan else ""
    found = [
        Fact(f"makespan, {over.word}", time_text(makespan, unit), ""),
        Fact("predicted", time_text(run.makespan, unit), ""),
        Fact("residual", signed(over, beside.residual), share if signed(over, beside.residual) != "0" else ""),
    ]
    if makespan and beside.busy.any():
        bubble = 1 - float(beside.busy.sum()) / (ranks * makespan)
        found.append(
            Fact(
                "bubble",
                f"{plain(round(100 * bubble, 1))}%",
                f"predicted {plain(round(100 * run.bubble_fraction, 1))}%",
            )
        )
    latest = int(np.argmax(beside.lag))
    lag, what = float(beside.lag[latest]), in_words(run.schedule.action(latest))
    if lag > over.tolerance:
        found.append(Fact("largest lag", signed(over, lag), what))
    spent = np.bincount(over.others["rank"], over.others["end"] - over.others["start"], ranks)
    if spent.max() > over.tolerance:
        found.append(Fact("other work", time_text(float(spent.max()), unit), "per rank"))
    return found


def legend(over: Overlay) -> list[Key]:
    words = Key(f"{over.word}, above", sign=""), Key("predicted, beneath", PAPER, KINDS["F"])
    others = [OTHER_WORK] if len(over.others["rank"]) else []
    return [*actions(over.actions["kind"].tolist()), *words, *others, IDLE]


def _few(texts: list[str]) -> str:
    return ", ".join(texts[:3]) + (", …" if len(texts) > 3 else "")


def drawn(over: Overlay, width: float) -> Scene:
    """One lane for each rank: its actions as executed, with its other work, and as predicted below."""
    schedule, last, makespan = over.predicted.schedule, float(over.times[-1]), over.comparison.makespan
    heights = (22, 13, 9), (13, 7, 5), (6, 3, 2)  # of executed and of predicted bars, and of the gap after them
    work, due, gap = heights[0 if schedule.num_ranks <= 8 else 1 if schedule.num_ranks <= 16 else 2]
    pitch = work + due + gap
    bottom, unit, ranks = TOP + schedule.num_ranks * pitch, over.trace.unit, over.comparison.ranks
    label = f"timeline of {title(over)} on {counted(schedule.num_ranks, 'rank')}: {about(over)}"
    sheet = lanes(width, bottom + 20, label, 0, last, 8, schedule.num_ranks, unit)
    slots, near = max(1, int(schedule.slot.max(initial=0))), over.tolerance
    lows, talls = halves(schedule, due - 1)

    def span(start: float, end: float) -> str:
        return f"{time_text(start, unit, last)} to {time_text(end, unit, last)}, {time_text(end - start, unit)}"

    def late(by: float, verb: str) -> str:
        how = f"{time_text(abs(by), unit)} {'later' if by > 0 else 'earlier'}"
        return f"{verb} on time" if abs(by) <= near else f"{verb} {how}"

    for row, rank in enumerate(ranks):
        draw_lane(sheet, row, rank, TOP + row * pitch, pitch, work + due, last, 0)
        with sheet.in_time():  # there are no waits after the end of the batch
            sheet.hatch(0, TOP + row * pitch, makespan, work, HATCH)
    for lane, op, start, end in zip(*(over.others[name].tolist() for name in ("rank", "op", "start", "end"))):
        says = f"rank {ranks[lane]}: {name_of(over.ops[op])}, no action of the schedule"
        with sheet.in_time(), sheet.about([("", says), (over.word, span(start, end))]):
            sheet.bar(start, TOP + lane * pitch, end - start, work, fill=mix(WORK, 0.42))
    columns = [over.actions[name].tolist() for name in ("start", "end", "busy", "due_start", "due_end")]
    for index, (start, end, busy, due_start, due_end) in enumerate(zip(*columns)):
        action, kind, y = schedule.action(index), int(schedule.kind[index]), TOP + int(schedule.rank[index]) * pitch
        rows = [
            ("", f"{action.label} of stage {action.stage}, rank {ranks[int(schedule.rank[index])]}"),
            (over.word, span(start, end)),
            ("predicted", span(due_start, due_end)),
            ("difference", f"{late(start - due_start, 'starts')}, {late(end - due_end, 'ends')}"),
        ]
        rows += [("of it", f"{time_text(end - start - busy, unit)} waiting")] if end - start - busy > near else []
        with sheet.in_time(), sheet.about(rows, key=index):
            tier = schedule.slot[index] / slots
            draw_action(sheet, kind, action.label, start, y, end - start, work, tier)
            top, height = y + work + 1 + float(lows[index]), float(talls[index])
            draw_action(sheet, kind, action.label, due_start, top, due_end - due_start, height, outlined=True)
    sheet.axes.append(bottom)
    return sheet


def picture(over: Overlay, position: float = 0) -> bytes:
    """A PNG, with the playhead unless it is at the start."""
    moment, warning = now(over, position), words.warning(over.trace)
    heading = title(over), about(over), words.clock(over.trace), warning
    said = say(over, moment) if position else ("", "", "")
    return run_picture(drawn(over, WIDTH - 2 * MARGIN), *heading, legend(over), facts(over), said, moment.time)


def sent(of: Overlay) -> bytes:
    """For `timeline` over a prediction: when everything ran, and when it was predicted."""
    header, columns = packed([drawn(of, WIDTH)], legend(of))
    stops = np.unique([of.actions[name] for name in ("start", "end", "due_start", "due_end")])
    header |= {
        "title": title(of),
        "about": about(of),
        "badge": words.clock(of.trace),
        "unit": of.trace.unit,
        "times": of.times.tolist(),
        "facts": facts(of),
        "said": [say(of, at(of, time))[1:] for time in stops.tolist()],  # from each stop to the next
    }
    if of.trace.warnings:
        header["warning"] = words.warning(of.trace)
    return pack(header, {**columns, "stops": stops})


# --- reading ----------------------------------------------------------------------------------------------------------


def _others(trace: Trace, beside: Comparison) -> tuple[list[str], dict[str, np.ndarray]]:
    """Other computations of the schedule's ranks, between its actions."""
    start, end, rank = (trace.column(name) for name in ("start", "end", "rank"))
    kinds, kind = trace.codes("kind")
    ops, op = trace.codes("op")
    lane = np.full(trace.mesh.size, -1)
    lane[list(beside.ranks)] = np.arange(len(beside.ranks))
    is_compute = np.isin(kind, [index for index, name in enumerate(kinds) if name == "compute"])
    inside = (end > beside.origin) & (start < beside.origin + beside.makespan) & (end > start)
    rows = np.flatnonzero(is_compute & inside & (lane[rank] >= 0))
    begin, finish = start[rows] - beside.origin, end[rows] - beside.origin
    schedule = beside.predicted.schedule
    is_action = np.zeros(len(rows), bool)
    for index in range(schedule.num_ranks):  # the actions of a rank do not overlap
        own, span = lane[rank[rows]] == index, slice(schedule.offsets[index], schedule.offsets[index + 1])
        before = np.searchsorted(beside.start[span], begin[own], side="right") - 1
        until = np.append(beside.end[span], -np.inf)[before]
        is_action[own] = begin[own] < until
    rows, begin, finish = rows[~is_action], begin[~is_action], finish[~is_action]
    begin, finish = np.maximum(begin, 0.0), np.minimum(finish, beside.makespan)
    return ops, {"rank": lane[rank[rows]], "op": op[rows], "start": begin, "end": finish}
