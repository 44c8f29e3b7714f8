"""Training a GPT over data, pipeline and tensor parallelism at once: a loop to read, and to copy from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tplab.data.text import Text
from tplab.jax.layers.vocabulary import vocab_parallel_cross_entropy
from tplab.jax.models.gpt import gpt_layers
from tplab.jax.pipeline.stages import Stages
from tplab.jax.pipeline.train_batch import evaluate_batch, train_batch
from tplab.jax.run import run
from tplab.jax.training import checkpoint
from tplab.jax.training.gpt_stages import GPTPacking, blueprints_on, sharded_layer
from tplab.jax.training.optimizer import Optimizer
from tplab.mesh import Mesh
from tplab.models.gpt import GPTConfig, gpt_state
from tplab.pipeline.checks import split_batch
from tplab.sharding import P
from tplab.training.checkpoint import beginning
from tplab.training.progress import Clock, PlainLine, Progress, Show, Stop, Trained
from tplab.training.recipe import Recipe, batch_axes, context_axis, data_axes, with_all_axes


def train(
    config: GPTConfig,
    text: Text,
    mesh: Mesh,
    recipe: Recipe | None = None,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    show: Show | None = None,
    on: str | None = None,
    seed: int = 0,
) -> Trained:
    """Train a GPT on text, over a mesh of data parallelism "dp", pipelines "pp", expert parallelism "ep", context
    parallelism "cp" and tensor parallelism "tp".

        train(GPTConfig(256, 64, 4, 4, context=64), Text(python_source()), Mesh(dp=2, pp=2, tp=2))

    mesh      any sizes of these axes, in any order; one that is left out has one rank
    recipe    everything else: steps, batch, learning rate, schedule, ZeRO ...
    folder    where checkpoints go: training can resume from them on any other mesh, in either framework
    resume    continue from the newest checkpoint in the folder: bit for bit as if there had been no break. If there is
              none, training begins at step 0 and says so
    show      called after every step: a `LossCurve` draws while it trains. None: a line is printed now and then
    on        the kind of devices, as for `run`
    seed      the seed of the first weights, the batches and dropout

    On any mesh it is the same model on the same batches: losses are those of one device, up to rounding. With dropout,
    masks depend on the mesh and on the framework.
    Raises ValueError for a checkpoint of another model, and for ZeRO stages that do not work with pipelines; ShapeError
    for heads, features, experts or tokens that ranks cannot share equally;
    FileExistsError for an existing checkpoint without `resume`; CheckpointError for one that is damaged.
    Ctrl-C: the current step is finished, and what was trained until then is returned. The first step compiles.
    """
    recipe, mesh = recipe or Recipe(), with_all_axes(mesh, config)
    recipe.check_mesh(mesh, config)
    first, show = beginning(folder, resume, config), PlainLine() if show is None else show
    loop = _Loop(config, recipe, mesh, on, seed)
    if folder is not None and first:
        stages, state = checkpoint.load(folder, first, loop.packing, loop.optimizer)
    else:
        stages, state = loop.start(gpt_state(config, seed))
    done, clock = list[Progress](), Clock(first, recipe.steps)
    with Stop() as stop:
        for step in range(first, recipe.steps):
            if not stop.may_begin(step):
                break
            batch = text.batch(step, recipe.batch_size, config.context, seed)
            stages, state, loss, norm = loop.step(stages, state, batch, step)
            held_out = None
            if recipe.evaluates(step):
                held_out = loop.evaluate(stages, text.held_out(recipe.batch_size, config.context))
            done.append(Progress(step + 1, recipe.steps, float(loss), held_out, float(norm), clock.left(step + 1)))
            show(done[-1])
            if folder is not None and recipe.saves(step):
                checkpoint.save(folder, step + 1, stages, state, loop.packing, loop.optimizer)
    if folder is not None and done and not recipe.saves(done[-1].step - 1):  # it was stopped
        checkpoint.save(folder, done[-1].step, stages, state, loop.packing, loop.optimizer)
    held = {progress.step: progress.held_out for progress in done if progress.held_out is not None}
    return Trained(loop.packing.unpack(stages), [progress.loss for progress in done], first, held)


class _Loop:
    """The functions that are compiled once, for all steps."""

    def __init__(self, config: GPTConfig, recipe: Recipe, mesh: Mesh, on: str | None, seed: int):
        self._config, self._recipe, self._mesh, self._on, self._seed = config, recipe, mesh, on, seed
        self._tokens, self._data_axes = recipe.tokens_on(mesh, config.context), data_axes(mesh)
        self._batch = P(batch_axes(mesh), context_axis(mesh))
        layers = gpt_layers(config, **recipe.layer_options(mesh))
        if recipe.zero == 3:
            layers = [sharded_layer(layer, self._data_axes) for layer in layers]
        if recipe.scheme == "ring" and self._tokens.num_ranks > 1 and mesh.axis_size("pp") > 1:
            raise ValueError(
                f"scheme='ring' on pipelines of {mesh.axis_size('pp')} ranks: in XLA a hop joins the whole mesh, and "
                "the ranks of a pipeline run different stages; take scheme='gather' or 'head', or a mesh with pp=1"
            )
        self._schedule = recipe.schedule_on(mesh)
        self.packing = GPTPacking(blueprints_on(mesh, layers, self._schedule, on=on), config, mesh)
        self.optimizer = Optimizer(self.packing, recipe)

        def step(stages: Stages, state: Any, ids: Array, targets: Array, rate: Array, key: Any) -> Any:
            loss, grads = self._loss_and_grads(stages, ids, targets, key if config.dropout else None)
            stages, state, norm = self.optimizer.update(stages, state, grads, rate)
            return stages, state, loss, norm

        def evaluate(stages: Stages, ids: Array, targets: Array) -> Array:
            pairs = split_batch(ids, targets, recipe.microbatches)
            whole = recipe.schedule(mesh.axis_size("pp"), recipe.microbatches)
            return evaluate_batch(whole, stages, pairs, self._cross_entropy, data_axis=self._data_axes)

        self._programs = step, evaluate

    def start(self, whole: dict[str, np.ndarray]) -> tuple[Stages, Any]:
        """The stages of a whole model, and the optimizer's first states."""
        zeros = self.packing.pack({name: np.zeros_like(x) for name, x in whole.items()})
        return self.packing.pack(whole), self.optimizer.state_of(0, zeros, zeros)

    def step(self, stages: Stages, state: Any, batch: tuple[np.ndarray, np.ndarray], number: int) -> Any:
        """(stages and state after the step, loss, norm of the gradients)"""
        specs = stages.specs, self.optimizer.specs
        key = jax.random.fold_in(jax.random.key(self._seed), number)
        return run(
            self._programs[0], self._mesh, stages, state, *map(self._tokens.arrange, batch),
            self._recipe.rate(number), key,
            in_specs=(*specs, self._batch, self._batch, P(), P()), out_specs=(*specs, P(), P()), on=self._on,
        ).value  # fmt: skip

    def evaluate(self, stages: Stages, batch: tuple[np.ndarray, np.ndarray]) -> float:
        """The cross-entropy of a batch, without dropout: forward only."""
        specs, batch = (stages.specs, self._batch, self._batch), tuple(map(self._tokens.arrange, batch))
        return float(
            run(self._programs[1], self._mesh, stages, *batch, in_specs=specs, out_specs=P(), on=self._on).value
        )

    def _loss_and_grads(self, stages: Stages, ids: Array, targets: Array, key: Any) -> tuple[Array, Stages]:
        """The loss, and the gradients in the optimizer's form: with ZeRO 2 they are cut after every microbatch."""
        num_parts = self._recipe.num_parts
        if num_parts == 1:
            return self._of_part(stages, ids, targets, key, 0)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            number, (ids, targets) = part
            more = self._of_part(stages, ids, targets, key, number * self._schedule.num_microbatches)
            return jax.tree.map(lambda x, y: x + y / num_parts, total, more), None

        pairs = jax.tree.map(lambda *xs: jnp.stack(xs), *split_batch(ids, targets, num_parts))
        nothing = jnp.zeros((), jnp.result_type(float)), self.optimizer.no_gradients()
        return lax.scan(add, nothing, (jnp.arange(num_parts), pairs))[0]

    def _of_part(self, stages: Stages, ids: Array, targets: Array, key: Any, first: Any) -> tuple[Array, Stages]:
        recipe = self._recipe
        loss, grads = train_batch(
            self._schedule,
            stages,
            split_batch(ids, targets, self._schedule.num_microbatches),
            self._loss,
            data_axis=self._data_axes,
            average=not recipe.zero,
            checkpoint_every=recipe.checkpoint_every,
            first=first,
            key=key,
        )
        return loss, self.optimizer.reduced(grads)

    def _loss(self, outputs: Any, targets: Array) -> Array:
        loss = self._cross_entropy(outputs, targets)
        return loss + outputs[1] if isinstance(outputs, tuple) else loss

    def _cross_entropy(self, outputs: Any, targets: Array) -> Array:
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        return vocab_parallel_cross_entropy(logits, targets, "tp", self._config.vocab_size)
