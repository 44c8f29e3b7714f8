"""A training step of the overlapped classifier in JAX, compared with one written with Flax, a module per piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from benchmarks.table import Row, in_turns, seconds
from tplab import Mesh, P
from tplab.jax import ParallelClassifier, all_reduce, copy_to, run

INPUTS, WIDTH, CLASSES, LAYERS, BATCH = 784, 512, 10, 3, 128
MESH = Mesh(data=2, model=4)
UPDATES, REPETITIONS, COMPILATIONS = 17, 15, 3

Step = Callable[[Any, Any], Any]
"""(params, memory) -> (params, memory, loss, accuracy), on the one batch."""


def measure() -> list[Row]:
    run(lambda: 0, MESH)  # before JAX is first used: as many devices as ranks
    import jax

    random = np.random.default_rng(42)
    x = random.standard_normal((BATCH, INPUTS), np.float32)
    labels = random.integers(0, CLASSES, BATCH, np.int32)
    theirs, start = _flax(x, labels)
    ours, converted = _ours(x, labels, start[0])

    both = [_trained(step, *state) for step, state in ((theirs(), start), (ours(), converted))]
    for losses, accuracy in both:  # a fast wrong answer is no figure
        assert accuracy == 1 and losses[-1] < 1e-3
    # The same model: bfloat16 has 8 bits, and the effect of rounding grows with each update.
    np.testing.assert_allclose(both[1][0][:3], both[0][0][:3], rtol=0.1)

    def first(make: Callable[[], Step], state: Any) -> Callable[[], float]:
        return lambda: seconds(lambda: jax.block_until_ready(make()(*state)))

    def again(step: Step, state: Any) -> Callable[[], float]:
        jax.block_until_ready(step(*state))
        return lambda: seconds(lambda: jax.block_until_ready(step(*state)))

    compiled = in_turns(first(ours, converted), first(theirs, start), COMPILATIONS)
    stepped = in_turns(again(ours(), converted), again(theirs(), start), REPETITIONS)
    what = f"classifier {INPUTS} -> {WIDTH}, {LAYERS} layers, bfloat16, 2 x 4 simulated ranks, ours / Flax, JAX"
    return [
        _row(f"{what}: training step", *stepped, "ms", 1e3),
        _row(f"{what}: its first call, which compiles it", *compiled, "s", 1),
    ]


def _row(what: str, ratio: float, ours: float, theirs: float, unit: str, factor: float) -> Row:
    measured = f"{ratio:.2f} ({ours * factor:.3g} {unit} / {theirs * factor:.3g} {unit})"
    return Row(what, "<= 0.8", measured, ratio <= 0.8)


def _trained(step: Step, params: Any, memory: Any) -> tuple[list[float], float]:
    losses, accuracy = [], 0.0
    for _ in range(UPDATES + 1):  # the result of the last one is known in the next
        params, memory, loss, accuracy = step(params, memory)
        losses.append(float(loss))
    return losses, float(accuracy)


def _flax(x: np.ndarray, labels: np.ndarray) -> tuple[Callable[[], Step], Any]:
    import jax
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    from benchmarks.flax_classifier import Classifier, training
    from tplab.jax.ranks.devices import jax_mesh

    mesh, model = jax_mesh(MESH), Classifier(WIDTH, CLASSES, LAYERS, "model")
    by_batch = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.device_put((x, labels), by_batch)
    init, _ = training(model, mesh, optax.adamw(1e-3), "data")

    def make() -> Step:
        _, step = training(model, mesh, optax.adamw(1e-3), "data")
        return lambda params, memory: step(params, memory, *batch)

    return make, jax.block_until_ready(init(jax.random.key(42), x))


def _ours(x: np.ndarray, labels: np.ndarray, flax_params: Any) -> tuple[Callable[[], Step], Any]:
    import jax
    import jax.numpy as jnp
    import optax

    model, optimizer = ParallelClassifier(INPUTS, WIDTH, CLASSES, "model", num_layers=LAYERS), optax.adamw(1e-3)
    params = _converted(flax_params)
    memory = optimizer.init(params)
    moments, *others = cast("tuple[Any, ...]", memory)
    specs = model.specs, (moments._replace(count=P(), mu=model.specs, nu=model.specs), *others)
    state = run(lambda *state: state, MESH, params, memory, in_specs=specs, out_specs=specs).value
    batch = run(lambda *batch: batch, MESH, x, labels, in_specs=P("data"), out_specs=P("data")).value

    def make() -> Step:
        def update(params: Any, memory: Any, x: Any, labels: Any) -> Any:
            def loss_of(params: Any) -> Any:
                # Enter data-parallel work in float32, so that gradients are summed in float32; compute in bfloat16.
                low = jax.tree.map(lambda leaf: copy_to(leaf, "data").astype(jnp.bfloat16), params)
                logits = model(low, x.astype(jnp.bfloat16)).astype(jnp.float32)
                loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
                accuracy = (logits.argmax(-1) == labels).mean()
                return all_reduce(loss, "data", "mean"), all_reduce(accuracy, "data", "mean")

            (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            changes, memory = optimizer.update(grads, memory, params)
            return optax.apply_updates(params, changes), memory, loss, accuracy

        in_specs, out_specs = (*specs, P("data"), P("data")), (*specs, P(), P())
        return lambda params, memory: (
            run(update, MESH, params, memory, *batch, in_specs=in_specs, out_specs=out_specs).value
        )

    return make, jax.block_until_ready(state)


def _converted(flax: Any) -> dict[str, Any]:
    """The same numbers in the layout of ParallelClassifier, from kernels [layer, rank, in, out] of each arrival."""
    ranks = MESH.axis_size("model")

    def linear(part: Any, layer: int) -> dict[str, np.ndarray]:
        pieces = np.stack([part[f"shard_{k}"]["kernel"][layer] for k in range(ranks)], 1)  # [rank, arrival, in, out]
        (bias,) = [shard["bias"][layer] for shard in part.values() if "bias" in shard]
        weight = pieces.swapaxes(-1, -2)
        return {"weight": weight.reshape(-1, *weight.shape[2:]), "bias": np.asarray(bias).reshape(-1)}

    def block(layer: int) -> dict[str, Any]:
        norm = np.asarray(flax["blocks"]["norm"]["scale"][layer]).reshape(-1)
        return {"norm": {"weight": norm}} | {name: linear(flax["blocks"][name], layer) for name in ("up", "down")}

    kernel, last = np.asarray(flax["input"]["kernel"]), np.asarray(flax["output"]["kernel"])  # [rank, in, out]
    return {
        "input": {
            "weight": np.ascontiguousarray(kernel.swapaxes(1, 2).reshape(WIDTH, INPUTS)),
            "bias": np.asarray(flax["input"]["bias"]).reshape(-1),
        },
        "blocks": {str(layer): block(layer) for layer in range(LAYERS)},
        "output": {
            "weight": np.ascontiguousarray(last.reshape(WIDTH, CLASSES).T),
            "bias": np.zeros(CLASSES, np.float32),
        },
    }
