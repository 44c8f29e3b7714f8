"""Training steps in JAX, each wrong in one way: a mesh in, a step out; on one device each trains the right model.

`WRONG_STEPS` says by which factor, and how to repair it; `test_jax_steps` compares that with what the steps return.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
Step = Callable[..., Any]


@dataclass(frozen=True)
class WrongStep:
    """A step that returns the right thing on one device only.

    make      a mesh, and whether to repair it -> step(params, *data) -> what it returns, by name
    data      its arguments
    axes      the mesh: name and size of each axis
    what      what is wrong first: "loss", "gradient", "norm", "parameters"
    output    which of the returned values shows it: (name, path in its tree)
    factor    that value over the right one, or words
    cause     words, one of which says what was done; () where no change of one equation mends it
    """

    name: str
    make: Callable[[Mesh, bool], Step]
    data: Callable[[], tuple[Any, ...]]
    axes: tuple[tuple[str, int], ...]
    what: tuple[str, ...]
    output: tuple[str, ...]
    factor: float | str
    line: str
    cause: tuple[str, ...]
    thread: str

    def __str__(self) -> str:
        return self.name


# ---------------------------------------------------------------------------------------------- models and data


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def mlp_data() -> tuple[Any, ...]:
    params = {"up": draw(6, 16) / 2, "down": draw(16, 3, seed=1) / 4, "bias": draw(3, seed=2)}
    return params, draw(8, 6, seed=3), draw(8, 3, seed=4)


def tokens_data() -> tuple[Any, ...]:
    """Logits' weights, inputs, labels, and which of them count: unequally many in each part."""
    labels = jnp.asarray(np.random.default_rng(5).integers(0, 5, (4, 8)))
    counts = jnp.arange(8)[None] < jnp.asarray([[8], [7], [2], [1]])
    return {"head": draw(6, 5) / 2}, draw(4, 8, 6, seed=3), labels, counts


def sequence_data() -> tuple[Any, ...]:
    names = ("q", "k", "v")
    params = {name: draw(8, 8, seed=i) / 3 for i, name in enumerate(names)} | {"pos": draw(12, 8, seed=9)}
    return params, draw(2, 12, 8, seed=3), draw(2, 12, 8, seed=4)


def mlp(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]


def mse(params, x, y):
    return jnp.mean((mlp(params, x) - y) ** 2)


def sgd(params, grads, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def spread(mesh: Mesh, body: Step, in_specs: Any, out_specs: Any) -> Step:
    """What most code does until its specs have varying axes: shard_map that checks nothing."""
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


# ------------------------------------------------------------------------------------------------ data parallelism


def gradient_not_reduced(mesh: Mesh, repaired: bool) -> Step:
    """Each device steps with the gradient of its own part of the batch."""

    def step(params, x, y):
        loss, grads = jax.value_and_grad(mse)(params, x, y)
        if repaired:
            grads = lax.pmean(grads, "dp")
        loss = lax.pmean(loss, "dp")
        return {"loss": loss, "grads": grads, "params": sgd(params, grads)}

    return spread(mesh, step, (P(), P("dp"), P("dp")), P())


def gradient_summed(mesh: Mesh, repaired: bool) -> Step:
    """psum of gradients of local means."""

    def step(params, x, y):
        loss, grads = jax.value_and_grad(mse)(params, x, y)
        grads = (lax.pmean if repaired else lax.psum)(grads, "dp")
        return {"loss": lax.pmean(loss, "dp"), "grads": grads, "params": sgd(params, grads)}

    return spread(mesh, step, (P(), P("dp"), P("dp")), P())


def loss_summed_in_gradient(mesh: Mesh, repaired: bool) -> Step:
    """The loss is averaged inside the function that is differentiated; unchecked, psum's transpose sums once more."""

    def step(params, x, y):
        def loss_fn(params):
            local = mse(params, x, y)
            return local if repaired else lax.pmean(local, "dp") * lax.axis_size("dp")

        loss, grads = jax.value_and_grad(loss_fn)(params)
        if not repaired:
            loss = loss / lax.axis_size("dp")
        grads = lax.pmean(grads, "dp")
        return {"loss": lax.pmean(loss, "dp"), "grads": grads, "params": sgd(params, grads)}

    return spread(mesh, step, (P(), P("dp"), P("dp")), P())


def mean_of_means(mesh: Mesh, repaired: bool) -> Step:
    """pmean of means over unequally many labels."""

    def step(params, x, labels, counts):
        def loss_fn(params):
            losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], labels)
            number = counts.sum()
            if repaired:
                number = lax.psum(number, "dp") / lax.axis_size("dp")
            return (losses * counts).sum() / number

        loss, grads = jax.value_and_grad(loss_fn)(params)
        loss, grads = lax.pmean((loss, grads), "dp")
        return {"loss": loss, "grads": grads, "params": sgd(params, grads)}

    return spread(mesh, step, (P(), P("dp"), P("dp"), P("dp")), P())


def penalty_of_each_device(mesh: Mesh, repaired: bool) -> Step:
    """A mean over a device's own samples is added to its part of a sum over all."""

    def step(params, x, y):
        def loss_fn(params):
            penalty = 0.1 * jnp.mean((x @ params["up"]) ** 2)
            penalty = penalty / lax.axis_size("dp") if repaired else penalty
            return jnp.sum((mlp(params, x) - y) ** 2) / 24 + penalty

        loss, grads = lax.psum(jax.value_and_grad(loss_fn)(params), "dp")
        return {"loss": loss, "grads": grads, "params": sgd(params, grads)}

    return spread(mesh, step, (P(), P("dp"), P("dp")), P())


def local_loss_returned(mesh: Mesh, repaired: bool) -> Step:
    """The loss goes out with the spec of a replicated value, and is the first device's."""

    def step(params, x, y):
        loss, grads = jax.value_and_grad(mse)(params, x, y)
        grads = lax.pmean(grads, "dp")
        if repaired:
            loss = lax.pmean(loss, "dp")
        return {"loss": loss, "grads": grads, "params": sgd(params, grads)}

    return spread(mesh, step, (P(), P("dp"), P("dp")), P())


def dropped_accumulation(mesh: Mesh, repaired: bool) -> Step:
    """Microbatches in a scan that keeps the last gradient instead of their sum."""

    def step(params, x, y):
        num = 1 if mesh.size == 1 else 2

        def micro(carry, batch):
            loss, grads = jax.value_and_grad(mse)(params, *batch)
            total = jax.tree.map(jnp.add, carry[1], grads)
            return (carry[0] + loss / num, total if repaired or num == 1 else grads), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        parts = x.reshape(num, -1, *x.shape[1:]), y.reshape(num, -1, *y.shape[1:])
        (loss, grads), _ = lax.scan(micro, (jnp.zeros(()), zeros), parts)
        grads = jax.tree.map(lambda g: g / num, grads)
        loss, grads = lax.pmean((loss, grads), "dp")
        return {"loss": loss, "grads": grads, "params": sgd(params, grads)}

    return spread(mesh, step, (P(), P("dp"), P("dp")), P())


def norm_of_local_gradient(mesh: Mesh, repaired: bool) -> Step:
    """Each device clips its own gradient, and only then they are averaged."""

    def step(params, x, y):
        loss, grads = jax.value_and_grad(mse)(params, x, y)
        if repaired:
            grads = lax.pmean(grads, "dp")
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm), grads)
        grads = lax.pmean(grads, "dp")
        return {"loss": lax.pmean(loss, "dp"), "norm": norm, "grads": grads, "params": sgd(params, grads)}

    return spread(mesh, step, (P(), P("dp"), P("dp")), P())


# ---------------------------------------------------------------------------------------------- tensor parallelism

MLP_SPECS = {"up": P(None, "tp"), "down": P("tp"), "bias": P()}


def tensor_step(mesh: Mesh, forward: Step, finish: Callable[[Any], Any] = lambda grads: grads) -> Step:
    def step(params, x, y):
        loss, grads = jax.value_and_grad(lambda params: jnp.mean((forward(params, x) - y) ** 2))(params)
        grads = finish(grads)
        return {"loss": loss, "grads": grads, "params": sgd(params, grads)}

    out_specs = {"loss": P(), "grads": MLP_SPECS, "params": MLP_SPECS}
    return spread(mesh, step, (MLP_SPECS, P(), P()), out_specs)


@jax.custom_vjp
def _reduce(x):
    return lax.psum(x, "tp")


_reduce.defvjp(lambda x: (lax.psum(x, "tp"), None), lambda _, g: (g,))


def row_parallel_averaged(mesh: Mesh, repaired: bool) -> Step:
    """pmean where the parts of a matmul have to be added."""

    def forward(params, x):
        part = jnp.tanh(x @ params["up"]) @ params["down"]
        return (_reduce(part) if repaired else lax.pmean(part, "tp")) + params["bias"]

    return tensor_step(mesh, forward)


def psum_transposed(mesh: Mesh, repaired: bool) -> Step:
    """psum in the forward pass; unchecked, its backward pass adds the same gradient once for each device."""

    def forward(params, x):
        part = jnp.tanh(x @ params["up"]) @ params["down"]
        return (_reduce(part) if repaired else lax.psum(part, "tp")) + params["bias"]

    return tensor_step(mesh, forward)


def row_parallel_without_sum(mesh: Mesh, repaired: bool) -> Step:
    """Each device goes on with its own part of a matmul."""

    def forward(params, x):
        part = jnp.tanh(x @ params["up"]) @ params["down"]
        return (_reduce(part) if repaired else part) + params["bias"]

    return tensor_step(mesh, forward)


def layer_norm_of_parts(mesh: Mesh, repaired: bool) -> Step:
    """Mean and variance over the features of each device."""

    def forward(params, x):
        def mean(z):
            own = z.mean(-1, keepdims=True)
            return lax.pmean(own, "tp") if repaired else own

        h = x @ params["up"]
        h = h - mean(h)
        h = h / jnp.sqrt(mean(h * h) + 1e-5)
        return _reduce(jnp.tanh(h) @ params["down"]) + params["bias"]

    return tensor_step(mesh, forward)


def bias_on_each_device(mesh: Mesh, repaired: bool) -> Step:
    """The bias is added before the psum: once for each device."""

    def forward(params, x):
        part = jnp.tanh(x @ params["up"]) @ params["down"]
        return _reduce(part) + params["bias"] if repaired else _reduce(part + params["bias"])

    return tensor_step(mesh, forward)


def averaged_over_both_axes(mesh: Mesh, repaired: bool) -> Step:
    """Two by two: gradients of shards are averaged over tensor-parallel devices too, which hold other shards."""

    def step(params, x, y):
        def loss_fn(params):
            part = jnp.tanh(x @ params["up"]) @ params["down"]
            return jnp.mean((_reduce(part) + params["bias"] - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        grads = lax.pmean(grads, "dp" if repaired else ("dp", "tp"))
        return {"loss": lax.pmean(loss, "dp"), "grads": grads, "params": sgd(params, grads)}

    out_specs = {"loss": P(), "grads": MLP_SPECS, "params": MLP_SPECS}
    return spread(mesh, step, (MLP_SPECS, P("dp"), P("dp")), out_specs)


# ------------------------------------------------------------------------------------------------------- sequences


def sequence_step(mesh: Mesh, forward: Step) -> Step:
    def step(params, x, y):
        loss, grads = jax.value_and_grad(lambda params: jnp.mean((forward(params, x) - y) ** 2))(params)
        loss, grads = lax.pmean((loss, grads), "cp")
        return {"loss": loss, "grads": grads, "params": sgd(params, grads)}

    return spread(mesh, step, (P(), P(None, "cp"), P(None, "cp")), P())


def attend(params, x, positions, gather):
    x = x + params["pos"][positions]
    q, k, v = (x @ params[name] for name in ("q", "k", "v"))
    scores = q @ gather(k).swapaxes(1, 2) / 8**0.5
    return jax.nn.softmax(scores) @ gather(v)


def positions_from_zero(mesh: Mesh, repaired: bool) -> Step:
    """Every device takes the first rows of the position embedding."""

    def forward(params, x):
        start = lax.axis_index("cp") * x.shape[1] if repaired else 0
        return attend(params, x, start + jnp.arange(x.shape[1]), lambda z: lax.all_gather(z, "cp", axis=1, tiled=True))

    return sequence_step(mesh, forward)


def key_gradient_stays(mesh: Mesh, repaired: bool) -> Step:
    """Gathered keys and values count as constants where they came from other devices."""

    def forward(params, x):
        def gather(z):
            whole = lax.all_gather(z, "cp", axis=1, tiled=True)
            if repaired:
                return whole
            start = lax.axis_index("cp") * z.shape[1]
            return lax.dynamic_update_slice_in_dim(lax.stop_gradient(whole), z, start, axis=1)

        positions = lax.axis_index("cp") * x.shape[1] + jnp.arange(x.shape[1])
        return attend(params, x, positions, gather)

    return sequence_step(mesh, forward)


# ------------------------------------------------------------------------------------------------------ what is right


def partitioned_data(mesh: Mesh) -> Step:
    """jit partitions: the batch is sharded, nobody writes a collective."""
    batch, whole = NamedSharding(mesh, P("dp")), NamedSharding(mesh, P())

    def step(params, x, y):
        loss, grads = jax.value_and_grad(mse)(params, x, y)
        return {"loss": loss, "grads": grads, "params": sgd(params, grads)}

    return jax.jit(step, in_shardings=(whole, batch, batch), out_shardings=whole)


def partitioned_parameters(mesh: Mesh) -> Step:
    """Fully sharded: parameters and the states of AdamW lie in pieces, jit gathers them; the norm is that of all."""
    piece = {"up": P(None, "dp"), "down": P("dp"), "bias": P()}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in piece.items()}
    adamw = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))

    def step(params, x, y):
        x, y = (lax.with_sharding_constraint(z, NamedSharding(mesh, P("dp"))) for z in (x, y))
        loss, grads = jax.value_and_grad(mse)(params, x, y)
        updates, _ = adamw.update(grads, adamw.init(params), params)
        return {"loss": loss, "grads": grads, "params": optax.apply_updates(params, updates)}

    out = {"loss": NamedSharding(mesh, P()), "grads": shardings, "params": shardings}
    return jax.jit(step, in_shardings=(shardings, None, None), out_shardings=out)


def checked_shard_map(mesh: Mesh) -> Step:
    """With varying axes checked, the gradient of a replicated parameter is summed by itself."""

    def step(params, x, y):
        def loss_fn(params):
            return lax.pmean(mse(params, x, y), "dp")

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return {"loss": loss, "grads": grads, "params": sgd(params, grads)}

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp"), P("dp")), out_specs=P()))


def checked_tensor_parallel(mesh: Mesh) -> Step:
    """Columns, then rows, with one psum, two by two; varying axes checked."""

    def step(params, x, y):
        def loss_fn(params):
            part = jnp.tanh(x @ params["up"]) @ params["down"]
            return lax.pmean(jnp.mean((lax.psum(part, "tp") + params["bias"] - y) ** 2), "dp")

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return {"loss": loss, "grads": grads, "params": sgd(params, grads)}

    out_specs = {"loss": P(), "grads": MLP_SPECS, "params": MLP_SPECS}
    in_specs = (MLP_SPECS, P("dp"), P("dp"))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def in_bfloat16(mesh: Mesh) -> Step:
    """Forward and backward in bfloat16, gradients averaged in float32."""

    def step(params, x, y):
        def loss_fn(params):
            low = jax.tree.map(lambda p: p.astype("bfloat16"), params)
            return jnp.mean((mlp(low, x.astype("bfloat16")).astype("float32") - y) ** 2)

        loss, grads = lax.pmean(jax.value_and_grad(loss_fn)(params), "dp")
        return {"loss": loss, "grads": grads, "params": sgd(params, grads)}

    return spread(mesh, step, (P(), P("dp"), P("dp")), P())


@dataclass(frozen=True)
class RightStep:
    """A step that returns the same on its mesh as on one device, within `tolerance`."""

    name: str
    make: Callable[[Mesh], Step]
    axes: tuple[tuple[str, int], ...]
    tolerance: float = 2e-4

    def __str__(self) -> str:
        return self.name


DP2, DP4, TP2, CP2 = (("dp", 2),), (("dp", 4),), (("tp", 2),), (("cp", 2),)
WRONG_STEPS = (
    WrongStep(
        "gradient_not_reduced", gradient_not_reduced, mlp_data, DP2, ("gradient",), ("grads", "up"),
        "the first device's own part", "loss, grads = jax.value_and_grad(mse)(params, x, y)",
        ("a pmean over 'dp' is missing",), "many",
    ),
    WrongStep(
        "gradient_summed", gradient_summed, mlp_data, DP4, ("gradient",), ("grads", "up"), 4.0,
        'grads = (lax.pmean if repaired else lax.psum)(grads, "dp")', ("where a mean is meant",), "Megatron-LM #1124",
    ),
    WrongStep(
        "loss_summed_in_gradient", loss_summed_in_gradient, mlp_data, DP2, ("gradient",), ("grads", "up"), 2.0,
        'return local if repaired else lax.pmean(local, "dp") * lax.axis_size("dp")', ("of the backward pass",),
        "torchtitan #3280",
    ),
    WrongStep(
        "mean_of_means", mean_of_means, tokens_data, DP2, ("loss", "gradient"), ("loss",), "mean of means",
        "number = counts.sum()", ("a pmean is missing",), "transformers PR #35207",
    ),
    WrongStep(
        "penalty_of_each_device", penalty_of_each_device, mlp_data, DP2, ("loss",), ("loss",),
        "the penalty counts twice", "return jnp.sum((mlp(params, x) - y) ** 2) / 24 + penalty",
        ("is a mean on each of 2 devices",), "many",
    ),
    WrongStep(
        "local_loss_returned", local_loss_returned, mlp_data, DP2, ("loss", "log"), ("loss",),
        "the first device's own samples", "loss, grads = jax.value_and_grad(mse)(params, x, y)",
        ("each device has only its own part",), "miles_diffusion PR #35",
    ),
    WrongStep(
        "dropped_accumulation", dropped_accumulation, mlp_data, DP2, ("gradient",), ("grads", "up"),
        "the last microbatch only", "(loss, grads), _ = lax.scan(micro, (jnp.zeros(()), zeros), parts)",
        ("what its last round has computed",), "Automodel PR #3530",
    ),
    WrongStep(
        "norm_of_local_gradient", norm_of_local_gradient, mlp_data, DP2, ("norm", "gradient"), ("norm",),
        "the first device's own gradient", "norm = jnp.sqrt(", ("a pmean over 'dp' is missing",), "pytorch #88621",
    ),
    WrongStep(
        "row_parallel_averaged", row_parallel_averaged, mlp_data, TP2, ("loss",), ("loss",),
        "half of the matmul", 'return (_reduce(part) if repaired else lax.pmean(part, "tp")) + params["bias"]',
        ("a mean where a sum is needed",), "Megatron-LM #1464",
    ),
    WrongStep(
        "row_parallel_without_sum", row_parallel_without_sum, mlp_data, TP2, ("loss",), ("loss",),
        "the first device's own part", 'part = jnp.tanh(x @ params["up"]) @ params["down"]',
        ("a psum is missing before add",), "Megatron-LM #1464",
    ),
    WrongStep(
        "layer_norm_of_parts", layer_norm_of_parts, mlp_data, TP2, ("loss",), ("loss",),
        "means of each device's features", "own = z.mean(-1, keepdims=True)",
        ("a pmean is missing before sub",), "many",
    ),
    WrongStep(
        "psum_transposed", psum_transposed, mlp_data, TP2, ("gradient",), ("grads", "down"), 2.0,
        'return (_reduce(part) if repaired else lax.psum(part, "tp")) + params["bias"]', ("of the backward pass",),
        "transformers #48687",
    ),
    WrongStep(
        "bias_on_each_device", bias_on_each_device, mlp_data, TP2, ("loss",), ("loss",),
        "the bias is added once for each device",
        'return _reduce(part) + params["bias"] if repaired else _reduce(part + params["bias"])', ("counts 2 times",),
        "Megatron-LM #1464",
    ),
    WrongStep(
        "averaged_over_both_axes", averaged_over_both_axes, mlp_data, (("dp", 2), ("tp", 2)), ("gradient",),
        ("grads", "up"), "mixes the gradients of different shards",
        'grads = lax.pmean(grads, "dp" if repaired else ("dp", "tp"))', ("is to be over 'dp'",),
        "pytorch #160285",
    ),
    WrongStep(
        "positions_from_zero", positions_from_zero, sequence_data, CP2, ("loss",), ("loss",),
        "positions of the later part are wrong",
        "return attend(params, x, start + jnp.arange(x.shape[1])", ("something else there than on one device",),
        "long-context-attention #53",
    ),
    WrongStep(
        "key_gradient_stays", key_gradient_stays, sequence_data, CP2, ("gradient",), ("grads", "k"),
        "a part of the sum", "return lax.dynamic_update_slice_in_dim(lax.stop_gradient(whole), z, start, axis=1)",
        (), "diffusers #11941",
    ),
)  # fmt: skip
RIGHT_STEPS = (
    RightStep("partitioned_data", partitioned_data, DP4),
    RightStep("partitioned_parameters", partitioned_parameters, DP2),
    RightStep("checked_shard_map", checked_shard_map, DP2),
    RightStep("checked_tensor_parallel", checked_tensor_parallel, (("dp", 2), ("tp", 2))),
    RightStep("in_bfloat16", in_bfloat16, DP2, tolerance=2e-2),
)
