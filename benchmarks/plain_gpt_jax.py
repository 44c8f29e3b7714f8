"""The GPT in plain jax.numpy, unsharded, to compare the sharded one with. `jax.jit` can shard it by itself.

params = shard_params(params, GPT(config).specs, Mesh(tp=4))
step = jax.jit(jax.grad(partial(plain_loss, config=config)))
collectives_in(step, params, ids, targets)                        # what XLA inserts
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from tplab.errors import ShapeError
from tplab.jax.layers.parameters import Params
from tplab.models.gpt import GPTConfig


def plain_logits(params: Params, ids: Array, config: GPTConfig) -> Array:
    """ids [B, S]   ->   logits [B, S, V]: GPT(config) on one rank, without tplab, with the same parameters.

    Only for a GPT like GPT-2: LayerNorm, GeLU by its tanh formula, biases, a key for each query head; no dropout.
    """
    kind = config.norm, config.activation, config.bias, config.num_kv_heads in (None, config.num_heads)
    if kind != ("layer", "gelu_tanh", True, True):
        raise ShapeError(f"plain_logits is for models like GPT-2, with GPTConfig's defaults, not for {config}")
    x = params["embedding"]["weight"][ids] + params["positions"]["weight"][: ids.shape[1]]
    for number in range(config.num_layers):
        block = params["blocks"][str(number)]
        x = x + _attention(block["attention"], _norm(block["norm_1"], x), config.num_heads)
        hidden = jax.nn.gelu(_linear(block["mlp"]["up"], _norm(block["norm_2"], x)), approximate=True)
        x = x + _linear(block["mlp"]["down"], hidden)
    return _norm(params["norm"], x) @ params["embedding"]["weight"].T


def plain_loss(params: Params, ids: Array, targets: Array, config: GPTConfig) -> Array:
    """The mean cross-entropy of targets [B, S]."""
    logits = plain_logits(params, ids, config)
    of_target = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - of_target).mean()


def _linear(layer: Params, x: Array) -> Array:
    return x @ layer["weight"].T + layer["bias"]


def _norm(layer: Params, x: Array) -> Array:
    return jax.nn.standardize(x, epsilon=1e-5) * layer["weight"] + layer["bias"]


def _attention(layer: Params, x: Array, num_heads: int) -> Array:
    q, k, v = (_linear(layer[name], x).reshape(*x.shape[:2], num_heads, -1) for name in ("query", "key", "value"))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    is_seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    shares = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), -1)
    return _linear(layer["output"], jnp.einsum("bhst,bthd->bshd", shares, v).reshape(x.shape))
