"""The legends of a trace's pictures: only what is in them."""

from __future__ import annotations

import numpy as np

from tplab.schedules.action import F
from tplab.widgets.paper.legend import IDLE, WORKS, Key, actions
from tplab.widgets.paper.measured import Durations
from tplab.widgets.paper.palette import GRADIENT, HUES, KINDS, LINE, WORK, mix
from tplab.widgets.score.score import COMPUTE, SEND, WAIT, Score


def of_animation(score: Score) -> list[Key]:
    kept = mix(HUES[0], 0.26), HUES[0]
    if score.is_pipeline:
        sent = [Key("forward; activations on their way", KINDS["F"]), Key("gradients on their way", GRADIENT)]
        return [*sent, *actions(score.action_kinds - {F}), Key("activations that a rank holds", *kept)]
    if not score.items:
        return []
    keys = [Key("has been here" if score.tells_past else "held", *kept), Key("arriving", edge=HUES[0], sign="dashed")]
    if any(len(pool) > 1 for item in score.items for pool in item.pools):
        named = score.trace.mesh.size <= 8 and not score.shows_numbers  # as they are written in cells
        parts = Key(f"{'0+1: the ranks ' * named}whose parts are in it", HUES[0], sign="parts")
        keys += [Key("passed on", edge=LINE), parts]
    return [*keys, Key("computing", *WORKS["elementwise"])] if score.computes else keys


def of_timeline(score: Score, measured: Durations) -> list[Key]:
    keys = _of_pipeline(score) if score.is_pipeline else [
        Key(text, *WORKS[kind]) for kind, text in (*score.work_legend, *score.talk_legend)]  # fmt: skip
    if not score.is_pipeline and (score.bars["kind"] == SEND).any():
        keys.append(Key("messages, in the colour of what they carry", sign="hues"))
    keys += [IDLE] if score.computes else []
    return [*keys, Key(f"measured by {measured.by}", sign="diamond")] if measured.rows else keys


def _of_pipeline(score: Score) -> list[Key]:
    bars, keys = score.bars, actions(score.action_kinds)
    is_other, is_sent = (bars["kind"] == COMPUTE) & (score.actions < 0), ~np.isin(bars["kind"], (COMPUTE, WAIT))
    keys += [Key("other work", *WORKS["computing"])] if is_other.any() else []
    says = ("other messages", WORK), ("activations sent", KINDS["F"]), ("gradients sent", GRADIENT)
    there = np.unique(bars["flow"][is_sent]).tolist()
    return keys + [Key(says[flow][0], mix(says[flow][1], 0.24), says[flow][1]) for flow in (1, 2, 0) if flow in there]
