"""A unit of ZeRO stage 3: a function of parameters that are whole only while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tplab.data.pieces import Pieces, UnitOptions
from tplab.jax.comm.collectives import axis_index, axis_size
from tplab.jax.comm.derivatives import with_backward
from tplab.jax.comm.two_passes import TwoPasses
from tplab.jax.data.pieces import held_in, held_of, message_of, pieces_of, reduced_row, row_of, wholes_in
from tplab.jax.ranks.context import this_mesh, vary, varying_axes
from tplab.jax.tracing.jaxprs import LAYOUTS, UNIT
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
        floats = [place for place, x in enumerate(leaves) if _is_float(x)]
        fixed = [place for place, x in enumerate(leaves) if _is_array(x) and not _is_float(x)]

        def of_wholes(wholes: Sequence[Array], float_args: Sequence[Any], fixed_args: Sequence[Any]) -> Any:
            given = list(leaves)
            for places, values in ((floats, float_args), (fixed, fixed_args)):
                for place, value in zip(places, values, strict=True):
                    given[place] = value
            args, kwargs = about_args.unflatten(given)
            return fn(structure.unflatten(wholes), *args, **kwargs)

        call = _Call(self, of_wholes, tuple(piece.whole_shape for piece in pieces))
        names = self.names()
        float_args = [vary(jnp.asarray(leaves[place]), names) for place in floats]
        known = [jax.lax.stop_gradient(x) for x in jax.tree.leaves(after) if _is_array(x)]
        held = [piece.piece for piece in pieces]
        return call(held, float_args, [jnp.asarray(leaves[place]) for place in fixed], known)

    def gathered(self, params: Any) -> Any:
        """The whole parameters, in their own dtype."""
        pieces, structure = jax.tree.flatten(params, is_leaf=is_sharded)
        call = _Call(self, None, tuple(piece.whole_shape for piece in pieces))
        return structure.unflatten(call.wholes([p.piece for p in pieces], None, [])[0])


@dataclass(frozen=True, eq=False)
class _Call:
    """The static data of one call of a unit, which JAX does not trace.

    results   the structure of fn's results, once it has been traced
    """

    about: About
    fn: Any
    shapes: tuple[tuple[int, ...], ...]
    results: list[Any] = field(default_factory=list)
    num_fixed: list[int] = field(default_factory=list)

    def __call__(self, held: list[Array], floats: list[Array], fixed: list[Array], after: list[Array]) -> Any:
        self.num_fixed.append(len(fixed))
        found = _run(self, [*held, *floats], [*fixed, *after])
        return self.results[0].unflatten(found)

    def of(self, wholes: Sequence[Array], floats: Sequence[Array], fixed: Sequence[Array]) -> list[Array]:
        """The results of fn, as a list."""
        found, structure = jax.tree.flatten(self.fn(wholes, floats, fixed))
        self.results[:] = [structure]
        return [jnp.asarray(x) for x in found]

    def parts(self, xs: list[Array], fixed: list[Array]) -> tuple[list[Array], list[Array], list[Array], list[Array]]:
        """(pieces, floating-point arguments, other arguments, the arrays before the unit)."""
        count, rest = len(self.shapes), self.num_fixed[0]
        return xs[:count], xs[count:], fixed[:rest], fixed[rest:]

    def groups(self, held: Sequence[Array]) -> list[list[int]]:
        """The places of parameters that are sent together: they have one dtype, and differ along the same axes."""
        kinds: dict[Any, list[int]] = {}
        for place, piece in enumerate(held):
            kinds.setdefault((piece.dtype, varying_axes(piece)), []).append(place)
        return list(kinds.values())

    def pieces(self, places: Sequence[int]) -> Pieces:
        return Pieces(tuple(self.shapes[place] for place in places), axis_size(self.about.axis))

    def wholes(self, held: Sequence[Array], dtype: Any, after: Any) -> tuple[list[Array], list[Array]]:
        """The whole parameters, gathered once `after` is ready, and the messages in which they arrived."""
        wholes: list[Any] = [None] * len(held)
        messages = []
        for places in self.groups(held):
            row = row_of([held[place] for place in places], _dtype(held[places[0]], dtype))
            messages += with_backward(_gathered, _reduced, [row, *self._known(row, after)], self.about)
            self._unpack(places, messages[-1], wholes)
        return wholes, messages

    def again(self, held: Sequence[Array], secondary: Sequence[Array], after: Any) -> list[Array]:
        """The same for the backward pass, from the pieces or from second ones."""
        if not secondary:
            return self.wholes(held, self.about.compute_dtype, after)[0]
        assert self.about.secondary_axis is not None
        wholes: list[Any] = [None] * len(held)
        for places, piece in zip(self.groups(held), secondary):
            piece = _behind(piece, self._known(piece, after))
            self._unpack(places, self.about.gathers(piece, self.about.secondary_axis), wholes)
        return wholes

    def _known(self, row: Array, after: Any) -> list[Array]:
        """The arrays in `after` that a row's gather must wait for.

        A barrier makes its operands differ along the same axes, by JAX's types. So we use only those parts of `after`
        that differ along no other axes than whole parameters do.
        """
        axes = {*varying_axes(row), *self.about.names()}
        return [lax.stop_gradient(x) for x in jax.tree.leaves(after) if _is_float(x) and varying_axes(x) <= axes]

    def _unpack(self, places: Sequence[int], message: Array, wholes: list[Any]) -> None:
        for place, whole in zip(places, wholes_in(self.pieces(places), message)):
            wholes[place] = vary(whole, self.about.names())

    def reduced(self, grads: Sequence[Array], held: Sequence[Array]) -> list[Array]:
        """This rank's piece of each gradient."""
        about, found = self.about, list(held)
        for places in self.groups(held):
            pieces = self.pieces(places)
            dtype = about.reduce_dtype or grads[places[0]].dtype
            message = message_of(pieces, [grads[place] for place in places], dtype)
            row = about.reduces(message)
            for place, grad in zip(places, held_in(pieces, row)):
                found[place] = vary(grad.astype(held[place].dtype), tuple(varying_axes(held[place])))
        return found


def _behind(row: Array, known: list[Array]) -> Array:
    """The same row, but for the compiler not available before `known`."""
    return lax.optimization_barrier((row, known))[0] if known else row


def _gathered(row_and_known: list[Array], about: About) -> list[Array]:
    """The message of all ranks' rows. Its gradient is reduced like the unit's, including when JAX differentiates the
    unit's own passes for second derivatives."""
    row, *known = row_and_known
    return [vary(about.gathers(_behind(row, known), about.axis), about.names())]


def _reduced(messages: Sequence[Array], axes: Sequence[Sequence[str]], about: About) -> list[Any]:
    dtype = messages[0].dtype
    row = about.reduces(messages[0].astype(about.reduce_dtype or dtype))
    return [vary(row.astype(dtype), tuple(axes[0])), *[None] * (len(axes) - 1)]


# --- both passes ------------------------------------------------------------------------------------------------------


def _function(call: _Call, xs: list[Array], fixed: list[Array]) -> list[Array]:
    held, floats, others, after = call.parts(xs, fixed)
    return call.of(call.wholes(held, call.about.compute_dtype, after)[0], floats, others)


def _plain(call: _Call, xs: list[Array], fixed: list[Array]) -> list[Array]:
    """The same, with whole parameters that are kept for the backward pass."""
    held, floats, others, _ = call.parts(xs, fixed)
    return call.of(call.wholes(held, call.about.compute_dtype, [])[0], floats, others)


def _forward(call: _Call, xs: list[Array], fixed: list[Array]) -> tuple[list[Array], list[Array], Any]:
    about = call.about
    held, floats, others, after = call.parts(xs, fixed)
    wholes, messages = call.wholes(held, about.compute_dtype, after)

    def of_floats(wholes: Sequence[Array], floats: Sequence[Array]) -> list[Array]:
        return call.of(wholes, floats, others)

    ys, pullback = jax.vjp(jax.checkpoint(of_floats, policy=_is_kept), wholes, floats)
    kept, structure = jax.tree.flatten(pullback)
    secondary = []
    if about.secondary_axis is not None:
        place, parts = axis_index(about.secondary_axis), axis_size(about.secondary_axis)
        secondary = [message.reshape(parts, -1)[place] for message in messages]
    # If resharded, whole parameters are not kept but gathered again, and arrays derived from them are recomputed.
    places = {id(whole): place for place, whole in enumerate(wholes)} if about.reshard_after_forward else {}
    gaps = [places.get(id(x)) for x in kept]
    residuals = [x for x, place in zip(kept, gaps) if place is None]
    return ys, [*held, *secondary, *residuals], (gaps, structure, len(secondary))


def _backward(call: _Call, kept: list[Array], note: Any, dys: list[Any]) -> list[Array]:
    gaps, structure, num_secondary = note
    count = len(call.shapes)
    held, secondary, rest = kept[:count], kept[count : count + num_secondary], iter(kept[count + num_secondary :])
    if any(place is not None for place in gaps):
        # after dy, so that they are gathered when the backward pass gets here, rather than kept from before
        wholes = call.again(held, secondary, dys)
    else:
        wholes = []
    pullback = structure.unflatten([next(rest) if place is None else wholes[place] for place in gaps])
    grads, dfloats = pullback(dys)
    return [*call.reduced(grads, held), *dfloats]


_run = TwoPasses("tplab_unit", _function, _plain, _forward, _backward)

_REMADE = {*LAYOUTS, "convert_element_type", "slice", "dynamic_slice"}


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keep every result for the backward pass except reshaped or converted arrays. These are recomputed, so that only
    the whole parameters themselves have to be gathered again."""
    return primitive.name not in _REMADE


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _is_float(x: Any) -> bool:
    return _is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def _dtype(piece: Array, dtype: Any) -> Any:
    return dtype if dtype is not None and jnp.issubdtype(piece.dtype, jnp.inexact) else piece.dtype
