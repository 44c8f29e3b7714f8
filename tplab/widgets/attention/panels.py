"""Which rank computes which scores of an S x S mask at which step of a ring: everything that `tiles` shows.

A position of the playhead is in steps: at 0 nothing has been computed, at 1.5 the second step is half over. All ranks
are in lock-step: a step lasts as long as its slowest rank computes, and one score takes one unit of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

import numpy as np

from tplab.errors import ShapeError
from tplab.mesh import Axis
from tplab.sequence import AttentionMask, TokenLayout, efficiency, load, tiles_of
from tplab.trace.trace import Trace
from tplab.widgets.paper.shown import check_shown
from tplab.widgets.score.names import kind_of

MOST_TOKENS, MOST_RANKS = 64, 16
TITLE, STRIP, LABEL, CHIP, AXIS = 26, 15, 44, 40, 22
"""In pixels: the height of a panel's title; the width of the strips that show the ranks of queries and keys; the width
of a rank's name, and of its chip, beside its bar; the height of the time axis."""
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Panel:
    """One layout under one mask."""

    layout: TokenLayout
    mask: AttentionMask

    @cached_property
    def owner(self) -> np.ndarray:
        """[S]: the rank that holds each token."""
        owner = np.empty(self.layout.num_tokens, int)
        for rank, positions in enumerate(self.layout.positions):
            owner[positions] = rank
        return owner

    @cached_property
    def steps(self) -> np.ndarray:
        """[S (query), S (key)]: the step, from 0, at which the score is computed, by the query's rank; -1: masked."""
        steps = np.full((self.layout.num_tokens,) * 2, -1)
        held = self.layout.positions
        for rank, row in enumerate(tiles_of(self.layout, self.mask)):
            for step, tile in enumerate(row):
                keys = held[tile.source][tile.keys]
                for query, begin, end in zip(held[rank][tile.queries], tile.begins, tile.ends, strict=True):
                    steps[query, keys[begin:end]] = step
        return steps

    @cached_property
    def load(self) -> np.ndarray:
        """[p (rank), p (step)]: how many scores."""
        return load(self.layout, self.mask)

    @cached_property
    def efficiency(self) -> float:
        return efficiency(self.layout, self.mask)

    @property
    def starts(self) -> np.ndarray:
        """[p + 1]: when each step begins, and when the last one ends, in scores."""
        return np.append(0, np.cumsum(self.load.max(0)))

    def source(self, rank: int, step: int) -> int:
        """The rank whose keys and values `rank` has at a step."""
        return tiles_of(self.layout, self.mask)[rank][step].source

    def computed(self, position: float) -> np.ndarray:
        """[p (rank), p (step)]: how many of its scores each rank has computed."""
        whole, part = int(position), position % 1
        done = np.where(np.arange(self.load.shape[1]) < whole, self.load, 0)
        if part:
            now = int(part * self.load[:, whole].max() + 1e-9)
            done[:, whole] = np.minimum(self.load[:, whole], now)
        return done

    def says(self, step: int) -> str:
        """What the ranks compute at a step, from 0: "zigzag 8 scores each"."""
        scores, skips = self.load[:, step], int((self.load[:, step] == 0).sum())
        some = scores[scores > 0]
        if not some.size:
            return f"{self.layout.name} no scores"
        if not skips and some.min() == some.max():
            return f"{self.layout.name} {some[0]} scores each"
        spread = f"{some.min()}" if some.min() == some.max() else f"{some.min()} to {some.max()}"
        who = f", and {skips} of {len(scores)} ranks {'skips its tile' if skips == 1 else 'skip their tiles'}"
        return f"{self.layout.name} {spread} scores{who if skips else ''}"


class Place(NamedTuple):
    """The layout of a panel, in pixels: the grid of scores, and the bars below or beside it."""

    width: float
    height: float
    grid: tuple[float, float]
    cell: float
    bars: tuple[float, float]
    bar: float
    per_score: float


@dataclass(frozen=True)
class Panels:
    """Panels side by side, under one playhead.

    times    with a trace: when each step begins on its clock, and when the last one ends, for one or two passes
    """

    panels: tuple[Panel, ...]
    trace: Trace | None = None
    times: tuple[float, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.panels[0].layout.num_ranks

    @property
    def num_steps(self) -> int:
        return len(self.times) - 1 if self.times else self.num_ranks

    @property
    def geometry(self) -> Place:
        """The layout of every panel. Time has one scale in all of them."""
        many = len(self.panels)
        width = {1: 900, 2: 440, 3: 290}[many]
        size = 282 if many == 1 else 266
        bar = min(17.0, (size if many == 1 else 150) / self.num_ranks)
        x, y = (STRIP + size + 96, TITLE + STRIP) if many == 1 else (LABEL, TITLE + STRIP + size + 26)
        longest = max(int(panel.starts[-1]) for panel in self.panels)
        height = max(TITLE + STRIP + size, y + bar * self.num_ranks) + AXIS
        cell = size / self.panels[0].layout.num_tokens
        return Place(width, height, (STRIP, TITLE + STRIP), cell, (x, y), bar, (width - x - CHIP) / longest)

    def place(self, position: float) -> tuple[int, float]:
        """(the pass, from 0, the position in it)."""
        number = max(ceil(position - 1e-9) - 1, 0) // self.num_ranks
        return number, position - number * self.num_ranks

    def says(self, step: int) -> tuple[str, str]:
        """The line below the picture after `step` steps: the position of the playhead, and what happens there."""
        number, within = self.place(step)
        num_ranks, passes = self.num_ranks, self.num_steps // self.num_ranks
        if not step:
            return "before the first step", "each rank holds its own queries, keys and values"
        head = f"step {round(within)} of {num_ranks}{f', {PASSES[number]}' if passes > 1 else ''}"
        before = round(within) - 1
        whose = "its own keys and values" if not before else f"the keys and values of the rank {before} before it"
        return head, f"each rank has {whose}: {'; '.join(panel.says(before) for panel in self.panels)}"

    @property
    def sentence(self) -> str:
        first = self.panels[0].layout
        each = ", ".join(f"{100 * panel.efficiency:.1f}% ({panel.layout.name})" for panel in self.panels)
        return (
            f"{mask_text(self.panels[0].mask)} over {first.num_tokens} tokens on {first.num_ranks} ranks, a "
            f"ring of {first.num_ranks} steps: ranks compute for {each} of the time."
        )


def shown(layouts: TokenLayout | Sequence[TokenLayout], mask: AttentionMask, trace: Trace | None, axis: Axis) -> Panels:
    """The panels for these layouts, after checks."""
    given = list(layouts) if isinstance(layouts, Sequence) else [layouts]
    if not 1 <= len(given) <= 3:
        raise ValueError(f"tiles shows one layout or up to 3 side by side, not {len(given)}")
    check_shown(given, TokenLayout)
    sizes = {(layout.num_tokens, layout.num_ranks) for layout in given}
    if len(sizes) > 1:
        raise ShapeError(f"layouts side by side must be of the same tokens and ranks, not of {sorted(sizes)}")
    ((num_tokens, num_ranks),) = sizes
    if num_tokens > MOST_TOKENS or num_ranks > MOST_RANKS:
        raise ShapeError(
            f"a picture has room for {MOST_TOKENS} tokens on {MOST_RANKS} ranks, not for {num_tokens} on {num_ranks}; "
            "give a smaller layout of the same kind: its tiles look the same"
        )
    panels = tuple(Panel(layout, mask) for layout in given)
    if trace is None:
        return Panels(panels)
    panel, *others = panels
    if others:
        raise ValueError(f"a trace is of one layout, and {len(panels)} were given; give the one that ran")
    return Panels(panels, trace, times_of(trace, panel, axis))


def times_of(trace: Trace, panel: Panel, axis: Axis) -> tuple[float, ...]:
    """When each step of each pass ends in a trace of one call of `ring_attention`: when every rank of the first ring
    along `axis` has computed its tile. All tiles of a pass have the same number of matrix products."""
    ranks = trace.mesh.group(0, axis)
    if len(ranks) != panel.layout.num_ranks:
        raise ShapeError(
            f"the layout is for {panel.layout.num_ranks} ranks, and axis {axis!r} of the trace has {len(ranks)}"
        )
    times = [float(min(event.start for event in trace.events))]
    for phase in PASSES:
        ends = np.zeros(panel.load.shape)
        for index, rank in enumerate(ranks):
            events = [e for e in trace.select(kind="compute", rank=rank).events if kind_of(e.op) == "product"]
            products = sorted((e for e in events if (e.phase or "forward") == phase), key=lambda e: e.start)
            computed = np.flatnonzero(panel.load[index])
            if len(products) % len(computed):
                raise ValueError(
                    f"rank {rank} has {len(products)} products of matrices in its {phase} pass, which are not equally "
                    f"many for each of its {len(computed)} tiles; give the trace of ring_attention alone, with this "
                    "layout and mask"
                )
            for step, of_tile in zip(computed, np.array_split(np.array(products, object), len(computed))):
                ends[index, step] = max((event.end for event in of_tile), default=0)
        if not ends.any():
            break
        times += np.maximum.accumulate(np.maximum(ends.max(0), times[-1])).tolist()
    if len(times) == 1:
        raise ValueError("no rank computes a product of matrices in this trace; give one of ring_attention")
    return (*times[:-1], float(max(event.end for event in trace.events)))


def mask_text(mask: AttentionMask) -> str:
    """ "Causal attention in a window of 4, 3 packed documents"."""
    window = f" in a window of {mask.window}" if mask.window is not None else ""
    packed = f", {len(mask.documents)} packed documents," if mask.documents else ""
    return f"{'Causal' if mask.causal else 'Full'} attention{window}{packed}"
