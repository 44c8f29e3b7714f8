"""Measurements of a cluster on the ranks of this process group: collectives, hops, matmuls, copies.

Every rank calls `on_these_ranks`; rank 0 gets the rows. A time is the slowest rank's, the median of several runs.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from tplab.cost.own import Row

_SIZES = tuple(2**power for power in range(10, 29, 2))
"""Sizes of the whole tensor, in bytes."""
_EDGES = (64, 256, 512, 1024, 2048)
_DTYPES = {"cuda": (torch.bfloat16, torch.float32), "cpu": (torch.float32,)}
_RUNS = 7


class Measured(NamedTuple):
    """The rows, on the first rank, and the hardware and software that they were measured on."""

    rows: list[Row]
    chip: str
    on_gpus: bool
    how: str


def on_these_ranks(most: int | None = None) -> Measured:
    """Measure the ranks of torchrun, or this process alone: over NCCL if every rank has a GPU, otherwise over gloo.

    most   bytes of the largest tensor that is sent
    """
    local, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        sizes = [size for size in _SIZES if size <= (most or (2**28 if on_gpus else 2**24))]
        chip = torch.cuda.get_device_name(device) if on_gpus else f"{platform.machine()}, one process"
        how = f"{'NCCL' if on_gpus else 'gloo'} on {dist.get_world_size()} ranks, torch {torch.__version__}"
        return Measured(_measure(device, sizes), chip, on_gpus, how)
    finally:
        dist.destroy_process_group()


def _measure(device: torch.device, sizes: Sequence[int]) -> list[Row]:
    """The rows of this process group on `device`, at rank 0; an empty list on all other ranks."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, os.environ.get("GROUP_RANK", "") + socket.gethostname())
    rows = list(_on_chip(device))
    for ranks in _groups(hosts):
        group = dist.new_group(ranks)
        if isinstance(group, dist.ProcessGroup):
            rows += _on_group(group, ranks, len({hosts[rank] for rank in ranks}), device, sizes)
        dist.barrier()
    return rows if dist.get_rank() == 0 else []


def _groups(hosts: Sequence[str]) -> list[list[int]]:
    """Ranks 0 to n-1 for n = 2, 4, ... up to one node; and all ranks of 2, 4, ... nodes."""
    node = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
    nodes = list(dict.fromkeys(hosts))
    found = [node[:size] for size in _doubled(len(node))]
    found += [[rank for rank, host in enumerate(hosts) if host in nodes[:size]] for size in _doubled(len(nodes))]
    return found


def _doubled(most: int) -> list[int]:
    sizes = [2**power for power in range(1, most.bit_length()) if 2**power <= most]
    return sizes if not sizes or sizes[-1] == most else [*sizes, most]


def _on_group(
    group: dist.ProcessGroup, ranks: Sequence[int], nodes: int, device: torch.device, sizes: Sequence[int]
) -> Iterator[Row]:
    R = len(ranks)
    for size in sizes:
        piece = torch.ones(max(1, size // 4 // R), device=device)
        whole = torch.ones(R * len(piece), device=device)
        for op, call in _calls(piece, whole, group).items():
            yield Row(op, R, nodes, float(whole.nbytes), _seconds(call, device, group))
    if ranks[1] - ranks[0] == 1 and (nodes == 1) == (R == 2):
        for size in sizes:
            x = torch.ones(size // 4, device=device)
            yield Row("hop", 2, 1, float(x.nbytes), _seconds(_ping(x, ranks, group), device, group) / 2)


def _calls(piece: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    out = torch.empty_like(whole)
    pieces, parts = list(out.chunk(group.size())), list(whole.chunk(group.size()))
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed both
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: gather(out, piece, group=group),
        "reduce_scatter": lambda: scatter(piece, whole, group=group),
        "all_to_all": lambda: dist.all_to_all(pieces, parts, group=group),
    }


def _ping(x: torch.Tensor, ranks: Sequence[int], group: dist.ProcessGroup) -> Callable[[], object]:
    """There and back, between the first two ranks of a group; the other ranks do nothing."""

    def call() -> None:
        if dist.get_rank() == ranks[0]:
            dist.send(x, ranks[1], group=group)
            dist.recv(x, ranks[1], group=group)
        elif dist.get_rank() == ranks[1]:
            dist.recv(x, ranks[0], group=group)
            dist.send(x, ranks[0], group=group)

    return call


def _on_chip(device: torch.device) -> Iterator[Row]:
    """Matmuls and copies, on all ranks at once: they share hardware as in a program."""
    for dtype in _DTYPES[device.type]:
        for edge in (*_EDGES, 4096, 8192) if device.type == "cuda" else _EDGES:
            a, b = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
            seconds = _seconds(lambda a=a, b=b: a @ b, device, None)
            yield Row("matmul", 1, 1, 2.0 * edge**3, seconds, str(dtype).removeprefix("torch."))
    x = torch.ones(2**28 if device.type == "cuda" else 2**24, device=device)
    y = torch.empty_like(x)
    yield Row("copy", 1, 1, 2.0 * x.nbytes, _seconds(lambda: y.copy_(x), device, None))


def _seconds(call: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None) -> float:
    """The seconds of one call on the slowest rank: the median of several runs, each of as many calls as take 5 ms."""
    call()
    once = _timed(call, 1, device, group)
    calls = int(min(100.0, max(1.0, 5e-3 / once)))
    return statistics.median(_timed(call, calls, device, group) for _ in range(_RUNS))


def _timed(call: Callable[[], object], calls: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if group is not None:
        dist.barrier(group)
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    took = torch.tensor([(time.perf_counter() - start) / calls], device=device)
    if group is not None:
        dist.all_reduce(took, dist.ReduceOp.MAX, group=group)  # so that all ranks agree on the number of calls
    return float(took)
