"""Functions with custom derivatives that work everywhere: in loops, to any order, in forward and reverse mode.

JAX drops a `custom_jvp` in the body of a `scan` once it has differentiated it there, so that a second derivative is
that of the function's body. And a `custom_vjp` has no forward mode: no `jax.jvp`, and no Hessian-vector product that
uses it. The functions made here are primitives of JAX, as `lax.psum` is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from tplab.jax.private import varying_axes_of
from tplab.jax.ranks.context import vary

Axes = tuple[str, ...]
Lists = Callable[..., Sequence[Any]]
"""From a list of arrays, and further arguments, to a list of arrays."""


def with_backward(forward: Lists, backward: Lists, xs: Sequence[Array], *about: Any) -> list[Array]:
    """`forward(xs, *about)`, which is linear in the arrays xs. In forward mode it is its own derivative.

    backward   `backward(dys, axes, *about)` computes the gradients of xs, from those of the results and the axes along
               which each x varies. They may differ from those that JAX would derive from `forward`
    about      further arguments of both, known when the program is traced
    """
    jaxpr = jax.make_jaxpr(lambda *xs: list(forward(list(xs), *about)))(*xs)
    return _with_backward.bind(*xs, jaxpr=jaxpr, backward=(backward, *about))


class Differentiable:
    """A function of an array, `function(x, **about)`, whose tangent is `tangent(x, y, dx, **about)`, linear in dx."""

    def __init__(self, name: str, function: Callable[..., Array], tangent: Callable[..., Array]):
        self._function = function
        self._primitive = Primitive(name)
        define(self._primitive, self._mapped)
        ad.primitive_jvps[self._primitive] = self._jvp
        self._tangent = tangent

    def __call__(self, x: Array, **about: Any) -> Array:
        return self._bound(x, 0, about)

    def _bound(self, x: Array, depth: int, about: dict[str, Any]) -> Array:
        """The function under `depth` vmaps, over the first dims of x."""
        jaxpr = jax.make_jaxpr(_under(depth, lambda x: self._function(x, **about)))(x)
        return self._primitive.bind(x, jaxpr=jaxpr, depth=depth, **about)

    def _jvp(self, primals: Any, tangents: Any, *, jaxpr: Any, depth: int, **about: Any) -> tuple[Array, Array]:
        (x,), (dx,) = primals, tangents
        y = self._primitive.bind(x, jaxpr=jaxpr, depth=depth, **about)
        return y, _under(depth, lambda *each: self._tangent(*each, **about))(x, y, ad.instantiate_zeros(dx))

    def _mapped(self, xs: Any, dims: Any, *, jaxpr: Any, depth: int, **about: Any) -> tuple[Array, int]:
        return self._bound(jnp.moveaxis(xs[0], dims[0], 0), depth + 1, about), 0


def _under(depth: int, function: Callable[..., Any]) -> Callable[..., Any]:
    for _ in range(depth):
        function = jax.vmap(function)
    return function


# --- the operation behind `with_backward` -----------------------------------------------------------------------------


def _transposed(dys: Sequence[Any], *xs: Any, jaxpr: Any, backward: Any) -> list[Any]:
    function, *about = backward
    whole = [
        vary(ad.instantiate_zeros(dy), axes_of(aval)) if isinstance(dy, ad.Zero) else dy
        for dy, aval in zip(dys, jaxpr.out_avals, strict=True)
    ]
    grads = function(whole, [axes_of(aval) for aval in jaxpr.in_avals], *about)
    return [grad if ad.is_undefined_primal(x) else None for x, grad in zip(xs, grads, strict=True)]


def _mapped(xs: Sequence[Any], dims: Sequence[Any], *, jaxpr: Any, backward: Any) -> tuple[list[Array], list[int]]:
    size = next(x.shape[dim] for x, dim in zip(xs, dims, strict=True) if dim is not None)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(xs, dims, strict=True)
    ]
    results = with_backward(_forward_of_each, _backward_of_each, moved, jaxpr, backward)
    return results, [0] * len(results)


def _forward_of_each(xs: list[Array], jaxpr: Any, backward: Any) -> list[Array]:
    return jax.vmap(jaxpr_as_fun(jaxpr))(*xs)


def _backward_of_each(dys: Sequence[Array], axes: Sequence[Axes], jaxpr: Any, backward: Any) -> Any:
    function, *about = backward
    return jax.vmap(lambda *dys: list(function(list(dys), axes, *about)))(*dys)


def axes_of(x: Any) -> Axes:
    """The axes along which arrays of a type may differ, in order."""
    return tuple(sorted(varying_axes_of(x)))


def define(primitive: Primitive, batched: Callable[..., Any]) -> None:
    """Define an operation that evaluates its parameter `jaxpr`."""
    many = primitive.multiple_results

    def compute(*xs: Any, jaxpr: Any, **_: Any) -> Any:
        results = jaxpr_as_fun(jaxpr)(*xs)
        return results if many else results[0]

    def kinds(*_: Any, jaxpr: Any, **__: Any) -> Any:
        return (jaxpr.out_avals if many else jaxpr.out_avals[0]), jaxpr.effects

    primitive.def_impl(compute)
    primitive.def_effectful_abstract_eval(kinds)
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=many))


_with_backward = Primitive("tplab_linear")
_with_backward.multiple_results = True
define(_with_backward, _mapped)
ad.deflinear2(_with_backward, _transposed)
