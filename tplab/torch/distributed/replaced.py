"""Attributes of modules and classes that are replaced while ranks run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Value = tuple[Any, str, Any]
"""Module, class or object; attribute; and its value for the duration of a run."""
_INHERITED = object()


class Replaced:
    """Replacements, and the values before them."""

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
        """Restore the values before. May be called again if Ctrl-C has interrupted it."""
        for (home, name, _), value in zip(self.values, self._before):
            if value is not _INHERITED:
                setattr(home, name, value)
            elif name in vars(home):
                delattr(home, name)
        self._before = []
