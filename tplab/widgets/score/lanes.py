"""The timeline of a score: one lane for each rank, with its work above and its messages below; a scene over time.

Position 1 of the playhead shows the critical path.
"""

from __future__ import annotations

import math
import re

import numpy as np

from tplab.trace.critical_path import critical_rows
from tplab.units import bytes_text, plain, time_text
from tplab.widgets.paper.action import draw_action
from tplab.widgets.paper.lanes import TOP, Bar, draw_chain, draw_lane, lanes
from tplab.widgets.paper.letters import fitted
from tplab.widgets.paper.measured import Durations
from tplab.widgets.paper.palette import DIM, INK, mix
from tplab.widgets.paper.scene import Rows, Scene
from tplab.widgets.score import pipeline, words
from tplab.widgets.score.score import COLLECTIVE, COMPUTE, SEND, WAIT, Score

MEASURED = 17  # the height of what was measured
WIDTH = 900


def critical_bars(score: Score) -> list[int]:
    """The bars of the critical path, in order. A receive has no bar."""
    bar_of = {row: bar for bar, row in enumerate(score.bars["row"].tolist())}
    return [bar_of[row] for row in critical_rows(score.trace).tolist() if row in bar_of]


def draw(score: Score, width: float = WIDTH, by_kind: bool = False, measured: Durations | None = None) -> Scene:
    """by_kind    whether this is a timeline of its own: it says how busy ranks are, and collectives have the colours of
               their effect; otherwise each bar has the colour of what it carries
    measured   durations to draw below the lanes
    """
    measured, ranks = measured or Durations(), score.trace.mesh.size
    of = _Lanes(score, by_kind)
    begin, last = float(score.times[0]), max(float(score.times[-1]), float(score.times[0]) + 1e-12)
    end, has_busy = max(last, begin + measured.longest), by_kind and score.computes
    beside = "".join(f", {name} {text} measured by {measured.by}" for name, _, text in measured.rows)
    took = time_text(last - begin, score.trace.unit)
    label = f"timeline of {ranks} rank{'s' * (ranks > 1)}, {took} long{beside}"
    bottom = TOP + of.lane * ranks + MEASURED * len(measured.rows)
    sheet = lanes(width, bottom + 20, label, begin, end, 50 if has_busy else 8, ranks, score.trace.unit)
    for rank, share in enumerate(words.busy(score).tolist()):
        y = TOP + rank * of.lane
        if draw_lane(sheet, rank, rank, y, of.lane, of.lane - of.gap, last, of.work) and has_busy:
            text = f"{plain(round(100 * share))}%"
            sheet.text(width, y + (of.lane - 4) / 2, text, size=10.5, fill=DIM, anchor="rm")
    of.draw(sheet)
    critical = critical_bars(score) if by_kind else []
    if critical:
        with sheet.during(0.5), sheet.in_time():
            sheet.veil(begin, TOP, last - begin, of.lane * ranks)
            for bar in critical:
                of.bar(sheet, bar)
            draw_chain(sheet, [of.place(bar) for bar in critical])
    for place, (name, seconds, text) in enumerate(measured.rows):
        y = bottom - MEASURED * (len(measured.rows) - place) + 7
        sheet.text(0, y, fitted(name, 10.5, 50), size=10.5, fill=DIM, anchor="lm")
        rows = [("", name), ("measured", text), ("by", measured.by), ("whole trace", took)]
        with sheet.in_time(), sheet.about(rows):
            sheet.line([(begin, y), (begin + seconds, y)], INK, 1.4)
            sheet.box(begin, y - 7, end - begin, MEASURED)
            is_left = seconds > 0.8 * (end - begin)
            sheet.text(begin + seconds, y, "◆", size=14)
            sheet.text(begin + seconds, y, text, size=10.5, anchor="rm" if is_left else "lm",
                       shift=-10 if is_left else 10)  # fmt: skip
    sheet.axes.append(bottom)
    return sheet


class _Lanes:
    """Where the bars of a score are, and how they look."""

    def __init__(self, score: Score, by_kind: bool):
        self.score, self.by_kind, bars = score, by_kind, score.bars
        self.colours = score.colours(by_kind)
        self.kind, self.rank, self.start, self.end, self.item, self.op = (
            bars[name].tolist() for name in ("kind", "rank", "start", "end", "item", "op")
        )
        ranks = score.trace.mesh.size
        self.shown = [bar for bar, end in enumerate(self.end) if end > self.start[bar]]
        self.track, free, tracks = dict[int, int](), [list[float]() for _ in range(ranks)], 1
        for bar in self.shown:
            if self.kind[bar] not in (COMPUTE, WAIT):
                until = free[self.rank[bar]]
                track = next(
                    (at for at, time in enumerate(until) if time <= self.start[bar] + 1e-15), min(len(until), 2)
                )
                until[track : track + 1] = [self.end[bar]]
                self.track[bar], tracks = track, max(tracks, track + 1)
        size = next((size for most, size in ((4, 17), (8, 15), (16, 11), (32, 6)) if ranks <= most), 3)
        self.work = size if score.computes else 0
        talk = size * 1.5 / tracks if tracks > 1 else size * 0.8
        self.talk = max(2, math.floor(talk + 0.5)) if tracks > 1 or score.computes else size
        self.gap = 5 if size > 6 else 1
        self.lane = self.work + self.talk * tracks + self.gap

    def place(self, bar: int) -> Bar:
        """A wait has the background of its lane, where no bar covers it."""
        top, kind, start = TOP + self.rank[bar] * self.lane, self.kind[bar], self.start[bar]
        if kind == WAIT or (kind == COMPUTE and self.work):
            height = self.work or self.lane - self.gap
        else:
            top += self.work + self.track.get(bar, 0) * self.talk
            height = self.talk - (self.talk > 5)
        return start, top, self.end[bar] - start, height

    def draw(self, sheet: Scene) -> None:
        says = _Says(self.score)
        for bar in sorted(self.shown, key=lambda bar: self.kind[bar] != WAIT):
            with sheet.in_time(), sheet.about(says.rows(bar), key=bar):
                if self.kind[bar] == WAIT:
                    x, y, width, _ = self.place(bar)
                    sheet.box(x, y, width, self.lane - self.gap)
                else:
                    self.bar(sheet, bar)

    def bar(self, sheet: Scene, bar: int) -> None:
        (x, y, width, height), score = self.place(bar), self.score
        if score.actions[bar] >= 0:
            names = score.op_names[self.op[bar]].split("+")  # a pair: one above the other
            for place, name in enumerate(names):
                each = height / len(names)
                draw_action(sheet, pipeline.kind_of(name), name, x, y + place * each, width, each)
            return
        colour, is_work = self.colours[bar], self.kind[bar] == COMPUTE
        looks = {"fill": mix(colour, 0.55), "edge": colour} if is_work else {
            "fill": mix(colour, 0.24), "small": mix(colour, 0.7), "edge": colour}  # fmt: skip
        texts, size = self.texts(bar) if height >= 10 else [], 11 if height >= 14 else 10
        sheet.bar(x, y, width, height, texts, **looks, ink=INK, size=size, anchor="lm")

    def texts(self, bar: int) -> list[str]:
        """What may be written on a bar. A collective on a timeline has no letter: no table has a column for it."""
        score, op = self.score, self.score.op_names[self.op[bar]]
        is_plain = self.by_kind and self.kind[bar] == COLLECTIVE and not score.is_pipeline
        name = score.items[self.item[bar]].name if self.item[bar] >= 0 and not is_plain else ""
        if self.kind[bar] == SEND:
            return [f"send {name}", name]
        return [f"{op} {name}", op, name] if name else [op, re.sub("^(_|native_|scaled dot-product )", "", op)]


class _Says:
    """The tooltips of bars: what each is, then its time, size, partners and line in the program."""

    def __init__(self, score: Score):
        self.score, trace, bars = score, score.trace, score.bars
        rows = bars["row"]
        self.column = {name: column.tolist() for name, column in bars.items()}
        names = ("dtype", "shape", "types", "where", "axis", "reduction")
        self.codes = {name: [*map(trace.codes(name)[0].__getitem__, trace.codes(name)[1][rows])] for name in names}
        self.flops, (self.phases, self.phase) = trace.column("flops")[rows].tolist(), score.passes
        self.causes = dict[tuple[int, float], int]()  # what ends a wait of a rank at this time
        for bar in reversed(np.flatnonzero(np.isin(bars["kind"], (SEND, COLLECTIVE))).tolist()):
            of = "peer" if self.column["kind"][bar] == SEND else "rank"
            self.causes[self.column[of][bar], self.column["end"][bar]] = bar
        self.waits = [np.flatnonzero((bars["kind"] == WAIT) & (bars["rank"] == rank)) for rank in trace.mesh.ranks]

    def rows(self, bar: int) -> Rows:
        score, trace, column = self.score, self.score.trace, self.column
        kind, rank, start, end, sent = (column[name][bar] for name in ("kind", "rank", "start", "end", "bytes"))
        begin, whole = float(score.times[0]), float(score.times[-1] - score.times[0])
        when, until = (time_text(time - begin, trace.unit, whole) for time in (start, end))
        kinds, shape, item = self.codes["dtype"][bar], self.codes["shape"][bar], column["item"][bar]
        phase, axis = self.phases[self.phase[bar]], self.codes["axis"][bar] or ""
        origin = -1 if item < 0 or score.is_pipeline else score.items[item].origin
        of_group = ", ".join(map(str, score.groups[column["group"][bar]])) if kind == COLLECTIVE else ""
        return [
            *_row("", *self.title(bar, axis if {*axis.split(",")} <= {*trace.mesh.axis_names} else "")),
            ("when", f"{when} to {until}, {time_text(end - start, trace.unit)}"),
            ("tensor", f"{kinds} {list(shape)}".strip() if kinds or shape else ""),
            ("sends", f"{bytes_text(sent)}{' in total' * (kind == COLLECTIVE)}" if sent else ""),
            ("started on", f"rank {origin}" if origin >= 0 else ""),
            ("in", f"the {phase} pass" if phase and "backward" in self.phases else ""),
            ("FLOPs", f"{self.flops[bar]:,}" if self.flops[bar] else ""),
            ("between", f"ranks {of_group}" if kind == COLLECTIVE else ""),
            *_row("waits for", *(self.awaited(bar) if kind == WAIT else ("", ""))),
            *_row("meanwhile", *self.meanwhile(bar, rank)),
            ("types", self.codes["types"][bar]),
            ("written at", self.codes["where"][bar]),
        ]

    def title(self, bar: int, axis: str) -> tuple[str, ...]:
        """The parts of the heading: many bars have each of them."""
        kind, rank, item = (self.column[name][bar] for name in ("kind", "rank", "item"))
        op, how = self.score.op_names[self.column["op"][bar]], self.codes["reduction"][bar]
        if kind == WAIT:
            return f"rank {rank}", " waits", ""
        if kind == SEND:
            return f"{op}: rank {rank} sends ", self.carried(bar), f" to rank {self.column['peer'][bar]}"
        what = f", with {self.score.items[item].text}" if kind == COMPUTE and item >= 0 else ""
        over = f" over {axis}" if kind == COLLECTIVE and axis else ""
        return f"rank {rank}", f": {op}{f' ({how})' if how else ''}{over}", what

    def carried(self, bar: int) -> str:
        """The contents of a message."""
        flow, item = self.column["flow"][bar], self.column["item"][bar]
        return (
            ("", "activations of ", "gradients of ")[flow] + self.score.items[item].text if item >= 0 else "a message"
        )

    def awaited(self, bar: int) -> tuple[str, str]:
        """What a rank waits for: a message to it, or a collective with it, which ends when the wait does."""
        cause = self.causes.get((self.column["rank"][bar], self.column["end"][bar]), -1)
        op = self.score.op_names[self.column["op"][cause]] if cause >= 0 else ""
        if cause < 0 or self.column["kind"][cause] != SEND:
            return op, ""
        what = self.carried(cause) if self.column["item"][cause] >= 0 else op
        return what, f" from rank {self.column['rank'][cause]}"

    def meanwhile(self, bar: int, rank: int) -> tuple[str, str, str]:
        """The wait of the rank while this bar is in transit."""
        if self.column["kind"][bar] not in (SEND, COLLECTIVE):
            return "", "", ""
        bars, waits = self.score.bars, self.waits[rank]
        start, end = self.column["start"][bar], self.column["end"][bar]
        found = waits[(bars["start"][waits] < end) & (bars["end"][waits] > start)]
        if not len(found):
            return "", "", ""
        what, source = self.awaited(int(found[0]))
        return f"rank {rank} waits for ", what or "other ranks", source


def _row(what: str, *parts: str) -> Rows:
    return list(zip((what, *[None] * len(parts)), parts))
