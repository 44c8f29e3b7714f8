"""The other views of `layout_lab`: the pipeline of a plan, only a few rounds of it if it has many microbatches; and its
ranks on the nodes, of which some share a node while the groups of others are spread over several."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tplab.forecast import Forecast, Plan
from tplab.forecast.plan import AXES
from tplab.schedules import Simulation
from tplab.units import plain
from tplab.widgets.layouts.words import PART_HUES
from tplab.widgets.paper.frame import MARGIN
from tplab.widgets.paper.legend import Key, draw_legend, legend_height
from tplab.widgets.paper.palette import ACCENT, DIM, INK, LINE, PAPER, SOFT, hue, mix
from tplab.widgets.paper.scene import Scene
from tplab.widgets.schedule import lanes
from tplab.widgets.schedule.still import legend


class Group(NamedTuple):
    """The groups of one axis, or "ep" for the consecutive ranks that share the experts of a layer: the number of ranks
    of each, and the most nodes over which one is spread."""

    axis: str
    ranks: int
    nodes: int


def groups(plan: Plan, node_size: int | None) -> list[Group]:
    """The groups of each axis with more than one rank. node_size None: all ranks are in one node."""
    nodes = (np.arange(plan.ranks) // (node_size or plan.ranks)).reshape([getattr(plan, axis) for axis in AXES])
    most = [int((np.diff(nodes, axis=at) > 0).sum(axis=at).max()) + 1 for at in range(len(AXES))]
    found = [Group(axis, ranks, many) for axis, ranks, many in zip(AXES, nodes.shape, most) if ranks > 1]
    if plan.ep > 1:
        spread = (np.diff(nodes.reshape(-1, plan.ep), axis=1) > 0).sum(axis=1)
        found.append(Group("ep", plan.ep, int(spread.max()) + 1))
    return found


def on_nodes(plan: Plan, node_size: int | None) -> str:
    """Which axes stay within a node, and over how many nodes the groups of the others are spread: "Inside a node of
    8 GPUs: tp 8. Across nodes: dp 16, each group on 16 nodes."."""
    found = groups(plan, node_size)
    inside = [f"{axis} {ranks}" for axis, ranks, nodes in found if nodes == 1]
    across = [f"{axis} {ranks}, each group on {nodes:,} nodes" for axis, ranks, nodes in found if nodes > 1]
    size = f"{node_size or plan.ranks:,}"
    parts = [f"Inside a node of {size} GPUs: {', '.join(inside)}."] if inside else []
    return " ".join([*parts, f"Across nodes: {'; '.join(across)}."] if across else parts)


def coordinates(plan: Plan, rank: int) -> str:
    """The coordinates of a rank on the axes with more than one rank: "pp 0 dp 1 tp 5"."""
    sizes = [getattr(plan, axis) for axis in AXES]
    return " ".join(f"{axis} {at}" for axis, size, at in zip(AXES, sizes, np.unravel_index(rank, sizes)) if size > 1)


def group_of(plan: Plan, rank: int, axis: str) -> list[int]:
    """The ranks that differ from `rank` only along an axis, including itself; for "ep", those with its experts."""
    if axis == "ep":
        first = rank - rank % plan.ep
        return list(range(first, first + plan.ep))
    ranks = np.arange(plan.ranks).reshape([getattr(plan, one) for one in AXES])
    place = [int(at) for at in np.unravel_index(rank, ranks.shape)]
    return ranks[tuple(slice(None) if one == axis else at for one, at in zip(AXES, place))].tolist()


ACTIONS = 3000
"""The most actions that are drawn, unless one microbatch per rank has more."""


def drawn(one: Forecast) -> Simulation | None:
    """The simulated pipeline of a plan, with up to 16 microbatches, or two per rank; None without a pipeline."""
    pp = one.plan.pp
    if pp == 1:
        return None
    return one.pipeline(max(pp, min(max(16, 2 * pp), ACTIONS // (2 * pp * one.plan.virtual))))


def about(one: Forecast, run: Simulation) -> str:
    """A description of what is drawn."""
    few, count = run.schedule.num_microbatches, one.plan.microbatches(one.batch)
    many = f"All {count} microbatches are drawn" if few == count else f"{few} of {count:,} microbatches are drawn"
    many += "" if few == count else ": the rounds in the middle are alike"
    first, last = (float(run.costs.durations(run.schedule)[_forward(run, stage)]) for stage in (0, -1))
    unequal = f"A forward pass takes {_ms(first)} in the first stage and {_ms(last)} in the last, which has the head"
    bubble = f"In the whole step, the busiest rank waits for {one.parts['bubble'] / one.seconds:.1%} of the time"
    return f"{many}. {unequal}. {bubble}."


def _forward(run: Simulation, stage: int) -> int:
    """The index of the first forward pass of a stage."""
    schedule = run.schedule
    return int(np.flatnonzero((schedule.kind == 0) & (schedule.stage == stage % schedule.num_stages))[0])


def _ms(seconds: float) -> str:
    return f"{plain(1e3 * seconds)} ms"


def board(one: Forecast, index: int) -> tuple[dict[str, Any] | None, Mapping[str, np.ndarray]]:
    """The pipeline of the plan at this index for static/layouts.js: a header and its columns."""
    run = drawn(one)
    if run is None:
        return None, {}
    header, columns = lanes.sent(_lanes(run), [run], None, legend([run], None), "pp")
    return header | {"plan": index, "about": about(one, run)}, columns


def _lanes(run: Simulation) -> Scene:
    return lanes.draw([run], None, WIDTH - 2 * MARGIN, ["kind"], TALL, "pp")


NODES, ACROSS = 16, 4
"""The most nodes that are drawn, and how many of them side by side."""
WIDTH, CELL, HEAD = 900, 21, 15
TALL = 300  # of a pipeline


def pipeline(one: Forecast) -> Scene:
    run = drawn(one)
    of = None if run is None else _lanes(run)
    pen = Scene(WIDTH, 26 if of is None else 54 + of.height)
    said = "This plan has no pipeline: pp is 1, so every rank has all layers." if run is None else about(one, run)
    for number, line in enumerate(textwrap.wrap(said, 145)):
        pen.text(MARGIN, 6 + 15 * number, line, size=11, fill=DIM, anchor="lm")
    if run is not None and of is not None:
        draw_legend(pen, legend([run], None), MARGIN, 38, WIDTH - 2 * MARGIN)
        of.paint(pen, 0, MARGIN, 54)
    return _cut(pen)


def nodes(one: Forecast) -> Scene:
    """The nodes; the groups of rank 0 are coloured."""
    plan, (size, count), pen, room = one.plan, _sizes(one), Scene(WIDTH, 0), WIDTH - 2 * MARGIN
    found = groups(plan, one.cluster.node_size)
    axes = [group for group in found if group.axis != "ep"]
    colours = {rank: hue(PART_HUES[group.axis]) for group in axes for rank in group_of(plan, 0, group.axis)}
    sharing = group_of(plan, 0, "ep") if plan.ep > 1 else []  # of several axes: a border, no colour
    keys = [Key(f"rank 0{', and its groups:' if found else ''}", ACCENT)]
    for axis, ranks, on in found:
        words, colour = f"{axis} {ranks} on {f'{on:,} nodes' if on > 1 else 'a node'}", hue(PART_HUES[axis])
        keys.append(Key(words, PAPER, colour, "border") if axis == "ep" else Key(words, mix(colour, 0.45), colour))
    draw_legend(pen, keys, MARGIN, 5, room)
    top = legend_height(keys, room, pen.width_of) + 4
    said = " · ".join(group.axis for group in axes) + (" in each cell" if axes else "")
    said += f"; {NODES} of {count:,} nodes are drawn" if count > NODES else ""
    rows = -(-min(count, NODES) // ACROSS)
    wide, lines = (room - 10 * (ACROSS - 1)) / ACROSS, -(-size // 8)
    cell, tall = (wide - 8) / min(size, 4), 2 * CELL * lines + HEAD
    pen.height = top + 12 + rows * (tall + 14)
    pen.text(MARGIN, pen.height - 10, said, size=10.5, fill=DIM, anchor="lm")
    for node in range(min(count, NODES)):
        left, y = MARGIN + (node % ACROSS) * (wide + 10), top + node // ACROSS * (tall + 14)
        pen.box(left, y, wide, tall + 4, fill=SOFT, edge=LINE, radius=5)
        pen.text(left + 5, y + 8, f"node {node}", size=9.5, fill=DIM, anchor="lm")
        for place in range(min(size, plan.ranks - node * size)):
            rank = node * size + place
            a, b = left + 4 + place % 4 * cell, y + HEAD + place // 4 * CELL
            colour, is_focus = colours.get(rank), rank == 0
            fill = ACCENT if is_focus else mix(colour, 0.45) if colour else PAPER
            edge, line = (hue(PART_HUES["ep"]), 2) if rank in sharing else (colour or LINE, 1)
            pen.box(a + 1, b + 1, cell - 2, CELL - 2, fill=fill, edge=edge, radius=3, line=line)
            words = "·".join(coordinates(plan, rank).split()[1::2])
            if pen.width_of(words, 9.5) < cell - 4:
                pen.text(a + cell / 2, b + CELL / 2, words, size=9.5, fill=PAPER if is_focus else INK)
    return _cut(pen)


def _cut(scene: Scene) -> Scene:
    """The scene without its margins, because the card has its own."""
    found = Scene(scene.width - 2 * MARGIN, scene.height)
    scene.paint(found, x=-MARGIN)
    return found


def _sizes(one: Forecast) -> tuple[int, int]:
    """(GPUs per node, nodes)."""
    size = one.cluster.node_size or one.plan.ranks
    size = min(size, one.plan.ranks)
    return min(size, 64), -(-one.plan.ranks // size)
