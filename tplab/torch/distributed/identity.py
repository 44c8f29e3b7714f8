"""A rank's process from its program's view: its number, its end and its signals, as in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import defaultdict
from typing import Any, NoReturn

import torch

from tplab.errors import RankError
from tplab.torch.distributed.blocking import taking_turns
from tplab.torch.distributed.replaced import Value
from tplab.torch.ranks.program import is_program
from tplab.torch.ranks.simulated import SimulatedRank
from tplab.torch.ranks.turns import Released

_getpid, _end = os.getpid, os._exit
_PROFILER = os.path.join(os.path.dirname(torch.profiler.__file__), "")
_logging_data: Any = torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data


def getpid() -> int:
    """`os.getpid`: each rank's own number if the program asks, or torch's profiler for a file name. Libraries that
    check for a fork get the process's own."""
    asks = sys._getframe(1).f_code.co_filename
    if not (is_program(asks) or asks.startswith(_PROFILER)) or (rank := taking_turns()) is None:
        return _getpid()
    return number_of(rank)


def number_of(rank: SimulatedRank) -> int:
    """The rank's process number: that of its thread. No other process has it, and a signal to it reaches this one."""
    thread = rank.home.seat.thread
    return (thread and thread.native_id) or _getpid()


def end(code: int) -> NoReturn:
    """`os._exit`: ends the rank and, as under torchrun, all others, unless all is well. The process continues: in a
    notebook, it is the kernel."""
    if (rank := taking_turns()) is None:
        _end(code)
    if code == 0 and threading.current_thread() is rank.home.seat.thread:
        raise SystemExit(0)
    text = f"rank {rank.rank} ended its process by os._exit({code}) at {rank.lines.here()}"
    rank.seat.turns.fail(RankError(text, rank.rank))
    raise Released


def logging_data(model: Any) -> dict[str, Any]:
    """`DistributedDataParallel._get_ddp_logging_data`, with the backend that the program asked for, and the rank's own
    environment, which torch's C++ code does not see."""
    found = _logging_data(model)
    name = getattr(model.process_group, "backend", None)
    if name is None:
        return found
    unseen = [key for key, value in found.items() if isinstance(value, str) and key.upper() in os.environ]
    seen: dict[str, Any] = {key: os.environ[key.upper()] for key in unseen}
    if "gloo" in name:
        seen |= {key: os.environ.get(key.upper(), "N/A") for key in ("gloo_socket_ifname", "gloo_device_transport")}
        seen["gloo_num_threads"] = _GLOOS_THREADS
    return {**found, **seen, "backend_name": name}


_GLOOS_THREADS = 2


IDENTITY: list[Value] = [
    (os, "getpid", getpid),
    (os, "_exit", end),
    (torch.nn.parallel.DistributedDataParallel, "_get_ddp_logging_data", logging_data),
]


# --- signals ----------------------------------------------------------------------------------------------------------
# Python lets only the first thread of a process have handlers, and a signal without one ends the process, including the
# notebook. Signals from outside reach the process as usual.


_signal, _getsignal, _raise, _kill = signal.signal, signal.getsignal, signal.raise_signal, os.kill
_alarm, _setitimer = getattr(signal, "alarm", None), getattr(signal, "setitimer", None)
_ENDS_NOTHING = {"SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU"}


class Signals:
    """The signal handlers of all ranks of a run, and the replacements for its duration."""

    def __init__(self) -> None:
        self._handlers: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self.attributes: list[Value] = [
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
        """Deliver a signal that a rank sends to itself."""
        handler, name = self._get(number), signal.Signals(number).name
        if callable(handler):
            handler(number, sys._getframe(2))
        elif handler != signal.SIG_IGN and name not in _ENDS_NOTHING:
            text = f"rank {rank.rank} ended its process by {name} at {rank.lines.here()}"
            rank.seat.turns.fail(RankError(text, rank.rank))
            raise Released


class _Never:
    """`signal.alarm` or `setitimer`. A rank spends most of its time waiting for its turn, so no alarm goes off."""

    def __init__(self, own: Any, result: Any):
        self._own, self._result = own, result

    def __call__(self, *args: Any) -> Any:
        return self._own(*args) if taking_turns() is None else self._result
