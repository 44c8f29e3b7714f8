"""scatter_to and gather_from: what comes out, what flows back, what is sent, in both frameworks."""

import numpy as np
import pytest

from tests.frameworks import FRAMEWORKS, Framework, gathers_alike
from tplab import Mesh, P
from tplab.errors import MeshError, ShapeError

MESHES = [*(Mesh(tp=size) for size in (1, 2, 3, 4, 8)), Mesh(dp=2, tp=3)]


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def whole_numbers(*shape, seed=0):
    """Sums and products of small whole numbers are exact in float32."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def axes_of(mesh):
    return [*mesh.axis_names, *([mesh.axis_names, mesh.axis_names[::-1]] if len(mesh.shape) > 1 else [])]


def split_along(axis, dim):
    """The P of an array of 3 dims that is split along one of them."""
    return P(*(axis if place == dim % 3 else None for place in range(3)))


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
@pytest.mark.parametrize("dim", [0, -1])
def test_scatter_to_keeps_a_piece_and_gathers_the_gradient(fw, mesh, dim):
    x = whole_numbers(2 * mesh.size, 3, 2 * mesh.size)
    for axis in axes_of(mesh):
        weights = whole_numbers(*x.shape, seed=1)

        def program(w, x, axis=axis):
            y = fw.lab.scatter_to(x, axis, dim)
            return y, *fw.gradients(lambda x: (fw.lab.scatter_to(x, axis, dim) * w).sum(), x)

        specs = (split_along(axis, dim), P())
        out = fw.lab.run(program, mesh, fw.array(weights), fw.array(x), in_specs=specs, out_specs=specs)
        np.testing.assert_array_equal(fw.numpy(out.value[0]), x)
        np.testing.assert_array_equal(fw.numpy(out.value[1]), weights)


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
@pytest.mark.parametrize("dim", [0, -1])
def test_gather_from_joins_pieces_and_keeps_a_piece_of_the_gradient(fw, mesh, dim):
    for axis in axes_of(mesh):
        x = whole_numbers(2 * mesh.axis_size(axis), 3, 2 * mesh.axis_size(axis))
        weights = whole_numbers(*x.shape, seed=1)

        def program(x, weights, axis=axis):
            y = fw.lab.gather_from(x, axis, dim)
            return y, *fw.gradients(lambda x: (fw.lab.gather_from(x, axis, dim) * weights).sum(), x)

        specs = (split_along(axis, dim), P())
        out = fw.lab.run(program, mesh, fw.array(x), fw.array(weights), in_specs=specs, out_specs=specs[::-1])
        np.testing.assert_array_equal(fw.numpy(out.value[0]), x)
        # not R times as large, as that of all_gather would be
        np.testing.assert_array_equal(fw.numpy(out.value[1]), weights)


def test_what_gather_from_returns_is_known_to_be_the_same(fw):
    mesh, x = Mesh(tp=4), whole_numbers(8, 2)
    out = fw.lab.run(lambda x: fw.lab.gather_from(x, "tp", 0), mesh, fw.array(x), in_specs=P("tp"), out_specs=P())
    np.testing.assert_array_equal(fw.numpy(out.value), x)


def test_there_and_back(fw):
    """Each undoes the other, forward and backward, twice."""
    mesh, x = Mesh(tp=3), whole_numbers(2, 6)
    around = lambda x: fw.lab.gather_from(fw.lab.scatter_to(x, "tp"), "tp")  # noqa: E731
    program = lambda x: (around(x), *fw.gradients(lambda x: (around(x) ** 3).sum() / 3, x))  # noqa: E731
    out = fw.lab.run(program, mesh, fw.array(x), out_specs=(P(), P()))
    np.testing.assert_array_equal(fw.numpy(out.value[0]), x)
    np.testing.assert_array_equal(fw.numpy(out.value[1]), x**2)


def test_scatter_to_what_was_gathered(fw):
    """What all_gather returned is the same on every rank by value, though JAX's types do not say so."""
    mesh, x = Mesh(tp=2), whole_numbers(4, 4)
    weights = whole_numbers(2, 2, 2, seed=1)

    def program(x, w):
        loss = lambda x: (fw.lab.scatter_to(fw.lab.all_gather(x, "tp", 0), "tp", 0) * w[0]).sum()  # noqa: E731
        return fw.gradients(loss, x)

    specs = (P("tp", None), P("tp"))
    results = fw.lab.run(program, mesh, fw.array(x[:, :2]), fw.array(weights), in_specs=specs).per_rank
    for (dx,), w in zip(results, weights, strict=True):
        np.testing.assert_array_equal(fw.numpy(dx), 2 * w)  # all_gather's gradient adds up what both ranks pass back


def test_second_derivatives(fw):
    mesh, x = Mesh(tp=2), whole_numbers(4)
    around = lambda x: fw.lab.gather_from(fw.lab.scatter_to(x, "tp") ** 3, "tp").sum()  # noqa: E731

    def program(x):
        if fw.name == "jax":
            return fw.gradients(lambda x: fw.gradients(around, x)[0].sum(), x)
        import torch

        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(around(x), x, create_graph=True)
        return torch.autograd.grad(dx.sum(), x)

    for (ddx,) in fw.lab.run(program, mesh, fw.array(x)).per_rank:
        np.testing.assert_array_equal(fw.numpy(ddx), 6 * x)


def test_what_is_sent(fw):
    """Forward and backward together one all_gather each: (R-1)/R of the whole from every rank."""
    mesh, x = Mesh(tp=4), whole_numbers(8, 2)
    gather_op, times = gathers_alike(fw)
    scatter = lambda x: fw.gradients(lambda x: (fw.lab.scatter_to(x, "tp", 0) ** 2).sum(), x)  # noqa: E731
    gather = lambda x: fw.gradients(lambda x: (fw.lab.gather_from(x, "tp", 0) ** 2).sum(), x)  # noqa: E731
    for program, spec in ((scatter, P()), (gather, P("tp"))):
        trace = fw.lab.run(program, mesh, fw.array(x), in_specs=(spec,), keep_values=0).trace
        assert {event.op for event in trace.events if event.kind == "collective"} == {gather_op}
        assert trace.bytes_sent(rank=1) == times * x.nbytes * 3 // 4


def test_torch_gathers_uneven_pieces():
    import torch

    from tplab.torch import axis_index, gather_from, run

    def program():
        x = torch.full((axis_index("tp"), 2), float(axis_index("tp")), requires_grad=True)
        y = gather_from(x, "tp", 0)
        (y * torch.arange(6.0)[:, None]).sum().backward()
        return y.detach(), x.grad

    begin = 0
    for rank, (y, dx) in enumerate(run(program, Mesh(tp=4)).per_rank):
        assert y[:, 0].tolist() == [1, 2, 2, 3, 3, 3]
        assert dx[:, 0].tolist() == list(range(begin, begin + rank))
        begin += rank


WRONG = {
    "unknown axis": (lambda lab, x: lab.scatter_to(x, "pp"), MeshError, r"has no axis 'pp'"),
    "unknown axis of gather": (lambda lab, x: lab.gather_from(x, "pp"), MeshError, r"has no axis 'pp'"),
    "no such dim": (lambda lab, x: lab.gather_from(x, "tp", 2), ShapeError, r"gather_from along dim 2: .* 2 dims"),
    "does not divide": (
        lambda lab, x: lab.scatter_to(x, "tp"), ShapeError,
        r"scatter_to: dim 1 has size 10, which the 4 ranks of axis 'tp' cannot share equally;\npad it to 12",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(fw, name):
    wrong, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        fw.lab.run(lambda x: wrong(fw.lab, x), Mesh(tp=4), fw.array(whole_numbers(4, 10)))
