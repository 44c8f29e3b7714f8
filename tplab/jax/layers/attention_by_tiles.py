"""Attention of a rank's queries to the keys of all ranks, tile by tile, and its derivatives.

Two tiles are merged by their log-sum-exps; only q, k, v, o and lse are kept. JAX overlaps a hop with a tile, since they
are independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tplab.jax.comm.collectives import all_gather, axis_index, reduce_scatter, ring_shift
from tplab.jax.layers.attention_tile import (
    Box,
    Partial,
    added_at,
    attend,
    attend_backward,
    merged,
    of_this_rank,
    written_at,
)
from tplab.jax.ranks.context import this_mesh, vary, varying_axes
from tplab.mesh import Axis
from tplab.sequence import AttentionMask, Tile, TokenLayout, tiles_of


class About(NamedTuple):
    """The computation, as far as it is known during tracing.

    axis      the ring of the keys; None: this rank has all of them
    gathers   whether all keys are gathered, instead of passed around
    group     how many ranks have exchanged heads
    """

    axis: Axis | None
    layout: TokenLayout
    mask: AttentionMask
    scale: float
    gathers: bool = False
    group: int = 1

    @property
    def index(self) -> Any:
        return 0 if self.axis is None else axis_index(self.axis)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(queries of a tile, keys of a tile, the most rows of its scores that exist at a time: n)."""
        each = self.layout.num_tokens // self.layout.num_ranks
        return each * self.group, each * self.group, each

    def steps(self, k: Array, v: Array) -> Iterator[tuple[int, tuple[Tile, ...], Array]]:
        """For each step its number, the tile of each rank of the ring, and the keys and values [2, B, g, n, d] of the
        rank at this distance. While they are used, the next ones are being sent."""
        kv, size = jnp.stack([k, v]), k.shape[-2]
        steps = list(enumerate(zip(*tiles_of(self.layout, self.mask, self.group), strict=True)))
        if self.axis is not None and self.gathers:
            every = all_gather(kv, self.axis, -2)
            for step, tiles in steps:
                begin = (self.index - step) % len(steps) * size
                yield step, tiles, lax.dynamic_slice_in_dim(every, begin, size, every.ndim - 2)
            return
        for step, tiles in steps:
            coming = ring_shift(kv, self.axis) if self.axis is not None and step < len(steps) - 1 else kv
            yield step, tiles, kv
            kv = coming

    def in_order_of_ranks(self, parts: list[Array]) -> Array:
        """One part for the rank at each distance   ->   all parts along the tokens, rank 0's first."""
        places = (self.index - np.arange(len(parts))) % len(parts)
        joined = jnp.moveaxis(jnp.stack(parts)[places], 0, -3)
        return joined.reshape(*joined.shape[:-3], -1, joined.shape[-1])


def attend_by_tiles(about: About, q: Array, k: Array, v: Array, return_lse: bool) -> Any:
    """o [B, h, n, d] of a rank's queries and the keys of all ranks; with return_lse, also the lse."""
    names = () if about.axis is None else this_mesh().names(about.axis)
    names = tuple(sorted({*names, *(name for x in (q, k, v) for name in varying_axes(x))}))
    attended: Any = _attention(about, *(vary(x, names) for x in (q, k, v)))
    o, lse = attended
    return (o, lax.stop_gradient(lse)) if return_lse else o


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(about: About, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """o [B, h, m, d] and lse [B, h, m] of this rank's queries and the keys of all ranks of the ring."""
    return _forward(about, q, k, v)[0]


def _forward(about: About, q: Array, k: Array, v: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    dtype, names = jnp.promote_types(q.dtype, jnp.float32), tuple(varying_axes(q))
    total = Partial(*(vary(jnp.zeros(shape, dtype), names) for shape in (q.shape, (*q.shape[:3], 1))))
    for step, tiles, (keys, values) in about.steps(k, v):

        def add(
            total: Partial, box: Box, seen: Array | None, step: int = step, k: Array = keys, v: Array = values
        ) -> Partial:
            part = attend(box.rows(q), box.columns(k), box.columns(v), seen, about.scale)
            if step:  # at step 0 every query sees at least itself, and there is nothing to merge with
                part = merged(Partial(*map(box.rows, total)), part)
            return Partial(*(written_at(x, rows, box.top) for x, rows in zip(total, part, strict=True)))

        total = of_this_rank(tiles, about.sizes, about.index, add, total)
    o, lse = total
    o = o.astype(q.dtype)
    return (o, lse[..., 0]), (q, k, v, o, lse)


def _backward(about: About, kept: tuple[Array, ...], gradients: tuple[Array, Array]) -> tuple[Array, ...]:
    q, k, v, o, lse = kept
    names, do = tuple(varying_axes(q)), gradients[0].astype(lse.dtype)
    mean = (do * o).sum(-1, keepdims=True)
    dq, nothing = (vary(jnp.zeros(x.shape, lse.dtype), names) for x in (q, k))
    total, parts = None, []
    for _, tiles, (keys, values) in about.steps(k, v):

        def add(total: Any, box: Box, seen: Array | None, k: Array = keys, v: Array = values) -> Any:
            of_rows = [box.rows(x) for x in (lse, do, mean)]
            parts = attend_backward(box.rows(q), box.columns(k), box.columns(v), seen, about.scale, *of_rows)
            return tuple(
                added_at(x, part, begin) for x, part, begin in zip(total, parts, (box.top, box.left, box.left))
            )

        dq, dk, dv = of_this_rank(tiles, about.sizes, about.index, add, (dq, nothing, nothing))
        part = jnp.stack([dk, dv])
        if about.axis is None or about.gathers:
            parts.append(part.astype(k.dtype))
        else:
            total = part if total is None else ring_shift(total, about.axis) + part
    if about.axis is None:
        (total,) = parts
    elif about.gathers:
        total = reduce_scatter(about.in_order_of_ranks(parts), about.axis, -2)
    else:
        total = ring_shift(total, about.axis)  # back to their owner
    dk, dv = total.astype(k.dtype)
    return dq.astype(q.dtype), dk, dv


_attention.defvjp(_forward, _backward)
