"""`python -m benchmarks.device`, without a GPU: what its runner survives, what it writes, and its items in small."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from benchmarks.device import report, tests_of, timer
from benchmarks.device.__main__ import ITEMS, _started, _to_its_end
from benchmarks.device.check import Check, Log, NotRun, Place, Wrong, rounded, shortened
from benchmarks.device.items import clock
from benchmarks.device.modelled import modelled
from benchmarks.device.models import Block, SmallGPT, trained
from benchmarks.device.process import Done
from benchmarks.device.process import run as run_python
from website import device

CPU = Place("cpu", quick=True)
WRONG_ITEM = "tests.device_items"
LONG_ITEM = "tests.device_item_long"


def test_an_item_goes_on_after_what_goes_wrong(tmp_path: Path):
    log, written = Log(WRONG_ITEM, tmp_path / "log"), report.Report(tmp_path / "out.json", {}, [WRONG_ITEM])
    _to_its_end(log, CPU, written, time.monotonic() + 60, Event())
    _, checks = report.read(tmp_path / "out.json")
    assert [(check.what, check.passed) for check in checks] == [
        ("passes", True), ("is wrong", False), ("ends its process", False), ("hangs", False),
        ("breaks CUDA", False), ("passes in another process", True), ("cannot be run", None),
    ]  # fmt: skip
    said = {check.what: check.said for check in checks}
    assert "ended with 7" in said["ends its process"] and "more than 1 s" in said["hangs"]
    assert said["cannot be run"] == "there is no GPU" and said["is wrong"].endswith("off by 3\n")
    assert checks[0].figures == {"device": "cpu"} and checks[1].figures == {"off by": 3}


def test_an_item_whose_time_is_over_is_not_a_failure(tmp_path: Path):
    log, written = Log(LONG_ITEM, tmp_path / "log"), report.Report(tmp_path / "out.json", {}, [LONG_ITEM])
    halt = Event()
    assert not _started(log, CPU, written, time.monotonic(), halt)
    assert [(check.passed, check.said) for check in log.checks()][-1] == (None, "not finished: the time was over")
    halt.set()
    assert not _started(log, CPU, written, time.monotonic() + 60, halt)
    assert log.checks()[-1].said == "not finished: the command was stopped"


def test_the_file_stays_small_and_errors_keep_their_ends():
    checks = [Check("ranks", f"check {n}", False, "first line\n" + "x" * 9000 + "\nthe reason") for n in range(60)]
    text = report.text_of({"chip": "none"}, checks)
    assert len(text.encode()) <= report.MOST_BYTES
    rows = json.loads(text)["checks"]
    assert len(rows) == 60 and all(row["said"].endswith("the reason") for row in rows)
    assert shortened("short") == "short"
    assert shortened(f'File "{Path(report.__file__)}", line 3') == 'File "benchmarks/device/report.py", line 3'


def test_items_that_run_again_take_the_place_of_their_own(tmp_path: Path):
    file = tmp_path / "device.json"
    checks = [Check("ranks", "a", False), Check("clock", "b", True, figures={"off by": rounded(0.123456)})]
    file.write_text(report.text_of({"commit": "old", "chip": "A chip"}, checks), encoding="utf8")
    again = report.Report(file, {"commit": "new"}, ["clock", "ranks"])
    again.keep(file, ["ranks"])
    again.put("ranks", [Check("ranks", "a", True)])
    about, found = report.read(file)
    assert about == {"commit": "old (ranks: new)", "chip": "A chip"}
    assert [(check.what, check.passed) for check in found] == [("b", True), ("a", True)]
    assert found[0].figures == {"off by": 0.1235}


def test_a_command_that_hangs_is_stopped_with_what_it_has_started(tmp_path: Path):
    inner = f"import time, pathlib; time.sleep(4); pathlib.Path({str(tmp_path / 'late')!r}).touch()"
    code = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {inner!r}])"
    done = run_python(["-c", code], 3)
    assert done.code is None and done.out == "begun\n"
    time.sleep(2.5)
    assert not (tmp_path / "late").exists()


def test_tests_that_mix_devices_are_no_failures():
    lines = [
        {"test": "a", "outcome": "passed", "said": ""},
        {"test": "b", "outcome": "failed", "said": "RuntimeError: Expected all tensors to be on the same device"},
    ]
    assert tests_of._judged(lines, Done(1, "", ""), True) == {"passed": 1, "failed": 0, "mixed devices": 1}
    with pytest.raises(Wrong, match="1 tests failed") as wrong:
        tests_of._judged(lines, Done(1, "", ""), False)
    assert wrong.value.figures == {"passed": 1, "failed": 1}
    with pytest.raises(NotRun, match="sees no GPU"):
        tests_of._judged(
            [{"test": "a", "outcome": "skipped", "said": "torch sees no GPU here"}], Done(0, "", ""), False
        )
    with pytest.raises(Wrong, match="no test passed: exit status 4; usage"):
        tests_of._judged([], Done(4, "", "usage"), False)


def test_a_model_is_modelled_with_and_without_numbers():
    """The backward pass costs about twice the forward one."""
    for model, x in ((Block(64, 2), torch.randn(1, 32, 64)), (SmallGPT(96, 64, 2, 1), torch.arange(32).view(1, 32))):
        for place in ("cpu", "meta"):
            took = modelled(trained, (model, x), "h100", place)
            assert took.both > 0 and 1 < took.backward / took.forward < 4


def test_rows_of_the_clock_that_cannot_be_measured_are_told_with_the_others():
    def broken() -> list[object]:
        raise RuntimeError("no such kernel")

    with pytest.raises(Wrong, match=r"1 rows could not be measured[\s\S]*no such kernel") as wrong:
        clock._table(iter([broken, lambda: ["row", 1.0, 2.0, 3.0, 4.0, None]]), 5)
    assert wrong.value.figures["rows"] == [["row", 1.0, 2.0, 3.0, 4.0, None]]
    assert clock._table(iter([lambda: ["row"]] * 3), -1)["left_out"] == 3


def test_tests_on_a_device_see_the_lines_of_their_programs():
    """What the plugin does for them is no part of a program: a backward pass is where the program has it."""
    figures = tests_of.run(["tests/data/test_units_are_named.py"], 60, "-k", "in_torch and simulated", device="cpu")
    assert figures == {"passed": 1, "failed": 0, "mixed devices": 0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without GPUs")
def test_the_command_on_the_cpu(tmp_path: Path):
    out = tmp_path / "device.json"
    done = run_python(
        ["-m", "benchmarks.device", "environment", "clock", "--device", "cpu", "--quick", "--out", str(out)], 100
    )
    about, checks = report.read(out)
    assert done.code == 0, done.errors
    states = {check.what: check.passed for check in checks}
    assert states["versions"] and states["matmul, bfloat16"] and states["whole models, forward and backward"]
    assert states["chip"] is None and states["matmul, float8"] is None
    assert about["device"] == "cpu" and about["packages"]["torch"] and about["seconds"] >= 0
    page = device.section(out)
    assert "A machine without a GPU" in page and "| matmul, bfloat16 | 2 |" in page
    assert "clock, matmul, float8: not run. `there is no GPU`" in page


def test_the_page_shows_only_what_the_file_has(tmp_path: Path):
    assert "Not run yet" in device.section(tmp_path / "none.json")
    rows = [["1 x 2 x 3", 10e-6, 20e-6, 11e-6, 5e-6, None], ["4 x 5 x 6", 10e-6, 40e-6, 12e-6, 10e-6, None]]
    figures = {"forecast": "h100-measured", "sheet": "h100", "rows": rows}
    checks = [
        Check("clock", "matmul", True, "", figures, 1.0),
        Check("jax_programs", "run", False, "Traceback\n  here\nValueError: it is `wrong`\n", {}, 2.0),
        Check(
            "suite", "layers", False, "Traceback\nhere.Wrong: 1 tests failed:\n1 x assert 2\n    a.py::test", {}, 2.0
        ),
    ]
    about = {"date": "2026-01-02", "commit": "abc", "chip": "A chip", "driver": "5", "cuda": "13.0", "python": "3.12"}
    file = tmp_path / "device.json"
    file.write_text(report.text_of(about, checks), encoding="utf8")
    page = device.section(file)
    assert "### A chip\n\nDriver 5, CUDA 13.0, Python 3.12" in page and "2026-01-02, tplab abc" in page
    assert "| matmul | 2 | 15.0, 19 % | 25.0, 45 % | 3.0 x |" in page
    assert "| 1 x 2 x 3 | 10.0 | 20.0 | 11.0 | +10 % | 5.0 | -50 % |" in page
    assert "| jax programs | 0 | 1 | 0 | 2 s |" in page and "failed. `ValueError: it is 'wrong'`" in page
    assert "- suite, layers: failed. `1 tests failed: 1 x assert 2 a.py::test`" in page


def test_every_item_has_a_file():
    folder = Path(report.__file__).parent / "items"
    assert sorted(ITEMS) == sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__")


class FakeGpu:
    """torch.cuda, as far as the timer uses it: each call of `work` takes 2 us, and 50 us more if Python starts it."""

    def __init__(self) -> None:
        self.now, self.captured, self.is_capturing = 0.0, 0, False

    def work(self) -> None:
        self.captured += self.is_capturing
        self.now += 0 if self.is_capturing else 52e-6

    def replay(self) -> None:
        self.now += self.captured * 2e-6

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Moment:
            time = 0.0

            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                self.time = gpu.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Moment) -> float:
                return 1e3 * (end.time - self.time)

        @contextmanager
        def capture(graph: object) -> Iterator[None]:
            gpu.is_capturing = True
            yield
            gpu.is_capturing = False

        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "Event": Moment, "Stream": lambda: stream, "current_stream": lambda: stream, "synchronize": lambda: None,
            "stream": nullcontext, "CUDAGraph": lambda: SimpleNamespace(replay=gpu.replay), "graph": capture,
        }.items():  # fmt: skip
            patch.setattr(torch.cuda, name, value)


def test_a_replayed_graph_is_timed_without_python(monkeypatch: pytest.MonkeyPatch):
    gpu = FakeGpu()
    gpu.patch(monkeypatch)
    assert timer.eager_seconds(gpu.work, "cuda") == pytest.approx(52e-6)
    assert timer.kernel_seconds(gpu.work, "cuda") == pytest.approx(2e-6)
    assert gpu.captured == 50
