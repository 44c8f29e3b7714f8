"""Lab 27: memory of Megatron on B200s, of nanotron and of KempnerForge, which uses torch's FSDP."""

from dataclasses import replace
from functools import cache

from tests.labs.entries import Claim, Given, Quote
from tplab.cost import H100_MEASURED
from tplab.exercises.will_it_fit import JOBS, LIMIT
from tplab.forecast import Model, Plan, forecast
from tplab.forecast.measured import ON_B200, runs
from tplab.forecast.memory import Held, memory, usable_bytes
from tplab.forecast.stacks import KEEPS

GB = 1e9
LAYER = 2 * 8192 * 4096 / GB
EIGHT_STAGES = Plan(pp=8, recompute="full")
BIG = Plan(tp=4, pp=2, dp=16, sequence_parallel=True)
PARTED = replace(BIG, zero=3, pp=1, dp=32)


def stages(sequences: int = 1) -> tuple[Held, ...]:
    plan = replace(EIGHT_STAGES, microbatch=sequences)
    return memory(Model.find("llama3-8b"), plan, batch=64, sequence=8192)


def states(held: Held) -> float:
    return (held.parameters + held.gradients + held.optimizer) / GB


def big(plan: Plan, stack: str = "megatron") -> tuple[Held, ...]:
    return memory(Model.find("llama3-70b"), plan, batch=128, sequence=8192, stack=stack)


@cache
def fsdp() -> list[float]:
    """Forecast over measured memory of KempnerForge's runs on H200s."""
    found = list[float]()
    for run in runs():
        if run.stack == "fsdp" and run.memory:
            one = forecast(run.model, run.plan, run.on, batch=run.batch, sequence=run.sequence, stack=run.stack)
            found.append(one.peak.total / GB / run.memory)
    return found


def off_on_b200() -> float:
    """The largest error of Megatron's memory, in percent."""
    twelve, errors = replace(Model.find("llama3-70b"), layers=12), list[float]()
    for (tp, pp, dp), measured in ON_B200.items():
        plan = Plan(tp=tp, pp=pp, dp=dp, zero=1, sequence_parallel=True)
        held = memory(twelve, plan, batch=8 * dp, sequence=4096)
        errors += [abs(one.total / 2**30 / gib - 1) for one, gib in zip(held, measured, strict=True)]
    return 100 * max(errors)


CLAIMS = (
    Claim("76.1 GB where the mark is at 71.5", lambda: [70.9 * 2**30 / GB, ON_B200[1, 2, 4][0] * 2**30 / GB]),
    Given("a plan fits if its forecast is at most 80 of the 85 GB that a program can use"),
    Claim("the weights alone take only 13.5 GB", lambda: [2 * Model.find("llama2-7b").parameters / GB]),
    Claim("which is 0.067 GB", lambda: [LAYER]),
    Claim(
        "= 25.2$ GB, and stage 1 needs 15.7 GB",
        lambda: [states(stages()[0]), 1, states(stages()[1])],
    ),
    Claim(
        "= 2.1$ GB, stage 1 keeps seven, 1.9 GB, and stage 7 keeps one, 0.3 GB",
        lambda: [32 * LAYER, 1, 28 * LAYER, 7, 4 * LAYER],
    ),
    Claim(
        "= 6.3$ GB",
        lambda: [stages()[7].logits / GB],
    ),
    Claim("about 29, 20 and 32 GB", lambda: [stages()[stage].total / GB for stage in (0, 1, 7)]),
    Claim(
        "While a layer is computed again, about 2 GB more are needed",
        lambda: [stages()[0].total / GB - states(stages()[0]) - 32 * LAYER],
    ),
    Claim(
        "With two sequences in a microbatch they are twice as large",
        lambda: stages(2)[7].logits == 2 * stages(1)[7].logits,
    ),
    Claim("it is off by 0.1% at most", lambda: [off_on_b200()]),
    Claim(
        "the GPUs on which Llama 3 405B was trained have 12% less than its forecast",
        lambda: "Llama 3 405B trained on GPUs that have 12 % less than its forecast" in KEEPS["megatron"].source,
    ),
    Claim("On the other half, the median error is 10.5%", lambda: "median error is 10.5 %" in KEEPS["nanotron"].source),
    Quote(
        "with dp 4 they still take 32.1 GB", ("dp 4, tp 1, microbatches: 2 of 4 sequences", "of that gradients 32.1")
    ),
    Claim("The forecast is within 8% of what was measured", lambda: all(abs(by - 1) < 0.08 for by in fsdp())),
    Claim(
        "The 85 GB are 79.2 of an H100's 80 GiB",
        lambda: [usable_bytes(H100_MEASURED.chip) / GB, usable_bytes(H100_MEASURED.chip) / 2**30, 80],
    ),
    Claim(
        "the activations of stage 0 stay at 45.0 GB",
        lambda: all(round(big(replace(BIG, pp=pp, dp=32 // pp))[0].activations / GB, 1) == 45 for pp in (2, 4, 8)),
    ),
    Claim(
        "with eight of them it still needs 89.1 GB",
        lambda: [max(held.total for held in big(replace(BIG, pp=8, dp=4))) / GB],
    ),
    Claim(
        "ZeRO 1 with full recomputation (63.6 GB), and ZeRO 3 (57.3 GB)",
        lambda: [1, big(replace(BIG, zero=1, recompute="full"))[0].total / GB, 3, big(PARTED)[0].total / GB],
    ),
    Claim(
        "each rank would have 71 GB of whole gradients",
        lambda: [big(PARTED, "fsdp-compiled")[0].gradients / GB],
    ),
    Claim(
        "so the plan would not fit",
        lambda: big(PARTED, "fsdp-compiled")[0].total > LIMIT > big(PARTED, "fsdp")[0].total,
    ),
    Given("to within 10%"),
    Claim(
        "None of these four jobs fits into 80 GB",
        lambda: [LIMIT / GB] if all(job.peak(job.plan)[0] > LIMIT for job in JOBS.values()) else False,
    ),
)
