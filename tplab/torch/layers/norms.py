"""Norms: of features that every rank holds, and of features that are sharded over an axis of the mesh.

LayerNorm and RMSNorm compute the same on every rank. Under sequence parallelism each rank has its own part of the
sequence, so the gradients of scale and bias are sums over ranks: `sequence_axis` passes them through copy_to, whose
backward pass is that sum; Megatron-LM has lacked it twice (its issues 443 and 1446). Statistics of 16-bit numbers are
computed in 32 bits, as torch does.

ParallelLayerNorm and ParallelRMSNorm normalise over all features, of which each rank holds some: their statistics are
sums over the axis. `batch_norm` is for a batch that is spread over an axis: statistics of one replica alone would
change the function.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.mesh import Axis
from tplab.models.checks import check_norm_input
from tplab.torch.comm.collectives import all_reduce
from tplab.torch.comm.regions import copy_to
from tplab.torch.layers.linear import share, shared
from tplab.torch.layers.parameters import Layer, note_cuts
from tplab.torch.ranks.rank import this_rank


class _Norm(Layer):
    """What the four norms share: `weight` begins with ones, `bias` with zeros. A norm with a bias centres x.

    axis            the ranks that each hold some of the features; None: every rank holds all of them
    sequence_axis   the ranks over which gradients of the parameters are summed
    """

    has_bias = True

    def __init__(self, width: int, eps: float, axis: Axis | None, sequence_axis: Axis | None):
        super().__init__()
        self.width, self.eps, self.axis, self.sequence_axis = width, eps, axis, sequence_axis
        if sequence_axis is not None:
            this_rank().place(sequence_axis)  # so that an unknown axis raises here
        self.num_here = width if axis is None else share(width, axis, "width")
        self.weight = nn.Parameter(torch.ones(self.num_here))
        self.bias = nn.Parameter(torch.zeros(self.num_here)) if self.has_bias else None
        if axis is not None:
            note_cuts(self, axis, *(name for name, _ in self.named_parameters()))

    def forward(self, x: Tensor) -> Tensor:
        check_norm_input(type(self).__name__, x.shape, self.num_here, self.width)
        weight = shared(self.weight, self.sequence_axis)
        bias = None if self.bias is None else shared(self.bias, self.sequence_axis)
        if self.axis is not None:
            return _over_ranks(x, weight, bias, self.width, self.axis, self.eps)
        if bias is None:
            return F.rms_norm(x, (self.width,), weight, self.eps)
        return F.layer_norm(x, (self.width,), weight, bias, self.eps)


class LayerNorm(_Norm):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, over the last dim.

    x [..., D]   weight, bias [D], the same on every rank   ->   y [..., D]
    backward  nothing is sent; with sequence_axis an all_reduce of each of dweight and dbias, 2(R-1)/R of D
    """

    def __init__(self, width: int, *, eps: float = 1e-5, sequence_axis: Axis | None = None):
        super().__init__(width, eps, None, sequence_axis)


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dim (Zhang & Sennrich 2019).

    x [..., D]   weight [D], the same on every rank   ->   y [..., D]
    backward  nothing is sent; with sequence_axis an all_reduce of dweight, 2(R-1)/R of D
    """

    has_bias = False

    def __init__(self, width: int, *, eps: float = 1e-6, sequence_axis: Axis | None = None):
        super().__init__(width, eps, None, sequence_axis)


class ParallelLayerNorm(_Norm):
    """LayerNorm over D features of which each rank of `axis` (R ranks) holds some.

    x [..., D/R]   weight, bias [D/R]   ->   y [..., D/R]
    forward   two all_reduces of 1 number per token: the mean, then the variance about it
    backward  the same
    """

    def __init__(self, width: int, axis: Axis, *, eps: float = 1e-5):
        super().__init__(width, eps, axis, None)


class ParallelRMSNorm(_Norm):
    """RMSNorm over D features of which each rank of `axis` (R ranks) holds some.

    x [..., D/R]   weight [D/R]   ->   y [..., D/R]
    forward   one all_reduce of 1 number per token
    backward  the same
    """

    has_bias = False

    def __init__(self, width: int, axis: Axis, *, eps: float = 1e-6):
        super().__init__(width, eps, axis, None)


def _over_ranks(x: Tensor, weight: Tensor, bias: Tensor | None, width: int, axis: Axis, eps: float) -> Tensor:
    wide = _wide(x)
    if bias is not None:
        wide = wide - _mean(wide, width, axis)
    y = wide * (_mean(wide.square(), width, axis) + eps).rsqrt() * weight
    return (y if bias is None else y + bias).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x


def _mean(x: Tensor, width: int, axis: Axis) -> Tensor:
    """The mean over the features of all ranks, for each rank's use on its own features."""
    return copy_to(all_reduce(x.sum(-1, keepdim=True), axis) / width, axis)


# --- batch norm -------------------------------------------------------------------------------------------------------


def batch_statistics(x: Tensor, axis: Axis, *, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and variance of each feature over the batches of all ranks of `axis`, the same on every rank.

    x [..., C], this rank's part, of any size   counted [...], which of its rows count; all if None   ->   [C], [C]
    forward   two all_reduces, of C + 1 numbers (sums and a count) and of C (squares about the mean)
    backward  the same: the effect of a rank's x on the others' outputs comes back to it
    The variance is that of the batch (divided by N, not N - 1). 16-bit numbers are added up in 32 bits.
    """
    x = _wide(x)
    rows = x.reshape(-1, x.shape[-1])
    is_counted = torch.ones_like(rows[:, :1], dtype=torch.bool) if counted is None else counted.reshape(-1, 1)
    rows = torch.where(is_counted, rows, 0)
    sums = all_reduce(torch.cat([rows.sum(0), is_counted.sum(0).to(x.dtype)]), axis)
    number = sums[-1].detach().clamp(min=1)
    mean = copy_to(sums[:-1] / number, axis)
    squares = torch.where(is_counted, rows - mean, 0).square().sum(0)
    return mean, copy_to(all_reduce(squares, axis) / number, axis)


def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, axis: Axis, *, counted: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, with statistics of the whole batch (Ioffe & Szegedy).

    x [..., C], this rank's part   weight, bias [C], the same on every rank   ->   y [..., C]
    counted [...]   which rows of x count; the others are treated as zeros
    cost      that of `batch_statistics`; for a running average, call it for the mean and variance
    backward  the gradients of weight and bias are each rank's part: data parallelism averages them like any others
    It is torch.nn.SyncBatchNorm while training, with features last: x.movedim(1, -1) of images. Its running variance is
    N / (N-1) times that of `batch_statistics`.
    """
    mean, variance = batch_statistics(x, axis, counted=counted)
    used = x if counted is None else torch.where(counted.unsqueeze(-1), x, 0)
    return ((used - mean) * (variance + eps).rsqrt() * weight + bias).to(x.dtype)
