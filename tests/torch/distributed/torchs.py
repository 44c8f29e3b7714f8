"""`make torchs-tests`: PyTorch's own tests of torch.distributed, from torch's wheel, on three simulated ranks.

Each test of `torch.testing._internal.distributed.distributed_test` runs as PyTorch runs it with the backend gloo, with
its unchanged harness, in which a barrier polls files. Each rank imports its own copy of the module, as a process would,
since it is beside the script. The folder and the environment variables are those that PyTorch's runner makes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

SOURCE = "torch.testing._internal.distributed.distributed_test"
NUM_RANKS = 3
SECONDS = 60
PASSED, NEEDS_CUDA, NOT_HERE, FAILED = "passed", "needs CUDA", "not for three CPUs", "not passed"

SCRIPT = """\
import importlib.machinery, importlib.util, sys, types, unittest
if importlib.util.find_spec("expecttest") is None:  # torch's test cases inherit from its; these use nothing of it
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase
    sys.modules["expecttest"].__spec__ = importlib.machinery.ModuleSpec("expecttest", None)
import json, logging, multiprocessing, os, sys
from distributed_test import DistributedTest, TestDistBackend

class TestDistBackendWithSpawn(TestDistBackend, DistributedTest._DistTestBase):
    pass

class Skipped(logging.Handler):
    def emit(self, record):
        if "skipping test" in record.msg:
            said.append(str(record.args[-1]))

said = []
logging.getLogger("torch.testing._internal.common_distributed").addHandler(Skipped())
here, there = multiprocessing.Pipe()
code = None
try:
    name, folder = sys.argv[1:]
    TestDistBackendWithSpawn._run(int(os.environ["RANK"]), name, os.path.join(folder, "store"), there)
except SystemExit as end:
    code = end.code
    while here.poll():
        try:
            said.append(str(here.recv()))
        except EOFError:
            break
finally:
    with open(os.path.join(folder, "said" + os.environ["RANK"]), "w") as file:
        json.dump([code, said], file)
"""


class Outcome(NamedTuple):
    """The outcome of one test, and its reason."""

    name: str
    kind: str
    reason: str


def stand_in() -> None:
    """Replace `expecttest` if it is missing. torch's test cases inherit from its class, and these use nothing of it."""
    if find_spec("expecttest") is None:
        package = ModuleType("expecttest")
        vars(package)["TestCase"] = unittest.TestCase
        package.__spec__ = ModuleSpec("expecttest", None)
        sys.modules["expecttest"] = package


def names() -> list[str]:
    """All tests, as PyTorch's runner finds them."""
    os.environ.setdefault("BACKEND", "gloo")
    os.environ.setdefault("WORLD_SIZE", str(NUM_RANKS))
    stand_in()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.distributed.distributed_test import DistributedTest
    return sorted(name for name in dir(DistributedTest._DistTestBase) if name.startswith("test_"))


@contextmanager
def script() -> Iterator[Path]:
    """The script, in a folder with the module that it imports."""
    spec = find_spec(SOURCE)
    assert spec is not None and spec.origin is not None
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(spec.origin, folder)
        path = Path(folder) / "script.py"
        path.write_text(SCRIPT)
        yield path


def outcome(name: str, path: Path) -> Outcome:
    """Run one test."""
    from tplab.errors import TplabError
    from tplab.torch import launch

    kept = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(_variables(folder))
        error = ""
        try:
            launch(path, [name, folder], ranks=NUM_RANKS)
        except (TplabError, SystemExit) as failure:
            error = str(failure)
        finally:
            os.environ.clear()
            os.environ.update(kept)
        reports = _reports(folder)
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return judged(name, error, reports, {skip.exit_code: skip.message for skip in TEST_SKIPS.values()})


def _variables(folder: str) -> dict[str, str]:
    """The variables that PyTorch's runner sets, after making its folders."""
    for made in ("barrier", "test_dir", "init_dir"):
        (Path(folder) / made).mkdir()
    return {"BACKEND": "gloo", "TEMP_DIR": folder, "INIT_METHOD": f"file://{folder}/init_dir/shared_init_file"}


def _reports(folder: str) -> Sequence[tuple[int | None, list[str]]]:
    """Each rank's report: (its exit code, its messages)."""
    files = [Path(folder) / f"said{rank}" for rank in range(NUM_RANKS)]
    return [json.loads(file.read_text()) if file.exists() else (None, []) for file in files]


def judged(name: str, error: str, reports: Sequence[tuple[int | None, list[str]]], skips: Mapping[int, str]) -> Outcome:
    """The meaning of the ranks' exit codes in PyTorch's harness. `skips` are the codes of skipped tests."""
    codes, said = [code for code, _ in reports], [text for _, texts in reports for text in texts]
    if not error and set(codes) == {0}:
        return Outcome(name, PASSED, "")
    if set(codes) <= {*skips, 0, None} and (
        left_out := [skips[code] for code in codes if code is not None and code in skips]
    ):
        reason = "; ".join(dict.fromkeys(said or left_out))
        return Outcome(name, NEEDS_CUDA if re.search("(?i)cuda|gpu|nccl", reason) else NOT_HERE, reason)
    reason = "\n".join(dict.fromkeys([*said, error])).strip() or f"exit codes {codes}"
    kind = next((kind for pattern, kind in _OF_THIS_MACHINE.items() if re.search(pattern, reason)), FAILED)
    return Outcome(name, kind, reason)


_OF_THIS_MACHINE = {
    r"rank_to_GPU(.*\n)+IndexError: list index out of range": NEEDS_CUDA,
    r"NameError: name 'torchvision' is not defined": NOT_HERE,
    r"Rank 3 is out of range. Valid ranks are 0 to 2": NOT_HERE,
}
"""Errors of tests that also fail on three processes: they need GPUs, a package or a fourth rank without checking."""


# --- the command ------------------------------------------------------------------------------------------------------


def main(given: Sequence[str]) -> int:
    """Run the tests whose names contain one of the `given`, or all. The report distinguishes tests that end the process
    from tests that fail."""
    todo = [name for name in names() if not given or any(part in name for part in given)]
    found: list[Outcome] = []
    while todo:
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name if __spec__ else __name__, "--each", *todo]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                found.append(Outcome(**json.loads(line)))
                todo.remove(found[-1].name)
                print(f"{found[-1].kind:12} {found[-1].name}", flush=True)
        if child.wait() and todo:
            found.append(Outcome(todo.pop(0), FAILED, f"ended the process, with exit code {child.returncode}"))
            print(f"{FAILED:12} {found[-1].name}", flush=True)
    for kind in (NOT_HERE, FAILED):
        for name, _, reason in (one for one in found if one.kind == kind):
            print(f"\n{kind}: {name}\n    " + reason.replace("\n", "\n    "))
    counts = {kind: sum(one.kind == kind for one in found) for kind in (PASSED, NEEDS_CUDA, NOT_HERE, FAILED)}
    print("\n" + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int(counts[FAILED] > 0)


def _each(todo: Sequence[str]) -> None:
    """Run these tests one after another, and print the outcome of each. One that takes too long ends the process."""
    import faulthandler

    logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.INFO)
    stand_in()
    with script() as path:
        for name in todo:
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            print("\n" + json.dumps(outcome(name, path)._asdict()), flush=True)
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--each"]:
        _each(sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
