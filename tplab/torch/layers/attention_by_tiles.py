"""Attention of a rank's queries to the keys of all ranks, tile after tile, and its derivatives.

Tiles are merged by their log-sum-exps; only q, k, v, o and lse are kept. On a ring, the next keys and values travel
while a tile is computed, and so do the gradients of the last ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tplab.errors import ShapeError
from tplab.mesh import Axis
from tplab.sequence import Tile
from tplab.torch.comm.collectives import all_gather, reduce_scatter, ring_shift, start
from tplab.torch.layers.attention_tile import attend, attend_backward


def attend_by_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    tiles: Sequence[Tile],
    scale: float,
    return_lse: bool,
    gathers: bool = False,
) -> Any:
    """o [B, h, n, d] of a rank's queries and the keys of all ranks of `axis`; (o, lse) with return_lse.

    tiles     this rank's, the first of them with its own keys
    gathers   k and v are gathered, instead of passed on
    """
    o, lse = _Attention.apply(q, k, v, axis, tiles, scale, gathers and len(tiles) > 1)  # type: ignore
    return (o, lse) if return_lse else o


class _Attention(torch.autograd.Function):
    """A rank's tiles, one after the other. The first has the rank's own keys, so each query sees a key in it: itself.
    So lse is finite from then on, and a row of a later tile that sees no key (o 0, lse -inf) changes nothing.

    axis      along which k and v travel; if there is one tile, nothing is sent
    gathers   k and v are gathered, instead of passed on
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, tiles: Sequence[Tile], scale: float, gathers: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.about = axis, tiles, scale, gathers
        o, lse = q, q  # nothing yet: the first tile makes them
        for step, (tile, keys, values) in enumerate(_arriving(k, v, axis, tiles, gathers)):
            if step == 0:
                o, lse = attend(q, keys, values, tile, scale)
                o = o.to(lse.dtype)
            elif tile.entries:
                _merge(o[:, :, tile.queries], lse[:, :, tile.queries], *attend(q, keys, values, tile, scale))
            del keys, values  # so that at most two of them exist
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, _: Tensor) -> Any:
        (q, k, v, o, lse), (axis, tiles, scale, gathers) = ctx.saved_tensors, ctx.about
        dq = torch.zeros_like(q, dtype=lse.dtype)
        size, home = k.shape[2], None
        num_tokens, dtype = (size * len(tiles), k.dtype) if gathers else (size, lse.dtype)
        dkv = torch.zeros(2, *k.shape[:2], num_tokens, k.shape[3], dtype=dtype, device=k.device)
        for tile, keys, values in _arriving(k, v, axis, tiles, gathers):
            found = attend_backward(do, q, keys, values, o, lse, tile, scale) if tile.entries else None
            del keys, values
            if home is not None:  # the sum of the ranks before this one
                dkv = home.wait()
            if found is not None:
                here = _piece(dkv, tile.source, size) if gathers else dkv
                dq[:, :, tile.queries] += found[0]
                here[0][:, :, tile.keys] += found[1]
                here[1][:, :, tile.keys] += found[2]
            home = start(ring_shift, dkv, axis) if len(tiles) > 1 and not gathers else None
        if gathers:
            dkv = reduce_scatter(dkv, axis, -2)
        dk, dv = dkv if home is None else home.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _arriving(
    k: Tensor, v: Tensor, axis: Axis, tiles: Sequence[Tile], gathers: bool
) -> Iterator[tuple[Tile, Tensor, Tensor]]:
    """Each tile, with its keys and values; on a ring, those of the next tile travel while this one is computed."""
    size = k.shape[-2]
    if gathers:
        every = all_gather(torch.stack([k, v]), axis, -2)
        _check_equal_shares(every, size * len(tiles), axis)
        for tile in tiles:
            keys, values = _piece(every, tile.source, size)
            yield tile, keys, values
        return
    kv: Any = torch.stack([k, v]) if len(tiles) > 1 else (k, v)
    for step, tile in enumerate(tiles):
        hop = start(ring_shift, kv, axis) if step + 1 < len(tiles) else None
        keys, values = kv
        yield tile, keys, values
        del keys, values
        if hop is not None:
            kv, hop = hop.wait(), None
            _check_equal_shares(kv, size, axis)


def _check_equal_shares(arrived: Tensor, expected: int, axis: Axis) -> None:
    if arrived.shape[-2] != expected:
        raise ShapeError(
            f"attention over axis {axis!r}: the keys of {arrived.shape[-2]} tokens arrived instead of {expected}; "
            "every rank needs the same number of tokens: pad the sequence"
        )


def _piece(whole: Tensor, index: int, size: int) -> Tensor:
    """The tokens of the rank at `index`, out of the tokens of all ranks in order."""
    return whole.narrow(-2, index * size, size)


def _merge(o: Tensor, lse: Tensor, other_o: Tensor, other_lse: Tensor) -> None:
    """Extend (o, lse) to the other's keys, in place: lse' = log(e^lse + e^other_lse), and o' is the mean of both
    weighted by e^(each lse - lse'), which is o + sigmoid(other_lse - lse) (other_o - o)."""
    o.lerp_(other_o.to(o.dtype), torch.sigmoid(other_lse - lse)[..., None])
    torch.logaddexp(lse, other_lse, out=lse)
