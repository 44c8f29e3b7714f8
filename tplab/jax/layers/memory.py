"""The arrays that JAX keeps for the backward pass, and how to keep fewer under sequence parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from tplab.cost.activations import SavedTensor, SavedTensors
from tplab.jax.tracing.jaxprs import LAYOUTS, called


def saved_tensors(fn: Callable[..., Any], params: Any, *args: Any) -> SavedTensors:
    """The arrays that fn(params, *args) keeps for its backward pass, each once, without those from params alone.

        saved_tensors(model.loss, params, ids, targets).bytes      # inside a rank's program: what this rank keeps

    These are the arrays that `jax.vjp` passes from the forward to the backward pass. The same array in another layout
    (reshape, transpose) counts once. Nothing is run. If both passes are compiled together, XLA may recompute the
    results of cheap operations, such as a norm or gelu, instead of keeping them.
    """
    leaves, structure = jax.tree.flatten((params, *args))
    num_params = len(jax.tree.leaves(params))
    places = [place for place, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]

    def residuals(*leaves: Any) -> list[Any]:
        def of_floats(*floats: Any) -> Any:
            everything = list(leaves)
            for place, value in zip(places, floats, strict=True):
                everything[place] = value
            return fn(*structure.unflatten(everything))

        return jax.tree.leaves(jax.vjp(of_floats, *(leaves[place] for place in places))[1])

    jaxpr = jax.make_jaxpr(residuals)(*leaves).jaxpr
    origins: dict[Any, _Origin] = {var: _Origin(var, "a constant", False) for var in jaxpr.constvars}
    for place, var in enumerate(jaxpr.invars):
        origins[var] = _Origin(var, "params" if place < num_params else "input", place < num_params)
    _follow(jaxpr, origins)
    kept: dict[Any, SavedTensor] = {}
    for var in jaxpr.outvars:
        if isinstance(var, core.Literal) or (origin := origins[var]).is_params:
            continue
        aval = var.aval
        nbytes = math.prod(aval.shape) * aval.dtype.itemsize
        kept.setdefault(origin.key, SavedTensor(aval.shape, str(aval.dtype), nbytes, origin.made_by))
    return SavedTensors(kept.values())


def gather_again(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, but of the results of `all_gather` inside it, only this rank's piece is kept for the backward pass.

    Sequence parallelism gathers the inputs of attention and of the MLP. Kept whole, these are the only two tensors of a
    layer that are not divided by the number of ranks R. Gathered again for the backward pass, they are divided too.

    forward   as fn
    backward  as that of fn, after one more all_gather for each of the forward pass: (R-1)/R of the whole
    Korthikanti et al. 2022, section 4.2.2. It is jax.checkpoint with a policy that keeps all but gathered arrays,
    also what norms inside it would otherwise compute again.
    """
    return jax.checkpoint(fn, policy=lambda primitive, *_, **__: primitive.name != "all_gather")


class _Origin(NamedTuple):
    """The origin of a value of a jaxpr: the value that it equals up to its layout, the operation that made it, and
    whether it depends on parameters alone."""

    key: Any
    made_by: str
    is_params: bool


def _follow(jaxpr: Any, origins: dict[Any, _Origin], calls: tuple[int, ...] = ()) -> None:
    """Note the origin of every value of a jaxpr, and of the jaxprs that it calls.

    calls   the calls that led to it: JAX keeps the jaxpr of a function, so that two calls have the same variables.
            A value that depends on no argument is the same in both
    """
    for eqn in jaxpr.eqns:
        given = [None if isinstance(var, core.Literal) else origins[var] for var in eqn.invars]
        name = eqn.primitive.name
        inner = called(eqn)
        if inner is not None:
            inner = getattr(inner, "jaxpr", inner)
            of_inner = {var: origin or _Origin(var, "a constant", False) for var, origin in zip(inner.invars, given)}
            of_inner |= {var: _Origin((id(eqn), var), "a constant", False) for var in inner.constvars}
            _follow(inner, of_inner, (*calls, id(eqn)))
            for outer, var in zip(eqn.outvars, inner.outvars, strict=True):
                literal = isinstance(var, core.Literal)
                origins[outer] = _Origin(outer, "a constant", False) if literal else of_inner[var]
            continue
        if name in {*LAYOUTS, "optimization_barrier"}:
            origins |= {out: origin or _Origin(out, name, False) for out, origin in zip(eqn.outvars, given)}
            continue
        known = [origin for origin in given if origin is not None and origin.made_by != "a constant"]
        is_params = bool(known) and all(origin.is_params for origin in known)
        made_by = name if known else "a constant"
        origins |= {out: _Origin((calls, out) if known else out, made_by, is_params) for out in eqn.outvars}
