"""The picture of `experts`: rows sent between ranks, what each expert computes, and which ranks wait.

From left to right: each rank's tokens; ribbons for the rows sent to each rank, with widths in proportion to rows; a bar
for each expert, with a length in proportion to rows; and the time of each rank. A layer of L levels has 2 L + 1 steps
of the playhead: the exchanges, the experts, and the exchanges back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from tplab.units import bytes_text, count_text, counted, time_text
from tplab.widgets.mixture.reading import Layer, Level
from tplab.widgets.paper.legend import Key
from tplab.widgets.paper.palette import DIM, INK, LINE, SOFT, WORK, hue, mix
from tplab.widgets.paper.scene import Rows, Scene

WAITS = mix(DIM, 0.5)
LEGEND = (
    Key("rows, in the colour of the rank whose tokens they are", mix(hue(0), 0.55)),
    Key("rows that stay where they are", mix(hue(0), 0.13), mix(hue(0), 0.55)),
    Key("an equal share", edge=INK, sign="dashes"),
    Key("sending", mix(WORK, 0.42)),
    Key("computing", WORK),
    Key("waiting for other ranks", SOFT, WAITS, "hatch"),
)
WIDE, NARROW = 900.0, 430.0
_TOP, _GAP, _BLOCK, _BOTTOM = 36.0, 14.0, 11.0, 22.0
_SAMPLES = np.linspace(0, 1, 13)


@dataclass(frozen=True)
class Place:
    """The layout, in pixels: the left sides of tokens, ribbons, experts and times, and the rows of ranks."""

    width: float
    ranks: int
    here: int

    @property
    def is_wide(self) -> bool:
        return self.width == WIDE

    @property
    def label(self) -> float:
        return 52.0 if self.is_wide else 22.0

    @property
    def experts(self) -> float:
        return self.label + (330.0 if self.is_wide else 150.0)

    @property
    def times(self) -> float:
        return self.width - (270.0 if self.is_wide else 130.0)

    @property
    def expert(self) -> float:
        """The height of an expert."""
        return float(np.clip(380 / (self.ranks * self.here), 5, 18))

    @property
    def rank(self) -> float:
        return max(self.here * self.expert, 22.0)

    @property
    def height(self) -> float:
        return _TOP + self.ranks * (self.rank + _GAP) + _BOTTOM

    def top(self, rank: int) -> float:
        return _TOP + rank * (self.rank + _GAP)


def draw(layers: Sequence[Layer], unit: str, width: float = WIDE) -> Scene:
    first = layers[0]
    place = Place(width, len(first.ranks), first.here)
    sheet = Scene(width, place.height)
    sheet.text(0, 12, "tokens of", size=10.5, fill=DIM, anchor="lm")
    for x, what, of in ((place.experts + 22, "rows", " of each expert"), (place.times, "time", " of each rank")):
        sheet.text(x, 12, what + of * place.is_wide, size=10.5, fill=DIM, anchor="lm")
    nodes = first.nodes
    for number, rank in enumerate(first.ranks):
        middle = place.top(number) + place.rank / 2
        sheet.text(0, middle, f"rank {rank}" if place.is_wide else str(rank), size=11, bold=True, anchor="lm")
        if number and nodes[number] != nodes[number - 1]:
            sheet.line([(0, place.top(number) - _GAP / 2), (place.width - 4, place.top(number) - _GAP / 2)], LINE, 1)
        if len(first.levels) > 1 and place.is_wide and nodes.index(nodes[number]) == number:
            name = f"{first.levels[0].axis} {nodes[number]}"
            sheet.text(0, middle + 13, name, size=9, fill=DIM, anchor="lm")
    most, slowest, step = max(int(layer.loads.sum(0).max()) for layer in layers), _slowest(layers), 0
    for number, layer in enumerate(layers):
        whole = (step if number else -inf, step + layer.num_steps if number + 1 < len(layers) else inf)
        _Drawing(sheet, place, layer, whole, step, unit).draw(most, slowest)
        step += layer.num_steps
    return sheet


def _slowest(layers: Sequence[Layer]) -> float:
    return max(spent.end - spent.begin for layer in layers for spent in layer.spent)


@dataclass(frozen=True)
class _Drawing:
    """The drawing of one layer, which is visible during `whole` and begins at a step."""

    sheet: Scene
    place: Place
    layer: Layer
    whole: tuple[float, float]
    step: int
    unit: str

    def draw(self, most: int, slowest: float) -> None:
        count = len(self.layer.levels)
        edges = np.linspace(self.place.label, self.place.experts, count + 1).tolist()
        tallest = max(int(max(level.pairs.sum(0).max(), level.pairs.sum(1).max())) for level in self.layer.levels)
        per_row = self.place.rank / max(tallest, 1)
        for number, level in enumerate(self.layer.levels):
            self._exchange(level, number, edges[number], edges[number + 1], per_row)
        self._experts(most)
        self._times(slowest)

    def _exchange(self, level: Level, number: int, left: float, right: float, per_row: float) -> None:
        """Ribbons from the ranks' blocks on the left to those on the right, and rows that move along them."""
        sheet, (begin, end), there = self.sheet, self.whole, self.step + number
        back = self.step + self.layer.num_steps - 1 - number
        left, right = left + 2, right - 4 - _BLOCK
        for source, target in zip(*level.pairs.nonzero()):
            stays = source == target
            above = [level.pairs[source, :target].sum(), level.pairs[:source, target].sum()]
            size = int(level.pairs[source, target]) * per_row
            y, to = (self.place.top(rank) + float(n) * per_row for rank, n in zip((int(source), int(target)), above))
            with sheet.during(begin, end), sheet.about(self._about_rows(level, int(source), int(target))):
                sheet.box(left, y, _BLOCK, max(size, 1))
                sheet.box(right, to, _BLOCK, max(size, 1))
            for origin, rows in self.layer.origins(number, int(source), int(target)):
                self._band(origin, rows * per_row, (left, right), (y, to), (there, back), stays)
                y, to = y + rows * per_row, to + rows * per_row
        with sheet.during(begin, end):
            name = f"{'along ' * self.place.is_wide}{level.axis}"
            if len(self.layer.levels) == 1:
                name = f"dispatch{f' along {level.axis}' * self.place.is_wide}"
            sheet.text((left + right) / 2 + 4, 12, name, size=10.5, fill=DIM)
            for rank in self.layer.ranks if number and self.place.is_wide else ():  # the ranks that pass rows on
                top = self.place.top(self.layer.ranks.index(rank))
                sheet.text(left + 4, top - 6, f"rank {rank}", size=8.5, fill=DIM)

    def _band(
        self, origin: int, size: float, sides: tuple[float, float], tops: tuple[float, float], steps: tuple[int, int],
        stays: bool,
    ) -> None:  # fmt: skip
        """One rank's rows between two blocks, from `tops[0]` to `tops[1]`: their path, and the rows moving along it."""
        sheet, (begin, end), (there, back), (left, right), (y, to) = self.sheet, self.whole, steps, sides, tops
        colour = hue(origin) if origin >= 0 else DIM
        xs = left + _BLOCK + (right - left - _BLOCK) * _SAMPLES
        ys = y + (to - y) * (3 * _SAMPLES**2 - 2 * _SAMPLES**3)
        edge = list(zip(xs.tolist(), ys.tolist()))
        ribbon = [*edge, *[(x, down + size) for x, down in reversed(edge)]]
        looks = ((begin, there, 0.13), (there, there + 1, 0.55), (there + 1, back, 0.26), (back, back + 1, 0.55),
                 (back + 1, end, 0.26))  # fmt: skip
        for first, last, share in looks:
            if first < last:
                with sheet.during(first, last):
                    sheet.area(ribbon, mix(colour, 0.13 if stays else share))
        third = (right - left - _BLOCK) / 3
        flow = [(left + _BLOCK, y), (left + _BLOCK + third, y), (right - third, to), (right, to)]
        for first, way in () if stays else ((there, flow), (back, flow[::-1])):
            with sheet.during(first, first + 1 - 1e-4), sheet.along([length for point in way for length in point]):
                sheet.box(-4, 0, 8, max(size, 1.5), fill=colour, radius=2)
        with sheet.during(begin, end):
            light = mix(colour, 0.13 if stays else 0.55)
            sheet.box(left, y, _BLOCK, max(size, 1), fill=light if stays else colour, edge=colour, line=0.5)
            sheet.box(right, to, _BLOCK, max(size, 1), fill=light, edge=colour, line=0.5)

    def _about_rows(self, level: Level, source: int, target: int) -> Rows:
        layer, rows = self.layer, int(level.pairs[source, target])
        what = "slot" if level.is_padded else "row"
        leave = int(level.pairs[source].sum() - level.pairs[source, source])
        if source == target:
            stay = f"{counted(rows, what)} stay{'s' * (rows == 1)} on rank {layer.ranks[source]}, along {level.axis}"
            return [("", stay), ("sent", "nothing")]
        each = level.there[source].bytes // leave
        said = [
            ("", f"rank {layer.ranks[source]} to rank {layer.ranks[target]}, along {level.axis}"),
            ("sent", f"{counted(rows, what)} of {each:,} B: {rows * each:,} B"),
            ("back", "as many"),
        ]
        return [*said, ("room", "in a slot there may be a row")] if level.is_padded else said

    def _experts(self, most: int) -> None:
        """A bar for each expert, with a segment for the rows of each rank's tokens."""
        sheet, place, layer, (begin, end) = self.sheet, self.place, self.layer, self.whole
        left, step = place.experts + 22, self.step + len(layer.levels)
        per_row = (place.times - left - 42) / max(most, 1)
        longest = max(spent.computing for spent in layer.spent) or 1
        with sheet.during(begin, end):
            share = left + layer.loads.sum() / layer.loads.shape[1] * per_row
            for y in np.arange(_TOP - 4, place.height - _BOTTOM, 7).tolist():
                sheet.line([(share, y), (share, y + 4)], INK, 1)
        for expert, loads in enumerate(layer.loads.T.tolist()):
            rank, total = expert // layer.here, sum(loads)
            y = place.top(rank) + expert % layer.here * place.expert
            first = layer.loads[:, rank * layer.here : expert + 1].sum() / max(layer.of_ranks[rank], 1)
            done = step + max(0.02, first * layer.spent[rank].computing / longest) - 1e-4
            with sheet.during(begin, end):
                if place.expert > 9:
                    sheet.text(left - 5, y + place.expert / 2, f"E{expert}", size=9, fill=DIM, anchor="rm")
                with sheet.about(self._about_expert(expert)):
                    sheet.box(left, y, place.times - left - 8, place.expert)
            x = left
            with sheet.during(done, end):
                if place.expert > 9:
                    at = place.times - 12, y + place.expert / 2
                    sheet.text(*at, f"{total}", size=9.5, fill=INK if total else DIM, anchor="rm")
                for source, rows in enumerate(loads):
                    if rows:
                        colour = hue(source)
                        box = (x, y + 1, rows * per_row, place.expert - 2)
                        sheet.box(*box, fill=mix(colour, 0.7), edge=mix(colour, 0.55), line=0.6)
                    x += rows * per_row

    def _about_expert(self, expert: int) -> Rows:
        layer, loads = self.layer, self.layer.loads[:, expert].tolist()
        total, whole = sum(loads), int(layer.loads.sum())
        said = [
            ("", f"expert {expert}, on rank {layer.ranks[expert // layer.here]}"),
            ("computes", f"{counted(total, 'row')} of {whole:,}; an equal share is {whole / layer.loads.shape[1]:g}"),
        ]
        for source, rows in enumerate(loads):
            if rows:
                of = ", ".join(map(str, layer.tokens[source][expert][:6])) if layer.tokens else ""
                tokens = f": its token{'s' * (rows > 1)} {of}{', ...' * (rows > 6)}" if of else ""
                said.append(("from", f"rank {layer.ranks[source]}, {counted(rows, 'row')}{tokens}"))
        return said

    def _times(self, slowest: float) -> None:
        """One bar for each rank: dispatch, its experts, waiting, and combine."""
        sheet, place, layer, (begin, end) = self.sheet, self.place, self.layer, self.whole
        per_time = (place.width - place.times - 4) / slowest
        compute = self.step + len(layer.levels)
        height = min(place.rank, 22)
        for number, spent in enumerate(layer.spent):
            y, left = place.top(number) + (place.rank - height) / 2, place.times
            pieces = (
                (spent.begin, spent.arrived, compute, "send"),
                (spent.arrived, spent.computed, compute + 1, "work"),
                (spent.computed, spent.met, compute + 1, "wait"),
                (spent.met, spent.end, self.step + layer.num_steps, "send"),
            )
            with sheet.during(begin, end):
                sheet.box(left, y, per_time * (spent.end - spent.begin), height, fill=SOFT)
            for first, last, seen, kind in pieces:
                x, size = left + per_time * (first - spent.begin), per_time * (last - first)
                with sheet.during(seen - 1e-4, end):
                    if kind == "wait":
                        sheet.hatch(x, y, size, height, WAITS)
                    else:
                        sheet.box(x, y, size, height, fill=WORK if kind == "work" else mix(WORK, 0.42))
            with sheet.during(begin, end), sheet.about(self._about_times(number)):
                sheet.box(left, y, place.width - left, height)
        with sheet.during(begin, end):
            bottom, all_of_it = place.height - _BOTTOM + 2, max(spent.end - spent.begin for spent in layer.spent)
            sheet.line([(place.times, bottom), (place.width - 4, bottom)], LINE, 1)
            sheet.text(place.times, bottom + 11, "0", size=9.5, fill=DIM, anchor="lm")
            at = place.times + per_time * all_of_it
            sheet.text(at, bottom + 11, self._time(all_of_it), size=9.5, fill=DIM, anchor="rm")

    def _about_times(self, number: int) -> Rows:
        layer, spent = self.layer, self.layer.spent[number]
        sent = sum(level.there[number].bytes for level in layer.levels)
        beside = sum(event.bytes for level in layer.levels for event in level.beside[number])
        back = sum(level.back[number].bytes for level in layer.levels)
        return [
            ("", f"rank {layer.ranks[number]}"),
            ("dispatch", f"{self._time(spent.arrived - spent.begin)}: sends {bytes_text(sent)} of rows,"
                         f" and {bytes_text(beside)} that say what they are for"),
            ("computes", f"{counted(int(layer.of_ranks[number]), 'row')}, {count_text(layer.flops[number])} FLOPs, in"
                         f" {self._time(spent.computing)}"),
            ("waits", self._time(spent.waits)),
            ("combine", f"{self._time(spent.end - spent.met)}: sends {bytes_text(back)}"),
        ]  # fmt: skip

    def _time(self, time: float) -> str:
        return time_text(time, self.unit)
