"""Collectives that only some of the ranks would reach. They hang forever, so they are refused before anything runs.

All ranks follow the same path through a program, except at a `cond` or `while` whose condition differs between ranks.
JAX's types say along which axes it may differ. A collective inside is fine if its ranks differ only along other axes,
because they all decide alike.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tplab.errors import DeadlockError, TraceError
from tplab.jax.private import varying_axes_of
from tplab.jax.tracing.decisions import Reports
from tplab.jax.tracing.exchange import EXCHANGES
from tplab.jax.tracing.held import Held, PerRank
from tplab.jax.tracing.jaxprs import equations_of, inside, line_of, opened
from tplab.jax.tracing.walk import Ranks, Walk
from tplab.mesh import Mesh
from tplab.units import counted, ranks_text


def refuse_divergence(jaxpr: Any, mesh: Mesh) -> None:
    """Raise DeadlockError if some of a collective's ranks may take a different branch in the ranks' program, or leave a
    loop earlier."""
    wide = {name for name, size in mesh.shape.items() if size > 1}
    for eqn, outer in equations_of(jaxpr):
        if not (differs := _differs_along(eqn) & wide):
            continue
        for part in inside(eqn):
            for collective, around in equations_of(part):
                if axes := differs & _joined_by(collective, mesh):
                    lines = line_of(collective, around), line_of(eqn, outer)
                    raise DeadlockError(_message(collective, eqn, *lines, sorted(axes), _ways(jaxpr, mesh, eqn)))


def _differs_along(eqn: Any) -> frozenset[str]:
    """The axes along which ranks may decide differently at an equation."""
    if eqn.primitive.name == "cond":
        return varying_axes_of(eqn.invars[0].aval)
    if eqn.primitive.name == "while":
        return varying_axes_of(opened(eqn.params["cond_jaxpr"])[0].outvars[0].aval)
    return frozenset()


def _joined_by(eqn: Any, mesh: Mesh) -> set[str]:
    """The axes along which ranks must reach an equation together."""
    if (exchange := EXCHANGES.get(eqn.primitive.name)) is None:
        return set()
    # XLA's ppermute involves all devices, even those that do not send: it has been seen to hang on the CPU
    return set(mesh.axis_names if exchange.op == "ppermute" else exchange.names(eqn.params))


def _message(collective: Any, eqn: Any, line: str | None, outer: str | None, axes: list[str], ways: str) -> str:
    exchange = EXCHANGES[collective.primitive.name]
    op, over = exchange.name_in(collective), ",".join(exchange.names(collective.params))
    along = ", ".join(map(repr, axes))
    if eqn.primitive.name == "cond":
        where, may = f"a branch of the cond at {outer}", "may take different branches"
    else:
        where, may = f"the while_loop at {outer}", "may leave it at different times"
    why = f" (in XLA a {exchange.op} joins every rank of the mesh)" if exchange.op == "ppermute" else ""
    return (
        f"{op} over {over!r} at {line} is inside {where}, and the ranks along {along} {may}{ways}.\n"
        f"Those that reach the {op} would wait for the others forever{why}. Call it on every rank, and choose between "
        f"results with jnp.where; or let every rank decide alike: all_reduce(condition, "
        f"{(axes[0] if len(axes) == 1 else tuple(axes))!r}, 'max')"
    )


def _ways(jaxpr: Any, mesh: Mesh, eqn: Any) -> str:
    """Which ranks take which path, if that can be known without the program's arguments, otherwise ""."""
    asking = _Reaching(mesh, eqn)
    with suppress(_Reached, TraceError):
        asking.run(jaxpr, [Held.known(variable.aval, None) for variable in jaxpr.invars], tuple(mesh.ranks), "?")
    return asking.answer


class _Reached(Exception):
    """Raised when the walk reaches the equation in question."""


class _Reaching(Walk):
    """A walk up to one equation, to see which path each rank takes there."""

    def __init__(self, mesh: Mesh, eqn: Any):
        super().__init__(mesh, lambda *_: 0, Reports(frozenset(), None, mesh.size))
        self._eqn, self.answer = eqn, ""

    def _cond(self, eqn: Any, inputs: list[Held], ranks: Ranks, where: str) -> list[Held]:
        if eqn is not self._eqn:
            return super()._cond(eqn, inputs, ranks, where)
        if (values := inputs[0].values()) is not None:
            groups = {int(values[rank]): [r for r in ranks if values[r] == values[rank]] for rank in ranks}
            self.answer = ": " + "; ".join(f"{_do(groups[way], 'take')} branch {way}" for way in sorted(groups))
        raise _Reached

    def _must_know(self, eqn: Any) -> bool:
        """The results of any other branch or loop may be unknown: the program's arguments may decide there."""
        return eqn is self._eqn

    def _goes_on(self, eqn: Any, decision: Held, times: int, ranks: Ranks, where: str) -> PerRank:
        values = super()._goes_on(eqn, decision, times, ranks, where)
        leaving = [rank for rank in ranks if not values[rank]]
        if eqn is self._eqn and 0 < len(leaving) < len(ranks):
            staying = [rank for rank in ranks if values[rank]]
            self.answer = f": {_do(leaving, 'leave')} it after {counted(times, 'turn')}, and {_do(staying, 'go')} on"
            raise _Reached
        return values


def _do(ranks: list[int], verb: str) -> str:
    ending = "" if len(ranks) > 1 else "es" if verb.endswith("o") else "s"
    return f"{ranks_text(ranks)} {verb}{ending}"
