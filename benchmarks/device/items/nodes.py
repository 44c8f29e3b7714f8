"""Several nodes of one GPU each, as far as one GPU can simulate them: NCCL takes each process for another machine.

NCCL refuses two ranks on one GPU if both are on one host, and identifies a host by NCCL_HOSTID. With a different one
per process, messages go through sockets, as between machines without InfiniBand.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from benchmarks.device import node, process
from benchmarks.device.check import Figures, Place, Task, Wrong
from benchmarks.device.items.recording import judged, written
from tplab import Mesh

CLOSE = {"torch.float64": 1e-12, "torch.float32": 1e-4, "torch.bfloat16": 0.08}
"""The largest error of sums, relative to the largest number: they are added up in another order, also in 16 bits."""


def tasks(place: Place) -> Iterator[Task]:
    for nodes in (2,) if place.quick else (2, 3, 4):
        yield Task(f"{nodes} nodes of one rank, run under torchrun", partial(under_torchrun, place, nodes), 120)
    yield Task("2 nodes of one rank, recorded", partial(recorded, place), 90)


def under_torchrun(place: Place, nodes: int) -> Figures:
    """Compare every rank's results and gradients with simulated ranks'. Faults are named, and later runs still work."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{index}.pt" for index in range(nodes)]
        started(nodes, [["-m", "benchmarks.device.node", str(file), str(nodes)] for file in files], 100)
        found = [torch.load(file, weights_only=False) for file in files]
    want, off = node.results(Mesh(dp=1, tp=nodes)), dict.fromkeys(CLOSE, 0.0)
    for one in found:
        for name, each in want.items():
            dtype = name.split(", ")[1]
            for a, b in zip(pytree.tree_leaves(one["results"][name]), pytree.tree_leaves(each), strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype, (name, a.shape, b.shape)
                off[dtype] = max(off[dtype], float((a - b).abs().max() / b.abs().max()) if b.numel() else 0.0)
    figures: Figures = {"where": found[0]["where"], "off by": off, "said": found[0]["errors"]}
    assert all(where.startswith(place.device) for one in found for where in one["where"]), figures
    if not all(off[dtype] < most for dtype, most in CLOSE.items()):
        raise Wrong("results differ from those of simulated ranks", figures)
    kinds = {
        "raises": "RankError: rank 1 raised ValueError",
        "differs": "CollectiveMismatchError",
        "returns early": "DeadlockError",
    }
    for one in found:
        for name, text in one["errors"].items():
            if text != str([float(nodes)] * 2) if name.startswith("after") else not text.startswith(kinds[name]):
                raise Wrong(f"{name}: {text}", figures)
    return figures


def recorded(place: Place) -> Figures:
    """DDP on two nodes under `tplab.record`, merged: all_reduce and all_gather of both ranks, each with a time."""
    device, backend = place.device, "nccl" if place.device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(written(device, backend, 64 if place.quick else 1024), encoding="utf8")
        started(2, [["-m", "tplab.record", "--to", f"{folder}/trace", str(script)]] * 2, 75)
        return judged(Path(folder) / "trace", 2)


def started(nodes: int, commands: Sequence[Sequence[str]], limit: float) -> None:
    """Run a command on each node, under its own torchrun. Raises Wrong if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(nodes),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
    ]
    many = [
        ([*launcher, "--node-rank", str(index), "--nproc-per-node", "1", *command], {"NCCL_HOSTID": f"node{index}"})
        for index, command in enumerate(commands)
    ]
    for index, done in enumerate(process.together(many, limit)):
        if done.code:
            raise Wrong(f"node {index}: {done.tail}", {"exit status": done.code})
