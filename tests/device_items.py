"""An item of benchmarks.device whose checks fail in every way."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from benchmarks.device.check import Figures, NotRun, Place, Task, Wrong


def tasks(place: Place) -> Iterator[Task]:
    yield Task("passes", lambda: {"device": place.device})
    yield Task("is wrong", wrong)
    yield Task("ends its process", lambda: os._exit(7))
    yield Task("hangs", lambda: time.sleep(100), 1.0)
    yield Task("breaks CUDA", broken)
    yield Task("passes in another process", lambda: {"process": os.getpid()})
    yield Task("cannot be run", not_here)


def wrong() -> Figures:
    raise Wrong("off by 3", {"off by": 3})


def broken() -> Figures:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def not_here() -> Figures:
    raise NotRun("there is no GPU")
