"""The tests' program under torchrun: torchrun_program.py OUT CASE. Rank r writes its results to OUT/r.pt."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tplab import Mesh, P
from tplab.errors import TplabError
from tplab.torch import (
    all_gather,
    all_reduce,
    axis_index,
    copy_to,
    reduce_scatter,
    ring_shift,
    run,
    start,
)

MESH = Mesh(dp=1, tp=2)
SPECS = {"in_specs": (P("tp"), P(None, "tp")), "out_specs": (P(None, "tp"), P("tp"), P(), P())}


def arguments():
    return torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_(), torch.linspace(0, 3, 6).reshape(1, 6)


def program(x, w):
    """Messages of all kinds, a gradient, random numbers, and a tensor that is larger than a frame."""
    handle = start(ring_shift, torch.ones(5000) * axis_index("tp"), "tp")
    y = all_gather(copy_to(torch.nn.functional.dropout(x, 0.3), "tp"), "tp", 0) @ torch.ones(3, 3).tanh()
    y = reduce_scatter(y * (axis_index("tp") + 1), "tp").sin().mean(1, keepdim=True) @ w
    (dx,) = torch.autograd.grad(all_reduce(y.square().sum(), "tp"), x)
    large = all_reduce(torch.arange(5000.0) / 7 + handle.wait(), "tp")
    return y, dx, large, all_reduce(torch.rand(3), "tp", "max")


def says(fn, mesh=MESH):
    """The kind and text of the error that running `fn` raises."""
    try:
        run(fn, mesh)
    except TplabError as error:
        return type(error).__name__, str(error), repr(error.__cause__)
    return None


def raises():
    if axis_index("tp") == 1:
        raise ValueError("lost my shard")
    return all_reduce(torch.ones(3), "tp")


def returns_early():
    return None if axis_index("tp") == 0 else all_reduce(torch.ones(3), "tp")


def differs():
    return all_reduce(torch.ones(3 + axis_index("tp")), "tp")


def sends_for_nobody():
    if axis_index("tp") == 1:
        start(ring_shift, torch.ones(3), "tp")


def main(out, case):
    seen = {}
    done = run(program, MESH, *arguments(), **SPECS)
    seen["value"], seen["per_rank"] = done.value, done.per_rank
    seen["trace"] = done.trace.to_json()
    if case == "all":
        seen["wrong mesh"] = says(program, Mesh(tp=3))
        seen["raises"] = says(raises)
        seen["after"] = run(lambda: all_reduce(torch.ones(1), "tp"), MESH).per_rank
        seen["early"] = says(returns_early)
        seen["differs"] = says(differs)
        seen["nobody"] = says(sends_for_nobody)
        seen["again"] = run(program, MESH, *arguments(), **SPECS).per_rank
        run(lambda: print("a line of", axis_index("tp")), MESH)
    torch.save(seen, Path(out) / f"{dist.get_rank()}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
