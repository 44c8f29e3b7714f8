"""The equations of a traced function, cut into parts that compute some results from given values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from tplab.jax.ranks.context import vary
from tplab.jax.tracing.jaxprs import LAYOUTS, called, folded, followed, reached

Var = Any
"""A variable of a jaxpr: the result of an equation, or an input."""

_CHEAP = LAYOUTS | {
    "add", "sub", "mul", "div", "neg", "abs", "sign", "max", "min", "square", "integer_pow", "add_any", "select_n",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "broadcast_in_dim", "convert_element_type",
    "stop_gradient",
}  # fmt: skip
"""Operations that take less time than reading their result from memory."""


class Part(NamedTuple):
    """Some equations of a function, in order, as a function of their own.

    takes   the variables that it needs       gives   its results: variables or literals       consts   known values
    """

    equations: Sequence[Any]
    takes: Sequence[Var]
    gives: Sequence[Any]
    consts: dict[Var, Any]

    def __call__(self, given: dict[Var, Any]) -> list[Any]:
        """Compute the results. `given`: the known values, by variable."""
        here = self.consts | {var: given[var] for var in self.takes}
        return followed(self.equations, here, self.gives, lambda eqn, values, _: _results(eqn, values))


class Equations:
    """All equations of `function(*examples)`, with nested calls inlined.

    `outputs` are the variables of its results; `inputs` are those of the examples. A result may be a literal.
    """

    def __init__(self, function: Callable[..., Sequence[Any]], examples: Sequence[Any]):
        nested = jax.make_jaxpr(function)(*examples)
        closed = jax.make_jaxpr(lambda *args: _inlined(nested, args))(*examples)
        jaxpr = closed.jaxpr
        self.inputs, self.outputs = tuple(jaxpr.invars), tuple(jaxpr.outvars)
        self._equations = list(jaxpr.eqns)
        self._consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._maker = {var: place for place, eqn in enumerate(self._equations) for var in eqn.outvars}

    def depends_on(self, sources: Iterable[Var]) -> set[Var]:
        """These variables and all that depend on them."""
        found = set(sources)
        for eqn in self._equations:
            if any(atom in found for atom in eqn.invars if not is_literal(atom)):
                found.update(eqn.outvars)
        return found

    def origin(self, var: Var, inside: set[Var]) -> Var:
        """The earliest variable within `inside` that has the same values in another layout."""
        while (before := self._before(var)) is not None and before in inside:
            var = before
        return var

    def without_cheap(self, variables: Iterable[Var], given: set[Var], data: set[Var]) -> list[Var]:
        """The variables that cheap operations cannot compute from the others, from `given`, or from non-`data`."""
        kept = self.in_order(variables)
        for var in reversed(kept[:]):
            if self._is_cheap(var, given.union(kept) - {var}, data):
                kept.remove(var)
        return kept

    def needed_for(self, wanted: Iterable[Any], given: Iterable[Var] = ()) -> set[int]:
        """The places of the equations that these results need if the variables `given` are known."""
        given = set(given)

        def makers(atoms: Iterable[Any]) -> list[int]:
            unknown = (atom for atom in atoms if not is_literal(atom) and atom not in given)
            return [self._maker[var] for var in unknown if var in self._maker]

        return set(reached(makers(wanted), lambda place: makers(self._equations[place].invars)))

    def part(self, wanted: Sequence[Any], given: Iterable[Var] = ()) -> Part:
        """The part that computes `wanted` from `given` and the inputs."""
        given = set(given)
        places = self.needed_for(wanted, given)
        chosen = [self._equations[place] for place in sorted(places)]
        read = [atom for eqn in chosen for atom in eqn.invars] + list(wanted)
        made = {var for place in places for var in self._equations[place].outvars} - given
        takes = dict.fromkeys(a for a in read if not is_literal(a) and a not in made and a not in self._consts)
        return Part(chosen, list(takes), wanted, self._consts)

    def in_order(self, variables: Iterable[Var]) -> list[Var]:
        """These variables, inputs first, then in the order in which they are made."""
        place = {var: number for number, var in enumerate(self.inputs)}
        return sorted(variables, key=lambda var: place.get(var, len(place) + self._maker.get(var, 0)))

    def made_by(self, places: Iterable[int]) -> set[Var]:
        """The variables that these equations make."""
        return {var for place in places for var in self._equations[place].outvars}

    def _is_cheap(self, var: Var, known: set[Var], data: set[Var]) -> bool:
        places = [place for place in self.needed_for([var], known) if data & set(self._equations[place].outvars)]
        made = known.union(*(self._equations[place].outvars for place in places))
        return bool(places) and all(
            self._equations[place].primitive.name in _CHEAP
            and all(is_literal(atom) or atom in made or atom not in data for atom in self._equations[place].invars)
            for place in places
        )

    def _before(self, var: Var) -> Var | None:
        place = self._maker.get(var)
        if place is None or self._equations[place].primitive.name not in LAYOUTS:
            return None
        before = self._equations[place].invars[0]
        return None if is_literal(before) else before


def is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def _inlined(inner: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr, with calls inlined."""

    def visit(eqn: Any, values: list[Any], _: Any) -> list[Any]:
        body = called(eqn)
        return _results(eqn, values) if body is None else _inlined(body, values)

    return folded(inner, values, visit)


def _results(eqn: Any, values: Sequence[Any]) -> list[Any]:
    if eqn.primitive.name == "pvary":  # the type of a kept value may differ along more axes than when it was made
        return [vary(x, eqn.params["axes"]) for x in values]
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*values, **eqn.params)
    return results if eqn.primitive.multiple_results else [results]
