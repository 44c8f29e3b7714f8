"""The program of each rank in a check of several nodes: `torchrun .. -m benchmarks.device.node OUT RANKS`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tplab.torch as tt
from tplab import Mesh, P
from tplab.errors import TplabError


def collectives(x: Tensor, mine: Tensor) -> list[Tensor]:
    """Every collective with its gradient, from x [R R 2, 3]; and an uneven all_to_all, gather and all_gather."""
    ranks, index = tt.axis_size("tp"), tt.axis_index("tp")
    sizes = [(index + other) % ranks for other in range(ranks)]  # to each position, and equally many from it
    dealt = torch.cat([mine, mine])[: sum(sizes)]
    sums = [
        tt.all_reduce(x, "tp"),
        tt.reduce_scatter(x, "tp"),
        tt.reduce(x, "tp", ranks - 1),
        tt.ring_all_reduce(x, "tp"),
    ]
    more = [tt.all_reduce(x, "tp", "max"), tt.all_reduce(x, "tp", "mean"), tt.reduce_scatter(x, "tp", op="mean")]
    moved = [
        tt.all_gather(x, "tp"), tt.all_gather(mine[: index + 1], "tp"), tt.gather(mine[: index + 1], "tp", 1),
        tt.scatter(x, "tp", 1), tt.all_to_all(x, "tp"), tt.all_to_all(dealt, "tp", sizes=sizes, received=sizes),
        tt.broadcast(x, "tp", 1), tt.ring_shift(x, "tp"), tt.start(tt.all_reduce, x, "tp").wait(),
    ]  # fmt: skip
    found = [*sums, *more, *moved]
    sum(y.square().sum() * (place + 1) for place, y in enumerate(found)).backward()  # type: ignore[union-attr]
    grads = [each.grad for each in (x, mine)]
    assert all(grad is not None for grad in grads)
    return [y.detach() for y in found] + [grad for grad in grads if grad is not None]


def overlapped(x: Tensor) -> Tensor:
    """A collective during much work of the same rank, on tensors that are freed while it is in flight."""
    total = torch.zeros_like(x)
    for step in range(20):
        flight = tt.start(tt.all_reduce, x * (step + tt.axis_index("tp")), "tp")
        work = x
        for _ in range(10):
            work = (work @ x).tanh()
        total = total + flight.wait() + work
    return total


def sharded(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y = tt.reduce_from((tt.copy_to(x, "tp") @ a).tanh() @ b, "tp")
    y.square().sum().backward()
    assert x.grad is not None and a.grad is not None and b.grad is not None
    return y.detach(), x.grad, a.grad, b.grad


def arguments(ranks: int, dtype: torch.dtype) -> dict[str, tuple[Any, tuple[Tensor, ...], dict[str, Any]]]:
    """name -> (program, its arguments, the options of `run`)"""
    generator = torch.Generator().manual_seed(ranks)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    parts = drawn(ranks * ranks * 2 * ranks, 3), drawn(ranks * ranks, 5)
    layers = drawn(5, 6), drawn(6, 4 * ranks), drawn(4 * ranks, 6)
    return {
        "collectives": (collectives, parts, {"in_specs": (P("tp"), P("tp"))}),
        "overlapped": (overlapped, (drawn(256, 256).detach() / 16,), {}),
        "in pairs": (in_pairs, (drawn(7, 5).detach(),), {}),
        "layers": (sharded, layers, {"in_specs": (P(), P(None, "tp"), P("tp", None))}),
    }


def in_pairs(x: Tensor) -> list[Tensor]:
    """Several messages at a time around the ring, in both directions, and in a group of one; awaited in any order."""
    ranks, index = tt.axis_size("tp"), tt.axis_index("tp")
    found = [tt.start(tt.all_reduce, x * k, "dp") for k in range(3)]
    for k in range(3):
        tt.send((x + k, x.sum(0) * index), "tp", (index + 1) % ranks)
    got = [tt.start(tt.receive, "tp", (index - 1) % ranks) for _ in range(3)]
    flights = [tt.start(tt.ring_shift, x * (k + 1), "tp", 1 - 2 * (k % 2)) for k in range(4)]
    late = [flight.wait() for flight in reversed([*found, *flights])]
    return late + [part for one in got for part in one.wait()]


def raises(x: Tensor) -> Tensor:
    if tt.axis_index("tp") == 1:
        raise ValueError("lost my shard")
    return tt.all_reduce(x, "tp")


def differs(x: Tensor) -> Tensor:
    return tt.all_reduce(x[tt.axis_index("tp") :], "tp")


def returns_early(x: Tensor) -> Tensor | None:
    return None if tt.axis_index("tp") == 0 else tt.all_reduce(x, "tp")


FAULTS = {"raises": raises, "differs": differs, "returns early": returns_early}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def results(mesh: Mesh) -> dict[str, Any]:
    """The programs' results on every rank of `mesh`, moved to the CPU."""
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        for name, (program, given, about) in arguments(mesh.axis_size("tp"), dtype).items():
            out = tt.run(program, mesh, *given, **about)
            found[f"{name}, {dtype}"] = pytree.tree_map_only(Tensor, lambda x: x.cpu(), out.per_rank)
    return found


def errors(mesh: Mesh) -> dict[str, str]:
    """The error of each fault, and after it the result of a correct program."""
    found = {}
    for name, fault in FAULTS.items():
        try:
            tt.run(fault, mesh, torch.ones(9))
        except TplabError as error:
            found[name] = f"{type(error).__name__}: {error}"
        found[f"after {name}"] = str(tt.run(lambda x: tt.all_reduce(x, "tp"), mesh, torch.ones(2)).per_rank[0].tolist())
    return found


def main(out: Path, size: int) -> None:
    mesh = Mesh(dp=1, tp=size)
    where = tt.run(lambda x: str(tt.all_reduce(x, "tp").device), mesh, torch.ones(1)).per_rank
    found = {"where": where, "results": results(mesh), "errors": errors(mesh)}
    torch.save(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
