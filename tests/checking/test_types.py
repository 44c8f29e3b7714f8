"""The types of tensors on ranks: every cast and its backward pass, against finite differences, in both frameworks."""

from pathlib import Path

import numpy as np
import pytest

from tests.frameworks import FRAMEWORKS, Framework, gathers_alike
from tplab import Mesh, P
from tplab.checking.types import DUALS, KINDS
from website.casts import CASTS, table


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def mine(fw, num_ranks):
    """[R]: 1 at the index of this rank, 0 elsewhere."""
    return fw.array(np.eye(num_ranks, dtype=np.float32))[fw.lab.axis_index("tp")]


def piece(fw, x, num_ranks):
    return (x.reshape(num_ranks, -1) * mine(fw, num_ranks)[:, None]).sum(0)


def among_zeros(fw, x, num_ranks):
    return (x[None] * mine(fw, num_ranks)[:, None]).reshape(-1)


def cast(fw, call, x, num_ranks):
    """What the program in a cell of the table makes of x."""
    names = {name: getattr(fw.lab, name) for name in fw.lab.__all__ if name.islower()}
    names |= {"x": x, "axis": "tp", "dim": 0, "R": num_ranks}
    names |= {"piece": lambda x: piece(fw, x, num_ranks), "among_zeros": lambda x: among_zeros(fw, x, num_ranks)}
    return eval(call, names)


def program_of(fw, one, num_ranks, only_gradient=False):
    """Each rank's gradient of what the cast takes, and its loss, quadratic in what the cast makes.

    What the loss is depends on the type: of something invariant, all ranks have the same loss. Of something replicated
    or varying, each has its own, and they count together. What is partial is added up first.
    """

    def loss(x, together, own):
        y = cast(fw, one.call, x, num_ranks)
        if one.target == "P":
            y = fw.lab.all_reduce(y, "tp")
        weights = own if one.target in "RV" else together
        return (weights[: y.shape[0]] * y * y).sum()

    def program(x, together, own):
        x = {"I": lambda: x, "R": lambda: fw.lab.copy_to(x, "tp")}.get(one.source, lambda: x[0])()
        own = own[0]
        (gradient,) = fw.gradients(lambda x: loss(x, together, own), x)
        return gradient if only_gradient else (gradient, loss(x, together, own))

    return program


@pytest.mark.parametrize(("name", "num_ranks"), [("torch", 2), ("torch", 3), ("torch", 4), ("jax", 3)])
@pytest.mark.parametrize("pair", CASTS, ids=" to ".join)
def test_a_cast_and_its_backward_pass(pair, name, num_ranks):
    """Losses of whole numbers, which central differences of step 1 differentiate exactly: no tolerance but that of
    thirds. The gradient has the type that the table says. In torch they are taken along every element; in JAX, where a
    run takes longer, in three directions."""
    fw = FRAMEWORKS[name]()
    one, mesh, size = CASTS[pair], Mesh(tp=num_ranks), num_ranks
    draw = np.random.default_rng(num_ranks)
    is_whole = one.source in "RI"
    x = draw.integers(-4, 5, size if is_whole else (num_ranks, size)).astype(np.float32)
    together = draw.integers(1, 5, size * num_ranks).astype(np.float32)
    own = draw.integers(1, 5, (num_ranks, size * num_ranks)).astype(np.float32)
    program, specs = program_of(fw, one, num_ranks), (P() if is_whole else P("tp"), P(), P("tp"))

    def answer(x):
        results = fw.lab.run(program, mesh, *map(fw.array, (x, together, own)), in_specs=specs).per_rank
        losses = [float(fw.numpy(loss)) for _, loss in results]
        total = sum(losses) if one.target in "RV" else losses[0]
        return total, np.stack([fw.numpy(gradient) for gradient, _ in results])

    _, gradients = answer(x)
    steps = np.eye(x.size) if name == "torch" else draw.integers(-1, 2, (3, x.size))
    steps = steps.astype(np.float32).reshape(-1, *x.shape)
    want = np.array([(answer(x + step)[0] - answer(x - step)[0]) / 2 for step in steps])
    assert np.abs(want).max() > 1
    found = {"I": list(gradients), "R": [gradients.sum(0)]}.get(one.source, [gradients])
    for got in found:
        np.testing.assert_allclose(np.tensordot(steps, got, x.ndim), want, rtol=1e-5, atol=1e-4)
    if DUALS[one.source] in "RI":
        np.testing.assert_array_equal(gradients, np.broadcast_to(gradients[0], gradients.shape))


@pytest.mark.parametrize("pair", [pair for pair in CASTS if CASTS[pair].call != "x"], ids=" to ".join)
def test_what_a_cast_sends(fw, pair):
    one, mesh, size = CASTS[pair], Mesh(tp=2), 4
    is_whole = one.source in "RI"
    program = program_of(fw, one._replace(target="V" if one.target == "P" else one.target), 2, only_gradient=True)
    arguments = [fw.array(np.ones(shape, np.float32)) for shape in (size if is_whole else (2, size), 8, (2, 8))]
    specs = (P() if is_whole else P("tp"), P(), P("tp"))
    trace = fw.lab.run(program, mesh, *arguments, in_specs=specs, keep_values=0).trace
    sent = [event.op for event in trace.select(kind="collective", rank=0).events]
    want = [op for op in (one.sends, one.backward.sends) if op != "nothing"]
    assert sorted(sent) == sorted(gathers_alike(fw)[0] if "I" in pair and op == "all_gather" else op for op in want)


def test_every_type_is_cast_to_every_other_and_backward_passes_are_in_the_table():
    assert list(CASTS) == [(source, target) for source in KINDS for target in KINDS]
    for one in CASTS.values():
        assert one.backward.backward is one
        assert (one.call == "x") == (one.backward.call == "x")


def test_the_table_of_the_docs():
    page = Path(__file__).parents[2] / "docs" / "types.md"
    assert table() in page.read_text(encoding="utf8"), "docs/types.md needs what website.casts.table() returns"
