"""One call of a unit of ZeRO stage 3, with a backward pass of its own that also supports forward mode, unlike that of a
`custom_vjp`.

The call is a primitive of JAX. Its tangent is a second primitive, linear in the tangents, whose transpose is the
backward pass. Residuals for the backward pass are computed with the result and passed to the second primitive; in
forward mode nothing uses them, and the compiler drops them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad

from tplab.data.pieces import Pieces
from tplab.jax.comm.collectives import axis_index, axis_size
from tplab.jax.comm.derivatives import axes_of, define, with_backward
from tplab.jax.data.pieces import held_in, message_of, row_of, wholes_in
from tplab.jax.ranks.context import vary, varying_axes
from tplab.jax.tracing.jaxprs import LAYOUTS

Arrays = list[Array]


@dataclass(frozen=True, eq=False)
class Call:
    """The static data of one call of a unit, which JAX does not trace. Its arrays are the pieces of the parameters, the
    floating-point arguments, the other arguments, and the arrays before the unit.

    about                   what the unit sends: an `About`
    fn                      a function of the whole parameters and of both lists of arguments
    shapes                  of the whole parameters
    num_floats, num_fixed   how many arguments there are
    results                 the structure of fn's results, once it has been traced
    """

    about: Any
    fn: Any
    shapes: tuple[tuple[int, ...], ...]
    num_floats: int = 0
    num_fixed: int = 0
    results: list[Any] = field(default_factory=list)

    def __call__(self, *given: Array) -> Any:
        found = _unit.bind(*given, jaxpr=jax.make_jaxpr(self.function)(*given), call=self)
        return self.results[0].unflatten(found)

    @property
    def num_xs(self) -> int:
        """How many arrays it is differentiated with respect to: pieces and floating-point arguments."""
        return len(self.shapes) + self.num_floats

    def parts(self, given: Sequence[Array]) -> tuple[Sequence[Array], ...]:
        """(pieces, floating-point arguments, other arguments, the arrays before the unit)."""
        begin, end, last = len(self.shapes), self.num_xs, self.num_xs + self.num_fixed
        return given[:begin], given[begin:end], given[end:last], given[last:]

    def function(self, *given: Array) -> Arrays:
        """The results of fn, whose parameters are gathered once the arrays before the unit are ready."""
        held, floats, fixed, after = self.parts(given)
        return self.of(self.wholes(held, self.about.compute_dtype, after)[0], floats, fixed)

    def plain(self, *given: Array) -> Arrays:
        """The same, with whole parameters that are kept for the backward pass, as JAX may differentiate it."""
        return self.function(*given[: self.num_xs + self.num_fixed])

    def of(self, wholes: Sequence[Array], floats: Sequence[Array], fixed: Sequence[Array]) -> Arrays:
        """The results of fn, as a list."""
        found, structure = jax.tree.flatten(self.fn(wholes, floats, fixed))
        self.results[:] = [structure]
        return [jnp.asarray(x) for x in found]

    def groups(self, held: Sequence[Array]) -> list[list[int]]:
        """The places of parameters that are sent together: they have one dtype, and differ along the same axes."""
        kinds: dict[Any, list[int]] = {}
        for place, piece in enumerate(held):
            kinds.setdefault((piece.dtype, varying_axes(piece)), []).append(place)
        return list(kinds.values())

    def pieces(self, places: Sequence[int]) -> Pieces:
        return Pieces(tuple(self.shapes[place] for place in places), axis_size(self.about.axis))

    def wholes(self, held: Sequence[Array], dtype: Any, after: Any) -> tuple[Arrays, Arrays]:
        """The whole parameters, gathered once `after` is ready, and the messages in which they arrived."""
        wholes: list[Any] = [None] * len(held)
        messages = []
        for places in self.groups(held):
            row = row_of([held[place] for place in places], _dtype(held[places[0]], dtype))
            messages += with_backward(_gathered, _reduced, [row, *self._known(row, after)], self.about)
            self._unpack(places, messages[-1], wholes)
        return wholes, messages

    def again(self, held: Sequence[Array], secondary: Sequence[Array], after: Any) -> Arrays:
        """The same for the backward pass, from the pieces or from second ones."""
        if not secondary:
            return self.wholes(held, self.about.compute_dtype, after)[0]
        wholes: list[Any] = [None] * len(held)
        for places, piece in zip(self.groups(held), secondary):
            piece = _behind(piece, self._known(piece, after))
            self._unpack(places, self.about.gathers(piece, self.about.secondary_axis), wholes)
        return wholes

    def _known(self, row: Array, after: Any) -> Arrays:
        """The arrays in `after` that a row's gather must wait for.

        A barrier makes its operands differ along the same axes, by JAX's types. So we use only those parts of `after`
        that differ along no other axes than whole parameters do.
        """
        axes = {*varying_axes(row), *self.about.names()}
        return [lax.stop_gradient(x) for x in jax.tree.leaves(after) if is_float(x) and varying_axes(x) <= axes]

    def _unpack(self, places: Sequence[int], message: Array, wholes: list[Any]) -> None:
        for place, whole in zip(places, wholes_in(self.pieces(places), message)):
            wholes[place] = vary(whole, self.about.names())

    def reduced(self, grads: Sequence[Array], held: Sequence[Array]) -> Arrays:
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


def _behind(row: Array, known: Arrays) -> Array:
    """The same row, but for the compiler not available before `known`."""
    return lax.optimization_barrier((row, known))[0] if known else row


def _gathered(row_and_known: Arrays, about: Any) -> Arrays:
    """The message of all ranks' rows. Its gradient is reduced like the unit's, including when JAX differentiates the
    unit's own passes for second derivatives."""
    row, *known = row_and_known
    return [vary(about.gathers(_behind(row, known), about.axis), about.names())]


def _reduced(messages: Sequence[Array], axes: Sequence[Sequence[str]], about: Any) -> list[Any]:
    dtype = messages[0].dtype
    row = about.reduces(messages[0].astype(about.reduce_dtype or dtype))
    return [vary(row.astype(dtype), tuple(axes[0])), *[None] * (len(axes) - 1)]


# --- both passes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _About:
    """What the tangent's primitive needs besides arrays. Compared by identity.

    gaps                  for each array that the pullback has kept, which whole parameter it is; None: none
    structure             of the pullback
    num_secondary         how many second pieces there are
    num_kept, num_known   how many operands the backward pass needs, and how many are not tangents
    places, floats        which arrays have tangents, and which results
    results               the shapes of all results
    """

    call: Call
    gaps: list[int | None]
    structure: Any
    num_secondary: int
    num_kept: int
    num_known: int
    places: tuple[int, ...]
    floats: tuple[int, ...]
    results: tuple[tuple[int, ...], ...]


def _forward(call: Call, given: Sequence[Array]) -> tuple[Arrays, Arrays, tuple[list[int | None], Any, int]]:
    """The results, the arrays that the backward pass needs, and a note for it: gaps, structure, num_secondary."""
    about = call.about
    held, floats, fixed, after = call.parts(given)
    wholes, messages = call.wholes(held, about.compute_dtype, after)

    def of_floats(wholes: Sequence[Array], floats: Sequence[Array]) -> Arrays:
        return call.of(wholes, floats, fixed)

    ys, pullback = jax.vjp(jax.checkpoint(of_floats, policy=_is_kept), wholes, list(floats))
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


def _jvp(primals: Any, tangents: Any, *, jaxpr: Any, call: Call) -> tuple[Arrays, list[Any]]:
    given, count = list(primals), call.num_xs
    places = [place for place, x in enumerate(given[:count]) if is_float(x)]
    ys, kept, note = _forward(call, given)
    floats = [place for place, y in enumerate(ys) if is_float(y)]
    dxs = [_tangent_at(given, tangents, place) for place in places]
    num_known = len(kept) + len(given)

    def tangent(*operands: Array) -> Arrays:
        given = operands[len(kept) : num_known]

        def of_floats(*xs: Array) -> Arrays:
            found = call.plain(*_with(given, places, xs))
            return [found[place] for place in floats]

        return jax.jvp(of_floats, tuple(given[place] for place in places), operands[num_known:])[1]

    operands, shapes = [*kept, *given, *dxs], tuple(y.shape for y in ys)
    about = _About(call, *note, len(kept), num_known, tuple(places), tuple(floats), shapes)
    dys = _tangent.bind(*operands, jaxpr=jax.make_jaxpr(tangent)(*operands), about=about)
    return ys, _with([ad.Zero(jax.typeof(y).to_tangent_aval()) for y in ys], floats, dys)


def _transposed(dys: Sequence[Any], *operands: Any, jaxpr: Any, about: _About) -> list[Any]:
    """The backward pass."""
    whole: list[Any] = [np.zeros(shape, jax.dtypes.float0) for shape in about.results]
    for place, dy, aval in zip(about.floats, dys, jaxpr.out_avals, strict=True):
        whole[place] = vary(ad.instantiate_zeros(dy), axes_of(aval)) if isinstance(dy, ad.Zero) else dy
    call, count = about.call, len(about.call.shapes)
    held, rest = list(operands[:count]), iter(operands[count + about.num_secondary : about.num_kept])
    # after dy, so that they are gathered when the backward pass gets here, rather than kept from before
    is_resharded = any(place is not None for place in about.gaps)
    wholes = call.again(held, operands[count : count + about.num_secondary], whole) if is_resharded else []
    pullback = about.structure.unflatten([next(rest) if place is None else wholes[place] for place in about.gaps])
    grads, dfloats = pullback(whole)
    every = [*call.reduced(grads, held), *dfloats]
    needed = zip((every[place] for place in about.places), operands[about.num_known :], strict=True)
    return [None] * about.num_known + [grad if ad.is_undefined_primal(x) else None for grad, x in needed]


def _tangent_jvp(primals: Any, tangents: Any, *, jaxpr: Any, about: _About) -> Any:
    """A second derivative: JAX differentiates the first."""
    places = [place for place, x in enumerate(primals) if is_float(x)]

    def of_floats(*xs: Array) -> Any:
        return jaxpr_as_fun(jaxpr)(*_with(primals, places, xs))

    moved = tuple(_tangent_at(primals, tangents, place) for place in places)
    return jax.jvp(of_floats, tuple(primals[place] for place in places), moved)


def _with(given: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The arrays with others at these places."""
    known = dict(zip(places, others, strict=True))
    return [known.get(place, x) for place, x in enumerate(given)]


def _tangent_at(primals: Sequence[Any], tangents: Sequence[Any], place: int) -> Array:
    return vary(ad.instantiate_zeros(tangents[place]), axes_of(jax.typeof(primals[place])))


def _mapped(given: Any, dims: Any, *, jaxpr: Any, call: Call | None = None, about: Any = None) -> tuple[Arrays, Any]:
    found = jax.vmap(jaxpr_as_fun(jaxpr) if call is None else call.plain, in_axes=tuple(dims))(*given)
    return found, [0] * len(found)


_unit, _tangent = Primitive("tplab_unit"), Primitive("tplab_unit_tangent")
for _primitive, _of_tangents in ((_unit, _jvp), (_tangent, _tangent_jvp)):
    _primitive.multiple_results = True
    define(_primitive, _mapped)
    ad.primitive_jvps[_primitive] = _of_tangents
ad.primitive_transposes[_tangent] = _transposed

_REMADE = {*LAYOUTS, "convert_element_type", "slice", "dynamic_slice"}


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keep every result for the backward pass except reshaped or converted arrays. These are recomputed, so that only
    the whole parameters themselves have to be gathered again."""
    return primitive.name not in _REMADE


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def is_float(x: Any) -> bool:
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def _dtype(piece: Array, dtype: Any) -> Any:
    return dtype if dtype is not None and jnp.issubdtype(piece.dtype, jnp.inexact) else piece.dtype
