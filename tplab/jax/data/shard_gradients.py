"""ZeRO stage 2: gradients are sent during the backward pass, and every rank keeps its own part of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tplab.jax.data.pieces import Gather, Reduce
from tplab.jax.data.sharded_optimizer import ShardedOptimizer, shard_optimizer
from tplab.mesh import Axis


def shard_gradients(
    optimizer: Any,
    axis: Axis = "dp",
    *,
    op: str = "mean",
    replicate_axis: Axis | None = None,
    master_dtype: Any = None,
    reduce_dtype: Any = None,
    specs: Any = None,
    gather: Gather | None = None,
    reduce: Reduce | None = None,
) -> ShardedOptimizer:
    """Divide the states of an optimizer and the gradients over the R ranks of `axis` (ZeRO stage 2).

        optimizer = shard_gradients(optax.adamw(1e-3), "dp")
        state = optimizer.init(params)
        value, grads = optimizer.value_and_grad(loss)(params, x, y)      # this rank's part of the gradients
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)

    This is like `shard_optimizer`, but the backward pass itself combines gradients: `value_and_grad` returns this
    rank's piece [ceil(n/R)] of each, and a parameter's reduce_scatter depends only on its gradient. The compiler
    decides when it runs, and so how many whole gradients exist at once.

    states    2 + 14/R bytes per parameter with Adam and master_dtype=float32
    sent      2(R-1)/R of the parameters by each rank; with k backward passes before a step, each sends its gradients:
              k+1 times (R-1)/R, where stage 1 adds them up first and sends twice (R-1)/R
    The other arguments are those of `shard_optimizer`. Rajbhandari et al. 2020, section 5.2.
    """
    first = shard_optimizer(
        optimizer,
        axis,
        op=op,
        replicate_axis=replicate_axis,
        master_dtype=master_dtype,
        reduce_dtype=reduce_dtype,
        specs=specs,
        gather=gather,
        reduce=reduce,
    )
    return replace(first, during_backward=True)
