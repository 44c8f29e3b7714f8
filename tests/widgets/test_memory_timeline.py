"""`memory_timeline`: areas whose heights are the bytes, of which no peak is lost; and what was predicted."""

from __future__ import annotations

import re

import numpy as np
import pytest
from traitlets import TraitError

from tests.widgets.memories import a_step, at_random, held, two_ranks
from tplab import Mesh
from tplab.errors import MeshError
from tplab.trace.memory import KINDS, Memory
from tplab.units import bytes_text
from tplab.widgets import memory_timeline
from tplab.widgets.paper.scene import Part, Scene
from tplab.widgets.paper.wire import unpack
from tplab.widgets.stacks.drawing import BOTTOM, HEIGHT, NARROW, TOP, WIDTH, name_of, picture, reading

BASE = HEIGHT - BOTTOM


@pytest.mark.parametrize("num_rows", [1, 2, 7, 300, 5000])
@pytest.mark.parametrize("unit", ["s", "steps"])
def test_heights_are_bytes_and_no_peak_is_lost(num_rows: int, unit: str):
    """Also of more rows than pixels, and of rows that last no time."""
    ranks = [at_random(num_rows, seed) for seed in range(2)]
    drawn = picture({"": Memory(Mesh(dp=2), ranks, unit=unit)}, {})
    (panel,) = drawn.panels
    scale = (BASE - TOP) / (1.06 * max(memory.peak for memory in ranks))  # pixels for a byte
    for memory, area in zip(ranks, panel.areas):
        xs, heights = area.xs, BASE - area.tops
        assert np.allclose(heights, scale * memory.num_bytes[area.rows].cumsum(axis=1), atol=0.11)  # rounded to 0.1
        assert memory.totals[area.rows].max() == memory.peak
        assert area.rows[-1] == len(memory) - 1 or xs[-1] - xs[-2] <= 1.1
        assert (np.diff(xs) >= 0).all() and (np.diff(area.rows) != 0).all()
        assert xs[0] == panel.x and xs[-1] <= panel.x + panel.width + 0.1
        assert len(area.rows) <= 2 * panel.width + 2
    assert heights.max() <= BASE


def test_between_peaks_the_picture_is_what_was_held_then():
    rows = [(0.0, {"other": 100}), (5.0, {"other": 900}), (5.0, {"other": 300}), (10.0, {"other": 300})]
    (panel,) = picture({"": Memory(Mesh(dp=1), [held(rows)])}, {}).panels
    area = panel.areas[0]
    amounts = held(rows).totals[area.rows].tolist()
    assert amounts == [100, 900, 300, 300]
    halfway = panel.x + panel.width / 2
    assert area.xs[1] == pytest.approx(halfway, abs=1) and area.xs[2] - area.xs[1] == pytest.approx(1, abs=0.1)


def test_panels_are_side_by_side_on_one_scale():
    memories = {"whole": two_ranks(800), "half": two_ranks(400)}
    drawn = picture(memories, {"half": [{"parameters": 400, "optimizer": 400}, {"parameters": 800}]})
    whole, half = drawn.panels
    assert whole.x + whole.width < half.x and half.x + half.width <= WIDTH
    assert whole.predicted == [None, None]
    assert [amount for _, amount in filter(None, half.predicted)] == [800, 800]
    scale = (BASE - whole.areas[0].tops[:, -1].min()) / memories["whole"][0].peak
    assert half.predicted[0] == pytest.approx((BASE - 800 * scale, 800), abs=0.2)
    for (y, text), amount in zip(drawn.ticks, range(0, 2000, 256)):
        assert (y, text) == (pytest.approx(BASE - amount * scale, abs=0.2), bytes_text(amount))
    names = {name for name, _, _ in whole.areas[0].labels}
    assert {"parameters", "gradients", "optimizer"} <= names  # "optimizer states" has no room


def test_names_are_inside_of_their_areas():
    for seed in range(8):
        memory = Memory(Mesh(dp=1), [at_random(12, seed)])
        (panel,) = picture({"": memory}, {}).panels
        area = panel.areas[0]
        for name, x, y in area.labels:
            kind = next(kind for kind in range(len(KINDS)) if name in (name_of(kind), KINDS[kind]))
            stop = int(np.searchsorted(area.xs, x, side="right")) - 1
            upper = area.tops[stop, kind]
            lower = area.tops[stop, kind - 1] if kind else BASE
            assert upper + 7 <= y <= lower - 7


def test_the_unit_says_what_time_is():
    memory = two_ranks(unit="steps")
    assert picture({"": memory}, {}).along == "operations"
    assert [text for _, text in picture({"": memory}, {}).panels[0].ticks] == ["0", "1", "2", "3", "4", "5", "6"]
    assert picture({"": two_ranks()}, {}).along == "time"
    assert picture({"a": two_ranks(), "b": memory}, {}).along == "operations"  # of both
    assert reading(a_step(8), 3, "time") == "3 s: op 3 at cell 1, line 2, forward"
    assert reading(a_step(8), 3, "operations") == "operation 3: op 3 at cell 1, line 2, forward"
    assert memory_timeline(two_ranks()).about == "modelled time on h100"
    assert memory_timeline(memory).about == "by operation"


def there(scene: Scene, rank: int) -> list[Part]:
    return [part for part in scene.parts if part.when.begin < rank <= part.when.end]


@pytest.mark.parametrize("wide", [True, False])
def test_what_is_drawn_is_what_was_held(wide: bool):
    memory = two_ranks(800)
    card = memory_timeline(memory, [{"parameters": 400}, {"parameters": 300}])
    scene = card.scene_of_ranks if wide else card.scene_of_ranks.narrow
    assert scene is not None and scene.width == (WIDTH if wide else NARROW)
    (panel,) = picture({"": memory}, {"": card.predicted[""]}, scene.width).panels
    for rank, (kept, area) in enumerate(zip(memory, panel.areas)):
        drawn, marks = there(scene, rank), scene.marks
        stops = [marks[part.mark].rows for part in drawn if part.mark >= 0]
        assert len(stops) == len(kept)  # each row has a pixel here
        for row, rows in enumerate(stops):
            said = {what: text.split(",")[0] for what, text in rows[1:]}
            want = {name_of(kind): amount for kind, amount in enumerate(kept.num_bytes[row]) if amount}
            want |= {"parameters": kept.num_bytes[row, 0], "in total": kept.totals[row]}
            assert said == {name: bytes_text(amount) for name, amount in want.items()}
            assert f"predicted {(400, 300)[rank]} B" in dict(rows[1:])["in total"]
        tops = {tuple(y for _, y in part.points[1:-1:2]) for part in drawn if part.method == "area"}
        there_are = [kind for kind in range(len(KINDS)) if kept.num_bytes[:, kind].any()]
        assert tops == {tuple(area.tops[:, kind].tolist()) for kind in there_are}


def test_what_ranks_have_in_common_is_sent_once():
    different, same = (
        memory_timeline(Memory(Mesh(dp=2), [a_step(800), a_step(states)])).scene_of_ranks for states in (400, 800)
    )
    assert len(there(same, 0)) == len(there(same, 1)) == len(same.parts) < len(different.parts)
    mesh = Memory(Mesh(dp=2, tp=2), [a_step(800)] * 4)
    assert unpack(memory_timeline(mesh).scene)[0]["ranks"][3] == "rank 3: dp 1, tp 1"


def test_the_card_is_a_sentence_and_a_picture_of_each_rank():
    card = memory_timeline(two_ranks(800), {"parameters": 400, "optimizer": 800})
    assert repr(card) == "Memory of each rank: rank 0 holds at most 1.56 KiB, at cell 1, line 2."
    pictures = []
    for rank in (0, 1):
        card.rank = rank
        pictures.append(card.picture())
        assert pictures[-1].startswith(b"\x89PNG")
    assert pictures[0] != pictures[1]
    both = memory_timeline({"a": two_ranks(800), "b": two_ranks(0)}, title="Two runs", rank=1)
    assert both.sentence == "Two runs: rank 1 holds at most 1.17 KiB (a), 900 B (b)."
    with pytest.raises((TraitError, MeshError)):
        card.rank = 2


def test_what_cannot_be_drawn_is_named():
    memory = two_ranks()
    for given, predicted, text in [
        ({}, None, "there is no memory to draw"),
        ({"a": memory, "b": Memory(Mesh(dp=1), [a_step(1)])}, None, "they have [1, 2] ranks"),
        ({"a": memory}, {"b": {"parameters": 1}}, "a prediction of 'b', which is no run; runs are a"),
        (memory, {"weights": 1}, "predicted has 'weights'; kinds of memory are parameters, optimizer"),
        (memory, [{"parameters": 1}] * 3, "predicted is of 3 ranks, and the run has 2"),
        (memory, {"gradients": float("nan")}, "predicted has nan of gradients; give bytes"),
        (memory, {"gradients": -1}, "predicted has -1 of gradients; give bytes"),
    ]:
        with pytest.raises(ValueError, match=re.escape(text)):
            memory_timeline(given, predicted)
