"""The order in which a ring moves pieces: what each rank gets, or sends, hop by hop, in each direction.

Framework-free: the rings of both frameworks read it, in JAX with an index that is known only when the program runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

DIRECTIONS = ("up", "down", "both", "split")


class Piece(NamedTuple):
    """A piece, or half of one, that a rank gets or sends.

    distance   its place: that many ranks lie between the rank and the owner, counted the way of the ring; 0: its own
    owner      the index of the rank whose piece it is, or for which it is
    begin      the first element of the half, from the start of the piece; `size` of them
    """

    distance: int
    owner: Any
    begin: int
    size: int


class Lanes(NamedTuple):
    """A rank's pieces: those that travel up, those that travel down, each in the order of their hops, and its own."""

    up: list[Piece]
    down: list[Piece]
    own: Piece


def gather_lanes(index: Any, num_ranks: int, size: int, direction: str) -> Lanes:
    """The pieces of `size` elements that the rank at `index` gets from the others, in the order in which they come.

    "up"      from index - 1, index - 2, ...
    "down"    from index + 1, index + 2, ...
    "both"    ceil((R-1)/2) as "up", floor((R-1)/2) as "down"; distances are counted as for "up"
    "split"   first halves (the larger ones, where `size` is odd) as "up", second halves as "down"
    """
    others = range(1, num_ranks)
    half = size - size // 2
    own = Piece(0, index, 0, size)
    if direction == "split":
        first = [Piece(distance, (index - distance) % num_ranks, 0, half) for distance in others]
        second = [Piece(distance, (index + distance) % num_ranks, half, size - half) for distance in others]
        return Lanes(first, second, own)
    if direction == "down":
        return Lanes([], [Piece(distance, (index + distance) % num_ranks, 0, size) for distance in others], own)
    rising = [Piece(distance, (index - distance) % num_ranks, 0, size) for distance in others]
    hops_up = num_ranks - 1 if direction == "up" else num_ranks // 2
    return Lanes(rising[:hops_up], rising[hops_up:][::-1], own)


def scatter_lanes(index: Any, num_ranks: int, size: int, direction: str) -> Lanes:
    """The parts of `size` elements that the rank at `index` adds to the sums of the others, in the order of hops.

    The same pieces as those of gather_lanes. A sum travels towards its owner, so that what is nearest to it comes last:
    "both" sends up what is far that way, and down what is near on the other side.
    """
    up, down, own = gather_lanes(index, num_ranks, size, direction)
    if direction == "both":
        ordered = [*up, *reversed(down)]
        nearest = num_ranks - 1 - num_ranks // 2
        return Lanes(ordered[nearest:], ordered[:nearest][::-1], own)
    return Lanes(up, down, own)
