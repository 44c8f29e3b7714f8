"""The tests that need a GPU, one file after another."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.device import tests_of
from benchmarks.device.check import Place, Task

FILES = ("test_cuda", "test_sequence_attention", "test_train")


def tasks(place: Place) -> Iterator[Task]:
    for name in FILES:
        yield Task(f"tests/gpu/{name}.py", partial(tests_of.run, [f"tests/gpu/{name}.py"], 120), 135)
