"""Traces written by hand, event by event, for tests of their drawings. Nothing here runs a framework."""

from __future__ import annotations

import numpy as np

from tplab import Mesh, Trace
from tplab.schedules import Costs, one_f_one_b, simulate, zb_v
from tplab.trace import Recorder


def ring_all_gather(mesh: Mesh, axis: str, nbytes: int = 4096, hop: float = 1.0, cluster: str | None = None) -> Trace:
    """Every rank passes on the piece that it has just received, size - 1 times."""
    recorder = Recorder(mesh, "ring_all_gather", "torch")
    held = {rank: recorder.chunk(rank, 0) for rank in mesh.ranks}
    message, size = 0, mesh.axis_size(axis)
    for step in range(size - 1):
        moved = {}
        for rank in mesh.ranks:
            peer, group = mesh.neighbor(rank, axis), mesh.group(rank, axis)
            origin = mesh.neighbor(rank, axis, -step)
            about = {
                "axis": axis,
                "group": group,
                "bytes": nbytes,
                "shape": (nbytes // 4,),
                "dtype": "float32",
                "message": message,
            }
            about |= {"step": step, "chunk": held[rank], "contributors": (origin,), "values": np.array([float(origin)])}
            times = (step * hop, (step + 1) * hop)
            recorder.add(rank, "send", "ring_shift", *times, peer=peer, where="cell 3, line 4", **about)
            recorder.add(peer, "receive", "ring_shift", *times, peer=rank, where="cell 3, line 4", **about)
            moved[peer] = held[rank]
            message += 1
        held = moved
    return recorder.trace(unit="s" if cluster else "steps", cluster=cluster)


def ring_all_reduce(mesh: Mesh, axis: str, gather: bool = True, hop: float = 1.0, cluster: str | None = None) -> Trace:
    """Reduce-scatter, then (unless gather=False) all-gather. Rank r's part of piece p is worth 10 r + p."""
    recorder = Recorder(mesh, "ring_all_reduce" if gather else "ring_reduce_scatter", "torch")
    size = mesh.axis_size(axis)
    carried = {
        rank: (recorder.chunk(rank, mesh.index(rank, axis)), (rank,), 10.0 * rank + mesh.index(rank, axis))
        for rank in mesh.ranks
    }
    message = 0
    for step in range((2 if gather else 1) * (size - 1)):
        moved = {}
        for rank in mesh.ranks:
            peer, (chunk, members, value) = mesh.neighbor(rank, axis), carried[rank]
            about = {"axis": axis, "group": mesh.group(rank, axis), "bytes": 1024, "shape": (256,), "dtype": "float32"}
            about |= {
                "message": message,
                "step": step,
                "chunk": chunk,
                "contributors": members,
                "values": np.array([value]),
            }
            recorder.add(rank, "send", "ring_shift", step * hop, (step + 1) * hop, peer=peer, **about)
            recorder.add(peer, "receive", "ring_shift", step * hop, (step + 1) * hop, peer=rank, **about)
            if step < size - 1:
                piece = (mesh.index(rank, axis) - step) % size
                value, members = value + 10.0 * peer + piece, tuple(sorted((*members, peer)))
                time = (step + 1) * hop
                recorder.add(peer, "compute", "add", time, time, chunk=chunk, contributors=members, shape=(256,))
            moved[peer] = (chunk, members, value)
            message += 1
        carried = moved
    return recorder.trace(unit="s" if cluster else "steps", cluster=cluster)


def megatron_mlp(mesh: Mesh, axis: str, cluster: str = "h100") -> Trace:
    """matmul, tanh, matmul, then one all_reduce, as a single event on each rank."""
    recorder = Recorder(mesh, "mlp", "torch")
    shape, groups = (8, 16), mesh.groups(axis)
    for rank in mesh.ranks:
        for op, start, end, flops in (("matmul", 0, 8, 1 << 20), ("tanh", 8, 10, 2048), ("matmul", 10, 18, 1 << 20)):
            recorder.add(
                rank,
                "compute",
                op,
                start * 1e-6,
                end * 1e-6,
                flops=flops,
                bytes=4096,
                shape=shape,
                dtype="float32",
                where="cell 5, line 2",
            )
        group = mesh.group(rank, axis)
        total = np.full((1, 4), float(sum(group)))
        recorder.add(
            rank,
            "collective",
            "all_reduce",
            18e-6,
            26e-6,
            axis=axis,
            group=group,
            bytes=768,
            shape=shape,
            dtype="float32",
            reduction="sum",
            message=groups.index(group),
            step=0,
            contributors=group,
            values=total,
            where="cell 5, line 3",
        )
    return recorder.trace(cluster=cluster)


def overlapped_matmul(ranks: int, cluster: str = "tpu_v5e") -> Trace:
    """A ring all-gather whose hops overlap with products of the pieces that have arrived, except for the last product.

    The hop takes 12 us and the product 9, so each rank waits 3 us per hop.
    """
    mesh = Mesh(tp=ranks)
    recorder = Recorder(mesh, "all_gather_matmul", "jax")
    chunks = [recorder.chunk(rank, 0) for rank in mesh.ranks]
    for step in range(ranks):
        begin = step * 12e-6
        for rank in mesh.ranks:
            origin = (rank - step) % ranks
            recorder.add(
                rank,
                "compute",
                "dot_general",
                begin,
                begin + 9e-6,
                flops=1 << 22,
                shape=(64, 64),
                bytes=1 << 15,
                dtype="bfloat16",
                where="gather.py:12",
            )
            if step == ranks - 1:
                continue
            message, peer = step * ranks + rank, (rank + 1) % ranks
            about = {
                "axis": "tp",
                "group": tuple(mesh.ranks),
                "bytes": 8192,
                "shape": (64, 64),
                "dtype": "bfloat16",
                "step": step,
            }
            about |= {"message": message, "chunk": chunks[origin], "contributors": (origin,), "where": "gather.py:11"}
            recorder.add(rank, "send", "ring_shift", begin, begin + 12e-6, peer=peer, **about)
            recorder.add(peer, "receive", "ring_shift", begin, begin + 12e-6, peer=rank, **about)
            recorder.add(peer, "wait", "ring_shift", begin + 9e-6, begin + 12e-6, peer=rank, **{**about, "bytes": 0})
    return recorder.trace(cluster=cluster)


def send_over_wait() -> Trace:
    """Two ranks: rank 0 sends a piece, and waits from the beginning for a piece that rank 1 sends two hops later."""
    recorder = Recorder(Mesh(tp=2), "exchange", "torch")
    mine, other = recorder.chunk(0, 0), recorder.chunk(1, 0)
    for source, target, start, chunk in ((0, 1, 0.0, mine), (1, 0, 2.0, other)):
        about = {"peer": target, "axis": "tp", "group": (0, 1), "bytes": 16, "shape": (4,), "dtype": "float32"}
        about |= {"step": int(start), "chunk": chunk, "contributors": (source,), "where": "cell 2, line 3"}
        recorder.add(source, "message", "ring_shift", start, start + 1, **about)
    for rank, end in ((0, 3.0), (1, 1.0)):
        recorder.add(rank, "wait", "ring_shift", 0.0, end, axis="tp", where="cell 2, line 3")
    return recorder.trace(unit="steps")


ALL = {
    "gather 4": lambda: ring_all_gather(Mesh(tp=4), "tp", hop=22.4e-6, cluster="h100"),
    "gather 3": lambda: ring_all_gather(Mesh(tp=3), "tp"),
    "gather 2x4": lambda: ring_all_gather(Mesh(data=2, model=4), "model"),
    "gather down the columns": lambda: ring_all_gather(Mesh(data=4, model=2), "data"),
    "reduce-scatter 4": lambda: ring_all_reduce(Mesh(tp=4), "tp", gather=False),
    "all-reduce 8": lambda: ring_all_reduce(Mesh(tp=8), "tp"),
    "mlp 4": lambda: megatron_mlp(Mesh(tp=4), "tp"),
    "mlp 2x3": lambda: megatron_mlp(Mesh(dp=2, tp=3), "tp"),
    "overlap 4": lambda: overlapped_matmul(4),
    "pipeline 4": lambda: simulate(one_f_one_b(4, 6), Costs(transfer=0.5)).trace,
    "pipeline with V": lambda: simulate(zb_v(3, 6), Costs(transfer=0.25)).trace,
}
