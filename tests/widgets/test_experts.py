"""`experts`: its numbers are the bytes and times of the trace, and the counts of the routing."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from jax import random

import tplab.jax as tj
import tplab.torch as tt
from tplab import Mesh, P
from tplab.errors import ShapeError, TraceError
from tplab.experts import Routing, contiguous, rows_between, tokens_between
from tplab.trace.trace import Trace
from tplab.widgets import experts, to_html
from tplab.widgets.mixture.drawing import WIDE, Place
from tplab.widgets.mixture.reading import Layer, layers_of

MESH, BOTH, WIDTH = Mesh(node=2, ep=2), ("node", "ep"), 4
EACH = P(BOTH)
DISPATCHES = ("all_to_all", "per_rank", "gather", "two_levels")
RULE = Routing(experts=8, top_k=2)


def torch_run(dispatch: str, rule: Routing = RULE, layers: int = 1, tokens: int = 24, seed: int = 0) -> Any:
    """(trace, choices of each layer), forward and backward."""

    def program(x: torch.Tensor) -> Any:
        x, chosen = x.clone().requires_grad_(), []
        for _ in range(layers):
            y, routed = tt.MixtureOfExperts(WIDTH, 6, rule, BOTH, dispatch=dispatch)(x)
            x = x + y
            chosen.append(routed.choices)
        x.sum().backward()
        return torch.stack(chosen, 1)

    torch.manual_seed(seed)
    x = torch.randn(tokens, WIDTH) + 0.6
    out = tt.run(program, MESH, x, in_specs=EACH, out_specs=EACH, cluster="h100")
    return out.trace, out.value.unbind(1)


def jax_run(dispatch: str, rule: Routing = RULE) -> Any:
    model = tj.MixtureOfExperts(WIDTH, 6, rule, BOTH, dispatch=dispatch)

    def program(params: Any, x: Any) -> Any:
        y, routed = model(params, x)
        return y, routed.choices

    x = np.random.default_rng(0).normal(size=(16, WIDTH)).astype("f4")
    specs = {"in_specs": (model.specs, EACH), "out_specs": (EACH, EACH)}
    out = tj.run(program, MESH, model.init(random.key(0)), x, cluster="h100", **specs)
    return out.trace, (np.asarray(out.value[1]),)


def counted(choices: Any, ranks: int = 4, size: int = 8) -> np.ndarray:
    """[R, E], written out."""
    found = np.zeros((ranks, size), int)
    for token, chosen in enumerate(np.asarray(choices)):
        for expert in chosen[chosen >= 0]:
            found[token * ranks // len(choices), expert] += 1
    return found


def check_bytes(layer: Layer, trace: Trace, row: int) -> None:
    """What is drawn between ranks is what the ranks sent, in rows of so many bytes."""
    for level in layer.levels:
        leave = level.pairs.sum(1) - level.pairs.diagonal()
        for place, rank in enumerate(layer.ranks):
            event = level.there[place]
            sent = trace.select(rank=rank, kind="collective").events
            assert [e.bytes for e in sent if (e.message, e.start) == (event.message, event.start)] == [event.bytes]
            assert level.is_gather or event.bytes == leave[place] * row
            if not level.is_gather:
                assert level.back[place].bytes == (level.pairs.sum(0) - level.pairs.diagonal())[place] * row
            beside = sum(one.bytes for one in level.beside[place])
            assert beside == sum(
                one.bytes
                for one in trace.select(rank=rank, kind="collective", axis=level.axis).events
                if one.phase == "forward" and one.end <= layer.spent[place].arrived and one.shape[1:] != (WIDTH,)
            )


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_in_torch_it_shows_the_rows_that_travelled_and_the_choices_that_were_made(dispatch: str):
    trace, (choices,) = torch_run(dispatch)
    (seen,), (given,) = layers_of(trace), layers_of(trace, choices)
    assert (seen.loads == counted(choices)).all() and (given.loads == seen.loads).all()
    placement, (level, *_) = contiguous(8, 4), seen.levels
    once = rows_between(choices.numpy(), placement, once=True)
    want = {"all_to_all": rows_between(choices.numpy(), placement), "per_rank": once, "gather": np.full((4, 4), 6)}
    if dispatch == "two_levels":
        by_node = level.pairs.reshape(2, 2, 2, 2).sum((1, 3))
        assert (by_node == tokens_between(choices.numpy(), placement, 2)).all()
        inner = seen.levels[1].pairs
        assert (inner.sum(0) == once.sum(0)).all() and not inner[:2, 2:].any() and not inner[2:, :2].any()
    else:
        assert (level.pairs == want[dispatch]).all()
    check_bytes(seen, trace, 4 * WIDTH)
    for rank, spent in enumerate(seen.spent):
        work = [e for e in trace.select(rank=rank, kind="compute").events if spent.arrived <= e.start < spent.computed]
        assert sum(event.flops for event in work) == seen.flops[rank]
        products = [event for event in work if event.op == "mm"]
        assert sum(event.shape[0] for event in products) == 3 * seen.of_ranks[rank]  # swiglu: three for each row
        assert spent.begin < spent.arrived < spent.computed <= spent.met < spent.end


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_in_jax_slots_travel_and_dropped_choices_are_told(dispatch: str):
    trace, (choices,) = jax_run(dispatch, Routing(8, 2, capacity=1.0))
    (seen,), (given,) = layers_of(trace), layers_of(trace, choices)
    assert (seen.loads == counted(choices)).all() and (given.loads == seen.loads).all()
    assert sum(given.dropped) == (choices < 0).sum() > 0
    card = experts(trace, choices)
    assert f"{(choices < 0).sum()} choices found no room" in card.sentence
    assert "no rank waits for long, since each rank computes all its slots, also empty ones" in card.sentence
    assert [level.is_padded for level in seen.levels] == [dispatch != "gather"] * len(seen.levels)
    check_bytes(seen, trace, 4 * WIDTH)


def said(card: Any) -> list[tuple[tuple[str, str], ...]]:
    return [mark.rows for mark in card.drawn.marks]


@pytest.mark.parametrize("dispatch", ["all_to_all", "two_levels"])
def test_what_the_hints_say_adds_up_to_the_bytes_of_the_trace(dispatch: str):
    trace, (choices,) = torch_run(dispatch)
    card = experts(trace, choices)
    total = 0
    for (_, head), (_, sent), *_ in [rows for rows in said(card) if rows[1][0] == "sent"]:
        assert re.match(r"rank \d to rank \d|\d+ rows? stays? on rank \d, along (node|ep|node,ep)$", head), head
        if " to rank " in head:
            total += int(re.search(r": ([\d,]+) B", sent)[1].replace(",", ""))  # type: ignore[index]
    rows = [e.bytes for level in card.layers[0].levels for e in level.there]
    assert total == sum(rows) > 0
    computed = [rows for rows in said(card) if rows[0][1].startswith("expert ")]
    for expert, (_, (_, text), *origins) in enumerate(computed):
        assert int(text.split()[0]) == counted(choices)[:, expert].sum()
        for _, origin in origins:
            rank, number = map(int, re.findall(r"\d+", origin)[:2])
            assert number == counted(choices)[rank, expert]
            tokens = [int(one) for one in re.findall(r"\d+", origin.partition(":")[2])]
            assert tokens == [t for t in range(6) if expert in choices[6 * rank + t]][:6]


@pytest.mark.parametrize("is_known", [False, True])
def test_rows_that_are_passed_on_keep_the_colour_of_their_tokens(is_known: bool):
    """At the second level, as many of a rank's rows come to each rank as it has tokens with experts there."""
    trace, (choices,) = torch_run("two_levels")
    (layer,) = layers_of(trace, choices if is_known else None)
    found = np.zeros((4, 4), int)
    for source, target in zip(*layer.levels[1].pairs.nonzero()):
        for origin, rows in layer.origins(1, int(source), int(target)):
            assert origin % 2 == source % 2  # its place in the node
            found[origin, target] += rows
    assert (found == rows_between(choices.numpy(), contiguous(8, 4), once=True)).all()
    assert layer.nodes == [0, 0, 1, 1]


def test_words_count_what_arrives_what_is_copied_and_what_is_alike():
    trace, (choices,) = torch_run("two_levels")
    card = experts(trace, choices)
    (layer,) = card.layers
    copies = layer.levels[1].pairs.sum() - layer.levels[0].pairs.sum()
    assert copies > 0 and f"{copies} are copies for more than one rank" in card.says[2][1]
    arrive = layer.levels[1].pairs.sum(0)
    assert f"rank {arrive.argmax()} then has the most, {arrive.max()}" in card.says[2][1]
    assert (layer.of_ranks > arrive).any() and "computed by each of them" in card.says[3][1]
    assert "no rank waits for long, since so few rows take nearly the same time on every rank" in card.sentence
    plain = experts(*[one if place == 0 else one[0] for place, one in enumerate(torch_run("all_to_all"))])
    assert plain.says[3][1].endswith("each rank then has 12") and "computed by each" not in plain.says[2][1]


def test_more_slots_are_no_copies():
    trace, (choices,) = jax_run("two_levels")
    card = experts(trace, choices)
    first, second = (level.pairs.sum() for level in card.layers[0].levels)
    assert second > first and not any("cop" in text for _, text in card.says)


def test_numbers_of_experts_appear_when_they_are_computed():
    trace, (choices,) = torch_run("all_to_all")
    card = experts(trace, choices)
    at = Place(WIDE, 4, 2).times - 12
    numbers = [part.when.begin for part in card.drawn.parts if part.text.isdigit() and part.place[0] == at]
    assert len(numbers) == 8 and min(numbers) >= 1


def test_bars_are_as_long_as_the_rows_and_times_of_the_trace():
    trace, (choices,) = torch_run("all_to_all")
    card = experts(trace, choices)
    (layer,), place = card.layers, Place(WIDE, 4, 2)
    loads, left = counted(choices), place.experts + 22
    per_row = (place.times - left - 42) / loads.sum(0).max()
    bars = [part.place for part in card.drawn.parts if part.method == "box" and part.place[3] == place.expert - 2]
    found = np.zeros(8)
    for _, y, width, _ in {bar for bar in bars if left - 1e-6 <= bar[0] < place.times}:
        rank = int((y - place.top(0)) // (place.top(1) - place.top(0)))
        found[2 * rank + round((y - 1 - place.top(rank)) / place.expert)] += width
    assert found == pytest.approx(per_row * loads.sum(0))
    scale = (WIDE - place.times - 4) / max(spent.end - spent.begin for spent in layer.spent)
    hatched = [part.place[2] for part in card.drawn.parts if part.method == "hatch"]
    assert hatched == pytest.approx([scale * spent.waits for spent in layer.spent])


def test_a_rank_with_little_to_do_waits():
    """All tokens choose the experts of rank 0, whose products take longer than the others' launches."""

    def program(x: torch.Tensor) -> torch.Tensor:
        layer = tt.ParallelExperts(64, 4096, Routing(4, 1), "ep")
        chosen = torch.zeros(len(x), 1, dtype=torch.long)
        layer(x, tt.Routed(chosen, torch.ones(len(x), 1), torch.ones(len(x), 4), torch.ones(len(x), 4)))
        return chosen

    out = tt.run(program, Mesh(ep=4), torch.randn(256, 64), in_specs=P("ep"), out_specs=P("ep"), cluster="laptop")
    card = experts(out.trace, out.value)
    (layer,) = card.layers
    assert layer.of_ranks.tolist() == [256, 0, 0, 0]
    assert layer.spent[0].waits == 0 and min(spent.waits for spent in layer.spent[1:]) > 5 * layer.spent[1].computing
    assert "rank 0 computes 256 rows, and rank 1 only 0; 3 of 4 experts have none; rank 1 waits for" in card.sentence


def test_layers_follow_one_another():
    trace, choices = torch_run("all_to_all", layers=3)
    card = experts(trace, choices)
    assert card.num_steps == 9 and len(card.says) == 10
    for layer, table in zip(card.layers, choices, strict=True):
        assert (layer.loads == counted(table)).all()
    assert card.says[5][0] == "layer 2 of 3: experts compute" and "the first of 3 layers" in card.sentence
    card.step = 9
    with pytest.raises(Exception, match="there are steps 0 to 9"):
        card.step = 9.5
    with pytest.raises(ShapeError, match="choices of 2 layers, and the trace has 3"):
        experts(trace, choices[:2])


def test_the_pictures_differ_from_step_to_step(tmp_path: Any):
    trace, (choices,) = torch_run("all_to_all")
    pictures = [experts(trace, choices, step=step).picture() for step in (0, 0.5, 1, 2, 3)]
    assert pictures[0] == pictures[4] and len({*pictures}) == 4
    page = to_html(experts(trace, choices), tmp_path / "experts.html").read_text(encoding="utf8")
    assert "8 experts on 4 ranks: of 48 choices," in page


def test_what_does_not_fit_is_refused():
    trace, (choices,) = torch_run("all_to_all")
    with pytest.raises(ShapeError, match=r"these choices make rank 0 send .* and in the trace it sent"):
        experts(trace, (choices + 3) % 8)
    with pytest.raises(ShapeError, match="room for 64 experts, and there are 128"):
        experts(trace, experts=128)
    many, _ = torch_run("all_to_all", tokens=256)
    with pytest.raises(TraceError, match="no values of messages with more than 64 numbers; give choices="):
        experts(many)
    without = tt.run(
        lambda x: tt.all_to_all(x, "ep"), Mesh(ep=2), torch.ones(4, 2), in_specs=P("ep"), out_specs=P("ep")
    )
    with pytest.raises(TraceError, match="give the run a cluster"):
        experts(without.trace)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return tt.all_reduce(x @ x.T, "ep")

    with pytest.raises(TraceError, match="no tokens travel to experts in this trace"):
        experts(tt.run(plain, Mesh(ep=2), torch.ones(2, 2), cluster="h100").trace)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_experts_that_are_cut_over_ranks_are_refused(framework: str):
    """Their ranks exchange tokens once more, which would look like four ranks with experts of their own."""
    mesh, every = Mesh(ep=2, tp=2), P(("ep", "tp"))
    if framework == "torch":
        x = torch.randn(16, WIDTH)
        out = tt.run(
            lambda x: tt.MixtureOfExperts(WIDTH, 6, RULE, "ep", tensor_axis="tp")(x)[0],
            mesh, x, in_specs=every, cluster="h100",
        )  # fmt: skip
    else:
        model, x = tj.MixtureOfExperts(WIDTH, 6, RULE, "ep", tensor_axis="tp"), np.ones((16, WIDTH), "f4")
        out = tj.run(
            lambda params, x: model(params, x)[0], mesh, model.init(random.key(0)), x,
            in_specs=(model.specs, every), out_specs=every, cluster="h100",
        )  # fmt: skip
    with pytest.raises(TraceError, match=r"each expert\s+is cut over"):
        experts(out.trace)


def test_ranks_that_share_no_experts_with_rank_0_are_not_shown():
    """On dp x ep, where whole tensors are also gathered along dp."""

    def program(x: torch.Tensor) -> torch.Tensor:
        tt.all_gather(x, "dp")
        return tt.MixtureOfExperts(WIDTH, 6, RULE, "ep")(x)[1].choices

    both = P(("dp", "ep"))
    x = torch.randn(16, WIDTH)
    out = tt.run(program, Mesh(dp=2, ep=2), x, in_specs=both, out_specs=both, cluster="h100")
    (seen,), (given,) = layers_of(out.trace), layers_of(out.trace, out.value[:8])
    assert seen.ranks == given.ranks == (0, 1)
    assert (seen.loads == counted(out.value[:8], ranks=2)).all() and (given.loads == seen.loads).all()
