"""Ranks on this machine, each in its own process, kept warm from one run to the next until no more runs follow."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path
from threading import RLock, Timer
from typing import Any

import numpy as np
import torch

from tplab.lines import notebook_cells
from tplab.torch.private import pytree
from tplab.torch.processes.launcher import Launcher
from tplab.torch.processes.parcels import Parcel, explained
from tplab.torch.processes.pool import Pool
from tplab.torch.processes.program import Program, Settings
from tplab.torch.ranks.arguments import Arguments, Job
from tplab.torch.ranks.printing import show
from tplab.trace.journal import trace_of
from tplab.trace.trace import Trace

KEPT_WARM = 2
"""How many pools are kept, of the most recent sizes: each holds memory."""

SECONDS_AT_REST = 3.0
"""Seconds without a run after which the ranks' processes end: each holds some 40 MB. New ones take 0.25 s."""

SECONDS_TO_KEEP = 30.0
"""Seconds after which the launcher also ends. It holds torch's imports, 160 MB; a new one takes some seconds."""


class _Warm:
    """The launcher and the pools of this process."""

    def __init__(self) -> None:
        self.lock = RLock()
        self._launcher: Launcher | None = None
        self._pools: dict[tuple[int, bool], Pool] = {}  # the most recently used is last
        self._clocks: list[Timer] = []

    def pool(self, num_ranks: int, has_gpus: bool) -> Pool:
        """A pool that is ready to run."""
        self._wake_up()
        key = num_ranks, has_gpus
        pool = self._pools.pop(key, None)
        if pool is not None and not pool.is_fit():
            pool.close()
            pool = None
        while len(self._pools) >= KEPT_WARM:
            self._pools.pop(next(iter(self._pools))).close()
        if self._launcher is None or not self._launcher.is_alive:
            self.close()
            self._launcher = Launcher("tplab.torch.processes.worker:main", ["tplab.torch.processes.worker", *_also()])
        if pool is None:
            pool = Pool(self._launcher, *key)
        self._pools[key] = pool
        return pool

    def rest(self) -> None:
        """After each run: if no other run follows soon, end the processes, and later the launcher."""
        self._wake_up()

        def at_last(end: Callable[[], None]) -> None:
            with self.lock:
                if self._clocks is clocks:  # no run since then
                    end()

        ends = (SECONDS_AT_REST, self._end_pools), (SECONDS_TO_KEEP, self.close)
        self._clocks = clocks = [Timer(seconds, at_last, [end]) for seconds, end in ends]
        for clock in clocks:
            clock.daemon = True
            clock.start()

    def _wake_up(self) -> None:
        for clock in self._clocks:
            clock.cancel()
        self._clocks = []

    def _end_pools(self) -> None:
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()

    def close(self) -> None:
        """End all processes."""
        self._end_pools()
        self._wake_up()
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None

    def forget(self) -> None:
        """Drop everything in a copy of this process (after a fork): it all belongs to the original."""
        for pool in self._pools.values():
            pool.forget()
        if self._launcher is not None:
            self._launcher.forget()
        self.__init__()


def _also() -> list[str]:
    """Further modules that the ranks will import, to be shared by them: torch's first optimizer imports its compiler,
    which takes 70 MB and a second, and a program that has made an optimizer here will make one there."""
    return [name for name in ("torch._dynamo",) if name in sys.modules]


_warm = _Warm()
atexit.register(_warm.close)
os.register_at_fork(after_in_child=_warm.forget)


def shut_down() -> None:
    """End the processes that are kept warm; the next run starts new ones. They also end with this process, and after
    some time without a run."""
    with _warm.lock:
        _warm.close()


def run_on_processes(job: Job) -> tuple[list[Any], Callable[[], Trace]]:
    """Run a program on every rank of its mesh, each a process. Returns each rank's result, and what makes the trace.

    The first run starts the processes; later runs on the same number of ranks find them warm. The program is sent as
    code, so it may be a function of a notebook cell, a lambda or a closure; modules that it needs are imported from
    where this process finds them. Results equal those of simulated ranks up to rounding: gloo and NCCL add up in their
    own order, and each process computes with its share of this process's threads, over which torch splits large sums.
    """
    Arguments(job, num_here=1)  # raises if they do not fit their specs
    job = job._replace(args=tuple(pytree.tree_map_only(np.ndarray, _as_tensor, arg) for arg in job.args))
    cells = {Path(file).name: number for file, number in notebook_cells().items()}
    program, mesh, device = Program(job, Settings.here(job.mesh.size), cells), job.mesh, job.device
    with explained(job.fn, job.args):
        parcel = Parcel(program.settings, program)
    wants_gpu = device is None or device.type == "cuda"
    has_gpus = wants_gpu and torch.cuda.is_available() and torch.cuda.device_count() >= mesh.size
    with _warm.lock:
        try:
            outcomes, error, stdout, stderr = _warm.pool(mesh.size, has_gpus).run(program, parcel)
        finally:
            parcel.close()
            _warm.rest()
    show([[text] for text in stdout], sys.stdout)
    show([[text] for text in stderr], sys.stderr)
    if error is not None:
        raise error
    journals = [outcome.journal for outcome in outcomes if outcome.journal is not None]
    return [outcome.result for outcome in outcomes], lambda: trace_of(journals, mesh, job.title)


def _as_tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())
