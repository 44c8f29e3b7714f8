"""Attention in a training step: whose kernels count, and what they take."""

from dataclasses import replace

import pytest

from tplab.cost import H100_MEASURED
from tplab.cost.named import A100_MEASURED, B200_MEASURED, H100_NODE
from tplab.errors import ClusterError
from tplab.forecast import Model, Plan, forecast
from tplab.forecast.layers import layer_seconds
from tplab.forecast.rows import forecast_rows
from tplab.forecast.stacks import STACKS, Stack

LLAMA = Model.find("llama3-8b")
NAKED = {name: replace(stack, factor=1.0, host=0.0, passes=0.0) for name, stack in STACKS.items()}


def computing(plan: Plan, stack: Stack, cluster=H100_MEASURED, sequence: int = 8192) -> float:
    return layer_seconds(LLAMA, plan, cluster, sequence, stack).computing


def both_ways(cluster, *shape: int, **options) -> float:
    """One kernel forward and one backward: causal, 8 key heads divided like the 32 query heads."""
    batch, heads, tokens = shape
    return sum(
        cluster.chip.attention_seconds(
            batch, heads, tokens, tokens, 128, "bfloat16", True, way, kv_heads=heads // 4, **options
        )
        for way in (False, True)
    )


def test_a_stack_has_kernels_of_its_time():
    old, new = (Plan(attention=name) for name in ("flash2", "flash3"))
    assert computing(Plan(), NAKED["nanotron"]) == computing(old, NAKED["megatron"])
    assert computing(Plan(), NAKED["megatron"]) == computing(new, NAKED["nanotron"])
    by = both_ways(H100_MEASURED, 1, 32, 8192, kernel="flash2") - both_ways(H100_MEASURED, 1, 32, 8192, kernel="flash3")
    assert computing(old, NAKED["megatron"]) - computing(new, NAKED["megatron"]) == pytest.approx(by)
    assert by > 0.5 * both_ways(H100_MEASURED, 1, 32, 8192, kernel="flash2")


def test_a_chip_without_that_generation_takes_its_newest():
    assert computing(Plan(), NAKED["megatron"], A100_MEASURED) == computing(
        Plan(attention="flash2"), NAKED["megatron"], A100_MEASURED
    )
    assert computing(Plan(), NAKED["nanotron"], B200_MEASURED) == computing(Plan(), NAKED["megatron"], B200_MEASURED)
    with pytest.raises(ClusterError, match="no kernel of attention named 'flash3' was measured on A100"):
        computing(Plan(attention="flash3"), NAKED["megatron"], A100_MEASURED)
    assert computing(Plan(), NAKED["nanotron"], H100_NODE) == computing(Plan(), NAKED["megatron"], H100_NODE)


@pytest.mark.parametrize("cp, tp", [(1, 1), (2, 1), (4, 2)])
def test_each_rank_computes_a_kernel_for_the_keys_of_each_rank(cp: int, tp: int):
    """Twice the microbatch minus once: what of a layer is not attention does not depend on how attention is cut."""
    plan, stack = Plan(cp=cp, tp=tp, microbatch=1), NAKED["megatron"]
    part = 8192 // cp
    by = [cp * both_ways(H100_MEASURED, 1, 32 // tp, part, kernel=name) for name in ("flash2", "flash3")]
    found = [computing(replace(plan, attention=name), stack) for name in ("flash2", "flash3")]
    assert found[0] - found[1] == pytest.approx(by[0] - by[1])


def test_at_peak_rates_attention_is_a_roofline_too():
    sheet = replace(H100_NODE, chip=replace(H100_NODE.chip, launch=0.0))
    short, long = (computing(Plan(), NAKED["megatron"], sheet, sequence) for sequence in (8192, 16384))
    pairs = 8192 * 8193 / 2, 16384 * 16385 / 2
    more = 4 * 128 * 32 * (pairs[1] - 2 * pairs[0]) * 3.5 / 989e12
    added = 10 * LLAMA.layer_parameters / 3.35e12  # gradients are added up once per microbatch
    assert long - 2 * short == pytest.approx(more - added)


def test_unfused_attention_is_no_kernel():
    plan = Plan(attention="unfused")
    assert not plan.flash and Plan(attention="flash2").flash
    same = forecast(LLAMA, Plan(attention="unfused", dp=8), "h100-measured", batch=8, sequence=4096)
    assert forecast(LLAMA, replace(plan, dp=8), "h100-measured", batch=8, sequence=4096).seconds == same.seconds
    with pytest.raises(ValueError, match="attention is 'flash9'; it must be one of flash2"):
        Plan(attention="flash9")


def test_rows_have_a_column_for_it():
    cells = {"model": "llama3-8b", "cluster": "h100", "gpus": "8", "batch": "8", "sequence": "8192", "tp": "8"}
    found = [next(forecast_rows([{**cells, "attention": name}])) for name in ("", "flash3", "flash2", "unfused")]
    seconds = [float(one["seconds"]) for one in found]
    assert seconds[0] == seconds[1] < seconds[2] < seconds[3]
    held = [float(one["memory_gib"]) for one in found]
    assert held[0] == held[1] == held[2] < held[3]
    (refused,) = forecast_rows([{**cells, "attention": "flash9"}])
    assert refused["why"].startswith("not forecast: ") and "'flash9'" in refused["why"]
    (refused,) = forecast_rows([{**cells, "cluster": "a100", "attention": "flash3"}])
    assert "no kernel of attention named 'flash3' was measured on A100" in refused["why"]
