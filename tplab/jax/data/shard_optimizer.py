"""ZeRO stage 1: every rank keeps the optimizer's states of its own part of the parameters."""

from __future__ import annotations

from typing import Any

from tplab.jax.data.pieces import Gather, Reduce, gather_copies, reduce_rows
from tplab.jax.data.sharded_optimizer import ShardedOptimizer
from tplab.mesh import Axis


def shard_optimizer(
    optimizer: Any,
    axis: Axis = "dp",
    *,
    op: str = "mean",
    replicate_axis: Axis | None = None,
    master_dtype: Any = None,
    reduce_dtype: Any = None,
    is_reduced: bool = False,
    gather: Gather | None = None,
    reduce: Reduce | None = None,
) -> ShardedOptimizer:
    """Divide the states of an optimizer over the R ranks of `axis`, which hold copies of the model (ZeRO stage 1).

        optimizer = shard_optimizer(optax.adamw(1e-3), "dp")
        state = optimizer.init(params)
        value, grads = optimizer.value_and_grad(loss)(params, x, y)      # each rank's own gradient
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)

    `update` combines the gradients, so that each rank gets its piece [ceil(n/R)] of each parameter's gradient [n]; it
    works out the updates of the pieces; and it gathers them, so that every rank can update the whole parameters.

    optimizer       one of optax's. What it does to an element may depend only on that element, as in sgd, adam or
                    adamw: it never sees a whole matrix, so clip_by_global_norm would see the norm of a part
    op              how gradients are combined: "mean" or "sum"
    replicate_axis  the axis along which pieces have copies: gradients are combined along it too
    master_dtype    that of the pieces: float32 keeps an exact copy of parameters that are bfloat16
    reduce_dtype    the dtype in which gradients travel; by default, their own
    is_reduced      whether the gradients have already been combined: by `average_gradients`, or by JAX, which adds up
                    the result of jax.grad for parameters that are the same on every rank. Then nothing is sent for
                    them, and `op` is not applied: differentiate the mean of the losses, all_reduce(loss, "dp", "mean")
    gather, reduce  what sends: functions as in `tplab.jax.data.pieces`, or None for all_gather and reduce_scatter

    states    4 + 12/R bytes per parameter with Adam and master_dtype=float32, where R copies take 16
    sent      reduce_scatter and all_gather: 2(R-1)/R of the parameters by each rank, the same as an all_reduce of the
              gradients; one message for each parameter. With is_reduced, that all_reduce comes first, and it is
              3(R-1)/R in total
    Raises ValueError, in `update`, for gradients that JAX has added up, unless is_reduced says so.
    Rajbhandari et al. 2020, section 5.1.
    """
    return ShardedOptimizer(
        optimizer,
        axis,
        op,
        replicate_axis,
        master_dtype,
        reduce_dtype,
        gather or gather_copies,
        reduce or reduce_rows,
        is_reduced=is_reduced,
    )
