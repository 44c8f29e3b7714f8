"""The operation that goes wrong, in a forward pass or in an update; and the program that is right but for its line."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tplab.checking.causes import times
from tplab.torch import same_model

HEAD = """\
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad

def over_ranks(x, op=dist.ReduceOp.SUM):
    x = x.detach().clone()
    dist.all_reduce(x, op)
    return x

class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return over_ranks(grad)

torch.manual_seed(0)
net, head = nn.Linear(6, 8), nn.Linear(8, 8)
params = [*net.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(params, lr=0.1)
data = torch.Generator().manual_seed(1)

def reduced(mean):
    for p in params:
        dist.all_reduce(p.grad)
        p.grad /= world if mean else 1

for step in range(2):
    x, y = torch.randn(8, 6, generator=data), torch.randint(8, (8,), generator=data)
    own, labels = x.chunk(world)[rank], y.chunk(world)[rank]
    optimizer.zero_grad()
"""


class Case(NamedTuple):
    """text: the rest of a program, in which LINE stands for a line; right and wrong: that line; cause: words of the
    proven cause; what: is wrong first"""

    text: str
    right: str
    wrong: str
    cause: str
    what: str = "loss"
    head: str = HEAD


CASES = {
    "a function of each part, summed": Case(
        """\
    hidden, rows = net(x), slice(rank * 8 // world, (rank + 1) * 8 // world)
    LINE
    F.cross_entropy(out + head.bias, y).backward()
    for p in (*net.parameters(), head.weight):
        dist.all_reduce(p.grad)
    optimizer.step()
""",
        "out = F.silu(Sum.apply(F.linear(hidden[:, rows], head.weight[:, rows])))",
        "out = Sum.apply(F.silu(F.linear(hidden[:, rows], head.weight[:, rows])))",
        "sums only what is computed from it",
    ),
    "a sum that what follows takes twice": Case(
        """\
    columns, rows = (slice(rank * n // world, (rank + 1) * n // world) for n in (6, 8))
    LINE
    scaled = Copy.apply(hidden) / Copy.apply(hidden).sum(1, keepdim=True)
    F.cross_entropy(Sum.apply(F.linear(scaled[:, rows], head.weight[:, rows])), y).backward()
    reduced(mean=False)
    optimizer.step()
""",
        "hidden = Sum.apply(F.linear(x.abs()[:, columns], net.weight.abs()[:, columns]))",
        "hidden = F.linear(x.abs()[:, columns], net.weight.abs()[:, columns])",
        "sums only what is computed from it",
        head=HEAD.replace("6, 8)", "6, 8, bias=False)").replace("8, 8)", "8, 8, bias=False)", 1),
    ),
    "a loss of each part of a sum": Case(
        """\
    chosen = head(net(x)).log_softmax(1).gather(1, y[:, None]).view(4, 2)
    LINE
    (-F.logsigmoid(of_sequence)).mean().backward()
    reduced(mean=False)
    optimizer.step()
""",
        "of_sequence = Sum.apply(chosen.chunk(world, 1)[rank].sum(1))",
        "of_sequence = chosen.chunk(world, 1)[rank].sum(1)",
        "the sum of it over ranks is the reference's",
    ),
    "the last of each part": Case(
        """\
    tokens = head(torch.tanh(net(x))).view(2, 4, 8).chunk(world, 1)[rank]
    LINE
    F.cross_entropy(last, y[:2]).backward()
    reduced(mean=False)
    optimizer.step()
""",
        "last = Sum.apply(tokens[:, -1] * (rank == world - 1))",
        "last = Sum.apply(tokens[:, -1]) / world",
        "the last rank's value is the reference's",
    ),
    "a count that is at least one on each rank": Case(
        """\
    mask = torch.arange(8).chunk(world)[rank] < 2
    LINE
    ((F.cross_entropy(head(net(own)), labels, reduction="none") * mask).sum() / (count / world)).backward()
    reduced(mean=True)
    optimizer.step()
""",
        "count = over_ranks(mask.sum().float()).clamp(min=1)",
        "count = over_ranks(mask.sum().float().clamp(min=1))",
        "the sum of it over ranks is the reference's",
    ),
    "scores that come back in another order": Case(
        """\
    scores, back = [torch.empty(len(own)) for _ in range(world)], torch.empty(len(own))
    dist.all_gather(scores, own[:, 0].contiguous())
    scores = torch.cat(scores).square()
    LINE
    (back * F.cross_entropy(head(net(own)), labels, reduction="none")).mean().backward()
    reduced(mean=True)
    optimizer.step()
""",
        "back = scores.chunk(world)[rank]",
        "back = scores[rank::world]",
        "in another order",
    ),
    "a weight that is scaled by each rank's largest score after the step": Case(
        """\
    scores = head(net(own))
    F.cross_entropy(scores, labels).backward()
    reduced(mean=True)
    optimizer.step()
    with torch.no_grad():
        LINE
        head.weight.mul_((1 / largest).sqrt())
""",
        "largest = over_ranks(scores.abs().max(), dist.ReduceOp.MAX)",
        "largest = scores.abs().max()",
        "the maximum of it over ranks is the reference's",
        what="parameters",
    ),
    "a neighbour's token, whose gradient is not sent back": Case(
        """\
    LINE
    tail = hidden[:, -1:]
    before = torch.cat([Left.apply(tail), hidden[:, :-1]], 1)
    labels = y.view(2, 4).chunk(world, 1)[rank].flatten()
    (F.cross_entropy(head(hidden * before).flatten(0, 1), labels) / world).backward()
    reduced(mean=False)
    optimizer.step()
""",
        "hidden, is_sent_back = net(x.view(2, 4, 6).chunk(world, 1)[rank]), True",
        "hidden, is_sent_back = net(x.view(2, 4, 6).chunk(world, 1)[rank]), False",
        "A part of it is lost on the way",
        what="gradient",
        head=HEAD.replace(
            "torch.manual_seed",
            """\
def from_rank(x, other):
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x.contiguous())
    return parts[other] if 0 <= other < world else torch.zeros_like(x)

class Left(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return from_rank(x, rank - 1)

    @staticmethod
    def backward(ctx, grad):
        return from_rank(grad, rank + 1) if is_sent_back else torch.zeros_like(grad)

torch.manual_seed""",
        ),
    ),
    "an update by hand, in a basis of each rank's own": Case(
        """\
    F.cross_entropy(head(net(own)), labels).backward()
    with torch.no_grad():
        whole = over_ranks(net.weight.grad)
        LINE
        reduced(mean=True)
        net.weight.sub_(0.1 * basis @ (basis.t() @ net.weight.grad))
""",
        "basis = torch.linalg.svd(whole)[0][:, :2]",
        "basis = torch.linalg.svd(net.weight.grad)[0][:, :2]",
        "computed tensors that go into this line are right",
        what="parameters",
        head=HEAD.replace("torch.optim.SGD(params, lr=0.1)", "net"),  # it has zero_grad, and never steps
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_operation_that_goes_wrong(name: str, tmp_path: Path):
    case, path = CASES[name], tmp_path / "train.py"
    path.write_text(case.head + case.text.replace("LINE", case.wrong))
    report = same_model(path, ranks=2, steps=2)
    assert report.first is not None and report.first.what == case.what, str(report)
    assert report.first.where == f"train.py:{(case.head + case.text).split('LINE')[0].count(chr(10)) + 1}", str(report)
    assert case.cause in report.first.cause and report.first.proof, str(report)
    path.write_text(case.head + case.text.replace("LINE", case.right))
    report = same_model(path, ranks=2, steps=2)
    assert report.verdict == "same", str(report)


def test_a_query_of_all_ranks_beside_parts_of_the_keys_is_right(tmp_path: Path):
    text = """\
    class Attends(nn.Module):
        def forward(self, query, keys):
            weight = (net(query).detach() @ net(keys).t()).exp()
            return Sum.apply(weight @ head(net(keys))) / Sum.apply(weight.sum(1, keepdim=True))

    attends = Attends()
    attends.net, attends.head = net, head
    F.cross_entropy(attends(x[:4], x.chunk(world)[rank]), y[:4]).backward()
    reduced(mean=False)
    optimizer.step()
"""
    (tmp_path / "train.py").write_text(HEAD + text)
    report = same_model(tmp_path / "train.py", ranks=2, steps=2)
    assert report.verdict == "same", str(report)


def test_ranks_that_share_the_edges_of_a_graph_do_not_repeat_their_work(tmp_path: Path):
    text = """\
    hidden, columns = net(x), slice(rank * 8 // world, (rank + 1) * 8 // world)
    sent = Copy.apply(hidden)[columns]
    F.cross_entropy(head(hidden + Sum.apply((x @ x.t())[:, columns] @ sent)), y).backward()
    optimizer.step()
"""
    (tmp_path / "train.py").write_text(HEAD + text)
    report = same_model(tmp_path / "train.py", ranks=2, steps=2)
    assert report.verdict == "same", str(report)


def test_ranks_that_log_several_numbers_still_repeat_their_work(tmp_path: Path):
    """They add them up before the backward pass, and have the same ones."""
    text = """\
    loss = F.cross_entropy(head(net(x)), y)
    dist.all_reduce(torch.stack([loss.detach(), 2 * loss.detach()]))
    loss.backward()
    reduced(mean=True)
    optimizer.step()
"""
    (tmp_path / "train.py").write_text(HEAD + text)
    report = same_model(tmp_path / "train.py", ranks=2, steps=2)
    assert report.verdict == "cannot tell" and "all see the same samples" in report.reason, str(report)


def test_a_loss_that_is_almost_right_is_not_one_time_the_reference():
    assert times(1.0005) == "1.0005"
