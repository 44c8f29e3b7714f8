"""`timeline(trace, measured=..., by=...)`: what others have measured, below the lanes and on the same axis."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from tests.hand_traces import ring_all_reduce
from tplab import Mesh, Trace
from tplab.schedules import gpipe, simulate
from tplab.trace import Recorder
from tplab.widgets import timeline
from tplab.widgets.paper.measured import Durations
from tplab.widgets.paper.wire import unpack
from tplab.widgets.score.lanes import draw
from tplab.widgets.score.score import score

BY = "a blog, 2 H100s"


def two_seconds() -> Trace:
    recorder = Recorder(Mesh(tp=2), "step", "torch")
    for rank in (0, 1):
        recorder.add(rank, "compute", "mm", 5.0, 7.0)  # a trace may begin later than at 0
    return recorder.trace()


def test_a_measured_duration_is_sent_and_said_with_who_measured_it():
    card = timeline(two_seconds(), measured={"step": 2.5, "forward": 0.5}, by=BY)
    header, _ = unpack(card.score)
    for row in (["", "step"], ["measured", "2.5 s"], ["", "forward"], ["measured", "500 ms"], ["by", BY]):
        assert row in header["hints"]
    assert {"2.5 s", "500 ms"} <= {*header["tables"][0]["texts"]}
    assert repr(card).endswith(f"Measured by {BY}: step 2.5 s, forward 500 ms.")
    alone, _ = unpack(timeline(two_seconds()).score)
    assert not any(what in ("measured", "by") for what, _ in alone["hints"])
    assert "easured by" not in repr(timeline(two_seconds()))


@pytest.mark.parametrize(("seconds", "end"), [(0.5, 7.0), (2.0, 7.0), (2.5, 7.5)])
def test_the_axis_reaches_to_the_longer_of_the_trace_and_what_was_measured(seconds: float, end: float):
    lanes = draw(score(two_seconds()), 566, measured=Durations({"step": seconds}, BY))
    assert lanes.across(5.0 + seconds) == pytest.approx(58 + 500 * seconds / (end - 5.0))
    assert lanes.across(end) == pytest.approx(58 + 500)


def test_the_picture_has_a_row_for_each_duration():
    heights = [
        Image.open(io.BytesIO(timeline(two_seconds(), measured=dict(rows), by=BY).picture())).height
        for rows in ([("step", 1.0)], [("step", 1.0), ("forward", 0.5)])
    ]
    assert heights[1] - heights[0] == 17


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(ValueError, match="'step' has a measured value; say in `by` who measured it"):
        timeline(two_seconds(), measured={"step": 1.0})
    with pytest.raises(ValueError, match=r"'step' has -1\.0 as its measured value; give a number from 0"):
        timeline(two_seconds(), measured={"step": -1.0}, by=BY)
    with pytest.raises(ValueError, match="beside a trace in seconds; this is a trace in steps"):
        timeline(ring_all_reduce(Mesh(tp=3), "tp"), measured={"step": 1.0}, by=BY)
    plan = simulate(gpipe(2, 2))
    with pytest.raises(ValueError, match="this is a prediction"):
        timeline(plan.trace, plan, measured={"step": 1.0}, by=BY)
