"""A score as it is sent to the browser: everything that the widgets of a trace need for drawing, and their legends,
which have only what is in the pictures."""

from __future__ import annotations

from typing import Any

import numpy as np

from tplab.schedules.action import F
from tplab.units import number_text
from tplab.widgets.paper.legend import IDLE, WORKS, Key, actions
from tplab.widgets.paper.measured import Durations
from tplab.widgets.paper.palette import GRADIENT, HUES, KINDS, LINE, WORK, mix
from tplab.widgets.paper.scene import packed
from tplab.widgets.paper.wire import pack
from tplab.widgets.score import lanes, ranks, table, words
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


MAX_NUMBERS = 6000  # of contents


def picture(score: Score) -> bytes:
    """For `animate`: the scenes of the ranks, the table and the timeline, the sentences, the holds, and the bars."""
    drawings = [scene for scene in (ranks.draw(score), table.draw(score)) if scene]
    scenes, drawn = packed([*drawings, lanes.draw(score)], of_animation(score))
    holds = {f"hold_{name}": column for name, column in score.holds.items()}
    header = {
        **_about(score),
        **scenes,
        "values": _contents(score, holds),
        "ranks": score.trace.mesh.size,
        "items": [[item.name, item.origin, item.text, item.op, item.pools] for item in score.items],
        "ops": score.op_names,
        "groups": score.groups,
        "parts": score.parts,
        "where": score.trace.codes("where")[0],
        "tells_past": score.tells_past,
        "shapes": _tensors(score)[0],
    }
    bars = {
        name: score.bars[name]
        for name in ("rank", "kind", "op", "start", "end", "item", "peer", "bytes", "group", "flow")
    }
    bars |= {"place": score.trace.codes("where")[1][score.bars["row"]], "shape": _tensors(score)[1]}
    return pack(header, {**bars, **drawn, **holds, "sets": _bits(score.sets, score.trace.mesh.size)})


def timeline(score: Score, measured: Durations | None = None, by_kind: bool = False) -> bytes:
    """For `timeline`: its scene, and its figures. by_kind: whether collectives are coloured by their effect."""
    measured = measured or Durations()
    scenes, drawn = packed([lanes.draw(score, lanes.WIDTH, by_kind, measured)], of_timeline(score, measured))
    critical = lanes.critical_bars(score)
    more = {"facts": words.facts(score, np.array(critical, int)), "has_path": bool(critical)}
    return pack({**_about(score), **scenes, **more}, drawn)


def _tensors(score: Score) -> tuple[list[str], np.ndarray]:
    """Each bar's tensor, as "float32 [8, 16]": the distinct texts, and for each bar the index of its text."""
    trace, rows = score.trace, score.bars["row"]
    shapes, shape = trace.codes("shape")
    dtypes, dtype = trace.codes("dtype")
    texts: dict[str, int] = {}
    written = [
        texts.setdefault(f"{dtypes[d]} {list(shapes[s])}".strip() if dtypes[d] or shapes[s] else "", len(texts))
        for s, d in zip(shape[rows].tolist(), dtype[rows].tolist())
    ]
    return list(texts), np.array(written, np.int32)


def _about(score: Score) -> dict[str, Any]:
    trace = score.trace
    warned = {"warning": words.warning(trace)} if trace.warnings else {}
    return warned | {
        "title": trace.title or "program",
        "about": words.about(score),
        "badge": words.clock(trace),
        "unit": trace.unit,
        "times": score.times.tolist(),
        "sentences": words.sentences(score),
    }


def _contents(score: Score, holds: dict[str, np.ndarray]) -> list[str]:
    """The numbers that were kept, as text; the largest are left out if there are too many."""
    sizes = np.array([array.size for array in score.values], int)
    limit = next((limit for limit in (64, 16, 4, 1) if sizes[sizes <= limit].sum() <= MAX_NUMBERS), 0)
    place = np.append(np.where(sizes <= limit, np.cumsum(sizes <= limit) - 1, -1), -1)  # the last one is for "none"
    holds["hold_value"] = place[holds["hold_value"]]
    return [_listed(np.ravel(array).astype(np.float32)) for array in score.values if array.size <= limit]


def _listed(numbers: np.ndarray, most: int = 12) -> str:
    more = f" … ({len(numbers)})" * (len(numbers) > most)
    return " ".join(number_text(float(number)) for number in numbers[:most]) + more


def _bits(sets: list[tuple[int, ...]], num_ranks: int) -> np.ndarray:
    """Each set of ranks as bits, the lowest first: ceil(ranks / 8) bytes per set."""
    member = np.zeros((len(sets), -(-num_ranks // 8) * 8), bool)
    for place, members in enumerate(sets):
        member[place, list(members)] = True
    return np.packbits(member, axis=1, bitorder="little").ravel()
