"""Signals on simulated ranks: each rank has handlers of its own, for the signals that it sends to itself.

Python lets only the first thread of a process have handlers, and a signal without one ends the process, the notebook
with it. Signals from outside reach the process as always.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import defaultdict
from typing import Any

from tplab.errors import RankError
from tplab.torch.distributed.blocking import taking_turns
from tplab.torch.distributed.identity import number_of
from tplab.torch.ranks.simulated import SimulatedRank
from tplab.torch.ranks.turns import Released

_signal, _getsignal, _raise, _kill = signal.signal, signal.getsignal, signal.raise_signal, os.kill
_alarm, _setitimer = getattr(signal, "alarm", None), getattr(signal, "setitimer", None)
_ENDS_NOTHING = {"SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU"}


class Signals:
    """The handlers of all ranks of a run: what is to be replaced for its time, and by what."""

    def __init__(self) -> None:
        self._handlers: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self.attributes: list[tuple[Any, str, Any]] = [
            (signal, "signal", self._set),
            (signal, "getsignal", self._get),
            (signal, "raise_signal", self._raised),
            (os, "kill", self._killed),
        ]
        if _alarm is not None:
            never = ("alarm", _Never(_alarm, 0)), ("setitimer", _Never(_setitimer, (0.0, 0.0)))
            self.attributes += [(signal, name, value) for name, value in never]

    def _set(self, number: int, handler: Any) -> Any:
        rank = taking_turns()
        if rank is None or threading.current_thread() is not rank.home.seat.thread:
            return _signal(number, handler)  # which refuses, in a second thread
        if not (callable(handler) or handler in (signal.SIG_DFL, signal.SIG_IGN)):
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        before, self._handlers[rank.rank][int(number)] = self._get(number), handler
        return before

    def _get(self, number: int) -> Any:
        rank = taking_turns()
        return _getsignal(number) if rank is None else self._handlers[rank.rank].get(int(number), _getsignal(number))

    def _raised(self, number: int) -> None:
        rank = taking_turns()
        if rank is None:
            _raise(number)
        else:
            self._reaches(rank, number)

    def _killed(self, process: int, number: int) -> None:
        rank = taking_turns()
        if rank is None or number == 0 or process != number_of(rank):
            _kill(process, number)
        else:
            self._reaches(rank, number)

    def _reaches(self, rank: SimulatedRank, number: int) -> None:
        """A rank gets a signal: from itself."""
        handler, name = self._get(number), signal.Signals(number).name
        if callable(handler):
            handler(number, sys._getframe(2))
        elif handler != signal.SIG_IGN and name not in _ENDS_NOTHING:
            text = f"rank {rank.rank} ended its process by {name} at {rank.lines.here()}"
            rank.seat.turns.fail(RankError(text, rank.rank))
            raise Released


class _Never:
    """`signal.alarm` or `setitimer`. A rank spends most of the time waiting for its turn, so no alarm goes off."""

    def __init__(self, own: Any, result: Any):
        self._own, self._result = own, result

    def __call__(self, *args: Any) -> Any:
        return self._own(*args) if taking_turns() is None else self._result
