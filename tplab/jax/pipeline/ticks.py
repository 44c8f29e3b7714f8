"""The loop over a schedule's ticks: in each, a rank does what its row of the plan has for it, and then all exchange.

Two things keep it quick. What a rank carries from tick to tick is written where it lies: an action is a loop of one or
no iterations, since XLA updates the carry of a loop in place, and copies that of a conditional. And each action counts
one up in that carry, which the next one looks at before it begins: so they have an order that XLA can see, and none
needs a copy of what another one reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tplab.jax.actions import STORE, action
from tplab.jax.comm import axis_index, ppermute
from tplab.jax.context import this_mesh, vary
from tplab.jax.pipeline.equations import Var
from tplab.jax.pipeline.flat import Flat, Kind, add_at, largest
from tplab.jax.pipeline.plan import Buffer, Pairs, Plan
from tplab.jax.pipeline.programs import Batch, Program
from tplab.jax.pipeline.stages import Blueprints
from tplab.mesh import Axis
from tplab.schedules import Costs, Schedule

Carry = TypeVar("Carry")


class State(NamedTuple):
    """What a rank carries from tick to tick.

    message   what its last action has made for another stage, packed
    inbox     what has arrived for later actions, a slot each
    stash     what passes keep for later passes: an array a buffer, a slot for each microbatch in flight
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


Row = dict[Any, Array]
"""A rank's row of the plan at one tick: column -> number."""


class Ticks:
    """All ticks of a batch, on one rank."""

    def __init__(
        self, schedule: Schedule, plan: Plan, programs: Sequence[Program], blueprints: Blueprints, params: Flat,
        batch: Batch, axis: Axis, costs: Costs | None,
    ):  # fmt: skip
        self.schedule, self.plan, self.programs = schedule, plan, programs
        self.blueprints, self.params, self.batch, self.axis = blueprints, params, batch, axis
        self.message_sizes = largest(layout for p in programs for layout in (p.leaves, p.returns))
        self.table = plan.table | self._places()
        self.seconds = np.zeros((schedule.num_ticks, schedule.num_ranks), np.float32)
        if costs is not None:
            self.seconds[schedule.ticks, schedule.rank] = costs.durations(schedule)
        mesh = this_mesh()
        groups = np.array([mesh.group(rank, axis) for rank in mesh.ranks], np.int32)
        self.group = jnp.asarray(groups)[lax.axis_index(mesh.axis_names)]

    def run(self) -> State:
        """The state after the last tick."""
        index = axis_index(self.axis)
        rows = jnp.asarray(np.stack(list(self.table.values()), axis=-1))[:, index]
        seconds = jnp.asarray(self.seconds)[:, index]
        return lax.scan(self._tick, self._begin(), (rows, seconds, jnp.asarray(self.plan.round_of)))[0]

    def _begin(self) -> State:
        def zeros(kind: Kind, *shape: int) -> Array:
            return vary(kind.zeros(*shape), self.batch.axes)

        return State(
            message={kind: zeros(kind, size) for kind, size in self.message_sizes.items()},
            inbox={kind: zeros(kind, self.plan.inbox, size) for kind, size in self.message_sizes.items()},
            stash={buffer: zeros(buffer.kind, slots, *buffer.shape) for buffer, slots in self.plan.stash.items()},
            grads={kind: jnp.zeros_like(x) for kind, x in self.params.items()},
            loss=vary(jnp.zeros((), jnp.result_type(float)), self._loss_axes()),
            count=vary(jnp.int32(0), self.batch.axes),
        )

    def _tick(self, state: State, now: tuple[Array, Array, Array]) -> tuple[State, None]:
        values, seconds, rounds = now
        row: Row = dict(zip(self.table, values))
        numbers = row["stage"], row["microbatch"], self.group[row["home"]], seconds
        for number, (kind, program) in enumerate(self.plan.passes, 1):
            act = action(kind, partial(self._act, kind, self.programs[program], row))
            is_next = (row["action"] == number) & (state.count >= 0)
            state = _when(is_next, lambda state, act=act: act(state, *numbers), state)
        ways = [partial(_exchange, pairs, self.axis) for pairs in self.plan.rounds]
        arrived = [lax.switch(number, ways, state.message) for number in rounds]
        for number, message in enumerate(arrived):
            slot = row["arrives", number]
            store = action(STORE, partial(_stored, message, slot))
            state = state._replace(inbox=_when(slot >= 0, store, state.inbox))
        return state, None

    # --- actions -------------------------------------------------------------------------------------------------

    def _act(self, kind: str, program: Program, row: Row, state: State, *_: Array) -> State:
        """Do an action of this kind."""
        begin = {kind: row.get(("begin", kind), 0) for kind in self.params}
        given = self.batch.given(
            program.params(self.params, begin), program.is_first, program.is_last, row["microbatch"], row["place"]
        )
        known = dict(zip(program.passes.traced.fixed, given.flat()[0]))
        does = {"F": self._forward, "B": self._backward, "I": self._input_grad, "W": self._weight_grad}
        return does[kind](program, row, begin, known, state)._replace(count=state.count + 1)

    def _forward(self, program: Program, row: Row, begin: Any, known: dict[Var, Any], state: State) -> State:
        passes, traced = program.passes, program.passes.traced
        known |= zip(traced.arriving, program.enters.unpack(_taken(state, row)))
        results = passes.forward(known)
        outputs, saved = results[: len(traced.outputs)], results[len(traced.outputs) :]
        state = state._replace(stash=_kept(state.stash, program.saved, saved, row))
        if program.is_last:
            return state._replace(loss=state.loss + outputs[0].astype(state.loss.dtype))
        return state._replace(message=program.leaves.pack(outputs, self.message_sizes))

    def _backward(self, program: Program, row: Row, begin: Any, known: dict[Var, Any], state: State) -> State:
        passes = program.passes
        self._recall(program, row, known, state)
        results = passes.backward(known)
        state = self._sent_back(program, results, state)
        return self._added(program, begin, passes.trained, results[len(passes.traced.input_grads) :], state)

    def _input_grad(self, program: Program, row: Row, begin: Any, known: dict[Var, Any], state: State) -> State:
        passes = program.passes
        self._recall(program, row, known, state)
        results = passes.input_grad(known)
        first, after = len(passes.traced.input_grads), len(passes.traced.input_grads) + len(passes.early)
        state = state._replace(stash=_kept(state.stash, program.left, results[after:], row))
        return self._added(
            program, begin, passes.early, results[first:after], self._sent_back(program, results, state)
        )

    def _weight_grad(self, program: Program, row: Row, begin: Any, known: dict[Var, Any], state: State) -> State:
        passes = program.passes
        for variables, buffers in ((passes.saved, program.saved), (passes.left, program.left)):
            known |= {var: _at(state.stash[buffer], row[buffer]) for var, buffer in zip(variables, buffers)}
        return self._added(program, begin, passes.late, passes.weight_grad(known), state)

    def _recall(self, program: Program, row: Row, known: dict[Var, Any], state: State) -> None:
        """Add what F has kept, and the gradients of the outputs; that of the loss is its share of the mean."""
        passes = program.passes
        known |= {var: _at(state.stash[buffer], row[buffer]) for var, buffer in zip(passes.saved, program.saved)}
        if program.is_last:
            (kind,) = {piece.kind for piece in program.ends.pieces}
            ends = [vary(jnp.full((), 1 / self.schedule.num_microbatches, kind.dtype), kind.axes)]
        else:
            ends = program.ends.unpack(_taken(state, row))
        known |= zip(passes.traced.ends, ends)

    def _sent_back(self, program: Program, results: list[Array], state: State) -> State:
        if program.is_first:
            return state
        grads = results[: len(program.returns.pieces)]
        return state._replace(message=program.returns.pack(grads, self.message_sizes))

    def _added(
        self, program: Program, begin: dict[Kind, Any], numbers: Sequence[int], grads: Sequence[Array], state: State
    ) -> State:
        """With the gradients of the parameters that have these numbers added."""
        total = dict(state.grads)
        for number, grad in zip(numbers, grads, strict=True):
            piece = program.blueprint.layout.pieces[number]
            total[piece.kind] = add_at(total[piece.kind], begin[piece.kind] + piece.begin, grad.reshape(-1))
        return state._replace(grads=total)

    # --- what the plan does not say ------------------------------------------------------------------------------

    def _places(self) -> dict[Any, np.ndarray]:
        """More columns: the first layer of the action's stage, and where its parameters begin in the rank's."""
        stage, about = self.plan.table["stage"], self.blueprints
        made = about.partition
        first = np.arange(len(about.stages)) if made is None else np.array(made.bounds[:-1])
        columns: dict[Any, np.ndarray] = {"place": first[stage].astype(np.int32)}
        for kind in self.params:
            begin = np.zeros((len(about.placement), len(about.stages)), np.int32)
            for rank in range(len(about.placement)):
                for held in about.held(rank):
                    begin[rank, held] = about.begin(rank, held)[kind]
            if begin.any():  # else it is known while the program is compiled
                columns["begin", kind] = np.take_along_axis(begin, stage.T, axis=1).T
        return columns

    def _loss_axes(self) -> tuple[str, ...]:
        ends = next(program.ends for program in self.programs if program.is_last)
        return tuple({*self.batch.axes, *(name for piece in ends.pieces for name in piece.kind.axes)})


def _when(condition: Array, update: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`update(carry)` where the condition holds, else `carry`: written in place."""

    def once(state: tuple[Array, Carry]) -> tuple[Array, Carry]:
        return state[0] & False, update(state[1])

    return lax.while_loop(lambda state: state[0], once, (condition, carry))[1]


def _exchange(pairs: Pairs, axis: Axis, message: Flat) -> Flat:
    """What each rank gets if these send. All ranks take part in the same exchange, so none waits in another one."""
    if not pairs:
        return message
    with jax.named_scope("tplab.send"):
        return {kind: ppermute(x, axis, pairs) for kind, x in message.items()}


def _stored(message: Flat, slot: Array, inbox: Flat) -> Flat:
    return {kind: lax.dynamic_update_index_in_dim(x, message[kind], slot, 0) for kind, x in inbox.items()}


def _taken(state: State, row: Row) -> Flat:
    return {kind: _at(x, row["takes"]) for kind, x in state.inbox.items()}


def _kept(
    stash: dict[Buffer, Array], buffers: Sequence[Buffer], values: Sequence[Array], row: Row
) -> dict[Buffer, Array]:
    """The stash with these values in the action's slots."""
    new = {
        buffer: lax.dynamic_update_index_in_dim(stash[buffer], value, row[buffer], 0)
        for buffer, value in zip(buffers, values, strict=True)
    }
    return {**stash, **new}


def _at(x: Array, slot: Array) -> Array:
    return lax.dynamic_index_in_dim(x, slot, keepdims=False)
