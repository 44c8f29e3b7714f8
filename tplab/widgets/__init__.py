"""Moving pictures of traces, meshes and shardings, for notebooks.

    animate(trace)                ranks on their mesh, the messages between them, and what each rank holds
    timeline(trace)               where the time of every rank goes; with predicted=, an executed schedule over its
                                  prediction
    memory_timeline(run.memory)   what each rank holds in memory over time, by kind
    experts(trace)                a layer of experts: which rows go where, what each expert computes, which ranks wait
    tiles(layouts)                attention over a ring of ranks: which rank computes which scores when, or skips them
    gantt(run)                    a pipeline schedule as simulated, and what each rank holds in memory
    pipeline_lab()                the same, with controls for every number
    layout_lab("llama3-70b")      which layout trains a model fastest, what each rank holds, and why
    shards(mesh, shape, P(...))   which rank holds which slice of a tensor, or computes which part of a product

for labs, to show numbers that a cell has computed:

    matrices({...})               small matrices side by side
    curves(...)                   how something grows
    levels(...)                   how much memory is held, over time or over another quantity
    scatter(...)                  forecasts beside measurements, one dot per run
    LossCurve(steps)              the loss of a model while it trains
    knob(...)                     one control, and bars that change with it
    bytes_text(...)               "1.43 MiB": sizes as the widgets write them

and for readers without a notebook:

    to_html(trace, "run.html")    a page that plays a trace, a schedule or a widget in any browser

Each of these is a widget; without a running kernel, it is a picture and a sentence.

Each module here is one of them. Their parts are in packages: score/ (a trace, laid out), schedule/ (a pipeline
schedule), layouts/ (plans and what they take), stacks/ (areas on top of each other), attention/ (scores as tiles),
mixture/ (a layer of experts), tensors/ (pieces on ranks), paper/ (shared by all) and static/ (their JavaScript).
"""

from tplab.units import bytes_text
from tplab.widgets.animate import Animation, animate
from tplab.widgets.curves import curves
from tplab.widgets.experts import Experts, experts
from tplab.widgets.gantt import Gantt, gantt
from tplab.widgets.knob import Bars, Row, knob
from tplab.widgets.layout_lab import LayoutLab, layout_lab
from tplab.widgets.levels import levels
from tplab.widgets.loss_curve import LossCurve
from tplab.widgets.matrices import matrices
from tplab.widgets.memory_timeline import MemoryTimeline, memory_timeline
from tplab.widgets.page import to_html
from tplab.widgets.pipeline_lab import PipelineLab, pipeline_lab
from tplab.widgets.scatter import Dot, scatter
from tplab.widgets.shards import Shards, shards
from tplab.widgets.tiles import Tiles, tiles
from tplab.widgets.timeline import Timeline, timeline

__all__ = [
    "Animation",
    "Bars",
    "Dot",
    "Experts",
    "Gantt",
    "LayoutLab",
    "LossCurve",
    "MemoryTimeline",
    "PipelineLab",
    "Row",
    "Shards",
    "Tiles",
    "Timeline",
    "animate",
    "bytes_text",
    "curves",
    "experts",
    "gantt",
    "knob",
    "layout_lab",
    "levels",
    "matrices",
    "memory_timeline",
    "pipeline_lab",
    "scatter",
    "shards",
    "tiles",
    "timeline",
    "to_html",
]
