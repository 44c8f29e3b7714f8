"""The doctor, judged by scripts: it names what is wrong, the factor and the line, and blames nothing that is right."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest

from tests.checking.doctor.expected import WRONG, Wrong
from tests.checking.doctor.right import IN_BFLOAT16, RIGHT, Right
from tests.checking.doctor.test_scripts import FOLDER, GOOD, repaired, text_of
from tplab.checking import reference, verdict
from tplab.checking.same_model import Finding, SameModel
from tplab.checking.verdict import EPSILON
from tplab.commands import mesh_from
from tplab.torch import same_model

pytestmark = pytest.mark.filterwarnings("ignore")

NO_CAUSE = {"pipeline_other_order", "one_rank_evaluates_its_part"}
"""Scripts whose cause no repair proves: their reports say so."""

NOT_NAMED: dict[str, str] = {}
"""Scripts that are reported as different, and whose report misses the line or the factor; with what it says instead."""


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def examined(script: Path, row: Wrong | Right) -> SameModel:
    args, alone = shlex.split(row.args), shlex.split(row.reference_args)
    if row.mesh:
        return same_model(script, args, mesh=mesh_from(row.mesh), reference_args=alone)
    return same_model(script, args, ranks=row.ranks, reference_args=alone)


def missed(first: Finding, row: Wrong) -> str:
    """What a finding does not say as it is; empty if it names everything."""
    text, said = text_of(row), f"{first.cause} {first.text_of_factor}".lower()
    line = text[: text.index(row.lines[0])].count("\n") + 1
    missing = []
    if first.what not in row.what:
        missing.append(f"{first.what} and not {' or '.join(row.what)} is wrong first")
    if isinstance(row.factor, float) and not (first.factor and math.isclose(first.factor, row.factor, rel_tol=5e-3)):
        missing += [f"the factor is {row.factor}, not {first.factor} ({first.text_of_factor})"] * (row.factor != 0)
    if first.where != f"{row.script}.py:{line}":
        missing.append(f"it is at line {line}, not at {first.where}")
    if first.cause and not any(word.lower() in said for word in row.cause):
        missing.append(f"the cause, {row.cause}, is none of: {said}")
    return "; ".join(missing)


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row.script)
def test_what_is_wrong_is_named(row: Wrong):
    report = examined(FOLDER / f"{row.script}.py", row)
    assert report.verdict in ("different", "logs differ") and report.exit_code == 1, str(report)
    assert report.first is not None
    if row.script in NOT_NAMED:
        assert missed(report.first, row), "it is named now: take it out of NOT_NAMED"
    else:
        assert not missed(report.first, row), f"{missed(report.first, row)}\n{report}"
    assert bool(report.first.proof) == (row.script not in NO_CAUSE), str(report)
    assert report.first.cause in ("", report.first.seen) or report.first.proof


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row.script)
def test_what_is_repaired_is_not_blamed(row: Wrong, tmp_path: Path):
    report = examined(repaired(row, tmp_path), row)
    assert (report.verdict, report.exit_code, report.findings) == ("same", 0, ()), str(report)


@pytest.mark.parametrize("row", RIGHT, ids=str)
def test_what_is_right_is_not_blamed(row: Right):
    report = examined(GOOD / f"{row.script}.py", row)
    assert (report.verdict, report.exit_code, report.findings) == ("same", 0, ()), str(report)


def test_rounding_would_be_blamed_if_its_size_were_not_derived(monkeypatch):
    for module in (reference, verdict):
        monkeypatch.setattr(module, "EPSILON", {"float32": EPSILON["float32"]})
    monkeypatch.setattr(reference, "TIMES", 0)
    first = examined(GOOD / f"{IN_BFLOAT16.script}.py", IN_BFLOAT16).first
    assert first is not None and first.what == "gradient"


def test_score():
    assert len(WRONG) >= 40 and len(RIGHT) >= 40
    assert len(NOT_NAMED) <= 2


TRAINING = """\
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{before}
for step in range(3):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))[rank::world]
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    {step}
dist.destroy_process_group()
"""
NOT_COMPARABLE = {
    "never_steps": ({"before": "", "step": "pass"}, ("step",)),
    "a_rank_ends": ({"before": "if rank == 1:\n    sys.exit(0)", "step": "optimizer.step()"}, ("rank 1",)),
    "an_error_on_one_rank": (
        {"before": "if rank == 1:\n    raise OSError('no data')", "step": "optimizer.step()"},
        ("no data",),
    ),
    "only_with_several_ranks": (
        {"before": "assert world > 1, 'needs ranks'", "step": "optimizer.step()"},
        ("needs ranks",),
    ),
}


@pytest.mark.parametrize("name", NOT_COMPARABLE)
def test_what_cannot_be_compared_says_why(name: str, tmp_path: Path):
    parts, words = NOT_COMPARABLE[name]
    path = tmp_path / f"{name}.py"
    path.write_text(TRAINING.format(**parts))
    report = same_model(path, ranks=2)
    verdict = ("cannot tell", 3) if name == "never_steps" else ("could not run", 2)
    assert (report.verdict, report.exit_code, report.findings) == (*verdict, ()), str(report)
    assert all(word in report.reason for word in words), report.reason


def test_data_drawn_by_each_rank_are_no_fault(tmp_path: Path):
    text = TRAINING.format(before="torch.manual_seed(100 + rank)", step="optimizer.step()")
    text = text.replace("generator=torch.Generator().manual_seed(step))[rank::world]", "requires_grad=False)")
    path = tmp_path / "own_data.py"
    path.write_text(text)
    report = same_model(path, ranks=2)
    assert report.verdict in ("same", "cannot tell"), str(report)
    assert report.verdict == "same" or "seed" in report.reason
