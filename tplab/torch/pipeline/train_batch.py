"""A pipeline: each rank holds some stages of a model, and runs its row of a schedule on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tplab.errors import ScheduleError, ShapeError
from tplab.mesh import Axis
from tplab.pipeline.microbatches import check_microbatches
from tplab.pipeline.tied import Tied
from tplab.schedules import Action, Costs, Schedule
from tplab.schedules.execute import program, require_ranks
from tplab.torch.comm.collectives import all_reduce, start
from tplab.torch.comm.messages import receive, send
from tplab.torch.pipeline.copies import GradientSync
from tplab.torch.pipeline.graph import Gradients, Tensors, add_gradients, has_gradient
from tplab.torch.pipeline.redraw import Redraw
from tplab.torch.pipeline.stage import Pass, Stage
from tplab.torch.private import pytree
from tplab.torch.ranks.rank import this_rank
from tplab.trace.journal import Doing

Loss = Callable[[Any, Any], Tensor]


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
) -> Tensor:
    """Run one batch through a pipeline: every microbatch forward and backward, as `schedule` says. Called by each rank
    of `axis`, inside its program; the rank at position r runs row r.

        def step(x, y):
            stage = torch.nn.Linear(8, 8)                     # this rank's layers
            loss = train_batch(one_f_one_b(4, 8), stage, split_batch(x, y, 8), torch.nn.functional.mse_loss)
            return loss, stage.weight.grad

        run(step, Mesh(pp=4), x, y)

    schedule      any `Schedule`, by a rule or by hand; it is checked first
    stages        this rank's stages: what `stages_of` makes, or {number: module}, or a sequence in the order of
                  schedule.placement[r], or the one module there is. A module takes what the one before it returns: a
                  tensor, or a tuple of them
    microbatches  a pair (input, target) each. The rank that runs stage 0 looks at the inputs, the one that runs the
                  last stage at the targets; a tuple as input is several tensors
    loss          loss(output, target) -> a scalar
    ->            the mean of the microbatches' losses, in float64, the same on every rank. Its gradients are added to
                  `.grad` of the parameters, as `backward` would. Hooks of tensors run once per microbatch, as in plain
                  accumulation; a parameter's post-accumulate-grad hooks once per batch, when its gradient is complete:
                  at the end of the batch where other ranks have parts of it (data_axis, copies), else in the last
                  backward pass of its stage

    data_axis     along which ranks hold copies of the stages and have other microbatches: losses and gradients are the
                  mean over it
    average       False: gradients stay those of this rank's own microbatches, for an optimizer that combines them along
                  data_axis itself, as that of `shard_optimizer` does
    tied          parameters that are one: [((0, "embedding.weight"), (3, "head.weight"))] says by stage and name that
                  their gradients are added up, and each gets the sum; the same on every rank. `stages_of` finds them.
                  Copies of one stage on two ranks (Chimera, DualPipe) are tied without being named
    checkpoint_every  every so many layers of a stage (an nn.Sequential) what passes between them is forgotten, and
                  computed again in the backward pass, where buffers are not written to again: statistics of a
                  BatchNorm move once per microbatch
    costs         how long actions take on the clock that counts steps, which `run` has without a cluster; left out, no
                  time. So the trace of a real run can be laid over `simulate(schedule, costs)`

    What each action does:
        F   take the input, run the stage, keep what the backward pass needs; the last stage goes on to the loss
        B   from the gradient of the output, that of the input and those of the parameters
        I   that of the input only; keep what W needs, let go of the rest       W   those of the parameters
    B is I and W at once, to the FLOP. Outputs and gradients travel as messages of their own, and a send never waits; so
    nothing can wait for ever that `check` lets pass. An overlapped pair runs one after the other. A STEP is left to the
    caller.

    The trace has each action as an event, and in it the bytes that the rank then holds for backward passes (`held`).
    Dropout draws from the seed of the run, the number of the batch, the stage and the microbatch: the same numbers in
    every schedule of the same stages, on however many ranks, computed again or not. Shapes may differ from microbatch
    to microbatch and from call to call: every message brings its own.
    Raises ScheduleError and ShapeError, in words, where schedule, stages, microbatches and axis do not fit together.
    """
    worker = _Worker(schedule, stages, microbatches, loss, axis, checkpoint_every, costs)
    ties: Tied = getattr(stages, "tied", ()) if tied is None else tied
    sync = GradientSync(worker.stages, schedule.placement, axis, data_axis if average else None, ties)
    row = program(schedule)[worker.place.index]
    last = {action.stage: action for action in row if action.kind in ("B", "W")}
    with sync.batch():
        for action in row:
            if action.kind == "REDUCE_GRAD":
                sync.reduce(action.stage, worker.gradients)
            elif action is last.get(action.stage):
                with sync.leaving(action.stage, worker.gradients[action.stage], in_one=action.kind == "B"):
                    worker.run(action)
            else:
                worker.run(action)
        sync.finish(worker.gradients)
    mean = all_reduce(worker.total_loss, axis) / len(microbatches)
    return mean if data_axis is None else all_reduce(mean, data_axis, "mean")


class _Worker:
    """One rank's side of a batch: its stages, what has arrived for them, and what they keep."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Any,
        microbatches: Sequence[tuple[Any, Any]],
        loss: Loss,
        axis: Axis,
        checkpoint_every: int | None,
        costs: Costs | None,
    ):
        self.rank, self.schedule, self.loss, self.axis = this_rank(), schedule, loss, axis
        self.place = self.rank.place(axis)
        modules = _modules_of(schedule, stages, self.place.index, len(self.place.group), self.place.label)
        self.stages = {n: Stage(module, n, schedule.num_stages, checkpoint_every) for n, module in modules.items()}
        self.microbatches = check_microbatches(microbatches, schedule.num_microbatches)
        self.durations = _durations(schedule, costs, self.place.index)
        self.gradients: dict[int, Gradients] = {stage: {} for stage in self.stages}
        self.device = next((p.device for m in modules.values() for p in m.parameters()), torch.empty(0).device)
        self.total_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._arriving: dict[tuple[str, int, int], Any] = {}  # what F or B of a stage and microbatch will take
        self._leaving: dict[tuple[str, int, int], Any] = {}  # what is to be sent
        self._passes: dict[tuple[int, int], Pass] = {}
        self._kept: dict[tuple[int, int], int] = {}  # bytes of each pass
        self._losses: dict[int, Tensor] = {}
        self._batch = self.rank.draws.get("batches", 0)  # how many there were before
        self.rank.draws["batches"] = self._batch + 1
        self._does = {"F": self.forward, "B": self.backward, "I": self.input_grad, "W": self.weight_grad}

    def run(self, action: Action) -> None:
        """Do one action of the row."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        way = kind[-1]
        if kind in self._does:
            self._does[kind](stage, microbatch)
        elif kind.startswith("SEND"):
            send(self._leaving.pop((way, stage, microbatch)), self.axis, self._neighbor(way, stage, microbatch))
        elif kind.startswith("RECV"):
            source = self._neighbor("B" if way == "F" else "F", stage, microbatch)
            self._arriving[way, stage, microbatch] = start(receive, self.axis, source)

    # --- the four computations -----------------------------------------------------------------------------------

    def forward(self, number: int, microbatch: int) -> None:
        stage = self.stages[number]
        inputs = self._input(microbatch) if stage.is_first else self._taken("F", number, microbatch)
        with self._doing("F", number, microbatch):
            redraw = Redraw(self.rank, (self._batch, number, microbatch), self.axis, self.device)
            finish = self._finish(microbatch) if stage.is_last else None
            target = self._target(microbatch) if stage.is_last else []
            made = self._passes[number, microbatch] = Pass(stage, inputs, finish, redraw, target)
            outputs, made.outputs = made.outputs, ()
            if stage.is_last:
                self._losses[microbatch] = outputs[0]
                self.total_loss = self.total_loss + outputs[0]
            else:
                self._hand_over("F", number, microbatch, outputs)

    def backward(self, number: int, microbatch: int) -> None:
        grads = self._output_grads(number, microbatch)
        with self._doing("B", number, microbatch):
            grads, gradients = self._passes.pop((number, microbatch)).backward(grads)
            add_gradients(self.gradients[number], gradients)
            self._hand_back(number, microbatch, grads)

    def input_grad(self, number: int, microbatch: int) -> None:
        grads = self._output_grads(number, microbatch)
        with self._doing("I", number, microbatch):
            grads = self._passes[number, microbatch].input_grads(grads)
            self._hand_back(number, microbatch, grads)

    def weight_grad(self, number: int, microbatch: int) -> None:
        with self._doing("W", number, microbatch):
            add_gradients(self.gradients[number], self._passes.pop((number, microbatch)).weight_grads())

    # --- what passes between stages ------------------------------------------------------------------------------

    def _hand_over(self, way: str, number: int, microbatch: int, x: Any) -> None:
        """Give an output to the next stage, or (way "B") an input's gradient to the one before: here, or in a
        message, when its SEND comes."""
        to = number + 1 if way == "F" else number - 1
        here = self.schedule.rank_of(to, microbatch) == self.place.index
        self._label(x, way, number, microbatch)
        if here:
            self._arriving[way, to, microbatch] = x
        else:
            self._leaving[way, number, microbatch] = x

    def _hand_back(self, number: int, microbatch: int, grads: Tensors) -> None:
        if not self.stages[number].is_first:
            if not grads:
                raise ScheduleError(
                    f"nothing that enters stage {number} is of floating point, so no gradient can flow back to stage "
                    f"{number - 1}; cut the model elsewhere"
                )
            self._hand_over("B", number, microbatch, grads)

    def _taken(self, way: str, number: int, microbatch: int) -> Tensors:
        """What has arrived for F, or for B or I; waits for it where it has not."""
        found = self._arriving.pop((way, number, microbatch))
        return found if isinstance(found, tuple) else found.wait()

    def _neighbor(self, way: str, number: int, microbatch: int) -> int:
        return self.schedule.rank_of(number + 1 if way == "F" else number - 1, microbatch)

    def _input(self, microbatch: int) -> Tensors:
        given = self.microbatches[microbatch][0]
        return given if isinstance(given, tuple) else (given,)

    def _target(self, microbatch: int) -> list[Tensor]:
        return [x for x in pytree.tree_leaves(self.microbatches[microbatch][1]) if isinstance(x, Tensor)]

    def _output_grads(self, number: int, microbatch: int) -> Tensors:
        """Of the last stage, that of its share of the mean loss."""
        if not self.stages[number].is_last:
            return self._taken("B", number, microbatch)
        return (torch.full_like(self._losses.pop(microbatch), 1 / len(self.microbatches)),)

    def _finish(self, microbatch: int) -> Callable[..., Tensors]:
        def finish(*outputs: Tensor) -> Tensors:
            target = self.microbatches[microbatch][1]
            value = self.loss(outputs[0] if len(outputs) == 1 else outputs, target)
            if not isinstance(value, Tensor) or value.dim() or not has_gradient(value):
                is_tensor = isinstance(value, Tensor)
                what = f"a {value.dtype} tensor {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
                raise ShapeError(
                    f"the loss of microbatch {microbatch} is {what}; it must be one number, as .mean() or .sum() give"
                )
            if not value.requires_grad:
                raise ScheduleError(
                    f"the loss of microbatch {microbatch} depends on nothing that has a gradient, so nothing would be "
                    "trained; look for detach(), no_grad() or item() in the loss and the last stage, or for parameters "
                    "that are all frozen"
                )
            return (value,)

        return finish

    # --- the trace -----------------------------------------------------------------------------------------------

    @contextmanager
    def _doing(self, kind: str, number: int, microbatch: int) -> Iterator[None]:
        """The action's event in the trace, "F3" at "stage 1", with the bytes that are kept after it."""
        label = self._chunk(microbatch, ())
        takes = self.durations.get((kind, number, microbatch), 0.0)
        with self.rank.doing(Doing(f"{kind}{microbatch}", f"stage {number}", label, takes)):
            yield
            made = self._passes.get((number, microbatch))
            self._kept[number, microbatch] = 0 if made is None else made.num_bytes()
            self.rank.held = sum(self._kept.values())

    def _chunk(self, microbatch: int, contributors: tuple[int, ...]) -> Any:
        home = self.place.group[self.schedule.rank_of(0, microbatch)]
        return self.rank.label(home, microbatch, contributors)

    def _label(self, x: Tensors, way: str, number: int, microbatch: int) -> None:
        """Say of what is sent which microbatch it is of, and through which ranks that has come."""
        last = number if way == "F" else self.schedule.num_stages - 1
        ranks = {self.place.group[self.schedule.rank_of(stage, microbatch)] for stage in range(last + 1)}
        label = self._chunk(microbatch, tuple(sorted(ranks)))
        for part in x:
            self.rank.labels.set(part, label)


# --- what can be wrong with the arguments ----------------------------------------------------------------------------


def _modules_of(schedule: Schedule, stages: Any, index: int, num_ranks: int, label: str) -> dict[int, nn.Module]:
    """Stage number -> module of this rank. Raises ScheduleError where they are not those of its row."""
    require_ranks(schedule, num_ranks, label)
    held = tuple(dict.fromkeys(schedule.placement[index]))
    if isinstance(stages, nn.Module):
        stages = [stages]
    if not isinstance(stages, Mapping | Sequence):
        raise TypeError(
            f"train_batch takes an nn.Module for each stage, not {stages!r}; stages_of(layers, schedule) makes them, "
            "also of functions"
        )
    if not isinstance(stages, Mapping):
        if len(stages) != len(held):
            raise ScheduleError(
                f"position {index} of axis {label!r} holds {_stages(held)}, but was given {len(stages)}; give a module "
                "for each, in this order, or {stage: module}"
            )
        stages = dict(zip(held, stages))
    missing, extra = [n for n in held if n not in stages], [n for n in stages if n not in held]
    if missing or extra:
        wrong = f"{_stages(missing)} is missing" if missing else f"{_stages(extra)} is not its own"
        raise ScheduleError(
            f"position {index} of axis {label!r} holds {_stages(held)}, but was given {_stages(list(stages))}: {wrong}"
        )
    for n in held:
        if not isinstance(stages[n], nn.Module):
            raise TypeError(f"stage {n} is {stages[n]!r}; it must be an nn.Module: stages_of makes one of functions")
    return {n: stages[n] for n in held}


def _durations(schedule: Schedule, costs: Costs | None, index: int) -> dict[tuple[str, int, int], float]:
    """(kind, stage, microbatch) -> how long it takes by `costs`."""
    if costs is None:
        return {}
    takes = costs.durations(schedule)
    first, after = schedule.offsets[index], schedule.offsets[index + 1]
    actions = schedule.by_rank()[index]
    return {(a.kind, a.stage, a.microbatch): float(t) for a, t in zip(actions, takes[first:after])}


def _stages(numbers: Sequence[int]) -> str:
    if not numbers:
        return "no stage"
    return f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
