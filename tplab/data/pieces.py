"""Which elements of which parameter each rank holds if ranks share parameters (ZeRO), and how they are sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tplab.sharding import cut


@dataclass(frozen=True)
class Pieces:
    """Some parameters, each cut into one piece per rank. R ranks.

    Each parameter is flattened, and `cut(size, R, "ceil")` says which rank holds which elements: 10 numbers over 4
    ranks are 3 3 3 1, and 3 numbers over 4 ranks are 1 1 1 0. So parameters of any shape can be shared.

    All parameters are sent in one message, [R, width]: row r has rank r's piece of each parameter, one after the other,
    and each piece is padded to the longest. In an all_gather of the rows, or a reduce_scatter to them, each rank sends
    (R-1) * width elements.

        Pieces(((2, 5), (3,)), 4)       a weight of 10 numbers, a bias of 3

        rank 0   0 1 2 | 0          the numbers are indices into the parameter
        rank 1   3 4 5 | 1
        rank 2   6 7 8 | 2
        rank 3   9 . . | .          a dot is padding
    """

    shapes: tuple[tuple[int, ...], ...]
    num_ranks: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def ranges(self) -> tuple[tuple[range, ...], ...]:
        """The elements of each parameter that each rank holds."""
        return tuple(cut(size, self.num_ranks, "ceil") for size in self.sizes)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """How many elements of each parameter are in one row of the message: as many as rank 0 has, which has most."""
        return tuple(len(ranges[0]) for ranges in self.ranges)

    @cached_property
    def columns(self) -> tuple[slice, ...]:
        """Where each parameter is in a row."""
        ends = [sum(self.widths[: place + 1]) for place in range(len(self.widths))]
        return tuple(slice(end - width, end) for end, width in zip(ends, self.widths))

    @property
    def width(self) -> int:
        """How many elements a row has."""
        return sum(self.widths)

    def num_held(self, index: int) -> int:
        """How many elements the rank at position `index` holds, without padding."""
        return sum(len(ranges[index]) for ranges in self.ranges)

    def __str__(self) -> str:
        return "\n".join(
            f"rank {index}   " + " | ".join(_row(ranges[index], len(ranges[0])) for ranges in self.ranges)
            for index in range(self.num_ranks)
        )


def _row(held: range, width: int) -> str:
    return " ".join([*map(str, held), *["."] * (width - len(held))])
