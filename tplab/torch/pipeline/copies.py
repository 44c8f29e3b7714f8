"""Copies of parameters on several ranks: their gradients are added up or averaged before the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from tplab.errors import ScheduleError
from tplab.mesh import Axis
from tplab.pipeline.checks import Tied, check_tied, check_tied_name
from tplab.schedules.placement import Placement
from tplab.torch.comm.collectives import all_reduce, axis_size
from tplab.torch.comm.messages import receive, send
from tplab.torch.layers.parameters import copies_in
from tplab.torch.pipeline.graph import Gradients
from tplab.torch.pipeline.stage import Stage
from tplab.torch.private import at_end_of_backward, base_of, post_accumulate_hooks, storage_id
from tplab.torch.ranks.rank import this_rank


def at_end_of_pass(then: Callable[[], None]) -> Callable[[], object]:
    """Call `then` at the end of the current backward pass; in `train_batch`, after the backward passes of the batch.

    Returns a function that returns None once `then` will not be called any more: a pass that raises has no end.
    """
    waiting, call = this_rank().after_batch, partial(then)
    if waiting is None:
        at_end_of_backward(call)
    else:
        waiting.append(call)
    return ref(call)


class _Copies(NamedTuple):
    """One parameter of the model: its places (stage, name) on this rank, and all ranks that hold it."""

    here: list[tuple[int, str]]
    holders: list[int]


class GradientSync:
    """The processing of gradients after the backward passes of a batch.

    Over `data_axis` they are averaged, stage by stage. Experts, of which those ranks hold different ones, are added up
    over their copies and divided by the number of all ranks. Then copies along `axis` are added up: each rank that
    holds one sends its part to the others, and adds all parts in the order of ranks, so that copies stay equal to the
    last bit. At the end all are added to `.grad`, and the parameters' post-accumulate-grad hooks are called. If a
    parameter with such hooks needs nothing from other ranks, `leaving` calls them once the last backward pass of its
    stage has computed the gradient.
    """

    def __init__(
        self, stages: Mapping[int, Stage], placement: Placement, axis: Axis, data_axis: Axis | None, tied: Tied
    ):
        self._stages, self._axis, self._data_axis = stages, axis, data_axis
        self._names = {n: dict(stage.module.named_parameters()) for n, stage in stages.items()}
        self._index = this_rank().place(axis).index
        self._copies = list(self._find(placement, tied))
        self._reduced: set[int] = set()
        self._gone: set[nn.Parameter] = set()  # parameters that already have their gradients
        copied = {place for copies in self._copies for place in copies.here}
        self._alone = {
            n: [] if data_axis is not None else [p for name, p in names.items() if (n, name) not in copied]
            for n, names in self._names.items()
        }

    @contextmanager
    def batch(self) -> Iterator[None]:
        """A context around a batch: functions that are passed to `at_end_of_pass` inside are called at its end."""
        rank, waiting = this_rank(), list[Callable[[], None]]()
        rank.after_batch = waiting
        try:
            yield
        except BaseException:
            waiting.clear()
            raise
        finally:
            rank.after_batch = None
        for then in waiting:
            then()

    @contextmanager
    def leaving(self, stage: int, gradients: Gradients, in_one: bool) -> Iterator[None]:
        """A context for the last backward pass of a stage, in which each gradient goes to `.grad` once it is complete.

        in_one   whether each parameter's gradient comes in one piece: not if W adds up several products
        """

        def arrived(parameter: nn.Parameter, grad: Tensor) -> Tensor:
            before = gradients.pop(parameter, None)
            self._give(parameter, grad if before is None else before + grad)
            return grad.new_zeros(()).expand_as(grad)  # the pass keeps this until it ends, instead of the gradient

        alone = [p for p in self._alone[stage] if p.requires_grad and post_accumulate_hooks(p)]
        once = self._stages[stage].in_one_section() if in_one else ()
        handles = [p.register_hook(partial(arrived, p)) for p in alone if p in once]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for parameter in alone:
            grad = gradients.pop(parameter, None)
            if grad is not None and parameter not in self._gone:
                self._give(parameter, grad)

    def _give(self, parameter: nn.Parameter, grad: Tensor) -> None:
        self._gone.add(parameter)
        with torch.no_grad():
            parameter.grad = grad.detach().clone() if parameter.grad is None else parameter.grad + grad
        _call_hooks(parameter)

    def reduce(self, stage: int, gradients: Mapping[int, Gradients]) -> None:
        """Average the gradients of one stage over the data-parallel ranks, once."""
        if self._data_axis is None or stage in self._reduced:
            return
        self._reduced.add(stage)
        found, copies = gradients[stage], copies_in([self._stages[stage].module], self._data_axis)
        for parameter in self._stages[stage].parameters():
            grad, axis = found.get(parameter), copies(parameter)
            own = (torch.zeros_like(parameter) if grad is None else grad).detach()
            if axis == self._data_axis:
                found[parameter] = all_reduce(own, axis, "mean")
            else:
                found[parameter] = (all_reduce(own, axis) if axis else own) / axis_size(self._data_axis)

    def finish(self, gradients: Mapping[int, Gradients]) -> None:
        """Average what has not been averaged, add up copies, and give every parameter its gradient."""
        for stage in self._stages:
            self.reduce(stage, gradients)
        parts = [self._part(copies, gradients) for copies in self._copies]
        for part, copies in zip(parts, self._copies):
            for holder in copies.holders:
                if holder != self._index:
                    send(part, self._axis, holder)
        for part, copies in zip(parts, self._copies):
            total = None
            for holder in copies.holders:  # the same order on all of them
                term = part if holder == self._index else receive(self._axis, holder)
                assert isinstance(term, Tensor)
                if term.shape != part.shape:
                    stage, name = copies.here[0]
                    raise ScheduleError(
                        f"parameter {name!r} of stage {stage} is {list(part.shape)} here, and its copy at position "
                        f"{holder} of axis {self._axis!r} {list(term.shape)}; copies must have one shape"
                    )
                total = term if total is None else total + term
            assert total is not None
            met: set[nn.Parameter] = set()
            for stage, name in copies.here:
                parameter = self._names[stage][name]
                if parameter in met:  # two names here for one parameter
                    gradients[stage].pop(parameter, None)
                else:
                    gradients[stage][parameter] = total.clone() if met else total  # memory of its own
                    met.add(parameter)
        given: set[int] = set()
        for found in gradients.values():
            for parameter, grad in found.items():
                parameter.grad = _own(grad, given) if parameter.grad is None else parameter.grad + grad
        for parameter in dict.fromkeys(parameter for found in gradients.values() for parameter in found):
            _call_hooks(parameter)

    def _part(self, copies: _Copies, gradients: Mapping[int, Gradients]) -> Tensor:
        """The sum of the gradients of this rank's copies."""
        parameters = [self._names[stage][name] for stage, name in copies.here]
        found = [gradients[stage].get(p) for (stage, _), p in zip(copies.here, parameters)]
        total = torch.zeros_like(parameters[0])
        for grad in found:
            if grad is not None:
                total = total + grad
        return total.detach()

    def _find(self, placement: Placement, tied: Tied) -> Iterator[_Copies]:
        """This rank's copies: of parameters tied by name, then of stages that several ranks hold."""
        ranks_of = {n: [r for r, held in enumerate(placement) if n in held] for held in placement for n in held}
        in_a_tie = set()
        check_tied(tied, 1 + max(ranks_of))
        for tie in tied:
            here = [(stage, name) for stage, name in tie if stage in self._stages]
            for stage, name in here:
                check_tied_name(stage, name, self._names[stage])
            in_a_tie |= set(here)
            if here:
                yield _Copies(here, sorted({rank for stage, _ in tie for rank in ranks_of[stage]}))
        for stage in sorted(self._stages):
            if len(ranks_of[stage]) > 1:
                for name, parameter in self._names[stage].items():
                    if parameter.requires_grad and (stage, name) not in in_a_tie:
                        yield _Copies([(stage, name)], ranks_of[stage])


def _call_hooks(parameter: nn.Parameter) -> None:
    for hook in list((post_accumulate_hooks(parameter) or {}).values()):
        hook(parameter)


def _own(grad: Tensor, given: set[int]) -> Tensor:
    """A gradient that nothing else writes to. `given` has the storages of those before it: autograd may give one tensor
    to several parameters, as where they are added up."""
    is_free = base_of(grad) is None and grad.is_contiguous() and storage_id(grad.untyped_storage()) not in given
    given.add(storage_id(grad.untyped_storage()))
    return grad.detach() if is_free else grad.detach().clone()
