"""What every collective returns: every dtype, shape and mesh, blocking or not, held against plain indexing and sums."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.pairwise import pairs
from tplab import Mesh, P
from tplab.errors import MeshError, OutsideRunError, ShapeError
from tplab.torch import (
    Handle,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    barrier,
    broadcast,
    gather,
    ppermute,
    reduce,
    reduce_scatter,
    ring_all_reduce,
    ring_shift,
    run,
    scatter,
    start,
)

MESHES = [
    Mesh(tp=1),
    Mesh(tp=2),
    Mesh(tp=3),
    Mesh(tp=4),
    Mesh(tp=7),
    Mesh(dp=2, tp=3),
    Mesh(tp=3, dp=2),
    Mesh(a=2, tp=2, b=2),
]
AXES = ["tp", ("tp",), "all"]

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOATS_8 = [
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128, torch.complex32]
EVERY = [*FLOATS, *FLOATS_8, *SIGNED, *UNSIGNED, *COMPLEX, torch.bool]
ids = str

# complex32 is called experimental by a warning of its own
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def bits(x: Tensor) -> list:
    """Shape, dtype and every bit of x."""
    return [
        x.dtype,
        tuple(x.shape),
        x.detach().contiguous().reshape(-1).view(torch.uint8).tolist() if x.numel() else [],
    ]


def data(dtype: torch.dtype, rank: int, shape: tuple[int, ...] = (12, 2)) -> Tensor:
    """Numbers that every dtype holds exactly, as do their sums over a few ranks."""
    count = int(np.prod(shape))
    numbers = (torch.arange(count).reshape(shape) * 5 + 3 * rank) % 4
    if dtype == torch.float8_e8m0fnu:  # powers of two, no zero
        return (2.0**numbers).to(dtype)
    return (numbers % 2 == 0) if dtype == torch.bool else numbers.to(dtype)


def groups_of(mesh: Mesh, axis) -> tuple:
    return mesh.axis_names if axis == "all" else axis


def expect(error: type[Exception], message: str, collective: Callable[[], object], mesh: Mesh | None = None) -> None:
    with pytest.raises(Exception, match=message) as caught:
        run(collective, mesh or Mesh(dp=2, tp=3))
    found = caught.value if isinstance(caught.value, error) else caught.value.__cause__
    assert isinstance(found, error)


def check(mesh: Mesh, axis, collective: Callable, inputs: Callable[[int], Tensor], wanted: Callable) -> None:
    """`wanted(inputs of the group, index)` is what each rank gets, to the bit, whether it blocks or not."""
    axis = groups_of(mesh, axis)
    everything = [inputs(rank) for rank in mesh.ranks]

    def program() -> tuple[Tensor, Tensor]:
        mine = everything[axis_index(mesh.axis_names)].clone()
        blocking = collective(mine, axis)
        flight = start(getattr(collective, "func", collective), mine, axis, *getattr(collective, "args", ()))
        return blocking, flight.wait()

    for rank, results in enumerate(run(program, mesh).per_rank):
        xs = [everything[other] for other in mesh.group(rank, axis)]
        expected = wanted(xs, mesh.index(rank, axis))
        for result in results:
            assert bits(result) == bits(expected), (mesh, axis, rank)


class With:
    """A collective with arguments after the axis."""

    def __init__(self, func: Callable, *args):
        self.func, self.args = func, args

    def __call__(self, x: Tensor, axis) -> Tensor:
        return self.func(x, axis, *self.args)


# --- moving data ------------------------------------------------------------------------------------------------------


def moves(num_ranks: int) -> dict[str, tuple[Callable, Callable]]:
    perm = [(0, num_ranks - 1)] + ([(num_ranks - 1, 1)] if num_ranks > 2 else [])
    source = {b: a for a, b in perm}

    def permuted(xs, i):
        return xs[source[i]] if i in source else torch.zeros(xs[i].shape).to(xs[i].dtype) if i not in source else None

    def alone(whole, i):
        return whole if i == num_ranks - 1 else torch.zeros(whole.shape).to(whole.dtype)

    return {
        "all_gather": (all_gather, lambda xs, i: torch.cat(xs)),
        "all_gather, last dim": (With(all_gather, -1), lambda xs, i: torch.cat(xs, -1)),
        "all_to_all": (all_to_all, lambda xs, i: torch.cat([x.chunk(len(xs))[i] for x in xs])),
        "all_to_all, other dim": (
            With(all_to_all, 0, 1),
            lambda xs, i: torch.cat([x.chunk(len(xs))[i] for x in xs], 1),
        ),
        "broadcast": (broadcast, lambda xs, i: xs[0]),
        "broadcast of the last": (With(broadcast, num_ranks - 1), lambda xs, i: xs[-1]),
        "gather": (With(gather, num_ranks - 1), lambda xs, i: alone(torch.cat(xs), i)),
        "scatter": (With(scatter, num_ranks - 1), lambda xs, i: xs[-1].chunk(len(xs))[i]),
        "ppermute": (With(ppermute, perm), permuted),
        "ring_shift": (ring_shift, lambda xs, i: xs[i - 1]),
        "ring_shift, down by two": (With(ring_shift, -2), lambda xs, i: xs[(i + 2) % len(xs)]),
    }


@pytest.mark.parametrize("mesh, axis, op", pairs(MESHES, AXES, moves(2)), ids=ids)
def test_data_arrives_bit_by_bit(mesh: Mesh, axis, op: str):
    num_ranks = mesh.axis_size(groups_of(mesh, axis))
    collective, wanted = moves(num_ranks)[op]
    check(mesh, axis, collective, lambda rank: torch.randn(num_ranks * 2, 3) + rank, wanted)


@pytest.mark.parametrize("dtype", EVERY, ids=ids)
def test_every_dtype_moves(dtype: torch.dtype):
    mesh = Mesh(tp=3)
    for collective, wanted in moves(3).values():
        if dtype == torch.float8_e8m0fnu and getattr(collective, "func", None) in (ppermute, gather):
            continue  # this dtype has no zero
        check(mesh, "tp", collective, lambda rank: data(dtype, rank), wanted)


@pytest.mark.parametrize("dtype", [torch.bits8, torch.bits16, torch.float4_e2m1fn_x2], ids=ids)
def test_types_without_arithmetic_move_too(dtype: torch.dtype):
    for op in ("all_gather", "all_to_all", "broadcast", "ring_shift"):
        collective, wanted = moves(3)[op]
        check(
            Mesh(tp=3),
            "tp",
            collective,
            lambda rank: torch.arange(24, dtype=torch.uint8).add(rank).view(dtype),
            lambda xs, i, wanted=wanted: wanted([x.view(torch.uint8) for x in xs], i).view(dtype),
        )


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (3, 0, 2), (3, 1), (6, 1, 2, 1)], ids=ids)
def test_any_shape_moves_also_without_elements(shape: tuple[int, ...]):
    for collective, wanted in moves(3).values():
        if len(shape) == 1 and getattr(collective, "args", None) == (0, 1):
            continue  # has no dim 1
        check(Mesh(tp=3), "tp", collective, lambda rank: torch.full(shape, rank), wanted)


@pytest.mark.parametrize("collective", [all_reduce, broadcast, ring_shift, With(ppermute, [(0, 1)]), ring_all_reduce])
def test_scalars_travel(collective: Callable):
    out = run(lambda: collective(torch.tensor(1.0 + axis_index("tp")), "tp"), Mesh(tp=3)).per_rank
    assert [x.shape for x in out] == [()] * 3
    wanted = {all_reduce: [6, 6, 6], broadcast: [1, 1, 1], ring_shift: [3, 1, 2], ring_all_reduce: [6, 6, 6]}
    assert [x.item() for x in out] == wanted.get(collective, [0, 1, 0])


@pytest.mark.parametrize("collective", [all_gather, reduce_scatter, all_to_all])
def test_a_scalar_cannot_be_cut_or_joined(collective: Callable):
    with pytest.raises(ShapeError, match=r"0 dims .*\n?.*reshape\(1\)"):
        run(lambda: collective(torch.tensor(1.0), "tp"), Mesh(tp=2))


def test_all_gather_takes_pieces_of_different_sizes():
    sizes = [2, 0, 5, 1]

    def program() -> tuple[Tensor, Tensor]:
        i = axis_index("tp")
        x = torch.full((3, sizes[i]), float(i))
        return all_gather(x, "tp", dim=1), start(all_gather, x.t(), "tp").wait()

    wanted = torch.cat([torch.full((3, size), float(i)) for i, size in enumerate(sizes)], 1)
    for a, b in run(program, Mesh(tp=4)).per_rank:
        assert torch.equal(a, wanted)
        assert torch.equal(b, wanted.t())


def test_messages_may_differ_in_shape_from_rank_to_rank():
    out = run(lambda: ring_shift(torch.ones(axis_index("tp") + 1, 2), "tp").shape[0], Mesh(tp=3)).per_rank
    assert out == [3, 1, 2]


def test_nans_and_signed_zeros_travel_as_they_are():
    x = torch.tensor([float("nan"), -0.0, float("inf"), -float("inf")])
    for result in run(
        lambda x: (ring_shift(x, "tp"), broadcast(x, "tp"), all_gather(x, "tp")[4:]), Mesh(tp=2), x
    ).per_rank:
        for y in result:
            assert bits(y) == bits(x)


# --- reductions -------------------------------------------------------------------------------------------------------


def exact_sum(xs: list[Tensor]) -> Tensor:
    """Added up in the order of positions; types of 16 bits and fewer in float32, rounded once."""
    dtype = xs[0].dtype
    if dtype == torch.bool:
        return torch.stack(xs).any(0)
    if dtype in COMPLEX:
        wide = torch.complex64 if dtype == torch.complex32 else dtype
    elif dtype.is_floating_point:
        wide = torch.float32 if dtype.itemsize < 4 else dtype
    else:
        wide = torch.int64
    total = xs[0].to(wide)
    for x in xs[1:]:
        total = total + x.to(wide)
    return total.to(dtype)


@pytest.mark.parametrize("mesh", MESHES, ids=ids)
@pytest.mark.parametrize("axis", AXES, ids=ids)
def test_reductions_on_every_mesh(mesh: Mesh, axis):
    num_ranks = mesh.axis_size(groups_of(mesh, axis))

    def inputs(rank: int) -> Tensor:
        return torch.randn(num_ranks * 2, 3, generator=torch.Generator().manual_seed(rank))

    reductions = {
        "sum": exact_sum,
        "mean": lambda xs: exact_sum(xs) / len(xs),
        "max": lambda xs: torch.stack(xs).amax(0),
        "min": lambda xs: torch.stack(xs).amin(0),
    }
    for op, total in reductions.items():
        check(mesh, axis, With(all_reduce, op), inputs, lambda xs, i, total=total: total(xs))
        alone = lambda xs, i, total=total: total(xs) if i == num_ranks - 1 else torch.zeros_like(xs[0])  # noqa: E731
        check(mesh, axis, With(reduce, num_ranks - 1, op), inputs, alone)
        check(mesh, axis, With(reduce_scatter, 0, op), inputs, lambda xs, i, total=total: total(xs).chunk(len(xs))[i])
    inputs_by_column = lambda rank: inputs(rank).t().contiguous()  # noqa: E731
    check(mesh, axis, With(reduce_scatter, 1), inputs_by_column, lambda xs, i: exact_sum(xs).chunk(len(xs), 1)[i])


@pytest.mark.parametrize("dtype", EVERY, ids=ids)
@pytest.mark.parametrize("shape", [(6, 2), (3, 0), ()], ids=ids)
def test_every_dtype_is_added_up(dtype: torch.dtype, shape: tuple[int, ...]):
    mesh = Mesh(tp=3)
    check(mesh, "tp", all_reduce, lambda rank: data(dtype, rank, shape), lambda xs, i: exact_sum(xs))
    if shape:
        check(
            mesh, "tp", reduce_scatter, lambda rank: data(dtype, rank, shape), lambda xs, i: exact_sum(xs).chunk(3)[i]
        )


@pytest.mark.parametrize("dtype", [d for d in EVERY if not d.is_complex], ids=ids)
def test_every_ordered_dtype_has_extremes(dtype: torch.dtype):
    def wanted(xs: list[Tensor], pick: str) -> Tensor:
        numbers = torch.stack([x.double() for x in xs])
        return (numbers.amax(0) if pick == "max" else numbers.amin(0)).to(dtype)

    for op in ("max", "min"):
        check(
            Mesh(tp=3), "tp", With(all_reduce, op), lambda rank: data(dtype, rank), lambda xs, i, op=op: wanted(xs, op)
        )


def test_unsigned_extremes_and_sums_use_all_their_bits():
    rows = {
        torch.uint16: [1, 2**16 - 1, 2**15],
        torch.uint32: [1, 2**32 - 1, 2**31],
        torch.uint64: [1, 2**64 - 1, 2**63],
    }
    for dtype, numbers in rows.items():

        def program(dtype=dtype, numbers=numbers) -> list:
            x = torch.tensor([numbers[axis_index("tp")]], dtype=dtype)
            return [all_reduce(x, "tp", op).item() for op in ("max", "min", "sum")]

        wanted = [max(numbers), min(numbers), sum(numbers) % 2 ** (8 * dtype.itemsize)]
        assert run(program, Mesh(tp=3)).per_rank == [wanted] * 3


@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED, torch.bool], ids=ids)
def test_whole_numbers_have_no_mean(dtype: torch.dtype):
    expect(TypeError, rf"mean of {dtype} .*floating-point type first", lambda: all_reduce(data(dtype, 0), "tp", "mean"))


@pytest.mark.parametrize("dtype", [*COMPLEX, torch.bits8], ids=ids)
def test_complex_numbers_have_no_extremes(dtype: torch.dtype):
    x = torch.zeros(48, dtype=torch.uint8).view(dtype)
    expect(TypeError, f"no max of {dtype}", lambda: reduce_scatter(x, "tp", op="max"))


def test_sixteen_bits_are_rounded_once():
    """1 + 8 x 2^-9: in bfloat16 each addition would round the term away."""

    def program() -> float:
        x = torch.tensor([1.0 if axis_index("tp") == 0 else 2.0**-9], dtype=torch.bfloat16)
        return all_reduce(x, "tp").item()

    assert run(program, Mesh(tp=9)).per_rank == [1 + 2.0**-6] * 9


def test_nan_wins_every_extreme():
    def program() -> list[float]:
        x = torch.tensor([float("nan") if axis_index("tp") == 1 else 3.0])
        return [all_reduce(x, "tp", op).item() for op in ("max", "min", "sum")]

    assert np.isnan(run(program, Mesh(tp=3)).per_rank).all()


def test_a_sum_is_the_same_bits_on_every_rank_and_in_reduce_scatter():
    def program() -> tuple[Tensor, Tensor]:
        x = torch.randn(4096) * 10 ** (3 * torch.rand(4096))
        return all_reduce(x, "tp"), all_gather(reduce_scatter(x, "tp"), "tp")

    out = [x for pair in run(program, Mesh(tp=8)).per_rank for x in pair]
    assert all(torch.equal(out[0], x) for x in out)


# --- places and parameters --------------------------------------------------------------------------------------------


def test_places_along_axes():
    mesh = Mesh(dp=2, tp=3)
    out = run(lambda: [axis_index(a) for a in ("dp", "tp", ("dp", "tp"), ("tp", "dp"))], mesh).per_rank
    assert out == [[rank // 3, rank % 3, rank, rank % 3 * 2 + rank // 3] for rank in range(6)]
    assert run(lambda: [axis_size(a) for a in ("dp", "tp", ("tp", "dp"))], mesh).per_rank == [[2, 3, 6]] * 6
    out = run(lambda: all_gather(torch.tensor([axis_index("dp") * 3 + axis_index("tp")]), ["tp", "dp"]).tolist(), mesh)  # type: ignore
    assert out.per_rank == [[0, 3, 1, 4, 2, 5]] * 6


def test_whole_numbers_of_numpy_are_as_good_as_pythons():
    one: Any = np.int64(1)

    def program() -> list:
        x = torch.arange(4.0).reshape(2, 2) + axis_index("tp")
        return [
            all_gather(x, "tp", dim=one).shape,
            reduce_scatter(x, "tp", dim=one).shape,
            broadcast(x, "tp", root=one)[0, 0].item(),
            ring_shift(x, "tp", shift=one)[0, 0].item(),
            ppermute(x, "tp", np.array([[0, 1]]))[0, 0].item(),  # type: ignore
        ]

    assert run(program, Mesh(tp=2)).per_rank == [[(2, 4), (2, 1), 1, 1, 0], [(2, 4), (2, 1), 1, 0, 0]]


def test_what_cannot_be_meant_is_refused_with_the_way_out():
    x = torch.ones(6, 4)
    expect(MeshError, r"has no axis 'pp'; its axes are 'dp', 'tp'", lambda: all_reduce(x, "pp"))
    expect(MeshError, r"each once", lambda: all_reduce(x, ("tp", "tp")))
    expect(MeshError, r"3 is neither", lambda: all_reduce(x, 3))  # type: ignore
    expect(MeshError, r"has no axis 'pp'", lambda: barrier("pp"))
    expect(MeshError, r"has no axis 'pp'", lambda: axis_index("pp"))
    expect(ValueError, r"op is 'prod'; it must be one of sum, mean, max, min", lambda: all_reduce(x, "tp", "prod"))
    expect(ValueError, r"op is 'prod'", lambda: reduce_scatter(x, "tp", 0, "prod"))
    expect(TypeError, r"all_reduce sends a torch.Tensor, not float", lambda: all_reduce(1.0, "tp"))  # type: ignore
    expect(TypeError, r"ring_shift sends a torch.Tensor, not list", lambda: ring_shift([x], "tp"))  # type: ignore
    expect(ShapeError, r"all_gather along dim 2: the tensor has 2 dims \(6, 4\)", lambda: all_gather(x, "tp", 2))
    expect(ShapeError, r"all_to_all along dim -3", lambda: all_to_all(x, "tp", 0, -3))
    expect(ShapeError, r"dim 1 has size 4.*3 ranks of axis 'tp'.*\n.*pad it to 6", lambda: reduce_scatter(x, "tp", 1))
    expect(ShapeError, r"all_to_all: dim 1 has size 4", lambda: all_to_all(x, "tp", 1, 0))
    expect(MeshError, r"positions 0 to 2; root=3 is not one", lambda: broadcast(x, "tp", 3))
    expect(MeshError, r"root=-1 is not one", lambda: broadcast(x, "tp", -1))
    expect(TypeError, r"root .*whole number.*1\.0", lambda: broadcast(x, "tp", 1.0))  # type: ignore
    expect(TypeError, r"shift .*whole number.*0\.5", lambda: ring_shift(x, "tp", 0.5))  # type: ignore
    expect(TypeError, r"dim .*whole number.*'x'", lambda: all_gather(x, "tp", "x"))  # type: ignore
    expect(MeshError, r"positions 0 to 2; 3 in \[\(0, 3\)\] is not one", lambda: ppermute(x, "tp", [(0, 3)]))
    expect(MeshError, r"position 0 .*sends twice", lambda: ppermute(x, "tp", [(0, 1), (0, 2)]))
    expect(MeshError, r"position 1 .*receives twice", lambda: ppermute(x, "tp", [(0, 1), (2, 1)]))
    expect(TypeError, r"pairs .*\(0, 1, 2\)", lambda: ppermute(x, "tp", [(0, 1, 2)]))  # type: ignore
    expect(TypeError, r"start needs a collective", lambda: start(barrier, "tp"))  # type: ignore
    expect(TypeError, r"start needs a collective, as in start\(ring_shift", lambda: start(torch.relu, x))


@pytest.mark.parametrize("collective", [all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, ring_shift])
def test_collectives_work_only_inside_run(collective: Callable):
    for call in (lambda: collective(torch.ones(2), "tp"), lambda: start(collective, torch.ones(2), "tp")):
        with pytest.raises(OutsideRunError, match="call run"):
            call()
    for place in (
        lambda: axis_index("tp"),
        lambda: axis_size("tp"),
        barrier,
        lambda: ppermute(torch.ones(1), "tp", []),
    ):
        with pytest.raises(OutsideRunError, match="call run"):
            place()


# --- asynchronous -----------------------------------------------------------------------------------------------------


def test_handles_are_waited_for_in_any_order_and_twice():
    def program() -> list[Tensor]:
        i = float(axis_index("tp"))
        flights = [
            start(ring_shift, torch.tensor([i]), "tp"),
            start(all_reduce, torch.tensor([i]), "tp", op="max"),
            start(ring_shift, torch.tensor([i]), "tp", shift=-1),
            start(all_gather, torch.tensor([i]), "tp"),
            start(ppermute, torch.tensor([i]), axis="tp", perm=[(0, 1)]),
        ]
        assert all(isinstance(flight, Handle) for flight in flights)
        order = [4, 0, 3, 1, 2] if axis_index("tp") % 2 else [3, 2, 1, 0, 4]  # each rank in an order of its own
        landed = {place: flights[place].wait() for place in order}
        assert all(flights[place].wait() is landed[place] for place in reversed(order))
        return [landed[place] for place in range(5)]

    for i, (up, most, down, every, pair) in enumerate(run(program, Mesh(tp=4)).per_rank):
        assert [up.item(), most.item(), down.item(), pair.item()] == [(i - 1) % 4, 3, (i + 1) % 4, 0]
        assert every.tolist() == [0, 1, 2, 3]


def test_a_handle_that_is_never_waited_for_does_no_harm():
    def program() -> Tensor:
        x = torch.ones(3, requires_grad=True)
        start(all_reduce, x, "tp")
        if axis_index("tp") == 1:
            start(ring_shift, x * 2, "tp").wait()
        else:
            start(ring_shift, x * 2, "tp")
        return all_reduce(x, "tp")

    out = run(program, Mesh(tp=3))
    assert [x.tolist() for x in out.per_rank] == [[3, 3, 3]] * 3


def test_a_rank_may_return_while_its_message_is_still_under_way():
    def program() -> float | None:
        flight = start(ppermute, torch.tensor([1.0 + axis_index("tp")]), "tp", [(0, 1)])
        return flight.wait().item() if axis_index("tp") == 1 else None

    assert run(program, Mesh(tp=2)).per_rank == [None, 1.0]


def test_many_in_flight():
    def program() -> float:
        flights = [start(ring_shift, torch.tensor([float(k)]), "tp", k) for k in range(40)]
        sums = [start(all_reduce, torch.tensor([float(k)]), "tp") for k in range(40)]
        return sum(h.wait().item() for h in flights + sums[::-1])

    assert run(program, Mesh(tp=3)).per_rank == [780 + 3 * 780] * 3


def test_several_axes_at_once():
    mesh = Mesh(dp=2, tp=3)

    def program(x: Tensor) -> Tensor:
        rows = start(all_reduce, x, "tp")
        columns = start(all_reduce, x, "dp")
        both = start(all_reduce, x, ("dp", "tp"))
        return torch.stack([both.wait(), columns.wait(), rows.wait()], -1)

    x = torch.arange(6.0).reshape(2, 3)
    out = run(program, mesh, x, in_specs=P("dp", "tp"), out_specs=P("dp", "tp"))
    assert torch.equal(out.value[..., 0], torch.full((2, 3), 15.0))
    assert torch.equal(out.value[..., 1], x.sum(0).expand(2, 3))
    assert torch.equal(out.value[..., 2], x.sum(1, keepdim=True).expand(2, 3))


def test_a_barrier_is_a_meeting_of_its_axis():
    seen: list[tuple[str, int]] = []

    def program() -> None:
        i = axis_index("tp")
        seen.append(("before", i))
        barrier("tp")
        seen.append(("after", i))

    run(program, Mesh(tp=4))
    assert [when for when, _ in seen] == ["before"] * 4 + ["after"] * 4


def test_a_hundred_ranks():
    out = run(lambda: all_reduce(torch.ones(1), ("dp", "tp")).item(), Mesh(dp=10, tp=10))
    assert out.per_rank == [100.0] * 100
