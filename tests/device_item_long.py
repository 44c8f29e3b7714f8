"""An item of benchmarks.device whose only check does not end by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.device.check import Place, Task


def tasks(place: Place) -> Iterator[Task]:
    yield Task("takes an hour", lambda: time.sleep(3600))
