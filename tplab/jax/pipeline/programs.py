"""Programs: the traced computation of a model's stages. Equal stages share a program and its compiled branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tplab.errors import ShapeError
from tplab.jax.pipeline.equations import Var
from tplab.jax.pipeline.flat import Flat, Packing, kind_of
from tplab.jax.pipeline.passes import Given, Loss, Passes, Stage, is_float, traced
from tplab.jax.pipeline.plan import Buffer, Keeping
from tplab.jax.pipeline.stages import Blueprint, Blueprints
from tplab.jax.ranks.context import vary
from tplab.pipeline.checks import no_way_back


class Batch:
    """The microbatches of a batch, stacked, and its random key. Every pass on every rank has them.

    axes    the axes along which ranks have activations of their own: those of the pipeline and of data parallelism
    first   the number of the first microbatch, for the key
    """

    def __init__(self, microbatches: Sequence[tuple[Any, Any]], key: Any, axes: tuple[str, ...], first: Any = 0):
        self.axes, self._key, self._first = axes, key, first
        self._inputs = self._stacked([x if isinstance(x, tuple) else (x,) for x, _ in microbatches])
        self._targets = self._stacked([target for _, target in microbatches])

    def given(self, params: Any, is_first: bool, is_last: bool, microbatch: Array, place: Array) -> Given:
        """The `Given` of a pass over one microbatch."""

        def one(tree: Any) -> Any:
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, microbatch, keepdims=False), tree)

        inputs, target = one(self._inputs) if is_first else None, one(self._targets) if is_last else None
        # with the same types as when the stage was traced, otherwise dropout's random numbers would not fit
        if not isinstance(self._first, int) or self._first:
            microbatch = microbatch + jnp.asarray(self._first, jnp.int32)
        microbatch, place = vary(microbatch, self.axes), vary(place, self.axes)
        return Given(params, inputs, target, microbatch, place, self._key)

    def _stacked(self, trees: list[Any]) -> Any:
        first = _shapes(trees[0])
        for number, tree in enumerate(trees):
            if _shapes(tree) != first:
                raise ShapeError(
                    f"microbatch {number} is {_in_words(tree)}, and microbatch 0 {_in_words(trees[0])}; one compiled "
                    "loop runs all of them, so they must have one shape: pad them, or leave the odd one out"
                )
        return jax.tree.map(lambda *xs: vary(jnp.stack(xs), self.axes), *trees)


@dataclass(frozen=True)
class Program:
    """The computation of a stage.

    enters, leaves   how F's inputs and outputs are packed when they are sent between stages
    ends, returns    the same for gradients: those of the outputs, with which B and I begin, and those of the inputs
    saved, left      the stash's buffers for what F keeps, and for what I keeps for W: see `Passes`
    """

    blueprint: Blueprint
    stage: Stage
    passes: Passes
    enters: Packing
    leaves: Packing
    ends: Packing
    returns: Packing
    saved: tuple[Buffer, ...]
    left: tuple[Buffer, ...]

    @property
    def is_first(self) -> bool:
        return not self.enters.slots

    @property
    def is_last(self) -> bool:
        return not self.leaves.slots

    @property
    def keeping(self) -> Keeping:
        """What the stash holds, and how long."""
        passes = self.passes
        outlasting = {buffer for var, buffer in zip(passes.saved, self.saved) if var in passes.outlasting}
        return Keeping(self.saved, frozenset(outlasting), self.left)

    def forward_only(self) -> Program:
        """The same for a run of F alone, which keeps nothing."""
        return replace(self, passes=self.passes.forward_only(), saved=(), left=())

    def params(self, flat: Flat, begin: Any = None) -> Any:
        """The stage's parameters, unpacked."""
        return self.blueprint.structure.unflatten(self.blueprint.layout.unpack(flat, begin))


def programs_of(
    blueprints: Blueprints, params: Flat, batch: Batch, loss: Loss, checkpoint_every: int | None
) -> tuple[list[Program], list[int]]:
    """(the programs of a model's stages, the index of each stage's program)."""
    programs: list[Program] = []
    program_of: list[int] = []
    enters, last = Packing(()), len(blueprints.stages) - 1
    for number, blueprint in enumerate(blueprints.stages):
        stage = Stage(blueprint.layers, number, checkpoint_every)
        roles = number == 0, number == last
        equal = [
            place
            for place, known in enumerate(programs)
            if (known.is_first, known.is_last, known.enters) == (*roles, enters) and _same(known, stage, blueprint)
        ]
        place = equal[0] if equal else len(programs)
        if not equal:
            programs.append(_traced(stage, blueprint, params, batch, enters, loss if number == last else None))
        program_of.append(place)
        enters = programs[place].leaves
    return programs, program_of


def _traced(
    stage: Stage, blueprint: Blueprint, params: Flat, batch: Batch, enters: Packing, loss: Loss | None
) -> Program:
    """The program of a stage that differs from all earlier ones."""
    is_first, is_last = stage.number == 0, loss is not None
    if not is_first and not any(is_float(jnp.empty(0, slot.kind.dtype)) for slot in enters.slots):
        raise no_way_back(stage.number)
    zero = vary(jnp.int32(0), batch.axes)
    own = blueprint.structure.unflatten(blueprint.layout.unpack(params))
    given = batch.given(own, is_first, is_last, zero, zero)
    arriving = tuple(slot.kind.zeros(*slot.shape) for slot in enters.slots)
    made = traced(stage, given, arriving, loss, batch.axes)
    passes, count = Passes(made), {}

    def buffer(var: Var) -> Buffer:
        key = tuple(var.aval.shape), kind_of(var.aval)
        count[key] = count.get(key, -1) + 1
        return Buffer(*key, count[key])

    saved, left = tuple(map(buffer, passes.saved)), tuple(map(buffer, passes.left))
    leaves = Packing(()) if is_last else _layout(made.outputs)
    return Program(blueprint, stage, passes, enters, leaves, _layout(made.ends), _layout(made.input_grads), saved, left)


def _layout(variables: Sequence[Any]) -> Packing:
    return Packing.of((tuple(var.aval.shape), kind_of(var.aval)) for var in variables)


def _same(known: Program, stage: Stage, blueprint: Blueprint) -> bool:
    other = known.blueprint
    alike = (other.layout, other.structure) == (blueprint.layout, blueprint.structure)
    return alike and known.stage.same_as(stage)


def _shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def _in_words(tree: Any) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in _shapes(tree)[1])
