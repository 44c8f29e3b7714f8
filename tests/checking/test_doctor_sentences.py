"""Proven causes whose words would be untrue in some script, although the run with the repair is right."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.checking.test_doctor_of_values import HEAD
from tplab.checking.differences import difference
from tplab.checking.observed import find_spread
from tplab.checking.trail import Op, Trail
from tplab.checking.trails import Trails
from tplab.torch import same_model

LOSS = "    F.cross_entropy(head({}), labels).backward()\n"
END = "    reduced(mean=True)\n    optimizer.step()\n"


class Case(NamedTuple):
    """start: before the steps. text: of a step. words: of the proven cause; no: words that would be untrue"""

    start: str
    text: str
    words: str
    no: str


CASES = {
    "a part of the elements is summed": Case(
        "",
        LOSS.format("net(own)")
        + "    for p in params:\n        dist.all_reduce(p.grad.view(-1)[:40])\n        p.grad /= world\n"
        "    optimizer.step()\n",
        "only 40 of the 64 elements of the gradient of",
        "sparse",
    ),
    "one rank computes more": Case(
        "",
        "    h = net(own)\n    if rank == 0:\n        h = h + torch.arange(8.0) * (world - 1)\n"
        + LOSS.format("h")
        + END,
        "only rank 0 and the reference compute this",
        "does not compute",
    ),
    "what is compared is wrong, too": Case(
        "",
        "    place = torch.ones(len(own)).cumsum(0)\n    mask = place <= len(own) - 2\n"
        "    h = net(own) * mask[:, None]\n" + LOSS.format("h") + END,
        "compares with 2, and in the reference with 6",
        "that go into this line are right",
    ),
    "elements that each number of ranks draws": Case(
        "own = torch.Generator().manual_seed(5 + world)\n"
        "for p in params:\n    p.data.mul_(torch.rand(p.shape, generator=own) > 0.2)\n",
        LOSS.format("net(own)") + END,
        "depends on the rank or on the number of ranks",
        "they are written after",
    ),
    "BatchNorm is frozen": Case(
        "norm = nn.BatchNorm1d(8).eval()\n",
        "    h = norm(net(own)).sort(0).values.cumsum(0)\n" + LOSS.format("h") + END,
        "what this line|that go into this line are right",
        "BatchNorm",
    ),
}  # fmt: skip


def test_two_wrong_logs_have_causes_of_their_own(tmp_path: Path):
    text = """\
    z = net(own)
    F.cross_entropy(head(z), labels).backward()
    hits = F.one_hot(z.argmax(1), 8).T.detach() @ F.one_hot(labels, 8)
    f1 = float(1 / hits.square().sum().sqrt())
    score = z.detach().sigmoid().square().mean().sqrt()
    print(f"f1 {f1:.4f} score {score:.4f}") if not rank else None
"""
    (tmp_path / "train.py").write_text(HEAD + text + END)
    report = same_model(tmp_path / "train.py", ranks=2, steps=1)
    assert report.first and report.first.proof and report.first.name == "f1", str(report)
    line = (HEAD + text).split("f1 =")[0].count("\n") + 1
    assert report.first.where == f"train.py:{line}" and "likewise" not in report.first.cause, str(report)
    assert "score differs too" in str(report) and "or parts that add up" in report.first.cause, str(report)


@pytest.mark.parametrize("name", CASES)
def test_a_cause_says_only_what_is_so(name: str, tmp_path: Path):
    case = CASES[name]
    (tmp_path / "train.py").write_text(HEAD.replace("for step", f"{case.start}for step") + case.text)
    report = same_model(tmp_path / "train.py", ranks=2, steps=1)
    assert report.first and report.first.proof, str(report)
    assert any(words in report.first.cause for words in case.words.split("|")), str(report)
    assert case.no not in str(report.first), str(report)


def test_ends_with_a_gap_between_them_are_not_the_whole():
    x = np.random.default_rng(0).standard_normal((9, 3))
    assert find_spread({0: x[:4], 1: x[-4:]}, x, 2) is None
    assert find_spread({0: x[:6], 1: x[-6:]}, x, 2) is not None  # with a halo


def test_an_index_that_is_off_by_one_is_wrong():
    places = np.arange(20_000)
    assert find_spread({0: places[:10_000], 1: places[10_000:]}, places, 2) is not None
    assert find_spread({0: places[:10_000], 1: places[10_000:] + 1}, places, 2) is None


def test_rows_of_a_large_tensor_are_found_in_another_order():
    x = np.random.default_rng(0).standard_normal((512, 20_000)).astype(np.float32)  # all pairs would take 42 GB
    assert difference(x[::-1], x) == "the reference's rows in another order: its row 0 is the reference's row 511"


def test_runs_of_a_shared_loop_may_be_missing():
    """As where an exception ended one of them."""
    ones = lambda *turns: Trail([Op(("a.py:1", "add", turn), ["a.py:1"], [], [np.ones(2)]) for turn in turns])  # noqa: E731
    for ours, theirs in (((0,), (0, 2)), ((1,), (0, 1))):
        assert Trails([ones(*ours), ones(*ours)], ones(*theirs)).reads() == []


def test_equal_numbers_that_are_read_are_right_even_if_they_are_nan():
    read = lambda x: Trail([Op(("a.py:1", "item", 0), ["a.py:1"], [], [x])], end=0)  # noqa: E731
    for x in (np.array(np.nan), np.array([1.0, 1e-9]), np.array(True), np.array(3)):
        assert Trails([read(x), read(x)], read(x)).reads() == []
    assert Trails([read(np.array(100_000))], read(np.array(100_001))).reads()
    assert not Trails([read(np.array([1.0, 1e-7]))], read(np.array([1.0, 2e-7]))).reads()


def test_what_dtensor_computes_is_traced(tmp_path: Path):
    """Its collectives return tensors without an address."""
    (tmp_path / "train.py").write_text(f"""\
{HEAD.partition("class Sum")[0]}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
if world > 1:
    parallelize_module(net, init_device_mesh("cpu", (world,)), {{"0": ColwiseParallel(), "2": RowwiseParallel()}})
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.Generator().manual_seed(1)
for step in range(2):
    x, y = torch.randn(8, 6, generator=data), torch.randint(3, (8,), generator=data)
    optimizer.zero_grad()
    F.cross_entropy(net(x) / world, y).backward()
    optimizer.step()
""")
    report = same_model(tmp_path / "train.py", ranks=2, steps=1)
    assert report.verdict == "different" and report.first and report.first.what == "loss", str(report)
