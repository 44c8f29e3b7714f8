"""Repairs of one rank's run while it runs: what a collective, a number or a product would be without the fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.checking.gaps import near
from tplab.checking.repairs import Kind, Repair
from tplab.checking.trail import MATMULS
from tplab.torch.checking.mended_steps import MendedSteps
from tplab.torch.checking.names import address_of
from tplab.torch.checking.origins import ADDS, CLAMPS, MULTIPLIES, times
from tplab.torch.private import graph_task, local_of
from tplab.torch.ranks.meter import tensors_in
from tplab.torch.ranks.rank import this_rank

_IN_PLACE = ("_", "__imul__", "__idiv__", "__itruediv__")


class Mending(MendedSteps):
    """The repairs of a run, applied as its ranks reach their lines: of operations here, of steps in `MendedSteps`."""

    # --- collectives -------------------------------------------------------------------------------------------------

    def collective(self, run: Callable[..., Any], call: Any, put: Any, take: Any, finished: Any) -> Any:
        """Run a collective of torch.distributed with `run(take)`; if it is left out, return `finished()`."""
        if not self._repairs:
            return run(take)
        own = put[min(call.place.index, len(put) - 1)] if isinstance(put, list | tuple) and put else put
        for one in self._here(own, "scale", "skip", "last", "gradients", "wait", "parameters"):
            if one.kind == "wait":
                work = run(take)
                work.wait()
                return work
            if one.kind == "scale":
                return run(lambda y, by=one.by: take(y * by))
            if call.op in ("all_reduce", "broadcast"):
                return finished()
            if call.op == "reduce_scatter":
                if isinstance(put, Tensor):
                    own = put.reshape(len(call.place.group), -1)[call.place.index]
                take(own)
                return finished()
        return run(take)

    def of_tplab(self, run: Callable[[Tensor], Any], call: Any, x: Tensor) -> Any:
        """Run a collective of tplab with `run(x)`."""
        for one in self._here(x, "scale", "skip", "gradients") if self._repairs else ():
            if one.kind == "scale":
                return run(x * one.by)  # a sum is linear
            if call.op == "all_reduce":
                return x.clone()
        return run(x)

    def _here(self, x: Any, *kinds: Kind) -> Iterator[Repair]:
        """Yield the repairs of the collective at this line, whose input is x."""
        for one in self._of(*kinds, line=self._watched.line()):
            is_meant = not one.names or set(self._watched.names.at(address_of(x))[1]) & set(one.names)
            if is_meant and (one.kind not in ("skip", "last") or self._is_turn(one)):
                yield one

    def _is_turn(self, one: Repair) -> bool:
        """Return whether a collective is to be left out: one of those in the backward pass, or of the first ones."""
        if one.kind == "last":
            return self._turn(one.line) < one.times
        return graph_task() != -1 and self._turn(one.line) % one.times == one.was

    # --- other operations --------------------------------------------------------------------------------------------

    def function(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch and return its repaired result."""
        name = getattr(func, "__name__", "")
        if not self._repairs or self._watched.is_looking:
            return func(*args, **kwargs)
        if func is F.batch_norm and self.has("statistics"):
            return self._batch_norm(*args, **kwargs)
        line = self._watched.line()
        if name in CLAMPS | ADDS and self.has("late", line):
            self._later.append(lambda: _written(args[0], func(*args, **kwargs)))
            return args[0]
        for one in self._of("dual", line=line) if graph_task() == -1 else ():
            if one.combine == "copies":  # equal inputs of work that ranks share
                with torch.no_grad():
                    made = next(tensors_in(func(*args, **kwargs)), None) if not name.endswith("_") else None
                if made is None or self._are_alike(made, one):
                    continue
            if one.combine != "function":
                args = tuple(self._wrapped(one, x, args) for x in args)
        if name in MATMULS and self.has("gather", line):
            args = args[0], self._gathered(args[1])
        found = func(*args, **kwargs)
        for one in self._of("cast", line=line) if graph_task() == -1 else ():
            first = next(tensors_in(found), None)  # also for the tuple that max returns
            if name in one.names and first is not None and first.is_floating_point():
                combined = self._cast(first, one.combine, one.group_of(self.rank), one.by)
                found = type(found)((combined, *found[1:])) if isinstance(found, tuple) else combined
        if name in MULTIPLIES and self.has("factor", line):
            by = times(name, args) or times(name, (None, *args[1:2]))
            for one in self._of("factor", line=line):
                should = one.values.get(self._step) if one.values else one.by
                if by and should is not None and (one.values or near(by, one.was)):
                    found = _times(found, should / by, name)
        return found

    def applied(self, line: str, returned: str, found: Any) -> Any:
        """Return the results of an autograd function, given its line and that where its backward pass returns."""
        for one in self._of("dual") if self._repairs and graph_task() == -1 else ():
            if one.line in (line, returned) and one.combine != "copies":
                many = found if isinstance(found, tuple) else (found,)
                many = tuple(self._back(one, x) if isinstance(x, Tensor) and x.requires_grad else x for x in many)
                found = many if isinstance(found, tuple) else many[0]
        return found

    def hook(self, line: str, parameter: Tensor, hook: Callable[[Tensor], Any]) -> bool:
        """Return whether a hook of the script, registered at this line, is deferred until gradients are averaged."""
        is_late = self.has("late", line)
        if is_late and not self._turn((line, id(parameter))):
            self._later.append(lambda: _written(parameter.grad, hook(cast(Tensor, parameter.grad))))
        return is_late

    def _wrapped(self, one: Repair, x: Any, args: Sequence[Any]) -> Any:
        """Return an input so that its gradient is added up: of a named parameter, or else of a computed value."""
        if not isinstance(x, Tensor) or not x.requires_grad:
            return x
        name = self._watched.names.known(id(x)) if x.is_leaf else ""
        has_named = any(
            isinstance(y, Tensor) and y.is_leaf and self._watched.names.known(id(y)) in one.names for y in args
        )
        is_meant = name in one.names if x.is_leaf else not has_named
        if one.combine == "copies":
            is_meant = self._are_alike(x, one)
        return self._back(one, x) if is_meant else x

    def _are_alike(self, x: Tensor, one: Repair) -> bool:
        held = self._exchanged("alike", local_of(x).detach().clone())
        return all(torch.equal(local_of(x), held[rank]) for rank in one.group_of(self.rank))

    def _back(self, one: Repair, x: Tensor) -> Tensor:
        """Return the same tensor, whose gradient is the sum over the rank's group, times a factor."""

        def back(gradient: Tensor) -> Tensor:
            if one.groups:
                total = self._combined(("dual", one.line), gradient, "sum", one.group_of(self.rank))
                local_of(gradient).detach().copy_(total)
            return gradient * one.by

        return Back.apply(x, back)

    def _gathered(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, side by side along the last dim; gradients go back to each."""
        held, size = self._exchanged("gather", x.detach().clone()), x.shape[-1]

        def back(gradient: Tensor) -> Tensor:
            every = self._exchanged("gathered", gradient)
            return sum(every.values(), torch.zeros_like(gradient)).narrow(-1, self.rank * size, size)

        return Back.apply(x, back, torch.cat([held[rank] for rank in sorted(held)], -1))

    def _batch_norm(
        self, x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False,
        momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        if not training:
            return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        centre = self._mean(x.mean(dims))
        spread = self._mean(x.square().mean(dims)) - centre.square()
        if mean is not None:
            count = x.numel() // x.shape[1] * this_rank().mesh.size
            with torch.no_grad():
                mean.lerp_(centre, momentum)
                var.lerp_(spread * count / max(count - 1, 1), momentum)
        y = (x - centre.reshape(shape)) / (spread.reshape(shape) + eps).sqrt()
        y = y if weight is None else y * weight.reshape(shape)
        return y if bias is None else y + bias.reshape(shape)

    def _mean(self, x: Tensor) -> Tensor:
        return self._cast(x, "mean", range(this_rank().mesh.size))

    def _cast(self, x: Tensor, how: str, group: Sequence[int], by: float = 1.0) -> Tensor:
        """Return the ranks' tensors, combined; the backward pass adds up the result's gradients, times a factor."""
        held = self._exchanged("cast", x.detach().clone())
        if x.numel() > 1 and all(torch.equal(x, held[rank]) for rank in group):
            return x  # another operation of the same name at this line
        value = _COMBINED[how](torch.stack([x if rank == self.rank else held[rank] for rank in group]))
        if not x.requires_grad:
            return value
        return Back.apply(value, lambda y: self._combined("cast", y, "sum", group) * by)

    def passes_back(self, line: str, ranks: Sequence[int], given: Sequence[Tensor], got: Sequence[Tensor]) -> None:
        """Pass gradients back from the outputs of a finished collective, one per rank, to its inputs, one per rank or
        one for all."""
        if not self.has("through", line):
            return
        index = ranks.index(self.rank)

        def back(gradients: Sequence[Tensor]) -> list[Tensor]:
            held = self._exchanged(("through", line), gradients)
            mine = [held[rank][index] for rank in ranks]
            return mine if len(given) > 1 else [torch.stack(mine).sum(0).reshape(given[0].shape)]

        found, base = Through.apply(back, len(given), *given, *got), got[0]._base
        if base is not None and sum(x.numel() for x in got if x._base is base) == base.numel():  # write it at once
            base.copy_(torch.cat([y.reshape(-1) for y in found]).view_as(base))
            return
        for x, y in zip(got, found):
            x.copy_(y)

    @property
    def put(self) -> dict[Any, Tensor]:
        """The replaced results, by the key of an operation."""
        return {
            key: torch.from_numpy(np.array(pieces[self.rank]))
            for one in self._of("put")
            for key, pieces in one.values.items()
            if self.rank in pieces
        }

    def seed(self, seed: int, line: str) -> int:
        return next((one.values["seed"] for one in self._of("seed", line=line)), seed)


_COMBINED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda parts: parts.mean(0),
    "sum": lambda parts: parts.sum(0),
    "maximum": lambda parts: parts.amax(0),
    "logsumexp": lambda parts: parts.logsumexp(0),
    "root of the sum of squares": lambda parts: parts.square().sum(0).sqrt(),
    "first rank's value": lambda parts: parts[0],
    "last rank's value": lambda parts: parts[-1],
}
"""See `forward.COMBINED`."""


class Back(torch.autograd.Function):
    """The same tensor, or one in its place; the backward pass applies a function to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: Callable[[Tensor], Tensor], instead: Tensor | None = None) -> Tensor:
        ctx.back = back
        return x.view_as(x) if instead is None else instead

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(gradients[0].clone()), None, None


class Through(torch.autograd.Function):
    """The output of a collective, as a function of its input."""

    @staticmethod
    def forward(ctx: Any, back: Callable[..., Any], count: int, *tensors: Tensor) -> Any:
        ctx.back, ctx.count = back, count
        return tuple(x.clone() for x in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *ctx.back(gradients), *(None for _ in gradients)


def _written(x: Any, found: Any) -> None:
    """Write what was computed in place of a gradient to it."""
    if isinstance(x, Tensor) and found is not x:
        local_of(x).detach().copy_(local_of(found))


def _times(found: Any, by: float, name: str) -> Any:
    """Return the result of an operation that multiplies, times a factor."""
    if name.endswith(_IN_PLACE) and not name.startswith("__r"):
        with torch.no_grad():
            for x in found if isinstance(found, list | tuple) else [found]:
                if isinstance(x, Tensor):
                    local_of(x).detach().mul_(by)
        return found
    return [x * by for x in found] if isinstance(found, list | tuple) else found * by
