"""A gate: the part of a thread in which another thread may raise an exception."""

from __future__ import annotations

import ctypes
from threading import Lock, get_ident


class Gate:
    """Is open while a thread is in the program, and closed while it is in what runs the program: there an exception
    could come between two lines that belong together.

    `open` and `close` are called by the thread itself. Once `close` has returned, nothing is raised any more; while it
    runs, what was raised before may still come.
    """

    def __init__(self) -> None:
        self._is_open, self._thread = False, 0
        self._lock = Lock()

    def open(self) -> None:
        self._thread = get_ident()
        self._is_open = True

    def close(self) -> None:
        self._is_open = False
        with self._lock:  # who has seen it open has raised by now
            _set_exception(self._thread, None)

    def raise_through(self, kind: type[BaseException]) -> None:
        """Raise an exception in the thread, at the next line of Python that it comes to; not where it is closed."""
        with self._lock:
            if self._is_open:
                _set_exception(self._thread, kind)


def _set_exception(thread: int, kind: type[BaseException] | None) -> None:
    """Give a thread an exception to raise; None takes back one that it has not come to yet."""
    given = ctypes.py_object() if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), given)
