"""Overlapped linear layers against the whole ones, in float64, with every gradient; and what they send and when."""

import math
from itertools import product as every
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.frameworks import FRAMEWORKS, Framework, in_both
from tests.sharded import check, close, double, numbers
from tplab import Mesh, P
from tplab.errors import MeshError, ShapeError
from tplab.trace import overlap

RANKS = [1, 2, 3, 4, 8]
DIRECTIONS = ["up", "down", "both", "split"]
FEATURES = P(None, None, "tp")  # of x [batch, tokens, features]


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def product(fw, op, x, weight, c, mesh, specs, axis="tp", **options):
    """y, dx and dW of `op` on a mesh; specs are those of x, weight and y."""

    def program(x, weight, c):
        y = getattr(fw.lab, op)(x, weight, axis, **options)
        grads = fw.gradients(lambda *xs: (getattr(fw.lab, op)(*xs, axis, **options) * c).sum(), x, weight)
        return y, *grads

    x_spec, weight_spec, y_spec = specs
    out = fw.lab.run(
        program, mesh, *map(fw.array, (x, weight, c)), in_specs=specs, out_specs=(y_spec, x_spec, weight_spec)
    )
    return [fw.numpy(each) for each in out.value]


def held_against_whole(fw, op, x, weight, mesh, specs, axis="tp", **options):
    x_, weight_ = torch.tensor(x, requires_grad=True), torch.tensor(weight, requires_grad=True)
    y = F.linear(x_, weight_)
    c = numbers(*y.shape, seed=9)
    (y * torch.tensor(c)).sum().backward()
    with double(fw):
        got = product(fw, op, x, weight, c, mesh, specs, axis, **options)
    for name, each, want in zip(("y", "dx", "dW"), got, (y.detach(), x_.grad, weight_.grad), strict=True):
        assert want is not None
        close(each, want.numpy(), f"{op}: {name}")


ROWS, COLUMNS = P("tp"), P(None, "tp")
FORMS = {  # of x, weight and y
    ("all_gather_matmul", "features"): (FEATURES, ROWS, FEATURES),
    ("all_gather_matmul", "tokens"): (P(None, "tp"), ROWS, FEATURES),
    ("matmul_reduce_scatter", "features"): (FEATURES, COLUMNS, FEATURES),
    ("matmul_reduce_scatter", "tokens"): (FEATURES, COLUMNS, P(None, "tp")),
}


GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
OPS = [GATHER, SCATTER]
MODES = ["gather", "scatter"]
SOME = [  # for JAX: each product and form, each direction
    (GATHER, "features", "split"), (GATHER, "tokens", "both"), (SCATTER, "features", "down"), (SCATTER, "tokens", "up"),
]  # fmt: skip


@pytest.mark.parametrize(
    "fw, op, form, direction", in_both([(*form, d) for form, d in every(FORMS, DIRECTIONS)], SOME), indirect=["fw"]
)
def test_products_on_4_ranks(fw, op, form, direction):
    """Pieces of 3 features (split: 2 and 1), of 3 tokens."""
    specs, dim = FORMS[op, form], -1 if form == "features" else 1
    x, weight = numbers(2, 12, 12), numbers(20, 12, seed=1)
    held_against_whole(fw, op, x, weight, Mesh(tp=4), specs, dim=dim, direction=direction)


@pytest.mark.parametrize(
    "fw, op, form, num_ranks",
    in_both(
        [(*form, num_ranks) for form, num_ranks in every(FORMS, [1, 2, 3, 8])],
        [(GATHER, "tokens", 1), (SCATTER, "features", 3)],
    ),
    indirect=["fw"],
)
def test_products_on_any_number_of_ranks(fw, op, form, num_ranks):
    direction = {1: "split", 2: "both", 3: "both", 8: "split"}[num_ranks]
    specs, dim = FORMS[op, form], -1 if form == "features" else -2
    x, weight = numbers(2, num_ranks, 3 * num_ranks), numbers(num_ranks * 2, 3 * num_ranks, seed=1)
    held_against_whole(fw, op, x, weight, Mesh(tp=num_ranks), specs, dim=dim, direction=direction)


@settings(max_examples=12, deadline=None)
@given(
    num_ranks=st.integers(1, 5),
    sizes=st.tuples(*[st.integers(1, 4)] * 4),
    op=st.sampled_from(OPS),
    dim=st.integers(0, 2),
    direction=st.sampled_from(DIRECTIONS),
)
def test_products_of_any_shape(num_ranks, sizes, op, dim, direction):
    batch, tokens, inputs, outputs = (size * num_ranks for size in sizes)
    cut = P(*[None] * dim, "tp")
    specs = (cut, ROWS, FEATURES) if op == "all_gather_matmul" else (FEATURES, COLUMNS, cut)
    x, weight = numbers(batch, tokens, inputs), numbers(outputs, inputs, seed=1)
    held_against_whole(FRAMEWORKS["torch"](), op, x, weight, Mesh(tp=num_ranks), specs, dim=dim, direction=direction)


@pytest.mark.parametrize("fw, axis", in_both([(("a", "b"),), (("b", "a"),), ("b",)], [(("b", "a"),)]), indirect=["fw"])
def test_any_axis_of_the_mesh(fw, axis):
    pieces, rows = P(None, axis), P(axis)
    x, weight = numbers(5, 12), numbers(6, 12, seed=1)
    held_against_whole(
        fw, "all_gather_matmul", x, weight, Mesh(a=2, b=3), (pieces, rows, pieces), axis, direction="both"
    )


# --------------------------------------------------------------------------------------------------------- the layer


def linear_state(fw, mode, direction, num_ranks, outputs, inputs):
    """The whole state of an AsyncLinear."""
    stacked = fw.lab.async_weight(numbers(outputs, inputs, seed=1), num_ranks, mode, direction)
    return {"weight": stacked.reshape(-1, *stacked.shape[2:]), "bias": numbers(outputs, seed=2)}


def dense(fw, mode, direction, num_ranks):
    def linear(state, x):
        pieces = state["weight"].reshape(num_ranks, num_ranks, *state["weight"].shape[1:])
        return F.linear(x, fw.lab.blocking_weight(pieces, mode, direction), state["bias"])

    return linear


def held_layer(fw, mode, direction, num_ranks, inputs, outputs):
    def make(lab):
        return lab.AsyncLinear(inputs * num_ranks, outputs * num_ranks, "tp", mode=mode, direction=direction)

    state = linear_state(fw, mode, direction, num_ranks, outputs * num_ranks, inputs * num_ranks)
    specs = {"weight": P("tp"), "bias": P("tp")}
    x = numbers(2, 3, inputs * num_ranks)
    oracle = dense(fw, mode, direction, num_ranks)
    return check(fw, Mesh(tp=num_ranks), make, oracle, state, specs, x, FEATURES, FEATURES)


@pytest.mark.parametrize(
    "fw, mode, direction",
    in_both(every(MODES, DIRECTIONS), [("gather", "down"), ("scatter", "split")]),
    indirect=["fw"],
)
def test_the_layer_on_4_ranks(fw, mode, direction):
    held_layer(fw, mode, direction, 4, inputs=3, outputs=5)


@pytest.mark.parametrize("fw, mode, num_ranks", in_both(every(MODES, [1, 2, 3, 8]), [("gather", 3)]), indirect=["fw"])
def test_the_layer_on_any_number_of_ranks(fw, mode, num_ranks):
    held_layer(fw, mode, "both" if num_ranks % 2 else "up", num_ranks, inputs=2, outputs=1)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_in_mode_none_each_rank_is_for_itself(fw, num_ranks):
    def whole(state, x):
        pieces = [
            F.linear(a, w, b)
            for a, w, b in zip(x.chunk(num_ranks, -1), state["weight"], state["bias"].chunk(num_ranks), strict=True)
        ]
        return torch.cat(pieces, -1)

    state = {"weight": numbers(num_ranks, 4, 5, seed=1), "bias": numbers(num_ranks * 4, seed=2)}
    make = lambda lab: lab.AsyncLinear(5 * num_ranks, 4 * num_ranks, "tp", mode="none")  # noqa: E731
    x = numbers(2, 3, 5 * num_ranks)
    specs = {"weight": P("tp"), "bias": P("tp")}
    trace = check(fw, Mesh(tp=num_ranks), make, whole, state, specs, x, FEATURES, FEATURES)
    assert trace.bytes_sent() == 0


@pytest.mark.parametrize("mode", ["gather", "scatter"])
def test_the_bias_is_added_once(fw, mode):
    """Each feature's bias lies on the rank that has the feature. Added with every piece, it would count 4 times."""
    state = linear_state(fw, mode, "up", 4, 8, 8)
    state = {"weight": np.zeros_like(state["weight"]), "bias": np.arange(8.0)}
    make = lambda lab: lab.AsyncLinear(8, 8, "tp", mode=mode)  # noqa: E731
    specs = {"weight": P("tp"), "bias": P("tp")}
    check(fw, Mesh(tp=4), make, dense(fw, mode, "up", 4), state, specs, numbers(2, 8), COLUMNS, COLUMNS)


def first_weights(fw, mesh, *args, **options):
    """The whole first weights of an AsyncLinear; a copy on each of data-parallel ranks."""

    def program():
        layer = fw.lab.AsyncLinear(*args, "tp", **options)
        if fw.name == "torch":
            assert not layer.bias.any()
            return layer.weight
        import jax

        return layer.init(jax.random.key(0))["weight"]

    return fw.numpy(fw.lab.run(program, mesh, out_specs=P("tp")).value)


@pytest.mark.parametrize("mode", ["gather", "scatter"])
def test_one_seed_gives_one_layer_on_every_mesh(fw, mode):
    """And in every direction: the whole weight is that of a blocking layer, up to the order."""
    meshes = [(Mesh(tp=1), "up"), (Mesh(dp=2, tp=2), "down"), (Mesh(tp=3), "split")]
    for mesh, direction in meshes[: 3 if fw.name == "torch" else 2]:
        num_ranks = mesh.axis_size("tp")
        pieces = first_weights(fw, mesh, 12, 6, mode=mode, direction=direction)
        assert pieces.shape == (num_ranks**2, 6 // num_ranks, 12 // num_ranks)
        stacked = pieces.reshape(num_ranks, num_ranks, *pieces.shape[1:])
        weight = fw.lab.blocking_weight(stacked, mode, direction)
        if num_ranks == 1:
            alone = weight
        np.testing.assert_array_equal(weight, alone)
    assert len(np.unique(alone)) == alone.size


def test_first_weights_are_scaled_by_the_number_of_products_that_are_added_up(fw):
    """R products of D/R features: the bound is (D/R)^-1/2 R^-1/2 = D^-1/2. In mode "none" there is one product."""
    for mode, bound in (("gather", 64**-0.5), ("scatter", 64**-0.5), ("none", 16**-0.5)):
        largest = np.abs(first_weights(fw, Mesh(tp=4), 64, 64, mode=mode)).max()
        assert 0.95 * bound < largest <= bound


def test_the_blocking_twin_begins_with_the_same_weight():
    from tplab.torch import AsyncLinear, blocking_weight, run
    from tplab.torch.layers.overlap import BlockingLinear

    def first(cls, mode, spec):
        return run(lambda: cls(6, 9, "tp", mode=mode).weight, Mesh(tp=3), out_specs=spec).value

    for mode, spec in (("gather", P("tp")), ("scatter", P(None, "tp"))):
        stacked = first(AsyncLinear, mode, P("tp")).reshape(3, 3, 3, 2)
        assert torch.equal(first(BlockingLinear, mode, spec), blocking_weight(stacked, mode))
    assert torch.equal(first(BlockingLinear, "none", P("tp")), first(AsyncLinear, "none", P("tp")).flatten(0, 1))


# ------------------------------------------------------------------------------------------- conversion of weights


@pytest.mark.parametrize(
    "fw, mode, direction, num_ranks",
    in_both(every(MODES, DIRECTIONS, RANKS), every(MODES, DIRECTIONS, [3])),
    indirect=["fw"],
)
def test_weights_are_permuted_as_the_ring_needs_them_and_back(fw, mode, direction, num_ranks):
    """gather: W_async[i, k] = W[rows of i, columns of i-k]; scatter: W_async[j, k] = W[rows of j-1-k, columns of j]."""
    rows, columns = 3, 5
    weight = numbers(num_ranks * rows, num_ranks * columns).astype(np.float32)
    stacked = fw.lab.async_weight(fw.array(weight), num_ranks, mode, direction)
    assert stacked.shape == (num_ranks, num_ranks, rows, columns)
    assert type(stacked) is type(fw.array(weight))
    np.testing.assert_array_equal(fw.numpy(fw.lab.blocking_weight(stacked, mode, direction)), weight)

    def block(i, j):
        i, j = i % num_ranks, j % num_ranks
        return weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]

    for i in range(num_ranks):
        for k in range(num_ranks):
            up = block(i, i - k) if mode == "gather" else block(i - 1 - k, i)
            down = block(i, i + k) if mode == "gather" else block(i + 1 + k, i)
            want = {"up": up, "both": up, "down": down}.get(direction)
            if want is None:
                want = np.hstack([up[:, :3], down[:, 3:]]) if mode == "gather" else np.vstack([up[:2], down[2:]])
            np.testing.assert_array_equal(fw.numpy(stacked[i, k]), want)


def test_what_cannot_be_converted_is_refused(fw):
    convert = fw.lab.async_weight
    with pytest.raises(ShapeError, match="dim 0 of the weight has size 6, which 4 ranks cannot share equally"):
        convert(np.zeros((6, 4)), 4, "gather")
    with pytest.raises(ValueError, match="mode is 'none'; it must be 'gather' or 'scatter'"):
        convert(np.zeros((4, 4)), 2, "none")
    with pytest.raises(ValueError, match="direction is 'left'; it must be one of up, down, both, split"):
        convert(np.zeros((4, 4)), 2, "gather", "left")
    with pytest.raises(ShapeError, match=r"\[R, R, F/R, D/R\], the pieces of each of R ranks, but got \[4, 2, 2\]"):
        fw.lab.blocking_weight(np.zeros((4, 2, 2)), "gather")


def test_weights_in_the_order_of_another_direction_give_another_result(fw):
    """A mistake that no shape shows: pieces that come from below, multiplied as if they came from above."""
    state = linear_state(fw, "gather", "up", 4, 8, 8)
    make = lambda lab: lab.AsyncLinear(8, 8, "tp", direction="down")  # noqa: E731
    specs = {"weight": P("tp"), "bias": P("tp")}
    with pytest.raises(AssertionError, match="y is off by"):
        check(fw, Mesh(tp=4), make, dense(fw, "gather", "up", 4), state, specs, numbers(2, 8), COLUMNS, COLUMNS)


# --------------------------------------------------------------------------------------------- what is sent, and when


def forward_trace(fw, op, direction, num_ranks=4, tokens=64, width=4096, cluster: Any = "h100"):
    def program(x, weight):
        return getattr(fw.lab, op)(x, weight, "tp", direction=direction)

    x, weight = np.zeros((tokens, width), np.float32), np.zeros((width, width), np.float32)
    specs = (COLUMNS, ROWS if op == "all_gather_matmul" else COLUMNS)
    return fw.lab.run(program, Mesh(tp=num_ranks), fw.array(x), fw.array(weight), in_specs=specs, cluster=cluster).trace


TWO = [(GATHER, "split"), (SCATTER, "both")]


@pytest.mark.parametrize("fw, op, direction", in_both(every(OPS, DIRECTIONS), TWO), indirect=["fw"])
def test_it_sends_what_the_collective_sends_in_neighbours_hops(fw, op, direction):
    num_ranks, tokens, width = 4, 8, 32
    trace = forward_trace(fw, op, direction, num_ranks, tokens, width)
    piece = tokens * width // num_ranks * 4
    assert trace.bytes_sent(rank=0) == (num_ranks - 1) * piece
    sends = trace.select(kind="send", rank=0).events
    assert len(sends) == (2 if direction == "split" else 1) * (num_ranks - 1)
    assert {event.peer for event in sends} == {"up": {1}, "down": {3}}.get(direction, {1, 3})
    assert len(trace.select(kind="collective")) == 0


@pytest.mark.parametrize("fw, op, direction", in_both(every(OPS, DIRECTIONS), TWO), indirect=["fw"])
def test_every_hop_is_hidden_where_the_products_are_longer(fw, op, direction):
    """float32 on a GPU without TF32: a product of 64 tokens takes 12 us, a hop 2.5 us."""
    found = overlap(forward_trace(fw, op, direction, width=2048))
    assert found.share == pytest.approx(1, abs=1e-9)
    assert (found.communication > 0).all()


def test_in_torch_a_message_is_started_before_the_product_beside_it():
    """In the order of the program, up: send, product, (wait,) send, product, ... and the last product alone."""
    fw = FRAMEWORKS["torch"]()
    trace = forward_trace(fw, "all_gather_matmul", "up", width=2048)
    kinds = [event.kind for event in trace.select(rank=1).events if event.kind in ("send", "compute")]
    assert kinds == ["send", "compute"] * 3 + ["compute"]
    trace = forward_trace(fw, "matmul_reduce_scatter", "up", width=2048)
    ops = [event.op for event in trace.select(rank=1).events if event.kind in ("send", "compute")]
    assert ops == ["mm", "ring_shift", "mm", "add_", "ring_shift", "mm", "add_", "ring_shift", "mm", "add_"]


@pytest.mark.parametrize("op, times", [("all_gather_matmul", 2), ("matmul_reduce_scatter", 1)])
def test_the_backward_pass_overlaps_too(op, times):
    """torch: dx as hops of sums and, of a gather, x once more; all of it beside products."""

    def program(x, weight):
        import tplab.torch as lab

        y = getattr(lab, op)(x.requires_grad_(), weight.requires_grad_(), "tp")
        lab.barrier()
        y.sum().backward()

    meta = lambda *shape: torch.empty(shape, device="meta")  # noqa: E731
    specs = (COLUMNS, ROWS if op == "all_gather_matmul" else COLUMNS)
    trace = (
        FRAMEWORKS["torch"]()
        .lab.run(program, Mesh(tp=4), meta(64, 2048), meta(2048, 2048), in_specs=specs, cluster="h100")
        .trace
    )
    assert trace.bytes_sent() == (1 + times) * 4 * 3 * 64 * 512 * 4
    found = overlap(trace)
    assert found.exposed.max() <= 1.01 * trace.select(op="barrier").makespan


def test_what_arrives_is_not_kept_for_the_backward_pass():
    from tplab.torch import AsyncLinear, run, saved_tensors
    from tplab.torch.layers.overlap import BlockingLinear

    def kept(cls, **options):
        def program(x):
            layer = cls(1024, 1024, "tp", **options)
            return saved_tensors(layer, x.requires_grad_()).bytes

        return run(program, Mesh(tp=4), torch.zeros(64, 1024), in_specs=(COLUMNS,)).per_rank[0]

    assert kept(AsyncLinear) == kept(AsyncLinear, direction="split") == 64 * 256 * 4
    assert kept(BlockingLinear) == 64 * 1024 * 4


# --------------------------------------------------------------------------------------------------- other places


def test_on_processes_it_is_the_same():
    from tplab.torch import AsyncLinear, run

    def program(x):
        layer = AsyncLinear(6, 6, "tp", mode="gather", direction="both")
        other = AsyncLinear(6, 6, "tp", mode="scatter", direction="split")
        y = other(layer(x.requires_grad_()))
        y.sum().backward()
        return y, x.grad, layer.weight.grad

    x = torch.tensor(numbers(4, 6).astype(np.float32))
    specs = (COLUMNS, COLUMNS, P("tp"))
    there = run(program, Mesh(tp=2), x, in_specs=(COLUMNS,), out_specs=specs, on="processes").value
    here = run(program, Mesh(tp=2), x, in_specs=(COLUMNS,), out_specs=specs).value
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a, b)


def test_on_the_measured_clock():
    from tplab.torch import all_gather_matmul, run

    def program(x, weight):
        return all_gather_matmul(x, weight, "tp")

    x, weight = torch.zeros(64, 512), torch.zeros(512, 512)
    trace = run(program, Mesh(tp=2), x, weight, in_specs=(COLUMNS, ROWS), clock="measured").trace
    found = overlap(trace)
    assert trace.clock == "measured"
    assert 0 <= found.share <= 1
    assert (found.computing > 0).all() and (found.communication > 0).all()


def test_in_bfloat16_and_under_autocast():
    """Sums are rounded to bfloat16 once a hop: 8 bits, three hops, and as many roundings of the largest element."""
    from tplab.torch import AsyncLinear, run

    def program(x):
        torch.manual_seed(0)
        layer = AsyncLinear(64, 64, "tp", direction="split")
        exact = layer(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            cast = layer(x)
        assert cast.dtype is torch.bfloat16
        cast.sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32
        low = layer.bfloat16()(x.bfloat16())
        return exact, cast.float(), low.float()

    out = run(program, Mesh(tp=4), torch.tensor(numbers(8, 64)).float(), in_specs=(COLUMNS,), out_specs=COLUMNS).value
    for low in out[1:]:
        close(low.numpy(), out[0].numpy(), "bfloat16", tolerance=4 * 2**-8)


# ---------------------------------------------------------------------------------------------------------- bad input


def fails(fw, error, match, program, *args, mesh=None):
    with pytest.raises(error, match=match):
        fw.lab.run(program, mesh or Mesh(tp=4), *map(fw.array, args))


def test_sizes_that_do_not_fit_are_refused_with_the_numbers(fw):
    x, lab = np.zeros((2, 6, 3), np.float32), fw.lab
    weight = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    gather, scatter = lab.all_gather_matmul, lab.matmul_reduce_scatter
    fails(fw, ShapeError, r"\[5, 3\].*12", lambda x, w: gather(x, w, "tp"), x, weight(5, 3))
    fails(fw, ShapeError, r"\[5, 12\]", lambda x, w: gather(x, w, "tp", dim=1), x, weight(5, 12))
    fails(
        fw,
        ShapeError,
        "6.* which the 4 ranks of axis 'tp' cannot share equally",
        lambda x, w: scatter(x, w, "tp"),
        x,
        weight(6, 3),
    )
    fails(
        fw,
        ShapeError,
        "6.* which the 4 ranks of axis 'tp' cannot share equally",
        lambda x, w: scatter(x, w, "tp", dim=1),
        x,
        weight(8, 3),
    )
    fails(fw, ShapeError, "dim 3", lambda x, w: gather(x, w, "tp", dim=3), x, weight(5, 3))
    fails(
        fw,
        (ValueError, RuntimeError),
        "direction is 'left'; it must be one of up, down, both, split",
        lambda x, w: gather(x, w, "tp", direction="left"),
        x,
        weight(5, 12),
    )
    fails(fw, MeshError, "'dp'", lambda x, w: gather(x, w, "dp"), x, weight(5, 12))


def test_a_layer_that_cannot_be_shared_is_refused(fw):
    def make(*sizes, **options):
        def program(x):
            layer = fw.lab.AsyncLinear(*sizes, "tp", **options)
            if fw.name == "torch":
                return layer(x)
            import jax

            return layer(layer.init(jax.random.key(0)), x)

        return program

    x = np.zeros((2, 8), np.float32)
    fails(fw, ShapeError, "in_features is 6, which the 4 ranks of axis 'tp' cannot share equally", make(6, 8), x)
    fails(fw, ShapeError, "out_features is 6, which the 4 ranks of axis 'tp' cannot share equally", make(8, 6), x)
    fails(fw, ShapeError, r"takes x \[..., 2\].*got \[2, 8\].*scatter_to", make(8, 8), x)
    fails(
        fw,
        (ValueError, RuntimeError),
        "mode is 'ring'; it must be one of gather, scatter, none",
        make(8, 8, mode="ring"),
        x,
    )


def test_in_torch_pieces_of_different_sizes_are_refused():
    from tplab.torch import all_gather_matmul, axis_index, run

    def program(weight):
        return all_gather_matmul(torch.zeros(3 + axis_index("tp"), 4), weight, "tp", dim=0)

    with pytest.raises(ShapeError, match=r"different shapes, as matrices \[\d, 4\] here and \[\d, 4\] on anot"):
        run(program, Mesh(tp=2), torch.zeros(5, 4))


def test_hops_are_what_the_ring_needs():
    """ceil((R-1)/2) hops follow one another where both directions are used, on chips with a link each way."""
    fw = FRAMEWORKS["torch"]()
    for num_ranks in (2, 3, 4, 5, 8):
        hops = forward_trace(fw, "matmul_reduce_scatter", "both", num_ranks, 1, 120, cluster=None).makespan
        assert hops == math.ceil((num_ranks - 1) / 2)
