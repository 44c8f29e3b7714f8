"""The engine: the collectives of torch.distributed, gloo's on CPUs and NCCL's between GPUs, with a group per axis."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.comm import EXTREMES
from tplab.torch.private import at_once
from tplab.torch.processes.frames import bytes_of
from tplab.torch.ranks import outcomes
from tplab.torch.ranks.rank import MESSAGES, Call, Place
from tplab.trace.journal import Group

WAIT_FOREVER = timedelta(days=365)
"""Gloo's own limit on a wait. A rank may compute for hours; ranks that never arrive are detected in other ways."""

POISON_TAG = 2**31 - 1
"""The tag of a message that is never sent."""

_OP = dist.ReduceOp
_REDUCTIONS: dict[str, Any] = {"sum": _OP.SUM, "mean": _OP.SUM, "max": _OP.MAX, "min": _OP.MIN}
_REDUCES = ("all_reduce", "reduce", "reduce_scatter")
_ADDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
"""The dtypes that both backends add up."""

_ORDERS = tuple(dtype for dtype in _ADDS if not dtype.is_floating_point)
"""The dtypes of which both backends find the extreme. With floating-point numbers they may lose a NaN."""

Shapes = list[tuple[int, ...]]


class Engine:
    """The groups of one process. Each is connected when it is first used, so all of its ranks must take part in that.

    A group needs its collectives in the same order on every rank, which `Together` ensures. Sums are added up in the
    backend's order, and 16-bit types in 16 bits, so they equal those of simulated ranks up to rounding. Everything that
    is only moved is moved as bytes.

    On a GPU, tensors travel on a separate stream, which waits only for the work that the GPU had when the collective
    was started. So they overlap with what the rank computes meanwhile.

    store   where the ranks of a group find each other
    """

    def __init__(self, store: Any, has_gpu: bool):
        self._store, self.has_gpu = store, has_gpu
        self._backends: dict[tuple[Group, str], Any] = {}
        self._stream = torch.cuda.Stream() if has_gpu else None

    def carries(self, call: Call, x: Tensor) -> bool:
        """Whether `x` can travel from its device. Otherwise it has to be copied to the CPU: a tensor on a GPU that
        ranks share, or one for a receiver that does not know its device yet."""
        return x.is_cpu or (x.is_cuda and self.has_gpu and call.op not in MESSAGES)

    def break_off(self) -> None:
        """Close the connections of all CPU groups, which releases ranks that wait in their collectives."""
        for (_, device_type), backend in list(self._backends.items()):
            if device_type == "cpu":
                break_off(backend)

    def together(self, call: Call, x: Tensor, shapes: Shapes) -> Tensor:
        """This rank's result of a collective that every rank of its group has announced.

        x       this rank's input, contiguous; it may be written to
        shapes  of all inputs, in the order of positions
        """
        op, row, index, join_dim = call.op, call.row, call.place.index, call.dims[1]
        if row.takes and not any(map(prod, shapes)) and call.splits is None:
            return outcomes.results(call, [x.new_empty(shape) for shape in shapes])[index]
        backend = self._backend(call.place, x.device.type)
        if not row.takes:
            backend.barrier().wait()
        elif op == "broadcast":
            backend.broadcast([bytes_of(x)], _with(dist.BroadcastOptions(), rootRank=call.root, rootTensor=0)).wait()
        elif row.gathers:
            found = _gathered(backend, x, shapes, call.root if row.gives == "root" else None)
            return outcomes.joined(found, join_dim) if found else _zeros(x, shapes, join_dim)
        elif op == "scatter":
            return _scattered(backend, call, x)
        elif op == "all_to_all":
            return _dealt(backend, call, x)
        elif op in _REDUCES and x.dtype in (_ORDERS if call.reduction in EXTREMES else _ADDS):
            result = _reduced(backend, call, x)
            return result.div_(len(shapes)) if call.reduction == "mean" else result
        else:  # no backend has it
            return outcomes.results(call, _gathered(backend, x, shapes))[index]
        return x

    def exchange(self, call: Call, x: Tensor, result: Tensor) -> None:
        """Send `x` to one rank and fill `result` with what another one sends, between GPUs."""
        assert call.peers is not None
        backend, (target, source) = self._backend(call.place, x.device.type), call.peers
        with at_once(backend):
            if target is not None and x.numel():
                backend.send([bytes_of(x)], call.place.group.index(target), 0)
            if source is not None and result.numel():
                backend.recv([bytes_of(result)], call.place.group.index(source), 0)

    def _backend(self, place: Place, device_type: str) -> Any:
        found = self._backends.get((place.group, device_type))
        if found is None:
            name = f"{device_type}/{','.join(map(str, place.group))}/"
            store = dist.PrefixStore(name, self._store.clone())  # while one thread waits in a store, others cannot
            make: Any = dist.ProcessGroupGloo if device_type == "cpu" else dist.ProcessGroupNCCL
            found = make(store, place.index, len(place.group), WAIT_FOREVER)
            self._backends[place.group, device_type] = found
        return found

    # --- a GPU's time ----------------------------------------------------------------------------------------------

    def now(self, x: Tensor) -> Any:
        """The point that the current stream has reached; None on a CPU."""
        return torch.cuda.current_stream().record_event() if x.is_cuda else None

    def after(self, event: Any) -> AbstractContextManager[Any]:
        """A context whose work runs beside the program's, once `event` has happened."""
        if event is None or self._stream is None:
            return nullcontext()
        self._stream.wait_event(event)
        return torch.cuda.stream(self._stream)

    def join(self, event: Any, x: Tensor) -> None:
        """Let everything that the program does from here on run after `event`."""
        if event is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(event)
            x.record_stream(stream)


def _dealt(backend: Any, call: Call, x: Tensor) -> Tensor:
    """An all_to_all of equal pieces, or with the number of rows for each position that the call gives."""
    (cut_dim, join_dim), num_ranks = call.dims, len(call.place.group)
    pieces = x.chunk(num_ranks, cut_dim) if call.splits is None else x.split(call.splits)
    shapes = [pieces[0].shape] * num_ranks if call.takes is None else [(rows, *x.shape[1:]) for rows in call.takes]
    to, come = ([prod(shape) * x.element_size() for shape in each] for each in ((one.shape for one in pieces), shapes))
    taken = torch.empty(sum(come), dtype=torch.uint8, device=x.device)
    backend.alltoall_base(taken, torch.cat([bytes_of(piece.contiguous()) for piece in pieces]), come, to).wait()
    parts = [part.view(x.dtype).view(shape) for part, shape in zip(taken.split(come), shapes)]
    return outcomes.joined(parts, join_dim)


def _gathered(backend: Any, x: Tensor, shapes: Shapes, root: int | None = None) -> list[Tensor]:
    """The inputs of all ranks; with `root` only there, and nothing elsewhere. All ranks send as many bytes as the
    largest input has, as gloo only gathers equal sizes."""
    sizes = [prod(shape) * x.element_size() for shape in shapes]
    put, *rows = (torch.empty(max(sizes), dtype=torch.uint8, device=x.device) for _ in [0, *shapes])
    mine = bytes_of(x)
    put[: mine.numel()] = mine
    if root is None:
        backend.allgather([rows], [put]).wait()
    else:
        rows = rows if backend.rank() == root else []
        backend.gather([rows] if rows else [], [put], _with(dist.GatherOptions(), rootRank=root)).wait()
    return [row[:size].view(x.dtype).view(shape) for row, size, shape in zip(rows, sizes, shapes)]


def _zeros(x: Tensor, shapes: Shapes, dim: int) -> Tensor:
    """The result on a rank that is not the root, where the inputs are joined along `dim`."""
    size = sum(shape[dim] for shape in shapes)
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return torch.zeros(prod(shape) * x.element_size(), dtype=torch.uint8, device=x.device).view(x.dtype).view(shape)


def _scattered(backend: Any, call: Call, x: Tensor) -> Tensor:
    """This rank's piece of the root's x. All pieces are sent with the size of the largest."""
    index, dim, sizes = call.place.index, call.dims[0], call.about["sizes"]
    row = x.numel() // max(sum(sizes), 1) * x.element_size()  # the bytes of one slice
    taken, *put = (torch.empty(max(sizes) * row, dtype=torch.uint8, device=x.device) for _ in [0, *sizes])
    for place, piece in zip(put, x.split(list(sizes), dim)):
        place[: piece.numel() * x.element_size()] = bytes_of(piece.contiguous())
    pieces = [put] if index == call.root else []
    backend.scatter([taken], pieces, _with(dist.ScatterOptions(), rootRank=call.root)).wait()
    shape = (*x.shape[:dim], sizes[index], *x.shape[dim + 1 :])
    return taken[: sizes[index] * row].view(x.dtype).view(shape)


def _reduced(backend: Any, call: Call, x: Tensor) -> Tensor:
    """The sum or the extreme over the ranks: the whole, on all ranks or on the root, or this rank's piece."""
    reduces = {"reduceOp": _REDUCTIONS[call.reduction]}
    if call.op == "all_reduce":
        backend.allreduce([x], _with(dist.AllreduceOptions(), **reduces)).wait()
        return x
    if call.op == "reduce":
        backend.reduce([x], _with(dist.ReduceOptions(), rootRank=call.root, **reduces)).wait()
        return x if call.place.index == call.root else torch.zeros_like(x)
    pieces = [piece.contiguous() for piece in x.split(list(call.about["sizes"]), call.dims[0])]
    result = torch.empty_like(pieces[call.place.index])
    backend.reduce_scatter([result], [pieces], _with(dist.ReduceScatterOptions(), **reduces)).wait()
    return result


def _with(options: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(options, name, value)
    return options


def break_off(gloo: Any) -> None:
    """Close all connections of a group, by a wait that times out: gloo has no other way."""
    if gloo.size() > 1:
        with suppress(RuntimeError):
            neighbor = (gloo.rank() + 1) % gloo.size()
            gloo.recv([torch.empty(1, device="cpu")], neighbor, POISON_TAG).wait(timedelta(milliseconds=1))
