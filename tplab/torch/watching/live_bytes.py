"""The peak memory of tensors in a program, counted tensor by tensor, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from tplab.torch.private import HigherOrder
from tplab.torch.ranks.meter import tensors_in
from tplab.torch.ranks.storages import Storages
from tplab.torch.ranks.watcher import Listener, watcher

_aten = torch.ops.aten
_GIVE_MEMORY = (_aten.lift_fresh, _aten.set_, _aten.resize_, _aten.resize_as_)
_BEFORE = -1


class LiveBytes(Listener):
    """The memory of all tensors that are made inside it and still exist.

        with LiveBytes() as live:
            stages = stages_of(layers, schedule)
        live.peak                                     # bytes, after the operation with the most

    peak    the most bytes so far, measured after each operation
    lap     the same since `lap` was last set, to start again in between
    now()   the bytes at this moment

    Each piece of memory counts once, including the results of collectives; views of older tensors do not count.
    Gradients count, as does what a backward pass has not freed yet, and `torch.tensor([...])`, but not
    `torch.from_numpy`, whose memory is NumPy's. Memory that an operation uses internally is not seen, and tensors on
    the "meta" device have none. Inside a rank's program only this rank's tensors count. Measuring takes time.
    """

    follows_threads = True

    def __init__(self) -> None:
        self.peak = self.lap = 0
        self._now = 0
        self._storages: Storages[int] = Storages()  # the bytes of each; _BEFORE if it existed before

    def now(self) -> int:
        for num_bytes in self._storages.gone():
            self._now -= max(num_bytes, 0)
        return self._now

    def __enter__(self) -> Self:
        watcher().add(self)
        return self

    def __exit__(self, *error: object) -> None:
        watcher().remove(self)

    def starts(self, func: Any, args: Any, kwargs: Any) -> None:
        if not _may_make_memory(func):
            return
        is_new = func is torch.ops.aten.lift_fresh.default  # torch.tensor calls it on what it has just made
        for storage in _storages((args, [*kwargs.values()])):
            if self._storages.get(storage) is None and not (is_new and storage.resizable()):
                self._storages.add(storage, _BEFORE)

    def ended(self, func: Any, args: Any, kwargs: Any, result: Any, note: Any) -> None:
        if _may_make_memory(func):
            self.made(result)

    def met(self, call: Any, x: Tensor, y: Tensor, note: Any) -> None:
        self.made(y)

    def made(self, result: Any) -> None:
        """Count the result of an operation or a collective."""
        for storage in _storages(result):
            self._measure(storage)
        self._note()

    def resized(self, storage: torch.UntypedStorage) -> None:
        if self._storages.get(storage) is not None:
            self._measure(storage)
            self._note()

    def _measure(self, storage: torch.UntypedStorage) -> None:
        size, known = storage.nbytes(), self._storages.get(storage)
        num_bytes = size if type(size) is int else 0  # symbolic if a tensor is only traced
        if known not in (num_bytes, _BEFORE):
            self._storages.add(storage, num_bytes)
            self._now += num_bytes - (known or 0)

    def _note(self) -> None:
        now = self.now()
        self.peak, self.lap = max(self.peak, now), max(self.lap, now)


@cache
def _may_make_memory(func: Any) -> bool:
    """Whether an operation may return new memory, or resize memory. Most operations return views, write in place or
    return no tensors, and are not counted."""
    if isinstance(func, HigherOrder):
        return True
    schema = func._schema
    is_old = all(value.alias_info is not None or "Tensor" not in str(value.type) for value in schema.returns)
    return not is_old or func.overloadpacket in _GIVE_MEMORY or any(one.is_out for one in schema.arguments)


def _storages(tensors: Any) -> Iterator[torch.UntypedStorage]:
    for x in tensors_in(tensors):
        if x.layout is torch.strided and (storage := x.untyped_storage()).device.type != "meta":
            yield storage  # not of sparse tensors, which consist of others, nor of fake ones
