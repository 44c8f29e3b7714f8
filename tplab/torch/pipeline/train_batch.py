"""A pipeline: each rank holds some stages of a model, and runs its row of a schedule on real tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tplab.mesh import Axis
from tplab.pipeline.checks import Tied, check_data_axis
from tplab.schedules import Action, Costs, Schedule
from tplab.schedules.check import program
from tplab.torch.pipeline.copies import GradientSync
from tplab.torch.pipeline.worker import Evaluation, Loss, Worker
from tplab.torch.ranks.rank import this_rank


def train_batch(
    schedule: Schedule,
    stages: Mapping[int, nn.Module] | Sequence[nn.Module] | nn.Module,
    microbatches: Sequence[tuple[Any, Any]],
    loss: Loss,
    *,
    axis: Axis = "pp",
    data_axis: Axis | None = None,
    average: bool = True,
    tied: Tied | None = None,
    checkpoint_every: int | None = None,
    costs: Costs | None = None,
    first: int = 0,
    overlap: bool = False,
) -> Tensor:
    """Run one batch through a pipeline: every microbatch forward and backward, as `schedule` says. Each rank of `axis`
    calls this inside its program; the rank at position r runs row r.

        def step(x, y):
            stage = torch.nn.Linear(8, 8)                     # this rank's layers
            loss = train_batch(one_f_one_b(4, 8), stage, split_batch(x, y, 8), torch.nn.functional.mse_loss)
            return loss, stage.weight.grad

        run(step, Mesh(pp=4), x, y)

    schedule      any `Schedule`, made by a rule or by hand; it is checked first
    stages        this rank's stages: the result of `stages_of`, or {number: module}, or a sequence in the order of
                  schedule.placement[r], or a single module. A module takes what the one before it returns: a tensor, or
                  a tuple of them
    microbatches  one pair (input, target) each. Only the rank that runs stage 0 reads the inputs, and only the rank
                  that runs the last stage reads the targets; a tuple as input is several tensors
    loss          loss(output, target) -> a scalar
    ->            the mean of the microbatches' losses, in float64, the same on every rank. Its gradients are added to
                  `.grad` of the parameters, as by `backward`. Hooks of tensors run once per microbatch, as in plain
                  accumulation. A parameter's post-accumulate-grad hooks run once per batch, when its gradient is
                  complete: at the end of the batch if other ranks have parts of it (data_axis, copies), otherwise in
                  the last backward pass of its stage

    data_axis     along which ranks hold copies of the stages and have different microbatches: losses and gradients are
                  the mean over it
    average       False: gradients stay those of this rank's own microbatches, for an optimizer that combines them along
                  data_axis itself, such as that of `shard_optimizer`
    tied          tied parameters: [((0, "embedding.weight"), (3, "head.weight"))] says by stage and name that their
                  gradients are added up, and each gets the sum; the same on every rank. `stages_of` finds them. Copies
                  of one stage on two ranks (Chimera, DualPipe) are tied automatically
    checkpoint_every  only the input of each group of this many layers of a stage (an nn.Sequential) is kept; the rest
                  is recomputed in the backward pass. Buffers are not written again: BatchNorm statistics are updated
                  once per microbatch
    costs         how long actions take on the clock that counts steps, which `run` uses without a cluster; without
                  costs they take no time. So the trace of a real run can be laid over `simulate(schedule, costs)`
    first         the number of the first microbatch, if the batch of one optimizer step is run in several calls:
                  dropout draws as if it were one call
    overlap       whether the forward and the backward pass of an overlapped pair run at once, as in DualPipe: what
                  either sends inside its stage, such as the all_to_all of experts, travels while the other computes,
                  and the pair is one event of the trace. Ranks that run the same stage must call the same collectives,
                  in the same order. False: one runs after the other

    What each action does:
        F   take the input, run the stage, keep what the backward pass needs; the last stage also computes the loss
        B   from the gradient of the output, compute those of the input and the parameters
        I   compute that of the input only; keep what W needs, free the rest       W   compute those of the parameters
    B is I and W at once, to the FLOP. Outputs and gradients travel as separate messages, and a send never waits, so no
    schedule that passes `check` can deadlock. A STEP is left to the caller.

    The trace has each action as an event, with the bytes that the rank then holds for backward passes (`held`).
    Dropout draws from the seed of the run, the number of the batch, the stage and the microbatch: the same numbers in
    every schedule of the same stages, on any number of ranks, recomputed or not. Shapes may differ from microbatch to
    microbatch and from call to call: every message carries its own.
    Raises ScheduleError and ShapeError, with an explanation, if schedule, stages, microbatches and axis do not match.
    """
    if overlap and checkpoint_every:
        raise ValueError(
            "overlap=True runs a forward pass beside a backward pass, which with checkpoint_every is itself a forward "
            "pass at times; leave out one of them"
        )
    check_data_axis(this_rank().mesh, axis, data_axis)
    worker = Worker(schedule, stages, microbatches, loss, axis, checkpoint_every, costs, first)
    worker.rank.draws["batches"] = worker.batch + 1
    ties: Tied = getattr(stages, "tied", ()) if tied is None else tied
    sync = GradientSync(worker.stages, schedule.placement, axis, data_axis if average else None, ties)
    row = program(schedule)[worker.place.index]
    last = {action.stage: action for action in row if action.kind in ("B", "W")}
    with sync.batch():
        for action, *joined in _cells(row, overlap):
            if action.kind == "REDUCE_GRAD":
                sync.reduce(action.stage, worker.gradients)
                continue
            ends = next((one for one in (action, *joined) if one is last.get(one.stage)), None)
            with sync.leaving(ends.stage, worker.gradients[ends.stage], ends.kind == "B") if ends else nullcontext():
                worker.run_pair(action, *joined) if joined else worker.run(action)
        sync.finish(worker.gradients)
    return worker.mean_loss(data_axis)


def _cells(row: Sequence[Action], overlap: bool) -> list[list[Action]]:
    """Single actions and, with overlap, pairs of a forward and a backward pass, to run one after the other."""
    cells: list[list[Action]] = []
    for action in row:
        if overlap and action.joined and (action.kind == "F") != (cells[-1][0].kind == "F"):
            cells[-1].append(action)
        else:
            cells.append([action])
    return cells


@torch.no_grad()
def evaluate_batch(
    schedule: Schedule,
    stages: Mapping[int, nn.Module] | Sequence[nn.Module] | nn.Module,
    microbatches: Sequence[tuple[Any, Any]],
    loss: Loss,
    *,
    axis: Axis = "pp",
    data_axis: Axis | None = None,
    costs: Costs | None = None,
) -> Tensor:
    """Run one batch through a pipeline, forward only. Returns the same as `train_batch`, without gradients.

    The arguments are those of `train_batch`. The schedule's forward passes run in order, each as soon as its input has
    arrived. Nothing is kept, and only what passes from stage to stage is sent. The call does not count as a batch:
    dropout, unless modules are in `.eval()`, draws what the next batch will draw.
    """
    check_data_axis(this_rank().mesh, axis, data_axis)
    rows = program(schedule, is_forward_only=True)
    worker = Evaluation(schedule, stages, microbatches, loss, axis, None, costs)
    for action in rows[worker.place.index]:
        worker.run(action)
    return worker.mean_loss(data_axis)
