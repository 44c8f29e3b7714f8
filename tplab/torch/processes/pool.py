"""A pool: one process per rank of a mesh, joined to a group and kept warm from one run to the next."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Pipe
from multiprocessing.connection import wait as wait_for_any
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

from tplab.errors import RankError, TplabError
from tplab.spare import scratch_file
from tplab.torch.processes import parcels
from tplab.torch.processes.launcher import LAST_WORDS, Launcher, text_of
from tplab.torch.processes.program import Outcome, Program, death, error_of
from tplab.torch.processes.waits import unmet
from tplab.torch.ranks.program import is_program

SECONDS_FOR_OTHERS = 0.1
"""How long the other ranks may take to report errors: a wrong program often fails on all ranks. Then they are ended."""

SECONDS_FOR_CAUSE = 5.0
"""How long to wait for the cause after a rank has lost its connection: another rank has ended."""

POLL = 0.5
"""Seconds; a Ctrl-C that the system delivers to another thread reaches this one only between two waits."""


Finished = tuple[list[Outcome], BaseException | None, list[str], list[str]]
"""How a run ended: one outcome per rank, or what went wrong; and what each rank has printed to stdout and to stderr."""


class Member:
    """One worker, as its pool sees it. Its programs print to two files; all other output goes to `words`."""

    def __init__(self, launcher: Launcher, rank: int, about: dict[str, Any]):
        self.rank, self.is_gone = rank, False
        self.control, theirs = Pipe()
        self.stdout, self.stderr, self.words = (scratch_file() for _ in range(3))
        for file in (self.stdout, self.stderr):
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # so that it can be emptied while it is written to
        with theirs:
            fds = [theirs.fileno(), self.stdout, self.stderr]
            self.pid = launcher.start({**about, "rank": rank}, fds, self.words)

    def fileno(self) -> int:
        return self.control.fileno()


class Pool:
    """Processes for `num_ranks` ranks. If anything goes wrong in one of them, the pool is closed."""

    def __init__(self, launcher: Launcher, num_ranks: int, has_gpus: bool):
        self._launcher, self._sources = launcher, Sources()
        self.num_ranks, self.is_closed = num_ranks, False
        self.members: list[Member] = []
        self._directory = mkdtemp(prefix="tplab-")  # only this user may look inside
        try:
            about = {"num_ranks": num_ranks, "store": f"{self._directory}/store", "has_gpu": has_gpus}
            for rank in range(num_ranks):
                self.members.append(Member(launcher, rank, about))
        except BaseException:
            self.close()
            raise

    def is_fit(self) -> bool:
        """Whether the pool can run another program: all processes are alive, and their modules are up to date."""
        if self.is_closed or not self._launcher.is_alive or self._sources.have_changed():
            return False
        return all(outcome is not None for _, outcome in self._outcomes(0))

    def run(self, program: Program, parcel: parcels.Parcel) -> Finished:
        """Run the program that `parcel` contains. After an error the pool is closed."""
        outcomes: dict[int, Outcome] = {}
        error: BaseException | None
        try:
            for member in self.members:
                os.ftruncate(member.stdout, 0)
                os.ftruncate(member.stderr, 0)
                with suppress(ConnectionError):  # it has ended, which will be noticed
                    parcel.send(member.control)
            error = self._collect(outcomes) or _first_error(outcomes, program) or _unmet(outcomes)
        except BaseException as interrupt:  # usually Ctrl-C
            error = interrupt
        stdout, stderr = ([text_of(getattr(member, to)) for member in self.members] for to in ("stdout", "stderr"))
        if error is not None or not all(outcome.is_clean for outcome in outcomes.values()):
            self.close()  # what is still in flight would reach the next program
        return [] if error is not None else [outcomes[rank] for rank in range(self.num_ranks)], error, stdout, stderr

    def _collect(self, outcomes: dict[int, Outcome]) -> TplabError | None:
        """Gather outcomes until every rank has one, or it is useless to wait for more."""
        deadline = float("inf")
        while len(outcomes) < self.num_ranks and (left := deadline - time.monotonic()) > 0:
            for member, outcome in self._outcomes(min(left, POLL)):
                if outcome is not None:
                    outcomes[member.rank] = outcome
                    if outcome.raised is not None:
                        patience = SECONDS_FOR_CAUSE if outcome.raised.is_lost else SECONDS_FOR_OTHERS
                        deadline = min(deadline, time.monotonic() + patience)
                elif (said := outcomes.get(member.rank)) is None or said.raised is None:
                    return self._death_of(member)  # else it ended because another was lost, whose end comes later
        return None

    def _outcomes(self, timeout: float) -> Iterator[tuple[Member, Outcome | None]]:
        """The outcomes that workers have sent; None for a worker whose process has ended."""
        alive = [member for member in self.members if not member.is_gone]
        sources: list[Any] = [*alive, self._launcher] if self._launcher.is_alive else alive
        for source in wait_for_any(sources, timeout):
            if isinstance(source, Member):
                parcel = parcels.receive(source.control)
                source.is_gone = parcel is None
                yield source, None if parcel is None else _opened(source, parcel)
            else:
                for member in alive:
                    if self._launcher.ended(member.pid) is not None:
                        member.is_gone = True
                        yield member, None

    def _death_of(self, member: Member) -> RankError:
        status = self._launcher.ended(member.pid, within_seconds=2.0)
        return death(member.rank, status, text_of(member.words, LAST_WORDS).strip())

    def close(self) -> None:
        """End all processes, whatever they are doing, and wait until they have ended."""
        if self.is_closed:
            return
        self.is_closed = True
        self._launcher.kill([member.pid for member in self.members])
        for member in self.members:
            member.control.close()
            self._launcher.ended(member.pid, within_seconds=5.0)
            for file in (member.stdout, member.stderr, member.words):
                os.close(file)
        shutil.rmtree(self._directory, ignore_errors=True)

    def forget(self) -> None:
        """Drop the pool in a copy of this process (after a fork), to which it does not belong."""
        self.is_closed = True
        for member in self.members:
            member.control.close()


def _opened(member: Member, parcel: parcels.Received) -> Outcome:
    try:
        return parcel.open()
    except Exception as error:
        raise RankError(
            f"what rank {member.rank} returned cannot be opened here: {type(error).__name__}: {error};\n"
            "return tensors, numbers and plain structures of them",
            member.rank,
        ) from error


def _first_error(outcomes: dict[int, Outcome], program: Program) -> TplabError | None:
    """The error of the lowest rank that failed by itself, otherwise of the lowest that failed at all."""
    failed = {rank: outcome.raised for rank, outcome in sorted(outcomes.items()) if outcome.raised is not None}
    by_itself = [rank for rank, raised in failed.items() if not raised.is_lost]
    if not failed:
        return None
    rank = (by_itself or list(failed))[0]
    return error_of(rank, failed[rank], program.job.mesh, program.cells)


def _unmet(outcomes: dict[int, Outcome]) -> TplabError | None:
    return unmet([outcome.report for _, outcome in sorted(outcomes.items()) if outcome.report is not None])


# --- whether modules have changed -------------------------------------------------------------------------------------


class Sources:
    """The files of the user's own modules, and when they were written.

    A warm process keeps the modules that it has imported. If the user edits and reloads one of them here, the process
    would still use the old one.
    """

    def __init__(self) -> None:
        self._written: dict[str, float] = {}
        self.have_changed()

    def have_changed(self) -> bool:
        """Whether a file is newer than at the last call. Files that are new to this object are noted."""
        changed = False
        for module in list(sys.modules.values()):
            file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
            if not isinstance(file, str) or module.__name__ == "__main__" or not is_program(file):
                continue
            try:
                written = os.stat(file).st_mtime
            except OSError:
                continue
            changed |= self._written.setdefault(file, written) != written
            self._written[file] = written
        return changed
