"""Spare memory: what has been freed, and the C library keeps for later.

XLA's compiler needs some 0.3 GB for seconds, and the thread of each rank has a heap of its own. A kernel would hold all
of that from then on, on machines that have 1 or 2 GB.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WORTH_RETURNING = 64_000_000
"""Bytes by which a process must have grown. To look through its heaps takes 10 ms or so."""


@contextmanager
def returned() -> Iterator[None]:
    """If the process grows inside, the system gets back what is spare afterwards. Without glibc nothing happens."""
    before = resident_bytes()
    try:
        yield
    finally:
        if resident_bytes() - before >= WORTH_RETURNING:
            give_back()


def give_back() -> None:
    """Return all spare memory of this process to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """The memory of this process; 0 where the system does not say, which Linux does."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
