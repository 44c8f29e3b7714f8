# %% [markdown]
# # 14 Cut a pipeline
#
# **Where should a model be cut into stages, so that no rank waits and no rank runs out of memory?**
#
# Prerequisites: 1F1B from [lab 10](10_pipeline_schedules.ipynb), and what a rank has to keep from
# [lab 13](13_pipeline_memory.ipynb). Time: 45 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/14_cut_a_pipeline.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/14_cut_a_pipeline.ipynb)
#
# ![The same five layers on four ranks, cut in two ways. Above, rank 0 has two layers and is hardly ever idle, and the others wait for it. Below, the work is more even and ends sooner.](images/14_cut_a_pipeline.png)
#
# *Five layers take 2, 3, 1, 3 and 2 steps. Above, the first rank has 5 of these steps and the other ranks wait for it.
# Below, no rank has more than 4. The microbatches are the same, and the schedule is 1F1B in both. A backward pass takes
# twice as long as its forward pass.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
from itertools import combinations, pairwise

import numpy as np
from tplab.pipeline import partition
from tplab.schedules import Costs, Schedule, interleaved_1f1b, one_f_one_b
from tplab.schedules import measured_costs, simulate
from tplab.widgets import Bars, Row, gantt, knob, pipeline_lab

# %% tags=["opening-picture"]
def step(stages, microbatches=8):  # 1F1B; a backward pass takes two forward passes
    rows = one_f_one_b(len(stages), microbatches).by_rank()
    schedule = Schedule(rows, name=f"stages of {stages} steps")
    return simulate(schedule, Costs(stages, stages, stages))

gantt(step([5, 1, 3, 2]), step([2, 4, 3, 2]))

# %% [markdown]
# ## By hand: five layers, four ranks
#
# Every microbatch passes through every stage. Once the pipeline is full, the slowest stage sets the pace, and all other
# ranks wait for it. So the first rule is to make the **largest stage as small as possible**.
#
# It is not the only rule in use. DeepSpeed has minimised *largest − smallest*
# [since 2023](https://github.com/microsoft/DeepSpeed/pull/4312).
#
# **Predict.** The layers take 1, 4, 2, 2, 2. With four ranks, one pair of neighbours must share a rank, so there are four
# ways to cut. Which is best by each rule?
#
# <details><summary>Answer</summary>
#
# The cuts are [5, 2, 2, 2], [1, 6, 2, 2], [1, 4, 4, 2] and [1, 4, 2, 4]. Their largest stages are 5, 6, 4 and 4, so the
# first rule takes one of the last two. Their differences are 3, 5, 3 and 3. By the second rule the cut with 5 is as good
# as the two with 4, and DeepSpeed's code returns the one with 5.
#
# </details>

# %%
layers = [1, 4, 2, 2, 2]
for inner in reversed([*combinations(range(1, 5), 3)]):
    stages = [sum(layers[a:b]) for a, b in pairwise((0, *inner, 5))]
    most, least, steps = max(stages), min(stages), step(stages).makespan
    print(stages, f"largest {most}, difference {most - least}: {steps:g} steps")

# %% [markdown]
# ## Ties are not equal
#
# The last two cuts have the same largest stage, 4, and yet one needs 113 steps and the other 117. The largest stage sets
# the pace, but it does not decide how long the pipeline takes to fill and to drain. In [1, 4, 2, 4] the last rank is one of
# the slow ones. It cannot start before 7 steps of forwards have passed, and after its last backward the gradient still has
# to travel up through 14 more:
#
# $$7 + 8 \cdot 3 \cdot 4 + 14 = 117$$
#
# In [1, 4, 4, 2] the slow ranks come earlier, so both trips are shorter. With more microbatches the difference stays
# the same, and matters less. `partition` makes the largest stage as small as possible. Among ties it takes the most
# even cut, by the sum of squares. These two have the same sizes, and it returns the slower one.

# %%
chosen = partition(layers, 4)
print(chosen.stage_costs, f"takes {step(chosen.stage_costs).makespan:g} steps")
for m in (8, 32, 128):
    early, late = (step(cut, m).makespan for cut in ([1, 4, 4, 2], [1, 4, 2, 4]))
    apart = 100 * (late / early - 1)
    print(f"{m:3} microbatches: {early:g} and {late:g} steps, {apart:.1f}% apart")

# %% [markdown]
# With few microbatches, let the simulation decide: even a cut with a larger largest stage can win. With layers of 1,
# 5, 7, 3, 3, 9 steps, three ranks and 8 microbatches, [6, 10, 12] takes 336 steps, and [13, 6, 9] takes 331.
#
# ## Build it
#
# Trying all cuts is too slow for a hundred layers. There is a quick way for costs that are whole numbers. First answer
# a simpler question: can we cut stages that are no larger than `most`? Fill each stage as far as possible. Then find
# the smallest such `most` by bisection.

# %%
def fits(costs, parts, most):
    stages, filled = 1, 0
    for cost in costs:
        if filled + cost > most:
            stages, filled = stages + 1, 0
        filled += cost
    return stages <= parts

def smallest(costs, parts):
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(costs, parts, middle) else (middle + 1, high)
    return low

random = np.random.default_rng(0)
for _ in range(50):  # compared with every possible cut
    costs = random.integers(1, 20, 9).tolist()
    cuts = [(0, *inner, 9) for inner in combinations(range(1, 9), 3)]
    best = min(max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in cuts)
    assert smallest(costs, 4) == partition(costs, 4).largest == best
print("50 random models: as good as the best of 56 cuts")

# %% [markdown]
# ## A bug to repair
#
# Here is a cut in one pass, without any search. Every stage gets layers until it has its share of the work. Run the
# check, look at the picture, and repair `fill`. You may use `smallest`, but not `partition`. Every stage needs at least one layer.

# %%
def fill(costs, ranks):
    bounds, filled, share = [0], 0, sum(costs) / ranks
    for layer, cost in enumerate(costs):
        if layer and filled + cost > share and len(bounds) < ranks:
            bounds.append(layer)
            filled = 0
        filled += cost
    return bounds + [len(costs)]

# %%
from tplab.exercises.cut_a_pipeline import check_fill

check_fill(fill)

# %% [markdown]
# <details><summary>A hint</summary>
#
# No stage has to be as small as the mean. It may have up to `smallest(costs, ranks)` steps. With that much room, the layers
# can run out before every stage has one: a layer must also begin a new stage if only as many layers as stages are left.
#
# </details>
#
# ## What to balance: parameters are not time
#
# Which numbers should we give to `partition`? Parameters are easy to count, and many programs use them. But an
# embedding with a vocabulary of 3,000 has about as many parameters as four of the small blocks below, and takes almost no
# time, because it only looks tokens up. The head has just as many, but is a large matmul.
#
# **Predict.** Four ranks share an embedding, 12 blocks, a norm and a head. If they are balanced by parameters, how many
# blocks does the first rank get? And if they are balanced by time?
#
# <details><summary>Answer</summary>
#
# By parameters it gets one block, because the embedding counts as four. By time it gets three or four, because the
# embedding takes almost no time. The head has as many parameters as the embedding, and also takes as long as several
# blocks, so the last rank gets the fewest. These layers take only milliseconds, so on a busy machine a block may land
# elsewhere.
#
# </details>
#
# Let us measure it. With one layer per stage, and all stages on one rank, the trace of a batch shows how long every
# layer takes. We take the shortest of 20 measurements:

# %%
import torch
from tplab import Mesh
from tplab.torch import GPTConfig, num_parameters
from tplab.torch import run, split_batch, stages_of, train_batch
from tplab.torch.models.plain import plain_layers, token_loss

torch.set_num_threads(1)  # several threads do not pay off for tensors this small

def gpt(vocabulary):  # 12 blocks, 64 wide
    return plain_layers(GPTConfig(vocabulary, 64, 12, num_heads=4, context=32))

large, each = gpt(3000), interleaved_1f1b(1, 4, virtual_stages=15)
ids = torch.randint(65, (16, 32), generator=torch.Generator().manual_seed(0))

def timed():
    stages = stages_of(large, each, "uniform")  # one layer per stage
    for _ in range(6):  # the first batch warms up
        train_batch(each, stages, split_batch(ids, ids, 4), token_loss)

trace = run(timed, Mesh(pp=1), clock="measured").trace
batches = [measured_costs(each, trace, batch=k) for k in range(1, 6)]
seconds = np.array([costs.forward + costs.full_backward for costs in batches])
milliseconds = 1e3 * seconds.min((0, 2))  # [batches, layers, microbatches] -> [layers]
by_parameters = partition(num_parameters(large), 4)
by_time = partition(num_parameters(large), 4, milliseconds.tolist())

# %% tags=["nbval-ignore-output"]
for name, cut in [("parameters", by_parameters), ("time", by_time)]:
    stages = [sum(milliseconds[a:b]) for a, b in pairwise(cut.bounds)]
    blocks = [sum(1 <= layer <= 12 for layer in stage) for stage in cut.stages]
    print(f"by {name:10} blocks {blocks}, slowest stage {max(stages):.1f} ms")

# %% [markdown]
# Now cut a model with such a head by hand. Its 16 layers cost 0.25 each, and its head costs 1. With four layers on each
# rank, 1F1B takes 57 steps. The task below the picture asks for 42 or fewer. Type your cut as the cost of each stage:

# %%
pipeline_lab(stage_costs="1, 1, 1, 2", task="cut")

# %% [markdown]
# ## Turn the knob: a limit on memory
#
# A balanced cut can still run out of memory, because the first rank keeps the most microbatches. Under 1F1B on $p$
# ranks, with at least $p$ microbatches, rank $r$ needs
#
# $$\text{parameters, gradients and Adam states of its layers} + (p - r) \cdot \text{what they keep for one microbatch}$$
#
# `partition` takes this as a table, `memory[rank][layer]`, with a `memory_limit`. Here `Trial` makes the table; in the
# exercise, you will. The model is a GPT with a vocabulary of 65, where parameters matter less. We count 16 bytes per
# parameter with Adam, and the bytes kept for one microbatch of four sequences. Then we lower the limit. How much longer
# does a step take when every rank has 15% less memory? Guess, then turn the knob.

# %%
from tplab.exercises.cut_a_pipeline import Trial, measured_layers

measured = measured_layers(gpt(65), ids[:4])  # FLOPs, weights, kept, by layer
trial = Trial("GPT", *measured, ranks=4, limit=float("inf"))
free = trial.best()
most = max(trial.takes(free.bounds))

def bars(percent):
    cut = trial.within(most * percent / 100)
    blocks = [sum(1 <= layer <= 12 for layer in stage) for stage in cut.stages]
    longer = step(cut.stage_costs).makespan / step(free.stage_costs).makespan
    rows = [Row(f"rank {r}", parts, f"{n} blocks")
            for r, (parts, n) in enumerate(zip(trial.parts(cut.bounds), blocks))]
    return Bars(rows, f"A step of 8 microbatches takes {longer:.2f} times as long.")

knob("The best cut that fits", "memory per rank, in % of what the even cut needs",
     {percent: bars(percent) for percent in (100, 95, 90, 85, 80)}, start=100,
     about="FLOPs and bytes counted · 1F1B", unit="B")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# At 95%, a step already takes 1.16 times as long. Blocks cannot be divided, so a whole block moves from rank 0 to rank
# 2, and this cut still fits at 85%. At 80%, rank 3 gets two more blocks than in the even cut, and a step takes 1.42
# times as long. At 75%, no cut fits.
#
# </details>
#
# ## What it costs
#
# $F_s$ and $B_s$ are the times that stage $s$ takes for the forward and the backward pass of one of $m$ microbatches.
# Stage $s$ waits until the first microbatch reaches it, and then does its own work. At the end, its last gradient has to
# travel up:
#
# $$\text{time of a step} \;\ge\; \max_s \Big( \sum_{t<s} F_t + m \, (F_s + B_s) + \sum_{t<s} B_t \Big)$$
#
# Here are this bound and the simulation for the four cuts above:

# %%
def bound(sizes, m=8):  # B = 2 F
    return max(3 * sum(sizes[:s]) + 3 * m * sizes[s] for s in range(len(sizes)))

for sizes in ([5, 2, 2, 2], [1, 6, 2, 2], [1, 4, 4, 2], [1, 4, 2, 4]):
    steps = step(sizes).makespan
    print(sizes, f"at least {bound(sizes)} steps; 1F1B takes {steps:g}")

# %% [markdown]
# When is an uneven cut worth it? Here, moving one block saves 16% of the memory for 16% more time.
# Recomputation ([lab 15](15_recomputation.ipynb)) saves most of the activations for up to a third more FLOPs. So if
# you need a little more memory, move a layer. If you need much more, recompute.

# %% [markdown]
# ## Your turn: room for the first rank
#
# Write `my_cut`. It gets a list of the layers' costs (FLOPs), a list of the bytes of their weights (with gradient and
# Adam), and a list of the bytes that they keep for one microbatch. It returns the bounds of the stages for 1F1B, such
# as `[0, 4, 7, 10, 15]`. Every stage has at least one layer, no rank may take more than `limit` bytes, and the busiest
# rank should have as little to do as possible. Write the search yourself, without `partition`: you may try every cut
# with `combinations`, as above.
#
# The check tries your function on small models, five of which you can work out by hand, and then on the GPT of this lab,
# which it runs with your cut.

# %%
def my_cut(costs, weights, kept, ranks, limit):
    ...

# %%
from tplab.exercises.cut_a_pipeline import check_cut

check_cut(my_cut, gpt(65), ids[:4])

# %% [markdown]
# <details><summary>A hint</summary>
#
# How many bytes does rank $r$ take if it has the layers $a$ to $b - 1$? It has their weights once, and what they keep
# once for each microbatch that it holds.
#
# </details>
#
# ## On Monday
#
# | | where to cut |
# |---|---|
# | torch | you cut: `PipelineStage` takes your submodule. `pipeline(..., split_spec=...)` cuts where you name a module, and does not balance |
# | Megatron | equal numbers of blocks; `--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers` give the end stages fewer. `--pipeline-model-parallel-layout` describes the whole cut as text |
# | DeepSpeed | `PipelineModule(layers, partition_method=...)`, with "parameters", "uniform" or "type:regex" |
# | JAX | you cut; blocks of one shape are stacked and sharded along `pp` |
#
# What differs in JAX: all ranks run one compiled program ([lab 12](12_pipeline_in_jax.ipynb)), in which the blocks are
# stacked in one array and sharded along `pp`. So every rank has equally many blocks, and an uneven cut has to be padded
# with blocks whose results are thrown away.
#
# tplab's `partition` accepts DeepSpeed's three methods by the same names, or a list of figures, as here.
#
# ## To take away
#
# - Once the pipeline is full, the largest stage sets the pace. Among cuts with the same largest stage, slow stages near the
#   start are better. With few microbatches, simulate.
# - Balance time, and measure it. Parameters are a poor guess for embeddings and heads.
# - The first rank keeps the most microbatches. With a memory limit it gets fewer layers, and the step takes longer.

# %% [markdown]
# **Sources.** DeepSpeed's [pipeline tutorial](https://www.deepspeed.ai/tutorials/pipeline/) and its
# [change of the objective](https://github.com/microsoft/DeepSpeed/pull/4312). Harlap et al. 2018,
# [PipeDream](https://arxiv.org/abs/1806.03377), which measures layers and then cuts. Fan et al. 2020,
# [DAPPLE](https://arxiv.org/abs/2007.01045), which places uneven stages.
#
# Next: [15 Recomputation](15_recomputation.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
