"""data_parallel: gradients that leave during the backward pass, against one device with the whole batch."""

import gc
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.frameworks import FRAMEWORKS, Framework, in_both
from tests.sharded import TOLERANCE, close, double, numbers
from tplab import Mesh, P
from tplab.cost.collectives import bytes_sent
from tplab.errors import RankError
from tplab.pipeline import LayerSpec
from tplab.schedules import one_f_one_b
from tplab.torch import axis_index, data_parallel, run, shard_gradients, split_batch, stages_of, train_batch
from tplab.trace import overlap

SHAPES = {"first": (5, 7), "bias": (7,), "second": (7, 7), "last": (7, 3)}
WEIGHTS = {name: numbers(*shape, seed=place) for place, (name, shape) in enumerate(SHAPES.items())}
X, Y = numbers(24, 5, seed=8), numbers(24, 3, seed=9)
RATE, STEPS = 0.1, 3


@pytest.fixture
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def loss_of(fw: Framework, w, x, y):
    hidden = fw.tanh(fw.tanh(x @ w["first"] + w["bias"]) @ w["second"])
    return ((hidden @ w["last"] - y) ** 2).mean()


def one_device() -> dict[str, np.ndarray]:
    """The weights after some steps with the whole batch."""
    fw = FRAMEWORKS["torch"]()
    w = {name: torch.tensor(value, requires_grad=True) for name, value in WEIGHTS.items()}
    for _ in range(STEPS):
        grads = torch.autograd.grad(loss_of(fw, w, torch.tensor(X), torch.tensor(Y)), list(w.values()))
        w = {name: (p - RATE * g).detach().requires_grad_() for (name, p), g in zip(w.items(), grads)}
    return {name: p.detach().numpy() for name, p in w.items()}


def of_torch(fw, bucket_bytes):
    def program(weights, x, y):
        w = {name: nn.Parameter(value) for name, value in weights.items()}
        fw.lab.data_parallel(w, "dp", bucket_bytes=bucket_bytes, broadcast=False)
        optimizer = torch.optim.SGD(w.values(), lr=RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(fw, w, x, y).backward()
            optimizer.step()
        return {name: p.detach() for name, p in w.items()}

    return program


def of_jax(fw, bucket_bytes):
    import jax

    def loss(w, x, y):
        return loss_of(fw, fw.lab.data_parallel(w, "dp", bucket_bytes=bucket_bytes), x, y)

    def program(w, x, y):
        for _ in range(STEPS):
            w = jax.tree.map(lambda p, g: p - RATE * g, w, jax.grad(loss)(w, x, y))
        return w

    return program


@pytest.mark.parametrize(
    "fw, num_ranks, bucket_bytes",
    in_both([(1, 200), (2, None), (3, 200), (4, 1e9), (8, 500)], [(1, 200), (3, 500), (4, None)]),
    indirect=["fw"],
)
def test_replicas_learn_what_one_device_learns(fw, num_ranks, bucket_bytes):
    program = (of_torch if fw.name == "torch" else of_jax)(fw, bucket_bytes)
    with double(fw):
        args = {name: fw.array(w) for name, w in WEIGHTS.items()}, fw.array(X), fw.array(Y)
        specs = (P(), P("dp"), P("dp"))
        out = fw.lab.run(program, Mesh(dp=num_ranks), *args, in_specs=specs, out_specs=P(), keep_values=0)
    for name, want in one_device().items():
        close(fw.numpy(out.value[name]), want, name, TOLERANCE)
    num_bytes = 8 * sum(w.size for w in WEIGHTS.values())
    assert out.trace.bytes_sent() == STEPS * 2 * (num_ranks - 1) * num_bytes


# --- torch: hooks -----------------------------------------------------------------------------------------------------


def layers(count=6, width=5):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)]).double()


def grads_of(model, batches):
    """On one device."""
    model.zero_grad()
    for x in batches:
        (model(x).square().mean() / len(batches)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_buckets_leave_during_the_backward_pass():
    """On the modelled clock, with sizes alone: all but what the last bucket sends is hidden."""

    def step(x):
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])
        replicas = data_parallel(model, "dp", bucket_bytes=8 << 20, broadcast=False)
        model(x).sum().backward()
        return [bucket.size for bucket in replicas.buckets]

    out = run(step, Mesh(dp=8), torch.empty(2048, 1024, device="meta"), cluster="h100")
    assert out.per_rank[0] == [2 << 20] * 4
    sent = out.trace.select(rank=0, kind="collective").events
    last_product = max(e.end for e in out.trace.select(rank=0, op="mm").events)
    assert [event.start < last_product for event in sent] == [True, True, True, False]
    assert overlap(out.trace).exposed[0] == pytest.approx(sent[-1].end - sent[-1].start, rel=1e-6)
    assert overlap(out.trace).share == pytest.approx(0.75, rel=1e-6)


@pytest.mark.parametrize("shard", [False, True])
def test_in_a_pipeline_buckets_leave_during_the_last_backward_pass(shard):
    """Once for both microbatches. In the first stage, which ends last, all but the last bucket is hidden."""

    def step(x):
        with torch.device("meta"):
            stage = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])
        options: Any = {"bucket_bytes": 8 << 20}
        if shard:
            shard_gradients(partial(torch.optim.SGD, lr=0.1), stage.parameters(), "dp", **options)
        else:
            data_parallel(stage, "dp", broadcast=False, **options)
        pairs = [(half, half) for half in x.chunk(2)]
        train_batch(one_f_one_b(2, 2), stage, pairs, lambda y, _: y.sum(), data_axis="dp", average=False)

    out = run(step, Mesh(dp=2, pp=2), torch.empty(2048, 1024, device="meta"), cluster="h100")
    sent = [e for e in out.trace.select(rank=0, kind="collective").events if e.axis == "dp" and e.bytes > 8]
    (backward,) = out.trace.select(rank=0, op="B1").events
    assert [backward.start < event.end < backward.end for event in sent] == [True, True, True, False]
    for rank in range(4):
        sent = [e for e in out.trace.select(rank=rank, kind="collective").events if e.axis == "dp" and e.bytes > 8]
        assert sum(event.bytes for event in sent) == (16 if shard else 32) << 20


def test_accumulation_sends_once_per_step():
    def program(model, xs):
        replicas = data_parallel(model, "dp", bucket_bytes=300, broadcast=False)
        for number, x in enumerate(xs[0]):
            if number < len(xs[0]) - 1:
                with replicas.no_sync():
                    (model(x).square().mean() / len(xs[0])).backward()
            else:
                (model(x).square().mean() / len(xs[0])).backward()
        return {name: p.grad for name, p in model.named_parameters()}, len(replicas.buckets)

    model, xs = layers(), torch.randn(3, 4, 2, 5, dtype=torch.float64)
    out = run(program, Mesh(dp=3), model, xs, in_specs=(P(), P("dp")))
    want = grads_of(model, xs.flatten(0, 1))
    for grads, num_buckets in out.per_rank:
        assert len(out.trace.select(kind="collective", rank=0)) == num_buckets
        for name, grad in grads.items():
            torch.testing.assert_close(grad, want[name], rtol=1e-12, atol=1e-15)
    assert out.trace.bytes_sent() == 2 * 2 * 8 * sum(p.numel() for p in model.parameters())


def test_two_backward_passes_that_both_send_add_up():
    """The mean of a mean is the same again, so that nothing is lost by sending twice."""

    def program(model, xs):
        data_parallel(model, "dp", broadcast=False)
        for x in xs[0]:
            (model(x).square().mean() / 2).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    model, xs = layers(2), torch.randn(2, 2, 3, 5, dtype=torch.float64)
    got = run(program, Mesh(dp=2), model, xs, in_specs=(P(), P("dp"))).per_rank
    for name, want in grads_of(model, xs.flatten(0, 1)).items():
        torch.testing.assert_close(got[1][name], want, rtol=1e-12, atol=1e-15)


class Switch(nn.Module):
    """Two layers in an order that may differ from rank to rank, one that only some use, one tied, one frozen."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.sometimes, self.never = (nn.Linear(3, 3) for _ in range(4))
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.a.weight
        self.b.bias.requires_grad_(False)
        self.double()

    def forward(self, x, swapped, more):
        x = self.a(self.b(x)) if swapped else self.b(self.a(x))
        return self.tied(self.sometimes(x) if more else x)


@pytest.mark.parametrize("bucket_bytes", [None, 150, 1e9])
def test_ranks_whose_gradients_come_in_different_orders(bucket_bytes):
    def program(model, x):
        index = axis_index("dp")
        data_parallel(model, "dp", bucket_bytes=bucket_bytes, find_unused=True)
        for _ in range(2):
            model.zero_grad()
            model(x[0], index == 0, index == 1).square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    model, x = Switch(), torch.randn(3, 2, 3, dtype=torch.float64)
    per_rank = run(program, Mesh(dp=3), model, x, in_specs=(P(), P("dp"))).per_rank
    for rank in range(3):
        (model(x[rank], rank == 0, rank == 1).square().sum() / 3).backward()
    assert model.sometimes.weight.grad is not None and model.never.weight.grad is None
    for grads in per_rank:
        for name, p in model.named_parameters():
            if p.grad is None:
                assert grads[name] is None, name
            else:
                torch.testing.assert_close(grads[name], p.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("place", [0, 4, 5])
def test_all_is_used_but_one_layer_on_one_rank(place):
    """The rank that uses all sends its buckets during the backward pass, the other one at its end: in one order."""

    def forward(model, x, index):
        for number, layer in enumerate(model):
            x = x if number == place and index == 1 else layer(x)
        return x.square().sum()

    def program(model, x):
        data_parallel(model, "dp", bucket_bytes=300, find_unused=True)
        forward(model, x[0], axis_index("dp")).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    model, x = layers(), torch.randn(2, 2, 5, dtype=torch.float64)
    per_rank = run(program, Mesh(dp=2), model, x, in_specs=(P(), P("dp"))).per_rank
    for rank in range(2):
        (forward(model, x[rank], rank) / 2).backward()
    for grads in per_rank:
        for name, p in model.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-12, atol=1e-15)


def test_what_was_not_used_is_named():
    def program(model):
        data_parallel(model, "dp")
        model(torch.ones(1, 3, dtype=torch.float64), False, True).sum().backward()

    with pytest.raises(RankError, match=r"'never.weight', parameter 'never.bias': no gradient .*find_unused"):
        run(program, Mesh(dp=2), Switch())


def test_the_backward_pass_after_an_error_sends_again():
    def program(model, x):
        data_parallel(model, "dp", bucket_bytes=300)
        with pytest.raises(ValueError, match="no gradient on this rank"):
            model[1:](x[0]).square().mean().backward()
        model.zero_grad()
        model(x[0]).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    model, x = layers(3), torch.randn(2, 2, 5, dtype=torch.float64)
    for grads in run(program, Mesh(dp=2), model, x, in_specs=(P(), P("dp"))).per_rank:
        for name, want in grads_of(model, x).items():
            torch.testing.assert_close(grads[name], want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers(reentrant):
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()

        def forward(self, x):
            for layer in (self.a, self.b, self.a):
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    def program(model, xs):
        data_parallel(model, "dp", bucket_bytes=100)
        model(xs[0].requires_grad_()).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    model, xs = Recomputed(), torch.randn(2, 3, 5, dtype=torch.float64)
    if reentrant:
        with pytest.raises(RankError, match="needs use_reentrant=False"):
            run(program, Mesh(dp=2), model, xs, in_specs=(P(), P("dp")))
        return
    for grads in run(program, Mesh(dp=2), model, xs, in_specs=(P(), P("dp"))).per_rank:
        for name, want in grads_of(model, xs).items():
            torch.testing.assert_close(grads[name], want, rtol=1e-12, atol=1e-15)


def test_a_large_model_hides_its_gradients():
    """1.07 billion parameters on a modelled H100 node: all but the first layer's, which nothing is left to hide."""

    def step(model, x):
        data_parallel(model, "dp", broadcast=False)
        model(x).mean().backward()

    def share(num_ranks, tokens):
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16) for _ in range(16)])
            x = torch.empty(tokens, 8192, dtype=torch.bfloat16)
        return overlap(run(step, Mesh(dp=num_ranks), model, x, cluster="h100").trace).share

    assert share(8, 4096) == pytest.approx(15 / 16, rel=1e-3)
    assert share(16, 32768) > 0.9
    assert share(16, 512) < 0.25  # between nodes, where so few tokens do not take long enough


def test_replicas_begin_as_the_first_and_end_with_remove():
    def program():
        norm = nn.BatchNorm1d(3)
        model = nn.Sequential(nn.Linear(3, 3), norm)  # each rank draws its own
        norm.running_mean = torch.full((3,), float(axis_index("dp")))
        replicas = data_parallel(model, "dp")
        other = nn.Linear(3, 3)
        data_parallel(other.parameters(), "dp")  # can be read only once
        begun = {name: x.clone() for name, x in [*model.state_dict().items(), ("other", other.weight)]}
        replicas.remove()
        model(torch.randn(4, 3)).square().sum().backward()
        return begun, model[0].weight.grad, repr(replicas)

    (first, grad, text), (second, other, _) = run(program, Mesh(dp=2)).per_rank
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(grad, other)
    assert text == "DataParallel of 4 parameters in 1 buckets along 'dp'"


@pytest.mark.parametrize("num_unused", [0, 1])
def test_copies_of_a_pipeline(num_unused):
    """train_batch calls the hooks when a batch's gradients are complete."""
    spec = LayerSpec(nn.Linear, 4, 4, dtype=torch.float64)

    def program(x, y):
        schedule = one_f_one_b(2, 2)
        stages = stages_of([spec] * 4, schedule)
        if num_unused:
            stages[axis_index("pp")].register_parameter("unused", nn.Parameter(torch.ones(2)))
        replicas = data_parallel(stages, "dp", bucket_bytes=200, find_unused=True, broadcast=False)
        loss = train_batch(schedule, stages, split_batch(x, y, 2), F.mse_loss)
        replicas.wait()
        return loss, [p.grad for p in stages.parameters() if p.grad is not None]

    x, y = torch.tensor(numbers(8, 4)), torch.tensor(numbers(8, 4, seed=1))
    got = run(program, Mesh(dp=2, pp=2), x, y, in_specs=P("dp")).per_rank
    want = run(program, Mesh(dp=1, pp=2), x, y).per_rank
    for rank, (_, grads) in enumerate(got):
        for grad, expected in zip(grads, want[rank % 2][1], strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-15)
    assert got[0][0] + got[2][0] == pytest.approx(2 * float(want[0][0]), rel=1e-12)


def test_on_processes():
    def program(model, xs):
        data_parallel(model, "dp", bucket_bytes=300)
        model(xs[0]).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    model, xs = layers(3), torch.randn(2, 4, 5, dtype=torch.float64)
    for grads in run(program, Mesh(dp=2), model, xs, in_specs=(P(), P("dp")), on="processes").per_rank:
        for name, want in grads_of(model, xs).items():
            torch.testing.assert_close(grads[name], want, rtol=1e-12, atol=1e-15)


# --- JAX: types -------------------------------------------------------------------------------------------------------


def test_what_jax_does_by_its_types():
    """Without data_parallel JAX adds the gradients up by itself; the buckets send the same bytes, in fewer messages."""
    fw = FRAMEWORKS["jax"]()
    import jax

    def program(w, x, y):
        by_types = jax.tree.map(lambda g: g / 3, jax.grad(lambda w: loss_of(fw, w, x, y))(w))
        buckets = jax.grad(lambda w: loss_of(fw, fw.lab.data_parallel(w, "dp"), x, y))(w)
        own = jax.tree.map(lambda p: fw.lab.copy_to(p, "dp"), w)  # differs by its types
        of_own = jax.grad(lambda w: loss_of(fw, fw.lab.data_parallel(w, "dp"), x, y))(own)
        return by_types, buckets, of_own

    with double(fw):
        args = {name: fw.array(w) for name, w in WEIGHTS.items()}, fw.array(X), fw.array(Y)
        out = fw.lab.run(program, Mesh(dp=3), *args, in_specs=(P(), P("dp"), P("dp")), keep_values=0)
    for by_types, buckets, of_own in out.per_rank:
        for name in WEIGHTS:
            close(fw.numpy(buckets[name]), fw.numpy(by_types[name]), name, TOLERANCE)
            assert np.array_equal(fw.numpy(of_own[name]), fw.numpy(buckets[name]))
    sizes = sorted(np.prod(event.shape) for event in out.trace.select(kind="collective", rank=0).events)
    assert sizes == [7, 21, 35, 49, 112, 112]
    sent = sum(bytes_sent("all_reduce", int(size), 8, 3, 0) for size in sizes)
    assert out.trace.bytes_sent(rank=0) == sent


@pytest.mark.parametrize("per_layer", [True, False])
def test_where_jax_buckets_leave(per_layer):
    """On the modelled clock, shapes alone. Called on a layer's parameters, all but the last bucket is hidden."""
    fw = FRAMEWORKS["jax"]()
    import jax

    def loss(params, x):
        params = params if per_layer else fw.lab.data_parallel(params, "dp", bucket_bytes=8 << 20)
        for w in params:
            x = x @ (fw.lab.data_parallel(w, "dp") if per_layer else w)
        return x.sum()

    sizes = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 8, jax.ShapeDtypeStruct((8 * 2048, 1024), "float32")
    trace = fw.lab.run(jax.grad(loss), Mesh(dp=8), *sizes, in_specs=(P(), P("dp")), cluster="h100").trace
    sent = trace.select(rank=0, kind="collective").events
    assert len(sent) == (8 if per_layer else 4)
    if per_layer:
        assert overlap(trace).share == pytest.approx(7 / 8, rel=1e-6)
    else:  # packing comes last in the program's order
        assert min(event.start for event in sent) > max(e.end for e in trace.select(rank=0, op="dot_general").events)


LEAVING = {
    "data_parallel": lambda model: data_parallel(model, "dp", bucket_bytes=None),
    "shard_gradients": lambda model: shard_gradients(
        partial(torch.optim.SGD, lr=1.0), model.parameters(), "dp", bucket_bytes=None
    ),
}


@pytest.mark.parametrize("name", LEAVING)
def test_nothing_is_left_of_a_model_that_is_gone(name):
    """torch refers twice to the hooks of a parameter, and Python's garbage collector sees only one of these. Until then
    gradients leave, even if what made them do so is dropped."""
    left = []

    def program(x):
        model = nn.Linear(5, 3)
        LEAVING[name](model)
        gc.collect()
        model(x).sum().backward()
        left.append(ref(model.weight))

    out = run(program, Mesh(dp=2), torch.ones(4, 5))
    assert len(out.trace.select(rank=0, kind="collective").events) == (4 if name == "data_parallel" else 2)
    gc.collect()
    assert [held() for held in left] == [None, None]


@pytest.mark.parametrize("name", LEAVING)
def test_a_backward_pass_after_one_that_raised(name):
    """As where a program that runs out of memory leaves a batch out: half of the gradients had left."""

    def program(x):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        before = [p.detach().clone() for p in model.parameters()]
        made = LEAVING[name](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if name == "data_parallel" else made
        hidden = model[0](x)
        hidden.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model[1](hidden).sum().backward()
        optimizer.zero_grad()
        model(x * (1 + axis_index("dp"))).sum().backward()
        optimizer.step()
        return [a - b.detach() for a, b in zip(before, model.parameters())]

    x = torch.rand(4, 5)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model(x * 1.5).sum().backward()
    for gradients in run(program, Mesh(dp=2), x).per_rank:
        for got, p in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(got, p.grad, rtol=1e-5, atol=1e-5)  # float32, and differences of weights


def test_a_parameter_that_is_replaced_later():
    def program(x):
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        data_parallel(model, "dp")
        model[1].weight = model[0].weight
        model(x).sum().backward()

    with pytest.raises(RankError, match=r"1\.weight.: this parameter is gone"):
        run(program, Mesh(dp=2), torch.ones(4, 5))
