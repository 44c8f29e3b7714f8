"""Threads that a rank's program starts belong to the rank: they take turns with it and with all other ranks.

So a thread that writes a checkpoint in the background, or fetches batches, may communicate over its own groups. As with
ranks, threads run in the same order each time. Threads of libraries that wait for files or processes, such as those of
a DataLoader, take no turns; they run as usual, and cannot communicate.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from tplab.torch.distributed.blocking import BLOCKING, SimpleQueue
from tplab.torch.distributed.replaced import Replaced, on_ranks
from tplab.torch.ranks.program import is_program
from tplab.torch.ranks.rank import enter, leave
from tplab.torch.ranks.simulated import SimulatedRank
from tplab.torch.ranks.turns import Released
from tplab.torch.ranks.watcher import Listener, watcher

Inside = Callable[[SimulatedRank], AbstractContextManager[None]]


class Threads(Replaced):
    """Python's threads as simulated ranks need them, for the duration of a run.

    beside   makes the context for a thread that a rank has started
    """

    def __init__(self, beside: Inside):
        self._beside = beside
        log = logging.getLogger("concurrent.futures")
        quiet = log, "filters", [*log.filters, _is_no_release]
        super().__init__([*BLOCKING, on_ranks(threading.Thread, "start")(self._started), quiet])

    def _started(self, rank: SimulatedRank, own: Any, thread: Any) -> None:
        if not _belongs_to_program(thread) or thread.ident is not None:
            rank.turns.watches.outsiders.add(thread)
            own(thread)
            return
        other = rank.beside(thread)
        turns = rank.turns
        listeners = [one for one in watcher().listeners if one.follows_threads]
        program = thread.run
        thread._seat = other
        thread.run = partial(turns.live, other, partial(self._live, other, thread, program, listeners))
        rank.waits_as_always = True  # until the new thread runs, which is before its turn
        try:
            own(thread)
        except BaseException:
            turns.leave(other)
            raise
        finally:
            rank.waits_as_always = False

    def _live(self, rank: SimulatedRank, thread: Any, program: Callable[[], None], listeners: list[Listener]) -> None:
        """Run such a thread, in its turns."""
        del thread.run
        enter(rank)
        try:
            with rank.world.inherited.state(), self._beside(rank):
                for one in listeners:
                    watcher().add(one)
                rank.start_watching()
                try:
                    program()
                finally:
                    rank.stop_watching()
                    for one in listeners:
                        watcher().remove(one)
        except Released:
            raise
        except BaseException as error:  # as in any thread, it ends only the thread
            if rank.turns.failure is None:
                at = rank.world.lines.of(error)
                text = f"{type(error).__name__}{f' at {at}' if at else ''}: {error}"
                rank.home.raised.append(f"its thread {thread.name!r} has raised {text}")
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))
        finally:
            leave()


def _belongs_to_program(thread: Any) -> bool:
    """Whether a thread runs the program's own code, or code that an executor or torch.distributed runs for it."""
    function: Any = type(thread).run
    if function is threading.Thread.run and thread._target is not None:
        function = thread._target
    elif function is threading.Timer.run:
        function = thread.function
    while isinstance(function, partial):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    if module == "concurrent.futures.thread":  # its queue is Python's own if it was made outside the run
        return any(isinstance(given, SimpleQueue) for given in thread._args)
    is_ours = module.startswith("tplab.torch.") or hasattr(function, "tplabs_own")  # such as os._exit
    if is_ours or module.split(".")[:2] == ["torch", "distributed"]:
        return True
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code is not None and is_program(code.co_filename)


def _is_no_release(record: logging.LogRecord) -> bool:
    """Filter the log of an executor, which reports what ends its threads: their release need not be reported."""
    return not (record.exc_info and record.exc_info[0] is not None and issubclass(record.exc_info[0], Released))
