"""The steps of one rank of a watched script: its initial state, its gradients as they arrive, its updates."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from tplab.checking.recording import Piece, Seen, Step
from tplab.torch.checking.handed import Enough, Plan
from tplab.torch.checking.mending import Mending
from tplab.torch.checking.names import Names, address_of, parameters_of
from tplab.torch.checking.origins import Origins, made, terms
from tplab.torch.checking.pending import Draws, Pending
from tplab.torch.checking.pieces import is_reduced, is_there, nudged, piece_of, put_piece, reduced, sampled
from tplab.torch.checking.trail import Recorder
from tplab.torch.private import graph_task, local_of, transform
from tplab.torch.ranks.rank import this_rank


class WatchedSteps:
    """The steps of one rank while it is watched.

    depth       whether it is in a call of its model; is_looking: whether a collective is the watch's own
    has_enough  whether it is no longer watched
    step        the current step
    computed    results of modules in it, by id: they are not samples
    normed      copies of tensors whose norm the script took before it assigned them to its parameters, by address
    """

    def __init__(self, plan: Plan, seen: Seen):
        self.plan, self.seen = plan, seen
        mesh = this_rank().mesh
        seen.groups.update(mesh.axis_size(name) for name in mesh.axis_names)
        self.names, self.step, self.depth, self.is_looking = Names(), Step(), 0, False
        self.origins = Origins()
        self.mending = Mending(plan.repairs, plan.board, self)
        self.recorder = Recorder(self.names, self._is_traced, self.mending.put)
        self._draws = Draws(plan)
        self._called: list[tuple[CodeType, str]] = []
        self._pending = Pending()
        self._optimizers: dict[int, Optimizer] = {}
        self._made: list[Optimizer] = []
        self._inside: Optimizer | None = None
        self._hooked: dict[int, Any] = {}
        self._used = set[int]()
        self._detached, self.computed = dict[int, Tensor](), dict[int, Tensor]()
        self._num_backward = 0
        self._backward_in = set[CodeType]()
        self._old, self.normed = dict[int, Any](), dict[int, Tensor]()
        self.is_measured = self._has_begun = self.has_enough = False

    def line(self) -> str:
        return this_rank().lines.here()

    def _is_traced(self) -> bool:
        """Return whether this is the step to record. It begins right after the update before it, and ends when all
        ranks' updates have arrived."""
        now = self.seen.num_steps
        return not self.is_looking and self.plan.traced in (now, now + self.step.has_stepped)

    @property
    def moment(self) -> str:
        """Where the rank is in its step: see `Sent`."""
        if graph_task() != -1:
            return "backward"
        if self._inside is not None:
            return "step"
        if self.depth:
            return "forward"
        return "after" if self.step.has_stepped else "reduction" if self._num_backward else "between"

    @contextmanager
    def looks(self) -> Iterator[None]:
        """Computations and collectives inside are not the script's."""
        before, self.is_looking = self.is_looking, True
        try:
            with torch.no_grad():
                yield
        finally:
            self.is_looking = before

    def _gradients(self, parameters: list[Tensor]) -> dict[str, Piece]:
        return self._pieces((self.names.of(p), reduced(p.grad, p)) for p in parameters if p.grad is not None)

    def _pieces(self, tensors: Iterable[tuple[Any, Tensor]]) -> dict[Any, Piece]:
        return {name: piece_of(x, self.plan.once) for name, x in tensors if is_there(x)}

    # --- a microbatch ------------------------------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        """Return whether the rank makes another step, and is watched in it. Raises Enough if it is to end."""
        if self.seen.num_steps < self.plan.steps:
            return True
        if self.plan.ends:
            raise Enough
        self.has_enough = True
        return False

    def _begin(self) -> None:
        """Prepare the first forward pass."""
        self.mending.begin()
        if self.seen.num_steps:
            return
        if "empty" in self.seen.lines:
            unfilled = (p for p in self.names.parameters() if bool(local_of(p).isnan().any()))
            self.seen.unfilled = [self.names.of(p) for p in unfilled]
        with torch.no_grad():
            for parameter in self.names.parameters():
                if (values := (self.plan.weights or {}).get(self.names.of(parameter))) is not None:
                    put_piece(parameter, torch.from_numpy(np.array(values)))
                if self.plan.nudges and is_there(parameter):
                    local_of(parameter).copy_(nudged(local_of(parameter)))

    def _see_buffers(self) -> None:
        """Record the buffers before a forward pass changes them."""
        with self.looks():
            self.seen.buffers = self._pieces(self.names.buffers()) | self.seen.buffers

    def _hook(self) -> None:
        """See each gradient as it arrives, before anything is reduced."""
        for parameter in self.names.parameters():
            if id(parameter) not in self._hooked and parameter.requires_grad:

                def arrived(gradient: Tensor, parameter: Tensor = parameter) -> None:
                    self._arrived(parameter, gradient)

                self._hooked[id(parameter)] = parameter.register_hook(arrived)

    def _arrived(self, parameter: Tensor, gradient: Tensor) -> None:
        name, parts = self.names.of(parameter), self.step.parts
        while len(parts) <= self._num_backward:
            parts.append({})
        found = sampled(gradient)
        mine = parts[self._num_backward]
        mine[name] = mine[name] + found if name in mine else found
        if self.seen.num_steps == 0 and name not in self.seen.order:
            self.seen.order.append(name)

    def begin_backward(self, tensors: Any, grads: Any) -> Any:
        """Record the beginning of a backward pass. Return the gradients that it begins with."""
        self.settle()
        if not self._goes_on():
            return grads
        self.is_measured = False
        self.normed.clear()
        first = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        line = self.line()
        self.recorder.begin_backward(first)
        self.step.lines["backward"] = line
        self._backward_in = {code for code, _ in this_rank().lines.chain()}
        self._hook()
        if not self._made and not self.seen.weights:
            with self.looks():
                self.seen.weights = self._pieces((self.names.of(p), p) for p in self.names.parameters())
                self.seen.shared = self.names.shared()
        is_first = grads is None or (not isinstance(grads, Tensor) and all(grad is None for grad in grads))
        if isinstance(first, Tensor) and first.numel() == 1 and is_first:
            by = self.mending.loss(len(self.step.losses))
            grads = torch.full_like(first, by) if by != 1.0 else grads
            self.step.losses.append((by * float(local_of(first).detach()), line))
            self.step.made, self.step.terms = self.step.made or made(first), self.step.terms or terms(first)
        if called := [line for code, line in self._called if code in self._backward_in]:
            self.step.lines.setdefault("call", called[0])
        return grads

    def end_backward(self) -> None:
        self._num_backward += 1
        self._detached.clear()
        self.step.parts += [{} for _ in range(self._num_backward - len(self.step.parts))]

    # --- a step ------------------------------------------------------------------------------------------------------

    def clip(self, parameters: list[Tensor], norm: Tensor) -> None:
        line = self.line()
        with self.looks():
            value = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[operator]
            self.step.lines["clip"] = line
            self.step.norms.append((float(value), line, tuple(map(self.names.of, parameters))))
            if not self.is_measured:
                self.step.gradients |= self._gradients(parameters)
        self.is_measured = True

    def measure(self, tensors: Sequence[Tensor]) -> None:
        """Record gradients when a norm of these tensors is taken, because a clip by it may follow. The tensors may be
        gradients that the script assigns to its parameters only afterwards."""
        parameters = parameters_of(self._made)
        if self.is_measured or not all(p.grad is None or is_reduced(p.grad, p) for p in parameters):
            return
        with self.looks():
            if not any(p.grad is not None and self._is_new(p) for p in parameters):
                self.normed.update((address_of(x), x.detach().clone()) for x in tensors)
                return
            self.step.gradients = self._gradients(parameters)
        self.is_measured = True

    def _is_new(self, parameter: Any) -> bool:
        """Return whether its gradient is another tensor than at the end of the last step, or was written to since."""
        old, version = self._old.get(id(parameter), (lambda: None, 0))
        return old() is not parameter.grad or version != parameter.grad._version

    def before_step(self, optimizer: Optimizer) -> None:
        if self._inside is not None:
            return  # called by another optimizer
        if id(optimizer) in self._optimizers and self.step.has_stepped:
            self.settle()
        self._inside = optimizer
        self._optimizers[id(optimizer)] = optimizer
        parameters = parameters_of([optimizer])
        self.mending.before_step(optimizer)
        with self.looks():
            finals = self._gradients(parameters)
            given = {p: self.normed.get(address_of(p.grad)) for p in parameters if p.grad is not None}
            before = {p: x for p, x in given.items() if x is not None and x.shape == p.grad.shape}
            self.step.gradients |= self._pieces((self.names.of(p), reduced(x, p)) for p, x in before.items())
            if self.is_measured or before:
                self.step.finals |= finals
                finals = {name: piece for name, piece in finals.items() if name not in self.step.gradients}
            self.step.gradients |= finals
            if not self.seen.num_steps:
                parameters += self.names.parameters()
                weights = self._pieces((self.names.of(p), p) for p in parameters)
                self.seen.weights = weights | self.seen.weights  # another optimizer may already have stepped
                if not all(map(is_there, parameters)):
                    self.seen.lines.setdefault("freed", self.origins.of(optimizer))
                self._see_buffers()
                self.seen.shared = self.names.shared()
            elif new := [p for p in parameters if self.names.of(p) not in self.seen.weights]:  # as after a restart
                weights = self._pieces((self.names.of(p), p) for p in new)
                self.seen.weights |= weights
                self.seen.late |= set(weights)
        for group in optimizer.param_groups:
            settings = dict(_numbers(group))
            self.step.settings.update((self.names.of(p), settings) for p in group["params"])
        self.step.lines |= self.origins.lines(optimizer)
        with self.looks():
            self.mending.begin_update(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        if self._inside is optimizer:
            with self.looks():
                self.mending.end_update()
            self._inside = None
            self.step.lines["step"] = self.line()

    def skip(self) -> None:
        """Begin the step again after an update was skipped because gradients were not finite."""
        if self.step.has_stepped or not self._num_backward:
            return
        step, line = self.step, self.line()
        self._pending.move(step)
        self.step = Step(prints=step.prints, skipped=step.skipped + 1, lines={"skipped": line})
        self._num_backward, self.is_measured = 0, False
        self.seen.lines["skipped"] = line

    def settle(self) -> None:
        """Close the step that the optimizer has made: other ranks' updates have arrived by now."""
        if not self.step.has_stepped or self._inside is not None:
            return
        step, is_whole = self.step, transform() is None  # under a transform, the model has other weights
        self.mending.after_step(self.names.parameters())
        self._pending.move(step)
        with self.looks():
            if is_whole:
                step.parameters = self._pieces((self.names.of(p), p) for p in self.names.parameters())
                step.buffers = self._pieces(self.names.buffers())
            for optimizer in self._optimizers.values():
                parameters = parameters_of([optimizer])
                step.parameters |= self._pieces((self.names.of(p), p) for p in parameters)
                for p in parameters:
                    states = {(self.names.of(p), key): x for key, x in optimizer.state.get(p, {}).items()}
                    step.states |= self._pieces(
                        (key, torch.as_tensor(x)) for key, x in states.items() if isinstance(x, Tensor) or _is_number(x)
                    )
        self.seen.kinds |= self.names.kinds()
        self._draws.close(self.seen.num_steps, step)
        self.seen.steps.append(step)
        self.step, self._num_backward, self.is_measured = Step(), 0, False
        self.normed.clear()
        every = parameters_of(self._optimizers.values())
        self._old = {id(p): (weakref.ref(p.grad), p.grad._version) for p in every if p.grad is not None}
        self.computed.clear()

    def close(self) -> None:
        self.recorder.close()
        self.seen.used.update(filter(None, map(self.names.known, self._used)))
        self._pending.move(self.step)
        self.seen.places = this_rank().lines.places
        self.seen.steps.append(self.step)  # the rest after the last step
        for handle in self._hooked.values():
            handle.remove()
        self.names = Names()
        self._optimizers.clear()


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the settings that are numbers, those in tuples included."""
    for key, x in group.items():
        if _is_number(x) or (isinstance(x, Tensor) and x.numel() == 1):
            yield key, float(x)
        elif isinstance(x, tuple) and all(map(_is_number, x)):
            yield from ((f"{key}[{place}]", float(one)) for place, one in enumerate(x))


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)
