"""Attention of some queries to some keys, and its derivatives from o and lse alone: one step of a rank.

The softmax over all keys is assembled from tiles. Each tile gives means of values, o, and the logarithm of a sum of
exponentials, lse, and two tiles merge as

    lse = log(e^lse1 + e^lse2)      o = e^(lse1 - lse) o1 + e^(lse2 - lse) o2

If a query sees no key of a tile, the tile's lse is -inf, and it changes nothing. The backward pass only needs the
merged o and lse. With s = scale q k^T, P = e^(s - lse), the shares of the whole softmax, and D = sum_d(do o):

    ds = P (do v^T - D)      dq = scale ds k      dk = scale ds^T q      dv = P^T do

Dao et al. 2022, "FlashAttention", appendix B. Everything is computed in float32 at least.

q, o [B, h, m, d]   k, v [B, g, t, d]   lse, D [B, h, m, 1]   seen [m, t], or None if all keys are seen. Each
of the g key heads serves h/g query heads next to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tplab.sequence import Tile

State = TypeVar("State")

BANDS = 4
"""A partly masked tile is computed in this many bands of rows, whose columns are whole blocks, each a quarter of the
tile. So of n x n scores under a causal mask, (1 + 1/4) n^2 / 2 are computed, not n^2 / 2."""


class Partial(NamedTuple):
    """The attention of queries to some of their keys: means of values o [B, h, m, d], and lse [B, h, m, 1]."""

    o: Array
    lse: Array


def attend(q: Array, k: Array, v: Array, seen: Array | None, scale: float) -> Partial:
    """The attention of these queries to these keys."""
    scores = _scores(q, k, seen, scale)
    highest = scores.max(-1, keepdims=True)
    highest = jnp.where(highest == -jnp.inf, 0, highest)  # -inf minus itself is NaN
    weights = jnp.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    o = jnp.einsum("bgrmt,bgtd->bgrmd", weights, v.astype(weights.dtype)) / jnp.where(total == 0, 1, total)
    return Partial(o.reshape(q.shape), _by_head(highest + jnp.log(total)))


def merged(one: Partial, other: Partial) -> Partial:
    """The attention to the keys of both. Each query must see a key of the first; it may see none of the other."""
    lse = jnp.logaddexp(one.lse, other.lse)
    return Partial(jnp.exp(one.lse - lse) * one.o + jnp.exp(other.lse - lse) * other.o, lse)


def attend_backward(
    q: Array, k: Array, v: Array, seen: Array | None, scale: float, lse: Array, do: Array, mean: Array
) -> tuple[Array, Array, Array]:
    """The contributions of this tile to dq, dk and dv. lse and mean = D are those of the whole softmax."""
    groups = k.shape[1]
    shares = jnp.exp(_scores(q, k, seen, scale) - _grouped(lse, groups))
    q, k, v, do = (x.astype(shares.dtype) for x in (_grouped(q, groups), k, v, _grouped(do, groups)))
    dv = jnp.einsum("bgrmt,bgrmd->bgtd", shares, do)
    slopes = shares * (jnp.einsum("bgrmd,bgtd->bgrmt", do, v) - _grouped(mean, groups)) * scale
    dq = jnp.einsum("bgrmt,bgtd->bgrmd", slopes, k)
    return _by_head(dq), jnp.einsum("bgrmt,bgrmd->bgtd", slopes, q), dv


def _scores(q: Array, k: Array, seen: Array | None, scale: float) -> Array:
    """[B, g, h/g, m, t]"""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    scores = scale * jnp.einsum("bgrmd,bgtd->bgrmt", _grouped(q, k.shape[1]), k, preferred_element_type=dtype)
    return scores if seen is None else jnp.where(seen, scores, -jnp.inf)


def _grouped(x: Array, groups: int) -> Array:
    """[B, h, ..] -> [B, g, h/g, ..]: grouped by key head."""
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def _by_head(x: Array) -> Array:
    """[B, g, h/g, ..] -> [B, h, ..]"""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


# --- of each rank its own tile ----------------------------------------------------------------------------------------


class Box(NamedTuple):
    """A range of this rank's queries and of its keys, and whether all scores in it are seen."""

    top: int
    bottom: int
    left: int
    right: int
    is_full: bool

    def rows(self, x: Array) -> Array:
        return lax.slice_in_dim(x, self.top, self.bottom, axis=-2)

    def columns(self, x: Array) -> Array:
        return lax.slice_in_dim(x, self.left, self.right, axis=-2)


class Band(NamedTuple):
    """A box, and in each of its rows, if it is not full, the columns that are seen: begins[i] to ends[i] - 1."""

    box: Box
    begins: np.ndarray = np.zeros(0)
    ends: np.ndarray = np.zeros(0)


def bands_of(tile: Tile, num_queries: int, num_keys: int, most_rows: int) -> list[Band]:
    """The tile cut into bands of at most `most_rows` rows. If it is partly masked, bands and their columns begin and
    end at the edges of blocks, so that ranks whose masks differ slightly take the same branch."""
    rows, columns = tile.queries, tile.keys
    if tile.kind == "full":
        tops = [*range(rows.start, rows.stop, most_rows), rows.stop]
        return [Band(Box(*edges, columns.start, columns.stop, True)) for edges in pairwise(tops)]
    tops = _edges(num_queries, max(BANDS, -(-num_queries // most_rows)))
    lefts = _edges(num_keys, BANDS)
    begins, ends = np.zeros((2, num_queries), int)
    begins[rows], ends[rows] = tile.begins + columns.start, tile.ends + columns.start
    found = []
    for top, bottom in pairwise(tops):
        first, last = begins[top:bottom], ends[top:bottom]
        if (first == last).all():
            continue
        left = max(edge for edge in lefts if edge <= first[first < last].min())
        right = min(edge for edge in lefts if edge >= last.max())
        is_full = bool((first <= left).all() and (last >= right).all())
        found.append(Band(Box(top, bottom, left, right, is_full), first - left, last - left))
    return found


def _edges(size: int, parts: int) -> list[int]:
    """The edges of `parts` parts of sizes as equal as possible, without empty parts."""
    return sorted({part * size // parts for part in range(parts + 1)})


def of_this_rank(
    tiles: Sequence[Tile],
    sizes: tuple[int, int, int],
    index: Any,
    add: Callable[[State, Box, Array | None], State],
    state: State,
) -> State:
    """Apply `add(state, box, seen)` to each band of the tile of the rank at `index`, which is known only at run time:
    all ranks run one program, and each takes the branch of its own boxes.

    sizes   the number of queries, the number of keys, and the most rows of a band
    """
    bands = [bands_of(tile, *sizes) for tile in tiles]
    boxes = [tuple(band.box for band in of_rank) for of_rank in bands]
    ways = sorted(set(boxes))

    def take(way: tuple[Box, ...], state: State) -> State:
        takes = [rank for rank, of_rank in enumerate(boxes) if of_rank == way]
        for number, box in enumerate(way):
            seen = None
            if not box.is_full:
                edges = np.zeros((len(tiles), 2, box.bottom - box.top, 1), np.int32)
                for rank in takes:
                    edges[rank, :, :, 0] = bands[rank][number][1:]
                begins, ends = jnp.asarray(edges)[index]
                columns = jnp.arange(box.right - box.left, dtype=jnp.int32)
                seen = (begins <= columns) & (columns < ends)
            state = add(state, box, seen)
        return state

    if len(ways) == 1:
        return take(ways[0], state)
    which = jnp.asarray([ways.index(way) for way in boxes])[index]
    return lax.switch(which, [partial(take, way) for way in ways], state)


def written_at(x: Array, part: Array, begin: int) -> Array:
    """x [.., m, d], with `part` in its rows from `begin` on."""
    return part if part.shape == x.shape else lax.dynamic_update_slice_in_dim(x, part, begin, x.ndim - 2)


def added_at(x: Array, part: Array, begin: int) -> Array:
    return written_at(x, lax.slice_in_dim(x, begin, begin + part.shape[-2], axis=-2) + part, begin)
