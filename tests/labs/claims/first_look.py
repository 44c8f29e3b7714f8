"""Lab 00: whole tensors and pieces, small and large."""

import re

from tests.labs.entries import Claim
from tests.labs.prose import printed


def micros() -> list[float]:
    """What the lab prints: eight numbers as a whole and in pieces, then a matrix as a whole and in pieces."""
    return [float(found.replace(",", "")) for found in re.findall(r"bytes in +([\d,]+) µs", printed("00_first_look"))]


def in_total(ranks: int) -> int:
    """How many tensors all ranks send."""
    return ranks * (ranks - 1)


CLAIMS = (
    Claim(
        "twice as many ranks send more than four times as many bytes",
        lambda: all(in_total(2 * ranks) > 4 * in_total(ranks) for ranks in range(2, 100)),
    ),
    Claim("seven steps are faster than fourteen", lambda: micros()[0] < micros()[1]),
    Claim("in pieces, it takes less than a third of the time", lambda: micros()[3] < micros()[2] / 3),
)
