"""docs/forecast.md, "How right is the forecast?": published training steps beside what tplab forecasts.

python -m website.forecast      writes the page again
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.fit import steps as fit
from tplab.cost import find
from tplab.forecast import Model, Plan, measured
from tplab.forecast.keeps import KEEPS
from tplab.forecast.measured import ON_B200, Run
from tplab.forecast.memory import memory, peak_bytes, room
from tplab.forecast.messages import price, sent_once
from tplab.forecast.stacks import STACKS, constants

PAGE = Path(__file__).parent.parent / "docs" / "forecast.md"

INTRODUCTION = """\
# How right is the forecast?

<!-- written by python -m website.forecast -->

`tplab.forecast` says how long a training step of any model takes with any plan on any cluster. It adds up parts that
exist: matmuls and collectives of [the measured clock](clock.md), a pipeline that is simulated with its own schedule,
gradients and parameters of data parallelism and ZeRO, the optimizer, and the host. None of these
parts is fitted to training steps. What is fitted is one factor per stack (a library that trains models), for nanotron
what the host takes per layer (with few tokens per GPU, GPUs wait for Python), and one factor for a B200 in 16 bit.
They are fitted to the rows that are marked so below. FSDP's factor is fitted to one row, which therefore says nothing
about its error. "Never fitted" are rows of papers that no fit has seen.

A third of the runs, always the same, is left out of the fit. `python -m benchmarks.fit.steps` does it again. Every
forecast has an interval: nine of ten of the runs that were fitted are within.

What is no constant was chosen by hand, with all tables of this page in sight: which share of messages is hidden, which
edge of the measured network, what kernels read and write, how DeepSpeed sends. The third that was left out therefore
judges the fitted numbers, and not these rules. The figures of papers were not read in the papers themselves, but in the
repositories that are named with them. Where a paper prints TFLOP/s per GPU, seconds follow from them.

The same plan can be executed on simulated ranks. On a cluster on which only matmuls and messages take time, the
executed step takes what the forecast says within 2 %, for every schedule, ZeRO stage and recomputation that was tried
(tests/forecast/test_seconds.py). Kernels that are limited by memory are left out there: the forecast counts them as
libraries fuse them, and tplab's own layers do not fuse them.

## In short
"""

LIMITS = """\
## What this does not say

- The runs of the playbook are of one cluster, and single runs differ: one took twice as long as its twin with ZeRO 1,
  and another five times as long as when it was repeated.
- Two fifths of the messages are hidden where messages and computing overlap. That is one number for all stacks and
  plans. Whether runs in papers overlapped is rarely said; then what the stack does today is assumed.
- The network of "h100-measured" is the one that the playbook's cluster had: not its mean at 256 MB, but the upper edge
  of the band of single runs, with which the runs on 16 nodes agree. A cluster with a better network is faster.
- One run of FSDP is among the rows, and six of DeepSpeed, of 2021. The factor of DeepSpeed is Megatron's.
- On a B200 in 16 bit, computing takes as much longer than its kernels one by one as it did in four runs. In FP8 nobody
  has published such a run of a dense model, and its kernels count as they were measured.
- What converts numbers to FP8 is not counted.
- Experts are counted as if tokens were spread equally, and as if their kernels ran in one launch. Neither the host's
  work for them is counted, nor the conversion of their inputs to FP8.
- Small kernels that run one by one wait for their launches. On simulated ranks of "h100-measured", a step of tplab's
  own GPT with one layer of 1,024 features takes 1.8 times its forecast, and a narrower one more.
- Failures, checkpoints, data loading and evaluation are not in a step.
"""


def page() -> str:
    parts = [
        INTRODUCTION,
        _summary(),
        _constants(),
        _papers(),
        _experts(),
        _left_out(),
        _memory(),
        _choices(),
        _fails(),
        LIMITS,
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *("--:" for _ in head[1:])], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _summary() -> str:
    lines: list[list[str]] = []
    kinds = [(f"{name}, {which}", of) for name, *pair in fit.table() for which, of in zip(("fitted", "left out"), pair)]
    for name, of in kinds + fit.unseen():
        if of:
            shares = [f"{100 * share:.1f}" for share in (of.median, of.most, of.worst)]
            lines.append([name, str(of.rows), *shares, f"{100 * of.covered:.0f} %"])
    head = ["what", "runs", "median error, %", "nine of ten within, %", "worst, %", "in the interval"]
    return _table(head, lines)


def _constants() -> str:
    lines = []
    for name, stack in STACKS.items():
        if name != "tplab":
            host = f"{1e3 * stack.host:.1f} ms"
            lines.append([name, f"{stack.factor:.2f}", host, f"{stack.low:.2f} to {stack.high:.2f}"])
    head = ["stack", "factor", "host, per layer and microbatch", "interval, times the forecast"]
    chips = " ".join(
        f"On a {n} in 16 bit, computing takes {by:.2f} times what the clock says."
        for n, by in constants()["chips"].items()
    )
    return f"## The constants\n\n{_table(head, lines)}\n{chips}\n"


def _row(run: Run) -> list[str]:
    found = fit.forecast_of(run)
    took = [f"{seconds:.3g}" for seconds in (run.seconds, found.seconds)]
    return [*took, f"{100 * (found.seconds / run.seconds - 1):+.0f} %", f"{found.low:.3g} to {found.high:.3g}"]


HEAD = ["measured, s", "forecast, s", "off by", "interval, s"]


def _papers() -> str:
    seen, rows = measured.split(measured.runs())[0], measured.runs()
    lines = []
    for run in rows:
        fitted = "no" if not run.is_fitted else "yes" if run in seen or not _is_split(run) else "left out"
        gpus = f"{run.plan.ranks} {run.cluster.split('-')[0].upper()}s"
        lines.append([f"{run.source}: {run.model.name}, {gpus}, {run.plan}", fitted, *_row(run)])
    sources = "".join(f"- {line}\n" for line in measured.sources("runs"))
    return f"## Megatron, FSDP and DeepSpeed\n\n{sources}\n{_table(['run', 'fitted', *HEAD], lines)}\n{_unseen()}"


def _unseen() -> str:
    """What is behind the errors on rows that were not fitted."""
    all_cards = replace(STACKS["deepspeed"], cards=None)
    zero = [run for run in measured.runs() if run.stack == "deepspeed"]
    most = max(1 - fit.forecast_of(run, all_cards).seconds / run.seconds for run in zero)
    llama = next(run for run in measured.runs() if run.plan.ranks == 16384 and run.sequence == 8192)
    step = fit.forecast_of(llama)
    return f"""\
Rows marked "no" have fitted no constant. But how ZeRO 3 of DeepSpeed sends was chosen when its six rows were known.
Each layer is gathered three times, when it is needed; no more of that is hidden than of gradients; and it crosses the
network over one card of each node. In 2021, a step took as long on 768 GPUs as on twice as many, which is nearly what
one card per node needs. With all eight cards, forecasts would be up to {100 * most:.0f} % too low.

Llama 3 on 16,384 GPUs is forecast too slow. {step.parts["dp"]:.1f} of {step.seconds:.1f} s are gradients and parameters
that are not hidden, on the network of "h100-measured" with 128 nodes in a group: twice as many as were measured, and on
another cluster. The paper has FLOP/s, and not seconds. They are taken to count all positions, as an MFU does. If they
count half of them, as a causal mask leaves, the run on sequences of 131,072 tokens took 29 % less than is said here.
"""


def _experts() -> str:
    """What is known of the runs of mixtures of experts."""
    rows = [run for run in measured.runs() if run.model.experts]
    by, wide = fit.ratios(rows), constants()["experts"]
    small, large = (
        {run.source: run for run in rows if run.model.name == name} for name in ("qwen3-30b-a3b", "qwen3-235b-a22b")
    )
    (old, new), releases = ("bridge-25.09", "bridge-25.11"), [small, large]
    took = [[f"{of[source].seconds:.0f}" for source in (old, new)] for of in releases]
    steps = [fit.forecast_of(of[new]) for of in releases]
    share = 100 * steps[0].parts["ep"] / steps[0].seconds
    once = sent_once(large[new].model.experts_per_token, large[new].plan.ep // 8)
    every = steps[1].seconds + steps[1].parts["ep"] * (1 / once - 1)
    network, sent = find("h100-measured", fabric="infiniband-ndr"), ((7_569_408, 118), (14_680_064, 195))
    slower = [price(network, "all_to_all", size, tuple(range(16))).seconds * 1e6 / us for size, us in sent]
    return f"""\
## Mixtures of experts

Do not trust these forecasts as you would the others. Only {len(rows)} steps of two models were measured, and they took
{by.min():.1f} to {by.max():.1f} times what is forecast. No constant is fitted to their seconds; only their interval is,
{wide["low"]:.2f} to {wide["high"]:.2f} times the forecast, and what a forecast says of its reasons repeats that.

- That a token is sent once to each node that needs it (DeepEP) was chosen when these runs were known. modelzoo's run
  does so. Bridge's runs send every copy, as the recipes of its v0.1.0rc4 (25.09) and v0.2.0 (25.11) have it. Then the
  large model would be forecast to take {every:.0f} s; {took[1][0]} were measured in 25.09, and {took[1][1]} in 25.11,
  which sends while it computes on another microbatch. No column of a row says which of these a run does.
- Between nodes, messages are forecast on the playbook's network. There, an all_to_all over 16 GPUs is forecast to take
  {min(slower):.1f} to {max(slower):.1f} times as long as DeepEP's kernels took elsewhere with as many bytes: 118 and
  195 us for 7.6 and 14.7 MB (deepseek-ai/DeepEP, docs/legacy.md).
- In the small model, all messages stay in a node and are {share:.0f} % of its forecast. Its steps took {took[0][0]} and
  {took[0][1]} s with one layout in two releases, so what is missing there is software: NVIDIA's guide (Megatron-Bridge,
  docs/training/moe-optimization.md) names small matmuls, the kernels that convert to FP8, and the host. We know of
  nobody who has published these parts, so they are not counted.
"""


def _is_split(run: Run) -> bool:
    return run.stack == "megatron" and run.cluster != "b200-measured"


def _left_out() -> str:
    source = " ".join(measured.sources("playbook")).replace("Apache-2.0 measured by", "Apache-2.0. Measured by")
    rows = sorted(measured.split(measured.playbook())[1], key=lambda run: (run.model.name, run.plan.ranks, run.seconds))
    lines = [[f"{run.model.name}, {run.plan.ranks} GPUs, {run.plan}", *_row(run)] for run in rows]
    title = f"The {len(rows)} clean runs that were left out"
    text = f"## nanotron\n\n{source}\n\n<details>\n<summary>{title}</summary>\n\n"
    return f"{text}{_table(['run', *HEAD], lines)}\n</details>\n"


def _memory() -> str:
    model, off = replace(Model.find("llama3-70b"), layers=12), list[float]()
    for (tp, pp, dp), peaks in ON_B200.items():
        plan = Plan(dp=dp, tp=tp, pp=pp, zero=1, sequence_parallel=True)
        held = [one.total / 2**30 for one in memory(model, plan, 8 * dp, 4096, "megatron")]
        off += [100 * abs(said / peak - 1) for said, peak in zip(held, peaks, strict=True)]
    rows = [run for run in measured.playbook() if run.memory is not None]
    most = room(find("h100-measured").chip, "nanotron").most
    said = [peak_bytes(run.model, run.plan, run.batch, run.sequence, run.stack) for run in rows]
    wrong = sum(bytes > most for bytes in said)
    for run in measured.runs():
        held = peak_bytes(run.model, run.plan, run.batch, run.sequence, run.stack)
        wrong += held > room(run.on.chip, run.stack).most
    median = re.findall(r"[\d.]+ %", KEEPS["nanotron"].source)[0]
    lines = [
        [f"Megatron on B200, {len(off)} stages", "counted, not fitted", f"{min(off):.2f} to {max(off):.2f} %"],
        ["nanotron on H100, the half that was not fitted", "four numbers fitted to the other half", f"median {median}"],
    ]
    return f"""\
## Memory

What GPUs had allocated at most, beside what the forecast says. All {len(rows)} runs of the playbook and the
{len(measured.runs())} of other sources did run. The forecast wrongly says of {wrong} of them that they do not fit. The
runs on B200 are SimuMax's, as above.

{_table(["runs", "how", "off by"], lines)}"""


def _choices() -> str:
    clean = [run for run in measured.playbook() if run.is_fitted]
    lost = sorted(fit.regret(clean))
    mean = 100 * float(np.mean(lost[:-1]))
    return f"""\
## Does it choose well?

In {len(lost)} cells (a model on so many GPUs) several plans were measured. The plan that the forecast takes for the
fastest was slower than the fastest one by {mean:.1f} % on average and {100 * lost[-2]:.0f} % at most, but for one cell:
there it takes a run of 64 GPUs that took {1 + lost[-1]:.1f} times as long as its twin with ZeRO 1.
"""


def _fails() -> str:
    rows = [run for run in measured.playbook() if not run.is_fitted and run.plan.tp <= 8]
    kinds: list[tuple[str, Callable[[Run], bool]]] = [
        ("no pipeline, 32 nodes and more", lambda run: run.plan.pp == 1),
        ("pipelines in one node", lambda run: run.plan.pp > 1 and run.plan.ranks == 8),
    ]
    for nodes in (2, 4, 8, 16, 32, 64):
        kinds.append((f"pipelines, {nodes} nodes", lambda run, n=nodes: run.plan.pp > 1 and run.plan.ranks == 8 * n))
    lines, medians = [], dict[str, float]()
    for name, is_such in kinds:
        chosen = [run for run in rows if is_such(run)]
        by = fit.ratios(chosen)
        shares = [f"{share:.2f}" for share in np.quantile(by, (0.1, 0.5, 0.9))]
        medians[name] = float(np.median(by))
        lines.append([name, str(len(chosen)), *shares])
    head = ["what", "runs", "one of ten below", "median", "nine of ten below"]
    middle = [medians[f"pipelines, {nodes} nodes"] for nodes in (4, 8, 16)]
    return f"""\
## Where it fails

Runs of the playbook that were not fitted: measured / forecast. Pipelines in one node are as forecast, though none was
fitted. At the median, those on 2 nodes took {medians["pipelines, 2 nodes"]:.1f} times their forecast, those on 4 to 16
nodes {min(middle):.1f} to {max(middle):.1f} times, and those on 64 nodes {medians["pipelines, 64 nodes"]:.0f} times:
nanotron's pipeline engine of that time was later replaced.

{_table(head, lines)}"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf8")
