"""`knob(...)`: one control, and bars that change with it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import traitlets

from tplab.units import bytes_text, plain, time_text
from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.card import Card, script, style
from tplab.widgets.paper.measured import check_measured
from tplab.widgets.paper.palette import ACCENT, DIM, HUES, INK, LINE, WORK, mix
from tplab.widgets.paper.pen import Pen, text_width

MARGIN, LINE_HEIGHT, WIDTH = 18, 34, 720
MANY = 4
"""More measured rows than these are counted in the sentence, and not listed."""


@dataclass(frozen=True)
class Row:
    """One bar.

    label      what the bar is for: "4 ranks"
    parts      its parts, in order: {"computing": seconds, "all_reduce": seconds}
    note       the text after its total: "2.5 x as fast"
    measured   what others have measured for the whole bar, in the unit of its parts: a mark on its row
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
        """How far its bar or its mark goes."""
        return max(self.total, self.measured or 0.0)


@dataclass(frozen=True)
class Bars:
    """What one setting of the control shows: bars on one scale, and a sentence that says what there is to see."""

    rows: Sequence[Row]
    sentence: str


class Knob(Card):
    """The card that `knob` makes. `index` says which option is chosen; `option` is that option."""

    _esm = script("shell", "knob")
    _css = style()
    content = traitlets.Dict().tag(sync=True)
    index = traitlets.Int(0).tag(sync=True)

    def __init__(
        self, title: str, control: str, options: Mapping[Any, Bars], start: Any, about: str, unit: str, by: str = ""
    ):
        self.title, self.control, self.about, self.unit, self.options = title, control, about, unit, dict(options)
        self.by = by
        if start not in self.options:
            raise ValueError(f"start is {start!r}; it must be one of the options, {', '.join(map(repr, self.options))}")
        listed = ", ".join(map(option_text, self.options))
        shown = f"{self.options[start].sentence} {self.said(self.options[start])}".strip()
        self.sentence = f"{title}. {control}: {listed}. At {option_text(start)}: {shown}"
        names = list(dict.fromkeys(name for bars in self.options.values() for row in bars.rows for name in row.parts))
        hued = [name for name in names if not name.startswith("comput")]  # computing is grey, as on a timeline
        self.colours = {name: hued.index(name) if name in hued else -1 for name in names}
        super().__init__(content=self._content(), index=list(self.options).index(start))

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
        """Everything that the browser draws, for every option, so that turning the knob needs no kernel."""
        return {
            "title": self.title,
            "about": self.about,
            "control": self.control,
            "colours": self.colours,
            "by": self.by
            if any(row.measured is not None for bars in self.options.values() for row in bars.rows)
            else "",
            "options": [
                {
                    "name": option_text(option),
                    "sentence": f"{bars.sentence} {self.said(bars)}".strip(),
                    "rows": [
                        {
                            "label": row.label,
                            "parts": [[name, share, self.text(row.parts[name])] for name, share in _shares(bars, row)],
                            "total": self.text(row.total),
                            "note": row.note,
                            "measured": self._mark(bars, row),
                        }
                        for row in bars.rows
                    ],
                }
                for option, bars in self.options.items()
            ],
        }

    def text(self, amount: float) -> str:
        if self.unit == "B":
            return bytes_text(amount)
        if self.unit in ("s", "steps"):
            return time_text(amount, self.unit)
        return f"{f'{amount:,.0f}' if amount == int(amount) else plain(amount)} {self.unit}".strip()

    def said(self, bars: Bars) -> str:
        """ "Measured by the NCCL team: 2.4 ms on 4 ranks.", or nothing if nothing was measured."""
        values = [f"{row.label} {self.text(row.measured)}" for row in bars.rows if row.measured is not None]
        if len(values) > MANY:
            return f"Measured by {self.by}: the marks on {len(values)} rows."
        return f"Measured by {self.by}: {', '.join(values)}." if values else ""

    def _mark(self, bars: Bars, row: Row) -> list[Any] | None:
        """Where a measured value is, as a share of the longest row, and its text."""
        return None if row.measured is None else [row.measured / _longest(bars), self.text(row.measured)]

    def _behind(self, row: Row) -> str:
        """The text after a bar's total."""
        measured = "" if row.measured is None else f"measured {self.text(row.measured)}"
        return " · ".join(filter(None, [row.note, measured]))

    def picture(self) -> bytes:
        bars = self.options[self.option]
        sentence = textwrap.wrap(f"{bars.sentence} {self.said(bars)}".strip(), int((WIDTH - 2 * MARGIN) / 6.8))
        pen = Pen(WIDTH, 2 * MARGIN + 89 + LINE_HEIGHT * len(bars.rows) + 17 * len(sentence))
        pen.box(0.5, 0.5, pen.width - 1, pen.height - 1, edge=LINE, radius=12)
        x = MARGIN + pen.text(MARGIN, 26, self.title, size=14, bold=True, anchor="lm") + 10
        pen.text(x, 26.5, self.about, size=11, fill=DIM, anchor="lm")
        x = MARGIN + pen.text(MARGIN, 54, f"{self.control}: ", size=11.5, fill=DIM, anchor="lm")
        self._track(pen, x + pen.text(x, 54, option_text(self.option), size=11.5, bold=True, anchor="lm") + 16, 54)
        label = max(text_width(row.label, 11) for row in bars.rows) + 12
        behind = max(text_width(f"{self.text(row.total)}  {self._behind(row)}", 11) for row in bars.rows) + 12
        room = WIDTH - 2 * MARGIN - label - behind
        y = 80
        x = MARGIN + label
        for name, colour in self.colours.items():
            tint = WORK if colour < 0 else HUES[colour % 8]
            pen.box(x, y + 4, 16, 10, fill=mix(tint, 0.3), edge=tint, radius=3)
            x += 22 + pen.text(x + 22, y + 9, name, size=10.5, fill=DIM, anchor="lm") + 18
        if any(row.measured is not None for row in bars.rows):
            pen.diamond(x + 8, y + 9)
            text = f"measured by {self.by}"
            if text_width(text, 10.5) > WIDTH - MARGIN - x - 22:
                text = "measured"  # the sentence says by whom
            pen.text(x + 22, y + 9, text, size=10.5, fill=DIM, anchor="lm")
        y += 24
        for row in bars.rows:
            pen.text(MARGIN + label - 10, y + 12, row.label, size=11, anchor="rm")
            x = MARGIN + label
            for name, share in _shares(bars, row):
                width, colour = share * room, self.colours[name]
                tint = WORK if colour < 0 else HUES[colour % 8]
                pen.box(x, y, max(width - 1, 1), 24, fill=mix(tint, 0.3), edge=tint, radius=3)
                if text_width(name, 10) + 10 < width:
                    pen.text(x + width / 2, y + 12, name, size=10)
                x += width
            if row.measured is not None:
                at = MARGIN + label + room * row.measured / _longest(bars)
                if at > x:
                    pen.line([(x, y + 12), (at, y + 12)], DIM, 1)
                pen.line([(at, y - 2), (at, y + 24)], INK, 1.6)
                pen.diamond(at, y + 25)
                x = max(x, at)
            end = x + 8 + pen.text(x + 8, y + 12, self.text(row.total), size=11, bold=True, fill=INK, anchor="lm")
            pen.text(end + 7, y + 12, self._behind(row), size=11, fill=DIM, anchor="lm")
            y += LINE_HEIGHT
        for number, line in enumerate(sentence):
            pen.text(MARGIN, y + 14 + 17 * number, line, size=11.5, anchor="lm")
        return encode([pen.image()], [0])

    def _track(self, pen: Pen, x: float, y: float) -> None:
        last, width = max(len(self.options) - 1, 1), 200
        pen.line([(x, y), (x + width, y)], LINE, 4)
        pen.line([(x, y), (x + width * self.index / last, y)], ACCENT, 4)
        pen.disc(x + width * self.index / last, y, 6, fill=ACCENT)
        names = [*map(option_text, self.options)]
        if self.index > 0:
            pen.text(x - 2, y + 14, names[0], size=9.5, fill=DIM, anchor="lm")
        if self.index < last:
            pen.text(x + width + 2, y + 14, names[-1], size=9.5, fill=DIM, anchor="rm")


def knob(
    title: str,
    control: str,
    options: Mapping[Any, Bars],
    *,
    start: Any = None,
    about: str = "",
    unit: str = "s",
    by: str = "",
) -> Knob:
    """Show the bars of one option, and a slider that goes through all options.

    options   what the control can be set to, in order -> the bars to show for it
    start     the option to begin with; the first, if None
    unit      the unit of the bars: "s", "steps", "B", or a word of your own
    by        who has measured the values that rows have as `measured`; legend, tooltip and sentence say it

    Everything is computed in advance, so turning the knob needs no kernel.
    """
    if not options or any(not bars.rows for bars in options.values()):
        raise ValueError("knob needs an option at least, and a bar at least for each")
    for row in (row for bars in options.values() for row in bars.rows):
        if row.measured is not None:
            check_measured(row.label, row.measured, by)
    return Knob(title, control, options, next(iter(options)) if start is None else start, about, unit, by)


def option_text(option: Any) -> str:
    return f"{option:,}" if isinstance(option, int) else str(option)


def _shares(bars: Bars, row: Row) -> list[tuple[str, float]]:
    """The parts of a row as shares of the longest row."""
    return [(name, amount / _longest(bars)) for name, amount in row.parts.items() if amount > 0]


def _longest(bars: Bars) -> float:
    return max(row.reach for row in bars.rows) or 1.0
