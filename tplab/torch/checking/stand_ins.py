"""Stand-ins for torch's functions while a script is watched: each notifies the running rank and calls the original."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tplab.torch.checking.chance import CHANCE, states
from tplab.torch.checking.groups import GROUPS, StandIn, require_sync
from tplab.torch.checking.names import OF_A_BATCH
from tplab.torch.checking.pending import Call
from tplab.torch.checking.pieces import is_stateless
from tplab.torch.checking.watched import Watched
from tplab.torch.distributed.replaced import Replaced, on_ranks
from tplab.torch.private import CLIP, graph_task, local_of, transform
from tplab.torch.ranks.meter import tensors_in
from tplab.torch.ranks.program import is_program, outwards
from tplab.torch.ranks.values import dtype_name


class StandIns:
    """While it is open, these functions notify the rank of their calls.

    here   returns the rank whose program the running thread runs, while it is watched
    """

    def __init__(self, here: Callable[[], Watched | None]):
        self._here, self._undo = here, ExitStack()
        self._schedules, self._has_fsdp = set[type](), False

    def __enter__(self) -> StandIns:
        for row in self.table():
            self._replace(*row)
        for handle in (register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)):
            self._undo.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def table(self) -> Sequence[StandIn]:
        own = (nn.Module, "__call__", self._module), (LRScheduler, "__init__", self._schedule)
        return *TABLE, *CHANCE, *GROUPS, *own

    def see_functions(self) -> None:
        """See each autograd function that is applied, too."""
        original, here = vars(torch.autograd.Function)["apply"], self._here

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            def call() -> Any:
                return original.__get__(None, function)(*args, **kwargs)

            rank = here()
            return call() if rank is None else rank.apply(function, call, args, kwargs)

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
        self._undo.callback(setattr, torch.autograd.Function, "apply", original)

    def see_fsdp(self) -> None:
        """See FSDP's switches, once the script has imported FSDP: the import is slow."""
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and not self._has_fsdp:
            self._has_fsdp = True
            self._replace(fsdp.FSDPModule, "set_requires_gradient_sync", require_sync)

    def _replace(self, owner: Any, name: str, act: Callable[..., Any]) -> None:
        replaced = Replaced([on_ranks(owner, name, self._here)(act)])
        replaced.put()
        self._undo.callback(replaced.take_back)

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if (rank := self._here()) is not None:
            rank.before_step(optimizer)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if (rank := self._here()) is not None:
            rank.after_step(optimizer)

    def _module(self, rank: Watched, call: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if rank.depth or graph_task() != -1:
            return call(module, *args, **kwargs)
        seen = Call()
        if not _only_asks_for_shapes():
            self.see_fsdp()
            args, kwargs, seen = rank.forward(module, args, kwargs)
        rank.depth, before = 1, states()
        try:
            found = call(module, *args, **kwargs)
            seen.returns(found)
            if not is_stateless(module):
                rank.computed.update((id(x), x) for x in tensors_in(found) if not x.requires_grad)
            return found
        finally:
            rank.depth = 0
            rank.mending.after_forward()
            if torch.is_grad_enabled() and states() != before:
                rank.seen.random.add((rank.line(), None))

    def _schedule(
        self, rank: Watched, original: Any, schedule: Any, /, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        """Watch the `step` of a schedule's class from its creation on."""
        original(schedule, optimizer, *args, **kwargs)
        rank.origins.set(optimizer, rank.line())
        for kind in type(schedule).__mro__:
            if "step" in vars(kind) and kind not in self._schedules:
                self._schedules.add(kind)
                self._replace(kind, "step", _set_rate)


def _asked_for_parameters(rank: Watched, original: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    if not rank.depth:
        rank.names.note(module)
    return original(module, *args, **kwargs)


def _backward(
    rank: Watched, original: Any, /, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
) -> None:
    if graph_task() != -1 or original in rank.inside:  # or the recomputation of a checkpoint
        original(tensors, grad_tensors, *args, **kwargs)
        return
    grad_tensors = rank.begin_backward(tensors, grad_tensors)
    with rank.calls(original):
        original(tensors, grad_tensors, *args, **kwargs)
    rank.end_backward()


def _clip(
    rank: Watched, original: Any, /, parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any
) -> Any:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    found = rank.mending.clip(parameters, max_norm, total_norm, rank.line())
    if found is None:
        return None
    rank.clip(parameters, found)
    return original(parameters, max_norm, found, *args, **kwargs)


def _hook(rank: Watched, original: Any, x: Tensor, /, hook: Any) -> Any:
    """Stand in for a script's hook on a parameter, which may change its gradient before the reduction."""
    code, line = getattr(hook, "__code__", None), rank.line()
    if not isinstance(x, nn.Parameter) or code is None or not is_program(code.co_filename):
        return original(x, hook)

    def hooked(gradient: Tensor) -> Any:
        if rank.mending.hook(line, x, hook):
            return None
        num_sent, found = len(rank.step.sent), hook(gradient)
        if found is not None and len(rank.step.sent) == num_sent:
            rank.step.lines["early hook"] = line
        return found

    return original(x, hooked)


def _autocast(rank: Watched, original: Any, context: torch.autocast, /) -> Any:
    if context._enabled and torch.is_grad_enabled():
        rank.seen.kinds.add(dtype_name(context.fast_dtype))
    return original(context)


def _compile(rank: Watched, original: Any, /, model: Any = None, **kwargs: Any) -> Any:
    """Leave the program as it is: compiled, it would not call these stand-ins."""
    rank.seen.kinds.add("torch.compile")
    return model if model is not None else lambda function: function


def _loss(rank: Watched, original: Any, /, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    if graph_task() != -1 or _only_asks_for_shapes() or original in rank.inside:
        return original(input, target, *args, **kwargs)
    target, seen = rank.target(target, kwargs.get("ignore_index", -100))
    with rank.calls(original):
        value = rank.mending.weighted(original(input, target, *args, **kwargs))
    seen.returns(value)
    is_number = isinstance(value, Tensor) and value.numel() == 1 and transform() is None
    if is_number and not torch.is_grad_enabled():
        rank.step.evaluated.append((float(local_of(value)), target.numel()))
    return value


def _zero_grad(rank: Watched, original: Any, owner: Any, /, *args: Any, **kwargs: Any) -> Any:
    if rank.step.losses and not rank.step.has_stepped:
        rank.step.lines["zero_grad"] = rank.line()  # between two microbatches
        if rank.mending.has("keep", rank.line()):
            return None
    return original(owner, *args, **kwargs)


def _wrap(rank: Watched, original: Any, model: DistributedDataParallel, /, *args: Any, **kwargs: Any) -> None:
    rank.seen.lines["wrapped"] = rank.line()
    if kwargs.get("broadcast_buffers") is False:
        rank.seen.lines["no broadcast"] = rank.line()
    original(model, *args, **kwargs)


def _make(rank: Watched, original: Any, thing: Any, /, *args: Any, **kwargs: Any) -> None:
    rank.make(thing)
    original(thing, *args, **kwargs)
    if isinstance(thing, Optimizer):
        rank.origins.set(thing, rank.origins.of(thing))


def _set_rate(rank: Watched, original: Any, schedule: Any, /, *args: Any, **kwargs: Any) -> None:
    original(schedule, *args, **kwargs)
    if isinstance(optimizer := getattr(schedule, "optimizer", None), Optimizer):
        rank.origins.set(optimizer, rank.line())


def _then(tell: Callable[[Watched, Any, Any], Any]) -> Callable[..., Any]:
    """Return a stand-in that calls a method, and then notifies the rank of the method's object and result."""

    def act(rank: Watched, original: Any, owner: Any, /, *args: Any, **kwargs: Any) -> Any:
        found = original(owner, *args, **kwargs)
        tell(rank, owner, found)
        return found

    return act


def _load_weights(rank: Watched, original: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    rank.seen.lines["weights"] = rank.line()
    return original(module, *args, **kwargs)


def _seed(rank: Watched, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    seed = next(iter((*args, *kwargs.values())), None)
    if isinstance(seed, int):
        other = rank.mending.seed(seed, rank.line())
        rank.seen.seeds.append((other, rank.line()))
        if other != seed:
            return original(other)
    return original(*args, **kwargs)


_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
           "binary_cross_entropy_with_logits")  # fmt: skip
TABLE: Sequence[StandIn] = (
    (nn.Module, "named_parameters", _asked_for_parameters),
    (torch.autograd, "backward", _backward),
    (Tensor, "register_hook", _hook),
    (clip_grad, CLIP, _clip),
    (torch.nn.utils, "clip_grads_with_norm_", _clip),
    (torch.autocast, "__enter__", _autocast),
    (torch, "compile", _compile),
    *((F, name, _loss) for name in _LOSSES),
    *((owner, name, _seed) for owner, name in ((torch, "manual_seed"), (random, "seed"), (np.random, "seed"))),
    (argparse.ArgumentParser, "parse_args", _then(lambda rank, _, found: rank.seen.options.update(vars(found)))),
    *((owner, "zero_grad", _zero_grad) for owner in (Optimizer, nn.Module)),
    (DistributedDataParallel, "__init__", _wrap),
    *((kind, "__init__", _make) for kind in (Optimizer, DataLoader, DistributedSampler, *OF_A_BATCH)),
    (DataLoader, "__iter__", _then(lambda rank, loader, _: rank.read(loader))),
    (torch.amp.GradScaler, "step", _then(lambda rank, *_: rank.skip())),
    (Optimizer, "load_state_dict", _then(lambda rank, optimizer, _: rank.origins.load(optimizer))),
    (nn.Module, "load_state_dict", _load_weights),
    (nn.Module, "to_empty", _then(lambda rank, module, _: rank.empty(module))),
)


def _only_asks_for_shapes() -> bool:
    """Return whether a pipeline calls its stage, or its loss, only to infer shapes."""
    codes = (frame.f_code for frame in outwards(sys._getframe(2)))
    return any(one.co_name.endswith("_inference") and one.co_filename.endswith("pipelining/stage.py") for one in codes)
