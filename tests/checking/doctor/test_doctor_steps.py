"""`tplab.jax.same_model`, judged by steps: it names what is wrong, the factor and the line, and blames nothing else."""

from __future__ import annotations

import inspect
import math

import pytest

from tests.checking.doctor import jax_steps
from tests.checking.doctor.jax_steps import RIGHT_STEPS, WRONG_STEPS, RightStep, WrongStep, mlp_data
from tests.checking.doctor.test_jax_steps import mesh_of
from tplab.checking.same_model import Finding
from tplab.jax import same_model

NOT_NAMED = {"positions_from_zero"}
"""Steps that are reported as different at another line: that of the loss' pmean."""


def missed(first: Finding, row: WrongStep) -> str:
    """What a finding does not say as it is; empty if it names everything."""
    text, said = inspect.getsource(jax_steps), f"{first.cause} {first.text_of_factor}".lower()
    body, start = inspect.getsourcelines(row.make)
    lines = {f"jax_steps.py:{number}" for number in range(start, start + len(body))}
    fault = f"jax_steps.py:{text[: text.index(row.line)].count(chr(10)) + 1}"
    missing = []
    if first.what not in row.what:
        missing.append(f"{first.what} and not {' or '.join(row.what)} is wrong first")
    if isinstance(row.factor, float) and not (first.factor and math.isclose(first.factor, row.factor, rel_tol=5e-3)):
        missing.append(f"the factor is {row.factor}, not {first.factor} ({first.text_of_factor})")
    if first.where not in lines | {fault}:
        missing.append(f"it is at {fault}, not at {first.where}")
    if not any(word.lower() in said for word in row.cause):
        missing.append(f"the cause, {row.cause}, is none of: {said}")
    return "; ".join(missing)


@pytest.mark.parametrize("row", WRONG_STEPS, ids=str)
def test_what_is_wrong_is_named(row: WrongStep):
    report = same_model(lambda mesh: row.make(mesh, False), row.data(), mesh=mesh_of(row))
    assert (report.verdict, report.exit_code) == ("different", 1), str(report)
    assert report.first is not None
    if row.name in NOT_NAMED:
        assert missed(report.first, row), "it is named now: take it out of NOT_NAMED"
    else:
        assert not missed(report.first, row), f"{missed(report.first, row)}\n{report}"


@pytest.mark.parametrize("row", WRONG_STEPS, ids=str)
def test_what_is_repaired_is_not_blamed(row: WrongStep):
    report = same_model(lambda mesh: row.make(mesh, True), row.data(), mesh=mesh_of(row))
    assert (report.verdict, report.exit_code, report.findings) == ("same", 0, ()), str(report)


@pytest.mark.parametrize("row", RIGHT_STEPS, ids=str)
def test_what_is_right_is_not_blamed(row: RightStep):
    report = same_model(row.make, mlp_data(), mesh=mesh_of(row))
    assert (report.verdict, report.exit_code, report.findings) == ("same", 0, ()), str(report)
