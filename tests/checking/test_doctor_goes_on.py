"""What begins wrong, what no module holds, and a wrong log, after which the doctor goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checking.test_doctor_of_values import HEAD
from tplab.checking.same_model import SameModel
from tplab.torch import same_model

STEP = """\
    F.cross_entropy(head(net(own)), labels).backward()
    reduced(mean=True)
    optimizer.step()
"""


def compared(path: Path, *parts: str) -> SameModel:
    (path / "train.py").write_text("".join(parts))
    return same_model(path / "train.py", ranks=2, steps=2)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_parameter_of_no_module_is_compared(is_right: bool, tmp_path: Path):
    head = HEAD.replace(
        "data = ", "scale = torch.zeros(1, requires_grad=True)\nother = torch.optim.SGD([scale], 0.1)\ndata = "
    )
    step = f"""\
    other.zero_grad()
    (scale * head(net(own)).detach().square().mean()).backward()
    dist.all_reduce(scale.grad) if {is_right} else None
    scale.grad /= world if {is_right} else 1
    other.step()
"""
    report = compared(tmp_path, head, STEP, step)
    assert report.verdict == ("same" if is_right else "different"), str(report)
    if report.first:
        assert report.first.name.startswith("parameter") and "average" in report.first.cause, str(report)
        assert report.first.proof and report.first.step == 1, str(report)


def test_a_wrong_log_does_not_hide_what_goes_wrong_later(tmp_path: Path):
    step = STEP.replace(
        "    reduced",
        '    print(f"loss {F.cross_entropy(head(net(own)), labels):.5f}") if not rank else 0\n    reduced',
    )
    report = compared(tmp_path, HEAD, step)
    assert report.verdict == "logs differ" and report.first and report.first.step == 0, str(report)
    report = compared(tmp_path, HEAD, step.replace("reduced(mean=True)", "reduced(mean=True) if step < 1 else None"))
    assert report.verdict == "different" and report.first, str(report)
    assert (report.first.what, report.first.step) == ("gradient", 1) and report.first.proof, str(report)
    assert [(one.what, one.step) for one in report.findings[1:]] == [("log", 0)], str(report)


def test_a_log_proves_nothing_of_ranks_that_send_nothing(tmp_path: Path):
    step = STEP.replace(
        "    reduced(mean=True)\n", '    print(f"loss {head(net(own)).sum():.5f}") if not rank else 0\n'
    )
    report = compared(tmp_path, HEAD, step.replace("(own)", "(x)").replace("labels", "y"))
    assert report.verdict == "cannot tell", str(report)


def test_settings_that_are_wrong_by_another_factor_on_each_rank(tmp_path: Path):
    report = compared(tmp_path, HEAD.replace("lr=0.1", "lr=0.1 * (1 + (rank + 1) * (world - 1))"), STEP)
    assert report.first and (report.first.what, report.first.factor) == ("optimizer", None), str(report)
    assert (report.first.got, report.first.want) == ("0.2 on rank 0", "0.1"), str(report)


def test_copies_of_which_none_begins_right(tmp_path: Path):
    start = "own = torch.randn(8, 8, generator=data).chunk(world)[rank]\nnet.bias.data.copy_(own.mean(0))\nfor step"
    report = compared(tmp_path, HEAD.replace("for step", start), STEP)
    assert report.first and report.first.what == "weights" and report.first.proof, str(report)
    assert "and none with the reference's" in report.first.cause and "and rank 0 has" in report.first.want, str(report)


@pytest.mark.parametrize("row, is_right", [("0 if rank == 0 else slice(0)", True), ("0", False)])
def test_an_element_that_is_written_at_an_index_of_a_part(row: str, is_right: bool, tmp_path: Path):
    start = f"""\
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(head.weight.detach().chunk(world)[rank].clone())
        self.weight.data[{row}] = 0

    def forward(self, x):
        parts = [torch.empty(len(x), 8 // world) for _ in range(world)]
        mine = F.linear(x, self.weight)
        dist.all_gather(parts, mine.detach())
        parts[rank] = mine
        return torch.cat(parts, 1)

part = Part()
optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
for step"""
    text = "    F.cross_entropy(part(net(x).detach()), y).backward()\n    optimizer.step()\n"
    report = compared(tmp_path, HEAD.replace("for step", start), text)
    assert report.verdict == ("same" if is_right else "different"), str(report)
    if report.first:
        assert report.first.ranks == (1,) and "8 of 32 elements" in str(report) and report.first.proof, str(report)
