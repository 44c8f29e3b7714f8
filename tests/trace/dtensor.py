"""torch's own tensor parallelism, DTensor, on ranks of this process; and its messages, to compare with ours.

The ranks are those of torch's LocalTensorMode: one tensor per rank, and each operation runs for all ranks in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tplab.cost import collectives as cost
from tplab.errors import MeshError
from tplab.torch.models.plain import PlainGPT
from tplab.torch.private import DispatchMode, dispatch_modes
from tplab.trace.traffic import Traffic

_OPS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


def with_dtensor(program: Callable[[Any], Any], num_ranks: int) -> tuple[Any, Traffic]:
    """Run `program(mesh)`, which uses DTensors on a DeviceMesh. Returns its result, and the traffic of a rank.

        def program(mesh):
            parallelize_module(model, mesh, plan)
            return whole(model(ids))

    The program should return `whole(x)` of tensors. Raises MeshError if torch.distributed is already in use: this makes
    its own process group, which sends nothing.
    """
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise MeshError(
            "torch.distributed has a process group already, and with_dtensor makes one of its own; call it where no "
            "other is in use, or dist.destroy_process_group() first"
        )
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        with LocalTensorMode(num_ranks):
            mesh = init_device_mesh("cpu", (num_ranks,))
            with _Watch(num_ranks) as watch:
                result = program(mesh)
    finally:
        dist.destroy_process_group()
    return result, Traffic.of(watch.seen)


def whole(x: Any) -> Tensor:
    """A whole DTensor, or a tensor of which every rank has a copy, as a plain tensor. Its messages are not counted."""
    with _not_counted():
        x = x.detach()
        x = x.full_tensor() if hasattr(x, "full_tensor") else x
        x = x.wait() if hasattr(x, "wait") else x
        return x._local_tensors[0] if hasattr(x, "_local_tensors") else x


def shard_with_dtensor(model: PlainGPT, mesh: Any, *, share_input: bool = True) -> PlainGPT:
    """Shard a PlainGPT in place with torch's `parallelize_module`: columns then rows, and the vocabulary of embedding
    and head.

    share_input   query, key and value get their input as one DTensor, so that its gradient is summed once for all three
                  (PrepareModuleInput). False: each sums its own, the default of parallelize_module

    Its logits stay sharded: compute the loss inside `loss_parallel()`. parallelize_module gives the embedding and the
    head separate weights, which are tied again here.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        "blocks.*.attention.output": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
    }
    plan |= {f"blocks.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    if share_input:
        plan["blocks.*.attention"] = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    assert isinstance(model.embedding.weight, nn.Parameter)
    model.head.weight = model.embedding.weight
    return model


class _Watch(DispatchMode):
    """Records the collectives that are called: (name, 1, bytes that a rank sends)."""

    def __init__(self, num_ranks: int):
        super().__init__()
        self.num_ranks, self.seen, self.is_counting = num_ranks, list[tuple[str, int, int]](), True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # so that it is called again with its operations on the ranks
        name = func.overloadpacket.__name__.rstrip("_")
        if self.is_counting and func.namespace.endswith("c10d_functional") and name in _OPS:
            op, x, ranks = _OPS[name], args[0], range(self.num_ranks)
            sent = max(cost.bytes_sent(op, x.numel(), x.dtype.itemsize, self.num_ranks, rank) for rank in ranks)
            self.seen.append((op, 1, sent))
        return func(*args, **(kwargs or {}))


@contextmanager
def _not_counted() -> Iterator[None]:
    modes = [mode for mode in dispatch_modes() if isinstance(mode, _Watch)]
    try:
        for mode in modes:
            mode.is_counting = False
        yield
    finally:
        for mode in modes:
            mode.is_counting = True
