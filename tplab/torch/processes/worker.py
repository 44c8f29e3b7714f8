"""A worker: the process of one rank. It joins the group once, then runs one program after another."""

from __future__ import annotations

import faulthandler
import os
import queue
import socket
import sys
import time
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist

from tplab import spare
from tplab.torch.processes import parcels
from tplab.torch.processes.engine import Engine
from tplab.torch.processes.exchange import WAIT_FOREVER, Exchange, gloo_of
from tplab.torch.processes.parcels import Received
from tplab.torch.processes.pending import ProcessPending
from tplab.torch.processes.program import Outcome, Printed, Program, Settings, carry_out, raised
from tplab.torch.processes.rank import ProcessRank
from tplab.torch.processes.waits import Report

LOOK_EVERY = 0.25
"""Seconds between two looks at whether the rank stands still; the second look that finds it in one wait reports it."""

LOOKS_AT_REST = 2
"""After so many looks without a program, a worker returns the memory that its last program has freed."""

WORTH_RETURNING = 8_000_000
"""Bytes; below that, it is not worth a search through all heaps."""


class Ready(NamedTuple):
    """A worker has joined the group."""


class Stopped(NamedTuple):
    """A worker was told to end while its program ran. It holds what the program has printed."""

    printed: Printed


class Letter(NamedTuple):
    """What a worker sends: the number of its program, counted from 1, and the content."""

    number: int
    message: Ready | Report | Stopped | Outcome


class Worker:
    """One rank's process. Each parcel that comes over `control` is a program; when `control` closes, it ends."""

    def __init__(self, rank: int, control: socket.socket, exchange: Exchange, engine: Engine, has_gpu: bool):
        self._rank, self._control, self._has_gpu = rank, control, has_gpu
        self._exchange, self._engine = exchange, engine
        self._sending = Lock()
        self._programs: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._running: tuple[int, ProcessRank] | None = None
        self._number = 0
        self._is_busy = False
        self._sheets: list[list[str]] = [[], []]
        sys.stdout, sys.stderr = (_Sheet(stream, self, place) for place, stream in enumerate((sys.stdout, sys.stderr)))

    def serve(self) -> None:
        """Run programs until the other side is gone."""
        Thread(target=self._listen, daemon=True).start()
        Thread(target=self._watch, daemon=True).start()
        self._send(0, Ready())
        while True:
            parcel = self._programs.get()
            self._number += 1
            outcome = self._outcome(parcel)
            self._is_busy = False
            try:
                self._send(self._number, outcome)
            except Exception as error:  # the program's result cannot be packed
                note = f"what rank {self._rank} returned cannot be sent back from its process: {error}"
                self._send(self._number, outcome._replace(result=None, raised=raised(TypeError(note), None)))
            del outcome, parcel
            self._exchange.all_sent()  # so that no memory is held; if something never arrives, this pool is abandoned

    def _outcome(self, parcel: Received) -> Outcome:
        result = failure = None
        rank: ProcessRank | None = None
        try:
            contents = parcel.contents()
            settings: Settings = next(contents)
            settings.adopt()  # the program may be in a module that can only be found now
            program: Program = next(contents)
            rank = program.rank(self._rank, self._exchange, self._engine)
            self._running = self._number, rank
            device = program.device
            if self._has_gpu and (device is None or device.type == "cuda"):
                device = torch.device("cuda", self._rank)
            result = carry_out(program, rank, device)
        except BaseException as error:
            failure = raised(error, rank)
        self._running = None
        printed = self._take_printed()
        if rank is None:
            return Outcome(self._rank, None, failure, None, None, printed, False)
        return Outcome(self._rank, result, failure, rank.journal, rank.report(), printed, not rank.num_in_flight)

    def write(self, place: int, text: str) -> None:
        self._sheets[place].append(text)

    def _take_printed(self) -> Printed:
        sheets, self._sheets = self._sheets, [[], []]
        return Printed(*("".join(sheet) for sheet in sheets))

    def _send(self, number: int, message: Ready | Report | Stopped | Outcome) -> None:
        parcel = parcels.Parcel(Letter(number, message))
        with self._sending:
            parcel.send(self._control)
        parcel.close()

    # --- the threads beside the program ----------------------------------------------------------------------------

    def _listen(self) -> None:
        while (parcel := parcels.receive(self._control)) is not None:
            self._is_busy = True
            self._programs.put(parcel)
        if self._is_busy:
            with suppress(OSError):  # the other side may be gone
                self._send(self._number, Stopped(self._take_printed()))
        os._exit(0)

    def _watch(self) -> None:
        """Report a waiting rank, once for each wait. Between programs that follow one another at once, memory stays:
        returning it would cost them time."""
        seen: ProcessPending | None = None
        reported: ProcessPending | None = None
        num_at_rest, before = 0, spare.resident_bytes()
        while True:
            time.sleep(LOOK_EVERY)
            num_at_rest = 0 if self._is_busy else num_at_rest + 1
            if num_at_rest == LOOKS_AT_REST and spare.resident_bytes() - before >= WORTH_RETURNING:
                spare.give_back()
                before = spare.resident_bytes()
            number, rank = self._running or (0, None)
            waits_in = None if rank is None else rank.waits_in
            if rank is not None and waits_in is not None and waits_in is seen and waits_in is not reported:
                report = rank.report()
                if rank.waits_in is waits_in:
                    reported = waits_in
                    self._send(number, report)
            seen = waits_in


class _Sheet:
    """Replaces sys.stdout and sys.stderr: what a program prints is kept, and returned with its outcome."""

    def __init__(self, stream: TextIO, worker: Worker, place: int):
        self._stream, self._worker, self._place = stream, worker, place

    def write(self, text: str) -> int:
        self._worker.write(self._place, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(arguments: dict[str, Any], fds: list[int]) -> None:
    """The life of a worker: rank `arguments["rank"]` of `arguments["num_ranks"]`, with or without a GPU.

    The ranks find each other through a file in a directory that only this user may read. It tells gloo where to
    connect.

    fds     the socket to the process that asked for the worker
    """
    faulthandler.enable(all_threads=False)
    rank, num_ranks, has_gpu = arguments["rank"], arguments["num_ranks"], arguments["has_gpu"]
    control = socket.socket(fileno=fds[0])
    store = dist.FileStore(arguments["store"], num_ranks)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()  # the machine's own name may lead anywhere, or nowhere
    if has_gpu:
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=WAIT_FOREVER)
    engine = Engine(dist.PrefixStore("engine/", store), has_gpu)
    Worker(rank, control, Exchange(gloo_of(dist.group.WORLD), rank), engine, has_gpu).serve()


def loopback() -> str:
    """The name of the interface on which a machine talks to itself."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])
