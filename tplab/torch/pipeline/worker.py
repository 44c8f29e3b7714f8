"""One rank's side of a batch in a pipeline: its stages, and what passes between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tplab.errors import ScheduleError
from tplab.mesh import Axis
from tplab.pipeline.checks import check_loss, check_microbatches, no_way_back
from tplab.schedules import Action, Costs, Schedule
from tplab.schedules.check import require_ranks
from tplab.torch.comm.collectives import all_reduce, start
from tplab.torch.comm.messages import receive, send
from tplab.torch.pipeline.graph import Gradients, Tensors, add_gradients, has_gradient
from tplab.torch.pipeline.pair import Pair
from tplab.torch.pipeline.redraw import Redraw
from tplab.torch.pipeline.stage import Pass, Stage
from tplab.torch.private import pytree
from tplab.torch.ranks.rank import this_rank
from tplab.trace.journal import Doing

Loss = Callable[[Any, Any], Tensor]


class Worker:
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
        first: int = 0,
    ):
        self.first = first
        self.rank, self.schedule, self.loss, self.axis = this_rank(), schedule, loss, axis
        self.place = self.rank.place(axis)
        modules = _modules_of(schedule, stages, self.place.index, len(self.place.group), self.place.label)
        self.stages = {n: Stage(module, n, schedule.num_stages, checkpoint_every) for n, module in modules.items()}
        self.microbatches = check_microbatches(microbatches, schedule.num_microbatches)
        self.durations = _durations(schedule, costs, self.place.index)
        self.overlap, self._is_in_pair = 0.0 if costs is None else costs.overlap, False
        self.gradients: dict[int, Gradients] = {stage: {} for stage in self.stages}
        self.device = next((p.device for m in modules.values() for p in m.parameters()), torch.empty(0).device)
        self.total_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._arriving: dict[tuple[str, int, int], Any] = {}  # inputs of F or B, by stage and microbatch
        self._leaving: dict[tuple[str, int, int], Any] = {}  # to be sent
        self._passes: dict[tuple[int, int], Pass] = {}
        self._kept: dict[tuple[int, int], int] = {}  # bytes of each pass
        self._losses: dict[int, Tensor] = {}
        self.batch = self.rank.draws.get("batches", 0)  # the number of batches before this one
        self._does = {"F": self.forward, "B": self.backward, "I": self.input_grad, "W": self.weight_grad}

    def run(self, action: Action) -> None:
        """Run one action of the row."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        way = kind[-1]
        if kind in self._does:
            self._does[kind](stage, microbatch)
        elif kind.startswith("SEND"):
            send(self._leaving.pop((way, stage, microbatch)), self.axis, self._neighbor(way, stage, microbatch))
        elif kind.startswith("RECV"):
            source = self._neighbor("B" if way == "F" else "F", stage, microbatch)
            self._arriving[way, stage, microbatch] = start(receive, self.axis, source)

    def run_pair(self, first: Action, second: Action) -> None:
        """Run a forward and a backward pass at once: the messages of one travel while the other computes."""
        forward, backward = (first, second) if first.kind == "F" else (second, first)
        for way, one in (("F", forward), ("B", backward)):  # the pair begins when both can
            key = way, one.stage, one.microbatch
            if key in self._arriving:
                self._arriving[key] = self._taken(*key)
        keys = [(one.kind, one.stage, one.microbatch) for one in (first, second)]
        takes = [self.durations.get(key, 0.0) for key in keys]
        label = self._chunk(first.microbatch, ())
        name, where = f"{first.label}+{second.label}", f"stage {first.stage} + stage {second.stage}"
        about = Doing(name, where, label, sum(takes) - self.overlap * min(takes))
        with self.rank.doing(about):
            self._is_in_pair = True
            Pair(partial(self.run, forward)).run(partial(self.run, backward))
            self._is_in_pair = False
            for _, number, microbatch in keys:
                self._keeps(number, microbatch)

    def mean_loss(self, data_axis: Axis | None) -> Tensor:
        """The mean loss of all microbatches, the same on every rank."""
        mean = all_reduce(self.total_loss, self.axis) / len(self.microbatches)
        return mean if data_axis is None else all_reduce(mean, data_axis, "mean")

    # --- the four computations -----------------------------------------------------------------------------------

    def forward(self, number: int, microbatch: int) -> None:
        stage = self.stages[number]
        inputs = self._input(microbatch) if stage.is_first else self._taken("F", number, microbatch)
        with self._doing("F", number, microbatch):
            redraw = Redraw(self.rank, (self.batch, number, self.first + microbatch), self.axis, self.device)
            outputs = self._outputs(stage, microbatch, inputs, redraw)
            if stage.is_last:
                self.total_loss = self.total_loss + outputs[0]
            else:
                self._hand_over("F", number, microbatch, outputs)

    def _outputs(self, stage: Stage, microbatch: int, inputs: Tensors, redraw: Redraw) -> Tensors:
        """The outputs of the stage; for the last stage, the loss. What the backward pass needs is kept."""
        finish = self._finish(microbatch) if stage.is_last else None
        target = self._target(microbatch) if stage.is_last else []
        made = self._passes[stage.number, microbatch] = Pass(stage, inputs, finish, redraw, target)
        outputs, made.outputs = made.outputs, ()
        if stage.is_last:
            self._losses[microbatch] = outputs[0]
        return outputs

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
        """Pass an output to the next stage, or (way "B") an input's gradient to the one before: directly if it is on
        this rank, otherwise in a message when its SEND comes."""
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
                raise no_way_back(number)
            self._hand_over("B", number, microbatch, grads)

    def _taken(self, way: str, number: int, microbatch: int) -> Tensors:
        """What has arrived for F, B or I; waits for it if necessary."""
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
        """The gradients of a stage's outputs. For the last stage: its loss's weight in the mean loss."""
        if not self.stages[number].is_last:
            return self._taken("B", number, microbatch)
        return (torch.full_like(self._losses.pop(microbatch), 1 / len(self.microbatches)),)

    def _loss_of(self, microbatch: int, outputs: Tensors) -> Tensor:
        target = self.microbatches[microbatch][1]
        value = self.loss(outputs[0] if len(outputs) == 1 else outputs, target)
        check_loss(value, Tensor, has_gradient, f"microbatch {microbatch}")
        return value

    def _finish(self, microbatch: int) -> Callable[..., Tensors]:
        def finish(*outputs: Tensor) -> Tensors:
            value = self._loss_of(microbatch, outputs)
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
        if self._is_in_pair:  # the pair is one event
            yield
            return
        label = self._chunk(microbatch, ())
        takes = self.durations.get((kind, number, microbatch), 0.0)
        with self.rank.doing(Doing(f"{kind}{microbatch}", f"stage {number}", label, takes)):
            yield
            self._keeps(number, microbatch)

    def _keeps(self, number: int, microbatch: int) -> None:
        made = self._passes.get((number, microbatch))
        self._kept[number, microbatch] = 0 if made is None else made.num_bytes()
        self.rank.held = sum(self._kept.values())

    def _chunk(self, microbatch: int, contributors: tuple[int, ...]) -> Any:
        home = self.place.group[self.schedule.rank_of(0, microbatch)]
        return self.rank.label(home, microbatch, contributors)

    def _label(self, x: Tensors, way: str, number: int, microbatch: int) -> None:
        """Label what is sent with its microbatch, and the ranks that it has passed through."""
        last = number if way == "F" else self.schedule.num_stages - 1
        ranks = {self.place.group[self.schedule.rank_of(stage, microbatch)] for stage in range(last + 1)}
        label = self._chunk(microbatch, tuple(sorted(ranks)))
        for part in x:
            self.rank.labels.set(part, label)


class Evaluation(Worker):
    """Forward passes only: nothing is kept for a backward pass."""

    def _outputs(self, stage: Stage, microbatch: int, inputs: Tensors, redraw: Redraw) -> Tensors:
        with redraw:
            for section in stage.sections:
                inputs = section.function(*inputs)
        return (self._loss_of(microbatch, inputs),) if stage.is_last else inputs


# --- what can be wrong with the arguments ----------------------------------------------------------------------------


def _modules_of(schedule: Schedule, stages: Any, index: int, num_ranks: int, label: str) -> dict[int, nn.Module]:
    """This rank's modules by stage number. Raises ScheduleError if they are not the stages of its row."""
    require_ranks(schedule, num_ranks, label)
    held = tuple(dict.fromkeys(schedule.placement[index]))
    if isinstance(stages, nn.Module):
        stages = [stages]
    if not isinstance(stages, Mapping | Sequence):
        raise TypeError(
            f"a pipeline takes an nn.Module for each stage, not {stages!r}; stages_of(layers, schedule) makes them, "
            "also from functions"
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
            raise TypeError(f"stage {n} is {stages[n]!r}; it must be an nn.Module: stages_of makes one from functions")
    return {n: stages[n] for n in held}


def _durations(schedule: Schedule, costs: Costs | None, index: int) -> dict[tuple[str, int, int], float]:
    """(kind, stage, microbatch) -> its duration under `costs`."""
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
