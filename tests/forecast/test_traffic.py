"""Traffic: what each axis of a plan sends, against the formulas of the literature."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from tplab.cost import find
from tplab.forecast import Model, Plan
from tplab.forecast.activations import held_parameters
from tplab.forecast.messages import price, ranks_along, send_seconds
from tplab.forecast.traffic import layer_traffic, traffic

LLAMA = Model.find("llama3-70b")


def test_sequence_parallelism_sends_as_much_as_tensor_parallelism():
    plain, divided = (Plan(tp=8, sequence_parallel=parallel) for parallel in (False, True))
    sent = [
        sum(one.total for one in layer_traffic(LLAMA, plan, 4096, "tplab") if one.part == "layer")
        for plan in (plain, divided)
    ]
    assert sent[0] == sent[1]
    # Megatron does not keep what it has gathered, and gathers it again: 2 of 8 passes more.
    again = sum(one.total for one in layer_traffic(LLAMA, divided, 4096) if one.part == "layer")
    assert again == pytest.approx(sent[0] * 10 / 8)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_parallelism_sends_what_zero_says(zero: int):
    """Rajbhandari et al. 2020: 2 M elements, 3 M with stage 3; with 2 and 3 for each microbatch."""
    plan = Plan(dp=8, zero=zero, dtype="float16", grad_dtype="float16", microbatch=2)
    sent = sum(one.total for one in traffic(LLAMA, plan, 16, 4096) if one.axis == "dp")
    assert sent == pytest.approx(2 * LLAMA.parameters * 7 / 8 * (3 if zero == 3 else 2))
    twice = sum(one.total for one in traffic(LLAMA, plan, 32, 4096) if one.axis == "dp")
    assert twice == pytest.approx(sent * {0: 1, 1: 1, 2: 1.5, 3: 2}[zero])


def test_latents_are_gathered_in_place_of_what_they_are_made_of():
    """Megatron: the ranks of tp make the latents of their own tokens, and gather these; with sequence parallelism or
    without, what leaves attention is as wide as the model."""
    model, tokens = replace(Model.find("deepseek-v3"), experts=0, experts_per_token=0, groups=1, top_groups=1,
        dense_layers=0), 4096  # fmt: skip
    whole, latents = tokens * 7168 * 2, tokens * (1536 + 512 + 64) * 2
    plain, divided = (
        Counter({(one.op, one.phase, one.bytes): one.count for one in layer_traffic(model, plan, tokens)})
        for plan in (Plan(tp=4), Plan(tp=4, sequence_parallel=True))
    )
    assert plain == {("all_reduce", "forward", whole): 2, ("all_reduce", "backward", whole): 1} | {
        ("all_reduce", "backward", latents): 1
    }
    both = {(op, "forward", size): 1 for op, size in (("all_gather", whole), ("all_gather", latents))}
    assert divided == both | {
        ("reduce_scatter", "forward", whole): 2,
        ("all_gather", "backward", whole): 3,  # the gradients of both outputs, and the MLP's input again
        ("all_gather", "backward", latents): 1,
        ("reduce_scatter", "backward", whole): 1,
        ("reduce_scatter", "backward", latents): 1,
    }
    ring = [one for one in layer_traffic(model, Plan(cp=2, tp=4), tokens) if one.axis == "cp"]
    assert ring[0].bytes == tokens // 2 * 128 * (192 + 128) // 4 * 2  # keys and values of a rank's heads


def test_experts_and_long_sequences():
    mixtral = Model.find("mixtral-8x7b")
    plan = Plan(dp=8, ep=4, cp=2, microbatch=1)
    layer = {(one.axis, one.phase): one for one in layer_traffic(mixtral, plan, 8192)}
    tokens = 8192 // 2
    assert layer["ep", "forward"][2:5] == ("all_to_all", tokens * 2 * 4096 * 2, 2)
    assert layer["cp", "forward"][2:5] == ("send", 2 * tokens * 8 * 128 * 2, 1)
    assert layer["cp", "backward"][2:5] == ("send", 2 * tokens * 8 * 128 * 2, 2)
    shared = Plan(dp=2, tp=4, ep=8, sequence_parallel=True)
    layer = {(one.axis, one.op, one.phase): one for one in layer_traffic(mixtral, shared, 8192)}
    assert layer["ep", "all_to_all", "forward"][3:5] == (8192 // 4 * 2 * 4096 * 2, 2)
    assert layer["tp", "all_gather", "forward"].count == 1  # of attention: experts need no other rank's tokens
    groups = {one.ranks: one.bytes for one in traffic(mixtral, plan, 8, 8192) if one.part == "gradients"}
    experts = 32 * mixtral.layer_parts["mlp"].experts // 4
    assert groups == {4: experts * 4, 16: (mixtral.parameters - 4 * experts) * 4}


def test_experts_that_have_as_many_numbers_as_the_rest_have_no_embedding():
    model = Model(layers=2, hidden=8, heads=2, vocab=8, ffn=24, experts=4, experts_per_token=1, positions=9)
    plan = Plan(dp=2, zero=3)
    rest = held_parameters(model, plan, 0, "tplab")
    model = replace(model, vocab=8 + (rest.experts - rest.dense) // 16)
    held = held_parameters(model, plan, 0, "tplab")
    assert held.experts == held.dense
    sent = [one.bytes for one in traffic(model, plan, 2, 8, 0, "tplab") if one.phase == "backward" and one.axis == "dp"]
    assert sorted(sent)[:2] == [2 * (held.dense - held.embedding), 2 * held.experts]


def test_with_matmuls_in_8_bit_what_is_neither_an_activation_of_tp_nor_a_parameter_is_of_16():
    model = Model.find("qwen3-235b-a22b")
    for plan, zero in product((Plan(tp=2), Plan(tp=4, sequence_parallel=True)), (0, 1, 3)):
        wide = replace(plan, dp=4, cp=2, pp=2, ep=4, zero=zero)
        pair = traffic(model, wide, 8, 4096), traffic(model, replace(wide, dtype="float8"), 8, 4096)
        for one, narrow in zip(*pair, strict=True):
            is_narrow = (one.axis, one.part) == ("tp", "layer") or one.part == "parameters"
            assert one == narrow._replace(bytes=narrow.bytes * (1 + is_narrow))


def test_a_message_between_stages_is_timed_with_the_bytes_that_it_has():
    model, plan = Model.find("llama3-8b"), Plan(tp=2, cp=2, pp=4, dtype="float8")
    (sent,) = [one for one in traffic(model, plan, 1, 8192) if one.axis == "pp"]
    cluster = find("h100-measured")
    assert (
        send_seconds(model, plan, cluster, 8192) == price(cluster, "send", sent.bytes, ranks_along(plan, "pp")).seconds
    )
