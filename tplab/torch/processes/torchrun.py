"""Under torchrun: the processes that it has started, on one machine or several, are the ranks."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist

from tplab.errors import MeshError, TplabError
from tplab.mesh import Mesh
from tplab.torch.processes.engine import WAIT_FOREVER, Engine
from tplab.torch.processes.exchange import Exchange, gloo_of
from tplab.torch.processes.parcels import Parcel, Received
from tplab.torch.processes.program import Program, Raised, Settings, carry_out, error_of, named, raised
from tplab.torch.processes.rank import ProcessRank, Watch
from tplab.torch.processes.waits import unmet
from tplab.torch.ranks.arguments import Arguments, Job
from tplab.torch.ranks.printing import LiveOutput, Screen
from tplab.trace.journal import trace_of
from tplab.trace.trace import Trace

_FAILURE = "failure"
"""The key in a run's store for what the first rank that failed has raised."""

SECONDS_FOR_CAUSE = 5.0
"""How long a rank that has lost its connection waits for the cause."""


class Membership:
    """This process among those that torchrun has started; it joins them when it is made.

    An existing group of torch.distributed is used as it is. Ranks talk to each other through a separate gloo group of
    tplab's, made again after a failed run.
    """

    def __init__(self) -> None:
        local_rank, num_local = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.has_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= num_local
        self.gpu = torch.device("cuda", local_rank) if self.has_gpu else None
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.has_gpu else "gloo", timeout=WAIT_FOREVER)
            atexit.register(_leave)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.store: Any = dist.distributed_c10d._get_default_store()
        self.num_runs = 0
        self._group: Any = None
        self._exchange: Exchange | None = None
        self._num_exchanges = 0
        self.offset = 0.0

    def exchange(self) -> Exchange:
        """The exchange with the other ranks, with all connections intact."""
        if self._exchange is None:
            self._group = dist.new_group(backend="gloo", timeout=WAIT_FOREVER)
            gloo = gloo_of(self._group)
            self.offset = offset_from_first(gloo, self.rank, self.num_ranks)
            self._num_exchanges += 1
            store = dist.PrefixStore(f"tplab/engine{self._num_exchanges}/", self.store)
            self._exchange = Exchange(gloo, self.rank, Engine(store, self.has_gpu))
        return self._exchange

    def break_off(self) -> None:
        """Close all connections, which releases every rank that waits for this one."""
        if self._exchange is not None:
            self._exchange.break_off()
            self._exchange = None

    def gather(self, content: Any) -> list[Any]:
        """The content of every rank, on every rank. Raises ConnectionLost if one is gone."""
        exchange, bodies = self.exchange(), [b""] * self.num_ranks
        with exchange.connected():
            dist.all_gather_object(bodies, Parcel(content, shared=False).body, group=self._group)
        return [Received(body).open() for body in bodies]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def offset_from_first(gloo: Any, rank: int, num_ranks: int, rounds: int = 8) -> float:
    """How far this machine's clock must be advanced to agree with the first rank's.

    Every rank asks the first one for the time, as in Cristian 1989: the answer dates from about midway between the
    question and its arrival. The quickest of several rounds is used. On one machine both ranks read the same clock, and
    the measured offset is smaller than its uncertainty: then the result is 0.
    """
    time_of_first = torch.zeros(1, dtype=torch.float64)
    quickest, offset = float("inf"), 0.0
    for other in range(1, num_ranks):
        for _ in range(rounds):
            if rank == 0:
                gloo.recv([time_of_first], other, 0).wait()
                time_of_first[0] = time.perf_counter()
                gloo.send([time_of_first], other, 0).wait()
            elif rank == other:
                asked = time.perf_counter()
                gloo.send([time_of_first], 0, 0).wait()
                gloo.recv([time_of_first], 0, 0).wait()
                answered = time.perf_counter()
                if answered - asked < quickest:
                    quickest, offset = answered - asked, float(time_of_first) - (asked + answered) / 2
    return 0.0 if abs(offset) <= quickest / 2 else offset


_membership: list[Membership] = []  # one, once this process has joined


def run_under_torchrun(job: Job) -> tuple[list[Any], Callable[[], Trace]]:
    """Run a program as this process's rank of its mesh. Returns the results of all ranks, and a function for the trace.

    Every process runs the same script and calls this with the same arguments; each takes its own piece of them. What a
    rank prints appears at once, labelled. Results are gathered on every rank, so return something small, or None. If a
    rank raises, all are released, and all raise the error that names it. Raises MeshError unless the mesh has one rank
    per process.
    """
    if not _membership:
        _membership.append(Membership())
    here, mesh, device = _membership[0], job.mesh, job.device
    if mesh.size != here.num_ranks:
        raise MeshError(
            f"torchrun has started {here.num_ranks} processes, and {mesh} has {mesh.size} ranks; give torchrun "
            f"--nnodes and --nproc-per-node that make {mesh.size}, or run on a mesh of {here.num_ranks}"
        )
    Arguments(job, num_here=1)  # raises if they do not fit their specs
    program = Program(job, Settings.here(1), {})
    exchange = here.exchange()
    rank = program.rank(here.rank, exchange)
    device = here.gpu if here.gpu is not None and (device is None or device.type == "cuda") else device
    here.num_runs += 1
    store = dist.PrefixStore(f"tplab/{here.num_runs}/", here.store)
    watch = Watch(rank, store, here.break_off)
    try:
        with _labelled(here.rank):
            result = carry_out(program, rank, device)
        rank.journal.behind = here.offset
        gathered = here.gather((result, rank.journal, rank.report(), not rank.num_in_flight))
    except BaseException as error:
        watch.close()
        named = _named(error, rank, here, store)
        raise named from named.__cause__
    watch.close()
    results, journals, reports, cleans = zip(*gathered)
    error = unmet(reports)
    if error is not None or not all(cleans):
        here.break_off()  # what is still in flight would reach the next program
    else:
        exchange.all_sent()
    store.delete_key(str(here.rank))
    if error is not None:
        raise error
    return list(results), lambda: trace_of(journals, mesh, job.title)


def _named(error: BaseException, rank: ProcessRank, here: Membership, store: Any) -> BaseException:
    """The error to raise here for `error`, which ended this rank. The other ranks are informed and released."""
    said = raised(error, rank)
    if said.is_lost:
        found = _failure_of_another(store, rank.mesh)
        here.break_off()
        return found or error
    if said.is_verdict and rank.verdict is not None:
        error = rank.verdict
    store.compare_set(_FAILURE, "", said.to_text(here.rank))  # the first one counts
    here.break_off()
    return error if isinstance(error, KeyboardInterrupt | SystemExit) else named(error, here.rank, said, rank.mesh)


def _failure_of_another(store: Any, mesh: Mesh) -> TplabError | None:
    deadline = time.monotonic() + SECONDS_FOR_CAUSE
    while not store.check([_FAILURE]):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)
    rank, cause = Raised.from_text(store.get(_FAILURE))
    return error_of(rank, cause, mesh, {})


@contextmanager
def _labelled(rank: int) -> Iterator[None]:
    """A context in which each printed line appears when it ends, labelled with its rank."""
    stream = sys.stdout
    live = LiveOutput(stream, lambda: rank, Screen())
    sys.stdout = cast(TextIO, live)
    try:
        yield
    finally:
        live.end()
        sys.stdout = stream
