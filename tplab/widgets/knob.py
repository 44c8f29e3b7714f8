"""`knob(...)`: one control, and bars that change with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import traitlets

from tplab.units import bytes_text, plain, time_text
from tplab.widgets.paper.card import Card, script
from tplab.widgets.paper.legend import Key
from tplab.widgets.paper.measured import check_measured, draw_diamond
from tplab.widgets.paper.palette import ACCENT, DIM, INK, LINE, SOFT, hue, mix
from tplab.widgets.paper.scene import Scene, packed
from tplab.widgets.paper.shown import check_is
from tplab.widgets.paper.still import still
from tplab.widgets.paper.wire import pack

WIDTH, NARROW, ROW, HEIGHT = 880, 420, 34, 24
LEAST = 10
"""If the longest bar of a setting is this many times as long as that of another, each has its own scale."""
MANY = 4
"""The most measured rows that the sentence lists; more are only counted."""


WAITS = ("waiting", "idle")
"""The names of parts that are hatched, because no rank does anything."""


@dataclass(frozen=True)
class Row:
    """One bar.

    label      what the bar is for: "4 ranks"
    parts      its parts, in order: {"computing": seconds, "all_reduce": seconds}
    note       the text after its total: "2.5 x as fast"
    measured   a published measurement of the whole bar, in the unit of its parts: a mark on its row
    """

    label: str
    parts: Mapping[str, float]
    note: str = ""
    measured: float | None = None

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def reach(self) -> float:
        """The end of its bar or its mark, whichever is further right."""
        return max(self.total, self.measured or 0.0)


@dataclass(frozen=True)
class Bars:
    """The bars of one setting of the control, on one scale, and a sentence that describes them."""

    rows: Sequence[Row]
    sentence: str


class Knob(Card):
    """The card of `knob`. `index` is that of the chosen option; `option` is the option itself."""

    _esm = script("knob")
    kept = ("index",)
    content = traitlets.Dict().tag(sync=True)
    scene = traitlets.Bytes().tag(sync=True)
    index = traitlets.Int(0).tag(sync=True)

    def __init__(
        self,
        title: str,
        control: str,
        options: Mapping[Any, Bars],
        start: Any,
        about: str,
        unit: str,
        by: str = "",
        one_scale: bool | None = None,
    ):
        self.title, self.control, self.about, self.unit, self.options = title, control, about, unit, dict(options)
        self.by = by
        self.reach = [max(row.reach for row in bars.rows) for bars in self.options.values()]
        some = [reach for reach in self.reach if reach] or [1.0]
        self.one_scale = max(some) < LEAST * min(some) if one_scale is None else one_scale
        if not self.one_scale:
            self.about = "; ".join(filter(None, [about, "each setting has a scale of its own"]))
        if start not in self.options:
            raise ValueError(f"start is {start!r}; it must be one of the options, {', '.join(map(repr, self.options))}")
        listed = ", ".join(map(option_text, self.options))
        shown = f"{self.options[start].sentence} {self.said(self.options[start])}".strip()
        self.sentence = f"{title}. {control}: {listed}. At {option_text(start)}: {shown}"
        names = list(dict.fromkeys(name for bars in self.options.values() for row in bars.rows for name in row.parts))
        grey = ("comput", *WAITS)  # as on a timeline, and in the picture of experts
        hued = [name for name in names if not name.startswith(grey)]
        self.colours = {name: hued.index(name) if name in hued else -1 for name in names}
        self.bars = self._draw(WIDTH)
        self.bars.narrow = self._draw(NARROW)
        scene = pack(*packed([self.bars], self._legend()))
        super().__init__(content=self._content(), scene=scene, index=list(self.options).index(start))

    @property
    def option(self) -> Any:
        return list(self.options)[self.index]

    @traitlets.validate("index")
    def _check_index(self, proposal: Any) -> int:
        if not 0 <= proposal["value"] < len(self.options):
            many = len(self.options)
            raise traitlets.TraitError(f"index is {proposal['value']}; give one from 0 to {many - 1}")
        return proposal["value"]

    def _content(self) -> dict[str, Any]:
        """The texts for every option, so that turning the knob needs no kernel."""
        return {
            "title": self.title,
            "about": self.about,
            "control": self.control,
            "options": [
                {
                    "name": option_text(option),
                    "sentence": f"{bars.sentence} {self.said(bars)}".strip(),
                    "label": "; ".join(f"{row.label}: {self.text(row.total)} {self._behind(row)}" for row in bars.rows),
                }
                for option, bars in self.options.items()
            ],
        }

    def _legend(self) -> list[Key]:
        keys = [
            Key(name, SOFT, mix(DIM, 0.5), "hatch") if name.startswith(WAITS) else Key(name, mix(tint, 0.3), tint)
            for name, tint in ((name, self._tint(name)) for name in self.colours)
        ]
        is_measured = any(row.measured is not None for bars in self.options.values() for row in bars.rows)
        return [*keys, Key(f"measured by {self.by}", sign="diamond")] if is_measured else keys

    def _tint(self, part: str) -> str:
        return hue(self.colours[part])

    def text(self, amount: float) -> str:
        if self.unit == "B":
            return bytes_text(amount)
        if self.unit in ("s", "steps"):
            return time_text(amount, self.unit)
        return f"{f'{amount:,.0f}' if amount == int(amount) else plain(amount)} {self.unit}".strip()

    def said(self, bars: Bars) -> str:
        """ "Measured by the NCCL team: 2.4 ms for 4 ranks.", or nothing if nothing was measured."""
        values = [f"{self.text(row.measured)} for {row.label}" for row in bars.rows if row.measured is not None]
        if len(values) > MANY:
            return f"Measured by {self.by}: the marks on {len(values)} rows."
        return f"Measured by {self.by}: {'; '.join(values)}." if values else ""

    def _behind(self, row: Row) -> str:
        """The text after a bar's total."""
        measured = "" if row.measured is None else f"measured {self.text(row.measured)}"
        return " · ".join(filter(None, [row.note, measured]))

    def picture(self) -> bytes:
        sentence = self._content()["options"][self.index]["sentence"]
        words = {"about": self.about, "legend": self._legend(), "gap": 8}
        return still(self.title, sentence, [self._track(), self.bars], self.index, **words)

    def _track(self) -> Scene:
        """The control in a still picture: the position of the knob among all others."""
        sheet, names, wide = Scene(WIDTH, 38), [*map(option_text, self.options)], 200
        x = sheet.text(0, 12, f"{self.control}: ", size=11.5, fill=DIM, anchor="lm") + 6
        x += sheet.text(x, 12, names[self.index], size=11.5, bold=True, anchor="lm") + 16
        at = x + wide * self.index / max(len(names) - 1, 1)
        sheet.line([(x, 12), (x + wide, 12)], LINE, 4)
        sheet.line([(x, 12), (at, 12)], ACCENT, 4)
        sheet.box(at - 6, 6, 12, 12, fill=ACCENT, radius=6)
        sheet.text(x - 2, 26, names[0], size=9.5, fill=DIM, anchor="lm")
        sheet.text(x + wide + 2, 26, names[-1] if len(names) > 1 else "", size=9.5, fill=DIM, anchor="rm")
        return sheet

    def _draw(self, wide: float) -> Scene:
        """The bars of all options. The position of the playhead is the option's index."""
        every = [row for bars in self.options.values() for row in bars.rows]
        sheet = Scene(wide, ROW * max(len(bars.rows) for bars in self.options.values()))
        left = 12 + max(sheet.width_of(row.label) for row in every)
        behind = 12 + max(sheet.width_of(f"{self.text(row.total)}   {self._behind(row)}", bold=True) for row in every)
        for index, bars in enumerate(self.options.values()):
            scale = max(wide - left - behind, 40) / ((max(self.reach) if self.one_scale else self.reach[index]) or 1.0)
            with sheet.during(index - 0.5, index + 0.5):
                for place, row in enumerate(bars.rows):
                    self._row(sheet, row, left, ROW * place + 3, scale)
        return sheet

    def _row(self, sheet: Scene, row: Row, left: float, y: float, scale: float) -> None:
        middle, x = y + HEIGHT / 2, left
        sheet.text(left - 10, middle, row.label, anchor="rm")
        texts = [(name, self.text(amount)) for name, amount in row.parts.items() if amount > 0]
        with sheet.about([("", row.label), *texts, ("in total", self.text(row.total))]):
            sheet.box(left, y, max(scale * row.total, 1), HEIGHT)
        for name, text in texts:
            width = scale * row.parts[name]
            if name.startswith(WAITS):
                sheet.box(x, y, max(width - 1, 1), HEIGHT, fill=SOFT, edge=mix(DIM, 0.5), radius=3)
                sheet.hatch(x, y, max(width - 1, 1), HEIGHT, mix(DIM, 0.5))
            else:
                edge = self._tint(name)
                sheet.box(x, y, max(width - 1, 1), HEIGHT, fill=mix(edge, 0.3), edge=edge, radius=3)
            says = (f"{name} {text}", text, name) if len(texts) > 1 else (name,)  # otherwise the total has it
            fitting = [said for said in says if sheet.width_of(said, 10) + 8 < width]
            if fitting and name.startswith(WAITS):  # no hatching behind letters
                beside = sheet.width_of(fitting[0], 10) + 6
                sheet.box(x + (width - beside) / 2, y + 4, beside, HEIGHT - 8, fill=SOFT)
            sheet.text(x + width / 2, middle, next(iter(fitting), ""), size=10)
            x += width
        if row.measured is not None:
            at, rows = left + scale * row.measured, [("", row.label), ("measured", self.text(row.measured))]
            if at > x:
                sheet.line([(x, middle), (at, middle)], DIM, 1)
            sheet.line([(at, y - 2), (at, y + HEIGHT)], INK, 1.6)
            draw_diamond(sheet, at, y + HEIGHT + 1)
            with sheet.about([*rows, ("by", self.by), ("bar", self.text(row.total))]):
                sheet.box(at - 8, y, 16, ROW - 2)
            x = max(x, at)
        end = x + 8 + sheet.text(x + 8, middle, self.text(row.total), bold=True, anchor="lm")
        sheet.text(end + 7, middle, self._behind(row), fill=DIM, anchor="lm")


def knob(
    title: str,
    control: str,
    options: Mapping[Any, Bars],
    *,
    start: Any = None,
    about: str = "",
    unit: str = "s",
    by: str = "",
    one_scale: bool | None = None,
) -> Knob:
    """Show the bars of one option, and a slider that goes through all options.

    options   the control's options, in order -> the bars to show for each
    start     the option to begin with; the first, if None
    unit      the unit of the bars: "s", "steps", "B", or your own word
    by        who measured the rows' `measured` values, for legend, tooltip and sentence
    one_scale   whether the bars of all settings have the same scale; by default, if their longest bars are within a
                factor of ten

    Everything is computed in advance, so turning the knob needs no kernel.
    """
    for option, bars in options.items():
        check_is(f"the option {option!r}", bars, Bars)
    if not options or any(not bars.rows for bars in options.values()):
        raise ValueError("knob needs an option at least, and a bar at least for each")
    for row in (row for bars in options.values() for row in bars.rows):
        for name, amount in row.parts.items():
            if not 0 <= amount < math.inf:
                raise ValueError(f"{row.label!r} has {amount} for {name!r}, and a bar cannot be as long as that")
        if row.measured is not None:
            check_measured(row.label, row.measured, by)
    return Knob(title, control, options, next(iter(options)) if start is None else start, about, unit, by, one_scale)


def option_text(option: Any) -> str:
    return f"{option:,}" if isinstance(option, int) else str(option)
