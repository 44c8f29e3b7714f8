# %% [markdown]
# # 25 Will it fit?
#
# **How much memory does each rank of a training job need, and which rank runs out first?**
#
# Prerequisites: what a pipeline keeps ([lab 13](13_pipeline_memory.ipynb)), recomputation
# ([lab 15](15_recomputation.ipynb)), and ZeRO ([lab 17](17_zero.ipynb)). Time: 50 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/25_will_it_fit.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/25_will_it_fit.ipynb)
#
# ![Bars for one training job on eight GPUs, in two pipeline stages. Each bar shows what a rank of a stage holds, and a mark shows what was measured.](images/25_will_it_fit.png)
#
# *Twelve layers of a model on eight B200 GPUs, in two stages. Bars: the forecast peak of a rank. Marks: what SimuMax measured.
# With two stages, the first needs more than the second.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
from dataclasses import replace

import torch
import tplab.torch as tt
from tplab import Mesh
from tplab.cost import H100_MEASURED
from tplab.forecast import Model, Plan, forecast
from tplab.forecast.activations import layer_tensors
from tplab.forecast.measured import ON_B200, runs
from tplab.forecast.memory import memory, usable_bytes
from tplab.widgets import Bars, Row, knob

# %% [markdown]
# A `Model` says how large a model is, and a `Plan` says how it is split. `memory` works out the peak memory of
# the ranks of each pipeline stage.

# %% tags=["opening-picture"]
GB, GIB = 1e9, 2**30
KINDS = ("parameters", "gradients", "optimizer", "gathered",
         "activations", "logits", "buffers")

def row(label, held, unit=GB, measured=None):
    parts = {kind: getattr(held, kind) / unit for kind in KINDS if getattr(held, kind)}
    return Row(label, parts, measured=measured)

TWELVE = replace(Model.find("llama3-70b"), layers=12)
layouts = {}
for (tp, pp, dp), measured in ON_B200.items():  # GiB on the ranks of each stage
    plan = Plan(tp=tp, pp=pp, dp=dp, zero=1, sequence_parallel=True)
    held = memory(TWELVE, plan, batch=8 * dp, sequence=4096)
    rows = [row(f"stage {i}", held[i], GIB, measured[i]) for i in range(pp)]
    layouts[f"tp {tp}, pp {pp}, dp {dp}"] = Bars(rows, "")
about = "at the peak; Megatron, 8 microbatches of 4,096 tokens"
title = "Twelve layers of Llama 3 70B on eight B200s"
shown = {"about": about, "unit": "GiB", "by": "SimuMax"}
knob(title, "layout", layouts, start="tp 1, pp 2, dp 4", **shown)

# %% [markdown]
# The marks are what torch had allocated. Its allocator had reserved more: 70.9 GiB where the mark is at 66.55. NCCL and the CUDA
# context come on top. So leave a margin.
#
# ## By hand: bytes per parameter
#
# In mixed precision, each parameter has a copy in bfloat16 (2 bytes) and a gradient, which is often summed up in float32 (4).
# Adam has a float32 copy of the parameter and two moments (12 more). That makes 18 bytes, or 16 with gradients in 16 bits.
#
# **Predict.** Llama 2 7B has 6.74 billion parameters. How many GB is that? An H100 lets a program use
# 85 GB (79.2 of 80 GiB).
#
# <details><summary>Answer</summary>
#
# $18 \cdot 6.74 = 121$ GB. It does not fit, although the weights alone take only 13.5 GB. Eight of nine bytes are there
# only for training.
#
# </details>

# %%
llama = Model.find("llama2-7b")
(held,) = memory(llama, Plan(), batch=1, sequence=4096)
for kind in KINDS:
    print(f"{kind:<12} {getattr(held, kind) / GB:5.1f} GB")
print(f"{'in total':<12} {held.total / GB:5.1f} GB")

# %% [markdown]
# The first three kinds are the 18 bytes. The others depend on the batch: here it is one sequence of 4,096 tokens.
#
# ## What a layer keeps
#
# **Activations** are what the forward pass keeps for the backward pass. For each token, a layer keeps the inputs of its
# matmuls and a few tensors more. Which are the largest?

# %%
kept = layer_tensors(llama, Plan(), sequence=4096)
for name, size in sorted(kept.items(), key=lambda item: -item[1])[:7]:
    print(f"{name:<28} {size / 2**20:6.1f} MiB")
print(f"{'one layer in all':<28} {sum(kept.values()) / 2**20:6.1f} MiB")

# %% [markdown]
# All of them grow with the number of tokens in a microbatch. ZeRO divides none of them. Tensor parallelism with sequence
# parallelism divides all by `tp`. Full recomputation keeps only `input of norm 1`, and computes the others
# again.
#
# ## The stages of a pipeline
#
# Llama 3 8B is split into eight stages of four layers each, with full recomputation. With the 1F1B schedule, an early stage
# has more microbatches **in flight**: it has run their forward pass, and not yet their backward pass.
#
# **Predict.** A layer has 0.218 billion parameters, and the embedding and the output matrix have 0.525 billion each. A microbatch
# of one sequence keeps 8,192 x 4,096 numbers of two bytes per layer, which is 0.067 GB. How many GB do stages 0, 1 and 7 need, and
# which stage needs the most?
#
# <details><summary>Answer</summary>
#
# For parameters, gradients and optimizer, stages 0 and 7 need $18 \cdot (4 \cdot 0.218 + 0.525) = 25.2$ GB, and stage 1 needs
# 15.7 GB. Stage 0 keeps eight microbatches, $8 \cdot 4 \cdot 0.067 = 2.1$ GB, stage 1 keeps seven, 1.9 GB, and stage 7 keeps
# one, 0.3 GB. About 2 GB more are needed while a layer is computed again. So you would expect about 29 GB on stage 0, and less
# everywhere else. But it is the last stage that needs the most. The next cell shows why.
#
# </details>

# %%
small = Model.find("llama3-8b")
options = {}
for sequences in (1, 2):
    plan = Plan(pp=8, recompute="full", microbatch=sequences)
    stages = memory(small, plan, batch=64, sequence=8192)
    labels = [f"stage {i}: {one.in_flight:g} in flight" for i, one in enumerate(stages)]
    fullest = max(range(8), key=lambda i: stages[i].total)
    rows = [row(*pair) for pair in zip(labels, stages)]
    options[sequences] = Bars(rows, f"Stage {fullest} needs the most.")
control, about = "sequences in a microbatch", "forecast for Megatron, 8,192 tokens each"
knob("Eight stages of Llama 3 8B", control, options, start=1, unit="GB", about=about)

# %% [markdown]
# The last stage turns each token into **logits**: one number for every entry of the vocabulary, and Llama 3 has 128,256
# entries. Megatron keeps them in bfloat16, and its loss needs them in float32 too. That is 6 bytes per token and entry:
# 6.3 GB for one sequence, and twice as much for two. The output matrix is as large as the embedding of stage 0. So the last stage should get fewer
# layers ([lab 14](14_cut_a_pipeline.ipynb)), or its logits should be split ([lab 06](06_vocabulary.ipynb)).
#
# ## Count it
#
# Is the formula right? Simulated ranks execute the same plan. Here is tplab's GPT in four stages, with `count_memory=True`,
# which follows every tensor of every rank:

# %%
from tplab.schedules import one_f_one_b

config = tt.GPTConfig(132, 24, num_layers=4, num_heads=4, context=12)

def step():
    schedule = one_f_one_b(4, 8)
    stages = tt.stages_of(tt.gpt_layers(config), schedule)
    ids = torch.arange(8 * 12).reshape(8, 12)

    def loss_of(logits, targets):
        return tt.vocab_parallel_cross_entropy(logits, targets, "tp", config.vocab_size)

    optimizer = torch.optim.AdamW(stages.parameters())
    pairs = tt.split_batch(ids, ids, 8)
    tt.train_batch(schedule, stages, pairs, loss_of, data_axis="dp")
    optimizer.step()

counted = tt.run(step, Mesh(pp=4, dp=1, tp=1), count_memory=True).memory
plan = Plan(pp=4, dtype="float32", grad_dtype="float32", balance="parameters")
planned = memory(Model.of_config(config), plan, batch=8, sequence=12, stack="tplab")
for rank, held in enumerate(planned):
    said, most = held.by_kind["activations"], int(counted[rank].of("activations").max())
    print(f"rank {rank}: activations, forecast {said:,} B, counted {most:,} B")

# %% [markdown]
# The activations agree to the byte. On real GPUs, libraries add workspaces of their own. Megatron's are known, so for the four
# runs at the top the forecast is off by 0.1% at most, without any fitting. For nanotron, four constants were fitted to half of
# 803 runs; on the other half the median error is 10.5%.
#
# This lab runs no JAX: what a compiled step keeps is XLA's choice, and `compiled.memory_analysis()` says how many bytes a device
# needs, before the step runs.

# %% [markdown]
# ## Other software, other memory
#
# **torch's FSDP** differs in two places. If a step has several microbatches, their gradients are added up in float32 and stay
# whole until the last one: ZeRO 3 divides them only if there is one microbatch. And the loss keeps at least four copies of the
# logits in 16 bits, 8 bytes for each, which tensor parallelism does not divide. Llama 3 8B on H200s, measured by KempnerForge:

# %%
for run in runs():
    plan, job = run.plan, {"batch": run.batch, "sequence": run.sequence}
    if run.stack == "fsdp" and run.memory:
        one = forecast(run.model, plan, run.on, **job, stack=run.stack).peak
        times = run.batch // plan.dp // plan.microbatch
        total, gradients, logits = (
            size / GB for size in (one.total, one.gradients, one.logits))
        print(f"dp {plan.dp}, tp {plan.tp}, microbatches: {times}. "
              f"Measured {run.memory:.1f} GB, forecast {total:.1f} GB")
        print(f"   of that gradients {gradients:.1f}, logits {logits:.1f}")  # fmt: skip

# %% [markdown]
# Data parallelism divides parameters and optimizer, but not the gradients: with `dp` 4 they still take 32.1 GB. The forecast is
# within 8% of what was measured. The four copies were chosen with these rows in sight; all else was counted.
#
# ## Turn the knob
#
# Llama 3 70B is on 128 H100s: tensor parallelism over 4, two stages, and data parallelism over 16. Try one plan after the
# other. Before each of them, guess which parts of the bars will shrink.

# %%
BIG = Model.find("llama3-70b")
BASE = Plan(tp=4, pp=2, dp=16, sequence_parallel=True)
LIMIT = usable_bytes(H100_MEASURED.chip)
PLANS = {
    "nothing more": BASE,
    "full recomputation": replace(BASE, recompute="full"),
    "pp 4, dp 8": replace(BASE, pp=4, dp=8),
    "pp 8, dp 4": replace(BASE, pp=8, dp=4),
    "ZeRO 1": replace(BASE, zero=1),
    "ZeRO 1, full recomputation": replace(BASE, zero=1, recompute="full"),
    "ZeRO 3, pp 1, dp 32": replace(BASE, zero=3, pp=1, dp=32),
}
options = {}
for name, plan in PLANS.items():
    held = memory(BIG, plan, batch=128, sequence=8192)
    worst = max(one.total for one in held)
    rows = [row(f"stage {i}", one) for i, one in enumerate(held)]
    verdict = "fits" if worst <= LIMIT else "does not fit"
    options[name] = Bars(rows, f"It {verdict} in {LIMIT / GB:.0f} GB.")
knob("Llama 3 70B on 128 H100s", "plan", options, start="nothing more", unit="GB",
     about="forecast for Megatron; tp 4, sequences of 8,192 tokens")  # fmt: skip

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# Recomputation alone is not enough, because most of the memory is not activations. ZeRO 1 divides the largest part by 16, and is
# not enough alone either, but the two together are. More stages divide parameters, gradients and optimizer. The activations of
# stage 0 stay at 45.0 GB: it has half as many layers, and twice as many microbatches in flight. ZeRO 3 needs the least, but only
# with Megatron: torch's FSDP would keep 71 GB of whole gradients on each rank, because a step has four microbatches, and the plan
# would not fit.
#
# </details>
#
# ## A bug to repair: the mean of all stages
#
# NVIDIA's Megatron-Bridge prints the memory of its fullest rank before it trains. Until July 2026 it [divided all
# parameters by the number of stages](https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5077), although stages differ. For
# eight layers in stages of 1, 2, 2 and 3, it said 6,792 parameters, and the last stage had 9,952. Here is such an estimate
# for a 1F1B pipeline, and what it says of the eight stages of Llama 3 8B:

# %%
def stage_bytes(cut, microbatches, layer, ends, kept):  # ->   the bytes of each stage
    # cut: how many layers each stage has. layer: parameters of a layer. ends: those
    # of the embedding, and of the output matrix. kept: bytes of a layer per microbatch
    stages = len(cut)
    parameters = (sum(cut) * layer + 2 * ends) / stages
    in_flight = stages
    return [18 * parameters + in_flight * layers * kept for layers in cut]

said = stage_bytes([4] * 8, 64, 218_112_000, 525_336_576, 67_108_864)
held = memory(small, Plan(pp=8, recompute="full"), batch=64, sequence=8192)
for s in (0, 1, 7):
    ours, theirs = said[s] / GB, held[s].total / GB
    print(f"stage {s}: this says {ours:.1f} GB, the forecast {theirs:.1f} GB")

# %% [markdown]
# Two lines are wrong. Repair them for every cut, every stage and every number of microbatches: what are the parameters of a
# stage, and how many microbatches does it have in flight at most? (Logits and buffers stay out of it.)

# %%
from tplab.exercises.will_it_fit import check_stage_bytes

check_stage_bytes(stage_bytes)

# %% [markdown]
# ## Your turn: make it fit
#
# None of these four jobs fits into the 85 GB of an H100. The list of remedies begins with what changes a job least. Choose for
# each job the first one that is enough, and work out how many GB its fullest rank then holds. A tenth more or less is good
# enough. What fills the memory, which remedy divides just that, and by what?

# %%
from tplab.exercises.will_it_fit import JOBS, REMEDIES, check_remedies

for name, job in JOBS.items():
    print(f"{name}: {job}")
print("\nremedies:", *REMEDIES, sep="\n  ")

my_remedies = {"A": ("", 0), "B": ("", 0), "C": ("", 0), "D": ("", 0)}  # and its GB

# %%
check_remedies(my_remedies)

# %% [markdown]
# ## On Monday
#
# | here | Megatron-LM | torch, torchtitan | DeepSpeed |
# |---|---|---|---|
# | `zero=1` | `--use-distributed-optimizer` | `ZeroRedundancyOptimizer` | `"stage": 1` |
# | `zero=3` | `--use-torch-fsdp2` | `fully_shard` | `"stage": 3` |
# | `recompute="full"` | `--recompute-granularity full --recompute-method uniform --recompute-num-layers 1` | `torch.utils.checkpoint`, `activation_checkpoint.mode` | `activation_checkpointing` |
# | `sequence_parallel` | `--sequence-parallel` | `SequenceParallel` | |
# | counted on real ranks | `--log-memory-to-tensorboard` | `torch.cuda.max_memory_allocated()` | `see_memory_usage` |
#
# ## To take away
#
# - A parameter costs 16 to 18 bytes in training. ZeRO divides them over `dp`, and tensor and pipeline parallelism divide the
#   parameters themselves.
# - Ask what your software keeps: torch's FSDP has whole gradients as long as it adds up microbatches.
# - Activations grow with the tokens of a microbatch and with the microbatches in flight. Sequence parallelism and
#   recomputation make them smaller, and ZeRO does not.
# - Look at every stage: the first has the most in flight, and the last has the logits.
#
# **Sources.** Rajbhandari et al. 2020, [ZeRO](https://arxiv.org/abs/1910.02054). Korthikanti et al. 2022, [Reducing
# activation recomputation](https://arxiv.org/abs/2205.05198). The measured runs: MooreThreads,
# [SimuMax](https://github.com/MooreThreads/SimuMax), commit `4dcaae5`; KempnerInstitute,
# [KempnerForge](https://github.com/KempnerInstitute/KempnerForge), commit `5666d0d`.
#
# Next: [26 Which layout?](26_which_layout.ipynb), for the plans that fit: which of them is fastest?

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
