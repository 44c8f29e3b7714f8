"""`tiles(layouts)`: shows which rank computes which scores of attention at which step of a ring, and what it skips."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tplab.mesh import Axis
from tplab.sequence import AttentionMask, TokenLayout
from tplab.trace.trace import Trace
from tplab.units import counted
from tplab.widgets.attention.panels import CHIP, STRIP, Panel, Panels, Place, mask_text, shown
from tplab.widgets.paper.card import Played
from tplab.widgets.paper.legend import Key
from tplab.widgets.paper.palette import ACCENT, DIM, INK, LINE, PAPER, SOFT, WHITE, hue, mix
from tplab.widgets.paper.scene import Scene
from tplab.widgets.paper.still import still
from tplab.widgets.score import payload
from tplab.widgets.score.score import score

SKIPPED = mix(DIM, 0.5)
LEGEND = (
    Key("this step, in the colour of the rank", hue(0)),
    Key("computed before", mix(hue(0), 0.26), mix(hue(0), 0.55)),
    Key("to come", PAPER, mix(hue(0), 0.55)),
    Key("skipped, idle", SOFT, SKIPPED, "hatch"),
)
AXES = "rows: queries, columns: keys, edges: their ranks"
_SOON = 1e-5


def draw(panel: Panel, place: Place) -> Scene:
    """Draw a panel for all positions of the playhead within a pass. The key of a bar is its step, from 1."""
    about = f"{100 * panel.efficiency:.1f}% of the time computing"
    sheet = Scene(place.width, place.height, f"{panel.layout.name}: {about}")
    x = sheet.text(0, 8.5, panel.layout.name, size=12, bold=True, anchor="lm") + 8
    sheet.text(x, 9, about, size=10.5, fill=DIM, anchor="lm")
    _owners(sheet, panel, place)
    _scores(sheet, panel, place)
    _bars(sheet, panel, place)
    return sheet


def _owners(sheet: Scene, panel: Panel, place: Place) -> None:
    """The edges of the grid: which rank has these queries, and these keys."""
    (x, y), cell = place.grid, place.cell
    for begin, end, rank in _runs(panel.owner):
        across, length = begin * cell, (end - begin) * cell - 1
        for box in ((x + across, y - STRIP, length, STRIP - 3), (x - STRIP, y + across, STRIP - 3, length)):
            sheet.box(*box, fill=mix(hue(rank), 0.26), edge=hue(rank), line=0.7)
            if length > 8:
                sheet.text(box[0] + box[2] / 2, box[1] + box[3] / 2, str(rank), size=8.5, bold=True)


def _scores(sheet: Scene, panel: Panel, place: Place) -> None:
    (x, y), cell, size = place.grid, place.cell, place.cell * panel.layout.num_tokens
    sheet.box(x, y, size, size, fill=PAPER, edge=LINE)
    for rank, step in np.argwhere(panel.load == 0).tolist():
        with sheet.during(step, step + 1):
            for query in panel.layout.positions[rank]:
                for begin, end, _ in _runs(panel.owner, panel.source(rank, step)):
                    sheet.hatch(x + begin * cell, y + query * cell, (end - begin) * cell, cell, SKIPPED)
    counts, most, gap = np.zeros_like(panel.load), panel.load.max(0), 0.5 if cell > 6 else 0.25
    for (query, key), step in np.ndenumerate(panel.steps):
        with sheet.about(_about_score(panel, query, key)):
            sheet.box(x + key * cell, y + query * cell, cell, cell)
        if step < 0:
            continue
        rank = int(panel.owner[query])
        counts[rank, step] += 1
        done = step + counts[rank, step] / most[step] - _SOON  # ranks compute one score at a time
        box = (x + key * cell + gap, y + query * cell + gap, cell - 2 * gap, cell - 2 * gap)
        edge = mix(hue(rank), 0.55)
        sheet.box(*box, fill=PAPER, edge=edge, line=0.7)
        with sheet.during(done):
            sheet.box(*box, fill=mix(hue(rank), 0.26), edge=edge, line=0.7)
        with sheet.during(done, step + 1):
            sheet.box(*box, fill=hue(rank), edge=edge, line=0.7)


def _about_score(panel: Panel, query: int, key: int) -> list[tuple[str, str]]:
    rank, source = int(panel.owner[query]), int(panel.owner[key])
    step, tile = int(panel.steps[query, key]), (rank - source) % panel.layout.num_ranks
    rows = [("", f"query {query} and key {key}"), ("query", f"of rank {rank}"), ("key", f"of rank {source}")]
    if step >= 0:
        many = counted(panel.load[rank, step], "score")
        return [*rows, ("computed", f"by rank {rank} at step {step + 1} of {panel.layout.num_ranks}, one of {many}")]
    if panel.load[rank, tile]:
        return [*rows, ("masked", "the query does not see the key")]
    return [*rows, ("masked", f"like all of this tile, which rank {rank} skips at step {tile + 1}")]


def _bars(sheet: Scene, panel: Panel, place: Place) -> None:
    (x, y), row, unit = place.bars, place.bar, place.per_score
    starts, num_ranks = panel.starts, panel.layout.num_ranks
    narrowest = unit * panel.load[panel.load > 0].min() - 0.5
    mark = "KV " if sheet.width_of("KV 0", 8.5) + 4 < narrowest else ""
    title = "scores computed, step by step" if mark else "scores computed with KV of rank ..."
    sheet.text(x, y - 9, title, size=10, fill=DIM, anchor="lm")
    edge = place.width - CHIP + 8  # what each rank has now
    sheet.text(edge + (CHIP - 8) / 2, y - 9, "has", size=10, fill=DIM)
    for rank in range(num_ranks):
        top, height = y + rank * row, row - 3
        sheet.text(x - 6, top + height / 2, f"rank {rank}", size=min(10, row), fill=DIM, anchor="rm")
        sheet.box(x, top, starts[-1] * unit, height, fill=SOFT)
        sheet.hatch(x, top, starts[-1] * unit, height, SKIPPED)
        for step, scores in enumerate(panel.load[rank].tolist()):
            with sheet.about(_about_bar(panel, rank, step), key=step + 1):
                sheet.box(x + starts[step] * unit, top, (starts[step + 1] - starts[step]) * unit, row)
            source = panel.source(rank, step)
            box = (x + starts[step] * unit, top, scores * unit - 0.5, height)
            text = f"{mark}{source}"
            has_room = sheet.width_of(text, 8.5) + 2 < box[2] and row >= 12
            for (begin, end), share in (((-np.inf, step), 0), ((step, step + 1), 1), ((step + 1, np.inf), 0.26)):
                with sheet.during(begin, end):
                    if scores:
                        sheet.box(*box, fill=mix(hue(rank), share), edge=hue(rank), line=0.8, radius=2)
                    if scores and has_room:
                        fill = WHITE if share == 1 else INK
                        sheet.text(box[0] + box[2] / 2, top + height / 2, text, size=8.5, fill=fill)
            if row < 12:
                continue
            with sheet.during(step if step else -np.inf, step + 1):
                sheet.box(edge, top, CHIP - 8, height, fill=mix(hue(source), 0.26), edge=hue(source), radius=4)
                sheet.text(edge + (CHIP - 8) / 2, top + height / 2, f"KV {source}", size=8.5)
    bottom = y + num_ranks * row
    for at in starts:
        sheet.line([(x + at * unit, bottom - 1), (x + at * unit, bottom + 3)], LINE, 1)
    ends = [x, *(x + starts * unit).tolist()]
    for step, (a, b) in enumerate(pairwise(ends)):
        with sheet.during(step - 1 if step else -np.inf, step), sheet.along((a, 0, (a + b) / 2, 0, b, 0)):
            sheet.line([(0, y - 3), (0, bottom)], ACCENT, 1.6)
    sheet.text(x, bottom + 9, "0", size=9.5, fill=DIM)
    sheet.text(x + starts[-1] * unit, bottom + 9, f"{starts[-1]:,} scores long", size=9.5, fill=DIM, anchor="rm")


def _about_bar(panel: Panel, rank: int, step: int) -> list[tuple[str, str]]:
    scores, most = int(panel.load[rank, step]), int(panel.load[:, step].max())
    return [
        ("", f"rank {rank}, step {step + 1} of {panel.layout.num_ranks}"),
        ("has", f"keys and values of rank {panel.source(rank, step)}"),
        ("computes", counted(scores, "score") if scores else "nothing: its tile is skipped"),
        ("idle", f"as long as {counted(most - scores, 'score')} take" if most > scores else "no"),
    ]


def _runs(owner: np.ndarray, of: int | None = None) -> list[tuple[int, int, int]]:
    """(begin, end, rank) of each run of neighbouring tokens on one rank; for all ranks, or for one."""
    edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    runs = [(begin, end, int(owner[begin])) for begin, end in pairwise(edges)]
    return [run for run in runs if of is None or run[2] == of]


TITLE = "Attention over a ring of ranks"


class Tiles(Played):
    """The card of `tiles`. `step` is the position of the playhead, in steps of the ring: 1.5 is half-way through the
    second. With a trace that has a backward pass, its steps follow those of the forward pass. `scenes` are panels."""

    def __init__(self, of: Panels, step: float = 0):
        self.of, self.num_steps, self.sentence = of, of.num_steps, of.sentence
        self.scenes = [draw(panel, of.geometry) for panel in of.panels]
        lanes = b"" if of.trace is None else payload.timeline(score(of.trace))
        says, about = [of.says(step) for step in range(of.num_steps + 1)], mask_text(of.panels[0].mask).rstrip(",")
        fixed = self.scenes, LEGEND, TITLE, about, says, of.num_ranks
        super().__init__(*fixed, step, AXES, of.times, lanes)

    def picture(self) -> bytes:
        """The picture at `step`. Before the first step, which would be empty, it is that of the last step."""
        _, within = self.of.place(self.step or self.of.num_steps)
        return still(TITLE, self.sentence, self.scenes, within, legend=LEGEND, note=AXES)


def tiles(
    layouts: TokenLayout | Sequence[TokenLayout],
    mask: AttentionMask | None = None,
    *,
    trace: Trace | None = None,
    axis: Axis = "cp",
    step: float = 0,
) -> Tiles:
    """Show the S x S scores of attention over a ring: at each step, which rank computes which scores, with which rank's
    keys and values, and what it skips; below, how long each rank computes and idles, if each step lasts as long as its
    slowest rank.

        tiles([TokenLayout(name, 16, 4) for name in ("contiguous", "zigzag", "striped")])

    layouts   one layout, or up to three side by side, of the same tokens and ranks: at most 64 tokens
    mask      which keys a query sees; None: causal
    trace     of a run of `ring_attention` with this one layout and mask, on ranks of `axis`: its timeline is shown
              below, under the same playhead. It may have more tokens than the picture
    step      where the playhead starts: 0 is before the first step, 1 after it
    Raises ShapeError and ValueError if layouts, or the trace, do not fit together.
    """
    return Tiles(shown(layouts, AttentionMask() if mask is None else mask, trace, axis), step)
