"""A batch in JAX's pipeline executor: its compilation, and its step compared with plain gradient accumulation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.table import Row, in_turns, seconds
from tplab import Mesh, P
from tplab.pipeline.partition import LayerSpec
from tplab.schedules import one_f_one_b

RANKS, MICROBATCHES, REPETITIONS = 4, 8, 7
WIDTH, HEADS, WORDS, LENGTH, SEQUENCES = 256, 4, 512, 128, 4


@dataclass(frozen=True)
class Words:
    def init(self, key: Any) -> Any:
        import jax

        return jax.random.normal(key, (WORDS, WIDTH))

    def __call__(self, weight: Any, ids: Any) -> Any:
        return weight[ids]


@dataclass(frozen=True)
class Linear:
    rows: int
    columns: int

    def init(self, key: Any) -> Any:
        import jax

        return jax.random.normal(key, (self.rows, self.columns)) / self.rows**0.5

    def __call__(self, weight: Any, x: Any) -> Any:
        return x @ weight


@dataclass(frozen=True)
class Block:
    """Norm, attention, norm, MLP."""

    def init(self, key: Any) -> Any:
        import jax

        d = WIDTH
        shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
        keys = jax.random.split(key, len(shapes))
        return {name: jax.random.normal(k, s) / s[0] ** 0.5 for k, (name, s) in zip(keys, shapes.items())}

    def __call__(self, w: Any, x: Any) -> Any:
        import jax
        import jax.numpy as jnp

        batch, length, _ = x.shape
        heads = (jax.nn.standardize(x) @ w["qkv"]).reshape(batch, length, HEADS, -1)
        q, k, v = jnp.split(heads, 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        shares = jax.nn.softmax(jnp.where(jnp.tri(length, dtype=bool), scores, -1e30))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(jax.nn.standardize(x) @ w["up"]) @ w["down"]


def tanh(x: Any) -> Any:
    import jax.numpy as jnp

    return jnp.tanh(x)


def cross_entropy(logits: Any, targets: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def mean_squares(y: Any, target: Any) -> Any:
    return ((y - target) ** 2).mean()


def measure() -> list[Row]:
    random = np.random.default_rng(0)
    x = random.normal(size=(MICROBATCHES * 64, WIDTH)).astype(np.float32)
    mlp = [LayerSpec(Linear, WIDTH, 4 * WIDTH), tanh, LayerSpec(Linear, 4 * WIDTH, WIDTH)] * RANKS
    ids = random.integers(0, WORDS, (MICROBATCHES * SEQUENCES, LENGTH))
    gpt = [LayerSpec(Words), *[LayerSpec(Block)] * RANKS, LayerSpec(Linear, WIDTH, WORDS)]
    return [
        *_rows("MLP (width 256, batch 8 x 64)", mlp, (0, 3, 6, 9, 12), x, x[::-1].copy(), mean_squares),
        *_rows("GPT (width 256, 4 blocks, batch 8 x 512 tokens)", gpt, (0, 2, 3, 4, 6), ids, (ids + 1) % WORDS,
               cross_entropy),
    ]  # fmt: skip


def _rows(
    what: str, layers: list[Any], bounds: tuple[int, ...], x: np.ndarray, y: np.ndarray, loss: Callable[..., Any]
) -> list[Row]:
    from tplab.jax import run, split_batch, stages_of, train_batch

    schedule, mesh = one_f_one_b(RANKS, MICROBATCHES), Mesh(pp=RANKS)
    # Before JAX is first used: as many devices as ranks. Weights are placed where they are used, as in training.
    stages = run(partial(stages_of, layers, schedule, bounds=bounds), mesh, out_specs=P("pp")).value
    x, y = run(lambda *batch: batch, mesh, x, y, out_specs=P()).value

    import jax
    import jax.numpy as jnp

    def step(stages: Any, x: Any, y: Any) -> Any:
        return train_batch(schedule, stages, split_batch(x, y, MICROBATCHES), loss)

    def pipelined() -> Any:
        out = run(step, mesh, stages, x, y, in_specs=(P("pp"), P(), P()), out_specs=(P(), P("pp")))
        return jax.block_until_ready(out.value)

    built = [layer.build() if isinstance(layer, LayerSpec) else layer for layer in layers]
    params = [layer for number in range(RANKS) for layer in stages[number]]

    def of_one(params: Any, x: Any, y: Any) -> Any:
        for layer, weights in zip(built, params):
            x = layer(weights, x) if hasattr(layer, "init") else layer(x)
        return loss(x, y) / MICROBATCHES

    def accumulated(params: Any, x: Any, y: Any) -> Any:
        def add(total: Any, pair: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(of_one)(params, *pair)), None

        batches = jax.tree.map(lambda x: x.reshape(MICROBATCHES, -1, *x.shape[1:]), (x, y))
        return jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), batches)[0]

    plain_step = jax.jit(accumulated)
    on_one = jax.device_put(jax.tree.map(np.asarray, (params, x, y)), jax.devices()[0])

    def plain() -> Any:
        return jax.block_until_ready(plain_step(*on_one))

    begin = time.perf_counter()
    mean, grads = pipelined()
    compiling = time.perf_counter() - begin
    begin = time.perf_counter()
    want, by_layer = plain()
    unpipelined = time.perf_counter() - begin
    np.testing.assert_allclose(mean, want, rtol=1e-5)  # a fast wrong answer is no figure; float32
    found = [layer for number in range(RANKS) for layer in grads[number]]
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(by_layer), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    ratio, ours, theirs = in_turns(lambda: seconds(pipelined), lambda: seconds(plain), REPETITIONS)
    compiling, unpipelined = compiling - ours, unpipelined - theirs
    title = f"JAX pipeline, 1F1B, p {RANKS}, m {MICROBATCHES}, {what}"
    return [
        Row(
            f"{title}: first call less a step, which is compiling", "<= 3 s",
            f"{compiling:.1f} s, unpipelined {unpipelined:.1f} s", compiling <= 3,
        ),
        Row(
            f"{title}: step / unpipelined accumulation, jitted, on the same cores", "<= 1.5",
            f"{ratio:.2f} ({ours * 1e3:.0f} ms / {theirs * 1e3:.0f} ms), a call of run each", ratio <= 1.5,
        ),
    ]  # fmt: skip
