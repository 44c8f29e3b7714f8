"""Experts over ranks: what a plan says they send is what the layers of tplab.torch send, byte for byte."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from tplab import Mesh, P
from tplab.errors import PlanError
from tplab.experts import Routing, expected_copies, fold
from tplab.forecast import Model, Plan, forecast, plans
from tplab.forecast.beside import beside
from tplab.forecast.classes import class_of
from tplab.forecast.layers import layer_seconds, local
from tplab.forecast.messages import ranks_along
from tplab.forecast.rows import forecast_row
from tplab.forecast.stacks import find_stack
from tplab.forecast.traffic import bytes_by_axis, layer_traffic

WIDTH, HIDDEN = 6, 12
AXES = {"outer": "ep", "inner": "ep inside", "ep": "ep", "tp": "etp"}


def executed(mesh: Mesh, routing: Routing, dispatch: str, same_tokens: bool) -> tuple[int, Any]:
    """Forward and backward of the experts, each rank with every combination of experts once: all loads are equal, and a
    token's copies are those of the mean. Returns the number of its tokens, and the trace."""
    torch = pytest.importorskip("torch")
    from tplab.torch import ParallelExperts, run
    from tplab.torch.layers.router import Routed

    choices = torch.tensor([*combinations(range(routing.experts), routing.top_k)])
    axis = ("outer", "inner") if dispatch == "two_levels" else "ep"
    tensor_axis = "tp" if "tp" in mesh.axis_names else None

    def program() -> None:
        about: dict[str, Any] = {"dispatch": dispatch, "tensor_axis": tensor_axis, "same_tokens": same_tokens}
        experts = ParallelExperts(WIDTH, HIDDEN, routing, axis, **about)
        x, weights = torch.ones(len(choices), WIDTH), torch.ones(choices.shape)
        x.requires_grad_()
        weights.requires_grad_()
        experts(x, Routed(choices, weights, *[torch.zeros(())] * (len(Routed._fields) - 2))).sum().backward()

    return len(choices), run(program, mesh).trace


@pytest.mark.parametrize(
    ("dispatch", "sizes", "same_tokens"),
    [
        ("all_to_all", {"ep": 2}, False),
        ("all_to_all", {"ep": 4, "tp": 2}, False),
        ("all_to_all", {"ep": 2, "tp": 4}, True),
        ("per_rank", {"ep": 4}, False),
        ("per_rank", {"ep": 2, "tp": 2}, False),
        ("per_rank", {"ep": 2, "tp": 2}, True),
        ("gather", {"ep": 4}, False),
        ("gather", {"ep": 2, "tp": 2}, False),
        ("two_levels", {"outer": 2, "inner": 2}, False),
        ("two_levels", {"outer": 2, "inner": 4, "tp": 2}, False),
        ("two_levels", {"outer": 2, "inner": 2, "tp": 2}, True),
    ],
    ids=str,
)
def test_experts_send_what_the_plan_says(dispatch: str, sizes: dict[str, int], same_tokens: bool):
    routing = Routing(8, 2)
    tp = sizes.get("tp", 1)
    tokens, trace = executed(Mesh(**sizes), routing, dispatch, same_tokens)
    ep = int(np.prod([size for name, size in sizes.items() if name != "tp"]))
    model = Model(layers=1, hidden=WIDTH, heads=tp, head_dim=1, vocab=8, ffn=HIDDEN, experts=8, experts_per_token=2)
    plan = Plan(dp=ep, tp=tp, ep=ep, etp=tp, dispatch=dispatch, sequence_parallel=not same_tokens, dtype="float32")
    length, node = tokens if same_tokens else tokens * tp, sizes.get("inner", ep) * tp
    said: dict[str, float] = defaultdict(float)
    for one in layer_traffic(model, plan, length, "tplab", node):
        if one.axis != "tp":
            said[one.axis] += one.total
        elif one.bytes == tokens * 4 * 2:  # the weights' gradients; the others are the MLP's and attention's
            said["etp"] += one.total
    for rank in trace.mesh.ranks:
        sent = Counter[str]()
        for event in trace.select(rank=rank, kind="collective").events:
            if not (same_tokens and event.op == "all_reduce" and event.bytes > tokens * 4 * 2 * 2 * (tp - 1) / tp):
                sent[AXES[event.axis]] += event.bytes
        assert dict(sent) == pytest.approx(dict(said), rel=1e-9), rank


@pytest.mark.parametrize(("top_k", "near"), [(4, 0.0), (2, 0.03)])  # which two a router chooses, the mean cannot know
@pytest.mark.parametrize("parallel", [False, True])
def test_a_gpt_sends_a_token_once_to_a_node(top_k: int, near: float, parallel: bool):
    torch = pytest.importorskip("torch")
    from tplab.models.gpt import GPTConfig, GPTExperts
    from tplab.torch import run
    from tplab.torch.models.gpt import GPT

    config = GPTConfig(132, 24, 2, 12, 48, norm="rms", bias=False, experts=GPTExperts(Routing(4, top_k), 24))
    mesh, about = Mesh(dp=2, node=2, ep=2, tp=2), dict[str, Any](sequence_parallel=parallel)
    batch = torch.randint(132, (8, 1, config.context), generator=torch.Generator().manual_seed(0))

    def program(ids: Any) -> None:
        data_axis, expert_axis = ("dp", "node", "ep"), ("node", "ep")
        GPT(config, data_axis=data_axis, expert_axis=expert_axis, dispatch="two_levels", **about).loss(
            *ids, *ids
        ).backward()

    plan = Plan(dp=8, tp=2, ep=4, etp=2, dispatch="two_levels", dtype="float32", **about)
    (said,) = bytes_by_axis(Model.of_config(config), plan, 8, config.context, "tplab", node_size=4)
    sent, names = Counter[str](), {"node": "ep", "ep": "ep inside", "tp": "tp"}
    for event in run(program, mesh, batch, in_specs=P(("dp", "node", "ep"))).trace.select(kind="collective").events:
        is_number = event.op == "all_reduce" and event.bytes <= 16
        sent[names[event.axis or ""]] += 0 if is_number else event.bytes
    said["tp"] += said.pop("etp", 0)
    for axis in ("ep", "ep inside", "tp"):
        assert sent[axis] / mesh.size == pytest.approx(said[axis], rel=near), axis


MIXTURE = replace(Model.find("mixtral-8x7b"), layers=4)


@pytest.mark.parametrize(("tp", "ep", "etp"), [(2, 2, 2), (1, 2, 2), (2, 4, 1), (4, 2, 2), (2, 1, 4)])
def test_folded_ranks_are_those_of_the_mesh_that_fold_makes(tp: int, ep: int, etp: int):
    plan = Plan(dp=8 // tp, tp=tp, ep=ep, etp=etp, sequence_parallel=True)
    folded = fold({"dp": plan.dp, "tp": tp}, {"edp": plan.expert_copies, "ep": ep, "etp": etp})
    for axis in ("ep", "etp"):
        if plan.ep > 1 or axis == "etp":
            assert set(ranks_along(plan, axis)) == set(folded.mesh.group(0, folded.experts[axis]))
    on_rank = MIXTURE.layer_on_rank(tp, ep, etp)
    split, copied, experts = (sum(of) for of in zip(*MIXTURE.layer_parts.values()))
    assert on_rank == split // tp + copied + experts // (ep * etp)
    assert plan.expert_copies * ep * etp == 8


def test_experts_are_divided_as_before_where_nothing_is_said():
    for plan, etp in ((Plan(dp=4, tp=2, ep=4, sequence_parallel=True), 1), (Plan(dp=4, tp=2), 2)):
        said, usual = (
            forecast(MIXTURE, one, "h100-measured", batch=8, sequence=4096) for one in (replace(plan, etp=etp), plan)
        )
        assert said.seconds == usual.seconds and said.held == usual.held
        assert usual.measured and said.measured is None  # nobody has measured who said it


def test_a_skew_makes_all_wait_for_the_fullest_rank():
    cluster, stack = "h100-measured", find_stack("megatron")
    plan, even = Plan(dp=8, ep=8, skew=1.2), Plan(dp=8, ep=8)
    load = plan.load(MIXTURE, 4096)
    assert load > 1.2 and Plan(dp=8, skew=1.2).load(MIXTURE, 4096) == even.load(MIXTURE, 4096) == 1
    assert 1 < Plan(dp=8, ep=8, skew=0.4).load(MIXTURE, 4096) < load
    fuller, equal = (MIXTURE.matmuls(4096, 4096, 1, 8, load=one)["up"][0] for one in (load, 1.0))
    assert fuller == pytest.approx(load * equal, rel=1e-3)
    sent = [sum(one.bytes for one in layer_traffic(MIXTURE, one, 4096) if one.axis == "ep") for one in (plan, even)]
    assert sent[0] == pytest.approx(load * sent[1], rel=1e-6)
    a, b = (forecast(MIXTURE, one, cluster, batch=64, sequence=4096, stack=stack) for one in (plan, even))
    assert a.seconds > b.seconds and a.peak.activations > b.peak.activations and "skew 1.2" in str(a)


def test_fewer_copies_take_less_time_between_nodes():
    from tplab.cost import find

    cluster = find("h100-measured")
    taken = {
        dispatch: layer_seconds(
            Model.find("deepseek-v3"),
            local(Plan(dp=64, ep=64, dispatch=dispatch)),
            cluster,
            4096,
            find_stack("megatron").on(cluster),
        ).ep
        for dispatch in ("two_levels", "per_rank", "all_to_all", "gather")
    }
    assert sorted(taken, key=taken.__getitem__) == [*taken]
    whole, halves = (
        layer_seconds(MIXTURE, local(Plan(dp=16, ep=8, etp=etp)), cluster, 4096, find_stack("megatron")).ep
        for etp in (None, 2)  # of one node, and of two
    )
    assert halves > 2 * whole
    copies = expected_copies(Model.find("deepseek-v3").routing, 8)
    levels = {one.axis: one for one in layer_traffic(Model.find("deepseek-v3"),
        Plan(dp=64, ep=64, dispatch="two_levels"), 4096, node_size=8) if one.phase == "forward"}  # fmt: skip
    assert levels["ep"][1:5] == (8, "all_to_all", round(4096 * copies * 7168 * 2), 2)
    assert levels["ep inside"].ranks == 8 and levels["ep inside"].bytes > levels["ep"].bytes


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(dp=8, etp=3), "etp=3 does not divide 14336 features of the MLP"),
        (Plan(dp=8, ep=8, etp=2), "ep x etp = 8 x 2 does not divide dp x cp x tp = 8 ranks"),
        (Plan(dp=2, tp=4, etp=2), "etp=2 is neither 1 nor tp=4"),
    ],
)
def test_plans_that_do_not_divide_are_refused(plan: Plan, why: str):
    assert why in (plan.refusal(MIXTURE, 8, 4096) or "")


def test_what_belongs_to_experts_is_refused_without_them():
    told: list[dict[str, Any]] = [{"etp": 2}, {"dispatch": "per_rank"}, {"skew": 1.0}, {"ep": 2}]
    for about in told:
        (name,) = about
        said = Plan(dp=2, **about).refusal(Model.find("llama3-8b"), 8, 4096) or ""
        assert said.startswith(f"{name}=") and said.endswith("but llama3-8b has no experts")
    with pytest.raises(PlanError, match="skew is -1"):
        Plan(skew=-1.0)
    with pytest.raises(PlanError, match="etp is 0; it is a whole number"):
        Plan(etp=0)
    with pytest.raises(ValueError, match="dispatch is 'pigeon'; it must be one of"):
        Plan(dispatch="pigeon")
    groups = replace(MIXTURE, experts=12, groups=4, top_groups=2)
    assert "whole groups" in (Plan(dp=6, ep=6, dispatch="per_rank").refusal(groups, 6, 4096) or "")


def test_what_nobody_has_measured_has_no_interval():
    from tplab.cost import find

    cluster, stack, model = find("h100-measured"), find_stack("megatron"), Model.find("qwen3-30b-a3b")
    plan = Plan(dp=16, ep=8)
    assert class_of(stack, model, plan, cluster)
    for about in ({"etp": 1}, {"dispatch": "per_rank"}, {"skew": 0.5}):
        assert class_of(stack, model, replace(plan, **about), cluster) is None
    assert class_of(stack, Model.find("deepseek-v3"), plan, cluster) is None


def test_a_row_and_a_search_know_them():
    row: dict[str, Any] = {
        "model": "mixtral-8x7b",
        "cluster": "h100",
        "gpus": 16,
        "tp": 2,
        "ep": 4,
        "etp": 2,
        "batch": 64,
    }
    _, found = forecast_row(row | {"sequence": 4096, "dispatch": "per rank", "skew": "0.5", "sequence_parallel": True})
    plan = found.plan
    assert (plan.etp, plan.dispatch, plan.skew, plan.expert_copies) == (2, "per_rank", 0.5, 2)
    assert "ep 4, etp 2, dispatch per_rank, skew 0.5, microbatch 1" in str(plan)
    several = plans(MIXTURE, "h100-measured", gpus=16, batch=16, etp=(None, 1, 2, 4), inside=False, dispatch="gather")
    usual = plans(MIXTURE, "h100-measured", gpus=16, batch=16, inside=False, dispatch="gather")
    assert several.considered > usual.considered and several[0].seconds <= usual[0].seconds
    assert {one.plan.etp for one in several[:300]} > {None} and all(
        one.plan.dispatch == "gather" for one in several[:9]
    )
    for one in several.notable(40):
        exact = forecast(MIXTURE, one.plan, "h100-measured", batch=16, sequence=4096)
        assert one.bytes == exact.peak.total and one.seconds == pytest.approx(exact.seconds, rel=0.012)


def test_what_travels_to_experts_in_a_run_is_beside_what_the_plan_sends_to_them():
    torch = pytest.importorskip("torch")
    from tplab.models.gpt import GPTConfig, GPTExperts
    from tplab.torch import all_to_all, run

    model = Model.of_config(GPTConfig(132, 24, 1, 12, 48, experts=GPTExperts(Routing(4, 2), 24)))
    trace = run(lambda x: all_to_all(x, "ep"), Mesh(tp=2, ep=4), torch.ones(4, 6)).trace
    found = forecast(model, Plan(dp=4, tp=2, ep=4), "h100", batch=8, sequence=48)
    (row,) = (line.split() for line in beside(trace, found).splitlines() if line.startswith("ep "))
    assert row[1:3] == ["576", "B"] and float(row[-1]) >= 0
