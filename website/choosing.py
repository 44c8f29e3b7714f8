"""docs/choosing.md, "Which layout?": a guide in five questions, and what a search over all plans finds.

python -m website.choosing      writes the page again
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tplab.forecast import Plan, Plans, forecast, plans
from tplab.forecast.messages import FABRIC

PAGE = Path(__file__).parent.parent / "docs" / "choosing.md"
CLUSTER = "h100-measured"

GUIDE = """\
# Which layout? A guide

<!-- written by python -m website.choosing -->

You have a model, a batch and a number of GPUs. Go through these questions in order, and stop where the model fits.
The guide comes from [lab 26](../labs/26_which_layout.ipynb), and [How right is the forecast?](forecast.md) says how far
to believe it.

1. **Does one sequence fit on one GPU, if ZeRO divides what can be divided?** Then use data parallelism alone. Stage 1
   sends no more than plain data parallelism does. Stage 3 sends up to half as much again, and does so for every
   microbatch, so take large ones ([lab 17](../labs/17_zero.ipynb)).
2. **Are activations what is too large?** Use smaller microbatches first, then selective and full recomputation, which
   costs a third of the computing ([lab 15](../labs/15_recomputation.ipynb), [lab 25](../labs/25_will_it_fit.ipynb)).
3. **Is the model too large?** Use tensor parallelism inside a node, with sequence parallelism: 2 or 4 ranks, and 8 only
   if you must, because every layer waits for its messages ([lab 04](../labs/04_megatron_block.ipynb)). Take ZeRO 1 with
   it, not 3: for {job}, dp 64 and tp 4 with ZeRO 3 take {slower:.1f} times as long as the best plan below.
4. **Still too large?** Add pipeline stages, and let them cross the network: they send the least. Take four microbatches
   per stage or more, or interleave, or the bubble is large ([lab 10](../labs/10_pipeline_schedules.ipynb)).
5. **Are sequences so long that one does not fit, or are there more GPUs than sequences?** Split the sequence, with a
   balanced layout ([lab 20](../labs/20_long_sequence.ipynb), [lab 21](../labs/21_balance.ipynb)).

In a mesh the axis that sends most comes last, so that its ranks share a node: `pp, dp, cp, tp`
([lab 19](../labs/19_axes_and_nodes.ipynb)). When you compare layouts, keep the batch the same, and count only useful
FLOPs.

## What a search finds

The best of all plans, by the forecast for Megatron. Half of its forecasts are off by a few percent, so plans that
differ by less are equally good. The last column says why most of the others lose.

All of them are on nodes of eight H100s, joined by NVLink and NVSwitch. Between nodes, each GPU has a network card of
400 Gb/s. Collectives over two nodes reach {two} of that bandwidth, over 8 nodes {eight}, and over 32 nodes {many}: that
was measured on one cluster ([How right is the forecast?](forecast.md)). On a better network, data parallelism and ZeRO
cost less than here; on a slower one, plans with more stages and fewer data-parallel ranks win.
"""

NODES = {"two": 2, "eight": 8, "many": 32}

JOBS = (
    ("llama3-8b", 8, 64, 8192),
    ("llama3-8b", 64, 256, 8192),
    ("llama2-13b", 16, 128, 4096),
    ("llama3-70b", 64, 256, 8192),
    ("llama3-70b", 256, 1024, 8192),
)


def page() -> str:
    lines = [
        "| model, GPUs, batch | best plan | s | interval, s | MFU | others |",
        "| --- | --- | --: | --: | --: | --- |",
    ]
    lines += [_row(*job) for job in JOBS]
    reached: dict[str, Any] = {
        name: f"{FABRIC.reached / nodes**FABRIC.congestion:.0%}" for name, nodes in NODES.items()
    }
    model, gpus, batch, sequence = JOBS[-1]
    slow = Plan(dp=gpus // 4, tp=4, zero=3, sequence_parallel=True)
    best = plans(model, CLUSTER, gpus=gpus, batch=batch, sequence=sequence)[0].seconds
    took = forecast(model, slow, CLUSTER, batch=batch, sequence=sequence).seconds
    reached |= {"job": f"{model} on {gpus} GPUs", "slower": took / best}
    return GUIDE.format(**reached) + "\n" + "\n".join(lines) + "\n"


def _row(model: str, gpus: int, batch: int, sequence: int) -> str:
    found = plans(model, CLUSTER, gpus=gpus, batch=batch, sequence=sequence)
    best = found[0]
    job = f"{model}, {gpus} GPUs, {batch:,} x {sequence:,} tokens"
    interval = best.step.between
    return f"| {job} | {best.plan} | {best.seconds:.3g} | {interval} | {best.mfu:.0%} | {_others(found)} |"


def _others(found: Plans) -> str:
    reason = max(found.lost, key=lambda reason: found.lost[reason])
    return f"{found.lost[reason]:,} of {found.considered:,} {reason}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf8")
