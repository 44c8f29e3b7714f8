"""Batch norm of a batch that is spread over an axis of the mesh: one replica's statistics would change the function."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from tplab.jax.comm.collectives import all_reduce
from tplab.jax.comm.regions import copy_to
from tplab.mesh import Axis


def batch_statistics(x: Array, axis: Axis, *, counted: Array | None = None) -> tuple[Array, Array]:
    """Mean and variance of each feature over the batches of all ranks of `axis`, the same on every rank.

    x [..., C], this rank's part   counted [...], which rows of it count; all if None   ->   [C], [C]
    forward   two all_reduces, of C + 1 numbers (sums and a count) and of C (squares about the mean)
    backward  the same: the effect of a rank's x on the others' outputs comes back to it
    The variance is that of the batch (divided by N, not N - 1). 16-bit numbers are added up in 32 bits. All ranks have
    arrays of one shape here: `counted` says which rows belong to a smaller batch.
    """
    x = x.astype(jnp.result_type(jnp.float32, x.dtype))
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
