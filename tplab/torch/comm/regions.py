"""Regions: where a shared tensor enters work that ranks divide, and where the result comes out again.

Megatron's two conjugate pairs (Shoeybi et al. 2019, section 3). The backward pass of each is the forward pass of its
partner:

    forward                                backward
    copy_to       f    y = x               all_reduce(dy)
    reduce_from   g    y = all_reduce(x)   dy
    scatter_to         y = my piece of x   all_gather(dy)
    gather_from        y = all_gather(x)   my piece of dy

Sequence parallelism has a third pair, which is in `comm`: the backward pass of all_gather is reduce_scatter, and vice
versa. It differs from gather_from in the use of y: all ranks use the result of `gather_from` in the same way, while
each uses the result of `all_gather` in its own way, and the gradients are added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tplab.mesh import Axis
from tplab.torch.comm.autograd import check_no_forward_mode, varying
from tplab.torch.comm.collectives import all_reduce
from tplab.torch.ranks.outcomes import check_divides, check_tensor, dim_of, own
from tplab.torch.ranks.rank import this_rank


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Megatron's f: a shared x enters work that the ranks of `axis` divide; its gradient is the sum of theirs.

    x [...], the same on every rank   ->   y = x
    forward   nothing is sent
    backward  dx = all_reduce(dy)    2(R-1)/R of x is sent by each rank
    """
    this_rank().place(axis)  # so that an unknown axis raises here, not in the backward pass
    return varying(check_tensor("copy_to", x), axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Megatron's g: add up the results of the ranks of `axis`; every rank goes on with the sum.

    x [...], each rank's part   ->   y, the same on every rank
    forward   y = all_reduce(x)    2(R-1)/R of x is sent by each rank
    backward  dx = dy              nothing is sent
    """
    return all_reduce(x, axis)


def scatter_to(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Return each rank's own piece of a tensor that all ranks of `axis` hold.

    x [.., R n, ..], the same on every rank   ->   y [.., n, ..]: piece i on the rank at index i
    forward   nothing is sent
    backward  dx = all_gather(dy)    each rank sends (R-1)/R of x
    Raises ShapeError where R does not divide the dim.
    """
    check_no_forward_mode()
    place = this_rank().place(axis)
    dim = dim_of(check_tensor("scatter_to", x), dim, "scatter_to")
    check_divides("scatter_to", x, dim, place)
    num_ranks = len(place.group)
    return _Scatter.apply(x, axis, dim, (x.shape[dim] // num_ranks,) * num_ranks)  # type: ignore[return-value]


def gather_from(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Join the pieces of all ranks along `dim`; every rank goes on with the whole, in the same way.

    x [.., n, ..], each rank's piece   ->   y [.., R n, ..], the same on every rank; sizes along dim may differ
    forward   y = all_gather(x)      each rank sends (R-1) pieces
    backward  dx = its piece of dy   nothing is sent
    """
    check_no_forward_mode()
    this_rank().place(axis)
    dim = dim_of(check_tensor("gather_from", x), dim, "gather_from")
    return _Gather.apply(x, axis, dim, _Sizes())  # type: ignore[return-value]


class _Scatter(torch.autograd.Function):
    """Forward: this rank's piece, among pieces of these sizes. Backward: all pieces."""

    @staticmethod
    def forward(x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
        index = this_rank().place(axis).index
        return own(x.narrow(dim, sum(sizes[:index]), sizes[index]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Axis, int, tuple[int, ...]], output: Tensor) -> None:
        _, ctx.axis, ctx.dim, _ = inputs

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Any:
        return _Scatter.apply(x.movedim(in_dims[0], 0), axis, dim + 1, sizes), 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return gather_from(grads[0], ctx.axis, ctx.dim), None, None, None


class _Sizes:
    """Each rank's size along the dim. Not a list, because torch.func would copy it."""

    all: tuple[int, ...]


class _Gather(torch.autograd.Function):
    """Forward: all pieces, whose sizes are recorded. Backward: this rank's piece."""

    @staticmethod
    def forward(x: Tensor, axis: Axis, dim: int, sizes: _Sizes) -> Tensor:
        rank = this_rank()
        pending = rank.begin(rank.call("all_gather", axis, (dim,)), x)
        y = pending.wait()
        sizes.all = pending.sizes or (x.shape[dim],)
        if rank.types is not None:
            rank.types.cast("gather_from", rank.place(axis).group, x, y)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Axis, int, _Sizes], output: Tensor) -> None:
        _, ctx.axis, ctx.dim, ctx.sizes = inputs

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, axis: Axis, dim: int, sizes: _Sizes) -> Any:
        return _Gather.apply(x.movedim(in_dims[0], 0), axis, dim + 1, sizes), 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Scatter.apply(grads[0], ctx.axis, ctx.dim, ctx.sizes.all), None, None, None
