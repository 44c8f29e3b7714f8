"""docs/forecast.md, "How right is the forecast?": published training steps beside tplab's forecasts.

python -m website.forecast      rewrites the page
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.fit import steps as fit
from tplab.forecast import Model, Plan, measured
from tplab.forecast.classes import ANY, SIZES, Key, class_of, key_from, keys_of, known
from tplab.forecast.measured import ON_B200, Run
from tplab.forecast.memory import memory, peak_bytes, room
from tplab.forecast.stacks import FSDP, KEEPS, STACKS, constants, find_stack
from website import steps
from website.device import table

PAGE = Path(__file__).parent.parent / "docs" / "forecast.md"
NODES = (2, 4, 8, 16, 32, 64)

INTRODUCTION = """\
# How right is the forecast?

<!-- written by python -m website.forecast -->

`tplab.forecast` says how long a training step of any model takes with any plan on any cluster. It adds up parts that
exist: matmuls and collectives of [the measured clock](clock.md), a pipeline that is simulated with its own schedule,
gradients and parameters of data parallelism and ZeRO, the optimizer, and the host. This page compares it with {rows}
training steps that others have published.

Some constants are fitted to these steps. Each stack (a library that trains models) has one factor for its computing.
nanotron and FSDP have what the host takes per layer, because GPUs with few tokens wait for Python. FSDP has its share
of the speed of attention, a B200 in 16 bit has a factor, and a layer of experts has what routing takes on each chip.
The latencies of the playbook's network are fitted to its steps, too, because its collectives are all of 256 MB.

Errors are those of rows that a fit has not seen. The rows are dealt into five folds, and those of each fold are
forecast with constants that were fitted to the other four. `python -m benchmarks.fit.steps` does it again. The network
is not fitted again in each fold. Nor is what was chosen by hand with all rows in sight: which share of messages is
hidden, what kernels read and write, how DeepSpeed sends. So errors on a cluster that nobody here has seen will be
larger.

Figures of papers were not read in the papers themselves, but in the repositories that are named with them. Where a
paper prints TFLOP/s per GPU, seconds follow from them.

The same plan can be executed on simulated ranks. On a cluster on which only matmuls and messages take time, the
executed step takes what the forecast says within 2 %, for every schedule, ZeRO stage and recomputation that was tried
(tests/forecast/test_seconds.py). Kernels that are limited by memory are left out there: the forecast counts them as
libraries fuse them, and tplab's own layers do not fuse them.

## How right?
"""

LIMITS = """\
## What this does not say

- The runs of the playbook are of one cluster, and single runs differ: one took twice as long as its twin with ZeRO 1,
  and another five times as long as when it was repeated. "h100-measured" has this cluster's network. NVIDIA's, Meta's
  and llm-foundry's runs on H100s are forecast on InfiniBand NDR (`fabric="infiniband-ndr"`), and those on A100s with
  the same constants at half the bandwidth, which nobody has measured.
- Two fifths of the messages are hidden where messages and computing overlap. That is one number for all stacks and
  plans, but for tensor parallelism by DTensor, of which nothing is hidden. Whether runs in papers overlapped is rarely
  said; then what the stack does today is assumed.
- Where a forward and a backward pass run as one action, as in DualPipe, each one's messages of experts are taken to lie
  wholly under what the other computes, as far as that is long enough. No row is of such a schedule.
- An interval speaks of rows like those of its class. Where a class has few rows, all of them may be of one cluster, one
  model and one team. A plan with over twice as many ranks as any row of its class is outside what was measured.
- FSDP was measured eager on A100s and H100s with data parallelism alone, and compiled on one to four H200s. The kernels
  of an H200 are taken to be an H100's. DeepSpeed has six rows, of 2021, and Megatron's factor.
- On a B200 in 16 bit, computing takes as much longer than its kernels one by one as it did in four runs. No row is of a
  dense model in FP8 on a B200. There, kernels count as they were measured one by one.
- What converts numbers to FP8 is not counted for dense models. For experts it is part of what routing takes.
- Experts are counted as if tokens were spread equally, unless a plan has a skew, and as if their kernels ran in one
  launch. What routing takes is one number per layer and microbatch, whatever their size, and it is known of Megatron on
  H100s and B200s only.
- No step of a model with latent attention, or with dense layers before its experts (DeepSeek-V2 and V3), was fitted,
  and none is in a class: their forecasts have no interval. What predicts a further token (DeepSeek-V3's MTP) is left
  out. We know of no step whose plan has an `etp`, `dispatch` or `skew`, so these have no interval either. The bytes are
  those of tplab's own layers (tests/forecast/test_dispatch.py), but no row says what a skew costs in a training step.
- Small kernels that run one by one wait for their launches. On simulated ranks of "h100-measured", a step of tplab's
  own GPT on 512 tokens took 2.0 times its forecast with 16 layers of 1,024 features, and 2.6 times with 8 of 512.
- Failures, checkpoints, data loading and evaluation are not in a step.
"""


def page() -> str:
    parts = [
        INTRODUCTION.format(rows=len(fit.every())),
        _classes(),
        _constants(),
        steps.nanotron(),
        steps.megatron(),
        steps.fsdp(),
        steps.experts(),
        _memory(),
        _choices(),
        _fails(),
        LIMITS,
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts)


# ------------------------------------------------------------------------------------------------------------- classes


def _classes() -> str:
    """The classes of all published steps: for each step, the narrowest one that has enough rows."""
    judged, rows = defaultdict[Key, int](int), defaultdict[Key, list[Run]](list)
    for run in fit.every():
        stack = find_stack(run.stack, run.plan)
        of = class_of(stack, run.model, run.plan, run.on)
        judged[key_from(of.name) if of else ()] += 1
        for key in dict.fromkeys(keys_of(stack.name, run.model, run.plan, run.on)):
            rows[key].append(run)
    lines = []
    for key in sorted(judged.keys() - {()}, key=_order):
        of = known()[key]
        errors = [f"{100 * share:.1f} %" for share in (of.median, of.most)]
        interval = f"{of.low:.2f} to {of.high:.2f}", f"{100 * inside(rows[key]):.0f} %"
        lines.append([of.name, str(judged[key]), str(of.rows), *errors, *interval])
    head = ["class", "steps", "rows", "half within", "nine of ten within", "interval, times the forecast", "inside"]
    pooled = sum(count for key, count in judged.items() if ANY in key)
    return f"""\
A class is what steps have in common that decides how well they are forecast. Every published step is in one line of the
table, whether its forecast is good or bad: "steps" add up to {sum(judged.values())}, and {judged[()]} are in no class.
"Rows" are those that the errors and the interval are made of. They are more than the steps where a class is pooled
("any chip"): {pooled} steps are of kinds with fewer than five rows, so they are judged with rows of other dtypes,
chips or numbers of nodes. The same happens to your plan. If even that leaves fewer than five rows, a forecast has no
interval and says "outside what was measured".

Errors are shares of the measured time, of rows that a fit has not seen. Nine of ten measured steps took so many times
their forecast as the interval says. "Inside" is tried, with the constants that tplab has: for each row, an interval is
made from the other rows of its class, and this is the share of rows that are inside of it.

{table(head, lines)}
Believe a class whose interval is narrow. nanotron's pipelines over nodes, its runs on 64 nodes and its tensor
parallelism over nodes with large microbatches took up to several times as long as is forecast, and some a hundred
times; see "Where it fails" below. Their wide intervals say that nothing useful is known.
"""


def _order(key: Key) -> tuple[object, ...]:
    sizes = [name for _, name in SIZES]
    return list(STACKS).index(key[0]), *key[1:-1], sizes.index(key[-1]) if key[-1] in sizes else len(sizes)


def inside(rows: Sequence[Run]) -> float:
    logs = [(float(np.log(steps.ratios()[run])), run.plan.ranks) for run in rows]
    found = [fit.measured_of("", [*logs[:place], *logs[place + 1 :]]) for place in range(len(logs))]
    return float(np.mean([of.low <= steps.ratios()[run] <= of.high for of, run in zip(found, rows)]))


def _constants() -> str:
    lines = []
    for name, stack in STACKS.items():
        if name != "tplab":
            lines.append([name, f"{stack.factor:.2f}", f"{1e3 * stack.host:.1f} ms", f"{stack.attention_share:.2f}"])
    head = ["stack", "factor", "host, per layer and microbatch", "share of the speed of attention"]
    chips = " ".join(
        f"On a {n} in 16 bit, computing takes {by:.2f} times what the factor says."
        for n, by in constants()["chips"].items()
    )
    routing = " and ".join(
        f"{1e3 * by:.1f} ms on a{'n' * (n[0] in 'AH')} {n}" for n, by in constants()["routing"].items()
    )
    return f"""\
## The constants

{table(head, lines)}
{chips}
For each microbatch, a layer of experts takes {routing}
longer than its kernels and messages. DeepSpeed's constants are Megatron's. A host's time of 1.0 ms and a share of 1 are
assumed, and not fitted.
"""


# ------------------------------------------------------------------------------------------- memory, choices, failures


def _memory() -> str:
    model, off = replace(Model.find("llama3-70b"), layers=12), list[float]()
    for (tp, pp, dp), peaks in ON_B200.items():
        plan = Plan(dp=dp, tp=tp, pp=pp, zero=1, sequence_parallel=True)
        held = [one.total / 2**30 for one in memory(model, plan, 8 * dp, 4096, "megatron")]
        off += [100 * abs(said / peak - 1) for said, peak in zip(held, peaks, strict=True)]
    wrong, held = defaultdict[str, int](int), list[float]()
    for run in fit.every():
        peak = peak_bytes(run.model, run.plan, run.batch, run.sequence, run.stack)
        wrong[run.source] += peak > room(run.on.chip, find_stack(run.stack, run.plan)).most
        if run.stack in FSDP and run.memory:
            held.append(100 * (peak / 1e9 / run.memory - 1))
    median = re.findall(r"[\d.]+ %", KEEPS["nanotron"].source)[0]
    said = " and ".join(f"{count} of {source}'s" for source, count in wrong.items() if count)
    lines = [
        [f"Megatron on B200, {len(off)} stages", "counted, not fitted", f"{min(off):.2f} to {max(off):.2f} %"],
        ["nanotron on H100, the half that was not fitted", "four numbers fitted to the other half", f"median {median}"],
        [f"FSDP compiled on H200, {len(held)} runs", "chosen on these runs", f"{min(held):+.0f} to {max(held):+.0f} %"],
    ]
    return f"""\
## Memory

What GPUs had allocated at most, beside what the forecast says. The runs on B200 are SimuMax's, and those on H200
KempnerForge's, as above.

{table(["runs", "how", "off by"], lines)}
All {len(fit.every())} runs on this page did run. The forecast wrongly says of {sum(wrong.values())} that they do not
fit: {said}. llm-foundry's memory was not published, so what eager FSDP keeps is
assumed, and for these runs it is too much.
"""


def _choices() -> str:
    clean = [run for run in measured.playbook() if run.is_fitted]
    lost = sorted(fit.regret(clean))
    mean = 100 * float(np.mean(lost[:-1]))
    flat = [run for run in measured.playbook() if run.plan.pp == 1]
    also = fit.regret(flat)
    bad = [one for one in also if one > 0.15]
    return f"""\
## Does it choose well?

In {len(lost)} cells (a model on so many GPUs) of the playbook, several plans were measured on up to 16 nodes, without a
pipeline and with tp up to 8. The plan that the forecast takes for the fastest was slower than the fastest one by
{mean:.1f} % on average and {100 * lost[-2]:.0f} % at most, but for one cell: there it takes a run of 64 GPUs that took
{1 + lost[-1]:.1f} times as long as its twin with ZeRO 1. Constants were fitted to these rows.

With tp over nodes and up to 64 nodes, there are {len(flat)} rows without a pipeline in {len(also)} cells. In
{len(also) - len(bad)} of them, at most {100 * max(one for one in also if one not in bad):.0f} % are lost, and in the
other {len(bad)} it is {100 * min(bad):.0f} to {100 * max(bad):.0f} %.
"""


def _fails() -> str:
    kinds: list[tuple[str, Callable[[Run], bool]]] = [
        (
            "no pipeline, tp up to 8, 64 nodes",
            lambda run: run.plan.pp == 1 and run.plan.tp <= 8 and run.plan.ranks == 512,
        )
    ]
    few, many = "no pipeline, tp 16 and more, microbatch up to 4", "no pipeline, tp 16 and more, microbatch from 8"
    kinds += [(few, lambda run: run.plan.pp == 1 and run.plan.tp > 8 and run.plan.microbatch <= 4)]
    kinds += [(many, lambda run: run.plan.pp == 1 and run.plan.tp > 8 and run.plan.microbatch > 4)]
    kinds += [("pipelines, one node", lambda run: run.plan.pp > 1 and run.plan.ranks == 8)]
    for nodes in NODES:
        kinds.append((f"pipelines, {nodes} nodes", lambda run, n=nodes: run.plan.pp > 1 and run.plan.ranks == 8 * n))
    lines, medians = [], dict[str, float]()
    for name, is_such in kinds:
        by = [steps.ratios()[run] for run in measured.playbook() if is_such(run)]
        medians[name] = float(np.median(by))
        lines.append([name, str(len(by)), *(f"{share:.2f}" for share in np.quantile(by, (0.1, 0.5, 0.9)))])
    head = ["what", "runs", "one of ten below", "median", "nine of ten below"]
    middle = [medians[f"pipelines, {nodes} nodes"] for nodes in (4, 8, 16)]
    return f"""\
## Where it fails

Runs of the playbook that were not fitted: measured / forecast. Pipelines in one node are as forecast, though none was
fitted. At the median, those on 2 nodes took {medians["pipelines, 2 nodes"]:.1f} times their forecast, those on 4 to 16
nodes {min(middle):.1f} to {max(middle):.1f} times, and those on 64 nodes {medians["pipelines, 64 nodes"]:.0f} times:
nanotron's pipeline engine of that time was later replaced. On 64 nodes without a pipeline, each run took longer than
the fastest one of its model on 32 nodes, and we do not know why.

{table(head, lines)}"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf8")
