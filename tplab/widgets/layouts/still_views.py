"""The other still pictures of `layout_lab`: the chosen plan's pipeline, and its ranks on the nodes."""

from __future__ import annotations

import textwrap

from tplab.forecast import Forecast
from tplab.widgets.layouts.nodes import coordinates, group_of, groups
from tplab.widgets.layouts.pipeline import about, drawn
from tplab.widgets.layouts.words import PART_HUES
from tplab.widgets.paper.legend import Key, draw_legend, legend_height
from tplab.widgets.paper.palette import ACCENT, DIM, INK, LINE, PAPER, SOFT, hue, mix
from tplab.widgets.paper.scene import Scene
from tplab.widgets.schedule.still import MARGIN, draw_run, lane_heights, legend

NODES, ACROSS = 16, 4
"""The most nodes that are drawn, and how many of them side by side."""
WIDTH, CELL, HEAD = 900, 21, 15


def pipeline(one: Forecast) -> Scene:
    run = drawn(one)
    pen = Scene(WIDTH, 26 if run is None else 50 + one.plan.pp * (sum(lane_heights(one.plan.pp)) + 5) + 24)
    said = "This plan has no pipeline: pp is 1, so every rank has all layers." if run is None else about(one, run)
    for number, line in enumerate(textwrap.wrap(said, 145)):
        pen.text(MARGIN, 6 + 15 * number, line, size=11, fill=DIM, anchor="lm")
    if run is not None:
        draw_legend(pen, legend([run], None), MARGIN, 38, WIDTH - 2 * MARGIN)
        most = float(run.peak_activations.max(initial=0.0))
        draw_run(pen, run, 54, run.makespan, most, None, "kind", "pp")
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
