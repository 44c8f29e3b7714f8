# %% [markdown]
# # 15 Recomputation
#
# **How can a rank keep less for each microbatch, and what does that cost?**
#
# Prerequisites: [lab 13](13_pipeline_memory.ipynb), for what a rank keeps. Time: 50 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/15_recomputation.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/15_recomputation.ipynb)
#
# ![Memory of 16 layers over the distance between checkpoints: it falls, is least at 4, and rises again.](images/15_recomputation.png)
#
# *A network of 16 layers trains. It keeps only the input of every k-th layer, and computes everything else again when
# the backward pass needs it. The solid line shows the most bytes that its tensors take at any moment, the dotted one a
# formula, and the dashed one what the network needs if it keeps everything. Checkpoints too close together, or too far
# apart, cost more memory than none.*

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
from torch.nn import functional as F
from tplab import Mesh
from tplab.pipeline import LayerSpec
from tplab.schedules import one_f_one_b
from tplab.torch import LiveBytes, run, stages_of, train_batch
from tplab.widgets import Bars, Row, knob, levels

torch.set_num_threads(1)  # several threads do not pay off for tensors this small

# %% [markdown]
# Each layer below keeps `a` tensors as large as its input. With `a = 1` that is the output of the tanh, which is also
# the input of the next layer. For now, the option `checkpoint_every` of `train_batch` does the work. `LiveBytes` counts
# the bytes of all tensors that are alive.

# %% tags=["opening-picture"]
def layer(a):
    if a == 1:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    wide = 16 * (a - 1)
    return nn.Sequential(nn.Linear(16, wide), nn.Tanh(), nn.Linear(wide, 16))

def deep(a, every):
    """Train 16 layers on one rank: the peak of all live tensors, in bytes."""
    schedule, x = one_f_one_b(1, 1), torch.ones(512, 16)
    stages = stages_of([LayerSpec(layer, a)] * 16, schedule)
    with LiveBytes() as live:
        train_batch(schedule, stages, [(x, x)], F.mse_loss, checkpoint_every=every)
    return live.peak

one_input = 512 * 16 * 4  # bytes
ks = (1, 2, 4, 8, 16)
peak = {(a, k): run(deep, Mesh(pp=1), a, k).per_rank[0]
        for a in (1, 4, 9) for k in (None, *ks)}
formula = [(16 / k + k) * one_input for k in ks]
levels(
    {"": {"counted": (ks, [peak[1, k] for k in ks]),
          "no recomputation": (ks, [peak[1, None]] * len(ks))}},
    predicted={"": {"L / k + k inputs": (ks, formula)}},
    title="The peak of 16 layers", about="bytes counted",
    along="layers per checkpoint, k",
    sentence="k = 4 needs about half of the memory. "
             "k = 1 and k = 16 need more than doing nothing.",
)

# %% [markdown]
# ## By hand: 16 layers
#
# **Recomputation** (torch calls it activation checkpointing) keeps only the input of every $k$-th layer: a
# **checkpoint**. The backward pass handles one piece of $k$ layers at a time, starting from the end. It computes the
# piece again, this time keeping everything, goes back through it, and frees it.
#
# With $L$ layers that keep $a$ tensors of their input's size each, memory is
#
# $$\frac{L}{k} \text{ checkpoints} \;+\; k a \text{ tensors of one piece}$$
#
# **Predict.** With $L = 64$ and $a = 4$, which $k$ takes the least memory? And how much more does a step have to compute?
#
# <details><summary>Answer</summary>
#
# $k = 4$ takes 16 + 16 = 32 tensors. Keeping everything, without a checkpoint, takes $La = 256$. In general
# $k = \sqrt{L / a}$, which is 4 for $L = 16$ and $a = 1$, too. The price is one more forward pass, whatever $k$ is. (Only
# the last piece could do without: its backward pass comes at once.) A backward pass computes as much as two forward
# passes. So a step takes 1 + 1 + 2 = 4 forward passes instead of 1 + 2 = 3, a third more.
#
# </details>

# %%
for k in ks:
    counted = peak[1, k] / one_input
    print(f"k = {k:2}: {16 / k + k:2.0f} inputs by the formula, {counted:4.1f} counted")
print(f"no recomputation:              {peak[1, None] / one_input:4.1f} counted")

# %% [markdown]
# The count is 2 to 2.5 inputs above the formula, because gradients are alive as well. Surprisingly, $k = 1$ and $k = 16$ are
# worse than keeping everything. With $k = 1$ every layer's input is a checkpoint, and such a layer keeps hardly more than
# that anyway. With $k = 16$ everything is computed twice, and the second time everything is kept.

# %%
def flops(every):  # the clock of a cluster counts them
    events = run(deep, Mesh(pp=1), 1, every, cluster="h100").trace.events
    return sum(event.flops for event in events if event.op in ("F0", "B0"))

print(f"with recomputation {flops(4) / flops(None):.2f} times the FLOPs")

# %% [markdown]
# This is a little more than four thirds. The first layer needs no gradient of its input, so its backward pass computes no
# more than its forward pass.
#
# ## Build it
#
# Two functions are enough. The forward pass of a piece returns its output and what to keep. The backward pass gets both
# what was kept and the gradient of the output.

# %%
def forget(piece, x):  # -> y, what to keep
    with torch.no_grad():  # no graph, so no activations
        return piece(x), x

def again(piece, kept, dy):  # -> dx, and adds to .grad of the weights
    x = kept.detach().requires_grad_()
    piece(x).backward(dy)  # computes again, then goes back
    return x.grad

def recomputed(layers, every, x, dy):
    starts, held = range(0, len(layers), every), []
    pieces = [nn.Sequential(*layers[i : i + every]) for i in starts]
    for piece in pieces:
        x, kept = forget(piece, x)
        held.append(kept)
    while pieces:
        dy = again(pieces.pop(), held.pop(), dy)
    return x, dy

# %%
torch.manual_seed(0)
layers, dy = [layer(1) for _ in range(16)], torch.randn(512, 16)
x = torch.randn(512, 16, requires_grad=True)
y = nn.Sequential(*layers)(x)
y.backward(dy)
want = [weight.grad.clone() for one in layers for weight in one.parameters()]
for every in (1, 3, 16):
    nn.Sequential(*layers).zero_grad()
    got_y, dx = recomputed(layers, every, x.detach(), dy)
    grads = [weight.grad for one in layers for weight in one.parameters()]
    same = all(map(torch.equal, [got_y, dx, *grads], [y, x.grad, *want]))
    print(f"every {every:2}: all equal to the last bit: {same}")

# %% [markdown]
# ## The twin: JAX
#
# `jax.checkpoint` wraps a piece. `vjp` returns the output and the backward pass, and the backward pass holds what it needs.
# So we can count the tensors in it that are as large as the input:

# %%
import jax
import jax.numpy as jnp

def jax_piece(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x

def jax_recomputed(weights, x, every):
    for i in range(0, len(weights), every):
        x = jax.checkpoint(jax_piece)(weights[i : i + every], x)
    return x

ws, jax_x = list(jnp.ones((16, 16, 16)) / 16), jnp.ones((512, 16))
def tensors_kept(fn):
    _, back = jax.vjp(fn, ws, jax_x)
    return len([x for x in jax.tree.leaves(back) if x.shape == jax_x.shape])

print(f"no recomputation: tensors kept: {tensors_kept(jax_piece)}")
for every in (1, 4, 16):
    kept = tensors_kept(lambda ws, x, k=every: jax_recomputed(ws, x, k))
    print(f"every {every:2}: tensors kept: {kept}")

# %% [markdown]
# Without `jax.checkpoint`, JAX keeps the input and two tensors per layer. What truly differs is randomness. In JAX, a
# random key is an argument of the piece, so both passes draw the same numbers. In torch, the numbers come from a
# generator that the first pass has changed. Your turn, below, is about that.
#
# ## Turn the knob: layers that keep more
#
# A transformer block keeps far more than its input: about 16 times as much in [lab 13](13_pipeline_memory.ipynb). How does
# that move the best $k$? Guess, then turn the knob.

# %%
def bars(a):
    best = min(ks, key=lambda k: peak[a, k])
    rows = [Row("no recomputation", {"the rest at its peak": peak[a, None]})]
    for k in ks:
        checkpoints = (16 / k - 1) * one_input  # the first one is the batch itself
        rest = peak[a, k] - checkpoints
        parts = {"checkpoints": checkpoints, "the rest at its peak": rest}
        rows.append(Row(f"k = {k}", parts, "the least" if k == best else ""))
    layers = "layer" if best == 1 else f"{best} layers"
    return Bars(rows, f"A checkpoint every {layers} takes the least.")

knob("16 layers, a checkpoint every k of them", "a layer keeps, in inputs",
     {a: bars(a) for a in (1, 4, 9)}, start=1, about="bytes counted", unit="B")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# The more a layer keeps, the shorter the best piece, and the more it saves. With $a = 9$ the best is a single layer:
# $\sqrt{16 / 9}$ is 1.3. A transformer block keeps about 16 times its input, so a checkpoint at every block is the usual
# choice. By the formula, pieces of two blocks take less only for $L$ above 32.
#
# </details>
#
# ## In a pipeline
#
# Under 1F1B on $p$ ranks, rank 0 keeps the activations of its $L / p$ layers for $p$ microbatches. With recomputation it
# keeps $p$ times $L / (pk)$ checkpoints, and one piece while that piece is recomputed. Our rank 0 has the embedding and
# three blocks:

# %%
from tplab.torch import GPTConfig, split_batch
from tplab.torch.models.plain import plain_layers, token_loss

p, m = 4, 8  # ranks, microbatches

gpt = plain_layers(GPTConfig(65, 64, num_layers=12, num_heads=4, context=32))
ids = torch.randint(65, (m, 32), generator=torch.Generator().manual_seed(0))

def train(schedule, every=None):
    stages = stages_of(gpt, schedule)
    with LiveBytes() as live:
        pairs = split_batch(ids, ids, m)
        train_batch(schedule, stages, pairs, token_loss, checkpoint_every=every)
    return live.peak, [weight.grad for weight in stages.parameters()]

plain = run(train, Mesh(pp=p), one_f_one_b(p, m)).per_rank
for name, every in [("none", None), ("every 1", 1), ("every 2", 2), ("every 3", 3)]:
    out = run(train, Mesh(pp=p), one_f_one_b(p, m), every)
    apart = max((a - b).abs().max().item() / b.abs().max().item() for rank in range(p)
                for a, b in zip(out.per_rank[rank][1], plain[rank][1]))
    kept, alive = out.trace.peak_bytes[0], out.per_rank[0][0]
    print(f"{name:7} rank 0 keeps {kept / 1e6:.2f} MB between actions,",
          f"{alive / 1e6:.2f} MB at its peak; same gradients: {apart < 1e-5}")

# %% [markdown]
# What a rank keeps *between* its actions (forward and backward passes) nearly disappears. With $k = 1$, rank 0 has
# four pieces. They begin at the token ids, which take almost nothing, and at each of the three blocks. With $k = 2$
# or 3, one piece begins at the ids and one at a block. So 3, 1 and 1 checkpoints per microbatch are left to count.
# One of them takes 32 tokens x 64 numbers x 4 B = 8,192 B, and 3 of them for 4 microbatches are the 0.10 MB. The peak
# falls less, because the piece that is being computed again is alive, and so are gradients. Here is all of rank 0's
# memory, with the parameters:

# %%
from tplab.widgets import memory_timeline

def memory(every):
    schedule = one_f_one_b(p, m)
    return run(train, Mesh(pp=p), schedule, every, count_memory=True).memory

runs = {"no recomputation": memory(None), "a checkpoint at every layer": memory(1)}
memory_timeline(runs, title="A pipeline of four ranks")

# %% [markdown]
# On the left, the activations of four microbatches pile up. On the right, hardly more than checkpoints are left, and there
# are more operations, because each forward pass is run again.
#
# ## What it costs
#
# $A$ is what the whole model keeps for one microbatch, $L$ its number of layers, $s$ the size of a layer's input, and
# $m \ge p$.
#
# | | kept by rank $r$ | FLOPs, relative |
# |---|---|---|
# | GPipe | $m A / p$ | 1 |
# | 1F1B | $(p - r) A / p$ | 1 |
# | GPipe, a checkpoint every $k$ | $m L s / (p k)$, and one piece | 4/3 |
# | 1F1B, a checkpoint every $k$ | $(p - r) L s / (p k)$, and one piece | 4/3 |
#
# Is that worth a third more FLOPs? Take 32 blocks, 4,096 wide, with fused attention and sequences of 4,096 tokens in
# bfloat16, under 1F1B on 8 H100s. An H100 lets a program use 85 GB (79.2 of 80 GiB). We leave out the embedding.

# %%
blocks, width, tokens, ranks = 32, 4096, 4096, 8
s = tokens * width * 2  # the bytes of a block's input
block = 16 * s  # what a block keeps
own = blocks // ranks  # blocks on a rank
held = own * 12 * width**2 * 16  # 16 bytes per parameter, with gradient and Adam
for size in (1, 2, 4, 8):  # sequences per microbatch
    saved = ranks * own * block * size  # rank 0 keeps as many microbatches as ranks
    checkpoints = ranks * own * s * size + block * size  # and one block once more
    print(f"sequences per microbatch: {size}. Rank 0: {(held + saved) / 1e9:5.1f} GB,",
          f"recomputed {(held + checkpoints) / 1e9:4.1f} GB")

# %% [markdown]
# With one or two sequences per microbatch everything fits, and recomputation would only cost time. With four, it fits
# only without the embedding: an embedding of 128,256 entries takes 8.4 GB more. With eight, it needs 1.8 times the
# memory that there is. A compromise is **selective** recomputation, which recomputes only what is large but cheap, such as
# attention scores. Fused attention already does this.
#
# By the count of FLOPs, a step takes a third longer. What does avoiding it save on real GPUs? Korthikanti et al.
# trained a GPT with 530 billion parameters on 2,240 A100s. Compared with recomputing everything, training became 29%
# faster when they recomputed only attention scores, and sharded the norms' activations as in [lab
# 05](05_block_memory.ipynb).

# %% [markdown]
# ## Your turn: a bug to repair
#
# Dropout draws random numbers. `forget` and `again` from above look right, and without dropout they are. Here they are
# once more. Run the check, read what it says, and repair them, without `torch.utils.checkpoint`. A piece may keep anything,
# such as a tuple, but only one tensor as large as its input, besides the generator's state. In a pipeline, other
# microbatches go through the same piece before `my_again` runs.
#
# <details><summary>Hint</summary>
#
# `torch.get_rng_state`, `torch.set_rng_state` and `torch.random.fork_rng` will help.
#
# </details>

# %%
def my_forget(piece, x):  # -> y, what to keep
    with torch.no_grad():
        return piece(x), x

def my_again(piece, kept, dy):  # -> dx
    x = kept.detach().requires_grad_()
    piece(x).backward(dy)
    return x.grad

# %%
from tplab.exercises.recomputation import check_recomputed

check_recomputed(my_forget, my_again)

# %% [markdown]
# ## On Monday
#
# | library | its name for recomputation |
# |---|---|
# | torch | `torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)`; it saves and restores the random state by default |
# | DTensor, FSDP | `apply_activation_checkpointing`, or `checkpoint_wrapper` around a block; under DTensor nothing changes |
# | Megatron | `--recompute-granularity full` or `selective`; `--recompute-method uniform --recompute-num-layers k` |
# | DeepSpeed | `activation_checkpoint_interval` of a `PipelineModule` |
# | JAX | `jax.checkpoint(block, policy=...)`; random keys are arguments, so this bug cannot happen |
#
# ## To take away
#
# - Keep the input of every $k$-th layer and compute the rest again: $L/k + ka$ tensors instead of $La$, for one more forward
#   pass.
# - In a pipeline, the checkpoints are multiplied by the microbatches in flight. Under 1F1B there are at most $p$ of them.
# - A second forward pass must draw the same random numbers as the first, and must leave the generator as it found it.

# %% [markdown]
# **Sources.** Chen et al. 2016, [Sublinear memory cost](https://arxiv.org/abs/1604.06174). Huang et al. 2018,
# [GPipe](https://arxiv.org/abs/1811.06965), which recomputes. Korthikanti et al. 2022,
# [Reducing activation recomputation](https://arxiv.org/abs/2205.05198), for selective recomputation. torch's
# [checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html).
#
# Next: [16 Data parallel](16_data_parallel.ipynb), where every rank has the whole model and a part of the batch.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
