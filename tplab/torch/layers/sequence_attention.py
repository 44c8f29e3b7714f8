"""Attention over a sequence that the ranks of an axis share: each has n = S/p of its tokens (context parallelism).

Every query needs the keys and values of all tokens that it may see, some of them on other ranks. There are three ways:

    ring_attention     k and v travel around a ring; each rank adds up what its queries see, tile by tile
                       (Liu et al. 2023, "Ring attention with blockwise transformers")
    gather_attention   k and v are gathered (Llama 3, Dubey et al. 2024, section 3.3.2)
    head_attention     ranks exchange tokens for heads, and back (Jacobs et al. 2023, "DeepSpeed Ulysses")

and `head_ring_attention` combines the first and the last, on two axes. All compute the same; `tplab.sequence` says what
each sends and keeps, and which rank computes which tile; `attention_by_tiles` computes a rank's tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tplab.mesh import Axis
from tplab.sequence import AttentionMask, LayoutName, TokenLayout, check_heads_to_share, check_rope, tiles_of
from tplab.sequence.call import Call, over_axis, over_two_axes
from tplab.torch.comm.collectives import all_to_all, axis_index, axis_size
from tplab.torch.layers.attention_by_tiles import attend_by_tiles

_over_axis, _over_two_axes = partial(over_axis, axis_size=axis_size), partial(over_two_axes, axis_size=axis_size)


@_over_axis
def ring_attention(call: Call, q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Any:
    """softmax(scale q k^T) v over all tokens, where k and v travel around the ring of `axis` (p ranks).

    q [B, h, n, d]   k, v [B, g, n, d], of this rank's tokens   ->   o [B, h, n, d]; g divides h
    forward    p-1 hops of k and v, each beside the tile of scores of the k and v before it
    backward   p-1 hops of k and v again, and p of dk and dv, the last of which takes them home; in float32
               if k is narrower
    layout     which tokens a rank has: "contiguous", "zigzag", "striped", or a TokenLayout
    causal, window, documents   which keys a query sees, as in AttentionMask; tiles in which it sees none are skipped
    scale      above 0; 1/sqrt(d) if None
    dropout    only 0 is supported
    return_lse   (o, lse) instead of o: the log-sum-exp [B, h, n] of each query's scores, without a gradient
    Raises ShapeError where the shapes, the layout or the documents do not fit, ValueError for a scale of 0 or less,
    NotImplementedError for dropout.
    """
    tiles = tiles_of(call.layout, call.mask)[axis_index(axis)]
    return attend_by_tiles(q, k, v, axis, tiles, call.scale, call.return_lse)


@_over_axis
def gather_attention(call: Call, q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Any:
    """softmax(scale q k^T) v over all tokens, where each rank gathers k and v of all p ranks of `axis`.

    Shapes, arguments and errors are those of ring_attention.
    forward    all_gather of k and v, before anything is computed
    backward   all_gather of k and v once more, and reduce_scatter of dk and dv, in the dtype of k
    memory     k and v of all S tokens while one of the passes runs; between the passes only this rank's
    """
    tiles = tiles_of(call.layout, call.mask)[axis_index(axis)]
    return attend_by_tiles(q, k, v, axis, tiles, call.scale, call.return_lse, gathers=True)


@_over_axis
def head_attention(call: Call, q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Any:
    """softmax(scale q k^T) v over all tokens, where each of the p ranks of `axis` computes h/p of the heads.

    Shapes and arguments are those of ring_attention; p divides h and g.
    forward    all_to_all of q, k and v: from n tokens of all heads to all tokens of 1/p of the heads; and of o, back
    backward   the same of their gradients
    Raises ShapeError also where the ranks cannot share the heads.
    """
    return _by_heads(call, q, k, v, axis, None)


@_over_two_axes
def head_ring_attention(call: Call, q: Tensor, k: Tensor, v: Tensor, head_axis: Axis, ring_axis: Axis) -> Any:
    """softmax(scale q k^T) v over all tokens: head_attention along one axis, and ring_attention along another.

    Shapes and arguments are those of ring_attention; the ranks of `head_axis` share h and g. The tokens are laid out
    over both axes, P((ring_axis, head_axis)): those that exchange heads are neighbours in the layout, as they should be
    in the network (Fang and Zhao 2024, "USP").
    forward    all_to_all of q, k and v along `head_axis`, a ring of the exchanged k and v along `ring_axis`, all_to_all
               of o
    backward   the same of their gradients
    """
    return _by_heads(call, q, k, v, head_axis, ring_axis)


# --- tokens for heads -------------------------------------------------------------------------------------------------


def _by_heads(call: Call, q: Tensor, k: Tensor, v: Tensor, axis: Axis, ring_axis: Axis | None) -> Any:
    num_ranks, index = axis_size(axis), 0 if ring_axis is None else axis_index(ring_axis)
    check_heads_to_share(call.op, q.shape[1], k.shape[1], num_ranks, axis)
    sequence = call.layout.exchanged(num_ranks)
    order, order_back = _places(sequence, q), _places(sequence.argsort(), q)
    tiles = tiles_of(call.layout, call.mask, num_ranks)[index]

    def exchange(x: Tensor) -> Tensor:
        """[.., heads, n, d] -> [.., heads / p, p n, d], in the order of the sequence"""
        return _ordered(all_to_all(x, axis, -3, -2), order)

    def back(x: Tensor) -> Tensor:
        return all_to_all(_ordered(x, order_back), axis, -2, -3)

    k, v = exchange(torch.stack([k, v]))
    o, lse = attend_by_tiles(exchange(q), k, v, ring_axis or axis, tiles, call.scale, return_lse=True)
    return (back(o), back(lse[..., None])[..., 0]) if call.return_lse else back(o)


def _places(order: np.ndarray, like: Tensor) -> Tensor | None:
    """An order of tokens, as a tensor; None if it changes nothing."""
    return None if (order == np.arange(len(order))).all() else torch.tensor(order, device=like.device)


def _ordered(x: Tensor, order: Tensor | None) -> Tensor:
    """x [.., S, d] with its tokens in another order."""
    return x if order is None else x.index_select(-2, order)


# --- positions --------------------------------------------------------------------------------------------------------


def token_positions(
    num_tokens: int, axis: Axis, *, layout: LayoutName = "contiguous", documents: Sequence[int] = ()
) -> Tensor:
    """The positions [n] of this rank's tokens in a whole sequence of `num_tokens`: ids[:, positions] are their ids.

    documents   lengths of packed documents: positions in the token's own document, as RoPE needs them
    """
    positions = TokenLayout(layout, num_tokens, axis_size(axis)).positions[axis_index(axis)]
    return torch.tensor(AttentionMask(documents=documents).in_document(positions, num_tokens))


def rope(x: Tensor, positions: Any, *, base: float = 10000.0) -> Tensor:
    """Rotary position embedding (Su et al. 2021), with the two halves of a head paired, as in Llama.

    x [.., n, d], d even   positions [n]: of this rank's tokens, from token_positions or TokenLayout
    ->   [.., n, d]
    y_i = x_i cos a_i - x_(i + d/2) sin a_i      y_(i + d/2) = x_(i + d/2) cos a_i + x_i sin a_i      i < d/2
    a_i = position base^(-2i/d)
    """
    positions = torch.as_tensor(positions)
    half = check_rope(x.shape, positions.shape)
    dtype = torch.promote_types(x.dtype, torch.float32)
    angles = positions.to(x.device, dtype)[:, None] * base ** (torch.arange(half, dtype=dtype, device=x.device) / -half)
    first, second = x.to(dtype).split(half, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
