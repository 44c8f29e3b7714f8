"""How long fused attention takes: what it computes, and what each generation of its kernels reaches.

q queries and k keys of `batch` sequences and `heads` heads with d features:

    pairs     q k; with a causal mask those it keeps: q (q+1) / 2 if there are as many keys as queries
    FLOPs     4 d batch heads pairs; backward 2.5 times as many, because the scores are recomputed
    seconds   start + 4 d (batch heads (pairs + extra q) + multiprocessors min(tile, q) k / 2) / (share x peak)

Each query costs as much as `extra` more keys, for its softmax and for wasted scores above the diagonal. A
multiprocessor computes `tile` queries at a time; the wait for the last one is half of the longest tile.

`benchmarks.fit.chips` fits the constants. Sources. Dao 2023 (arXiv:2307.08691), Shah et al. 2024 (arXiv:2407.08608).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

AGAIN = 2.5
"""FLOPs of the backward pass per FLOP of the forward pass: five matmuls instead of two."""


@dataclass(frozen=True, slots=True)
class Attention:
    """The kernels of one generation on one kind of GPU.

    name       "flash2", of 2023; "flash3": FlashAttention 3 on an H100, and its successors on later GPUs
    share      of the peak that long sequences reach forward, with heads of 128 features
    narrow     the same with heads of 64, as a share of `share`
    backward   the same backward, as a share of the forward rate
    extra      cost of a query in keys, besides its own keys
    tile       queries that a multiprocessor computes at a time
    start      s that an empty kernel takes
    """

    name: str
    share: float
    narrow: float
    backward: float
    extra: float
    tile: int
    start: float

    def seconds(
        self, batch: Any, heads: Any, q: Any, k: Any, width: int, peak: float, multiprocessors: int,
        *, causal: bool, backward: bool,
    ) -> Any:  # fmt: skip
        """One kernel on a chip with this peak in FLOP/s; with arrays, an array of seconds."""
        last = multiprocessors * np.minimum(self.tile, q) * k / 2
        work = 4 * width * (batch * heads * (attention_pairs(q, k, causal) + self.extra * q) + last)
        wide = min(1.0, max(0.0, width / 64 - 1))  # 0 for heads of 64 and less, 1 from 128 on
        reached = self.share * (self.narrow * min(1.0, width / 64) * (1 - wide) + wide)
        return self.start + work / (peak * reached) * (AGAIN / self.backward if backward else 1)


class FusedAttention(NamedTuple):
    """Attention that one kernel computes: q [batch, heads, q_len, head_dim] and k [..., k_len, head_dim], one pass."""

    batch: int
    heads: int
    q_len: int
    k_len: int
    head_dim: int
    causal: bool
    backward: bool

    @property
    def flops(self) -> int:
        return int(attention_flops(*self))


def attention_pairs(q: Any, k: Any, causal: bool) -> Any:
    """How many of the q x k pairs of a query and a key are computed. With a causal mask, query i sees keys 0..i, as in
    torch."""
    square = np.minimum(q, k)
    return square * (square + 1) / 2 + (q - square) * k if causal else q * k


def attention_flops(batch: Any, heads: Any, q: Any, k: Any, width: int, causal: bool, backward: bool) -> Any:
    """FLOPs of one pass: scores and values take 2 d each for every pair."""
    return 4 * width * batch * heads * attention_pairs(q, k, causal) * (AGAIN if backward else 1)


def attention_numbers(batch: Any, heads: Any, q: Any, k: Any, width: int, kv_heads: Any, backward: bool) -> Any:
    """Numbers read and written, each tensor once: q, k, v and o; backward also the gradients of all four."""
    return 2 * (1 + backward) * batch * width * (q * heads + k * kv_heads)
