"""Groups of 2 x 4 and Megatron's region functions, as tutorials write them by hand, with the mistakes they print."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab import Mesh
from tplab.errors import RankError, TplabError
from tplab.torch import run

WORLD, TENSOR = 8, 4
MESH = Mesh(dp=WORLD // TENSOR, tp=TENSOR)
X = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
A = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
B = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def groups() -> tuple[Any, Any]:
    """Consecutive ranks are one tensor-parallel group; the data-parallel groups run across them."""
    rank, tensor, data = dist.get_rank(), None, None
    for first in range(0, WORLD, TENSOR):
        ranks = list(range(first, first + TENSOR))
        group = dist.new_group(ranks)
        tensor = group if rank in ranks else tensor
    for first in range(TENSOR):
        ranks = list(range(first, WORLD, TENSOR))
        group = dist.new_group(ranks)
        data = group if rank in ranks else data
    return tensor, data


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return gathered(grads[0], ctx.group), None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)].contiguous(), None


def gathered(x: Tensor, group: Any) -> Tensor:
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces, -1)


def unsharded() -> tuple[Tensor, list[Tensor]]:
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    loss = ((X @ a).tanh() @ b).tanh().square().mean()
    loss.backward()
    assert a.grad is not None and b.grad is not None
    return loss.detach(), [a.grad, b.grad]


def step(copy: Any = Copy) -> tuple[Tensor, list[Tensor]]:
    """Column-parallel, row-parallel, then the last activation on slices of the output; the mean over both replicas."""
    tensor, data = groups()
    place, replica = dist.get_rank(tensor), dist.get_rank(data)
    a = A.chunk(TENSOR, 1)[place].clone().requires_grad_()
    b = B.chunk(TENSOR, 0)[place].clone().requires_grad_()
    x = X.chunk(WORLD // TENSOR)[replica]
    y = Reduce.apply((copy.apply(x, tensor) @ a).tanh() @ b, tensor)
    y = Gather.apply(Scatter.apply(y, tensor).tanh(), tensor)
    loss = y.square().mean()  # type: ignore[attr-defined]
    loss.backward()
    total = loss.detach().clone()
    assert a.grad is not None and b.grad is not None
    for one in (total, a.grad, b.grad):
        dist.all_reduce(one, op=dist.ReduceOp.AVG, group=data)
    return total, [gathered(a.grad, tensor), gathered(b.grad.T, tensor).T]


class NotStatic(torch.autograd.Function):
    """Without @staticmethod, which torch no longer needs where the class is applied."""

    def forward(ctx, x, group):  # type: ignore[override]
        ctx.group = group
        return x

    def backward(ctx, grad):  # type: ignore[override]
        return Copy.backward(ctx, grad)


@pytest.mark.parametrize("copy", [Copy, NotStatic])
def test_groups_of_two_by_four_and_all_four_regions(copy: Any):
    out = run(step, MESH, copy, distributed=True)
    loss, grads = unsharded()
    for got_loss, got in out.per_rank:
        torch.testing.assert_close(got_loss, loss, rtol=1e-12, atol=0)  # the order of sums in float64
        for one, other in zip(got, grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    axes = {(event.op, event.axis) for event in out.trace.select(kind="collective").events}
    assert axes == {("all_reduce", "tp"), ("all_gather", "tp"), ("all_reduce", "dp")}


class OneGradient(Copy):
    """Two inputs, and one gradient."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Copy.backward(ctx, *grads)[0]


class InPlace(Copy):
    """Reduces the gradient that it was given. That of a sum is one number, seen many times, and cannot be written."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dist.all_reduce(grads[0], group=ctx.group)
        return grads[0], None


@pytest.mark.parametrize(
    "copy, said",
    [
        (OneGradient, "returned an incorrect number of gradients .expected 2, got 1"),
        (
            InPlace,
            r"all_reduce: the elements of a tensor \[6, 8\] with strides \(0, 0\) are not in the order of memory",
        ),
    ],
)
def test_a_region_that_torch_refuses_is_named_with_its_line(copy: Any, said: str):
    def program() -> None:
        x = X.clone().requires_grad_()
        group, _ = groups()
        y = copy.apply(2 * x, group)
        y.sum().backward()

    with pytest.raises(TplabError, match=said) as error:
        run(program, MESH, distributed=True)
    told = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert re.search(r"rank \d.* at test_regions_of_others.py:\d+", told)


def test_sizes_divided_by_the_world_in_place_of_the_group():
    """The row-parallel layer gets columns for which its weight has no rows: torch says so, and tplab on which rank."""

    def program() -> None:
        group, _ = groups()
        wrong = nn.Linear(12 // 2 // (WORLD // TENSOR), 4, bias=False).double()
        Reduce.apply(wrong(X[:, :2] @ A[:2].chunk(TENSOR, 1)[dist.get_rank(group)][:, :2]), group)

    with pytest.raises(RankError, match=r"rank 0 raised RuntimeError at .*mat1 and mat2 shapes cannot be multiplied"):
        run(program, MESH, distributed=True)
