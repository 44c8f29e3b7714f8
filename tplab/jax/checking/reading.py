"""What a model's jaxpr says besides its results: the order in which gradients arrive, and its softmaxes' inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import Array
from jax.extend.core import Literal

from tplab.jax.tracing.jaxprs import LAYOUTS, called, opened

_SAME_NAME = LAYOUTS | {"convert_element_type", "broadcast_in_dim", "optimization_barrier"}
MOST_SOFTMAXES = 32


def backward_order(jaxpr: Any, names: Sequence[str]) -> list[str]:
    """The names of inputs of a jaxpr, in the order in which their gradients are complete: what is used first in the
    forward pass comes last.

    names   the names of the first inputs; others are left out
    """
    first: dict[str, int] = {}
    count = 0

    def follow(jaxpr: Any, known: Mapping[Any, str]) -> None:
        nonlocal count
        here = dict(known)
        for eqn in jaxpr.eqns:
            count += 1
            used = [None if isinstance(atom, Literal) else here.get(atom) for atom in eqn.invars]
            inner, named = called(eqn), [name for name in used if name]
            if inner is not None:
                body, _ = opened(inner)
                follow(body, {var: name for var, name in zip(body.invars, used) if name})
            elif eqn.primitive.name in _SAME_NAME and named:
                here[eqn.outvars[0]] = named[0]
            else:
                for name in named:
                    first.setdefault(name, count)

    follow(jaxpr, dict(zip(jaxpr.invars, names)))
    return sorted(first, key=lambda name: -first[name])


def softmaxes(fn: Callable[..., Any], *args: Any) -> list[Array]:
    """The input of each softmax in fn(*args), in the order in which they are computed, without those in a loop.

    A softmax is exp(x - max(x)), however it is written.
    """
    closed = jax.make_jaxpr(fn)(*args)
    found: list[Array] = []

    def evaluate(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        here = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values]))
        taken = _taken_by_softmax(jaxpr)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else here[atom]

        for eqn in jaxpr.eqns:
            inputs, inner = [read(atom) for atom in eqn.invars], called(eqn)
            if inner is not None:
                body, own = opened(inner)
                results = evaluate(body, own, inputs)
            else:
                results = eqn.primitive.bind(*inputs, **eqn.params)
                results = results if eqn.primitive.multiple_results else [results]
            if id(eqn) in taken and len(found) < MOST_SOFTMAXES:
                found.append(read(taken[id(eqn)]))
            here.update(zip(eqn.outvars, results))
        return [read(atom) for atom in jaxpr.outvars]

    evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return found


def _taken_by_softmax(jaxpr: Any) -> dict[int, Any]:
    """The id of each equation exp(x - ..) whose x also has its maximum taken, and that x."""

    def those(name: str, of: Collection[Any] | None = None) -> Iterator[tuple[Any, Any]]:
        for eqn in jaxpr.eqns:
            x = eqn.invars[0] if eqn.primitive.name == name else None
            if x is not None and not isinstance(x, Literal) and (of is None or x in of):
                yield eqn, x

    maximal = {x for _, x in those("reduce_max")}
    apart = {eqn.outvars[0]: x for eqn, x in those("sub", maximal)}
    return {id(eqn): apart[difference] for eqn, difference in those("exp", apart)}
