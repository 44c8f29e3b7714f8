"""What torch.cuda and torch.accelerator return on ranks whose GPU is the CPU."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ContextDecorator, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.cuda import memory as torchs_memory
from torch.cuda import nccl, nvtx, random

from tplab.torch.ranks.rank import this_rank
from tplab.torch.ranks.simulated import SimulatedRank
from tplab.torch.ranks.watcher import listening
from tplab.torch.watching.live_bytes import LiveBytes


class Devices:
    """The GPUs of a node, each of which is the CPU; as many as ranks, unless the run gives another number.

    was_asked_for_memory   whether a program has asked for its memory use while memory was not counted
    """

    def __init__(self, num_gpus: int, cpu: torch.device):
        self.num_gpus, self._cpu = num_gpus, cpu
        self.was_asked_for_memory = False
        self._current: dict[int, int] = {}  # rank -> its current device

    def answers(self) -> list[tuple[Any, Mapping[str, Any]]]:
        """(module, name -> the function or class to put there)"""
        nothing = dict.fromkeys(_NOTHING, _nothing)
        memory = {
            **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), lambda *_: self._bytes().now()),
            **dict.fromkeys(_MOST, lambda *_: self._bytes().lap),
            **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), lambda *_: self._new_lap()),
        }
        cuda = {
            **memory, **nothing, **{name: getattr(torch, name) for name in _TENSORS}, "Stream": Stream, "Event": Event,
            "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: self.num_gpus,
            "is_bf16_supported": lambda *_, **__: True, "is_tf32_supported": lambda: False,
            "is_current_stream_capturing": lambda: False, "can_device_access_peer": lambda *_: True,
            "set_device": self._set, "current_device": self._get, "device": _Context, "device_of": _Context,
            "stream": _Context, "current_stream": Stream, "default_stream": Stream,
            "get_device_name": lambda device=None: _NAME, "get_device_capability": lambda device=None: _CAPABILITY,
            "get_device_properties": lambda device=None: self._properties(), "get_arch_list": list,
            "mem_get_info": lambda device=None: (self._memory() - self._bytes().now(), self._memory()),
            "memory_stats": lambda device=None: {}, "memory_summary": lambda *_, **__: _NAME,
            "manual_seed": _seed, "manual_seed_all": _seed, "seed": _nothing, "seed_all": _nothing,
            "initial_seed": torch.initial_seed, "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "get_rng_state_all": lambda: [torch.get_rng_state()],
            "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        }  # fmt: skip
        accelerator = {
            **memory, **nothing, "is_available": lambda: True, "device_count": lambda: self.num_gpus,
            "current_accelerator": lambda check_available=False: self._cpu, "current_stream": Stream,
            "set_device_index": self._set, "set_device_idx": self._set, "current_device_index": self._get,
            "current_device_idx": self._get, "device_index": _Context, "memory_stats": cuda["memory_stats"],
            "get_device_capability": lambda device=None: {},
        }  # fmt: skip
        marks = dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), lambda *_, **__: 0)
        return [
            (torch.cuda, cuda),
            *((home, cuda) for home in (torchs_memory, random)),
            (torch.accelerator, accelerator),
            (nvtx, {**marks, "range": _Context}),
            (nccl, {"version": lambda: (2, 0, 0)}),
        ]

    def _set(self, device: Any) -> None:
        """torch.cuda.set_device: a number, or a device; devices are mapped, and mean the rank's own."""
        rank = this_rank().rank
        index = device if isinstance(device, int) else rank % self.num_gpus
        if index >= self.num_gpus:
            raise ValueError(
                f"set_device({index}): a node has {self.num_gpus} devices here, from 0 to {self.num_gpus - 1}; "
                "LOCAL_RANK is this rank's"
            )
        self._current[rank] = max(index, 0)

    def _get(self) -> int:
        return self._current.get(this_rank().rank, 0)

    def _bytes(self) -> LiveBytes:
        """The counter of this rank's tensor bytes; if there is none, a counter that has seen no tensors."""
        live = listening(LiveBytes)
        self.was_asked_for_memory |= live is None
        return live or LiveBytes()

    def _new_lap(self) -> None:
        live = self._bytes()
        live.lap = live.now()

    def _memory(self) -> int:
        """The bytes of a GPU of the cluster, or of an H100."""
        cluster = _simulated().world.cluster
        return int(cluster.chip.memory if cluster is not None else 80e9)

    def _properties(self) -> SimpleNamespace:
        major, minor = _CAPABILITY
        return SimpleNamespace(
            name=_NAME, total_memory=self._memory(), major=major, minor=minor, multi_processor_count=1, warp_size=32
        )


_NAME = "the CPU instead of a GPU"
_CAPABILITY = (8, 0)  # the first with bfloat16, which the CPU also has
_MOST = ("max_memory_allocated", "max_memory_reserved", "max_memory_cached")
_NOTHING = (
    "init",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "set_stream",
    "reset_accumulated_memory_stats",
    "reset_max_memory_cached",
    "set_per_process_memory_fraction",
    "set_sync_debug_mode",
    "empty_host_cache",
)
_TENSORS = [name for name in dir(torch.cuda) if name.endswith("Tensor") and hasattr(torch, name)]


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


class _Context(ContextDecorator, nullcontext[None]):
    """A stream or a device that is current inside a `with`, or in a function that is decorated with it."""

    def __init__(self, *_: Any, **__: Any):
        super().__init__()


def _seed(seed: int) -> None:
    """torch.cuda.manual_seed: ranks have one generator each."""
    torch.default_generator.manual_seed(int(seed))


def _simulated() -> SimulatedRank:
    rank = this_rank()
    assert isinstance(rank, SimulatedRank)
    return rank


class Stream:
    """A queue of operations. On the CPU all operations run in order, so there is never anything to wait for."""

    device_type, stream_id, cuda_stream = 1, 0, 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        self.priority = priority

    wait_stream = wait_event = synchronize = _nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        """There is no other stream to return to."""


class Event:
    """A moment: on the rank's modelled clock if the run has a cluster, otherwise on this machine's."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any):
        self._seconds = 0.0
        self._moment: int | None = None  # on the modelled clock

    wait = synchronize = _nothing

    def record(self, stream: Any = None) -> None:
        rank = _simulated()
        is_modelled = rank.world.cluster is not None and not rank.world.is_timed
        self._moment = rank.here().moment() if is_modelled else None
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        return 1e3 * (end_event._read() - self._read())

    def _read(self) -> float:
        return self._seconds if self._moment is None else _simulated().here().seconds_at(self._moment)
