"""The dispatch mode that reports a thread's operations to all its listeners; it is active only while it has some."""

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
    put_modes,
)
from tplab.torch.ranks.attention import ATTENTION, attention
from tplab.torch.ranks.rank import this_rank


class Listener:
    """Receives a thread's operations and collectives. Each kind of listener overrides some of these methods.

    follows_threads   whether it also receives those of threads that a rank's program starts
    """

    follows_threads = False

    def starts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Called before an operation. `ended` gets what this returns."""

    def ended(self, func: Any, args: Any, kwargs: Any, result: Any, note: Any) -> None:
        """Called after an operation."""

    def wraps(self, args: Any, kwargs: Any) -> None:
        """Called before an operation on tensors that wrap others, such as DTensors. Those on the inner ones follow."""

    def takes_whole(self, func: HigherOrder, args: Any) -> bool:
        """Whether an operation that takes functions, such as flex_attention, is one operation for this listener."""
        return True

    def begins(self) -> Any:
        """Called when a collective begins. `met` gets what this returns."""

    def met(self, call: Any, x: Tensor, y: Tensor, note: Any) -> None:
        """Called after the collective `call`, which is not a torch operation, has made y of x."""

    def ends_with(self, result: Any) -> None:
        """Called with the program's result before it returns."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Called when a storage has been resized without an operation."""


class Watched:
    """A rank's program `fn` with a listener: `kind(rank, fn, args)`. Returns (result, the listener's `heard`)."""

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
    """Reports the operations of one thread to `listeners`, in the order in which they ran.

    It is active while it has listeners, below all modes of the program, which may be popped in any order. The
    listeners' own operations are not reported, nor are operations on fake tensors, with which torch works out shapes.
    Compound operations, such as linear in inference mode, are reported as their parts.

    It is not pushed by `with`, which also counts in a variable of the process: wrong if threads leave in another order.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.listeners: tuple[Listener, ...] = ()
        self._noting: tuple[Listener, ...] = ()  # those that define `starts`
        self._is_below = False  # below autograd: inside an operation that takes functions
        self._depth = 0  # how many operations this thread is in; torch takes the mode off the stack during each

    def _listen(self, *listeners: Listener) -> None:
        self.listeners = listeners
        self._noting = tuple(one for one in listeners if type(one).starts is not Listener.starts)

    def add(self, listener: Listener) -> None:
        self._listen(*self.listeners, listener)
        if not self._depth and self not in dispatch_modes():
            put_modes([self, *dispatch_modes()])

    def remove(self, listener: Listener) -> None:
        """Remove a listener, and pop this mode if it was the last. Inside an operation or a backward pass, which would
        restore the mode at its end, the mode stays until this is called again."""
        if listener in self.listeners:
            self._listen(*(one for one in self.listeners if one is not listener))
        if self.listeners or not num_modes() or self._depth or graph_task() != -1 or self not in dispatch_modes():
            return
        put_modes([mode for mode in dispatch_modes() if mode is not self])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(map(is_wrapper, types)):
            for one in self.listeners:
                one.wraps(args, kwargs)
            return NotImplemented  # the operations on the inner tensors come here
        is_of_functions = not hasattr(func, "overloadpacket")  # a HigherOrder: tested so because it runs often
        if not self.listeners or (not is_of_functions and types and any(map(is_fake, types))):
            return func(*args, **kwargs)
        self._depth += 1
        try:
            if is_of_functions:
                return self._of_functions(func, args, kwargs)
            if torch.is_inference_mode_enabled() or self._is_below:  # compound operations arrive whole
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
        """Run an operation that takes functions: whole for listeners that take it so, else as its parts."""
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


@cache
def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class wrap others, as DTensors do, and have no memory of their own."""
    return hasattr(kind, "__tensor_flatten__")


def is_fake(kind: type) -> bool:
    """Whether tensors of a class have no data and only serve to work out shapes."""
    return kind.__name__ == "FakeTensor"


# --- of the running thread -------------------------------------------------------------------------------------------


class _Thread(threading.local):
    def __init__(self) -> None:
        self.watcher = Watcher()


_thread = _Thread()


def watcher() -> Watcher:
    """The watcher of the running thread."""
    return _thread.watcher


def listening(kind: type[Kind]) -> Kind | None:
    """The first listener of this kind in the running thread."""
    if not num_modes():
        return None
    return next((one for one in watcher().listeners if isinstance(one, kind)), None)


Begun = dict[Listener, Any]
"""What each listener returned when a collective began."""


def begins() -> Begun:
    """Report to listeners the beginning of a collective that is waited for later."""
    return {one: one.begins() for one in watcher().listeners}


def met(call: Any, x: Tensor, y: Tensor, begun: Begun | None = None) -> None:
    """Report to listeners that the collective `call` has made y of x."""
    for one in watcher().listeners:
        one.met(call, x, y, begun.get(one) if begun else None)


_resize: Callable[..., Any] = torch.UntypedStorage.resize_


def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
    """`torch.UntypedStorage.resize_`, reported to listeners: FSDP frees and restores whole parameters with it."""
    result = _resize(storage, num_bytes)
    for one in watcher().listeners:
        one.resized(storage)
    return result
