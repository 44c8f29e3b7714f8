"""Memory of a process: what was freed but is kept by the C library for later, and memory as a file.

XLA's compiler needs about 0.3 GB for some seconds, and the thread of each rank has its own heap. A notebook's kernel
would otherwise keep all of this, on machines that may have only 1 or 2 GB.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WORTH_RETURNING = 64_000_000
"""Memory is returned only if the process has grown by this many bytes: searching its heaps takes about 10 ms."""


@contextmanager
def returned() -> Iterator[None]:
    """If the process grows inside the block, return its spare memory to the system afterwards. Needs glibc; without it,
    nothing happens."""
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
    """The resident memory of this process in bytes; 0 if the system does not report it, as Linux does."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def scratch_file() -> int:
    """The descriptor of an unnamed file, in memory if the system supports that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tplab", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
