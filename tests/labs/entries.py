"""The three kinds of entries that a sentence about speed or memory has. `says` is a part of it, as in the lab."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Claim(NamedTuple):
    """Measured rows or the model must agree: holds() is True, or has what the numbers in `says` are rounded from."""

    says: str
    holds: Callable[[], bool | Sequence[float]]


class Quote(NamedTuple):
    """A cell of the lab prints it: each number in `says` is one of those in these printed lines, rounded."""

    says: str
    lines: tuple[str, ...]


class Given(NamedTuple):
    """Nothing is claimed: a size that the lab chooses, a definition, what other software has for a default."""

    says: str


Entry = Claim | Quote | Given
