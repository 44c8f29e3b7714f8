"""DTensor's rule for the CPU's flash attention: each rank has some of the heads, or of the batch, or everything.

DTensor has such rules for the kernels of GPUs, and none for `aten._scaled_dot_product_flash_attention_for_cpu`, which
`scaled_dot_product_attention` uses on the CPU (torch 2.11, 2.13, 2.14).
"""

from __future__ import annotations

from typing import Any

import torch

aten: Any = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_TABLES = "op_strategy_funcs", "op_to_schema_info"


def tables_with_attention(propagator: Any) -> dict[str, Any]:
    """The tables of DTensor's sharding propagator by name, with these rules; its own stay as they are."""
    from torch.distributed.tensor.experimental import register_sharding

    before = {name: getattr(propagator, name) for name in _TABLES}
    try:
        for name, table in before.items():
            setattr(propagator, name, dict(table))
        register_sharding(FORWARD)(_forward)
        register_sharding(BACKWARD)(_backward)
        return {name: getattr(propagator, name) for name in _TABLES}
    finally:
        for name, table in before.items():
            setattr(propagator, name, table)


def _forward(*args: Any, attn_mask: Any = None, **_: Any) -> list[tuple[list[Any], list[Any]]]:
    """query [B, H, S, D], key and value [B, H, T, D]   ->   output [B, H, S, D], log-sum-exp [B, H, S]"""
    others = [None] * (len(args) - 3)
    return [([lies] * 2, [lies] * 3 + others + mask) for lies, mask in _lies(attn_mask)]


def _backward(*args: Any, attn_mask: Any = None, **_: Any) -> list[tuple[list[Any], list[Any]]]:
    """Gradient of the output, query, key, value, output, log-sum-exp -> the gradients of query, key and value."""
    others = [None] * (len(args) - 6)
    return [([lies] * 3, [lies] * 6 + others + mask) for lies, mask in _lies(attn_mask)]


def _lies(mask: Any) -> list[tuple[Any, list[Any]]]:
    """How all of them may lie along one dim of the mesh, and how the mask does: [S, T] or [B or 1, H or 1, S, T].

    DTensor does not move keyword arguments, so a mask is never cut.
    """
    from torch.distributed.tensor import Replicate, Shard

    possible: list[Any] = [Replicate()]
    possible += [Shard(dim) for dim in (1, 0) if mask is None or len(mask.shape) < 4 or mask.shape[dim] == 1]
    return [(lies, [] if mask is None else [Replicate()]) for lies in possible]
