"""Repairs of the steps of one rank's run: of its samples, its gradients and its optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from tplab.checking.recording import Seen
from tplab.checking.repairs import Kind, Repair
from tplab.torch.checking.names import Names, parameters_of
from tplab.torch.comm.collectives import barrier
from tplab.torch.private import local_of
from tplab.torch.ranks.rank import this_rank


class Watching(Protocol):
    """The rank whose run is repaired."""

    names: Names
    seen: Seen
    is_looking: bool
    is_measured: bool

    def line(self) -> str: ...

    def looks(self) -> AbstractContextManager[None]: ...


class MendedSteps:
    """Repairs the inputs and results of a rank's steps.

    board     what ranks have exchanged for a repair, by key and rank: they share a process
    watched   the rank whose run is repaired: see `Watched`
    num_rows  of the samples that its model was called with last
    """

    def __init__(self, repairs: Sequence[Repair], board: dict[Any, dict[int, Any]], watched: Watching):
        self._repairs, self._board, self._watched = repairs, board, watched
        self.rank = this_rank().rank
        self._turns: Counter[Any] = Counter()
        self._later: list[Callable[[], Any]] = []
        self._weight = 1.0
        self._before: dict[str, Tensor] = {}
        self._is_done, self.num_rows = -1, 1
        self._cut: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def _of(self, *kinds: Kind, line: str | None = None) -> Iterator[Repair]:
        for one in self._repairs:
            if one.kind in kinds and (line is None or one.line == line):
                yield one

    def has(self, kind: Kind, line: str | None = None) -> bool:
        """Return whether there is such a repair, of this line."""
        return any(self._of(kind, line=line))

    def _exchanged(self, key: Any, value: Any) -> dict[int, Any]:
        """Return what every rank has put under this key, once all of them have."""
        self._turns[key] += 1
        self._watched.seen.has_sent = True
        held = self._board.setdefault((key, self._turns[key]), {})
        held[self.rank] = value
        with self._watched.looks():
            barrier()
        return held

    @property
    def _step(self) -> int:
        return self._watched.seen.num_steps

    def _combined(self, key: Any, x: Tensor, how: str, group: Sequence[int]) -> Tensor:
        held = self._exchanged(key, local_of(x).detach().clone())
        total = torch.stack([held[rank] for rank in group]).sum(0)
        return total / len(group) if how == "mean" else total

    def loss(self, batch: int) -> float:
        """Return the factor of the loss of a microbatch."""
        by = 1.0
        for one in self._of("loss"):
            by *= one.values.get((self.rank, self._step, batch), 1.0) if one.values else one.by
        return by

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the value of a loss whose targets may have been replaced."""
        by, self._weight = self._weight, 1.0
        return loss if by == 1.0 else loss * by

    def begin(self) -> None:
        """Repair the weights before the first forward pass."""
        for one in self._of("weights"):
            if one.values:
                for x in self._watched.names.parameters():
                    if (part := one.values.get((self.rank, self._watched.names.of(x)))) is not None:
                        local_of(x).detach().copy_(torch.from_numpy(np.array(part)))
                continue
            self._share(one, {name: x for x in self._watched.names.parameters()
                              if (name := self._watched.names.of(x)) in one.names or not one.names})  # fmt: skip

    def _turn(self, key: Any) -> int:
        """Return how often this was asked before in the step."""
        self._turns[key, self._step] += 1
        return self._turns[key, self._step] - 1

    def target(self, target: Tensor, ignored: int) -> Tensor:
        """Return the targets of a loss."""
        batch = self._turn("target")
        for one in self._of("gather"):
            if batch < len(wholes := one.values.get(self._step, ())):
                part = wholes[batch][self.rank * len(target) : (self.rank + 1) * len(target)]
                return torch.from_numpy(np.array(part)).to(target)
        for one in self._of("targets"):
            return self._cut_targets(one, one.values[self._step][1][batch], target, ignored)
        return target

    def _cut_targets(self, one: Repair, whole: np.ndarray, target: Tensor, ignored: int) -> Tensor:
        """Return the rank's part of the targets, and set the weight of its loss: as in the mean over all of them; or if
        the loss is not a mean, to make up for the number of targets that it had."""
        size = this_rank().mesh.size
        part = np.array_split(whole.reshape(self.num_rows, -1), size, axis=1)[self.rank]
        held = self._exchanged("targets", [int((x != ignored).sum()) for x in (target, part)])
        had, has = (max(sum(counts), 1) for counts in zip(*held.values()))
        self._weight = had / has if one.by != 1 else held[self.rank][1] * size / has
        return torch.from_numpy(np.array(part)).reshape(target.shape).to(target)

    def after_forward(self) -> None:
        for one in self._of("buffers"):
            self._share(one, {name: x for name, x in self._watched.names.buffers() if name in one.names})

    def gradients(self, parameters: Sequence[Tensor], is_last: bool = False) -> None:
        """Repair all gradients of a step, before they are used."""
        if self._is_done == self._step or not self._repairs or (self.has("late") and not is_last):
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
        """Return the norm to clip by; None if clipping is deferred."""
        if self._is_done != self._step and self.has("late", line):
            self._later.append(lambda: torch.nn.utils.clip_grad_norm_(parameters, max_norm))
            return None
        at = self._step, self._turn("norm")
        return next((torch.full_like(norm, one.values[at]) for one in self._of("norm") if at in one.values), norm)

    def before_step(self, optimizer: Optimizer) -> None:
        parameters = parameters_of([optimizer])
        self.gradients(parameters, is_last=True)
        if self.has("parameters"):
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
        """Let the optimizer update whole tensors in place of the rank's parts."""
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
        """Split a group of parameters into groups with the same settings."""
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
        """Repair the parameters after other ranks' updates have arrived."""
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
        """Set each of these to the first rank's of the group, or to the group's sum or mean."""
        held = self._exchanged(one.kind, {name: local_of(x).detach().clone() for name, x in mine.items()})
        for name, x in mine.items():
            parts = [held[rank][name] for rank in one.group_of(self.rank) if name in held[rank]]
            total = parts[0] if not one.combine else torch.stack(parts).sum(0)
            total = total / len(parts) if one.combine == "mean" else total
            own = local_of(x).detach() if x.layout is torch.strided else x  # a sparse one has memory of its own
            own.copy_(total * by if by != 1.0 else total)
