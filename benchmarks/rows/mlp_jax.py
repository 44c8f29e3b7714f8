"""An MLP step in JAX, split over 8 simulated ranks, compared with the dense one, jitted, on the same cores."""

from __future__ import annotations

import numpy as np

from benchmarks.table import Row, in_turns, seconds
from tplab import Mesh, P
from tplab.jax import all_reduce, run

D, F, B, NUM_RANKS, REPETITIONS = 1024, 4096, 512, 8, 9
SPECS = (P(), P(None, "tp"), P("tp", None))


def measure() -> list[Row]:
    random = np.random.default_rng(0)
    x = random.standard_normal((B, D), np.float32)
    a = random.standard_normal((D, F), np.float32) / np.float32(D**0.5)
    b = random.standard_normal((F, D), np.float32) / np.float32(F**0.5)
    mesh = Mesh(tp=NUM_RANKS)
    # Before JAX is first used: as many devices as ranks. Weights are placed where they are used, as in training.
    placed = run(lambda *tensors: tensors, mesh, x, a, b, in_specs=SPECS, out_specs=SPECS).value

    import jax
    import jax.numpy as jnp

    def step(leave):
        def loss(x, a, b):
            return (leave(jnp.tanh(x @ a) @ b) ** 2).mean()

        return jax.value_and_grad(loss, argnums=(0, 1, 2))

    split_step = step(lambda partial: all_reduce(partial, "tp"))
    dense_step = jax.jit(step(lambda whole: whole))
    on_one = [jax.device_put(tensor, jax.devices()[0]) for tensor in (x, a, b)]

    def dense():
        return jax.block_until_ready(dense_step(*on_one))

    def split():
        out = run(split_step, mesh, *placed, in_specs=SPECS, out_specs=(P(), SPECS))
        return jax.block_until_ready(out.value)

    for got, expected in zip(jax.tree.leaves(split()), jax.tree.leaves(dense())):  # a fast wrong answer is no figure
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)  # float32, sums in another order
    ratio, ours, theirs = in_turns(lambda: seconds(split), lambda: seconds(dense), REPETITIONS)
    measured = f"{ratio:.2f} ({ours * 1e3:.0f} ms / {theirs * 1e3:.0f} ms), a call of run each"
    what = f"MLP step (D {D}, F {F}, B {B}, forward + backward), 8 simulated ranks / dense, JAX"
    return [Row(what, "<= 0.9", measured, ratio <= 0.9)]
