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
from pathlib import Path

from benchmarks import rows
from benchmarks.table import Row, machine, markdown

ROOT = Path(__file__).parent.parent
# As the table of figures lists them; a new file in rows/ comes last until it is given a place here.
ORDER = [
    "torch_hops",
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
    """The rows there are: the files of rows/."""
    found = {module.name for module in pkgutil.iter_modules(rows.__path__)}
    return [name for name in ORDER if name in found] + sorted(found - set(ORDER))


def measure(name: str) -> list[Row]:
    """Run one row in a fresh process; where it fails, say so in its place in the table."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks", "--into", str(result), name]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return [Row(name, "", f"not finished after {LIMIT_SECONDS} s", ok=False)]
        if result.exists():
            return [Row(**row) for row in json.loads(result.read_text())]
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(done.stderr, file=sys.stderr)
        return [Row(name, "", f"failed (exit status {done.returncode}): {last}", ok=False)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"rows to measure (all): {', '.join(names())}")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # one row, in this process, as JSON
    wanted = parser.parse_args()
    unknown = [name for name in wanted.names if name not in names()]
    if unknown:
        parser.error(f"no row is named {', '.join(unknown)}; there are {', '.join(names())}")
    if wanted.into:
        found = [row for name in wanted.names for row in importlib.import_module(f"benchmarks.rows.{name}").measure()]
        wanted.into.write_text(json.dumps([asdict(row) for row in found]))
        return 0
    table: list[Row] = []
    for name in wanted.names or names():
        start = time.perf_counter()
        print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
        table += measure(name)
        print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(f"Measured on {machine()}; load {os.getloadavg()[0]:.1f} at the end.\n")
    print(markdown(table))
    return 0 if all(row.ok for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
