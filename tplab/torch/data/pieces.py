"""Parameters in pieces: from whole tensors to rows that travel, and back. `tplab.data.pieces` has the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tplab.data.pieces import Pieces
from tplab.mesh import Axis
from tplab.torch.comm.collectives import Handle, all_gather, all_reduce, reduce_scatter, start
from tplab.torch.ranks.outcomes import lend
from tplab.torch.ranks.rank import this_rank

Gather = Callable[[Tensor, Axis], Handle]
"""(this rank's row [width], axis) -> a handle, whose wait() returns the message [R * width] of all ranks' rows."""

Reduce = Callable[[Tensor, Axis, str], Handle]
"""(a message [R * width], axis, "sum" or "mean") -> a handle, whose wait() returns this rank's row of the sum."""


def gather_rows(row: Tensor, axis: Axis) -> Handle:
    """Start an all_gather: each rank sends (R-1) rows."""
    return start(all_gather, row, axis)


def reduce_rows(message: Tensor, axis: Axis, op: str) -> Handle:
    """Start a reduce_scatter: each rank sends (R-1) rows."""
    return start(reduce_scatter, message, axis, 0, op)


def reduced_row(handle: Handle, replicate_axis: Axis | None, op: str) -> Tensor:
    """The row of a started `Reduce`; if other nodes hold copies, combined with theirs."""
    row = handle.wait()
    return row if replicate_axis is None else all_reduce(row, replicate_axis, op)


def pieces_of(parameters: Sequence[Tensor], axis: Axis) -> tuple[Pieces, int]:
    """How the ranks of `axis` share these parameters, and this rank's position among them."""
    place = this_rank().place(axis)
    return Pieces(tuple(tuple(p.shape) for p in parameters), len(place.group)), place.index


def held_of(pieces: Pieces, index: int, wholes: Sequence[Tensor]) -> list[Tensor]:
    """The piece [n] of each whole tensor that the rank at position `index` holds: views, if memory is contiguous."""
    flats = [whole.detach().reshape(-1) for whole in wholes]
    return [x[held.start : held.stop] for x, held in zip(flats, (ranges[index] for ranges in pieces.ranges))]


def row_of(pieces: Pieces, held: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """This rank's row [width]: its pieces, each padded with zeros, concatenated."""
    row = torch.empty(pieces.width, dtype=dtype, device=held[0].device)
    torch.cat([_padded(piece.detach(), width) for piece, width in zip(held, pieces.widths)], out=row)
    return lend(row)


def held_in(pieces: Pieces, index: int, row: Tensor) -> list[Tensor]:
    """The pieces [n] in the row of the rank at position `index`, without padding: views."""
    return [row[column][: len(ranges[index])] for column, ranges in zip(pieces.columns, pieces.ranges)]


def message_of(pieces: Pieces, wholes: Sequence[Tensor | None], like: Tensor, dtype: torch.dtype) -> Tensor:
    """All ranks' rows [R * width] of whole tensors; None counts as zeros."""
    num_ranks = pieces.num_ranks
    message = torch.empty(num_ranks, pieces.width, dtype=dtype, device=like.device)
    rows = [
        message.new_zeros(num_ranks, width)
        if whole is None
        else _padded(whole.detach().reshape(-1), num_ranks * width).view(num_ranks, width)
        for whole, width in zip(wholes, pieces.widths)
    ]
    torch.cat(rows, 1, out=message)
    return lend(message.view(-1))


def wholes_in(pieces: Pieces, message: Tensor) -> list[Tensor]:
    """The whole tensors in a message [R * width] of all rows, in their shapes, without padding."""
    rows = message.view(pieces.num_ranks, pieces.width)
    return [
        rows[:, column].reshape(-1)[:size].view(shape)
        for column, size, shape in zip(pieces.columns, pieces.sizes, pieces.shapes)
    ]


def _padded(x: Tensor, size: int) -> Tensor:
    """x [n], padded with zeros to this size."""
    return x if x.numel() == size else torch.cat([x, x.new_zeros(size - x.numel())])
