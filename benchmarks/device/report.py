"""The file that a run writes: about the machine, and one line per check."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.device.check import Check, shortened

MOST_BYTES = 60_000


def text_of(about: Mapping[str, Any], checks: Iterable[Check]) -> str:
    """JSON of at most 60 kB; long errors are shortened if necessary."""
    rows = [asdict(check) for check in checks]
    for most in (2500, 1200, 600, 300, 100):
        for row in rows:
            row["said"] = shortened(row["said"], most)
        lines = ",\n".join(json.dumps(row, separators=(", ", ": ")) for row in rows)
        text = f'{{\n"about": {json.dumps(about)},\n"checks": [\n{lines}\n]\n}}\n'
        if len(text.encode()) <= MOST_BYTES:
            break
    return text


def read(file: Path) -> tuple[dict[str, Any], list[Check]]:
    """Parse the output of `text_of`: (about the machine, the checks)."""
    whole = json.loads(file.read_text(encoding="utf8"))
    return whole["about"], [Check(**row) for row in whole["checks"]]


class Report:
    """The file, rewritten whenever an item has more checks."""

    def __init__(self, file: Path, about: Mapping[str, Any], order: Iterable[str]):
        self._file, self._about, self._lock = file, dict(about), Lock()
        self._items: dict[str, list[Check]] = {item: [] for item in order}

    def keep(self, file: Path, again: Iterable[str]) -> None:
        """Keep the results of an earlier run, except for the items that are run again."""
        about, checks = read(file)
        if about["commit"] != self._about["commit"]:
            self._about["commit"] = f"{about['commit']} ({', '.join(again)}: {self._about['commit']})"
        self._about = about | self._about
        for item in self._items.keys() - set(again):
            self._items[item] = [check for check in checks if check.item == item]

    @property
    def checks(self) -> list[Check]:
        return [check for checks in self._items.values() for check in checks]

    def put(self, item: str, checks: list[Check]) -> None:
        """Set an item's checks so far. The figures of "environment" are about the machine."""
        if checks == self._items[item]:
            return
        self._items[item] = checks
        about = checks if item == "environment" else []
        self.write(**{name: value for check in about for name, value in check.figures.items()})

    def write(self, **about: Any) -> None:
        """Rewrite the file, with more about the machine or the run."""
        with self._lock:
            self._about |= about
            beside = self._file.with_name(f"{self._file.name}.part")
            beside.write_text(text_of(self._about, self.checks), encoding="utf8")
            os.replace(beside, self._file)
