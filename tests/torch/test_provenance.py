"""Whose data each message carries: chunk, contributors and values, also of rings that somebody writes by hand."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tplab import Mesh
from tplab.torch import (
    Result,
    all_gather,
    all_reduce,
    axis_index,
    axis_size,
    ppermute,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    ring_shift,
    run,
    start,
)
from tplab.torch.ranks import meeting, meter
from tplab.trace.label import of_all

FOUR = Mesh(tp=4)
SMALL, LARGE = 3, 5000  # elements: on both sides of where a received tensor makes us follow operations


def sends(out: Result, rank: int) -> list[tuple]:
    """(step, origin of the chunk, which piece of its, contributors) of what a rank sends, in order."""
    found = []
    for event in out.trace.events:
        if event.kind == "send" and event.rank == rank:
            origin = out.trace.chunks[event.chunk] if event.chunk >= 0 else (None, None)
            found.append((event.step, *origin, event.contributors))
    return found


def piece(size: int) -> Tensor:
    return torch.full((size,), 10.0 ** axis_index("tp"))


# --- rings by hand ----------------------------------------------------------------------------------------------------


def gather_ring(size: int) -> Tensor:
    x = piece(size)
    found = [x]
    for _ in range(axis_size("tp") - 1):
        x = ring_shift(x, "tp")
        found.append(x)
    return torch.cat(found)


def gather_ring_that_keeps_a_buffer(size: int) -> Tensor:
    found = torch.zeros(axis_size("tp"), size)
    found[0] = piece(size)
    x = piece(size)
    for hop in range(1, axis_size("tp")):
        x = ring_shift(x, "tp")
        found[hop] = x
    return found


@pytest.mark.parametrize("cluster", [None, "h100"])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("ring", [gather_ring, gather_ring_that_keeps_a_buffer])
def test_an_all_gather_by_hand_passes_chunks_on(ring: Callable, size: int, cluster: str | None):
    out = run(ring, FOUR, size, cluster=cluster)
    for rank in range(4):
        assert sends(out, rank) == [(hop, (rank - hop) % 4, 0, ((rank - hop) % 4,)) for hop in range(3)]


def plus(acc: Tensor, x: Tensor) -> Tensor:
    return acc + x


def plus_from_the_left(acc: Tensor, x: Tensor) -> Tensor:
    return x + acc


def in_place(acc: Tensor, x: Tensor) -> Tensor:
    acc += x
    return acc


def in_place_on_a_view(acc: Tensor, x: Tensor) -> Tensor:
    acc[:2] += x[:2]
    acc[2:].add_(x[2:])
    return acc


def function(acc: Tensor, x: Tensor) -> Tensor:
    return torch.add(acc, x)


def into_a_buffer(acc: Tensor, x: Tensor) -> Tensor:
    return torch.add(acc, x, out=torch.empty_like(x))


def copied_first(acc: Tensor, x: Tensor) -> Tensor:
    mine = x.clone()
    mine.add_(acc)
    return mine


def reshaped(acc: Tensor, x: Tensor) -> Tensor:
    return (acc.reshape(-1, 1) + x.unsqueeze(1)).flatten()


def stacked(acc: Tensor, x: Tensor) -> Tensor:
    return torch.stack([acc, x]).sum(0)


def scaled(acc: Tensor, x: Tensor) -> Tensor:
    return (acc * 2.0 + x * 2.0) / torch.tensor(2.0)


ADDITIONS = [plus, plus_from_the_left, in_place, in_place_on_a_view, function, into_a_buffer, copied_first, reshaped,
             stacked, scaled]  # fmt: skip


def sum_ring(add: Callable[[Tensor, Tensor], Tensor], size: int) -> Tensor:
    """A reduce-scatter: rank i ends with the sum of everybody's piece i."""
    ranks, i = axis_size("tp"), axis_index("tp")
    parts = [piece(size) * (k + 1) for k in range(ranks)]
    acc = parts[i - 1]
    for hop in range(2, ranks + 1):
        acc = add(ring_shift(acc, "tp"), parts[(i - hop) % ranks])
    return acc


@pytest.mark.parametrize("cluster", [None, "h100"])
@pytest.mark.parametrize("add", ADDITIONS, ids=lambda add: add.__name__)
def test_in_a_reduce_scatter_by_hand_contributors_grow_by_one_a_hop(add: Callable, cluster: str | None):
    out = run(sum_ring, FOUR, add, SMALL, cluster=cluster)
    assert [x.tolist() for x in out.per_rank] == [[1111.0 * (rank + 1)] * SMALL for rank in range(4)]
    for rank in range(4):
        wanted = [
            (hop, (rank - hop) % 4, 0, tuple(sorted((rank - back) % 4 for back in range(hop + 1)))) for hop in range(3)
        ]
        assert sends(out, rank) == wanted


def test_a_large_sum_by_hand_is_followed_where_operations_are_watched_and_unknown_elsewhere():
    followed = run(sum_ring, FOUR, plus, LARGE, cluster="h100")
    assert sends(followed, 3) == [(0, 3, 0, (3,)), (1, 2, 0, (2, 3)), (2, 1, 0, (1, 2, 3))]
    unknown = run(sum_ring, FOUR, plus, LARGE)  # not: new data of rank 3's own, which it is not
    assert sends(unknown, 3) == [(0, 3, 0, (3,)), (1, None, None, ()), (2, None, None, ())]


def test_values_are_those_of_the_moment():
    out = run(sum_ring, FOUR, in_place, SMALL)
    carried = {(e.rank, e.step): e.values.tolist() for e in out.trace.events if e.kind == "send"}  # type: ignore
    # the sum that rank 0 ends with begins on rank 1
    assert [carried[1, 0][0], carried[2, 1][0], carried[3, 2][0]] == [10.0, 110.0, 1110.0]
    received = {(e.rank, e.step): e.values.tolist() for e in out.trace.events if e.kind == "receive"}  # type: ignore
    assert received == {((rank + 1) % 4, step): values for (rank, step), values in carried.items()}


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.complex32, torch.float8_e4m3fn, torch.bool, torch.uint64, torch.bits8],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_values_of_types_that_numpy_does_not_have(dtype: torch.dtype):
    def program() -> None:
        x = torch.arange(2)
        ring_shift(x.to(torch.uint8).view(dtype) if dtype == torch.bits8 else x.to(dtype), "tp")

    (first, *_) = run(program, Mesh(tp=2)).trace.events
    assert isinstance(first.values, np.ndarray)
    assert first.values.tolist() == [0, 1]
    assert first.dtype == str(dtype).removeprefix("torch.")


def test_values_of_a_view_and_of_a_conjugate():
    def program() -> None:
        ring_shift((torch.arange(6.0).reshape(2, 3).t() + 1j).conj(), "tp")

    (first, *_) = run(program, Mesh(tp=2)).trace.events
    assert first.values.tolist() == [[0 - 1j, 3 - 1j], [1 - 1j, 4 - 1j], [2 - 1j, 5 - 1j]]  # type: ignore


# --- what descends from what ------------------------------------------------------------------------------------------


def descends(make: Callable[[Tensor, Tensor], Tensor], cluster: str | None = None) -> tuple:
    """(origin, contributors) of what rank 1 sends after it has received x from rank 0, and has y of its own."""

    def program() -> None:
        x, y = torch.ones(2, 2), torch.full((2, 2), 2.0)
        got = ring_shift(x, "tp")
        ring_shift(make(got, y), "tp")

    _, origin, piece, contributors = sends(run(program, Mesh(tp=3), cluster=cluster), 1)[-1]
    assert piece == (0 if origin == 0 else 1)
    return origin, contributors


FROM_BOTH, FROM_THE_SENDER, ITS_OWN = (0, (0, 1)), (0, (0,)), (1, (1,))


@pytest.mark.parametrize("cluster", [None, "h100"])
@pytest.mark.parametrize(
    "make, wanted",
    [
        (lambda got, y: got, FROM_THE_SENDER),
        (lambda got, y: got.clone(), FROM_THE_SENDER),
        (lambda got, y: got.t()[0], FROM_THE_SENDER),
        (lambda got, y: got.reshape(-1).contiguous().view(4, 1), FROM_THE_SENDER),
        (lambda got, y: got * 3 + 1, FROM_THE_SENDER),
        (lambda got, y: got * torch.tensor(3.0), FROM_THE_SENDER),
        (lambda got, y: got.split(1)[1], FROM_THE_SENDER),
        (lambda got, y: got.softmax(0).sum(), FROM_THE_SENDER),
        (lambda got, y: got.double().numpy() is None or got, FROM_THE_SENDER),
        (lambda got, y: y.copy_(got), FROM_THE_SENDER),
        (lambda got, y: y @ got, FROM_BOTH),
        (lambda got, y: torch.where(y > 0, got, y), FROM_BOTH),
        (lambda got, y: torch.cat([got, y]), FROM_BOTH),
        (lambda got, y: torch.nn.functional.linear(got, y, y[0]), FROM_BOTH),
        (lambda got, y: y.index_add(0, torch.tensor([0, 1]), got), FROM_BOTH),
        (lambda got, y: y.requires_grad_() * got, FROM_BOTH),
        (lambda got, y: y, ITS_OWN),
        (lambda got, y: torch.zeros_like(got), ITS_OWN),
        (lambda got, y: got.new_zeros(2), ITS_OWN),
        (lambda got, y: torch.empty_like(got).copy_(y), ITS_OWN),
        (lambda got, y: got.copy_(y), ITS_OWN),
        (lambda got, y: got.fill_(1.0), ITS_OWN),
        (lambda got, y: got.zero_() + y, ITS_OWN),
        (lambda got, y: torch.mul(y, y, out=got), ITS_OWN),
        (lambda got, y: torch.tensor(got.tolist()) + y, ITS_OWN),
    ],
)
def test_what_descends_from_what(make: Callable, wanted: tuple, cluster: str | None):
    assert descends(make, cluster) == wanted


def test_labels_go_through_a_graph():
    def program() -> None:
        x = torch.ones(2, requires_grad=True)
        got = ring_shift(x * 1, "tp")
        ring_shift((got.reshape(1, 2) * 2)[0], "tp")
        ring_shift(start(ring_shift, got.view(2), "tp").wait(), "tp")

    out = run(program, Mesh(tp=4))
    assert sends(out, 3) == [(0, 3, 0, (3,)), (1, 2, 0, (2,)), (2, 2, 0, (2,)), (3, 1, 0, (1,))]


def test_the_same_tensor_sent_again_is_the_same_chunk_and_another_one_is_not():
    x = torch.ones(2)

    def program() -> None:
        y = torch.ones(2)
        flights = [start(ring_shift, t, "tp", k) for t, k in ((x, 1), (x, 2), (y, 1), (y, 1), (y + 1, 1))]
        for flight in flights:
            flight.wait()

    out = run(program, Mesh(tp=3))
    for rank in range(3):
        assert [row[1:3] for row in sends(out, rank)] == [(rank, 0), (rank, 0), (rank, 1), (rank, 1), (rank, 2)]
    assert len(out.trace.chunks) == 9


def test_nothing_is_noted_on_the_tensors_themselves():
    """They may be saved, copied and sent elsewhere as they were."""
    x = torch.ones(3)
    w = torch.nn.Parameter(torch.ones(3))
    kept = []

    def program() -> None:
        got = ring_shift(x, "tp")
        kept.append(got)
        kept.append(ring_shift(w.detach() + got, "tp"))
        ring_shift(w, "tp")

    run(program, Mesh(tp=2))
    for tensor in (x, w, *kept):
        assert vars(tensor) == {}
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=True), tensor)
        assert torch.equal(pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor))


# --- tplab's own rings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [None, "h100"])
@pytest.mark.parametrize("size", [1, SMALL, LARGE])
def test_tplabs_own_rings_know_whose_data_they_carry_at_any_size(size: int, cluster: str | None):
    up = [(hop, lambda rank, hop=hop: (rank - hop) % 4) for hop in range(3)]

    gathered = run(lambda: ring_all_gather(piece(size), "tp"), FOUR, cluster=cluster)
    summed = run(lambda: ring_reduce_scatter([piece(size) for _ in range(4)], "tp"), FOUR, cluster=cluster)
    both = run(lambda: ring_all_reduce(piece(4 * size), "tp"), FOUR, cluster=cluster)
    for rank in range(4):
        assert sends(gathered, rank) == [(hop, origin(rank), 0, (origin(rank),)) for hop, origin in up]
        growing = [
            (hop, origin(rank), 0, tuple(sorted((rank - back) % 4 for back in range(hop + 1)))) for hop, origin in up
        ]
        assert sends(summed, rank) == growing
        everybody = [(3 + hop, (rank + 1 - hop) % 4, 0, (0, 1, 2, 3)) for hop in range(3)]
        assert sends(both, rank) == growing + everybody


def test_a_ring_of_large_sums_after_something_large_was_received_still_counts_its_own():
    """What the parts were computed from is not known; from where the ring begins it is."""

    def program() -> None:
        got = ring_shift(piece(LARGE), "tp")
        ring_reduce_scatter([got * 2 for _ in range(4)], "tp")

    assert sends(run(program, FOUR), 2)[1:] == [(1, 2, 1, (2,)), (2, 1, 1, (1, 2)), (3, 0, 1, (0, 1, 2))]


# --- modes, backward passes, budgets ----------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """A mode of the program's own."""

    def __init__(self):
        super().__init__()
        self.ops: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cluster", [None, "h100"])
def test_a_program_with_modes_of_its_own_sees_its_own_operations_and_is_followed(cluster: str | None):
    def program() -> list[str]:
        outer, inner = Seen(), Seen()
        with outer:
            acc = piece(SMALL)
            with inner:
                acc = ring_shift(acc, "tp") + piece(SMALL)  # from here on we watch, below both
            acc = ring_shift(acc, "tp") + piece(SMALL)
        ring_shift(acc, "tp")
        all_reduce(acc * 1, "tp")
        assert torch._C._len_torch_dispatch_stack() == 1
        return [op for op in outer.ops if op != "full"]

    out = run(program, FOUR, cluster=cluster)
    assert out.per_rank == [["add", "add"]] * 4  # not those by which tplab copies and adds up
    assert sends(out, 3) == [(0, 3, 0, (3,)), (1, 2, 0, (2, 3)), (2, 1, 0, (1, 2, 3))]
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("cluster", [None, "h100"])
def test_the_flop_counter_works_inside_a_rank(cluster: str | None):
    def program() -> int:
        got = ring_shift(torch.ones(2, 2), "tp")
        with FlopCounterMode(display=False) as counter:
            got = ring_shift(got @ got, "tp")
        ring_shift(got @ got, "tp")
        return counter.get_total_flops()

    assert run(program, Mesh(tp=2), cluster=cluster).per_rank == [16, 16]


def test_a_mode_that_is_entered_and_never_left_ends_with_its_rank():
    def program() -> None:
        Seen().__enter__()
        ring_shift(torch.ones(2), "tp")

    run(program, Mesh(tp=2), cluster="h100")
    assert run(lambda: torch._C._len_torch_dispatch_stack(), Mesh(tp=2)).per_rank == [0, 0]
    from torch.utils import _python_dispatch

    _python_dispatch._is_in_torch_dispatch_mode = False  # that of `__enter__` above


def test_a_run_leaves_torchs_account_of_modes_as_it_was():
    """It is kept for the whole process; ranks that end in another order than they began must not upset it."""
    from torch.utils import _python_dispatch

    assert not _python_dispatch.is_in_torch_dispatch_mode()
    run(sum_ring, FOUR, plus, SMALL)
    run(sum_ring, FOUR, plus, SMALL, cluster="h100")
    assert not _python_dispatch.is_in_torch_dispatch_mode()


@pytest.mark.parametrize("cluster", [None, "h100"])
def test_messages_of_a_backward_pass_carry_gradients(cluster: str | None):
    def program() -> None:
        x = piece(SMALL).requires_grad_()
        ring_shift(ring_shift(x, "tp") * 2, "tp").sum().backward()

    out = run(program, FOUR, cluster=cluster)
    # two hops forward; two back, of a gradient that begins on the rank where the loss is
    assert [row[0] for row in sends(out, 0)] == [0, 1, 2, 3]
    assert {e.peer for e in out.trace.events if e.kind == "send" and e.rank == 0} == {1, 3}
    assert sends(out, 0)[1][1:] == (3, 0, (3,))


def test_a_backward_pass_alone_may_communicate():
    class Shifted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):  # type: ignore
            return ring_shift(ring_shift(grads[0] * 1, "tp") + 1, "tp")

    def program() -> Tensor | None:
        x = piece(SMALL).requires_grad_()
        Shifted.apply(x).mul(3).sum().backward()  # type: ignore
        ring_shift(torch.ones(2), "tp")
        assert torch._C._len_torch_dispatch_stack() == 0
        return x.grad

    out = run(program, FOUR)
    assert [x.tolist() for x in out.per_rank] == [[4.0] * SMALL] * 4
    assert [row[1:] for row in sends(out, 0)] == [(0, 0, (0,)), (None, None, ()), (None, None, ())]


def test_values_are_kept_of_so_many_messages_and_whose_data_they_carry_of_all():
    def program() -> None:
        x = piece(SMALL)
        for _ in range(4):
            x = ring_shift(x, "tp") + piece(SMALL)
        all_gather(x, "tp")

    whole = run(program, FOUR, keep_values=1000).trace
    for record in (0, 6):
        trace = run(program, FOUR, keep_values=record).trace
        messages = trace.select(kind="send").events
        assert sum(e.values is not None for e in messages) == record
        assert [(e.chunk, e.contributors) for e in messages] == [
            (e.chunk, e.contributors) for e in whole.select(kind="send").events
        ]
        assert all(e.contributors for e in messages)
        assert not any(e.values is not None for e in trace.select(kind="collective").events)
        assert [(e.rank, e.peer, e.bytes, e.start) for e in messages] == [
            (e.rank, e.peer, e.bytes, e.start) for e in whole.select(kind="send").events
        ]
    assert all(e.values is not None for e in whole.select(kind="collective").events)


def test_a_message_to_oneself_is_none():
    def program() -> Tensor:
        got = ring_shift(piece(SMALL), "tp")
        return ring_shift(ppermute(got, "tp", [(k, k) for k in range(4)]) * 2, "tp")

    out = run(program, FOUR)
    assert len(sends(out, 1)) == 2
    assert sends(out, 1)[1] == (1, 0, 0, (0,))


@pytest.mark.parametrize("order", ["received first", "mode first"])
def test_functional_collectives_go_on_where_operations_are_no_longer_followed(order: str, monkeypatch):
    """torch sends them through modes, so the one that follows operations is out of the stack when they are called."""
    monkeypatch.setattr(meter, "FOLLOWED", 5)

    def program() -> Tensor:
        pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = pairs[dist.get_rank() // 2]

        def step(x: Tensor) -> Tensor:
            for _ in range(4):
                x = functional.wait_tensor(functional.all_reduce(x, "sum", group)) * 0.5 + 0.5
            return x

        if order == "received first":
            return step(step(torch.ones(SMALL)))
        with FlopCounterMode(display=False):
            return step(step(torch.ones(SMALL)))

    out = run(program, FOUR, distributed=True)
    for x in out.per_rank:
        torch.testing.assert_close(x, torch.full((SMALL,), 1 + 0.5 * 8), rtol=0, atol=0)


def test_labels_of_a_collective_are_worked_out_once_whichever_rank_comes_last(monkeypatch):
    """Another rank comes last each time."""
    seen = []
    monkeypatch.setattr(meeting, "of_all", lambda *args: seen.append(args) or of_all(*args))

    def program(x: Tensor) -> Tensor:
        for _ in range(6):
            x = all_reduce(x, "tp") / 4
        return x

    run(program, FOUR, torch.ones(3))
    assert len(seen) == 1
