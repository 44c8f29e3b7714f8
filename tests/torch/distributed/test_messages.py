"""Messages of torch.distributed between simulated ranks: sent, received, in batches, from any source, with tags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.torch.distributed.test_collectives import done, each_size, group_of, on, put_in, same, sent
from tplab.errors import RankError


@each_size
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_along_a_line(shape: tuple[int, ...], num_ranks: int):
    """Each rank adds its own to what comes from the rank before; blocking."""

    def program() -> Tensor:
        rank = dist.get_rank()
        x, total = torch.zeros(shape, dtype=torch.float64), put_in(rank, *shape)
        if rank > 0:
            assert dist.recv(x, rank - 1) == rank - 1
            total += x
        if rank < num_ranks - 1:
            dist.send(total, rank + 1)
        return total

    out = on(num_ranks, program)
    for rank, got in enumerate(out.per_rank):
        same(got, torch.stack([put_in(other, *shape) for other in range(rank + 1)]).sum(0))
    num_bytes = 8 * torch.zeros(shape).numel()
    assert sent(out, "send") == [num_bytes] * (num_ranks - 1) + [0]


@each_size
def test_round_a_ring_with_isend_and_irecv(num_ranks: int):
    """All receive first and send after. On one rank the message is to oneself."""

    def program() -> Tensor:
        rank = dist.get_rank()
        x = torch.empty(3, dtype=torch.float64)
        receiving = dist.irecv(x, (rank - 1) % num_ranks)
        sending = dist.isend(put_in(rank, 3), (rank + 1) % num_ranks)
        done(sending)
        done(receiving)
        return x

    for rank, got in enumerate(on(num_ranks, program).per_rank):
        same(got, put_in((rank - 1) % num_ranks, 3))


@each_size
def test_batches_both_ways(num_ranks: int):
    """Halos: each rank exchanges an edge with both neighbours in one batch."""

    def program() -> list[Tensor]:
        rank = dist.get_rank()
        operations, places = [], {}
        for step in (-1, 1):
            other = rank + step
            if 0 <= other < num_ranks:
                places[other] = torch.empty(2, dtype=torch.float64)
                operations.append(dist.P2POp(dist.isend, put_in(10 * rank + other, 2), other))
                operations.append(dist.P2POp(dist.irecv, places[other], other))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return [places[other] for other in sorted(places)]

    for rank, got in enumerate(on(num_ranks, program).per_rank):
        others = [other for other in (rank - 1, rank + 1) if 0 <= other < num_ranks]
        for x, other in zip(got, others, strict=True):
            same(x, put_in(10 * other + rank, 2))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_tags_keep_messages_apart(num_ranks: int):
    """What was sent last may be received first."""

    def program() -> list[Tensor] | None:
        rank = dist.get_rank()
        if rank > 0:
            works = [dist.isend(put_in(10 * rank + tag, 2), 0, tag=tag) for tag in (1, 2, 1)]
            for work in works:
                done(work)
            return None
        got = []
        for other in range(1, num_ranks):
            for tag in (2, 1, 1):
                got.append(torch.empty(2, dtype=torch.float64))
                dist.recv(got[-1], other, tag=tag)
        return got

    got = iter(on(num_ranks, program).per_rank[0])
    for other in range(1, num_ranks):
        for tag in (2, 1, 1):
            same(next(got), put_in(10 * other + tag, 2))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_from_any_source(num_ranks: int):
    """A parameter server: whoever sends is told apart by what recv returns."""

    def program() -> dict[int, Tensor]:
        rank = dist.get_rank()
        if rank > 0:
            for step in range(2):
                dist.send(put_in(rank + step, 2), 0, tag=7)
            return {}
        totals = {other: torch.zeros(2, dtype=torch.float64) for other in range(1, num_ranks)}
        for _ in range(2 * (num_ranks - 1)):
            x = torch.empty(2, dtype=torch.float64)
            source = dist.recv(x, tag=7)
            totals[source] += x
        return totals

    totals = on(num_ranks, program).per_rank[0]
    assert sorted(totals) == list(range(1, num_ranks))
    for other, total in totals.items():
        same(total, put_in(other, 2) + put_in(other + 1, 2))


def test_irecv_from_any_source():
    def program() -> list[Any] | None:
        rank = dist.get_rank()
        if rank:
            dist.send(put_in(rank, 2), 0)
            return None
        xs = [torch.empty(2, dtype=torch.float64) for _ in range(2)]
        works = [dist.irecv(x) for x in xs]
        for work in works:
            done(work)
        return sorted((work._source_rank(), x.tolist()) for work, x in zip(works, xs, strict=True))  # type: ignore

    assert on(3, program).per_rank[0] == [(rank, put_in(rank, 2).tolist()) for rank in (1, 2)]


def test_ranks_of_a_group_are_counted_in_the_group_where_the_program_says_so():
    def program() -> Tensor | None:
        group = group_of([1, 3])
        rank = dist.get_rank()
        x = torch.full((2,), float(rank))
        if rank == 1:
            dist.send(x, group=group, group_dst=1)
            dist.recv(x, group=group, group_src=1)
        elif rank == 3:
            y = torch.empty(2)
            dist.recv(y, 1, group=group)
            dist.send(x, 1, group=group)
            return y
        return x

    zero, one, two, three = on(4, program).per_rank
    assert [x.tolist() for x in (zero, one, two, three)] == [[0, 0], [3, 3], [2, 2], [1, 1]]


MESSAGE = st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 4), st.integers(0, 2))


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.lists(MESSAGE, max_size=8))
def test_any_messages(num_ranks: int, drawn: list[tuple[int, int, int, int]]):
    """Any messages (source, target, size, tag), all started before any is waited for, arrive where they should."""
    messages = [(source % num_ranks, (source + step) % num_ranks, size, tag) for source, step, size, tag in drawn]

    def program() -> list[Tensor]:
        rank = dist.get_rank()
        works, got = [], []
        for number, (source, target, size, tag) in enumerate(messages):
            if rank == source:
                works.append(dist.isend(put_in(number, size), target, tag=tag))
            if rank == target:
                got.append(torch.empty(size, dtype=torch.float64))
                works.append(dist.irecv(got[-1], source, tag=tag))
        for work in works:
            done(work)
        return got

    out = on(num_ranks, program)
    for rank, got in enumerate(out.per_rank):
        wanted = [put_in(number, size) for number, (_, target, size, _) in enumerate(messages) if target == rank]
        for x, want in zip(got, wanted, strict=True):
            same(x, want)
    assert sent(out, "send") == [
        sum(8 * size for source, target, size, _ in messages if source == rank != target) for rank in range(num_ranks)
    ]


def test_a_receive_has_the_line_that_asked_for_it():
    def program() -> None:
        x = torch.ones(2)
        if dist.get_rank() == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)

    trace = on(2, program).trace
    (send,), (receive,) = trace.select(kind="send").events, trace.select(kind="receive").events
    assert int(receive.where.rpartition(":")[2]) == int(send.where.rpartition(":")[2]) + 2
    assert send.message == receive.message and trace.from_json(trace.to_json()) == trace


@pytest.mark.parametrize("peer", [-1, 2, 5])
def test_a_peer_that_does_not_exist_is_named(peer: int):
    """gloo ends the process; before, this was an IndexError of a tuple, or the last rank."""
    with pytest.raises(RankError, match=f"rank {peer} of 'world', which has 2 ranks, does not exist"):
        on(2, lambda: dist.send(torch.ones(2), peer))


def receives(op: str) -> None:
    x, output = torch.ones(2), torch.empty(2 if op == "recv" else 4 if op == "all_gather" else 1, dtype=torch.int32)
    if op == "all_gather":
        dist.all_gather_into_tensor(output, x)
    elif op == "reduce_scatter":
        dist.reduce_scatter_tensor(output, x)
    elif dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(output, 0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "recv"])
def test_what_arrives_has_the_dtype_of_the_tensor_for_it(op: str):
    """gloo and nccl refuse it; before, it was rounded."""
    with pytest.raises(RankError, match=r"the result is torch.float32, and the tensor for it is torch.int32"):
        on(2, lambda: receives(op))
