"""Stacks: the defaults of training libraries, and how their measured times and memory differ from the sum of parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tplab.cost import Cluster
from tplab.data.gradients import BUCKET_BYTES
from tplab.forecast.plan import Plan


@dataclass(frozen=True)
class Keeps:
    """How a stack uses memory.

    logits     how many copies of the logits are in memory at the loss, in the plan's dtype: Megatron's fused
               cross-entropy has them in float32, and their gradient
    wasted     whether an unused gradient is allocated for each kind of weight, as in Transformer Engine, where the
               matmul accumulates gradients itself
    workspace  bytes of libraries (cuBLAS has 32 MiB, Transformer Engine another 32)
    spare      bytes per parameter besides parameters, gradients and optimizer: gradients in 16 bit before accumulation
    extra      tensors [tokens, h] that a layer keeps beyond the known ones
    whole_ends whether each tensor-parallel rank has the whole embedding and whole logits, as with torch's DTensor
    whole_sums whether gradients that are accumulated over several microbatches stay whole with ZeRO 3: torch's FSDP
               reduce-scatters them in each backward pass, unless a trainer calls set_requires_gradient_sync(False)
    too_high   the largest overestimate of memory for runs that did run, as a part of the forecast
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


CONSTANTS = Path(__file__).parent / "measured" / "constants.json"


@dataclass(frozen=True)
class Stack:
    """A library that trains models.

    defaults   the fields of a Plan for empty cells of a table
    factor     seconds of its computing per second of the modelled clock: one number for all models and plans
    host       s that the host takes to launch the kernels of one layer, forward and backward
    hidden     with overlap, the share of the layers' messages that is hidden, and the largest share of gradients that
               can be. It is the same for all stacks whose runs were measured
    gathers_each       whether every matmul of a tensor-parallel layer gathers its own input, as in torch's DTensor
    gathers    how often ZeRO 3 gathers a recomputed layer for each microbatch: 2, early enough for computing to hide
               it; 3, each time when it is needed, so that no more of it is hidden than of gradients. Layers that are
               not recomputed are gathered twice
    cards      how many network cards of a node ZeRO 3 uses; None: all
    attention  the generation of its fused attention kernels, if the chip has it; otherwise the chip's newest
    attention_share    the share of these kernels' speed that its own reach
    balance    what its pipelines balance over the stages by default: see `Plan.balance`
    passes     how often its kernels read and write what fused ones would read and write once
    bucket     bytes of gradients, or of parameters, that one collective sends
    routing    additional s per microbatch for a layer of experts, whatever its size, on this chip
    plain      made of plain layers, like tplab.torch's own: without fused kernels more is kept; gathered inputs are
               kept rather than gathered again; recomputation includes the embedding and the head; gradients of norms
               are summed after every microbatch; each of the two uses of a tied embedding has a copy
    keeps      what it keeps in memory
    source     where the defaults and the constants come from
    """

    name: str
    defaults: Mapping[str, Any] = field(hash=False)
    factor: float = 1.0
    host: float = 0.0
    hidden: tuple[float, float] = (0.4, 0.4)
    gathers_each: bool = False
    gathers: int = 2
    cards: int | None = None
    attention: str = "flash3"
    attention_share: float = 1.0
    balance: str = "layers"
    passes: float = 1.0
    bucket: float = BUCKET_BYTES
    routing: float = 0.0
    plain: bool = False
    keeps: Keeps = field(default_factory=Keeps)
    source: str = ""

    def on(self, cluster: Cluster) -> Stack:
        """The stack on this cluster: `routing` is that of its chip. A data sheet removes all fitted constants."""
        if cluster.fitted is None:
            return replace(self, factor=1.0, host=0.0, attention_share=1.0)
        of_chips = constants()["routing"] if self.name == "megatron" else {}
        return replace(self, routing=of_chips.get(cluster.chip.name.split()[0], 0.0))

    def cut(self, plan: Plan) -> Plan:
        """The plan with this stack's way to cut stages, unless the plan has its own."""
        return plan if plan.balance else replace(plan, balance=self.balance)

    def defaults_on(self, cluster: Cluster, recompute: str | None = None) -> dict[str, Any]:
        """The defaults for runs on this cluster. Megatron's published runs on A100s are from 2021 and 2022: attention
        was not fused yet, and sequence parallelism came with selective recomputation (Korthikanti et al. 2022)."""
        found = dict(self.defaults)
        if self.name == "megatron" and cluster.chip.name.startswith("A100"):
            found |= {"attention": "unfused", "sequence_parallel": recompute == "selective"}
        return found


@cache
def constants() -> Mapping[str, Any]:
    """The constants written by `python -m benchmarks.fit.steps --write`."""
    return json.loads(CONSTANTS.read_text(encoding="utf-8"))


def _stack(name: str, defaults: Mapping[str, Any], source: str, **more: Any) -> Stack:
    more |= constants()["stacks"].get(name, {})
    return Stack(name, MappingProxyType(dict(defaults)), source=source, **more)


COMPILED = "fsdp-compiled"
DTENSOR: Mapping[str, Any] = {"gathers_each": True, "hidden": (0.0, 0.4)}
_LISTED = (
    _stack(
        "megatron",
        {"zero": 1, "schedule": "1f1b", "sequence_parallel": True, "grad_dtype": "float32"},
        "Megatron-LM with its distributed optimizer, as its training scripts are. host: assumed. bucket: 40 million "
        "float32 gradients, the smallest default of Megatron-core's DistributedDataParallelConfig; above 40 ranks of "
        "dp it takes a million for each",
        bucket=160e6,
        keeps=Keeps(
            wasted=True,
            workspace=64 * 2**20,
            too_high=0.12,
            source="counted; 0.1 % off, on eight ranks of four runs on B200 (MooreThreads/SimuMax 4dcaae5). too_high: "
            "Llama 3 405B trained on GPUs that have 12 % less than its forecast (arXiv:2407.21783, table 4; it frees "
            "tensors early). Inputs of matmuls in float8 count as 16 bit",
        ),
    ),
    _stack(
        "nanotron",
        {"zero": 1, "schedule": "1f1b", "sequence_parallel": True, "grad_dtype": "float32"},
        "nanotron 0.5 as the ultra-scale playbook ran it: sequence parallel, no recomputation, FlashAttention 2. "
        "balance: as its pipelines are cut, by what blocks compute. passes: assumed, for kernels of eager PyTorch. "
        "bucket: chosen on its runs",
        attention="flash2",
        balance="computing",
        passes=3.0,
        bucket=500e6,
        keeps=Keeps(
            logits=4.8,
            workspace=400 * 2**20,
            spare=2.0,
            extra=9.7,
            too_high=0.4,
            source="logits, workspace, spare and extra: fitted to half of 803 runs of the ultra-scale playbook; on the "
            "other half the median error is 10.5 % (vinjn/nanotron-ultrascale-playbook 924e4d0)",
        ),
    ),
    _stack(
        "fsdp",
        {"zero": 3, "recompute": "full", "grad_dtype": "float32", "sequence_parallel": True},
        "torch FSDP, eager, as llm-foundry ran it: float32 pieces, gathered in bfloat16; FlashAttention 2. Of tensor "
        "parallelism by DTensor nothing is hidden",
        attention="flash2",
        keeps=Keeps(
            logits=5.0,
            whole_ends=True,
            source="as of the compiled one, whose loss has four copies of the logits, and one more: assumed. "
            "Gradients are reduce-scattered in each backward pass, FSDP's default",
        ),
        **DTENSOR,
    ),
    _stack(
        COMPILED,
        {"zero": 3, "recompute": "full", "grad_dtype": "float32", "sequence_parallel": True},
        "torch FSDP2 under torch.compile, as KempnerForge ran it. factor and host: Megatron's",
        attention="flash2",
        keeps=Keeps(
            logits=4.0,
            whole_ends=True,
            whole_sums=True,
            source="chosen on six runs on one to four H200s (KempnerInstitute/KempnerForge 5666d0d, which switches "
            "gradient synchronisation off until the last microbatch)",
        ),
        **DTENSOR,
    ),
    _stack(
        "deepspeed",
        {"zero": 3, "recompute": "full", "grad_dtype": "bfloat16"},
        "DeepSpeed's ZeRO, Rajbhandari et al. 2020. cards: for two models, more GPUs did not make ZeRO 3 faster in "
        "Narayanan et al. 2021, table 2; its messages took what they take over one card per node. factor and host: "
        "Megatron's",
        gathers=3,
        cards=1,
    ),
    _stack(
        "tplab",
        {"dtype": "float32", "grad_dtype": "float32", "zero": 1},
        "tplab.torch.train and its Recipe, on simulated ranks",
        hidden=(0.0, 1.0),
        gathers=3,
        balance="parameters",
        plain=True,
        keeps=Keeps(logits=2.0, spare=4.0, too_high=0.0, source="counted, tensor by tensor"),
    ),
)

STACKS: Mapping[str, Stack] = MappingProxyType({stack.name: stack for stack in _LISTED})
"""Every stack by name."""

KEEPS: Mapping[str, Keeps] = MappingProxyType({stack.name: stack.keeps for stack in _LISTED})
"""Name of the stack -> what it keeps. The figures of stacks without a source of their own are assumed."""

ALIASES = {"megatron-lm": "megatron", "megatron-core": "megatron", "megatron-bridge": "megatron", "nemo": "megatron",
    "torch": "fsdp", "fsdp2": "fsdp", "torchtitan": "fsdp", "zero": "deepspeed"}  # fmt: skip


FSDP = ("fsdp", *(alias for alias, name in ALIASES.items() if name == "fsdp"))


def find_stack(stack: str | Stack, plan: Plan | None = None) -> Stack:
    """A stack by name; a Stack is returned unchanged. FSDP is the compiled one if the plan says so."""
    if plan is not None and plan.compiled and (stack if isinstance(stack, str) else stack.name) in FSDP:
        return STACKS[COMPILED]
    if isinstance(stack, Stack):
        return stack
    name = stack.lower().replace("_", "-").replace(" ", "-")
    name = ALIASES.get(name, name)
    if name not in STACKS:
        raise ValueError(f"no stack is called {stack!r}; there are {', '.join(STACKS)}")
    return STACKS[name]
