"""A plan: over how many ranks of each axis a model is trained, and what else a training job chooses."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from tplab.data.zero import STAGES
from tplab.errors import PlanError, ScheduleError, ShapeError, TplabError, one_of
from tplab.experts import expected_copies
from tplab.forecast.experts import fullest
from tplab.forecast.model import Model, expert_tp
from tplab.mesh import Mesh
from tplab.models.checks import DISPATCHES
from tplab.pipeline.partition import Partition, cut_layers
from tplab.schedules import RULES, Schedule
from tplab.schedules.placement import Placement, one_way
from tplab.sharding import cut

ALIASES = {"1f1b": "one_f_one_b", "interleaved": "interleaved_1f1b", "afab": "gpipe"}
"""Other names of some of tplab's rules. With virtual stages, "1f1b" is the interleaved one, as in Megatron."""

ATTENTION = {"flash2": "FlashAttention 2", "flash3": "FlashAttention 3", "unfused": "unfused attention"}
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
CHOICES: Mapping[str, Collection[str]] = {
    "recompute": ("none", "selective", "full"),
    "balance": ("layers", "parameters", "computing"),
    "dtype": ITEMSIZE,
    "grad_dtype": ITEMSIZE,
    "dispatch": DISPATCHES,
    "attention": ATTENTION,
    "state_dtype": ("float32", "bfloat16"),
}
"""The values of a plan's fields, besides the default."""
AXES = ("pp", "dp", "cp", "tp")
ROUNDS = {"naive": 2, "gpipe": 2, "one_f_one_b": 2, "chimera": 2, "zb_h1": 3, "looped_bfs": 3, "hanayo": 3}
"""The round from which a schedule repeats itself; for rules not listed, the fourth."""
GROUPED = ("interleaved_1f1b", "interleaved_zb")
"""In these, m modulo p of the first groups have more microbatches than the others: only the others repeat."""


@dataclass(frozen=True)
class Plan:
    """How a model is trained on dp x tp x pp x cp ranks.

    dp, tp, pp, cp    ranks of data, tensor, pipeline and context parallelism (which divides each sequence)
    ep                expert parallelism: how many of the dp x cp x tp ranks share the experts of a layer, with each
                      expert whole on one rank. 1: each of the dp x cp ranks has all experts, and tp divides them
    etp               how many ranks divide each expert; None: as for `ep`. For experts, the dp x cp x tp ranks are
                      copies x ep x etp, the last axis fastest, folded over attention's (`tplab.experts.fold`)
    dispatch          how tokens travel to their experts: "all_to_all", "per_rank", "gather" or "two_levels", as in
                      `tplab.torch.ParallelExperts`; None: as the stack sends them
    skew              how unequally experts are chosen, as in `experts_seconds`; 0: equally. The fullest rank decides
    microbatch        sequences that one pipeline runs at once
    zero              what is divided over the dp x cp ranks: 0 nothing; 1 the optimizer's states; 2 also the gradients;
                      3 also the parameters, of which a layer is gathered while it runs
    schedule          a rule of tplab.schedules, or "1f1b", "interleaved", "afab"
    virtual           stages per pipeline rank
    sequence_parallel whether tensor-parallel ranks also divide the sequence, between the layers
    recompute         "none"; "selective": the backward pass recomputes the scores of attention; "full": it recomputes
                      whole layers from their inputs. With fused attention, "selective" changes nothing
    attention         its kernel: "flash2" or "flash3" (FlashAttention 2 of 2023, 3 of 2024), which keep no scores, or
                      "unfused", which keeps them; None: fused, by the kernel that the stack uses
    compiled          whether torch.compile fuses the small kernels of a layer; None: as in the stack. Memory of
                      compiled FSDP is as KempnerForge runs it, which keeps whole gradients until the last microbatch;
                      messages and time are those of FSDP's default, which reduce-scatters them after each one
    dtype             of parameters and activations while computing; grad_dtype: of accumulated gradients
    state_dtype       of the optimizer's moments and its own copy of the parameters: "float32" or "bfloat16"; None: as
                      the stack has them
    overlap           whether gradients and parameters are sent while ranks compute
    balance           what is balanced over the stages; None: as in the stack (`Stack.balance`). "layers", with the
                      embedding and the head added to the first and the last stage; "parameters" of a rank, as in
                      tplab.pipeline.partition; or "computing", as in nanotron: parameters without the embedding,
                      which is only looked up. With three stages per rank or more, always "layers", because finding the
                      best cut would take minutes
    """

    _: KW_ONLY
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dispatch: str | None = None
    skew: float = 0.0
    microbatch: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    virtual: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    attention: str | None = None
    compiled: bool | None = None
    dtype: str = "bfloat16"
    grad_dtype: str = "float32"
    state_dtype: str | None = None
    overlap: bool = True
    balance: str | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "microbatch", "virtual", "etp"):
            if (1 if getattr(self, name) is None else getattr(self, name)) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; it is a whole number, 1 or more")
        if self.zero not in STAGES:
            raise PlanError(f"zero is {self.zero!r}; ZeRO has stages 0 to 3")
        if self.rule_name not in RULES:
            raise PlanError(f"no schedule is called {self.schedule!r}; there are {', '.join([*ALIASES, *RULES])}")
        for name, choices in CHOICES.items():
            if getattr(self, name) != getattr(Plan, name):  # the default
                one_of(name, getattr(self, name), tuple(choices))
        if not 0 <= self.skew < math.inf:
            raise PlanError(f"skew is {self.skew}; it is 0, where all experts are chosen equally often, or more")
        if self.compiled not in (None, True, False):
            raise PlanError(f"compiled is {self.compiled!r}; it is True, False, or None for what the stack does")

    # --- ranks -------------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """The number of ranks: dp x tp x pp x cp."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def mesh(self) -> Mesh:
        """The ranks on axes pp, dp, cp and tp, the last fastest: tensor-parallel ranks are neighbours, as in Megatron
        and nanotron."""
        return Mesh(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp)

    @property
    def copies(self) -> int:
        """How many ranks compute with the same parameters on other tokens: dp x cp. ZeRO divides states over them."""
        return self.dp * self.cp

    @property
    def expert_copies(self) -> int:
        """How many ranks have the same experts. ZeRO divides the experts' states over them."""
        return self.copies * self.tp // (self.ep * self.expert_tp)

    @property
    def expert_tp(self) -> int:
        """The number of ranks that divide each expert."""
        return expert_tp(self.tp, self.ep, self.etp)

    def load(self, model: Model, sequence: int) -> float:
        """The tokens of the fullest rank's experts, as a multiple of the mean."""
        tokens = self.microbatch * sequence // self.cp * self.ep * self.expert_tp // self.tp
        return fullest(tokens, model.routing, self.ep, self.skew) if self.skew and model.experts else 1.0

    def pipeline_rank(self, rank: int) -> int:
        """The position of a rank of the mesh along its pipeline."""
        return rank // (self.dp * self.cp * self.tp)

    @property
    def flash(self) -> bool:
        """Whether attention is fused and keeps no scores."""
        return self.attention != "unfused"

    @property
    def chip_dtype(self) -> str:
        """The chips' name for `dtype`."""
        return "float8_e4m3fn" if self.dtype == "float8" else self.dtype

    @property
    def kept_size(self) -> int:
        """Bytes of a parameter or an activation that is kept: with matmuls in 8 bit, these are in 16."""
        return max(2, ITEMSIZE[self.dtype])

    # --- the pipeline ------------------------------------------------------------------------------------------------

    @property
    def rule_name(self) -> str:
        """The name of the schedule in tplab.schedules.RULES."""
        name = ALIASES.get(self.schedule, self.schedule)
        return "interleaved_1f1b" if name == "one_f_one_b" and self.virtual > 1 else name

    def microbatches(self, batch: int) -> int:
        """How many microbatches each pipeline runs in a step of `batch` sequences."""
        return batch // (self.dp * self.microbatch)

    def rule(self, microbatches: int) -> Schedule:
        """The schedule of each pipeline."""
        return rule_of(self.rule_name, self.pp, microbatches, self.virtual)

    @property
    def placement(self) -> Placement:
        """The stages of each pipeline rank."""
        return _placed(self.rule_name, self.pp, self.virtual)

    @property
    def num_stages(self) -> int:
        """The number of stages of the model. A schedule with two directions has each of them twice."""
        return self.pp * (self.virtual if takes_virtual(self.rule_name) else _stages_per_rank(self.rule_name))

    def partition(self, model: Model) -> Partition:
        """The stages of the model. Layer 0 is the embedding, 1 to L are the model's layers, L + 1 is the final norm,
        the head and the loss."""
        balance, stages = self.balance or "layers", self.num_stages
        tp = 1 if balance == "layers" else self.tp
        return _partition(model, one_way(self.placement, stages), stages, tp, balance)

    # --- refusals ----------------------------------------------------------------------------------------------------

    def check(self, model: Model, batch: int, sequence: int) -> None:
        """Raise PlanError if this plan cannot train the model, with the numbers that do not divide."""
        why = self.refusal(model, batch, sequence)
        if why:
            raise PlanError(why)

    def refusal(self, model: Model, batch: int, sequence: int) -> str | None:
        """Why this plan cannot train the model on `batch` sequences of this length; None if it can."""
        if sequence < 1:
            return f"sequence is {sequence}; it must be 1 or more"
        if 0 < model.window < sequence:
            who = model.name or "the model"
            return f"a token of {who} attends to {model.window} tokens in some layers, and sequence is {sequence}"
        over, etp = (f"ep x etp = {self.ep} x {self.etp}", self.etp) if self.etp else (f"ep={self.ep}", 1)
        tp, divided, shared = self.tp, self.cp * (self.tp if self.sequence_parallel else 1), self.copies * self.tp
        whole = (
            (model.heads, tp, f"tp={tp} does not divide {model.heads} heads"),
            (model.num_kv_heads, tp, f"tp={tp} does not divide {model.num_kv_heads} key and value heads"),
            (
                model.ffn_width,
                parts := self.expert_tp if model.experts else tp,
                f"{'tp' if self.etp is None else 'etp'}={parts} does not divide {model.ffn_width} features of the MLP",
            ),
            (model.dense_ffn or 0, tp, f"tp={tp} does not divide {model.dense_ffn} features of a dense layer's MLP"),
            (model.shared_ffn, tp, f"tp={tp} does not divide {model.shared_ffn} features of the shared MLP"),
            (sequence, divided, f"cp x tp = {divided} ranks cannot share a sequence of {sequence} tokens equally"),
            (shared, self.ep * etp, f"{over} does not divide dp x cp x tp = {shared} ranks"),
            (model.experts, self.ep, f"ep={self.ep} does not divide {model.experts} experts"),
        )
        for number, parts, why in whole:
            if number % parts:
                return why
        about = {"ep": self.ep > 1, "etp": self.etp, "dispatch": self.dispatch, "skew": self.skew}
        for name in (name for name, is_said in about.items() if is_said and not model.experts):
            return f"{name}={getattr(self, name)}, but {model.name or 'the model'} has no experts"
        if tp > 1 and not self.sequence_parallel and self.expert_tp not in (1, tp):
            return (
                f"etp={self.etp} is neither 1 nor tp={tp}, whose ranks have the same tokens without sequence_parallel"
            )
        if self.dispatch in ("per_rank", "two_levels") and self.ep > 1:
            try:
                expected_copies(model.routing, self.ep)
            except ShapeError as error:
                return f"ep={self.ep}: {error}"
        group = self.dp * self.microbatch
        if batch % group or not batch:
            return f"dp x microbatch = {self.dp} x {self.microbatch} = {group} does not divide a batch of {batch}"
        return self.pipeline_refusal(model, batch // group)

    def pipeline_refusal(self, model: Model, microbatches: int) -> str | None:
        """Why a pipeline of this plan cannot have this many microbatches, or so few layers; None if it can."""
        if self.virtual > 1 and self.pp == 1:
            return f"virtual={self.virtual} stages per rank need a pipeline, and pp is 1"
        stages = self.num_stages
        if self.virtual > 1 and not takes_virtual(self.rule_name) and stages != self.virtual * self.pp:
            return f"{self.schedule} has {stages // self.pp} stages per rank, not virtual={self.virtual}"
        ends = 2 if self.balance in (None, "layers") else 0  # the embedding and the head can be stages of their own
        if stages > model.layers + ends:
            what = f"{model.layers} layers{', the embedding and the head' * bool(ends)}"
            return f"{what} cannot fill pp x virtual = {stages} stages"
        try:
            self.rule(int(few(self.rule_name, self.pp, microbatches)))
        except TplabError as error:
            return f"{self.schedule}: {error}"
        if self.rule_name == "interleaved_1f1b" and microbatches < self.pp:
            return f"{microbatches} microbatches are fewer than pp={self.pp}, the fewest that Megatron-LM interleaves"
        return None

    def __str__(self) -> str:
        """ "dp 8, tp 8, pp 4, 1f1b, ..."; sizes of 1 and defaults are left out."""
        words = [f"{name} {getattr(self, name)}" for name in ("dp", "tp", "pp", "cp", "ep") if getattr(self, name) > 1]
        words += [f"etp {self.etp}"] * bool(self.etp) + [f"dispatch {self.dispatch}"] * bool(self.dispatch)
        words += [f"skew {self.skew:g}"] * bool(self.skew) + [f"microbatch {self.microbatch}"]
        if self.pp > 1:
            words.append(self.schedule + (f" of {self.virtual} stages per rank" if self.virtual > 1 else ""))
        words += [f"ZeRO {self.zero}"] if self.zero else []
        words += ["sequence parallel"] if self.sequence_parallel and self.tp > 1 else []
        words += [f"{self.recompute} recomputation"] if self.recompute != "none" else []
        words += [ATTENTION[self.attention]] if self.attention else []
        words += [] if self.compiled is None else ["compiled" if self.compiled else "not compiled"]
        return ", ".join(words + ([f"states in {self.state_dtype}"] if self.state_dtype else []))


def round_of(rule: str, ranks: int) -> int:
    """The number of microbatches after which a schedule repeats itself."""
    return 1 if rule == "naive" else ranks


def few(rule: str, ranks: int, microbatches: Any) -> Any:
    """The number of microbatches without the rounds that repeat the previous one. Takes a number, or an array."""
    each = round_of(rule, ranks)
    unequal = microbatches % each + 2 if rule in GROUPED else 0
    return microbatches - np.maximum(0, microbatches // each - np.maximum(ROUNDS.get(rule, 4), unequal)) * each


@cache
def takes_virtual(name: str) -> bool:
    """Whether a rule can have any number of stages per rank."""
    return "virtual_stages" in inspect.signature(RULES[name]).parameters


@lru_cache(maxsize=1024)
def rule_of(name: str, ranks: int, microbatches: int, virtual: int) -> Schedule:
    """A schedule by the name of its rule."""
    more = {"virtual_stages": virtual} if takes_virtual(name) else {}
    return RULES[name](ranks=ranks, microbatches=microbatches, **more)


@cache
def _placed(name: str, ranks: int, virtual: int) -> Placement:
    """The placement of a rule, which does not depend on the number of microbatches."""
    try:
        return rule_of(name, ranks, 1, virtual).placement
    except ScheduleError:
        return rule_of(name, ranks, 2 * ranks, virtual).placement


@cache
def _stages_per_rank(name: str) -> int:
    return rule_of(name, 2, 4, 1).num_stages // 2


@cache
def pairs_passes(name: str) -> bool:
    """Whether a rule runs some forward and backward passes as one action, as DualPipe does."""
    return bool(rule_of(name, 2, 4, 2).joined.any())


@lru_cache(maxsize=4096)
def _partition(model: Model, placement: Placement, stages: int, tp: int, balance: str) -> Partition:
    ends = model.end_parts
    if stages > 2 * len(placement):
        balance = "layers"
    words = model.vocab_on_rank(tp) * model.hidden
    table = 0 if balance == "computing" else words + ends["positions"]  # a lookup has no FLOPs
    layers = [kind.layer_on_rank(tp) for kind in (model, model.dense)]
    first = model.dense_layers
    sizes = [table, *layers[1:] * first, *layers[:1] * (model.layers - first), ends["final norm"] + words]
    bounds = None
    if balance == "layers" and model.layers % stages == 0:
        each = model.layers // stages
        bounds = [0, *(1 + each * stage for stage in range(1, stages)), model.layers + 2]
    elif balance == "layers":  # embedding and head count as a layer each
        bounds = [0, *(piece.stop for piece in cut(model.layers + 2, stages, "even"))]
    return cut_layers(sizes, stages, placement=placement, bounds=bounds)


def divisors(number: int) -> list[int]:
    """All divisors of a number, the smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
