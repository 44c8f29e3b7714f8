"""Batch norm of a batch that is spread over an axis of the mesh: one replica's statistics would change the function."""

from __future__ import annotations

import torch
from torch import Tensor

from tplab.mesh import Axis
from tplab.torch.comm.collectives import all_reduce
from tplab.torch.comm.regions import copy_to


def batch_statistics(x: Tensor, axis: Axis, *, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and variance of each feature over the batches of all ranks of `axis`, the same on every rank.

    x [..., C], this rank's part, of any size   counted [...], which rows of it count; all if None   ->   [C], [C]
    forward   two all_reduces, of C + 1 numbers (sums and a count) and of C (squares about the mean)
    backward  the same: the effect of a rank's x on the others' outputs comes back to it
    The variance is that of the batch (divided by N, not N - 1). 16-bit numbers are added up in 32 bits.
    """
    x = x.float() if x.element_size() < 4 else x
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
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, by the statistics of the whole batch (Ioffe & Szegedy).

    x [..., C], this rank's part   weight, bias [C], the same on every rank   ->   y [..., C]
    counted [...]   which rows of x count; the others are treated as zeros
    cost      that of `batch_statistics`; for a running average, call it for the mean and variance
    backward  the gradients of weight and bias are each rank's part: data parallelism averages them, like any others
    It is torch.nn.SyncBatchNorm while training, with features last: x.movedim(1, -1) of images.
    """
    mean, variance = batch_statistics(x, axis, counted=counted)
    used = x if counted is None else torch.where(counted.unsqueeze(-1), x, 0)
    return ((used - mean) * (variance + eps).rsqrt() * weight + bias).to(x.dtype)
