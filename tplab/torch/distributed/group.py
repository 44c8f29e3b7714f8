"""A process group of torch.distributed whose members are simulated ranks.

torch.distributed calls the methods here by name. Each one hands its tensors to the rank that runs, as tplab's own
collectives do, and writes what comes back into the tensors that the program gave it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from tplab.errors import ShapeError
from tplab.mesh import Mesh
from tplab.torch.distributed.work import Several, Started, Taken, Work
from tplab.torch.private import no_dispatch, num_modes
from tplab.torch.ranks.outcomes import own
from tplab.torch.ranks.rank import Apart, Call, Place
from tplab.torch.ranks.simulated import SimulatedRank


class Group(dist.ProcessGroup):
    """Some ranks of a run, as a process group. A rank's number in it is its position in `ranks`.

    unfinished   what was started and not yet waited for, the oldest first
    """

    def __init__(self, member: SimulatedRank, ranks: Sequence[int], name: str, label: str, backend: str, store: Any):
        index = list(ranks).index(member.rank)
        super().__init__(index, len(ranks))  # type: ignore[call-arg]  # the stub lacks torch's shorter form
        self.member, self.name_, self.label, self.backend, self.store = member, name, label, backend, store
        self.place = Place(label, Apart(ranks, name), index)
        self.unfinished: deque[Started] = deque()
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._messages: dict[tuple[Any, ...], Call] = {}

    # --- what torch.distributed asks of a group ------------------------------------------------------------------

    @property
    def group_name(self) -> str:
        return self.name_

    @property
    def group_desc(self) -> str:
        return self.label

    @property
    def bound_device_id(self) -> None:
        return None

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: Any) -> _Backend:
        return _Backend(self.backend)

    def getBackendName(self) -> str:
        """For torch's C++ code, which under the names of its own backends looks for their connections."""
        return "simulated"

    def _get_backend_name(self) -> str:
        return self.backend

    def get_group_store(self) -> Any:
        return self.store

    def size(self) -> int:
        return len(self.place.group)

    def rank(self) -> int:
        return self.place.index

    def shutdown(self) -> None:
        """There are no connections to close."""

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        """A deadlock is seen at once, so no time is waited."""

    def _set_sequence_number_for_group(self) -> None:
        """Calls are counted anyway."""

    def _start_coalescing(self, device: Any) -> None:
        """What is started between this and `_end_coalescing` is waited for as one."""
        self._num_before = len(self.unfinished)

    def _end_coalescing(self, device: Any) -> Work:
        return self.unfinished[-1] if len(self.unfinished) > self._num_before else Taken()

    def __repr__(self) -> str:
        return f"Group {self.label!r} of ranks {', '.join(map(str, self.place.group))}, simulated"

    def __reduce__(self) -> Any:
        raise TypeError("a process group cannot be copied or pickled; create it on each rank")

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    # --- collectives ---------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, **given: Any) -> Work:
        (x,) = _several(tensors)
        call = self._call("all_reduce", _reduction(opts, x, given))
        return self._run(call, x, opts, lambda y: _write(x, y))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        return self._together([self.allreduce([x], _Started(opts)) for x in tensors], opts)

    def reduce(self, tensors: Any, opts: Any = None, **given: Any) -> Work:
        (x,) = _several(tensors)
        root = _root(opts, given)
        call = self._call("reduce", (root, *_reduction(opts, x, given)))
        return self._run(call, x, opts, lambda y: _write(x, y) if root == self.place.index else None)

    def broadcast(self, tensors: Any, opts: Any = None, **given: Any) -> Work:
        (x,) = _several(tensors)
        root = _root(opts, given)
        return self._run(
            self._call("broadcast", (root,)), x, opts, lambda y: _write(x, y) if root != self.place.index else None
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Work:
        (x,) = _several(inputs)
        places: Sequence[Tensor] = outputs if isinstance(outputs[0], Tensor) else outputs[0]
        self._check_count("all_gather", places)
        call = self._call("all_gather", (0,), None, _sizes(places))
        return self._run(call, _flat(x), opts, lambda y: self._deal(places, y))

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None, **_: Any) -> Work:
        self._check_numel("all_gather_into_tensor", "output", output, x.numel() * self.size())
        return self._run(self._call("all_gather", (0,)), _rows(x), opts, lambda y: _write(output, y))

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Work:
        """output_lists[rank][i] gets what that rank has as inputs[i]."""
        self._check_count("all_gather_coalesced", output_lists)
        pairs = zip(zip(*output_lists, strict=True), inputs, strict=True)
        return self._together([self.allgather([outputs], [x], _Started(opts)) for outputs, x in pairs], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._together([self.all_gather_single(output, x, _Started(opts)) for output, x in pairs], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **given: Any) -> Work:
        (output,) = _several(outputs)
        pieces: Sequence[Tensor] = inputs if isinstance(inputs[0], Tensor) else inputs[0]
        self._check_count("reduce_scatter", pieces)
        self._check_numel("reduce_scatter", "output", output, pieces[self.place.index].numel())
        sizes = _sizes(pieces)
        call = self._call("reduce_scatter", (0, *_reduction(opts, output, given), sizes))
        return self._run(call, _together(pieces), opts, lambda y: _write(output, y))

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any = None, **given: Any) -> Work:
        self._check_numel("reduce_scatter_tensor", "input", x, output.numel() * self.size())
        x = _rows(x) if x.dim() and x.shape[0] % self.size() == 0 else _flat(x)
        sizes = (x.shape[0] // self.size(),) * self.size()
        call = self._call("reduce_scatter", (0, *_reduction(opts, x, given), sizes))
        return self._run(call, x, opts, lambda y: _write(output, y))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._together([self.reduce_scatter_single(output, x, _Started(opts)) for output, x in pairs], opts)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None, opts: Any = None, **_: Any,
    ) -> Work:  # fmt: skip
        num = self.size()
        for name, splits, tensor in (("input", input_splits, x), ("output", output_splits, output)):
            rows = tensor.shape[0] if tensor.dim() else 0
            if splits and (len(splits) != num or sum(splits) != rows):
                raise ShapeError(
                    f"all_to_all_single: {name}_split_sizes {list(splits)} must be {num} numbers, one per rank, whose "
                    f"sum is {rows}, the size of dim 0 of the {name}"
                )
            if not splits and rows % num:
                raise ShapeError(
                    f"all_to_all_single: dim 0 of the {name} has size {rows}, which {num} ranks cannot share equally; "
                    f"give {name}_split_sizes"
                )
        sizes, takes = (
            tuple(splits or (len(tensor) // num if tensor.dim() else 0,) * num)
            for splits, tensor in ((input_splits, x), (output_splits, output))
        )
        call = self._call("all_to_all", (), sizes, takes)
        return self._run(call, _rows(x), opts, lambda y: self._write_all("all_to_all_single", output, y))

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None, **_: Any) -> Work:
        for tensors in (outputs, inputs):
            self._check_count("all_to_all", tensors)
        call = self._call("all_to_all", (), _sizes(inputs), _sizes(outputs))
        return self._run(call, _together(inputs), opts, lambda y: self._deal(outputs, y))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **given: Any) -> Work:
        (x,) = _several(inputs)
        root = _root(opts, given)
        places = outputs[0] if outputs and not isinstance(outputs[0], Tensor) else outputs
        if root == self.place.index:
            self._check_count("gather", places)
        return self._run(
            self._call("gather", (root,), None, _sizes(places) if root == self.place.index else ()), _flat(x), opts,
            lambda y: self._deal(places, y) if root == self.place.index else None,
        )  # fmt: skip

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **given: Any) -> Work:
        (output,) = _several(outputs)
        root = _root(opts, given)
        if root == self.place.index:
            pieces = inputs[0] if not isinstance(inputs[0], Tensor) else inputs
            self._check_count("scatter", pieces)
            x, sizes = _together(pieces), _sizes(pieces)
        else:
            x, sizes = output.new_empty(0), (0,) * self.size()
        return self._run(
            self._call("scatter", (root,), sizes), x, opts, lambda y: self._write_all("scatter", output, y)
        )

    def barrier(self, opts: Any = None, **_: Any) -> Work:
        return self._run(self._call("barrier", ()), torch.empty(0, device="cpu"), opts, lambda y: None)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A rank that never comes is named by the error for a deadlock."""
        self.barrier(_Finished)

    # --- messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, target: int, tag: int = 0) -> Work:
        """`dist.send` waits for this at once: until the receiver has said that it will take the message."""
        (x,) = _several(tensors)
        call = self._message("send", target, tag)
        return Started(self.member, self.member.begin(call, _dense(x)), x, None)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        (x,) = _several(tensors)
        call = self._message("receive", source, tag)
        pending = self.member.begin(call, _dense(x))
        return Started(self.member, pending, x, lambda y: self._write_all("recv", x, y), source)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        (x,) = _several(tensors)
        return AnyMessage(self, x, tag)

    # --- how ----------------------------------------------------------------------------------------------------

    def _call(
        self, op: str, params: tuple[Any, ...], splits: tuple[int, ...] | None = None,
        takes: tuple[int, ...] | None = None,
    ) -> Call:  # fmt: skip
        key = op, params, splits, takes
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = Call(op, self.label, self.place, params, None, splits, takes)
        return call

    def _message(self, op: str, other: int, tag: int) -> Call:
        key = op, other, tag
        call = self._messages.get(key)
        if call is None:
            here, there = self.member.rank, self.place.group[other]
            pair, peers = ((here, there), (there, None)) if op == "send" else ((there, here), (None, there))
            place = Place(self.label, Apart(pair, f"{self.name_} message {tag}"), int(op == "receive"))
            call = self._messages[key] = Call(op, self.label, place, (other,), peers)
        return call

    def _run(self, call: Call, x: Tensor, opts: Any, take: Callable[[Tensor], None]) -> Work:
        """Run the collective; or start it, where the program will wait for it itself. `take` gets the result."""
        x = _dense(x)
        if opts is None or opts.asyncOp:
            return Started(self.member, self.member.begin(call, x), x, take, queue=self.unfinished)
        result = self.member.do(call, x)
        while self.unfinished:  # whatever was started before this is done too
            self.unfinished[0].wait()
        take(result)
        return Taken()

    def _together(self, works: Sequence[Work], opts: Any) -> Work:
        """Several collectives as one."""
        if not works:
            return Taken()
        if opts is not None and not opts.asyncOp:
            works[-1].wait()
        return Several(works)

    def _deal(self, places: Sequence[Tensor], y: Tensor) -> None:
        """Write what came from all ranks into one tensor for each."""
        for place, piece in zip(places, y.split(list(_sizes(places))), strict=True):
            _write(place, piece)

    def _write_all(self, op: str, output: Tensor, y: Tensor) -> None:
        self._check_numel(op, "output", output, y.numel())
        _write(output, y)

    def _check_numel(self, op: str, name: str, x: Tensor, expected: int) -> None:
        if x.numel() != expected:
            raise ShapeError(
                f"{op} over {self.label!r} ({self.size()} ranks): the {name} on rank {self.member.rank} is "
                f"{list(x.shape)}, {x.numel()} elements; it must have {expected}"
            )

    def _check_count(self, op: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.size():
            raise ShapeError(
                f"{op} over {self.label!r}: the list on rank {self.member.rank} has {len(tensors)} tensors; it needs "
                f"one for each of the {self.size()} ranks"
            )


# The names that torch has or had for the same methods.
Group._allgather_base = Group.all_gather_single  # type: ignore[attr-defined]
Group.allgather_into_tensor_coalesced = Group.all_gather_single_coalesced  # type: ignore[attr-defined]
Group._reduce_scatter_base = Group.reduce_scatter_single  # type: ignore[attr-defined]
Group.reduce_scatter_tensor_coalesced = Group.reduce_scatter_single_coalesced  # type: ignore[attr-defined]
Group.alltoall_base = Group.all_to_all_single  # type: ignore[attr-defined]


class AnyMessage(Work):
    """The next message from any rank of the group."""

    def __init__(self, group: Group, x: Tensor, tag: int):
        super().__init__()
        self._group, self._x, self._tag, self._source = group, x, tag, -1

    def wait(self, timeout: Any = None) -> bool:
        if self._source < 0:
            group = self._group
            others = [other for other in range(group.size()) if other != group.rank()]
            source = group.member.first_to_send([group._message("receive", other, self._tag) for other in others])
            self._source = group.place.group.index(source)
            group.recv(self._x, self._source, self._tag).wait()
        return True

    def is_completed(self) -> bool:
        return self._source >= 0

    def _source_rank(self) -> int:
        return self._source

    def result(self) -> list[Tensor]:
        self.wait()
        return [self._x]


def label_of(ranks: Sequence[int], mesh: Mesh) -> str:
    """What a trace calls a group: the axis of the mesh that it is, or its ranks."""
    names = mesh.axis_names
    for first in range(len(names)):
        for last in range(first + 1, len(names) + 1):
            if mesh.group(ranks[0], names[first:last]) == tuple(ranks):
                return ",".join(names[first:last])
    return "ranks " + ",".join(map(str, ranks))


class _Backend:
    """What torch reads of a backend that it does not know."""

    supports_splitting = supports_coalescing = supports_time_estimate = False
    options = None

    def __init__(self, name: str):
        self._name = name

    def name(self) -> str:
        return self._name


class _Started:
    """The options of a collective that is only started: those of the whole of which it is a part."""

    asyncOp = True

    def __init__(self, opts: Any):
        self.reduceOp = getattr(opts, "reduceOp", ReduceOp.SUM)


class _Finished:
    asyncOp = False


_REDUCTIONS = {
    "SUM": "sum", "AVG": "mean", "PRODUCT": "product", "MIN": "min", "MAX": "max", "BAND": "and", "BOR": "or",
    "BXOR": "xor",
}  # fmt: skip


def _reduction(opts: Any, x: Tensor, given: dict[str, Any]) -> tuple[str]:
    """What to reduce with, by tplab's name for it."""
    op = given.get("op", ReduceOp.SUM) if opts is None else getattr(opts, "reduceOp", opts)
    kind = getattr(op, "op", op).name  # torch hands on an object with the kind, or the kind
    name = _REDUCTIONS.get(kind)
    if name is None:
        raise NotImplementedError(
            f"ReduceOp.{kind} is not supported on simulated ranks; multiply by the factor first and reduce with "
            "ReduceOp.SUM"
        )
    if name in ("and", "or", "xor") and (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"a bitwise {name} needs whole numbers or booleans, not {x.dtype}")
    if name == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"ReduceOp.AVG of {x.dtype} would not be whole numbers; convert to a floating-point type first")
    return (name,)


def _root(opts: Any, given: dict[str, Any]) -> int:
    return int(given["root"] if opts is None else opts.rootRank)


def _several(tensors: Any) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _dense(x: Tensor) -> Tensor:
    return x.detach() if x.requires_grad else x


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(-1)


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() else x.detach().reshape(1)


def _sizes(pieces: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(piece.numel() for piece in pieces)


def _together(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces behind one another; no operation of the program's."""
    with no_dispatch():
        return torch.cat([_flat(piece) for piece in pieces]) if len(pieces) > 1 else own(_flat(pieces[0]))


def _write(output: Tensor, y: Tensor) -> None:
    """Write a result where the program wants it. Autograd does not see it, as with any other process group."""
    if num_modes():
        with no_dispatch():
            output.data.copy_(y.view(output.shape))
    else:
        output.data.copy_(y.view(output.shape))
