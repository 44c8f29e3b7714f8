"""Where a script makes what its steps use: its optimizers and their settings, its data, its layers."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from torch.optim.optimizer import Optimizer

Setting = tuple[float, ...]
"""A number that an optimizer has, for each of its groups of parameters."""


class Origins:
    """The lines of one rank at which things were made.

    chain   the code and the line of each of the script's frames, the innermost first
    """

    def __init__(self, chain: Callable[[], list[tuple[CodeType, str]]]):
        self._chain, self._loader = chain, ""
        self._drawn: tuple[str, int] = "", 0
        self._lines: dict[int, str] = {}
        self._settings: dict[int, dict[str, tuple[Setting, str]]] = {}
        self._loaded: dict[int, str] = {}
        self._kept: list[Any] = []  # so that nothing else gets their id

    def here(self) -> str:
        chain = self._chain()
        return chain[0][1] if chain else ""

    def make(self, thing: Any) -> None:
        """A thing begins to be made. Its line is the one that calls its class, not one of its own `__init__`."""
        inits = {code for kind in type(thing).__mro__ if (code := _code_of(vars(kind).get("__init__"))) is not None}
        self._lines[id(thing)] = next((line for code, line in self._chain() if code not in inits), "")
        self._kept.append(thing)

    def of(self, thing: Any) -> str:
        """The line at which a thing was made, or ""."""
        return self._lines.get(id(thing), "")

    def read(self, loader: Any) -> None:
        """Samples are taken from a loader: they are chosen by its sampler if the script has made that one."""
        self._loader = self.of(getattr(loader, "sampler", None)) or self.of(loader)

    def draw(self, rows: int) -> None:
        """So many rows of random numbers are drawn: samples may be made of them."""
        self._drawn = self.here(), rows

    def use_data(self, lines: dict[str, str], rows: int) -> None:
        """The model is called with so many rows: note the lines of the "loader", and of what was "drawn" since the last
        call, unless that was cut afterwards."""
        line, drawn = self._drawn
        for key, at in (("loader", self._loader), ("drawn", line if drawn == rows else "")):
            if at:
                lines.setdefault(key, at)
        self._drawn = "", 0

    # --- optimizers --------------------------------------------------------------------------------------------------

    def set(self, optimizer: Optimizer, line: str) -> None:
        """The settings are new, or a schedule has changed some of them."""
        known = self._settings.setdefault(id(optimizer), {})
        for key, values in _settings(optimizer).items():
            if key not in known or known[key][0] != values:
                known[key] = values, line

    def load(self, optimizer: Optimizer) -> None:
        self._loaded[id(optimizer)] = line = self.here()
        self.set(optimizer, line)

    def lines(self, optimizer: Optimizer) -> dict[str, str]:
        """For each setting the line that it is from, unless it was changed by hand; and under "loaded", that of the
        states."""
        known, now = self._settings.get(id(optimizer), {}), _settings(optimizer)
        found = {f"set {key}": line for key, (values, line) in known.items() if now.get(key) == values and line}
        return found | ({"loaded": self._loaded[id(optimizer)]} if id(optimizer) in self._loaded else {})


def _settings(optimizer: Optimizer) -> dict[str, Setting]:
    groups = optimizer.param_groups
    keys = [key for key, x in groups[0].items() if isinstance(x, int | float)] if groups else []
    return {key: tuple(float(group.get(key, 0)) for group in groups) for key in keys}


def _code_of(function: Any) -> CodeType | None:
    return getattr(function, "__code__", None)
