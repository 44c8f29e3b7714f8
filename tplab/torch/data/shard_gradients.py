"""ZeRO stage 2: gradients leave during the backward pass, and every rank keeps its own part of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tplab.data.gradients import BUCKET_BYTES
from tplab.mesh import Axis
from tplab.torch.data.pieces import Gather, Reduce
from tplab.torch.data.sharded_optimizer import About, Bucket, Params, ShardedOptimizer
from tplab.torch.pipeline.copies import at_end_of_pass


def shard_gradients(
    optimizer: Callable[[Any], Optimizer],
    params: Params,
    axis: Axis = "dp",
    *,
    op: str = "mean",
    replicate_axis: Axis | None = None,
    master_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    bucket_bytes: float | None = BUCKET_BYTES,
    gather: Gather | None = None,
    reduce: Reduce | None = None,
) -> ShardedOptimizer:
    """Divide the states of an optimizer and the gradients over the R ranks of `axis` (ZeRO stage 2).

        optimizer = shard_gradients(partial(torch.optim.AdamW, lr=1e-3), model.parameters(), "dp")
        model.loss(x, y).backward()        # gradients leave as soon as they are ready: p.grad is None afterwards
        optimizer.step()

    This is like `shard_optimizer`, but the backward pass itself combines gradients: as soon as those of a bucket are
    ready, their reduce_scatter starts and they are freed, while the backward pass goes on. So a rank holds its piece of
    the gradients, and at most two buckets of whole gradients: one that is filling, and one in flight.

    bucket_bytes    the most that travels in one message; None: each parameter by itself. Buckets leave from the last
                    parameter to the first, the same on every rank; a parameter that got no gradient counts as zeros

    states    2 + 14/R bytes per parameter with Adam and master_dtype=float32
    sent      2(R-1)/R of the parameters by each rank; with k backward passes before a step, each sends its gradients:
              k+1 times (R-1)/R, where stage 1 adds them up first and sends twice (R-1)/R
    In `train_batch`, which has several backward passes, buckets leave during the last one, when the batch's gradients
    are complete.
    The other arguments are those of `shard_optimizer`. Rajbhandari et al. 2020, section 5.2.
    """
    about = About(axis, op, replicate_axis, master_dtype, reduce_dtype, bucket_bytes, False, gather, reduce)
    return _GradientsShardedOptimizer(optimizer, params, about)


class _GradientsShardedOptimizer(ShardedOptimizer):
    """A sharded optimizer whose buckets leave during the backward pass."""

    def __init__(self, make: Callable[[Any], Optimizer], params: Params, about: About):
        super().__init__(make, params, about)
        _Leaving(self.buckets)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        for bucket in self.buckets:
            if bucket.row is None:  # no backward pass has run
                bucket.reduce()
            bucket.hand_over()
        self._is_reduced = True


class _Leaving:
    """Buckets that leave during the backward pass, in their order, one after another.

    The parameters' hooks keep it alive, even if the optimizer is dropped: Python may drop that at another time on each
    rank, and all ranks must send the same. It keeps neither the parameters alive nor the optimizer, which refers to
    them: Python cannot collect a cycle through a hook of this kind, as torch refers to the hooks twice.
    """

    def __init__(self, buckets: Sequence[Bucket]):
        self._buckets = buckets
        self._end: Callable[[], object]  # of the running pass; returns None if there is none
        self._ready: list[set[int]] = [set() for _ in buckets]  # the parameters whose gradients are ready, by id
        self._begin_pass()
        for bucket, ready in zip(buckets, self._ready):
            bucket.in_backward = True
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, ready))

    def _begin_pass(self) -> None:
        """Reset for a new pass, also if the one before has raised."""
        for ready in self._ready:
            ready.clear()
        self._next, self._end = 0, lambda: None

    def _arrived(self, ready: set[int], parameter: Tensor) -> None:
        if self._end() is None:
            self._begin_pass()
            self._end = at_end_of_pass(self._finish)
        ready.add(id(parameter))
        while self._next < len(self._buckets) and len(self._ready[self._next]) == len(self._buckets[self._next].shards):
            self._leave()

    def _leave(self) -> None:
        with torch.no_grad():
            self._buckets[self._next].begin()
            if self._next > 0:
                self._buckets[self._next - 1].end()
        self._next += 1

    def _finish(self) -> None:
        """At the end of the pass, send what has not left, and wait for what is in flight."""
        try:
            while self._next < len(self._buckets):
                self._leave()
            with torch.no_grad():
                self._buckets[-1].end()
        finally:
            self._begin_pass()
