"""Information in a model's jaxpr besides its results: the order in which gradients arrive, the inputs of its softmaxes,
and its results with the changes of a trial."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal

from tplab.checking.proofs import AVERAGED, LEFT_OUT, SAME, SUMMED, Reduction
from tplab.jax.comm.collectives import all_reduce, axis_size
from tplab.jax.ranks.context import vary
from tplab.jax.tracing.exchange import EXCHANGES
from tplab.jax.tracing.jaxprs import LAYOUTS, called, folded, line_of, opened

_SAME_NAME = LAYOUTS | {"convert_element_type", "broadcast_in_dim", "optimization_barrier"}
MOST_SOFTMAXES = 32


def backward_order(jaxpr: Any, names: Sequence[str]) -> list[str]:
    """Return the names of inputs of a closed jaxpr, in the order in which their gradients are complete: the one that is
    used first in the forward pass comes last.

    names   the names of the first inputs; others are left out
    """
    first: dict[str, int] = {}
    count = 0

    def visit(eqn: Any, given: list[Any], _: Any) -> list[Any]:
        """Return the name of each result that only has another layout or dtype than an input; else None."""
        nonlocal count
        count += 1
        named = [name for name in given if name]
        if (inner := called(eqn)) is not None:
            return folded(inner, given, visit, given=lambda *_: None)
        if eqn.primitive.name in _SAME_NAME and named:
            return [named[0], *[None] * (len(eqn.outvars) - 1)]
        for name in named:
            first.setdefault(name, count)
        return [None] * len(eqn.outvars)

    others = [None] * (len(jaxpr.in_avals) - len(names))
    folded(jaxpr, [*names, *others], visit, given=lambda *_: None)
    return sorted(first, key=lambda name: -first[name])


def softmaxes(fn: Callable[..., Any], *args: Any) -> list[Array]:
    """Return the input of each softmax in fn(*args), in the order of computation, without those in a loop.

    A softmax is exp(x - max(x)), however it is written.
    """
    found: list[Array] = []
    taken: dict[int, dict[int, Any]] = {}

    def note(eqn: Any, jaxpr: Any, read: Callable[[Any], Any], results: list[Any]) -> list[Any]:
        here = taken.setdefault(id(jaxpr), _taken_by_softmax(jaxpr))
        if id(eqn) in here and len(found) < MOST_SOFTMAXES:
            found.append(read(here[id(eqn)]))
        return results

    _evaluated(jax.make_jaxpr(fn)(*args), jax.tree.leaves(args), note)
    return found


def with_changes(fn: Callable[..., Any], at: Mapping[str, Any], found: list[Reduction]) -> Callable[..., Any]:
    """Return `fn` with other results of all_reduces, and other scores in softmaxes: see `proofs.Trial`.

    found   gets the all_reduces in lines of the program, without those in loops and branches. A mean counts as the sum
            that it begins with
    """
    taken: dict[int, set[Any]] = {}

    def changed(eqn: Any, jaxpr: Any, read: Callable[[Any], Any], results: list[Any]) -> list[Any]:
        if (reduction := _reduction(eqn, jaxpr)) is not None:
            found.append(reduction)
        how = at.get("reductions", {}).get(reduction)
        if how is not None:
            names = EXCHANGES[eqn.primitive.name].names(eqn.params)
            return [_other_result(how, read(atom), result, names) for atom, result in zip(eqn.invars, results)]
        if "scores" not in at:
            return results
        scores = taken.setdefault(id(jaxpr), set(_taken_by_softmax(jaxpr).values()))
        if not any(not isinstance(atom, Literal) and atom in scores for atom in eqn.invars):
            return results
        inputs = [_other_scores(read(atom), at["scores"]) if not isinstance(atom, Literal) and atom in scores
                  else read(atom) for atom in eqn.invars]  # fmt: skip
        again = eqn.primitive.bind(*inputs, **eqn.params)
        return again if eqn.primitive.multiple_results else [again]

    def other(*args: Any) -> Any:
        found.clear()
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shape), _evaluated(closed, jax.tree.leaves(args), changed))

    return other


def _other_scores(x: Any, change: float | tuple[str, ...]) -> Any:
    return vary(lax.psum(vary(x, change), change), change) if isinstance(change, tuple) else x * change


def _other_result(how: str, x: Any, result: Any, names: tuple[str, ...]) -> Any:
    num_ranks = axis_size(names)
    if how == SUMMED:
        return lax.psum(vary(x, names), names)
    if how not in (LEFT_OUT, AVERAGED):
        return result * num_ranks
    mean = result / num_ranks
    gap = all_reduce(jnp.abs(x - mean).max(initial=0), names, "max")
    is_same = gap <= SAME * jnp.abs(mean).max(initial=0)
    return jnp.where(is_same == (how == LEFT_OUT), mean, result).astype(result.dtype)


def _reduction(eqn: Any, jaxpr: Any) -> Reduction | None:
    known = EXCHANGES.get(eqn.primitive.name)
    line = line_of(eqn, jaxpr) if known is not None and known.op == "all_reduce" else None
    if known is None or not line or known.name_in(eqn) != "all_reduce":
        return None
    return Reduction(known.combines, ",".join(known.names(eqn.params)), line)


def _evaluated(inner: Any, args: Sequence[Any], watch: Callable[..., list[Any]]) -> list[Any]:
    """Return the results of a jaxpr. `watch` gets each equation, its jaxpr, a function that reads its operands, and its
    results, and returns these or others."""
    jaxpr, _ = opened(inner)

    def visit(eqn: Any, inputs: list[Any], read: Any) -> list[Any]:
        if (body := called(eqn)) is not None:
            return _evaluated(body, inputs, watch)
        results = eqn.primitive.bind(*inputs, **eqn.params)
        return watch(eqn, jaxpr, read, results if eqn.primitive.multiple_results else [results])

    return folded(inner, args, visit)


def _taken_by_softmax(jaxpr: Any) -> dict[int, Any]:
    """Return the id of each equation exp(x - ..) whose x also has its maximum taken, and that x."""

    def those(name: str, of: Collection[Any] | None = None) -> Iterator[tuple[Any, Any]]:
        for eqn in jaxpr.eqns:
            x = eqn.invars[0] if eqn.primitive.name == name else None
            if x is not None and not isinstance(x, Literal) and (of is None or x in of):
                yield eqn, x

    maximal = {x for _, x in those("reduce_max")}
    apart = {eqn.outvars[0]: x for eqn, x in those("sub", maximal)}
    return {id(eqn): apart[difference] for eqn, difference in those("exp", apart)}
