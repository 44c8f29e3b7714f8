"""Groups: parameters of a unit of ZeRO stage 3 that travel in one message; and unsent gradients of all units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tplab.data.pieces import UnitOptions
from tplab.torch.comm.collectives import Handle
from tplab.torch.data.parameters import Owner, note_owner
from tplab.torch.data.pieces import held_in, held_of, message_of, pieces_of, reduced_row, row_of
from tplab.torch.layers.parameters import CUTS, note_cuts, note_mean
from tplab.torch.pipeline.copies import at_end_of_pass
from tplab.torch.private import graph_task
from tplab.torch.ranks.rank import this_rank
from tplab.torch.watching.memory import count_as

Sites = list[tuple[nn.Module, str]]
"""Where a parameter is: modules, and its name in each; several if it is tied."""


class Unsent:
    """Gradients of whole parameters that no rank has sent yet, because of `no_sync`.

    messages     by their group, in the order in which they came
    is_paused    whether new ones are kept too
    awaited_by   the backward pass whose end sends what is left. A pass that fails has no end; the next is another
    """

    def __init__(self) -> None:
        self.messages: dict[Group, Tensor] = {}
        self.is_paused, self.awaited_by = False, -1

    def send(self) -> None:
        """Send the gradients of groups that the backward pass has not reached."""
        messages, self.messages = self.messages, {}
        with torch.no_grad():
            for group, message in messages.items():
                for shard, grad in zip(group.shards, group.reduced(group.send(message))):
                    shard.grad = grad if shard.grad is None else shard.grad + grad


@dataclass(frozen=True, eq=False)
class About(UnitOptions):
    """Those of a model in torch; `unsent` has the gradients that none of its units has sent yet."""

    prefetch: bool
    unsent: Unsent = field(default_factory=Unsent)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.names_on(this_rank().mesh)  # so that axes that do not fit together raise here


class Group(Owner):
    """Parameters of a unit that travel in one message: of one dtype, and all trained or all frozen.

    sites    where each parameter is; between uses, this rank's piece is there, a parameter [n]
    unit     the unit that they belong to, by its name in a trace
    """

    def __init__(self, sites: Sequence[Sites], about: About, unit: str):
        self.sites, self.about, self.unit = list(sites), about, unit
        wholes = [module._parameters[name] for (module, name), *_ in sites]
        parameters = [p for p in wholes if p is not None]
        self.pieces, self.index = pieces_of(parameters, about.axis)
        first = parameters[0]
        self.is_trained, self.dtype = first.requires_grad, first.dtype
        if about.compute_dtype is not None and first.dtype.is_floating_point:
            self.dtype = about.compute_dtype
        held = held_of(self.pieces, self.index, parameters)
        self.shards = [nn.Parameter(piece.clone(), requires_grad=self.is_trained) for piece in held]
        for places, shard in zip(self.sites, self.shards):
            note_owner(shard, shard, self, about.axis)
            for module, name in places:
                _check_copies(module, name, about)
                module._parameters[name] = shard
                note_cuts(module, about.axis, name)
                if about.op == "mean":
                    note_mean(module, about.names_on(this_rank().mesh), name)

    def row(self) -> Tensor:
        """The row of this rank's pieces, as it travels."""
        return row_of(self.pieces, self.shards, self.dtype)

    def begin_reduce(self, grads: Sequence[Tensor | None]) -> Handle | None:
        """Send the gradients of whole parameters, with any that were kept before; None if they are kept for later."""
        about, unsent = self.about, self.about.unsent
        message = message_of(self.pieces, grads, self.shards[0], about.reduce_dtype or self.dtype)
        count_as("gradients", [message, *grads])
        if self in unsent.messages:
            message = unsent.messages.pop(self).add_(message)
        if unsent.is_paused:
            unsent.messages[self] = message
            return None
        if unsent.messages and unsent.awaited_by != graph_task():
            unsent.awaited_by = graph_task()
            at_end_of_pass(unsent.send)
        return self.send(message)

    def send(self, message: Tensor) -> Handle:
        with this_rank().sends_for(self.unit):
            return self.about.reduce(message, self.about.axis, self.about.op)

    def reduced(self, leaving: Handle) -> list[Tensor]:
        """This rank's piece of each gradient, once it has arrived."""
        with this_rank().sends_for(self.unit):
            row = reduced_row(leaving, self.about.replicate_axis, self.about.op)
        count_as("gradients", row)
        held = held_in(self.pieces, self.index, row)
        return [grad.to(shard.dtype) for grad, shard in zip(held, self.shards)]


def _check_copies(module: nn.Module, name: str, about: About) -> None:
    """Raise ValueError if ranks that would share a parameter already hold different pieces of it, as of experts."""
    names = this_rank().mesh.names
    cut = {axis for axes in vars(module).get(CUTS, {}).get(name, ()) for axis in names(axes)}
    along = [axis for axes in (about.axis, about.replicate_axis) if axes for axis in names(axes) if axis in cut]
    if along:
        raise ValueError(
            f"{name!r} of {type(module).__name__} is cut along {', '.join(map(repr, along))}: its ranks hold different "
            "pieces, and no copies that they could share. Call shard_parameters for that module by itself first, along "
            "the axes whose ranks hold copies of it"
        )
