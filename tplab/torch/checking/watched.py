"""One rank of a watched script: the calls of its program, and their lines; among them what it computes by hand, outside
of autograd's graph: it draws samples, shifts labels, takes the norm of its gradients, scales and clips them."""

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
from tplab.torch.checking.handed import Plan
from tplab.torch.checking.mending import Back, Through
from tplab.torch.checking.names import OF_A_BATCH, address_of, parameters_of
from tplab.torch.checking.origins import ADDS, CLAMPS, MULTIPLIES, is_in_place, times
from tplab.torch.checking.pending import Call
from tplab.torch.checking.pieces import array_of, data_in, has_no_samples, nudged, replaced
from tplab.torch.checking.trail import line_of_return
from tplab.torch.checking.watched_steps import WatchedSteps
from tplab.torch.private import graph_task, local_of, transform
from tplab.torch.ranks.meter import tensors_in
from tplab.torch.ranks.rank import this_rank
from tplab.torch.ranks.values import dtype_name

_DRAWS = {"randint", "randperm", "randn", "rand", "normal", "multinomial"}
_SHIFTS = {"pad", "roll", "__getitem__", "__setitem__", "narrow", "cat", "concat", "where", "masked_fill", "shift"}
_IN_PLACE = {"mul_", "div_", "__imul__", "__idiv__", "__itruediv__", "_foreach_mul_", "_foreach_div_"}
NORMS = {"norm", "vector_norm", "linalg_vector_norm", "_foreach_norm", "sum", "dot", "vdot", "dist", "max"}
SQUARES = {"square", "pow", "__pow__"}
_CHANGES = {"forward": "buffer", "after": "parameter"}
"""What a script may change by hand, by the moment."""
LINE = "_tplab_shifted_at"
"""The attribute of a tensor that has the line at which it was last shifted, cut or padded, as targets are."""


class Watched(WatchedSteps):
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
        is_sparse = False
        x, size = next(tensors_in(put), None), sum(x.numel() for x in tensors_in(put))
        if x is not None and not x.is_meta:
            on, names = self.names.at(address_of(x))
            is_sparse = self.names.is_sparse(address_of(x))
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
        is_open = is_open and moment == "reduction"
        self.step.sent.append(Sent(*sent, size, on, names, value, is_open, marked, is_sparse))

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

    # --- by hand -----------------------------------------------------------------------------------------------------

    def compute(self, func: Any, args: Sequence[Any], found: Any) -> None:
        """Note a call of a torch function outside of autograd."""
        if self.is_looking:
            return
        step, moment = self.step, self.moment
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        writes = moment == "reduction" and is_in_place(name) and not self._made  # without an optimizer
        if writes and isinstance(first, Tensor) and self.names.at(address_of(first))[0] == "parameter":
            step.lines["step"] = self.origins.here()
        if name in _DRAWS and isinstance(found, Tensor):
            self.origins.draw(len(found) if found.dim() else 0)
        elif moment in _CHANGES and name.endswith("_") and not name.endswith("__"):
            for x in first if isinstance(first, list | tuple) else [first]:
                kind, names = self.names.at(address_of(x)) if isinstance(x, Tensor) else ("", ())
                if kind == _CHANGES[moment]:
                    step.lines |= {f"{kind} {one}": self.origins.here() for one in names}
        elif moment == "step" and name in NORMS | {"mean"} and isinstance(first, Tensor) and isinstance(found, Tensor):
            if found.numel() < first.numel():
                step.lines.setdefault("combined", self.origins.here())
        elif moment == "reduction" and (name in MULTIPLIES | NORMS | CLAMPS | ADDS):
            self._reduce(name, args, found)
        else:
            self._shift(name, first, found)

    def _shift(self, name: str, first: Any, found: Any) -> None:
        tensor = first if name == "__setitem__" else found
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64 or not tensor.dim():
            return
        if name in _SHIFTS:
            setattr(tensor, LINE, self.origins.here())
        elif isinstance(first, Tensor) and (line := getattr(first, LINE, "")):
            setattr(tensor, LINE, line)

    def _reduce(self, name: str, args: Sequence[Any], found: Any) -> None:
        many = [x for x in (args[0] if isinstance(args[0], list | tuple) else args[:1]) if isinstance(x, Tensor)]
        if not many:
            return
        if name in NORMS:
            is_number = isinstance(found, list | tuple) or (isinstance(found, Tensor) and found.numel() == 1)
            if is_number and many[0].is_floating_point() and many[0].numel() > 1:
                self.measure(many)
            if is_number and "scale" not in self.step.lines and sum(x.numel() for x in many) > 1:
                self.step.lines["norm"] = self.origins.here()
            return
        x = many[0]
        at = address_of(x)
        if x.is_meta or (self.names.at(at)[0] != "gradient" and at not in self.normed):
            return
        if name in CLAMPS:
            self.step.lines["clamp"] = self.origins.here()
            return
        if name in ADDS:
            if self._is_decay(x, args[1][0] if isinstance(args[1], list | tuple) else args[1]):
                self.step.lines["decay"] = self.origins.here()
            return
        chain, line, factor = this_rank().lines.chain(), self.origins.here(), times(name, args)
        if factor is not None and (line, factor) not in self.step.scaled:
            self.step.scaled.append((line, factor))
        if name in _IN_PLACE and "scale" not in self.step.lines:
            self.step.lines["scale in"] = line
            self.step.lines["scale"] = next((at for code, at in chain if code in self._backward_in), line)

    def _is_decay(self, gradient: Tensor, added: Any) -> bool:
        """Return whether the addend of a gradient is a multiple of its parameter."""
        owner = next((p for p in self.names.parameters() if p.grad is not None
                      and address_of(p.grad) == address_of(gradient)), None)  # fmt: skip
        if owner is None or not isinstance(added, Tensor) or added.shape != owner.shape:
            return False
        x, y = local_of(owner).detach().double().reshape(-1), local_of(added).detach().double().reshape(-1)
        return bool((y - x * (x @ y) / (x @ x).clamp(min=1e-30)).abs().max() <= 1e-5 * y.abs().max())
