"""What the simulated ranks of one run share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

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
    inherited          makes the context in which a rank's thread runs
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
        self.inherited = inherited_state(device)
        self.stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None


def inherited_state(device: torch.device | None = None) -> Callable[[], AbstractContextManager[None]]:
    """A context that gives another thread the torch settings of this one; `device` is where its program runs."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    num_threads, default_device = torch.get_num_threads(), torch.get_default_device()
    kinds = {"cpu", "cuda"} | ({device.type} if device is not None else set())
    kinds = {kind for kind in kinds if torch.amp.is_autocast_available(kind)}  # meta tensors have none
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
    cache = torch.is_autocast_cache_enabled()
    stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None

    @contextmanager
    def state() -> Iterator[None]:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        with ExitStack() as stack:
            # a GPU's backward pass would run in a thread that all ranks share, and the first to wait would stop all
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if inference:
                stack.enter_context(torch.inference_mode())
            if not grad:
                stack.enter_context(torch.no_grad())
            if default_device.type != "cpu":
                stack.enter_context(default_device)
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))  # this also makes its device the current one
            yield

    return state
