"""Commands that may hang: each has a time limit, after which it and all its children are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent


class Done(NamedTuple):
    """How a command ended. `code` is None if it was stopped at its limit."""

    code: int | None
    out: str
    errors: str

    @property
    def tail(self) -> str:
        return f"exit status {self.code}; {self.errors[-1500:] or self.out[-1500:]}"


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for another one that imports tplab from here, shares the GPU with others, and connects
    to its peers through the loopback interface, since the machine may have no name in any network."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    lo = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "OMP_NUM_THREADS": "2"}
    return {**os.environ, **lo, **shared, "PYTHONPATH": path, **(more or {})}


def start(command: Sequence[str], more: Mapping[str, str] | None = None, **options: object) -> subprocess.Popen[str]:
    """Start Python with these arguments, as the leader of a process group."""
    where = {"cwd": ROOT, "env": environment(more), "start_new_session": True, "text": True}
    return subprocess.Popen([sys.executable, *command], **(where | options))  # type: ignore[call-overload]


def stop(process: subprocess.Popen[str]) -> None:
    """End a process and its group, first with SIGTERM, so that torchrun ends its workers, which have other groups."""
    for number, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def run(command: Sequence[str], limit: float, more: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Done:
    """Run Python with these arguments for at most `limit` seconds."""
    return together([(command, more)], limit, cwd)[0]


def together(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str] | None]], limit: float, cwd: Path = ROOT
) -> list[Done]:
    """Run several commands at the same time, each with more environment variables, and stop all at the limit."""
    processes = [start(command, more, stdout=PIPE, stderr=PIPE, cwd=cwd) for command, more in commands]
    end = time.monotonic() + limit
    try:
        with ThreadPoolExecutor(len(processes)) as pool:  # one with a full pipe would wait forever
            return list(pool.map(lambda process: _ended(process, end), processes))
    except BaseException:
        for process in processes:
            stop(process)
        raise


def _ended(process: subprocess.Popen[str], end: float) -> Done:
    try:
        out, errors = process.communicate(timeout=max(end - time.monotonic(), 0.1))
        return Done(process.returncode, out, errors)
    except subprocess.TimeoutExpired:
        stop(process)
        out, errors = "", ""
        with suppress(subprocess.TimeoutExpired, ValueError):
            out, errors = process.communicate(timeout=5)
        return Done(None, out or "", errors or "")
