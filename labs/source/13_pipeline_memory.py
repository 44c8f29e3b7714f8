# %% [markdown]
# # 13 Pipeline memory
#
# **Where does a pipeline's memory go, and why does its first rank need the most?**
#
# Prerequisites: the schedules of [lab 10](10_pipeline_schedules.ipynb) and the pipeline of
# [lab 11](11_run_a_pipeline.ipynb). Time: one hour.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/13_pipeline_memory.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/13_pipeline_memory.ipynb)
#
# ![Two staircases of memory over time. Under GPipe both ranks climb to eight microbatches. Under 1F1B rank 0 stops at four, and rank 3 at one.](images/13_pipeline_memory.png)
#
# *A small GPT trains on four ranks. The lines show the bytes that the first and the last rank keep for their backward
# passes, counted after every action. The dotted lines were predicted from a single microbatch.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
import torch
from torch import nn
from tplab import Mesh
from tplab.pipeline import LayerSpec, TiedSpec, partition
from tplab.schedules import Costs, gpipe, interleaved_1f1b, one_f_one_b, simulate
from tplab.schedules import measured_costs, measured_strip, v_half, zb_h1
from tplab.torch import GPTConfig, LiveBytes, run, split_batch, stages_of, train_batch
from tplab.torch.models.plain import plain_layers, token_loss
from tplab.widgets import Bars, Row, bytes_text, knob, levels, pipeline_lab

torch.set_num_threads(1)  # several threads do not pay off for tensors this small

# %% [markdown]
# The model is a small GPT: an embedding, twelve blocks, a norm and a head. A list holds a `LayerSpec` for each, which
# says what to build, and takes no memory. Four ranks train it with eight microbatches.

# %%
p, m = 4, 8  # ranks, microbatches

def gpt(blocks=12):  # 65 characters, 64 wide
    return plain_layers(GPTConfig(65, 64, blocks, num_heads=4, context=32))

def train(schedule, blocks=12, bounds=None):
    stages = stages_of(gpt(blocks), schedule, bounds=bounds)
    ids = torch.randint(65, (schedule.num_microbatches, 32))
    microbatches = split_batch(ids, ids, schedule.num_microbatches)
    train_batch(schedule, stages, microbatches, token_loss)
    return stages

two = {"GPipe": gpipe(p, m), "1F1B": one_f_one_b(p, m)}
runs = {name: run(train, Mesh(pp=p), schedule).trace for name, schedule in two.items()}

# %% [markdown]
# One microbatch is enough to measure what a stage keeps. The simulation of lab 10 predicts the rest:

# %%
alone = run(train, Mesh(pp=p), one_f_one_b(p, 1)).trace
one = measured_costs(one_f_one_b(p, 1), alone).activation  # bytes that each stage keeps

# %% tags=["opening-picture"]
counted, predicted = {}, {}
for name, trace in runs.items():
    simulated = simulate(two[name], Costs(activation=one))
    counted[name] = {f"rank {r}": measured_strip(simulated, r, trace) for r in (0, 3)}
    predicted[name] = {f"rank {r}": simulated.activation_bytes(r) for r in (0, 3)}
levels(counted, predicted=predicted, stairs=True, along="steps (F = 1, B = 2)",
       title="Kept for backward passes", about="bytes counted, steps modelled",
       sentence="Under GPipe every rank keeps eight microbatches. "
                "Under 1F1B rank 0 keeps four, and rank 3 keeps one.")

# %% [markdown]
# ## By hand: twelve blocks
#
# A backward pass needs what its forward pass computed: the **activations**. Let one **unit** be what a block keeps for
# one microbatch. Each of the four ranks has three blocks. Under 1F1B, rank $r$ runs $p - 1 - r$ forwards ahead, so
# it keeps up to $p - r$ microbatches.
#
# **Predict.** Four ranks divide the weights by four. How many units does rank 0 keep, compared with a single device that
# trains the whole model, one microbatch after another? And what if there are six ranks?
#
# <details><summary>Answer</summary>
#
# Just as many. The single device keeps one microbatch of 12 blocks. Rank 0 of four keeps 4 microbatches of 3 blocks, and
# rank 0 of six keeps 6 of 2. The product is always 12.
#
# </details>

# %%
device = run(train, Mesh(pp=1), one_f_one_b(1, m)).trace
unit = one[0] / 3  # the embedding keeps nothing but the ids
for name, trace in [("one device", device), *runs.items()]:
    units = [round(most / unit, 1) for most in trace.peak_bytes.tolist()]
    print(f"{name:10} keeps {units} units")
assert [round(most / unit) for most in runs["1F1B"].peak_bytes] == [12, 9, 6, 3]

# %% [markdown]
# The last rank has a little more: it also keeps what the norm, the head and the loss need.
#
# ## Build it: count along a row
#
# A forward adds a microbatch, and a backward removes one. If the backward is split, the microbatch is freed when its W
# is done.

# %%
def most_kept(row):
    kept = most = 0
    for action in row:
        kept += {"F": 1, "I": 0, "W": -1, "B": -1}[action.kind]
        most = max(most, kept)
    return most

for rule in (gpipe, one_f_one_b, zb_h1):
    trace = run(train, Mesh(pp=p), rule(p, m)).trace
    ours = [most_kept(row) for row in rule(p, m).by_rank()]
    bytes_kept = [float(round(most / x, 2)) for most, x in zip(trace.peak_bytes, one)]
    print(f"{rule.__name__:12} microbatches {ours}, in bytes {bytes_kept}")

# %% [markdown]
# For GPipe and 1F1B the count is exact. Under ZB-H1, a rank never holds more than four microbatches, but up to the
# bytes of five. Between I and W it keeps the input of every layer with weights *and* the gradient of its
# output, here about a quarter more than the forward pass left. Rank $r$ has up to $r + 1$ such microbatches: $r$ whose W waits
# for the end, and the current one.
#
# ## A model that is never whole
#
# If a rank builds the whole model and then drops most of it, it briefly needs room for all of it. `stages_of` cuts the
# list of specs first, and builds only this rank's layers. `LiveBytes` counts the tensors that are alive. (Of eight
# ranks, some have two of the twelve blocks.)

# %%
def built_whole():
    with LiveBytes() as live:
        model = [layer.build() for layer in gpt()]
        del model[4:]  # rank 0 keeps the first four of fifteen layers
    return live.peak

def built_in_place(ranks):
    with LiveBytes() as live:
        stages_of(gpt(), gpipe(ranks, 1))
    return live.peak

whole = run(built_whole, Mesh(pp=1)).per_rank[0]
for ranks in (1, 2, 4, 8):
    most = max(run(built_in_place, Mesh(pp=ranks), ranks).per_rank)
    print(f"pp = {ranks}: at most {100 * most / whole:.0f}% of the model on one rank")

# %% [markdown]
# ## Turn the knob: everything a rank holds
#
# A rank holds weights, their gradients, Adam's two averages per weight, and activations. Here are the bytes of real
# tensors for a model of eight blocks, activations at their peak. Guess first: which schedule gives its fullest rank the
# least?

# %%
def everything(schedule):  # a stage has two blocks, or one if each rank has two stages
    bounds = {4: [0, 3, 5, 7, 11], 8: [0, 2, 3, 4, 5, 6, 7, 8, 11]}
    stages = train(schedule, 8, bounds[schedule.num_stages])
    optimizer = torch.optim.Adam(stages.parameters())
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values()]
    weights = stages.parameters()
    kinds = weights, [w.grad for w in weights], [x for x in states if x.dim()]
    return [sum(x.nbytes for x in tensors) for tensors in kinds]

def bars(rule):
    out = run(everything, Mesh(pp=p), rule(p, m))
    parts = "weights", "gradients", "Adam", "activations"
    shares = [dict(zip(parts, [*held, most]))
              for held, most in zip(out.per_rank, out.trace.peak_bytes.tolist())]
    totals = [sum(share.values()) for share in shares]
    most = max(range(p), key=totals.__getitem__)
    rows = [Row(f"rank {r}", share) for r, share in enumerate(shares)]
    return Bars(rows, f"Rank {most} holds the most: {bytes_text(totals[most])}.")

rules = {"GPipe": gpipe, "1F1B": one_f_one_b, "interleaved": interleaved_1f1b,
         "ZB-H1": zb_h1, "V-Half": v_half}
shown = {name: bars(rule) for name, rule in rules.items()}
knob("What each rank holds", "schedule", shown, start="1F1B",
     about="bytes counted · 8 blocks, 8 microbatches", unit="B")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# V-Half, but only just. It gives each rank an early stage and a late one, so that all ranks keep about the same.
# Under ZB-H1 it is the *last* rank that holds the most.
#
# </details>
#
# In the next picture, the strip under each rank counts microbatches. Your task is to make them equal on all ranks, at no
# cost in time.

# %%
pipeline_lab(task="even")

# %% [markdown]
# ## The mystery of the first stage
#
# Bruno Magalhães [trained "GPT-lite" with DeepSpeed](https://github.com/brunomaga/brunomaga.github.io/blob/37da981abf3304c154523aee6edd0d1557f193a8/_posts/2023-08-30-pipeline-parallelism.md):
# 12 blocks, 768 wide, 65 characters, cut into four stages of about equally many parameters. The first and the last of
# its 16 layers were each a `lambda`. tplab's `partition` gives the table that DeepSpeed printed:

# %%
twelve, norm_and_head = [7_085_568] * 12, [1_536, 65 * 768]  # parameters
printed = partition([0, *twelve, *norm_and_head, 0], 4)  # 0: a function has none
print(printed)

# %% [markdown]
# According to this table the *last* stage is the largest. Yet the first rank took the most memory.
#
# **Predict.** What is missing from the table?
#
# <details><summary>Answer</summary>
#
# Activations are missing: rank 0 keeps four microbatches, and rank 3 keeps one. So it is in DeepSpeed: when we trained
# twelve smaller blocks with its version 0.19.8, its ranks had 4, 3, 2 and 1.1 times what three blocks keep for a
# microbatch. There may be more to it: the author published
# no bytes, and his [question](https://github.com/microsoft/DeepSpeed/issues/4477) is open.
#
# The embeddings of 65 characters and 200 positions hide in a lambda, so they are neither counted nor trained. With Adam
# they add 3 MB, so the table is also wrong about which stage is the largest.
#
# </details>
#
# Let us count, with one sequence of 200 characters per microbatch, and 16 bytes per parameter. (The author used ZeRO 1,
# which needs fewer.)

# %%
counted = partition([(65 + 200) * 768, *twelve, *norm_and_head, 0], 4)
by_block = 16 * 200 * 768 * 4  # a block keeps about 16 times its input, in float32
for r in range(p):
    with_adam = 16 * counted.stage_weights[r]  # and with the gradient, in float32
    print(f"rank {r}: parameters and Adam {with_adam / 1e6:.1f} MB,",
          f"activations {(p - r) * 3 * by_block / 1e6:.0f} MB")
print("a block keeps", round(unit / (32 * 64 * 4), 1), "times its input [32, 64]")

# %% [markdown]
# ## What it costs
#
# $N$ is the number of parameters, and $A$ the bytes that the whole model keeps for one microbatch. With its
# gradient and Adam's averages, a parameter takes 16 bytes in float32, and also in bfloat16 with master weights in
# float32 ([lab 17](17_zero.ipynb)).
#
# | | parameters and Adam | activations of rank $r$ |
# |---|---|---|
# | one device, or each data-parallel rank | $16 N$ | $A$ |
# | GPipe | $16 N / p$ | $m A / p$ |
# | 1F1B, $m \ge p$ | $16 N / p$ | $(p - r) A / p$ |
#
# Take 32 blocks, 4,096 wide, with a vocabulary of 128,000 and one sequence of 4,096 tokens per microbatch, in bfloat16.
# (Attention is fused, and does not keep the scores.)

# %%
width, tokens, blocks, vocabulary = 4096, 4096, 32, 128_000
N, A = blocks * 12 * width**2, blocks * 16 * tokens * width * 2
for ranks in (4, 8, 16):
    for name, held in [("GPipe, 32 microbatches", 32), ("1F1B", ranks)]:
        sizes = 16 * N / ranks / 1e9, held * A / ranks / 1e9
        print(f"{ranks:2} ranks, {name:22}: with Adam {sizes[0]:4.1f} GB,",
              f"activations of rank 0 {sizes[1]:5.1f} GB")
logits = tokens * vocabulary * 4 / 1e9  # the loss is computed in float32
head = 16 * width * vocabulary / 1e9
print(f"embedding, head: with Adam {head:.1f} GB each,",
      f"logits of a microbatch {logits:.1f} GB")

# %% [markdown]
# Under 1F1B, more ranks make the parameters of each rank fewer, but rank 0 keeps $A$ as before, and the ranks next to it
# come closer to $A$. At 16 ranks, $A$ is nearly three times as large as a rank's blocks with Adam. Two
# remedies: give the first rank fewer layers ([lab 14](14_cut_a_pipeline.ipynb)), or keep less for each microbatch
# ([lab 15](15_recomputation.ipynb)).
#
# The first and the last rank hold more: one has the embedding, and the other a head of the same size, the logits of its
# one microbatch and their gradient, which is in bfloat16. So at 16 ranks the first one holds about 32 GB, the last one
# 19 GB, and the one before it 9 GB. In JAX, every rank needs as much room as the fullest
# ([lab 12](12_pipeline_in_jax.ipynb)).

# %% [markdown]
# Is the formula right? [SimuMax](https://github.com/MooreThreads/SimuMax) measured 12 layers of Llama 3 70B in two
# stages on eight B200s, four copies of each stage. There a weight takes 2 bytes, its float32 gradient 4, and Adam's
# averages and the master weight 12, which ZeRO 1 divides by the four copies. So we count $2 + 4 + 12/4 = 9$ bytes
# instead of 16.

# %%
from tplab.forecast.measured import ON_B200  # GiB that Megatron allocated

layers, tokens, width, vocabulary = 6, 4096, 8192, 128_256  # of one stage
states = 9 * (layers * 855_654_400 + width * vocabulary)
kept = layers * 16 * tokens * width * 2  # of one microbatch
logits = (4 + 2) * tokens * vocabulary  # float32, and a bfloat16 gradient
by_formula = {"first": 2 * kept, "last": kept + logits}
for (stage, num_bytes), gib in zip(by_formula.items(), ON_B200[1, 2, 4]):
    measured = gib * 2**30
    print(f"{stage:5} stage: {measured / 1e9:.1f} GB measured,",
          f"{(states + num_bytes) / 1e9:.1f} GB by the formulas;")
    print("             without parameters and Adam,",
          f"{(measured - states) / 1e9:.1f} GB and {num_bytes / 1e9:.1f} GB")

# %% [markdown]
# The sum is right within 5%, but most of it is parameters and Adam. Of the rest, the formula finds about four fifths.
#
# ## Which schedule?
#
# Qi et al. measured $F = 18.5$, $I = 18.1$, $W = 9.3$ and 0.6 ms for a message, for a GPT on 8 A100s. With these
# costs, 24 microbatches and one program per rank:
#
# | | a step, simulated | bytes kept by the fullest rank | messages |
# |---|---|---|---|
# | GPipe | 1,433 ms | 3 | 336 |
# | 1F1B | 1,457 ms | 1 | 336 |
# | ZB-H1 | 1,310 ms | 1.2 | 336 |
# | ZB-H2 | 1,237 ms | 2.3 | 336 |
# | interleaved, $v = 4$ | 1,220 ms | 1.2 | 1,488 |
# | ZB-V | 1,189 ms | 1.2 | 672 |
#
# The bytes, relative to 1F1B, were counted for equal transformer blocks. A split backward also keeps gradients until W.
#
# With one program per rank, begin with 1F1B and as many microbatches as the batch allows, unless they become too small
# to keep a GPU busy. GPipe is hardly faster, and keeps three times as much. If the bubble is still large, ZB-V and
# interleaving with $v = 4$ shorten the step most. They keep about a fifth more, and send at least twice as many messages.

# %% [markdown]
# ## A bug to repair
#
# GPT-2 uses one matrix at both ends, as the embedding and as the head. So does this list of layers. On one rank the
# model trains as it should. Run the check, then repair `my_layers`. A `TiedSpec` is a `LayerSpec` with a key; see
# `help(TiedSpec)`.

# %%
def my_layers():
    embedding = nn.Embedding(65, 64)
    blocks, norm = gpt(blocks=4)[1:-2], LayerSpec(nn.LayerNorm, 64)
    return [embedding, *blocks, norm, lambda x: x @ embedding.weight.T]

# %%
from tplab.exercises.pipeline_memory import check_layers

check_layers(my_layers)

# %% [markdown]
# <details><summary>What the two matrices show</summary>
#
# They have one row per vocabulary entry, and the tokens of these eight rows are in the batch. A row gets a gradient from
# the embedding, and another from the head. Before the repair, with two ranks, the head's part is missing: it is on the
# last rank, in a copy of the matrix that belongs to no list of parameters.
#
# </details>
#
# ## Your turn: bytes along a row
#
# `most_kept` counts microbatches. Now count bytes. `row` holds the actions of one rank, and `stage_bytes[s]` is what
# stage `s` keeps for one microbatch. A rank may have several stages, and `action.stage` says which one an action belongs
# to. Return the most that the rank keeps at once. No backward is split here.

# %%
def most_bytes(row, stage_bytes):
    ...

# %%
from tplab.exercises.pipeline_memory import check_most_bytes

check_most_bytes(most_bytes)

# %% [markdown]
# ## On Monday
#
# | here | torch | Megatron and DeepSpeed | JAX |
# |---|---|---|---|
# | `LayerSpec` | build under `torch.device("meta")`, then materialise your stage | `ModuleSpec`; DeepSpeed's `LayerSpec` | `jax.eval_shape`, then initialise with sharded outputs |
# | `TiedSpec` | add up the two gradients yourself | `share_embeddings_and_output_weights`; DeepSpeed's `TiedLayerSpec` | one array, used twice |
# | bytes kept | `torch.cuda.max_memory_allocated()` | `--log-memory-to-tensorboard` | `compiled.memory_analysis()` |
#
# ## To take away
#
# - A pipeline divides weights by $p$, but not the activations of its first rank. Under 1F1B, rank 0 keeps as much as one
#   device that trains the whole model.
# - A parameter that hides in a function is neither counted nor trained. Give a pipeline layers, or specs of layers.
# - Microbatches are not bytes. If the backward is not split, measure one microbatch, and the schedule tells you the rest.

# %% [markdown]
# **Sources.** Huang et al. 2018, [GPipe](https://arxiv.org/abs/1811.06965). Narayanan et al. 2021,
# [PipeDream-2BW](https://arxiv.org/abs/2006.09503), where 1F1B with a flush is called PipeDream-Flush. DeepSpeed's
# [pipeline tutorial](https://www.deepspeed.ai/tutorials/pipeline/), for `LayerSpec` and `TiedLayerSpec`.
#
# Next: [14 Cut a pipeline](14_cut_a_pipeline.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
