"""Attributes of modules and classes that are replaced while ranks run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from tplab.torch.ranks.rank import current_rank_or_none
from tplab.torch.ranks.simulated import SimulatedRank

Value = tuple[Any, str, Any]
"""Module, class or object; attribute; and its value for the duration of a run."""
_INHERITED = object()
_getpid = os.getpid


class Replaced:
    """Replacements, and the values before them. A change of a process for the duration of a run is one, or consists of
    several."""

    def __init__(self, values: Iterable[Value] = ()):
        self.values = [*values]
        self._before: list[Any] = []

    @property
    def is_there(self) -> bool:
        return bool(self._before)

    def put(self) -> None:
        self._before = self._before or [
            home.__code__ if name == "__code__" else vars(home).get(name, _INHERITED) for home, name, _ in self.values
        ]
        for home, name, value in self.values:
            setattr(home, name, value)

    def take_back(self) -> None:
        """Restore the values before. May be called again if Ctrl-C has interrupted it."""
        for (home, name, _), value in zip(self.values, self._before):
            if value is not _INHERITED:
                setattr(home, name, value)
            elif name in vars(home):
                delattr(home, name)
        self._before = []


def taking_turns() -> SimulatedRank | None:
    """The rank of the calling thread, if it takes turns."""
    rank = current_rank_or_none()
    return rank if isinstance(rank, SimulatedRank) and rank.turns.process == _getpid() else None


def on_ranks(home: Any, name: str, here: Callable[[], Any] = taking_turns) -> Callable[[Callable[..., Any]], Value]:
    """Decorate what replaces `home.name` in threads that run a rank, which `here` returns: it gets the rank and the
    original first. In other threads the original runs. Gives the replacement, not the function."""
    found: Any = getattr(home, name)
    own: Callable[..., Any] = getattr(found, "tplabs_own", found)  # not that of an enclosing run

    def decorated(function: Callable[..., Any]) -> Value:
        def call(*args: Any, **kwargs: Any) -> Any:
            rank = here()
            return own(*args, **kwargs) if rank is None else function(rank, own, *args, **kwargs)

        replacement: Any = wraps(own)(call)
        replacement.__code__ = call.__code__.replace(co_qualname=f"{home.__name__}.{name}")  # which waits are named by
        replacement.tplabs_own = own
        return home, name, replacement

    return decorated
