"""A program as it is sent to a rank's process, and what is sent back: a result, or what it raised, as an error here."""

from __future__ import annotations

import builtins
import json
import linecache
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tplab
from tplab import errors
from tplab.errors import RankError, TplabError
from tplab.mesh import Mesh
from tplab.torch.processes.exchange import ConnectionLost, Exchange
from tplab.torch.processes.parcels import Parcel, Received
from tplab.torch.processes.rank import ProcessRank
from tplab.torch.processes.waits import Report
from tplab.torch.ranks import rank as rank_context
from tplab.torch.ranks import texts
from tplab.torch.ranks.arguments import Arguments, Job
from tplab.torch.ranks.process_state import first_state, generators, put_states
from tplab.torch.ranks.results import without_graph
from tplab.torch.ranks.world import Inherited
from tplab.trace.journal import Journal


class Settings(NamedTuple):
    """The settings that a program may depend on but a new process does not inherit."""

    inherited: Inherited
    default_dtype: torch.dtype
    deterministic: bool
    directory: str
    path: list[str]

    @classmethod
    def here(cls, num_ranks: int) -> Settings:
        """The settings of the calling thread; each of `num_ranks` ranks gets a share of its threads."""
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        inherited = Inherited.here(num_ranks=num_ranks)
        return cls(inherited, torch.get_default_dtype(), is_deterministic, os.getcwd(), list(sys.path))

    def adopt(self) -> None:
        """Apply these settings to this process, except those that are inherited by one thread."""
        torch.set_default_dtype(self.default_dtype)
        if self.deterministic != torch.are_deterministic_algorithms_enabled():  # asked first: setting it takes a second
            torch.use_deterministic_algorithms(self.deterministic)
        if os.getcwd() != self.directory:
            os.chdir(self.directory)
        sys.path[:] = self.path


class Program(NamedTuple):
    """A job as it is sent to a rank's process. cells: file name -> the number of its notebook cell."""

    job: Job
    settings: Settings
    cells: dict[str, int]

    def rank(self, rank: int, exchange: Exchange) -> ProcessRank:
        """The rank with this number, to run the program. Each rank keeps the values of its share of messages."""
        record = -(-self.job.keep_values // self.job.mesh.size)
        return ProcessRank(rank, self.job.mesh, exchange, record=record, cells=self.cells)


class Raised(NamedTuple):
    """What a rank raised, in a form that can be sent.

    error        as a parcel; None if it could not be packed
    line         the program's line that raised it
    stack        (file, line, function) of the program's frames, outermost first
    is_lost      whether it only followed from what happened on another rank
    is_verdict   whether the rank found a mismatch between its collective and the others', or a deadlock
    """

    error: bytes | None
    kind: str
    text: str
    line: str | None
    stack: list[tuple[str, int, str]]
    is_lost: bool
    is_verdict: bool

    def to_text(self, rank: int) -> bytes:
        """The text for a place that others may write to. The pickle is left out: it must not be read from there."""
        return json.dumps([rank, *self[1:]]).encode()

    @classmethod
    def from_text(cls, text: bytes) -> tuple[int, Raised]:
        rank, *rest = json.loads(text)
        return rank, cls(None, *rest)


class Outcome(NamedTuple):
    """How a rank's program ended: with `result`, or with what it raised.

    is_clean     whether everything it started was waited for
    """

    rank: int
    result: Any
    raised: Raised | None
    journal: Journal | None
    report: Report | None
    is_clean: bool


def carry_out(program: Program, rank: ProcessRank, device: torch.device | None) -> Any:
    """Run the program as this rank, and return its result."""
    job, drawn_from = program.job, generators(device)
    kept = [generator.get_state() for generator in drawn_from]
    pieces = Arguments(job._replace(device=device), num_here=1).of(rank.rank)
    put_states(drawn_from, [first_state(generator, job.seed, rank.rank) for generator in drawn_from])
    rank.seed = job.seed
    rank_context.enter(rank)
    try:
        with program.settings.inherited.state():
            rank.start_watching()
            try:
                result = job.fn(*pieces)
                rank.has_returned = True
            finally:
                rank.stop_watching()
        return without_graph(result)
    finally:
        rank_context.leave()
        put_states(drawn_from, kept)


def raised(error: BaseException, rank: ProcessRank | None) -> Raised:
    """What `rank` raised, in a form that can be sent; `rank` is None if there was no rank yet.

    If it has lost its connections because of a verdict, the verdict is what it raised.
    """
    if rank is not None and rank.verdict is not None and isinstance(error, ConnectionLost):
        error = rank.verdict
    try:
        text = Parcel(error, shared=False).body
        Received(text).open()  # many exceptions can be packed but not opened: __init__ takes other arguments
    except Exception:
        text = None
    frames = traceback.extract_tb(error.__traceback__)
    stack = [(frame.filename, frame.lineno or 0, frame.name) for frame in frames if not _is_ours(frame.filename)]
    line = None if rank is None else rank.lines.of(error)
    is_verdict = rank is not None and error is rank.verdict
    return Raised(text, type(error).__name__, str(error), line, stack, isinstance(error, ConnectionLost), is_verdict)


def _is_ours(filename: str) -> bool:
    return Path(tplab.__file__).parent in Path(filename).parents


# --- the error in the process that started the run --------------------------------------------------------------------


def error_of(rank: int, raised: Raised, mesh: Mesh, cells: Mapping[str, int]) -> TplabError:
    """The error for what `rank` raised: that error itself if it is tplab's, otherwise a RankError with it as the cause.

    The rank's traceback is added to it as a note.
    """
    try:
        error = None if raised.error is None else Received(raised.error).open()
    except Exception:  # its class cannot be imported here
        error = None
    if not isinstance(error, BaseException):
        error = _made_anew(raised)
    if raised.stack:
        error.add_note(_stack_text(rank, raised, cells))
    return named(error, rank, raised, mesh)


def _made_anew(raised: Raised) -> BaseException:
    """A Python or tplab error, from its name and text; for any other, a RuntimeError that names it."""
    known = getattr(errors, raised.kind, None) or getattr(builtins, raised.kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        with suppress(TypeError):  # it needs other arguments than a text
            return known(raised.text)
    return RuntimeError(f"{raised.kind}: {raised.text}")


def named(error: BaseException, rank: int, raised: Raised, mesh: Mesh) -> TplabError:
    """The error for `error`, which `rank` raised, as for simulated ranks."""
    if isinstance(error, TplabError) and (raised.is_verdict or raised.is_lost):
        return error
    return texts.raised(rank, error, raised.kind, raised.text, raised.line, mesh)


def _stack_text(rank: int, raised: Raised, cells: Mapping[str, int]) -> str:
    """The rank's traceback. The text of its lines is read here, in the notebook's process."""
    lines = [f"Traceback of rank {rank} (most recent call last):"]
    for filename, number, function in raised.stack:
        name = Path(filename).name
        cell = f"cell {cells[name]}" if name in cells else filename
        lines.append(f"  {cell}, line {number}, in {function}")
        if text := linecache.getline(filename, number).strip():
            lines.append(f"    {text}")
    return "\n".join(lines)


def death(rank: int, status: int | None, words: str) -> RankError:
    """The error for a process that ended by itself. `status` is from os.waitpid; `words` is its last output."""
    if status is None:
        how = "closed its connection"
    elif os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        how = f"ended with signal {number} ({signal.Signals(number).name})"
        if number == signal.SIGKILL:
            how += ", which is what the system sends when memory runs out"
    else:
        how = f"ended with exit status {os.waitstatus_to_exitcode(status)}"
    words = words.partition("\n\nExtension modules:")[0]  # the end of Python's message about a crash
    text = f"rank {rank}'s process {how}; the other ranks were ended, and the next run starts new processes"
    return RankError(text + (f".\nThe last it said:\n{words}" if words else ""), rank)
