"""Repairs of one rank's run while it runs: what a collective, a number, a gradient would be without the fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.optimizer import Optimizer

from tplab.checking.gaps import near
from tplab.checking.recording import Seen
from tplab.checking.repairs import Kind, Repair
from tplab.checking.trail import MATMULS
from tplab.torch.checking.made import MULTIPLIES, times
from tplab.torch.checking.names import Names, address_of, parameters_of
from tplab.torch.checking.origins import ADDS, CLAMPS
from tplab.torch.comm.collectives import barrier
from tplab.torch.private import graph_task, local_of
from tplab.torch.ranks.rank import this_rank

_IN_PLACE = ("_", "__imul__", "__idiv__", "__itruediv__")


class Watching(Protocol):
    """The rank whose run is repaired: see `Watched`."""

    names: Names
    seen: Seen
    is_looking: bool
    is_measured: bool

    def line(self) -> str: ...

    def looks(self) -> AbstractContextManager[None]: ...


class Board:
    """What ranks tell each other for a repair: they share a process."""

    def __init__(self) -> None:
        self._held: dict[Any, dict[int, Any]] = {}

    def exchanged(self, key: Any, rank: int, value: Any) -> dict[int, Any]:
        """What every rank has put under this key, once all of them have."""
        self._held.setdefault(key, {})[rank] = value
        barrier()
        return self._held[key]


class Mending:
    """The repairs of a run, as its ranks come to their places.

    watched   the rank
    """

    def __init__(self, repairs: Sequence[Repair], board: Board, watched: Watching):
        self._repairs, self._board, self._watched = repairs, board, watched
        self.rank = this_rank().rank
        self._turns: Counter[Any] = Counter()
        self._later: list[Callable[[], Any]] = []
        self._weights: dict[tuple[int, int], float] = {}
        self._before: dict[str, Tensor] = {}
        self._is_done, self._rows = -1, 1
        self._cut: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def _of(self, *kinds: Kind, line: str | None = None) -> Iterator[Repair]:
        for one in self._repairs:
            if one.kind in kinds and (line is None or one.line == line):
                yield one

    def _exchanged(self, key: Any, value: Any) -> dict[int, Any]:
        self._turns[key] += 1
        self._watched.seen.has_sent = True
        with self._watched.looks():
            return self._board.exchanged((key, self._turns[key]), self.rank, value)

    @property
    def _step(self) -> int:
        return self._watched.seen.num_steps

    # --- collectives -------------------------------------------------------------------------------------------------

    def collective(self, run: Callable[..., Any], call: Any, put: Any, take: Any, finished: Any) -> Any:
        """One of torch.distributed's. `run(take)` runs it; `finished` is what to return where it is left out."""
        if not self._repairs:
            return run(take)
        own = put[min(call.place.index, len(put) - 1)] if isinstance(put, list | tuple) and put else put
        for one in self._here(own, "mean", "sum", "skip", "last", "gradients", "wait", "parameters"):
            if one.kind == "wait":
                work = run(take)
                work.wait()
                return work
            if one.kind in ("mean", "sum"):
                by = _scale(one, len(call.place.group))
                return run(lambda y, by=by: take(y * by))
            if one.kind == "last":
                self._turns[one.line, self._step] += 1
                if self._turns[one.line, self._step] > one.times:
                    continue
            if call.op in ("all_reduce", "broadcast"):
                return finished()
            if call.op == "reduce_scatter":
                if isinstance(put, Tensor):
                    own = put.reshape(len(call.place.group), -1)[call.place.index]
                take(own)
                return finished()
        return run(take)

    def of_tplab(self, run: Callable[[Tensor], Any], call: Any, x: Tensor) -> Any:
        """One of tplab's own. `run(x)` runs it."""
        for one in self._here(x, "mean", "sum", "skip", "gradients") if self._repairs else ():
            if one.kind in ("mean", "sum"):
                return run(x * _scale(one, len(call.place.group)))  # what adds up is linear
            if call.op == "all_reduce":
                return x.clone()
        return run(x)

    def _here(self, x: Any, *kinds: Kind) -> Iterator[Repair]:
        """The repairs of the collective at this line, which is given x."""
        for one in self._of(*kinds, line=self._watched.line()):
            is_meant = not one.names or set(self._watched.names.at(address_of(x))[1]) & set(one.names)
            if is_meant and (one.kind != "skip" or self._is_turn(one)):
                yield one

    def keeps_order(self, line: str) -> bool:
        """Whether a collective takes the elements of a tensor in the program's order, not in that of memory."""
        return any(self._of("order", line=line))

    def _is_turn(self, one: Repair) -> bool:
        """Whether a sum in the backward pass is the one to leave out."""
        return graph_task() != -1 and self._turn(one.line) % one.times == one.was

    # --- other operations --------------------------------------------------------------------------------------------

    def function(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A function of torch is called: its result, as it should be."""
        name = getattr(func, "__name__", "")
        if not self._repairs or self._watched.is_looking:
            return func(*args, **kwargs)
        if func is F.batch_norm and any(self._of("statistics")):
            return self._batch_norm(*args, **kwargs)
        line = self._watched.line()
        if name in CLAMPS | ADDS and any(self._of("late", line=line)):
            self._later.append(lambda: func(*args, **kwargs))
            return args[0]
        for one in self._of("dual", line=line) if graph_task() == -1 else ():
            args = tuple(self._wrapped(one, x, args) for x in args)
        if name in MATMULS and any(self._of("gather", line=line)):
            args = args[0], self._gathered(args[1])
        found = func(*args, **kwargs)
        for one in self._of("cast", line=line) if graph_task() == -1 else ():
            if name in one.names and isinstance(found, Tensor) and found.is_floating_point():
                found = self._cast(found, one.combine, one.group_of(self.rank))
        if name in MULTIPLIES and any(self._of("factor", "numbers", line=line)):
            by = times(name, args) or times(name, (None, *args[1:2]))
            for one in self._of("factor", line=line):
                if by is not None and near(by, one.was):
                    found = _times(found, one.by / one.was, name)
            for one in self._of("numbers", line=line):
                if by and one.values.get(self._step):
                    found = _times(found, one.values[self._step] / by, name)
        return found

    def applied(self, line: str, returned: str, found: Any) -> Any:
        """The results of an autograd function that is applied at a line, and whose backward pass returns at another."""
        for one in self._of("dual") if self._repairs and graph_task() == -1 else ():
            if one.line in (line, returned):
                many = found if isinstance(found, tuple) else (found,)
                many = tuple(self._back(one, x) if isinstance(x, Tensor) and x.requires_grad else x for x in many)
                found = many if isinstance(found, tuple) else many[0]
        return found

    def _wrapped(self, one: Repair, x: Any, args: Sequence[Any]) -> Any:
        """An input whose gradient is to be added up: a parameter that is named, or else what was computed."""
        if not isinstance(x, Tensor) or not x.requires_grad:
            return x
        name = self._watched.names.known(id(x)) if x.is_leaf else ""
        has_named = any(
            isinstance(y, Tensor) and y.is_leaf and self._watched.names.known(id(y)) in one.names for y in args
        )
        return self._back(one, x) if (name in one.names if x.is_leaf else not has_named) else x

    def _back(self, one: Repair, x: Tensor) -> Tensor:
        """The same, whose gradient is the sum over the rank's group, times a factor."""

        def back(gradient: Tensor) -> Tensor:
            if one.groups:
                total = self._combined(("dual", one.line), gradient, "sum", one.group_of(self.rank))
                local_of(gradient).detach().copy_(total)
            return gradient * one.by

        return Back.apply(x, back)

    def _combined(self, key: Any, x: Tensor, how: str, group: Sequence[int]) -> Tensor:
        held = self._exchanged(key, local_of(x).detach().clone())
        total = torch.stack([held[rank] for rank in group]).sum(0)
        return total / len(group) if how == "mean" else total

    def _gathered(self, x: Tensor) -> Tensor:
        """Those of all ranks, side by side along the last dim; gradients go back to each."""
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

    def _cast(self, x: Tensor, how: str, group: Sequence[int]) -> Tensor:
        """The sum or the mean over ranks, also on the way back."""
        value = self._combined("cast", x, how, group)
        if not x.requires_grad:
            return value
        return Back.apply(x + (value - x).detach(), lambda y: self._combined("cast", y, how, group))

    def passes_back(self, line: str, ranks: Sequence[int], given: Sequence[Tensor], got: Sequence[Tensor]) -> None:
        """A collective is done that took pieces, one for each rank or one for all, and gave one of each rank: now
        gradients go back from these to those."""
        if not any(self._of("through", line=line)):
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

    def keeps(self, line: str) -> bool:
        """Whether gradients are not cleared at this line."""
        return any(self._of("keep", line=line))

    @property
    def put(self) -> dict[Any, Tensor]:
        """By the key of an operation: what its result is to be."""
        return {
            key: torch.from_numpy(np.array(pieces[self.rank]))
            for one in self._of("put")
            for key, pieces in one.values.items()
        }

    @property
    def syncs(self) -> bool:
        """Whether gradients are synchronised whatever the script says."""
        return any(self._of("sync"))

    def seed(self, seed: int, line: str) -> int:
        return next((one.values["seed"] for one in self._of("seed", line=line)), seed)

    # --- a step ------------------------------------------------------------------------------------------------------

    def loss(self, batch: int) -> float:
        """What the loss of a microbatch is multiplied by."""
        by = self._weights.get((self._step, batch), 1.0)
        for one in self._of("loss"):
            by *= one.values.get((self.rank, self._step, batch), 1.0) if one.values else one.by
        return by

    def begin(self) -> None:
        """Before the first forward pass."""
        for one in self._of("weights"):
            if one.values:
                for x in self._watched.names.parameters():
                    if (part := one.values.get((self.rank, self._watched.names.of(x)))) is not None:
                        local_of(x).detach().copy_(torch.from_numpy(np.array(part)))
                continue
            self._share(one, {name: x for x in self._watched.names.parameters()
                              if (name := self._watched.names.of(x)) in one.names or not one.names})  # fmt: skip

    def samples(self, asked: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the model is called with."""
        batch, self._rows = self._turn("samples"), len(next(iter(asked.values())))
        for one in self._of("samples"):
            rows, _ = one.values.get(self._step, ([], None))
            for whole, (name, x) in zip(rows, [*asked.items()]):
                if x.dim() and whole.shape[1:] == tuple(x.shape[1:]):
                    asked = {**asked, name: self._part(one, whole, batch, x)}
        return asked

    def _part(self, one: Repair, whole: np.ndarray, batch: int, like: Tensor) -> Tensor:
        """As many rows as there are in `like`."""
        place = next(place for place, group in enumerate(one.groups) if self.rank in group)
        start = (place * one.times + batch) * len(like)
        return torch.from_numpy(np.array(whole[start : start + len(like)])).to(like)

    def _turn(self, key: str) -> int:
        """How often this was asked in the step."""
        self._turns[key, self._step] += 1
        return self._turns[key, self._step] - 1

    def target(self, target: Tensor, ignored: int) -> Tensor:
        """What a loss compares with."""
        batch = self._turn("target")
        for one in self._of("samples"):
            _, whole = one.values.get(self._step, ([], None))
            if whole is not None and target.dim() and whole.shape[1:] == tuple(target.shape[1:]):
                return self._part(one, whole, batch, target)
        for one in self._of("gather"):
            if batch < len(wholes := one.values.get(self._step, ())):
                return self._part(one, wholes[batch], 0, target)
        for one in self._of("targets"):
            return self._cut_targets(one.values[self._step][1][batch], target, batch, ignored)
        return target

    def _cut_targets(self, whole: np.ndarray, target: Tensor, batch: int, ignored: int) -> Tensor:
        """The rank's part of the targets, and its weight in the mean over all of them."""
        size = this_rank().mesh.size
        part = np.array_split(whole.reshape(self._rows, -1), size, axis=1)[self.rank]
        counts = self._exchanged("targets", int((part != ignored).sum()))
        self._weights[self._step, batch] = counts[self.rank] * size / max(sum(counts.values()), 1)
        return torch.from_numpy(np.array(part)).reshape(target.shape).to(target)

    def after_forward(self) -> None:
        for one in self._of("buffers"):
            self._share(one, {name: x for name, x in self._watched.names.buffers() if name in one.names})

    def gradients(self, parameters: Sequence[Tensor], is_last: bool = False) -> None:
        """All gradients of a step are there, and nothing has been done with them."""
        if self._is_done == self._step or not self._repairs or (any(self._of("late")) and not is_last):
            return
        self._is_done = self._step
        for one in self._of("gradients"):
            known = {self._watched.names.of(p): p.grad for p in parameters if p.grad is not None}
            self._share(one, {name: x for name, x in known.items() if name in one.names}, one.by)
        later, self._later = self._later, []
        for act in later:
            act()
            self._watched.is_measured = False  # the reference clips before its average

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm: Tensor, line: str) -> Tensor | None:
        """The norm to clip by; None if there is nothing to do now."""
        if self._is_done != self._step and any(self._of("late", line=line)):
            self._later.append(lambda: torch.nn.utils.clip_grad_norm_(parameters, max_norm))
            return None
        at = self._step, self._turn("norm")
        return next((torch.full_like(norm, one.values[at]) for one in self._of("norm") if at in one.values), norm)

    def before_step(self, optimizer: Optimizer) -> None:
        parameters = parameters_of([optimizer])
        self.gradients(parameters, is_last=True)
        if any(self._of("parameters")):
            every = {id(p): p for p in [*parameters, *self._watched.names.parameters()]}.values()
            self._before |= {self._watched.names.of(p): local_of(p).detach().clone() for p in every}
        for one in self._of("settings"):
            optimizer.param_groups[:] = [
                other for group in optimizer.param_groups for other in self._set(one, group)
            ]  # fmt: skip
        for one in self._of("states"):
            if self._step == one.values["step"]:
                self._share_states(one, optimizer)

    def begin_update(self, optimizer: Optimizer) -> None:
        """All that the optimizer gets is as it should be: it updates whole tensors, in place of the rank's parts."""
        for one in self._of("whole"):
            at = {p: one.values[self.rank, name] for p in parameters_of([optimizer]) if p.grad is not None
                  and local_of(p) is p and (self.rank, name := self._watched.names.of(p)) in one.values}  # fmt: skip
            held = self._exchanged("whole", {of: (x.detach().clone(), x.grad.clone(), numbers)  # type: ignore[union-attr]
                                             for x, (of, numbers, _) in at.items()})  # fmt: skip
            for p, (of, numbers, shape) in at.items():
                wholes = [p.new_zeros(shape) for _ in "pg"]
                for parts in (mine[of] for mine in held.values() if of in mine):
                    for whole, part in zip(wholes, parts):
                        whole.view(-1)[torch.from_numpy(parts[2])] = part
                self._cut.append((p, p.data, p.grad, torch.from_numpy(numbers)))  # type: ignore[arg-type]
                p.grad, p.data = None, wholes[0]
                p.grad = wholes[1]

    def end_update(self) -> None:
        for p, own, gradient, numbers in self._cut:
            own.copy_(p.data.view(-1)[numbers])
            p.grad, p.data = None, own
            p.grad = gradient
        self._cut.clear()

    def _set(self, one: Repair, group: dict[str, Any]) -> list[dict[str, Any]]:
        """A group of parameters in as many groups as have the same settings."""
        found: dict[Any, dict[str, Any]] = {}
        for p in group["params"]:
            name = self._watched.names.of(p)
            values = {key: one.values[name, key, self._step] for key in group if (name, key, self._step) in one.values}
            like = found.setdefault(tuple(values.items()), {**group, "params": []})
            like |= {key: type(group[key])(value) for key, value in values.items()}
            like["params"].append(p)
        if len(found) == 1:
            group |= {key: value for key, value in next(iter(found.values())).items() if key != "params"}
            return [group]
        return [*found.values()]

    def _share_states(self, one: Repair, optimizer: Optimizer) -> None:
        names, source = self._watched.names, one.values.get("from")
        if source is None:
            known = {names.of(p): p for p in parameters_of([optimizer])}
            for (rank, (name, key)), x in one.values["whole"].items():
                if rank == self.rank and (p := known.get(name)) is not None:
                    value = torch.from_numpy(np.array(x))
                    optimizer.state[p][key] = value.to(local_of(p)) if value.shape == local_of(p).shape else value
            return
        held = self._exchanged("states", {names.of(p): state for p, state in optimizer.state.items()})
        if self.rank != source:
            for p in parameters_of([optimizer]):
                state = held[source].get(names.of(p), {})
                optimizer.state[p] = {key: x.clone() if isinstance(x, Tensor) else x for key, x in state.items()}

    def after_step(self, parameters: Sequence[Tensor]) -> None:
        """Other ranks' updates have arrived."""
        for one in self._of("parameters"):
            known = {self._watched.names.of(p): p for p in parameters}
            owned = {name: x for name, x in known.items() if name in one.names or not one.names}
            held = self._exchanged("parameters", {name: local_of(x).detach().clone() for name, x in owned.items()})
            moved = {name: float((local_of(x) - self._before[name]).abs().max()) for name, x in owned.items()}
            moves = self._exchanged("moved", moved)
            for name, x in owned.items():
                owner = one.values.get(name, max(held, key=lambda rank, name=name: moves[rank].get(name, 0.0)))
                local_of(x).detach().copy_(held[owner][name])

    def _share(self, one: Repair, mine: Mapping[str, Tensor], by: float = 1.0) -> None:
        """Each of these becomes what the rank's group has: the first rank's, the sum or the mean."""
        held = self._exchanged(one.kind, {name: local_of(x).detach().clone() for name, x in mine.items()})
        for name, x in mine.items():
            parts = [held[rank][name] for rank in one.group_of(self.rank) if name in held[rank]]
            total = parts[0] if not one.combine else torch.stack(parts).sum(0)
            total = total / len(parts) if one.combine == "mean" else total
            local_of(x).detach().copy_(total * by if by != 1.0 else total)


class Back(torch.autograd.Function):
    """The same, or what is there instead; on the way back, a function of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: Callable[[Tensor], Tensor], instead: Tensor | None = None) -> Tensor:
        ctx.back = back
        return x.view_as(x) if instead is None else instead

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(gradients[0].clone()), None, None


class Through(torch.autograd.Function):
    """What a collective gave, as a function of what it was given."""

    @staticmethod
    def forward(ctx: Any, back: Callable[..., Any], count: int, *tensors: Tensor) -> Any:
        ctx.back, ctx.count = back, count
        return tuple(x.clone() for x in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *ctx.back(gradients), *(None for _ in gradients)


def _scale(one: Repair, size: int) -> float:
    """What the result of a collective is multiplied by."""
    if one.by != 1.0:
        return 1 / one.by
    return 1 / size if one.kind == "mean" else float(size)


def _times(found: Any, by: float, name: str) -> Any:
    """The result of an operation that multiplies, times a factor."""
    if name.endswith(_IN_PLACE) and not name.startswith("__r"):
        with torch.no_grad():
            for x in found if isinstance(found, list | tuple) else [found]:
                if isinstance(x, Tensor):
                    local_of(x).detach().mul_(by)
        return found
    return [x * by for x in found] if isinstance(found, list | tuple) else found * by
