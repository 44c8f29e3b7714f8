"""check_parallel in JAX: what is right passes on every mesh, and each known mistake is found and named."""

import numpy as np
import pytest

from tplab.jax import GPT, all_gather, all_reduce, check_parallel, reduce_scatter  # isort: skip  # before JAX is used
import jax
import jax.numpy as jnp
import optax

from tests.sharded import numbers
from tplab import Mesh, P
from tplab.errors import ParallelError, SpecError
from tplab.jax import axis_index, axis_size, gather_from
from tplab.jax.private import in_float64
from tplab.models.gpt import GPTConfig

SPECS = {"up": P(None, "tp"), "down": P("tp"), "bias": P()}
X = numbers(6, 4)


@pytest.fixture(autouse=True)
def double():
    with in_float64():
        yield


def mlp_params(dtype="float64"):
    params = {"up": numbers(4, 12, seed=1), "down": numbers(12, 4, seed=2), "bias": np.zeros(4)}
    return {name: jnp.asarray(x, dtype) for name, x in params.items()}


def whole(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]


def right(params, x):
    return all_reduce(jnp.tanh(x @ params["up"]) @ params["down"], "tp") + params["bias"]


def checked(model, reference=whole, *inputs, num_ranks=3, params=None, specs=SPECS, **options):
    inputs, params, mesh = inputs or (X,), params or mlp_params(), Mesh(tp=num_ranks)
    return check_parallel(model, reference, inputs=inputs, params=params, mesh=mesh, specs=specs, **options)


def found(report):
    return {(row.kind, row.name): row.mistake for row in report.wrong}


# ------------------------------------------------------------------------------------------------- what is right


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_right_program_passes(num_ranks):
    report = checked(right, num_ranks=num_ranks, optimizer=optax.adamw(1e-2))
    assert report.ok, str(report)
    assert {row.kind for row in report.rows} == {"output", "gradient", "parameter"}
    assert report.raise_if_wrong() is report
    assert max(row.error for row in report.rows) < 1e-14
    assert "bias was constant, so the check gave it random values" in str(report)


def test_a_gpt_passes():
    """11 words, which no 4 ranks share; the model is its own reference: on one rank it is whole."""
    model = GPT(GPTConfig(11, 8, 1, 4, 8), sequence_parallel=True)
    ids = np.random.default_rng(0).integers(0, 11, (2, 8))
    loss = lambda params, ids: model.loss(params, ids, ids)  # noqa: E731
    report = check_parallel(
        loss, loss, inputs=(ids,), params=model.init(jax.random.key(0)), mesh=Mesh(tp=4), specs=model.specs
    )
    assert report.ok, str(report)
    assert report.of("loss").error < 1e-14
    assert len([row for row in report.rows if row.kind == "gradient"]) == len(jax.tree.leaves(model.specs))


def test_sharded_outputs_and_inputs():
    """Column-parallel alone, of a sequence of which each rank has a piece: a layout is found for what comes out."""

    def columns(params, x):
        return all_gather(x, "tp", 0) @ params["up"], x

    params, specs = {"up": mlp_params()["up"]}, {"up": P(None, "tp")}
    report = checked(columns, lambda p, x: (x @ p["up"], x), params=params, specs=specs, in_specs=P("tp"))
    assert report.ok, str(report)
    assert [row.layout for row in report.rows] == ["P(None, 'tp')", "P('tp')", "P(None, 'tp')", "P('tp')"]


def test_gradients_of_two_axes():
    """Data and tensor parallelism: JAX's types sum the gradients over dp."""

    def loss(params, x):
        return all_reduce((right(params, x) ** 2).mean(), "dp", "mean")

    reference, mesh = lambda params, x: (whole(params, x) ** 2).mean(), Mesh(dp=2, tp=3)
    report = check_parallel(
        loss, reference, inputs=(X,), params=mlp_params(), mesh=mesh, specs=SPECS, in_specs=(P("dp"),)
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_rounding_in_shorter_dtypes(dtype):
    """The sums are made in another order, and that may show in their last bits."""
    report = checked(right, whole, jnp.asarray(X, dtype), params=mlp_params(dtype), num_ranks=4)
    assert report.ok, str(report)
    assert report.of("up").tolerance > 1e-7


def test_a_model_that_draws_random_numbers_hides_no_mistake():
    """In float64 the reference draws other numbers than in float32. That is no rounding."""

    def noisy(params, x, factor=1.0):
        y = jnp.tanh(x @ params["up"])
        return factor * (y + jax.random.normal(jax.random.key(0), y.shape, y.dtype))

    params, x = {"up": jnp.asarray(numbers(4, 12), "float32")}, jnp.asarray(X, "float32")
    options = {"params": params, "specs": {"up": P()}}
    report = checked(noisy, noisy, x, **options)
    assert report.ok and report.of("output").error == 0
    report = checked(lambda params, x: noisy(params, x, 1.5), noisy, x, **options)
    assert report.of("output").mistake == "scaled" and not report.of("up").ok


# ------------------------------------------------------------------------------------------------ known mistakes


def test_a_bias_inside_the_sum():
    """text-generation-inference #1036. A bias of zeros would hide it: perturb gives it other values."""
    wrong = lambda params, x: all_reduce(whole(params, x), "tp")  # noqa: E731
    report = checked(wrong)
    assert set(found(report)) == {("output", "output"), ("gradient", "bias")}
    assert report.of("output").words == (
        "its bias is added 3 times; it is right with its bias on one rank of 'tp' alone, so every rank adds it before "
        "the sum: add it once, after it"
    )
    assert [row.name for row in report.wrong] == ["output", "bias"] and report.of("bias").follows == "output"
    assert "3 times the reference on every rank" in report.of("bias").words
    assert set(found(checked(wrong, perturb=False))) == {("gradient", "bias")}
    with pytest.raises(ParallelError, match="2 of 5 wrong"):
        report.raise_if_wrong()


def test_a_forgotten_sum():
    report = checked(lambda params, x: whole({**params, "bias": params["bias"] / axis_size("tp")}, x))
    assert found(report)["output", "output"] == "partial"
    assert report.of("output").words.endswith("it is right with an all_reduce over 'tp' here")


def test_a_sum_made_twice():
    report = checked(lambda params, x: all_reduce(right(params, x), "tp"))
    assert found(report)["output", "output"] == "scaled"
    assert "it is right without all_reduce(x, 'tp') in test_check_parallel_jax.py" in report.of("output").words


def test_a_loss_that_jax_adds_up_once_a_rank():
    """What was gathered differs from rank to rank, as far as the types know: the loss is right, all gradients are R
    times too large (jax #3970)."""
    specs, params = {"up": P(None, "tp")}, {"up": mlp_params()["up"]}

    def gathered(params, x):
        return (all_gather(jnp.tanh(x @ params["up"]), "tp", 1) ** 2).sum()

    report = checked(gathered, lambda params, x: (jnp.tanh(x @ params["up"]) ** 2).sum(), params=params, specs=specs)
    assert report.of("loss").ok
    assert set(found(report).values()) == {"scaled"}
    assert "all gradients are right with all_reduce(loss, 'tp', 'mean'): it may differ along it" in str(report)
    mended = checked(
        lambda params, x: all_reduce(gathered(params, x), "tp", "mean"),
        lambda params, x: (jnp.tanh(x @ params["up"]) ** 2).sum(),
        params=params,
        specs=specs,
    )
    assert mended.ok, str(mended)
    assert not mended.notes


def test_gradients_reduced_by_hand_once_too_often():
    """JAX has summed the gradient of what all ranks hold already."""
    by_hand = lambda grads: {**grads, "bias": all_reduce(grads["bias"], "tp", "sum")}  # noqa: E731
    report = checked(right, after_backward=by_hand)
    assert found(report) == {("gradient", "bias"): "scaled"}


def test_heads_cut_in_parts():
    """Attention that sums after the softmax: a part of a head gives a part of each score."""

    def attention(params, x, total=lambda x: x):
        q, k, v = (x @ params[name] for name in "qkv")
        return total(jax.nn.softmax(q @ k.T, -1) @ v @ params["o"])

    params = {name: jnp.asarray(numbers(4, 12, seed=seed)) for seed, name in enumerate("qkv")}
    params["o"] = jnp.asarray(numbers(12, 4, seed=5))
    specs = {**dict.fromkeys("qkv", P(None, "tp")), "o": P("tp")}
    wrong = lambda params, x: attention(params, x, lambda part: all_reduce(part, "tp"))  # noqa: E731
    report = checked(wrong, attention, params=params, specs=specs)
    assert not report.of("output").ok
    assert not report.of("q").ok


def test_two_halves_that_were_not_cut_together():
    """gate and up in one matrix, cut in one piece: the first ranks have the gates, the last ones what they gate."""

    def gated(params, x):
        gate, up = jnp.split(x @ params["gate_up"], 2, -1)
        return jax.nn.silu(gate) * up @ params["down"]

    params = {"gate_up": jnp.asarray(numbers(4, 24, seed=3)), "down": mlp_params()["down"]}
    report = checked(
        lambda params, x: all_reduce(gated(params, x), "tp"),
        gated,
        params=params,
        specs={"gate_up": P(None, "tp"), "down": P("tp")},
        num_ranks=2,
    )
    assert not report.of("output").ok


def test_dropped_tokens_and_a_piece_of_another_rank():
    """reduce_scatter gives piece i to rank i: one that turns them around has right numbers on the wrong ranks."""

    def turned(params, x):
        part = jnp.tanh(x @ params["up"]) @ params["down"]
        return reduce_scatter(jnp.roll(part, -2, 0), "tp", 0) + params["bias"]

    report = checked(turned)
    assert found(report)["output", "output"] == "pieces"
    assert "the right pieces on the wrong ranks" in report.of("output").words


def test_heads_cut_in_parts_are_named():
    def attention(params, x, total=lambda x: x):
        scores = (x @ params["q"]) @ (x @ params["k"]).T / 2
        return total(jax.nn.softmax(jnp.where(jnp.tril(jnp.ones_like(scores)) > 0, scores, -jnp.inf), -1) @ x)

    params = {name: jnp.asarray(numbers(4, 12, seed=seed)) for seed, name in enumerate("qk")}
    wrong = lambda params, x: attention(params, x, lambda part: all_reduce(part, "tp", "mean"))  # noqa: E731
    report = checked(wrong, attention, params=params, specs=dict.fromkeys("qk", P(None, "tp")))
    assert report.wrong[0].name == "output" and report.wrong[0].mistake == "softmax"
    assert report.wrong[0].words.endswith(
        "it is right with the scores added up over 'tp' before softmax, which takes only a part of them"
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_scores_of_another_scale_are_named(num_ranks):
    """The width of a head is taken from this rank's columns, as if it had one head; also inside of jit."""

    def attention(params, x, heads, width=3):
        q, k, v = ((x @ params[name]).reshape(len(x), heads, 3).swapaxes(0, 1) for name in "qkv")
        weights = jax.jit(jax.nn.softmax)(q @ k.mT / np.sqrt(width))
        return (weights @ v).swapaxes(0, 1).reshape(len(x), -1) @ params["o"]

    def sharded(params, x, width=3):
        return all_reduce(attention(params, x, 4 // num_ranks, width), "tp")

    params = {name: jnp.asarray(numbers(4, 12, seed=seed)) for seed, name in enumerate("qkv")}
    params["o"] = jnp.asarray(numbers(12, 4, seed=5))
    specs = {**dict.fromkeys("qkv", P(None, "tp")), "o": P("tp")}
    options = {"params": params, "specs": specs, "num_ranks": num_ranks}
    assert checked(sharded, lambda params, x: attention(params, x, 4), **options).ok
    wrong = lambda params, x: sharded(params, x, 12)  # noqa: E731
    report = checked(wrong, lambda params, x: attention(params, x, 4), **options)
    assert report.wrong[0].name == "output" and report.wrong[0].mistake == "scale"
    assert "it is right with the scores that softmax takes divided by 0.5" in report.wrong[0].words


def test_gradients_of_a_mean_over_data_that_is_missing():
    """JAX's types add gradients up over dp: where each rank's loss is the mean over its own data, they are dp times too
    large."""
    loss = lambda params, x: (right(params, x) ** 2).mean()  # noqa: E731
    reference, mesh = lambda params, x: (whole(params, x) ** 2).mean(), Mesh(dp=2, tp=3)
    report = check_parallel(
        loss, reference, inputs=(X,), params=mlp_params(), mesh=mesh, specs=SPECS, in_specs=(P("dp"),)
    )
    assert report.summary().endswith("each rank has its part of the loss")
    first, *behind = report.wrong
    assert (first.name, first.mistake) == ("bias", "scaled")
    assert "all gradients are right with all_reduce(loss, 'dp', 'mean')" in first.words
    assert [(row.name, row.follows) for row in behind] == [
        ("down", "gradient of bias"), ("up", "gradient of bias"),
    ]  # fmt: skip
    assert "2 times the reference on every rank, as each rank's loss" in report.of("input 0").words


def test_the_first_wrong_gradient_of_the_backward_pass_is_on_top():
    """A gradient that somebody scales on its way back, between down and up: what is behind follows from it."""

    @jax.custom_vjp
    def doubled(x):
        return x

    doubled.defvjp(lambda x: (x, None), lambda _, dx: (2 * dx,))

    def wrong(params, x):
        return all_reduce(doubled(jnp.tanh(x @ params["up"])) @ params["down"], "tp") + params["bias"]

    report = checked(wrong, params={**mlp_params(), "bias": jnp.asarray(numbers(4, seed=3))})
    assert [row.name for row in report.rows if row.kind == "gradient"] == ["bias", "down", "up", "input 0"]
    assert [(row.name, row.follows) for row in report.wrong] == [("up", ""), ("input 0", "gradient of up")]
    assert str(report).splitlines()[2].strip() == "and 1 gradient that may follow from it: input 0"


def test_gather_from_is_as_right_as_all_gather():
    """JAX's types add up what ranks use in different ways: the cause that torch's check names cannot be."""
    specs = {"up": P(None, "tp"), "down": P("tp"), "bias": P()}

    def tokens(gather):
        return lambda p, x: reduce_scatter(jnp.tanh(gather(x, "tp", 0) @ p["up"]) @ p["down"], "tp", 0) + p["bias"]

    for gather in (all_gather, gather_from):
        report = checked(tokens(gather), specs=specs, in_specs=P("tp"))
        assert report.ok, str(report)


def test_what_differs_from_rank_to_rank():
    report = checked(lambda params, x: right(params, x) * (1 + 0.1 * (axis_index("tp") == 1)))
    assert found(report)["output", "output"] in ("disagree", "scaled")
    assert not report.ok


# ---------------------------------------------------------------------------------------------------------- errors


def test_what_is_missing_is_said():
    with pytest.raises(SpecError, match="give specs, a structure of P"):
        checked(right, specs=None)
    with pytest.raises(SpecError, match="in_specs has 2 entries, but there are 1 inputs"):
        checked(right, in_specs=(P(), P()))
    with pytest.raises(TypeError, match=r"steps is of dtype int32; jax\.grad differentiates floats only"):
        checked(right, params={**mlp_params(), "steps": np.int32(3)}, specs={**SPECS, "steps": P()})
