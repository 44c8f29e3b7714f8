"""docs/choosing.md, "Which layout?": a guide in five questions, and the results of a search over all plans.

python -m website.choosing      rewrites the page
"""

from __future__ import annotations

from pathlib import Path

from tplab.cost import find
from tplab.cost.measured import fabrics
from tplab.forecast import Plan, Plans, forecast, plans
from tplab.forecast.step import OUTSIDE, Step

PAGE = Path(__file__).parent.parent / "docs" / "choosing.md"
NODES = "h100-measured"
NETWORKS = ("playbook", "infiniband-ndr")

GUIDE = """\
# Which layout? A guide

<!-- written by python -m website.choosing -->

You have a model, a batch and a number of GPUs. Go through these questions in order, and stop where the model fits.
The guide comes from [lab 28](../labs/28_which_layout.ipynb), and [How right is the forecast?](forecast.md) says how far
to believe it.

1. **Does one sequence fit on one GPU, if ZeRO divides what can be divided?** Then use data parallelism alone. Stage 1
   sends no more than plain data parallelism does. Stage 3 sends up to half as much again, and does so for every
   microbatch, so take large ones ([lab 17](../labs/17_zero.ipynb)).
2. **Are activations what is too large?** Use smaller microbatches first, then selective and full recomputation, which
   costs a third of the computing ([lab 15](../labs/15_recomputation.ipynb), [lab 27](../labs/27_will_it_fit.ipynb)).
3. **Is the model too large?** Use tensor parallelism inside a node, with sequence parallelism: 2 or 4 ranks, and 8 only
   if you must, because every layer waits for its messages ([lab 04](../labs/04_megatron_block.ipynb)). Whether to
   combine it with ZeRO 3 depends on the network: for {job}, dp 64 and tp 4 with ZeRO 3 take
   {slower[0]:.1f} times as long as the best plan below on the playbook's network, and {slower[1]:.2f} times on
   InfiniBand NDR.
4. **Still too large?** Add pipeline stages, and let them cross the network: they send the least. Take four microbatches
   per stage or more, or interleave, or the bubble is large ([lab 10](../labs/10_pipeline_schedules.ipynb)).
5. **Are sequences so long that one does not fit, or are there more GPUs than sequences?** Split the sequence, with a
   balanced layout ([lab 20](../labs/20_long_sequence.ipynb), [lab 21](../labs/21_balance.ipynb)).

In a mesh the axis that sends most comes last, so that its ranks share a node: `pp, dp, cp, tp`
([lab 19](../labs/19_axes_and_nodes.ipynb)). When you compare layouts, keep the batch the same, and count only useful
FLOPs.

## What a search finds

The best of all plans, by the forecast for Megatron, on nodes of eight H100s with NVLink and NVSwitch. Between nodes,
each GPU has a network card of 400 Gb/s. What reaches it differs, so each job is searched on two networks
([How right is the clock?](clock.md)):

- **{playbook}** is what one cluster had, with whatever else ran there. Of 400 Gb/s, collectives
  over two nodes reach {shares[0]:.0%}, over 8 nodes {shares[1]:.0%}, and over 32 nodes {shares[2]:.0%}. Its error is
  known, and large.
- **{ndr}** has constants from two messages between two nodes. Its bandwidth does not fall with more nodes,
  which nobody has measured, so it is the better case.

If both networks give one plan, take it. If they differ, try both plans on your own cluster, or measure your network
(`python -m tplab.measure`) and search with that.

The class is the kind of published steps that the interval comes from, with the number of its rows and the error that
half of them stay below ([How right is the forecast?](forecast.md)). Classes do not tell schedules apart. All published
steps of Megatron with pipelines are of 1F1B, plain or interleaved, so a plan with another schedule is less sure than
its interval says. Plans that differ by less than the error of their class are equally good. The last column says why
most of the others lose.
"""

JOBS = (
    ("llama3-8b", 8, 64, 8192),
    ("llama3-8b", 64, 256, 8192),
    ("llama2-13b", 16, 128, 4096),
    ("llama3-70b", 64, 256, 8192),
    ("llama3-70b", 256, 1024, 8192),
)


def page() -> str:
    lines = [_row(*job, network) for job in JOBS for network in NETWORKS if job[1] > 8 or network == NETWORKS[0]]
    head = [
        "| model, GPUs, batch | network | best plan | s | interval, s | its class | MFU | others |",
        "| --- | --- | --- | --: | --: | --- | --: | --- |",
    ]
    playbook, ndr = (fabrics()[network] for network in NETWORKS)
    model, gpus, batch, sequence = JOBS[-1]
    slow, slower = Plan(dp=gpus // 4, tp=4, zero=3, sequence_parallel=True), list[float]()
    for network in NETWORKS:
        cluster = find(NODES, fabric=network)
        best = plans(model, cluster, gpus=gpus, batch=batch, sequence=sequence)[0].seconds
        slower.append(forecast(model, slow, cluster, batch=batch, sequence=sequence).seconds / best)
    text = GUIDE.format(
        job=f"{model} on {gpus} GPUs",
        slower=slower,
        playbook=playbook.name.capitalize(),
        ndr=ndr.name,
        shares=[playbook.reached / nodes**playbook.fall for nodes in (2, 8, 32)],
    )
    return text + "\n" + "\n".join([*head, *lines]) + "\n"


def _row(model: str, gpus: int, batch: int, sequence: int, network: str) -> str:
    found = plans(model, find(NODES, fabric=network), gpus=gpus, batch=batch, sequence=sequence)
    best = found[0]
    job = f"{model}, {gpus} GPUs, {batch:,} x {sequence:,} tokens"
    where = fabrics()[network].name if gpus > 8 else "one node"
    about = str(best.plan), f"{best.seconds:.3g}", best.between, _class(best), f"{best.mfu:.0%}"
    return f"| {' | '.join([job, where, *about, _others(found)])} |"


def _class(step: Step) -> str:
    of = step.measured
    return f"{of.name}: {of.rows} rows, {of.median:.1%}" if of else OUTSIDE


def _others(found: Plans) -> str:
    reason = max(found.lost, key=lambda reason: found.lost[reason])
    return f"{found.lost[reason]:,} of {found.considered:,} {reason}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf8")
