"""A check on the device: its name, its result, its figures, and how long it took."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.device.process import ROOT

Figures = dict[str, Any]
LIMIT = 60.0
"""Seconds that one check may take, unless its item sets another limit."""
MOST_SAID = 2500
"""Characters of an error that are kept, from its beginning and its end."""


class NotRun(Exception):
    """A check cannot be run here; the text says why."""


class Place(NamedTuple):
    """Where checks run.

    device   "cuda" or "cpu"
    quick    tiny sizes, and few of them, to try the command without a GPU
    """

    device: str
    quick: bool = False

    def need_gpu(self) -> None:
        if self.device != "cuda":
            raise NotRun("there is no GPU")


class Task(NamedTuple):
    """A check to run. `work` returns its figures, or raises if something is wrong.

    limit   seconds after which its process is stopped
    """

    what: str
    work: Callable[[], Figures | None]
    limit: float = LIMIT


@dataclass(frozen=True)
class Check:
    """A check that is over.

    passed   None: it was not run
    said     the error, or why it was not run
    """

    item: str
    what: str
    passed: bool | None
    said: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Log:
    """The checks of one item, in a file that is written line by line: a stopped process loses none."""

    def __init__(self, item: str, file: Path):
        self.item, self._file = item, file

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._file.open("a", encoding="utf8") as file:
            file.write(json.dumps(line) + "\n")

    def begin(self, task: Task) -> None:
        self._write({"begins": task.what, "limit": task.limit, "time": time.time()})

    def end(self, check: Check) -> None:
        self._write(asdict(check) | {"figures": rounded(dict(check.figures))})

    def _lines(self) -> list[dict[str, Any]]:
        text = self._file.read_text(encoding="utf8") if self._file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def checks(self) -> list[Check]:
        return [Check(**line) for line in self._lines() if "begins" not in line]

    def underway(self) -> tuple[str, float, float] | None:
        """The check that has begun and not ended: its name, its limit, and when it began. None between checks."""
        last = self._lines()[-1:]
        return (last[0]["begins"], last[0]["limit"], last[0]["time"]) if last and "begins" in last[0] else None


def run(tasks: Iterator[Task], log: Log) -> bool:
    """Run all tasks that the log does not have yet. Return False after a CUDA error: the rest needs another process."""
    done = {check.what for check in log.checks()}
    for task in tasks:
        if task.what in done:
            continue
        log.begin(task)
        began, passed, said, figures = time.perf_counter(), True, "", None
        try:
            figures = task.work()
        except NotRun as why:
            passed, said = None, str(why)
        except Exception as error:
            passed, said = False, shortened("".join(traceback.format_exception(error)).replace(f"{ROOT}/", ""))
            figures = getattr(error, "figures", None)
        log.end(Check(log.item, task.what, passed, said, figures or {}, round(time.perf_counter() - began, 2)))
        if "CUDA error" in said and "out of memory" not in said:
            return False
    return True


def rounded(value: Any) -> Any:
    """The value with every float in it rounded to four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


class Wrong(AssertionError):
    """A result is wrong; the figures show by how much."""

    def __init__(self, text: str, figures: Figures):
        super().__init__(text)
        self.figures = figures


def shortened(text: str, most: int = MOST_SAID) -> str:
    """The beginning and the end of a text that is too long, mostly the end. Paths are relative to the repository."""
    text = text.replace(f"{ROOT}{os.sep}", "")
    if len(text) <= most:
        return text
    return f"{text[: most // 4]}\n... {len(text) - most} characters left out ...\n{text[-3 * most // 4 :]}"
