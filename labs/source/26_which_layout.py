# %% [markdown]
# # 26 Which layout?
#
# **There are thousands of ways to put a model on 128 GPUs. Which one is fastest, and can you know before you try?**
#
# Prerequisites: what fits ([lab 25](25_will_it_fit.ipynb)), and what each axis costs
# ([lab 24](24_three_dimensions.ipynb)). Time: one hour.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/26_which_layout.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/26_which_layout.ipynb)
#
# ![Bars for ten layouts of one model on 128 GPUs. Each bar shows where the time of a step goes, and a mark shows what was measured.](images/26_which_layout.png)
#
# *Ten layouts of a model with eight billion parameters on 128 H100s. The bars are forecasts of one training step, and the marks
# are what Hugging Face measured. The second slowest takes 1.76 times as long as the fastest; the slowest is an outlier.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
from tplab.exercises.which_layout import CLUSTER, forecast_of, measured_runs
from tplab.forecast import Model, Plan, plans
from tplab.forecast.measured import playbook, split
from tplab.forecast.messages import FABRIC
from tplab.widgets import Bars, Dot, Row, knob, layout_lab, scatter

# %% tags=["opening-picture"]
def short(plan):
    zero = f", ZeRO {plan.zero}" if plan.zero else ""
    return f"dp {plan.dp}, tp {plan.tp}, microbatch {plan.microbatch}{zero}"

def bars(model, gpus):
    rows = []
    for run in measured_runs(model, gpus):
        parts = {name: float(s) for name, s in forecast_of(run).parts.items() if s}
        rows.append(Row(short(run.plan), parts, measured=run.seconds))
    return Bars(rows, "")

GPUS = 16, 32, 64, 128
title, by = "One step of an 8B model on H100s", "Hugging Face"
about = "forecast for nanotron, 256 sequences of 4,096 tokens"
knob(title, "GPUs", {n: bars("playbook-8b", n) for n in GPUS}, start=128, about=about,
     unit="s", by=by)  # fmt: skip

# %% [markdown]
# Only time that nothing hides is drawn: `tp` and `dp` are messages that ranks wait for, and `host` is time in which GPUs wait
# for Python.
#
# ## By hand: how fast could it be?
#
# By the usual count, training on one token takes 6 FLOPs per parameter, plus those of attention. The count is a convention: it
# includes the embedding, and attention without its causal mask. If all GPUs did that work at their peak, a step would take

# %%
eight = Model.find("playbook-8b")
tokens = 256 * 4096
flops = tokens * eight.flops_per_token(4096)
bound = flops / (128 * 989e12)  # the peak of an H100 in bfloat16
size = eight.parameters / 1e9
print(f"{size:.2f} billion parameters, {flops / 1e15:.0f} PFLOPs per step")
best = measured_runs("playbook-8b", 128)[0].seconds
print(f"at the peak {bound:.2f} s, and the best run took {best:.2f} s")
print(f"ratio: {bound / best:.0%}")

# %% [markdown]
# The ratio of the two is the **model FLOPs utilisation**, MFU. The rest is lost in kernels that do not reach the peak, in
# messages that nothing hides, in bubbles, and in the optimizer.
#
# ## Predict: your guess
#
# Take the smaller model of 3 billion parameters on 16 GPUs, in two nodes of eight,
# with a batch of 256 sequences. There is no pipeline. Choose `dp`, `tp` and the sequences in a microbatch, and see what was
# measured for your choice, and then what was forecast. How many guesses do you need?

# %%
from tplab.exercises.which_layout import check_guess

my_guess = {"dp": None, "tp": None, "microbatch": None}

check_guess(**my_guess, model="playbook-3b", gpus=16)

# %% [markdown]
# <details><summary>The best one, and why</summary>
#
# `dp` 16, `tp` 1, microbatches of 2. The model fits on one GPU if ZeRO divides the optimizer's states, so there is no need for
# tensor parallelism, which sends activations in every layer. A microbatch of 2 makes matmuls larger than one of 1. One of 4
# would make them larger still, but it needs more memory than a GPU has.
#
# </details>
#
# ## Why is it fast?
#
# A forecast adds up the parts of a step. Each of them comes from an earlier lab: matmuls and collectives on a measured clock
# ([lab 03](03_network_levels.ipynb)), the bubble of the schedule ([lab 10](10_pipeline_schedules.ipynb)), gradients that hide
# behind the backward pass ([lab 16](16_data_parallel.ipynb)). Two numbers are fitted to measured runs of nanotron, the
# library that was used here: one factor for all computing, and the time that the host needs per layer. The best run is left
# out here, so that you can still guess.

# %%
runs = measured_runs("playbook-3b", 16)
for run in runs[1::4] + runs[-1:]:
    one = forecast_of(run)
    print(f"{short(run.plan)}: {run.seconds:.2f} s, forecast {one.seconds:.2f} s")
    parts = {part: s for part, s in one.parts.items() if s > 0.005}
    print("   ", ", ".join(f"{part} {s:.2f}" for part, s in parts.items()))

# %% [markdown]
# With microbatches of one sequence and high `tp`, the host cannot start kernels as fast as the GPU finishes them, and
# `host` is most of the loss. Two choices matter most: use as little tensor parallelism, and as large a microbatch, as
# memory allows.
#
# ## How right is it?
#
# Others have published 118 runs of 8 to 128 GPUs without a pipeline, with tensor parallelism inside a node. The
# constants were fitted to 85 of them. The fit has never seen the other 33, so these test the forecast.

# %%
def off(run):
    return forecast_of(run).seconds / run.seconds - 1

fitted, left_out = split(playbook())
for name, table in {"fitted": fitted, "left out": left_out}.items():
    errors = sorted(abs(off(run)) for run in table)
    half, nine = errors[len(errors) // 2], errors[int(0.9 * len(errors))]
    print(f"{len(table)} {name}: half are off by up to {half:.1%}, 9 in 10 {nine:.0%}")
for run in sorted(fitted + left_out, key=lambda run: abs(off(run)))[-4:]:
    print(f"{off(run):+.0%}: {run.model.name}, {short(run.plan)}, {run.seconds:.2f} s")

# %% [markdown]
# The four runs with the largest errors all took *longer* than forecast. One took almost five times as long as the same layout
# in another run of the table, so it was not the layout. If your run is slower than a forecast, look for what is wrong with the
# run: a slow network, a memory that is nearly full, or a **straggler**, one slow GPU for which all others wait.
#
# ## Where does it fail?
#
# The same people have measured 576 more runs, with a pipeline. Here is every run as a dot: on the line, it took what was
# forecast.

# %%
def dots(runs):
    return [Dot(run.seconds, forecast_of(run).seconds, f"{run.model.name}, {run.plan}")
            for run in runs]  # fmt: skip

piped = [run for run in playbook() if run.plan.pp > 1]
inside = [run for run in piped if run.plan.ranks <= 8]
across = [run for run in piped if run.plan.ranks > 8]
panels = {
    "without a pipeline": {"fitted": dots(fitted), "left out": dots(left_out)},
    "with a pipeline": {"one node": dots(inside), "several nodes": dots(across)},
}
scatter(panels, title="Forecast and measured", about="nanotron on H100s, Hugging Face",
        sentence="Below the line, a run took longer than was forecast.")  # fmt: skip

# %%
for nodes in (1, 2, 4, 16, 64):
    alike = [run for run in piped if run.plan.ranks == 8 * nodes]
    middle = sorted(1 / (1 + off(run)) for run in alike)[len(alike) // 2]
    share = FABRIC.reached / nodes**FABRIC.congestion
    reached = f", collectives get {share:.0%}" if nodes > 1 else ""
    print(f"nodes {nodes:>2}: half took over {middle:.2f} times the forecast{reached}")

# %% [markdown]
# In one node, pipelines took as long as forecast, although the fit had seen none of them. On 16 nodes, half took three
# times as long or more. It is not the network: across nodes, collectives got only a part of its bandwidth (the last
# column), but the forecast knows that. And it is not pipelines as such: Megatron's take about what is forecast. So it
# was this version of nanotron. [How right is the forecast?](../docs/forecast.md) has each run, and other software and
# GPUs.
#
# ## Search
#
# `plans` forecasts every plan that is possible, best first, and counts why the others lost:

# %%
found = plans("llama3-70b", CLUSTER, gpus=256, batch=1024, sequence=8192)
print(found)
middle = found[len(found) // 2].seconds / found[0].seconds
print(f"half of those that fit take {middle:.1f} times as long as the best, or longer")

# %%
print(found[0].why)

# %% [markdown]
# Here are the plans for the 8B model on 64 GPUs as a picture. Choose one with the mouse or the arrow keys, and compare its step
# and its memory with those of the best. In a running notebook you can also change the model and the number of GPUs.

# %%
layout_lab("llama3-8b", cluster=CLUSTER, gpus=64, batch=256, sequence=8192)

# %% [markdown]
# ## Turn the knob
#
# Llama 3 8B is trained on 32 to 512 GPUs. With more GPUs, each of them gets fewer sequences of the batch. How does the best
# layout change from row to row, and how much of each GPU is lost? Then turn the knob to a batch four times as large.

# %%
def best_on(gpus, batch):
    best = plans("llama3-8b", CLUSTER, gpus=gpus, batch=batch, sequence=8192)[0]
    share = {part: 100 * float(s) / best.seconds for part, s in best.parts.items() if s}
    axes = {axis: getattr(best.plan, axis) for axis in ("dp", "tp", "pp", "cp")}
    layout = ", ".join(f"{axis} {ranks}" for axis, ranks in axes.items() if ranks > 1)
    return Row(f"{gpus} GPUs: {layout}", share, f"{best.seconds:.2f} s"), best.mfu

options = {}
for batch in (64, 256):
    rows, mfus = zip(*(best_on(gpus, batch) for gpus in (32, 64, 128, 256, 512)))
    options[batch] = Bars(rows, f"MFU falls from {mfus[0]:.0%} to {mfus[-1]:.0%}.")
about = "Llama 3 8B on H100s, 8,192 tokens each; forecast for Megatron"
knob("The best plan's step", "sequences in a batch", options, start=64, about=about,
     unit="%")  # fmt: skip

# %% [markdown]
# Kernels reach only two thirds of the peak, so even a bar that is all `computing` has an MFU of about 65%.
#
# <details><summary>What there is to discover</summary>
#
# As long as there is a sequence for each GPU, data parallelism with ZeRO 3 is best, and twice as many GPUs are almost twice as
# fast. With more GPUs than sequences, several ranks must share a sequence, by tensor, pipeline or context parallelism, and the
# MFU falls with every doubling. A batch four times as large has the same problem with four times as many GPUs.
#
# </details>
#
# ## Run it
#
# A plan can be executed. Here are the two blocks of [lab 24](24_three_dimensions.ipynb) on eight simulated ranks,
# beside the forecast's bytes. The few extra bytes are sums of the loss, one number each:

# %%
from tplab import Mesh
from tplab.exercises.three_dimensions import LARGE, NETWORKS, modelled
from tplab.forecast.traffic import bytes_by_axis

mesh = Mesh(pp=2, dp=2, tp=2)
plan = Plan(pp=2, dp=2, tp=2, microbatch=4, grad_dtype="bfloat16", balance="parameters")
model = Model.of_config(LARGE)
said = bytes_by_axis(model, plan, batch=16, sequence=2048, stack="tplab")
trace = modelled(mesh, NETWORKS["InfiniBand"])
for axis in mesh.axis_names:
    counted = trace.bytes_sent(rank=0, axis=axis)
    print(f"{axis}: forecast {int(said[0][axis]):,} B, rank 0 sent {counted:,} B")

# %% [markdown]
# ## A bug to repair
#
# A colleague compares plans by their utilisation, and always chooses full recomputation. A well-known
# [table](https://arxiv.org/abs/2104.04473) counts like this too, and says so. Which of these FLOPs does the model not need?
# (`one.plan.recompute` is `"none"`, `"selective"` or `"full"`.)

# %%
PEAK = 989e12  # FLOP/s of an H100 in bfloat16

def utilisation(one):  # of a forecast
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
# Now put what you know into a rule. `choose` gets a model and a number of H100s, in nodes of eight, and returns the plan that
# you would try first. It must fit, and take at most 15% longer than the best of all plans, for the five jobs below and two more.
# Use `peak_bytes` to see whether a plan fits, but do not forecast any time. Which axes do you make larger first, and which only
# if you must?

# %%
from tplab.forecast.memory import peak_bytes

def choose(model, gpus, batch, sequence):  # ->   Plan
    ...

# A plan that is not possible has a reason: Plan(...).refusal(model, batch, sequence).
# The memory of its fullest rank: peak_bytes(model, plan, batch, sequence).
# A program can use 85.0e9 bytes of an H100.

# %%
from tplab.exercises.which_layout import JOBS, check_choose

print(*JOBS, sep="\n")

check_choose(choose)

# %% [markdown]
# ## On Monday
#
# | question | answer |
# |---|---|
# | Does one sequence fit on one GPU, with ZeRO 3? | data parallelism alone |
# | If not? | tensor parallelism inside the node, 2 or 4, with sequence parallelism and ZeRO 1 |
# | Still not? | pipeline stages across nodes, and enough microbatches: four per stage or more |
# | Fewer sequences than GPUs? | these axes share them; context parallelism, if they are long |
# | The microbatch | as large as memory allows, before you recompute anything |
#
# [Which layout? A guide](../docs/choosing.md) has the reasons, and [All formulas on one sheet](../docs/formulas.md) the rest.
# `python -m tplab.forecast llama3-70b --cluster h100-measured --gpus 256 --batch 1024 --sequence 8192` prints a table for your own model.
#
# ## To take away
#
# - Few layouts are near the best: half of those that fit take 1.8 times as long, or longer. Most lose by sending gradients and
#   parameters, or by recomputation.
# - A forecast has an error. Believe the order of two plans only if they differ by more.
# - Count useful FLOPs only. A plan that computes more is not better.
#
# **Sources.** Tazi et al. 2025, [The Ultra-Scale Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), whose
# runs are the marks (Apache-2.0, vinjn/nanotron-ultrascale-playbook, commit `924e4d0`). Narayanan et al. 2021, [Efficient
# large-scale training](https://arxiv.org/abs/2104.04473). Korthikanti et al. 2022, [Reducing activation
# recomputation](https://arxiv.org/abs/2205.05198), for useful and executed FLOPs.
#
# Back to the [list of labs](../README.md#labs).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
