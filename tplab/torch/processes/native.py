"""Native collectives: where every rank has a GPU of its own, CUDA tensors go from GPU to GPU, through NCCL.

Frames still go over gloo first: they say whether all ranks are in the same collective, and which shapes it has. Then
NCCL carries the tensors, on a separate stream that waits only for what the GPU had to do when the collective was begun,
so that it overlaps with what the rank computes meanwhile. NCCL adds up in its own order, and 16-bit types in 16 bits:
sums equal those of simulated ranks up to rounding. Times in the trace are the host's: when it launched them.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.torch.processes.exchange import WAIT_FOREVER, Arrived
from tplab.torch.processes.frames import Header
from tplab.torch.processes.pending import Message, ProcessPending, Together
from tplab.torch.ranks import outcomes as collectives
from tplab.torch.ranks.rank import MESSAGES, Call
from tplab.trace.journal import Group

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_ADDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
"""The types NCCL computes with; of the others, reductions go over gloo."""


class Native:
    """The native transport of one process: a communicator for each group of ranks, made when it is first used.

    A communicator needs its collectives in the same order on every rank. Ranks may wait for theirs in any order, so
    collectives are queued when they are begun, and launched in that order.
    """

    def __init__(self, backend: str = "nccl", device_type: str = "cuda"):
        self._backend, self._device_type = backend, device_type
        self._groups: dict[Group, Any] = {}
        self._queues: dict[Group, deque[_OnGpu]] = {}
        self._stream = torch.cuda.Stream() if device_type == "cuda" else None

    def begin_program(self) -> None:
        """Clear what another program has left in the queues; communicators are kept."""
        self._queues.clear()

    def carries(self, call: Call, x: Tensor) -> bool:
        """Whether this collective of `x` uses the native transport."""
        adds = call.op in ("all_reduce", "reduce_scatter")
        is_ours = call.op not in ("barrier", *MESSAGES)  # a receiver does not know yet what comes: use gloo
        return x.device.type == self._device_type and is_ours and (not adds or x.dtype in _ADDS)

    def kind(self, call: Call) -> type[ProcessPending]:
        return MessageOnGpu if call.peers else TogetherOnGpu

    def communicator(self, group: Group) -> Any:
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = dist.new_group(
                sorted(group), timeout=WAIT_FOREVER, backend=self._backend, use_local_synchronization=True
            )
        return found

    def enqueue(self, pending: _OnGpu) -> None:
        self._queues.setdefault(pending.group, deque()).append(pending)

    def launch_up_to(self, pending: _OnGpu) -> None:
        """Launch what was begun over this group, in order, up to and including `pending`."""
        queue = self._queues[pending.group]
        while not pending.is_launched:
            queue.popleft().launch()

    def launch_all(self) -> None:
        """Launch what the program has not waited for, when it ends."""
        for queue in self._queues.values():
            while queue:
                queue.popleft().launch()

    def now(self) -> Any:
        """The point that the program's stream has reached."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    def after(self, event: Any) -> AbstractContextManager[Any]:
        """Work in this context runs beside the program's, once `event` has happened."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(event)
        return torch.cuda.stream(self._stream)

    def join(self, event: Any, *tensors: Tensor) -> None:
        """Everything the program does from here on runs after `event`."""
        if self._stream is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(event)
            for x in tensors:
                x.record_stream(stream)


class _OnGpu(ProcessPending):
    """A collective whose frames announce a tensor without carrying it."""

    is_launched = False

    def fly(self) -> None:
        """Nothing to do: NCCL's own streams overlap with the program."""

    def launch(self) -> None:
        """Take the frames, and let the tensors travel: the result is ready when the GPU has reached `self.done`."""
        native = self.rank.native
        assert native is not None
        self.is_launched = True
        announced = self.announced()
        with native.after(self.ready):
            self.result = self.carried(announced, native.communicator(self.group))
            self.done = native.now()

    def announced(self) -> dict[int, Arrived]:
        raise NotImplementedError

    def carried(self, announced: dict[int, Arrived], communicator: Any) -> Tensor:
        raise NotImplementedError

    def arrive(self) -> Tensor:
        native = self.rank.native
        assert native is not None
        native.launch_up_to(self)
        native.join(self.done, self.result)
        return self.result

    def _keep(self, x: Tensor) -> Tensor:
        """Keep x as it is now, and the event from which on it is ready."""
        assert self.rank.native is not None
        kept = collectives.own(x)
        self.ready = self.rank.native.now()
        self.rank.native.enqueue(self)
        return kept


class MessageOnGpu(_OnGpu, Message):
    """ppermute and ring_shift from GPU to GPU."""

    def payload(self, x: Tensor) -> Tensor | None:
        self.x = self._keep(x)
        return None

    def depart(self, x: Tensor) -> None:
        super().depart(x)
        if not hasattr(self, "x"):  # nothing to send
            self.x = self._keep(x[:0] if x.dim() else x)

    def announced(self) -> dict[int, Arrived]:
        assert self.flight is not None
        return self.flight.finish(self.check)

    def carried(self, announced: dict[int, Arrived], communicator: Any) -> Tensor:
        assert self.call.peers is not None
        target, source = self.call.peers
        like, self.like = self.like, None
        assert like is not None
        result, operations = torch.zeros_like(like, memory_format=torch.contiguous_format, requires_grad=False), []
        if target is not None and self.x.numel():
            operations.append(dist.P2POp(dist.isend, _bytes(self.x), target, communicator))
        if source is not None:
            self.header = announced[source].header
            result = torch.empty(self.header.side.shape, dtype=like.dtype, device=like.device)
            if result.numel():
                operations.append(dist.P2POp(dist.irecv, _bytes(result), source, communicator))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return result


class TogetherOnGpu(_OnGpu, Together):
    """The collectives of a whole group, by NCCL."""

    def depart(self, x: Tensor) -> None:
        label = self.rank.put_in(x)
        self.labels = {self.call.place.index: label}
        self.prepare(self._keep(x))
        self.flight = self.start(dict.fromkeys(range(len(self.group)), (Header(self.side, self.hop, label), None)))

    def announced(self) -> dict[int, Arrived]:
        return self.taken()

    def carried(self, announced: dict[int, Arrived], communicator: Any) -> Tensor:
        x, op, params, index, num_ranks = self.x, self.call.op, self.call.params, self.call.place.index, len(self.group)
        if op == "broadcast":
            result = x.clone()
            dist.broadcast(_bytes(result), self.group[params[0]], communicator)
            return result
        if op == "all_reduce":
            result = x.clone()
            dist.all_reduce(result, _REDUCTIONS[params[0]], communicator)
            return result.div_(num_ranks) if params[0] == "mean" else result
        # torch counts the ranks of a group in ascending order, a mesh by their positions
        positions = [self.group.index(rank) for rank in sorted(self.group)]
        if op == "reduce_scatter":
            pieces = [piece.contiguous() for piece in x.split(list(params[2]), params[0])]
            ordered = [pieces[position] for position in positions]
            result = torch.empty_like(pieces[index])
            dist.reduce_scatter(result, ordered, _REDUCTIONS[params[1]], communicator)
            return result.div_(num_ranks) if params[1] == "mean" else result
        if op == "all_gather":
            shapes = {place: came.header.side.shape for place, came in announced.items()} | {index: self.side.shape}
            self.inputs = parts = [x.new_empty(shapes[place]) for place in range(num_ranks)]
            dist.all_gather([_bytes(parts[position]) for position in positions], _bytes(x), communicator)
            return torch.cat(parts, params[0])
        size = x.shape[params[0]] // num_ranks
        pieces = [piece.contiguous() for piece in x.split([size] * num_ranks, params[0])]
        parts = [torch.empty_like(piece) for piece in pieces]
        joined = torch.cat([_bytes(pieces[position]) for position in positions])
        arrived = torch.empty_like(joined)
        dist.all_to_all_single(arrived, joined, group=communicator)
        for position, row in zip(positions, arrived.chunk(num_ranks)):
            _bytes(parts[position]).copy_(row)
        return torch.cat(parts, params[1])


def _bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes, which NCCL carries whatever their type."""
    return x.view(-1).view(torch.uint8)
