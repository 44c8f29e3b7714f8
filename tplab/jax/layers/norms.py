"""Norms: of features that every rank holds, and of features that are sharded over an axis of the mesh.

LayerNorm and RMSNorm compute the same on every rank. Under sequence parallelism each rank has its own part of the
sequence, so the gradients of scale and bias are sums over ranks. `sequence_axis` passes them through copy_to,
whose backward pass is that sum; Megatron-LM has lacked it twice (its issues 443 and 1446). JAX would insert it itself,
because x varies along the axis and the parameters do not. Statistics of 16-bit numbers are computed in 32 bits, as
torch does.

ParallelLayerNorm and ParallelRMSNorm normalise over all features, of which each rank holds some: their statistics are
sums over the axis. `batch_norm` is for a batch that is sharded over an axis: statistics of one replica would change the
function.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from tplab.jax.comm.collectives import all_reduce
from tplab.jax.comm.regions import copy_to
from tplab.jax.layers.linear import check_share, share, shared
from tplab.jax.layers.parameters import Params, here
from tplab.mesh import Axis
from tplab.models.checks import check_norm_input
from tplab.sharding import P


class _Norm:
    """What the four norms share: `weight` begins with ones, `bias` with zeros. A norm with a bias centres x.

    axis            the ranks that each hold some of the features; None: every rank holds all of them
    sequence_axis   the ranks over which gradients of the parameters are summed
    """

    width: int
    eps: float
    axis: Axis | None
    sequence_axis: Axis | None = None
    has_bias: ClassVar[bool] = True

    @property
    def specs(self) -> Params:
        """How the parameters are sharded."""
        names = ("weight", "bias") if self.has_bias else ("weight",)
        return dict.fromkeys(names, P() if self.axis is None else P(self.axis))

    def init(self, key: Any = None) -> Params:
        """Ones, and zeros for the bias. Whole; inside a rank's program, its piece. No key is needed."""
        if self.axis is not None:
            check_share(self.width, self.axis, "width")
        whole = {"weight": jnp.ones(self.width), "bias": jnp.zeros(self.width)}
        return {name: here(whole[name], spec) for name, spec in self.specs.items()}

    def __call__(self, params: Params, x: Array) -> Array:
        num_here = self.width if self.axis is None else share(self.width, self.axis, "width")
        check_norm_input(type(self).__name__, x.shape, num_here, self.width)
        weight, *bias = (shared(params[name], self.sequence_axis) for name in self.specs)
        # of whole features the backward pass keeps x, and not its copies in 32 bits
        normed = jax.checkpoint(_normed, static_argnums=(3, 4, 5)) if self.axis is None else _normed
        return normed(x, weight, bias, self.width, self.axis, self.eps)


@dataclass(frozen=True)
class LayerNorm(_Norm):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, over the last dim.

    x [..., D]   weight, bias [D], the same on every rank   ->   y [..., D]
    backward  nothing is sent; with sequence_axis an all_reduce of each of dweight and dbias, 2(R-1)/R of D
    """

    width: int
    _: KW_ONLY
    eps: float = 1e-5
    sequence_axis: Axis | None = None
    axis = None


@dataclass(frozen=True)
class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dim (Zhang & Sennrich 2019).

    x [..., D]   weight [D], the same on every rank   ->   y [..., D]
    backward  nothing is sent; with sequence_axis an all_reduce of dweight, 2(R-1)/R of D
    """

    width: int
    _: KW_ONLY
    eps: float = 1e-6
    sequence_axis: Axis | None = None
    axis, has_bias = None, False


@dataclass(frozen=True)
class ParallelLayerNorm(_Norm):
    """LayerNorm over D features of which each rank of `axis` (R ranks) holds some.

    x [..., D/R]   weight, bias [D/R]   ->   y [..., D/R]
    forward   two all_reduces of 1 number per token: the mean, then the variance about it
    backward  the same
    """

    width: int
    axis: Axis
    _: KW_ONLY
    eps: float = 1e-5


@dataclass(frozen=True)
class ParallelRMSNorm(_Norm):
    """RMSNorm over D features of which each rank of `axis` (R ranks) holds some.

    x [..., D/R]   weight [D/R]   ->   y [..., D/R]
    forward   one all_reduce of 1 number per token
    backward  the same
    """

    width: int
    axis: Axis
    _: KW_ONLY
    eps: float = 1e-6
    has_bias = False


def _normed(x: Array, weight: Array, bias: list[Array], width: int, axis: Axis | None, eps: float) -> Array:
    wide = _wide(x)
    if bias:
        wide = wide - _mean(wide, width, axis)
    y = wide * lax.rsqrt(_mean(jnp.square(wide), width, axis) + eps) * weight
    return (y + bias[0] if bias else y).astype(jnp.result_type(x, weight))


def _wide(x: Array) -> Array:
    return x.astype(jnp.result_type(jnp.float32, x.dtype))


def _mean(x: Array, width: int, axis: Axis | None) -> Array:
    """The mean over the features, of all ranks of `axis`, for each rank's use on its own features."""
    if axis is None:
        return x.mean(-1, keepdims=True)
    return copy_to(all_reduce(x.sum(-1, keepdims=True), axis) / width, axis)


# --- of a batch -------------------------------------------------------------------------------------------------------


def batch_statistics(x: Array, axis: Axis, *, counted: Array | None = None) -> tuple[Array, Array]:
    """Mean and variance of each feature over the batches of all ranks of `axis`, the same on every rank.

    x [..., C], this rank's part   counted [...], which rows of it count; all if None   ->   [C], [C]
    forward   two all_reduces, of C + 1 numbers (sums and a count) and of C (squares about the mean)
    backward  the same: the effect of a rank's x on the others' outputs comes back to it
    The variance is that of the batch (divided by N, not N - 1). 16-bit numbers are added up in 32 bits. All ranks have
    arrays of one shape in JAX: `counted` marks the rows of a smaller batch.
    """
    x = _wide(x)
    rows = x.reshape(-1, x.shape[-1])
    is_counted = jnp.ones((len(rows), 1), bool) if counted is None else counted.reshape(-1, 1)
    rows = jnp.where(is_counted, rows, 0)
    sums = all_reduce(jnp.concatenate([rows.sum(0), is_counted.sum(0).astype(x.dtype)]), axis)
    number = jnp.maximum(lax.stop_gradient(sums[-1]), 1)
    mean = copy_to(sums[:-1] / number, axis)
    squares = jnp.square(jnp.where(is_counted, rows - mean, 0)).sum(0)
    return mean, copy_to(all_reduce(squares, axis) / number, axis)


def batch_norm(
    x: Array, weight: Array, bias: Array, axis: Axis, *, counted: Array | None = None, eps: float = 1e-5
) -> Array:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, by the statistics of the whole batch (Ioffe & Szegedy).

    x [..., C], this rank's part   weight, bias [C], the same on every rank   ->   y [..., C]
    counted [...]   which rows of x count; the others are treated as zeros
    cost      that of `batch_statistics`; for a running average, call it for the mean and variance
    backward  the gradients of weight and bias are each rank's part: data parallelism averages them, like any others
    It is flax's BatchNorm(axis_name=axis) while training.
    """
    mean, variance = batch_statistics(x, axis, counted=counted)
    used = x if counted is None else jnp.where(counted[..., None], x, 0)
    return ((used - mean) * lax.rsqrt(variance + eps) * weight + bias).astype(x.dtype)
