"""The same program in torch and in JAX leaves the same trace of messages."""

import numpy as np
import pytest

from tests.frameworks import FRAMEWORKS
from tplab import Mesh, P, cost
from tplab.widgets.score import words
from tplab.widgets.score.score import score

MESHES = [Mesh(tp=1), Mesh(tp=2), Mesh(tp=3), Mesh(tp=4), Mesh(dp=2, tp=3)]
TRACED = ("send", "receive", "collective")


def messages(trace):
    """Every message and collective as both frameworks must see it; chunks by what they are, not by number."""
    rows = []
    for e in trace.events:
        if e.kind in TRACED:
            chunk = trace.chunks[e.chunk] if e.chunk >= 0 else None
            values = None if e.values is None else np.round(e.values, 4).ravel().tolist()
            who, what = (e.rank, e.kind, e.op, e.axis, e.group, e.peer), (e.bytes, e.shape, e.dtype)
            rows.append((*who, *what, e.step, chunk, e.contributors, values))
    return sorted(rows, key=repr)


def traces_of(program, mesh, *args, **options):
    found = {}
    for name, framework in FRAMEWORKS.items():
        fw = framework()
        found[name] = fw.lab.run(lambda *args, fw=fw: program(fw, *args), mesh, *map(fw.array, args), **options).trace
    return found["torch"], found["jax"]


def columns(x):
    """The pieces of x along its last dim, one a rank."""
    return [x[..., k : k + 1] for k in range(x.shape[-1])]


RINGS = {
    f"{name} {direction}": program
    for direction in ("up", "down", "both", "split")
    for name, program in {
        "gather": lambda fw, x, direction=direction: fw.lab.ring_all_gather(x, "tp", direction),
        "scatter": lambda fw, x, direction=direction: fw.lab.ring_reduce_scatter(columns(x), "tp", direction, 0),
        "reduce": lambda fw, x, direction=direction: fw.lab.ring_all_reduce(x, "tp", direction),
    }.items()
}


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
@pytest.mark.parametrize("name", RINGS)
def test_rings(name, mesh):
    x = np.arange(6.0 * mesh.size * mesh.axis_size("tp"), dtype=np.float32).reshape(6, -1)
    axis = next(iter(mesh.axis_names)) if len(mesh.axis_names) > 1 else None
    torch_trace, jax_trace = traces_of(RINGS[name], mesh, x[:, : mesh.axis_size("tp")], in_specs=P(axis))
    assert messages(jax_trace) == messages(torch_trace)
    assert (len(messages(jax_trace)) > 0) == (mesh.axis_size("tp") > 1)
    assert jax_trace.unit == torch_trace.unit == "steps"


def matmul_ring(fw, x, w):
    """An all-gather by hand, with a product of each piece as it comes."""
    total = x @ w
    for _ in range(fw.lab.axis_size("tp") - 1):
        x = fw.lab.ring_shift(x, "tp")
        total = total + x @ w
    return total


def two_ways(fw, x, w):
    up, down = fw.lab.start(fw.lab.ring_shift, x @ w, "tp"), fw.lab.start(fw.lab.ring_shift, x @ w, "tp", -1)
    return fw.lab.ring_shift(up.wait() + down.wait(), "tp")


def sums(fw, x, w):
    y = fw.lab.all_reduce(fw.tanh(x @ w), "tp")
    z = fw.lab.all_gather(y, "tp", 1)
    return fw.lab.reduce_scatter(z, "tp", 1), fw.lab.all_to_all(z, "tp", 1, 0)


def line(fw, x, w):
    """A pipeline's forward pass: down the line, not around."""
    for _ in range(2):
        x = fw.lab.ppermute(fw.tanh(x @ w), "tp", [(i, i + 1) for i in range(fw.lab.axis_size("tp") - 1)])
    return x


def sent_again(fw, x, w):
    """What is sent twice is one chunk; what is computed anew is another."""
    start, ring_shift = fw.lab.start, fw.lab.ring_shift
    flights = start(ring_shift, x, "tp"), start(ring_shift, x, "tp", 2), start(ring_shift, x + 1, "tp")
    return [flight.wait() for flight in flights]


def doubled(fw, x, w):
    """A number is nobody's data; a tensor of a rank's own is its own."""
    return fw.lab.ring_shift(fw.lab.ring_shift(fw.lab.ring_shift(x, "tp") * 2, "tp") + x, "tp")


def numbers(fw, x, w):
    """A ring that adds up one number of each rank: there, a single number is a rank's own data, and 2 is not."""
    own = total = x[0, 0]
    for _ in range(fw.lab.axis_size("tp") - 2):
        total = fw.lab.ring_shift(total, "tp") + own
    return fw.lab.ring_shift(fw.lab.ring_shift(total, "tp") * 2, "tp")


def backward(fw, x, w):
    def loss(x, w):
        y = fw.lab.copy_to(x, "tp") @ fw.lab.copy_to(w, "tp")
        return (fw.lab.ring_shift(fw.tanh(y), "tp") ** 2).sum()

    return fw.gradients(loss, x, w)


PROGRAMS = [matmul_ring, two_ways, sums, line, sent_again, doubled, numbers]


@pytest.mark.parametrize("mesh", [Mesh(tp=3), Mesh(tp=4), Mesh(dp=2, tp=3)], ids=repr)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs(program, mesh):
    random = np.random.default_rng(0)
    x, w = random.normal(size=(2, 3)).astype(np.float32), random.normal(size=(3, 3)).astype(np.float32)
    torch_trace, jax_trace = traces_of(program, mesh, x, w)
    assert messages(jax_trace) == messages(torch_trace)


@pytest.mark.parametrize("mesh", [Mesh(tp=3), Mesh(tp=4), Mesh(dp=2, tp=3)], ids=repr)
def test_to_and_from_a_root(mesh):
    """Forward and backward, the same but for bytes: XLA has no such collectives, and so JAX sends what stands for them.
    Others than the root end with zeros, and with no data but their own."""
    size, root = mesh.axis_size("tp"), 1

    def program(fw, x):
        def loss(x):
            found = fw.lab.reduce(x, "tp", root), fw.lab.gather(x, "tp", root), fw.lab.scatter(x, "tp", root)
            return sum((y * y).sum() for y in found)

        return fw.gradients(loss, x)

    x = np.arange(12.0 * size * size).reshape(-1, size) % 7
    traces = traces_of(program, mesh, x, in_specs=P("tp"))
    for fw, trace in zip(FRAMEWORKS, traces):
        sent = {
            "reduce": ("all_reduce", 12 * size), "broadcast": ("all_reduce", 12 * size),
            "gather": ("all_gather", 12 * size), "scatter": ("reduce_scatter", 12 * size),
        }  # fmt: skip
        seen = [e for e in trace.events if e.kind == "collective"]
        forward = [e.op for e in seen if e.rank == 0 and e.phase == "forward"]
        backward = sorted(e.op for e in seen if e.rank == 0 and e.phase == "backward")
        assert (forward, backward) == (["reduce", "gather", "scatter"], ["broadcast", "gather", "scatter"])
        for e in seen:
            index, group = mesh.index(e.rank, "tp"), mesh.group(e.rank, "tp")
            op, elements = sent[e.op]
            if e.phase == "backward" and e.op != "broadcast":
                elements = {"scatter": size * elements, "gather": elements // size}[e.op]
            itemsize = np.dtype(e.dtype).itemsize
            of = (e.op, (index - root) % size) if fw == "torch" else (op, index)
            assert e.bytes == cost.bytes_sent(of[0], elements, itemsize, size, of[1])
            if e.op in ("reduce", "gather") and e.phase == "forward":
                assert e.contributors == (group if index == root else (e.rank,))
                assert index == root or e.values is None or not np.any(e.values)
            if e.op == "scatter" and e.phase == "forward":
                assert (e.contributors, e.part) == ((group[root],), (index, size))
    texts = [words.sentences(score(trace)) for trace in traces]
    assert any("one rank of" in text and "ends with the sum of all their tensors" in text for text in texts[0])
    assert texts[0][:4] == texts[1][:4]  # the backward pass has another order


def test_a_sum_of_single_numbers_has_data_of_all_that_were_added():
    for trace in traces_of(numbers, Mesh(tp=4), np.ones((2, 3), np.float32), np.ones((3, 3), np.float32)):
        sent = [event.contributors for event in trace.events if event.kind == "send" and event.rank == 0]
        assert sent == [(0,), (0, 3), (0, 2, 3), (1, 2, 3)]


@pytest.mark.parametrize("axis", [("a", "b"), ("b", "a")])
def test_along_two_axes(axis):
    """Positions along two axes count in the order of their names."""
    program = lambda fw, x: fw.lab.ring_shift(fw.lab.all_gather(x, axis), axis)  # noqa: E731
    x = np.arange(6, dtype=np.float32)
    torch_trace, jax_trace = traces_of(program, Mesh(a=2, b=3), x, in_specs=P(("a", "b")))
    assert messages(jax_trace) == messages(torch_trace)


def test_backward_passes_send_the_same():
    """JAX has no labels of a graph's inside, and torch none in a backward pass: who sends what, and how much, agree."""
    x, w = np.ones((2, 3), np.float32), np.ones((3, 3), np.float32)
    sent = [
        sorted((e.rank, e.kind, e.op, e.peer, e.bytes, e.shape) for e in trace.events if e.kind in TRACED)
        for trace in traces_of(backward, Mesh(tp=3), x, w)
    ]
    assert sent[0] == sent[1]


@pytest.mark.parametrize("cluster, direction", [("h100", "up"), ("tpu_v5e", "both"), ("tpu_v5e", "split")])
def test_a_ring_of_hops_takes_as_long(cluster, direction):
    """Where nothing is computed and no way is shared, blocking and compiled rings take the same modelled time."""
    gather = lambda fw, x: fw.lab.ring_all_gather(x, "tp", direction)  # noqa: E731
    hops = [
        sorted((e.rank, e.peer, e.start, e.end) for e in trace.events if e.kind == "send")
        for trace in traces_of(gather, Mesh(tp=4), np.ones((4, 100), np.float32), cluster=cluster)
    ]
    np.testing.assert_allclose(hops[0], hops[1], rtol=1e-12)


@pytest.mark.parametrize("direction", ["up", "down", "both", "split"])
@pytest.mark.parametrize("cluster", [None, "h100"])
def test_sums_on_their_way_say_whose_data_they_hold(direction, cluster):
    """Each rank adds its own part to what came: an event with the chunk, everybody's contributors and the values."""

    def program(fw, x):
        return fw.lab.ring_reduce_scatter([x[:, 2 * k : 2 * k + 2] for k in range(4)], "tp", direction)

    x = np.random.default_rng(42).integers(0, 10, (4, 8)).astype(np.float32)
    found = []
    for trace in traces_of(program, Mesh(tp=4), x, in_specs=P("tp"), cluster=cluster):
        sums = [e for e in trace.events if e.kind == "compute" and e.chunk >= 0 and e.op.startswith("add")]
        assert sum(e.contributors == (0, 1, 2, 3) for e in sums) == (8 if direction == "split" else 4)
        if cluster is None:
            assert all(e.start == e.end for e in sums)
        rows = [(e.rank, trace.chunks[e.chunk], e.contributors, e.values.tolist(), e.shape) for e in sums]
        found.append(sorted(rows, key=repr))
    assert found[0] == found[1]
