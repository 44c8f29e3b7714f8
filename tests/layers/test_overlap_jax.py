"""Overlap in JAX on the modelled clock, on arrays of which there is only the shape; and beside torch's."""

from typing import Any

import numpy as np
import pytest

import tplab.jax as lab  # before JAX is used  # isort: skip
import jax
import jax.numpy as jnp

from tests.frameworks import FRAMEWORKS
from tplab import Mesh, P, Trace
from tplab.cost import gather_seconds, scatter_seconds
from tplab.jax.layers.overlap import BlockingLinear
from tplab.trace import overlap

COLUMNS = P(None, "tp")
DIRECTIONS = ["up", "down", "both", "split"]
WIDTH = TOKENS = 8192


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


# ------------------------------------------------------------------------------------------- runs of which only shapes


def test_where_there_are_only_shapes_nothing_is_run_and_the_trace_is_the_same():
    def program(x, weight, scale):
        y = lab.matmul_reduce_scatter(jnp.tanh(x) * scale, weight, "tp")
        return y, lab.all_reduce(y.sum(), "tp")

    def outcome(x, weight):
        specs = {"in_specs": (COLUMNS, COLUMNS, P()), "out_specs": (COLUMNS, P())}
        return lab.run(program, Mesh(tp=4), x, weight, 2.0, cluster="h100", **specs)

    real = outcome(jnp.ones((4, 8)), np.ones((12, 8), np.float32))
    only_shapes = outcome(shape(4, 8, dtype=jnp.float32), np.ones((12, 8), np.float32))  # of one argument is enough
    assert only_shapes.value == (shape(4, 12, dtype=jnp.float32), shape(dtype=jnp.float32))
    assert only_shapes.per_rank == [(shape(4, 3, dtype=jnp.float32), shape(dtype=jnp.float32))] * 4
    assert [x.shape for x in real.value] == [x.shape for x in only_shapes.value]

    def about(event):
        return event.rank, event.kind, event.op, event.start, event.end, event.bytes, event.shape, event.contributors

    assert list(map(about, real.trace.events)) == list(map(about, only_shapes.trace.events))
    assert real.trace.events[0].where == only_shapes.trace.events[0].where


def test_arrays_too_large_for_any_machine():
    program = lambda x: lab.all_reduce(x, "tp")  # noqa: E731
    trace = lab.run(program, Mesh(tp=8), shape(1 << 20, 1 << 20), in_specs=P("tp")).trace
    assert trace.bytes_sent(rank=0) == 2 * 7 / 8 * 2**40 / 8 * 2


# ------------------------------------------------------------------------------------------------ what is hidden, when


def linear(mode: Any, direction: Any, outputs: int, backward: bool) -> Trace:
    """W -> outputs, or outputs -> W, at width 8192 on 8 modelled H100s; direction None: blocking."""
    inputs, outputs = (WIDTH, outputs) if mode == "gather" else (outputs, WIDTH)
    if direction is None:
        layer = BlockingLinear(inputs, outputs, "tp", mode=mode, bias=False)
        weight = shape(outputs, inputs)
    else:
        layer = lab.AsyncLinear(inputs, outputs, "tp", mode=mode, direction=direction, bias=False)
        weight = shape(64, outputs // 8, inputs // 8)

    def program(params, x, dy):
        y, pull = jax.vjp(layer, params, x)
        return pull(dy) if backward else y

    x, dy = shape(TOKENS, inputs), shape(TOKENS, outputs)
    specs = (layer.specs, COLUMNS, COLUMNS)
    return lab.run(program, Mesh(tp=8), {"weight": weight}, x, dy, in_specs=specs, cluster="h100").trace


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", ["gather", "scatter"])
def test_at_width_8192_all_communication_is_hidden_forward_and_backward(mode, direction, backward):
    """8192 tokens, tp 8, hidden 4 W: a product takes 75 us, a hop 39. The backward pass is not written by hand: its
    hops, too, have products beside them."""
    found = overlap(linear(mode, direction, 4 * WIDTH, backward))
    assert found.share == pytest.approx(1, abs=1e-9)
    assert found.share_of_possible >= 0.9
    assert (found.communication > 0).all()


@pytest.mark.parametrize("mode", ["gather", "scatter"])
def test_the_blocking_layer_hides_nothing_and_is_slower(mode):
    blocking = linear(mode, None, 4 * WIDTH, backward=False)
    assert overlap(blocking).share == 0
    assert linear(mode, "up", 4 * WIDTH, backward=False).makespan < blocking.makespan


def test_where_hops_are_longer_than_products_most_is_hidden_all_the_same():
    """H = W: a product takes 22 us, a hop 39."""
    for mode in ("gather", "scatter"):
        assert overlap(linear(mode, "up", WIDTH, backward=False)).share > 0.5
        assert overlap(linear(mode, "up", WIDTH, backward=True)).share > 0.9


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_torch_and_jax_send_the_same_and_hide_the_same(op, direction):
    import torch

    rows, tokens, width = P("tp") if op == "all_gather_matmul" else COLUMNS, 2048, 4096
    found = {}
    for name, make in FRAMEWORKS.items():
        fw = make()
        program = lambda x, w: getattr(fw.lab, op)(x, w, "tp", direction=direction)  # noqa: E731, B023
        x, weight = (
            torch.empty(dims, device="meta") if name == "torch" else shape(*dims, dtype=jnp.float32)
            for dims in ((tokens, width), (width, width))
        )
        trace = fw.lab.run(program, Mesh(tp=4), x, weight, in_specs=(COLUMNS, rows), cluster="h100").trace
        sends = trace.select(kind="send", rank=1).events
        found[name] = overlap(trace), sorted((event.peer, event.bytes) for event in sends)
    (one, sent), (other, also_sent) = found.values()
    assert sent == also_sent
    assert one.share == pytest.approx(other.share, abs=1e-9) == pytest.approx(1)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_the_formulas_are_what_the_modelled_clock_finds(num_ranks):
    """As in torch. What is ready goes first, here: where a hop is longer than the product beside it, a rank may just
    have begun another product when a sum arrives, which then waits for a moment."""
    for tokens, inputs, outputs in ((8192, 8184, 8184 * 3), (16, 96, 48)):
        x, weight = shape(tokens, inputs), shape(outputs, inputs)
        for op, formula, w_spec in (
            ("all_gather_matmul", gather_seconds, P("tp")),
            ("matmul_reduce_scatter", scatter_seconds, COLUMNS),
        ):
            program = lambda x, w: getattr(lab, op)(x, w, "tp")  # noqa: E731, B023
            trace = lab.run(program, Mesh(tp=num_ranks), x, weight, in_specs=(COLUMNS, w_spec), cluster="h100").trace
            want = formula(tokens, inputs, outputs, num_ranks, "h100").overlapped
            assert trace.makespan == pytest.approx(want, rel=1e-12 if op == "all_gather_matmul" else 2e-3)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_no_hop_needs_the_product_beside_it(op):
    """In the order of the program a hop stands before the product that it runs beside, also in the backward pass, where
    the gradient of a piece leaves before that of the next is made."""

    def program(x, weight):
        return jax.grad(lambda *xs: getattr(lab, op)(*xs, "tp").sum(), (0, 1))(x, weight)

    rows = P("tp") if op == "all_gather_matmul" else COLUMNS
    args = shape(64, 2048, dtype=jnp.float32), shape(2048, 2048, dtype=jnp.float32)
    trace = lab.run(program, Mesh(tp=4), *args, in_specs=(COLUMNS, rows), cluster="h100").trace
    hops = trace.select(kind="send", rank=1).events
    products = list(trace.select(rank=1, op="dot_general").events)
    beside = [any(product.start < hop.end and hop.start < product.end for product in products) for hop in hops]
    assert len(hops) == (6 if op == "all_gather_matmul" else 3)  # the sum of y does not need the y of a scatter
    assert all(beside)


def test_what_is_updated_in_place_is_not_copied():
    """A piece of 8 KB written into 64 KB that the program made: it costs reading and writing the piece. (An argument
    would be copied first, since the caller keeps it.)"""

    def program(x, piece):
        return jax.lax.dynamic_update_slice_in_dim(2 * x, piece, 8, 0)

    trace = lab.run(program, Mesh(tp=1), shape(64, 512), shape(8, 512), cluster="h100").trace
    (event,) = trace.select(op="dynamic_update_slice").events
    assert event.bytes == 2 * 8 * 512 * 2


# ------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    "make",
    [
        lambda: lab.ColumnParallelLinear(4, 8, "tp"),
        lambda: lab.RowParallelLinear(8, 4, "tp"),
        lambda: lab.AsyncLinear(8, 8, "tp"),
        lambda: BlockingLinear(8, 8, "tp", mode="scatter"),
    ],
)
def test_parameters_made_inside_the_program_have_the_gradients_of_those_given_to_it(make):
    """A bias begins as zeros, of which every rank has its own: JAX's types must know it, or it adds their gradients."""
    layer = make()
    x = jnp.arange(24.0).reshape(3, 8) / 10
    x_spec = P() if isinstance(layer, lab.ColumnParallelLinear) else COLUMNS
    x = x[:, : layer.in_features]

    def gradients(params, x):
        return jax.grad(lambda params: (jnp.sin(layer(params, x)) * jnp.arange(1, 4)[:, None]).sum())(params)

    def inside(x):
        params = layer.init(jax.random.key(0))
        return params, gradients(params, x)

    params, found = lab.run(inside, Mesh(tp=4), x, in_specs=(x_spec,), out_specs=(layer.specs, layer.specs)).value
    want = lab.run(gradients, Mesh(tp=4), params, x, in_specs=(layer.specs, x_spec), out_specs=layer.specs).value
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_the_classifier_learns_in_bfloat16():
    """Computed in bfloat16, parameters in float32, as the tutorial has it; narrower, so that it is quick."""
    import optax

    random = np.random.default_rng(42)
    x, labels = random.standard_normal((32, 48), np.float32), random.integers(0, 4, 32)
    model, optimizer = lab.ParallelClassifier(48, 128, 4, "tp"), optax.adamw(1e-3)

    def program(x, labels):
        def loss_of(params):
            low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
            logits = model(low, x.astype(jnp.bfloat16)).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

        def update(state, _):
            params, memory = state
            (_, logits), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            changes, memory = optimizer.update(grads, memory, params)
            return (optax.apply_updates(params, changes), memory), (logits.argmax(-1) == labels).mean()

        params = model.init(jax.random.key(42))
        _, accuracies = jax.lax.scan(update, (params, optimizer.init(params)), length=18)
        return accuracies[-1]  # before the 18th update: after 17

    assert float(lab.run(program, Mesh(tp=4), x, labels, out_specs=P()).value) == 1
