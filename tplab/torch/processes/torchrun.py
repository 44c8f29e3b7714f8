"""Under torchrun: the processes that it has started, on one machine or many, are the ranks."""

from __future__ import annotations

import atexit
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, TextIO

import torch
import torch.distributed as dist

from tplab.errors import MeshError, TplabError
from tplab.mesh import Mesh
from tplab.torch.processes.engine import Engine
from tplab.torch.processes.exchange import WAIT_FOREVER, ConnectionLost, Exchange, gloo_of
from tplab.torch.processes.failure import error_of, named
from tplab.torch.processes.parcels import Parcel, Received
from tplab.torch.processes.program import Program, Raised, Settings, carry_out, check_arguments, raised
from tplab.torch.processes.rank import ProcessRank
from tplab.torch.processes.waits import Report, unmet, verdict
from tplab.trace.journal import trace_of
from tplab.trace.trace import Trace

LOOK_EVERY = 0.5
"""Seconds between two looks at whether this rank stands still."""

SECONDS_FOR_CAUSE = 5.0
"""So long a rank that has lost its connection waits to hear why."""


class Membership:
    """This process among those that torchrun has started; joins them when it is made.

    If torch.distributed already has a group, it is used as it is. What ranks say to each other goes through a separate
    gloo group of ours, which is made again after a failed run.
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
        """The exchange with the other ranks, with all connections intact; `engine` is then new too."""
        if self._exchange is None:
            self._group = dist.new_group(backend="gloo", timeout=WAIT_FOREVER)
            gloo = gloo_of(self._group)
            self.offset = offset_from_first(gloo, self.rank, self.num_ranks)
            self._exchange = Exchange(gloo, self.rank)
            self._num_exchanges += 1
            self.engine = Engine(dist.PrefixStore(f"tplab/engine{self._num_exchanges}/", self.store), self.has_gpu)
        return self._exchange

    def break_off(self) -> None:
        """Close all connections, so that every rank that waits for this one is released."""
        if self._exchange is not None:
            self._exchange.break_off()
            self.engine.break_off()
            self._exchange = None

    def gather(self, content: Any) -> list[Any]:
        """The content of every rank, on every rank. Raises ConnectionLost if one is gone."""
        exchange, bodies = self.exchange(), [b""] * self.num_ranks
        try:
            dist.all_gather_object(bodies, Parcel(content, shared=False).body, group=self._group)
        except RuntimeError as error:
            raise exchange.lost(error) from None
        return [Received(body).open() for body in bodies]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def offset_from_first(gloo: Any, rank: int, num_ranks: int, rounds: int = 8) -> float:
    """How far this machine's clock must be advanced to agree with the first rank's.

    Every rank asks the first one for the time, as in Cristian 1989: the answer was given about midway between the
    question and its arrival. The quickest of several rounds is used. On one machine both read one clock, and the
    measured offset is smaller than its uncertainty: then it is 0.
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


def run_under_torchrun(
    fn: Callable[..., Any],
    mesh: Mesh,
    args: tuple[Any, ...],
    in_specs: Any,
    *,
    seed: int,
    record: int,
    device: torch.device | None,
    title: str,
) -> tuple[list[Any], Callable[[], Trace]]:
    """Run `fn` as this process's rank of `mesh`. Returns every rank's result and what makes the trace, on every rank.

    Every process runs the same script and calls this with the same arguments; each takes its own piece of them. What a
    rank prints appears at once, labelled. Results are gathered on every rank, so return something small, or None. When
    a rank raises, all are released, and the error that names it is raised on all. Raises MeshError if the number of
    ranks in the mesh is not the number of processes.
    """
    if not _membership:
        _membership.append(Membership())
    here = _membership[0]
    if mesh.size != here.num_ranks:
        raise MeshError(
            f"torchrun has started {here.num_ranks} processes, and {mesh} has {mesh.size} ranks; give torchrun "
            f"--nnodes and --nproc-per-node that make {mesh.size}, or run takes a mesh of {here.num_ranks}"
        )
    check_arguments(args, in_specs, mesh)
    program = Program(fn, mesh, args, in_specs, seed, record, device, Settings.here(1), {}, title)
    exchange = here.exchange()
    rank = program.rank(here.rank, exchange, here.engine)
    device = here.gpu if here.gpu is not None and (device is None or device.type == "cuda") else device
    here.num_runs += 1
    board = Board(here, f"tplab/{here.num_runs}")
    try:
        with board.watching(rank), _labelled(here.rank):
            result = carry_out(program, rank, device)
        board.post(rank)
        is_clean = not rank.num_in_flight
        gathered = here.gather((result, rank.journal.shift(here.offset), rank.report(), is_clean))
    except BaseException as error:
        named = board.named(error, rank)
        raise named from named.__cause__
    results, journals, reports, cleans = zip(*gathered)
    error = unmet(reports)
    if error is not None or not all(cleans):
        here.break_off()  # what is still on its way would reach the next program
    else:
        exchange.all_sent()
    board.clear()
    if error is not None:
        raise error
    return list(results), lambda: trace_of(journals, mesh, title)


class Board:
    """Where the ranks of one run publish what they wait for, and what they raised: in the store that torchrun keeps."""

    def __init__(self, here: Membership, name: str):
        self._here, self._name = here, name
        self._verdict: TplabError | None = None

    def _key(self, rank: int) -> str:
        return f"{self._name}/report/{rank}"

    def post(self, rank: ProcessRank) -> None:
        self._here.store.set(self._key(rank.rank), rank.report().to_text())

    def clear(self) -> None:
        self._here.store.delete_key(self._key(self._here.rank))

    @contextmanager
    def watching(self, rank: ProcessRank) -> Iterator[None]:
        """While this is open, a waiting rank publishes what it waits for, and checks whether any rank can go on."""
        is_over = Event()
        watcher = Thread(target=self._watch, args=(rank, is_over), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()

    def _watch(self, rank: ProcessRank, is_over: Event) -> None:
        seen = posted = None
        while not is_over.wait(LOOK_EVERY):
            waits_in = rank.waits_in
            if waits_in is not None and waits_in is seen:
                if waits_in is not posted:
                    self.post(rank)
                    posted = waits_in
                self._verdict = self._judge(rank.mesh)
                if self._verdict is not None:
                    self._here.break_off()  # the program's thread wakes up
                    return
            seen = waits_in

    def _judge(self, mesh: Mesh) -> TplabError | None:
        """The error that explains why all ranks are stuck, once every rank has published a report."""
        keys = [self._key(rank) for rank in mesh.ranks]
        if not self._here.store.check(keys):
            return None
        return verdict({rank: Report.from_text(self._here.store.get(key)) for rank, key in enumerate(keys)}, mesh)

    def named(self, error: BaseException, rank: ProcessRank) -> BaseException:
        """The error to raise here for `error`, which ended this rank. The others are informed and released."""
        here, key = self._here, f"{self._name}/failure"
        if isinstance(error, ConnectionLost) and self._verdict is None:
            found = self._failure_of_another(key, rank.mesh)
            here.break_off()
            return found or error
        if self._verdict is not None:
            error = self._verdict
        said = raised(error, rank)._replace(is_mismatch=error is rank.mismatch or error is self._verdict)
        here.store.compare_set(key, "", said.to_text(here.rank))  # the first one counts
        here.break_off()
        return error if isinstance(error, KeyboardInterrupt | SystemExit) else named(error, here.rank, said, rank.mesh)

    def _failure_of_another(self, key: str, mesh: Mesh) -> TplabError | None:
        deadline = time.monotonic() + SECONDS_FOR_CAUSE
        while not self._here.store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        rank, cause = Raised.from_text(self._here.store.get(key))
        return error_of(rank, cause, mesh, {})


@contextmanager
def _labelled(rank: int) -> Iterator[None]:
    """While this is open, each printed line says which rank it is from."""
    stream = sys.stdout
    sys.stdout = _Labelled(stream, f"[rank {rank}] ")
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = stream


class _Labelled(io.TextIOBase):
    """Writes whole lines, each after a label, so that lines of several processes do not mix."""

    def __init__(self, stream: TextIO, label: str):
        self._stream, self._label, self._line = stream, label, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        self._put(lines)
        return len(text)

    def flush(self) -> None:
        if self._line:
            self._put([self._line])
            self._line = ""
        self._stream.flush()

    def _put(self, lines: list[str]) -> None:
        if lines:
            self._stream.write("".join(f"{self._label}{line}\n" for line in lines))
            self._stream.flush()
