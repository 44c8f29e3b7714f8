"""Streams of a GPU that simulated ranks share, where each rank also has streams of its own, as FSDP2 does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tplab.torch.ranks.simulated import SimulatedRank


@contextmanager
def on_one_stream(member: SimulatedRank, x: Tensor) -> Iterator[None]:
    """Inside, work on x's GPU is queued on the one stream that all ranks share: another rank reads what this one sends,
    and a GPU runs the work of two streams in any order. That stream waits for what the rank's own stream has to do, and
    the rank's own one then waits for it."""
    if not x.is_cuda:
        yield
        return
    mine, shared = torch.cuda.current_stream(x.device), member.world.stream
    if shared is None or shared.device != x.device:
        shared = torch.cuda.default_stream(x.device)
    if mine == shared:
        yield
        return
    shared.wait_stream(mine)
    with torch.cuda.stream(shared):
        yield
    mine.wait_stream(shared)
