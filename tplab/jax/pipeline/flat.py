"""Arrays of many shapes, packed into flat ones. All ranks run one program, so their arrays must have the same shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tplab.jax.private import varying_axes_of
from tplab.jax.ranks.context import vary, varying_axes


class Kind(NamedTuple):
    """The elements that can share a flat array: of one dtype, and differing along the same axes by JAX's types."""

    dtype: str
    axes: tuple[str, ...]

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def zeros(self, *shape: int) -> Array:
        return vary(jnp.zeros(shape, self.dtype), self.axes)


Flat = dict[Kind, Array]
"""One flat array per kind."""
Sizes = Mapping[Kind, int]


class Slot(NamedTuple):
    """An array's shape, and where it begins in the flat array of its kind."""

    shape: tuple[int, ...]
    kind: Kind
    begin: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Packing(NamedTuple):
    """Where each of some arrays is: one after another, in the flat array of its kind."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, arrays: Iterable[tuple[tuple[int, ...], Kind]]) -> Packing:
        """The layout of arrays of these shapes and kinds."""
        sizes: dict[Kind, int] = {}
        slots = []
        for shape, kind in arrays:
            slot = Slot(shape, kind, sizes.get(kind, 0))
            sizes[kind] = slot.begin + slot.size
            slots.append(slot)
        return cls(tuple(slots))

    @property
    def sizes(self) -> dict[Kind, int]:
        """The number of elements of each kind."""
        sizes: dict[Kind, int] = {}
        for slot in self.slots:
            sizes[slot.kind] = sizes.get(slot.kind, 0) + slot.size
        return sizes

    def pack(self, arrays: Sequence[Array], sizes: Sizes) -> Flat:
        """The arrays, followed by zeros up to these sizes."""
        rows: dict[Kind, list[Array]] = {kind: [] for kind in sizes}
        for x, slot in zip(arrays, self.slots, strict=True):
            rows[slot.kind].append(vary(x, slot.kind.axes).reshape(-1))
        for kind, size in self.sizes.items():
            if size < sizes[kind]:
                rows[kind].append(kind.zeros(sizes[kind] - size))
        return {
            kind: row[0] if len(row) == 1 else jnp.concatenate(row) if row else kind.zeros(sizes[kind])
            for kind, row in rows.items()
        }

    def unpack(self, flat: Flat, begin: Mapping[Kind, Any] | None = None) -> list[Array]:
        """The reverse of `pack`. `begin` is where the arrays begin in the flat ones, if not at 0."""
        if begin is not None:
            flat = {kind: cut(flat[kind], begin[kind], size) for kind, size in self.sizes.items()}
        return [cut(flat[p.kind], p.begin, p.size).reshape(p.shape) for p in self.slots]


def cut(x: Array, begin: Any, size: int) -> Array:
    """`size` elements of a flat array."""
    if isinstance(begin, int):
        return x if (begin, size) == (0, x.shape[0]) else lax.slice(x, (begin,), (begin + size,))
    return lax.dynamic_slice(x, (begin,), (size,))


def add_at(x: Array, begin: Any, more: Array) -> Array:
    """A flat array with `more` added to the elements from `begin` on: in place, if it is the carry of a loop."""
    return lax.dynamic_update_slice(x, cut(x, begin, more.shape[0]) + more, (begin,))


def kind_of(x: Any, axes: Iterable[str] = ()) -> Kind:
    """The kind of an array or its type; `axes` are added to those along which it differs."""
    found = varying_axes(x) if isinstance(x, jax.Array) else varying_axes_of(x)
    return Kind(str(x.dtype), tuple(sorted({*found, *axes})))


def largest(layouts: Iterable[Packing]) -> dict[Kind, int]:
    """For each kind, the number of elements of the layout that has the most."""
    sizes: dict[Kind, int] = {}
    for layout in layouts:
        for kind, size in layout.sizes.items():
            sizes[kind] = max(size, sizes.get(kind, 0))
    return sizes
