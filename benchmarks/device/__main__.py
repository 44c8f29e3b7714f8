"""What only a GPU can show, within eight minutes: simulated ranks on cuda, a recorded run, the clock beside the chip.

    python -m benchmarks.device --out device.json       on a machine with a GPU
    python -m benchmarks.device --device cpu --quick    try the command without one

Each item runs in a process of its own, and is started again if that process ends or hangs. The file is written whenever
a check is over, so whoever stops the command loses only the check that was running.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import date
from pathlib import Path
from threading import Event

from benchmarks.device import process
from benchmarks.device.check import Check, Log, Place, run, shortened
from benchmarks.device.report import Report

TOGETHER = (
    ("environment",),
    ("clock",),  # alone: nothing else may run while it measures
    ("jax_programs", "attention", "ranks", "nodes", "gpu_tests", "scripts", "recording", "suite"),
)
"""The items, in the order in which they start. Those of one line run at the same time."""
SHARE = {"environment": 0.15, "clock": 0.5}
"""The share of the whole time that an item may take. The last line has the rest."""
MOST_STARTS = 4
"""How often an item is started at most, if its process ends early."""
ITEMS = [item for line in TOGETHER for item in line]
RESULT = Path(__file__).parent / "measured.json"
"""The file that docs/clock.md shows."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument(
        "items", nargs="*", metavar="ITEM", help=f"what to run (all); the file keeps the others: {', '.join(ITEMS)}"
    )
    parser.add_argument(
        "--out", type=Path, help=f"the file to write ({RESULT.name} beside this one; on the CPU, device.json)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda, or cpu to try the command; what there is")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, and few of them")
    parser.add_argument("--minutes", type=float, default=8.0, help="the most that all may take (8)")
    parser.add_argument("--commit", default="", help="tplab's commit, for a copy that is no git repository")
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)  # one item, in this process
    given = parser.parse_args()
    if not given.log and (unknown := [item for item in given.items if item not in ITEMS]):
        parser.error(f"no item is named {', '.join(unknown)}; there are {', '.join(ITEMS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also stops what it has started
    device = given.device or ("cuda" if _has_gpu() else "cpu")
    out: Path = given.out or (RESULT if device == "cuda" else Path("device.json"))
    if not out.absolute().parent.is_dir():
        parser.error(f"--out {out}: there is no folder {out.parent}; create it first")
    place = Place(device, given.quick)
    if given.log:
        return 0 if _here(given.items[0], place, given.log) else 1
    wanted = given.items or ITEMS
    about = {"date": date.today().isoformat(), "commit": given.commit or _commit(), "device": device}
    report, halt = Report(out, about, ITEMS), Event()
    if given.items and out.exists():
        report.keep(out, wanted)
    report.write()
    began, whole = time.monotonic(), 60 * given.minutes
    with tempfile.TemporaryDirectory() as folder:
        for line in TOGETHER:
            items = [item for item in line if item in wanted]
            left = began + whole - time.monotonic() - 5
            share = max(SHARE.get(line[0], 1.0) * whole, 20) if given.items == [] else left
            end = time.monotonic() + min(left, share)
            with ThreadPoolExecutor(max(len(items), 1)) as pool:
                logs = [Log(item, Path(folder) / item) for item in items]
                running = [pool.submit(_to_its_end, log, place, report, end, halt) for log in logs]
                try:
                    wait(running)
                except BaseException:
                    halt.set()
                    raise
    report.write(seconds=round(time.monotonic() - began))
    _tell(report, out)
    return 0 if all(check.passed is not False for check in report.checks) else 1


def _here(item: str, place: Place, file: Path) -> bool:
    """Run the checks of an item in this process. Return False if the rest needs another process."""
    log = Log(item, file)
    try:
        name = item if "." in item else f"benchmarks.device.items.{item}"
        return run(importlib.import_module(name).tasks(place), log)
    except Exception as error:
        log.end(Check(item, "the item as a whole", False, shortened("".join(traceback.format_exception(error)))))
        return True


def _to_its_end(log: Log, place: Place, report: Report, end: float, halt: Event) -> None:
    """Run an item in its own processes, until all its checks or its time are over, or the command is stopped."""
    try:
        for _ in range(MOST_STARTS):
            if _started(log, place, report, end, halt) or time.monotonic() > end or halt.is_set():
                break
    except Exception as error:  # of this command itself
        log.end(Check(log.item, "the command", False, "".join(traceback.format_exception(error))))
    report.put(log.item, log.checks())
    print(f"{log.item}: over", file=sys.stderr, flush=True)


def _started(log: Log, place: Place, report: Report, end: float, halt: Event) -> bool:
    """Run one process of an item. Return whether all its checks are over."""
    command = ["-m", "benchmarks.device", log.item, "--log", str(log._file), "--device", place.device]
    with tempfile.TemporaryFile("w+", encoding="utf8", errors="replace") as errors:
        child = process.start([*command, *["--quick"] * place.quick], stdout=errors, stderr=errors)
        why = ""
        try:
            while not why:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(0.05 if halt.is_set() else min(0.5, max(0.05, end - time.monotonic())))
                    break
                report.put(log.item, log.checks())
                running = log.underway()
                if time.monotonic() > end or halt.is_set():
                    why = "the command was stopped" if halt.is_set() else "the time was over"
                elif running is not None and time.time() - running[2] > running[1]:
                    why = f"it took more than {running[1]:.0f} s"
        finally:
            if child.poll() is None:
                process.stop(child)
        errors.seek(0)
        said = errors.read()
    running = log.underway()
    if why and not why.startswith("it took"):
        what = running[0] if running is not None else "the rest"
        log.end(Check(log.item, what, None, f"not finished: {why}"))
        return False
    if running is not None:
        said = shortened(f"stopped: {why}" if why else f"its process ended with {child.returncode}: {said}", 1500)
        log.end(Check(log.item, running[0], False, said, {}, round(time.time() - running[2], 1)))
        return False
    if not log.checks() and child.returncode:
        log.end(Check(log.item, "the item as a whole", False, shortened(f"{why} {child.returncode}: {said}", 1500)))
    return child.returncode == 0


def _tell(report: Report, out: Path) -> None:
    for check in report.checks:
        state = {True: "passed", False: "FAILED", None: "not run"}[check.passed]
        last = (check.said.strip().splitlines() or [""])[-1]
        print(f"{state:8}{check.seconds:6.1f} s  {check.item}: {check.what}{': ' + last[:160] if last else ''}")
    failed = sum(check.passed is False for check in report.checks)
    print(f"{len(report.checks)} checks, {failed} failed; written to {out}")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _commit() -> str:
    """The commit, and whether there are uncommitted changes; "unknown" without a repository."""
    command = ["git", "describe", "--always", "--dirty=, with changes", "--exclude", "*"]
    try:
        return subprocess.run(command, cwd=process.ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
