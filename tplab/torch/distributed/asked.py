"""The methods that torch.distributed calls on a process group, each in terms of one of tplab's collectives."""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from tplab.errors import ShapeError
from tplab.torch.private import no_dispatch, num_modes, premul_factor
from tplab.torch.ranks.rank import Apart, Call, Place, current_rank_or_none, message

Put = Tensor | Sequence[Tensor]
"""A rank's input to a collective: a tensor, or several that count as one, concatenated."""


class Asked:
    """The methods that torch.distributed calls by name, in terms of tplab's own collectives.

    Each of them checks its arguments and calls `_run` with the collective as a `Call`, this rank's input, and a
    function that writes the result where the program wants it. Subclasses define `_run`.

    rank    this rank's number in the world
    ranks   the group's members; name: torch's name of the group; label: its name in a trace
    """

    def __init__(self, rank: int, ranks: Sequence[int], name: str, label: str):
        self.world_rank, self.name_, self.label = rank, name, label
        self.place = Place(label, Apart(ranks, name), list(ranks).index(rank))
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._messages: dict[tuple[Any, ...], Call] = {}

    def _run(self, call: Call, put: Put, opts: Any, into: Sequence[Tensor], is_taker: bool = True) -> Any:
        """Run a collective; if `opts.asyncOp` is true, the program waits for it itself.

        into      the tensors that get the result, also as the result of the collective's future
        is_taker  whether this rank gets a result
        """
        raise NotImplementedError  # no ABC, because torch's process groups have another metaclass

    def _together(self, works: Sequence[Any], opts: Any) -> Any:
        """Several collectives as one."""
        raise NotImplementedError

    # --- collectives ---------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, **given: Any) -> Any:
        return self._all_reduce(in_memory("all_reduce", several(tensors)[0], elementwise=True), opts, **given)

    def _all_reduce(self, x: Tensor, opts: Any, **given: Any) -> Any:
        call = self._call("all_reduce", _reduction(opts, x, given))
        return self._run(call, x, opts, [x])

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self._together([self._all_reduce(x, _Started(opts)) for x in tensors], opts)

    def reduce(self, tensors: Any, opts: Any = None, **given: Any) -> Any:
        x, root = in_memory("reduce", several(tensors)[0], elementwise=True), self._root(opts, given)
        takes = (x.numel(),) * len(self.place.group) if root == self.place.index else ()
        call = self._call("reduce", (root, *_reduction(opts, x, given)), None, takes)
        return self._run(call, x, opts, [x], root == self.place.index)

    def broadcast(self, tensors: Any, opts: Any = None, **given: Any) -> Any:
        x, root = in_memory("broadcast", several(tensors)[0], elementwise=True), self._root(opts, given)
        return self._run(self._call("broadcast", (root,)), x, opts, [x], root != self.place.index)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        (x,) = several(inputs)
        places: Sequence[Tensor] = outputs if isinstance(outputs[0], Tensor) else outputs[0]
        self._check_count("all_gather", places)
        call = self._call("all_gather", (0,), None, _sizes(places))
        return self._run(call, flat(x), opts, places)

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None, **_: Any) -> Any:
        self._check_numel("all_gather_into_tensor", "output", output, x.numel() * len(self.place.group))
        return self._run(self._call("all_gather", (0,)), _rows(x), opts, [output])

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """output_lists[rank][i] gets that rank's inputs[i]."""
        self._check_count("all_gather_coalesced", output_lists)
        pairs = zip(zip(*output_lists, strict=True), inputs, strict=True)
        return self._together([self.allgather([outputs], [x], _Started(opts)) for outputs, x in pairs], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return self._together([self.all_gather_single(output, x, _Started(opts)) for output, x in pairs], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **given: Any) -> Any:
        (output,) = several(outputs)
        pieces: Sequence[Tensor] = inputs if isinstance(inputs[0], Tensor) else inputs[0]
        self._check_count("reduce_scatter", pieces)
        self._check_numel("reduce_scatter", "output", output, pieces[self.place.index].numel())
        if not all(x.is_contiguous() for x in (output, *pieces)):  # gloo adds up the memory of these as it is:
            output.data.copy_(pieces[self.place.index])
            clones = [output if place == self.place.index else piece.clone() for place, piece in enumerate(pieces)]
            pieces, output = [in_memory("reduce_scatter", x) for x in clones], in_memory("reduce_scatter", output)
        sizes = _sizes(pieces)
        call = self._call("reduce_scatter", (0, *_reduction(opts, output, given), sizes))
        return self._run(call, pieces, opts, [output])

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any = None, **given: Any) -> Any:
        self._check_numel("reduce_scatter_tensor", "input", x, output.numel() * len(self.place.group))
        x = _rows(x) if x.dim() and x.shape[0] % len(self.place.group) == 0 else flat(x)
        sizes = (x.shape[0] // len(self.place.group),) * len(self.place.group)
        call = self._call("reduce_scatter", (0, *_reduction(opts, x, given), sizes))
        return self._run(call, x, opts, [output])

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return self._together([self.reduce_scatter_single(output, x, _Started(opts)) for output, x in pairs], opts)

    def all_to_all_single(
        self,
        output: Tensor,
        x: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
        **_: Any,
    ) -> Any:
        check_contiguous("all_to_all_single", x)
        num, output = len(self.place.group), in_memory("all_to_all_single", output)
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
        return self._run(call, _rows(x), opts, [output])

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None, **_: Any) -> Any:
        for tensors in (outputs, inputs):
            self._check_count("all_to_all", tensors)
        call = self._call("all_to_all", (), _sizes(inputs), _sizes(outputs))
        return self._run(call, inputs, opts, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **given: Any) -> Any:
        (x,) = several(inputs)
        places = outputs[0] if outputs and not isinstance(outputs[0], Tensor) else outputs
        root = self._root(opts, given)
        is_root = root == self.place.index
        if is_root:
            self._check_count("gather", places)
        call = self._call("gather", (root,), None, _sizes(places) if is_root else ())
        return self._run(call, flat(x), opts, places if is_root else [], is_root)

    def gather_single(self, output: Tensor, x: Tensor, opts: Any = None, **given: Any) -> Any:
        root, num = self._root(opts, given), len(self.place.group)
        is_root = root == self.place.index
        if is_root:
            self._check_numel("gather_single", "output", output, x.numel() * num)
        call = self._call("gather", (root,), None, (x.numel(),) * num if is_root else ())
        return self._run(call, flat(x), opts, [output] if is_root else [], is_root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **given: Any) -> Any:
        output, root = in_memory("scatter", several(outputs)[0]), self._root(opts, given)
        if root == self.place.index:
            pieces = [in_memory("scatter", x) for x in (inputs[0] if not isinstance(inputs[0], Tensor) else inputs)]
            self._check_count("scatter", pieces)
            x, sizes = pieces, _sizes(pieces)
        else:
            x, sizes = output.new_empty(0), (0,) * len(self.place.group)
        return self._run(self._call("scatter", (root,), sizes), x, opts, [output])

    def barrier(self, opts: Any = None, **_: Any) -> Any:
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        return self._run(self._call("barrier", ()), nothing, opts, [], False)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. The error for a deadlock names a rank that never arrives."""
        self.barrier(_Finished)

    # --- helpers -------------------------------------------------------------------------------------------------

    def _call(
        self,
        op: str,
        params: tuple[Any, ...],
        splits: tuple[int, ...] | None = None,
        takes: tuple[int, ...] | None = None,
    ) -> Call:
        key = op, params, splits, takes
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = Call(op, self.label, self.place, params, None, splits, takes)
        return call

    def _message(self, op: str, other: int, tag: int) -> Call:
        key = op, other, tag
        call = self._messages.get(key)
        if call is None:
            name, position = f"{self.name_} message {tag}", self._position(other)
            call = self._messages[key] = message(op, self.label, self.place, position, name=name)
        return call

    def _deal(self, op: str, places: Sequence[Tensor], y: Tensor) -> None:
        """Write what has arrived into one tensor, or into one per rank."""
        if len(places) == 1:
            self._check_numel(op, "output", places[0], y.numel())
            _write(places[0], y)
            return
        for place, piece in zip(places, y.split(list(_sizes(places))), strict=True):
            _write(place, piece)

    def _root(self, opts: Any, given: dict[str, Any]) -> int:
        """The position of the rank that all data comes from, or goes to."""
        return self._position(int(given["root"] if opts is None else opts.rootRank))

    def _position(self, rank: int) -> int:
        if not 0 <= rank < len(self.place.group):
            raise ValueError(f"rank {rank} of {self.label!r}, which has {len(self.place.group)} ranks, does not exist")
        return rank

    def _check_numel(self, op: str, name: str, x: Tensor, expected: int) -> None:
        if x.numel() != expected:
            raise ShapeError(
                f"{op} over {self.label!r} ({len(self.place.group)} ranks): the {name} on rank {self.world_rank} is "
                f"{list(x.shape)}, {x.numel()} elements; it must have {expected}"
            )

    def _check_count(self, op: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != len(self.place.group):
            raise ShapeError(
                f"{op} over {self.label!r}: the list on rank {self.world_rank} has {len(tensors)} tensors; it needs "
                f"one for each of the {len(self.place.group)} ranks"
            )


# Other names that torch has or had for the same methods.
Asked._allgather_base = Asked.all_gather_single  # type: ignore[attr-defined]
Asked.allgather_into_tensor_coalesced = Asked.all_gather_single_coalesced  # type: ignore[attr-defined]
Asked._reduce_scatter_base = Asked.reduce_scatter_single  # type: ignore[attr-defined]
Asked.reduce_scatter_tensor_coalesced = Asked.reduce_scatter_single_coalesced  # type: ignore[attr-defined]
Asked.gather_into_tensor = Asked.gather_single  # type: ignore[attr-defined]
Asked.alltoall_base = Asked.all_to_all_single  # type: ignore[attr-defined]


class Method(NamedTuple):
    """A method of a process group: the operation of `torch.ops.c10d` that torch dispatches for it, gloo's name for it
    in a profile ("": none), and the position of its inputs among the arguments."""

    operation: str
    title: str
    inputs: int = 1


_METHODS = {
    "allreduce": Method("allreduce_", "all_reduce", 0),
    "allreduce_coalesced": Method("allreduce_coalesced_", "all_reduce", 0),
    "reduce": Method("reduce_", "reduce", 0), "broadcast": Method("broadcast_", "broadcast", 0),
    "allgather": Method("allgather_", "all_gather"), "all_gather_single": Method("_allgather_base_", "all_gather"),
    "allgather_coalesced": Method("allgather_coalesced_", "all_gather"),
    "all_gather_single_coalesced": Method("allgather_into_tensor_coalesced_", "all_gather"),
    "reduce_scatter": Method("reduce_scatter_", "reduce_scatter"),
    "reduce_scatter_single": Method("_reduce_scatter_base_", "reduce_scatter"),
    "reduce_scatter_single_coalesced": Method("reduce_scatter_tensor_coalesced_", "reduce_scatter"),
    "all_to_all_single": Method("alltoall_base_", "all_to_all"), "alltoall": Method("alltoall_", "all_to_all"),
    "gather": Method("gather_", "gather"), "gather_single": Method("gather_into_tensor_", "gather_single"),
    "scatter": Method("scatter_", "scatter"), "barrier": Method("barrier", "barrier", 9),
    "monitored_barrier": Method("monitored_barrier_", ""), "send": Method("send", "send", 0),
    "recv": Method("recv_", "recv", 0), "recv_anysource": Method("recv_any_source_", "recvAnySource", 0),
}  # fmt: skip


def methods_of(group: type) -> dict[str, tuple[Any, Method]]:
    """The methods that torch calls on process groups of this class, by each of torch's names for them."""
    known = {getattr(group, name): about for name, about in _METHODS.items()}
    functions = {name: method for name in dir(group) if isinstance(method := getattr(group, name), FunctionType)}
    return {name: (method, known[method]) for name, method in functions.items() if method in known}


class _Started:
    """The options of a collective that is only started: those of the whole that it is part of."""

    asyncOp = True

    def __init__(self, opts: Any):
        self.reduceOp = getattr(opts, "reduceOp", ReduceOp.SUM)


class _Finished:
    asyncOp = False


_REDUCTIONS = {
    "SUM": "sum", "PREMUL_SUM": "sum", "AVG": "mean", "PRODUCT": "product", "MIN": "min", "MAX": "max",
    "BAND": "and", "BOR": "or", "BXOR": "xor",
}  # fmt: skip


def _reduction(opts: Any, x: Tensor, given: dict[str, Any]) -> tuple[str]:
    """tplab's name for the reduction."""
    op = given.get("op", ReduceOp.SUM) if opts is None else getattr(opts, "reduceOp", opts)
    kind = getattr(op, "op", op).name  # torch passes an object with the kind, or the kind
    name = _REDUCTIONS[kind]
    if name in ("and", "or", "xor") and (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"a bitwise {name} needs whole numbers or booleans, not {x.dtype}")
    if name == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"ReduceOp.AVG of {x.dtype} would not be whole numbers; convert to a floating-point type first")
    return (name,)


def factor_of(opts: Any) -> Any:
    """The factor that `ReduceOp.PREMUL_SUM` applies before it adds up; None for other reductions."""
    op = getattr(opts, "reduceOp", None)
    return premul_factor(op) if getattr(op, "op", None) == ReduceOp.PREMUL_SUM else None


def several(tensors: Any) -> Sequence[Tensor]:
    """The tensors as a list; torch passes a list of them or just one."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def flat(x: Tensor) -> Tensor:
    return x.detach().reshape(-1)


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() else x.detach().reshape(1)


def _sizes(pieces: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(piece.numel() for piece in pieces)


def _write(output: Tensor, y: Tensor) -> None:
    """Write a result where the program wants it. Autograd does not see the write, as with any other process group."""
    if num_modes():
        with no_dispatch():
            _copy(output, y)
    else:
        _copy(output, y)


def _copy(output: Tensor, y: Tensor) -> None:
    if y.dtype != output.dtype:
        raise TypeError(f"the result is {y.dtype}, and the tensor for it is {output.dtype}; use one dtype for both")
    output.data.copy_(y if y.shape == output.shape else y.view(output.shape))
    if (rank := current_rank_or_none()) is not None and rank.types is not None:
        rank.types.carried(y, output)


# --- tensors that are not contiguous, as gloo treats them -------------------------------------------------------------


def in_memory(op: str, x: Tensor, elementwise: bool = False) -> Tensor:
    """x as gloo reads and writes it in this collective: its number of elements, in the order of memory, whatever the
    strides. Warns if the program's order may differ.

    elementwise   whether the order makes no difference, as long as it is the same on all ranks
    Raises ShapeError if the memory ends before the last element.
    """
    if x.layout is not torch.strided or x.is_contiguous():
        return x
    rank, strides = current_rank_or_none(), torch.empty(x.shape, device="meta").stride()
    about = f"{op}: the elements of a tensor {list(x.shape)} with strides {x.stride()} are not in the order of memory"
    if (x.storage_offset() + x.numel()) * x.element_size() > x.untyped_storage().nbytes():
        raise ShapeError(f"{about}, which ends before the last one; pass x.contiguous()")
    if rank is not None and not (elementwise and fills_its_memory(x)):
        rank.lines.warning(f"{about}. gloo uses the order of memory, nccl refuses the tensor; pass x.contiguous()")()
    with no_dispatch():
        return x.detach().as_strided(x.shape, strides)


def check_contiguous(op: str, x: Tensor) -> None:
    """Raise ValueError for a tensor that gloo refuses."""
    if x.layout is torch.strided and not x.is_contiguous():
        raise ValueError(
            f"{op}: a tensor {list(x.shape)} with strides {x.stride()} is not contiguous, and gloo refuses it; send "
            "x.contiguous(), and receive into a contiguous tensor"
        )


def fills_its_memory(x: Tensor) -> bool:
    """Whether there are no gaps in memory between its first element and its last."""
    expected = 1
    for size, stride in sorted(zip(x.shape, x.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
