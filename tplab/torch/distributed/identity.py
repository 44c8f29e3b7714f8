"""A rank's process from its program's view: its number, its end and its signals, as in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, NoReturn

import torch

from tplab.errors import RankError
from tplab.torch.distributed.replaced import Value, on_ranks
from tplab.torch.ranks.program import is_program
from tplab.torch.ranks.simulated import SimulatedRank
from tplab.torch.ranks.turns import Released

_getpid = os.getpid
_PROFILER = os.path.join(os.path.dirname(torch.profiler.__file__), "")
_logging_data: Any = torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data


@on_ranks(os, "getpid")
def _number(rank: SimulatedRank, own: Any) -> int:
    """Each rank's own number if the program asks, or torch's profiler for a file name. Libraries that check for a fork
    get the process's own."""
    asks = sys._getframe(2).f_code.co_filename
    return number_of(rank) if is_program(asks) or asks.startswith(_PROFILER) else own()


def number_of(rank: SimulatedRank) -> int:
    """The rank's process number: that of its thread. No other process has it, and a signal to it reaches this one."""
    thread = rank.home.thread
    return (thread and thread.native_id) or _getpid()


@on_ranks(os, "_exit")
def _end(rank: SimulatedRank, own: Any, code: int) -> NoReturn:
    """Ends the rank and, as under torchrun, all others, unless all is well. The process continues: in a notebook, it is
    the kernel."""
    if code == 0 and threading.current_thread() is rank.home.thread:
        raise SystemExit(0)
    _fail(rank, f"os._exit({code})")


def _fail(rank: SimulatedRank, by: str) -> NoReturn:
    text = f"rank {rank.rank} ended its process by {by} at {rank.lines.here()}"
    rank.turns.fail(RankError(text, rank.rank))
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


# --- signals ----------------------------------------------------------------------------------------------------------
# Python lets only the first thread of a process have handlers, and a signal without one ends the process, including the
# notebook. Signals from outside reach the process as usual.


_ENDS_NOTHING = {"SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU"}
_getsignal = signal.getsignal


@on_ranks(signal, "signal")
def _set(rank: SimulatedRank, own: Any, number: int, handler: Any) -> Any:
    if threading.current_thread() is not rank.home.thread:
        return own(number, handler)  # which refuses, in a second thread
    if not (callable(handler) or handler in (signal.SIG_DFL, signal.SIG_IGN)):
        raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
    before, rank.home.handlers[int(number)] = _handler(rank, number), handler
    return before


def _handler(rank: SimulatedRank, number: int) -> Any:
    return rank.home.handlers.get(int(number), _getsignal(number))


@on_ranks(os, "kill")
def _kill(rank: SimulatedRank, own: Any, process: int, number: int) -> None:
    if number == 0 or process != number_of(rank):
        own(process, number)
    else:
        _reaches(rank, number)


def _reaches(rank: SimulatedRank, number: int) -> None:
    """Deliver a signal that a rank sends to itself."""
    handler, name = _handler(rank, number), signal.Signals(number).name
    if callable(handler):
        handler(number, sys._getframe(3))
    elif handler != signal.SIG_IGN and name not in _ENDS_NOTHING:
        _fail(rank, name)


IDENTITY: list[Value] = [
    *(_number, _end, _set, _kill),
    on_ranks(signal, "getsignal")(lambda rank, own, number: _handler(rank, number)),
    on_ranks(signal, "raise_signal")(lambda rank, own, number: _reaches(rank, number)),
    # a rank spends most of its time waiting for its turn, so no alarm goes off
    *(
        on_ranks(signal, name)(lambda *_, never=never: never)
        for name, never in (("alarm", 0), ("setitimer", (0.0, 0.0))) if hasattr(signal, name)
    ),
    (torch.nn.parallel.DistributedDataParallel, "_get_ddp_logging_data", logging_data),
]  # fmt: skip
