"""The GPT against one written out in plain torch: logits, loss, every gradient, AdamW's steps; and what it sends."""

import inspect
import math
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.frameworks import FRAMEWORKS, Framework, in_both
from tests.sharded import close, double, flat, nested, numbers
from tplab import Mesh, P
from tplab.errors import ShapeError
from tplab.models.gpt import GPTConfig, gpt_parameters, gpt_specs

BATCH, SEQUENCE, VOCABULARY = 2, 24, 11


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


BOTH_WAYS = [(False,), (True,)]  # sequence_parallel


def config_for(num_ranks, **options):
    """Two heads at least, and as many as the ranks can share."""
    heads = max(num_ranks, 2)
    defaults = {"width": 2 * heads, "num_layers": 2, "num_heads": heads, "context": SEQUENCE}
    return GPTConfig(VOCABULARY, **{**defaults, **options})


def state_of(config):
    """Every parameter far from where it starts, so that a wrong gradient shows."""
    state = {}
    for number, (name, about) in enumerate(gpt_parameters(config).items()):
        state[name] = about.mean + numbers(*about.shape, seed=number) / math.sqrt(about.shape[-1])
    return state


def batch_of(config, length=SEQUENCE):
    random = np.random.default_rng(3)
    return random.integers(0, config.vocab_size, (2, BATCH, length))


def dense_logits(config, state, ids):
    """In plain torch, on one rank."""

    def norm(name, x):
        weight = state[name + ".weight"]
        if config.norm == "layer":
            return F.layer_norm(x, weight.shape, weight, state[name + ".bias"], 1e-5)
        return F.rms_norm(x, weight.shape, weight, 1e-6)

    def linear(name, x):
        return F.linear(x, state[name + ".weight"], state.get(name + ".bias"))

    def attention(name, x):
        q, k, v = (
            linear(f"{name}.{n}", x).unflatten(-1, (-1, config.width // config.num_heads)).transpose(1, 2)
            for n in ("query", "key", "value")
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return linear(name + ".output", y.transpose(1, 2).flatten(2))

    def mlp(name, x):
        hidden = linear(name + ".up", x)
        if config.activation == "swiglu":
            return linear(name + ".down", F.silu(linear(name + ".gate", x)) * hidden)
        return linear(name + ".down", F.gelu(hidden, approximate="tanh" if "tanh" in config.activation else "none"))

    x = state["embedding.weight"][ids] + state["positions.weight"][: ids.shape[1]]
    for number in range(config.num_layers):
        block = f"blocks.{number}"
        x = x + attention(f"{block}.attention", norm(f"{block}.norm_1", x))
        x = x + mlp(f"{block}.mlp", norm(f"{block}.norm_2", x))
    return norm("norm", x) @ state["embedding.weight"].T


def dense(config, state, ids, targets):
    """Logits, loss and gradients."""
    params = {name: torch.tensor(value, requires_grad=True) for name, value in state.items()}
    logits = dense_logits(config, params, torch.tensor(ids))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
    grads = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
    return logits.detach().numpy(), loss.item(), {n: g.numpy() for n, g in zip(params, grads, strict=True)}


def trained(config, state, ids, targets):
    """The parameters after three steps of AdamW."""
    params = {name: torch.tensor(value, requires_grad=True) for name, value in state.items()}
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2, eps=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        logits = dense_logits(config, params, torch.tensor(ids))
        F.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten()).backward()
        optimizer.step()
    return {name: p.detach().numpy() for name, p in params.items()}


def pieces(fw, state, specs):
    """Inside a rank's program: its piece of the whole state."""
    if fw.name == "torch":
        from tplab.torch.layers.parameters import piece_of as piece
    else:
        from tplab.jax.layers.parameters import here as piece
    return {name: piece(value, specs[name]) for name, value in state.items()}


def evaluated(fw, mesh, config, state, ids, targets, axis="tp", **options):
    """Logits, loss, and gradients joined to whole ones."""
    specs = gpt_specs(config, axis)

    def program(state, ids, targets):
        mine, model = pieces(fw, state, specs), fw.lab.GPT(config, axis, **options)
        if fw.name == "torch":
            model = model.double()
            model.load_state_dict(mine)
            loss = model.loss(ids, targets)
            loss.backward()
            with torch.no_grad():
                return model(ids), loss.detach(), {name: p.grad for name, p in model.named_parameters()}
        import jax

        loss, grads = jax.value_and_grad(lambda mine: model.loss(nested(mine), ids, targets))(mine)
        return model(nested(mine), ids), loss, grads

    args = {name: fw.array(value) for name, value in state.items()}, fw.array(ids), fw.array(targets)
    out = fw.lab.run(program, mesh, *args)
    ranks = [(fw.numpy(z), float(loss), {n: fw.numpy(g) for n, g in grads.items()}) for z, loss, grads in out.per_rank]
    for _, loss, _ in ranks:
        assert abs(loss - ranks[0][1]) < 1e-14
    logits = np.concatenate([z for z, _, _ in ranks], -1)[..., :VOCABULARY]
    return logits, ranks[0][1], joined([grads for _, _, grads in ranks], specs)


def joined(states, specs):
    """Of pieces along tp; copies must agree."""
    whole = {}
    for name, spec in specs.items():
        if spec.axis_names:
            dim = next(dim for dim, entry in enumerate(spec) if entry)
            whole[name] = np.concatenate([state[name] for state in states], dim)
            whole[name] = whole[name][:VOCABULARY] if name == "embedding.weight" else whole[name]
        else:
            for state in states:
                np.testing.assert_allclose(state[name], states[0][name], rtol=1e-12, atol=1e-14, err_msg=name)
            whole[name] = states[0][name]
    return whole


def check(fw, num_ranks, config, **options):
    state, (ids, targets) = state_of(config), batch_of(config)
    want_logits, want_loss, want_grads = dense(config, state, ids, targets)
    with double(fw):
        logits, loss, grads = evaluated(fw, Mesh(tp=num_ranks), config, state, ids, targets, **options)
    close(logits, want_logits, "logits")
    close(loss, want_loss, "loss")
    assert grads.keys() == want_grads.keys()
    largest = max(np.abs(grad).max() for grad in want_grads.values())
    for name, want in want_grads.items():
        if name.endswith("key.bias"):  # zero but for rounding: softmax does not see it
            assert np.abs(grads[name]).max() < 1e-13 * largest
        else:
            close(grads[name], want, f"gradient of {name}")


@pytest.mark.parametrize(
    "fw, num_ranks, sequence_parallel",
    in_both(product([1, 2, 3, 4, 8], [False, True]), [(1, False), (3, True), (4, False), (8, True)]),
    indirect=["fw"],
)
def test_the_sharded_model_is_the_whole_one(fw, num_ranks, sequence_parallel):
    check(fw, num_ranks, config_for(num_ranks), sequence_parallel=sequence_parallel)


LLAMA = {"activation": "swiglu", "norm": "rms", "bias": False, "num_heads": 4, "num_kv_heads": 2, "width": 8}
OTHER = {"activation": "gelu", "norm": "rms", "hidden": 6, "num_layers": 1}


@pytest.mark.parametrize(
    "fw, options, sequence_parallel",
    in_both(product([LLAMA, OTHER], [False, True]), [(LLAMA, True), (OTHER, False)]),
    indirect=["fw"],
    ids=str,
)
def test_models_of_other_kinds(fw, options, sequence_parallel):
    check(fw, 2, config_for(2, **options), sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("fw, sequence_parallel", in_both(BOTH_WAYS, [(True,)]), indirect=["fw"])
def test_parameters_after_three_steps_of_adamw(fw, sequence_parallel):
    """eps is larger than the rounding of gradients that are zero, which AdamW would otherwise make steps of."""
    config = config_for(2, num_layers=1)
    state, (ids, targets) = state_of(config), batch_of(config)
    want, specs = trained(config, state, ids, targets), gpt_specs(config)

    def train(state, ids, targets):
        mine = pieces(fw, state, specs)
        model = fw.lab.GPT(config, sequence_parallel=sequence_parallel)
        if fw.name == "torch":
            model = model.double()
            model.load_state_dict(mine)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
            for _ in range(3):
                optimizer.zero_grad()
                model.loss(ids, targets).backward()
                optimizer.step()
            return dict(model.state_dict())
        import jax
        import optax

        optimizer = optax.adamw(1e-2, eps=1e-4, weight_decay=0.01)
        memory = optimizer.init(mine)
        for _ in range(3):
            grads = jax.grad(lambda mine: model.loss(nested(mine), ids, targets))(mine)
            updates, memory = optimizer.update(grads, memory, mine)
            mine = optax.apply_updates(mine, updates)
        return mine

    with double(fw):
        args = {name: fw.array(value) for name, value in state.items()}, fw.array(ids), fw.array(targets)
        states = fw.lab.run(train, Mesh(tp=2), *args).per_rank
        got = joined([{name: fw.numpy(x) for name, x in state.items()} for state in states], specs)
    for name, value in want.items():
        close(got[name], value, name)


# ------------------------------------------------------------------------------------------------------ what it costs


def gradients_trace(fw, config, sequence_parallel):
    """The trace of one forward and backward pass."""
    state, (ids, targets) = state_of(config), batch_of(config)
    specs = gpt_specs(config)

    def program(state, ids, targets):
        mine, model = pieces(fw, state, specs), fw.lab.GPT(config, sequence_parallel=sequence_parallel)
        if fw.name == "torch":
            model.load_state_dict(mine)
            model.loss(ids, targets).backward()
            return [p.grad for p in model.parameters()]
        import jax

        return jax.grad(lambda mine: model.loss(nested(mine), ids, targets))(mine)

    args = {n: fw.array(v.astype(np.float32)) for n, v in state.items()}, fw.array(ids), fw.array(targets)
    if fw.name == "jax":  # what is sent is known without numbers, and nothing is compiled for it
        import jax

        args = jax.eval_shape(lambda *args: args, *args)
    return fw.lab.run(program, Mesh(tp=2), *args, keep_values=0).trace


def sent(fw, num_layers, sequence_parallel):
    events = gradients_trace(fw, config_for(2, num_layers=num_layers, bias=False, norm="rms"), sequence_parallel)
    return [(event.op, event.bytes, event.shape) for event in events.select(kind="collective", rank=0).events]


def test_a_layer_communicates_four_times(fw):
    """Two sums forward and two backward, of the activations, and nothing else."""
    one, two = sent(fw, 1, False), sent(fw, 2, False)
    activation = BATCH * SEQUENCE * 4 * 4  # bytes: width 4, float32; a ring of 2 sends 2(R-1)/R = 1 of it
    assert two.count(("all_reduce", activation, (BATCH, SEQUENCE, 4))) == 2 + 2 * 4
    assert len(two) - len(one) == 4
    assert len(two) == 2 + 2 * 4 + 2  # embedding, head; four a layer; the loss's two


def test_sequence_parallelism_sends_the_same_bytes(fw):
    """A layer's four all_reduces become four all_gathers and four reduce_scatters; norms' gradients are more."""
    plain = [entry for entry in sent(fw, 2, False) if entry[0] != "all_gather"]
    split = [entry for entry in sent(fw, 2, True) if entry[2] != (4,)]  # without the norms' gradients
    large = lambda entries: sum(count for _, count, shape in entries if len(shape) == 3)  # noqa: E731
    assert large(plain) == large(split)
    ops = [op for op, _, shape in split if len(shape) == 3]
    assert ops.count("all_gather") == ops.count("reduce_scatter") == 2 * 4 + 2


# ------------------------------------------------------------------------------------------------------ how it begins


def test_one_seed_gives_one_model_on_every_mesh(fw):
    config = GPTConfig(VOCABULARY, 8, 2, 4, 16, activation="swiglu")
    specs = gpt_specs(config)

    def program():
        model = fw.lab.GPT(config)
        if fw.name == "torch":
            return dict(model.state_dict())
        import jax

        return flat(model.init(jax.random.key(0)))

    states = {}
    for num_ranks in (1, 4):
        ranks = fw.lab.run(program, Mesh(tp=num_ranks)).per_rank
        states[num_ranks] = joined([{n: fw.numpy(x) for n, x in state.items()} for state in ranks], specs)
    for state in states.values():
        assert state.keys() == specs.keys()
        for name, value in states[1].items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)
    whole = states[1]
    for name, (shape, _, mean, deviation) in gpt_parameters(config).items():
        assert whole[name].shape == shape
        if deviation:  # within five deviations of what as many numbers give
            assert abs(whole[name].std() / deviation - 1) < 5 / math.sqrt(2 * whole[name].size), name
        else:
            assert (whole[name] == mean).all(), name
    if fw.name == "jax":
        import jax

        model = fw.lab.GPT(config)
        assert flat(model.specs) == specs
        for name, value in flat(model.init(jax.random.key(0))).items():
            # where XLA compiles nothing it rounds once more: one unit in float32's last place
            np.testing.assert_allclose(fw.numpy(value), whole[name], rtol=3e-7, err_msg=name)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_keeps_copies_the_same(fw, sequence_parallel):
    """With a mask of each rank's own, gradients of what all hold would differ."""
    config = config_for(2, dropout=0.5, num_layers=1)
    state, (ids, targets) = state_of(config), batch_of(config)
    specs = gpt_specs(config)

    def program(state, ids, targets):
        mine, model = pieces(fw, state, specs), fw.lab.GPT(config, sequence_parallel=sequence_parallel)
        if fw.name == "torch":
            model = model.double()
            model.load_state_dict(mine)
            loss = model.loss(ids, targets)
            loss.backward()
            without = model.eval().loss(ids, targets).detach()
            return loss.detach(), without, {name: p.grad for name, p in model.named_parameters()}
        import jax

        loss_of = lambda mine, key: model.loss(nested(mine), ids, targets, key=key)  # noqa: E731
        loss, grads = jax.value_and_grad(loss_of)(mine, jax.random.key(0))
        return loss, loss_of(mine, None), grads

    with double(fw):
        args = {name: fw.array(value) for name, value in state.items()}, fw.array(ids), fw.array(targets)
        ranks = fw.lab.run(program, Mesh(tp=2), *args).per_rank
        joined([{n: fw.numpy(g) for n, g in grads.items()} for _, _, grads in ranks], specs)
        want = dense(config, state, ids, targets)[1]
        for loss, without, _ in ranks:
            assert abs(float(without) - want) < 1e-12
            assert abs(float(loss) - want) > 1e-3


# ---------------------------------------------------------------------------------------------------------- errors


def test_what_is_wrong_is_said(fw):
    def loss(config, ids):
        model = fw.lab.GPT(config)
        if fw.name == "torch":
            return model(ids)
        import jax

        return model(model.init(jax.random.key(0)), ids)

    ids = fw.array(batch_of(config_for(2))[0])
    for config, message in [
        (config_for(2, context=8), r"ids \[batch, sequence\] of up to 8 tokens, but got \[2, 24\]"),
        (config_for(3), r"num_heads is 3, which the 2 ranks|out_features is|hidden is"),
    ]:
        with pytest.raises(ShapeError, match=message):
            fw.lab.run(lambda ids, config=config: loss(config, ids), Mesh(tp=2), ids)
    for options, message in ({"norm": "batch"}, "norm is 'batch'"), ({"activation": "relu"}, "activation is 'relu'"):
        with pytest.raises(ValueError, match=message):
            config_for(2, **options)


def test_the_model_is_made_alike_in_both():
    twins = [inspect.signature(FRAMEWORKS[f]().lab.GPT.__init__).parameters for f in ("torch", "jax")]
    about = [[(p.name, p.kind, p.default, p.annotation) for p in list(twin.values())[1:]] for twin in twins]
    assert about[0] == about[1]


def test_specs_follow_the_axis():
    specs = gpt_specs(config_for(2), ("a", "b"))
    assert specs["blocks.1.mlp.down.weight"] == P(None, ("a", "b"))
    assert specs["blocks.1.mlp.down.bias"] == P()
