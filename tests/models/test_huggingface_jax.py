"""A GPT-2 of transformers, its weights in tplab's JAX GPT, sharded: logits, loss, gradients and AdamW's steps."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tplab.jax import GPT, gpt2_config, gpt2_params, run, shard_params  # isort: skip  # before JAX is used
import jax
import jax.numpy as jnp
import optax

from tests.sharded import close, flat, numbers
from tplab import Mesh, P
from tplab.errors import ShapeError, SpecError
from tplab.jax.private import in_float64
from tplab.models.gpt import GPTConfig

transformers = pytest.importorskip("transformers")

VOCABULARY = 101  # as 50257 it is odd, and no 2, 3 or 4 ranks share it
IDS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 7))


@pytest.fixture(autouse=True)
def double():
    with in_float64():
        yield


def hf_model(**options):
    """In float64, every parameter far from where it starts, so that a wrong one shows."""
    defaults = {"vocab_size": VOCABULARY, "n_embd": 24, "n_head": 12, "n_layer": 2, "n_positions": 16}
    config = transformers.GPT2Config(**{**defaults, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, **options})
    model = transformers.GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            noise = torch.tensor(numbers(*parameter.shape, seed=seed)) / math.sqrt(parameter.shape[-1])
            parameter.copy_(noise + ("ln_" in name and name.endswith("weight")))
    return model


def ours(model, mesh):
    """Our model, its parameters on the devices of the mesh, and the specs."""
    gpt = GPT(gpt2_config(model.config))
    return gpt, shard_params(gpt2_params(model.state_dict(), gpt.config), gpt.specs, mesh)


def logits_of(gpt, params, ids, mesh):
    out = run(gpt, mesh, params, ids, in_specs=(gpt.specs, P()), out_specs=P(None, None, "tp"))
    return np.asarray(out.value)[..., : gpt.config.vocab_size]


def without_padding(params, gpt):
    """Whole parameters by name, the vocabulary's padding taken off, which must be zeros."""
    whole = {name: np.asarray(x) for name, x in flat(params).items()}
    padded, num_words = whole["embedding.weight"], gpt.config.vocab_size
    assert not padded[num_words:].any()
    return {**whole, "embedding.weight": padded[:num_words]}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_logits_are_those_of_transformers(num_ranks):
    model, mesh = hf_model(), Mesh(tp=num_ranks)
    gpt, params = ours(model, mesh)
    with torch.no_grad():
        want = model(torch.tensor(IDS)).logits.numpy()
    close(logits_of(gpt, params, IDS, mesh), want, "logits")


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size": 50257, "n_embd": 12, "n_layer": 1},
        {"n_inner": 36, "activation_function": "gelu", "n_layer": 1},
    ],
    ids=str,
)
def test_models_of_other_kinds(options):
    model, mesh = hf_model(**options), Mesh(tp=4)
    gpt, params = ours(model, mesh)
    with torch.no_grad():
        want = model(torch.tensor(IDS)).logits.numpy()
    close(logits_of(gpt, params, IDS, mesh), want, "logits")


@pytest.mark.parametrize("num_ranks", [3])
def test_loss_gradients_and_three_steps_of_adamw(num_ranks):
    """eps is larger than the rounding of gradients that are zero (key's bias), which AdamW would make steps of."""
    model, mesh = hf_model(n_layer=1), Mesh(tp=num_ranks)
    gpt, params = ours(model, mesh)
    ids = torch.tensor(IDS)
    rules = optax.adamw(1e-2, eps=1e-4, weight_decay=0.01)

    def train(params, ids):
        def loss_of(params):
            return gpt.loss(params, ids[:, :-1], ids[:, 1:])

        def step(carry, _):  # compiled once for all three
            params, memory = carry
            loss, grads = jax.value_and_grad(loss_of)(params)
            updates, memory = rules.update(grads, memory, params)
            return (optax.apply_updates(params, updates), memory), (loss, grads)

        (params, _), (losses, grads) = jax.lax.scan(step, (params, rules.init(params)), length=3)
        return losses[0], jax.tree.map(lambda grad: grad[0], grads), params

    out = run(train, mesh, params, IDS, in_specs=(gpt.specs, P()), out_specs=(P(), gpt.specs, gpt.specs))
    loss, grads, trained = out.value

    def loss_in_torch():  # its own is computed in float32
        return F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    want = loss_in_torch()
    want.backward()
    close(loss, want.item(), "loss")
    named = dict(model.named_parameters())
    want_grads = flat(gpt2_params({name: p.grad for name, p in named.items()}, gpt.config))
    largest = max(np.abs(grad).max() for grad in want_grads.values())
    for name, got in without_padding(grads, gpt).items():
        if name.endswith("key.bias"):  # zero but for rounding: softmax does not see it
            assert np.abs(got).max() < 1e-13 * largest
        else:
            close(got, want_grads[name], f"gradient of {name}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss_in_torch().backward()
        optimizer.step()
    want_params = flat(gpt2_params(model.state_dict(), gpt.config))
    for name, got in without_padding(trained, gpt).items():
        close(got, want_params[name], name, 1e-10)


def test_any_array_that_numpy_reads_will_do():
    model = hf_model(n_layer=1)
    config, state = gpt2_config(model.config), model.state_dict()
    want = flat(gpt2_params(state, config))
    short = {name.removeprefix("transformer."): x.numpy() for name, x in state.items() if name != "lm_head.weight"}
    older = {**short, "h.0.attn.bias": np.tril(np.ones((1, 1, 16, 16)))}
    for given in (dict(model.named_parameters()), short, older):
        for name, x in flat(gpt2_params(given, config)).items():
            np.testing.assert_array_equal(x, want[name], err_msg=name)
    halves = flat(gpt2_params({name: x.bfloat16() for name, x in state.items()}, config))
    assert {x.dtype for x in halves.values()} == {jnp.dtype("float32")}
    assert gpt2_config(model.config.to_dict()) == config


def test_each_device_holds_its_piece():
    mesh = Mesh(tp=4)
    gpt, params = ours(hf_model(), mesh)
    for name, x in flat(params).items():
        spec = flat(gpt.specs)[name]
        shapes = {shard.data.shape for shard in x.addressable_shards}
        assert len(x.addressable_shards) == 4
        assert shapes == {tuple(n // 4 if place < len(spec) and spec[place] else n for place, n in enumerate(x.shape))}
    assert params["embedding"]["weight"].shape == (104, 24)
    assert params["positions"]["weight"].sharding.is_fully_replicated


def test_what_cannot_be_is_said():
    model = hf_model(n_layer=1)
    config, state = gpt2_config(model.config), dict(model.state_dict())
    for field, value in (("layer_norm_epsilon", 1e-6), ("scale_attn_by_inverse_layer_idx", True), ("resid_pdrop", 0.5)):
        with pytest.raises(ValueError, match=f"{field} is {value}"):
            gpt2_config({**model.config.to_dict(), field: value})
    with pytest.raises(ValueError, match="activation_function is 'relu'"):
        gpt2_config({**model.config.to_dict(), "activation_function": "relu"})
    with pytest.raises(SpecError, match=r"no 'ln_f.bias', and 1 of 16 names are missing"):
        gpt2_params({name: x for name, x in state.items() if name != "transformer.ln_f.bias"}, config)
    with pytest.raises(SpecError, match=r"'h.1.ln_1.weight', which a GPT-2 of 1 blocks does not have"):
        gpt2_params({**state, "h.1.ln_1.weight": np.ones(24)}, config)
    with pytest.raises(ValueError, match=r"lm_head.weight is not wte.weight"):
        gpt2_params({**state, "lm_head.weight": state["lm_head.weight"] + 1}, config)
    with pytest.raises(ShapeError, match=r"positions.weight would be \[16, 24\], but GPTConfig makes it \[8, 24\]"):
        gpt2_params(state, GPTConfig(VOCABULARY, 24, 1, 12, 8))
    with pytest.raises(SpecError, match="2 entries, and the parameter has 1 dims"):
        shard_params({"bias": jnp.ones(4)}, {"bias": P(None, "tp")}, Mesh(tp=2))
    with pytest.raises(SpecError, match="names axis 'pp'"):
        shard_params({"bias": jnp.ones(4)}, P("pp"), Mesh(tp=2))
