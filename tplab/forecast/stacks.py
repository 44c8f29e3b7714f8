"""Stacks: what the software that trains a model chooses where nothing is said, and how far it is from the parts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tplab.cost import Cluster
from tplab.data.buckets import BUCKET_BYTES
from tplab.forecast.keeps import KEEPS, Keeps
from tplab.forecast.model import Model
from tplab.forecast.plan import Plan

CONSTANTS = Path(__file__).parent / "measured" / "constants.json"


@dataclass(frozen=True)
class Stack:
    """A library that trains models.

    defaults   fields of a Plan, where a row of a table says nothing
    factor     seconds that its computing takes per second that the clock says: one number for all models and plans
    host       s that the host takes to start the kernels of one layer, forward and backward
    hidden     with overlap, the share of the messages of layers that is hidden, and the share of gradients that can be
               at most. It is the same for all stacks whose runs were measured
    gathers    how often ZeRO 3 gathers a layer that is recomputed, for each microbatch: 2, so early that computing can
               hide it; 3, each time when it is needed, and no more of it is hidden than of gradients. Layers that are
               not recomputed are gathered twice
    cards      over how many network cards of a node ZeRO 3 sends; None: over all
    attention  the generation of its kernels of fused attention, on chips that have it; on others the newest one
    balance    what the stages of its pipelines have equally much of, where a plan does not say: see `Plan.balance`
    passes     how often its kernels read and write what fused ones would read and write once
    bucket     bytes of gradients, or of parameters, that one collective sends
    low, high  nine of ten measured steps took between low and high times the forecast
    plain      made of plain layers, as tplab.torch's own are: without fused kernels more is kept; inputs that were
               gathered are kept, and not gathered again; recomputation includes the embedding and the head; gradients
               of norms are summed after every microbatch; the two uses of a tied embedding have a copy each
    keeps      what it keeps in memory
    source     where the defaults and the constants come from
    """

    name: str
    defaults: Mapping[str, Any] = field(hash=False)
    factor: float = 1.0
    host: float = 0.0
    hidden: tuple[float, float] = (0.4, 0.4)
    gathers: int = 2
    cards: int | None = None
    attention: str = "flash3"
    balance: str = "layers"
    passes: float = 1.0
    bucket: float = BUCKET_BYTES
    low: float = 1.0
    high: float = 1.0
    plain: bool = False
    keeps: Keeps = field(default_factory=Keeps)
    source: str = ""

    def between(self, model: Model) -> tuple[float, float]:
        """`low` and `high` for a model. Of mixtures of experts only five steps were measured, and they lie further from
        their forecasts than steps of any stack: `low` and `high` are theirs. A bound without an upper end keeps none.
        """
        if not model.experts or math.isinf(self.high):
            return self.low, self.high
        experts = constants()["experts"]
        return min(self.low, experts["low"]), max(self.high, experts["high"])

    def on(self, cluster: Cluster) -> Stack:
        """Without what was fitted to the measured clock where the cluster is a data sheet: that is a bound."""
        if cluster.fitted is not None:
            return self
        return replace(self, factor=1.0, host=0.0, low=1.0, high=math.inf)

    def cut(self, plan: Plan) -> Plan:
        """The plan with stages as this stack cuts them, if the plan does not say how."""
        return plan if plan.balance else replace(plan, balance=self.balance)

    def defaults_on(self, cluster: Cluster, recompute: str | None = None) -> dict[str, Any]:
        """The defaults for runs on this cluster. Megatron's published runs on A100s are of 2021 and 2022: attention was
        not fused yet, and sequence parallelism came with selective recomputation (Korthikanti et al. 2022)."""
        found = dict(self.defaults)
        if self.name == "megatron" and cluster.chip.name.startswith("A100"):
            found |= {"attention": "unfused", "sequence_parallel": recompute == "selective"}
        return found


@cache
def constants() -> Mapping[str, Any]:
    """What `python -m benchmarks.fit.steps --write` has written."""
    return json.loads(CONSTANTS.read_text(encoding="utf-8"))


def _stack(name: str, defaults: Mapping[str, Any], source: str, **more: Any) -> Stack:
    more |= constants()["stacks"].get(name, {})
    return Stack(name, MappingProxyType(dict(defaults)), keeps=KEEPS.get(name, Keeps()), source=source, **more)


_LISTED = (
    _stack(
        "megatron",
        {"zero": 1, "schedule": "1f1b", "sequence_parallel": True, "grad_dtype": "float32"},
        "Megatron-LM with its distributed optimizer, as its training scripts are. host: assumed",
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
    ),
    _stack(
        "fsdp",
        {"zero": 3, "recompute": "full", "grad_dtype": "float32"},
        "torch FSDP2: float32 pieces, gathered in bfloat16; FlashAttention 2, as scaled_dot_product_attention has it. "
        "factor: of one run; host: assumed",
        attention="flash2",
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
    ),
)

STACKS: Mapping[str, Stack] = MappingProxyType({stack.name: stack for stack in _LISTED})
"""Every stack by name."""

ALIASES = {"megatron-lm": "megatron", "megatron-core": "megatron", "megatron-bridge": "megatron", "nemo": "megatron",
    "torch": "fsdp", "fsdp2": "fsdp", "torchtitan": "fsdp", "zero": "deepspeed"}  # fmt: skip


def find_stack(stack: str | Stack) -> Stack:
    """A stack by name; a Stack is returned unchanged."""
    if isinstance(stack, Stack):
        return stack
    name = stack.lower().replace("_", "-").replace(" ", "-")
    name = ALIASES.get(name, name)
    if name not in STACKS:
        raise ValueError(f"no stack is called {stack!r}; there are {', '.join(STACKS)}")
    return STACKS[name]
