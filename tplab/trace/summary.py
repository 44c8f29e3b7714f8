"""A trace on one screen: what was sent along each group, how long ranks were idle, and where they waited longest."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tplab.mesh import ranks_of
from tplab.trace.event import Event
from tplab.trace.groups import kinds
from tplab.trace.trace import Trace
from tplab.units import bytes_text, plain, time_text


def summary(trace: Trace, peaks: list[int] | None = None, num_waits: int = 3) -> str:
    """The most important facts about a run, as text.

    peaks       the most bytes of tensors that each rank held at once, if they were counted
    num_waits   how many of the longest waits to list
    """
    on = f" on {trace.place}" if trace.cluster else ""
    parts = [f"{trace.title or 'a program'} on {trace.mesh}, {trace.clock}{on}", _sent(trace), _shares(trace)]
    if waits := _longest_waits(trace, num_waits):
        parts.append(waits)
    if peaks:
        most = max(range(len(peaks)), key=peaks.__getitem__)
        least = peaks.index(min(peaks))
        others = f"on rank {most}, the most, and {bytes_text(min(peaks))} on rank {least}, the least"
        whose = "on every rank" if min(peaks) == max(peaks) else others
        none = "" if max(peaks) else "; tensors on the device meta have no memory"
        parts.append(f"peak memory of tensors: {bytes_text(max(peaks))} {whose}{none}")
    parts += ["warning: " + text.partition("\n")[0].removesuffix(":") for text in trace.warnings]
    return "\n\n".join(parts)


def _sent(trace: Trace) -> str:
    """One line per group and operation; groups of one kind share a line."""
    names = kinds(trace)
    calls: dict[tuple[str, str], Counter[int]] = {}  # by rank
    sizes: dict[tuple[str, str], int] = {}
    for event in (*trace.select(kind="collective").events, *trace.select(kind="send").events):
        row = names.get(event.axis or "", ""), event.op
        sizes[row] = sizes.get(row, 0) + event.bytes
        made = calls.setdefault(row, Counter())
        group = event.group if event.kind == "collective" else ranks_of(event.axis or "")  # for a message, two ranks
        made.update(dict.fromkeys(group or trace.mesh.ranks, 0))
        made[event.rank] += 1
    if not sizes:
        return "nothing was sent: there is only 1 rank" if trace.mesh.size == 1 else "nothing was sent"
    lines = [["group", "operation", "calls per rank", "sent by all ranks"]]
    for row, num_bytes in sorted(sizes.items(), key=lambda row: -row[1]):
        least, most = min(calls[row].values()), max(calls[row].values())
        lines.append([*row, f"{least}" if least == most else f"{least} to {most}", bytes_text(num_bytes)])
    widths = [max(len(line[place]) for line in lines) for place in range(4)]
    left = [[cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)] for line in lines]
    figures = [[cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)] for line in lines]
    table = "\n".join("  ".join(texts + numbers) for texts, numbers in zip(left, figures, strict=True))
    return "\n".join([table, *_never_received(trace)])


def _never_received(trace: Trace, most: int = 3) -> list[str]:
    """A line for each of the first messages that were sent but not received, because the run failed before that."""
    received = set(trace.select(kind="receive").column("message").tolist())
    lost = [event for event in trace.select(kind="send").events if event.message not in received]
    lines = [
        f"  {event.op} from rank {event.rank} to rank {event.peer}, {bytes_text(event.bytes)}"
        f"{f' at {event.where}' if event.where else ''}"
        for event in lost[:most]
    ]
    if len(lost) > most:
        lines.append(f"  and {len(lost) - most} more")
    return ["", "of these, never received:", *lines] if lost else []


def _shares(trace: Trace) -> str:
    """How long the run took, and for how much of that time the ranks were idle."""
    idle = trace.idle_share()
    took = _time(trace, trace.makespan)
    if not np.any(trace.busy()):
        return f"takes {took}; computing is not counted: choose a cluster, such as h100, to model it"
    least, most = float(idle.min()), float(idle.max())
    share = f"{least:.0%}" if f"{least:.0%}" == f"{most:.0%}" else f"{least:.0%} to {most:.0%}"
    return f"takes {took}; ranks are idle (not computing) for {share} of it"


def _longest_waits(trace: Trace, count: int) -> str:
    """The longest waits; each line of the program appears once."""
    names = kinds(trace)
    longest: dict[tuple[str, str, str], list[Event]] = {}
    for wait in trace.select(kind="wait").events:
        longest.setdefault((wait.op, names.get(wait.axis or "", ""), wait.where), []).append(wait)
    worst = sorted(
        ((max(waits, key=lambda wait: wait.duration), waits) for waits in longest.values()),
        key=lambda pair: -pair[0].duration,
    )
    worst = [(wait, waits) for wait, waits in worst if wait.duration > 0]
    lines = []
    for wait, waits in worst[:count]:
        num_ranks = len({other.rank for other in waits})
        at = f" at {wait.where}" if wait.where else ""
        others = f"; {num_ranks} ranks wait there" if num_ranks > 1 else ""
        lines.append(f"  rank {wait.rank}: {_time(trace, wait.duration)} in {wait.op} over {wait.axis}{at}{others}")
    return "longest waits:\n" + "\n".join(lines) if worst else ""


def _time(trace: Trace, time: float) -> str:
    if trace.unit == "s":
        return time_text(time, "s")
    return f"{plain(time)} {trace.unit.removesuffix('s') if time == 1 else trace.unit}"
