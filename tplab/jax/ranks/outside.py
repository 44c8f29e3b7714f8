"""What a function reads from outside itself: globals and closures, whose values a compiled program has built in.

`jax.jit` never looks again, and a notebook is made of globals that change. So `run` compares these values at every
call, and compiles anew where one is another object than before.
"""

from __future__ import annotations

import dis
import functools
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_MOST = 1000  # values looked at; beyond it a large container counts as one


class Outside:
    """The values that `fn` read from outside when this was made. They are not kept alive by it, where that can be.

    Looked at are the globals and closure of `fn`, of the functions of its own module that it calls, and the items of
    lists, tuples, dicts and sets. Numbers and strings are compared by value, all else by identity: an array that is
    changed in place is not noticed (pass it as an argument), nor is an attribute of an object.
    """

    def __init__(self, fn: Callable[..., Any]):
        self._values = [_weakly(value) for value in _read_by(fn)]

    def unchanged(self, fn: Callable[..., Any]) -> bool:
        """Whether `fn` would read the same values now."""
        now = list(_read_by(fn))
        return len(now) == len(self._values) and all(map(_same, self._values, now))


class _Strong:
    """As a weak reference is called, for what cannot have one."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __call__(self) -> Any:
        return self.value


def _weakly(value: Any) -> Callable[[], Any]:
    if isinstance(value, _PLAIN):
        return _Strong(value)
    try:
        return weakref.ref(value)
    except TypeError:
        return _Strong(value)


def _same(before: Callable[[], Any], now: Any) -> bool:
    value = before()
    return value is now or (type(value) is type(now) and isinstance(now, _PLAIN) and value == now)


_EMPTY = type("_Empty", (), {})()  # a name that has no value yet


def _read_by(fn: Callable[..., Any]) -> Iterator[Any]:
    """Every value, in an order that depends on the program's text alone."""
    seen: set[int] = set()
    pending: list[Any] = [fn]
    if not isinstance(fn, FunctionType | MethodType | functools.partial):
        pending.append(vars(type(fn)).get("__call__"))  # of an object that can be called
    module: dict[str, Any] | None = None
    while pending and len(seen) < _MOST:
        value = pending.pop()
        if isinstance(value, MethodType):
            pending += [value.__self__, value.__func__]
            continue
        if isinstance(value, functools.partial):
            pending += [value.func, value.args, value.keywords]
            continue
        if isinstance(value, FunctionType):
            module = value.__globals__ if module is None else module
            yield value
            if id(value) not in seen and value.__globals__ is module:
                seen.add(id(value))
                pending += [module.get(name, _EMPTY) for name in _global_names(value.__code__)]
                pending += [_contents(cell) for cell in value.__closure__ or ()]
        elif isinstance(value, list | tuple | set | frozenset | dict):
            if id(value) not in seen:
                seen.add(id(value))
                yield len(value)
                pending += [*value, *value.values()] if isinstance(value, dict) else value
        else:
            yield value


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


@functools.lru_cache(maxsize=4096)
def _global_names(code: CodeType) -> tuple[str, ...]:
    """The globals that a function's code reads, and that of the functions defined in it."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(_global_names(constant))
    return tuple(sorted(names))
