"""One rank of a watched script: the calls of its program, and their lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data.distributed import DistributedSampler

from tplab.checking.recording import Drawn, Seen, Sent, checksum, mark
from tplab.torch.checking.by_hand import LINE, NORMS, SQUARES, ByHand
from tplab.torch.checking.mending import Back, Through
from tplab.torch.checking.names import OF_A_BATCH, address_of, parameters_of
from tplab.torch.checking.pending import Call
from tplab.torch.checking.pieces import array_of, data_in, has_no_samples, nudged, replaced
from tplab.torch.checking.plan import Plan
from tplab.torch.checking.trail import line_of_return
from tplab.torch.private import graph_task, local_of, transform
from tplab.torch.ranks.meter import tensors_in
from tplab.torch.ranks.rank import this_rank
from tplab.torch.ranks.values import dtype_name


class Watched(ByHand):
    """One rank while it is watched: see `WatchedSteps` for its steps.

    inside      the functions that it is in: under a mode, torch calls them once more
    """

    def __init__(self, plan: Plan, seen: Seen):
        super().__init__(plan, seen)
        self.inside = set[Any]()
        self._trains = False

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
        """Note that samples are taken from a loader."""
        self.origins.read(loader)
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler) and sampler.total_size > len(sampler.dataset):  # type: ignore[arg-type]
            self.seen.lines["padded"] = self.origins.of(sampler)
        if isinstance(sampler, DistributedSampler) and sampler.shuffle and sampler.num_replicas > 1:
            self.seen.samplers.append((sampler.seed + sampler.epoch, self.origins.of(sampler)))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch."""
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
        """Return whether a function with parameters belongs to a forward pass that trains, even if its result needs no
        gradient: the rank may have frozen them, or have turned gradients off. Outside of the model, it must return a
        tensor that needs a gradient, or take other tensors, too: a print or a broadcast does not."""
        if self.is_looking:
            return False
        if self.moment == "forward":
            return self._trains
        has_data = not all(isinstance(x, nn.Parameter) for x in given)
        needs = any(x.requires_grad and x.numel() > 1 for x in tensors_in(found))
        return self.moment == "between" and torch.is_grad_enabled() and (has_data or needs)

    def _reads_gradients(self, func: Any, given: Sequence[Tensor]) -> bool:
        """Return whether the function takes a norm, or squares a gradient."""
        name = getattr(func, "__name__", "")
        of = self.names.at(address_of(given[0]))[0] if name in SQUARES and given else ""
        return name in NORMS or of == "gradient"

    def apply(self, function: Any, call: Any, args: Any, kwargs: Any) -> Any:
        """Apply an autograd function."""
        if self.plan.traced is not None or not self.plan.repairs or function in (Back, Through):
            return self.recorder.apply(function, call, args, kwargs)
        return self.mending.applied(self.line(), line_of_return(function), call())

    def keep_apart(self) -> None:
        """Note that the script stops the synchronisation of gradients."""
        self.seen.lines["no sync"] = self.line()

    # --- a microbatch ------------------------------------------------------------------------------------------------

    def forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any, Call]:
        """Prepare a call of the model from outside of any module. Return its arguments, and a `Call` for its result."""
        self.settle()
        call = Call()
        is_whole = transform() is None  # under a transform, the model gets one sample, and other weights
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
        data = {name: x for name, x in data_in(args, kwargs).items() if id(x) not in self.computed}
        if not data or has_no_samples(module, args, kwargs):
            return args, kwargs, call
        self.recorder.begin_with(data.values())
        call.lines["forward"] = self.line()
        self._called = this_rank().lines.chain()
        self.origins.use_data(call.lines, max(len(x) if x.dim() else 0 for x in data.values()))
        if is_whole and (self.plan.feed is not None or self.plan.repairs or self.plan.nudges):
            data = self.plan.feed.data(self.seen.num_steps, data) if self.plan.feed is not None else data
            self.mending.num_rows = len(next(iter(data.values())))
            data = {name: nudged(x) for name, x in data.items()} if self.plan.nudges else data
            args, kwargs = replaced(args, kwargs, data)
        call.samples = {name: self.plan.once(x) for name, x in data.items()}
        return args, kwargs, self._pending.add(call)

    def empty(self, module: nn.Module) -> None:
        """Fill the uninitialised tensors of a module with a known value."""
        if not self.plan.ends:
            return
        self.seen.lines["empty"] = self.line()
        with self.looks():
            for x in (*module.parameters(), *module.buffers()):
                if x.is_floating_point() and not x.is_meta:
                    local_of(x).fill_(torch.nan)

    def target(self, target: Any, ignored: int) -> tuple[Any, Call]:
        """Prepare a call of a loss. Return its target, and a `Call` for its result."""
        if not isinstance(target, Tensor) or not torch.is_grad_enabled():
            return target, Call()
        self.recorder.begin_with([target])
        if line := getattr(target, LINE, ""):
            self.step.lines.setdefault("label", line)
        if self.plan.feed is not None and transform() is None:
            target = self.plan.feed.target(self.seen.num_steps, target)
        if self.plan.repairs and transform() is None:
            target = self.mending.target(target, ignored)
        values = array_of(local_of(target))
        count = int((values != ignored).sum()) if values.dtype.kind in "iu" else values.size
        return target, self._pending.add(Call(target=(self.plan.once(target), count, self.line())))

    def draws_sample(self, code: CodeType, found: Tensor) -> Tensor:
        """Note a tensor that was drawn outside of the model. Return the tensor for the script."""
        if self.is_looking or not torch.is_grad_enabled():
            return found
        return self._draws.draw(self.seen.num_steps + self.step.has_stepped, self.line(), code, found)

    def draw(self, x: Tensor, mask: Tensor) -> None:
        given, size = mark(array_of(x)), mask.numel() if local_of(x) is x else 0
        self.step.masks.append(Drawn(self.line(), given, checksum(array_of(mask != 0)), size))
        self.seen.kinds.add("Dropout")

    # --- collectives -------------------------------------------------------------------------------------------------

    def send(self, call: Any, put: Tensor | Sequence[Tensor], is_open: bool = False) -> None:
        on, names, value, marked, moment = "", tuple[str, ...](), None, None, self.moment
        x, size = next(tensors_in(put), None), sum(x.numel() for x in tensors_in(put))
        if x is not None and not x.is_meta:
            on, names = self.names.at(address_of(x))
            if x.numel() == 1 and x.is_floating_point():
                value = float(local_of(x).detach())
            elif call.op == "all_reduce" and moment in ("between", "forward"):
                marked = mark(array_of(x))
            if moment in ("backward", "reduction") and x.dtype in (torch.bfloat16, torch.float16):
                self.seen.kinds.add(dtype_name(x.dtype))  # gradients are rounded to it on the way
        if moment == "reduction" and size > 1:
            self.normed.clear()
        if moment == "reduction" and self.is_measured and x is not None and (on == "gradient" or x.numel() > 1):
            self.is_measured = False  # the reduced gradient differs from what was measured or clipped
            if on == "gradient" and "clip" in self.step.lines:
                self.step.lines["early clip"] = self.step.lines["clip"]
        for done in ("clamp", "decay") if moment == "reduction" and on == "gradient" else ():
            if done in self.step.lines:
                self.step.lines[f"early {done}"] = self.step.lines[done]
        self.recorder.send(self.line())
        self.seen.has_sent = self.seen.has_sent or (len(call.place.group) > 1 and call.op != "barrier")
        sent = call.op, call.reduction, tuple(call.place.group), self.line(), moment
        self.step.sent.append(Sent(*sent, size, on, names, value, is_open and moment == "reduction", marked))

    def gather(self, op: str, ranks: Sequence[int], parts: Callable[[], Any]) -> None:
        """Note a finished collective that autograd does not see. parts: its inputs, and the outputs, one per rank"""
        if self.is_looking or graph_task() != -1 or not torch.is_grad_enabled():
            return
        given, got = parts()
        given = [*map(self._undetached, given)]
        if any(x.requires_grad for x in given):
            self.seen.cut[self.line()] = op
            self.mending.passes_back(self.line(), ranks, given, got)

    def _undetached(self, x: Tensor) -> Tensor:
        """Return the same tensor, or the same part, of the one with a gradient that it was detached from."""
        whole = None if x.requires_grad else self._detached.get(address_of(x))
        if whole is None or whole.dtype != x.dtype:
            return x
        return whole.as_strided(x.size(), x.stride(), x.storage_offset()) if local_of(whole) is whole else whole
