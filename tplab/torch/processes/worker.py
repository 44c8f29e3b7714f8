"""A worker: the process of one rank. It joins the group once, then runs one program after another."""

from __future__ import annotations

import faulthandler
import io
import os
import queue
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from typing import TextIO

import torch
import torch.distributed as dist

from tplab import spare
from tplab.torch.processes import parcels
from tplab.torch.processes.engine import WAIT_FOREVER, Engine
from tplab.torch.processes.exchange import ConnectionLost, Exchange, gloo_of
from tplab.torch.processes.parcels import Received
from tplab.torch.processes.program import Outcome, Program, Settings, carry_out, raised
from tplab.torch.processes.rank import ProcessRank, Watch

SECONDS_AT_REST = 0.5
"""Seconds without a program after which a worker returns the memory that its last program has freed. Between programs
in quick succession the memory stays: returning it would cost them time."""

WORTH_RETURNING = 8_000_000
"""Bytes; less is not worth a search through all heaps."""


class Worker:
    """One rank's process. Each parcel that arrives over `control` is a program; it ends when `control` closes."""

    def __init__(self, rank: int, control: Connection, exchange: Exchange, store: dist.Store):
        self._rank, self._control, self._exchange, self._store = rank, control, exchange, store
        self._programs: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._resident = spare.resident_bytes()
        self._watch: Watch | None = None

    def serve(self) -> None:
        """Run programs until the other side is gone."""
        Thread(target=self._listen, daemon=True).start()
        number = 0
        while True:
            parcel, number = self._next(), number + 1
            if self._watch is not None:  # even if the rank has returned: others may wait for it
                self._watch.close()
            outcome = self._outcome(parcel, dist.PrefixStore(f"run{number}/", self._store))
            try:
                parcels.send(self._control, outcome)
            except Exception as error:  # the program's result cannot be packed
                note = f"what rank {self._rank} returned cannot be sent back from its process: {error}"
                parcels.send(self._control, outcome._replace(result=None, raised=raised(TypeError(note), None)))
            del outcome, parcel
            with suppress(ConnectionLost):  # then this pool is abandoned
                self._exchange.all_sent()  # frees the memory of what was sent

    def _next(self) -> Received:
        try:
            return self._programs.get(timeout=SECONDS_AT_REST)
        except queue.Empty:
            if spare.resident_bytes() - self._resident >= WORTH_RETURNING:
                spare.give_back()
                self._resident = spare.resident_bytes()
            return self._programs.get()

    def _listen(self) -> None:
        while (parcel := parcels.receive(self._control)) is not None:
            self._programs.put(parcel)
        os._exit(0)

    def _outcome(self, parcel: Received, store: dist.Store) -> Outcome:
        result = failure = None
        rank: ProcessRank | None = None
        self._watch = None
        try:
            contents = parcel.contents()
            settings: Settings = next(contents)
            settings.adopt()  # the program may be in a module that can only be found after this
            program: Program = next(contents)
            rank = program.rank(self._rank, self._exchange)
            self._watch = Watch(rank, store, self._exchange.break_off)
            device = program.job.device
            if self._exchange.engine.has_gpu and (device is None or device.type == "cuda"):
                device = torch.device("cuda", self._rank)
            result = carry_out(program, rank, device)
        except BaseException as error:
            failure = raised(error, rank)
        if rank is None:
            return Outcome(self._rank, None, failure, None, None, False)
        return Outcome(self._rank, result, failure, rank.journal, rank.report(), not rank.num_in_flight)


def main(arguments: dict[str, int | str], fds: list[int]) -> None:
    """Run a worker: rank `arguments["rank"]` of `arguments["num_ranks"]`, with or without a GPU.

    The ranks find each other through a file in a directory that only this user may read. It tells gloo where to
    connect.

    fds     the connection to the process that asked for the worker, and the files for what its programs print to stdout
            and to stderr; the output of libraries and of Python itself, as in a crash, goes elsewhere
    """
    faulthandler.enable(all_threads=False)
    rank, num_ranks, has_gpu = int(arguments["rank"]), int(arguments["num_ranks"]), bool(arguments["has_gpu"])
    control = Connection(fds[0])
    sys.stdout, sys.stderr = map(_written_at_once, fds[1:])
    store = dist.FileStore(str(arguments["store"]), num_ranks)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()  # the machine's own name may lead anywhere, or nowhere
    if has_gpu:
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=WAIT_FOREVER)
    engine = Engine(dist.PrefixStore("engine/", store), has_gpu)
    Worker(rank, control, Exchange(gloo_of(dist.group.WORLD), rank, engine), store).serve()


def _written_at_once(fd: int) -> TextIO:
    return io.TextIOWrapper(open(fd, "wb", buffering=0), "utf-8", "backslashreplace", write_through=True)


def loopback() -> str:
    """The name of the machine's loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])
