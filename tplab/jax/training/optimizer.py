"""AdamW over the stages of a GPT, divided over the data-parallel ranks by ZeRO; and clipping."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from tplab.jax.data.clipping import gradient_norm, scale_to
from tplab.jax.data.pieces import held_of, pieces_of
from tplab.jax.data.sharded_optimizer import GradientPieces, shard_optimizer
from tplab.jax.pipeline.copies import once
from tplab.jax.pipeline.flat import Flat, Kind
from tplab.jax.pipeline.stages import Stages
from tplab.jax.ranks.context import vary
from tplab.jax.training.gpt_stages import GPTPacking
from tplab.models.gpt import ROUTER_BIAS, GPTExperts
from tplab.sharding import P
from tplab.training.recipe import Recipe, data_axes


class _Steps(NamedTuple):
    """The update that a step subtracts: AdamW's times the rate; for routers' biases, their own rate times the sign of
    the gradient, which times `whole` is a whole number. `biases` is 1 for these biases, and 0 elsewhere."""

    adamw: Any
    rate: Array
    experts: GPTExperts | None
    biases: Flat
    whole: int

    def update(self, grads: Stages, state: Any, params: Stages) -> tuple[Stages, Any]:
        updates, state = self.adamw.update(grads, state, params)
        steps = {kind: self.rate * update for kind, update in updates.flat.items()}
        for kind, is_bias in self.biases.items():
            signs = jnp.sign(jnp.round(grads.flat[kind] * self.whole))
            signs = self.experts.bias_rate * signs if self.experts else 0
            steps[kind] = jnp.where(is_bias > 0, signs, steps[kind])
        return Stages(steps, updates.blueprints), state


class Optimizer:
    """A recipe's AdamW; the learning rate is passed to each step.

    Its states enter and leave a rank's program by `specs`. With ZeRO 1 and 2 each of the R ranks that hold copies of a
    flat array of `Stages` has a part of the states: ceil(n / R) of n numbers. Experts have copies along the data axes
    that do not cut them. With ZeRO 3 `Stages` themselves are divided.
    """

    def __init__(self, packing: GPTPacking, recipe: Recipe):
        self._packing, self._clip, self._data_axes = packing, recipe.clip, data_axes(packing.mesh)
        self._whole = recipe.whole_loads(packing.mesh)
        self._blueprints, self._sizes = packing.blueprints, packing.blueprints.sizes
        b1, b2 = recipe.betas
        self._adamw: Any = optax.chain(optax.scale_by_adam(b1, b2), optax.add_decayed_weights(recipe.weight_decay))
        lie = Stages({kind: P(kind.axes) for kind in self._sizes}, self._blueprints)  # type: ignore[misc]
        self._sharded = shard_optimizer(self._adamw, self._data_axes, specs=lie) if recipe.zero in (1, 2) else None

    def reduced(self, grads: Stages) -> Stages:
        """Inside a rank's program: the gradients in the form for `update`; with ZeRO 1 and 2, this rank's part of their
        mean."""
        return grads if self._sharded is None else self._sharded.reduce_gradients(grads).tree

    def no_gradients(self) -> Stages:
        """The result of `reduced` for zero gradients."""
        zeros = {k: jnp.zeros(-(-size // self._num_parts(k)), k.dtype) for k, size in self._sizes.items()}
        return Stages({kind: vary(x, self._axes(kind)) for kind, x in zeros.items()}, self._blueprints)

    def update(self, stages: Stages, state: Any, grads: Stages, rate: Array) -> tuple[Stages, Any, Array]:
        """Inside a rank's program: (the stages after the step, the new state, the norm of the gradients)."""
        experts = self._packing.config.experts
        biases = self._packing.where(ROUTER_BIAS) if experts is not None and experts.bias_rate else {}
        norm = self._norm(grads, biases)
        clipped, own_biases = grads, self._pieces(biases)
        if self._clip is not None:
            scaled = scale_to(grads, norm, self._clip).flat
            unscaled = {
                kind: jnp.where(is_bias > 0, grads.flat[kind], scaled[kind]) for kind, is_bias in own_biases.items()
            }
            clipped = Stages(scaled | unscaled, self._blueprints)
        inner = _Steps(self._adamw, rate, experts, own_biases, self._whole)
        if self._sharded is None:
            steps, state = inner.update(clipped, state, stages)
        else:
            steps, state = replace(self._sharded, inner=inner).update(GradientPieces(clipped), state, stages)
        return jax.tree.map(lambda p, step: (p - step).astype(p.dtype), stages, steps), state, norm

    @property
    def specs(self) -> Any:
        """The specs of the states."""
        moments = Stages({kind: P(self._axes(kind)) for kind in self._sizes}, self._blueprints)  # type: ignore[misc]
        return self._state(P(), moments, moments)

    def state_of(self, step: int, first: Stages, second: Stages) -> Any:
        """The states after some steps, made from AdamW's two moments as `GPTPacking.pack` returns them."""
        return self._state(jnp.int32(step), self._parts(first), self._parts(second))

    def moments_in(self, state: Any) -> tuple[Stages, Stages]:
        """The reverse of `state_of`."""
        adam = (state if self._sharded is None else state["states"])[0]
        return self._joined(adam.mu), self._joined(adam.nu)

    def _state(self, count: Any, first: Any, second: Any) -> Any:
        states = optax.ScaleByAdamState(count, first, second), optax.EmptyState()
        return states if self._sharded is None else {"states": states}

    def _norm(self, grads: Stages, biases: Flat) -> Array:
        """The norm that counts each parameter of the model once, and routers' biases not at all: the gradients are
        multiplied by ones and zeros."""
        ones = {kind: kind.zeros(size) + 1 for kind, size in self._sizes.items()}
        counts = self._pieces(once({kind: one - biases.get(kind, 0) for kind, one in ones.items()}, self._blueprints))
        counted = {kind: x * counts[kind] for kind, x in grads.flat.items()}
        return gradient_norm(list(counted.values()), [P(self._axes(kind)) for kind in counted])

    def _pieces(self, flat: Flat) -> Flat:
        """This rank's part of each array; all of it if ranks do not share the states."""
        shared = {kind: axes for kind in flat if (axes := self._shared_by(kind))}
        return flat | {k: held_of(pieces_of([flat[k]], axes), [flat[k]], axes)[0] for k, axes in shared.items()}

    def _parts(self, stages: Stages) -> Stages:
        """Rows of whole flat arrays -> rows of their parts, those of the first rank that shares them first."""
        flat = {}
        for kind, size in self._sizes.items():
            rows, num_parts = np.asarray(stages.flat[kind]).reshape(-1, size), self._num_parts(kind)
            padded = np.pad(rows, ((0, 0), (0, -size % num_parts)))
            parts = padded.reshape(len(rows), num_parts, -1).swapaxes(0, 1)
            flat[kind] = jnp.asarray(parts.reshape(-1))
        return Stages(flat, self._blueprints)

    def _joined(self, stages: Stages) -> Stages:
        """The reverse of `_parts`."""
        flat = {}
        for kind, size in self._sizes.items():
            num_parts = self._num_parts(kind)
            width = -(-size // num_parts)
            parts = np.asarray(stages.flat[kind]).reshape(num_parts, -1, width).swapaxes(0, 1)
            flat[kind] = np.ascontiguousarray(parts.reshape(-1, num_parts * width)[:, :size]).reshape(-1)
        return Stages(flat, self._blueprints)

    def _shared_by(self, kind: Kind) -> tuple[str, ...]:
        """The axes whose ranks share the states of their copies."""
        return () if self._sharded is None else tuple(name for name in self._data_axes if name not in kind.axes)

    def _num_parts(self, kind: Kind) -> int:
        return self._packing.mesh.axis_size(axes) if (axes := self._shared_by(kind)) else 1

    def _axes(self, kind: Kind) -> tuple[str, ...]:
        return (*self._shared_by(kind), *kind.axes)
