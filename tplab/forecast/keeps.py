"""What stacks keep in memory beyond what a model and a plan need; and how far off forecasts of memory were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Keeps:
    """What a stack keeps.

    logits     how many times the logits are in memory at the loss, in the plan's dtype: Megatron's fused cross-entropy
               has them in float32, and their gradient
    wasted     whether a gradient of each kind of weight is allocated that nothing is written to: Transformer Engine's,
               where the matmul adds gradients to their sums
    workspace  bytes of libraries (cuBLAS has 32 MiB, Transformer Engine another 32)
    spare      bytes per parameter beside parameters, gradients and optimizer: gradients in 16 bit before they are added
    extra      tensors [tokens, h] that a layer keeps beyond those that are known
    whole_ends whether each tensor-parallel rank has the whole embedding and whole logits, as with torch's DTensor
    whole_sums whether gradients that are added up over several microbatches stay whole with ZeRO 3, as in torch's FSDP
    too_high   by how much, at most, a forecast of memory was too high for runs that did run: a part of the forecast
    source     where the figures come from
    """

    logits: float = 3.0
    wasted: bool = False
    workspace: int = 0
    spare: float = 0.0
    extra: float = 0.0
    whole_ends: bool = False
    whole_sums: bool = False
    too_high: float = 0.1
    source: str = "assumed"


KEEPS: Mapping[str, Keeps] = MappingProxyType(
    {
        "megatron": Keeps(
            wasted=True,
            workspace=64 * 2**20,
            too_high=0.12,
            source="counted; 0.1 % off, on eight ranks of four runs on B200 (MooreThreads/SimuMax 4dcaae5). too_high: "
            "Llama 3 405B trained on GPUs that have 12 % less than its forecast (arXiv:2407.21783, table 4; it frees "
            "tensors early). Inputs of matmuls in float8 count as 16 bit",
        ),
        "nanotron": Keeps(
            logits=4.8,
            workspace=400 * 2**20,
            spare=2.0,
            extra=9.7,
            too_high=0.4,
            source="logits, workspace, spare and extra: fitted to half of 803 runs of the ultra-scale playbook; on the "
            "other half the median error is 10.5 % (vinjn/nanotron-ultrascale-playbook 924e4d0)",
        ),
        "fsdp": Keeps(
            logits=5.0,
            whole_ends=True,
            whole_sums=True,
            source="as of the compiled one, whose cross-entropy makes four copies of the logits, and one more: assumed",
        ),
        "fsdp-compiled": Keeps(
            logits=4.0,
            whole_ends=True,
            whole_sums=True,
            source="chosen on six runs on one to four H200s (KempnerInstitute/KempnerForge 5666d0d)",
        ),
        "tplab": Keeps(logits=2.0, spare=4.0, too_high=0.0, source="counted, tensor by tensor"),
    }
)
"""By the name of the stack. Of the others nothing was measured."""
