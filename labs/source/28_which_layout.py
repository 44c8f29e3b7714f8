# %% [markdown]
# # 28 Which layout?
#
# **There are thousands of ways to put a model on 128 GPUs. Which one is fastest, and can you know before you try?**
#
# Prerequisites: what fits ([lab 27](27_will_it_fit.ipynb)), and what each axis costs
# ([lab 26](26_three_dimensions.ipynb)). Time: one hour.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/28_which_layout.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/28_which_layout.ipynb)
#
# ![Ten layouts: bars of forecasts, and marks for what was measured.](images/28_which_layout.png)
#
# *Ten layouts of the playbook's 8B model on 128 H100s. Bars are forecasts of a training step, and marks
# are what Hugging Face measured. The slowest took 1.9 times as long as the fastest, and the forecast did not foresee
# it.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
from collections import defaultdict
from statistics import median

from tplab.cost import find
from tplab.exercises.which_layout import forecast_of, measured_runs
from tplab.forecast import Model, Plan, plans
from tplab.forecast.measured import foundry, playbook, runs
from tplab.widgets import Bars, Dot, Row, knob, layout_lab, scatter

# %% tags=["opening-picture"]
def short(plan):
    zero = f", ZeRO {plan.zero}" if plan.zero else ""
    return f"dp {plan.dp}, tp {plan.tp}, microbatch {plan.microbatch}{zero}"

def bars(model, gpus):
    rows = []
    for run in measured_runs(model, gpus):
        parts = {name: s for name, s in forecast_of(run).parts.items() if s > 1e-3}
        rows.append(Row(short(run.plan), parts, measured=run.seconds))
    return Bars(rows, "")

GPUS = 16, 32, 64, 128
title, by = "One step of an 8B model on H100s", "Hugging Face"
about = "forecast for nanotron on the playbook's network; 256 x 4,096 tokens"
knob(title, "GPUs", {n: bars("playbook-8b", n) for n in GPUS}, start=128, about=about,
     unit="s", by=by)

# %% [markdown]
# Only time that nothing hides is drawn: in `tp` and `dp`, ranks wait for messages, and in `host`, for Python.
#
# ## By hand: how fast could it be?
#
# By the usual count, training on one token takes 6 FLOPs per parameter, embedding included, plus those of attention
# without a causal mask. If all GPUs did that work at their peak, a step would take:

# %%
eight = Model.find("playbook-8b")
tokens = 256 * 4096
flops = tokens * eight.flops_per_token(4096)
at_peak = flops / (128 * 989e12)  # the peak of an H100 in bfloat16
size = eight.parameters / 1e9
print(f"{size:.2f} billion parameters, {flops / 1e15:.0f} PFLOPs per step")
best = measured_runs("playbook-8b", 128)[0].seconds
print(f"at the peak {at_peak:.2f} s, and the best run took {best:.2f} s")
print(f"ratio: {at_peak / best:.0%}")

# %% [markdown]
# The ratio is the **model FLOPs utilisation**, MFU. The rest is lost in kernels that do not reach the peak, in messages
# that nothing hides, on the host, and in the optimizer.
#
# ## Predict: your guess
#
# Take the model of 3 billion parameters on 16 GPUs, in two nodes of eight, with a batch of 256 sequences and no
# pipeline. Choose `dp`, `tp` and the sequences in a microbatch, and see what was measured and forecast.

# %%
from tplab.exercises.which_layout import check_guess

my_guess = {"dp": None, "tp": None, "microbatch": None}

check_guess(**my_guess, model="playbook-3b", gpus=16)

# %% [markdown]
# <details><summary>The best, and why</summary>
#
# Of what was measured, `dp` 16, `tp` 1, microbatches of 2. The model fits on one GPU if ZeRO divides the optimizer's
# states, so it does not need tensor parallelism, which sends activations in every layer. Microbatches of 2 make larger
# matmuls than single sequences. Microbatches of 4 would make them larger still, but need more memory than a GPU has.
#
# </details>
#
# ## Why is it fast?
#
# A forecast adds up the parts of a step, which earlier labs explain: matmuls and collectives on a measured clock ([lab
# 03](03_network_levels.ipynb)), the bubble of the schedule ([lab 10](10_pipeline_schedules.ipynb)), gradients that hide
# behind the backward pass ([lab 16](16_data_parallel.ipynb)). Two numbers are fitted to 118 runs of nanotron, the library
# that was used here, without a pipeline, with `tp` inside a node and on at most 16 nodes: one factor for all computing,
# and the time that the host needs per layer. **The playbook's network** is fitted to collectives that the same people
# measured, and to 195 runs without a pipeline. The best run is not shown, so that you can still guess.

# %%
ranked = measured_runs("playbook-3b", 16)
for run in ranked[1::4] + ranked[-1:]:
    one = forecast_of(run)
    print(f"{short(run.plan)}: {run.seconds:.2f} s, forecast {one.seconds:.2f} s")
    parts = {part: s for part, s in one.parts.items() if s > 0.005}
    print("   ", ", ".join(f"{part} {s:.2f}" for part, s in parts.items()))

# %% [markdown]
# With microbatches of one sequence and high `tp`, as in the last row, the host cannot start kernels as fast as the GPU
# finishes them, and `host` is most of the loss.
#
# To see what one choice does, compare **like with like**: two runs with the same model, GPUs, microbatch and ZeRO
# stage, of which one has twice the tensor parallelism and half the copies.

# %%
alike = defaultdict(dict)
for run in playbook():
    if run.plan.pp == 1 and run.plan.ranks <= 256:
        of = run.model.name, run.plan.ranks, run.plan.microbatch, run.plan.zero
        alike[of][run.plan.tp] = run.seconds, forecast_of(run).seconds

for microbatch in (1, 4):
    print(f"microbatches of {microbatch}: how many times as long with twice the tp?")
    for tp in (2, 4, 8):
        both = [(group[tp], group[2 * tp]) for of, group in alike.items()
                if of[2] == microbatch and {tp, 2 * tp} <= set(group)]
        measured, said = (median(b[i] / a[i] for a, b in both) for i in (0, 1))
        print(f"   tp {tp} to {2 * tp:>2}: measured {measured:.2f}, "
              f"forecast {said:.2f} (pairs: {len(both)})")

# %% [markdown]
# From 8 to 16, tensor parallelism leaves the node, and each of its messages crosses the network: in the few such
# pairs, steps took more than three times as long. Inside the node it costs less, and less with microbatches of 4
# than of 1. (Runs on 512 GPUs, which are forecast badly, are left out.) So use as little tensor parallelism as you can, and keep it in the node.
#
# ## How right is it?
#
# Of Hugging Face's 803 published runs, 794 count here. A forecast is good for some **classes** of them and useless for
# others, so each class has an interval of its own, which holds nine of ten of its runs. For each run's error, the two numbers
# were fitted without that run, but the network was not fitted again. Errors are parts of the measured time, and intervals are
# multiples of the forecast.

# %%
by_class = defaultdict(list)
for run in playbook():
    by_class[forecast_of(run).measured].append(run)
print("half off by / nine of ten by / interval")
for one in sorted(by_class, key=lambda one: one.median):
    _, _, tp, pipeline, *_, nodes = one.name.split(", ")
    print(f"{one.median:4.0%} {one.most:4.0%}  {one.low:.2f} to {one.high:6.2f}",
          f" {tp}, {pipeline}, {nodes}: {one.rows} runs")

# %% [markdown]
# In the first three classes, nine of ten runs are within about 10%. With a pipeline over several nodes, the forecast says
# nothing: the intervals reach 106 times the forecast. Here every run is a dot, beside published runs of Megatron, torch
# FSDP and DeepSpeed.

# %%
def dots(some):
    return [Dot(run.seconds, forecast_of(run).seconds, f"{run.model.name}, {run.plan}")
            for run in some]

plain = [run for run in playbook() if run.plan.pp == 1]
piped = [run for run in playbook() if run.plan.pp > 1]
panels = {
    "nanotron, no pipeline": {
        "tp inside": dots(run for run in plain if run.plan.tp <= 8),
        "tp across": dots(run for run in plain if run.plan.tp > 8)},
    "nanotron, with a pipeline": {
        "one node": dots(run for run in piped if run.plan.ranks <= 8),
        "more nodes": dots(run for run in piped if run.plan.ranks > 8)},
    "Megatron, FSDP, DeepSpeed": {"all": dots([*runs(), *foundry()])},
}
scatter(panels, title="Forecast and measured", about="all published runs",
        sentence="Below the line, a run took longer than was forecast.")

# %% [markdown]
# Almost all large errors are on one side: the run took *longer*. One layout of the 8B model took 19 s in one run and 89 s
# in another (the last two rows of the first picture, with its knob at 16 GPUs). We do not know why nanotron's pipelines were slow;
# Megatron's, on other networks, are near the line.
#
# ## Search
#
# `plans` forecasts every possible plan, best first, and counts why the others lost. From here on, forecasts are for Megatron's
# kernels and memory, but for all of tplab's schedules, on nodes of eight H100s with **InfiniBand NDR** between them, the network of
# all Megatron's measured runs on H100s:

# %%
CLUSTER = find("h100-measured", fabric="infiniband-ndr")
job = {"gpus": 256, "batch": 1024, "sequence": 8192}
found = plans("llama3-70b", CLUSTER, **job)
print(found)
middle = found[len(found) // 2].seconds / found[0].seconds
print(f"half of those that fit take {middle:.1f} times as long as the best, or longer")

# %%
for one in (found[0], plans("llama3-70b", CLUSTER, **job, schedules=["1f1b"])[0]):
    print(f"{one.plan}: {one.seconds:.1f} s ({one.low:.1f} to {one.high:.1f})")
    print(f"   {one.why}")
    print(f"   interval: {one.measured.name} ({one.measured.rows} runs)")

# %% [markdown]
# In the list, `cp` is context parallelism ([lab 20](20_long_sequence.ipynb)), `v_half` is lab 10's V-Half, and `v_min`
# keeps even fewer microbatches. Megatron-LM, as far as we know, has neither. ZeRO 3 in a pipeline gathers every layer again for each microbatch, and
# DeepSpeed [refuses it](https://github.com/deepspeedai/DeepSpeed/issues/1629). So the best plan of 1F1B is shown
# too: it has no pipeline. They differ by less than either interval is wide. A class ignores the schedule, the ZeRO stage and `cp`:
# no published run had V-Half, and the interval of the first plan comes from 7 runs with other schedules.

# %% [markdown]
# Here are plans for Llama 3 8B on 64 GPUs as a picture, with tasks below it. Choose *Faster than eight by eight*: how do
# you beat tensor parallelism over 8 GPUs and a pipeline of 8 stages?

# %%
layout_lab("llama3-8b", cluster=CLUSTER, gpus=64, batch=256, sequence=8192)

# %% [markdown]
# ## Turn the knob
#
# Llama 3 8B is trained on 32 to 512 GPUs. With more GPUs, each gets fewer sequences of the batch. How does the best
# layout change from row to row, and how much of each GPU is lost? Then turn the knob to a batch four times as large,
# and to the playbook's network.

# %%
SHOWN = {"dp": "dp", "tp": "tp", "pp": "pp", "cp": "cp", "zero": "ZeRO"}

def best_on(gpus, cluster, batch):
    best = plans("llama3-8b", cluster, gpus=gpus, batch=batch, sequence=8192)[0]
    share = {part: 100 * s / best.seconds for part, s in best.parts.items()}
    bar = {part: share[part] for part in ("computing", "tp", "dp", "bubble")}
    bar["other"] = 100 - sum(bar.values())
    numbers = {name: getattr(best.plan, field) for field, name in SHOWN.items()}
    plan = ", ".join(f"{name} {n}" for name, n in numbers.items()
                     if n > (name != "ZeRO"))
    return Row(f"{gpus} GPUs: {plan}", bar, f"{best.seconds:.2f} s"), best.mfu

options = {}
NDR, PLAYBOOK = "infiniband-ndr", "playbook"
names = {NDR: "NDR", PLAYBOOK: "playbook's"}
for fabric, batch in ((NDR, 64), (NDR, 256), (PLAYBOOK, 256)):
    on = find("h100-measured", fabric=fabric)
    rows, mfus = zip(*(best_on(gpus, on, batch) for gpus in (32, 64, 128, 256, 512)))
    busy = [mfu / row.parts["computing"] for mfu, row in zip(mfus, rows)]
    options[f"{names[fabric]}, {batch}"] = Bars(rows, (
        f"MFU falls from {mfus[0]:.0%} to {mfus[-1]:.0%}. While GPUs compute, they "
        f"reach {100 * busy[0]:.0%} and {100 * busy[-1]:.0%} of their peak."))
about = "Llama 3 8B on H100s, sequences of 8,192 tokens; Megatron's kernels"
knob("The best plan's step", "network, sequences in a batch", options,
     start="NDR, 64", about=about, unit="%")

# %% [markdown]
# `other` is the host, the optimizer, and messages of pipeline and context parallelism. By this forecast, even a bar that
# is all `computing` has an MFU of about 70%, because kernels do not reach the peak. (A tenth of it is attention that the mask
# spares.) On more GPUs, each kernel has less to
# do, and reaches less of it. So MFU falls by more than the other parts take.
#
# <details><summary>What there is to discover</summary>
#
# On InfiniBand NDR, as long as there is a sequence for each GPU, data parallelism with ZeRO 3 is best, and twice as
# many GPUs are almost twice as fast. By [lab 17](17_zero.ipynb), ZeRO 3 hides its messages there behind about 2,200
# tokens per rank on 64 GPUs, and a sequence has 8,192. With more GPUs than sequences, several ranks must share a
# sequence, and the MFU falls with every doubling; with a batch four times as large, this begins at four times as many
# GPUs.
#
# On the playbook's network, lab 17's threshold is about 6,500 tokens per rank on 64 GPUs, and 13,200 on 256. There, ZeRO 3
# alone is best up to 64 GPUs only. A rule about ZeRO 3 needs the name of a network.
#
# </details>
#
# ## Run it
#
# Here are the two blocks of [lab 26](26_three_dimensions.ipynb) on eight simulated ranks, beside the forecast's bytes.
# The 8 extra bytes are sums of the loss:

# %%
from tplab import Mesh
from tplab.exercises.three_dimensions import LARGE, NETWORKS, modelled
from tplab.forecast.traffic import bytes_by_axis

mesh = Mesh(pp=2, dp=2, tp=2)
plan = Plan(pp=2, dp=2, tp=2, microbatch=4, grad_dtype="bfloat16", balance="parameters")
model = Model.of_config(LARGE)
said = bytes_by_axis(model, plan, batch=16, sequence=2048, stack="tplab")
trace = modelled(mesh, NETWORKS["InfiniBand"])  # bytes are the same on any network
for axis in mesh.axis_names:
    counted = trace.bytes_sent(rank=0, axis=axis)
    print(f"{axis}: forecast {int(said[0][axis]):,} B, rank 0 sent {counted:,} B")

# %% [markdown]
# This lab runs no JAX, because none of the published steps that the forecast was tried on ran in JAX.
#
# ## A bug to repair
#
# A colleague compares plans by this utilisation, and always chooses full recomputation. A well-known
# [table](https://arxiv.org/abs/2104.04473) counts like this too, and says so. Which of these FLOPs does the model not
# need? (`one.plan.recompute` is `"none"`, `"selective"` or `"full"`.)

# %%
PEAK = 989e12  # FLOP/s of an H100 in bfloat16

def utilisation(one):  # a model, plan, batch, sequence and seconds
    flops = one.model.flops_per_token(one.sequence) * one.batch * one.sequence
    if one.plan.recompute == "full":
        flops *= 4 / 3  # one more forward pass
    return flops / (one.seconds * one.plan.ranks * PEAK)

# %%
from tplab.exercises.which_layout import check_mfu

check_mfu(utilisation)

# %% [markdown]
# ## Your turn: a rule of your own
#
# `choose` gets a model and a number of H100s, in nodes of eight, and returns the plan that you would try first. It must
# fit, and take at most a quarter longer than the best of all plans on InfiniBand NDR, for the five jobs below and two
# more. (A smaller difference means nothing: see the intervals.) Use `peak_bytes` to see whether a plan fits, but no forecast of time. Which axes do you make larger first, and
# which only if you must?

# %%
from tplab.forecast.memory import peak_bytes

def choose(model, gpus, batch, sequence):  # ->   Plan
    ...

# A plan that is not possible has a reason: Plan(...).refusal(model, batch, sequence).
# The memory of its fullest rank: peak_bytes(model, plan, batch, sequence).
# A program can use 85.0e9 bytes of an H100. With lab 27's margin, that is 80e9.

# %%
from tplab.exercises.which_layout import JOBS, check_choose

print(*JOBS, sep="\n")

check_choose(choose)

# %% [markdown]
# ## On Monday
#
# | question | answer |
# |---|---|
# | Does one sequence fit on one GPU, with ZeRO 3? | data parallelism alone, if a microbatch has the tokens that your network asks for ([lab 17](17_zero.ipynb)) |
# | If not? | tensor parallelism inside the node, 2 or 4, with sequence parallelism; ZeRO 3 if the network hides its messages, else ZeRO 1 |
# | Still not? | pipeline stages across nodes, and enough microbatches: four per stage or more |
# | Fewer sequences than GPUs? | let tensor or pipeline ranks share one; context parallelism, if they are long |
# | The microbatch | several sequences if they fit, before you recompute anything |
#
# [Which layout? A guide](../docs/choosing.md) has the reasons, and [All formulas on one sheet](../docs/formulas.md) the
# rest. `python -m tplab.forecast config.json --fabric infiniband-ndr --gpus 256 --batch 1024` forecasts your own model.
#
# ## To take away
#
# - Most layouts are far from the best: in the search above, half of those that fit take 2.1 times as long, or longer.
# - A forecast is as good as the class of runs that it was tried on, and holds for one network. Believe the order of two
#   plans only if they differ by more than their intervals.
# - Count useful FLOPs only: a plan that computes more is not better.
#
# **Sources.** Tazi et al. 2025, [The Ultra-Scale Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), whose
# runs are the marks (Apache-2.0, vinjn/nanotron-ultrascale-playbook, commit `924e4d0`). Narayanan et al. 2021, [Efficient
# large-scale training](https://arxiv.org/abs/2104.04473). Korthikanti et al. 2022, [Reducing activation
# recomputation](https://arxiv.org/abs/2205.05198).
#
# Back to the [list of labs](../README.md#labs).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
