"""Collectives that few programs use: of sparse tensors, into a given tensor, a barrier that says who is missing."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.torch.distributed.test_collectives import on
from tplab.errors import RankError
from tplab.mesh import Mesh
from tplab.torch import LiveBytes, run

SOON = timedelta(seconds=0.2)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def sparse(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows 0 to `rank`, the first of them twice; rank 2 has none at all."""
    rows = [] if rank == 2 else [0, *range(rank + 1)]
    values = torch.arange(2 * len(rows)).reshape(-1, 2).to(dtype) + rank
    return torch.sparse_coo_tensor(torch.tensor([rows, rows], dtype=torch.int64).reshape(2, -1), values, (4, 4, 2))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("is_async", [False, True])
def test_sparse_tensors_are_added_up(num_ranks: int, is_async: bool):
    def program() -> Tensor:
        x = sparse(dist.get_rank())
        work = dist.all_reduce(x, async_op=is_async)
        if work is not None:
            work.wait()
        assert x.is_sparse
        return x.to_dense()

    expected = sum(sparse(rank).to_dense() for rank in range(num_ranks))
    for found in on(num_ranks, program).per_rank:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_gradients_of_an_embedding():
    """Those that sparse=True makes are the ones that people add up."""

    def program() -> Tensor:
        torch.manual_seed(0)
        table = torch.nn.Embedding(6, 2, sparse=True)
        table(torch.tensor([dist.get_rank(), 5])).sum().backward()
        gradient: Any = table.weight.grad
        dist.all_reduce(gradient)
        return gradient.to_dense()[:, 0]

    assert [found.tolist() for found in on(3, program).per_rank] == [[1, 1, 1, 0, 0, 3]] * 3


def test_a_sparse_gradient_costs_its_indices_and_values():
    """On a modelled clock: it has no bytes of its own."""

    def program() -> None:
        torch.nn.Embedding(1000, 4, sparse=True)(torch.tensor([1, 2, 2])).sum().backward()

    (made,) = (event for event in run(program, Mesh(r=1), cluster="h100").trace.events if "sparse" in event.op)
    assert made.bytes == 2 * (3 * 8 + 3 * 4 * 4)  # read and written


def test_gradients_of_an_embedding_in_distributed_data_parallel():
    def program() -> Tensor:
        table = torch.nn.Embedding.from_pretrained(torch.ones(6, 2), freeze=False, sparse=True)
        model = torch.nn.parallel.DistributedDataParallel(table)
        model(torch.tensor([dist.get_rank(), 5])).sum().backward()
        gradient: Any = table.weight.grad
        return gradient.to_dense()[:, 0]

    assert [found.tolist() for found in on(2, program).per_rank] == [[0.5, 0.5, 0, 0, 0, 1]] * 2


def test_sparse_gradients_are_left_out_where_live_bytes_are_counted():
    table = torch.nn.Embedding(6, 2, sparse=True)
    with LiveBytes():
        table(torch.tensor([1, 5])).sum().backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse


@pytest.mark.parametrize("op", [dist.ReduceOp.MAX, dist.ReduceOp.AVG], ids=str)
def test_what_has_no_sparse_sum_is_refused(op: Any):
    with pytest.raises(RankError, match="can only add up sparse_coo tensors"):
        on(2, lambda: dist.all_reduce(sparse(0), op))


def test_a_functional_all_gather_into_a_given_tensor():
    def program() -> tuple[Tensor, bool]:
        out = torch.zeros(6)
        ops = torch.ops._c10d_functional
        x = torch.ones(2) + dist.get_rank()
        y = ops.all_gather_into_tensor_out(x, 3, dist.group.WORLD.group_name, out=out)  # type: ignore[union-attr]
        again = ops.all_gather_into_tensor_out.default(x, 3, dist.group.WORLD.group_name, out=y)  # type: ignore[union-attr]
        return ops.wait_tensor(again), y.data_ptr() == out.data_ptr()

    for found, is_same in on(3, program).per_rank:
        assert found.tolist() == [1, 1, 2, 2, 3, 3] and is_same


# --- monitored_barrier -----------------------------------------------------------------------------------------------


def test_a_barrier_with_a_timeout_that_all_reach():
    def program() -> float:
        dist.monitored_barrier(timeout=SOON)
        dist.monitored_barrier(timeout=SOON, wait_all_ranks=True)
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    assert on(3, program).per_rank == [3.0] * 3


def failed(rank: int) -> str:
    try:
        dist.monitored_barrier(timeout=SOON, wait_all_ranks=rank == 3)
    except RuntimeError as error:
        return str(error)
    return "passed"


@pytest.mark.parametrize("is_polling", [False, True])
def test_who_does_not_come_is_named_and_the_program_goes_on(is_polling: bool):
    """Where nothing can change any more, no rank waits for the time that it was given."""

    def program() -> tuple[str, float]:
        rank, said = dist.get_rank(), ""
        if rank != 1:
            said = failed(rank)
            done.append(rank)
        while is_polling and len(done) < 2:
            time.sleep(1e-3)
        x = torch.ones(1)
        dist.all_reduce(x)
        return said, x.item()

    done: list[int] = []
    (first, _), _, (third, last) = on(3, program).per_rank
    assert "Rank 1 failed to pass monitoredBarrier in 200 ms" in first
    assert "Rank 2 successfully reached monitoredBarrier, but received errors" in third and last == 3.0


def test_all_that_do_not_come():
    def program() -> None:
        if dist.get_rank() == 0:
            dist.monitored_barrier(timeout=timedelta(minutes=5), wait_all_ranks=True)

    with pytest.raises(RankError, match="Ranks 1, 2 failed to pass monitoredBarrier in 300000 ms"):
        on(3, program)


def test_no_time_at_all():
    def program() -> None:
        dist.monitored_barrier(timeout=timedelta(0))

    with pytest.raises(RankError, match="Rank 0 timed out in monitoredBarrier after 0 ms"):
        on(2, program)


def test_a_slow_rank_is_not_missing():
    """As long as a rank computes, the others wait: simulated ranks run one after another."""

    def program() -> str:
        if dist.get_rank() == 1:
            until = time.perf_counter() + 0.3
            while time.perf_counter() < until:
                torch.ones(10).sum()
                dist.all_reduce(torch.ones(1), group=alone[0])
        dist.monitored_barrier(timeout=SOON)
        return "passed"

    def both() -> str:
        groups = [dist.new_group([rank]) for rank in range(2)]
        if dist.get_rank() == 1:
            alone.append(groups[1])
        return program()

    alone: list[Any] = []
    assert on(2, both).per_rank == ["passed"] * 2
