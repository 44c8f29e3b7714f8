"""Collectives in both frameworks, against NumPy: what comes out, what flows back, what is refused."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frameworks import FRAMEWORKS, Framework, in_both, on_each_rank
from tests.pairwise import cover
from tplab import Mesh, P
from tplab.errors import MeshError, OutsideRunError, RankError, ShapeError

MESHES = [
    *(Mesh(tp=size) for size in (1, 2, 3, 4, 8)),
    *(Mesh(dp=2, tp=3), Mesh(dp=3, tp=2), Mesh(a=2, b=2, c=2)),
]
FEW = [Mesh(tp=1), Mesh(tp=3), Mesh(dp=3, tp=2), Mesh(a=2, b=2, c=2)]


def on_meshes(names="", values=((),), of_torch=MESHES, of_jax=FEW):
    """Cases of both frameworks, on these meshes: with some parameters more, a pairwise cover."""
    cases = [[(mesh, *value) for mesh, value in product(meshes, values)] for meshes in (of_torch, of_jax)]
    return pytest.mark.parametrize("fw, mesh" + names, cover(in_both(*cases)), indirect=["fw"], ids=str)


ON_MESHES = on_meshes()


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def axes_of(mesh):
    """Every axis, and all of them together in both orders."""
    names = mesh.axis_names
    return [*names, *([names, names[::-1]] if len(names) > 1 else [])]


def whole_numbers(mesh, shape, seed=0, dtype=np.float32):
    """A different small array on each rank. Sums of small whole numbers are exact: no tolerance is needed."""
    generator = np.random.default_rng(seed)
    return [generator.integers(-8, 9, shape).astype(dtype) for _ in mesh.ranks]


def expected(mesh, axis, xs, result):
    """What each rank gets: `result(index, inputs of its group in order)`."""
    return [result(mesh.index(rank, axis), [xs[r] for r in mesh.group(rank, axis)]) for rank in mesh.ranks]


def check(fw, mesh, xs, collective, result, rtol=0.0):
    """`collective(x, axis)` gives `result(index, inputs)` along every axis; all of them in one program."""
    axes = axes_of(mesh)
    got = on_each_rank(fw, lambda x: [collective(x, axis) for axis in axes], mesh, xs)
    for place, axis in enumerate(axes):
        for rank, want in enumerate(expected(mesh, axis, xs, result)):
            np.testing.assert_allclose(got[rank][place], want, rtol=rtol, err_msg=f"rank {rank}, axis {axis}")
            assert got[rank][place].dtype == want.dtype


REDUCED = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


# --------------------------------------------------------------------------------------------------------- forward


@on_meshes(", op", [(op,) for op in REDUCED])
def test_all_reduce(fw, mesh, op):
    xs = whole_numbers(mesh, (3, 5))
    # a mean over 3 ranks is rounded once
    combined = lambda _, group: REDUCED[op](group, 0)  # noqa: E731
    check(fw, mesh, xs, lambda x, axis: fw.lab.all_reduce(x, axis, op), combined, rtol=1e-6)


@on_meshes(", dim", [(0,), (1,), (-1,)])
def test_all_gather(fw, mesh, dim):
    xs = whole_numbers(mesh, (2, 3, 5))
    check(fw, mesh, xs, lambda x, axis: fw.lab.all_gather(x, axis, dim), lambda _, group: np.concatenate(group, dim))


@on_meshes(", op", [(op,) for op in REDUCED])
def test_reduce_scatter(fw, mesh, op):
    for dim in (0, -1):
        xs = whole_numbers(mesh, (2 * mesh.size, 3, mesh.size))
        collective = lambda x, axis, dim=dim: fw.lab.reduce_scatter(x, axis, dim, op)  # noqa: E731
        piece = lambda i, group, dim=dim: np.split(REDUCED[op](group, 0), len(group), dim)[i]  # noqa: E731
        check(fw, mesh, xs, collective, piece, rtol=1e-6)


@on_meshes(", split_dim, concat_dim", [(0, 0), (0, 1), (1, 0), (-1, 0)])
def test_all_to_all(fw, mesh, split_dim, concat_dim):
    def pieces(index, group):
        return np.concatenate([np.split(x, len(group), split_dim)[index] for x in group], concat_dim)

    xs = whole_numbers(mesh, (2 * mesh.size, mesh.size, mesh.size))
    check(fw, mesh, xs, lambda x, axis: fw.lab.all_to_all(x, axis, split_dim, concat_dim), pieces)


@on_meshes(", root", [("first",), ("last",)])
def test_broadcast(fw, mesh, root):
    def collective(x, axis):
        return fw.lab.broadcast(x, axis, 0 if root == "first" else fw.lab.axis_size(axis) - 1)

    check(fw, mesh, whole_numbers(mesh, (3, 2)), collective, lambda _, group: group[0 if root == "first" else -1])


@on_meshes(", op", [("reduce",), ("gather",), ("scatter",)])
def test_to_and_from_a_root(fw, mesh, op):
    """To a root: the others get zeros. From a root: nobody else's numbers matter."""

    def collective(x, axis):
        size = fw.lab.axis_size(axis)
        if op == "reduce":
            return [fw.lab.reduce(x, axis, root, how) for root, how in ((size - 1, "sum"), (0, "mean"), (0, "max"))]
        return [getattr(fw.lab, op)(x, axis, size - 1, -1), getattr(fw.lab, op)(x, axis)]

    def wanted(index, group):
        first, last = index == 0, index == len(group) - 1
        if op == "reduce":
            return [np.sum(group, 0) * last, np.mean(group, 0) * first, np.max(group, 0) * first]
        if op == "gather":
            return [np.concatenate(group, -1) * last, np.concatenate(group) * first]
        return [np.split(group[-1], len(group), -1)[index], np.split(group[0], len(group))[index]]

    xs, axes = whole_numbers(mesh, (2 * mesh.size, 3, mesh.size)), axes_of(mesh)
    got = on_each_rank(fw, lambda x: [collective(x, axis) for axis in axes], mesh, xs)
    for place, axis in enumerate(axes):
        for rank, want in enumerate(expected(mesh, axis, xs, wanted)):
            for found, right in zip(got[rank][place], want, strict=True):
                np.testing.assert_allclose(found, right, rtol=1e-6, err_msg=f"rank {rank}, axis {axis}")
                assert found.dtype == np.float32


@ON_MESHES
def test_ring_shift(fw, mesh):
    for shift in (1, -1, 2, 0, 7):
        collective = lambda x, axis, shift=shift: fw.lab.ring_shift(x, axis, shift)  # noqa: E731
        source = lambda i, group, shift=shift: group[(i - shift) % len(group)]  # noqa: E731
        check(fw, mesh, whole_numbers(mesh, (3, 2)), collective, source)


@ON_MESHES
def test_ppermute_leaves_zeros_where_nobody_sent(fw, mesh):
    def collective(x, axis):
        return fw.lab.ppermute(x, axis, [(index, index + 1) for index in range(fw.lab.axis_size(axis) - 1)])

    from_below = lambda i, group: group[i - 1] if i else np.zeros_like(group[0])  # noqa: E731
    check(fw, mesh, whole_numbers(mesh, (3, 2)), collective, from_below)


@ON_MESHES
def test_axis_index_and_size(fw, mesh):
    for axis in axes_of(mesh):
        program = lambda axis=axis: (fw.lab.axis_index(axis) + 0, fw.lab.axis_size(axis))  # noqa: E731
        results = fw.lab.run(program, mesh).per_rank
        assert [int(index) for index, _ in results] == [mesh.index(rank, axis) for rank in mesh.ranks]
        assert {int(size) for _, size in results} == {mesh.axis_size(axis)}


def test_barrier_changes_nothing(fw):
    def program(x):
        fw.lab.barrier("tp")
        fw.lab.barrier()
        return x

    mesh = Mesh(dp=2, tp=2)
    np.testing.assert_array_equal(on_each_rank(fw, program, mesh, xs := whole_numbers(mesh, (2,))), xs)


@pytest.mark.parametrize(
    "name",
    [
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "ring_shift"),
        *("reduce", "gather", "scatter"),
    ],
)
def test_start_and_wait_give_what_the_call_gives(fw, name):
    mesh = Mesh(dp=2, tp=3)

    def program(x):
        collective = getattr(fw.lab, name)
        handle = fw.lab.start(collective, x, "tp")
        meanwhile = x * 2
        return handle.wait() - collective(x, "tp"), handle.wait() - collective(x, axis="tp"), meanwhile

    for twice, again, meanwhile in on_each_rank(fw, program, mesh, whole_numbers(mesh, (6, 3))):
        assert not twice.any()
        assert not again.any()
        assert meanwhile.shape == (6, 3)


@pytest.mark.parametrize("dtype", ["int32", "float16", "bfloat16", "uint8"])
def test_dtypes_come_through(fw, dtype):
    """Small whole numbers are exact in each of these types."""
    mesh = Mesh(tp=3)

    def program(x):
        x = x.astype(dtype) if fw.name == "jax" else x.to(getattr(__import__("torch"), dtype))
        total, moved = fw.lab.all_reduce(x, "tp"), fw.lab.ring_shift(x, "tp")
        largest, all_of_it = fw.lab.all_reduce(x, "tp", "max"), fw.lab.all_gather(x, "tp")
        assert {str(y.dtype).removeprefix("torch.") for y in (total, moved, largest, all_of_it)} == {dtype}
        return total, moved, largest, all_of_it

    xs = [np.abs(x) for x in whole_numbers(mesh, (4,))]
    for rank, (total, moved, largest, all_of_it) in enumerate(on_each_rank(fw, program, mesh, xs)):
        np.testing.assert_array_equal(total, sum(xs))
        np.testing.assert_array_equal(moved, xs[rank - 1])
        np.testing.assert_array_equal(largest, np.max(xs, 0))
        np.testing.assert_array_equal(all_of_it, np.concatenate(xs))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), ()])
def test_nothing_and_scalars_can_be_sent(fw, shape):
    mesh = Mesh(tp=3)

    def program(x):
        results = [fw.lab.all_reduce(x, "tp"), fw.lab.all_reduce(x, "tp", "max"), fw.lab.ring_shift(x, "tp")]
        results += [fw.lab.broadcast(x, "tp"), fw.lab.ppermute(x, "tp", [(0, 1)]), fw.lab.reduce(x, "tp", 2)]
        if shape:
            results += [fw.lab.all_gather(x, "tp"), fw.lab.reduce_scatter(x, "tp"), fw.lab.all_to_all(x, "tp")]
            results += [fw.lab.gather(x, "tp", 1), fw.lab.scatter(x, "tp", 1)]
        return results

    if shape == (3, 0):
        shapes = [(3, 0)] * 6 + [(9, 0), (1, 0), (3, 0), (9, 0), (1, 0)]
    else:
        shapes = [shape] * (11 if shape else 6)
    for results in on_each_rank(fw, program, mesh, whole_numbers(mesh, shape)):
        assert [result.shape for result in results] == shapes


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_booleans_are_any_and_all(fw, op):
    mesh = Mesh(tp=3)
    xs = [np.array([[True, False, i == 1], [i == 2, i != 0, False]]) for i in range(3)]
    want = np.all(xs, 0) if op == "min" else np.any(xs, 0)

    def program(x):
        return (
            fw.lab.all_reduce(x, "tp", op),
            fw.lab.reduce_scatter(x, "tp", 1, op),
            fw.lab.broadcast(x, "tp", 1),
            fw.lab.ring_shift(x, "tp"),
            fw.lab.reduce(x, "tp", 1, op),
            fw.lab.gather(x, "tp", 1),
            fw.lab.scatter(x, "tp", 1, 1),
        )

    for rank, results in enumerate(on_each_rank(fw, program, mesh, xs)):
        to_root = want & (rank == 1), np.concatenate(xs) & (rank == 1), xs[1][:, [rank]]
        for got, right in zip(results, (want, want[:, [rank]], xs[1], xs[rank - 1], *to_root), strict=True):
            np.testing.assert_array_equal(got, right)
            assert got.dtype == bool


@pytest.mark.parametrize("op", REDUCED)
def test_nothing_can_be_scattered(fw, op):
    xs = [np.zeros((0, 4), np.float32)] * 2
    pieces = on_each_rank(fw, lambda x: fw.lab.reduce_scatter(x, "tp", 1, op), Mesh(tp=2), xs)
    assert [piece.shape for piece in pieces] == [(0, 2)] * 2


def test_what_depends_on_nothing_but_empty_tensors(fw):
    """XLA does not compile this by itself."""
    program = lambda x, i: fw.lab.all_reduce(x.sum(-1), "tp").sum() + (i != 1).sum()  # noqa: E731
    arguments = fw.array(np.zeros((0, 4), np.float32)), fw.array(np.zeros((0,), np.int32))
    out = fw.lab.run(program, Mesh(tp=2), *arguments, in_specs=(P(None, "tp"), P()))
    assert [float(y) for y in out.per_rank] == [0, 0]


# ------------------------------------------------------------------------------------------------------- gradients

# Every collective is linear (max and min piecewise so): y = A x over all ranks of a group, and dx = A^T dy. `back` is
# A^T, written down once more by hand: (index, the group's dy in order) -> dx.
LINEAR = {
    "all_reduce": (lambda lab, x: lab.all_reduce(x, "tp"), lambda i, d: d[i]),
    "mean": (lambda lab, x: lab.all_reduce(x, "tp", "mean"), lambda i, d: d[i] / len(d)),
    "all_gather": (lambda lab, x: lab.all_gather(x, "tp"), lambda i, d: np.split(sum(d), len(d), 0)[i]),
    "all_gather 1": (lambda lab, x: lab.all_gather(x, "tp", 1), lambda i, d: np.split(sum(d), len(d), 1)[i]),
    "reduce_scatter": (lambda lab, x: lab.reduce_scatter(x, "tp"), lambda i, d: np.concatenate(d)),
    "scattered mean": (lambda lab, x: lab.reduce_scatter(x, "tp", 0, "mean"), lambda i, d: np.concatenate(d) / len(d)),
    "all_to_all": (
        lambda lab, x: lab.all_to_all(x, "tp", 0, 1),
        lambda i, d: np.concatenate([np.split(dy, len(d), 1)[i] for dy in d], 0),
    ),
    "broadcast": (lambda lab, x: lab.broadcast(x, "tp", 0), lambda i, d: d[i] if i == 0 else 0 * d[i]),
    "reduce": (lambda lab, x: lab.reduce(x, "tp", lab.axis_size("tp") - 1), lambda i, d: d[-1]),
    "reduced mean": (lambda lab, x: lab.reduce(x, "tp", 0, "mean"), lambda i, d: d[0] / len(d)),
    "gather": (lambda lab, x: lab.gather(x, "tp", 0, 1), lambda i, d: np.split(d[0], len(d), 1)[i]),
    "scatter": (
        lambda lab, x: lab.scatter(x, "tp", lab.axis_size("tp") - 1),
        lambda i, d: np.concatenate(d) * (i == len(d) - 1),
    ),
    "ring_shift": (lambda lab, x: lab.ring_shift(x, "tp", 1), lambda i, d: d[(i + 1) % len(d)]),
    "ring_shift -2": (lambda lab, x: lab.ring_shift(x, "tp", -2), lambda i, d: d[(i - 2) % len(d)]),
    "ppermute": (
        lambda lab, x: lab.ppermute(x, "tp", [(j, j - 1) for j in range(1, lab.axis_size("tp"))]),
        lambda i, d: d[i - 1] if i else 0 * d[0],
    ),
    "started": (lambda lab, x: lab.start(lab.ring_shift, x, "tp").wait(), lambda i, d: d[(i + 1) % len(d)]),
    "reduce_from": (lambda lab, x: lab.reduce_from(x, "tp"), lambda i, d: d[i]),
    "copy_to": (lambda lab, x: lab.copy_to(x, "tp"), lambda i, d: sum(d)),
}
REPLICATED = ("all_reduce", "mean", "broadcast", "reduce_from")


@on_meshes(
    ", name",
    [(name,) for name in LINEAR],
    [Mesh(tp=1), Mesh(tp=2), Mesh(tp=3), Mesh(dp=2, tp=4)],
    [Mesh(tp=3), Mesh(dp=2, tp=4)],
)
def test_gradient(fw, mesh, name):
    """Weights that differ from rank to rank give each rank a dy of its own, unless the result is replicated."""
    forward, back = LINEAR[name]
    num_ranks = mesh.axis_size("tp")
    xs = whole_numbers(mesh, (2 * num_ranks, 3 * num_ranks))
    shape = {
        "all_gather": (2 * num_ranks**2, 3 * num_ranks),
        "all_gather 1": (2 * num_ranks, 3 * num_ranks**2),
        "reduce_scatter": (2, 3 * num_ranks),
        "scattered mean": (2, 3 * num_ranks),
        "scatter": (2, 3 * num_ranks),
        "gather": (2 * num_ranks, 3 * num_ranks**2),
        "all_to_all": (2, 3 * num_ranks**2),
    }.get(name, xs[0].shape)
    weights = whole_numbers(mesh, shape, seed=1)
    if name in REPLICATED:
        weights = [weights[mesh.group(rank, "tp")[0]] for rank in mesh.ranks]
        program = lambda x, w: fw.gradients(lambda x: (forward(fw.lab, x) * fw.lab.broadcast(w, "tp")).sum(), x)  # noqa: E731
    else:
        program = lambda x, w: fw.gradients(lambda x: (forward(fw.lab, x) * w).sum(), x)  # noqa: E731
    got = [dx for (dx,) in on_each_rank(fw, program, mesh, xs, weights)]
    for a, b in zip(got, expected(mesh, "tp", weights, back), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("op", ["max", "min"])
def test_gradient_of_an_extreme_goes_to_those_that_hold_it(fw, op):
    """Where a rank has NaN, nobody knows who holds the extreme: the gradient is NaN on every rank."""
    mesh, nan = Mesh(tp=4), np.nan
    xs = [np.array(x, np.float32) for x in ([1, 5, 2, 2, 1], [3, 5, 2, 0, nan], [3, 1, 2, 1, 2], [0, 0, 2, 2, 3])]
    program = lambda x: fw.gradients(lambda x: (fw.lab.all_reduce(x, "tp", op) * 12).sum(), x)  # noqa: E731
    got = np.stack([dx for (dx,) in on_each_rank(fw, program, mesh, xs)])
    holds = np.stack(xs) == getattr(np, op)(xs, 0)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, 12 * holds / holds.sum(0))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nan_goes_through_every_reduction(fw, dtype):
    """Whichever rank has it. And nothing else is lost: signs, infinities, numbers too small to be normal."""
    mesh, nan, inf = Mesh(tp=4), np.nan, np.inf
    columns = [[nan, 1, 2, 3], [1, nan, 2, 3], [3, 2, -nan, 1], [-1, -2, -3, nan], [inf, -inf, nan, 0], [nan] * 4]
    columns += [
        [inf, 1, -inf, 0],
        [-inf] * 4,
        [-3, -1, -2, -7],
        [0.0, -0.0, -1, 1],
        [6e-8, -6e-8, 3e-7, 0],
        [1, 2, 3, 4],
    ]
    xs = np.array(columns, np.float32).T.copy()
    with np.errstate(invalid="ignore"):
        wanted = {"max": xs.max(0), "min": xs.min(0), "sum": xs.sum(0)}

    def program(x):
        x = x.astype(dtype) if fw.name == "jax" else x.to(getattr(__import__("torch"), dtype))
        reduced = [fw.lab.all_reduce(x[0], "tp", op) for op in wanted]
        pieces = [fw.lab.all_gather(fw.lab.reduce_scatter(x[0], "tp", 0, op), "tp", 0) for op in wanted]
        return reduced, pieces

    out = fw.lab.run(program, mesh, fw.array(xs), in_specs=(P("tp"),))
    for both in out.per_rank:
        for found in both:
            for got, want in zip(map(fw.numpy, found), wanted.values(), strict=True):
                np.testing.assert_allclose(got.astype(np.float32), want, rtol=1e-2, atol=6e-8)
    reduced = [e for e in out.trace.events if e.rank == 0 and e.op == "all_reduce" and e.kind == "collective"]
    assert [(e.dtype, e.shape) for e in reduced] == [(dtype, (12,))] * 3


def test_second_derivatives(fw):
    """Of sum_r (x_(r-1))^3 over all ranks: 3 x^2 on the rank that holds x, and then 6 x."""
    mesh = Mesh(tp=3)
    xs = whole_numbers(mesh, (4,))

    def program(x):
        if fw.name == "jax":
            first = lambda x: fw.gradients(lambda x: (fw.lab.ring_shift(x, "tp") ** 3).sum(), x)[0].sum()  # noqa: E731
            return fw.gradients(first, x)
        import torch

        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad((fw.lab.ring_shift(x, "tp") ** 3).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.sum(), x)

    for x, (ddx,) in zip(xs, on_each_rank(fw, program, mesh, xs), strict=True):
        np.testing.assert_array_equal(ddx, 6 * x)


@settings(max_examples=8)
@given(
    mesh=st.sampled_from([Mesh(tp=2), Mesh(tp=3), Mesh(dp=2, tp=2)]),
    batch=st.integers(1, 3),
    width=st.integers(1, 4),
    hidden=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_a_sharded_mlp_has_the_gradients_of_the_dense_one(mesh, batch, width, hidden, seed):
    """Megatron's pair, f and g, around a column- and a row-parallel matrix; data parallel over dp."""
    random = np.random.default_rng(seed).normal
    hidden *= mesh.axis_size("tp")
    x = random(size=(batch * mesh.shape.get("dp", 1), width))
    a, b = random(size=(width, hidden)), random(size=(hidden, width))
    y = np.tanh(x @ a)
    dz = 2 * (y @ b)
    dy = (dz @ b.T) * (1 - y**2)
    want = [dy @ a.T, x.T @ dy, y.T @ dz]
    over = "dp" if "dp" in mesh.shape else None
    for name in FRAMEWORKS:
        fw = FRAMEWORKS[name]()

        def loss(x, a, b, fw=fw):
            hidden = fw.tanh(fw.lab.copy_to(x, "tp") @ (fw.lab.copy_to(a, over) if over else a))
            z = fw.lab.reduce_from(hidden @ (fw.lab.copy_to(b, over) if over else b), "tp")
            total = (z**2).sum()
            return fw.lab.all_reduce(total, over) if over else total

        program = lambda x, a, b, fw=fw, loss=loss: tuple(fw.gradients(loss, x, a, b))  # noqa: E731
        specs = (P(over), P(None, "tp"), P("tp"))
        args = [fw.array(array.astype(np.float32)) for array in (x, a, b)]
        out = fw.lab.run(program, mesh, *args, in_specs=specs, out_specs=specs)
        for got, right in zip(out.value, want, strict=True):
            np.testing.assert_allclose(fw.numpy(got), right, rtol=2e-3, atol=2e-4)  # float32 sums of products


# ---------------------------------------------------------------------------------------------------------- errors

MESH = Mesh(dp=2, tp=4)
WRONG = {
    "unknown axis": (lambda lab, x: lab.all_reduce(x, "pp"), MeshError, r"has no axis 'pp'; its axes are 'dp', 'tp'"),
    "unknown axis of an index": (lambda lab, x: lab.axis_index("pp"), MeshError, r"has no axis 'pp'"),
    "unknown axis of a size": (lambda lab, x: lab.axis_size("pp"), MeshError, r"has no axis 'pp'"),
    "unknown axis of a barrier": (lambda lab, x: lab.barrier("pp"), MeshError, r"has no axis 'pp'"),
    "unknown axis of copy_to": (lambda lab, x: lab.copy_to(x, "pp"), MeshError, r"has no axis 'pp'"),
    "axis twice": (lambda lab, x: lab.all_reduce(x, ("tp", "tp")), MeshError, r"each once"),
    "does not divide": (
        lambda lab, x: lab.reduce_scatter(x, "tp", 1),
        ShapeError,
        r"reduce_scatter: dim 1 has size 10, which the 4 ranks of axis 'tp' cannot share equally;\n"
        r"pad it to 12, or use a mesh whose 'tp' divides 10",
    ),
    "does not divide either": (lambda lab, x: lab.all_to_all(x, "tp", 1), ShapeError, r"all_to_all: dim 1 has size 10"),
    "no such dim": (lambda lab, x: lab.all_gather(x, "tp", 2), ShapeError, r"along dim 2: .* 2 dims \(4, 10\)"),
    "scalar": (lambda lab, x: lab.all_gather(x.sum(), "tp"), ShapeError, r"reshape\(1\)"),
    "root": (lambda lab, x: lab.broadcast(x, "tp", 4), MeshError, r"positions 0 to 3; root=4"),
    "root of a reduce": (lambda lab, x: lab.reduce(x, "tp", -1), MeshError, r"reduce: axis 'tp' has .*; root=-1 is"),
    "root of a gather": (lambda lab, x: lab.gather(x, "tp", 4), MeshError, r"gather: axis 'tp' has .*; root=4 is"),
    "root of a scatter": (lambda lab, x: lab.scatter(x, "tp", 4), MeshError, r"scatter: axis 'tp' has .*; root=4 is"),
    "cannot be scattered": (lambda lab, x: lab.scatter(x, "tp", 0, 1), ShapeError, r"scatter: dim 1 has size 10"),
    "pair off the axis": (lambda lab, x: lab.ppermute(x, "tp", [(0, 4)]), MeshError, r"positions 0 to 3; 4 in"),
    "sends twice": (lambda lab, x: lab.ppermute(x, "tp", [(0, 1), (0, 2)]), MeshError, r"position 0 .* sends twice"),
    "receives twice": (lambda lab, x: lab.ppermute(x, "tp", [(0, 1), (2, 1)]), MeshError, r"1 .* receives twice"),
    "parts": (lambda lab, x: lab.ring_reduce_scatter([x], "tp"), ShapeError, r"part for each of the 4 ranks .* got 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(fw, name):
    wrong, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        fw.lab.run(lambda x: wrong(fw.lab, x), MESH, fw.array(np.zeros((4, 10), np.float32)))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda lab, x: lab.all_reduce(x, "tp", "product"), r"op is 'product'; it must be one of sum, mean, max, min"),
        (lambda lab, x: lab.reduce_scatter(x, "tp", 0, "product"), r"op is 'product'"),
        (lambda lab, x: lab.ring_all_gather(x, "tp", "left"), r"direction is 'left'; it must be one of up, down,"),
        (lambda lab, x: lab.ring_reduce_scatter([x] * 4, "tp", "left"), r"direction is 'left'"),
        (lambda lab, x: lab.ring_all_reduce(x, "tp", "left"), r"direction is 'left'"),
        (lambda lab, x: lab.start(abs, x, "tp"), r"start needs a collective, as in start\(ring_shift, x, 'tp'\)"),
        (lambda lab, x: lab.all_reduce("x", "tp"), r"all_reduce sends .*, not str"),
    ],
)
def test_values_that_make_no_sense(fw, wrong, message):
    """torch's ranks each run the program, and so say which of them raised; JAX traces it once for all."""
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        fw.lab.run(lambda x: wrong(fw.lab, x), MESH, fw.array(np.zeros((4, 10), np.float32)))


NO_NUMBERS = {
    "mean of whole numbers": (np.int32, lambda lab, x: lab.all_reduce(x, "tp", "mean"),
                              r"all_reduce: the mean of (torch.)?int32 would not be whole numbers; convert to"),
    "mean of booleans": (bool, lambda lab, x: lab.reduce_scatter(x, "tp", 0, "mean"), r"mean of (torch.)?bool would"),
    "extreme": (np.complex64, lambda lab, x: lab.all_reduce(x, "tp", "max"), r"no max of (torch.)?complex64; reduce"),
    "scattered": (np.complex64, lambda lab, x: lab.reduce_scatter(x, "tp", 0, "min"), r"no min of (torch.)?complex64"),
    "pair": (np.float32, lambda lab, x: lab.ppermute(x, "tp", [(0.7, 1.2)]), r"as \(0, 1\); \(0.7, 1.2\) is no pair"),
    "no pair": (np.float32, lambda lab, x: lab.ppermute(x, "tp", [0, 1]), r"as \(0, 1\); 0 is no pair"),
    "root": (np.float32, lambda lab, x: lab.broadcast(x, "tp", 1.0), r"root must be a whole number, not 1.0"),
    "reduced": (np.int32, lambda lab, x: lab.reduce(x, "tp", 0, "mean"), r"reduce: the mean of (torch.)?int32 would"),
    "shift": (np.float32, lambda lab, x: lab.ring_shift(x, "tp", 1.0), r"shift must be a whole number, not 1.0"),
    "dim": (np.float32, lambda lab, x: lab.all_gather(x, "tp", "x"), r"all_gather: dim must be a whole .*'x'"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_numbers_that_are_none_and_types_that_do_not_have_it(fw, name):
    dtype, wrong, message = NO_NUMBERS[name]
    with pytest.raises((TypeError, RankError), match=message) as info:
        fw.lab.run(lambda x: wrong(fw.lab, x), Mesh(tp=2), fw.array(np.zeros((2, 2), dtype)))
    assert isinstance(info.value.__cause__ if fw.name == "torch" else info.value, TypeError)


@pytest.mark.parametrize(
    "call",
    [
        lambda lab, x: lab.all_reduce(x, "tp"),
        lambda lab, x: lab.ring_shift(x, "tp"),
        lambda lab, x: lab.axis_index("tp"),
        lambda lab, x: lab.axis_size("tp"),
        lambda lab, x: lab.barrier(),
        lambda lab, x: lab.copy_to(x, "tp"),
        lambda lab, x: lab.ring_all_gather(x, "tp"),
    ],
)
def test_outside_of_run(fw, call):
    with pytest.raises(OutsideRunError, match=rf"tplab\.{fw.name}\.run runs on a mesh; call run\(function, Mesh\("):
        call(fw.lab, fw.array(np.zeros(3, np.float32)))


@pytest.mark.parametrize("entry", [P("tp"), (P("tp"), P("tp")), (P("tp"), None)])
def test_none_is_nothing_to_split(fw, entry):
    """An argument, or one result of several, that is None has no pieces, whatever spec stands there: a bias, say."""
    x = fw.array(np.arange(6.0).reshape(6, 1))

    def program(pair):
        x, bias = pair
        return (2 * x, bias) if bias is None else (x, bias)

    whole = fw.lab.run(program, Mesh(tp=3), (x, None), in_specs=(entry,), out_specs=entry).value
    np.testing.assert_array_equal(fw.numpy(whole[0]), 2 * np.arange(6.0).reshape(6, 1))
    assert whole[1] is None
