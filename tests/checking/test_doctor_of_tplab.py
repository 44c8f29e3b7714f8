"""What the doctor says of scripts that train with tplab's own collectives."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tplab.torch as tt
from tplab import Mesh
from tplab.torch import same_model


class Layers(nn.Module):
    """A linear layer that every rank has, and two that the ranks of tp share."""

    def __init__(self, bug: str):
        super().__init__()
        count, index = tt.axis_size("tp"), tt.axis_index("tp")
        up, down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.first = nn.Linear(6, 6)
        self.up = nn.Parameter(up.weight.detach().chunk(count, 0)[index].clone())
        self.down = nn.Parameter(down.weight.detach().chunk(count, 1)[index].clone())
        self.bug = bug

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.bug != "no copy_to":
            x = tt.copy_to(x, "tp")
        y = torch.tanh(x @ self.up.T) @ self.down.T  # the shared work
        return tt.all_reduce(y, "tp", "mean" if self.bug == "mean of parts" else "sum")  # the parts' sum


def reduced(model: nn.Module, bug: str) -> None:
    """Average gradients over dp, or do what the bug says."""
    parameters = list(model.parameters())
    grads = [p.grad for p in parameters if p.grad is not None]
    if bug == "flat":
        flat = tt.all_reduce(torch.cat([grad.flatten() for grad in grads]), "dp")  # of a flat buffer
        pieces = flat.split([p.numel() for p in parameters])
        for p, piece in zip(parameters, pieces):
            p.grad = piece.view_as(p)
    elif bug == "started":
        handles = [tt.start(tt.all_reduce, grad, "dp") for grad in grads]  # begun
        for p, handle in zip(parameters, handles):
            p.grad = handle.wait()
    elif bug == "twice":
        tt.average_gradients(model, "dp")
        for p in parameters:
            p.grad = tt.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad, "dp")  # once more
    elif bug == "axis":
        for p, grad in zip(parameters, grads):
            p.grad = tt.all_reduce(grad, "tp", "mean")  # along the other axis
    elif bug == "unlike":
        for p, grad in zip(parameters, grads):
            p.grad = tt.all_reduce(grad, "dp", "sum" if p.dim() == 1 else "mean")  # unlike the others
    elif bug == "left out":
        for p, grad in zip(parameters, grads):
            if p.dim() > 1:  # not the bias
                p.grad = tt.all_reduce(grad, "dp", "mean")
    elif bug != "missing":
        for p, grad in zip(parameters, grads):
            p.grad = tt.all_reduce(grad, "dp", "sum" if bug == "sum" else "mean")  # one by one


def train(bug: str, is_split: bool) -> None:
    torch.manual_seed(0)
    model = Layers(bug) if is_split else nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    replicas = tt.data_parallel(model, "dp") if is_split else None
    for _ in range(2):
        x, y = (torch.randn(16, 6, generator=generator) for _ in "xy")
        x, y = (part.chunk(tt.axis_size("dp"))[tt.axis_index("dp")] for part in (x, y))
        optimizer.zero_grad()
        for number, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2))):
            is_last = number == 1 and bug != "no sync"  # whether to send
            with replicas.no_sync() if replicas is not None and not is_last else nullcontext():
                loss = F.mse_loss(model(a), b) / 2
                loss.backward()  # here
        if not is_split:
            reduced(model, bug)
        optimizer.step()


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.parametrize("is_split", [False, True])
def test_what_is_right_is_not_blamed(is_split: bool):
    report = same_model(train, ["", is_split], mesh=Mesh(dp=2, tp=2))
    assert (report.verdict, report.findings) == ("same", ()), str(report)


@pytest.mark.parametrize(
    ("bug", "what", "factor", "line", "cause"),
    [
        ("sum", "gradient", 2.0, "# one by one", "average the gradients"),
        ("flat", "gradient", 2.0, "# of a flat buffer", "average the gradients"),
        ("started", "gradient", 2.0, "# begun", "average the gradients"),
        ("twice", "gradient", 2.0, "# once more", "average the gradients"),
        ("axis", "gradient", None, "# along the other axis", "over ranks 0, 1, which saw the same samples"),
        ("unlike", "gradient", 2.0, "# unlike the others", "added up over ranks, and others are averaged"),
        ("left out", "gradient", None, "# not the bias", "not averaged over ranks"),
        ("missing", "gradient", None, "# here", "nothing averages them"),
        ("no sync", "gradient", None, "# whether to send", "nothing averages them"),
        ("no copy_to", "gradient", None, "# the shared work", "an identity whose backward pass is an all_reduce"),
        ("mean of parts", "loss", None, "# the parts' sum", ""),
    ],
)
def test_what_is_wrong_is_named(bug: str, what: str, factor: float | None, line: str, cause: str):
    is_split = bug in ("no sync", "no copy_to", "mean of parts")
    first = same_model(train, [bug, is_split], mesh=Mesh(dp=2, tp=2)).first
    assert first is not None
    assert (first.what, first.where) == (what, line_of(line)), str(first)
    assert cause in first.cause, str(first)
    assert first.factor == pytest.approx(factor) if factor else what == "loss" or first.factor is None, str(first)
