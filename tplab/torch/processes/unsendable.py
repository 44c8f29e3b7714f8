"""What cannot be sent to another process, and where in a program it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

from tplab.torch.processes.parcels import Parcel
from tplab.torch.ranks.watcher import Watched


@contextmanager
def explained(fn: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
    """Turns an error in pickling into a TypeError that names what cannot be sent."""
    try:
        yield
    except Exception as error:
        culprit = next((name for name, value in _parts(fn, args) if not _can_be_sent(value)), "the function")
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"on='processes' sends {name} to other processes, and {culprit} cannot be sent: {error};\n"
            f"make it inside {name}, so that every process has its own, or run on='simulated', where nothing is sent"
        ) from error


def _parts(fn: Callable[..., Any], args: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """What is sent with a function, by name: its arguments, and what it uses from its surroundings."""
    for place, arg in enumerate(args):
        yield f"argument {place}", arg
    fn = fn.fn if isinstance(fn, Watched) else fn
    if isinstance(fn, FunctionType):
        around = {name: fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__}
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            with suppress(ValueError):  # a variable that has no value yet
                around[name] = cell.cell_contents
        for name, value in around.items():
            yield f"the variable {name!r}", value


def _can_be_sent(value: Any) -> bool:
    try:
        Parcel(value).close()
    except Exception:
        return False
    return True
