"""A pool: one process per rank of a mesh, joined to a group and kept warm from one run to the next."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import wait as wait_for_any
from tempfile import mkdtemp
from typing import Any, NamedTuple

from tplab.errors import RankError, TplabError
from tplab.torch.processes import failure, parcels
from tplab.torch.processes.launcher import Launcher, scratch_file, text_of
from tplab.torch.processes.program import Outcome, Printed, Program
from tplab.torch.processes.sources import Sources
from tplab.torch.processes.waits import Report, unmet, verdict
from tplab.torch.processes.worker import Letter, Ready, Stopped

SECONDS_FOR_OTHERS = 0.1
"""A program that is wrong often fails on all ranks: so long the others have to say so, before they are ended."""

SECONDS_FOR_CAUSE = 5.0
"""A rank that has lost its connection followed another's end; so long we wait to hear of that."""

POLL = 0.5
"""Seconds; a Ctrl-C that the system hands to another thread reaches this one only between two waits."""

SECONDS_TO_STOP = 1.0
"""So long a rank that is told to stop has to send what it has printed."""


class Finished(NamedTuple):
    """How a run ended: one outcome per rank, or what went wrong; and what each rank has printed."""

    outcomes: list[Outcome]
    error: BaseException | None
    printed: list[Printed]


class Member:
    """One worker, as its pool sees it."""

    def __init__(self, rank: int, pid: int, control: socket.socket, words: int):
        self.rank, self.pid, self.control, self.words = rank, pid, control, words
        self.is_gone = False

    def fileno(self) -> int:
        return self.control.fileno()


class Pool:
    """Processes for `num_ranks` ranks. Once anything goes wrong in one of them, the pool is closed: make a new one."""

    def __init__(self, launcher: Launcher, num_ranks: int, has_gpus: bool):
        self._launcher, self._sources = launcher, Sources()
        self.num_ranks, self.is_closed, self._num_runs = num_ranks, False, 0
        self.members: list[Member] = []
        self._directory = mkdtemp(prefix="tplab-")  # only this user may look inside
        try:
            about = {"num_ranks": num_ranks, "store": f"{self._directory}/store", "has_gpu": has_gpus}
            for rank in range(num_ranks):
                self.members.append(self._start({**about, "rank": rank}))
            num_ready = 0
            while num_ready < num_ranks:
                for member, message in self._messages(POLL):
                    if message is None:
                        raise self._death_of(member)
                    num_ready += isinstance(message, Ready)
        except BaseException:
            self.close()
            raise

    def _start(self, about: dict[str, Any]) -> Member:
        ours, theirs = socket.socketpair()
        words = scratch_file()
        fcntl.fcntl(words, fcntl.F_SETFL, os.O_APPEND)  # so that it can be emptied while it is written to
        with theirs:
            pid = self._launcher.start(about, [theirs.fileno()], words)
        return Member(about["rank"], pid, ours, words)

    def is_fit(self) -> bool:
        """Whether the pool can run another program: all processes are alive, and have imported current modules."""
        if self.is_closed or not self._launcher.is_alive or self._sources.have_changed():
            return False
        return all(message is not None for _, message in self._messages(0))

    def run(self, program: Program, parcel: parcels.Parcel) -> Finished:
        """Run the program, which is packed in `parcel`. After an error the pool is closed."""
        outcomes: dict[int, Outcome] = {}
        printed: dict[int, Printed] = {}
        error: BaseException | None
        self._num_runs += 1
        try:
            for member in self.members:
                os.ftruncate(member.words, 0)
                parcel.send(member.control)
            error = self._collect(program, outcomes) or _first_error(outcomes, program) or _unmet(outcomes)
        except BaseException as interrupt:  # Ctrl-C, most likely
            error = interrupt
        if error is not None:
            printed = self._stop(outcomes)
        elif not all(outcome.is_clean for outcome in outcomes.values()):
            self.close()  # what is still on its way would reach the next program
        printed |= {rank: outcome.printed for rank, outcome in outcomes.items()}
        ranks = range(self.num_ranks)
        done = [] if error is not None else [outcomes[rank] for rank in ranks]
        return Finished(done, error, [printed.get(rank, Printed()) for rank in ranks])

    def _collect(self, program: Program, outcomes: dict[int, Outcome]) -> TplabError | None:
        """Gather outcomes until there is one from each rank, or waiting for more is useless."""
        reports: dict[int, Report] = {}
        deadline = float("inf")
        while len(outcomes) < self.num_ranks and (left := deadline - time.monotonic()) > 0:
            for member, message in self._messages(min(left, POLL)):
                if message is None:
                    if (said := outcomes.get(member.rank)) is not None and said.raised is not None:
                        continue  # it ended because another was lost, whose end may be noticed later
                    return self._death_of(member)
                if isinstance(message, Report):
                    reports[member.rank] = message
                if isinstance(message, Outcome):
                    outcomes[member.rank] = message
                    if message.report is not None:
                        reports[member.rank] = message.report
                    if message.raised is not None:
                        patience = SECONDS_FOR_CAUSE if message.raised.is_lost else SECONDS_FOR_OTHERS
                        deadline = min(deadline, time.monotonic() + patience)
            if deadline == float("inf") and (error := verdict(reports, program.mesh)):
                return error
        return None

    def _messages(self, timeout: float) -> Iterator[tuple[Member, Any]]:
        """What workers have sent; None from one whose process has ended."""
        alive = [member for member in self.members if not member.is_gone]
        sources: list[Any] = [*alive, self._launcher] if self._launcher.is_alive else alive
        for source in wait_for_any(sources, timeout):
            if isinstance(source, Member):
                parcel = parcels.receive(source.control)
                source.is_gone = parcel is None
                letter = None if parcel is None else _opened(source, parcel)
                if letter is None or letter.number == self._num_runs:  # a report may come too late, in the next run
                    yield source, None if letter is None else letter.message
            else:
                ended = [member for member in alive if self._launcher.ended(member.pid) is not None]
                for member in ended:
                    member.is_gone = True
                    yield member, None

    def _death_of(self, member: Member) -> RankError:
        status = self._launcher.ended(member.pid, within_seconds=2.0)
        return failure.death(member.rank, status, text_of(member.words))

    def _stop(self, outcomes: dict[int, Outcome]) -> dict[int, Printed]:
        """End a run that has failed. Returns what the ranks whose program was still running have printed."""
        printed: dict[int, Printed] = {}
        waited_for = {member.rank for member in self.members if not member.is_gone} - outcomes.keys()
        try:
            for member in self.members:
                if not member.is_gone:
                    member.control.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + SECONDS_TO_STOP
            while waited_for and (left := deadline - time.monotonic()) > 0:
                for member, message in self._messages(left):
                    if message is None or isinstance(message, Stopped | Outcome):
                        waited_for.discard(member.rank)
                    if isinstance(message, Stopped | Outcome):
                        printed[member.rank] = message.printed
        except (OSError, KeyboardInterrupt):
            pass
        self.close()
        return printed

    def close(self) -> None:
        """End all processes, whatever they are doing, and wait until they have ended."""
        if self.is_closed:
            return
        self.is_closed = True
        self._launcher.kill([member.pid for member in self.members])
        for member in self.members:
            member.control.close()
            self._launcher.ended(member.pid, within_seconds=5.0)
            os.close(member.words)
        shutil.rmtree(self._directory, ignore_errors=True)

    def forget(self) -> None:
        """Called in a copy of this process (after a fork): the pool does not belong to the copy."""
        self.is_closed = True
        for member in self.members:
            member.control.close()


def _opened(member: Member, parcel: parcels.Received) -> Letter:
    try:
        return parcel.open()
    except Exception as error:
        raise RankError(
            f"what rank {member.rank} returned cannot be opened here: {type(error).__name__}: {error};\n"
            "return tensors, numbers and plain structures of them",
            member.rank,
        ) from error


def _first_error(outcomes: dict[int, Outcome], program: Program) -> TplabError | None:
    """The error of the lowest rank that failed by itself, or else of the lowest that failed at all."""
    failed = {rank: outcome.raised for rank, outcome in sorted(outcomes.items()) if outcome.raised is not None}
    by_itself = [rank for rank, raised in failed.items() if not raised.is_lost]
    if not failed:
        return None
    rank = (by_itself or list(failed))[0]
    return failure.error_of(rank, failed[rank], program.mesh, program.cells)


def _unmet(outcomes: dict[int, Outcome]) -> TplabError | None:
    return unmet([outcome.report for _, outcome in sorted(outcomes.items()) if outcome.report is not None])
