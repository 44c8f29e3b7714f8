"""Find the library functions that a learner's function uses, from its bytecode."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any

LIBRARIES = ("tplab", "torch", "jax", "optax", "flax")


def library_call(fn: Callable[..., Any], names: tuple[str, ...], libraries: tuple[str, ...] = LIBRARIES) -> str:
    """The first of these names that `fn`, or another function that it uses, takes from a library; "" if none. The
    learner's own functions with such a name do not count."""
    if _library(fn) in libraries and getattr(fn, "__name__", "") in names:
        return str(fn.__name__)
    found = ((value.__name__, _library(value)) for value in _used(fn, set()) if hasattr(value, "__name__"))
    return next((name for name, library in found if name in names and library in libraries), "")


def _used(fn: Any, met: set[CodeType]) -> Iterator[Any]:
    """The library objects that a function's code mentions, and those of the learner's functions that it uses."""
    if not isinstance(fn, FunctionType) or fn.__code__ in met:
        return
    closure = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False))
    known = {**fn.__globals__, **{name: cell.cell_contents for name, cell in closure.items() if _is_full(cell)}}
    for value in _mentioned(fn.__code__, known, met):
        if _library(value) in LIBRARIES:
            yield value
        elif isinstance(value, FunctionType):
            yield from _used(value, met)


def _mentioned(code: CodeType, known: dict[str, Any], met: set[CodeType]) -> Iterator[Any]:
    """The objects that code mentions by a global name, as attributes of a module, or through its own imports."""
    met.add(code)
    value: Any = None
    module: Any = None  # of the current import
    names: Any = ()  # that it takes from the module: None in `import a.b as c`, which takes b from a
    for before, step in pairwise(dis.get_instructions(code)):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"):
            value = known.get(step.argval)
        elif step.opname == "IMPORT_FROM":
            value = getattr(module, step.argval, None)
            module = value if names is None else module
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            value = getattr(value, step.argval, None) if isinstance(value, ModuleType | type) else None
        elif step.opname == "IMPORT_NAME":
            names = before.argval
            value = module = sys.modules.get(step.argval.split(".")[0] if names is None else step.argval)
        elif step.opname in ("STORE_FAST", "STORE_DEREF", "STORE_NAME") and isinstance(value, ModuleType):
            known = {**known, step.argval: value}
        elif step.opname == "LOAD_FAST" and isinstance(known.get(step.argval), ModuleType):
            value = known[step.argval]
        elif step.opname != "CACHE":
            value = value if step.opname in ("PUSH_NULL", "RESUME", "SWAP", "POP_TOP") else None
        if value is not None:
            yield value
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _mentioned(inner, known, met)


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _library(value: Any) -> str:
    return str(getattr(value, "__module__", None) or "").split(".")[0]
