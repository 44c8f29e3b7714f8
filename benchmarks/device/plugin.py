"""A pytest plugin: ordinary tests run their simulated ranks on a GPU.

    python -m pytest -p benchmarks.device.plugin --ranks-on cuda --told FILE tests/layers

With --ranks-on, `tplab.torch.run` puts arguments and ranks on that device, creates new tensors there, and returns
results on the CPU, where the test compares them. A module's initial weights are those that the CPU draws from the same
seed, since a test creates the module again outside for comparison. --told writes a line of JSON per finished test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("device")
    group.addoption("--ranks-on", help="the device of simulated ranks")
    group.addoption("--told", type=Path, help="a line for each test goes to this file")


def pytest_configure(config: pytest.Config) -> None:
    if device := config.getoption("--ranks-on"):
        import tplab.torch

        tplab.torch.run = ranks_on(device, tplab.torch.run)
    file = config.getoption("--told")
    if file is not None and not hasattr(config, "workerinput"):  # under xdist, only the process with all reports
        config.pluginmanager.register(_Told(file))


def ranks_on(device: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with its ranks on another device, and its results on the CPU."""
    import torch
    from torch.utils import _pytree as pytree

    def on_cpu(value: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu() if x.is_cuda else x, value)

    @wraps(run)
    def run_there(fn: Any, mesh: Any, *args: Any, **options: Any) -> Any:
        elsewhere = options.get("device") is not None or options.get("on") == "processes"
        if elsewhere or not callable(fn):
            return run(fn, mesh, *args, **options)

        @wraps(fn)
        def program(*mine: Any, **also: Any) -> Any:
            with torch.device(device):
                return fn(*mine, **also)

        with drawn_on_the_cpu():
            out = run(program, mesh, *args, **(options | {"device": device}))
        out.per_rank = on_cpu(out.per_rank)
        out._value = on_cpu(out._value)
        return out

    return run_there


@contextmanager
def drawn_on_the_cpu() -> Iterator[None]:
    """Fill tensors inside from the CPU's generator, since a GPU's draws other numbers from the same seed."""
    import torch

    from tplab.torch.private import no_dispatch

    names = ("uniform_", "normal_")  # the functions that initialise modules' weights

    def drawn(fill: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fill)
        def filled(x: torch.Tensor, *args: Any, generator: torch.Generator | None = None, **given: Any) -> torch.Tensor:
            if x.device.type in ("cpu", "meta") or generator is not None:
                return fill(x, *args, generator=generator, **given)
            with torch.no_grad():
                with no_dispatch():
                    numbers = fill(torch.empty(x.shape, dtype=x.dtype, device="cpu"), *args, **given)
                return x.copy_(numbers)

        return filled

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(torch.Tensor, name, drawn(getattr(torch.Tensor, name))))
        yield


class _Told:
    def __init__(self, file: Path):
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        said = "" if report.passed else _said(report)
        self._tell({"test": report.nodeid, "outcome": report.outcome, "said": said})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._tell({"test": report.nodeid, "outcome": report.outcome, "said": _said(report)})

    def _tell(self, line: dict[str, str]) -> None:
        with self._file.open("a", encoding="utf8") as file:
            file.write(json.dumps(line) + "\n")


def _said(report: Any) -> str:
    """The error in one sentence, or why a test was skipped."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return f"{crash.message[:500]} ({Path(crash.path).name}:{crash.lineno})"
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)[-800:]
