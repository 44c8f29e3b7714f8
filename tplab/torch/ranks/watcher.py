"""Who is told what a thread does: one dispatch mode for everybody who listens, and none while nobody does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from tplab.torch.private import (
    DispatchMode,
    HigherOrder,
    dispatch_modes,
    graph_task,
    num_modes,
    parts_of,
    pop_mode,
    push_mode,
)
from tplab.torch.ranks.attention import ATTENTION, attention
from tplab.torch.ranks.rank import this_rank


class Listener:
    """Somebody who is told of a thread's operations and collectives. Each kind of listener has some of these methods.

    follows_threads   whether it is also told of what threads do that a rank's program starts
    """

    follows_threads = False

    def starts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation is about to run. `ended` gets what this returns."""

    def ended(self, func: Any, args: Any, kwargs: Any, result: Any, note: Any) -> None:
        """An operation has run."""

    def wraps(self, args: Any, kwargs: Any) -> None:
        """An operation is on tensors that hold others, such as DTensors. What it does to those will be told."""

    def takes_whole(self, func: HigherOrder, args: Any) -> bool:
        """Whether an operation that takes functions, such as flex_attention, is one operation for this listener."""
        return True

    def begins(self) -> Any:
        """A collective has begun. `met` gets what this returns."""

    def met(self, call: Any, x: Tensor, y: Tensor, note: Any) -> None:
        """The collective `call`, which is no operation of torch, has made y of x."""

    def ends_with(self, result: Any) -> None:
        """The program is about to return this."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """This memory has another size, which no operation has given it."""


class Watched:
    """A rank's program `fn` with a listener, which `kind` makes of the rank, `fn` and its arguments. It returns (what
    the program returns, what the listener has `heard`)."""

    def __init__(self, fn: Callable[..., Any], kind: Callable[..., Any]):
        self.fn, self.kind = fn, kind
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *args: Any) -> tuple[Any, Any]:
        with self.kind(this_rank(), self.fn, args) as listener:
            result = self.fn(*args)
            listener.ends_with(result)
        return result, listener.heard


Kind = TypeVar("Kind", bound=Listener)


class Watcher(DispatchMode):
    """Tells `listeners` of the operations of one thread, in the order in which they came.

    It is in force while anybody listens, below all modes of the program, which may leave in any order. What a listener
    does meanwhile is not told. Nobody is told of operations on tensors without data, by which torch works out shapes.
    Compound operations, such as linear in inference mode, are told as what they consist of.

    It does not use `with`, which also counts in a variable of the whole process. That goes wrong if threads leave in a
    different order than they entered.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.listeners: tuple[Listener, ...] = ()
        self._noting: tuple[Listener, ...] = ()  # those that are told when an operation starts
        self._is_below = False  # below autograd: inside an operation that takes functions
        self._depth = 0  # the operations that this thread is in, during which torch takes this mode out of the stack

    def _listen(self, *listeners: Listener) -> None:
        self.listeners = listeners
        self._noting = tuple(one for one in listeners if type(one).starts is not Listener.starts)

    def add(self, listener: Listener) -> None:
        self._listen(*self.listeners, listener)
        if not self._depth and self not in dispatch_modes():
            above = [pop_mode(None) for _ in range(num_modes())]
            push_mode(self)
            _put_back(above)

    def remove(self, listener: Listener) -> None:
        """Tell this one no more. If nobody else listens, this mode leaves; not inside an operation or a backward pass,
        at whose end torch would put it back: then it leaves when this is called again."""
        if listener in self.listeners:
            self._listen(*(one for one in self.listeners if one is not listener))
        if self.listeners or not num_modes() or self._depth or graph_task() != -1 or self not in dispatch_modes():
            return
        above = []
        while (mode := pop_mode(None)) is not self:
            above.append(mode)
        _put_back(above)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(map(is_wrapper, types)):
            for one in self.listeners:
                one.wraps(args, kwargs)
            return NotImplemented  # operations on the tensors inside it come here again
        is_of_functions = not hasattr(func, "overloadpacket")  # a HigherOrder: asked so, as this is at every operation
        if not self.listeners or (not is_of_functions and types and any(map(is_fake, types))):
            return func(*args, **kwargs)
        self._depth += 1
        try:
            if is_of_functions:
                return self._of_functions(func, args, kwargs)
            if torch.is_inference_mode_enabled() or self._is_below:  # where compound operations come whole
                with self:
                    result = attention(*args, **kwargs) if func is ATTENTION else func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            listeners, noting = self.listeners, self._noting
            notes = {one: one.starts(func, args, kwargs) for one in noting} if noting else {}
            result = func(*args, **kwargs)
            for one in listeners:
                one.ended(func, args, kwargs, result, notes.get(one))
            return result
        finally:
            self._depth -= 1

    def _of_functions(self, func: HigherOrder, args: Any, kwargs: Any) -> Any:
        """Such an operation is one for those who take it whole. The others are told of what it consists of."""
        listeners, before = self.listeners, self._is_below
        whole = {one: one.starts(func, args, kwargs) for one in listeners if one.takes_whole(func, args)}
        if len(whole) == len(listeners):
            result = func(*args, **kwargs)
        else:
            self._listen(*(one for one in listeners if one not in whole))
            self._is_below = True
            try:
                with self:
                    result = parts_of(func)(*args, **kwargs)
            finally:
                self._is_below = before
                self._listen(*listeners)
        for one, note in whole.items():
            one.ended(func, args, kwargs, result, note)
        return result


def _put_back(modes: list[Any]) -> None:
    for mode in reversed(modes):
        push_mode(mode)


@cache
def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class hold others, as DTensors do, and have no memory of their own."""
    return hasattr(kind, "__tensor_flatten__")


def is_fake(kind: type) -> bool:
    """Whether tensors of a class have no data, and are there to work out shapes."""
    return kind.__name__ == "FakeTensor"


# --- of the running thread -------------------------------------------------------------------------------------------

_thread = threading.local()


def watcher() -> Watcher:
    """The watcher of the running thread."""
    try:
        return _thread.watcher
    except AttributeError:
        _thread.watcher = Watcher()
        return _thread.watcher


def listening(kind: type[Kind]) -> Kind | None:
    """The first listener of this kind in the running thread."""
    if not num_modes():
        return None
    return next((one for one in watcher().listeners if isinstance(one, kind)), None)


Begun = dict[Listener, Any]
"""What each listener has noted as a collective began."""


def begins() -> Begun:
    """Tell listeners that a collective begins which is waited for later."""
    return {one: one.begins() for one in watcher().listeners}


def met(call: Any, x: Tensor, y: Tensor, begun: Begun | None = None) -> None:
    """Tell listeners that the collective `call` has made y of x."""
    for one in watcher().listeners:
        one.met(call, x, y, begun.get(one) if begun else None)


_resize: Callable[..., Any] = torch.UntypedStorage.resize_


def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
    """`torch.UntypedStorage.resize_`, by which FSDP frees whole parameters and makes them again. It is no operation."""
    result = _resize(storage, num_bytes)
    for one in watcher().listeners:
        one.resized(storage)
    return result
