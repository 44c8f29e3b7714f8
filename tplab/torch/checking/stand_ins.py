"""What stands in for torch's functions while a script is watched: each tells the rank that runs, and calls torch's."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import update_wrapper
from types import FrameType
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

from tplab.torch.checking.chance import Chance, states
from tplab.torch.checking.groups import Groups, StandIn
from tplab.torch.checking.names import OF_A_BATCH
from tplab.torch.checking.pending import Call
from tplab.torch.checking.watched import Watched
from tplab.torch.private import CLIP, graph_task, local_of, transform
from tplab.torch.ranks.values import dtype_name


class StandIns:
    """While it is open, these functions tell about their calls.

    here   the rank whose program the running thread runs, while it is watched
    """

    def __init__(self, here: Callable[[], Watched | None]):
        self._here, self._chance, self.groups = here, Chance(here), Groups(here)
        self._undo, self._schedules = ExitStack(), set[type]()

    def __enter__(self) -> StandIns:
        for row in self.table():
            self._replace(*row)
        for handle in (register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)):
            self._undo.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def table(self) -> Sequence[StandIn]:
        return (
            (nn.Module, "__call__", self._module),
            (nn.Module, "named_parameters", self._asked_for_parameters),
            (torch.autograd, "backward", self._backward),
            (clip_grad, CLIP, self._clip),
            (torch.nn.utils, "clip_grads_with_norm_", self._clip),
            (torch.autocast, "__enter__", self._autocast),
            (torch, "compile", self._compile),
            (F, "cross_entropy", self._loss),
            (F, "nll_loss", self._loss),
            *((F, name, self._loss) for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")),
            *((F, name, self._loss) for name in ("binary_cross_entropy", "binary_cross_entropy_with_logits")),
            (torch, "manual_seed", self._seed),
            (random, "seed", self._seed),
            (np.random, "seed", self._seed),
            (argparse.ArgumentParser, "parse_args", self._options),
            (Optimizer, "zero_grad", self._zero_grad),
            (nn.Module, "zero_grad", self._zero_grad),
            (DistributedDataParallel, "__init__", self._wrap),
            *((kind, "__init__", self._make) for kind in (Optimizer, DataLoader, DistributedSampler, *OF_A_BATCH)),
            (DataLoader, "__iter__", self._read),
            (LRScheduler, "__init__", self._schedule),
            (torch.amp.GradScaler, "step", self._scaled_step),
            (Optimizer, "load_state_dict", self._load),
            (nn.Module, "load_state_dict", self._load_weights),
            (nn.Module, "to_empty", self._to_empty),
            *self._chance.table(),
            *self.groups.table(),
        )

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
        """See what FSDP is told from the beginning, and not only once a model is called."""
        import torch.distributed.fsdp  # noqa: F401  # takes long

        for one in self.groups.of_fsdp():
            self._replace(*one)

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original, is_own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, update_wrapper(make(original), original))  # others ask for its name and its arguments
        if is_own:
            self._undo.callback(setattr, owner, name, original)
        else:  # what it inherits
            self._undo.callback(delattr, owner, name)

    def _module(self, call: Any) -> Any:
        def watched(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            rank = self._here()
            if rank is None or rank.depth or graph_task() != -1:
                return call(module, *args, **kwargs)
            seen = Call()
            if not _only_asks_for_shapes():
                for one in self.groups.of_fsdp():
                    self._replace(*one)
                args, kwargs, seen = rank.forward(module, args, kwargs)
            rank.depth, before = 1, states()
            try:
                found = call(module, *args, **kwargs)
                seen.returns(found)
                return found
            finally:
                rank.depth = 0
                rank.mending.after_forward()
                if torch.is_grad_enabled() and states() != before:
                    rank.seen.random.add((rank.line(), None))

        return watched

    def _asked_for_parameters(self, original: Any) -> Any:
        def watched(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if (rank := self._here()) is not None and not rank.depth:
                rank.names.note(module)
            return original(module, *args, **kwargs)

        return watched

    def _backward(self, original: Any) -> Any:
        def watched(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            rank = self._here()
            if rank is None or graph_task() != -1 or original in rank.inside:  # or what a checkpoint computes again
                original(tensors, grad_tensors, *args, **kwargs)
                return
            grad_tensors = rank.begin_backward(tensors, grad_tensors)
            with rank.calls(original):
                original(tensors, grad_tensors, *args, **kwargs)
            rank.end_backward()

        return watched

    def _clip(self, original: Any) -> Any:
        def watched(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if (rank := self._here()) is not None:
                found = rank.mending.clip(parameters, max_norm, total_norm, rank.line())
                if found is None:
                    return None
                total_norm = found
                rank.clip(parameters, total_norm)
            return original(parameters, max_norm, total_norm, *args, **kwargs)

        return watched

    def _autocast(self, original: Any) -> Any:
        def watched(context: torch.autocast, /) -> Any:
            rank = self._here()
            if rank is not None and context._enabled and torch.is_grad_enabled():
                rank.seen.kinds.add(dtype_name(context.fast_dtype))
            return original(context)

        return watched

    def _compile(self, original: Any) -> Any:
        """The program runs as it is: compiled, it would have no calls of these stand-ins."""

        def watched(model: Any = None, **kwargs: Any) -> Any:
            if (rank := self._here()) is None:
                return original(model, **kwargs)
            rank.seen.kinds.add("torch.compile")
            return model if model is not None else lambda function: function

        return watched

    def _loss(self, original: Any) -> Any:
        def watched(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            rank = self._here()
            if rank is None or graph_task() != -1 or _only_asks_for_shapes() or original in rank.inside:
                return original(input, target, *args, **kwargs)
            target, seen = rank.target(target, kwargs.get("ignore_index", -100))
            with rank.calls(original):
                value = original(input, target, *args, **kwargs)
            seen.returns(value)
            is_number = isinstance(value, Tensor) and value.numel() == 1 and transform() is None
            if is_number and not torch.is_grad_enabled():
                rank.step.evaluated.append((float(local_of(value)), target.numel()))
            return value

        return watched

    def _zero_grad(self, original: Any) -> Any:
        def watched(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            if (rank := self._here()) is not None and rank.step.losses and not rank.step.has_stepped:
                rank.step.lines["zero_grad"] = rank.line()  # between two microbatches
                if rank.mending.keeps(rank.line()):
                    return None
            return original(owner, *args, **kwargs)

        return watched

    def _wrap(self, original: Any) -> Any:
        def watched(model: DistributedDataParallel, /, *args: Any, **kwargs: Any) -> None:
            if (rank := self._here()) is not None:
                rank.seen.lines["wrapped"] = rank.line()
                if kwargs.get("broadcast_buffers") is False:
                    rank.seen.lines["no broadcast"] = rank.line()
            original(model, *args, **kwargs)

        return watched

    def _make(self, original: Any) -> Any:
        def watched(thing: Any, /, *args: Any, **kwargs: Any) -> None:
            if (rank := self._here()) is not None:
                rank.make(thing)
            original(thing, *args, **kwargs)
            if rank is not None and isinstance(thing, Optimizer):
                rank.origins.set(thing, rank.origins.of(thing))

        return watched

    def _read(self, original: Any) -> Any:
        def watched(loader: Any, /) -> Any:
            samples = original(loader)
            if (rank := self._here()) is not None:
                rank.read(loader)
            return samples

        return watched

    def _schedule(self, original: Any) -> Any:
        """A schedule is made: from now on, the `step` of its class is watched."""

        def watched(schedule: Any, /, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            rank = self._here()
            original(schedule, optimizer, *args, **kwargs)
            if rank is None:
                return
            rank.origins.set(optimizer, rank.line())
            for kind in type(schedule).__mro__:
                if "step" in vars(kind) and kind not in self._schedules:
                    self._schedules.add(kind)
                    self._replace(kind, "step", self._set_rate)

        return watched

    def _set_rate(self, original: Any) -> Any:
        def watched(schedule: Any, /, *args: Any, **kwargs: Any) -> None:
            original(schedule, *args, **kwargs)
            optimizer = getattr(schedule, "optimizer", None)
            if isinstance(optimizer, Optimizer) and (rank := self._here()) is not None:
                rank.origins.set(optimizer, rank.line())

        return watched

    def _scaled_step(self, original: Any) -> Any:
        def watched(scaler: Any, /, *args: Any, **kwargs: Any) -> Any:
            found = original(scaler, *args, **kwargs)
            if (rank := self._here()) is not None:
                rank.skip()
            return found

        return watched

    def _load(self, original: Any) -> Any:
        def watched(optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if (rank := self._here()) is not None:
                rank.origins.load(optimizer)

        return watched

    def _to_empty(self, original: Any) -> Any:
        def watched(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            found = original(module, *args, **kwargs)
            if (rank := self._here()) is not None:
                rank.empty(module)
            return found

        return watched

    def _load_weights(self, original: Any) -> Any:
        def watched(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if (rank := self._here()) is not None:
                rank.seen.lines["weights"] = rank.line()
            return original(module, *args, **kwargs)

        return watched

    # --- the program's arguments, and its steps ----------------------------------------------------------------------

    def _seed(self, original: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            seed = next(iter((*args, *kwargs.values())), None)
            if (rank := self._here()) is not None and isinstance(seed, int):
                other = rank.mending.seed(seed, rank.line())
                rank.seen.seeds.append((other, rank.line()))
                if other != seed:
                    return original(other)
            return original(*args, **kwargs)

        return watched

    def _options(self, original: Any) -> Any:
        def watched(parser: argparse.ArgumentParser, /, *args: Any, **kwargs: Any) -> Any:
            found = original(parser, *args, **kwargs)
            if (rank := self._here()) is not None:
                rank.seen.options.update(vars(found))
            return found

        return watched

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if (rank := self._here()) is not None:
            rank.before_step(optimizer)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if (rank := self._here()) is not None:
            rank.after_step(optimizer)


def _only_asks_for_shapes() -> bool:
    """Whether a pipeline calls its stage, or its loss, only to learn shapes."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name.endswith("_inference") and frame.f_code.co_filename.endswith("pipelining/stage.py"):
            return True
        frame = frame.f_back
    return False
