"""What the simulated ranks of one run share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from tplab.cost.cluster import Cluster
from tplab.torch.ranks.arguments import Job
from tplab.torch.ranks.chronicle import Chronicle
from tplab.torch.ranks.meeting import Group
from tplab.torch.ranks.rank import Lines
from tplab.torch.ranks.values import Values


class World:
    """The mesh, the groups that meet on it, and the chronicle of what happens.

    is_timed           whether the ranks' own computing is timed
    values             what the trace keeps of messages and results
    inherited          the settings with which a rank's thread runs
    fuses_attention    whether its modelled clock is that of a chip that computes attention in one kernel
    stream             the caller's stream on the GPU that the ranks share, on which they all begin; None without a GPU
    """

    def __init__(self, job: Job, cluster: Cluster | None, is_timed: bool):
        device = self.device = job.device
        self.mesh, self.seed, self.cluster, self.is_timed = job.mesh, job.seed, cluster, is_timed
        self.fuses_attention = cluster is not None and not is_timed and cluster.chip.fuses_attention
        self.values = Values(job.keep_values)
        self.chronicle = Chronicle(job.mesh, job.title, cluster, "measured" if is_timed else "modelled")
        self.members: list[Any] = []  # the rank of each lane
        self.lines = Lines()
        self.groups: dict[tuple[int, ...], Group] = {}
        self.inherited = Inherited.here(device)
        self.stream = self.inherited.stream


class Inherited(NamedTuple):
    """The torch settings of a thread, for another thread or a process that runs a program in its place."""

    grad: bool
    inference: bool
    num_threads: int
    default_device: torch.device
    autocast: list[tuple[str, torch.dtype, bool]]
    stream: Any = None

    @classmethod
    def here(cls, device: torch.device | None = None, num_ranks: int = 1) -> Inherited:
        """Those of the calling thread; `device` is where the program runs. Processes share its threads."""
        kinds = {"cpu", "cuda"} | ({device.type} if device is not None else set())
        kinds = {kind for kind in kinds if torch.amp.is_autocast_available(kind)}  # meta tensors have none
        cache = torch.is_autocast_cache_enabled()
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            max(1, torch.get_num_threads() // num_ranks),
            torch.get_default_device(),
            [(kind, torch.get_autocast_dtype(kind), cache) for kind in kinds if torch.is_autocast_enabled(kind)],
            torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None,
        )

    @contextmanager
    def state(self) -> Iterator[None]:
        """A context with these settings."""
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        with ExitStack() as stack:
            # a GPU's backward pass would run in a thread that knows no rank, and the first to wait would stop all
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if not self.grad:
                stack.enter_context(torch.no_grad())
            if self.default_device.type != "cpu":
                stack.enter_context(self.default_device)
            for kind, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))  # this also makes its device the current one
            yield
