"""Attention over a sequence that ranks share (context parallelism): how a query sees the keys of other ranks.

    ring_attention        keys and values go around a ring, and each rank merges its queries' attention to them
    gather_attention      every rank gathers all keys and values, and computes the rows of its own queries
    head_attention        ranks exchange tokens for heads: each computes some heads of the whole sequence
    head_ring_attention   heads are exchanged along one axis, and keys and values go around a ring along another

The results are the same, and so are the gradients. p ranks, S tokens, n = S/p on each, in a layout of `tplab.sequence`:

    q [B, h, n, d]   k, v [B, g, n, d]   ->   o [B, h, n, d]; query head i is served by key head i // (h/g)

The mask is causal, or a window |i - j| < window, or both; `documents` are the lengths of documents that are packed into
the sequence, and a token sees only its own. A fully masked tile of scores is not computed: ranks with different tiles
take different branches of the one compiled program. Of a partly masked tile, four bands of rows are computed, each from
the first to the last quarter of the columns that it needs: for the triangle of n x n, 5/8 n^2 scores, while torch's
kernels compute n^2 / 2. At most n x S scores per head exist at a time, in `ring_attention` n x n.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from tplab.jax.comm.collectives import all_to_all, axis_index, axis_size
from tplab.jax.comm.derivatives import with_backward
from tplab.jax.layers.attention_by_tiles import About, attend_by_tiles
from tplab.mesh import Axis
from tplab.sequence import AttentionMask, LayoutName, TokenLayout, check_heads_to_share, check_rope
from tplab.sequence.call import Call, over_axis, over_two_axes

_over_axis, _over_two_axes = partial(over_axis, axis_size=axis_size), partial(over_two_axes, axis_size=axis_size)


@_over_axis
def ring_attention(call: Call, q: Array, k: Array, v: Array, axis: Axis) -> Any:
    """Attention in which keys and values go around the ring of `axis`, with a tile of scores computed during each hop.

    forward    p-1 hops of k and v, stacked
    backward   p-1 hops of k and v again, and p of dk and dv, in float32 at least: the last one returns them
    scale      of the scores, above 0; None: 1/sqrt(d)
    return_lse    return (o, lse [B, h, n]): the logarithm of each query's sum of exponentials, without a gradient
    Raises ShapeError if the shapes, the layout or the documents do not fit, NotImplementedError for dropout.
    Liu et al. 2023, "Ring attention with blockwise transformers".
    """
    return attend_by_tiles(About(axis, call.layout, call.mask, call.scale), q, k, v, call.return_lse)


@_over_axis
def gather_attention(call: Call, q: Array, k: Array, v: Array, axis: Axis) -> Any:
    """Attention in which every rank of `axis` gathers all keys and values.

    forward    one all_gather of k and v, stacked
    backward   the same again, so that they need not be kept; and one reduce_scatter of dk and dv, in their own dtype
    Other arguments, and errors, as for `ring_attention`. Llama 3 herd of models, 2024, section 3.3.2.
    """
    about = About(axis, call.layout, call.mask, call.scale, gathers=True)
    return attend_by_tiles(about, q, k, v, call.return_lse)


@_over_axis
def head_attention(call: Call, q: Array, k: Array, v: Array, axis: Axis) -> Any:
    """Attention in which each rank of `axis` computes h/p heads of the whole sequence.

    forward    an all_to_all of q, one of k and v, stacked, and one of o: (p-1)/p of each is sent
    backward   the same of their gradients
    Other arguments, and errors, as for `ring_attention`; also a ShapeError if p does not divide h and g.
    Jacobs et al. 2023, "DeepSpeed Ulysses".
    """
    return _exchanged(call, q, k, v, axis, None)


@_over_two_axes
def head_ring_attention(call: Call, q: Array, k: Array, v: Array, head_axis: Axis, ring_axis: Axis) -> Any:
    """Attention with heads exchanged along `head_axis`, and keys and values passed around the ring of `ring_axis`.

    The layout is over the p ranks of both: the rank at index i of the ring and j of the heads has place i p_head + j,
    as cut by P(None, None, (ring_axis, head_axis)).
    forward, backward    those of `head_attention` over p_head ranks, then those of `ring_attention` over p_ring
    Other arguments, and errors, as for both. Fang and Zhao 2024, "USP".
    """
    return _exchanged(call, q, k, v, head_axis, ring_axis)


# --- tokens for heads -------------------------------------------------------------------------------------------------


def _exchanged(call: Call, q: Array, k: Array, v: Array, axis: Axis, ring_axis: Axis | None) -> Any:
    """Attention with tokens exchanged for heads along `axis` before, and back again after."""
    num_ranks = axis_size(axis)
    check_heads_to_share(call.op, q.shape[1], k.shape[1], num_ranks, axis)
    about = About(ring_axis, call.layout, call.mask, call.scale, group=num_ranks)
    order = call.layout.exchanged(num_ranks)
    back = order.argsort()
    q = _ordered(all_to_all(q, axis, 1, 2), order)
    kv = _ordered(all_to_all(jnp.stack([k, v]), axis, 2, 3), order)
    o, lse = attend_by_tiles(about, q, kv[0], kv[1], True)
    o = all_to_all(_ordered(o, back), axis, 2, 1)
    return (o, all_to_all(_ordered(lse[..., None], back), axis, 2, 1)[..., 0]) if call.return_lse else o


def _ordered(x: Array, order: np.ndarray) -> Array:
    """x [.., m, d] with its tokens reordered. Its gradient is reordered back, without adding anything up."""
    return with_backward(_taken, _taken_back, [x], tuple(order.tolist()))[0]


def _taken(xs: list[Array], order: tuple[int, ...]) -> list[Array]:
    return [xs[0][..., np.array(order), :] if order != tuple(range(len(order))) else xs[0]]


def _taken_back(dys: list[Array], axes: Any, order: tuple[int, ...]) -> list[Array]:
    return [_ordered(dys[0], np.argsort(order))]


# --- positions --------------------------------------------------------------------------------------------------------


def token_positions(
    num_tokens: int, axis: Axis, *, layout: LayoutName = "contiguous", documents: Sequence[int] = ()
) -> Array:
    """The positions [n] of this rank's tokens in a whole sequence of `num_tokens`: ids[:, positions] are their ids.

    documents   lengths of packed documents: positions in the token's own document, as RoPE needs them
    """
    positions = TokenLayout(layout, num_tokens, axis_size(axis)).positions
    return jnp.asarray(AttentionMask(documents=documents).in_document(positions, num_tokens))[axis_index(axis)]


def rope(x: Array, positions: Any, *, base: float = 10000.0) -> Array:
    """Rotary position embedding (Su et al. 2021), with the two halves of a head paired, as in Llama.

    x [.., n, d], d even   positions [n]: those of this rank's tokens, as token_positions or TokenLayout gives them
    ->   [.., n, d]
    y_i = x_i cos a_i - x_(i + d/2) sin a_i      y_(i + d/2) = x_(i + d/2) cos a_i + x_i sin a_i      i < d/2
    a_i = position base^(-2i/d), in float32 at least
    """
    positions = jnp.asarray(positions)
    half = check_rope(x.shape, positions.shape)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    angles = positions.astype(dtype)[:, None] * base ** (jnp.arange(half, dtype=dtype) / -half)
    first, second = jnp.split(x.astype(dtype), 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
