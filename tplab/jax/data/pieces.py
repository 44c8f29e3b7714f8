"""Parameters in pieces: from whole arrays to the rows that are sent, and back. See `tplab.data.pieces` for the layout.

In a compiled program all ranks have the same shapes, so here a piece keeps its padding: [width] on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from tplab.data.pieces import Pieces
from tplab.jax.comm.collectives import Handle, all_gather, all_reduce, axis_index, axis_size, reduce_scatter, start
from tplab.jax.comm.regions import gather_from
from tplab.mesh import Axis

Gather = Callable[[Array, Axis], Handle]
"""(this rank's row [width], axis) -> a handle, whose wait() gives the message [R * width] of all ranks' rows."""

Reduce = Callable[[Array, Axis, str], Handle]
"""(a message [R * width], axis, "sum" or "mean") -> a handle, whose wait() gives this rank's row [width] of the sum."""


def gather_rows(row: Array, axis: Axis) -> Handle:
    """An all_gather: each rank sends (R-1) rows. By JAX's types, the result differs between ranks."""
    return start(all_gather, row, axis)


def gather_copies(row: Array, axis: Axis) -> Handle:
    """The same, but by JAX's types too, the result is the same on every rank."""
    return Handle(gather_from(row, axis, 0))


def reduce_rows(message: Array, axis: Axis, op: str) -> Handle:
    """A reduce_scatter: each rank sends (R-1) rows."""
    return start(reduce_scatter, message, axis, 0, op)


def reduced_row(handle: Handle, replicate_axis: Axis | None, op: str) -> Array:
    """The row that a `Reduce` returns, combined with those of other nodes if these hold copies."""
    row = handle.wait()
    return row if replicate_axis is None else all_reduce(row, replicate_axis, op)


def pieces_of(arrays: Sequence[Any], axis: Axis) -> Pieces:
    """How the ranks of `axis` share these arrays."""
    return Pieces(tuple(tuple(array.shape) for array in arrays), axis_size(axis))


def held_of(pieces: Pieces, wholes: Sequence[Array], axis: Axis) -> list[Array]:
    """This rank's piece [width] of each whole array, padded with zeros."""
    row = message_of(pieces, wholes).reshape(pieces.num_ranks, pieces.width)[axis_index(axis)]
    return held_in(pieces, row)


def row_of(held: Sequence[Array], dtype: Any) -> Array:
    """This rank's row [width]: its pieces, concatenated."""
    return _joined([piece.astype(dtype) for piece in held])


def held_in(pieces: Pieces, row: Array) -> list[Array]:
    """The pieces [n] in a row."""
    return [row[column] for column in pieces.columns]


def message_of(pieces: Pieces, wholes: Sequence[Array], dtype: Any = None) -> Array:
    """All ranks' rows [R * width] of whole arrays."""
    rows = []
    for whole, size, width in zip(wholes, pieces.sizes, pieces.widths):
        flat = whole.reshape(-1).astype(dtype or whole.dtype)
        rows.append(jnp.pad(flat, (0, pieces.num_ranks * width - size)).reshape(pieces.num_ranks, width))
    return _joined(rows, 1).reshape(-1)


def wholes_in(pieces: Pieces, message: Array) -> list[Array]:
    """The whole arrays in a message [R * width] of all rows, in their shapes, without padding."""
    rows = message.reshape(pieces.num_ranks, pieces.width)
    return [
        lax.slice_in_dim(rows[:, column].reshape(-1), 0, size).reshape(shape)
        for column, size, shape in zip(pieces.columns, pieces.sizes, pieces.shapes)
    ]


def _joined(arrays: Sequence[Array], dim: int = 0) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, dim)
