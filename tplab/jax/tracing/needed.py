"""Which of a jaxpr's variables are still needed while it is followed: what they hold must not be overwritten."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tplab.jax.tracing.held import Held


class Needed:
    """How far a jaxpr has been followed.

    held   what its variables hold so far
    now    the number of the equation that is followed
    """

    def __init__(self, jaxpr: Any, held: dict[Any, Held], keeps_arguments: bool):
        """keeps_arguments   whether the caller needs the arguments afterwards, as that of the whole program does"""
        self._eqns, self._held, self.now = jaxpr.eqns, held, 0
        readers = *(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars
        self._uses = Counter(id(atom) for atoms in readers for atom in atoms)
        self._last = {atom: place for place, atoms in enumerate(readers) for atom in atoms if not hasattr(atom, "val")}
        if keeps_arguments:
            self._last |= dict.fromkeys((*jaxpr.constvars, *jaxpr.invars), len(jaxpr.eqns))

    def is_used_once(self, atom: Any) -> bool:
        return self._uses[id(atom)] == 1

    def later(self, held: Held) -> bool:
        """Whether a later equation reads it, or a later iteration of the loop that is followed now."""
        eqn, params = self._eqns[self.now], self._eqns[self.now].params
        counts = (params.get(name, 0) for name in ("num_consts", "cond_nconsts", "body_nconsts"))
        again = eqn.invars[: sum(counts)] if eqn.primitive.name in ("scan", "while") else ()
        later = [atom for atom, place in self._last.items() if place > self.now]
        return any(self._held.get(atom) is held for atom in (*again, *later) if not hasattr(atom, "val"))
