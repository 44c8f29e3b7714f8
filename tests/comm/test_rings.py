"""Rings in both frameworks: what arrives and in which order, what is sent, what flows back."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tplab.jax as tj
from tests.frameworks import FRAMEWORKS, Framework, in_both, on_each_rank
from tplab import Mesh, P
from tplab.errors import ShapeError

DIRECTIONS = ("up", "down", "both", "split")
MESHES = [Mesh(tp=1), Mesh(tp=2), Mesh(tp=3), Mesh(tp=4), Mesh(tp=8), Mesh(dp=2, tp=3)]
FEW = [Mesh(tp=1), Mesh(tp=2), Mesh(tp=8), Mesh(dp=2, tp=3)]
ON_MESHES = pytest.mark.parametrize(
    "fw, mesh", in_both([(mesh,) for mesh in MESHES], [(mesh,) for mesh in FEW]), indirect=["fw"], ids=str
)


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


# ----------------------------------------------------------------------------------- the oracle: the formulas, in NumPy


def halves(x, dim):
    """x in two; of an odd size the first is the larger."""
    return np.split(x, [(x.shape[dim] + 1) // 2], dim)


def gathered(group, i, direction, dim=-1):
    """What index i holds in the end, in the order of arrival."""
    num_ranks = len(group)
    if direction == "split":
        up = [halves(group[(i - k) % num_ranks], dim)[0] for k in range(num_ranks)]
        return up + [halves(group[(i + k) % num_ranks], dim)[1] for k in range(num_ranks)]
    sign = 1 if direction == "down" else -1
    return [group[(i + sign * k) % num_ranks] for k in range(num_ranks)]


def scattered(parts, i, direction, dim=-1):
    """sum_j parts[j][(j-1-i) mod R] on index i, or downwards (i-j-1)."""
    num_ranks = len(parts)
    up = sum(parts[j][(j - 1 - i) % num_ranks] for j in range(num_ranks))
    down = sum(parts[j][(i - j - 1) % num_ranks] for j in range(num_ranks))
    if direction == "split":
        return np.concatenate([halves(up, dim)[0], halves(down, dim)[1]], dim)
    return down if direction == "down" else up


def arrays(mesh, shape, seed=0):
    """Small whole numbers, whose sums are exact."""
    generator = np.random.default_rng(seed)
    return [generator.integers(-8, 9, shape).astype(np.float32) for _ in mesh.ranks]


def on_its_ring(mesh, rank, xs):
    return mesh.index(rank, "tp"), [xs[r] for r in mesh.group(rank, "tp")]


# ---------------------------------------------------------------------------------------- the outputs the source prints


def test_all_gather_as_published(fw):
    """UvA Deep Learning Tutorials 4.2: x = 0..7, one feature a device, mesh (data 2, model 4)."""
    mesh = Mesh(data=2, model=4)
    x = fw.array(np.arange(8, dtype=np.float32).reshape(2, 4))

    def run(direction, x=x):
        program = lambda x: [p.reshape(-1) for p in fw.lab.ring_all_gather(x, "model", direction)]  # noqa: E731
        per_rank = fw.lab.run(program, mesh, x, in_specs=P("data", "model")).per_rank
        return [[float(v) for piece in pieces for v in piece] for pieces in per_rank]

    ring = [[0, 3, 2, 1], [1, 0, 3, 2], [2, 1, 0, 3], [3, 2, 1, 0]]
    up = ring + [[4 + source for source in row] for row in ring]
    assert run("up") == up
    assert run("both") == up
    assert run("down") == [[row[0], *row[:0:-1]] for row in up]
    two_features = fw.array(np.arange(0, 8, 0.5, dtype=np.float32).reshape(2, 8))
    split = run("split", two_features)
    assert split[0] == [0, 3, 2, 1, 0.5, 1.5, 2.5, 3.5]
    assert split[1] == [1, 0, 3, 2, 1.5, 2.5, 3.5, 0.5]


def test_reduce_scatter_as_published(fw):
    y = np.random.default_rng(42).integers(0, 10, (2, 4, 4))
    mesh = Mesh(data=2, model=4)

    def run(direction, y):
        def program(y):
            parts = [y[..., k, :].reshape(-1) for k in range(4)]
            return fw.lab.ring_reduce_scatter(parts, "model", direction)

        out = fw.lab.run(program, mesh, fw.array(y), in_specs=P("data", "model")).per_rank
        return [[int(v) for v in piece] for piece in out]

    assert y[0].tolist() == [[0, 7, 6, 4], [4, 8, 0, 6], [2, 0, 5, 9], [7, 7, 7, 7]]
    want = [15, 21, 23, 20, 19, 28, 15, 14]
    one = y.reshape(2, 4, 4, 1)
    assert run("up", one) == [[v] for v in want]
    assert run("both", one) == [[v] for v in want]
    twice = np.stack([y, y], -1)  # two features, of which the second half goes the other way round
    assert run("split", twice) == [[a, b] for a, b in zip(want, [11, 18, 27, 23, 16, 22, 18, 20], strict=True)]
    assert run("down", one) == [[v] for v in [11, 18, 27, 23, 16, 22, 18, 20]]


# --------------------------------------------------------------------------------------------------------- the formulas


@ON_MESHES
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_all_gather(fw, mesh, direction):
    xs = arrays(mesh, (3, 5))
    got = on_each_rank(fw, lambda x: fw.lab.ring_all_gather(x, "tp", direction), mesh, xs)
    for rank, pieces in enumerate(got):
        index, group = on_its_ring(mesh, rank, xs)
        want = gathered(group, index, direction)
        assert len(pieces) == len(want)
        for a, b in zip(pieces, want, strict=True):
            np.testing.assert_array_equal(a, b)


@ON_MESHES
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_reduce_scatter(fw, mesh, direction):
    num_ranks = mesh.axis_size("tp")
    xs = arrays(mesh, (num_ranks, 3, 5))
    program = lambda x: fw.lab.ring_reduce_scatter([x[k] for k in range(num_ranks)], "tp", direction, 0)  # noqa: E731
    for rank, got in enumerate(on_each_rank(fw, program, mesh, xs)):
        index, group = on_its_ring(mesh, rank, xs)
        np.testing.assert_array_equal(got, scattered(group, index, direction, 0))


@ON_MESHES
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_all_reduce(fw, mesh, direction):
    """Of any shape: fewer elements than ranks, a number that does not divide, none, a scalar."""
    shapes = [(2, 3), (7,), (1,), (0, 2), ()]
    xs = [arrays(mesh, shape, seed) for seed, shape in enumerate(shapes)]
    program = lambda *xs: [fw.lab.ring_all_reduce(x, "tp", direction) for x in xs]  # noqa: E731
    for rank, results in enumerate(on_each_rank(fw, program, mesh, *xs)):
        for got, x, shape in zip(results, xs, shapes, strict=True):
            assert got.shape == shape
            np.testing.assert_array_equal(got, sum(on_its_ring(mesh, rank, x)[1]))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_any_structure(fw, direction):
    mesh = Mesh(tp=3)
    xs, ys = arrays(mesh, (2, 3)), arrays(mesh, (4,), 1)

    def program(x, y):
        gathered = fw.lab.ring_all_gather({"x": x, "y": (y,)}, "tp", direction)
        parts = [{"x": x * k, "y": (y + k,)} for k in range(3)]
        return gathered, fw.lab.ring_reduce_scatter(parts, "tp", direction)

    for rank, (pieces, total) in enumerate(on_each_rank(fw, program, mesh, xs, ys)):
        for name, values in (("x", xs), ("y", ys)):
            for got, want in zip(pieces, gathered(values, rank, direction), strict=True):
                np.testing.assert_array_equal(got[name] if name == "x" else got[name][0], want)
        want_x = scattered([[x * k for k in range(3)] for x in xs], rank, direction)
        want_y = scattered([[y + k for k in range(3)] for y in ys], rank, direction)
        np.testing.assert_array_equal(total["x"], want_x)
        np.testing.assert_array_equal(total["y"][0], want_y)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_structure_without_arrays(direction):
    program = lambda x: len(tj.ring_all_gather(None, "tp", direction)) * x  # noqa: E731
    got = tj.run(program, Mesh(tp=3), np.ones(1)).per_rank
    assert [int(x[0]) for x in got] == [6 if direction == "split" else 3] * 3


def test_along_two_axes_at_once(fw):
    mesh = Mesh(a=2, b=2)
    xs = arrays(mesh, (3,))
    for axis in (("a", "b"), ("b", "a")):
        got = on_each_rank(fw, lambda x, axis=axis: fw.lab.ring_all_gather(x, axis), mesh, xs)
        for rank, pieces in enumerate(got):
            group = [xs[r] for r in mesh.group(rank, axis)]
            np.testing.assert_array_equal(pieces, gathered(group, mesh.index(rank, axis), "up"))


@settings(max_examples=6)
@given(
    size=st.sampled_from([2, 3, 4]),
    direction=st.sampled_from(DIRECTIONS),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    dim=st.sampled_from([0, 1, -1]),
    seed=st.integers(0, 99),
)
def test_gathering_what_was_scattered_is_all_reduce(size, direction, shape, dim, seed):
    mesh = Mesh(tp=size)
    xs = arrays(mesh, (size, *shape), seed)
    for name in FRAMEWORKS:
        fw = FRAMEWORKS[name]()

        def program(x, fw=fw):
            total = fw.lab.ring_reduce_scatter([x[k] for k in range(size)], "tp", direction, dim)
            return fw.lab.ring_all_gather(total, "tp", direction, dim)

        for rank, pieces in enumerate(on_each_rank(fw, program, mesh, xs)):
            totals = [scattered(xs, i, direction, dim) for i in range(size)]
            for got, want in zip(pieces, gathered(totals, rank, direction, dim), strict=True):
                np.testing.assert_array_equal(got, want)


# ------------------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("fw, size", in_both([(1,), (2,), (3,), (4,)], [(2,), (3,), (4,)]), indirect=["fw"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients(fw, size, direction):
    """Each rank weighs what it gets differently; the gradient is the weights, sent back the way the data came."""
    mesh = Mesh(tp=size)
    num_pieces = 2 * size if direction == "split" else size
    xs, weights = arrays(mesh, (size, 2, 4)), arrays(mesh, (num_pieces, 2, 4), 1)

    def program(x, w):
        def gather_loss(x):
            pieces = fw.lab.ring_all_gather(x[0], "tp", direction)
            return sum((piece * w[k][..., : piece.shape[-1]]).sum() for k, piece in enumerate(pieces))

        def scatter_loss(x):
            return (fw.lab.ring_reduce_scatter([x[k] for k in range(size)], "tp", direction) * w[0]).sum()

        def reduce_loss(x):
            return (fw.lab.ring_all_reduce(x, "tp", direction) * w[0]).sum()

        return [fw.gradients(loss, x)[0] for loss in (gather_loss, scatter_loss, reduce_loss)]

    def back(forward):
        """A^T w for a linear map from all ranks' x to all ranks' results, column by column."""
        gradients = np.zeros((size, *xs[0].shape), np.float32)
        for place in np.ndindex(*gradients.shape):
            unit = np.zeros_like(gradients)
            unit[place] = 1
            gradients[place] = sum((y * w).sum() for y, w in forward(unit))
        return gradients

    def gather(unit):
        for i in range(size):
            for k, piece in enumerate(gathered(unit[:, 0], i, direction)):
                yield piece, weights[i][k][..., : piece.shape[-1]]

    def scatter(unit):
        return ((scattered(unit, i, direction), weights[i][0]) for i in range(size))

    def reduce(unit):
        return ((unit.sum(0), weights[i][0]) for i in range(size))

    wants = [back(forward) for forward in (gather, scatter, reduce)]
    for rank, got in enumerate(on_each_rank(fw, program, mesh, xs, weights)):
        for a, want in zip(got, wants, strict=True):
            np.testing.assert_array_equal(a, want[rank])


# --------------------------------------------------------------------------------------------------------- what is sent


@pytest.mark.parametrize("fw, size", in_both([(1,), (2,), (3,), (4,), (8,)], [(2,), (3,), (8,)]), indirect=["fw"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_messages_and_steps(fw, size, direction):
    """R-1 pieces of x are sent by each rank whatever the way; both ways at once take half as many steps, or bytes."""
    mesh = Mesh(tp=size)
    nbytes = 4 * 2 * 6
    program = lambda x: fw.lab.ring_all_gather(x, "tp", direction)  # noqa: E731
    trace = fw.lab.run(program, mesh, fw.array(np.ones((2, 6), np.float32)), keep_values=0).trace
    sends = trace.select(kind="send")
    assert all(trace.bytes_sent(rank) == (size - 1) * nbytes for rank in mesh.ranks)
    assert len(sends) == size * (size - 1) * (2 if direction == "split" else 1)
    steps = {"both": math.ceil((size - 1) / 2), "split": 2 if size == 2 else size - 1}  # of 2, both ways are one link
    assert trace.num_steps == steps.get(direction, size - 1)
    ups = sum(event.peer == mesh.neighbor(event.rank, "tp") for event in sends.events) / size
    if size > 2:  # of two ranks each is both neighbours of the other
        hops = {"up": (size - 1, 0), "down": (0, size - 1), "both": (size // 2, size - 1 - size // 2)}
        assert (ups, len(sends) / size - ups) == hops.get(direction, (size - 1, size - 1))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_sends_what_is_optimal(fw, size):
    mesh, elements = Mesh(tp=size), 12
    x = fw.array(np.ones(elements, np.float32))
    trace = fw.lab.run(lambda x: fw.lab.ring_all_reduce(x, "tp"), mesh, x, keep_values=0).trace
    assert [trace.bytes_sent(rank) for rank in mesh.ranks] == [2 * (size - 1) * elements * 4 // size] * size
    assert trace.num_steps == 2 * (size - 1)


@pytest.mark.parametrize("cluster", [None, "h100"])
@pytest.mark.parametrize("size", [2, 5, 8])
def test_each_round_of_a_tree_is_a_step(fw, size, cluster):
    """The root only sends. Its messages leave in the rounds of the program, not all in the first one."""

    def tree(x):
        i, knowing = fw.lab.axis_index("tp"), 1
        while knowing < size:
            pairs = [(k, k + knowing) for k in range(knowing) if k + knowing < size]
            news = fw.lab.ppermute(x, "tp", pairs)
            is_new = (knowing <= i) & (i < 2 * knowing)
            x, knowing = news * is_new + x * (1 - is_new), 2 * knowing
        return x

    x = fw.array(np.ones(4, np.float32))
    sends = fw.lab.run(tree, Mesh(tp=size), x, cluster=cluster, keep_values=0).trace.select(kind="send").events
    for event in sends:
        distance = event.peer - event.rank
        assert event.step == distance.bit_length() - 1
        assert cluster is not None or event.start == event.step


@pytest.mark.parametrize("shape, dim, has", [((), -1, "0 dims"), ((4,), 2, "1 dims")])
def test_a_dim_that_is_not_there_cannot_be_split(fw, shape, dim, has):
    x = fw.array(np.ones(shape, np.float32))
    with pytest.raises(ShapeError, match=f"direction='split' along dim {dim}: the tensor has {has}"):
        fw.lab.run(lambda x: fw.lab.ring_all_gather(x, "tp", "split", dim), Mesh(tp=3), x)
    with pytest.raises(ShapeError, match=f"direction='split' along dim {dim}"):
        fw.lab.run(lambda x: fw.lab.ring_reduce_scatter([x] * 3, "tp", "split", dim), Mesh(tp=3), x)
