"""The cells of a row: text in a table, read as numbers, switches and names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

EMPTY = ("nan", "n/a", "<na>", "null", "none", "-")
"""Texts of a cell without a value. For `recompute`, "none" is a value."""


def plain(column: str) -> str:
    """The canonical form of a column's name: " GPUs" -> "gpus"."""
    return column.strip().lower()


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """The cells of a row as text, including empty ones."""
    return {plain(name): str(cell).strip() for name, cell in row.items() if name and cell is not None}


def says(column: str, cell: str) -> bool:
    """Whether a cell has a value."""
    return bool(cell) and (cell.lower() not in EMPTY or (column, cell.lower()) == ("recompute", "none"))


def whole(name: str, text: str) -> int:
    most = 10**9 if name in ("batch", "sequence") else 10**6
    try:
        number = float(text)
        if number == int(number) and number <= most:
            return int(number)
    except (ValueError, OverflowError):  # not a number; infinity
        pass
    raise ValueError(f"{name} is {text!r}; it must be a whole number, {most:,} at most")


def number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be a number") from None


def switch(name: str, text: str) -> bool:
    for value, words in {True: ("true", "1", "1.0", "yes", "on"), False: ("false", "0", "0.0", "no", "off")}.items():
        if text.lower() in words:
            return value
    raise ValueError(f"{name} is {text!r}; it must be true or false")


def fields_of(kind: Any, given: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a dataclass of numbers, switches and names, such as a Model or a Plan, that a row gives."""
    read: dict[str, Callable[..., Any]] = {"int": whole, "float": number, "bool": switch, "str": lambda _, text: text}
    types = {one.name: str(one.type).removesuffix(" | None") for one in fields(kind)}
    return {name: read[type](name, given[name]) for name, type in types.items() if name in given}
