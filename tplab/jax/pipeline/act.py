"""One action on one rank: a pass of a program over one microbatch, from the state before it to the state after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tplab.jax.pipeline.flat import Flat, Sizes, add_at
from tplab.jax.pipeline.plan import Buffer
from tplab.jax.pipeline.programs import Batch, Program
from tplab.jax.ranks.context import vary

Row = dict[Any, Array]
"""A rank's row of the plan at one tick: column -> number."""


class State(NamedTuple):
    """What a rank carries from tick to tick.

    message   what its last action has made for another stage, packed
    inbox     what has arrived for later actions, one slot each
    stash     what passes keep for later passes: each buffer has one slot per microbatch in flight
    grads     of its parameters, added up so far
    loss      of its microbatches, added up so far
    count     of its actions
    """

    message: Flat
    inbox: Flat
    stash: dict[Buffer, Array]
    grads: Flat
    loss: Array
    count: Array


class Act:
    """An action that has begun.

    row             where to find what it needs
    params          the parameters of all stages of the rank
    message_sizes   the length of messages
    share           a microbatch's share of the batch's loss
    """

    def __init__(
        self, program: Program, row: Row, state: State, params: Flat, batch: Batch, message_sizes: Sizes, share: float
    ):
        self._program, self._passes, self._row, self._state = program, program.passes, row, state
        self._message_sizes, self._share = message_sizes, share
        self._begin = {kind: row.get(("begin", kind), 0) for kind in params}
        own = program.params(params, self._begin)
        given = batch.given(own, program.is_first, program.is_last, row["microbatch"], row["place"])
        self._known = dict(zip(program.passes.traced.fixed, given.flat()[0]))

    def do(self, kind: str) -> State:
        """The state after it: F, B, I or W."""
        does = {"F": self._forward, "B": self._backward, "I": self._input_grad, "W": self._weight_grad}
        does[kind]()
        return self._state._replace(count=self._state.count + 1)

    def _forward(self) -> None:
        program, traced = self._program, self._passes.traced
        self._known |= zip(traced.arriving, program.enters.unpack(self._taken()))
        results = self._passes.forward(self._known)
        outputs, saved = results[: len(traced.outputs)], results[len(traced.outputs) :]
        self._keep(program.saved, saved)
        if program.is_last:
            loss = self._state.loss
            self._state = self._state._replace(loss=loss + outputs[0].astype(loss.dtype))
        else:
            self._state = self._state._replace(message=program.leaves.pack(outputs, self._message_sizes))

    def _backward(self) -> None:
        self._recall_saved()
        self._take_ends()
        results = self._passes.backward(self._known)
        self._add(self._passes.trained, self._send_back(results))

    def _input_grad(self) -> None:
        self._recall_saved()
        self._take_ends()
        rest = self._send_back(self._passes.input_grad(self._known))
        early = self._passes.early
        self._add(early, rest[: len(early)])
        self._keep(self._program.left, rest[len(early) :])

    def _weight_grad(self) -> None:
        self._recall_saved()
        stash = self._state.stash
        left = zip(self._passes.left, self._program.left)
        self._known |= {var: at(stash[buffer], self._row[buffer]) for var, buffer in left}
        self._add(self._passes.late, self._passes.weight_grad(self._known))

    # --- where things are ----------------------------------------------------------------------------------------

    def _taken(self) -> Flat:
        """What has arrived for this action."""
        return {kind: at(x, self._row["takes"]) for kind, x in self._state.inbox.items()}

    def _take_ends(self) -> None:
        """Take the gradients of the outputs. The gradient of the loss is its share."""
        program = self._program
        if program.is_last:
            (kind,) = program.ends.sizes
            ends = [vary(jnp.full((), self._share, kind.dtype), kind.axes)]
        else:
            ends = program.ends.unpack(self._taken())
        self._known |= zip(self._passes.traced.ends, ends)

    def _recall_saved(self) -> None:
        stash, saved = self._state.stash, zip(self._passes.saved, self._program.saved)
        self._known |= {var: at(stash[buffer], self._row[buffer]) for var, buffer in saved}

    def _keep(self, buffers: Sequence[Buffer], values: Sequence[Array]) -> None:
        stash = dict(self._state.stash)
        for buffer, value in zip(buffers, values, strict=True):
            stash[buffer] = lax.dynamic_update_index_in_dim(stash[buffer], value, self._row[buffer], 0)
        self._state = self._state._replace(stash=stash)

    def _send_back(self, results: list[Array]) -> list[Array]:
        """Make the gradients of the inputs, which come first, the message. Returns the other results."""
        program, after = self._program, len(self._program.returns.slots)
        if not program.is_first:
            message = program.returns.pack(results[:after], self._message_sizes)
            self._state = self._state._replace(message=message)
        return results[after:]

    def _add(self, numbers: Sequence[int], grads: Sequence[Array]) -> None:
        """Add to the gradients of the parameters that have these numbers."""
        total = dict(self._state.grads)
        for number, grad in zip(numbers, grads, strict=True):
            slot = self._program.blueprint.layout.slots[number]
            total[slot.kind] = add_at(total[slot.kind], self._begin[slot.kind] + slot.begin, grad.reshape(-1))
        self._state = self._state._replace(grads=total)


def at(x: Array, slot: Array) -> Array:
    """The contents of a slot."""
    return lax.dynamic_index_in_dim(x, slot, keepdims=False)
