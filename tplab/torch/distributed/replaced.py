"""Attributes of modules and classes that are other ones while ranks run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Value = tuple[Any, str, Any]
"""Module, class or object; name; and what is there for the time of a run."""
_INHERITED = object()


class Replaced:
    """What is replaced, and what was there before."""

    def __init__(self, values: Iterable[Value] = ()):
        self.values = [*values]
        self._before: list[Any] = []

    @property
    def is_there(self) -> bool:
        return bool(self._before)

    def put(self) -> None:
        self._before = self._before or [vars(home).get(name, _INHERITED) for home, name, _ in self.values]
        for home, name, value in self.values:
            setattr(home, name, value)

    def take_back(self) -> None:
        """Restore what was there. It may be called again if Ctrl-C has ended it."""
        for (home, name, _), value in zip(self.values, self._before):
            if value is not _INHERITED:
                setattr(home, name, value)
            elif name in vars(home):
                delattr(home, name)
        self._before = []
