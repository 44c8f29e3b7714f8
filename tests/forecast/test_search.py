"""The search: all plans and no other, as each is forecast by itself, the best first, and why the others lost."""

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tplab.cost import find
from tplab.errors import PlanError
from tplab.forecast import Model, Plan, forecast, plans
from tplab.forecast.memory import memory, peak_bytes, usable_bytes
from tplab.forecast.plan import divisors
from tplab.forecast.ranking import Plans
from tplab.forecast.search import _fields, _layouts, blocks
from tplab.forecast.stacks import find_stack
from tplab.forecast.step import step

SMALL = Model(layers=6, hidden=384, heads=6, vocab=3000, name="small")


def possible_ways(pp: int) -> list[tuple[str, int]]:
    """Every schedule. Where a rank has several stages, as many as 6 layers can fill, or 8 with the two ends."""
    if pp == 1:
        return [("1f1b", 1)]
    found = [(name, 1) for name in ("naive", "1f1b", "gpipe", "zb_h1", "zb_h2", "chimera", "dualpipe")]
    found += [(name, 1) for name in ("zb_v", "v_half", "v_min", "dualpipe_v") if 2 * pp in (4, 6, 8)]
    several = ("1f1b", "looped_bfs", "interleaved_zb", "hanayo")
    return found + [(name, v) for name in several for v in (2, 3, 4) if pp * v in (4, 6, 8)]


def by_hand(model: Model, gpus: int, batch: int, sequence: int) -> set[Plan]:
    """Every plan of Megatron's, one by one."""
    found = set()
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            for cp in divisors(gpus // tp // pp):
                dp = gpus // tp // pp // cp
                for microbatch in divisors(batch):
                    for zero in range(4) if dp * cp > 1 else (0,):
                        for recompute in ("none", "full"):
                            for schedule, virtual in possible_ways(pp):
                                plan = Plan(
                                    dp=dp,
                                    tp=tp,
                                    pp=pp,
                                    cp=cp,
                                    microbatch=microbatch,
                                    zero=zero,
                                    recompute=recompute,
                                    schedule=schedule,
                                    virtual=virtual,
                                    sequence_parallel=tp > 1,
                                )
                                if not plan.refusal(model, batch, sequence):
                                    found.add(plan)
    return found


def test_every_possible_plan_is_considered_and_no_other():
    expected = by_hand(SMALL, 12, 12, 512)
    found = plans(SMALL, "h100-measured", gpus=12, batch=12, sequence=512)
    assert found.considered == len(found) == len(expected) > 300  # all of them fit
    assert {found.plan(place) for place in range(len(found))} == expected and {
        one.plan for one in found[:200]
    } <= expected


def test_the_best_comes_first_and_is_forecast_as_by_itself():
    expected = by_hand(SMALL, 6, 6, 512)
    found = plans(SMALL, "h100-measured", gpus=6, batch=6, sequence=512)
    alone = {plan: forecast(SMALL, plan, "h100-measured", batch=6, sequence=512).seconds for plan in expected}
    best = min(alone, key=lambda plan: alone[plan])
    assert found[0].seconds == alone[best]
    seconds = [one.seconds for one in found]
    assert seconds[:100] == sorted(seconds[:100])
    assert np.corrcoef(np.argsort(np.argsort(seconds)), range(len(seconds)))[0, 1] > 0.99
    assert sum(count for why, count in found.lost.items() if why.startswith("fit")) == len(found) - 1


@pytest.mark.parametrize(
    "model, gpus, batch, sequence, stack",
    [
        ("llama3-70b", 256, 1024, 8192, "megatron"),
        ("playbook-8b", 64, 256, 4096, "nanotron"),
        ("qwen3-30b-a3b", 64, 512, 4096, "megatron"),
        ("llama3-8b", 16, 64, 8192, "fsdp"),
    ],
)
def test_all_plans_together_are_timed_as_each_by_itself(model: str, gpus: int, batch: int, sequence: int, stack: str):
    of, cluster, library = Model.find(model), find("h100-measured"), find_stack(stack)
    layouts = list(_layouts(of, replace(Plan(), **_fields(library, cluster)), gpus, batch, sequence, Counter()))
    together = blocks(of, layouts, cluster, batch, sequence, library)
    ranking = Plans(together, Counter(), (of, cluster, batch, sequence, library))
    possible, off = np.flatnonzero(np.isfinite(ranking.seconds)), []
    for index in np.random.default_rng(0).choice(possible, 60, replace=False).tolist():
        plan = ranking.at(index)
        off.append(ranking.seconds[index] / step(of, plan, cluster, batch, sequence, library).seconds - 1)
        assert ranking.held[index] == peak_bytes(of, plan, batch, sequence, library)
    assert np.quantile(np.abs(off), 0.9) < 1e-9 and max(np.abs(off)) < 0.02


def test_what_does_not_fit_is_not_found_and_is_counted():
    found = plans("llama3-70b", "h100-measured", gpus=64, batch=256, sequence=8192)
    usable = usable_bytes(find("h100-measured").chip)
    assert all(one.peak.total <= usable for one in found[:50])
    assert found.lost["need more than the 79 GiB of a GPU"] > 1000
    assert found.lost["tp=16 does not divide 8 key and value heads"] > 0
    assert "of" in str(found) and "plans fit" in str(found)


def test_where_nothing_is_possible_the_numbers_that_do_not_divide_are_named():
    with pytest.raises(PlanError, match=r"no plan trains this model on 7 GPUs .*tp=7 does not divide 6 heads"):
        plans(SMALL, "h100-measured", gpus=7, batch=24, sequence=500)
    with pytest.raises(PlanError, match="gpus is 0"):
        plans(SMALL, "h100-measured", gpus=0, batch=24, sequence=512)


def test_a_hundred_thousand_plans_take_seconds():
    began = time.process_time()
    found = plans("llama3-70b", "h100-measured", gpus=2048, batch=2**13, sequence=8192)
    took = (time.process_time() - began) / found.considered * 100_000
    assert found.considered > 50_000
    assert took < 4  # 1.7 s on an idle machine, and 0.9 if it was asked before; twice that for slower ones


def test_notable_plans_are_the_fastest_those_of_each_layout_and_the_front():
    found = plans(SMALL, "h100-measured", gpus=12, batch=24, sequence=384, exact=0)
    everything = [found.at(index) for index in range(len(found.seconds))]
    seconds, held = found.seconds, found.held
    estimates = {one.plan: one for one in found.notable(10_000)}
    shown = [*estimates]
    assert len(shown) == len(found.notable(10_000))
    for index, plan in enumerate(everything):
        if plan in estimates:
            assert estimates[plan][1:] == (seconds[index], held[index])
    near = (seconds <= 3 * seconds.min()) & (held <= usable_bytes(find("h100").chip))  # all of them fit
    for axes in {(plan.dp, plan.tp, plan.pp, plan.cp) for plan, is_near in zip(everything, near) if is_near}:
        of_axes = [i for i, plan in enumerate(everything) if (plan.dp, plan.tp, plan.pp, plan.cp) == axes]
        assert everything[min(of_axes, key=lambda index: seconds[index])] in shown
    for index in np.flatnonzero(near):
        beaten = (
            (seconds <= seconds[index]) & (held <= held[index]) & ((seconds < seconds[index]) | (held < held[index]))
        )
        twins = (seconds == seconds[index]) & (held == held[index])
        if not beaten.any():
            assert any(everything[twin] in shown for twin in np.flatnonzero(twins))
    assert shown[0] == everything[int(np.argmin(np.where(near, seconds, np.inf)))]
    assert len(found.notable(20)) == 20


def test_a_rank_has_at_most_four_stages_unless_more_are_asked_for():
    few = plans("llama3-8b", "h100-measured", gpus=8, batch=64, sequence=4096, schedules=["1f1b"])
    many = plans("llama3-8b", "h100-measured", gpus=8, batch=64, sequence=4096, schedules=["1f1b"], virtual=16)
    few, many = ({found.plan(place) for place in range(len(found))} for found in (few, many))
    assert max(one.virtual for one in few) == 4
    assert max(one.virtual for one in many) == 16
    assert few < many


def test_stages_are_cut_as_the_stack_does_it_unless_the_plan_says_how():
    model, cluster, given = Model.find("playbook-8b"), find("h100-measured"), (64, 4096, "nanotron")
    plan = Plan(dp=2, pp=4, zero=1)
    as_said, other = (replace(plan, balance=how) for how in ("computing", "layers"))
    assert step(model, plan, cluster, *given) == step(model, as_said, cluster, *given)
    assert step(model, plan, cluster, *given) != step(model, other, cluster, *given)
    assert memory(model, plan, *given) == memory(model, as_said, *given) != memory(model, other, *given)
    found = plans(model, cluster, gpus=8, batch=64, sequence=4096, stack="nanotron", schedules=["1f1b"], virtual=1)
    place = [found.plan(place) for place in range(len(found))].index(replace(plan, sequence_parallel=False))
    assert found.seconds[found.order[place]] == pytest.approx(step(model, plan, cluster, *given).seconds)


def test_without_a_cluster_and_a_sequence_they_are_those_of_the_command():
    found = plans("llama3.2-1b", gpus=2, batch=4, exact=1)
    assert (found[0].cluster.name, found[0].sequence) == ("h100-measured", 4096)


def test_what_is_chosen_every_plan_has():
    found = plans("llama3.2-1b", gpus=2, batch=4, exact=2, attention="unfused", compiled=True, state_dtype="bfloat16")
    assert {(one.plan.attention, one.plan.compiled, one.plan.state_dtype) for one in found} == {
        ("unfused", True, "bfloat16")
    }
    with pytest.raises(PlanError, match="a search cannot be given tp; it takes attention, compiled, state_dtype"):
        plans("llama3.2-1b", gpus=2, batch=4, tp=2)


def test_of_what_goes_without_saying_there_is_one_plan():
    """Where ranks share experts, etp=1 is what None means; and where they do not, etp=tp is."""
    model = Model(layers=2, hidden=64, heads=4, ffn=128, vocab=256, experts=8, experts_per_token=2)

    def layouts(*etp: int | None) -> list[Plan]:
        found = plans(model, "h100", gpus=4, batch=8, sequence=64, schedules=("1f1b",), inside=False, etp=etp)
        return [one.plan for one in found]

    alike, ones = [replace(plan, etp=plan.expert_tp) for plan in layouts(None, 1, 2)], layouts(1)
    assert len(set(alike)) == len(alike)
    assert {plan.expert_tp for plan in ones} == {1} and {plan.etp for plan in ones} == {None, 1}
