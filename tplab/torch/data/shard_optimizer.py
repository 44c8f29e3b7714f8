"""ZeRO stage 1: every rank keeps the optimizer's states of its own part of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from tplab.data.buckets import BUCKET_BYTES
from tplab.mesh import Axis
from tplab.torch.data.pieces import Gather, Reduce
from tplab.torch.data.sharded_optimizer import About, Params, ShardedOptimizer


def shard_optimizer(
    optimizer: Callable[[Any], Optimizer],
    params: Params,
    axis: Axis = "dp",
    *,
    op: str = "mean",
    replicate_axis: Axis | None = None,
    master_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    bucket_bytes: float | None = BUCKET_BYTES,
    is_reduced: bool = False,
    gather: Gather | None = None,
    reduce: Reduce | None = None,
) -> ShardedOptimizer:
    """Divide the states of an optimizer over the R ranks of `axis`, which hold copies of the model (ZeRO stage 1).

        optimizer = shard_optimizer(partial(torch.optim.AdamW, lr=1e-3), model.parameters(), "dp")
        model.loss(x, y).backward()        # each rank's own gradient, from its own part of the batch
        optimizer.step()

    `step` combines the gradients, so that each rank gets its piece [ceil(n/R)] of each parameter's gradient [n]; it
    steps the pieces; and it gathers them, so that every rank has the whole parameters again.

    optimizer       makes the optimizer of a rank's pieces: a class of torch.optim, or a function. What it does to an
                    element may depend only on that element, as in SGD, Adam or AdamW: it never sees a whole matrix
    params          as for the optimizer: model.parameters(), or groups with options. Frozen parameters are left out; a
                    tied one counts once. A parameter without a gradient is stepped with zeros
    op              how gradients are combined: "mean" or "sum"
    replicate_axis  the axis along which pieces have copies: gradients are combined along it too
    master_dtype    that of the pieces: float32 keeps an exact copy of parameters that are bfloat16
    reduce_dtype    the dtype in which gradients travel; by default, their own
    bucket_bytes    the most that travels in one message; None: each parameter by itself
    is_reduced      whether the gradients have already been combined (`average_gradients`, `data_parallel`): then
                    nothing is sent for them
    gather, reduce  what sends: functions as in `tplab.torch.data.pieces`, or None for all_gather and reduce_scatter

    states    4 + 12/R bytes per parameter with Adam and master_dtype=float32, where R copies take 16
    sent      reduce_scatter and all_gather: 2(R-1)/R of the parameters by each rank, the same as an all_reduce of the
              gradients. With is_reduced, that all_reduce comes first, and it is 3(R-1)/R in total
    Rajbhandari et al. 2020, section 5.1.
    """
    about = About(axis, op, replicate_axis, master_dtype, reduce_dtype, bucket_bytes, is_reduced, gather, reduce)
    return ShardedOptimizer(optimizer, params, about)
