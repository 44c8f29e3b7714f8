"""Settings for all tests: the effort of hypothesis and XLA, the memory that they keep, and tests without a browser."""

import gc
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tplab import spare

IN_CI = bool(os.environ.get("CI"))

# No deadline: the first call of anything in torch or JAX is slow. In CI the same examples every time.
settings.register_profile(
    "tplab",
    deadline=None,
    derandomize=IN_CI,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("tplab")

# Programs that run once, for microseconds, need no optimization, which would take most of the tests' time. With 0
# instead of 1 they are compiled as usual: CI does so on one Python, and labs and benchmarks always do.
IS_QUICK = os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") != "0"

# Each loop straight to LLVM, without MLIR, and a program's loops all at once: less than half of the work. XLA ends the
# process if it does not know a flag; it knows these from jaxlib 0.7 to 0.10.
if IS_QUICK and tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", flags)

# Workers of pytest share the cores. Torch's threads would take a fifth of the time by waiting for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

MOST_MEMORY = 1_200_000_000
"""Bytes of this process beyond which compiled JAX programs, of up to 0.2 GB each, are freed after a test."""
WORTH_CLEARING = 250_000_000
"""The least growth in bytes between two such frees, since compiling programs again takes seconds."""
LEFT = pytest.StashKey[int]()
"""Bytes of the process after the last free."""

_BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
_NO_BROWSER = "no Chromium or Chrome was found; on Debian: apt-get install chromium"


def find_browser() -> str | None:
    """The path of this machine's Chromium or Chrome, if it has one."""
    return next((path for name in _BROWSERS if (path := shutil.which(name))), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in tests/browser, which need a browser."""
    for item in items:
        if Path(__file__).parent / "browser" in item.path.parents:
            item.add_marker("browser")
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(180))


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, where they would take 0.7 s of each full one, and collect less
    often, which saves a tenth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    if (warm := sys.modules.get("tplab.torch.processes.warm")) is not None:
        vars(warm)["SECONDS_TO_KEEP"] = 600.0  # a new launcher takes seconds


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("browser") and not find_browser():
        if IN_CI:
            pytest.fail(_NO_BROWSER, pytrace=False)
        pytest.skip(_NO_BROWSER)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Free JAX's compiled programs when they take much memory: 7,000 tests compile several GB."""
    limit = max(MOST_MEMORY, item.config.stash.get(LEFT, 0) + WORTH_CLEARING)
    if "jax" in sys.modules and spare.resident_bytes() > limit:
        sys.modules["jax"].clear_caches()
        gc.collect()
        spare.give_back()
        item.config.stash[LEFT] = spare.resident_bytes()


def pytest_terminal_summary(terminalreporter) -> None:
    reports = terminalreporter.getreports("skipped")  # a file that was not collected has no keywords
    skipped = [report for report in reports if "browser" in getattr(report, "keywords", ())]
    if skipped:
        terminalreporter.section("browser tests were NOT run", sep="!", red=True, bold=True)
        terminalreporter.line(f"{len(skipped)} tests of what a browser shows were left out: {_NO_BROWSER}.")


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict) -> dict:
    """pytest-playwright's fixture: the system's browser, without background requests."""
    flags = [
        "--no-sandbox",  # needed where the tests run as root
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-quic",
        "--no-first-run",
    ]
    return {**browser_type_launch_args, "executable_path": find_browser(), "args": flags}
