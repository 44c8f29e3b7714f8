"""Plans: their ranks, their stages, and what they refuse."""

from itertools import chain

import pytest

from tplab.errors import PlanError
from tplab.forecast import Model, Plan
from tplab.forecast.plan import divisors

LLAMA = Model.find("llama3-70b")


def test_ranks_lie_on_the_mesh_with_tensor_parallel_neighbours():
    plan = Plan(dp=2, tp=4, pp=2, cp=2)
    assert plan.ranks == plan.mesh.size == 32
    assert [plan.mesh.coordinates(rank)["pp"] for rank in plan.mesh.ranks] == list(map(plan.pipeline_rank, range(32)))
    assert plan.mesh.index(1, "tp") == 1


@pytest.mark.parametrize(
    ("virtual", "pp", "schedule"), [(1, 4, "1f1b"), (2, 4, "1f1b"), (1, 3, "gpipe"), (2, 8, "zb_v"), (1, 4, "dualpipe")]
)
@pytest.mark.parametrize("balance", ["layers", "parameters"])
def test_stages_have_every_layer_once(virtual: int, pp: int, schedule: str, balance: str):
    plan = Plan(pp=pp, virtual=virtual, schedule=schedule, balance=balance)
    stages = plan.partition(LLAMA).stages
    assert list(chain(*stages)) == list(range(LLAMA.layers + 2))
    assert all(stages)


def test_equal_stages_have_equally_many_layers_and_the_ends_beside_them():
    assert [len(stage) for stage in Plan(pp=4).partition(LLAMA).stages] == [21, 20, 20, 21]
    # 126 layers, embedding and head on 16 ranks: 8 each, so the first and last rank have 7 layers (Llama 3 405B)
    assert {len(stage) for stage in Plan(pp=16).partition(Model.find("llama3-405b")).stages} == {8}


def test_stages_are_found_at_once_also_if_a_rank_has_many():
    even, by_parameters = (Plan(pp=8, virtual=5, balance=how).partition(LLAMA) for how in ("layers", "parameters"))
    assert by_parameters.bounds == even.bounds  # the best cut of 82 layers into 40 stages would take minutes
    assert Plan(pp=8, virtual=2, balance="parameters").partition(LLAMA).bounds != (
        Plan(pp=8, virtual=2).partition(LLAMA).bounds
    )


def test_expert_parallel_ranks_are_also_the_tensor_parallel_ones():
    qwen, plan = Model.find("qwen3-235b-a22b"), Plan(dp=16, tp=2, pp=8, ep=32, virtual=4, sequence_parallel=True)
    assert plan.refusal(qwen, 2048, 4096) is None and plan.expert_copies == 1
    assert Plan(dp=16, tp=2, ep=8).expert_copies == 4 and Plan(dp=16, tp=2).expert_copies == 16
    wide = Plan(dp=16, tp=2, ep=64)
    assert wide.refusal(qwen, 2048, 4096) == "ep=64 does not divide dp x cp x tp = 32 ranks"


REFUSED = {
    "tp=16 does not divide 8 key and value heads": Plan(tp=16),
    "ep=2, but llama3-70b has no experts": Plan(ep=2, dp=2),
    "dp x microbatch = 8 x 3 = 24 does not divide a batch of 64": Plan(dp=8, microbatch=3),
    "80 layers, the embedding and the head cannot fill pp x virtual = 96 stages": Plan(pp=32, virtual=3),
    "virtual=2 stages per rank need a pipeline": Plan(virtual=2),
    "zb_h1 has 1 stages per rank, not virtual=2": Plan(pp=2, virtual=2, schedule="zb_h1"),
    "cp x tp = 24 ranks cannot share a sequence of 4096 tokens": Plan(tp=8, cp=3, sequence_parallel=True),
    "8 microbatches are fewer than pp=10, the fewest that Megatron-LM interleaves": Plan(pp=10, dp=8, virtual=2),
    "dualpipe: ": Plan(pp=5, schedule="dualpipe"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_refusal_gives_the_number_that_does_not_divide(why: str):
    plan = REFUSED[why]
    found = plan.refusal(LLAMA, 64, 4096)
    assert found is not None and found.startswith(why)
    with pytest.raises(PlanError) as error:
        plan.check(LLAMA, 64, 4096)
    assert str(error.value) == found


def test_an_odd_number_of_microbatches_is_refused_where_a_rule_needs_an_even_one():
    why = Plan(pp=2, schedule="dualpipe").refusal(LLAMA, 65, 4096)
    assert why is not None and why.startswith("dualpipe: dualpipe needs an even number of ranks, and an even number of")
    assert Plan(pp=2, schedule="dualpipe").refusal(LLAMA, 66, 4096) is None


def test_a_plan_that_is_possible_is_not_refused():
    plan = Plan(dp=8, tp=8, pp=4, zero=1, sequence_parallel=True, recompute="selective")
    assert plan.refusal(LLAMA, 1024, 8192) is None
    assert plan.microbatches(1024) == 128
    assert plan.rule(8).name == "one_f_one_b"
    assert str(plan) == "dp 8, tp 8, pp 4, microbatch 1, 1f1b, ZeRO 1, sequence parallel, selective recomputation"


def test_what_the_stack_would_choose_can_be_said():
    plan = Plan(attention="flash3", compiled=False, state_dtype="bfloat16")
    assert str(plan) == "microbatch 1, FlashAttention 3, not compiled, states in bfloat16"
    assert str(Plan(attention="unfused", compiled=True)) == "microbatch 1, unfused attention, compiled"
    assert len({plan, Plan(), Plan(attention="flash3"), Plan(compiled=False), Plan(state_dtype="bfloat16")}) == 5
    assert [Plan(attention=name).flash for name in (None, "flash2", "flash3", "unfused")] == [True, True, True, False]


def test_nonsense_is_refused_at_once():
    with pytest.raises(ValueError, match="attention is 'flash4'; it must be one of flash2, flash3, unfused"):
        Plan(attention="flash4")
    with pytest.raises(ValueError, match="state_dtype is 'float8'; it must be one of float32, bfloat16"):
        Plan(state_dtype="float8")
    with pytest.raises(PlanError, match="compiled is 'yes'; it is True, False, or None"):
        Plan(compiled="yes")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="dp is 0; it is a whole number, 1 or more"):
        Plan(dp=0)
    with pytest.raises(PlanError, match="no schedule is called 'zigzag'; there are 1f1b, interleaved, afab, naive"):
        Plan(schedule="zigzag")
    with pytest.raises(ValueError, match="recompute is 'some'"):
        Plan(recompute="some")


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(16) == [1, 2, 4, 8, 16]
