"""Which elements of which parameter each rank holds, where ranks share parameters (ZeRO), and how they travel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tplab.sharding import cut


@dataclass(frozen=True)
class Pieces:
    """Some parameters, each cut into one piece per rank. R ranks.

    Every parameter is read as a row of numbers, and `cut(size, R, "ceil")` says who holds which: 10 numbers over 4
    ranks are 3 3 3 1, and 3 numbers over 4 ranks 1 1 1 0. So a rank holds some of every parameter, of any shape.

    Together they travel in one message, [R, width]: row r has rank r's piece of each parameter, one behind another, and
    each piece is padded to the longest. An all_gather of the rows, or a reduce_scatter to them, sends
    (R-1) * width elements from each rank.

        Pieces(((2, 5), (3,)), 4)       a weight of 10 numbers, a bias of 3

        rank 0   0 1 2 | 0          the numbers are places in the parameter
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
        """Of each parameter, the elements that each rank holds."""
        return tuple(cut(size, self.num_ranks, "ceil") for size in self.sizes)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The elements of each parameter in one row of the message: those of rank 0, which has most."""
        return tuple(len(ranges[0]) for ranges in self.ranges)

    @cached_property
    def columns(self) -> tuple[slice, ...]:
        """Where each parameter is in a row."""
        ends = [sum(self.widths[: place + 1]) for place in range(len(self.widths))]
        return tuple(slice(end - width, end) for end, width in zip(ends, self.widths))

    @property
    def width(self) -> int:
        """Elements in a row."""
        return sum(self.widths)

    def num_held(self, index: int) -> int:
        """Elements that the rank at position `index` holds, without padding."""
        return sum(len(ranges[index]) for ranges in self.ranges)

    def __str__(self) -> str:
        return "\n".join(
            f"rank {index}   " + " | ".join(_row(ranges[index], len(ranges[0])) for ranges in self.ranges)
            for index in range(self.num_ranks)
        )


def _row(held: range, width: int) -> str:
    return " ".join([*map(str, held), *["."] * (width - len(held))])
