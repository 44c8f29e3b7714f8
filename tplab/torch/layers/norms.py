"""Norms: of features that every rank holds, and of features that are spread over an axis of the mesh.

LayerNorm and RMSNorm compute the same on every rank. Under sequence parallelism each rank has its own part of the
sequence, so that the gradients of scale and bias are sums over ranks: `sequence_axis` puts them through copy_to, whose
backward pass is that sum (Megatron-LM has forgotten it twice).

ParallelLayerNorm and ParallelRMSNorm normalise over all features, of which each rank holds some: their statistics are
sums over the axis.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.mesh import Axis
from tplab.models.checks import check_norm_input
from tplab.torch.comm.collectives import all_reduce
from tplab.torch.comm.regions import copy_to
from tplab.torch.layers.linear import share
from tplab.torch.layers.parameters import note_cuts
from tplab.torch.ranks.rank import this_rank


class LayerNorm(nn.Module):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, over the last dim.

    x [..., D]   weight, bias [D], the same on every rank   ->   y [..., D]
    backward  nothing is sent; with sequence_axis an all_reduce of each of dweight and dbias, 2(R-1)/R of D
    """

    def __init__(self, width: int, *, eps: float = 1e-5, sequence_axis: Axis | None = None):
        super().__init__()
        self.width, self.eps, self.sequence_axis = width, eps, sequence_axis
        _check_axis(sequence_axis)
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        check_norm_input("LayerNorm", x.shape, self.width, self.width)
        weight, bias = _used(self.weight, self.sequence_axis), _used(self.bias, self.sequence_axis)
        return F.layer_norm(x, (self.width,), weight, bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}, sequence_axis={self.sequence_axis!r}"


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dim (Zhang & Sennrich 2019).

    x [..., D]   weight [D], the same on every rank   ->   y [..., D]
    backward  nothing is sent; with sequence_axis an all_reduce of dweight, 2(R-1)/R of D
    """

    def __init__(self, width: int, *, eps: float = 1e-6, sequence_axis: Axis | None = None):
        super().__init__()
        self.width, self.eps, self.sequence_axis = width, eps, sequence_axis
        _check_axis(sequence_axis)
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        check_norm_input("RMSNorm", x.shape, self.width, self.width)
        return F.rms_norm(x, (self.width,), _used(self.weight, self.sequence_axis), self.eps)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}, sequence_axis={self.sequence_axis!r}"


class ParallelLayerNorm(nn.Module):
    """LayerNorm over D features of which each rank of `axis` (R ranks) holds some.

    x [..., D/R]   weight, bias [D/R]   ->   y [..., D/R]
    forward   two all_reduces of 1 number per token: the mean, then the variance about it
    backward  the same
    """

    def __init__(self, width: int, axis: Axis, *, eps: float = 1e-5):
        super().__init__()
        self.width, self.axis, self.eps = width, axis, eps
        num_here = share(width, axis, "width")
        self.weight, self.bias = nn.Parameter(torch.ones(num_here)), nn.Parameter(torch.zeros(num_here))
        note_cuts(self, axis, "weight", "bias")

    def forward(self, x: Tensor) -> Tensor:
        check_norm_input("ParallelLayerNorm", x.shape, self.weight.shape[0], self.width)
        centred = x - _mean(x, self.width, self.axis)
        variance = _mean(centred.square(), self.width, self.axis)
        return centred * (variance + self.eps).rsqrt() * self.weight + self.bias

    def extra_repr(self) -> str:
        return f"{self.width}, {self.axis!r}, eps={self.eps}"


class ParallelRMSNorm(nn.Module):
    """RMSNorm over D features of which each rank of `axis` (R ranks) holds some.

    x [..., D/R]   weight [D/R]   ->   y [..., D/R]
    forward   one all_reduce of 1 number per token
    backward  the same
    """

    def __init__(self, width: int, axis: Axis, *, eps: float = 1e-6):
        super().__init__()
        self.width, self.axis, self.eps = width, axis, eps
        self.weight = nn.Parameter(torch.ones(share(width, axis, "width")))
        note_cuts(self, axis, "weight")

    def forward(self, x: Tensor) -> Tensor:
        check_norm_input("ParallelRMSNorm", x.shape, self.weight.shape[0], self.width)
        return x * (_mean(x.square(), self.width, self.axis) + self.eps).rsqrt() * self.weight

    def extra_repr(self) -> str:
        return f"{self.width}, {self.axis!r}, eps={self.eps}"


def _mean(x: Tensor, width: int, axis: Axis) -> Tensor:
    """The mean over the features of all ranks, which each rank then uses for its own features."""
    return copy_to(all_reduce(x.sum(-1, keepdim=True), axis) / width, axis)


def _used(parameter: Tensor, sequence_axis: Axis | None) -> Tensor:
    return parameter if sequence_axis is None else copy_to(parameter, sequence_axis)


def _check_axis(axis: Axis | None) -> None:
    if axis is not None:
        this_rank().place(axis)
