"""The constants of forecasts: they are what the fit finds, and runs that it has not seen are as near as promised."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fit import steps as fit
from tplab.forecast.measured import pairs, playbook, runs, sources, split
from tplab.forecast.stacks import STACKS, constants, find_stack


def test_every_published_run_is_of_a_possible_plan():
    for run in (*playbook(), *runs()):
        assert run.plan.refusal(run.model, run.batch, run.sequence) is None, run
    assert len([run for run in playbook() if run.is_fitted]) == 118
    assert all(run.source.split("-")[0] in "\n".join(sources("runs")) for run in runs())
    assert "Apache-2.0" in sources("playbook")[0]


def test_constants_are_what_the_fit_finds():
    found = fit.fit_all()
    for name, of in constants()["stacks"].items():
        assert found["stacks"][name] == pytest.approx(of, rel=0.02), name
    for name in ("chips", "experts"):
        assert found[name] == pytest.approx(constants()[name], rel=0.02), name


def test_a_third_of_the_runs_is_left_out_and_never_fitted():
    fitted, left_out = split(playbook())
    assert 0.2 < len(left_out) / 118 < 0.4 and not set(fitted) & set(left_out)


def test_pairs_of_runs_differ_in_tensor_parallelism_alone():
    found = [(few, many, size, pairs(few, many, size)) for few, many in ((4, 8), (8, 16)) for size in (1, 2, 4)]
    assert [len(of) for *_, of in found] == [13, 1, 4, 5, 3, 1]
    for few, many, size, of in found:
        for a, b in of:
            assert (a.model, a.plan.ranks, a.plan.zero) == (b.model, b.plan.ranks, b.plan.zero)
            assert (a.plan.tp, b.plan.tp, a.plan.pp, b.plan.pp) == (few, many, 1, 1)
            assert a.plan.microbatch == b.plan.microbatch == size and b.plan.ranks <= 256
    assert len(pairs(8, 16, 2, ranks=512)) == 4


def test_runs_that_were_left_out_are_as_near_as_the_page_says():
    table = {name: left_out for name, _, left_out in fit.table()}
    nanotron = table["nanotron on H100, playbook"]
    assert nanotron is not None
    assert nanotron.median < 0.04 and nanotron.most < 0.10
    assert 0.85 <= nanotron.covered <= 0.95
    papers = table["Megatron on A100, papers"]
    assert papers is not None and papers.worst < 0.12


def test_rows_that_nothing_was_fitted_to_are_as_near_as_the_page_says():
    found = [of for _, of in fit.unseen()]
    assert [of.rows for of in found] == [4, 6, 3, 6, 5]
    first, second, llama, zero, experts = found
    assert first.worst < 0.05 and second.worst < 0.08
    assert llama.median < 0.2 and llama.worst < 0.25
    assert zero.median < 0.07 and zero.worst < 0.15
    assert experts.worst > 0.5 and experts.covered == 1  # they are not forecast well, and their interval is as wide


def test_experts_that_a_token_is_sent_to_once_per_node():
    (run,) = (run for run in runs() if run.source == "modelzoo")
    assert run.plan.ep == run.plan.dp * run.plan.tp  # each expert is whole: tensor-parallel ranks share them, too
    assert fit.errors([run]).worst < 0.05


def test_the_plan_that_the_forecast_takes_for_the_fastest_is_fast():
    clean = [run for run in playbook() if run.is_fitted]
    lost = sorted(fit.regret(clean))
    # One run of one cell took twice as long as its twin with ZeRO 1, and no forecast can know that
    assert lost[-1] == pytest.approx(0.92, abs=0.01) and lost[-2] < 0.08
    assert np.mean(lost[:-1]) < 0.015


def test_pipelines_in_one_node_are_forecast_though_no_pipeline_was_fitted():
    rows = [run for run in playbook() if run.plan.pp > 1 and run.plan.ranks == 8 and run.plan.tp <= 8]
    found = fit.errors(rows)
    assert found.rows == 26 and found.median < 0.08 and found.most < 0.12


def test_one_factor_belongs_to_a_stack_and_fits_better_than_none():
    for stack, times in (("nanotron", 2), ("megatron", 1.5)):
        rows = [run for run in (*playbook(), *runs()) if run.stack == stack and run.is_fitted]
        plain = replace(find_stack(stack), factor=1.0, host=0.0)
        assert fit.errors(rows).median < fit.errors(rows, {stack: plain}).median / times


def test_stacks_have_other_names():
    assert find_stack("Megatron_LM") is STACKS["megatron"] and find_stack("FSDP2") is STACKS["fsdp"]
    with pytest.raises(ValueError, match="no stack is called 'mine'; there are megatron"):
        find_stack("mine")
