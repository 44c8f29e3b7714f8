"""Training a GPT over data, pipeline, context and tensor parallelism at once: a loop to read and to copy from."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tplab.data.text import Text
from tplab.mesh import Mesh
from tplab.models.gpt import GPTConfig, gpt_specs, gpt_state
from tplab.models.state import merge_state
from tplab.pipeline.checks import split_batch
from tplab.torch.comm.collectives import axis_index, axis_size
from tplab.torch.data.shard_parameters import shard_parameters
from tplab.torch.layers.vocabulary import vocab_parallel_cross_entropy
from tplab.torch.models.gpt import gpt_layers
from tplab.torch.pipeline.stages import Stages, stages_of
from tplab.torch.pipeline.train_batch import evaluate_batch, train_batch
from tplab.torch.ranks.rank import this_rank
from tplab.torch.run import launched_by_torchrun, run
from tplab.torch.training import checkpoint
from tplab.torch.training.gpt_stages import load_whole, whole_of
from tplab.torch.training.optimizer import Optimizer
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
    device: str | torch.device | None = None,
) -> Trained:
    """Train a GPT on text, over a mesh of data parallelism "dp", pipelines "pp", expert parallelism "ep", context
    parallelism "cp" and tensor parallelism "tp".

        train(GPTConfig(256, 64, 4, 4, context=64), Text(python_source()), Mesh(dp=2, pp=2, tp=2))

    mesh      any sizes of these axes, in any order; one that is left out has one rank
    recipe    everything else: steps, batch, learning rate, schedule, ZeRO ...
    folder    where checkpoints go: training can resume from them on any other mesh, in either framework
    resume    continue from the newest checkpoint in the folder: bit for bit as if there had been no break. If there is
              none, training begins at step 0, and says so
    show      called after every step: a `LossCurve` draws while it trains. None: a line is printed now and then
    on        where ranks run, as for `run`: simulated, on processes, or as torchrun has started them. On processes
              everything is shown at the end
    seed      the seed of the initial weights, the batches and dropout
    device    where ranks compute, as for `run`: "cuda" for simulated ranks that share one GPU. Under torchrun each rank
              has a GPU of its own, if there are enough

    On any mesh it is the same model on the same batches: losses are those of one device, up to rounding. With dropout,
    masks depend on the mesh and on the framework.
    Raises ValueError for a checkpoint of another model, and for ZeRO stages that do not work with pipelines; ShapeError
    for heads, features, experts or tokens that ranks cannot share equally;
    FileExistsError for an existing checkpoint without `resume`; CheckpointError for one that is damaged.
    Ctrl-C on simulated ranks finishes the current step and returns what has been trained. Elsewhere only the newest
    checkpoint remains.
    """
    recipe, mesh = recipe or Recipe(), with_all_axes(mesh, config)
    recipe.check_mesh(mesh, config)
    recipe.tokens_on(mesh, config.context)  # an error is easier to read here than on a rank
    first = beginning(folder, resume, config)
    show = PlainLine() if show is None else show
    live = None if on == "processes" else show
    with Stop() if on != "processes" and not launched_by_torchrun() else nullcontext() as stop:
        program = partial(_train, config, text, recipe, first, folder, seed, live, stop)
        here = torch.empty(0, device=device)  # under torchrun, run puts it on the GPU of the rank
        results = run(lambda x: program(x.device), mesh, here, on=on, seed=seed, keep_values=0, device=device).per_rank
    steps: list[Progress] = results[0][0]
    for progress in steps if live is None else ():
        show(progress)
    held_out = {done.step: done.held_out for done in steps if done.held_out is not None}
    state = _whole([held for _, held in results], config, mesh)
    return Trained(state, [done.loss for done in steps], first, held_out)


def _train(
    config: GPTConfig,
    text: Text,
    recipe: Recipe,
    first: int,
    folder: str | Path | None,
    seed: int,
    show: Show | None,
    stop: Stop | None,
    device: torch.device,
) -> tuple[list[Progress], dict[str, np.ndarray]]:
    """The program of one rank. Returns the progress of each step, and the rank's part of the model at the end."""
    rank, done, clock = this_rank(), [], Clock(first, recipe.steps)
    data = data_axes(rank.mesh)
    layers = gpt_layers(config, **recipe.layer_options(rank.mesh))
    with device:
        stages = stages_of(layers, recipe.schedule_on(rank.mesh))
    load_whole(stages, config, gpt_state(config, seed))
    if recipe.zero == 3:
        for module in stages.values():
            shard_parameters(module, data)
    optimizer = Optimizer(stages, config, recipe)
    if folder is not None and first:
        checkpoint.load(folder, first, optimizer, config)
    for step in range(first, recipe.steps):
        if stop is not None and not stop.may_begin(step):
            break
        batch = text.batch(step, recipe.batch_size, config.context, seed, **_share())
        loss = _run_batch(stages, batch, step, config, recipe)
        norm = optimizer.step(recipe.rate(step))
        held_out = _evaluate(stages, text, config, recipe) if recipe.evaluates(step) else None
        done.append(Progress(step + 1, recipe.steps, loss, held_out, norm, clock.left(step + 1)))
        if show is not None and rank.rank == 0:
            show(done[-1])
        if folder is not None and recipe.saves(step):
            checkpoint.save(folder, step + 1, optimizer, config)
    if folder is not None and done and not recipe.saves(done[-1].step - 1):  # it was stopped
        checkpoint.save(folder, done[-1].step, optimizer, config)
    held = whole_of(stages, config, is_cut=recipe.zero == 3)
    copies = tuple(name for name in data if name != "ep")
    return done, {name: x.cpu().numpy() for name, x in held.items()} if axis_index(copies) == 0 else {}


def _run_batch(
    stages: Stages, batch: tuple[np.ndarray, np.ndarray], step: int, config: GPTConfig, recipe: Recipe
) -> float:
    """Run forward and backward. Returns the mean loss over all tokens of the batch, with the experts' balance losses.
    The optimizer's hooks handle the gradients."""
    num_parts = recipe.num_parts

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        logits, balance = outputs if isinstance(outputs, tuple) else (outputs, 0.0)
        return (vocab_parallel_cross_entropy(logits, targets, "tp", config.vocab_size) + balance) / num_parts

    rank, pairs = this_rank(), _pairs(stages, batch, config, recipe)
    schedule, size = recipe.schedule_on(rank.mesh), recipe.microbatches // num_parts
    how: dict[str, Any] = {
        "data_axis": data_axes(rank.mesh),
        "average": False,
        "checkpoint_every": recipe.checkpoint_every,
    }
    total = 0.0
    for first in range(0, recipe.microbatches, size):
        rank.draws["batches"] = step  # seeds dropout: the same after a break, and in every part
        total += float(train_batch(schedule, stages, pairs[first : first + size], loss, first=first, **how))
    return total


def _evaluate(stages: Stages, text: Text, config: GPTConfig, recipe: Recipe) -> float:
    """The cross-entropy on held-out text, without dropout: forward only."""
    batch = text.held_out(recipe.batch_size, config.context, **_share())
    schedule = recipe.schedule(axis_size("pp"), recipe.microbatches)
    for module in stages.values():
        module.eval()
    loss = evaluate_batch(
        schedule,
        stages,
        _pairs(stages, batch, config, recipe),
        lambda outputs, targets: vocab_parallel_cross_entropy(
            outputs[0] if isinstance(outputs, tuple) else outputs, targets, "tp", config.vocab_size
        ),
        data_axis=data_axes(this_rank().mesh),
    )
    for module in stages.values():
        module.train()
    return float(loss)


def _pairs(
    stages: Stages, batch: tuple[np.ndarray, np.ndarray], config: GPTConfig, recipe: Recipe
) -> list[tuple[Tensor, Tensor]]:
    """The microbatches of this rank's tokens, on the device of the stages. Context-parallel ranks have the same number
    of tokens, all with targets, so the mean of their losses is the mean over all tokens."""
    device, mesh = stages.parameters()[0].device, this_rank().mesh
    axis = context_axis(mesh)
    held = recipe.tokens_on(mesh, config.context).positions[0 if axis is None else axis_index(axis)]
    ids, targets = (torch.from_numpy(x[:, held]).to(device) for x in batch)
    return split_batch(ids, targets, recipe.microbatches)


def _share() -> dict[str, int]:
    axes = batch_axes(this_rank().mesh)
    return {"rank": axis_index(axes), "num_ranks": axis_size(axes)}


def _whole(held: list[dict[str, np.ndarray]], config: GPTConfig, mesh: Mesh) -> dict[str, Any]:
    """The state of the whole GPT, from the parts that ranks hold."""
    axes = ("tp",) if config.experts is None else ("ep", "tp")
    cut = Mesh(**{name: mesh.axis_size(name) for name in axes})
    states: list[dict[str, np.ndarray]] = [{} for _ in cut.ranks]
    for rank, pieces in enumerate(held):
        states[mesh.index(rank, axes)] |= pieces
    return merge_state(states, gpt_specs(config), cut, np.concatenate)
