"""Memory: what a plan says each rank holds, against what others measured on GPUs, and the formulas of papers."""

from dataclasses import replace

import pytest

from tests.forecast.executed import Case, case
from tplab.cost.activations import activation_bytes
from tplab.forecast import Model, Plan
from tplab.forecast.activations import layer_tensors
from tplab.forecast.measured import ON_B200
from tplab.forecast.memory import memory, peak_bytes
from tplab.forecast.pipelines import in_flight
from tplab.forecast.plan import takes_virtual
from tplab.models.gpt import GPTConfig
from tplab.schedules import RULES
from tplab.schedules.simulation import peak_activations


@pytest.mark.parametrize(("tp", "pp", "dp"), ON_B200)
def test_megatron_on_b200_allocated_as_much(tp: int, pp: int, dp: int):
    model = replace(Model.find("llama3-70b"), layers=12)
    plan = Plan(dp=dp, tp=tp, pp=pp, zero=1, sequence_parallel=True)
    held = memory(model, plan, 8 * dp, 4096, "megatron")
    assert [one.total / 2**30 for one in held] == pytest.approx(ON_B200[tp, pp, dp], rel=2e-3)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("attention", ["unfused", None])
def test_a_layer_keeps_what_korthikanti_counts(parallel: bool, attention: str | None):
    """Beside one number per row of each norm and of the scores."""
    model = Model.find("megatron-22b")
    plan = Plan(tp=8, microbatch=4, sequence_parallel=parallel, attention=attention, dtype="float16")
    tensors = layer_tensors(model, plan, 2048)
    small = sum(bytes for name, bytes in tensors.items() if name in ("statistics of the norms", "sums of the scores"))
    expected = activation_bytes(2048, 4, 6144, 64, 8, sequence_parallel=parallel, scores=not plan.flash)
    assert sum(tensors.values()) - small == expected


def test_latents_and_dense_first_layers_are_kept():
    """DeepSeek-V3 on one rank for one token's share: heads of 192 and 128 features, latents twice, two kinds of MLP."""
    model, plan, tokens = Model.find("deepseek-v3"), Plan(tp=2, pp=16, dp=8, ep=16, sequence_parallel=True), 4096
    tensors = layer_tensors(model, plan, tokens)
    heads = {"query": 192, "key": 192, "value": 128, "input of the output projection": 128}
    assert {name: tensors[name] for name in heads} == {name: tokens * 64 * d * 2 for name, d in heads.items()}
    assert tensors["latents, and these normalised"] == 2 * tokens // 2 * (1536 + 512) * 2
    first = layer_tensors(model.dense, plan, tokens)
    assert first["up"] == tokens // 2 * 18432 * 2 and tensors["up"] == tokens // 2 * 8 * 2048 * 2
    layer, dense = (sum(one.values()) for one in (tensors, first))
    held = memory(model, plan, 128, tokens)
    for place, kinds in enumerate([(0, 3), (4, 0), (4, 0)]):  # the embedding counts as a layer where stages are cut
        of_one = kinds[0] * layer + kinds[1] * dense
        assert held[place].activations == pytest.approx((16 - place) * of_one, rel=1e-6), place


@pytest.mark.parametrize(
    ("rule", "ranks", "virtual", "microbatches"),
    [
        ("one_f_one_b", 4, 1, 9),
        ("gpipe", 3, 1, 7),
        ("interleaved_1f1b", 4, 3, 12),
        ("zb_h2", 4, 1, 12),
        ("v_min", 4, 2, 9),
    ],
)
def test_as_many_microbatches_are_in_flight_as_the_schedule_holds(
    rule: str, ranks: int, virtual: int, microbatches: int
):
    schedule = Plan(pp=ranks, virtual=virtual, schedule=rule).rule(microbatches)
    found = in_flight(rule, ranks, virtual, microbatches)
    assert [max(sum(counts) / virtual for _, counts in rank) for rank in found] == peak_activations(schedule).tolist()


@pytest.mark.parametrize("rule", RULES)
def test_of_many_microbatches_as_many_are_in_flight_as_the_schedule_holds(rule: str):
    virtual = 2 if takes_virtual(rule) else 1
    schedule = Plan(pp=4, virtual=virtual, schedule=rule).rule(36)
    held = [max(sum(counts) for _, counts in rank) for rank in in_flight(rule, 4, virtual, 36)]
    assert held == (peak_activations(schedule) * schedule.stages_per_rank).tolist()


def test_bytes_per_parameter_are_those_of_zero():
    """Rajbhandari et al. 2020: 16 bytes, of which 12, 14 and 16 are divided; here gradients are summed in float16."""
    model = Model.find("llama2-7b")
    for zero, expected in ((0, 16), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)):
        (held,) = memory(model, Plan(dp=64, zero=zero, dtype="float16", grad_dtype="float16"), 64, 4096, "deepspeed")
        states = held.parameters + held.gradients + held.optimizer
        # Pieces of ZeRO 3 are float32, and are their own copies: 4 + 2 + 8 bytes.
        assert states / model.parameters == pytest.approx(expected - (2 / 64 if zero == 3 else 0), rel=1e-3)


def test_gradients_stay_whole_between_microbatches_only_where_a_trainer_puts_their_sending_off():
    """FSDP reduce-scatters them in each backward pass. KempnerForge, whose runs are the compiled ones, does not."""
    model, plan = Model.find("llama3-8b"), Plan(dp=4, zero=3, grad_dtype="float32")

    def gradients(batch: int, **more: bool) -> int:
        (held,) = memory(model, replace(plan, **more), batch, 4096, "fsdp")
        return held.gradients

    assert gradients(4) == gradients(16) == gradients(4, compiled=True) == model.parameters
    assert gradients(16, compiled=True) == 4 * model.parameters


def test_recomputation_and_more_stages_need_less():
    model, sequence = Model.find("llama3-70b"), 8192
    peaks = [
        peak_bytes(model, Plan(dp=4, tp=8, pp=pp, zero=1, sequence_parallel=True, recompute=how), 64, sequence)
        for pp, how in ((4, "none"), (8, "none"), (8, "full"))
    ]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 2 * peaks[2]


def test_the_last_rank_has_the_logits():
    held = memory(Model.find("llama3-8b"), Plan(pp=4, microbatch=2), 32, 8192)
    assert [one.logits > 0 for one in held] == [False, False, False, True]
    assert [one.in_flight for one in held] == [4, 3, 2, 1]
    assert held[3].logits == 3 * 2 * 8192 * 128256 * 2


def test_a_gpt_without_dropout_keeps_no_masks():
    (plain,) = memory(Case(*case(GPTConfig(132, 24, 2, 4, 12))).model, Plan(dtype="float32"), 2, 12, "tplab")
    (dropped,) = memory(
        Case(*case(GPTConfig(132, 24, 2, 4, 12, dropout=0.1))).model, Plan(dtype="float32"), 2, 12, "tplab"
    )
    assert dropped.activations - plain.activations == 12 * 24 * (2 * 2 + 1)
