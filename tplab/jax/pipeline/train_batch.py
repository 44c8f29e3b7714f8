"""A pipeline: each rank holds some stages of a model, and all run one compiled loop over the ticks of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax import Array

from tplab.errors import ScheduleError
from tplab.jax.comm.collectives import all_reduce, axis_size
from tplab.jax.pipeline.copies import add_copies, mean
from tplab.jax.pipeline.passes import Loss
from tplab.jax.pipeline.stages import Stages, alike, as_params
from tplab.jax.pipeline.ticks import Ticks
from tplab.jax.ranks.context import this_mesh
from tplab.mesh import Axis
from tplab.pipeline.checks import Tied, mean_already
from tplab.schedules import Costs, Schedule, check
from tplab.schedules.check import require_ranks


def train_batch(
    schedule: Schedule,
    stages: Stages | tuple[Callable[..., Any], Any],
    microbatches: Sequence[tuple[Any, Any]],
    loss: Loss,
    *,
    axis: Axis = "pp",
    data_axis: Axis | None = None,
    average: bool = True,
    tied: Tied | None = None,
    checkpoint_every: int | None = None,
    costs: Costs | None = None,
    first: int | Array = 0,
    key: Any = None,
) -> tuple[Array, Any]:
    """Run one batch through a pipeline: every microbatch forward and backward, as `schedule` says. Each rank of `axis`
    calls it inside its program; the rank at position r runs row r.

        def step(x, y):
            stages = stages_of([LayerSpec(Linear, 8, 8)] * 4, one_f_one_b(4, 8))     # this rank's layers
            return train_batch(one_f_one_b(4, 8), stages, split_batch(x, y, 8), mean_squares)

        loss, grads = run(step, Mesh(pp=4), x, y, out_specs=(P(), P("pp"))).value

    schedule      any `Schedule`, made by a rule or by hand; it is checked first
    stages        the result of `stages_of`; or (function, params), where every stage is function(params, x), with this
                  rank's own params: a list of them if it holds several stages
    microbatches  one pair (input, target) each, all of one shape. Only the first stage reads the inputs, and only the
                  last reads the targets; a tuple as input is several arrays
    loss          loss(output, target) -> a scalar
    ->            the mean of the microbatches' losses, the same on every rank; and its gradients, which have the form
                  of `stages`: Stages, or the structure of params

    data_axis     the axis along which ranks hold copies of the stages and have different microbatches: losses and
                  gradients are the mean over it
    average       False: gradients stay those of this rank's own microbatches, for an optimizer that itself combines
                  them along data_axis, as that of `shard_optimizer` does
    tied          parameters that are tied: [((0, "0.weight"), (3, "2.weight"))] says by stage and name (which begins
                  with the layer's place in its stage) that their gradients are added up, and each gets the sum.
                  `stages_of` finds them. Copies of one stage on two ranks (Chimera, DualPipe) are always tied
    checkpoint_every  only the inputs of each group of this many layers of a stage are kept; the rest is recomputed in
                  the backward pass
    costs         how long actions take on the clock that counts steps, which `run` has without a cluster; without it,
                  they take no time. So the trace can be compared with `simulate(schedule, costs, lockstep=True)`
    first         the number of the first microbatch, if the batch of one optimizer step is run in several calls, so
                  that dropout draws as in one call
    key           the batch's random key, the same on every rank: layers that have a parameter of this name receive a
                  key derived only from it, the microbatch and the layer's place in the model. So dropout draws the same
                  numbers in every schedule of the same layers, recomputed or not

    What each action does:
        F   run the stage on its input, keep what the backward pass needs (what JAX's `vjp` keeps, without weights, and
            without values that are cheaper to recompute); the last stage also computes the loss
        B   from the gradient of the output, compute that of the input and those of the parameters
        I   compute that of the input only; keep what W needs, free the rest       W   compute those of the parameters
    B is I and W at once, to the FLOP. An overlapped pair runs one after the other. A STEP is left to the caller.

    The trace has each action as an event, with the bytes that the rank then holds for backward passes (`held`).
    Ranks run in lock-step: a tick ends when its slowest rank is done and its messages have arrived. A message is one
    flat array per dtype, as long as the longest between any two stages; a rank with nothing to send sends nothing.
    Stages of the same layers are compiled once.
    Raises ScheduleError and ShapeError, with an explanation, if schedule, stages, microbatches and axis do not fit
    together.
    """
    made = _stages(schedule, stages, axis)
    if average and data_axis is not None:
        _check_no_mean(made, data_axis)
    ticks = Ticks(schedule, made, microbatches, loss, axis, data_axis, costs, checkpoint_every, first, key)
    end = ticks.run()
    gradients = mean(end.grads, data_axis if average else None)
    gradients = add_copies(gradients, made.blueprints, made.blueprints.tied if tied is None else tied)
    grads = Stages(gradients, made.blueprints)
    return _mean_loss(end.loss, schedule, axis, data_axis), grads if made is stages else as_params(grads)


def evaluate_batch(
    schedule: Schedule,
    stages: Stages | tuple[Callable[..., Any], Any],
    microbatches: Sequence[tuple[Any, Any]],
    loss: Loss,
    *,
    axis: Axis = "pp",
    data_axis: Axis | None = None,
    costs: Costs | None = None,
) -> Array:
    """Run one batch through a pipeline, forward only: the loss that `train_batch` returns.

    The arguments are those of `train_batch`. The schedule's forward passes run in order, each as soon as its input has
    arrived. Nothing is kept, and only activations are sent from stage to stage. Layers receive no key, so dropout drops
    nothing.
    """
    made = _stages(schedule, stages, axis)
    end = Ticks(schedule, made, microbatches, loss, axis, data_axis, costs, forward_only=True).run()
    return _mean_loss(end.loss, schedule, axis, data_axis)


def _stages(schedule: Schedule, stages: Any, axis: Axis) -> Stages:
    """The stages, checked against the schedule."""
    require_ranks(schedule, axis_size(axis), ",".join(this_mesh().names(axis)))
    check(schedule)
    made = stages if isinstance(stages, Stages) else alike(*_function_and_params(stages), schedule, axis)
    blueprints = made.blueprints
    if (blueprints.placement, len(blueprints.stages)) != (schedule.placement, schedule.num_stages):
        raise ScheduleError(
            f"the stages were made for ranks that hold {blueprints.placement}, and in {schedule!r} they hold "
            f"{schedule.placement}; make them with stages_of(layers, schedule) for this schedule"
        )
    return made


def _check_no_mean(stages: Stages, data_axis: Axis) -> None:
    """Raise ValueError for a layer whose gradients are already the mean over a part of `data_axis`."""
    for layer in (layer.called for stage in stages.blueprints.stages for layer in stage.layers):
        means: Callable[[], Collection[str]] | None = getattr(layer, "axes_of_mean_gradients", None)
        if means is not None and (both := sorted(set(means()).intersection(this_mesh().names(data_axis)))):
            raise mean_already(f"a {type(layer).__name__}", both)


def _mean_loss(total: Array, schedule: Schedule, axis: Axis, data_axis: Axis | None) -> Array:
    """The mean loss of all microbatches, the same on every rank."""
    mean_of_axis = all_reduce(total, axis) / schedule.num_microbatches
    return mean_of_axis if data_axis is None else all_reduce(mean_of_axis, data_axis, "mean")


def _function_and_params(stages: Any) -> tuple[Callable[..., Any], Any]:
    if isinstance(stages, tuple) and len(stages) == 2 and callable(stages[0]):
        return stages
    raise TypeError(
        f"a pipeline takes stages_of(layers, schedule), or a pair (function, params), not an object of type "
        f"{type(stages).__name__}"
    )
