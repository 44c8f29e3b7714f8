"""The collectives of torch.distributed on simulated ranks: what each rank gets is what plain torch makes of what all
ranks put in, and what each sends is the formula of the ring."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

from tests.pairwise import cover, pairs
from tplab import Mesh
from tplab.cost import collectives as cost
from tplab.torch import Result, run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch has newer names for some of these
RANKS = [1, 2, 3, 4]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SHAPES = [(), (0,), (5,), (2, 3), (3, 0, 2)]


def put_in(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """What a rank puts in: small whole numbers, whose sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(0, 4, shape, generator=generator)
    return x > 1 if dtype is torch.bool else x.to(dtype)


def spread_out(x: Tensor) -> Tensor:
    """The same values, not contiguous."""
    if not x.dim():
        return x
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]


def on(num_ranks: int, program: Callable[[], Any]) -> Result:
    return run(program, Mesh(world=num_ranks), distributed=True)


def group_of(ranks: list[int]) -> Any:
    """A new group; torch's type of it has room for ranks outside of it."""
    return dist.new_group(ranks)


def done(work: Any) -> None:
    """Wait for a collective that was started, or a future; without async_op there is nothing to wait for."""
    if work is not None:
        work.wait()
        assert work.done() if isinstance(work, torch.futures.Future) else work.is_completed()


def same(got: Any, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def sent(out: Result, op: str) -> list[int]:
    """The bytes that each rank has sent in collectives of one kind."""
    events = [event for event in out.trace.events if event.op == op and event.kind in ("collective", "send")]
    return [sum(event.bytes for event in events if event.rank == rank) for rank in range(out.mesh.size)]


each_way = pytest.mark.parametrize("is_async", [False, True], ids=["at once", "async"])
each_size = pytest.mark.parametrize("num_ranks", RANKS)

# --- reductions ------------------------------------------------------------------------------------------------------

PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum, "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip
REDUCTIONS = [
    *[("SUM", dtype) for dtype in (*FLOATS, *COMPLEX, *WHOLE)],
    *[("PRODUCT", dtype) for dtype in (*FLOATS, *WHOLE)],
    *[(op, dtype) for op in ("MIN", "MAX") for dtype in (*FLOATS, *WHOLE, torch.bool)],
    *[(op, dtype) for op in ("BAND", "BOR", "BXOR") for dtype in (*WHOLE, torch.bool)],
    *[("AVG", dtype) for dtype in (*FLOATS, *COMPLEX)],
]


def plain(op: str, inputs: list[Tensor]) -> Tensor:
    if op == "AVG":
        wide = torch.float32 if inputs[0].dtype in (torch.float16, torch.bfloat16) else inputs[0].dtype
        return (torch.stack([x.to(wide) for x in inputs]).sum(0) / len(inputs)).to(inputs[0].dtype)
    return reduce(PLAIN[op], inputs)


def close(got: Tensor, want: Tensor) -> None:
    """Equal but for a third of a complex number, which torch rounds differently in place."""
    rtol = torch.finfo(want.dtype).eps if want.is_complex() else 0
    torch.testing.assert_close(got, want, rtol=rtol, atol=0)


@pytest.mark.parametrize(
    "op, dtype, num_ranks",
    cover((*reduction, num_ranks) for reduction, num_ranks in product(REDUCTIONS, RANKS)),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_reductions(op: str, dtype: torch.dtype, num_ranks: int):
    """all_reduce, reduce to each rank, and both kinds of reduce_scatter, of every kind and dtype."""
    kind = getattr(ReduceOp, op)

    def program() -> list[Any]:
        rank = dist.get_rank()
        x = put_in(rank, 2 * num_ranks, dtype=dtype)
        everywhere, at_root, part, listed = x.clone(), x.clone(), x[:2].clone(), x[:2].clone()
        dist.all_reduce(everywhere, kind)
        dist.reduce(at_root, num_ranks - 1, kind)
        dist.reduce_scatter_tensor(part, x, kind)
        dist.reduce_scatter(listed, list(x.chunk(num_ranks)), kind)
        return [everywhere, at_root, part, listed]

    out = on(num_ranks, program)
    want = plain(op, [put_in(rank, 2 * num_ranks, dtype=dtype) for rank in range(num_ranks)])
    for rank, (everywhere, at_root, part, listed) in enumerate(out.per_rank):
        close(everywhere, want)
        close(at_root, want if rank == num_ranks - 1 else put_in(rank, 2 * num_ranks, dtype=dtype))
        close(part, want.chunk(num_ranks)[rank])
        close(listed, want.chunk(num_ranks)[rank])


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_sums_of_what_each_rank_multiplies_first(as_tensor: bool, num_ranks: int):
    """ReduceOp.PREMUL_SUM, which only NCCL has otherwise; every rank with a factor of its own."""

    def program() -> list[Tensor]:
        rank = dist.get_rank()
        factor = torch.tensor([rank + 0.5]) if as_tensor else rank + 0.5
        kind = torch._C._distributed_c10d._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
        x = torch.arange(2.0 * num_ranks) + rank
        everywhere, part = x.clone(), torch.empty(2)
        dist.all_reduce(everywhere, kind)
        dist.reduce_scatter_tensor(part, x, kind)
        several = [x.clone(), x + 1]
        dist.all_reduce_coalesced(several, kind)
        return [x, everywhere, part, *several]

    out = on(num_ranks, program)
    whole: Any = sum((torch.arange(2.0 * num_ranks) + rank) * (rank + 0.5) for rank in range(num_ranks))
    more: Any = sum((torch.arange(2.0 * num_ranks) + rank + 1) * (rank + 0.5) for rank in range(num_ranks))
    for rank, (x, everywhere, part, first, second) in enumerate(out.per_rank):
        torch.testing.assert_close(x, torch.arange(2.0 * num_ranks) + rank, rtol=0, atol=0)
        for got, want in ((everywhere, whole), (part, whole[2 * rank : 2 * rank + 2]), (first, whole), (second, more)):
            torch.testing.assert_close(got, want, rtol=0, atol=0)  # small multiples of a half: exact


@pytest.mark.parametrize("arrange, shape, is_async, num_ranks", pairs([None, spread_out], SHAPES, [False, True], RANKS))
def test_every_shape(arrange, shape: tuple[int, ...], is_async: bool, num_ranks: int):
    """all_reduce, reduce, broadcast, gathers: of scalars, empty tensors; gathers of tensors that are not contiguous."""

    def program() -> list[Any]:
        x = put_in(dist.get_rank(), *shape)
        reduced, at_root, copied = (x.clone() for _ in range(3))
        arranged = arrange or (lambda x: x)
        gathered, stacked = [arranged(torch.empty_like(x)) for _ in range(num_ranks)], x.new_empty(num_ranks, *shape)
        for work in (
            dist.all_reduce(reduced, async_op=is_async),
            dist.reduce(at_root, 0, async_op=is_async),
            dist.broadcast(copied, num_ranks - 1, async_op=is_async),
            dist.all_gather(gathered, arranged(x), async_op=is_async),
            dist.all_gather_into_tensor(stacked, x, async_op=is_async),
        ):
            assert (work is not None) == is_async
            done(work)
        return [reduced, at_root, copied, gathered, stacked]

    out = on(num_ranks, program)
    inputs = [put_in(rank, *shape) for rank in range(num_ranks)]
    for rank, (reduced, at_root, copied, gathered, stacked) in enumerate(out.per_rank):
        same(reduced, torch.stack(inputs).sum(0))
        same(at_root, torch.stack(inputs).sum(0) if rank == 0 else inputs[rank])
        same(copied, inputs[-1])
        for got, want in zip(gathered, inputs, strict=True):
            same(got, want)
        same(stacked, torch.stack(inputs))


@each_size
def test_what_is_started_overlaps_and_may_be_waited_for_in_any_order(num_ranks: int):
    def program() -> list[Tensor]:
        rank = dist.get_rank()
        xs = [put_in(rank + 10 * step, 4) for step in range(3)]
        works = [dist.all_reduce(x, async_op=True) for x in xs]
        xs[0].add_(0)  # what was put in was put in
        for index in (2, 0, 1):
            done(works[index])
        return xs

    for xs in on(num_ranks, program).per_rank:
        for step, x in enumerate(xs):
            same(x, torch.stack([put_in(rank + 10 * step, 4) for rank in range(num_ranks)]).sum(0))


@each_size
def test_a_future_has_what_the_program_receives(num_ranks: int):
    """As over nccl: not what the rank has sent. Where nothing comes back, it has nothing."""

    def program() -> dict[str, tuple[Any, Any, Any]]:
        rank, found = dist.get_rank(), {}

        def row(n: int = num_ranks) -> list[Tensor]:
            return [torch.zeros(2, dtype=torch.float64) for _ in range(n)]

        def ask(name: str, function: Any, outputs: list[Tensor], *args: Any, **kwargs: Any) -> None:
            work = function(*args, **kwargs, async_op=True)
            found[name] = work.get_future().wait(), work.result(), outputs

        mine, pieces = put_in(rank, 2), list(put_in(rank, num_ranks, 2))
        is_root, root = rank == num_ranks - 1, num_ranks - 1
        ask("all_gather", dist.all_gather, out := row(), out, mine)
        ask("all_gather_into_tensor", dist.all_gather_into_tensor, out := row(1), out[0].resize_(2 * num_ranks), mine)
        ask("reduce_scatter", dist.reduce_scatter, out := row(1), out[0], pieces)
        ask("reduce_scatter_tensor", dist.reduce_scatter_tensor, out := row(1), out[0], torch.cat(pieces))
        ask("all_to_all", dist.all_to_all, out := row(), out, pieces)
        ask(
            "all_to_all_single",
            dist.all_to_all_single,
            out := row(1),
            out[0].resize_(num_ranks),
            mine[:1].repeat(num_ranks),
        )
        ask("gather", dist.gather, out := row() if is_root else [], mine, out if is_root else None, dst=root)
        ask("scatter", dist.scatter, out := row(1), out[0], pieces if is_root else None, src=root)
        ask("all_reduce", dist.all_reduce, out := [mine.clone()], out[0])
        ask("broadcast", dist.broadcast, out := [mine.clone()], out[0], src=root)
        ask("barrier", dist.barrier, [])
        return found

    for found in on(num_ranks, program).per_rank:
        for name, (future, result, outputs) in found.items():
            assert len(future) == len(result) == len(outputs), name
            for x, y, output in zip(future, result, outputs, strict=True):
                same(x, output)
                same(y, output)


@each_size
def test_futures(num_ranks: int):
    def program() -> Tensor:
        x = put_in(dist.get_rank(), 4)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        future = work.get_future().then(lambda future: future.value()[0] * 2)
        return future.wait()

    want = torch.stack([put_in(rank, 4) for rank in range(num_ranks)]).sum(0) * 2
    for got in on(num_ranks, program).per_rank:
        same(got, want)


# --- gathers and scatters --------------------------------------------------------------------------------------------


@each_size
@each_way
def test_gathers(is_async: bool, num_ranks: int):
    """One behind the other or stacked, as the output's shape says; of different sizes; to one rank."""

    def program() -> list[Any]:
        rank = dist.get_rank()
        x, mine = put_in(rank, 2, 3), put_in(rank, rank + 1)
        behind, stacked = x.new_empty(2 * num_ranks, 3), x.new_empty(num_ranks, 2, 3)
        uneven = [x.new_empty(other + 1) for other in range(num_ranks)]
        done(dist.all_gather_into_tensor(behind, x, async_op=is_async))
        done(dist.all_gather_into_tensor(stacked, x, async_op=is_async))
        done(dist.all_gather(uneven, mine, async_op=is_async))
        root = num_ranks - 1
        at_root = [torch.empty_like(x) for _ in range(num_ranks)] if rank == root else None
        done(dist.gather(x, at_root, dst=root, async_op=is_async))
        return [behind, stacked, uneven, at_root]

    out = on(num_ranks, program)
    inputs = [put_in(rank, 2, 3) for rank in range(num_ranks)]
    for rank, (behind, stacked, uneven, at_root) in enumerate(out.per_rank):
        same(behind, torch.cat(inputs))
        same(stacked, torch.stack(inputs))
        for other, got in enumerate(uneven):
            same(got, put_in(other, other + 1))
        if rank < num_ranks - 1:
            assert at_root is None
            continue
        for got, want in zip(at_root, inputs, strict=True):
            same(got, want)


@each_size
@each_way
def test_scatters(is_async: bool, num_ranks: int):
    """scatter from one rank; reduce_scatter of pieces of equal and of different sizes."""

    def program() -> list[Any]:
        rank, root = dist.get_rank(), num_ranks - 1
        piece, part, uneven = (torch.empty(2, 3, dtype=torch.float64) for _ in range(3))
        pieces = [put_in(other, 2, 3) for other in range(num_ranks)] if rank == root else None
        done(dist.scatter(piece, pieces, src=root, async_op=is_async))
        done(dist.reduce_scatter_tensor(part, put_in(rank, num_ranks, 2, 3), async_op=is_async))
        uneven = torch.empty(rank + 1, dtype=torch.float64)
        sizes = [put_in(rank + other, other + 1) for other in range(num_ranks)]
        done(dist.reduce_scatter(uneven, sizes, async_op=is_async))
        return [piece, part, uneven]

    out = on(num_ranks, program)
    total = torch.stack([put_in(rank, num_ranks, 2, 3) for rank in range(num_ranks)]).sum(0)
    for rank, (piece, part, uneven) in enumerate(out.per_rank):
        same(piece, put_in(rank, 2, 3))
        same(part, total[rank])
        same(uneven, torch.stack([put_in(other + rank, rank + 1) for other in range(num_ranks)]).sum(0))


@each_size
@each_way
def test_all_to_all_of_lists(is_async: bool, num_ranks: int):
    def program() -> list[Tensor]:
        rank = dist.get_rank()
        outputs = [torch.empty(rank + other, 2, dtype=torch.float64) for other in range(num_ranks)]
        inputs = [put_in(10 * rank + other, rank + other, 2) for other in range(num_ranks)]
        done(dist.all_to_all(outputs, inputs, async_op=is_async))
        return outputs

    for rank, outputs in enumerate(on(num_ranks, program).per_rank):
        for other, got in enumerate(outputs):
            same(got, put_in(10 * other + rank, rank + other, 2))


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda num: st.lists(st.lists(st.integers(0, 3), min_size=num, max_size=num), min_size=num, max_size=num)
    ),
    st.booleans(),
)
def test_all_to_all_single_of_any_sizes(sizes: list[list[int]], is_async: bool):
    """sizes[i][j]: how many rows rank i sends to rank j."""
    num_ranks = len(sizes)

    def program() -> Tensor:
        rank = dist.get_rank()
        theirs = [sizes[other][rank] for other in range(num_ranks)]
        output = torch.empty(sum(theirs), 2, dtype=torch.float64)
        done(dist.all_to_all_single(output, put_in(rank, sum(sizes[rank]), 2), theirs, sizes[rank], async_op=is_async))
        return output

    out = on(num_ranks, program)
    cut = [put_in(rank, sum(sizes[rank]), 2).split(sizes[rank]) for rank in range(num_ranks)]
    for rank, got in enumerate(out.per_rank):
        same(got, torch.cat([cut[other][rank] for other in range(num_ranks)]))
    assert sent(out, "all_to_all") == [
        16 * sum(size for other, size in enumerate(row) if other != rank) * (num_ranks > 1)
        for rank, row in enumerate(sizes)
    ]


@each_size
def test_all_to_all_single_of_equal_sizes(num_ranks: int):
    def program() -> Tensor:
        output = torch.empty(2 * num_ranks, dtype=torch.float64)
        dist.all_to_all_single(output, put_in(dist.get_rank(), 2 * num_ranks))
        return output

    cut = [put_in(rank, 2 * num_ranks).chunk(num_ranks) for rank in range(num_ranks)]
    for rank, got in enumerate(on(num_ranks, program).per_rank):
        same(got, torch.cat([pieces[rank] for pieces in cut]))


# --- several as one --------------------------------------------------------------------------------------------------


@each_size
@each_way
def test_coalesced_functions(is_async: bool, num_ranks: int):
    def program() -> list[Any]:
        rank = dist.get_rank()
        xs = [put_in(rank, 3), put_in(rank, 2, 2)]
        gathered = [[torch.empty_like(x) for x in xs] for _ in range(num_ranks)]
        done(dist.all_gather_coalesced(gathered, xs, async_op=is_async))
        done(dist.all_reduce_coalesced(xs, async_op=is_async))
        return [xs, gathered]

    for xs, gathered in on(num_ranks, program).per_rank:
        for index, shape in enumerate([(3,), (2, 2)]):
            inputs = [put_in(rank, *shape) for rank in range(num_ranks)]
            same(xs[index], torch.stack(inputs).sum(0))
            for rank in range(num_ranks):
                same(gathered[rank][index], inputs[rank])


@each_size
@each_way
def test_the_coalescing_manager(is_async: bool, num_ranks: int):
    def program() -> list[Any]:
        rank = dist.get_rank()
        xs = [put_in(rank + step, 2 * num_ranks) for step in range(2)]
        reduced, gathered = [x.clone() for x in xs], [x.new_empty(num_ranks * len(x)) for x in xs]
        parts = [x.new_empty(2) for x in xs]
        managers = []
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for x in reduced:
                dist.all_reduce(x)
        managers.append(manager)
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for x, y in zip(xs, gathered, strict=True):
                dist.all_gather_into_tensor(y, x)
        managers.append(manager)
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for x, y in zip(xs, parts, strict=True):
                dist.reduce_scatter_tensor(y, x)
        managers.append(manager)
        if is_async:
            for manager in managers:
                manager.wait()
        return [reduced, gathered, parts]

    for rank, (reduced, gathered, parts) in enumerate(on(num_ranks, program).per_rank):
        for step in range(2):
            inputs = [put_in(other + step, 2 * num_ranks) for other in range(num_ranks)]
            same(reduced[step], torch.stack(inputs).sum(0))
            same(gathered[step], torch.cat(inputs))
            same(parts[step], torch.stack(inputs).sum(0).chunk(num_ranks)[rank])


# --- functional ------------------------------------------------------------------------------------------------------


@each_size
def test_functional_collectives(num_ranks: int):
    from torch.distributed import _functional_collectives as functional

    def program() -> list[Tensor]:
        rank, group = dist.get_rank(), dist.group.WORLD
        assert group is not None
        x = put_in(rank, num_ranks, 2 * num_ranks)
        both, to = [x, x + 1], [(other + 1) % num_ranks for other in range(num_ranks)]
        return [
            functional.all_reduce(x, "sum", group),
            functional.all_reduce(x, "avg", group),
            functional.all_gather_tensor(x, 1, group),
            functional.reduce_scatter_tensor(x, "sum", 1, group),
            functional.all_to_all_single(x, None, None, group),
            functional.broadcast(x, num_ranks - 1, group),
            *functional.all_reduce_coalesced(both, "sum", group),
            *functional.all_gather_into_tensor_coalesced(both, group),
            *functional.reduce_scatter_tensor_coalesced(both, "sum", [0, 1], group),
            functional.permute_tensor(x[:, 0].contiguous(), to, group),
        ]

    inputs = [put_in(rank, num_ranks, 2 * num_ranks) for rank in range(num_ranks)]
    total = torch.stack(inputs).sum(0)
    for rank, results in enumerate(on(num_ranks, program).per_rank):
        wanted = [
            total, total / num_ranks, torch.cat(inputs, 1), total.chunk(num_ranks, 1)[rank],
            torch.cat([x[rank : rank + 1] for x in inputs]), inputs[-1],
            total, total + num_ranks,
            torch.cat(inputs), torch.cat(inputs) + 1,
            total[rank : rank + 1], total.chunk(num_ranks, 1)[rank] + num_ranks,
            inputs[(rank - 1) % num_ranks][:, 0],
        ]  # fmt: skip
        for got, want in zip(results, wanted, strict=True):
            same(got, want)


@each_size
def test_gradients_of_functional_collectives(num_ranks: int):
    from torch.distributed import _functional_collectives as functional

    def program() -> list[Any]:
        from torch.distributed.nn import functional as with_gradients  # its default group must be nobody's

        x = put_in(dist.get_rank(), 2 * num_ranks).requires_grad_()
        group = dist.group.WORLD
        assert group is not None
        grads = []
        for y in (
            functional.all_gather_tensor_autograd(x, 0, group),
            functional.reduce_scatter_tensor_autograd(x, "sum", 0, group),
            functional.all_to_all_single_autograd(x, None, None, group),
            with_gradients.all_reduce(x),
        ):
            (y * torch.arange(1.0, len(y) + 1, dtype=y.dtype) * (dist.get_rank() + 1)).sum().backward()
            assert x.grad is not None
            grads.append(x.grad.clone())
            x.grad = None
        return grads

    factors = [float(rank + 1) for rank in range(num_ranks)]
    size = 2 * num_ranks
    for rank, (gathered, scattered, exchanged, reduced) in enumerate(on(num_ranks, program).per_rank):
        weights = torch.arange(1.0, size * num_ranks + 1, dtype=torch.float64)
        same(gathered, sum(factors) * weights.chunk(num_ranks)[rank])
        same(scattered, torch.cat([torch.tensor([1.0, 2.0], dtype=torch.float64) * f for f in factors]))
        same(exchanged, torch.cat([weights[:size].chunk(num_ranks)[rank] * f for f in factors]))
        same(reduced, sum(factors) * weights[:size])


# --- bytes -----------------------------------------------------------------------------------------------------------


@each_size
def test_bytes_are_those_of_the_ring(num_ranks: int):
    """12 numbers of 8 bytes."""

    def program() -> None:
        x = put_in(dist.get_rank(), 12)
        pieces = list(x.chunk(num_ranks)) if dist.get_rank() == 0 else None
        dist.all_reduce(x)
        dist.all_gather_into_tensor(x.new_empty(12 * num_ranks), x)
        dist.reduce_scatter_tensor(x.new_empty(12 // num_ranks), x)
        dist.all_to_all_single(x.new_empty(12), x)
        dist.broadcast(x, 0)
        dist.scatter(x.new_empty(12 // num_ranks), pieces, src=0)

    out = on(num_ranks, program)
    share = 12 * 8 // num_ranks
    assert sent(out, "all_reduce") == [2 * (num_ranks - 1) * share] * num_ranks
    assert sent(out, "all_gather") == [(num_ranks - 1) * 12 * 8] * num_ranks
    assert sent(out, "reduce_scatter") == sent(out, "all_to_all") == [(num_ranks - 1) * share] * num_ranks
    assert sent(out, "scatter") == [(num_ranks - 1) * share] + [0] * (num_ranks - 1)
    assert sent(out, "broadcast") == [cost.bytes_sent("broadcast", 12, 8, num_ranks, rank) for rank in range(num_ranks)]
    assert sum(sent(out, "broadcast")) == (num_ranks - 1) * 12 * 8
