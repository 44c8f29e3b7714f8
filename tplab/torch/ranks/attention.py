"""Attention as a GPU computes it: under a GPU's clock, torch uses the kernel that it would use there.

On a GPU, `scaled_dot_product_attention` is one kernel, which stores no scores. On the device "meta" torch has no such
kernel, and on the CPU none for dropout, among others. There it computes scores, softmax and products one after another,
in float32. That is slower and takes more memory than on a GPU, so here the GPU's own operations replace it:

    flash       16-bit numbers, no mask, heads of at most 256, and as many queries as keys where it is causal
    efficient   everything else: float32, masks. Grouped keys and values are repeated first
    cudnn       if the program has chosen it with `sdpa_kernel`

What the CPU's flash attention can compute is left to it: its cost is the same. A program gets unfused attention if it
asks for it, with `sdpa_kernel(SDPBackend.MATH)` or by hand, or if no kernel of a GPU takes its tensors: float64, or
other shapes than [B, H, N, d].
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library
from torch.nn import functional as F

from tplab.cost.attention import FusedAttention
from tplab.torch.private import attention_kernels, forward_level, sdpa_choice, transform
from tplab.torch.ranks.rank import current_rank_or_none
from tplab.torch.ranks.storages import Storages

aten = torch.ops.aten
ATTENTION: Any = aten.scaled_dot_product_attention.default
_FLASH_ON_CPU = 1


class _KernelsOfGPUs:
    """`with KERNELS_OF_GPUS:` ranks with a GPU's clock compute attention with its kernels.

    Torch's table of operations belongs to the process, and several runs may be active. So the first one changes it, and
    the last one changes it back.
    """

    def __init__(self) -> None:
        self._lock, self._num_runs = Lock(), 0
        self._library: Library | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._num_runs += 1
            if self._library is None:
                self._library, draws = Library("aten", "IMPL"), _Draws()
                for key in ("AutogradCPU", "AutogradMeta"):
                    self._library.impl("scaled_dot_product_attention", attention, key)
                name = "_scaled_dot_product_efficient_attention"
                self._library.impl(name, draws.forward, "CPU")
                self._library.impl(f"{name}_backward", draws.backward, "CPU")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_runs -= 1
            if not self._num_runs:
                self._library = None  # this undoes the changes


KERNELS_OF_GPUS = _KernelsOfGPUs()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`: q [B, H, N, d]   k [B, G, M, d]   v [B, G, M, e]   ->   [B, H, N, e]"""
    masks, about = (attn_mask, dropout_p, is_causal), {"scale": scale, "enable_gqa": enable_gqa}
    flash, efficient, _, cudnn = attention_kernels.are_used
    if (
        not (flash or efficient or cudnn)  # the program has asked for unfused attention
        or not _is_fused_here(q)
        or (is_causal and attn_mask is not None)  # torch refuses both
        or not _fits(q, k, v, enable_gqa)
        or (q.device.type == "cpu" and sdpa_choice(q, k, v, *masks, **about) == _FLASH_ON_CPU)
    ):
        return ATTENTION.decompose(q, k, v, *masks, **about)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.device.type == "meta" and flash and _takes_flash(q, k, v, attn_mask, is_causal):
        wide = [F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in (q, k, v)]
        out = aten._scaled_dot_product_flash_attention(*wide, dropout_p, is_causal, scale=scale)[0]
        return out if out.shape[-1] == v.shape[-1] else out[..., : v.shape[-1]]
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    bias = None if attn_mask is None else _added(attn_mask, q).expand(*q.shape[:-1], k.shape[-2])
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    kernel: Any = aten._scaled_dot_product_efficient_attention
    if cudnn and not efficient and q.device.type == "meta":
        kernel = aten._scaled_dot_product_cudnn_attention
    return kernel(q, k, v, bias, keeps, dropout_p, is_causal, scale=scale)[0]


def _is_fused_here(q: Tensor) -> bool:
    """Whether this rank's clock is that of a GPU, and torch does not treat the operation in a special way."""
    rank = current_rank_or_none()
    if rank is None or not rank.fuses_attention:
        return False
    is_plain = type(q) in (Tensor, nn.Parameter) or q.device.type == "meta"
    return is_plain and rank.types is None and transform() is None and forward_level() < 0


def _fits(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    """Whether a kernel of a GPU takes these tensors. Torch raises its own errors for sizes that do not match."""
    if not q.dim() == k.dim() == v.dim() == 4 or not q.dtype == k.dtype == v.dtype or 0 in (*q.shape, *k.shape):
        return False
    batch, heads, _, width = q.shape
    fits = k.shape[:3] == v.shape[:3] and k.shape[0] == batch and k.shape[3] == width
    shares = k.shape[1] == heads or (enable_gqa and heads % k.shape[1] == 0)
    return fits and shares and q.dtype in (torch.float32, torch.float16, torch.bfloat16)


def _takes_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    is_square = q.shape[-2] == k.shape[-2]
    is_narrow = q.shape[-1] == v.shape[-1] <= 256
    return q.dtype is not torch.float32 and mask is None and is_narrow and (is_square or not is_causal)


def _added(mask: Tensor, q: Tensor) -> Tensor:
    """A mask as the bias that is added to the scores."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -torch.inf)


def flex_attention_of(op: str, args: Sequence[Any]) -> FusedAttention | None:
    """The sizes of torch's `flex_attention` or its backward pass, each of which compiles to one kernel. A query meets
    the mean number of keys in the blocks that the block mask keeps."""
    if op not in ("flex_attention", "flex_attention_backward"):
        return None
    is_backward = op != "flex_attention"
    q, k, v = args[:3]
    (batch, heads, q_len, width), k_len, mask = q.shape, k.shape[2], args[9 if is_backward else 4]
    partial, full, (q_block, k_block) = mask[2], mask[4], mask[-3:-1]
    num_blocks = int(partial.sum()) + (0 if full is None else int(full.sum()))
    pairs = num_blocks / partial.shape[0] / partial.shape[1] * min(q_block, q_len) * min(k_block, k_len)
    keys = min(k_len, round(pairs / q_len))
    return FusedAttention(batch, heads, q_len, keys, (width + v.shape[3]) // 2, False, is_backward)


class _Draws:
    """The memory-efficient kernel on the CPU, by its equations: it keeps only what the kernel keeps.

    Dropout is drawn as torch's own fallback draws it, and drawn again in the backward pass. For that the state of the
    random generator is kept beside `seed`, which is all that a GPU needs.
    """

    def __init__(self) -> None:
        self._states: Storages[Tensor] = Storages()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        keeps: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """o, and what the backward pass on a GPU also needs: log-sum-exp (not read here), seed and offset"""
        seed, offset = (torch.zeros((), dtype=torch.int64) for _ in range(2))
        if dropout_p:
            self._states.add(seed.untyped_storage(), torch.get_rng_state())
        out, _ = _unfused(q, k, v, bias, dropout_p, is_causal, scale)
        rows = -(-q.shape[2] // 32) * 32 if keeps else 0  # the kernel works on 32 rows at a time
        return out, q.new_zeros(*q.shape[:2], rows, dtype=torch.float32), seed, offset

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        seed: Tensor,
        offset: Tensor,
        dropout_p: float,
        wanted: Sequence[bool],
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor | None, ...]:
        """P = softmax(scale q k^T + bias)   Z = what dropout leaves of P   o = Z v

        dv = Z^T do      dS = Z * (do v^T) - P * (the sums of its rows)      dq = scale dS k      dk = scale dS^T q
        """
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        _, p = _unfused(q, k, v, bias, 0.0, is_causal, scale)
        z = p
        if dropout_p:
            state, now = self._states.get(seed.untyped_storage()), torch.get_rng_state()
            if state is None:
                raise RuntimeError(
                    "scaled_dot_product_attention: the random state of its dropout is no longer known, because a hook "
                    "has copied the saved tensors; run without that hook, or without a GPU's cluster"
                )
            torch.set_rng_state(state)
            _, z = _unfused(q, k, v, bias, dropout_p, is_causal, scale)
            torch.set_rng_state(now)
        do_, q_, k_, v_ = (x.to(p.dtype) for x in (do, q, k, v))
        dz = z * (do_ @ v_.mT)
        ds = dz - p * dz.sum(-1, keepdim=True)
        found = factor * ds @ k_, factor * ds.mT @ q_, z.mT @ do_, ds
        return tuple(x.to(q.dtype) if is_wanted else None for x, is_wanted in zip(found, wanted))


def _unfused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """o, and what dropout leaves of the softmax of the scores"""
    return aten._scaled_dot_product_attention_math(q, k, v, bias, dropout_p, is_causal, None, scale=scale)
