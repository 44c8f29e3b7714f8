"""A unit of ZeRO stage 3: a function of parameters that are whole only while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tplab.data.pieces import UnitOptions
from tplab.jax.data.call import Call, is_array, is_float
from tplab.jax.data.pieces import held_of, pieces_of, reduced_row
from tplab.jax.ranks.context import this_mesh, vary
from tplab.jax.tracing.jaxprs import UNIT
from tplab.mesh import Axis

PIECE = "piece"
"""The name of the leaf of a sharded parameter: "weight.piece" in a path."""


@jax.tree_util.register_pytree_with_keys_class
class Sharded:
    """A parameter of which each rank has a piece. It is a pytree whose leaf is the piece [width], padded with zeros.

    So `jax.tree.map` and optax work on pieces, and P("dp") puts them on the mesh: outside a rank's program all pieces
    are one array [R * width].
    """

    def __init__(self, piece: Any, shape: tuple[int, ...]):
        self.piece, self.whole_shape = piece, shape

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], tuple[int, ...]]:
        return ((jax.tree_util.GetAttrKey(PIECE), self.piece),), self.whole_shape

    def tree_flatten(self) -> tuple[tuple[Any], tuple[int, ...]]:
        return (self.piece,), self.whole_shape

    @classmethod
    def tree_unflatten(cls, shape: tuple[int, ...], children: tuple[Any]) -> Sharded:
        return cls(children[0], shape)

    def __repr__(self) -> str:
        return f"Sharded({self.piece!r}, of {list(self.whole_shape)})"


def is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


@dataclass(frozen=True)
class About(UnitOptions):
    """Those of a unit in JAX; `unit` is its number, if it is in a list of layers."""

    unit: int | None = None

    def gathers(self, row: Array, axis: Axis) -> Array:
        with self._named():
            return self.gather(row, axis).wait()

    def reduces(self, message: Array) -> Array:
        with self._named():
            return reduced_row(self.reduce(message, self.axis, self.op), self.replicate_axis, self.op)

    def _named(self) -> AbstractContextManager[Any]:
        """A context whose messages belong to this unit, which the trace shows beside the line."""
        return nullcontext() if self.unit is None else jax.named_scope(f"{UNIT}{self.unit}")

    def names(self) -> tuple[str, ...]:
        return self.names_on(this_mesh())

    def shard(self, whole: Array) -> Sharded:
        """This rank's piece of a parameter."""
        return Sharded(held_of(pieces_of([whole], self.axis), [whole], self.axis)[0], tuple(whole.shape))

    def run(self, fn: Callable[..., Any], params: Any, *args: Any, after: Any, **kwargs: Any) -> Any:
        """fn(whole params, *args, **kwargs), for Sharded `params`, which are gathered once `after` is ready."""
        pieces, structure = jax.tree.flatten(params, is_leaf=is_sharded)
        leaves, about_args = jax.tree.flatten((args, kwargs))
        floats = [place for place, x in enumerate(leaves) if is_float(x)]
        fixed = [place for place, x in enumerate(leaves) if is_array(x) and not is_float(x)]

        def of_wholes(wholes: Sequence[Array], float_args: Sequence[Any], fixed_args: Sequence[Any]) -> Any:
            given = list(leaves)
            for places, values in ((floats, float_args), (fixed, fixed_args)):
                for place, value in zip(places, values, strict=True):
                    given[place] = value
            args, kwargs = about_args.unflatten(given)
            return fn(structure.unflatten(wholes), *args, **kwargs)

        call = Call(self, of_wholes, tuple(piece.whole_shape for piece in pieces), len(floats), len(fixed))
        names = self.names()
        float_args = [vary(jnp.asarray(leaves[place]), names) for place in floats]
        known = [jax.lax.stop_gradient(x) for x in jax.tree.leaves(after) if is_array(x)]
        held = [piece.piece for piece in pieces]
        return call(*held, *float_args, *(jnp.asarray(leaves[place]) for place in fixed), *known)

    def gathered(self, params: Any) -> Any:
        """The whole parameters, in their own dtype."""
        pieces, structure = jax.tree.flatten(params, is_leaf=is_sharded)
        call = Call(self, None, tuple(piece.whole_shape for piece in pieces))
        return structure.unflatten(call.wholes([p.piece for p in pieces], None, [])[0])
