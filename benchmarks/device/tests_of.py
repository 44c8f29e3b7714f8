"""The project's own tests on the device, in a separate pytest: how many passed, and the errors of the others."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.device import process
from benchmarks.device.check import Figures, NotRun, Wrong

# fmt: off
PLAIN = (
    "-c", "/dev/null", "--rootdir", ".", "--import-mode=importlib", "-p", "no:cacheprovider", "-W", "default", "-q",
    "-o", "faulthandler_timeout=60", "-p", "benchmarks.device.plugin",
)
MIXED = (
    "on the same device", "at least two devices", "device type tensor to numpy", "is on cuda", "on cuda:0, but",
    "when checking argument", "attribute 'device'", "Expected a 'cpu' device", "Expected a 'cuda' device",
    "Cannot copy", "device(type=",
)
# fmt: on
"""Texts of errors in tests that mix their own tensors, on the CPU, with those of their ranks."""


def run(paths: Sequence[str], limit: float, *more: str, workers: int = 0, device: str | None = None) -> Figures:
    """Run the tests in these files. With `device`, ordinary tests run their ranks there.

    Raises Wrong if a test fails, unless it mixes devices, which only means that the test cannot run there.
    """
    if find_spec("pytest") is None or find_spec("hypothesis") is None:
        raise NotRun("pytest or hypothesis is not there")
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        told.touch()
        command = ["-m", "pytest", *PLAIN, "--told", str(told), *more, *paths]
        command += ["--ranks-on", device] if device else []
        command += ["-n", str(workers)] if workers and find_spec("xdist") is not None else []
        done = process.run(command, limit)
        lines = [json.loads(line) for line in told.read_text(encoding="utf8").splitlines()]
    return _judged(lines, done, bool(device))


def _judged(lines: list[dict[str, str]], done: process.Done, is_moved: bool) -> Figures:
    failed = [line for line in lines if line["outcome"] == "failed"]
    mixed = [line for line in failed if is_moved and any(words in line["said"] for words in MIXED)]
    wrong = [line for line in failed if line not in mixed]
    figures: dict[str, Any] = {outcome: sum(line["outcome"] == outcome for line in lines) for outcome in ("passed",)}
    figures |= {"failed": len(wrong)} | ({"mixed devices": len(mixed)} if is_moved else {})
    skipped = Counter(line["said"] for line in lines if line["outcome"] == "skipped")
    if skipped:
        figures["skipped"] = dict(skipped.most_common(4))
    if not figures["passed"] and not failed and skipped:
        raise NotRun("; ".join(list(skipped)[:2]))
    if done.code is None:
        figures["stopped"] = "its time was over"
    if wrong:
        kinds: dict[str, list[str]] = {}
        for line in wrong:
            kinds.setdefault(line["said"].split("\n")[0][:200], []).append(line["test"].removeprefix("tests/"))
        said = [f"{len(names)} x {text}\n    " + "\n    ".join(names[:4]) for text, names in kinds.items()]
        raise Wrong(f"{len(wrong)} tests failed:\n" + "\n".join(said), figures)
    if not figures["passed"]:
        raise Wrong(f"no test passed: {done.tail}", figures)
    return figures
