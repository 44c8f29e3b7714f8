"""What a rank's program is told about its process, and how it ends it: each rank would be a process of its own."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, NoReturn

import torch

from tplab.errors import RankError
from tplab.torch.distributed.blocking import taking_turns
from tplab.torch.ranks.program import is_program
from tplab.torch.ranks.simulated import SimulatedRank
from tplab.torch.ranks.turns import Released

_getpid, _end = os.getpid, os._exit
_PROFILER = os.path.join(os.path.dirname(torch.profiler.__file__), "")
_logging_data: Any = torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data


def getpid() -> int:
    """`os.getpid`: where the program itself asks, or torch's profiler for the name of a file, a number for each rank.
    Libraries that ask, to notice a fork, get the process's own."""
    asks = sys._getframe(1).f_code.co_filename
    if not (is_program(asks) or asks.startswith(_PROFILER)) or (rank := taking_turns()) is None:
        return _getpid()
    return number_of(rank)


def number_of(rank: SimulatedRank) -> int:
    """The number that the rank has for its process: that of its thread. So it belongs to no other process, and a signal
    to it reaches this one."""
    thread = rank.home.seat.thread
    return (thread and thread.native_id) or _getpid()


def end(code: int) -> NoReturn:
    """`os._exit`: ends the rank, and as under torchrun all others, unless all is well. The process goes on: in a
    notebook, it is the kernel."""
    if (rank := taking_turns()) is None:
        _end(code)
    if code == 0 and threading.current_thread() is rank.home.seat.thread:
        raise SystemExit(0)
    text = f"rank {rank.rank} ended its process by os._exit({code}) at {rank.lines.here()}"
    rank.seat.turns.fail(RankError(text, rank.rank))
    raise Released


def logging_data(model: Any) -> dict[str, Any]:
    """`DistributedDataParallel._get_ddp_logging_data`: with the backend that the program asked for, and the rank's own
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


IDENTITY: list[tuple[Any, str, Any]] = [
    (os, "getpid", getpid),
    (os, "_exit", end),
    (torch.nn.parallel.DistributedDataParallel, "_get_ddp_logging_data", logging_data),
]
"""Module or class, name, and what is there for the time of a run."""
