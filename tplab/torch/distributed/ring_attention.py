"""torch's context parallelism on the CPU: its ring attention, over the CPU's own flash attention.

`torch.distributed.tensor.experimental.context_parallel` knows three kernels, all of them for GPUs. DTensor has no rule
for `aten._scaled_dot_product_flash_attention_for_cpu`, which the same call uses on the CPU. Its two operations take and
return the same as those for GPUs, so torch's rings run over them as they are (torch 2.11, 2.13, 2.14).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten
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

    return {
        aten._scaled_dot_product_flash_attention_for_cpu.default: run,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: run,
    }
