# %% [markdown]
# # 27 Will it fit?
#
# **How much memory does each rank of a training job need, and which rank runs out first?**
#
# Prerequisites: what a pipeline keeps ([lab 13](13_pipeline_memory.ipynb)), recomputation
# ([lab 15](15_recomputation.ipynb)), and ZeRO ([lab 17](17_zero.ipynb)). Time: 50 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/27_will_it_fit.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/27_will_it_fit.ipynb)
#
# ![Bars for one training job on eight GPUs, in two pipeline stages. Each bar shows what a rank of a stage holds, and a mark shows what was measured.](images/27_will_it_fit.png)
#
# *Twelve layers of Llama 3 70B on eight B200 GPUs, in two stages. Bars: the forecast peak of a rank. Marks: what was measured.
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

from tplab.forecast import Model, Plan, forecast
from tplab.forecast.activations import layer_tensors
from tplab.forecast.measured import ON_B200, runs
from tplab.forecast.memory import memory
from tplab.widgets import Bars, Row, knob

# %% [markdown]
# A `Model` says how large a model is, and a `Plan` says how it is split. `memory` works out the peak memory of the ranks of each
# pipeline stage. Of the kinds that it tells apart, `gathered` are the whole parameters of the layers that run, under ZeRO 3, and
# `buffers` are temporary tensors and the workspaces of libraries.

# %% tags=["opening-picture"]
GB, GIB = 1e9, 2**30  # bytes
KINDS = ("parameters", "gradients", "optimizer", "gathered",
         "activations", "logits", "buffers")

def row(label, held, measured=None):
    parts = {kind: getattr(held, kind) / GB for kind in KINDS if getattr(held, kind)}
    return Row(label, parts, measured=measured)

TWELVE = replace(Model.find("llama3-70b"), layers=12)
layouts = {}
for (tp, pp, dp), measured in ON_B200.items():  # GiB on the ranks of each stage
    plan = Plan(tp=tp, pp=pp, dp=dp, zero=1, sequence_parallel=True)
    held = memory(TWELVE, plan, batch=8 * dp, sequence=4096)
    marks = [gib * GIB / GB for gib in measured]
    rows = [row(f"stage {i}", held[i], marks[i]) for i in range(pp)]
    off = max(abs(held[i].total / GB / marks[i] - 1) for i in range(pp))
    sentence = f"Forecast and measured differ by {off:.2%} at most."
    layouts[f"tp {tp}, pp {pp}, dp {dp}"] = Bars(rows, sentence)
about = "at the peak; Megatron, ZeRO 1, 8 microbatches of 4,096 tokens"
title = "Twelve layers of Llama 3 70B on eight B200s"
shown = {"about": about, "unit": "GB", "by": "SimuMax's authors"}
knob(title, "layout", layouts, start="tp 1, pp 2, dp 4", **shown)

# %% [markdown]
# The authors of SimuMax measured what torch had **allocated** for tensors. torch had **reserved** more:
# 76.1 GB where the mark is at 71.5. NCCL and the CUDA context come on top. So leave a margin: here,
# a plan fits if its forecast is at most 80 of the 85 GB that a program can use.
#
# ## By hand: bytes per parameter
#
# In mixed precision, each parameter has a copy in bfloat16 (2 bytes) and a gradient, often summed up in float32 (4).
# Adam has a float32 copy of the parameter and two moments (12 more). That makes 18 bytes, or 16 with gradients in 16 bits.
# Under ZeRO 3 it is 16 as well: a rank keeps its pieces in float32 only, and gathers bfloat16 from them.
#
# **Predict.** Llama 2 7B has 6.74 billion parameters. How many GB is that? (The 85 GB are 79.2 of an H100's 80 GiB.)
#
# <details><summary>Answer</summary>
#
# $18 \cdot 6.74 = 121$ GB. It does not fit, although the weights alone take only 13.5 GB.
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
# matmuls and a few more tensors. Which are the largest?

# %%
kept = layer_tensors(llama, Plan(), sequence=4096)
for name, size in sorted(kept.items(), key=lambda item: -item[1]):
    print(f"{name:<31} {size / GB:6.3f} GB")
print(f"{'all tensors of one layer':<31} {sum(kept.values()) / GB:6.3f} GB")

# %% [markdown]
# All of them grow with the number of tokens in a microbatch. ZeRO divides none of them. Tensor parallelism with sequence
# parallelism divides all by `tp`. Without it, four remain whole: the inputs of the two norms, and of the matmuls after
# them. Full recomputation keeps only `input of norm 1`, and computes the others again.

# %% [markdown]
# ## The stages of a pipeline
#
# Llama 3 8B is split into eight stages of four layers each, with full recomputation. With the 1F1B schedule, an early stage
# has more microbatches **in flight**: it has run their forward pass, and not yet their backward pass.
#
# **Predict.** A layer has 0.2181 billion parameters, and the embedding and the output matrix have 0.5253 billion each. A microbatch
# of one sequence keeps 8,192 x 4,096 numbers of two bytes per layer, which is 0.067 GB. While a layer is computed again, about 2 GB
# more are needed. At another time, the last stage needs its **logits**: 6 bytes for each token and each of the 128,256 entries of
# the vocabulary. How many GB do stages 0, 1 and 7 need?
#
# <details><summary>Answer</summary>
#
# For parameters, gradients and optimizer states, stages 0 and 7 need $18 \cdot (4 \cdot 0.2181 + 0.5253) = 25.2$ GB, and stage 1
# needs 15.7 GB. Stage 0 keeps eight microbatches, $8 \cdot 4 \cdot 0.067 = 2.1$ GB, stage 1 keeps seven, 1.9 GB, and stage 7 keeps
# one, 0.3 GB. The logits take $6 \cdot 8192 \cdot 128256 = 6.3$ GB. That makes about 29, 20 and 32 GB. The last stage needs the
# most, although it keeps the fewest microbatches.
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
# Megatron keeps the logits in float32 and their gradient in bfloat16. With two sequences in a microbatch they are twice as
# large. So the last stage should get fewer layers ([lab 14](14_cut_a_pipeline.ipynb)), or its logits should be split ([lab
# 06](06_vocabulary.ipynb)).
#
# ## Count it
#
# Is this way of counting right? Simulated ranks can execute a plan. Here is tplab's own GPT in four stages, with
# `count_memory=True`, which follows every tensor of every rank:

# %%
import torch
import tplab.torch as tt
from tplab import Mesh
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
four = Plan(pp=4, dtype="float32", grad_dtype="float32", balance="parameters")
planned = memory(Model.of_config(config), four, batch=8, sequence=12, stack="tplab")
for rank, formula in enumerate(planned):
    most = int(counted[rank].of("activations").max())
    print(f"rank {rank}: activations, forecast {formula.by_kind['activations']:,} B,",
          f"counted {most:,} B")

# %% [markdown]
# The activations agree to the byte. This tests the formula for tplab's own layers, `stack="tplab"`. Megatron's fused layers keep
# other tensors, and all pictures here use the formula for those. Its test is the four runs at the top, of one model on one machine: it is off by 0.1% at
# most, and nothing was fitted. Elsewhere it can be too high: the GPUs on which Llama 3 405B was trained have 12% less than its forecast. For
# nanotron, another library, four constants were fitted to half of 803 runs. On the other half, the
# median error is 10.5% ([all measured runs](https://github.com/tplab/tplab/blob/main/docs/forecast.md)).
#
# This lab runs no JAX: what a compiled step keeps is XLA's choice, and `compiled.memory_analysis()` says how many bytes a device
# needs, before the step runs.

# %% [markdown]
# ## Other software, other memory
#
# With ZeRO 3 and several microbatches, a trainer has a choice. By default, torch's FSDP reduce-scatters gradients in [every
# backward pass](https://github.com/pytorch/pytorch/pull/126166), so a rank adds up only its piece of them. The trainer KempnerForge
# calls `set_requires_gradient_sync(False)` until the last microbatch. It sends gradients only once, and until then each rank adds
# up *whole* gradients, in float32. Its loss keeps four 16-bit copies of the logits, 8 bytes per logit, and tensor parallelism does
# not divide these. Here is Llama 3 8B on H200s, measured by KempnerForge's authors. (Where `dp` is 1, ZeRO has nothing to divide.)

# %%
for run in runs():
    plan, job = run.plan, {"batch": run.batch, "sequence": run.sequence}
    if run.stack == "fsdp" and run.memory:
        one = forecast(run.model, plan, run.on, **job, stack=run.stack).peak
        times = run.batch // plan.dp // plan.microbatch
        total, gradients, logits = (
            size / GB for size in (one.total, one.gradients, one.logits))
        print(f"dp {plan.dp}, tp {plan.tp}, "
              f"microbatches: {times} of {plan.microbatch} sequences. "
              f"Measured {run.memory:.1f} GB, forecast {total:.1f} GB")
        print(f"   of that gradients {gradients:.1f}, logits {logits:.1f}")

# %% [markdown]
# Data parallelism divides parameters and optimizer states, but not these gradients: with `dp` 4 they still take 32.1 GB. The
# forecast is within 8% of what was measured. We chose four copies after looking at these rows. Everything else was counted.
#
# ## Turn the knob
#
# Llama 3 70B is on 128 H100s, with 128 sequences in a batch: tensor parallelism over 4, two stages, and data parallelism over 16. Before you choose
# a plan, guess which parts of the bars will shrink.

# %%
BIG = Model.find("llama3-70b")
BASE = Plan(tp=4, pp=2, dp=16, sequence_parallel=True)
LIMIT = 80 * GB
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
     about="forecast for Megatron; tp 4, sequences of 8,192 tokens")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# Only two plans fit: ZeRO 1 with full recomputation (63.6 GB), and ZeRO 3 (57.3 GB). Recomputation alone is not enough, because
# most of the memory is not activations. ZeRO 1 divides the largest part by 16, and is not enough alone either. More stages leave
# each rank with fewer parameters, but with eight of them it still needs 89.1 GB: the activations of stage 0 stay at 45.0 GB, because
# it has fewer layers and more microbatches in flight. ZeRO 3 depends on the software: with KempnerForge and the four microbatches of a
# step, each rank would have 71 GB of whole gradients, so the plan would not fit.
#
# </details>
#
# ## A bug to repair: the mean of all stages
#
# After its first steps, NVIDIA's Megatron-Bridge logs an estimate for its fullest rank. Until July 2026 that estimate [gave every
# stage the same number of layers](https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5077), although stages may differ. For eight
# layers in stages of 1, 2, 2 and 3, it said 6,792 parameters, and the last stage had 9,952. The estimate below makes a larger mistake: it
# divides the embedding and the output matrix by the number of stages, too. Here is what it says of a 1F1B pipeline, the eight stages
# of Llama 3 8B:

# %%
def stage_bytes(cut, microbatches, layer, ends, kept):  # ->   the bytes of each stage
    # cut: how many layers each stage has. layer: parameters of a layer. ends:
    # parameters of the embedding, and as many of the output matrix
    # kept: bytes that a layer keeps for a microbatch
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
# `parameters` and `in_flight` should differ from stage to stage, so the last line has to change as well. Repair it for every cut
# and every number of microbatches: how many parameters has a stage, and how many microbatches does it have in flight at most? Leave
# out logits and buffers.

# %%
from tplab.exercises.will_it_fit import check_stage_bytes

check_stage_bytes(stage_bytes)

# %% [markdown]
# ## Your turn: make it fit
#
# None of these four jobs fits into 80 GB. The remedies are in the order in which we would try them. For each job,
# choose the first one that makes it fit, and work out how many GB its fullest rank then holds, to within 10%. What fills the
# memory, which remedy divides just that, and by what?

# %%
from tplab.exercises.will_it_fit import JOBS, REMEDIES, check_remedies

for name, job in JOBS.items():
    print(f"{name}: {job}")
print("\nremedies:", *REMEDIES, sep="\n  ")

my_remedies = {"A": ("", 0), "B": ("", 0), "C": ("", 0), "D": ("", 0)}  # and its GB

# %%
check_remedies(my_remedies)

# %% [markdown]
# Would you like to choose among all plans? Run `from tplab.widgets import layout_lab` and `layout_lab()`, and choose the task *As few
# GPUs as possible*: on how many GPUs does Llama 3 70B still fit?

# %% [markdown]
# ## On Monday
#
# | here | Megatron-LM | torch, torchtitan | DeepSpeed |
# |---|---|---|---|
# | `zero=1` | `--use-distributed-optimizer` | `ZeroRedundancyOptimizer` | `"stage": 1` |
# | `zero=3` | `--use-megatron-fsdp` with `--data-parallel-sharding-strategy optim_grads_params` | `fully_shard` | `"stage": 3` |
# | `recompute="full"` | `--recompute-granularity full --recompute-method uniform --recompute-num-layers 1` | `torch.utils.checkpoint`, `activation_checkpoint.mode` | `activation_checkpointing` |
# | `sequence_parallel` | `--sequence-parallel` | `SequenceParallel` | |
# | counted on real ranks | `--log-memory-to-tensorboard` | `torch.cuda.max_memory_allocated()` | `see_memory_usage` |
#
# ## To take away
#
# - With Adam in float32, a parameter costs 16 to 18 bytes in training. ZeRO spreads those bytes over `dp`. Tensor and pipeline parallelism give each
#   rank fewer parameters.
# - Ask what your software keeps between microbatches. With FSDP, each rank adds up its piece of the gradients by default, and
#   whole gradients if you switch their synchronisation off.
# - Activations grow with the tokens of a microbatch and with the microbatches in flight. Sequence parallelism and
#   recomputation make them smaller, and ZeRO does not.
# - Look at every stage: the first has the most microbatches in flight, and the last has the logits.
#
# **Sources.** Rajbhandari et al. 2020, [ZeRO](https://arxiv.org/abs/1910.02054). Korthikanti et al. 2022, [Reducing
# activation recomputation](https://arxiv.org/abs/2205.05198). The measured runs: MooreThreads,
# [SimuMax](https://github.com/MooreThreads/SimuMax), commit `4dcaae5`; KempnerInstitute,
# [KempnerForge](https://github.com/KempnerInstitute/KempnerForge), commit `5666d0d`.
#
# Next: [28 Which layout?](28_which_layout.ipynb), for the plans that fit: which of them is fastest?

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
