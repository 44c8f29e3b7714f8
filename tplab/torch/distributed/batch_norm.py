"""torch.nn.SyncBatchNorm on the CPU: what its kernels compute on GPUs, x [N, C, ...]. Communication is torch's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as Normalized
from torch.nn.parallel import DistributedDataParallel

from tplab.torch.distributed.replaced import Value


def sync_batch_norm_on_cpu() -> list[Value]:
    """The replacements with which the layer runs on CPU tensors, in DistributedDataParallel or without it."""
    kernels = [_stats, _gather_stats_with_counts, _elemt, _backward_reduce, _backward_elemt]
    return [
        *((torch, f"batch_norm{kernel.__name__}", kernel) for kernel in kernels),
        (nn.SyncBatchNorm, "forward", _forward),
        (DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda ddp, module: None),
    ]


def _forward(layer: Any, x: Tensor) -> Tensor:
    """nn.SyncBatchNorm.forward, which refuses the CPU."""
    layer._check_input_dim(x)
    layer._check_non_zero_input_channels(x)
    group = layer.process_group or dist.group.WORLD
    ranks = dist.get_world_size(group) if layer.training and dist.is_initialized() else 1
    if ranks == 1:
        return nn.modules.batchnorm._BatchNorm.forward(layer, x)
    factor, means, variances = layer.momentum or 0.0, None, None
    if layer.track_running_stats:
        layer.num_batches_tracked.add_(1)
        factor = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
        means, variances = layer.running_mean, layer.running_var
    return Normalized.apply(x, layer.weight, layer.bias, means, variances, layer.eps, factor, group, ranks)


def _wide(x: Tensor) -> Tensor:
    """x in float32 if its numbers are narrower, as sums of them are."""
    return x if x.dtype == torch.float64 else x.float()


def _by_channel(v: Tensor, x: Tensor) -> Tensor:
    """v [C], to be combined with x [N, C, ...]"""
    return v.view(-1, *[1] * (x.ndim - 2))


def _others(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The mean and 1 / standard deviation of each channel, both [C]."""
    variance, mean = torch.var_mean(_wide(x), _others(x), correction=0)
    return mean, (variance + eps).rsqrt()


def _gather_stats_with_counts(
    x: Tensor, means: Tensor, invstds: Tensor, running_mean: Any, running_var: Any, factor: float, eps: float, n: Tensor
) -> tuple[Tensor, Tensor]:
    """Both over all R ranks' samples, from means and invstds [R, C] and counts n [R]. Updates the running values."""
    n = n.to(means.dtype)[:, None]
    mean = (means * n).sum(0) / n.sum()
    variance = ((invstds**-2 - eps + (means - mean).square()) * n).sum(0) / n.sum()
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), factor)
        running_var.lerp_((variance * n.sum() / (n.sum() - 1)).to(running_var.dtype), factor)
    return mean, (variance + eps).rsqrt()


def _elemt(x: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    """y = (x - mean) * invstd * weight + bias"""
    y = (_wide(x) - _by_channel(mean, x)) * _by_channel(invstd if weight is None else invstd * weight, x)
    return (y if bias is None else y + _by_channel(bias, x)).to(x.dtype)


def _backward_reduce(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, *needed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rank's sums of dy and of dy * (x - mean), and its gradients of weight and bias, all [C]."""
    dy = _wide(dy)
    sum_dy, sum_dy_x = dy.sum(_others(x)), (dy * (_wide(x) - _by_channel(mean, x))).sum(_others(x))
    kind = sum_dy.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_x, (sum_dy_x * invstd).to(kind), sum_dy.to(kind)


def _backward_elemt(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, sum_dy: Tensor, sum_dy_x: Tensor, n: Tensor
) -> Tensor:
    """dx = (dy - sum_dy / n - (x - mean) * invstd^2 * sum_dy_x / n) * invstd * weight"""
    total = n.sum()
    slope = _by_channel(invstd.square() * sum_dy_x / total, x)
    dx = _wide(dy) - _by_channel(sum_dy / total, x) - (_wide(x) - _by_channel(mean, x)) * slope
    return (dx * _by_channel(invstd if weight is None else invstd * weight, x)).to(x.dtype)
