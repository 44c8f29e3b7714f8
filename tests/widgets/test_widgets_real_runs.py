"""Pictures of what torch and JAX really ran: the same picture from the same program in both."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from tests.hand_traces import ring_all_gather
from tests.widgets.frames import frame
from tplab import Mesh, P
from tplab.widgets import animate, timeline
from tplab.widgets.score import words
from tplab.widgets.score.score import Score, score

FRAMEWORKS = ("torch", "jax")


def run(framework: str, program, mesh: Mesh, x: np.ndarray, spec: P, **options: Any) -> Score:
    ranks = importlib.import_module(f"tplab.{framework}")
    as_tensor = importlib.import_module("torch").tensor if framework == "torch" else lambda array: array
    out = ranks.run(lambda x: program(ranks, x), mesh, as_tensor(x), in_specs=(spec,), **options)
    return score(out.trace)


def what_is_seen(piece: Score, position: float) -> Any:
    """A frame in words that two traces share: who holds whose data, and what flies from where to where."""
    now, bars = frame(piece, position), piece.bars
    held = {}
    for (rank, place), hold in now.cells.items():
        item = piece.items[place]
        held[rank, item.origin, item.piece] = piece.members(hold), int(piece.holds["state"][hold])
    flights = sorted((int(bars["rank"][row]), int(bars["peer"][row]), u) for row, u in now.flights)
    return held, flights, now.sent


def gather(ranks: Any, x: Any) -> Any:
    return ranks.ring_all_gather(x, "model")


def scatter(ranks: Any, x: Any) -> Any:
    return ranks.ring_reduce_scatter([x[..., place : place + 1] for place in range(4)], "model")


def both_ways(ranks: Any, x: Any) -> Any:
    return ranks.ring_all_gather(x, "model", direction="both")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_real_ring_looks_like_the_one_written_by_hand(framework: str):
    mesh, x = Mesh(data=2, model=4), np.arange(8, dtype=np.float32).reshape(2, 4)
    real = run(framework, gather, mesh, x, P("data", "model"))
    by_hand = score(ring_all_gather(mesh, "model", nbytes=4))
    assert words.sentences(real) == words.sentences(by_hand)
    for position in np.arange(0, 3.01, 0.25):
        assert what_is_seen(real, position) == what_is_seen(by_hand, position)
    end = frame(real, 3)
    for (_, item), hold in end.cells.items():
        assert real.values[real.holds["value"][hold]].ravel().tolist() == [real.items[item].origin]


@pytest.mark.parametrize("program", [gather, scatter, both_ways], ids=lambda program: program.__name__)
def test_torch_and_jax_make_the_same_picture(program):
    mesh = Mesh(data=2, model=4)
    x = np.random.default_rng(42).integers(0, 10, (2, 16)).astype(np.float32)
    torch_s, jax_s = (run(framework, program, mesh, x, P("data", "model")) for framework in FRAMEWORKS)
    assert torch_s.num_steps == jax_s.num_steps
    assert words.sentences(torch_s) == words.sentences(jax_s)
    for position in np.arange(0, torch_s.num_steps + 0.01, 0.5):
        assert what_is_seen(torch_s, position) == what_is_seen(jax_s, position)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_real_layer_has_its_compute_and_its_collective(framework: str):
    def layer(ranks: Any, x: Any) -> Any:
        return ranks.all_reduce(x @ x.T, "tp")

    piece = run(framework, layer, Mesh(tp=4), np.ones((64, 64), np.float32), P(None, "tp"), cluster="h100")
    assert piece.computes
    (told,) = words.sentences(piece)[1:]
    assert told.startswith("all_reduce over tp: every rank of the 4 ends with the sum of all their tensors")
    assert "after computing" in told
    assert set(frame(piece, 1).cells) == {(rank, 0) for rank in range(4)}
    for make in (animate, timeline):
        assert "1 step, each rank sends 24 KiB (modelled, h100, data sheet)" in repr(make(piece.trace))


def test_who_computes_is_named_where_it_is_not_who_sends():
    import torch

    from tplab.torch import axis_index, receive, run, send

    x = torch.ones(512, 512)

    def program():
        place = axis_index("pp")
        if place == 0:
            send(x, "pp", 1)
        elif place == 1:
            receive("pp", 0)
        elif place == 2:
            x.mm(x)

    told = words.sentences(score(run(program, Mesh(pp=4), cluster="laptop").trace))[-1]
    assert told == "rank 0 sends piece a to rank 1; meanwhile rank 2 computes (mm)"


def test_ranks_that_exchange_in_pairs_have_one_partner_each():
    """Half of them send up and half down: no rank sends to both neighbours."""
    from tplab.torch import ppermute, ring_shift, run, start

    def in_pairs(x):
        return ppermute(x, "tp", [(0, 1), (1, 0), (2, 3), (3, 2)])

    def both_ways(x):
        flights = [start(ring_shift, x, "tp", step) for step in (1, -1)]
        return [flight.wait() for flight in flights]

    def shifted(step, ranks):
        x = np.arange(float(ranks))
        fn = step if callable(step) else lambda x: ring_shift(x, "tp", step)
        return words.sentences(score(run(fn, Mesh(tp=ranks), x, in_specs=P("tp")).trace))[1]

    assert shifted(in_pairs, 4) == "every rank sends its own piece to its partner, 1 place away"
    assert shifted(both_ways, 4).endswith("to both neighbours")
    assert shifted(2, 4).endswith("to its partner, 2 places away")
    assert shifted(2, 5).endswith("to the rank 2 places on")
    assert shifted(-2, 5).endswith("to the rank 2 places back")


def test_a_sum_has_none_of_its_terms_names():
    """Rank 0 of a star adds up three tensors, and sends the sum back; along a line, parts of a sum are passed on."""

    def star(ranks, x):
        total = x
        for k in (1, 2, 3):
            total = total + ranks.ppermute(x, "tp", [(k, 0)])
        for k in (1, 2, 3):
            ranks.ppermute(total, "tp", [(0, k)])
        return total

    def line(ranks, x):
        for k in (0, 1, 2):
            x = x + ranks.ppermute(x, "tp", [(k, k + 1)])
        return x

    x = np.ones((4, 2))
    assert words.sentences(run("torch", star, Mesh(tp=4), x, P("tp")))[1:] == [
        "3 ranks send their own piece to rank 0",
        *(f"rank 0 sends the finished sum to rank {k}" for k in (1, 2, 3)),
    ]
    assert words.sentences(run("torch", line, Mesh(tp=4), x, P("tp")))[1:] == [
        "rank 0 sends x to rank 1",
        "rank 1 sends the sum of 2 ranks' parts to rank 2",
        "rank 2 sends the sum of 3 ranks' parts to rank 3",
    ]
