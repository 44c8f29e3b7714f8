"""What JAX's executor does beside running schedules: stages, ties, dropout, recomputation, memory, I and W, errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from tests.pairwise import pairs
from tplab import Mesh, P
from tplab.errors import ScheduleError, ShapeError
from tplab.jax import (
    LayerNorm,
    ParallelMLP,
    Stages,
    axis_index,
    num_parameters,
    run,
    saved_tensors,
    split_batch,
    stages_of,
    train_batch,
)
from tplab.jax import dropout as shared_dropout
from tplab.jax.pipeline.flat import Kind
from tplab.jax.pipeline.passes import Given, Layer, Passes, Stage, traced
from tplab.jax.pipeline.plan import Buffer, Keeping, Plan
from tplab.jax.private import in_float64
from tplab.jax.ranks.context import vary
from tplab.jax.ranks.program import program_of
from tplab.jax.tracing.compiled import temporary_bytes
from tplab.mesh import Axis
from tplab.pipeline.partition import LayerSpec, TiedSpec
from tplab.schedules import (
    RULES,
    chimera,
    compare,
    gpipe,
    interleaved_1f1b,
    measured_costs,
    measured_strip,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_v,
)

D, WORDS = 8, 13


@pytest.fixture(autouse=True)
def _double():
    with in_float64():
        yield


def drawn(key, *shapes):
    """Numbers that look random: of a key, but compiled in no time."""
    begin, made = jax.random.key_data(key)[-1] % 1000, []
    for shape in shapes:
        made.append(jnp.sin((jnp.arange(np.prod(shape)) + begin) * 3.7).reshape(shape) * shape[0] ** -0.5)
        begin = begin + 17
    return made


@dataclass(frozen=True)
class Words:
    def init(self, key):
        return {"weight": drawn(key, (WORDS, D))[0]}

    def __call__(self, params, ids):
        return params["weight"][ids]


@dataclass(frozen=True)
class Block:
    """Norm, MLP with dropout, residual."""

    p: float = 0.0
    axis: Axis | None = None

    def init(self, key):
        up, down = drawn(key, (D, 2 * D), (2 * D, D))
        return {"up": up, "down": down, "gain": jnp.ones(D)}

    def __call__(self, params, x, key=None):
        hidden = jnp.tanh(jax.nn.standardize(x) * params["gain"] @ params["up"])
        if key is not None:
            hidden = shared_dropout(hidden, self.p, key=key, axis=self.axis)
        return x + hidden @ params["down"]


def gpt(num_blocks=2, **options):
    """Layers whose first and last have one matrix."""
    head = TiedSpec("words", Words, forward=lambda words, params, x: x @ params["weight"].T)
    return [TiedSpec("words", Words), *[LayerSpec(Block, **options)] * num_blocks, head]


def cross_entropy(logits, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


IDS = np.arange(40).reshape(8, 5) * 7 % WORDS
TARGETS = (IDS + 3) % WORDS


def trained(schedule, layers, bounds=None, loss=cross_entropy, batch=(IDS, TARGETS), **options):
    """(loss, gradients of each layer) of all ranks together; copies must agree."""

    def program():
        stages = stages_of(layers, schedule, bounds=bounds)
        mean, grads = train_batch(schedule, stages, split_batch(x, y, schedule.num_microbatches), loss, **options)
        assert stages.partition is not None
        made.append(stages.partition.bounds)
        return mean, [grads[number] for number in range(schedule.num_stages)]

    (x, y), made, found = batch, [], {}
    per_rank = run(program, Mesh(pp=schedule.num_ranks)).per_rank
    for rank, (mean, grads) in enumerate(per_rank):
        assert mean == per_rank[0][0]  # the same bits on every rank
        for stage in schedule.placement[rank]:
            for place, layer in enumerate(grads[stage], made[0][stage]):
                assert place not in found or jax.tree.all(jax.tree.map(np.array_equal, found[place], layer)), place
                found[place] = layer
    return float(per_rank[0][0]), [found[place] for place in range(len(layers))]


def same(got, want):
    assert got[0] == pytest.approx(want[0], rel=1e-12)
    for place, (a, b) in enumerate(zip(got[1], want[1], strict=True)):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert np.abs(x - y).max() <= 1e-12 * np.abs(y).max(), place


def begun(layers):
    """The parameters that `stages_of` makes."""
    return run(lambda: stages_of(layers, gpipe(1, 1))[0], Mesh(pp=1)).per_rank[0]


def plain(layers, loss=cross_entropy, batch=(IDS, TARGETS)):
    """One device, the whole batch at once, one matrix for words in and out."""
    params = begun(layers)
    built = [spec.build() if isinstance(spec, LayerSpec) else spec for spec in layers]
    tied = isinstance(layers[-1], TiedSpec)

    def whole(params):
        if tied:
            params = [*params[:-1], params[0]]
        x = jnp.asarray(batch[0])
        for spec, layer, w in zip(layers, built, params):
            forward = getattr(spec, "forward", None)
            args = x if isinstance(x, tuple) else (x,)
            if forward is not None:
                x = forward(layer, w, *args)
            else:
                x = layer(w, *args) if hasattr(layer, "init") else layer(*args)
        return loss(x, batch[1])

    mean, grads = jax.jit(jax.value_and_grad(whole))(params)
    if tied:
        grads[-1] = grads[0]
    return float(mean), grads


# ------------------------------------------------------------------------------------------ ties, dropout, shapes


@pytest.mark.parametrize("schedule", [gpipe(1, 4), one_f_one_b(3, 4), zb_v(2, 4), chimera(4, 4)], ids=lambda s: s.name)
def test_tied_words_and_copies_of_stages(schedule):
    """First and last layer are one matrix: in one stage, on two ranks, on one rank twice (V), on two ranks twice."""
    same(trained(schedule, gpt()), plain(gpt()))


def test_dropout_is_the_same_in_every_schedule():
    """Whatever the stages, computed again or not."""
    layers, options = gpt(p=0.3), {"key": jax.random.key(3)}
    want = trained(gpipe(2, 2), layers, **options)
    assert want[0] != pytest.approx(plain(layers)[0])  # where there is no key, there is no dropout
    same(trained(interleaved_1f1b(2, 2), layers, **options), want)
    same(trained(zb_h1(3, 2), layers, checkpoint_every=2, **options), want)


@pytest.mark.parametrize("schedule, every", [(one_f_one_b(2, 4), 1), (zb_v(1, 4), 2)], ids=["1F1B", "V"])
def test_recomputed_activations_change_nothing(schedule, every):
    same(trained(schedule, gpt(), checkpoint_every=every), plain(gpt()))


@dataclass(frozen=True)
class Widen:
    """An array -> three: one is a mask, and one nothing uses."""

    def init(self, key):
        return drawn(key, (D, D))[0]

    def __call__(self, w, x):
        y = x @ w
        return y, y[..., :3].sum(-1, keepdims=True), x > 0


def through(y, z, mask):
    """No parameters: hands on what it gets, in another order."""
    return z, mask, y


@dataclass(frozen=True)
class Narrow:
    def init(self, key):
        return {"w": drawn(key, (D, 1))[0], "unused": jnp.ones(2)}

    def __call__(self, params, z, mask, y):
        return (y * mask) @ params["w"] + z


def mean_squares(y, target):
    return ((y - target) ** 2).mean()


@pytest.mark.parametrize("rule", [one_f_one_b, zb_h1])
def test_several_arrays_between_stages(rule):
    x = np.random.default_rng(0).normal(size=(6, 5, D))
    layers, batch = [LayerSpec(Widen), through, LayerSpec(Narrow)], (x, x.mean(-1, keepdims=True))
    got = trained(rule(3, 3), layers, bounds=range(4), loss=mean_squares, batch=batch)
    want = plain(layers, mean_squares, batch)
    assert got[1][1] == ()
    assert not got[1][2].pop("unused").any()
    want[1][2].pop("unused")
    same(got, want)


@dataclass(frozen=True)
class Parallel:
    """A layer of this package, begun in float64."""

    layer: object

    def init(self, key):
        return jax.tree.map(lambda x: x.astype(jnp.float64), self.layer.init(key))  # type: ignore[attr-defined]

    def __call__(self, params, x):
        return x + self.layer(params, x)  # type: ignore[operator]


def test_data_pipeline_and_tensor_parallelism():
    """2 x 2 x 2 against one rank: ranks of a tp group are in the same action, whose collectives join them."""
    layers = [LayerSpec(Parallel, layer) for layer in (ParallelMLP(D, 2 * D, "tp"), LayerNorm(D)) * 2]
    x = np.random.default_rng(0).normal(size=(8, 5, D))
    schedule = zb_h1(2, 2)

    def program(x):
        stages = stages_of(layers, schedule)
        loss, grads = train_batch(schedule, stages, split_batch(x, x[:, ::-1], 2), mean_squares, data_axis="dp")
        return loss, [grads[number] for number in range(2)]

    out = run(program, Mesh(dp=2, pp=2, tp=2), x, in_specs=P("dp"), keep_values=0)

    def whole(x):
        stages = stages_of(layers, gpipe(1, 4))
        loss, grads = train_batch(gpipe(1, 4), stages, split_batch(x, x[:, ::-1], 4), mean_squares)
        return loss, grads[0]

    loss, grads = run(whole, Mesh(pp=1, tp=1), x).per_rank[0]
    for rank, (got, found) in enumerate(out.per_rank):
        assert float(got) == pytest.approx(float(loss), rel=1e-12)
        stage, piece = rank // 2 % 2, rank % 2
        mlp, norm = found[stage]
        up = grads[2 * stage]["up"]["weight"].reshape(2, D, D)[piece]
        np.testing.assert_allclose(mlp["up"]["weight"], up, rtol=1e-11, atol=1e-14)
        np.testing.assert_allclose(mlp["down"]["bias"], grads[2 * stage]["down"]["bias"], rtol=1e-11, atol=1e-14)
        np.testing.assert_allclose(norm["weight"], grads[2 * stage + 1]["weight"], rtol=1e-11, atol=1e-14)
    done = out.trace.select(kind="compute")
    assert {e.where for e in done.events if e.rank == 0} == {"stage 0"}
    inside = [e for e in out.trace.events if e.kind == "collective" and e.axis == "tp"]
    assert inside  # and an action is one event before and one after
    assert compare(schedule, out.trace).makespan > 0


# ------------------------------------------------------------------------------------------------------- stages


def linear(w, x):
    return jnp.tanh(x @ w)


@pytest.mark.parametrize("schedule", [one_f_one_b(4, 3), zb_v(2, 3)], ids=lambda s: s.name)
def test_one_function_for_all_stages(schedule):
    """A pair (function, params) in place of stages; gradients have the form of the params."""
    ws = np.random.default_rng(0).normal(size=(4, D, D))
    x = np.ones((3, 2, D))

    def program(ws):
        own = ws[jnp.asarray(schedule.placement)[axis_index("pp")]]
        params = own[0] if len(own) == 1 else list(own)
        return train_batch(schedule, (linear, params), list(zip(x, x)), mean_squares)

    def whole(ws):
        y = jnp.asarray(x)
        for w in ws:
            y = linear(w, y)
        return mean_squares(y, x)

    loss, grads = jax.value_and_grad(whole)(ws)
    for rank, (got, found) in enumerate(run(program, Mesh(pp=schedule.num_ranks), ws).per_rank):
        assert float(got) == pytest.approx(float(loss), rel=1e-12)
        held = schedule.placement[rank]
        for stage, grad in zip(held, found if len(held) > 1 else [found], strict=True):
            np.testing.assert_allclose(grad, grads[stage], rtol=1e-12, atol=1e-15)


def test_stages_are_a_pytree():
    """A training step between two runs: Stages go out by P("pp"), optax takes them, and they come in again."""
    schedule, layers, mesh = one_f_one_b(2, 4), gpt(), Mesh(pp=2)
    begin = run(lambda: stages_of(layers, schedule), mesh, out_specs=P("pp")).value
    assert isinstance(begin, Stages)
    assert repr(begin) == "Stages of 2 over 2 ranks"
    optimizer = optax.sgd(0.1)

    def step(stages, x, y):
        loss, grads = train_batch(schedule, stages, split_batch(x, y, 4), cross_entropy)
        updates, _ = optimizer.update(grads, optimizer.init(stages))
        return optax.apply_updates(stages, updates), loss

    specs = P("pp"), P(), P()
    once, first = run(step, mesh, begin, IDS, TARGETS, in_specs=specs, out_specs=(P("pp"), P())).value
    _, second = run(step, mesh, once, IDS, TARGETS, in_specs=specs, out_specs=(P("pp"), P())).value
    assert second < first
    want, grads = plain(layers)
    assert float(first) == pytest.approx(want, rel=1e-12)
    assert begin.partition is not None
    for stage, places in enumerate(begin.partition.stages):
        for place, before, after in zip(places, begin[stage], once[stage], strict=True):
            for w, v, grad in zip(*map(jax.tree.leaves, (before, after, grads[place])), strict=True):
                np.testing.assert_allclose(v, w - 0.1 * grad, rtol=1e-11, atol=1e-14)
    with pytest.raises(ScheduleError, match="there is no stage 2; there are stages 0 to 1"):
        begin[2]
    with pytest.raises(TypeError):
        iter(begin)  # type: ignore[call-overload]


def test_the_same_model_on_any_mesh():
    layers = gpt(4)
    want = begun(layers)
    assert not np.array_equal(want[1]["up"], want[2]["up"])  # two layers of one spec are two layers
    assert np.array_equal(want[0]["weight"], want[5]["weight"])  # tied ones begin alike
    for schedule in (gpipe(3, 1), zb_v(2, 2)):
        got = run(lambda schedule=schedule: stages_of(layers, schedule), Mesh(pp=schedule.num_ranks), out_specs=P("pp"))
        found = [layer for stage in range(schedule.num_stages) for layer in got.value[stage]]
        assert jax.tree.all(jax.tree.map(np.array_equal, found, want))
        assert got.value.tied[0][0] == (0, "0.weight")


def test_counting_makes_nothing():
    big = LayerSpec(Big, 1_000_000)
    assert num_parameters([big, big, Words(), through]) == [10**12, 10**12, WORDS * D, 0]


@dataclass(frozen=True)
class Big:
    width: int

    def init(self, key):
        return jax.random.normal(key, (self.width, self.width))


# ------------------------------------------------------------------------------------------------------- memory


def in_a_pipeline(schedule, x, **options):
    stages = stages_of([LayerSpec(Block)] * 2 * schedule.num_stages, schedule)
    batch = split_batch(x, x, schedule.num_microbatches)
    return train_batch(schedule, stages, batch, mean_squares, **options)


X = np.random.default_rng(0).normal(size=(32, 16, D))


def test_bytes_held_are_those_of_the_vjp():
    """What F keeps is part of what `saved_tensors` lists: no weights, nothing that is cheap to make again. At the end
    nothing is held, and the most is what the simulation says."""
    schedule = zb_h1(3, 4)
    trace = run(in_a_pipeline, Mesh(pp=3), schedule, X, out_specs=(P(), P("pp")), keep_values=0).trace

    def middle(params, x):
        for layer in params:
            x = Block()(layer, x)
        return x

    params = begun([LayerSpec(Block)] * 2)
    kept = saved_tensors(middle, params, jnp.asarray(X[:8]))
    predicted = simulate(schedule, measured_costs(schedule, trace))
    assert trace.peak_bytes == pytest.approx(predicted.peak_bytes)
    for rank in range(3):
        _, held = measured_strip(predicted, rank, trace)
        assert held[-1] == 0 and len(held) == 1 + 12
        assert rank != 1 or 0.5 * kept.bytes < held[1] < kept.bytes


def text_of(fn, mesh):
    """What XLA has made of a program."""
    compiled, _ = program_of(fn, mesh, None, None, "simulated").compiled(fn, ())
    return str(compiled.jitted.lower(compiled.key(0)).compile().as_text())


def test_what_xla_allocates_falls_with_the_schedule():
    """GPipe keeps 8 microbatches, 1F1B 2, and no more than their slots; and XLA copies no buffer to write into it."""
    x, w = np.ones((8 * 64, 32)), np.ones((32, 32))

    def wide(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return x

    def program(schedule, **options):
        return train_batch(schedule, (wide, jnp.asarray(w)), split_batch(x, x, 8), mean_squares, **options)

    one, found = 64 * 32 * 8, {}
    for rule in (gpipe, one_f_one_b):
        this = partial(program, rule(2, 8))
        found[rule] = temporary_bytes(this, Mesh(pp=2))
        copies = re.findall(rf"f64\[{8 if rule is gpipe else 2},64,32\]\S* copy\(", text_of(this, Mesh(pp=2)))
        assert len(copies) <= 5  # of zeros, before the loop
        slots = run(this, Mesh(pp=2), keep_values=0).trace.peak_bytes.max()
        # of each of the 4 layers its tanh; and what enters, where it is not the batch's own
        assert slots == one * (8 * 5 if rule is gpipe else 2 * 4)
        inputs, inbox, outside = 2 * 8 * one, 8 * one, 12 * one
        assert slots < found[rule] < slots + inputs + inbox + outside
    assert found[gpipe] > 2 * found[one_f_one_b]
    assert temporary_bytes(partial(program, checkpoint_every=1), Mesh(pp=2), gpipe(2, 8)) < 0.5 * found[gpipe]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_slots_are_the_peak_of_the_schedule(rule):
    """Buffers are as long as the schedule keeps microbatches at once on its fullest rank, and no longer."""
    schedule = rule(4, 1 if rule is RULES["naive"] else 8).compute_only()
    buffer = Buffer((4,), Kind("float32", ()), 0)
    keeping = Keeping((buffer,), frozenset([buffer]), ())
    made = Plan(schedule, [0] * schedule.num_stages, [keeping])
    peak = simulate(schedule).peak_activations * schedule.stages_per_rank  # in microbatches of one stage
    assert made.stash[buffer] == max(peak)
    for row, most in zip(schedule.by_rank(), peak, strict=True):
        assert max(accumulate(keeping.change(action.kind) for action in row)) == 16 * most
    sent = sum(len(made.rounds[number]) for number in made.round_of.flat)
    assert sent == 2 * (schedule.num_stages - 1) * schedule.num_microbatches  # each cut, each way; nothing else


# ------------------------------------------------------------------------------------------------ the split, FLOPs


@jax.custom_vjp
def scaled(x, w):
    return x * w


scaled.defvjp(lambda x, w: (x * w, (x, w)), lambda kept, dy: (dy * kept[1], (dy * kept[0]).sum((0, 1))))


def attention(w, x):
    q, k, v = jnp.split(jax.nn.standardize(x) @ w["qkv"], 3, -1)
    shares = jax.nn.softmax(jnp.where(jnp.tri(x.shape[1], dtype=bool), q @ k.mT, -jnp.inf))
    x = x + shares @ v @ w["out"]
    return x + jax.nn.gelu(jax.nn.standardize(x) * w["gain"] @ w["up"] + w["bias"]) @ w["down"]


def used_twice(w, x):
    return jnp.tanh(jnp.tanh(x @ w["mix"].T @ w["mix"]) @ w["out"] + x @ w["out"])


def looped(w, x):
    return lax.scan(lambda x, _: (jnp.tanh(x @ w["out"]), None), x, None, length=3)[0] @ w["out"]


def normed(w, x):
    out = w["out"] / jnp.linalg.norm(w["out"], axis=0)
    return scaled(x @ out, w["gain"])[..., ::-1] @ w["out"]


def constant(w, x):
    return x * 1.0


SHAPES = {
    "qkv": (D, 3 * D), "mix": (D, D), "out": (D, D), "up": (D, 2 * D), "bias": (2 * D,), "down": (2 * D, D),
    "gain": (D,),
}  # fmt: skip
KINDS_OF_STAGES = [attention, used_twice, looped, normed, constant]


@pytest.mark.parametrize("function, is_first, every", pairs(KINDS_OF_STAGES, [False, True], [None, 1]))
def test_i_and_w_are_b_in_two_parts(function, is_first, every):
    """The same gradients for the same FLOPs, though W takes only what it needs; and all of it without weights."""
    w = dict(zip(SHAPES, drawn(jax.random.key(0), *SHAPES.values())))
    x, dy = drawn(jax.random.key(1), (2, 5, D), (2, 5, D))

    def program():
        mine = jax.tree.map(lambda leaf: vary(leaf, ("pp",)), (w, x, dy))
        stage = Stage((Layer(function, bare=True),), 1, every)
        zero = vary(jnp.int32(0), ("pp",))
        given = Given([mine[0]], (mine[1],) if is_first else None, None, zero, zero, None)
        about = traced(stage, given, () if is_first else (mine[1],), None, ("pp",))
        passes = Passes(about)
        known = dict(zip(about.fixed, given.flat()[0])) | dict(zip(about.arriving, mine[1:2]))
        outputs = passes.forward(known)
        known |= dict(zip(passes.saved, outputs[1:])) | dict(zip(about.ends, mine[2:]))
        first = len(about.input_grads)
        whole, chain = passes.backward(known), passes.input_grad(known)
        after = dict(zip(passes.left, chain[first + len(passes.early) :]))
        late = passes.weight_grad({var: known[var] for var in (*about.fixed, *passes.outlasting)} | after)
        grads = dict(zip(passes.early, chain[first:])) | dict(zip(passes.late, late))
        flops.update(F=passes.forward, B=passes.backward, I=passes.input_grad, W=passes.weight_grad)
        return outputs[0], whole, [*chain[:first], *(grads[n] for n in passes.trained)], passes.trained

    flops = {}
    y, whole, parts, numbers = run(program, Mesh(pp=1)).per_rank[0]
    want_y, pull = jax.vjp(function, w, x)
    dw, dx = pull(dy)
    leaves = jax.tree.leaves(dw)
    want = [*([] if is_first else [dx]), *(leaves[int(n)] for n in numbers)]
    assert all(not leaf.any() for n, leaf in enumerate(leaves) if n not in [int(n) for n in numbers])
    for got in (whole, parts):
        for a, b in zip([y, *got], [want_y, *want], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    products = {kind: dot_flops(part) for kind, part in flops.items()}
    assert products["I"] + products["W"] == products["B"]
    if function in (attention, used_twice, normed):
        of_scores = 2 * (2 * 2 * 5 * 5 * D) if function is attention else 0  # which are products of no weights
        of_weights = products["F"] - of_scores
        if is_first:  # where W also walks what only the lowest weights need
            assert products["W"] >= of_weights
        else:
            assert products["W"] == of_weights
            assert every or products["I"] == products["F"] + of_scores


def dot_flops(part):
    """FLOPs of the matrix products among a part's equations."""
    total = 0
    for eqn in part.equations:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += 2 * eqn.outvars[0].aval.size * int(np.prod([eqn.invars[0].aval.shape[d] for d in contracted]))
    return total


# ------------------------------------------------------------------------------------------------------- errors


def refused(
    words, error: type[Exception] = ScheduleError, schedule=None, stages=None, batch=None, loss=mean_squares, **options
):
    schedule = schedule or one_f_one_b(2, 2)
    x = jnp.ones((2, 4))
    stages = stages or [LayerSpec(Linear)] * 2

    def program():
        made = stages if isinstance(stages, tuple) else stages_of(stages, schedule, bounds=range(len(stages) + 1))
        return train_batch(schedule, made, [(x, x)] * 2 if batch is None else batch, loss, **options)

    with pytest.raises(error, match=words):
        run(program, Mesh(pp=2))


@dataclass(frozen=True)
class Linear:
    dtype: str = "float64"

    def init(self, key):
        return {"weight": jnp.ones((4, 4), self.dtype)}

    def __call__(self, params, x):
        return x @ params["weight"]


def test_what_does_not_fit_is_told_in_words():
    x, w = jnp.ones((2, 4)), jnp.ones((4, 4))
    refused("for 3 ranks, but axis 'pp' has 2; make the schedule with ranks=2", schedule=one_f_one_b(3, 2))
    refused("the schedule has 2 microbatches, but 1 were given", batch=[(x, x)])
    refused("must be a pair", batch=[x, x])
    refused(
        r"microbatch 1 is float64 \[3, 4\], and microbatch 0 float64 \[2, 4\]; one compiled",
        ShapeError,
        batch=[(x, x), (jnp.ones((3, 4)), x)],
    )
    refused("holds 2 stages; with a function give a list", stages=(linear, w), schedule=zb_v(2, 2))
    refused("must have parameters of one structure", stages=(linear, [w, (w,)]), schedule=zb_v(2, 2))
    refused("takes stages_of", TypeError, stages=(w, w))
    refused(r"loss of a microbatch is a float64 array \[2, 4\]; it must be one", ShapeError, loss=lambda y, t: y - t)
    refused("loss of a microbatch is a float;", ShapeError, loss=lambda y, t: 1.0)
    refused("stage 0 returned a dict; it must return an array", stages=[lambda x: {}, LayerSpec(Linear)])
    refused("stage 0 returned a tuple of .*, NoneType", stages=[lambda x: (x, None), LayerSpec(Linear)])
    refused("nothing that enters stage 1 is of floating point", stages=[lambda x: x > 0, lambda x: x * 1.0])
    refused("checkpoint_every is 0", checkpoint_every=0)
    refused("parameter .4, 4. is int32; parameters are trained", stages=[LayerSpec(Linear, "int32")] * 2)
    refused("tied names stage 5; there are stages 0 to 1", tied=[((0, "0.weight"), (5, "0.weight"))])
    refused("'wait' of stage 0, which it does not have; it has 0.weight", tied=[((0, "wait"), (1, "0.weight"))])
    for wrong in ["weight"], "weight", [(0, "weight")], [[("weight", 0)]]:
        refused(r"where it must say \(stage, name\), a list of them for each parameter", tied=wrong)
    refused("layer 1 is 'relu', which cannot be called; a layer is a LayerSpec", TypeError, stages=[Linear(), "relu"])
    refused(
        "copies must have one shape",
        stages=[LayerSpec(Linear), LayerSpec(Linear, "float32")],
        tied=[((0, "0.weight"), (1, "0.weight"))],
    )


def test_what_types_have_lost_is_noticed():
    """Parameters that were the same along tp, and come in as if they differed: their gradients would be wrong."""
    schedule, mesh = one_f_one_b(2, 2), Mesh(pp=2, tp=2)
    begin = run(lambda: stages_of([LayerSpec(Linear)] * 2, schedule), mesh, out_specs=P("pp")).value

    def step(stages):
        return train_batch(schedule, stages, [(jnp.ones((2, 4)), jnp.ones((2, 4)))] * 2, mean_squares)

    with pytest.raises(ShapeError, match="parameters differ along 'tp', where they were made to differ along 'pp'"):
        run(step, mesh, begin, in_specs=P(("pp", "tp")))


# ------------------------------------------------------------------------------------------------------- traces


def test_times_on_the_clock_of_a_cluster():
    """F, B as events with FLOPs; a tick costs its slowest rank, so the prediction of a schedule in lock-step holds."""
    schedule, w = one_f_one_b(2, 4), jnp.ones((64, 64), jnp.float32)

    def program():
        x = jnp.ones((32, 64), jnp.float32)
        return train_batch(schedule, (linear, w), [(x, x)] * 4, mean_squares)

    trace = run(program, Mesh(pp=2), cluster="h100", keep_values=0).trace
    flops = trace.select(rank=0, op="F0").column("flops")
    assert flops.tolist()[0] >= 2 * 32 * 64 * 64
    costs = measured_costs(schedule, trace)
    assert costs.unit == "s"
    beside = compare(simulate(schedule, costs, lockstep=True), trace)
    assert abs(beside.residual) < 0.02 * beside.makespan
    assert compare(schedule, trace).residual >= 0  # free ranks would not be slower
