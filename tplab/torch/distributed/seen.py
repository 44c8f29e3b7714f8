"""Collectives as the program's own dispatch modes see them: `c10d::allreduce_` and the like, as with gloo.

A mode, such as CommDebugMode, sees the operations that torch dispatches. torch's own process groups dispatch each
collective as an operation of `torch.ops.c10d`. A group with Python methods does not, so here the modes are called one
after another, innermost first, each with the operation and its arguments in torch's form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from tplab.torch.distributed.asked import methods_of, several
from tplab.torch.private import DispatchMode, dispatch_modes, no_dispatch, num_modes, put_modes
from tplab.torch.ranks.rank import Lines
from tplab.torch.ranks.simulated import SimulatedRank

_Kind = TypeVar("_Kind", bound=type)

_GIVE_TENSORS = {"allreduce_", "broadcast_", "reduce_scatter_", "_reduce_scatter_base_", "alltoall_", "scatter_"}
"""Operations that return tensors; in torch they warn in a backward pass."""


def seen_by_modes(group: _Kind) -> _Kind:
    """Decorate a class of process groups: the program's dispatch modes see each of its methods."""
    made: dict[Any, Any] = {}
    for name, (method, about) in methods_of(group).items():
        setattr(group, name, made.setdefault(method, _seen(method, about.operation)))
    return group


def _seen(method: Callable[..., Any], operation: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if operation in _GIVE_TENSORS and torch.is_grad_enabled():
            for x in several(args[0]) if args else ():
                if x.requires_grad:
                    _warn_in_backward(x, operation, self.member.world.lines)
        if not num_modes():
            return method(self, *args, **kwargs)
        stack = dispatch_modes()
        if not any(map(_is_programs, stack)):
            return method(self, *args, **kwargs)
        op = getattr(torch.ops.c10d, operation).default
        with no_dispatch():
            given = list(_arguments(op, self, args, kwargs))
        found = _Call(op, lambda: method(self, *args, **kwargs), stack)
        member: SimulatedRank = self.member.here()
        with member.at_line():  # not at the line of a program's mode
            found.go_on(given)
        return found.result

    return call


def _warn_in_backward(x: Tensor, operation: str, lines: Lines) -> None:
    """Warn, as torch does for its own process groups, that the gradient of `x` ignores what the program sends here.
    Torch's warning points to the line of the backward pass; this one points to the collective's."""
    text = (
        f"c10d::{operation}: an autograd kernel was not registered, so a backward pass gives the gradient without this "
        "collective. torch.distributed.nn.functional has collectives with gradients; for a number that is only looked "
        "at, send x.detach()"
    )
    warn = lines.warning(text)
    vars(warn)["__torch_unserialize__"] = True  # torch's mark for a hook that need not be saved with its tensor
    x.register_hook(warn)


class _Call:
    """A collective on its way through the modes.

    result   what the group's method returned, once it has run
    """

    def __init__(self, op: Any, run: Callable[[], Any], stack: Sequence[Any]):
        self._op, self._run, self._stack = op, run, list(stack)
        self._outer = len(stack)  # the modes that have not been called are below this
        self.result: Any = None

    def go_on(self, args: Sequence[Any], kwargs: Any = None) -> Any:
        """Call the next mode outwards; after the last, run the collective. Returns the operation's result."""
        outer = self._outer
        while outer and not _is_programs(self._stack[outer - 1]):
            outer -= 1
        if not outer:
            with _modes([mode for mode in self._stack if not _is_programs(mode)]):
                self.result = self._run()
            return _returned(self._op, args, self.result)
        mode, before, self._outer = self._stack[outer - 1], self._outer, outer - 1
        try:
            with _modes(self._stack[: outer - 1]):
                result = mode.__torch_dispatch__(_stand_in(self._op, self.go_on), (), tuple(args), kwargs or {})
            return self.go_on(args, kwargs) if result is NotImplemented else result
        finally:
            self._outer = before


def _is_programs(mode: Any) -> bool:
    """Whether a mode is the program's: neither tplab's, nor one of those that torch builds others on."""
    return not isinstance(mode, DispatchMode) and getattr(mode, "_mode_key", None) is None


@contextmanager
def _modes(stack: Sequence[Any]) -> Iterator[None]:
    """A context with only these modes, innermost last."""
    before = dispatch_modes()
    put_modes(stack)
    try:
        yield
    finally:
        put_modes(before)


def _stand_in(op: Any, call: Callable[..., Any]) -> Any:
    """A stand-in for the operation `op` that does `call` when called. It equals `op`, and has its name and schema."""
    made = _stand_ins(type(op))()
    vars(made).update(vars(op), tplabs_op=op, tplabs_call=call)
    return made


@functools.cache
def _stand_ins(kind: type) -> type:
    """The class of stand-ins for operations of class `kind`."""
    own = {
        "__call__": lambda self, *args, **kwargs: self.tplabs_call(args, kwargs),
        "__eq__": lambda self, other: other is self.tplabs_op or other is self,
        "__hash__": lambda self: hash(self.tplabs_op),
        "__init__": lambda self: None,
    }
    return type(kind.__name__, (kind,), own)


# --- an operation's arguments and result ------------------------------------------------------------------------------


def _arguments(op: Any, group: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments in the order of the operation's schema, from those of the group's method."""
    positional = list(args)
    opts = next((value for value in (*args, *kwargs.values()) if hasattr(value, "asyncOp")), None)
    about = {
        "process_group": group.boxed(),
        "reduce_op": getattr(opts, "reduceOp", kwargs.get("op")),
        "sparse_indices": None,
        "async_op": bool(getattr(opts, "asyncOp", True)),
        "timeout": -1,
        "root_rank": getattr(opts, "rootRank", kwargs.get("root", 0)),
        "root_tensor": 0,
        "device_ids": [],
        "wait_all_ranks": False,
    }
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.name == "tensor":  # torch makes one to find the device
            yield torch.empty(int(op is torch.ops.c10d.barrier.default), dtype=torch.uint8, device="cpu")
        elif argument.name in about:
            yield about[argument.name]
        elif "Tensor" in kind:
            given = positional.pop(0) if positional else kwargs.get(argument.name)
            yield _nested(given, kind.count("List["))
        elif argument.name.endswith("split_sizes"):
            given = positional.pop(0) if positional and not hasattr(positional[0], "asyncOp") else None
            yield list(given or [])
        else:  # of a message: the other rank, or the tag
            yield positional.pop(0) if positional else kwargs.get(argument.name, 0)


def _nested(given: Any, depth: int) -> Any:
    """Tensors nested in lists to the depth that the schema requires."""
    if depth == 0:
        return given
    if isinstance(given, Tensor):
        return [_nested(given, depth - 1)]
    if depth == 2 and given and isinstance(given[0], Tensor):
        return [list(given)]
    return [_nested(one, depth - 1) for one in given or []]


def _returned(op: Any, args: Sequence[Any], work: Any) -> Any:
    """What the operation returns: the work, or its outputs and the work."""
    num = len(op._schema.returns)
    return work if num < 2 else (args[0], work)
