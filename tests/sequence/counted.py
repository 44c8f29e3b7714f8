"""References for tests of sequence parallelism: labels of a whole sequence, and the bytes that each rank holds."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from tplab.sequence import AttentionMask
from tplab.sharding import share

IGNORED = -100


def next_tokens(ids: np.ndarray, documents: Sequence[int] = (), ignored: int = IGNORED) -> np.ndarray:
    """ids [.., S], whole   ->   labels [.., S]: the id that follows each one.

    The last token of the sequence, and of each of the `documents` (their lengths), predicts nothing: `ignored`.
    """
    labels = np.full_like(ids, ignored)
    labels[..., :-1] = ids[..., 1:]
    place = AttentionMask(documents=tuple(documents)).in_document(np.arange(ids.shape[-1]), ids.shape[-1])
    labels[..., :-1][..., place[1:] == 0] = ignored
    return labels


def kept_bytes(
    num_tokens: int,
    num_ranks: int,
    num_heads: int,
    num_kv_heads: int,
    head_width: int,
    *,
    itemsize: int = 2,
    batch: int = 1,
) -> int:
    """The bytes that each rank keeps for the backward pass, in every scheme: q, k, v, o and lse, n (2h + 2g) d b bytes
    and one number of 4 bytes or more per query and head."""
    tokens = batch * share(num_tokens, num_ranks, "the number of tokens is")
    return tokens * (2 * (num_heads + num_kv_heads) * head_width * itemsize + num_heads * max(itemsize, 4))


def buffer_bytes(
    scheme: Literal["ring", "gather", "head"],
    num_tokens: int,
    num_ranks: int,
    num_heads: int,
    num_kv_heads: int,
    head_width: int,
    *,
    itemsize: int = 2,
    batch: int = 1,
) -> int:
    """The bytes of each rank's other buffers in the forward pass, without the results that it computes.

    ring     2 KV: one in use, and one arriving
    gather   p KV: those of all ranks
    head     q, k and v of its own tokens, until they have been exchanged and used
    """
    tokens = batch * share(num_tokens, num_ranks, "the number of tokens is")
    heads = {"ring": 4 * num_kv_heads, "gather": 2 * num_ranks * num_kv_heads, "head": num_heads + 2 * num_kv_heads}
    return tokens * heads[scheme] * head_width * itemsize
