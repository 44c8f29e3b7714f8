# %% [markdown]
# # 13 Pipeline memory
#
# **Where does a pipeline's memory go, and why does the first stage need more of it?**
#
# Time: an hour and a half. Prerequisites: the schedules of [lab 10](10_pipeline_schedules.ipynb), and [lab 11](11_run_a_pipeline.ipynb),
# which runs them.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/13_pipeline_memory.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/13_pipeline_memory.ipynb)
#
# ![Two staircases of memory over time. In GPipe both ranks climb to eight levels; in 1F1B rank 0 stops at four, rank 3 at one.](images/13_pipeline_memory.png)
#
# *What the first and the last of four ranks hold for their backward passes while a small GPT trains: bytes of real tensors,
# counted after every action. Dotted, on top: what was predicted from one microbatch alone.*

# %%
import subprocess
import sys

# On Colab, tplab joins the torch, jax and ipywidgets that are there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("no tplab: see above, then restart the runtime and try again")

# %%
from functools import partial
from itertools import combinations, pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tplab import Mesh
from tplab.pipeline import LayerSpec, TiedSpec, layer_names, partition
from tplab.schedules import Costs, gpipe, interleaved_1f1b, measured_costs, measured_strip, one_f_one_b, simulate, zb_h1
from tplab.torch import axis_index, num_parameters, run, split_batch, stages_of, train_batch
from tplab.widgets import Bars, Row, knob, levels

torch.set_num_threads(1)  # tensors are small here: several threads would wait for each other

# %% [markdown]
# The model is a small GPT, written as a list of layers: embedding, blocks, norm, head, and a function that reshapes.
# A `LayerSpec` is a layer that is not there yet: what to call, with which arguments.

# %%
class Embed(nn.Module):
    def __init__(self, words, places, width):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)

    def forward(self, ids):  # [B, T] -> [B, T, D]
        return self.words(ids) + self.places.weight[: ids.shape[-1]]

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x):  # [B, T, D] -> [B, T, D]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))

def flat(logits):
    return logits.flatten(0, 1)

def gpt(blocks=12, width=64, heads=4, places=32):
    ends = LayerSpec(nn.LayerNorm, width), LayerSpec(nn.Linear, width, 65, bias=False), flat
    return [LayerSpec(Embed, 65, places, width), *[LayerSpec(Block, width, heads)] * blocks, *ends]

# %% [markdown]
# And a program for one rank: build its stages, and train one batch of `m` microbatches. The trace says, after every action,
# how many bytes the rank keeps for backward passes.

# %%
def loss(logits, targets):
    return F.cross_entropy(logits, targets.flatten())

def batch(size, length=32):
    ids = torch.randint(0, 65, (size, length), generator=torch.Generator().manual_seed(0))
    return ids, ids.roll(-1, 1)

def train(schedule, layers, data_axis=None):
    stages = stages_of(layers, schedule)
    microbatches = split_batch(*batch(schedule.num_microbatches), schedule.num_microbatches)
    train_batch(schedule, stages, microbatches, loss, data_axis=data_axis)

# %% tags=["opening-picture"]
p, m = 4, 8  # ranks, microbatches
alone = run(train, Mesh(pp=p), one_f_one_b(p, 1), gpt())
one = measured_costs(one_f_one_b(p, 1), alone.trace).activation  # bytes that each stage keeps of one
ran, said = {}, {}
for name, rule in [("GPipe", gpipe), ("1F1B", one_f_one_b)]:
    said[name] = simulate(rule(p, m), Costs(activation=one))
    ran[name] = run(train, Mesh(pp=p), rule(p, m), gpt()).trace
levels(
    {name: {f"rank {r}": measured_strip(said[name], r, ran[name]) for r in (0, 3)} for name in ran},
    predicted={name: {f"rank {r}": said[name].activation_bytes(r) for r in (0, 3)} for name in ran},
    title="Held for backward passes", about="four ranks, eight microbatches · bytes measured, steps modelled",
    sentence="GPipe: every rank holds eight microbatches. 1F1B: rank 0 holds four of them, rank 3 one.",
    along="steps (F = 1, B = 2)", stairs=True,
)  # fmt: skip

# %% [markdown]
# ## By hand: twelve blocks
#
# A backward pass needs what the forward pass computed. Call what one block keeps of one microbatch a **unit**. Four ranks
# have three blocks each. In 1F1B rank $r$ runs $p - 1 - r$ forwards ahead, so it holds $p - r$ microbatches.
#
# **Predict.** A pipeline of four ranks divides the weights by four. What does rank 0 hold of activations, compared to one
# device that trains the whole model, one microbatch after another?
#
# <details><summary>Answer</summary>
#
# Just as much. The device holds one microbatch in 12 blocks; rank 0 holds 4 microbatches in 3 blocks. With more ranks it has
# fewer blocks and more microbatches: always 12. (In GPipe every rank holds all $m$.)
#
# </details>

# %%
by_hand = [(p - r) * 3 for r in range(p)]
device = run(train, Mesh(pp=1), one_f_one_b(1, m), gpt()).trace
unit = one[0] / 3  # looking words up keeps nothing but the words
for name, its_trace in [("one device", device), *ran.items()]:
    print(f"{name:10} holds", *[round(most / unit) for most in its_trace.peak_bytes])
assert by_hand == [12, 9, 6, 3]
assert [round(most / unit) for most in ran["1F1B"].peak_bytes] == by_hand
assert round(device.peak_bytes[0] / unit) == 12

# %% [markdown]
# (26: the last rank also keeps what norm, head and loss need, of eight microbatches.) The simulation of lab 10, given the bytes of one
# microbatch, says the rest, to the byte:

# %%
for name, rule in [("GPipe", gpipe), ("1F1B", one_f_one_b)]:
    assert list(ran[name].peak_bytes) == list(said[name].peak_bytes)
    assert list(said[name].peak_activations) == ([m] * p if rule is gpipe else [p - r for r in range(p)])

# %% [markdown]
# So much for activations. The rest is weights, and what belongs to them.
#
# ## A model that is not there
#
# A rank that builds the whole model and keeps a part of it needs, for a moment, room for all of it. A list of specs takes
# nothing. `stages_of` cuts it, and builds what this rank needs. `LiveBytes` counts the tensors alive:

# %%
from tplab.torch import LiveBytes

def built_whole():
    with LiveBytes() as live:
        model = [layer.build() if isinstance(layer, LayerSpec) else layer for layer in gpt()]
        del model[4 * axis_index("pp") + 4 :], model[: 4 * axis_index("pp")]  # keep four of sixteen layers
    return live.peak

def built_where_it_lives(ranks):
    with LiveBytes() as live:
        stages_of(gpt(), gpipe(ranks, 1))
    return live.peak

whole = 4 * sum(num_parameters(gpt()))
assert run(built_whole, Mesh(pp=4)).per_rank == [whole] * 4
for ranks in (1, 2, 4, 8):
    most = max(run(built_where_it_lives, Mesh(pp=ranks), ranks).per_rank)
    print(f"{ranks} ranks: {100 * most / whole:.0f} % of the whole model at most, while it is built")
    assert most < whole / ranks * 1.35

# %% [markdown]
# At 8 ranks more than an eighth: 12 blocks cannot be shared equally.
#
# ## Where to cut
#
# Every microbatch passes every rank, so the slowest sets the pace: make the **largest stage as small as possible**. Not
# every program does: DeepSpeed minimises *largest − smallest* ([since 2023](https://github.com/microsoft/DeepSpeed/pull/4312)).
#
# **Predict.** Five layers that take 1, 4, 2, 2, 2; four ranks. One pair of neighbours must share a rank: four ways. Which is
# best by each rule?
#
# <details><summary>Answer</summary>
#
# Pair by pair, the largest: 5, 6, 4, 4. The differences: 3, 5, 3, 3. By differences the way with 5 is as good as those with
# 4, and DeepSpeed takes it.
#
# </details>

# %%
layers = [1, 4, 2, 2, 2]
for inner in reversed([*combinations(range(1, 5), 3)]):
    bounds = (0, *inner, 5)
    sums = [sum(layers[a:b]) for a, b in pairwise(bounds)]
    steps = simulate(one_f_one_b(4, 8), Costs(sums, sums, sums)).makespan
    print(sums, "largest", max(sums), " difference", max(sums) - min(sums), f" eight microbatches in {steps:g} steps")
assert partition(layers, 4).largest == 4
assert partition([1, 6, 3, 3], 3).stage_costs == [1, 6, 6]  # the difference would choose [7, 3, 3]

# %% [markdown]
# Build it, for costs that are whole numbers. Can stages of at most `most` be cut? Fill each as far as it goes. Then halve the interval in which the smallest
# such `most` lies:

# %%
def fits(costs, parts, most):
    stages, filled = 1, 0
    for cost in costs:
        stages, filled = (stages, filled + cost) if filled + cost <= most else (stages + 1, cost)
    return stages <= parts

def smallest(costs, parts):
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(costs, parts, middle) else (middle + 1, high)
    return low

random = np.random.default_rng(0)
for _ in range(50):  # against every cut there is
    costs = random.integers(1, 20, 9).tolist()
    cuts = [(0, *inner, 9) for inner in combinations(range(1, 9), 3)]
    best = min(max(sum(costs[a:b]) for a, b in pairwise(bounds)) for bounds in cuts)
    assert smallest(costs, 4) == partition(costs, 4).largest == best
print("50 models, as good as the best of 56 cuts")

# %% [markdown]
# ## The first stage's mystery
#
# Now a real one. GPT-lite, from the blog that this lab grew from: 12 blocks, width 768, 65 characters, four stages, cut by
# parameters. Its embedding is a `lambda`. This is the cut that the blog printed:

# %%
words, places = nn.Embedding(65, 768), nn.Embedding(200, 768)
hidden = [lambda ids: words(ids) + places.weight[: ids.shape[-1]], *gpt(12, 768, 12)[1:]]
printed = partition(num_parameters(hidden), 4)
print(printed)
assert printed.bounds == (0, 4, 7, 10, 16)
assert printed.stage_weights == [21_256_704] * 3 + [21_308_160] and printed.largest == 21_308_160

# %% [markdown]
# By this table the *last* stage is the largest, by the head. Yet when the blog looked at its workers, the first one took the
# most memory, and it could not say why.
#
# **Predict.** What is not in the table?
#
# <details><summary>Answer</summary>
#
# Activations: of 200 characters a microbatch, rank 0 holds 88 MB, rank 3 22 MB, in any model
# ([DeepSpeed 4477](https://github.com/microsoft/DeepSpeed/issues/4477)). And the embeddings: they hide in a lambda, and a
# function has no parameters. That is 3 MB with Adam, enough to make the table wrong about which stage is largest.
#
# </details>

# %%
counted = partition(num_parameters(gpt(12, 768, 12, places=200)), 4)
print(counted)
assert counted.bounds == printed.bounds  # no cut is better: a block is 35 times as large
assert counted.largest == counted.stage_weights[0] == 21_256_704 + (65 + 200) * 768
block = 12 * 200 * 768 * 4  # a block keeps 12 times what enters it, as we shall see
print(f"activations: rank 0 {by_hand[0] * block / 1e6:.0f} MB, rank 3 {by_hand[3] * block / 1e6:.0f} MB")

# %% [markdown]
# (You can also balance the number of layers, or of layers of one kind:)

# %%
small = gpt()
for method in ("parameters", "uniform", "type:block"):
    cut = partition(num_parameters(small), 4, method, names=layer_names(small))
    print(f"{method:10}", [f"{names[0]} to {names[-1]}" for names in (layer_names(small)[a:b] for a, b in pairwise(cut.bounds))])
    print(" " * 10, f"{cut.stage_weights} parameters, balanced {cut.stage_costs}")
assert cut.stage_costs == [3] * 4

# %% [markdown]
# What is not counted is not trained either: no optimizer is ever told of it. `train_batch` does not even ask for its
# gradient. (`backward` would leave one that nobody uses.)

# %%
def train_hidden(schedule):
    words = nn.Embedding(65, 64)
    layers = [lambda ids: words(ids), *gpt()[1:]]
    stages = stages_of(layers, schedule)
    train_batch(schedule, stages, split_batch(*batch(4), 4), loss)
    return words.weight.grad is None, any(parameter is words.weight for parameter in stages.parameters())

assert run(train_hidden, Mesh(pp=2), one_f_one_b(2, 4)).per_rank == [(True, False)] * 2
print("no gradient, and in nobody's list")

# %% [markdown]
# ## All of it
#
# Weights, their gradients, two averages that Adam keeps, and activations: the bytes of real tensors after a real step.

# %%
def everything(schedule):
    stages = stages_of(gpt(), schedule)
    train_batch(schedule, stages, split_batch(*batch(m), m), loss)
    optimizer = torch.optim.Adam(stages.parameters())
    optimizer.step()
    weights = stages.parameters()
    averages = [x for states in optimizer.state.values() for x in states.values() if x.dim()]
    return [sum(x.nbytes for x in tensors) for tensors in (weights, [w.grad for w in weights], averages)]

out = run(everything, Mesh(pp=p), one_f_one_b(p, m))
shares = [[*rest, most] for rest, most in zip(out.per_rank, out.trace.peak_bytes)]
print("        weights  gradients  Adam  activations (MB)")
for rank, (weights, gradients, adam, activations) in enumerate(shares):
    print(f"rank {rank}  {weights / 1e6:7.1f}  {gradients / 1e6:9.1f}  {adam / 1e6:4.1f}  {activations / 1e6:11.1f}")
    assert gradients == weights and adam == 2 * weights
assert max(map(sum, shares)) == sum(shares[0])

# %% [markdown]
# What helps the first stage? Fewer layers: that is your turn, below. Or to keep less of each microbatch:
#
# ## Forget, and compute again
#
# **Activation checkpointing**: of every $k$ layers keep only what enters the first. In the backward pass compute these $k$
# layers again, then go back through them. With $L$ layers that keep $a$ tensors as large as their input each:
#
# $$\frac{L}{k} \text{ inputs kept} + k a \text{ of one piece, computed again}, \qquad \text{least at } k = \sqrt{L / a}$$
#
# **Predict.** 16 layers that keep as much as enters them. The best $k$? And how many FLOPs more?
#
# <details><summary>Answer</summary>
#
# $k = 4$: 4 + 4, instead of 16. And one forward pass more, whatever $k$ is: four thirds of the FLOPs.
#
# </details>

# %%
def layer(a):  # keeps its input, and a - 1 tensors as large
    wide = 16 * (a - 1)
    return nn.Sequential(nn.Linear(16, wide or 16), nn.Tanh(), *([nn.Linear(wide, 16)] if wide else []))

def deep(a, every):
    """Of 16 layers: the peak of all live tensors, in bytes."""
    schedule, x = one_f_one_b(1, 1), torch.ones(512, 16)
    stages = stages_of([LayerSpec(layer, a)] * 16, schedule)
    with LiveBytes() as live:
        train_batch(schedule, stages, [(x, x)], F.mse_loss, checkpoint_every=every)
    return live.peak

def in_inputs(a, every):
    """The peak of all live tensors, and what F keeps, in inputs of a layer."""
    out, one_input = run(deep, Mesh(pp=1), a, every), 512 * 16 * 4
    return out.per_rank[0] / one_input, out.trace.peak_bytes[0] / one_input

ks = (1, 2, 4, 8, 16)
found = {a: {k: in_inputs(a, k) for k in ks} for a in (1, 4, 9)}
for k, (most, kept) in found[1].items():
    print(f"k = {k:2}: {16 / k + k:4.1f} by the formula, {most:4.1f} counted")
    assert kept == 16 / k - 1  # the first input is the batch itself
    assert 16 / k + k <= most <= 16 / k + k + 4  # the gradients on their way
assert min(found[1], key=lambda k: found[1][k]) == 4

# %%
def flops(every):  # of F, and of B; the clock of a cluster counts them
    events = run(deep, Mesh(pp=1), 1, every, cluster="h100").trace.events
    return [sum(event.flops for event in events if event.op == kind) for kind in ("F0", "B0")]

(forward, backward), (_, with_again) = flops(None), flops(4)
assert np.isclose(with_again, backward + forward, rtol=1e-6)
print(f"{(forward + with_again) / (forward + backward):.2f} times the FLOPs")

# %% [markdown]
# Layers of a transformer keep far more than what enters them (a block of ours: 12 inputs' worth). Where does that move the
# best $k$? Guess, then turn the knob.

# %%
def bars(a):
    best = min(ks, key=lambda k: found[a][k])
    rows = [
        Row(f"k = {k}", {"inputs kept": kept, "the rest, at its peak": most - kept}, "least" if k == best else "")
        for k, (most, kept) in found[a].items()
    ]
    return Bars(rows, f"A checkpoint every {best} layer{'s' * (best > 1)} takes the least.")

knob("16 layers, a checkpoint every k of them", "a layer keeps, in inputs", {a: bars(a) for a in found},
     about="bytes counted, in inputs of a layer", unit="inputs")  # fmt: skip

# %%
assert [min(ks, key=lambda k: found[a][k]) for a in (1, 4, 9)] == [4, 2, 1]  # sqrt(16 / a)
assert round(unit / (32 * 64 * 4)) == 12  # a block keeps this many inputs [1, 32, 64]

# %% [markdown]
# For our twelve blocks, then: every one or two. In a pipeline rank 0 keeps inputs for $p$ microbatches, and computes one piece
# again: $p \cdot \frac{L}{p k} + k a$, what one device would. A checkpoint may fall on a stage's first layer, which is given a
# message and not a layer's output; there one reads of a missing `grad_fn`
# ([DeepSpeed 4479](https://github.com/microsoft/DeepSpeed/issues/4479)). Gradients are the same:

# %%
def gradients(schedule, every):
    stages = stages_of(gpt(), schedule)
    with LiveBytes() as live:
        train_batch(schedule, stages, split_batch(*batch(m), m), loss, checkpoint_every=every)
    return [parameter.grad for parameter in stages.parameters()], live.peak

plain = run(gradients, Mesh(pp=p), one_f_one_b(p, m), None)
for name, every in [("no checkpoints", None), ("every 1", 1), ("every 2", 2), ("every 3", 3)]:
    out = run(gradients, Mesh(pp=p), one_f_one_b(p, m), every)
    for (ours, _), (theirs, _) in zip(out.per_rank, plain.per_rank):
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(ours, theirs))
    kept, alive = out.trace.peak_bytes[0], out.per_rank[0][1]
    print(f"{name}: rank 0 keeps {kept / 1e6:.2f} MB, and has {alive / 1e6:.2f} MB alive at most")

# %% [markdown]
# What is kept *between* forward and backward nearly vanishes. What is alive at the peak does not fall as far: the piece
# computed again is there, and the gradients of all weights.

# %% [markdown]
# ## More microbatches
#
# **Gradient accumulation** means: run $m$ microbatches, add their gradients up, then step. On one device, or on four that
# hold copies (data parallelism), memory does not care about $m$.
#
# **Predict.** How do rank 0's activations grow with $m$ in a pipeline, under GPipe and under 1F1B?
#
# <details><summary>Answer</summary>
#
# GPipe: with every microbatch, and the bubble wants many. 1F1B: up to $m = p$, and then no more. There it meets data
# parallelism: $p$ microbatches of $1/p$ of the model. ([DeepSpeed 4602](https://github.com/microsoft/DeepSpeed/issues/4602)
# asks why memory grows.)
#
# </details>

# %%
counts = (1, 2, 4, 6, 8)
ways = {
    "data parallel, any rank": [(one_f_one_b(1, n), Mesh(dp=4, pp=1), "dp") for n in counts],
    "GPipe, rank 0": [(gpipe(4, n), Mesh(pp=4), None) for n in counts],
    "1F1B, rank 0": [(one_f_one_b(4, n), Mesh(pp=4), None) for n in counts],
}
grown = {
    way: [run(train, mesh, rule, gpt(blocks=4), axis).trace.peak_bytes[0] for rule, mesh, axis in runs]
    for way, runs in ways.items()
}
levels({"": {way: (counts, kept) for way, kept in grown.items()}}, title="Gradient accumulation on four workers",
       about="bytes measured", along="microbatches that each step adds up",
       sentence="GPipe grows with every microbatch; 1F1B stops where data parallelism has always been, but for its head.")

# %%
flat_line, growing, stops = grown.values()
assert len(set(flat_line)) == 1
assert growing == [n * growing[0] for n in counts]
assert stops == [min(n, 4) * stops[0] for n in counts]
assert round(stops[-1] / unit) == round(flat_line[0] / unit) == 4  # blocks; a whole device also keeps what its head needs

# %% [markdown]
# ## Pipelines beside each other
#
# Eight workers: one pipeline of eight stages (8 x 1), two of four (4 x 2), or four of two (2 x 4). Two axes of a mesh say
# which ranks form a pipeline (`pp`), and which hold the same stage and average its gradients (`dp`). The same 16 sequences
# for each:

# %%
def group(schedule, ids, targets):
    part, n = axis_index("dp"), schedule.num_microbatches
    mine = slice(part * n, (part + 1) * n)  # other sequences for each pipeline
    stages = stages_of(gpt(blocks=8), schedule)
    value = train_batch(schedule, stages, split_batch(ids[mine], targets[mine], n), loss, data_axis="dp")
    return value, sum(parameter.nbytes for parameter in stages.parameters())

values, sizes, bubbles = [], [], []
for pipelines, ranks in [(1, 8), (2, 4), (4, 2)]:
    mesh, schedule = Mesh(dp=pipelines, pp=ranks), one_f_one_b(ranks, 16 // pipelines)
    out = run(group, mesh, schedule, *batch(16))
    (value, weights), kept = out.per_rank[0], out.trace.peak_bytes[0]
    values, sizes = [*values, value.item()], [*sizes, weights]
    bubbles.append(simulate(schedule).bubble_fraction)
    print(f"{ranks} x {pipelines}  pipeline of rank 0: {mesh.groups('pp')[0]}  copies of its stage: {mesh.groups('dp')[0]}")
    print(f"       weights {weights / 1e6:.2f} MB, activations {kept / unit:.0f} units, bubble {100 * bubbles[-1]:.0f} %")
    assert round(kept / unit) == 8
assert np.allclose(values, values[0], rtol=1e-6) and sizes == sorted(sizes) and bubbles == sorted(bubbles)[::-1]

# %% [markdown]
# Longer pipelines divide weights further, and have more bubble. What rank 0 holds of activations is the same in all three.
#
# ## Shapes that change
#
# Microbatches may change their shape, from one to the next and from batch to batch. Some libraries allocate buffers once,
# and must be told (`reset_activation_shape`). In tplab a message brings its shape. (In JAX a program's microbatches have one
# shape; for another one it compiles another program.)

# %%
def changing(schedule):
    stages = stages_of(gpt(), schedule)
    first, second = batch(2, length=8), batch(3, length=32)
    return [train_batch(schedule, stages, pair, loss).item() for pair in ([first, second], [second, second])]

(want,) = run(changing, Mesh(pp=1), one_f_one_b(1, 2)).per_rank
for got in run(changing, Mesh(pp=4), one_f_one_b(4, 2)).per_rank:
    assert np.allclose(got, want, rtol=1e-6)

# %% [markdown]
# ## Parameters are not time
#
# With a vocabulary of 8,000 words, the embedding weighs as much as ten blocks, and takes no time: it looks words up. So
# measure. With one layer a stage, all on one rank, the trace of a batch has the time of every layer:

# %% tags=["nbval-ignore-output"]
words = [LayerSpec(Embed, 8000, 32, 64), *gpt()[1:-2], LayerSpec(nn.Linear, 64, 8000, bias=False), flat]
each = interleaved_1f1b(1, 2, virtual_stages=16)

def timed():
    stages = stages_of(words, each, "uniform")
    for _ in range(3):  # the first one warms up
        train_batch(each, stages, split_batch(*batch(8), 2), loss)

trace = run(timed, Mesh(pp=1), clock="measured").trace
measured = measured_costs(each, trace)
milliseconds = 1e3 * (measured.forward + measured.full_backward).min(1)
by_weight = partition(num_parameters(words), 4)
by_time = partition(num_parameters(words), 4, milliseconds.tolist())
for name, found_cut in (("parameters", by_weight), ("time", by_time)):
    slowest = max(milliseconds[a:b].sum() for a, b in pairwise(found_cut.bounds))
    print(f"balanced by {name:10} {found_cut.bounds}  slowest stage {slowest:.1f} ms")

# %%
assert by_weight.bounds[1] < by_time.bounds[1]  # by time, the first stage has room for blocks beside its embedding

# %% [markdown]
# ## The same in JAX
#
# The import is the switch; a layer keeps its parameters apart (lab 11). What truly differs: one program for all ranks, so
# all have arrays of one shape. `stages_of` packs a rank's parameters into a flat one, padded to the longest.
#
# **Predict.** To spare rank 0 we cut 12 layers into 2, 3, 3 and 4. What does rank 0 hold of weights now, in JAX? And
# rank 3, which in 1F1B keeps one microbatch at a time?
#
# <details><summary>Answer</summary>
#
# Four layers' worth: as much as rank 3. And rank 3 has room for four microbatches, as rank 0 needs (two cells below). Every
# rank pays for the fullest one.
#
# </details>

# %%
import jax
import jax.numpy as jnp
import tplab.jax as tj

class Mlp:
    def init(self, key):
        up, down = jax.random.split(key)
        return {"up": jax.random.normal(up, (32, 64)) / 6, "down": jax.random.normal(down, (64, 32)) / 8}

    def __call__(self, w, x):
        return x + jnp.tanh(x @ w["up"]) @ w["down"]

def held_in_jax(cut):
    stages = tj.stages_of([LayerSpec(Mlp)] * 12, one_f_one_b(4, 8), bounds=cut)
    return jnp.array(sum(leaf.size for leaf in jax.tree.leaves(stages)))

for cut in ([0, 3, 6, 9, 12], [0, 2, 5, 8, 12]):
    each_rank = [int(size) for size in tj.run(partial(held_in_jax, cut), Mesh(pp=4)).per_rank]
    print([b - a for a, b in pairwise(cut)], "layers; every rank holds", each_rank[0], "parameters")
    assert each_rank == [2 * 32 * 64 * max(b - a for a, b in pairwise(cut))] * 4

# %% [markdown]
# And activations? XLA plans the memory of a program before it runs: `temporary_bytes` asks it, for each rank the same. The
# lesson of the schedules is there, to be read from a compiler: GPipe, 1F1B, and 1F1B that recomputes. (Beside it what the
# passes keep. The rest is messages, gradients and work space.)

# %%

def in_jax(rule, every):
    x, schedule = jnp.ones((8, 4, 32, 32)), rule(4, 8)
    stages = tj.stages_of([LayerSpec(Mlp)] * 4, schedule)
    pairs = [(one, one) for one in x]
    return tj.train_batch(schedule, stages, pairs, lambda y, t: ((y - t) ** 2).mean(), checkpoint_every=every)

planned = {}
for name, rule, every in [("GPipe", gpipe, None), ("1F1B", one_f_one_b, None), ("1F1B, recomputed", one_f_one_b, 1)]:
    of_rule = partial(in_jax, rule, every)
    planned[name] = tj.temporary_bytes(of_rule, Mesh(pp=4)), tj.run(of_rule, Mesh(pp=4)).trace.peak_bytes

# %% tags=["nbval-ignore-output"]
for name, (temporaries, needed) in planned.items():
    print(f"{name:17} {temporaries:9,} bytes on every rank; its passes need", *(f"{num_bytes:,}" for num_bytes in needed))

# %%
total = {name: temporaries for name, (temporaries, _) in planned.items()}
assert total["GPipe"] > 1.3 * total["1F1B"] > 1.3 * 1.1 * total["1F1B, recomputed"]
needed = planned["1F1B"][1]
assert max(needed) > 2 * needed[-1]  # the last rank needs less than half,
assert total["1F1B"] > max(needed)  # and has what the fullest one needs

# %% [markdown]
# ## What it costs
#
# $N$ bytes of weights; one microbatch keeps $A$ bytes in all of $L$ equal layers, of which each has an input of $s$ bytes;
# $m \ge p$.
#
# | | weights | kept by rank $r$ | FLOPs |
# |---|---|---|---|
# | one device; data parallel | $N$ | $A$ | 1 |
# | GPipe | $N / p$ | $m A / p$ | 1 |
# | 1F1B | $N / p$ | $(p - r) A / p$ | 1 |
# | 1F1B, a checkpoint every $k$ | $N / p$ | $(p - r) L s / (p k)$, and a piece | 4/3 |

# %%
def equal_layers(schedule, every=None):
    stages, x = stages_of([LayerSpec(Block, 32, 4)] * 6, schedule), torch.ones(2, 16, 32)
    train_batch(schedule, stages, [(x, x)] * schedule.num_microbatches, F.mse_loss, checkpoint_every=every)
    return sum(parameter.nbytes for parameter in stages.parameters())

def kept_and_weights(schedule, every=None):
    out = run(equal_layers, Mesh(pp=schedule.num_ranks), schedule, every)
    return list(zip(out.trace.peak_bytes, out.per_rank))

((A, N),) = kept_and_weights(one_f_one_b(1, 6))
L, s = 6, 2 * 16 * 32 * 4
for ranks in (2, 3, 6):
    for rule, every, microbatch in [(gpipe, None, A), (one_f_one_b, None, A), (one_f_one_b, 1, L * s)]:
        for r, (kept, weights) in enumerate(kept_and_weights(rule(ranks, 6), every)):
            in_flight = 6 if rule is gpipe else ranks - r
            of_loss = in_flight * s if r == ranks - 1 and not every else 0  # it keeps the output
            of_batch = in_flight * s if r == 0 else 0  # the first input is there anyway
            assert kept - of_loss + of_batch == in_flight * microbatch / ranks and weights == N / ranks
split = [kept for kept, _ in kept_and_weights(zb_h1(3, 6))]
print("ZB-H1, three ranks:", *(f"{kept / A:.1f}" for kept in split), "of A")
assert split[2] > 1.4 * A

# %% [markdown]
# Microbatches are not bytes: ZB-H1 never holds more than $p$ of them. But between I and W it holds the inputs of every
# weight *and* the gradients that will meet them.
#
# ## A bug to repair
#
# GPT-2 has one matrix for both ends: words in, words out. Somebody wrote that down as a list of layers. On one rank the
# model trains as it should. Run the check, and fix it. (A `TiedSpec` is a `LayerSpec` with a key; `help(TiedSpec)`.)

# %%
def my_layers():
    words = nn.Embedding(65, 32)
    blocks = [LayerSpec(Block, 32, 4)] * 4
    return [words, *blocks, LayerSpec(nn.LayerNorm, 32), lambda x: x @ words.weight.T]

# %%
from tplab.exercises.pipeline_memory import check_layers

check_layers(my_layers)

# %% [markdown]
# <details><summary>What the two matrices show</summary>
#
# One row per word. As an embedding, only words of the batch get a gradient; as a head, every word does. On two ranks the head's
# part is missing: it is on the last rank, for a copy of the matrix that is in nobody's list.
#
# </details>

# %% [markdown]
# ## Your turn: room for the first stage
#
# Cut a model into `ranks` stages for 1F1B, of one layer at least, for no fewer microbatches than ranks. Of each layer you know
# what it costs (FLOPs), the bytes of its weights (16 a parameter, with Adam), and the bytes that it keeps of one
# microbatch. No rank may take more than `limit` bytes; the busiest one should have as little to do as can be. Return the
# bounds, such as `[0, 4, 7, 10, 16]`. (Trying every cut is fine: `combinations`, above.)
#
# It is tried on four models that you can check in your head, then on this lab's GPT, measured; and your cut of it is run.

# %%
def my_cut(costs, weights, kept, ranks, limit):
    ...

# %%
from tplab.exercises.pipeline_memory import check_cut

check_cut(my_cut, gpt(), batch(4)[0])

# %% [markdown]
# <details><summary>A hint</summary>
#
# What does rank $r$ take if it has the layers $a$ to $b$? Their weights once; what they keep, as many times as it holds
# microbatches.
#
# </details>
#
# `partition` does it too, with `memory=` (what each layer takes on each rank) and `memory_limit=`. Without a limit the
# fullest rank takes 7.3 MB. With 6.2 MB a rank, the first one has two blocks, and the last one four:

# %%
from tplab.exercises.pipeline_memory import measured_layers

costs, weights, kept = measured_layers(gpt(), batch(4)[0])
table = [[w + (p - r) * k for w, k in zip(weights, kept)] for r in range(p)]
free = partition(weights, p, costs)
tight = partition(weights, p, costs, memory=table, memory_limit=6_200_000)
fullest = [max(sum(table[r][a:b]) for r, (a, b) in enumerate(pairwise(cut.bounds))) for cut in (free, tight)]
print(free.bounds, "to", tight.bounds, "and", *(f"{num_bytes / 1e6:.2f} MB" for num_bytes in fullest))
assert tight.bounds == (0, 3, 6, 9, 16) and tight.largest > free.largest

# %% [markdown]
# ## To take away
#
# - A pipeline divides weights by $p$. The activations of its first rank it does not divide: in 1F1B rank $r$ holds $p - r$
#   microbatches of $1/p$ of the model: rank 0 as much as one device that trains it all.
# - What hides in a lambda is neither counted nor trained. Give a pipeline layers, or specs of them.
# - Make the largest stage small, under a limit that knows how many microbatches a rank holds. Checkpoints trade a third
#   more FLOPs for most of the memory.

# %% [markdown]
# **Sources.** Huang et al. 2018, [GPipe](https://arxiv.org/abs/1811.06965). Narayanan et al. 2021,
# [PipeDream-2BW](https://arxiv.org/abs/2006.09503) (PipeDream-Flush, which is 1F1B). Chen et al. 2016,
# [Sublinear memory cost](https://arxiv.org/abs/1604.06174) (checkpoints).
# Bruno Magalhães, [Pipeline parallelism on DeepSpeed](https://brunomaga.github.io) (GPT-lite, its printed partition).
# [DeepSpeed's pipelines](https://www.deepspeed.ai/tutorials/pipeline/) (`LayerSpec`, partition; it balances largest −
# smallest [since 4312](https://github.com/microsoft/DeepSpeed/pull/4312)).
#
# Back to the [list of labs](../README.md#labs).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
