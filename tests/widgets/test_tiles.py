"""`tiles`: which rank computes which score at which step, as the core says; a pure function of layout and step."""

from io import BytesIO
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tplab.torch as tt
from tplab import Mesh, P
from tplab.errors import ShapeError
from tplab.sequence import LAYOUTS, AttentionMask, TokenLayout, load
from tplab.trace.trace import Trace
from tplab.widgets import tiles, to_html
from tplab.widgets.attention.panels import Panel, times_of
from tplab.widgets.paper.apng import darkened
from tplab.widgets.paper.palette import PAPER, hue, mix
from tplab.widgets.paper.scene import Scene
from tplab.widgets.paper.wire import unpack

MASKS = [
    AttentionMask(),
    AttentionMask(causal=False),
    AttentionMask(window=3),
    AttentionMask(causal=False, window=4, documents=(5, 7)),
]


def side_by_side(num_tokens: int = 16, num_ranks: int = 4) -> list[TokenLayout]:
    return [TokenLayout(name, num_tokens, num_ranks) for name in LAYOUTS]


def allowed(mask: AttentionMask, query: int, key: int) -> bool:
    """Written out for one score."""
    document = np.repeat(range(len(mask.documents or [12])), mask.documents or 12)
    near = mask.window is None or abs(query - key) < mask.window
    return bool(near and document[query] == document[key] and (key <= query or not mask.causal))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("name", "num_ranks"), [*product(LAYOUTS, (1, 2, 3))])
def test_every_score_is_computed_once_by_the_rank_of_its_query(name: Any, num_ranks: int, mask: AttentionMask):
    layout = TokenLayout(name, 12, num_ranks)
    panel = Panel(layout, mask)
    for query, key in product(range(12), repeat=2):
        rank, source = panel.owner[query], panel.owner[key]
        assert query in layout.positions[rank]
        step = panel.steps[query, key]
        assert (step >= 0) == allowed(mask, query, key)
        if step >= 0:
            assert panel.source(rank, step) == source
    for rank, step in product(range(num_ranks), repeat=2):
        of_rank = panel.steps[panel.owner == rank]
        assert (of_rank == step).sum() == load(layout, mask)[rank, step]


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_are_in_lock_step(name: Any):
    panel = Panel(TokenLayout(name, 24, 3), AttentionMask())
    work = panel.load
    for step in range(4):
        assert (panel.computed(step) == np.where(np.arange(3) < step, work, 0)).all()
    for step, part in product(range(3), (0.25, 0.5, 0.9)):
        done = panel.computed(step + part)
        assert (done[:, step] == np.minimum(work[:, step], int(part * work[:, step].max()))).all()
        assert (done[:, :step] == work[:, :step]).all() and not done[:, step + 1 :].any()
    assert panel.starts.tolist() == [0, *np.cumsum(work.max(0))]
    assert panel.efficiency == work.sum() / (3 * panel.starts[-1])


def test_it_says_what_each_layout_does_at_each_step():
    card = tiles(side_by_side())
    assert repr(card) == (
        "Causal attention over 16 tokens on 4 ranks, a ring of 4 steps: ranks compute for "
        "58.6% (contiguous), 100.0% (zigzag), 85.0% (striped) of the time."
    )
    assert card.num_steps == 4
    assert card.of.says(0) == ("before the first step", "each rank holds its own queries, keys and values")
    assert card.of.says(3) == (
        "step 3 of 4",
        "each rank has the keys and values of the rank 2 before it: contiguous 16 scores, and 2 of 4 ranks skip their "
        "tiles; zigzag 8 scores each; striped 6 to 10 scores",
    )
    windowed = tiles(TokenLayout("contiguous", 16, 4), AttentionMask(window=2, documents=(10, 6)))
    assert windowed.sentence.startswith("Causal attention in a window of 2, 2 packed documents, over 16 tokens")
    assert windowed.of.says(4)[1].endswith("contiguous no scores")


def fills(scene: Scene, position: float) -> dict[tuple[float, float], Any]:
    """The colour of each box that is filled at a position: (x, y) of its middle -> the uppermost one's."""
    there = [part for part in scene.parts if part.method == "box" and part.when.begin < position <= part.when.end]
    filled = [(part.place, dict(part.look).get("fill")) for part in there]
    return {(round(x + w / 2, 2), round(y + h / 2, 2)): fill for (x, y, w, h), fill in filled if fill is not None}


@pytest.mark.parametrize("position", [0, 0.3, 1, 1.5, 2.75, 4])
def test_every_score_has_the_colour_of_its_rank_and_step(position: float):
    card = tiles(side_by_side(), step=position)
    (left, top), cell = card.of.geometry.grid, card.of.geometry.cell
    for panel, scene in zip(card.of.panels, card.scenes):
        drawn, done, counts = fills(scene, position), panel.computed(position), np.zeros_like(panel.load)
        for query, key in np.argwhere(panel.steps >= 0).tolist():
            rank, step = int(panel.owner[query]), int(panel.steps[query, key])
            counts[rank, step] += 1
            now = step == np.ceil(position) - 1
            want = (hue(rank) if now else mix(hue(rank), 0.26)) if counts[rank, step] <= done[rank, step] else PAPER
            assert drawn[round(left + (key + 0.5) * cell, 2), round(top + (query + 0.5) * cell, 2)] == want


def test_what_is_sent_to_the_browser_is_what_is_drawn():
    card = tiles(side_by_side(), step=1.5)
    header, columns = unpack(card.scene)
    assert len(header["says"]) == 5 and [about["label"] for about in header["tables"][:3]] == [
        s.label for s in card.scenes
    ]
    for number, (about, scene) in enumerate(zip(header["tables"], card.scenes)):
        sent = {
            name: columns[f"{name}{number}"] for name in ("x", "y", "w", "h", "look", "text", "begin", "end", "mark")
        }
        moments = columns[f"moments{number}"]
        for index, part in enumerate(scene.parts):
            look = about["looks"][sent["look"][index]]
            assert look["is"] == part.method and look.get("radius", 0) == dict(part.look).get("radius", 0)
            if part.place:
                place = [sent[name][index] / 20 for name in "xywh"][: len(part.place)]
                assert np.abs(np.array(place) - part.place).max() <= 0.025 + 1e-9
            if part.text:
                assert about["texts"][sent["text"][index]] == part.text
            assert [moments[sent[name][index]] for name in ("begin", "end")] == [*part.when]
            assert sent["mark"][index] == part.mark
        rows = columns[f"rows{number}"].reshape(
            -1, len(scene.marks)
        )  # the first ones of all tooltips, the second ones ...
        for index, mark in enumerate(scene.marks):
            said = [tuple(header["hints"][row]) for row in rows[:, index] if row >= 0]
            assert tuple(said) == mark.rows and columns[f"key{number}"][index] == mark.key
    card.step = 4
    with pytest.raises(Exception, match="there are steps 0 to 4"):
        card.step = 4.5


def test_the_still_picture_is_of_the_step(tmp_path: Any):
    pictures = {step: tiles(side_by_side(), step=step).picture() for step in (0, 1, 2.5, 4)}
    assert pictures[0] == pictures[4] and len({*pictures.values()}) == 3  # an empty picture says nothing
    light, dark = (np.asarray(Image.open(BytesIO(png)).convert("L")) for png in (pictures[4], darkened(pictures[4])))
    assert light.shape == dark.shape and light.mean() > 200 > 100 > dark.mean()
    page = to_html(tiles(side_by_side()), tmp_path / "tiles.html").read_text(encoding="utf8")
    assert "<h1>Causal attention over 16 tokens on 4 ranks, a ring of 4 steps</h1>" in page


def trace_of(layout: str, backward: bool = True, num_ranks: int = 4) -> Trace:
    q, k, v = (torch.randn(1, 2, 8 * num_ranks, 4) for _ in range(3))

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for x in (q, k, v):
            x.requires_grad_()
        o = tt.ring_attention(q, k, v, "cp", layout=layout)  # type: ignore
        if backward:
            o.sum().backward()
        return o.detach()

    spec = P(None, None, "cp")
    return tt.run(
        program, Mesh(cp=num_ranks), q, k, v, in_specs=(spec,) * 3, out_specs=spec, cluster="h100", keep_values=0
    ).trace


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_with_a_trace_a_step_is_over_when_its_tiles_are(layout: Any):
    """The trace has twice as many tokens as the picture: its tiles are the same ones."""
    trace = trace_of(layout)
    card = tiles(TokenLayout(layout, 16, 4), trace=trace, step=6)
    times = card.of.times
    assert card.num_steps == 8 and list(times) == sorted(times)
    assert times[-1] == max(event.end for event in trace.events)
    for number, phase in enumerate(("forward", "backward")):
        last = card.of.panels[0].load[:, -1].nonzero()[0].tolist()
        ends = [
            max(e.end for e in trace.select(kind="compute", rank=r).events if "attention" in e.op and e.phase == phase)
            for r in last
        ]
        if not number:
            assert times[4] == max(ends)
        assert times[4 * number] < min(ends) <= times[4 * number + 4]
    assert card.of.says(6)[0] == "step 2 of 4, backward" and card.of.place(5.5) == (1, 1.5)
    assert len(tiles(TokenLayout(layout, 16, 4), trace=trace_of(layout, backward=False)).of.times) == 5


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match="room for 64 tokens on 16 ranks, not for 128 on 4; give a smaller layout"):
        tiles(TokenLayout("zigzag", 128, 4))
    with pytest.raises(ShapeError, match=r"the same tokens and ranks, not of \[\(16, 2\), \(16, 4\)\]"):
        tiles([TokenLayout("zigzag", 16, 4), TokenLayout("zigzag", 16, 2)])
    with pytest.raises(ValueError, match="one layout or up to 3 side by side, not 0"):
        tiles([])
    trace = trace_of("contiguous", backward=False, num_ranks=2)
    with pytest.raises(ValueError, match="a trace is of one layout, and 3 were given"):
        tiles(side_by_side(16, 2), trace=trace)
    with pytest.raises(ShapeError, match="the layout is for 4 ranks, and axis 'cp' of the trace has 2"):
        tiles(TokenLayout("contiguous", 16, 4), trace=trace)
    with pytest.raises(ValueError, match=r"rank 0 has 1 products.*not equally many for each of its 2 tiles"):
        times_of(trace, Panel(TokenLayout("zigzag", 16, 2), AttentionMask()), "cp")
