"""A gate: the part of a thread in which another thread may raise an exception."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident


class _Last(BaseException):
    """Replaces an exception that has not arrived yet, and is caught where the gate is closed."""


class Gate:
    """Open while a thread is in the program, and closed while it is in the code that runs the program, where an
    exception could separate two lines that belong together.

    The thread itself calls `open` and `close`. Once `close` has returned, nothing more is raised; while it runs, an
    exception raised before may still arrive.
    """

    def __init__(self) -> None:
        self._is_open = self._was_used = False
        self._thread = 0
        self._lock = Lock()

    def open(self) -> None:
        self._thread = get_ident()
        self._is_open = True

    def close(self) -> None:
        self._is_open = False
        with self._lock:  # a thread that has seen it open has raised by now
            if self._was_used:
                try:
                    _raise(self._thread, _Last)
                    while True:
                        pass  # until it arrives
                except _Last:
                    self._was_used = False

    def raise_through(self, kind: type[BaseException]) -> None:
        """Raise an exception in the thread, at the next line of Python that it reaches, unless the gate is closed."""
        with self._lock:
            if self._is_open:
                self._was_used = True
                _raise(self._thread, kind)


@contextmanager
def unheard(kind: type[BaseException]) -> Iterator[None]:
    """A context in which Python does not report exceptions of this kind that it drops, as in the callback of a weak
    reference. A dropped exception has to be raised again."""
    before = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, kind):
            before(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before


def _raise(thread: int, kind: type[BaseException]) -> None:
    """Make a thread raise an exception, which replaces one that it has not reached yet.

    It is never withdrawn: Python would then look for it between any two instructions, in all threads and forever, and
    Python 3.11 never gets past the first of them in a thread that is profiled.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
