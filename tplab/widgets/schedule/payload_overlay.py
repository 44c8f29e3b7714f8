"""A trace over its prediction, as it is sent to the browser."""

from __future__ import annotations

from tplab.widgets.paper.scene import packed
from tplab.widgets.paper.wire import pack
from tplab.widgets.schedule import overlay as over
from tplab.widgets.score import words
from tplab.widgets.score.op_kinds import name_of


def overlay(of: over.Overlay) -> bytes:
    """For `timeline` over a prediction: when everything ran, and when it was predicted; static/overlay.js reads it."""
    schedule = of.predicted.schedule
    legend, drawn = packed([], over.legend(of))
    header = {
        **legend,
        "overlay": True,
        "title": over.title(of),
        "about": over.about(of),
        "badge": words.clock(of.trace),
        "unit": of.trace.unit,
        "ranks": schedule.num_ranks,
        "names": list(of.comparison.ranks),
        "word": of.word,
        "stages": schedule.num_stages,
        "times": of.times.tolist(),
        "ops": [name_of(op) for op in of.ops],
        "makespan": of.comparison.makespan,
        "facts": over.facts(of),
        "computes": True,
    }
    others = {f"other_{name}": column for name, column in of.others.items()}
    if of.trace.warnings:
        header["warning"] = words.warning(of.trace)
    return pack(header, {**of.actions, **others, **drawn})
