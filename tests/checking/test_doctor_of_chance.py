"""What the doctor says of models that are random: chance is no fault, and hides none."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tplab.torch import same_model

LAYERS = {
    "GRU": lambda: nn.GRU(8, 8, 2, dropout=0.3),
    "LSTM": lambda: nn.LSTM(8, 8, 2, dropout=0.3),
    "alpha dropout": lambda: nn.AlphaDropout(0.3),
    "feature alpha dropout": lambda: nn.FeatureAlphaDropout(0.3),
    "leaky by chance": lambda: nn.RReLU(),
    "attention": lambda: nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True),
}
DRAWS = {
    "dropout of torch": lambda x: torch.dropout(x, 0.3, True),
    "noise": lambda x: x + torch.randn_like(x),
    "normal": lambda x: torch.distributions.Normal(x, 0.3).rsample(),
    "mask": lambda x: x * (torch.rand(x.shape) < 0.7),
    "depth": lambda x: x * x.new_empty(len(x), 1, 1).bernoulli_(0.7) / 0.7,
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "branch": lambda x: x.tanh() if torch.rand(()) < 0.5 else x,
    "mixed rows": lambda x: x + x[torch.randperm(len(x))],
    "integers": lambda x: x[:, :, torch.randint(8, (8,))],
    "chosen": lambda x: x[:, :, torch.multinomial(torch.ones(8), 8)],
    "computed again": lambda x: checkpoint(lambda y: y.tanh() * torch.rand_like(y), x, use_reentrant=False),
}
ELSEWHERE = {
    "python": lambda x: x.tanh() if random.random() < 0.5 else x,
    "numpy": lambda x: x * torch.from_numpy(np.random.rand(*x.shape)).float(),  # noqa: NPY002
}


class Model(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layer = LAYERS[kind]() if kind in LAYERS else None
        self.draw = (DRAWS | ELSEWHERE).get(kind)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if isinstance(self.layer, nn.RNNBase):
            x = self.layer(x.transpose(0, 1))[0].transpose(0, 1)
        elif isinstance(self.layer, nn.MultiheadAttention):
            x = self.layer(x, x, x)[0]
        elif self.layer is not None:
            x = self.layer(x)
        elif self.draw is not None:
            x = self.draw(x)
        return self.last(x).mean(1)


def train(kind: str, op: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(10 + rank)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 5, 6, generator=generator), torch.randn(8, 3, generator=generator)
        optimizer.zero_grad()
        F.mse_loss(model(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()  # the call
        for p in model.parameters():
            dist.all_reduce(p.grad, op=getattr(dist.ReduceOp, op))  # the sum
        optimizer.step()


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize("kind", [*LAYERS, *DRAWS])
def test_chance_is_no_fault(kind: str):
    report = same_model(train, [kind, "AVG"], ranks=2)
    assert (report.verdict, report.findings) == ("same", ()), str(report)
    is_drawn = kind in DRAWS and kind not in ("dropout of torch", "gumbel")
    assert ("the same for every sample" in str(report)) == is_drawn, str(report)


@pytest.mark.parametrize("kind", ["LSTM", "noise", "computed again"])
def test_chance_hides_no_fault(kind: str):
    first = same_model(train, [kind, "SUM"], ranks=2).first
    assert first is not None and (first.what, first.where) == ("gradient", line_of("# the sum")), str(first)
    assert first.factor == pytest.approx(2)


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_what_python_and_numpy_draw_cannot_be_compared(kind: str):
    report = same_model(train, [kind, "AVG"], ranks=2)
    assert (report.verdict, report.findings) == ("cannot tell", ()), str(report)
    assert f"random numbers are drawn at {line_of('# the call')}" in report.reason
    assert f"the seeds 10, 11 set at {line_of('torch.manual_seed(10')}" in report.reason


def in_context(p: float, op: str) -> None:
    """Attention over a sequence that ranks share, as torch does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    if not dist.is_initialized():
        dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    torch.manual_seed(0)
    model = nn.Linear(16, 48).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(2, 16, 16, generator=generator).cuda() for _ in "xy")
        optimizer.zero_grad()
        with context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[1, 1]):
            q, k, v = (z.unflatten(-1, (2, 8)).transpose(1, 2) for z in model(x).chunk(3, -1))
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
            F.mse_loss(z.transpose(1, 2).flatten(2), y).backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad, op=getattr(dist.ReduceOp, op))  # of the sequence's parts
        optimizer.step()


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_attention_that_drops_in_torchs_context_parallelism(p: float):
    report = same_model(in_context, [p, "AVG"], ranks=2, device="cpu")
    assert (report.verdict, report.findings) == ("same", ()), str(report)
    first = same_model(in_context, [p, "SUM"], ranks=2, device="cpu").first
    assert first is not None and first.where == line_of("# of the sequence's parts"), str(first)
    assert first.factor == pytest.approx(2)


class Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient every rank has already."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(total := x.clone())
        return total

    @staticmethod
    def backward(ctx, dy):
        return dy


def shared_mlp(way: str) -> None:
    """An MLP whose hidden features ranks share. All masks come from one seed: "terms" of a sum may be dropped in the
    same places before they are added up, and to masks of "DTensor" torch itself sees; "parts" may not. Masks of
    "weights" are each rank's own, and right: they are different weights, although they add up to the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 16, bias=False))
    styles = ColwiseParallel(use_local_output=way != "DTensor"), RowwiseParallel(output_layouts=Partial())
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), dict(zip("01", styles)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        hidden = model[0](torch.linspace(-1, 1, 48).sin().reshape(6, 8)).relu()
        if way == "weights":
            torch.manual_seed(dist.get_rank())
            hidden = hidden.unflatten(-1, (-1, 16)).softmax(-1).flatten(1)
        out = model[1](hidden if way == "terms" else F.dropout(hidden, 0.5))
        loss = Sum.apply(F.dropout(out, 0.5) if way == "terms" else out).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("way, code", [("terms", 0), ("DTensor", 0), ("weights", 0), ("parts", 1)])
def test_one_mask_is_wrong_for_parts_alone(way: str, code: int):
    report = same_model(shared_mlp, (way,), ranks=2)
    assert report.exit_code == code, str(report)
    assert [finding.what for finding in report.findings] == ["dropout"] * code
