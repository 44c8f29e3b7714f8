"""One rank of a watched script: what it computes in each step of its optimizer, and at which lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data.distributed import DistributedSampler

from tplab.checking.masks import Drawn, mark
from tplab.checking.recording import Piece, Seen, Sent, Step, checksum
from tplab.torch.checking.made import made, terms
from tplab.torch.checking.mending import Back, Mending, Through
from tplab.torch.checking.names import OF_A_BATCH, Names, address_of, parameters_of
from tplab.torch.checking.origins import NORMS, SQUARES, ByHand, Origins
from tplab.torch.checking.pending import Call, Draws, Pending
from tplab.torch.checking.pieces import (
    array_of,
    data_in,
    is_loss,
    is_reduced,
    is_there,
    nudged,
    piece_of,
    put_piece,
    reduced,
    replaced,
    sampled,
)
from tplab.torch.checking.plan import Enough, Plan
from tplab.torch.checking.trail import Recorder, line_of_return
from tplab.torch.private import graph_task, local_of, transform
from tplab.torch.ranks.meter import tensors_in
from tplab.torch.ranks.rank import this_rank
from tplab.torch.ranks.values import dtype_name


class Watched:
    """One rank while it is watched.

    depth       whether it is in a call of its model; is_looking: whether a collective is the watch's own
    has_enough  whether it is not watched any more
    inside      the functions that it is in: where there are modes, torch calls them once more
    step        the step that is going on
    """

    def __init__(self, plan: Plan, seen: Seen):
        self.plan, self.seen = plan, seen
        mesh = this_rank().mesh
        seen.groups.update(mesh.axis_size(name) for name in mesh.axis_names)
        self.names, self.step, self.depth, self.is_looking = Names(), Step(), 0, False
        self.origins = Origins(lambda: this_rank().lines.chain())
        self.by_hand = ByHand(self.names, self.origins, self.measure)
        self.mending = Mending(plan.repairs, plan.board, self)
        self.recorder = Recorder(self.names, self._is_traced, self.mending.put)
        self._draws = Draws(plan)
        self.inside = set[Any]()
        self._called: list[tuple[CodeType, str]] = []
        self._pending = Pending()
        self._optimizers: dict[int, Optimizer] = {}
        self._made: list[Optimizer] = []
        self._inside: Optimizer | None = None
        self._hooked: dict[int, Any] = {}
        self._used = set[int]()
        self._detached = dict[int, Tensor]()
        self._num_backward = 0
        self._backward_in = set[CodeType]()
        self.is_measured = self._has_begun = self.has_enough = self._trains = False

    def line(self) -> str:
        return this_rank().lines.here()

    def print(self, text: str) -> None:
        self.step.prints.append((text, self.line()))

    @contextmanager
    def calls(self, function: Any) -> Iterator[None]:
        self.inside.add(function)
        try:
            yield
        finally:
            self.inside.discard(function)

    def make(self, thing: Any) -> None:
        self.origins.make(thing)
        if isinstance(thing, Optimizer):
            self._made.append(thing)
        if isinstance(thing, OF_A_BATCH):
            self.seen.made.setdefault("BatchNorm", self.origins.of(thing))

    def read(self, loader: Any) -> None:
        """Samples are taken from a loader."""
        self.origins.read(loader)
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler) and sampler.total_size > len(sampler.dataset):  # type: ignore[arg-type]
            self.seen.lines["padded"] = self.origins.of(sampler)
        if isinstance(sampler, DistributedSampler) and sampler.shuffle and sampler.num_replicas > 1:
            self.seen.samplers.append((sampler.seed + sampler.epoch, self.origins.of(sampler)))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A function of torch is called."""
        given = [*tensors_in((args, tuple(kwargs.values())))]
        if self.plan.repairs and self.moment == "reduction" and self._reads_gradients(func, given):
            self.mending.gradients(parameters_of(self._made))
        run = self.mending.function
        found = run(func, args, kwargs) if self.plan.traced is None else self.recorder.call(func, args, kwargs, run)
        is_detached = getattr(func, "__name__", "") == "detach" and given[0].requires_grad and not self.is_looking
        if is_detached and transform() is None:
            self._detached[address_of(found)] = given[0]
        used = [x for x in given if isinstance(x, nn.Parameter) and x is not found]
        if used and next(tensors_in(found), None) is not None and self._is_of_forward(given, found):
            self._used.update(map(id, used))
        return found

    def _is_of_forward(self, given: Sequence[Tensor], found: Any) -> bool:
        """Whether a function that takes parameters is of a forward pass that trains, even if its result needs no
        gradient: the rank may have frozen them, or have switched gradients off. Outside of the model it makes a tensor
        that needs one, or takes other tensors too: a print or a broadcast does not."""
        if self.is_looking:
            return False
        if self.moment == "forward":
            return self._trains
        has_data = not all(isinstance(x, nn.Parameter) for x in given)
        needs = any(x.requires_grad and x.numel() > 1 for x in tensors_in(found))
        return self.moment == "between" and torch.is_grad_enabled() and (has_data or needs)

    def _reads_gradients(self, func: Any, given: Sequence[Tensor]) -> bool:
        """Whether the function takes a norm, or a square of a gradient."""
        name = getattr(func, "__name__", "")
        of = self.names.at(address_of(given[0]))[0] if name in SQUARES and given else ""
        return name in NORMS or of == "gradient"

    def apply(self, function: Any, call: Any, args: Any, kwargs: Any) -> Any:
        """An autograd function is applied."""
        if self.plan.traced is not None or not self.plan.repairs or function in (Back, Through):
            return self.recorder.apply(function, call, args, kwargs)
        return self.mending.applied(self.line(), line_of_return(function), call())

    def compute(self, func: Any, args: Sequence[Any], found: Any) -> None:
        """A function of torch was called, and autograd has nothing to do with it."""
        if not self.is_looking:
            self.by_hand.see(func, args, found, self.step, self.moment, self._backward_in)

    def _is_traced(self) -> bool:
        """Whether the step that is to be recorded goes on. It begins right after the step before it."""
        return not self.is_looking and self.seen.num_steps + self.step.has_stepped == self.plan.traced

    def keep_apart(self) -> None:
        """Gradients are not to be added up over ranks, until further notice."""
        self.seen.lines["no sync"] = self.line()

    # --- a microbatch ------------------------------------------------------------------------------------------------

    def forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any, Call]:
        """The model is called, from outside of any module. Returns its arguments, and what has to know its result."""
        self.settle()
        call = Call()
        is_whole = transform() is None  # or the model is called with one sample, and with other weights
        if is_whole:
            self.names.note(module)
        self._trains = torch.is_grad_enabled() and module.training
        if not self._trains or not self._goes_on():
            return args, kwargs, call
        if is_whole:
            self._hook()
            if not self._has_begun:
                self._begin()
            if not self.seen.num_steps:
                self._see_buffers()
        self._has_begun = True
        data = data_in(args, kwargs)
        if not data or is_loss(module, args, kwargs):
            return args, kwargs, call
        self.recorder.begin_with(data.values())
        call.lines["forward"] = self.line()
        self._called = this_rank().lines.chain()
        self.origins.use_data(call.lines, max(len(x) if x.dim() else 0 for x in data.values()))
        if is_whole:
            before = data
            if self.plan.feed is not None:
                data = self.plan.feed.data(self.seen.num_steps, data)
            if self.plan.repairs:
                data = self.mending.samples(data)
            if self.plan.nudges:
                data = {name: nudged(x) for name, x in data.items()}
            args, kwargs = (args, kwargs) if data is before else replaced(args, kwargs, data)
        call.samples = {name: self.plan.once(x) for name, x in data.items()}
        return args, kwargs, self._pending.add(call)

    def _goes_on(self) -> bool:
        """Whether the rank makes another step, and is watched in it. Raises Enough where it is to end."""
        if self.seen.num_steps < self.plan.steps:
            return True
        if self.plan.ends:
            raise Enough
        self.has_enough = True
        return False

    def empty(self, module: nn.Module) -> None:
        """The module's tensors are now what was in memory: make that something that is known."""
        if not self.plan.ends:
            return
        self.seen.lines["empty"] = self.line()
        with self.looks():
            for x in (*module.parameters(), *module.buffers()):
                if x.is_floating_point() and not x.is_meta:
                    local_of(x).fill_(torch.nan)

    def _begin(self) -> None:
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
        """As they are before a forward pass changes them."""
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

    def target(self, target: Any, ignored: int) -> tuple[Any, Call]:
        """A loss is called. Returns what it compares with, and what has to know what it returns."""
        if not isinstance(target, Tensor) or not torch.is_grad_enabled():
            return target, Call()
        self.recorder.begin_with([target])
        if line := self.by_hand.label(target):
            self.step.lines.setdefault("label", line)
        if self.plan.feed is not None and transform() is None:
            target = self.plan.feed.target(self.seen.num_steps, target)
        if self.plan.repairs and transform() is None:
            target = self.mending.target(target, ignored)
        values = array_of(local_of(target))
        count = int((values != ignored).sum()) if values.dtype.kind in "iu" else values.size
        return target, self._pending.add(Call(target=(self.plan.once(target), count, self.line())))

    def draws_sample(self, code: CodeType, found: Tensor) -> Tensor:
        """A tensor was drawn outside of the model. Returns what the script is to get."""
        if self.is_looking or not torch.is_grad_enabled():
            return found
        return self._draws.draw(self.seen.num_steps + self.step.has_stepped, self.line(), code, found)

    def draw(self, x: Tensor, mask: Tensor) -> None:
        given, size = mark(array_of(x)), mask.numel() if local_of(x) is x else 0
        self.step.masks.append(Drawn(self.line(), given, checksum(array_of(mask != 0)), size))
        self.seen.kinds.add("Dropout")

    def begin_backward(self, tensors: Any, grads: Any) -> Any:
        """A backward pass begins. Returns the gradients that it begins with."""
        self.settle()
        if not self._goes_on():
            return grads
        self.is_measured = False
        first = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        line = self.line()
        self.recorder.begin_backward(first)
        self.step.lines["backward"] = line
        self._backward_in = {code for code, _ in this_rank().lines.chain()}
        self._hook()
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

    def measure(self) -> None:
        """A norm of the gradients is taken: what changes them from now on, such as a clip, does so by their size."""
        parameters = parameters_of(self._made)
        if self.is_measured or not all(p.grad is None or is_reduced(p.grad, p) for p in parameters):
            return
        with self.looks():
            self.step.gradients = self._gradients(parameters)
        self.is_measured = True

    def before_step(self, optimizer: Optimizer) -> None:
        if self._inside is not None:
            return  # an optimizer that calls another one
        if id(optimizer) in self._optimizers and self.step.has_stepped:
            self.settle()
        self._inside = optimizer
        self._optimizers[id(optimizer)] = optimizer
        parameters = parameters_of([optimizer])
        self.mending.before_step(optimizer)
        with self.looks():
            finals = self._gradients(parameters)
            if self.is_measured:
                self.step.finals |= finals
                finals = {name: piece for name, piece in finals.items() if name not in self.step.gradients}
            self.step.gradients |= finals
            if not self.seen.num_steps:
                parameters += self.names.parameters()
                weights = self._pieces((self.names.of(p), p) for p in parameters)
                self.seen.weights = weights | self.seen.weights  # another optimizer may have made its step
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
        """An update was left out, as gradients were not finite: the step begins again."""
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
        step, is_whole = self.step, transform() is None  # or other weights are in the places of the model's
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

    def close(self) -> None:
        self.recorder.close()
        self.seen.used.update(filter(None, map(self.names.known, self._used)))
        self._pending.move(self.step)
        self.seen.places = this_rank().lines.places
        self.seen.steps.append(self.step)  # what came after the last one
        for handle in self._hooked.values():
            handle.remove()
        self.names = Names()
        self._optimizers.clear()

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

    def send(self, call: Any, put: Tensor | Sequence[Tensor], is_open: bool = False) -> None:
        on, names, value, moment = "", tuple[str, ...](), None, self.moment
        x, size = next(tensors_in(put), None), sum(x.numel() for x in tensors_in(put))
        if x is not None and not x.is_meta:
            on, names = self.names.at(address_of(x))
            if x.numel() == 1 and x.is_floating_point():
                value = float(local_of(x).detach())
            if moment in ("backward", "reduction") and x.dtype in (torch.bfloat16, torch.float16):
                self.seen.kinds.add(dtype_name(x.dtype))  # gradients are rounded to it on their way
        if moment == "reduction" and self.is_measured and x is not None and (on == "gradient" or x.numel() > 1):
            self.is_measured = False  # what was measured, or clipped, is not what is added up over ranks
            if on == "gradient" and "clip" in self.step.lines:
                self.step.lines["early clip"] = self.step.lines["clip"]
        for done in ("clamp", "decay") if moment == "reduction" and on == "gradient" else ():
            if done in self.step.lines:
                self.step.lines[f"early {done}"] = self.step.lines[done]
        self.recorder.send(self.line())
        self.seen.has_sent = self.seen.has_sent or (len(call.place.group) > 1 and call.op != "barrier")
        sent = call.op, call.reduction, tuple(call.place.group), self.line(), moment
        self.step.sent.append(Sent(*sent, size, on, names, value, is_open and moment == "reduction"))

    def gather(self, op: str, ranks: Sequence[int], parts: Callable[[], Any]) -> None:
        """A collective is done that autograd does not see. parts: what it took, and what it gave of each rank"""
        if self.is_looking or graph_task() != -1 or not torch.is_grad_enabled():
            return
        given, got = parts()
        if op == "all_gather":  # a rank may put in its own part, which has a gradient, afterwards
            given = [*map(self._undetached, given)]
        if any(x.requires_grad for x in given):
            self.seen.cut[self.line()] = op
            self.mending.passes_back(self.line(), ranks, given, got)

    def _undetached(self, x: Tensor) -> Tensor:
        """The same, or the same part, of the tensor with a gradient of which it was detached."""
        whole = None if x.requires_grad else self._detached.get(address_of(x))
        if whole is None or whole.dtype != x.dtype:
            return x
        return whole.as_strided(x.size(), x.stride(), x.storage_offset()) if local_of(whole) is whole else whole

    def _gradients(self, parameters: list[Tensor]) -> dict[str, Piece]:
        return self._pieces((self.names.of(p), reduced(p.grad, p)) for p in parameters if p.grad is not None)

    def _pieces(self, tensors: Iterable[tuple[Any, Tensor]]) -> dict[Any, Piece]:
        return {name: piece_of(x, self.plan.once) for name, x in tensors if is_there(x)}

    @contextmanager
    def looks(self) -> Iterator[None]:
        """What is computed and sent meanwhile is not the script's."""
        before, self.is_looking = self.is_looking, True
        try:
            with torch.no_grad():
                yield
        finally:
            self.is_looking = before


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The settings that are numbers, those in tuples included."""
    for key, x in group.items():
        if _is_number(x) or (isinstance(x, Tensor) and x.numel() == 1):
            yield key, float(x)
        elif isinstance(x, tuple) and all(map(_is_number, x)):
            yield from ((f"{key}[{place}]", float(one)) for place, one in enumerate(x))


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)
