"""Seconds of a step: parts by hand, the pipeline against its whole simulation, and what hides what."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tplab.cost import Chip, Cluster, Link, find
from tplab.errors import PlanError
from tplab.forecast import Model, Plan, forecast, plans
from tplab.forecast.activations import held_parameters, stages_on
from tplab.forecast.classes import class_of
from tplab.forecast.layers import Layer, at_end, from_memory, layer_seconds, local, once_seconds
from tplab.forecast.memory import state_bytes
from tplab.forecast.messages import sent_once
from tplab.forecast.pipelines import Shape, in_flight, makespans
from tplab.forecast.plan import GROUPED, few, takes_virtual
from tplab.forecast.stacks import find_stack
from tplab.forecast.step import step
from tplab.schedules import RULES, Costs, simulate
from tplab.schedules.action import F, I

SMALL = Model(layers=8, hidden=64, heads=8, vocab=256)
# Only matmuls take time: 1 TFLOP/s, memory and links of no cost
MATMULS = Cluster("matmuls", Chip("chip", {"bfloat16": 1e12}, 1e30, 1e12), Link("link", 0.0, 1e30))
IDEAL = replace(find_stack("tplab"), name="ideal")


def test_where_only_matmuls_take_time_a_step_takes_its_flops():
    plan = Plan(dp=2, tp=2, pp=2, microbatch=2, attention="unfused")
    took = step(SMALL, plan, MATMULS, 16, 128, IDEAL)
    norms, words = 64 * (2 * 8 + 1), 64 * 256  # no matmul has the norms, nor the embedding
    head = 6 * words
    half = (SMALL.flops_per_token(128) - 6 * (norms + words) - head) / 2  # of the layers
    once = 2 * 128 / 2 / 1e12  # tokens of a microbatch, shared by two tensor-parallel ranks, per FLOP/s
    assert took.parts["computing"] == pytest.approx(4 * (half + head) * once)
    assert took.parts["bubble"] == pytest.approx(half * once)  # one microbatch in the first stage
    assert took.seconds == pytest.approx((5 * half + 4 * head) * once)


@pytest.mark.parametrize("stack", ["megatron", "nanotron", "fsdp"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_parts_add_up(stack: str, recompute: str):
    plan = Plan(dp=4, tp=2, pp=2, zero=1, recompute=recompute, sequence_parallel=True, virtual=2)
    took = step(Model.find("llama3-8b"), plan, find("h100-measured"), 64, 4096, stack)
    assert sum(took.parts.values()) == pytest.approx(took.seconds)
    assert all(seconds >= 0 for seconds in took.parts.values())
    assert took.low is None or took.high is None or took.low < took.seconds < took.high
    assert (took.parts["recompute"] > 0) == (recompute == "full")  # fused attention computes scores again anyhow


@pytest.mark.parametrize("rule", RULES)
def test_rounds_repeat_themselves(rule: str):
    """Whatever the stages take, the makespan of many microbatches is that of the simulation of all of them."""
    draw, ranks, virtual = np.random.default_rng(0), 4, 2 if takes_virtual(rule) else 1
    stages = Plan(pp=ranks, virtual=virtual, schedule=rule).num_stages
    what = tuple((n % 2 + (n > 1), int(n < 2), n == 0, n == stages - 1) for n in range(stages))
    for count in (3 * ranks + 2, 8 * ranks, 14 * ranks):
        schedule = Plan(pp=ranks, virtual=virtual, schedule=rule).rule(count)
        for again, head, send in ((0.0, 1.0, 0.0), (0.9, 3.0, 0.1), (0.0, 0.2, 0.3)):
            layer, end = np.array([1.0, 1.8 + again, again]), np.array([head, 2 * head, 0.0])
            seconds = np.array([*layer, *0.9 * layer, *0.1 * draw.random(3), *end, 0, 0, 0, 0, send])
            forward, backward, recompute = (np.array(what, float) @ seconds[:12].reshape(4, 3)).T
            inputs, weights = (backward + recompute) / 2, (backward - recompute) / 2
            costs = Costs(forward, inputs, weights, send, full_backward=backward)
            shape = Shape(rule, ranks, virtual, int(few(rule, ranks, count)), what)
            ((found,),) = makespans([shape], [seconds[None]], [np.array([count])])
            assert found == pytest.approx(simulate(schedule, costs).makespan, rel=0.01 if count > 15 else 1e-9)


@pytest.mark.parametrize("rule", GROUPED)
@pytest.mark.parametrize(("ranks", "virtual", "count"), [(4, 4, 31), (8, 2, 99), (8, 4, 108), (6, 3, 100)])
def test_so_do_groups_of_which_not_all_are_equal(rule: str, ranks: int, virtual: int, count: int):
    """Where m is not a multiple of p, in time and in memory."""
    stages = ranks * virtual
    schedule = Plan(pp=ranks, virtual=virtual, schedule=rule).rule(count)
    costs = Costs([1.0] * stages, [1.0] * stages, [1.0] * stages, 0.3)
    shape = Shape(rule, ranks, virtual, int(few(rule, ranks, count)), ((1, 0, False, False),) * stages)
    ((found,),) = makespans([shape], [np.array([[1.0, 2.0, *[0] * 14, 0.3]])], [np.array([count])])
    assert found == pytest.approx(simulate(schedule, costs).makespan, rel=1e-9) and shape.microbatches < count
    held = [max(sum(of) for _, of in moments) for moments in in_flight(rule, ranks, virtual, count)]
    change = np.select([schedule.kind == F, schedule.kind != I], [1, -1])
    assert held == [np.cumsum(change[a:b]).max() for a, b in pairwise(schedule.offsets)]


DEEPSEEK = Model.find("deepseek-v3")


@pytest.mark.parametrize(("rule", "passes"), [("dualpipe_v", (3.0, 5.0)), ("dualpipe", (4.0, 6.0))])
@pytest.mark.parametrize("travel", [(0.0, 0.0), (0.5, 0.5), (2.0, 2.5), (4.0, 5.0), (0.5, 8.0)])
def test_of_a_pair_messages_of_experts_lie_under_what_the_other_pass_computes(
    rule: str, passes: tuple[float, float], travel: tuple[float, float]
):
    """As on the modelled clock, told by hand which part of the shorter pass a pair hides."""
    ranks, count = 4, 12
    computing, stages = np.array(passes), Plan(pp=ranks, schedule=rule).num_stages
    alone = computing + travel
    pair = max(sum(computing), sum(travel), *alone)
    costs = Costs([alone[0]] * stages, [alone[1] / 2] * stages, [alone[1] / 2] * stages, 0.1)
    apart = simulate(Plan(pp=ranks, schedule=rule).rule(count), costs)
    hidden = replace(costs, overlap=(sum(alone) - pair) / min(alone))
    lasts = simulate(apart.schedule, hidden)
    seconds = np.array([*alone, 0, *[0] * 9, *travel, *travel, 0.1])
    shape = Shape(rule, ranks, 1, count, ((1, 0, False, False),) * stages)
    ((found,),) = makespans([shape], [seconds[None]], [np.array([count])])
    assert found == pytest.approx(lasts.makespan, rel=1e-12)
    assert found < apart.makespan or travel == (0.0, 0.0)


@pytest.mark.parametrize("rule", ["dualpipe_v", "dualpipe"])
def test_where_passes_are_pairs_a_step_shows_less_of_the_messages_of_experts(rule: str):
    """A whole forecast beside its simulated pipeline, in which all pairs hide the same part."""
    cluster, stack = find("h100-measured"), find_stack("megatron")
    plan, model = Plan(dp=64, ep=64, pp=4, schedule=rule), replace(DEEPSEEK, dense_layers=0, layers=16)
    pairs, ones = (
        forecast(model, replace(plan, overlap=it), cluster, batch=64 * 16, sequence=4096) for it in (True, False)
    )
    layer = layer_seconds(model, local(plan), cluster, 4096, stack.on(cluster))
    assert 0 < pairs.parts["ep"] < 0.6 * 16 * 4 * layer.ep  # 4 layers of 16 microbatches
    for one, reach in ((pairs, 0.04), (ones, 1e-9)):
        assert all(part >= 0 for part in one.parts.values())
        once = one.parts["dp"] + one.parts["optimizer"] + one.parts["host"]
        assert one.seconds - once == pytest.approx(one.pipeline(10_000).makespan, rel=reach)
    assert ones.pipeline().costs.overlap == 0 < pairs.pipeline().costs.overlap <= 1
    assert class_of(stack, qwen := Model.find("qwen3-30b-a3b"), replace(plan, dp=8, ep=8, schedule="1f1b"), cluster)
    assert class_of(stack, qwen, replace(plan, dp=8, ep=8), cluster) is None


def test_dense_first_layers_take_their_own_time():
    """Without a pipeline all layers are on each rank; with one, the first ranks have them."""
    cluster, stack = find("h100-measured"), find_stack("megatron").on(find("h100-measured"))
    plan = Plan(dp=8, ep=8)
    kinds = [layer_seconds(kind, local(plan), cluster, 4096, stack) for kind in (DEEPSEEK, DEEPSEEK.dense)]
    took = step(DEEPSEEK, plan, cluster, 8, 4096).parts
    all_alike = step(replace(DEEPSEEK, dense_layers=0), plan, cluster, 8, 4096).parts
    for name in ("computing", "ep"):
        apart = 3 * (getattr(kinds[1], name) - getattr(kinds[0], name))
        assert took[name] == pytest.approx(all_alike[name] + apart)
    assert kinds[1].ep == 0 < kinds[0].ep and took["computing"] < all_alike["computing"]
    over = Plan(dp=8, ep=8, pp=16, virtual=2)
    assert [[one.dense for one in stages_on(DEEPSEEK, over, place)] for place in (0, 1, 2, 15)] == [
        [1, 0], [2, 0], [0, 0], [0, 0]
    ]  # fmt: skip
    held = [held_parameters(DEEPSEEK, over, place) for place in range(16)]
    experts = 58 * DEEPSEEK.layer_parts["mlp"].experts
    assert sum(one.experts for one in held) == experts // 8
    assert sum(one.dense for one in held) == DEEPSEEK.parameters - experts


def test_zero_3_gathers_a_dense_layer_where_that_is_the_largest():
    """Where 64 ranks share the experts, a rank has less of a layer with experts than of a dense one."""
    plan = Plan(dp=64, ep=64, pp=61, zero=3)
    first, second, *_, last = [held_parameters(DEEPSEEK, plan, place).unit for place in range(61)]
    assert first == last == DEEPSEEK.vocab * DEEPSEEK.hidden
    assert second == DEEPSEEK.dense.layer_parameters > DEEPSEEK.layer_on_rank(ep=64)
    assert held_parameters(DEEPSEEK, plan, 30).unit == DEEPSEEK.layer_on_rank(ep=64)


def test_of_a_model_with_dense_first_layers_the_search_finds_what_a_forecast_says():
    model = replace(DEEPSEEK, layers=9, dense_layers=2)
    found = plans(model, "h100-measured", gpus=64, batch=64, inside=False)
    assert any(one.plan.pp > 1 and one.plan.ep > 1 for one in found[:200])
    estimates = {one.plan: one for one in found.notable()}
    for plan, one in estimates.items():
        exact = forecast(model, plan, "h100-measured", batch=64, sequence=4096)
        assert one.bytes == exact.peak.total
        assert one.seconds == pytest.approx(exact.seconds, rel=0.012)  # an estimate: see `Plans.notable`
    assert len(estimates) > 50 and all(one.measured is None for one in found[:3])


def test_latent_attention_computes_as_wide_as_its_mean_head():
    """Scores are of 192 features and values of 128: as many FLOPs and bytes as of 160 and 160."""
    shapes = DEEPSEEK.matmuls(4096, 4096, 4)
    flops = sum(2 * m * n * k * batch for m, n, k, batch in (shapes["scores"], shapes["values"]))
    assert flops == 4 * 4096 * 4096 * 160 * 128 // 4 and DEEPSEEK.attention_width == 160 * 128
    assert DEEPSEEK.matmuls(4096, 4096, 4, sequence_parallel=True)["query latent"] == (1024, 1536, 7168, 1)
    assert shapes["key, value"] == (4096, 32 * 256, 512, 1)


def test_gpus_wait_for_a_slow_host():
    model, cluster = Model.find("llama3-8b"), find("h100-measured")
    fast = step(model, Plan(tp=8), cluster, 8, 4096, replace(find_stack("nanotron"), host=0.0))
    slow = step(model, Plan(tp=8), cluster, 8, 4096, replace(find_stack("nanotron"), host=0.1))
    assert fast.parts["host"] == 0
    assert slow.seconds == pytest.approx(8.5 * 32 * 0.1, rel=0.02)  # 8 microbatches, and the half for the rest


def test_of_gradients_at_least_three_fifths_show_and_without_overlap_all_do():
    model, cluster, stack = Model.find("llama3-8b"), find("h100-measured"), find_stack("megatron")
    plan = Plan(dp=16, tp=8, zero=0)
    once = once_seconds(model, plan, 0, cluster, stack)
    long = Layer(1.0, 2.0)
    assert at_end(plan, long, once, 4)[0] == pytest.approx(0.6 * once.gradients)
    assert at_end(plan, Layer(0.0, 0.0), once, 4)[0] == pytest.approx(once.gradients)
    late = replace(plan, overlap=False)
    assert at_end(late, long, once_seconds(model, late, 0, cluster, stack), 4)[0] == pytest.approx(once.gradients)


def test_the_optimizer_updates_what_memory_says_a_rank_keeps():
    """ZeRO divides experts over the ranks that have the same ones: where ep = dp there is no other."""
    model, cluster, stack = Model.find("mixtral-8x7b"), find("h100-measured"), find_stack("megatron")
    for plan in (Plan(dp=8, ep=8, pp=8, zero=1), Plan(dp=16, ep=8, tp=2, zero=3), Plan(dp=8, ep=8, zero=0)):
        held = held_parameters(model, plan, 0, stack)
        (_, _, states, _), size = state_bytes(model, plan, 0, stack), 12 if plan.zero < 3 else 8
        took = from_memory(cluster, states / size * 30 + 2 * 4 * held.total)
        assert once_seconds(model, plan, 0, cluster, stack).optimizer == pytest.approx(took)


ADAM = {
    Plan(): 30, Plan(dtype="float8"): 30, Plan(grad_dtype="bfloat16"): 28, Plan(dtype="float32"): 28,
    Plan(state_dtype="bfloat16"): 16, Plan(state_dtype="bfloat16", grad_dtype="bfloat16"): 14,
}  # fmt: skip


@pytest.mark.parametrize(("plan", "moved"), ADAM.items(), ids=str)
def test_the_optimizer_reads_and_writes_what_its_states_have(plan: Plan, moved: int):
    model, cluster, stack = Model.find("llama3-8b"), find("h100-measured"), find_stack("megatron")
    grad = 2 if plan.grad_dtype == "bfloat16" else 4
    took = from_memory(cluster, (moved + 2 * grad) * model.parameters)
    assert once_seconds(model, plan, 0, cluster, stack).optimizer == pytest.approx(took)


def test_zero_3_hides_what_layers_compute_long_enough_for():
    model, cluster, stack = Model.find("llama3-8b"), find("h100-measured"), find_stack("fsdp")
    plan = Plan(dp=8, zero=3)
    once = once_seconds(model, plan, 0, cluster, stack)
    assert once.first == pytest.approx((once.parameters + once.gradients) / 33)
    assert at_end(plan, Layer(9.0, 9.0), once, 4)[0] == pytest.approx(4 * once.first)
    shown = at_end(plan, Layer(0.0, 0.0), once, 4)[0]
    assert shown == pytest.approx(4 * (2 * once.parameters + once.gradients))


def test_zero_3_that_gathers_late_hides_as_much_as_gradients_do():
    model, cluster, stack = (
        Model.find("llama3-8b"),
        find("h100-measured", fabric="infiniband-ndr"),
        find_stack("deepspeed"),
    )
    plan = Plan(dp=64, zero=3, recompute="full", grad_dtype="bfloat16")
    once = once_seconds(model, plan, 0, cluster, stack)
    sent = once.gradients + 2 * once.parameters  # three times: before the forward pass, again, and for the backward one
    assert at_end(plan, Layer(9.0, 9.0), once, 4)[0] == pytest.approx(4 * 0.6 * sent)
    assert at_end(plan, Layer(0.0, 0.0), once, 4)[0] == pytest.approx(4 * sent)
    kept = replace(plan, recompute="none")
    twice = once_seconds(model, kept, 0, cluster, stack)
    assert twice.parameters == pytest.approx(once.parameters / 1.5) and not twice.first
    fsdp = once_seconds(model, plan, 0, cluster, find_stack("fsdp"))
    assert once.parameters > 1.5 * 6 * fsdp.parameters  # over one card of eight; what is not bytes takes as long


def test_a_node_gets_a_token_once():
    assert sent_once(1, 4) == pytest.approx(1)
    assert sent_once(8, 1) == pytest.approx(1 / 8)
    assert sent_once(2, 2) == pytest.approx(3 / 4)  # both copies to one of two nodes in half of all cases


def test_full_recomputation_computes_the_forward_pass_once_more():
    model, cluster, stack = Model.find("llama3-8b"), find("h100-measured"), find_stack("megatron")
    kept = layer_seconds(model, local(Plan(tp=2)), cluster, 4096, stack)
    again = layer_seconds(model, local(Plan(tp=2, recompute="full")), cluster, 4096, stack)
    assert again.recompute == pytest.approx(kept.computing / 3, rel=0.1)
    assert again.computing == kept.computing
    assert again.forward == pytest.approx(kept.forward)


def test_a_plan_that_does_not_divide_is_refused_with_the_number():
    with pytest.raises(PlanError, match="tp=3 does not divide 32 heads"):
        step(Model.find("llama3-8b"), Plan(tp=3), find("h100-measured"), 8, 4096)


def test_on_a_data_sheet_a_step_runs_at_peak_rates_whichever_stack():
    model, plan = Model.find("llama3-8b"), Plan(dp=4, tp=2, zero=1, sequence_parallel=True)
    bound = step(model, plan, find("h100"), 32, 4096, "megatron")
    assert bound.parts["host"] == 0 and bound.measured is bound.low is bound.high is None
    fitted = step(model, plan, find("h100-measured"), 32, 4096, "megatron")
    assert fitted.low is not None and bound.seconds < fitted.low


def test_hidden_messages_of_zero_3_never_take_longer_than_shown_ones():
    """Even where they take so much longer than computing that half of the step is one layer's messages."""
    model, cluster = replace(Model.find("mixtral-8x7b"), layers=2), find("h100-measured")
    plan = Plan(dp=16, tp=8, zero=3)
    hidden, shown = (step(model, replace(plan, overlap=it), cluster, 16, 128, "fsdp").parts for it in (True, False))
    assert hidden["dp"] <= shown["dp"]
