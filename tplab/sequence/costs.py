"""The cost of attention over a sequence that ranks share: bytes sent, and how many tokens per rank hide a hop.

S tokens over p ranks, n = S/p on each; h query heads and g key and value heads of width d; b bytes per number. `KV` is
n 2g d b: the keys and values of one rank.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

from tplab.errors import one_of
from tplab.sharding import share

Scheme = Literal["ring", "gather", "head", "head_ring"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)


class BytesSent(NamedTuple):
    """Bytes that each rank sends in each pass."""

    forward: int
    backward: int


def attention_bytes(
    scheme: Scheme | str,
    num_tokens: int,
    num_ranks: int,
    num_heads: int,
    num_kv_heads: int,
    head_width: int,
    *,
    head_ranks: int = 1,
    itemsize: int = 2,
    batch: int = 1,
) -> BytesSent:
    """The bytes that each of p ranks sends.

                 forward                              backward
    ring         (p-1) KV                             (p-1) KV, and p dKV: gradients travel home, in float32 at least
    gather       (p-1) KV                             (p-1) KV again, and (p-1) dKV
    head         (p-1)/p of q, k, v and o             the same of their gradients
    head_ring    head over `head_ranks` of the ranks, then ring over the others

    Raises ShapeError if ranks cannot share tokens or heads.
    """
    one_of("scheme", scheme, SCHEMES)
    exchanging = {"head": num_ranks, "head_ring": head_ranks}.get(scheme, 1)
    around = share(num_ranks, exchanging, "the number of ranks is", sharers="ranks that exchange heads")
    tokens = share(num_tokens, num_ranks, "the number of tokens is")
    for what, heads in (("num_heads is", num_heads), ("num_kv_heads is", num_kv_heads)):
        share(heads, exchanging, what, sharers="ranks that exchange heads")
    one_row = batch * tokens * head_width
    exchanged = (exchanging - 1) * one_row * 2 * (num_heads + num_kv_heads) * itemsize // exchanging
    keys = one_row * 2 * num_kv_heads  # exchanging heads leaves their number as it is: more tokens of fewer heads
    if scheme == "gather":
        sent = (num_ranks - 1) * keys * itemsize
        return BytesSent(sent, 2 * sent)
    sent = (around - 1) * keys * itemsize
    home = around * keys * max(itemsize, 4) if around > 1 else 0
    return BytesSent(exchanged + sent, exchanged + sent + home)


def tokens_to_hide_hop(
    flops: float,
    bandwidth: float,
    num_heads: int,
    num_kv_heads: int,
    *,
    computed: float = 0.5,
    backward: bool = False,
    itemsize: int = 2,
) -> int:
    """From how many tokens per rank a hop of a ring takes no longer than the tile that is computed meanwhile.

    flops       FLOP/s at which tiles are computed
    bandwidth   B/s at which a rank sends
    computed    the share of a tile of n x n scores that is computed: 1/2 for zigzag and striped, 1 with no mask

    forward    4 computed n^2 h d / flops >= n 2g d b / bandwidth
    backward   10 computed n^2 h d / flops >= n 2g d (b + max(b, 4)) / bandwidth: k and v, with dk and dv
    The width of a head cancels out. Latency is left out, and kernels reach the peak.
    """
    per_number = itemsize + max(itemsize, 4) if backward else itemsize
    passes = 10 if backward else 4
    return math.ceil(2 * num_kv_heads * per_number * flops / (passes * computed * num_heads * bandwidth))
