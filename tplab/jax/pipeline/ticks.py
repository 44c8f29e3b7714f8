"""The loop over a schedule's ticks: in each, a rank executes its row of the plan, and then all ranks exchange.

Two things keep it fast. The state that a rank carries from tick to tick is updated in place: an action is a loop of one
or no iterations, since XLA updates the carry of a loop in place, but copies that of a conditional. And each action
increments a counter in that carry. So each depends on the previous one, and XLA, which sees their order, need not copy
for one action what another one reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tplab.errors import ShapeError
from tplab.jax.comm.collectives import axis_index, ppermute
from tplab.jax.pipeline.equations import Var
from tplab.jax.pipeline.flat import Flat, Kind, add_at, largest
from tplab.jax.pipeline.passes import Loss
from tplab.jax.pipeline.plan import Buffer, Pairs, Plan
from tplab.jax.pipeline.programs import Batch, Program, programs_of
from tplab.jax.pipeline.stages import Stages
from tplab.jax.ranks.context import this_mesh, vary, varying_axes
from tplab.jax.tracing.actions import STORE, action
from tplab.mesh import Axis
from tplab.pipeline.checks import check_data_axis, check_microbatches
from tplab.schedules import Costs, Schedule

Carry = TypeVar("Carry")


class Ticks:
    """All ticks of a batch, on one rank. The arguments are those of `train_batch`; `forward_only`: run F alone.

    share           a microbatch's share of the batch's loss
    message_sizes   the length of messages
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Stages,
        microbatches: Sequence[tuple[Any, Any]],
        loss: Loss,
        axis: Axis,
        data_axis: Axis | None,
        costs: Costs | None,
        checkpoint_every: int | None = None,
        first: int | Array = 0,
        key: Any = None,
        forward_only: bool = False,
    ):
        mesh, self.blueprints, self.axis = this_mesh(), stages.blueprints, axis
        check_data_axis(mesh, axis, data_axis)
        axes = mesh.names(axis) if data_axis is None else (*mesh.names(axis), *mesh.names(data_axis))
        self.batch = Batch(check_microbatches(microbatches, schedule.num_microbatches), key, axes, first)
        self.params = _own(stages, axes)
        programs, program_of = programs_of(self.blueprints, self.params, self.batch, loss, checkpoint_every)
        if forward_only:
            schedule, programs = schedule.forward_only(), [program.forward_only() for program in programs]
        schedule, self.programs = schedule.compute_only(), programs
        self.plan = Plan(schedule, program_of, [program.keeping for program in programs])
        self.share = 1 / schedule.num_microbatches
        self.message_sizes = largest(layout for p in programs for layout in (p.leaves, p.returns))
        self.table = self.plan.table | self._places()
        self.seconds = np.zeros((schedule.num_ticks, schedule.num_ranks))
        if costs is not None:
            self.seconds[schedule.ticks, schedule.rank] = costs.durations(schedule)
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

        ends = next(program.ends for program in self.programs if program.is_last)
        axes = {name for kind in ends.sizes for name in kind.axes}
        return State(
            message={kind: zeros(kind, size) for kind, size in self.message_sizes.items()},
            inbox={kind: zeros(kind, self.plan.inbox, size) for kind, size in self.message_sizes.items()},
            stash={buffer: zeros(buffer.kind, slots, *buffer.shape) for buffer, slots in self.plan.stash.items()},
            grads={kind: jnp.zeros_like(x) for kind, x in self.params.items()},
            loss=vary(jnp.zeros((), jnp.result_type(float)), tuple(sorted(axes))),
            count=vary(jnp.int32(0), self.batch.axes),
        )

    def _tick(self, state: State, now: tuple[Array, Array, Array]) -> tuple[State, None]:
        values, seconds, rounds = now
        row: Row = dict(zip(self.table, values))
        numbers = row["stage"], row["microbatch"], self.group[row["home"]], seconds
        for number, (kind, program) in enumerate(self.plan.passes, 1):
            one = self.programs[program]
            act = action(kind, partial(self._act, kind, one, row), one.keeping.change(kind))
            state = _when(row["action"] == number, lambda state, act=act: act(state, *numbers), state)
        ways = [partial(_exchange, pairs, self.axis) for pairs in self.plan.rounds]
        arrived = [lax.switch(number, ways, state.message) for number in rounds]
        for number, message in enumerate(arrived):
            slot = row["arrives", number]
            store = action(STORE, partial(_stored, message, slot))
            state = state._replace(inbox=_when(slot >= 0, store, state.inbox))
        return state, None

    def _act(self, kind: str, program: Program, row: Row, state: State, *_: Array) -> State:
        return Act(self, program, row, state).do(kind)

    def _places(self) -> dict[Any, np.ndarray]:
        """More columns: the first layer of the action's stage, and where its parameters begin among the rank's."""
        stage, about = self.plan.table["stage"], self.blueprints
        made = about.partition
        first = np.arange(len(about.stages)) if made is None else np.array(made.bounds[:-1])
        columns: dict[Any, np.ndarray] = {"place": first[stage].astype(np.int32)}
        for kind in self.params:
            begin = np.zeros((len(about.placement), len(about.stages)), np.int32)
            for rank in range(len(about.placement)):
                for held in about.held(rank):
                    begin[rank, held] = about.begin(rank, held)[kind]
            if begin.any():  # otherwise it is a constant
                columns["begin", kind] = np.take_along_axis(begin, stage.T, axis=1).T
        return columns


def _own(stages: Stages, axes: tuple[str, ...]) -> Flat:
    """The parameters, declared to differ along `axes`, so that gradients are added up along them once, at the end."""
    for kind, x in stages.flat.items():
        if more := varying_axes(x) - {*kind.axes, *axes}:
            raise ShapeError(
                f"the stages' {kind.dtype} parameters differ along {', '.join(map(repr, sorted(more)))}, where they "
                f"were made to differ along {', '.join(map(repr, kind.axes))} only; give in_specs that say so"
            )
    return {kind: vary(x, axes) for kind, x in stages.flat.items()}


def _when(condition: Array, update: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`update(carry)` if the condition holds, otherwise `carry`: written in place."""

    def once(state: tuple[Array, Carry]) -> tuple[Array, Carry]:
        return state[0] & False, update(state[1])

    return lax.while_loop(lambda state: state[0], once, (condition, carry))[1]


def _exchange(pairs: Pairs, axis: Axis, message: Flat) -> Flat:
    """What each rank receives from these sends. All ranks take part in the same exchange, so none waits in another."""
    if not pairs:
        return message
    with jax.named_scope("tplab.send"):
        return {kind: ppermute(x, axis, pairs) for kind, x in message.items()}


def _stored(message: Flat, slot: Array, inbox: Flat) -> Flat:
    return {kind: lax.dynamic_update_index_in_dim(x, message[kind], slot, 0) for kind, x in inbox.items()}


# --- one action -------------------------------------------------------------------------------------------------------


Row = dict[Any, Array]
"""A rank's row of the plan at one tick: column -> number."""


class State(NamedTuple):
    """The state that a rank carries from tick to tick.

    message   the packed result of its last action for another stage
    inbox     received inputs of later actions, one slot each
    stash     what passes keep for later passes: each buffer has one slot per microbatch in flight
    grads     of its parameters, accumulated so far
    loss      of its microbatches, accumulated so far
    count     of its actions
    """

    message: Flat
    inbox: Flat
    stash: dict[Buffer, Array]
    grads: Flat
    loss: Array
    count: Array


class Act:
    """An action in progress. `row` says where its inputs are."""

    def __init__(self, ticks: Ticks, program: Program, row: Row, state: State):
        self._ticks, self._program, self._passes, self._row, self._state = ticks, program, program.passes, row, state
        self._begin = {kind: row.get(("begin", kind), 0) for kind in ticks.params}
        own = program.params(ticks.params, self._begin)
        given = ticks.batch.given(own, program.is_first, program.is_last, row["microbatch"], row["place"])
        self._known = dict(zip(program.passes.traced.fixed, given.flat()[0]))

    def do(self, kind: str) -> State:
        """Execute F, B, I or W. Returns the state after it."""
        if kind != "F":
            self._recall(self._passes.saved, self._program.saved)
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
            self._state = self._state._replace(message=program.leaves.pack(outputs, self._ticks.message_sizes))

    def _backward(self) -> None:
        self._take_ends()
        self._add(self._passes.trained, self._send_back(self._passes.backward(self._known)))

    def _input_grad(self) -> None:
        self._take_ends()
        rest = self._send_back(self._passes.input_grad(self._known))
        early = self._passes.early
        self._add(early, rest[: len(early)])
        self._keep(self._program.left, rest[len(early) :])

    def _weight_grad(self) -> None:
        self._recall(self._passes.left, self._program.left)
        self._add(self._passes.late, self._passes.weight_grad(self._known))

    # --- where things are ----------------------------------------------------------------------------------------

    def _taken(self) -> Flat:
        """The received input of this action."""
        return {kind: at(x, self._row["takes"]) for kind, x in self._state.inbox.items()}

    def _take_ends(self) -> None:
        """Get the gradients of the outputs. The gradient of the loss is the microbatch's share."""
        program = self._program
        if program.is_last:
            (kind,) = program.ends.sizes
            ends = [vary(jnp.full((), self._ticks.share, kind.dtype), kind.axes)]
        else:
            ends = program.ends.unpack(self._taken())
        self._known |= zip(self._passes.traced.ends, ends)

    def _recall(self, variables: Sequence[Var], buffers: Sequence[Buffer]) -> None:
        """Get what an earlier pass has kept."""
        kept = zip(variables, buffers, strict=True)
        self._known |= {var: at(self._state.stash[buffer], self._row[buffer]) for var, buffer in kept}

    def _keep(self, buffers: Sequence[Buffer], values: Sequence[Array]) -> None:
        stash = dict(self._state.stash)
        for buffer, value in zip(buffers, values, strict=True):
            stash[buffer] = lax.dynamic_update_index_in_dim(stash[buffer], value, self._row[buffer], 0)
        self._state = self._state._replace(stash=stash)

    def _send_back(self, results: list[Array]) -> list[Array]:
        """Make the gradients of the inputs, which come first, the message. Returns the other results."""
        program, after = self._program, len(self._program.returns.slots)
        if not program.is_first:
            message = program.returns.pack(results[:after], self._ticks.message_sizes)
            self._state = self._state._replace(message=message)
        return results[after:]

    def _add(self, numbers: Sequence[int], grads: Sequence[Array]) -> None:
        """Add to the gradients of the parameters with these numbers."""
        total = dict(self._state.grads)
        for number, grad in zip(numbers, grads, strict=True):
            slot = self._program.blueprint.layout.slots[number]
            total[slot.kind] = add_at(total[slot.kind], self._begin[slot.kind] + slot.begin, grad.reshape(-1))
        self._state = self._state._replace(grads=total)


def at(x: Array, slot: Array) -> Array:
    """The contents of a slot."""
    return lax.dynamic_index_in_dim(x, slot, keepdims=False)
