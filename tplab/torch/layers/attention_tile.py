"""Attention of some queries to some keys, and its derivatives from o and lse alone: one step of a rank.

    S = scale q k^T          lse = log sum_j e^S_ij          P = e^(S - lse)          o = P v
    D = sum_d do * o         dv = P^T do       dS = P (do v^T - D)       dq = scale dS k       dk = scale dS^T q

If lse and o are those of *all* keys, these derivatives are this tile's share of the whole, and shares are added up (Dao
et al. 2022, "FlashAttention"). torch's own kernels compute both, and store no scores:

    CPU    all tiles; one of kind "masked" needs a mask of its size
    CUDA   tiles of kind "full" and "causal" in float16 and bfloat16, where torch has flash attention for the GPU

Everything else is computed by the equations above, for 1,024 queries at a time: at most 1,024 scores per head and key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from tplab.sequence import Tile
from tplab.torch.private import flash_on_cpu, flash_on_cpu_backward, flash_on_gpu, flash_on_gpu_backward

ROWS = 1024
"""How many queries the equations are computed for at a time."""


def attend(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
    """q [B, h, n, d]   k, v [B, g, m, d]   ->   o [B, h, rows, d], lse [B, h, rows], of the rows of the tile's box.

    Where a row sees no key of the box, o is 0 and lse is -inf.
    """
    q, k, v = q[:, :, tile.queries], k[:, :, tile.keys], v[:, :, tile.keys]
    kernel = _kernel_for(q, k, v, tile)
    if kernel == "none":
        return _attend(q, k, v, tile, scale)
    if kernel == "gpu":
        return flash_on_gpu(q, k, v, is_causal=tile.kind == "causal", scale=scale)[:2]
    hidden = _hidden(tile, slice(None), q)
    o, lse = flash_on_cpu(q, k, v, 0.0, tile.kind == "causal", attn_mask=_added(tile, hidden, q), scale=scale)
    return o, lse if hidden is None else lse.masked_fill(hidden.all(-1), -torch.inf)


def attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tile: Tile, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The tile's share of dq [B, h, rows, d], and of dk and dv [B, g, columns, d].

    do, o, lse   of all n queries, with o and lse from all the keys that they see, on whichever rank
    """
    rows = (slice(None), slice(None), tile.queries)
    do, q, o, lse, k, v = do[rows], q[rows], o[rows], lse[rows], k[:, :, tile.keys], v[:, :, tile.keys]
    kernel = _kernel_for(q, k, v, tile)
    if kernel == "none":
        return _attend_backward(do, q, k, v, o, lse, tile, scale)
    if kernel == "gpu":
        return flash_on_gpu_backward(do, q, k, v, o, lse.contiguous(), tile.kind == "causal", scale)
    mask = _added(tile, _hidden(tile, slice(None), q), q)
    return flash_on_cpu_backward(do, q, k, v, o, lse, 0.0, tile.kind == "causal", attn_mask=mask, scale=scale)


def _kernel_for(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Literal["cpu", "gpu", "none"]:
    """Which of torch's kernels computes these queries and keys."""
    if q.device.type in ("cpu", "meta"):
        return "cpu"
    if tile.kind == "masked" or q.shape[-1] not in range(8, 193, 8):  # wider heads: not backward, on some GPUs
        return "none"
    is_causal = tile.kind == "causal"
    return "gpu" if can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, is_causal, True)) else "none"


def _hidden(tile: Tile, rows: slice, q: Tensor) -> Tensor | None:
    """[rows, columns of the box]: True where a query does not see the key; None unless the tile is masked."""
    if tile.kind != "masked":
        return None
    begins, ends = (torch.tensor(bound[rows], device=q.device)[:, None] for bound in (tile.begins, tile.ends))
    columns = torch.arange(tile.keys.stop - tile.keys.start, device=q.device)
    return (columns < begins) | (columns >= ends)


def _added(tile: Tile, hidden: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask as a bias that is added to the scores."""
    return None if hidden is None else torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf)


# --- the equations above ----------------------------------------------------------------------------------------------


def _attend(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
    found = []
    for rows in _row_blocks(q):
        scores = _scores(q[:, :, rows], k, tile, rows, scale)
        lse = scores.logsumexp(-1)
        p = (scores - lse.masked_fill(lse.isinf(), 0)[..., None]).exp()
        found.append(((p @ _grouped(v, p.dtype)).flatten(1, 2), lse.flatten(1, 2)))
    o, lse = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    return o.to(q.dtype), lse


def _attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tile: Tile, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.zeros_like(q, dtype=lse.dtype), *(torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    groups = (k.shape[1], -1)
    for rows in _row_blocks(q):
        q_, do_, o_ = (x[:, :, rows].to(lse.dtype).unflatten(1, groups) for x in (q, do, o))
        p = (_scores(q[:, :, rows], k, tile, rows, scale) - lse[:, :, rows].unflatten(1, groups)[..., None]).exp()
        ds = p * (do_ @ _grouped(v, p.dtype).mT - (do_ * o_).sum(-1, keepdim=True)) * scale
        dq[:, :, rows] = (ds @ _grouped(k, p.dtype)).flatten(1, 2)
        dk += (ds.mT @ q_).sum(2)
        dv += (p.mT @ do_).sum(2)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, tile: Tile, rows: slice, scale: float) -> Tensor:
    """[B, g, h/g, rows, columns], in float32 at least; -inf where a query does not see the key."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype).unflatten(1, (k.shape[1], -1)) @ _grouped(k, dtype).mT * scale
    if tile.kind == "causal":
        return scores + torch.full(scores.shape[-2:], -torch.inf, device=q.device, dtype=dtype).triu(1 + rows.start)
    hidden = _hidden(tile, rows, q)
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def _grouped(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, g, m, d] -> [B, g, 1, m, d]: each key and value head serves h/g query heads."""
    return x.to(dtype).unsqueeze(2)


def _row_blocks(q: Tensor) -> Iterator[slice]:
    return (slice(start, min(start + ROWS, q.shape[2])) for start in range(0, q.shape[2], ROWS))
