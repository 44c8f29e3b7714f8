"""Functions with a custom backward pass that also support forward mode, unlike a `custom_vjp`.

Such a function is a primitive of JAX. Its tangent is a second primitive, linear in the tangents, whose transpose is the
backward pass. Residuals for the backward pass are computed with the result and passed to the second primitive; in
forward mode nothing uses them, and the compiler drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad

from tplab.jax.comm.derivatives import axes_of, define
from tplab.jax.ranks.context import vary

Arrays = list[Array]


class TwoPasses:
    """A function of arrays with a custom backward pass. Each of these receives `call`, which may be any object:

    function(call, xs, fixed)          the results; it is differentiated with respect to xs
    plain(call, xs, fixed)             the same, as JAX may differentiate it: for forward mode, and under vmap
    forward(call, xs, fixed)           the results, the arrays that the backward pass needs, and a note for it
    backward(call, kept, note, dys)    the gradients of xs
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Any, Arrays, Arrays], Arrays],
        plain: Callable[[Any, Arrays, Arrays], Arrays],
        forward: Callable[[Any, Arrays, Arrays], tuple[Arrays, Arrays, Any]],
        backward: Callable[[Any, Arrays, Any, list[Any]], Sequence[Any]],
    ):
        self.function, self.plain, self.forward, self.backward = function, plain, forward, backward
        self._primitive, self._tangent = Primitive(name), Primitive(f"{name}_tangent")
        for primitive in (self._primitive, self._tangent):
            primitive.multiple_results = True
        define(self._primitive, self._mapped)
        define(self._tangent, _tangent_mapped)
        ad.primitive_jvps[self._primitive] = self._jvp
        ad.primitive_jvps[self._tangent] = _tangent_jvp
        ad.primitive_transposes[self._tangent] = self._transposed

    def __call__(self, call: Any, xs: Sequence[Array], fixed: Sequence[Array]) -> Arrays:
        given, count = [*xs, *fixed], len(xs)
        jaxpr = jax.make_jaxpr(lambda *given: self.function(call, list(given[:count]), list(given[count:])))(*given)
        return self._primitive.bind(*given, jaxpr=jaxpr, call=call, count=count)

    def _jvp(self, primals: Any, tangents: Any, *, jaxpr: Any, call: Any, count: int) -> tuple[Arrays, list[Any]]:
        xs, fixed = list(primals[:count]), list(primals[count:])
        places = [place for place, x in enumerate(xs) if _is_float(x)]
        ys, kept, note = self.forward(call, xs, fixed)
        floats = [place for place, y in enumerate(ys) if _is_float(y)]

        def tangent(xs: Arrays, fixed: Arrays, dxs: Arrays) -> Arrays:
            def of_floats(*given: Array) -> Arrays:
                here = list(xs)
                for place, x in zip(places, given, strict=True):
                    here[place] = x
                found = self.plain(call, here, fixed)
                return [found[place] for place in floats]

            return jax.jvp(of_floats, tuple(xs[place] for place in places), tuple(dxs))[1]

        known = [*kept, *xs, *fixed]
        dxs = [vary(ad.instantiate_zeros(tangents[place]), axes_of(jax.typeof(xs[place]))) for place in places]
        begin, end = len(kept), len(kept) + count
        inner = jax.make_jaxpr(lambda *x: tangent(list(x[begin:end]), list(x[end : len(known)]), list(x[len(known) :])))
        dys = self._tangent.bind(
            *known,
            *dxs,
            jaxpr=inner(*known, *dxs),
            about=_About(call, note, len(kept), len(known), tuple(places), tuple(floats), tuple(y.shape for y in ys)),
        )
        found: list[Any] = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in ys]
        for place, dy in zip(floats, dys, strict=True):
            found[place] = dy
        return ys, found

    def _transposed(self, dys: Sequence[Any], *given: Any, jaxpr: Any, about: _About) -> list[Any]:
        whole: list[Any] = [np.zeros(shape, jax.dtypes.float0) for shape in about.results]
        for place, dy, aval in zip(about.floats, dys, jaxpr.out_avals, strict=True):
            whole[place] = vary(ad.instantiate_zeros(dy), axes_of(aval)) if isinstance(dy, ad.Zero) else dy
        grads = self.backward(about.call, list(given[: about.num_kept]), about.note, whole)
        of_tangents = [grads[place] for place in about.places]
        needed = zip(of_tangents, given[about.num_known :], strict=True)
        return [None] * about.num_known + [grad if ad.is_undefined_primal(x) else None for grad, x in needed]

    def _mapped(self, given: Any, dims: Any, *, jaxpr: Any, call: Any, count: int) -> tuple[Arrays, list[int]]:
        plain = lambda *given: self.plain(call, list(given[:count]), list(given[count:]))  # noqa: E731
        found = jax.vmap(plain, in_axes=tuple(dims))(*given)
        return found, [0] * len(found)


@dataclass(frozen=True, eq=False)
class _About:
    """What the tangent's primitive needs besides arrays; see `TwoPasses`. Compared by identity.

    num_kept, num_known   how many operands the backward pass needs, and how many are not tangents
    places, floats        which of xs have tangents, and which results
    results               the shapes of all results
    """

    call: Any
    note: Any
    num_kept: int
    num_known: int
    places: tuple[int, ...]
    floats: tuple[int, ...]
    results: tuple[tuple[int, ...], ...]


def _tangent_mapped(given: Any, dims: Any, *, jaxpr: Any, about: _About) -> tuple[Arrays, list[int]]:
    found = jax.vmap(jaxpr_as_fun(jaxpr), in_axes=tuple(dims))(*given)
    return found, [0] * len(found)


def _tangent_jvp(primals: Any, tangents: Any, *, jaxpr: Any, about: _About) -> Any:
    """A second derivative: JAX differentiates the first."""
    places = [place for place, x in enumerate(primals) if _is_float(x)]

    def of_floats(*given: Array) -> Any:
        here = list(primals)
        for place, x in zip(places, given, strict=True):
            here[place] = x
        return jaxpr_as_fun(jaxpr)(*here)

    moved = [vary(ad.instantiate_zeros(tangents[place]), axes_of(jax.typeof(primals[place]))) for place in places]
    return jax.jvp(of_floats, tuple(primals[place] for place in places), tuple(moved))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
