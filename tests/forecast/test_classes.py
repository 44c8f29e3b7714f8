"""Classes of measured steps: a plan has the interval of the narrowest, and outside every class it has none."""

import pytest

from tplab.cost import find
from tplab.errors import PlanError
from tplab.forecast import Model, Plan, forecast, plans
from tplab.forecast.classes import ENOUGH, class_of, keys_of, known
from tplab.forecast.stacks import find_stack

LLAMA = Model.find("llama3-8b")


def of(plan, stack="megatron", cluster="h100-measured", model=LLAMA):
    return class_of(find_stack(stack, plan), model, plan, find(cluster))


def test_the_narrowest_class_counts():
    inside = of(Plan(dp=16, tp=8, zero=1), "nanotron")
    assert inside and inside.name == "nanotron, dense, tp in a node, no pipeline, H100, 16 bit, 2 to 32 nodes"
    over = of(Plan(dp=8, tp=16, zero=1), "nanotron", model=Model.find("playbook-8b"))
    assert over and "tp over nodes" in over.name and over.high / over.low > inside.high / inside.low
    one = of(Plan(dp=8, zero=3, dtype="float8"))
    assert one and one.name.endswith("any chip, any dtype, one node")  # two rows of an H100 are not enough
    assert all(measured.rows >= ENOUGH and measured.low < measured.high for measured in known().values())


def test_a_forecast_says_its_interval_or_that_it_has_none():
    inside = forecast(LLAMA, Plan(dp=16, tp=8, zero=1), "h100-measured", batch=64, sequence=4096, stack="nanotron")
    assert inside.measured and inside.low == inside.measured.low * inside.seconds
    assert f"({inside.low:.3g} to {inside.high:.3g})" in str(inside) and "outside" not in inside.why
    outside = forecast(LLAMA, Plan(dp=32, pp=2, zero=1), "h100-measured", batch=64, sequence=4096, stack="deepspeed")
    assert outside.measured is outside.low is outside.high is None
    assert "(outside what was measured)" in str(outside)
    assert outside.why.endswith("outside what was measured, so there is no interval")
    sheet = forecast(LLAMA, Plan(dp=8), "h100", batch=8, sequence=4096)
    assert sheet.low is None and "outside" not in sheet.why  # a data sheet promises none


def test_far_more_ranks_than_any_that_was_measured_are_outside():
    assert of(Plan(dp=1024, zero=3), "fsdp") and not of(Plan(dp=2048, zero=3), "fsdp")  # 512 were
    assert not of(Plan(dp=8, zero=3), "tplab")


def test_fsdp_is_compiled_where_the_plan_says_so():
    eager, compiled = (of(Plan(dp=4, zero=3, compiled=flag), "fsdp", "h200-measured") for flag in (False, True))
    assert eager and eager.name.startswith("fsdp, ") and compiled and compiled.name.startswith("fsdp-compiled, ")


def test_a_search_proposes_only_what_was_measured():
    found = plans("llama3-70b", "h100-measured", gpus=64, batch=64, sequence=4096, stack="fsdp")
    assert all(one.measured for one in found[:20]) and found.lost["outside what was measured"] > 0
    every = plans("llama3-70b", "h100-measured", gpus=64, batch=64, sequence=4096, stack="fsdp", inside=False)
    assert every.considered > found.considered - found.lost["outside what was measured"]
    with pytest.raises(PlanError, match=r"that was measured; --outside, or plans\(\.\.\., inside=False\), searches"):
        plans("qwen3-30b-a3b", "a100-measured", gpus=64, batch=64, sequence=4096, stack="deepspeed")
    sheet = plans("llama3-70b", "h100", gpus=64, batch=64, sequence=4096)
    assert sheet[0].measured is None  # at peak rates nothing has an interval


def test_keys_go_from_narrow_to_wide():
    keys = [*keys_of("megatron", LLAMA, Plan(dp=4, tp=8, pp=2), find("h100-measured"))]
    assert keys[0] == ("megatron", "dense", "tp in a node", "pipeline", "H100", "16 bit", "2 to 32 nodes")
    assert keys[-1][-3:] == ("any", "any", "any") and len(set(keys)) == 5
