"""How much memory tensors take at the worst moment of a program: counted tensor by tensor, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tplab.torch.private import DispatchMode, pytree, storage_id


class LiveBytes(DispatchMode):
    """The memory of all tensors that are made inside of it and are still there.

        with LiveBytes() as live:
            stages = stages_of(layers, schedule)
        live.peak                                     # bytes, after the operation when they were most

    peak    most bytes so far, looked at after each operation
    lap     the same since `lap` was last set, to begin anew in between
    now()   bytes at this moment

    Each piece of memory counts once, what collectives bring too, and views of what was there before do not count.
    Gradients do, and what a backward pass has not freed yet; so does `torch.tensor([...])`, but not
    `torch.from_numpy`, whose memory is NumPy's. What an operation takes for itself while it runs is not seen, and
    torch's "meta" device, which has no memory, does not count. Inside a rank's program it sees this rank's tensors
    only. Looking costs time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.lap = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}  # place -> what lies there, its bytes
        self._before: dict[int, StorageWeakRef] = {}  # the same of what was there before

    def now(self) -> int:
        for place in [place for place, (storage, _) in self._made.items() if storage.expired()]:
            del self._made[place]
        return sum(num_bytes for _, num_bytes in self._made.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor, say: what it does to the tensors that it is made of comes here again
        is_new = func is torch.ops.aten.lift_fresh.default  # of torch.tensor: an operation on what it has just made
        for storage in _storages((args, kwargs)):
            if not self._knows(storage) and not (is_new and storage.resizable()):
                self._before[storage_id(storage)] = StorageWeakRef(storage)
        result = func(*args, **(kwargs or {}))
        self.made(result)
        return result

    def made(self, result: Any) -> None:
        """Count what an operation has made, or what a collective has brought, which is no operation of torch's."""
        for storage in _storages(result):
            if not self._knows(storage):
                self._made[storage_id(storage)] = StorageWeakRef(storage), storage.nbytes()
        now = self.now()
        self.peak, self.lap = max(self.peak, now), max(self.lap, now)

    def _knows(self, storage: Any) -> bool:
        """Whether it has been seen. What lies at its place may be another one, which is gone."""
        place = storage_id(storage)
        if place in self._before and not self._before[place].expired():
            return True
        return place in self._made and not self._made[place][0].expired()


def _storages(tensors: Any) -> Iterator[Any]:
    for x in pytree.tree_leaves(tensors):
        if isinstance(x, Tensor) and x.device.type != "meta":
            yield x.untyped_storage()
