"""Tensors that are not contiguous: what simulated ranks make of them is what processes over gloo make of them.

What is expected here was seen on two processes over gloo, with torch 2.14: each rank puts in 0, 1, 2 ..., rank 1 those
plus 100, dense, as the transpose of a dense tensor, or in every second column of a wider one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.torch.distributed.test_collectives import on, spread_out
from tplab.errors import RankError, ShapeError


def dense(rows: int) -> Tensor:
    return (torch.arange(3.0 * rows) + 100 * dist.get_rank()).view(rows, 3)


def transposed(rows: int) -> Tensor:
    return (torch.arange(3.0 * rows) + 100 * dist.get_rank()).view(3, rows).t()


def wide(rows: int) -> Tensor:
    """Every second column; what is between them is -1."""
    x = torch.full((rows, 6), -1.0)
    x[:, ::2] = dense(rows)
    return x[:, ::2]


Make = Callable[[int], Tensor]


def all_reduce(given: Make, _: Make) -> Any:
    x = given(2)
    dist.all_reduce(x)
    return x


def all_reduce_coalesced(given: Make, _: Make) -> Any:
    x = given(2)
    with pytest.warns(FutureWarning, match="all_reduce_coalesced"):
        dist.all_reduce_coalesced([x])
    return x


def broadcast(given: Make, _: Make) -> Any:
    x = given(2)
    dist.broadcast(x, 0)
    return x


def all_gather(given: Make, output: Make) -> Any:
    outputs = [output(2).fill_(-1) for _ in range(2)]
    dist.all_gather(outputs, given(2))
    return torch.cat(outputs)


def reduce_scatter(given: Make, output: Make) -> Any:
    y = output(2).fill_(-1)
    dist.reduce_scatter(y, [given(2) for _ in range(2)])
    return y


def scatter(given: Make, output: Make) -> Any:
    y = output(2).fill_(-1)
    dist.scatter(y, [given(2) for _ in range(2)] if dist.get_rank() == 0 else None, 0)
    return y


def all_to_all_single(given: Make, output: Make) -> Any:
    y = output(4).fill_(-1)
    dist.all_to_all_single(y, given(4))
    return y


WARNS = pytest.warns(UserWarning, match="are not in the order of memory.*gloo uses the order of memory")
SEEN = [
    (all_reduce, transposed, dense, nullcontext(), [100, 104, 108, 102, 106, 110]),
    (all_reduce, wide, dense, WARNS, [100, 102, 104, 103, 104, 105]),
    (all_reduce_coalesced, wide, dense, nullcontext(), [100, 102, 104, 106, 108, 110]),
    (broadcast, transposed, dense, nullcontext(), [0, 2, 4, 1, 3, 5]),
    (broadcast, wide, dense, WARNS, [0, 1, 2, 103, 104, 105]),
    (all_gather, transposed, wide, nullcontext(), [0, 2, 4, 1, 3, 5, 100, 102, 104, 101, 103, 105]),
    (reduce_scatter, transposed, dense, WARNS, [100, 103, 106, 104, 107, 110]),
    (reduce_scatter, dense, transposed, WARNS, [100, 103, 106, 104, 107, 110]),
    (reduce_scatter, transposed, transposed, WARNS, [100, 104, 108, 102, 106, 110]),
    (reduce_scatter, dense, wide, WARNS, [100, 103, 106, 103, 104, 105]),
    (scatter, transposed, dense, WARNS, [0, 1, 2, 3, 4, 5]),
    (scatter, wide, dense, WARNS, [0, -1, 1, -1, 2, -1]),
    (scatter, dense, transposed, WARNS, [0, 2, 4, 1, 3, 5]),
    (all_to_all_single, dense, transposed, WARNS, [6, 10, 108, 7, 11, 109, 8, 106, 110, 9, 107, 111]),
    (all_to_all_single, dense, wide, WARNS, [6, 8, 10, 106, 108, 110, -1, -1, -1, -1, -1, -1]),
]


@pytest.mark.parametrize(
    ("program", "given", "output", "says", "expected"), SEEN, ids=lambda value: getattr(value, "__name__", "")
)
def test_rank_1_has_what_it_has_over_gloo(
    program: Callable[[Make, Make], Tensor], given: Make, output: Make, says: AbstractContextManager, expected: list
):
    with says:
        out = on(2, lambda: program(given, output).flatten().tolist())
    assert out.per_rank[1] == expected


@pytest.mark.parametrize("make", [transposed, wide])
def test_what_gloo_refuses(make: Make):
    def sends() -> None:
        dist.send(make(2), 1) if dist.get_rank() == 0 else dist.recv(dense(2), 0)

    def receives() -> None:
        dist.send(dense(2), 1) if dist.get_rank() == 0 else dist.recv(make(2), 0)

    def receives_from_any() -> None:
        dist.send(dense(2), 1) if dist.get_rank() == 0 else dist.recv(make(2))

    def exchanges() -> None:
        dist.all_to_all_single(dense(2), make(2))

    for program, op in ((sends, "send"), (receives, "recv"), (receives_from_any, "recv"), (exchanges, "all_to_all")):
        with pytest.raises(RankError, match=rf"raised ValueError at test_strides.py.* {op}.* is not contiguous"):
            on(2, program)


def test_messages_of_a_program_for_nccl_are_taken_as_memory_has_them():
    """nccl asks that both ranks have the same strides, and warns."""

    def program() -> list[float]:
        dist.init_process_group("nccl")
        x = transposed(2)
        dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
        return x.flatten().tolist()

    assert on(2, program).per_rank == [[0, 2, 4, 1, 3, 5]] * 2


def test_a_tensor_that_is_larger_than_its_memory():
    with pytest.raises(ShapeError, match="which ends before the last one"):
        on(2, lambda: dist.all_reduce(torch.ones(1).expand(4)))


def test_no_gap_is_sent():
    """Only a collective of all elements may touch what is between those of a tensor; a gather has no such effect."""

    def program() -> list[float]:
        x = spread_out(torch.ones(2, 3))
        whole = x._base
        assert whole is not None
        dist.all_gather([x, torch.empty(2, 3)], torch.full((2, 3), 5.0 + dist.get_rank()))
        return whole.flatten().tolist()

    assert on(2, program).per_rank == [[5.0, 0.0] * 6] * 2
