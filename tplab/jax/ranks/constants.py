"""The constants of a traced program, as they were when it was traced.

JAX keeps a NumPy array that a program reads as it is, in memory that its owner may write to later. A program is traced
once, but it is compiled, compared with others and read for its trace afterwards. So it needs constants of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from tplab.jax.private import own_copy


class Constants:
    """Gives jaxprs constants of their own. What several jaxprs share, they share afterwards as well."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}  # id -> (what has this id, what replaces it)

    def owned_by(self, value: Any) -> Any:
        """A jaxpr, open or closed, with copies of every array that its owner may write to; the same object if there is
        none. A tuple or list of jaxprs, a constant, or anything else that an equation has for a parameter will do too.
        """
        if isinstance(value, tuple | list):
            items = self._each(value)
            return value if items is None else type(value)(items) if type(value) in (tuple, list) else value
        if id(value) not in self._made:
            self._made[id(value)] = value, self._replaced(value)
        return self._made[id(value)][1]

    def _each(self, values: Sequence[Any]) -> list[Any] | None:
        """What replaces each; None if all of them remain."""
        items = [self.owned_by(value) for value in values]
        return None if all(new is old for new, old in zip(items, values, strict=True)) else items

    def _replaced(self, value: Any) -> Any:
        if hasattr(value, "jaxpr") and value.jaxpr is not value:  # a closed one, before JAX 0.11
            jaxpr, consts = self.owned_by(value.jaxpr), self._each(value.consts)
            unchanged = jaxpr is value.jaxpr and consts is None
            return value if unchanged else value.replace(jaxpr=jaxpr, consts=consts or value.consts)
        if hasattr(value, "eqns"):
            parts = [name for name in ("eqns", "outvars", "consts") if hasattr(value, name)]
            changes = {name: new for name in parts if (new := self._each(getattr(value, name))) is not None}
            return value.replace(**changes, debug_info=value.debug_info) if changes else value
        if hasattr(value, "primitive") and hasattr(value, "params"):
            invars, params = self._each(value.invars), self._each(list(value.params.values()))
            named = value.params if params is None else dict(zip(value.params, params, strict=True))
            return value if named is value.params and invars is None else value.replace(invars=invars, params=named)
        if isinstance(value, Literal):
            number = own_copy(value.val)
            return value if number is value.val else Literal(number, value.aval)
        return own_copy(value)
