"""The CPU's flash attention where torch knows only those of GPUs: in its context parallelism, and in DTensor.

torch has no rules for `aten._scaled_dot_product_flash_attention_for_cpu`, which `scaled_dot_product_attention` uses on
the CPU. Its two operations take and return the same as those for GPUs, so torch's rings run over them as they are, and
with rules of ours each rank has some of the heads, or of the batch, or everything (torch 2.11, 2.13, 2.14).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SEQUENCE = 2  # [B, H, S, D], and log-sum-exp [B, H, S]


def cpu_kernels(home: Any) -> dict[Any, Callable[..., Any]]:
    """What context_parallel does with each operation, for its table `custom_ops`.

    home   torch's module in which the rings are
    """
    from torch.distributed.tensor import DTensor, Shard

    def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        names = [argument.name for argument in op._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query: Any = given["query"]
        if given.pop("attn_mask", None) is not None:
            raise NotImplementedError(
                "context_parallel takes no attn_mask, on GPUs or here; use is_causal=True, or attention without a mask"
            )
        if query.placements != (Shard(_SEQUENCE),):
            raise NotImplementedError(
                f"context_parallel shards only the sequence, dim {_SEQUENCE} of the query, over one mesh dim; here the "
                f"query is {query.placements}"
            )
        local = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in given.items()}
        ring, about = home._templated_ring_attention, {}
        if "grad_out" in local:
            ring, about = home._templated_ring_attention_backward, {"grad_out_name": "grad_out"}
            local["grad_out"] = local["grad_out"].contiguous()
        results: tuple[Tensor, ...] = ring(query.device_mesh.get_group(), _SEQUENCE, op, **about, **local)
        return tuple(DTensor.from_local(x, query.device_mesh, query.placements, run_check=False) for x in results)

    return {FORWARD: run, BACKWARD: run}


# --- DTensor ----------------------------------------------------------------------------------------------------------


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
