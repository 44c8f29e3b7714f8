"""Gradients over ranks: buckets of those that are sent together, and what clipping by their global norm needs.

A backward pass begins at the loss, so the last layer's gradients are ready first. Gradients are therefore put into
buckets from the last parameter to the first, and a bucket can be sent as soon as its last gradient is ready:

    parameters   0 1 2 3 4 5          bytes 8 8 4 4 4 4, bucket_bytes=12
    buckets      [5 4 3] [2 1] [0]          12, 12 and 8 bytes
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from tplab.errors import SpecError
from tplab.mesh import Mesh
from tplab.sharding import P

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


EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


def check_norm_type(norm_type: Any) -> float:
    """The p of a p-norm: above 0, or infinity. Raises ValueError."""
    p = float(norm_type)
    if not p > 0:
        raise ValueError(
            f"norm_type is {norm_type!r}; it must be above 0: 2 for the Euclidean norm, inf for the maximum"
        )
    return p


def check_max_norm(max_norm: Any) -> float:
    """The largest norm that is allowed. Raises ValueError if it is negative or not a number."""
    most = float(max_norm)
    if not most >= 0:
        raise ValueError(f"max_norm is {max_norm!r}; it must be the largest norm that is left alone, 0 or more")
    return most


def spec_of(name: Any, specs: Mapping[Any, Any] | None, what: str) -> P:
    """How a parameter is sharded; replicated if there are no specs. Raises SpecError."""
    if specs is None:
        return P()
    spec = specs.get(name)
    if not isinstance(spec, P):
        raise SpecError(
            f"specs say nothing of {what}; give a P for every parameter that is trained, P() for one that every rank "
            "holds whole, or its pieces would be counted wrong"
        )
    return spec


def specs_in(specs: Any) -> list[Any]:
    """The values of {name: P}, if it is given. Raises SpecError if it is not a mapping."""
    if specs is None:
        return []
    if not isinstance(specs, Mapping):
        raise SpecError(
            f"specs is {specs!r}; give a P by the name of each parameter, {{'weight': P()}}; for Stages, by stage and "
            "name, {0: {'weight': P()}}"
        )
    return list(specs.values())


def cut_along(specs: Iterable[Any], mesh: Mesh, more: Iterable[str] = ()) -> tuple[str, ...]:
    """The axes along which ranks hold different elements, in the mesh's order. Raises SpecError, MeshError."""
    named = set(more)
    for spec in specs:
        if not isinstance(spec, P):
            raise SpecError(f"specs has {spec!r} where a P belongs; P() stands for all of it on every rank")
        named |= set(spec.axis_names)
    if named:
        mesh.names(tuple(named))  # are there such axes?
    return tuple(name for name in mesh.axis_names if name in named)


def root(total: Any, p: float) -> Any:
    """The norm from a sum of p-th powers. For p = infinity the total is a maximum, and is the norm itself."""
    return total if math.isinf(p) else total ** (1 / p)
