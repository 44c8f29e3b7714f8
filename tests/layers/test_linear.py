"""Column- and row-parallel layers and the MLP of both, against the whole ones of torch: float64, every gradient."""

import inspect
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import tplab.torch as tt
from tests.frameworks import FRAMEWORKS, Framework, gathers_alike, in_both
from tests.sharded import check, close, double, flat, nested, numbers
from tplab import Mesh, P
from tplab.errors import MeshError, ShapeError

RANKS = [1, 2, 3, 4, 8]
BATCH, SEQUENCE, WIDTH, HIDDEN = 2, 24, 5, 24  # HIDDEN and SEQUENCE are multiples of 1, 2, 3, 4 and 8
ACROSS = P(None, "tp")  # a sequence's dim


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def linear_state(inputs, outputs, bias=True):
    state = {"weight": numbers(outputs, inputs, seed=1)}
    return state | ({"bias": numbers(outputs, seed=2)} if bias else {})


def dense_linear(state, x):
    return F.linear(x, state["weight"], state.get("bias"))


def mlp_state(activation, bias, width=WIDTH, hidden=HIDDEN):
    parts = {"gate": (width, hidden)} if activation == "swiglu" else {}
    parts |= {"up": (width, hidden), "down": (hidden, width)}
    return flat({name: linear_state(*sizes, bias) for name, sizes in parts.items()})


def mlp_specs(activation, bias):
    column = {"weight": P("tp")} | ({"bias": P("tp")} if bias else {})
    row = {"weight": P(None, "tp")} | ({"bias": P()} if bias else {})
    gate = {"gate": column} if activation == "swiglu" else {}
    return flat({**gate, "up": column, "down": row})


def dense_mlp(activation):
    def mlp(state, x):
        tree = nested(state)
        hidden = dense_linear(tree["up"], x)
        if activation == "swiglu":
            hidden = F.silu(dense_linear(tree["gate"], x)) * hidden
        else:
            hidden = F.gelu(hidden, approximate="tanh" if activation == "gelu_tanh" else "none")
        return dense_linear(tree["down"], hidden)

    return mlp


# ------------------------------------------------------------------------------------- against the whole layer


@pytest.mark.parametrize(
    "fw, mode, num_ranks",
    in_both(
        product(["pieces", "gathered", "sequence", "no bias"], RANKS),
        [("pieces", 1), ("pieces", 8), ("gathered", 3), ("sequence", 3), ("sequence", 4), ("no bias", 2)],
    ),
    indirect=["fw"],
)
def test_column_parallel(fw, num_ranks, mode):
    options = {"gathered": {"gather_output": True}, "sequence": {"sequence_dim": 1}, "no bias": {"bias": False}}
    make = lambda lab: lab.ColumnParallelLinear(WIDTH, HIDDEN, "tp", **options.get(mode, {}))  # noqa: E731
    state = linear_state(WIDTH, HIDDEN, mode != "no bias")
    specs = {name: P("tp") for name in state}
    x = numbers(BATCH, SEQUENCE, WIDTH)
    x_spec = ACROSS if mode == "sequence" else P()
    y_spec = P() if mode == "gathered" else P(None, None, "tp")
    check(fw, Mesh(tp=num_ranks), make, dense_linear, state, specs, x, x_spec, y_spec)


@pytest.mark.parametrize(
    "fw, mode, num_ranks",
    in_both(
        product(["pieces", "whole", "sequence", "no bias"], RANKS),
        [("pieces", 1), ("pieces", 8), ("whole", 3), ("sequence", 3), ("sequence", 4), ("no bias", 2)],
    ),
    indirect=["fw"],
)
def test_row_parallel(fw, num_ranks, mode):
    options = {"whole": {"input_is_parallel": False}, "sequence": {"sequence_dim": -2}, "no bias": {"bias": False}}
    make = lambda lab: lab.RowParallelLinear(HIDDEN, WIDTH, "tp", **options.get(mode, {}))  # noqa: E731
    state = linear_state(HIDDEN, WIDTH, mode != "no bias")
    specs = {"weight": P(None, "tp"), "bias": P()}
    x = numbers(BATCH, SEQUENCE, HIDDEN)
    x_spec = P() if mode == "whole" else P(None, None, "tp")
    y_spec = ACROSS if mode == "sequence" else P()
    specs = {name: specs[name] for name in state}
    check(fw, Mesh(tp=num_ranks), make, dense_linear, state, specs, x, x_spec, y_spec)


@pytest.mark.parametrize(
    "fw, activation, sequence_dim, num_ranks",
    in_both(
        [
            (*form, num_ranks)
            for form in [("gelu", None), ("gelu_tanh", 1), ("swiglu", None), ("swiglu", 1)]
            for num_ranks in RANKS
        ],
        [("gelu", None, 1), ("gelu", None, 4), ("gelu_tanh", 1, 2), ("swiglu", None, 8), ("swiglu", 1, 3)],
    ),
    indirect=["fw"],
)
def test_mlp(fw, activation, sequence_dim, num_ranks):
    make = lambda lab: lab.ParallelMLP(WIDTH, HIDDEN, "tp", activation=activation, sequence_dim=sequence_dim)  # noqa: E731
    state, specs = mlp_state(activation, True), mlp_specs(activation, True)
    outside = P() if sequence_dim is None else ACROSS
    x = numbers(BATCH, SEQUENCE, WIDTH)
    check(fw, Mesh(tp=num_ranks), make, dense_mlp(activation), state, specs, x, outside, outside)


@settings(max_examples=6)
@given(
    name=st.sampled_from(list(FRAMEWORKS)),
    num_ranks=st.integers(1, 5),
    sizes=st.tuples(*[st.integers(1, 3)] * 4),
    activation=st.sampled_from(["gelu", "gelu_tanh", "swiglu"]),
    bias=st.booleans(),
    sequence_dim=st.sampled_from([None, 0, 1, -2]),
)
def test_mlp_of_any_shape(name, num_ranks, sizes, activation, bias, sequence_dim):
    batch, sequence, width, hidden = sizes
    outside = P() if sequence_dim is None else P("tp") if sequence_dim == 0 else ACROSS
    x = numbers(batch * num_ranks, sequence * num_ranks, width)
    state, specs = mlp_state(activation, bias, width, hidden * num_ranks), mlp_specs(activation, bias)

    def make(lab):
        return lab.ParallelMLP(
            width, hidden * num_ranks, "tp", activation=activation, bias=bias, sequence_dim=sequence_dim
        )

    check(FRAMEWORKS[name](), Mesh(tp=num_ranks), make, dense_mlp(activation), state, specs, x, outside, outside)


@pytest.mark.parametrize("axis", [("a", "b"), ("b", "a"), "b"])
def test_any_axis_of_the_mesh(fw, axis):
    """Several axes taken together, in either order, and one of them alone."""
    make = lambda lab: lab.ParallelMLP(WIDTH, HIDDEN, axis)  # noqa: E731
    specs = {"up.weight": P(axis), "up.bias": P(axis), "down.weight": P(None, axis), "down.bias": P()}
    check(fw, Mesh(a=2, b=3), make, dense_mlp("gelu"), mlp_state("gelu", True), specs, numbers(3, WIDTH))


def adamw_in_torch(loss_of, state, steps=3):
    params = {name: torch.tensor(np.asarray(value)).requires_grad_() for name, value in state.items()}
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(params).backward()
        optimizer.step()
    return {name: p.detach().numpy() for name, p in params.items()}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_parameters_after_three_steps_of_adamw(fw, num_ranks, sequence_dim):
    x, state, specs = numbers(BATCH, SEQUENCE, WIDTH), mlp_state("swiglu", True), mlp_specs("swiglu", True)
    outside = P() if sequence_dim is None else ACROSS
    dense = dense_mlp("swiglu")
    want = adamw_in_torch(lambda params: (dense(params, torch.tensor(x)) ** 2).sum(), state)

    def train(state, x):
        layer = fw.lab.ParallelMLP(WIDTH, HIDDEN, "tp", activation="swiglu", sequence_dim=sequence_dim)
        if fw.name == "torch":
            layer = layer.double()
            layer.load_state_dict(state)
            optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                (layer(x) ** 2).sum().backward()
                optimizer.step()
            return dict(layer.state_dict())
        import jax
        import optax

        optimizer = optax.adamw(1e-2, weight_decay=0.1)
        memory = optimizer.init(state)
        for _ in range(3):
            grads = jax.grad(lambda state: (layer(nested(state), x) ** 2).sum())(state)
            updates, memory = optimizer.update(grads, memory, state)
            state = optax.apply_updates(state, updates)
        return state

    with double(fw):
        args = {name: fw.array(value) for name, value in state.items()}, fw.array(x)
        out = fw.lab.run(train, Mesh(tp=num_ranks), *args, in_specs=(specs, outside), out_specs=specs)
        for name, value in want.items():
            close(fw.numpy(out.value[name]), value, name)


# ------------------------------------------------------------------------------------------------------ what it costs


def traced(fw, mesh, bias, sequence_dim, activation="gelu", backward=True):
    """The trace of the MLP's forward pass, or of forward and backward."""

    def program(state, x):
        layer = fw.lab.ParallelMLP(WIDTH, HIDDEN, "tp", activation=activation, bias=bias, sequence_dim=sequence_dim)
        if fw.name == "torch":
            layer.load_state_dict(state)
            call = layer
        else:
            call = lambda x: layer(nested(state), x)  # noqa: E731
        if not backward:
            return call(x)
        if fw.name == "torch":
            x.requires_grad_()
            (call(x) ** 2).sum().backward()
            return x.grad, {n: p.grad for n, p in layer.named_parameters()}
        import jax

        return jax.grad(lambda state, x: (layer(nested(state), x) ** 2).sum(), (0, 1))(state, x)

    state = {n: fw.array(v.astype(np.float32)) for n, v in mlp_state(activation, bias).items()}
    x = fw.array(numbers(BATCH, SEQUENCE, WIDTH).astype(np.float32))
    specs = (mlp_specs(activation, bias), P() if sequence_dim is None else ACROSS)
    return fw.lab.run(program, mesh, state, x, in_specs=specs, keep_values=0).trace


def collectives(trace, rank=0):
    return [event.op for event in trace.select(kind="collective", rank=rank).events]


WHOLE_X = BATCH * SEQUENCE * WIDTH * 4  # bytes


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_one_sum_forward_and_one_backward(fw, activation):
    mesh = Mesh(tp=4)
    assert collectives(traced(fw, mesh, True, None, activation, backward=False)) == ["all_reduce"]
    trace = traced(fw, mesh, True, None, activation)
    assert collectives(trace) == ["all_reduce"] * 2
    assert trace.bytes_sent(rank=0) == 2 * 2 * WHOLE_X * 3 // 4


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_sequence_parallelism_sends_the_same_bytes(fw, activation):
    mesh = Mesh(tp=4)
    forward = traced(fw, mesh, False, 1, activation, backward=False)
    assert collectives(forward) == ["all_gather", "reduce_scatter"]
    assert forward.bytes_sent() == traced(fw, mesh, False, None, activation, backward=False).bytes_sent()
    both = traced(fw, mesh, False, 1, activation)
    assert sorted(collectives(both)) == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
    assert both.bytes_sent() == traced(fw, mesh, False, None, activation).bytes_sent()
    # With a bias its gradient is summed as well: D elements, whatever the batch.
    assert collectives(traced(fw, mesh, True, 1, activation)).count("all_reduce") == 1


def test_row_first_needs_two_sums_where_column_first_needs_one(fw):
    """gelu(a + b) is not gelu(a) + gelu(b): row first, the hidden features are summed before it, and whole after."""

    def program(x):
        layers = (
            fw.lab.RowParallelLinear(WIDTH * 4, HIDDEN, "tp", input_is_parallel=False, bias=False),
            fw.lab.ColumnParallelLinear(HIDDEN, WIDTH * 4, "tp", gather_output=True, bias=False),
        )
        for layer in layers:
            if fw.name == "jax":
                import jax

                x = layer(layer.init(jax.random.key(0)), x)
            else:
                x = layer(x)
        return x

    x = fw.array(numbers(3, WIDTH * 4).astype(np.float32))
    trace = fw.lab.run(program, Mesh(tp=4), x, keep_values=0).trace
    assert collectives(trace) == ["all_reduce", gathers_alike(fw)[0]]


def test_each_rank_holds_its_share_of_the_parameters(fw):
    def count(num_ranks):
        def program():
            layer = fw.lab.ParallelMLP(8, 48, "tp", bias=False)
            if fw.name == "torch":
                return torch.tensor(sum(p.untyped_storage().nbytes() for p in layer.parameters()))
            import jax

            return sum(leaf.nbytes for leaf in jax.tree.leaves(layer.init(jax.random.key(0))))

        return {int(n) for n in fw.lab.run(program, Mesh(tp=num_ranks)).per_rank}

    assert count(1) == {2 * 8 * 48 * 4}
    assert count(4) == {2 * 8 * 48 * 4 // 4}


# ------------------------------------------------------------------------------------------------- known mistakes


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_row_parallel_bias_is_added_once(fw, num_ranks):
    """text-generation-inference #1036: inside the sum it would count once per rank."""
    make = lambda lab: lab.RowParallelLinear(8, 3, "tp")  # noqa: E731
    state = {"weight": np.zeros((3, 8)), "bias": np.ones(3)}
    ones = lambda state, x: F.linear(x, state["weight"], state["bias"])  # noqa: E731
    specs = {"weight": P(None, "tp"), "bias": P()}
    check(fw, Mesh(tp=num_ranks), make, ones, state, specs, numbers(2, 8), P(None, "tp"))


def test_a_bias_on_a_partial_sum_is_refused(fw):
    with pytest.raises((ValueError, RuntimeError), match="a bias on a partial sum is added once by each of the"):
        fw.lab.run(lambda: fw.lab.RowParallelLinear(8, 3, "tp", reduce_output=False) and None, Mesh(tp=2))


def test_two_partial_sums_take_one_sum(fw):
    """What reduce_output=False is for: two branches of a block, added up together."""

    def program(x):
        layer = fw.lab.RowParallelLinear(8, 3, "tp", bias=False, reduce_output=False)
        if fw.name == "torch":
            part = layer(x) + layer(2 * x)
        else:
            import jax

            params = layer.init(jax.random.key(0))
            part = layer(params, x) + layer(params, 2 * x)
        return fw.lab.reduce_from(part, "tp")

    x = fw.array(numbers(2, 8).astype(np.float32))
    out = fw.lab.run(program, Mesh(tp=4), x, in_specs=(P(None, "tp"),), out_specs=P())
    assert collectives(out.trace) == ["all_reduce"]
    alone = fw.lab.run(program, Mesh(tp=1), x, in_specs=(P(None, "tp"),), out_specs=P())
    np.testing.assert_allclose(fw.numpy(out.value), fw.numpy(alone.value), rtol=1e-5, atol=1e-6)  # float32


def test_one_seed_gives_one_model_on_every_mesh(fw):
    """Also data-parallel copies agree, and no two ranks of tp hold the same piece."""

    def program():
        layer = fw.lab.ParallelMLP(4, 12, "tp", activation="swiglu")
        if fw.name == "torch":
            return dict(layer.state_dict())
        import jax

        return flat(layer.init(jax.random.key(0)))

    specs = mlp_specs("swiglu", True)
    states = [fw.lab.run(program, mesh, out_specs=specs).value for mesh in (Mesh(tp=1), Mesh(tp=3), Mesh(dp=2, tp=2))]
    for state in states[1:]:
        for name, value in states[0].items():
            np.testing.assert_array_equal(fw.numpy(state[name]), fw.numpy(value), err_msg=name)
    up = fw.numpy(states[0]["up.weight"])
    assert len(np.unique(up)) == up.size
    assert np.abs(up).max() <= 0.5
    if fw.name == "jax":
        import jax

        layer = fw.lab.ParallelMLP(4, 12, "tp", activation="swiglu")
        whole = flat(layer.init(jax.random.key(0)))  # outside of run: whole
        assert flat(layer.specs) == specs
        for name, value in whole.items():
            # where XLA compiles nothing it rounds once more: one unit in float32's last place
            np.testing.assert_allclose(fw.numpy(value), fw.numpy(states[0][name]), rtol=3e-7, err_msg=name)


# ---------------------------------------------------------------------------------------------------------- errors


def called(fw, layer, x):
    if fw.name == "torch":
        return layer(x)
    import jax

    return layer(layer.init(jax.random.key(0)), x)


WRONG = {
    "features": (
        lambda lab: lab.ColumnParallelLinear(4, 10, "tp"), ShapeError,
        r"out_features is 10, which the 4 ranks of axis 'tp' cannot share equally;\npad it to 12, or use a mesh",
    ),
    "row features": (lambda lab: lab.RowParallelLinear(10, 4, "tp"), ShapeError, r"in_features is 10, which the 4"),
    "hidden": (lambda lab: lab.ParallelMLP(4, 6, "tp"), ShapeError, r"hidden is 6, .*\npad it to 8"),
    "axis": (lambda lab: lab.ColumnParallelLinear(4, 8, "pp"), MeshError, r"no axis 'pp'; its axes are 'tp'"),
    "x": (lambda lab: lab.ColumnParallelLinear(5, 8, "tp"), ShapeError, r"x \[..., 5\], but got \[2, 8, 4\]"),
    "whole x": (lambda lab: lab.RowParallelLinear(4, 8, "tp"), ShapeError, r"all of x: give input_is_parallel=False"),
    "piece of x": (
        lambda lab: lab.RowParallelLinear(16, 8, "tp", input_is_parallel=False), ShapeError,
        r"takes x \[..., 16\] of 16 input features over axis 'tp', but got \[2, 8, 4\]; gather_from",
    ),
    "sequence": (
        lambda lab: lab.RowParallelLinear(16, 8, "tp", sequence_dim=0), ShapeError,
        r"reduce_scatter: dim 0 has size 2, which the 4 ranks",
    ),
    "sequence of features": (
        lambda lab: lab.ColumnParallelLinear(4, 8, "tp", sequence_dim=-1), ShapeError,
        r"sequence_dim=-1 of x \[2, 8, 4\]: it must be a dim before the last",
    ),
    "row sequence of features": (
        lambda lab: lab.RowParallelLinear(16, 8, "tp", sequence_dim=2), ShapeError, r"sequence_dim=2 of x \[2, 8, 8\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(fw, name):
    make, error, message = WRONG[name]
    x = fw.array(numbers(2, 8, 4).astype(np.float32))
    with pytest.raises(error, match=message):
        fw.lab.run(lambda x: called(fw, make(fw.lab), x), Mesh(tp=4), x)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda lab: lab.ParallelMLP(4, 8, "tp", activation="relu"), "activation is 'relu'; it must be one of gelu"),
        (lambda lab: lab.RowParallelLinear(4, 8, "tp", sequence_dim=1, input_is_parallel=False), "it needs input_is"),
    ],
)
def test_modes_that_make_no_sense(fw, make, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        fw.lab.run(lambda: make(fw.lab) and None, Mesh(tp=2))


def test_jax_layers_say_when_they_are_given_the_whole_weights():
    fw = FRAMEWORKS["jax"]()
    import jax

    layer = fw.lab.ColumnParallelLinear(4, 8, "tp")
    x = fw.array(np.ones((2, 4), np.float32))
    with pytest.raises(ShapeError, match=r"holds a weight \[4, 4\], but got \[8, 4\]; in_specs=layer.specs"):
        fw.lab.run(layer, Mesh(tp=2), layer.init(jax.random.key(0)), x)


@pytest.mark.parametrize("name", ["ColumnParallelLinear", "RowParallelLinear", "ParallelMLP"])
def test_twins_are_made_alike(name):
    """The parameters of both constructors, with their kinds and defaults."""
    twins = [inspect.signature(getattr(FRAMEWORKS[f]().lab, name).__init__).parameters for f in ("torch", "jax")]
    about = [[(p.name, p.kind, p.default, p.annotation) for p in list(twin.values())[1:]] for twin in twins]
    assert about[0] == about[1]


def test_a_subclass_shows_the_arguments_of_the_layer():
    class Query(tt.ColumnParallelLinear):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)

    class Narrow(tt.RowParallelLinear):
        def __init__(self):
            super().__init__(8, 4, "tp", bias=False)

    query, narrow = tt.run(lambda: (repr(Query(4, 8, "tp")), repr(Narrow())), Mesh(tp=2)).per_rank[0]
    assert query == "Query(4, 8, 'tp', bias=True, gather_output=False, sequence_dim=None)"
    assert narrow.startswith("Narrow(8, 4, 'tp', bias=False, ")
