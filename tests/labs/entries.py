"""The three kinds of entries for sentences about speed or memory. `says` is a part of the sentence, as in the lab."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Claim(NamedTuple):
    """Measured rows or the model must agree: holds() is True, or has the exact values of the numbers in `says`."""

    says: str
    holds: Callable[[], bool | Sequence[float]]


class Quote(NamedTuple):
    """A cell of the lab prints it: each number in `says` is a rounded one from these printed lines."""

    says: str
    lines: tuple[str, ...]


class Given(NamedTuple):
    """Nothing is claimed: a size that the lab chooses, a definition, a default of other software."""

    says: str


Entry = Claim | Quote | Given
