"""A unit of ZeRO stage 3: a layer whose parameters are whole only while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tplab.torch.comm.autograd import token
from tplab.torch.comm.collectives import Handle
from tplab.torch.data.group import About, Group
from tplab.torch.data.pieces import wholes_in
from tplab.torch.layers.memory import Again, Hooks, made_again
from tplab.torch.private import storage_id
from tplab.torch.ranks.rank import this_rank
from tplab.torch.watching.memory import count_as


class Use(Again):
    """One forward pass of a group, and its backward pass: the period in which its parameters are whole.

    wholes     the whole parameters, while they are needed
    before     the previous use in the forward pass: the backward pass reaches it next
    """

    def __init__(self, group: Group, before: Use | None):
        self.group, self.before = group, before
        self._arriving: Handle | None = None
        self._leaving: Handle | None = None
        self._secondary: Tensor | None = None
        self.begin_gather()
        self._token = self._begun()

    def _begun(self) -> Tensor | None:
        """The node that waits for gradients; None if there will be none."""
        is_wanted = self.group.is_trained and torch.is_grad_enabled()
        return _Begin.apply(self, *self.group.shards) if is_wanted else None  # type: ignore[return-value]

    def arrive(self) -> list[Tensor]:
        """The whole parameters, for the forward pass."""
        if (self._token is not None) != torch.is_grad_enabled():  # grad mode has changed since the layer before
            self._token = self._begun()
        if self._token is None:
            self.wholes = self.gathered()
        else:
            self.wholes, self._token = list(_Arrive.apply(self._token, self)), None  # type: ignore[arg-type]
        return self.wholes

    def make(self) -> list[Tensor]:
        """The whole parameters, for the backward pass."""
        if self._arriving is None:
            self.begin_gather()
        wholes = self.gathered()
        if self.before is not None and self.group.about.prefetch:
            self.before.begin_again()
        return wholes

    def begin_again(self) -> None:
        """Start gathering for the backward pass, unless the parameters are here, in flight, or no longer needed."""
        if self.num_served < self.num_kept and self.wholes is None and self._arriving is None:
            self.begin_gather()

    def begin_gather(self) -> None:
        about = self.group.about
        with this_rank().sends_for(self.group.unit):
            if self._secondary is not None:
                assert about.secondary_axis is not None
                self._arriving = about.gather(self._secondary, about.secondary_axis)
            else:
                self._arriving = about.gather(self.group.row(), about.axis)

    def gathered(self) -> list[Tensor]:
        assert self._arriving is not None
        message, self._arriving = self._arriving.read(), None
        axis = self.group.about.secondary_axis
        if axis is not None and self._secondary is None and torch.is_grad_enabled():
            place = this_rank().place(axis)
            self._secondary = message.view(len(place.group), -1)[place.index].clone()
            count_as("gathered", self._secondary)
        wholes = wholes_in(self.group.pieces, message)
        count_as("gathered", [message, *wholes])
        return wholes

    def begin_reduce(self, grads: Sequence[Tensor | None]) -> None:
        self._leaving = self.group.begin_reduce(grads)
        self.wholes = self._secondary = None  # this backward pass no longer needs them
        self.num_served = 0

    def reduced(self) -> Sequence[Tensor | None]:
        """This rank's piece of each gradient; None if they have not been sent."""
        leaving, self._leaving = self._leaving, None
        return [None] * len(self.group.shards) if leaving is None else self.group.reduced(leaving)


class _Begin(torch.autograd.Function):
    """Forward: the gather has started. Backward: wait for the reduction that `_Arrive` started.

    Whatever runs between the two nodes overlaps with the message: in the forward pass the layer before, and in the
    backward pass, which reaches the nodes in reverse order, that layer's backward pass.
    """

    @staticmethod
    def forward(ctx: Any, use: Use, *shards: Tensor) -> Tensor:
        ctx.use = use
        return token(shards[0], torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.use.reduced()


class _Arrive(torch.autograd.Function):
    """Forward: the whole parameters. Backward: start the reduction of their gradients."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, use: Use) -> tuple[Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        with torch.enable_grad():  # as in the caller: a secondary piece is kept for a backward pass
            wholes = use.gathered()
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.use.begin_reduce(grads)
        return token(ctx.use.group.shards[0], torch.float32), None


class Unit:
    """A module whose own parameters, which are in no other unit, are gathered when it runs.

    It may also use parameters of the model itself, which are whole during the model's forward pass. If the unit runs on
    its own, as when a checkpoint recomputes it for the backward pass, it gathers those too.
    """

    def __init__(self, module: nn.Module, groups: Sequence[Group], model: Model):
        self.groups, self._model = list(groups), model
        inside = set(module.modules())
        others = model.units[0].groups if model.units else []
        self._borrowed = [g for g in others if any(home in inside for places in g.sites for home, _ in places)]
        self._ahead: list[Use] | None = None  # started before its turn
        self._open: list[tuple[list[Use], saved_tensors_hooks | None]] = []
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward, always_call=True)

    def begin(self) -> None:
        """Start gathering, ahead of the forward pass."""
        if self._ahead is None:
            self._ahead = self._model.uses(self.groups)

    def drop(self) -> None:
        """Drop what was started but never used: it would be out of date after the optimizer's step."""
        self._ahead = None

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._model.enters(self)
        borrowed = [] if self._model.is_running else self._borrowed
        uses, self._ahead = self._ahead or self._model.uses([*self.groups, *borrowed]), None
        for use in uses:
            for places, whole in zip(use.group.sites, use.arrive()):
                for home, name in places:
                    home.__dict__[name] = whole
        self._model.open += uses
        hooks = None
        if torch.is_grad_enabled() and self._model.about.reshard_after_forward is not False:
            hooks = self._model.hooks()
            hooks.__enter__()
        self._open.append((uses, hooks))
        self._model.runs(self)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._open:
            return
        uses, hooks = self._open.pop()
        if hooks is not None:
            hooks.__exit__(None, None, None)
        for use in uses:
            use.wholes = None
            self._model.open.remove(use)
            for places in use.group.sites:
                for home, name in places:
                    home.__dict__.pop(name, None)
        self._model.leaves(self)


class Model:
    """All units of a model, in the order in which its forward pass reaches them; the model itself comes first."""

    def __init__(self, about: About):
        self.about = about
        self.units: list[Unit] = []
        self.open: list[Use] = []  # whose forward pass is running
        self.is_running = False
        self._last: Use | None = None

    def uses(self, groups: Sequence[Group]) -> list[Use]:
        made = []
        for group in groups:
            self._last = Use(group, self._last if self.is_running else None)  # a checkpoint runs units on their own
            made.append(self._last)
        return made

    def enters(self, unit: Unit) -> None:
        if unit is self.units[0]:
            self._last, self.is_running = None, True

    def runs(self, unit: Unit) -> None:
        """Start gathering the next unit's parameters, which travel while this unit computes."""
        place = self.units.index(unit) + 1
        if self.about.prefetch and self.is_running and place < len(self.units):
            self.units[place].begin()

    def leaves(self, unit: Unit) -> None:
        if unit is self.units[0]:
            self.is_running = False
            for other in self.units:
                other.drop()

    def hooks(self) -> saved_tensors_hooks:
        """Hooks under which autograd keeps only how whole parameters are used, not the parameters."""
        origins = {
            storage_id(whole.untyped_storage()): (use, place)
            for use in self.open
            for place, whole in enumerate(use.wholes or ())
        }

        def find(x: Tensor, _: Hooks) -> tuple[Use, int, int] | None:
            found = origins.get(storage_id(x.untyped_storage()))
            return found and (*found, int(x.storage_offset()))

        return made_again(find)
