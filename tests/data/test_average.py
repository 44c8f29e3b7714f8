"""Gradients averaged after the backward pass, against NumPy: values, bytes, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.frameworks import FRAMEWORKS, Framework, in_both
from tests.sharded import double
from tplab import Mesh, P
from tplab.cost.collectives import bytes_sent
from tplab.data.gradients import Gradient, buckets_of
from tplab.errors import RankError
from tplab.torch import ColumnParallelLinear, average_gradients, axis_index, data_parallel, run, shard_parameters

SHAPES = {"a": (3, 5), "b": (7,), "c": (), "d": (2, 1, 3), "e": (11,)}
DTYPES = {"a": "float64", "b": "float32", "c": "float64", "d": "float64", "e": "float32"}


@pytest.fixture
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def gradients_of(num_ranks: int) -> dict[str, np.ndarray]:
    """Of each parameter, those of all ranks: [rank, ...]."""
    random = np.random.default_rng(num_ranks)
    return {name: random.normal(size=(num_ranks, *shape)).astype(DTYPES[name]) for name, shape in SHAPES.items()}


def averaged(fw: Framework, num_ranks: int, bucket_bytes: float | None):
    """Each parameter's gradient after the average, as every rank has it, and the trace."""
    given = {name: fw.array(x) for name, x in gradients_of(num_ranks).items()}

    def of_torch(stacked):
        parameters = {name: nn.Parameter(torch.zeros_like(x[0])) for name, x in stacked.items()}
        for name, x in stacked.items():
            parameters[name].grad = x[0].clone()
        fw.lab.average_gradients(parameters, "dp", bucket_bytes=bucket_bytes)
        return {name: p.grad for name, p in parameters.items()}

    def of_jax(stacked):
        return fw.lab.average_gradients({name: x[0] for name, x in stacked.items()}, "dp", bucket_bytes=bucket_bytes)

    program = of_torch if fw.name == "torch" else of_jax
    out = fw.lab.run(program, Mesh(dp=num_ranks), given, in_specs=P("dp"), out_specs=P(), keep_values=0)
    return {name: fw.numpy(x) for name, x in out.value.items()}, out.trace


@pytest.mark.parametrize(
    "fw, num_ranks, bucket_bytes",
    in_both(
        [(n, size) for n in (1, 2, 3, 4, 8) for size in (None, 0, 60, 1e9)], [(1, 60), (2, 1e9), (3, 60), (4, None)]
    ),
    indirect=["fw"],
)
def test_every_rank_has_the_mean(fw, num_ranks, bucket_bytes):
    with double(fw):
        got, trace = averaged(fw, num_ranks, bucket_bytes)
    for name, each in gradients_of(num_ranks).items():
        assert got[name].dtype == each.dtype
        # sums of at most 8 numbers, in another order than NumPy's
        np.testing.assert_allclose(got[name], each.mean(0), rtol=0, atol=1e-15 if each.itemsize == 8 else 5e-7)
    plan = buckets_of(
        [Gradient(int(np.prod(shape)), np.dtype(DTYPES[n]).itemsize, DTYPES[n]) for n, shape in SHAPES.items()],
        bucket_bytes,
    )
    itemsize = [np.dtype(bucket.kind).itemsize for bucket in plan]
    for rank in range(num_ranks):
        sent = [bytes_sent("all_reduce", b.size, n, num_ranks, rank) for b, n in zip(plan, itemsize)]
        assert trace.bytes_sent(rank=rank) == sum(sent)
    num_bytes = sum(bucket.size * n for bucket, n in zip(plan, itemsize))
    assert trace.bytes_sent() == 2 * (num_ranks - 1) * num_bytes  # 2(R-1)/R of them from each rank
    if num_ranks > 1:
        assert len(trace.select(kind="collective", rank=0)) == len(plan)


# --- torch: which parameters ------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Two layers that share a weight, one that is frozen, one that only rank 1 uses, and one that no rank uses."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen, self.sometimes, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x, more):
        x = self.frozen(self.second(self.first(x)))
        return self.sometimes(x) if more else x


@pytest.mark.parametrize("bucket_bytes", [None, 50])
def test_frozen_tied_and_unused_parameters(bucket_bytes):
    def program(model, x):
        model(x[0], axis_index("dp") == 1).sum().backward()
        average_gradients(model, "dp", bucket_bytes=bucket_bytes, find_unused=True)
        return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}

    model, x = Branches().double(), torch.randn(3, 4, 3, dtype=torch.float64)
    got = run(program, Mesh(dp=3), model, x, in_specs=(P(), P("dp"))).per_rank
    for rank in range(3):
        model(x[rank], rank == 1).sum().div(3).backward()
    for name, p in model.named_parameters(remove_duplicate=False):
        for grads in got:
            if p.grad is None:
                assert grads[name] is None and name.split(".")[0] in ("frozen", "never")
            else:
                torch.testing.assert_close(grads[name], p.grad, rtol=1e-13, atol=1e-13)
    assert got[0]["first.weight"] is not None and got[0]["sometimes.weight"] is not None


def test_a_parameter_without_a_gradient_is_named():
    def program(model):
        model(torch.ones(1, 3), more=True).sum().backward()
        average_gradients(model, "dp")

    with pytest.raises(RankError, match=r"parameter 'never.weight', parameter 'never.bias': no gradient .* 5 others"):
        run(program, Mesh(dp=2), Branches())
    with pytest.raises(RankError, match="no parameter has a gradient; call backward first"):
        run(lambda model: average_gradients(model, "dp"), Mesh(dp=2), Branches())


def test_the_means_are_each_ranks_own():
    """They are views of a buffer, and what a rank writes to one is seen by no other rank and in no other gradient."""

    def program():
        w, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        w.grad, b.grad = torch.full((2,), float(axis_index("dp"))), torch.ones(3)
        average_gradients([w, b], "dp", bucket_bytes=1e6)
        w.grad.mul_(axis_index("dp"))
        return w.grad, b.grad

    (first, b), (second, _) = run(program, Mesh(dp=2)).per_rank
    assert first.tolist() == [0, 0] and second.tolist() == [0.5, 0.5] and b.tolist() == [1, 1, 1]


def test_a_sparse_gradient_is_named():
    def program():
        table = nn.Embedding(5, 2, sparse=True)
        table(torch.tensor([1, 2])).sum().backward()
        average_gradients(table, "dp")

    with pytest.raises(RankError, match=r"parameter 'weight' has a sparse gradient.*sparse=False"):
        run(program, Mesh(dp=2))


@pytest.mark.parametrize("given", ["module", "list", "dict"])
def test_pieces_stay_pieces_in_a_list_too(given):
    """Parameters that a layer has cut along an axis are neither copied nor mixed along it."""

    def program():
        layer = ColumnParallelLinear(4, 8, "tp", bias=False)
        before = layer.weight.detach().clone()
        model = {"module": layer, "list": list(layer.parameters()), "dict": dict(layer.named_parameters())}[given]
        data_parallel(model, ("dp", "tp"))
        assert torch.equal(layer.weight, before)
        layer.weight.grad = torch.full_like(layer.weight, axis_index("dp") + 10.0 * axis_index("tp"))
        average_gradients(model, ("dp", "tp"))
        return layer.weight.grad.unique().tolist()

    assert run(program, Mesh(dp=2, tp=2)).per_rank == [[0.25], [5.25], [0.25], [5.25]]  # the sum over dp, of 4 ranks


def test_pieces_whose_gradients_are_means_are_refused_in_a_list_too():
    def program():
        model = nn.Linear(4, 4)
        shard_parameters(model, "dp")
        average_gradients(list(model.parameters()), "dp")

    with pytest.raises(RankError, match="makes its gradient the mean over 'dp' in the backward pass"):
        run(program, Mesh(dp=2))


def test_what_has_no_parameters_is_named():
    with pytest.raises(RankError, match="parameter '0' is of type str; give a module"):
        run(lambda: average_gradients(["weight"], "dp"), Mesh(dp=2))  # type: ignore[list-item]


# --- JAX: what has been added up already ------------------------------------------------------------------------------


def test_gradients_that_jax_has_added_up_are_refused():
    fw = FRAMEWORKS["jax"]()
    import jax

    def program(w, x):
        return fw.lab.average_gradients(jax.grad(lambda p: (x @ p["w"]).sum())({"w": w}), "dp")

    args = fw.array(np.ones((3, 2), "float32")), fw.array(np.ones((4, 3), "float32"))
    with pytest.raises(ValueError, match=r"the gradient \['w'\] is the same on every rank of 'dp': JAX has added up"):
        fw.lab.run(program, Mesh(dp=2), *args, in_specs=(P(), P("dp")))

    def right(w, x):  # as the message says
        own = fw.lab.copy_to(w, "dp")
        return fw.lab.average_gradients(jax.grad(lambda w: (x @ w).sum())(own), "dp")

    got = fw.lab.run(right, Mesh(dp=2), *args, in_specs=(P(), P("dp")), out_specs=P()).value
    assert np.array_equal(fw.numpy(got), np.full((3, 2), 2.0))
