"""The classifier of asynchronous linear layers as one would write it with Flax: a module for each piece.

ParallelClassifier is compared with it. A ring brings the pieces of x, each goes through its own Dense, and the results
are added up; or a Dense makes each part of y, and a ring adds them up. Layers are stacked by nn.scan, and every
parameter has a dim for the model's ranks: kernels (3, 4, 128, 128), scales and biases (3, 4, 128).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import PartitionSpec


def ring_gather(x: Array, axis: str) -> list[Array]:
    """Every rank's x, in the order in which they arrive up the ring."""
    size = lax.axis_size(axis)
    pieces = [x]
    for _ in range(size - 1):
        x = lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])
        pieces.append(x)
    return pieces


def ring_scatter(parts: list[Array], axis: str) -> Array:
    """The sum of every rank's part for this one."""
    size = lax.axis_size(axis)
    total = parts[0]
    for part in parts[1:]:
        total = lax.ppermute(total, axis, [(i, (i + 1) % size) for i in range(size)]) + part
    return total


class AsyncDense(nn.Module):
    """One Dense per piece, to `features`: of the arriving pieces of x ("gather"), or of x for each part to send."""

    features: int
    axis: str
    mode: str
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        size = lax.axis_size(self.axis)
        first = nn.initializers.lecun_normal()
        dense = partial(
            nn.Dense,
            self.features,
            dtype=self.dtype,
            kernel_init=lambda *args: first(*args) * size**-0.5,
        )
        if self.mode == "gather":
            pieces = ring_gather(x, self.axis)
            return sum(dense(use_bias=k == 0, name=f"shard_{k}")(piece) for k, piece in enumerate(pieces))  # type: ignore
        parts = [dense(use_bias=k == size - 1, name=f"shard_{k}")(x) for k in range(size)]
        return ring_scatter(parts, self.axis)


class Block(nn.Module):
    """x + scatter(silu(gather(norm(x)))), as the body of a scan."""

    hidden: int
    axis: str
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, _: None) -> tuple[Array, None]:
        y = nn.RMSNorm(dtype=self.dtype, axis_name=self.axis, name="norm")(x)
        y = AsyncDense(self.hidden, self.axis, "gather", self.dtype, name="up")(y)
        y = AsyncDense(x.shape[-1], self.axis, "scatter", self.dtype, name="down")(nn.silu(y))
        return x + y, None


class Classifier(nn.Module):
    """x [..., I], the same on every rank of `axis`   ->   logits [..., C], the same on every rank."""

    width: int
    num_classes: int
    num_layers: int
    axis: str
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: Array) -> Array:
        here = self.width // lax.axis_size(self.axis)
        x = nn.Dense(here, dtype=self.dtype, name="input")(x)
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.num_layers)
        x, _ = blocks(here, self.axis, self.dtype, name="blocks")(x, None)
        logits = nn.Dense(self.num_classes, use_bias=False, dtype=self.dtype, name="output")(x)
        bias = self.param("bias", nn.initializers.zeros, (self.num_classes,))
        return lax.psum(logits + jnp.where(lax.axis_index(self.axis) == 0, bias, 0), self.axis)


def training(
    model: Classifier, mesh: jax.sharding.Mesh, optimizer: optax.GradientTransformation, data: str
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """init(key, x) -> (params, memory), and step(params, memory, x, labels) -> (params, memory, loss, accuracy).

    Both jitted, over a mesh along whose axis `data` the batch is split.
    """

    def each(change: Callable[..., Array], params: Any) -> Any:
        """Apply `change` to the dim of the ranks, which comes after that of the layers, if there is one."""
        places = {name: int(name == "blocks") for name in params}
        return {name: jax.tree.map(partial(change, axis=places[name]), part) for name, part in params.items()}

    def first(key: Any, x: Array) -> Any:
        params = each(jnp.expand_dims, model.init(jax.random.fold_in(key, lax.axis_index(model.axis)), x)["params"])
        return params, optimizer.init(params)

    def update(params: Any, memory: Any, x: Array, labels: Array) -> Any:
        def loss_of(params: Any) -> tuple[Array, Array]:
            applied: Any = model.apply({"params": each(jnp.squeeze, params)}, x)
            logits = applied.astype(jnp.float32)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            return lax.pmean(loss, data), lax.pmean((logits.argmax(-1) == labels).mean(), data)

        (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        changes, memory = optimizer.update(grads, memory, params)
        return optax.apply_updates(params, changes), memory, loss, accuracy

    P = PartitionSpec
    names = ("input", "blocks", "output", "bias")
    of_params = {name: P(None, model.axis) if name == "blocks" else P(model.axis) for name in names}
    state: Any = optimizer.init({name: jnp.zeros(()) for name in names})  # AdamW's, for the structure of the specs
    moments, *others = state
    specs = of_params, (moments._replace(count=P(), mu=of_params, nu=of_params), *others)
    init = jax.shard_map(first, mesh=mesh, in_specs=(P(), P()), out_specs=specs)
    step = jax.shard_map(update, mesh=mesh, in_specs=(*specs, P(data), P(data)), out_specs=(*specs, P(), P()))
    return jax.jit(init), jax.jit(step)
