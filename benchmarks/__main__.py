"""Print the table of figures: every row measured now, on this machine, each in a process of its own."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path

from benchmarks import rows
from benchmarks.against import checkout, compare, is_fine, ratios
from benchmarks.figures import written
from benchmarks.table import Row, machine, markdown

ROOT = Path(__file__).parent.parent
# The order in the table of figures. A new file in rows/ comes last until it is added here.
ORDER = [
    "torch_hops",
    "torch_scale",
    "mlp_torch",
    "mlp_jax",
    "gpt_torch",
    "gpt_jax",
    "zero_torch",
    "classifier_jax",
    "schedules",
    "pipeline_jax",
    "train",
    "jax_in_flight",
    "hidden_communication",
    "import_time",
    "first_animation",
    "widget_bytes",
    "labs",
]
LIMIT_SECONDS = 600


def names() -> list[str]:
    """The names of all rows: the files of rows/."""
    found = {module.name for module in pkgutil.iter_modules(rows.__path__)}
    return [name for name in ORDER if name in found] + sorted(found - set(ORDER))


def measure(name: str, root: Path = ROOT) -> list[Row]:
    """Run one row in a fresh process, with the tplab of the checkout `root`. If it fails, the row has the error."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks", "--into", str(result), name]
        environ = {**os.environ, "PYTHONPATH": str(root)}  # also for the processes and kernels that a row starts
        try:
            done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return [Row(name, "", f"not finished after {LIMIT_SECONDS} s", ok=False)]
        if result.exists():
            return [Row(**row) for row in json.loads(result.read_text())]
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(done.stderr, file=sys.stderr)
        return [Row(name, "", f"failed (exit status {done.returncode}): {last}", ok=False)]


def timed(name: str, root: Path = ROOT) -> list[Row]:
    """The same, and report on stderr how long it took."""
    start = time.perf_counter()
    print(f"{name}{'' if root == ROOT else f' on {root.name}'} ...", end=" ", file=sys.stderr, flush=True)
    found = measure(name, root)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"rows to measure (all): {', '.join(names())}")
    parser.add_argument(
        "--against", metavar="REV", help="measure them on that commit too, in turns, and print the ratio"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="with --against: turns of each side (3)")
    parser.add_argument("--write", action="store_true", help="write the rows into docs/figures.md")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # one row, in this process, as JSON
    wanted = parser.parse_args()
    unknown = [name for name in wanted.names if name not in names()]
    if unknown:
        parser.error(f"no row is named {', '.join(unknown)}; there are {', '.join(names())}")
    if wanted.against and wanted.write:
        parser.error("--write is for figures of this tree alone; leave --against out")
    if wanted.into:
        found = [row for name in wanted.names for row in importlib.import_module(f"benchmarks.rows.{name}").measure()]
        wanted.into.write_text(json.dumps([asdict(row) for row in found]))
        return 0
    rows_wanted = wanted.names or names()
    if wanted.against:
        try:
            before = checkout(wanted.against, ROOT)
        except ValueError as error:
            parser.error(str(error))
        pairs = compare(rows_wanted, before, ROOT, timed, wanted.rounds)
        print(f"Measured on {machine()}; load {os.getloadavg()[0]:.1f} at the end.\n")
        print(ratios(pairs))
        return 0 if all(is_fine(*pair) for pair in pairs) else 1
    table = [row for name in rows_wanted for row in timed(name)]
    print(f"Measured on {machine()}; load {os.getloadavg()[0]:.1f} at the end.\n")
    print(markdown(table))
    if wanted.write:
        page = ROOT / "docs" / "figures.md"
        about = f"Measured on {machine()}, {date.today().isoformat()}, commit {_commit()}."
        text = written(page.read_text(encoding="utf8"), table, about, is_whole=not wanted.names)
        page.write_text(text, encoding="utf8")
        print(f"\n{page.relative_to(ROOT)} has these figures now")
    return 0 if all(row.ok for row in table) else 1


def _commit() -> str:
    """The commit that is measured, and whether there are uncommitted changes."""
    command = ["git", "describe", "--always", "--dirty=, with changes", "--exclude", "*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
