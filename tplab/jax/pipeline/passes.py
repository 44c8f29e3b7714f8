"""A stage, and its passes over one microbatch, F, B, I and W, as parts of one traced gradient.

The stage and its gradient are traced once, together:

    x, weights -> y;  y, dy -> dx, dweights

and the equations are sorted by what they depend on and by what needs them:

    F   everything that does not depend on dy: y, and what JAX's `vjp` saves for its backward pass
    B   the rest
    I   the part of B that dx needs
    W   the part of B that dweights need and dx does not: for a linear layer dW = dy^T x. It reuses the gradients that I
        computed at the outputs of such products, so that nothing is computed twice: I and W together have B's FLOPs

Values computed from weights alone are not kept, since each pass can recompute them; nor are random keys, nor values
that elementwise operations compute from the rest, since that costs less than reading them from memory. The same values
in another layout (reshape, transpose) are kept once. If there is no dx, as in the first stage, I is what the gradients
of several weights have in common.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tplab.jax.pipeline.equations import Equations, Var, is_literal
from tplab.jax.ranks.context import vary
from tplab.pipeline.checks import check_group, check_loss, outputs_of

Arrays = tuple[Array, ...]


@dataclass(frozen=True)
class Layer:
    """A callable in a stage: a layer with `init`, which takes its parameters first, or a function without parameters.

    called    the layer or function
    forward   a function to call instead, with the layer and its parameters before the inputs
    bare      whether it is a function that takes parameters first, though it has no `init`
    """

    called: Any
    forward: Callable[..., Any] | None = None
    bare: bool = False

    @property
    def has_params(self) -> bool:
        return self.bare or hasattr(self.called, "init")

    def __call__(self, params: Any, inputs: Arrays, key: Any) -> Any:
        """The layer's output. `key` is passed only to a layer that has a parameter of this name."""
        given: tuple[Any, ...] = (params, *inputs) if self.has_params else inputs
        function = self.called
        if self.forward is not None:
            function, given = self.forward, (self.called, *given)
        if key is not None and "key" in inspect.signature(function).parameters:
            return function(*given, key=key)
        return function(*given)

    def same_as(self, other: Layer) -> bool:
        """Whether it is known to compute the same. A layer that cannot be compared counts as different."""
        try:
            return bool(self == other)
        except Exception:  # arrays in a layer, for one, are compared element by element
            return False


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of a model, run on one microbatch at a time.

    number             for messages
    checkpoint_every   only the inputs of each group of this many layers are kept; the rest is recomputed
    """

    layers: tuple[Layer, ...]
    number: int
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None:
            check_group(self.checkpoint_every)

    def __call__(
        self, params: Sequence[Any], inputs: Arrays, keys: Callable[[int], Any], finish: Callable[..., Arrays] | None
    ) -> Arrays:
        """The stage's outputs for `inputs`. `finish`, for the last stage: outputs -> loss, which it returns instead."""
        size = self.checkpoint_every or max(1, len(self.layers))
        starts = range(0, len(self.layers), size) or [0]
        for begin in starts:
            is_end = begin == starts[-1]

            def piece(params: Sequence[Any], inputs: Arrays, begin: int = begin, is_end: bool = is_end) -> Arrays:
                for place, layer in enumerate(self.layers[begin : begin + size], begin):
                    inputs = outputs_of(self.number, layer(params[place], inputs, keys(place)), Array)
                return finish(*inputs) if is_end and finish is not None else inputs

            inputs = (piece if self.checkpoint_every is None else jax.checkpoint(piece))(params, inputs)
        return inputs

    def same_as(self, other: Stage) -> bool:
        """Whether it computes the same from the same inputs."""
        return len(self.layers) == len(other.layers) and all(map(Layer.same_as, self.layers, other.layers))


Loss = Callable[[Any, Any], Array]


@dataclass(frozen=True)
class Given:
    """Inputs that a pass can use at any time, because they exist for the whole batch.

    params       the stage's parameters
    inputs       of one microbatch, in the first stage        target   its target, in the last
    microbatch   its number        place   the number of the stage's first layer in the model
    key          the batch's random key, or None
    """

    params: Any
    inputs: Arrays | None
    target: Any
    microbatch: Array
    place: Array
    key: Any

    def flat(self) -> tuple[list[Any], Any]:
        return jax.tree.flatten((self.params, self.inputs, self.target, self.microbatch, self.place, self.key))


@dataclass(frozen=True)
class Traced:
    """A stage and its gradient as equations, and the roles of their variables.

    params, fixed   the parameters; and everything in `Given`
    arriving        the inputs from the previous stage; none for the first stage
    outputs         what F returns: the stage's outputs, or the loss
    ends            the gradients of the floating-point outputs, with which the backward pass begins
    input_grads     those of the floating-point inputs among `arriving`
    param_grads     one per parameter
    residuals       what the backward pass uses from the forward pass
    """

    equations: Equations
    params: tuple[Var, ...]
    fixed: tuple[Var, ...]
    arriving: tuple[Var, ...]
    outputs: tuple[Any, ...]
    ends: tuple[Any, ...]
    input_grads: tuple[Any, ...]
    param_grads: tuple[Any, ...]
    residuals: tuple[Any, ...]


def traced(stage: Stage, given: Given, arriving: Arrays, loss: Loss | None, axes: tuple[str, ...]) -> Traced:
    """Trace a stage and its gradient. `arriving` are examples; `loss` is for the last stage.

    axes   the axes along which every rank has activations of its own: those of the pipeline and of data parallelism
    """
    leaves, structure = given.flat()
    is_first = given.inputs is not None
    parts: list[int] = []  # how many outputs, ends, ...

    def function(*args: Any) -> list[Any]:
        params, inputs, target, microbatch, place, key = structure.unflatten(args[: len(leaves)])
        inputs = tuple(inputs) if is_first else args[len(leaves) :]
        places = [] if is_first else [place for place, x in enumerate(inputs) if is_float(x)]

        def keys(layer: int) -> Any:
            return None if key is None else jax.random.fold_in(jax.random.fold_in(key, microbatch), place + layer)

        def finish(*outputs: Array) -> Arrays:
            assert loss is not None
            value = loss(outputs[0] if len(outputs) == 1 else outputs, target)
            check_loss(value, Array, is_float)
            return (value,)

        def forward(params: Any, floats: list[Array]) -> tuple[list[Array], Arrays]:
            entered = list(inputs)
            for where, x in zip(places, floats, strict=True):
                entered[where] = x
            outputs = stage(params, tuple(entered), keys, None if loss is None else finish)
            outputs = tuple(vary(y, axes) for y in outputs)
            return [y for y in outputs if is_float(y)], outputs

        floats, pull, outputs = jax.vjp(forward, params, [inputs[where] for where in places], has_aux=True)
        ends = [y * 0 for y in floats]  # placeholders for the gradients: separate variables, of the right types
        param_grads, input_grads = pull(ends)
        groups = [outputs, ends, input_grads, jax.tree.leaves(param_grads), jax.tree.leaves(pull)]
        parts[:] = [len(group) for group in groups]
        return [x for group in groups for x in group]

    equations = Equations(function, [*leaves, *arriving])
    given_params = len(jax.tree.leaves(given.params))
    found, results = [], list(equations.outputs)
    for size in parts:
        found.append(tuple(results[:size]))
        del results[:size]
    fixed, after = equations.inputs[: len(leaves)], equations.inputs[len(leaves) :]
    return Traced(equations, fixed[:given_params], fixed, after, *found)


class Passes:
    """F, B, I and W of a stage, with what each keeps for the others.

    F returns the outputs, then `saved`. B returns input_grads, then the gradients of the parameters numbered `trained`.
    I returns input_grads, those of `early`, then `left`; W returns those of `late`.

    saved   what F keeps        left   what I keeps for W, which also needs `outlasting` of `saved`
    """

    def __init__(self, traced: Traced):
        self.traced = traced
        equations, fixed = traced.equations, set(traced.fixed)
        data = equations.depends_on([*traced.arriving, *traced.fixed[len(traced.params) :]])
        saved = {v for v in traced.residuals if not is_literal(v) and v in data and not _is_key(v)}
        saved = {equations.origin(var, data) for var in saved} - fixed
        ends = {end for end in traced.ends if not is_literal(end)}
        gradients = traced.param_grads
        self.saved = equations.without_cheap(saved, fixed, data)
        saved = set(self.saved)
        self.trained = [n for n, var in enumerate(gradients) if not is_literal(var) and var in data]
        self.forward = equations.part([*traced.outputs, *self.saved])
        self.backward = equations.part([*traced.input_grads, *(gradients[n] for n in self.trained)], saved | ends)

        waits = equations.depends_on(ends)
        chain = self._chain(saved | ends)
        on_chain = equations.made_by(chain) & waits
        self.early = [n for n in self.trained if gradients[n] in on_chain]
        self.late = [n for n in self.trained if gradients[n] not in on_chain]
        late = [gradients[n] for n in self.late]
        # W starts from values on the chain, and from those that existed before it. Recomputation belongs to I.
        there = {v for v in (saved | ends | on_chain | (data - waits)) - fixed if not _is_key(v)}
        taken = {equations.origin(var, there) for var in equations.part(late, there).takes if var in there}
        self.weight_grad = equations.part(late, taken)
        self.outlasting = saved & taken
        self.left = equations.in_order(taken - saved)
        self.input_grad = equations.part(
            [*traced.input_grads, *(gradients[n] for n in self.early), *self.left], saved | ends
        )

    def forward_only(self) -> Passes:
        """The same for a run of F alone, which keeps nothing."""
        alone = copy(self)
        alone.saved, alone.left, alone.outlasting = [], [], set()
        alone.forward = self.traced.equations.part([*self.traced.outputs])
        return alone

    def _chain(self, known: set[Var]) -> set[int]:
        """The places of the equations through which the gradient flows to the inputs."""
        traced, equations = self.traced, self.traced.equations
        if traced.input_grads:
            return equations.needed_for(traced.input_grads, known)
        each = [equations.needed_for([traced.param_grads[n]], known) for n in self.trained]
        return {place for place, count in Counter(place for places in each for place in places).items() if count > 1}


def is_float(x: Any) -> bool:
    """Whether a gradient can flow through such an array. Token ids and masks have none."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _is_key(var: Var) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key))
