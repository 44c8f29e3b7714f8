"""The doctor's four answers: what is called the same is the same, and where nothing can be learnt it says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tplab.checking.copies import check_copies
from tplab.checking.gaps import farthest, gap
from tplab.checking.recording import Piece, Seen, Step
from tplab.torch import same_model

HEAD = """\
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
draw = torch.Generator().manual_seed(1)

def batch(rows=8):
    return torch.randn(rows, 4, generator=draw), torch.randn(rows, 3, generator=draw)
"""


def report_of(text: str, tmp_path: Path, ranks: int = 2):
    path = tmp_path / "train.py"
    path.write_text(HEAD + text)
    return same_model(path, ranks=ranks)


def line_of(words: str, text: str) -> str:
    return f"train.py:{(HEAD + text)[: (HEAD + text).index(words)].count(chr(10)) + 1}"


def test_what_is_not_finite_is_infinitely_far_away():
    assert gap([1.0, np.nan], [1.0, 2.0]) == gap([np.nan], [np.nan]) == gap([np.inf], [-np.inf]) == np.inf
    assert gap([np.inf, 1.0], [np.inf, 1.5]) == 0.5
    assert farthest([1.0, 3.0, np.nan], [1.0, 1.0, 4.0])[1] == 4.0


NAN = """
model = DDP(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, y = (part.chunk(world)[rank] for part in batch())
    out = model(x)
    if step == 1 and {when}:
        out = out * {number}
    optimizer.zero_grad()
    F.mse_loss(out, y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("number", ["float('nan')", "float('inf')"])
@pytest.mark.parametrize("when", ["world > 1", "rank == 1"])
def test_nan_on_ranks_is_another_model(when: str, number: str, tmp_path: Path):
    text = NAN.format(when=when, number=number)
    report = report_of(text, tmp_path)
    assert (report.verdict, report.exit_code) == ("different", 1), str(report)
    first = report.first
    assert first is not None and (first.what, first.step) == ("loss", 1)
    assert first.where == line_of("F.mse_loss(out, y).backward()", text)
    assert first.ranks == ((1,) if when == "rank == 1" else ())
    assert "not finite" in report.title and "NaN" in report.title and first.where in report.title


def test_nan_on_both_sides_tells_nothing(tmp_path: Path):
    report = report_of(NAN.format(when="True", number="float('nan')"), tmp_path)
    assert (report.verdict, report.exit_code, report.findings) == ("cannot tell", 3, ()), str(report)
    assert "NaN" in report.reason and "step 1" in report.reason


UPDATED = """
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(2):
    x, y = (part.chunk(world)[rank] for part in batch())
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
    if world > 1 and rank == 1:
        {change}
"""


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("model.weight.data[0, 0] = float('nan')", "parameters"),
        ("optimizer.state[model.bias]['momentum_buffer'][1] = float('inf')", "optimizer"),
    ],
)
def test_nan_in_what_a_step_leaves_is_another_model(change: str, what: str, tmp_path: Path):
    report = report_of(UPDATED.format(change=change), tmp_path)
    assert report.first is not None and (report.first.what, report.first.ranks) == (what, (1,)), str(report)
    assert report.first.is_not_finite


def test_copies_that_become_nan_are_not_the_same():
    def seen(value: float) -> Seen:
        begun, after = ({"w": Piece(np.array([1.0, x], np.float32))} for x in (2.0, value))
        step = Step(gradients=begun, parameters=after, lines={"step": "train.py:3"})
        return Seen(weights=begun, steps=[step, Step()])

    start = seen(2.0)
    other = seen(float("nan"))
    other.weights["w"] = start.weights["w"]
    assert check_copies([start, other]).verdict == "different"
