"""The classifier of S. Lippe's tutorial, blocking and overlapped: it trains, and the two are one model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.frameworks import FRAMEWORKS, Framework, in_both
from tests.sharded import check, close, double, flat, nested, numbers
from tplab import Mesh, P
from tplab.errors import ShapeError

DIRECTIONS = ["up", "down", "both", "split"]
FEATURES = P(None, "tp")
UPDATES, LEARNING_RATE = 17, 1e-3
SMALL = (12, 16, 5), 2  # features, width, classes; layers


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def block_state(width, hidden):
    return {
        "norm.weight": numbers(width, seed=1),
        "up.weight": numbers(hidden, width, seed=2),
        "up.bias": numbers(hidden, seed=3),
        "down.weight": numbers(width, hidden, seed=4),
        "down.bias": numbers(width, seed=5),
    }


def dense_block(state, x):
    normed = F.rms_norm(x, x.shape[-1:], state["norm.weight"], 1e-6)
    hidden = F.silu(F.linear(normed, state["up.weight"], state["up.bias"]))
    return x + F.linear(hidden, state["down.weight"], state["down.bias"])


def block_specs(overlap):
    down = P("tp") if overlap else P(None, "tp")
    return {"norm.weight": P("tp"), "up.weight": P("tp"), "up.bias": P("tp"), "down.weight": down, "down.bias": P("tp")}


MESHES = [(1, "up"), (2, "split"), (3, "down"), (4, "up"), (4, "both")]


@pytest.mark.parametrize(
    "fw, overlap, num_ranks, direction",
    in_both(
        [(overlap, *mesh) for overlap in (True, False) for mesh in MESHES],
        [(True, 3, "split"), (True, 4, "down"), (False, 4, "up")],
    ),
    indirect=["fw"],
)
def test_the_block(fw, overlap, num_ranks, direction):
    """Blocking or overlapped, it is the dense one: y and every gradient."""
    from tplab.models.state import async_state, blocking_state

    width, hidden = 3 * num_ranks, 2 * num_ranks
    state = block_state(width, hidden)
    oracle: Callable[..., Any] = dense_block
    if overlap:
        state = async_state(state, num_ranks, direction)
        oracle = lambda state, x: dense_block(blocking_state(state, num_ranks, direction), x)  # noqa: E731
    make = lambda lab: lab.ParallelMLPBlock(width, hidden, "tp", overlap=overlap, direction=direction)  # noqa: E731
    check(fw, Mesh(tp=num_ranks), make, oracle, state, block_specs(overlap), numbers(5, width), FEATURES, FEATURES)


def test_a_block_that_cannot_be_shared_is_refused(fw):
    def program(x):
        block = fw.lab.ParallelMLPBlock(6, 8, "tp")
        if fw.name == "torch":
            return block(x)
        import jax

        return block(block.init(jax.random.key(0)), x)

    with pytest.raises(ShapeError, match="is 6, which the 4 ranks of axis 'tp' cannot share equally"):
        fw.lab.run(program, Mesh(tp=4), fw.array(np.zeros((2, 2), np.float32)))


# ----------------------------------------------------------------------------------------------------------- training


def training(fw: Framework, sizes: Any, overlap: bool, direction: str, keep: bool) -> Any:
    """A program: 17 updates with AdamW. It returns the states before each update (none, if not to be kept), the loss
    before each, and the accuracy after the last."""
    widths, num_layers = sizes
    make = _torch_training if fw.name == "torch" else _jax_training
    return make(fw, widths, num_layers, overlap, direction, keep)


def _torch_training(fw, sizes, num_layers, overlap, direction, keep):
    def program(x, labels, state):
        model = fw.lab.ParallelClassifier(*sizes, "tp", num_layers=num_layers, overlap=overlap, direction=direction)
        model.to(x.dtype).load_state_dict(state)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        states, losses = [], []
        for _ in range(UPDATES):
            states.append({name: value.clone() for name, value in model.state_dict().items() if keep})
            loss = F.cross_entropy(model(x), labels)
            losses.append(loss.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = (model(x).argmax(-1) == labels).double().mean()
        return {name: torch.stack([each[name] for each in states]) for name in states[0]}, torch.stack(losses), accuracy

    return program


def _jax_training(fw, sizes, num_layers, overlap, direction, keep):
    import jax
    import jax.numpy as jnp
    import optax

    def program(x, labels, state):
        model = fw.lab.ParallelClassifier(*sizes, "tp", num_layers=num_layers, overlap=overlap, direction=direction)
        params = nested(state)
        optimizer = optax.adamw(LEARNING_RATE, weight_decay=1e-2)  # torch's default

        def loss_of(params):
            logits = model(params, x)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            return loss, (logits.argmax(-1) == labels).astype(jnp.float32).mean()

        def update(carry, _):
            params, memory = carry
            (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            changes, memory = optimizer.update(grads, memory, params)
            return (optax.apply_updates(params, changes), memory), (flat(params) if keep else {}, loss, accuracy)

        # one update more, which no one looks at: its forward pass says what the 17 have reached
        _, (states, losses, accuracy) = jax.lax.scan(update, (params, optimizer.init(params)), length=UPDATES + 1)
        return {name: value[:-1] for name, value in states.items()}, losses[:-1], accuracy[-1]

    return program


def batch(size, features, classes, dtype: Any = np.float64):
    random = np.random.default_rng(42)
    return random.normal(size=(size, features)).astype(dtype), random.integers(0, classes, size)


def first_state(sizes, num_layers, dtype: Any = np.float64):
    """A blocking state: weights spread evenly over +- inputs^-1/2, norms one, biases zero."""
    (features, width, classes), random = sizes, np.random.default_rng(0)
    shapes = {"input": (width, features), "output": (classes, width)}
    for number in range(num_layers):
        shapes |= {f"blocks.{number}.{name}": (width, width) for name in ("up", "down")}
    state = {f"blocks.{number}.norm.weight": np.ones(width, dtype) for number in range(num_layers)}
    for name, (rows, columns) in shapes.items():
        state[f"{name}.weight"] = random.uniform(-1, 1, (rows, columns)).astype(dtype) * dtype(columns**-0.5)
        state[f"{name}.bias"] = np.zeros(rows, dtype)
    return state


def trained(fw, sizes, x, labels, state, overlap, direction="up", keep=False):
    specs = fw.lab.classifier_specs(sizes[1], "tp", overlap=overlap)
    program = training(fw, sizes, overlap, direction, keep)
    args = fw.array(x), fw.array(labels), {name: fw.array(value) for name, value in state.items()}
    before_each = {name: P(None, *spec) for name, spec in specs.items()} if keep else {}
    out = fw.lab.run(
        program, Mesh(tp=4), *args, in_specs=(P(), P(), specs), out_specs=(before_each, P(), P()), keep_values=0
    )
    states, losses, accuracy = out.value
    return {name: fw.numpy(value) for name, value in states.items()}, fw.numpy(losses), float(accuracy)


@pytest.mark.parametrize("fw, direction", in_both([("up",), ("split",)], [("both",)]), indirect=["fw"])
def test_after_conversion_both_forms_agree_at_each_of_17_steps(fw, direction):
    """float64: the loss and every parameter before each update, to 1e-12 of the largest element."""
    x, labels = batch(32, 12, 5)
    state = first_state(*SMALL)
    with double(fw):
        blocking, losses, _ = trained(fw, SMALL, x, labels, state, overlap=False, keep=True)
        state = fw.lab.async_state(state, 4, direction)
        overlapped, other_losses, _ = trained(fw, SMALL, x, labels, state, True, direction, keep=True)
    close(other_losses, losses, "losses")
    assert losses[-1] < losses[0]
    for step in range(UPDATES):
        back = fw.lab.blocking_state({name: value[step] for name, value in overlapped.items()}, 4, direction)
        assert back.keys() == blocking.keys()
        for name, value in blocking.items():
            close(back[name], value[step], f"step {step}, {name}")


def test_it_learns_its_batch(fw):
    """784 -> 512, 3 layers, expansion 1 -> 10; 128 inputs with labels by chance, 17 updates: accuracy 1, both forms."""
    sizes = (784, 512, 10), 3
    x, labels = batch(128, 784, 10, np.float32)
    state = first_state(*sizes, np.float32)
    _, losses, accuracy = trained(fw, sizes, x, labels, state, overlap=False)
    state = fw.lab.async_state(state, 4)
    assert state["blocks.2.up.weight"].shape == state["blocks.2.down.weight"].shape == (4 * 4, 128, 128)
    _, other_losses, other_accuracy = trained(fw, sizes, x, labels, state, overlap=True)
    assert accuracy == other_accuracy == 1
    assert losses[-1] < 1e-4 < losses[0]
    # in float32: sums in another order, in 17 steps of AdamW, which divides by what may be small
    np.testing.assert_allclose(other_losses, losses, rtol=1e-2, atol=1e-6)


def test_one_seed_gives_one_model_in_both_forms(fw):
    def first(overlap):
        def program():
            model = fw.lab.ParallelClassifier(12, 16, 5, "tp", num_layers=1, overlap=overlap)
            if fw.name == "torch":
                return dict(model.state_dict())
            import jax

            return flat(model.init(jax.random.key(0)))

        specs = fw.lab.classifier_specs(1, "tp", overlap=overlap)
        state = fw.lab.run(program, Mesh(tp=4), out_specs=specs).value
        return {name: fw.numpy(value) for name, value in state.items()}

    blocking, overlapped = first(False), fw.lab.blocking_state(first(True), 4)
    assert blocking.keys() == overlapped.keys() == first_state((12, 16, 5), 1).keys()
    for name, value in blocking.items():
        np.testing.assert_array_equal(overlapped[name], value, err_msg=name)


def test_states_are_converted_bit_for_bit(fw):
    """Nested or flat; what has one form only stays as it is."""
    state = {"input.weight": numbers(8, 3), **{f"blocks.0.{n}": v for n, v in block_state(8, 12).items()}}
    for direction in DIRECTIONS:
        there = fw.lab.async_state({n: fw.array(v) for n, v in state.items()}, 4, direction)
        assert {n: there[n].shape for n in ("blocks.0.up.weight", "blocks.0.down.weight")} == {
            "blocks.0.up.weight": (16, 3, 2), "blocks.0.down.weight": (16, 2, 3),
        }  # fmt: skip
        back = fw.lab.blocking_state(there, 4, direction)
        for name, value in state.items():
            np.testing.assert_array_equal(fw.numpy(back[name]), np.asarray(fw.array(value)), err_msg=name)
    deep = fw.lab.async_state(nested(state), 4)
    for name, value in flat(deep).items():
        np.testing.assert_array_equal(value, fw.lab.async_state(state, 4)[name], err_msg=name)


def test_what_the_classifier_sends(fw):
    """The input nothing; a block a norm's sum and two rings, or two collectives of the same bytes; the output a sum."""
    x, state = batch(8, 12, 5, np.float32)[0], first_state((12, 16, 5), 1, np.float32)

    def forward(overlap):
        def program(x, state):
            model = fw.lab.ParallelClassifier(12, 16, 5, "tp", num_layers=1, overlap=overlap)
            if fw.name == "jax":
                return model(nested(state), x)
            model.load_state_dict(state)
            return model(x).detach()

        mine = fw.lab.async_state(state, 4) if overlap else state
        args = fw.array(x), {name: fw.array(value) for name, value in mine.items()}
        in_specs = P(), fw.lab.classifier_specs(1, "tp", overlap=overlap)
        return fw.lab.run(program, Mesh(tp=4), *args, in_specs=in_specs, out_specs=P(), keep_values=0)

    overlapped, blocking = forward(True), forward(False)
    close(fw.numpy(overlapped.value), fw.numpy(blocking.value), "logits", tolerance=1e-5)  # float32
    assert overlapped.trace.bytes_sent() == blocking.trace.bytes_sent()
    count = lambda out, op: len(out.trace.select(rank=0, op=op, kind="collective"))  # noqa: E731
    assert [count(blocking, op) for op in ("all_reduce", "all_gather", "reduce_scatter")] == [2, 1, 1]
    assert [count(overlapped, op) for op in ("all_reduce", "all_gather", "reduce_scatter")] == [2, 0, 0]
    assert len(overlapped.trace.select(rank=0, kind="send")) == 2 * 3


def test_in_torch_it_learns_in_bfloat16_too():
    """Computed in bfloat16, parameters in float32, as the tutorial has it; narrower, so that it is quick."""
    from tplab.torch import ParallelClassifier, run

    x, labels = (torch.tensor(each) for each in batch(32, 48, 4, np.float32))

    def program(x, labels):
        model = ParallelClassifier(48, 128, 4, "tp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        for _ in range(UPDATES):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return (model(x).argmax(-1) == labels).float().mean()

    assert run(program, Mesh(tp=4), x, labels, out_specs=P(), keep_values=0).value == 1
