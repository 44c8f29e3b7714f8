"""What went wrong in a rank's process, as an error in the process that started the run."""

from __future__ import annotations

import builtins
import linecache
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tplab import errors
from tplab.errors import RankError, TplabError
from tplab.mesh import Mesh
from tplab.torch.processes.parcels import Received
from tplab.torch.processes.program import Raised
from tplab.torch.ranks import texts


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
