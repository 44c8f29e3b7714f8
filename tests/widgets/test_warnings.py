"""What a run warned of is in its trace, and every view of the trace says it."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.hand_traces import ring_all_reduce
from tests.widgets.test_timeline_overlay import COSTS, executed
from tplab import Mesh, Trace
from tplab.errors import TraceError
from tplab.schedules import one_f_one_b, simulate
from tplab.trace import summary
from tplab.trace.columns import from_json
from tplab.widgets import animate, timeline, to_html
from tplab.widgets.paper.wire import unpack

TEXT = "all_reduce over 'tp' at a.py:3 and all_reduce over 'dp' at a.py:4 are in opposite orders. NCCL may hang here"


def warned(trace: Trace, *texts: str) -> Trace:
    """The same trace, of a run that warned."""
    given: dict[str, Any] = from_json(trace.to_json()) | {"warnings": texts}
    return Trace.from_columns(**given)


RING = ring_all_reduce(Mesh(tp=3), "tp")


def said(card: Any) -> str:
    return unpack(card.score)[0].get("warning", "")


def height(card: Any) -> int:
    return Image.open(io.BytesIO(card.picture())).height


def test_it_goes_through_json_and_selections():
    trace = warned(RING, TEXT)
    assert trace != RING and RING.warnings == []
    assert Trace.from_json(trace.to_json()) == trace == warned(trace, TEXT)
    assert trace.select(rank=0).warnings == trace.since(1).warnings == [TEXT]
    old = re.sub(r'"warnings": \[[^]]*\], ', "", RING.to_json())
    assert "warnings" not in old and Trace.from_json(old) == RING


@pytest.mark.parametrize("wrong", [TEXT, [1], None, {TEXT}])
def test_warnings_are_texts(wrong: Any):
    with pytest.raises(TraceError, match="the warnings of a trace are a list of texts"):
        Trace.from_columns(**(from_json(RING.to_json()) | {"warnings": wrong}))


@pytest.mark.parametrize("view", [animate, timeline])
def test_a_widget_says_the_first_and_how_many_more(view: Any):
    plain, one, three = (view(warned(RING, *[TEXT] * number)) for number in (0, 1, 3))
    assert said(plain) == ""
    assert said(one) == f"Warning: {TEXT}."
    assert said(three) == f"Warning: {TEXT}. (and 2 more warnings, in trace.warnings)"
    assert height(plain) < height(one) <= height(three)


def test_so_does_a_timeline_over_its_prediction():
    schedule = one_f_one_b(2, 2)
    trace, run = executed(simulate(schedule, COSTS)), simulate(schedule, COSTS)
    plain, one = timeline(trace, run), timeline(warned(trace, TEXT), run)
    assert said(plain) == "" and said(one) == f"Warning: {TEXT}."
    assert height(plain) < height(one)


def test_so_do_summaries_and_pages(tmp_path: Path):
    assert summary(warned(RING, TEXT, "b")).endswith(f"\n\nwarning: {TEXT}\n\nwarning: b")
    assert "warning" not in summary(RING)
    page = to_html(warned(RING, TEXT), tmp_path / "run.html").read_text()
    assert ".card + .card .tpl-warning{display:none}" in page  # the second card of a page is of the same trace
