"""A pipeline's run is drawn as stages in a line, through which microbatches travel."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch.nn import Linear
from torch.nn.functional import mse_loss

import tplab.torch as tt
from tests.widgets.frames import frame
from tplab import Mesh, Trace
from tplab.cost import find
from tplab.exercises.three_dimensions import modelled
from tplab.schedules import Costs, dualpipe, interleaved_1f1b, one_f_one_b, simulate, zb_v
from tplab.widgets import animate, timeline
from tplab.widgets.paper.measured import Durations
from tplab.widgets.paper.palette import GRADIENT, KINDS, WORK, mix, token
from tplab.widgets.paper.wire import unpack
from tplab.widgets.score import lanes, words
from tplab.widgets.score.layout import columns, layout
from tplab.widgets.score.payload import of_animation, of_timeline
from tplab.widgets.score.score import COMPUTE, SEND, Score, score


def executed(ranks: int = 3, microbatches: int = 5) -> Trace:
    def one_batch() -> torch.Tensor:
        batch = [(torch.ones(2, 4), torch.ones(2, 4))] * microbatches
        return tt.train_batch(one_f_one_b(ranks, microbatches), Linear(4, 4), batch, mse_loss, costs=Costs())

    return tt.run(one_batch, Mesh(pp=ranks)).trace


RUNS = {
    "executed": executed,
    "1F1B": lambda: simulate(one_f_one_b(3, 5), Costs(transfer=0.5)).trace,
    "tenths": lambda: simulate(one_f_one_b(3, 5), Costs(0.1, 0.1, 0.1, transfer=0.03)).trace,
    "interleaved": lambda: simulate(interleaved_1f1b(4, 8, 2), Costs(transfer=0.5)).trace,
    "ZB-V": lambda: simulate(zb_v(4, 6), Costs(transfer=0.5)).trace,
    "DualPipe": lambda: simulate(dualpipe(4, 8), Costs(transfer=0.5)).trace,
}


@pytest.mark.parametrize("name", RUNS)
def test_what_travels_is_a_microbatch(name: str):
    piece = score(RUNS[name]())
    assert piece.is_pipeline
    assert [item.name for item in piece.items] == [str(number) for number in range(len(piece.items))]
    assert piece.items[2].text == "microbatch 2"
    assert set(piece.bars["flow"][piece.bars["kind"] == SEND].tolist()) == {1, 2}


@pytest.mark.parametrize("name", RUNS)
def test_the_playhead_rests_exactly_where_actions_end(name: str):
    whole = RUNS[name]()
    part = whole.since(float(np.unique(whole.column("start"))[2]))
    times = score(part).times
    assert times[0] == part.column("start").min() > 0 and times[-1] == part.column("end").max()
    assert set(times[1:].tolist()) <= set(part.column("end").tolist())


@pytest.mark.parametrize("name", RUNS)
def test_the_ranks_are_in_a_line(name: str):
    place = layout(score(RUNS[name]()))
    x, y = place.centres.T
    assert np.ptp(y) == 0 and (np.diff(x) > place.size[0]).all()
    forth, back = place.links[0, 1], place.links[1, 0]
    assert forth[1] < y[0] < back[1]  # activations above, gradients below


def test_activations_go_to_the_next_stage_and_gradients_come_back():
    for run in (executed(), RUNS["1F1B"]()):
        bars = score(run).bars
        for row in np.flatnonzero(bars["kind"] == SEND).tolist():
            assert bars["peer"][row] - bars["rank"][row] == {1: 1, 2: -1}[bars["flow"][row]]


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 5), one_f_one_b(4, 8)], ids=str)
def test_a_rank_holds_what_the_simulator_says(schedule):
    run = simulate(schedule, Costs(transfer=0.5))
    piece = score(run.trace)
    for position in np.arange(0.25, piece.num_steps, 0.5):
        now = frame(piece, position)
        for rank in range(schedule.num_ranks):
            times, held = run.activations(rank)
            wanted = held[np.searchsorted(times, now.time, side="right") - 1]
            assert len([cell for cell in now.cells if cell[0] == rank]) == wanted
    assert not frame(piece, piece.num_steps).cells  # in the end nothing is kept


def test_a_step_is_told_by_what_runs_and_what_travels():
    piece = score(simulate(one_f_one_b(3, 5), Costs(transfer=0.5)).trace)
    told = words.sentences(piece)
    assert told[:2] == ["no rank computes yet", "rank 0 runs F0"]
    assert told[2].startswith("rank 0 runs F1, rank 1 runs F0; on their way: activations of microbatch 0 to rank 1")
    assert not any("chunk" in sentence or "sum" in sentence for sentence in told)
    assert words.about(piece).endswith("5 microbatches")
    assert piece.table_caption == "activations held, by microbatch"


@pytest.mark.parametrize("name", RUNS)
def test_it_is_a_picture_too(name: str):
    assert animate(RUNS[name]()).picture().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", RUNS)
def test_legends_name_the_actions_that_ran(name: str):
    piece = score(RUNS[name]())
    ops = [event.op for event in piece.trace.select(kind="compute").events if re.match(r"[FBIW]\d", event.op)]
    ran = {name[0] for op in ops for name in op.split("+")}
    for keys, there in ((of_timeline(piece, Durations()), ran), (of_animation(piece), ran - {"F"})):
        assert {key.sign for key in keys if key.sign in {*"FBIW"}} == there


def test_both_of_a_pair_are_drawn(monkeypatch: pytest.MonkeyPatch):
    drawn = []
    monkeypatch.setattr(lanes, "draw_action", lambda sheet, kind, name, *_: drawn.append(("FBIW"[kind], name)))
    trace = simulate(dualpipe(2, 4), Costs()).trace
    lanes.draw(score(trace), 700)
    ops = [name for event in trace.select(kind="compute").events for name in event.op.split("+")]
    assert sorted(drawn) == sorted((name[0], name) for name in ops)


def tints_of(piece: Score) -> dict[int, str]:
    """The colour of each bar's outline on its timeline, as it is sent."""
    header, columns = unpack(timeline(piece.trace).score)
    looks, key = header["tables"][0]["looks"], columns["key0"]
    parts = zip(columns["mark0"].tolist(), columns["look0"].tolist())
    return {int(key[mark]): looks[look]["edge"] for mark, look in parts if mark >= 0 and "edge" in looks[look]}


@pytest.mark.parametrize("name", RUNS)
def test_on_a_page_a_message_has_the_colour_of_its_legend(name: str):
    piece = score(RUNS[name]())
    tints = tints_of(piece)
    for row in np.flatnonzero((piece.bars["kind"] == SEND) & (piece.bars["end"] > piece.bars["start"])).tolist():
        assert tints[row] == token((WORK, KINDS["F"], GRADIENT)[piece.bars["flow"][row]])


def test_other_work_has_the_colour_of_its_legend():
    """On a modelled clock, too, where it is known what kind of work it is."""
    piece = score(modelled(Mesh(pp=2, dp=1, tp=1), find("h100")))
    tints = tints_of(piece)
    other = np.flatnonzero((piece.bars["kind"] == COMPUTE) & (piece.actions < 0))
    assert len(other) and {tints[row] for row in other.tolist() if row in tints} == {token(WORK)}
    keys = {key.text: (key.fill, key.edge) for key in of_timeline(piece, Durations())}
    assert keys["other work"] == (mix(WORK, 0.55), WORK) and keys["other messages"] == (mix(WORK, 0.24), WORK)


def test_the_same_microbatch_of_several_pipelines_is_one_column():
    def one_batch() -> torch.Tensor:
        batch = [(torch.ones(2, 4), torch.ones(2, 4))] * 3
        return tt.train_batch(one_f_one_b(2, 3), Linear(4, 4), batch, mse_loss, data_axis="dp")

    piece = score(tt.run(one_batch, Mesh(dp=2, pp=2)).trace)
    assert len(piece.items) == 6 and columns(piece).names == ["0", "1", "2"]


def test_the_gradient_of_a_tied_weight_is_no_microbatch():
    """Two ranks exchange the gradient of the tied embedding after their last actions."""
    piece = score(modelled(Mesh(pp=2, dp=1, tp=1), find("h100")))
    bars = piece.bars
    sends = np.flatnonzero(bars["kind"] == SEND)
    tied = sends[bars["item"][sends] < 0]
    assert bars["rank"][tied].tolist() == [1, 0] and (bars["flow"][tied] == 0).all()
    assert len(sends) == 2 + 4  # for 2 microbatches, an activation and its gradient each
