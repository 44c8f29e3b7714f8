"""What a plan says each rank sends and holds is what the ranks send and hold that execute it, byte for byte."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from tests.forecast.executed import Case, case, cases, sent_by_axis
from tests.pairwise import cover
from tplab import Mesh
from tplab.experts import Routing
from tplab.forecast.activations import stages_on
from tplab.forecast.memory import memory
from tplab.forecast.traffic import bytes_by_axis
from tplab.models.gpt import GPTConfig, GPTExperts
from tplab.training.recipe import batch_axes

LAYER_NORM = GPTConfig(132, 24, 4, 12, 12, num_kv_heads=6, activation="gelu", hidden=36)
GATED = GPTConfig(132, 24, 4, 12, 12, activation="swiglu", norm="rms", bias=False, hidden=36)
COUNTER = 4
"""Bytes: AdamW counts its steps for each parameter, which is not forecast."""
NUMBERS = 18
"""Bytes per token: ids, and which count. Where they are recomputed, they are kept with the whole batch."""


def check(case: Case) -> None:
    """One run is compared with both. A backward pass in two parts keeps what is not forecast."""
    out = case.executed()
    check_traffic(case, out)
    if not case.plan.rule(2 * case.plan.pp).splits_backward:
        check_memory(case, out)


def check_traffic(case: Case, out: Any) -> None:
    """With experts, each message between stages also has the balance loss so far, a number; and where ranks share the
    sequence, that of each layer is added up. For that loss, ranks that share a context add up each expert's choices
    and scores in each sequence."""
    balance = 4 * case.recipe.microbatches if case.config.experts else 0
    layers = case.model.layers - case.model.dense_layers
    summed = balance * case.recipe.sequence_parallel * layers
    cp = case.mesh.shape.get("cp", 1)
    per_sequence = 2 * 4 * case.model.experts * layers * 2 * (cp - 1) // cp if case.config.experts else 0
    sequences = case.recipe.batch_size // case.mesh.axis_size(batch_axes(case.mesh))
    expected = bytes_by_axis(case.model, case.plan, case.recipe.batch_size, case.config.context, "tplab")
    for rank in case.mesh.ranks:
        said = {axis: bytes for axis, bytes in expected[case.plan.pipeline_rank(rank)].items() if bytes}
        said |= {"pp": said["pp"] + balance} if "pp" in said else {}
        said |= {"tp": said["tp"] + said.pop("etp", 0) + summed} if "tp" in said else {}
        said |= {"cp": said["cp"] + per_sequence * sequences} if "cp" in said else {}
        assert sent_by_axis(out, rank) == said, f"rank {rank}"


def check_memory(case: Case, out: Any) -> None:
    """Parameters, gradients, optimizer states and activations of every rank, as they were counted while it ran."""
    recipe = case.recipe
    held = memory(case.model, case.plan, recipe.batch_size, case.config.context, "tplab")
    for rank in case.mesh.ranks:
        said, counted = held[case.plan.pipeline_rank(rank)].by_kind, out.memory[rank]
        row = int(counted.of("activations").argmax())
        assert counted.at(row)["parameters"] == said["parameters"], f"parameters of rank {rank}"
        most = min(2, case.mesh.axis_size("dp")) if stages_on(case.model, case.plan, 0)[0].share == 1 else 1
        if recipe.zero < most:  # they are whole then, a microbatch's beside their sums; copies of stages need more
            # From the third microbatch on, a sum is beside the one that it replaces: at most that of the embedding.
            table = 4 * case.config.vocab_size * case.config.width // case.mesh.axis_size("tp")
            more = table if recipe.microbatches > 2 else 0
            assert 0 <= counted.of("gradients").max() - said["gradients"] <= more, f"gradients of rank {rank}"
        num_counters, left = divmod(int(counted.of("optimizer").max()) - said["optimizer"], COUNTER)
        assert left == 0 and 0 < num_counters < 100, f"optimizer of rank {rank}"
        activations = int(counted.of("activations").max())
        if recipe.checkpoint_every and case.plan.virtual > 1:
            # Which of its stages a rank recomputes at its peak is not known: an input of a layer or two more, or less.
            mesh = case.mesh
            tokens = recipe.batch_size * case.config.context / mesh.axis_size("dp") / mesh.shape.get("cp", 1)
            input_bytes = 4 * case.config.width * tokens / recipe.microbatches
            near = pytest.approx(said["activations"], rel=0.1, abs=2 * input_bytes)
            assert activations == near, f"activations of rank {rank}"
        elif recipe.checkpoint_every:
            tokens = recipe.batch_size // case.mesh.axis_size("dp") * case.config.context
            assert 0 <= activations - said["activations"] <= NUMBERS * tokens, f"activations of rank {rank}"
        else:
            assert activations == said["activations"], f"activations of rank {rank}"


CASES = {
    "tp": case(LAYER_NORM, tp=3),
    "tp, sequence parallel": case(LAYER_NORM, tp=2, sequence_parallel=True),
    "tp, recomputed": case(GATED, tp=2, checkpoint_every=1, sequence_parallel=True),
    "dp": case(LAYER_NORM, dp=3),
    "ZeRO 1": case(GATED, dp=3, zero=1),
    "ZeRO 2": case(GATED, dp=2, zero=2),
    "ZeRO 3": case(LAYER_NORM, dp=2, zero=3),
    "ZeRO 3, recomputed": case(LAYER_NORM, dp=2, zero=3, checkpoint_every=1),
    "dp, pp, tp": case(GATED, dp=2, pp=2, tp=2, zero=1, sequence_parallel=True),
    "cp": case(GATED, cp=3),
    "cp, dp": case(LAYER_NORM, cp=2, dp=2, zero=1),
    "cp, tp": case(LAYER_NORM, cp=2, tp=2, sequence_parallel=True),
    "cp, pp": case(GATED, cp=2, pp=2),
    "ZeRO 3 over cp": case(LAYER_NORM, cp=2, zero=3),
    "interleaved": case(GATED, "interleaved_1f1b", pp=2, microbatches=4),
    "a V": case(GATED, "zb_v", pp=2, tp=2, microbatches=4),
    "waves, where inputs wait": case(replace(LAYER_NORM, dropout=0.1), "hanayo", pp=2, cp=2, microbatches=4),
    "two directions": case(LAYER_NORM, "dualpipe", pp=2, microbatches=4),
    "two directions of four": case(LAYER_NORM, "chimera", pp=4, microbatches=4),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_do_what_the_plan_says(name: str):
    check(CASES[name])


def with_experts(config: GPTConfig, experts: GPTExperts, num_layers: int = 2, **recipe: Any) -> Case:
    one = case(replace(config, num_layers=num_layers, experts=experts), dp=4, **recipe)
    context = {name: recipe[name] for name in ("cp",) if name in recipe}
    return one._replace(mesh=Mesh(pp=recipe.get("pp", 1), dp=2, **context, ep=2, tp=recipe.get("tp", 1)))


@pytest.mark.parametrize(
    ("blocks", "shared", "sizes"),
    [
        (None, 0, {"tp": 1, "zero": 1}),
        ((1, 2), 12, {"tp": 1, "zero": 1}),
        ((1, 2), 12, {"tp": 2, "pp": 2}),
        ((1, 2), 12, {"tp": 2, "sequence_parallel": True}),
        ((1, 2), 12, {"cp": 2, "zero": 1}),
    ],
    ids=str,
)
def test_ranks_with_experts_send_and_hold_what_the_plan_says(
    blocks: tuple[int, ...] | None, shared: int, sizes: dict[str, Any]
):
    """Every token goes to every rank, so that it does not matter which experts it chooses."""
    experts = GPTExperts(Routing(4, 2), 24, blocks=blocks, shared=shared)
    one = with_experts(GATED, experts, 3, dispatch="gather", **sizes)
    out = one.executed()
    check_traffic(one, out)
    held = memory(one.model, one.plan, one.recipe.batch_size, one.config.context, "tplab")
    for rank in one.mesh.ranks:
        said = held[one.plan.pipeline_rank(rank)].by_kind
        assert out.memory[rank].of("parameters").max() == said["parameters"]


LAYERS = [
    (GATED, 2, 0, {}),
    (GATED, 4, 12, {"tp": 2, "sequence_parallel": True}),
    (GATED, 2, 12, {"tp": 2, "sequence_parallel": True}),
    (LAYER_NORM, 1, 0, {"tp": 2}),
    (LAYER_NORM, 2, 12, {"checkpoint_every": 1}),
    (GATED, 2, 12, {"cp": 2}),
]


@pytest.mark.parametrize(
    ("config", "top_k", "shared", "about", "dispatch"),
    cover((*layer, dispatch) for layer in LAYERS for dispatch in ("all_to_all", "per_rank", "gather")),
    ids=str,
)
def test_ranks_with_experts_keep_what_the_plan_says(
    config: GPTConfig, top_k: int, shared: int, about: dict[str, Any], dispatch: str
):
    """The plan's loads are equal. Executed, all choices of a batch of one microbatch are those of the ranks together,
    and only how many copies of a token they make is left to chance; a layer that is recomputed is the fullest one."""
    one = with_experts(
        config, GPTExperts(Routing(4, top_k), 36, shared=shared), dispatch=dispatch, microbatches=1, **about
    )
    held = memory(one.model, one.plan, one.recipe.batch_size, one.config.context, "tplab")
    memories = [int(memory.of("activations").max()) for memory in one.executed().memory]
    near = 0.04 if one.recipe.checkpoint_every else 0.005 if dispatch == "per_rank" and top_k < 4 else 0
    assert sum(memories) / len(memories) == pytest.approx(held[0].by_kind["activations"], rel=near)


@settings(max_examples=5, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # to shrink one takes minutes
@given(cases())
def test_ranks_do_what_any_plan_says(case: Case):
    check(case)
