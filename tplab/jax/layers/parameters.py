"""Initial parameters: of the whole model or, inside a rank's program, the rank's piece of the same numbers.

A model initialised with one key is the same on every mesh, to the last bit. Outside `run`, where XLA compiles each
operation by itself, it is the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tplab.jax.comm.collectives import axis_index, axis_size
from tplab.sharding import P, cut

Params = dict[str, Any]
"""Names -> arrays or Params, named as in torch's state_dict, with weights [out, in]."""


class Composite:
    """A layer made of other layers: its parameters are theirs, by name."""

    def parts(self) -> Mapping[str, Any]:
        """The layers by name."""
        raise NotImplementedError

    def check_ranks(self) -> None:
        """Inside a rank's program, raise ShapeError if the ranks cannot share the layer."""

    @property
    def specs(self) -> Params:
        """How the parameters are sharded."""
        return {name: part.specs for name, part in self.parts().items()}

    def init(self, key: Any) -> Params:
        """The parameters of all parts. Whole; inside a rank's program, its piece."""
        if jax.sharding.get_abstract_mesh().manual_axes:
            self.check_ranks()
        parts = self.parts()
        keys = jax.random.split(key, len(parts))
        return {name: part.init(k) for k, (name, part) in zip(keys, parts.items(), strict=True)}


def uniform(key: Any, shape: tuple[int, ...], spec: P, bound: float) -> Array:
    """Numbers spread evenly over [-bound, bound]."""
    return here(jax.random.uniform(key, shape, minval=-bound, maxval=bound), spec)


def normal(key: Any, shape: tuple[int, ...], spec: P, deviation: float) -> Array:
    """Normal numbers."""
    return here(jax.random.normal(key, shape) * deviation, spec)


def here(whole: Array, spec: P) -> Array:
    """The whole array outside `run`; inside, this rank's piece, with a dim that does not divide padded with zeros."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return whole
    for dim, entry in enumerate(spec):
        if entry is not None:
            whole = _piece(whole, entry, dim)
    return whole


def _piece(whole: Array, axis: str | tuple[str, ...], dim: int) -> Array:
    size = len(cut(whole.shape[dim], axis_size(axis), "ceil")[0])
    missing = size * axis_size(axis) - whole.shape[dim]
    padded = jnp.pad(whole, [(0, missing if place == dim else 0) for place in range(whole.ndim)])
    return lax.dynamic_slice_in_dim(padded, axis_index(axis) * size, size, dim)


def nested(state: dict[str, Any]) -> Params:
    """{"norm.weight": w} -> {"norm": {"weight": w}}"""
    tree: Params = {}
    for name, value in state.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree
