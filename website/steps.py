"""The single rows of docs/forecast.md: nanotron, Megatron and DeepSpeed, FSDP, mixtures of experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.fit import experts as kernels
from benchmarks.fit import steps as fit
from tplab.cost import find
from tplab.forecast import Plan, forecast, measured
from tplab.forecast.classes import SIZES
from tplab.forecast.experts import constants
from tplab.forecast.measured import Run
from tplab.forecast.memory import peak_bytes
from tplab.forecast.stacks import FSDP, STACKS
from website.device import table

DEEPSEEK = (
    ("26.04.01", "b200-measured", Plan(dp=32, pp=8, virtual=2, ep=32), 4096, 3328),
    ("26.04", "b200-measured", Plan(dp=16, pp=16, ep=8), 4096, 2815),
    ("26.02.01", "b200-measured", Plan(dp=16, pp=16, ep=8), 4096, 2790),
    ("26.02", "b200-measured", Plan(dp=16, pp=16, ep=8), 4096, 2689),
    ("25.11", "b200-measured", Plan(dp=16, pp=16, ep=8), 2048, 2139),
    ("25.09", "b200-measured", Plan(dp=16, pp=16, ep=8), 2048, 2265),
    ("25.09", "h100-measured", Plan(dp=64, tp=2, pp=8, virtual=4, ep=64, sequence_parallel=True), 8192, 1297),
)
"""DeepSeek-V3 as Megatron-Bridge's page has it, on sequences of 4,096 tokens in 8 bit: release, cluster, plan,
sequences in a step, tokens per second of each GPU."""
EVERY = 20
"""One in this many of nanotron's rows is printed."""


@cache
def ratios() -> dict[Run, float]:
    """measured / forecast of every published step, with the constants that tplab has."""
    return dict(zip(fit.every(), fit.ratios(fit.every()).tolist()))


def off_by(rows: Iterable[Run]) -> str:
    """ "2.8, 10 %": half of the forecasts are within the first number, and nine of ten within the second."""
    off = [100 * abs(1 / ratios()[run] - 1) for run in rows]
    return f"{np.median(off):.1f}, {np.quantile(off, 0.9):.0f} %"


def _row(run: Run) -> list[str]:
    found = fit.forecast_of(run)
    took = [f"{seconds:.3g}" for seconds in (run.seconds, found.seconds)]
    return [*took, f"{100 * (found.seconds / run.seconds - 1):+.0f} %", found.between]


HEAD = ["measured, s", "forecast, s", "off by", "interval, s"]


def _named(run: Run) -> str:
    gpus = f"{run.plan.ranks} {run.cluster.split('-')[0].upper()}{'s' * (run.plan.ranks > 1)}"
    return f"{run.source}: {run.model.name}, {gpus}, {run.plan}"


def _listed(rows: Iterable[Run]) -> str:
    lines = [[_named(run), "yes" if run.is_fitted else "no", *_row(run)] for run in rows]
    return table(["run", "fitted", *HEAD], lines)


def _sources(*names: str) -> str:
    lines = [line for line in measured.sources("runs") if line.startswith(names)]
    return "".join(f"- {line}\n" for line in lines)


def nanotron() -> str:
    source = " ".join(measured.sources("playbook")).replace("Apache-2.0 measured by", "Apache-2.0. Measured by")
    source = source.removeprefix("source: ").replace("16 nodes nine rows", "16 nodes. Nine rows")
    rows = [run for run in measured.playbook() if run.plan.pp == 1 and run.plan.ranks <= 8 * 32]
    lines = []
    for many, name in {1: "1", 2: "2", 4: "4", 8: "8", 16: "16", 32: "32 and more"}.items():
        such = [run for run in rows if min(32, run.plan.microbatch) == many]
        both = [[run for run in such if (run.plan.tp > 8) == is_wide] for is_wide in (False, True)]
        lines.append([name, *(cell for some in both for cell in (str(len(some)), off_by(some) if some else ""))])
    head = ["microbatch", "rows, tp up to 8", "off by", "rows, tp 16 and more", "off by"]
    every = sorted(measured.playbook(), key=lambda run: (run.plan.pp > 1, run.plan.tp > 8, run.plan.ranks, run.seconds))
    some = [[f"{run.model.name}, {run.plan.ranks} GPUs, {run.plan}", *_row(run)] for run in every[::EVERY]]
    return f"""\
## nanotron

{source}.

Without a pipeline and on up to 32 nodes, half of the forecasts are nearer than the first figure, and nine of ten are
nearer than the second. Tensor parallelism over nodes is forecast nearly as well as in a node while microbatches are
small; it is also much slower, and the forecast knows that. These are errors with the constants that tplab has.

{table(head, lines)}
<details>
<summary>Every {EVERY}th of the {len(every)} rows, by pipeline, tp and number of GPUs</summary>

{table(["run", *HEAD], some)}
</details>
"""


def megatron() -> str:
    """Dense models of Megatron and DeepSpeed, and the causes of the errors."""
    rows = [run for run in measured.runs() if run.stack in ("megatron", "deepspeed") and not run.model.experts]
    all_cards = replace(STACKS["deepspeed"], cards=None)
    zero = [run for run in rows if run.stack == "deepspeed"]
    most = max(1 - fit.forecast_of(run, all_cards).seconds / run.seconds for run in zero)
    llama = next(run for run in rows if run.plan.ranks == 16384 and run.sequence == 8192)
    step = fit.forecast_of(llama)
    return f"""\
## Megatron and DeepSpeed

{_sources("narayanan", "korthikanti", "llama3", "bridge", "simumax")}
Rows marked "no" fit no constant.

{_listed(rows)}
How ZeRO 3 of DeepSpeed sends was chosen when its six rows were known. Each layer is gathered three times, when it is
needed; no more of that is hidden than of gradients; and it crosses the network over one card of each node. In 2021, a
step took as long on 768 GPUs as on twice as many, which is nearly what one card per node needs. With all eight cards,
forecasts would be up to {100 * most:.0f} % too low.

Of Llama 3 on 16,384 GPUs with sequences of 8,192 tokens, {step.parts["dp"]:.1f} of {step.seconds:.1f} s are gradients
and parameters that are not hidden, on a network of which only two nodes were measured. The paper has FLOP/s, and not
seconds. They are taken to count all positions, as an MFU does. If they count half of them, as a causal mask leaves, the
run on sequences of 131,072 tokens took 29 % less than is said here.
"""


def fsdp() -> str:
    rows = [run for run in measured.runs() if run.stack in FSDP]
    cells = defaultdict[tuple[str, str, int], list[Run]](list)
    for run in measured.foundry():
        size = next(place for place, (most, _) in enumerate(SIZES) if run.plan.ranks <= 8 * most)
        cells[run.on.chip.name, run.model.name, size].append(run)
    lines = []
    for (chip, model, size), some in sorted(cells.items()):
        by = [100 * (1 / ratios()[run] - 1) for run in some]
        shares = [f"{share:+.0f} %" for share in (min(by), float(np.median(by)), max(by))]
        lines.append([f"{model}, {chip}, {SIZES[size][1]}", str(len(some)), *shares])
    source = " ".join(measured.sources("llmfoundry")).removeprefix("source: ").replace("md measured", "md: measured")
    foundry = measured.foundry()
    return f"""\
## FSDP

{_sources("kempnerforge")}- llm-foundry: {source}

All rows are fitted. KempnerForge's are compiled (`compiled`), and llm-foundry's are not. Memory is what a GPU had
allocated at most, in GB.

{_with_memory(rows)}
Of llm-foundry's {len(foundry)} rows, half and nine of ten are within {off_by(foundry)}, with tplab's constants:

{table(["model, GPUs, nodes", "rows", "lowest", "median", "highest"], lines)}
A forecast for the smallest model is too slow, and one for the largest on H100s too fast.
"""


def _with_memory(rows: Sequence[Run]) -> str:
    lines = []
    for run in rows:
        held = peak_bytes(run.model, run.plan, run.batch, run.sequence, run.stack)
        both = [f"{run.memory:.1f}" if run.memory else "", f"{held / 1e9:.1f}"]
        lines.append([_named(run), *_row(run), *both])
    return table(["run", *HEAD, "memory, measured", "forecast"], lines)


def experts() -> str:
    """Runs of mixtures of experts."""
    rows = [run for run in measured.runs() if run.model.experts]
    by = np.array([ratios()[run] for run in rows])
    twins = defaultdict[tuple[str, Plan], list[Run]](list)
    for run in rows:
        twins[f"{run.model.name} on {run.plan.ranks} {run.cluster.split('-')[0].upper()}s", run.plan].append(run)
    apart, name = max(
        (max(r.seconds for r in of) / min(r.seconds for r in of), name) for (name, _), of in twins.items()
    )
    return f"""\
## Mixtures of experts

{_sources("bridge", "modelzoo")}
{_listed(rows)}
Do not trust these forecasts as you would the others. {len(rows)} steps of two models were measured, and they took
{by.min():.2f} to {by.max():.2f} times what is forecast. Software decides that more than any formula: with one plan
of {name}, a step of one release took {apart:.1f} times as long as one of another. No column
of a row says what a release does.

- What a layer of experts takes longer than its matmuls and messages is one number for each microbatch and chip, the
  median of the rows marked "yes" ("The constants" above). NVIDIA's guide (Megatron-Bridge,
  docs/training/moe-optimization.md) names what it is made of: small matmuls, the kernels that convert to FP8, and the
  host. We know of nobody who has published these parts.
- A token is sent once to each node that needs it, or in one node to each rank (DeepEP). This was chosen when some of
  these runs were known. modelzoo's run with ep 32 does so. Bridge's recipes of v0.1.0rc4 (25.09) and v0.2.0 (25.11)
  send every copy.
- On 25.09, tokens beyond an equal share for every expert are dropped. The step is then shorter than what is forecast.

{_deepseek()}
{_kernels()}"""


def _deepseek() -> str:
    """Steps whose rows do not state what was recomputed, so that they are in no class."""
    lines, took = [], {"none": list[float](), "full": list[float]()}
    for release, cluster, plan, batch, rate in DEEPSEEK:
        where = find(cluster, fabric="infiniband-ndr") if cluster == "h100-measured" else find(cluster)
        cells = list[str]()
        seconds = batch * 4096 / rate / plan.ranks
        for recompute, ratios_of in took.items():
            chosen = replace(plan, zero=1, dtype="float8", recompute=recompute)
            found = forecast("deepseek-v3", chosen, where, batch=batch, sequence=4096)
            assert found.measured is None
            ratios_of.append(seconds / found.seconds)
            cells.append(f"{found.seconds:.3g}")
        about = f"{release}: {plan.ranks:,} {where.chip.name.split()[0]}s, tp {plan.tp}, pp {plan.pp}, ep {plan.ep}"
        lines.append([about, f"{seconds:.3g}", *cells])
    none, full = (f"{min(of):.2f} to {max(of):.2f}" for of in took.values())
    head = ["DeepSeek-V3 in Megatron-Bridge", "measured, s", "forecast, nothing recomputed", "all recomputed"]
    return f"""\
DeepSeek-V3 has latent attention, three dense layers before its experts, and a shared expert. The rows that were
published (bridge, as above) do not say what was recomputed. Nothing was fitted to them, and they are in no class. The
model of 25.11 also predicts a further token, and that of 25.09 on B200s drops tokens.

{table(head, lines)}
They took {none} times what is forecast if nothing is recomputed, and {full} times if all is.
"""


def _kernels() -> str:
    """Fused kernels of experts and DeepEP's messages, which are forecast separately."""
    names = {"fused": "experts", "messages": "DeepEP"}
    lines = [
        [
            f"{names[what]}, {chip}, {kind}, {name}".replace("_", " ").removesuffix(", "),
            str(rows),
            f"{100 * half:.1f} %",
            f"{100 * most:.1f} %",
        ]
        for what, chip, kind, name, rows, half, most in constants()["errors"]
    ]
    equal = [row for row in kernels.fused() if row.kind in kernels.DTYPES and not row.given[-1]]
    plain = [abs(kernels.by_matmuls(row) / row.seconds - 1) for row in equal]
    return f"""\
### Kernels of experts by themselves

{kernels.source()}: measured by its authors, experts on one H100 and one B200, and DeepEP inside nodes of 8 of them.

`tplab.forecast.experts_seconds` says what the gated MLPs of one rank's experts take forward in one fused kernel of a
serving library, also where the routing is skewed. `message_seconds` says what DeepEP's dispatch and combine take
between the 8 GPUs of a node. Each kernel has constants of its own. Errors are of thirds of the models, by constants
that were fitted to the other two. `python -m benchmarks.fit.experts` does it again.

{table(["kernel", "rows", "half within", "nine of ten within"], lines)}
A training step does not take these times, since its kernels are others. It takes the clock's matmuls. On {len(equal):,}
of these rows, with equal loads in 16 and 8 bit, the clock is off by {100 * float(np.median(plain)):.0f} % (median).
Among other things, it counts neither the kernel that sorts tokens nor the rows that are moved, and it reads the weights
of every expert.
"""
