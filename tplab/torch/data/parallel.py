"""Data parallelism whose gradients travel while the backward pass is still computing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor

from tplab.data.gradients import BUCKET_BYTES, Bucket
from tplab.mesh import Axis
from tplab.torch.comm.collectives import Handle, broadcast
from tplab.torch.data.average import check_all_used, copies_of, keep_mean, plan_of, send_bucket, used_anywhere
from tplab.torch.data.parameters import Key, Model, Named, readable_again, state_of, text, trainable
from tplab.torch.pipeline.copies import at_end_of_pass
from tplab.torch.ranks.rank import Pending


def data_parallel(
    parameters: Model,
    axis: Axis,
    *,
    bucket_bytes: float | None = BUCKET_BYTES,
    find_unused: bool = False,
    broadcast: bool = True,
) -> DataParallel:
    """Let every backward pass from here on make `.grad` the mean over the ranks of `axis` (R ranks).

        replicas = data_parallel(model, "dp")
        for inputs, targets in microbatches[:-1]:
            with replicas.no_sync():                        # gradients are added up locally, and nothing is sent
                loss(model(inputs), targets).backward()
        inputs, targets = microbatches[-1]
        loss(model(inputs), targets).backward()             # each bucket leaves as soon as its gradients are ready

    parameters     a module, `Stages`, or parameters; those that are frozen now are left out
    bucket_bytes   the most that a bucket holds, from the last parameter to the first; None: one bucket per parameter
    find_unused    whether a parameter may have no gradient on some ranks. A bucket with missing gradients then leaves
                   at the end, with all buckets after it, and finally ranks exchange which parameters they have used
    broadcast      whether all ranks begin with the parameters and buffers of position 0. If not, the program makes them
                   equal

    A hook on each parameter notes when its gradient is complete. A bucket with complete gradients leaves in an
    all_reduce, in the same order on every rank. The end of the backward pass waits for all buckets and writes `.grad`.
    So the first layers' backward pass hides the communication of the last layers.
    Recomputation needs torch.utils.checkpoint's use_reentrant=False.
    cost   as `average_gradients`. This is torch's DistributedDataParallel, without a module around the model.
    Raises ValueError for a parameter without a gradient at the end of a backward pass, unless find_unused.
    """
    return DataParallel(parameters, axis, bucket_bytes, find_unused, broadcast)


_REENTRANT = (
    ". Where it is recomputed, torch.utils.checkpoint needs use_reentrant=False: a reentrant one runs a backward pass "
    "of its own"
)


class DataParallel:
    """Gradients that leave during the backward pass. Returned by `data_parallel`.

    The parameters' hooks keep it alive, and it does not keep the parameters alive: Python's garbage collector cannot
    free a cycle through a hook of this kind, because torch refers to the hooks twice.
    """

    def __init__(
        self,
        parameters: Model,
        axis: Axis,
        bucket_bytes: float | None,
        find_unused: bool,
        from_first: bool,
        copies: Callable[[Tensor], Axis] | None = None,
    ):
        parameters = readable_again(parameters)
        copies = copies or copies_of(parameters, axis)
        named = trainable(parameters)
        self._parameters, self._axis, self._find_unused = [(key, ref(p)) for key, p in named], axis, find_unused
        self.buckets: tuple[Bucket, ...] = plan_of(named, bucket_bytes, copies)
        self._bucket_of = {id(named[i][1]): n for n, bucket in enumerate(self.buckets) for i in bucket.indices}
        self._missing: list[int] = []  # per bucket, the number of missing gradients; empty while no backward pass runs
        self._flights: list[Handle | Tensor] = []
        self._end: Callable[[], object]  # of the running pass; returns None if that has raised
        self._is_paused = False
        if from_first:
            _copy_from_first(parameters, copies)
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for _, p in named]

    @property
    def _named(self) -> Named:
        return [(key, _still_there(key, held())) for key, held in self._parameters]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add to `.grad` and send nothing; the next one outside sends everything."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def wait(self) -> None:
        """Send what has not left yet, and write the means to `.grad`. Backward passes and `train_batch` call this."""
        if not self._missing:
            return
        try:
            used = set() if self._find_unused else check_all_used(self._named, _REENTRANT)
            self._missing = [0] * len(self.buckets)
            self._send_ready()
            if self._find_unused:  # after the buckets, which other ranks may have sent already
                used = used_anywhere(self._named, self._axis)
            named = self._named
            for bucket, flight in zip(self.buckets, self._flights):
                mean = flight.wait() if isinstance(flight, Pending) else flight
                keep_mean(bucket, named, mean, self._axis, used)
        finally:
            self._missing, self._flights = [], []

    def remove(self) -> None:
        """Stop averaging: from here on gradients stay each rank's own."""
        for hook in self._hooks:
            hook.remove()

    def _ready(self, parameter: Tensor) -> None:
        """Note that the gradient of `parameter` is complete."""
        if self._is_paused:
            return
        if not self._missing or self._end() is None:  # the first gradient of a pass; the pass before may have raised
            self._missing, self._flights = [len(bucket.pieces) for bucket in self.buckets], []
            self._end = at_end_of_pass(self.wait)
        self._missing[self._bucket_of[id(parameter)]] -= 1
        self._send_ready()

    def _send_ready(self) -> None:
        """Send ready buckets in order: if gradients come in a different order, some buckets wait for others."""
        while len(self._flights) < len(self.buckets) and self._missing[len(self._flights)] <= 0:
            self._flights.append(send_bucket(self.buckets[len(self._flights)], self._named))

    def __repr__(self) -> str:
        return f"DataParallel of {len(self._parameters)} parameters in {len(self.buckets)} buckets along {self._axis!r}"


def _still_there(key: Key, parameter: Tensor | None) -> Tensor:
    if parameter is None:
        raise ValueError(
            f"{text(key)}: this parameter is gone; call data_parallel once the model has all its parameters"
        )
    return parameter


@torch.no_grad()
def _copy_from_first(model: Model, copies: Callable[[Tensor], Axis]) -> None:
    """Set every rank's parameters, including frozen ones, and buffers to those of the first rank that holds them."""
    for x in state_of(model):
        if axis := copies(x):
            x.copy_(broadcast(x, axis))
