"""The CPU's flash attention where torch only supports those of GPUs, and kernels of GPUs on the CPU.

torch has no rules for `aten._scaled_dot_product_flash_attention_for_cpu`, which `scaled_dot_product_attention` uses on
the CPU. Its two operations have the same inputs and outputs as those for GPUs, so torch's rings run over them
unchanged. With our rules for DTensor, each rank has some heads, some of the batch, or everything (torch 2.11, 2.13,
2.14).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend

from tplab.torch.distributed.replaced import Value

FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SEQUENCE = 2  # [B, H, S, D], and log-sum-exp [B, H, S]


def cpu_kernels(home: Any) -> dict[Any, Callable[..., Any]]:
    """The handlers of both operations for context_parallel's table `custom_ops`.

    home   torch's module with the rings
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
    """The tables of DTensor's sharding propagator by name, with these rules; the propagator itself is unchanged."""
    from torch.distributed.tensor.experimental import register_sharding

    before = {name: getattr(propagator, name) for name in _TABLES}
    try:
        for name, table in before.items():
            setattr(propagator, name, dict(table))
        # query [B, H, S, D], key and value [B, H, T, D]   ->   output [B, H, S, D], log-sum-exp [B, H, S]
        register_sharding(FORWARD)(_rule(2, 3))
        # gradient of the output, query, key, value, output, log-sum-exp   ->   gradients of query, key and value
        register_sharding(BACKWARD)(_rule(3, 6))
        return {name: getattr(propagator, name) for name in _TABLES}
    finally:
        for name, table in before.items():
            setattr(propagator, name, table)


def _rule(num_results: int, num_operands: int) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    """The possible placements of the results and of the arguments along one mesh dim, the operands first.

    All have the same, except a mask, [S, T] or [B or 1, H or 1, S, T]: it is never sharded, because DTensor does not
    redistribute keyword arguments.
    """
    from torch.distributed.tensor import Replicate, Shard

    def placements(*args: Any, attn_mask: Any = None, **_: Any) -> list[tuple[list[Any], list[Any]]]:
        possible: list[Any] = [Replicate()]
        sizes = (1, 1) if attn_mask is None or len(attn_mask.shape) < 4 else attn_mask.shape
        possible += [Shard(dim) for dim in (1, 0) if sizes[dim] == 1]
        others = [None] * (len(args) - num_operands) + [Replicate()] * (attn_mask is not None)
        return [([placement] * num_results, [placement] * num_operands + others) for placement in possible]

    return placements


# --- kernels ----------------------------------------------------------------------------------------------------------


_ON_CPU = {SDPBackend.FLASH_ATTENTION, SDPBackend.MATH}
_choose: Any = attention._sdpa_kernel


def gpu_kernels_on_cpu(note: Callable[[], None]) -> Value:
    """Where GPUs are mapped to the CPU, and a rank asks for kernels that only GPUs have, it gets flash attention, and
    `note` is called."""

    def choose(backends: Iterable[SDPBackend], set_priority: bool = False) -> None:
        backends = [*backends]
        if backends and not _ON_CPU & {*backends}:
            note()
            backends.append(SDPBackend.FLASH_ATTENTION)
        _choose(backends, set_priority)

    return attention, "_sdpa_kernel", choose


def flex_attention_on_cpu(module: Any) -> list[Value]:
    """Changes to torch's flex_attention `module`. It refuses gradients on the CPU, where a compiled one has none; here
    nothing is compiled, and what runs instead has them. Nor does it warn programs that asked for compilation."""
    warn_once = getattr(module, "_warn_once", None)

    def warn(warning_id: str, *args: Any, **about: Any) -> None:
        if warn_once is not None and warning_id != "flex_attention_performance":
            warn_once(warning_id, *args, **about)

    changes = [("_validate_device", lambda query, key, value: None), ("_warn_once", warn)]
    return [(module, name, value) for name, value in changes if hasattr(module, name)]
