"""The tasks of `layout_lab`. They are judged by the forecast of the chosen plan, compared with that of the best one."""

from __future__ import annotations

from collections.abc import Iterator

from tplab.errors import PlanError
from tplab.forecast import Forecast, Plan
from tplab.widgets.layouts.candidates import exactly, survey
from tplab.widgets.layouts.words import GIB, held_text
from tplab.widgets.paper.task import Claim, Task, Tasks, at_least, at_most, below

START = {
    "model": "llama3-8b", "cluster": "h100-measured", "gpus": 64, "batch": 512, "sequence": 8192, "stack": "megatron"
}  # fmt: skip
"""The default settings at the start of a task."""

SAME = {"model": "model", "cluster": "cluster", "stack": "software", "gpus": "GPUs", "batch": "sequences per step",
    "sequence": "tokens each"}  # fmt: skip
"""The settings that a task keeps fixed, unless it is about them."""

LARGE = {**START, "model": "llama3-70b"}
EIGHTS = Plan(tp=8, pp=8, recompute="full", sequence_parallel=True)
"""Tensor parallelism in each node, a pipeline over the nodes, everything recomputed."""


def same(*free: str) -> dict[str, str]:
    return {name: words for name, words in SAME.items() if name not in free}


def fits(one: Forecast) -> Claim:
    if one.surely_fits:
        return Claim(True, f"the fullest rank holds {held_text(one)}")
    needs, usable = one.peak.total / GIB, one.usable / GIB
    return Claim(False, f"the fullest rank needs {needs:.1f} GiB, and {usable:.1f} GiB are sure to be free")


def slower(one: Forecast, best: Forecast, percent: float) -> Claim:
    says = "a step takes {}% longer than that of the fastest plan that fits"
    return at_most(says, 100 * max(one.seconds / best.seconds - 1, 0), percent, "it may take {}% longer at most")


def without_pipeline(one: Forecast) -> Claim:
    ranks = one.plan.pp
    return Claim(
        ranks == 1, "there is no pipeline" if ranks == 1 else f"the pipeline has {ranks} ranks, and there may be none"
    )


def few(one: Forecast, best: Forecast) -> Iterator[Claim]:
    yield fits(one)
    fewer = 2 ** ((one.plan.ranks - 1).bit_length() - 1) if one.plan.ranks > 1 else 0
    try:
        found = survey(one.model, one.cluster, fewer, one.batch, one.sequence, one.stack.name)
    except PlanError:
        yield Claim(True, f"no plan is possible on {fewer} GPUs")
        return
    if found.fitting:
        yield Claim(False, "there are plans that fit on fewer GPUs")
    else:
        yield Claim(True, f"on {fewer} GPUs, none of {found.considered:,} plans fits")


def half(one: Forecast, best: Forecast) -> Iterator[Claim]:
    says, gib = "the fullest rank holds {} GiB", best.peak.total / GIB / 2
    yield at_most(says, one.peak.total / GIB, gib, "half of what the fastest plan that fits holds is {} GiB")
    yield slower(one, best, 30)


def no_gathering(one: Forecast, best: Forecast) -> Iterator[Claim]:
    yield fits(one)
    zero = one.plan.zero
    says = "every rank keeps all parameters and gradients of its layers"
    yield Claim(zero <= 1, says if zero <= 1 else f"the plan has ZeRO {zero}, and it may have ZeRO 1 at most")
    yield slower(one, best, 10)


def long(one: Forecast, best: Forecast) -> Iterator[Claim]:
    tokens = START["batch"] * START["sequence"]
    yield at_least("a sequence has {:token}", one.sequence, 131072)
    given, words = one.batch * one.sequence, f"a step has {one.batch * one.sequence:,} tokens"
    yield Claim(given == tokens, words if given == tokens else f"{words}, and it must have {tokens:,}")
    yield fits(one)
    yield without_pipeline(one)
    kept = one.plan.recompute == "none"
    yield Claim(kept, "nothing is recomputed" if kept else f"the plan has {one.plan.recompute} recomputation")


def no_pipeline(one: Forecast, best: Forecast) -> Iterator[Claim]:
    yield fits(one)
    yield without_pipeline(one)
    yield slower(one, best, 15)


def faster(one: Forecast, best: Forecast) -> Iterator[Claim]:
    yield fits(one)
    is_plain = one.plan.pp > 1 and one.plan.schedule in ("1f1b", "one_f_one_b")
    yield Claim(is_plain, f"the plan {'has' if is_plain else 'must have'} a pipeline with 1F1B")
    other = exactly(one.model, EIGHTS, one.cluster, one.batch, one.sequence, one.stack.name)
    yield below("a step takes {} s", one.seconds, other.seconds, f"that of {EIGHTS} takes {{}} s")


def scale(one: Forecast, best: Forecast) -> Iterator[Claim]:
    memory = at_most("the fullest rank holds {} GiB", one.peak.total / GIB, 60, "it may hold {} GiB at most")
    yield memory if one.surely_fits else fits(one)
    says = "the model's own work is {}% of what the GPUs could do (MFU)"
    yield at_least(says, 100 * one.mfu, 50, "it must be {}% at least")
    yield at_most("a step has {:sequence}", one.batch, 1024, "it may have {} at most")


def experts(one: Forecast, best: Forecast) -> Iterator[Claim]:
    yield fits(one)
    yield at_least("the experts of a layer are over {:rank}", one.plan.ep, 8, "it must be {} at least")
    yield slower(one, best, 15)


TASKS = Tasks(
    Task(
        "zero-1", 17, "Without gathering parameters",
        "Llama 3 70B on 64 GPUs. ZeRO 2 and 3 divide gradients and parameters, which then travel for every microbatch. "
        "Choose a plan that fits with ZeRO 1 or none, and is at most 10% slower than the fastest plan that fits.",
        LARGE, same(), no_gathering,
        ("Something else has to divide the parameters: tensor parallelism, a pipeline, or both.",
         "A layout of 4 × 4 × 4 ranks leaves a sixteenth of the parameters on each rank."),
    ),
    Task(
        "long", 20, "A long sequence",
        "Llama 3 8B on 16 GPUs. Train on sequences of 131,072 tokens instead of 8,192, with as many tokens in a step "
        "as before. Choose a plan that fits, without a pipeline and without recomputation.",
        {**START, "gpus": 16}, same("batch", "sequence"), long,
        ("Sixteen times as many tokens in a sequence: how many sequences are a step now?",
         "One rank cannot hold the activations of a whole sequence. Which axes divide a sequence?",
         "Context parallelism (cp) divides the tokens, and so do tensor-parallel ranks between the layers."),
    ),
    Task(
        "experts", 22, "Experts on eight ranks",
        "Qwen3 30B has 128 experts in a layer. Choose a plan for 64 GPUs that fits, in which the experts of a layer "
        "are spread over at least 8 ranks, and that is at most 15% slower than the fastest.",
        {**START, "model": "qwen3-30b-a3b", "sequence": 4096}, same(), experts,
        ("The name of a plan says over how many ranks experts are spread: ep.",
         "The ranks that share experts are a part of those that share data. So dp may stay as large as it is."),
    ),
    Task(
        "few", 27, "As few GPUs as possible",
        "Llama 3 70B is trained on 64 GPUs of 80 GB. Find the smallest number of GPUs on which a plan surely fits.",
        LARGE, same("gpus"), few,
        ("Parameters, gradients and the optimizer's states take 18 bytes per parameter in Megatron.",
         "70.6 billion × 18 bytes is 1,270 GB. How many GPUs of 80 GB is that, and what is left for activations?"),
    ),
    Task(
        "half-of-fastest", 27, "Half of the memory",
        "Llama 3 8B on 64 GPUs. Choose a plan whose fullest rank holds at most half of what the fastest plan needs, "
        "and that is at most 30% slower.",
        START, same(), half,
        ("In the picture, go down along the left edge: the plans for which no other is both faster and smaller.",
         "Most of the memory is activations. What is not kept has to be computed again."),
    ),
    Task(
        "no-pipeline", 28, "Without a pipeline",
        "Llama 3 70B on 64 GPUs. Choose a plan that fits without a pipeline, and is at most 15% slower than the "
        "fastest.",
        LARGE, same(), no_pipeline,
        ("Without stages, every rank needs all layers in turn. What has to be divided, so that this fits?",
         "ZeRO 3 divides parameters, gradients and the optimizer's states. Then only the activations are too many."),
    ),
    Task(
        "faster", 28, "Faster than eight by eight",
        "Llama 3 70B on 64 GPUs of 80 GB. One plan has tensor parallelism in each node and a pipeline over the nodes: "
        f"{EIGHTS}. Choose a plan with a pipeline and 1F1B that fits and is faster.",
        LARGE, same(), faster,
        ("Look at the parts of a step: which of them is largest beside “computing” where tp is 8?",
         "Fewer tensor-parallel ranks send less, and a shorter pipeline idles less. The others are for data."),
    ),
    Task(
        "scale", 28, "Eight times as many GPUs",
        "Llama 3 8B on 512 GPUs, at first with as many sequences per step as on 64. Make the model's own work 50% of "
        "what the GPUs could do (MFU) or more, with at most 1,024 sequences per step and 60 GiB on the fullest rank.",
        {**START, "gpus": 512}, same("batch"), scale,
        ("With 512 sequences, each GPU has one. What is there to hide messages behind?",
         "Give each GPU more work between two exchanges of gradients.",
         "The fastest plans then keep too many activations. A stage of a pipeline keeps those of its own layers."),
    ),
)  # fmt: skip
