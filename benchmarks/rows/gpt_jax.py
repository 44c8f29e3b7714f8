"""A GPT training step in JAX on 4 simulated ranks, compared with the model unsharded, jitted, on the same cores."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.plain_gpt_jax import plain_loss
from benchmarks.table import Row, in_turns, seconds
from tplab import Mesh, P
from tplab.jax import GPT, GPTConfig, run

CONFIG = GPTConfig(vocab_size=1024, width=256, num_layers=4, num_heads=4, context=128)
BATCH, NUM_RANKS, REPETITIONS = 8, 4, 7


def measure() -> list[Row]:
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (BATCH, CONFIG.context + 1))
    mesh, models = Mesh(tp=NUM_RANKS), (GPT(CONFIG), GPT(CONFIG, sequence_parallel=True))
    model = models[0]
    # Before JAX is first used: as many devices as ranks.
    batch = run(lambda x: x, mesh, ids, in_specs=(P(),), out_specs=P()).value

    import jax
    import optax

    optimizer = optax.adamw(1e-3)
    whole = model.init(jax.random.key(0))
    memory = optimizer.init(whole)
    memory_specs = optax.tree_utils.tree_map_params(
        optimizer, lambda _, spec: spec, memory, model.specs, transform_non_params=lambda _: P()
    )
    specs = (model.specs, memory_specs, P())

    def step_of(loss_of: Any) -> Any:
        def step(params: Any, memory: Any, ids: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_of)(params, ids[:, :-1], ids[:, 1:])
            updates, memory = optimizer.update(grads, memory, params)
            return optax.apply_updates(params, updates), memory, loss

        return step

    split_steps = [step_of(model.loss) for model in models]
    plain_step = jax.jit(step_of(partial(plain_loss, config=CONFIG)))
    on_one = jax.device_put((whole, memory, ids), jax.devices()[0])
    # Parameters are placed where they are used, as in training.
    placed = run(lambda *tensors: tensors, mesh, whole, memory, batch, in_specs=specs, out_specs=specs).value

    def plain() -> Any:
        return jax.block_until_ready(plain_step(*on_one))

    def split(step: Any) -> Any:
        out = run(step, mesh, *placed, in_specs=specs, out_specs=(model.specs, memory_specs, P()))
        return jax.block_until_ready(out.value)

    for step in split_steps:
        for got, expected in zip(jax.tree.leaves(split(step)), jax.tree.leaves(plain())):
            # A fast wrong answer is no figure. float32; if a gradient is only rounding (the bias of key), AdamW's first
            # step may have either sign.
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=2.1e-3)
    (without, *_), (ratio, ours, theirs) = (
        in_turns(lambda step=step: seconds(lambda: split(step)), lambda: seconds(plain), REPETITIONS)
        for step in split_steps
    )
    measured = f"{ratio:.2f} ({ours * 1e3:.0f} ms / {theirs * 1e3:.0f} ms), a call of run each, sequence-parallel; "
    measured += f"{without:.2f} without, where every rank computes all norms"
    what = "GPT training step (width 256, 4 layers, 4 heads, batch 8 x 128 tokens), "
    what += "4 simulated ranks / unsharded, JAX"
    return [Row(what, "<= 1.25", measured, ratio <= 1.25)]
