"""Buckets: gradients that are sent together, in the order in which a backward pass computes them.

A backward pass begins at the loss, so the last layer's gradients are ready first. Gradients are therefore put into
buckets from the last parameter to the first, and a bucket can be sent as soon as its last gradient is ready:

    parameters   0 1 2 3 4 5          bytes 8 8 4 4 4 4, bucket_bytes=12
    buckets      [5 4 3] [2 1] [0]          12, 12 and 8 bytes
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

BUCKET_BYTES = 25 << 20
"""25 MiB, which is also the default of torch's DistributedDataParallel."""


class Gradient(NamedTuple):
    """A gradient before it is computed: its number of elements, the bytes of each, and its kind. Gradients of one kind,
    such as a dtype, can share a flat buffer."""

    size: int
    itemsize: int
    kind: Hashable

    @property
    def num_bytes(self) -> int:
        return self.size * self.itemsize


class Piece(NamedTuple):
    """A gradient's place in its bucket: its number, and the elements [begin, begin + size) of the flat buffer."""

    index: int
    begin: int
    size: int


class Bucket(NamedTuple):
    """Gradients of one kind, one after the other in a flat buffer."""

    kind: Any
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """How many elements the bucket has."""
        return sum(piece.size for piece in self.pieces)

    @property
    def indices(self) -> tuple[int, ...]:
        """The numbers of its gradients, in the order in which they become ready."""
        return tuple(piece.index for piece in self.pieces)


def buckets_of(gradients: Sequence[Gradient], bucket_bytes: float | None = None) -> tuple[Bucket, ...]:
    """Put gradients into buckets, from the last gradient to the first. Buckets are in the order in which they fill.

    gradients      in the order of the parameters, which is that of the forward pass
    bucket_bytes   the size limit of a bucket. A larger gradient gets its own bucket; None: every gradient does
    Raises ValueError for a negative number of bytes. Li et al. 2020, "PyTorch Distributed", section 3.2.
    """
    if bucket_bytes is not None and not (isinstance(bucket_bytes, int | float) and bucket_bytes >= 0):
        raise ValueError(
            f"bucket_bytes is {bucket_bytes!r}; it must be the most bytes that a bucket holds, such as 25e6, or None "
            "for a bucket per parameter"
        )
    limit = bucket_bytes or 0
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    for index in reversed(range(len(gradients))):
        kind, num_bytes = gradients[index].kind, gradients[index].num_bytes
        if kind in filling and filled[kind] + num_bytes > limit:
            closed.append(filling.pop(kind))
        filled[kind] = num_bytes + (filled[kind] if kind in filling else 0)
        filling.setdefault(kind, []).append(index)
        if bucket_bytes is None:
            closed.append(filling.pop(kind))
    closed += filling.values()
    return tuple(_bucket(gradients, members) for members in sorted(closed, key=lambda members: -members[-1]))


def _bucket(gradients: Sequence[Gradient], members: Sequence[int]) -> Bucket:
    sizes = [gradients[index].size for index in members]
    pieces = map(Piece, members, accumulate(sizes, initial=0), sizes)
    return Bucket(gradients[members[0]].kind, tuple(pieces))
