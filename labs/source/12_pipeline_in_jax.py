# %% [markdown]
# # 12 A pipeline in JAX
#
# **How can one compiled program run a pipeline, where every rank does something different?**
#
# Prerequisites: the schedules of [lab 10](10_pipeline_schedules.ipynb), and a little JAX: `jax.grad` and `jax.lax.scan`.
# Time: one hour.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/12_pipeline_in_jax.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/12_pipeline_in_jax.ipynb)
#
# ![Four ranks run 1F1B in lock-step. Whenever some rank runs a backward, the ranks that run a forward wait for it.](images/12_pipeline_in_jax.png)
#
# *1F1B as one compiled loop. A backward takes twice as long as a forward, so a rank that runs a forward often waits for
# one that runs a backward. Between actions, all ranks wait for messages.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import tplab.jax as tj
from tplab import Mesh, P
from tplab.pipeline import LayerSpec
from tplab.schedules import Costs, compare, gpipe, one_f_one_b, simulate, zb_h1
from tplab.widgets import Bars, Row, knob, pipeline_lab, timeline

# %%
p, m, D = 4, 8, 16  # ranks, microbatches, width

def stage(w, x):
    return jnp.tanh(x @ w + 0.1)

def mean_squares(y, target):
    return ((y - target) ** 2).mean()

keys = jax.random.split(jax.random.key(0), 3)
weights = jax.random.normal(keys[0], (p, D, D)) / 4  # one matrix per rank
inputs = jax.random.normal(keys[1], (m, 2, D))  # microbatches of two rows
targets = jax.random.normal(keys[2], (m, 2, D))

def train(rule, **options):
    def program(w, xs, ts):
        pairs = list(zip(xs, ts))
        return tj.train_batch(rule(p, m), (stage, w[0]), pairs, mean_squares, **options)

    return tj.run(program, Mesh(pp=p), weights, inputs, targets,
                  in_specs=(P("pp"), P(), P()), out_specs=(P(), P("pp")))

# %% tags=["opening-picture"]
in_lockstep = simulate(one_f_one_b(p, m), Costs(transfer=1), lockstep=True)
# Costs() gives the trace modelled times: F = I = W = 1, and 1 for an exchange.
timeline(train(one_f_one_b, costs=Costs()).trace, predicted=in_lockstep)

# %% [markdown]
# ## By hand: ticks
#
# JAX compiles *one* program for all ranks. So a schedule becomes a loop over **ticks**. In each tick every rank does at most
# one action, and then messages are exchanged. Here is 1F1B for three ranks and four microbatches, one column per tick:

# %%
ticks = one_f_one_b(ranks=3, microbatches=4).by_tick()
for rank in range(3):
    print(*(action.label if (action := tick[rank]) else ".." for tick in ticks))

# %% [markdown]
# A tick is over when its slowest rank is done. That is **lock-step**. With F = 1 and B = 2, a tick that has only forwards
# takes 1 step, and a tick in which some rank has a backward takes 2.
#
# **Predict.** With four ranks and eight microbatches, GPipe and 1F1B took 33 steps in lab 10, and ZB-H1 took 27. How many
# steps do they take in lock-step?
#
# <details><summary>Answer</summary>
#
# GPipe takes 33 as before, because in a tick all busy ranks do the same kind of work. 1F1B takes 40: in 18 of its 22 ticks
# some rank has a backward. ZB-H1 takes 27, because its F, I and W all take the same time.
#
# </details>

# %%
rules = {"GPipe": gpipe, "1F1B": one_f_one_b, "ZB-H1": zb_h1}
for name, rule in rules.items():
    free = simulate(rule(p, m)).makespan
    lockstep = simulate(rule(p, m), lockstep=True).makespan
    num_ticks = len(rule(p, m).by_tick())
    print(f"{name:6} {num_ticks} ticks: {free:g} steps, in lock-step {lockstep:g}")

# %% [markdown]
# ## Build it: GPipe is a scan
#
# In the forward half of GPipe, rank $r$ computes microbatch $t - r$ in tick $t$. Rank 0 takes the next microbatch as its
# input, and every other rank takes the output of the rank before it. After $m + p - 1$ ticks the last rank has computed
# all microbatches. What a rank computes in a bubble is not used.

# %%
def pipeline(w, xs):  # w [1, D, D], this rank's own   xs [m, b, D]   ->   [m, b, D]
    r, last, m = tj.axis_index("pp"), tj.axis_size("pp") - 1, len(xs)

    def tick(message, t):
        x = jnp.where(r == 0, xs[jnp.minimum(t, m - 1)], message)
        y = stage(w[0], x)
        return tj.ppermute(y, "pp", [(i, i + 1) for i in range(last)]), y

    nothing = 0 * stage(w[0], xs[0])  # zeros that may differ between ranks
    _, ys = jax.lax.scan(tick, nothing, jnp.arange(m + last))
    return tj.all_reduce(jnp.where(r == last, ys[last:], 0), "pp")  # for every rank

def loss_and_grad(w, xs, ts):
    return jax.value_and_grad(lambda w: mean_squares(pipeline(w, xs), ts))(w)

out = tj.run(loss_and_grad, Mesh(pp=p), weights, inputs, targets,
             in_specs=(P("pp"), P(), P()), out_specs=(P(), P("pp")))

def unsharded(weights):
    x = inputs
    for w in weights:
        x = stage(w, x)
    return mean_squares(x, targets)

want_loss, want = jax.value_and_grad(unsharded)(weights)
print("loss equal:", np.allclose(out.value[0], want_loss, rtol=1e-5))
print("gradients equal:", np.allclose(out.value[1], want, rtol=1e-4, atol=1e-6))

# %% [markdown]
# Why not begin with `jnp.zeros_like(xs[0])`? JAX's types say which values may differ between ranks. Zeros do not, but a
# message does, and a scan must return the type that it began with. So its zeros come from the stage, or from
# `jax.lax.pcast(zeros, "pp", to="varying")` (before JAX 0.8, `pvary`).
#
# We never wrote a backward pass. The gradient of a message is a message in the other direction, and the gradient of a
# loop is a loop that runs backwards. So `jax.grad` made the backward half of the pipeline. But it runs *after* the scan:
# all forwards, then all backwards. This cannot be 1F1B. And until then every rank keeps what all $m + p - 1$ ticks saved
# for the backward pass, even those in which it had no microbatch.

# %% [markdown]
# ## Any schedule: a table of actions
#
# To mix forwards and backwards, the loop has to contain both. tplab's `train_batch` turns the schedule into a table of
# numbers, one row per tick and one column per rank, and scans over its rows. Here are six ticks of the schedule above. A
# 0 means that the rank idles:

# %%
codes = {"F": 1, "B": 2}
table = [[codes[a.kind] if a else 0 for a in tick]
         for tick in one_f_one_b(ranks=3, microbatches=4).by_tick()]
print(np.array(table[:6]))

# %% [markdown]
# In each tick `lax.switch` chooses what the rank does:
#
# - **F** runs the stage with `jax.vjp` and puts what the backward pass needs into a buffer.
# - **B** takes it out and computes both gradients. **I** and **W** compute one each.
#
# Two `ppermute`s come *after* the switch, one for each direction, because every rank has to take part in them. Another
# `lax.switch` leaves them out where no rank has a message.

# %%
results = {name: train(rule, costs=Costs()) for name, rule in rules.items()}
for name, result in results.items():
    loss, grads = result.value
    equal = np.allclose(grads.reshape(want.shape), want, rtol=1e-4, atol=1e-6)
    print(f"{name:6} loss {loss:.4f}, gradients equal: {equal}")

# %% [markdown]
# ## See it run
#
# In this trace, as in the simulation, each exchange counts as one step, in both directions at once. Their agreement only
# shows that the compiled loop does what the table says.
#
# **Predict.** Which of the three is best now that an exchange takes as long as a forward?
#
# <details><summary>Answer</summary>
#
# ZB-H1 takes 52, GPipe 53, and 1F1B 61. Equal actions save ZB-H1 time, but it has more ticks, 27 instead of 22, and an
# exchange after most of them.
#
# </details>

# %%
for name, rule in rules.items():
    simulated = simulate(rule(p, m), Costs(transfer=1), lockstep=True)
    print(f"{name:6} {compare(simulated, results[name].trace).makespan:g} steps")
timeline(results["ZB-H1"].trace, predicted=simulated)

# %% [markdown]
# ## Uneven stages
#
# **Predict.** To spare rank 0, we cut 12 layers into 2, 3, 3 and 4 instead of 3, 3, 3 and 3. How many layers' weights does
# rank 0 hold now?
#
# <details><summary>Answer</summary>
#
# Four, like rank 3. In one program, arrays have the same shape on all ranks. So the parameters of each stage are packed
# into one flat array, padded to the length of the longest.
#
# </details>

# %%
class Mlp:
    def init(self, key):
        up, down = jax.random.split(key)
        return {"up": jax.random.normal(up, (32, 64)) / 6,
                "down": jax.random.normal(down, (64, 32)) / 8}

    def __call__(self, w, x):
        return x + jnp.tanh(x @ w["up"]) @ w["down"]

def held(cut):
    stages = tj.stages_of([LayerSpec(Mlp)] * 12, one_f_one_b(4, 8), bounds=cut)
    return jnp.array(sum(leaf.size for leaf in jax.tree.leaves(stages)))

for cut in ([0, 3, 6, 9, 12], [0, 2, 5, 8, 12]):
    sizes = [int(size) for size in tj.run(partial(held, cut), Mesh(pp=4)).per_rank]
    print(np.diff(cut).tolist(), "layers: each rank holds", sizes[0] // (2 * 32 * 64),
          "layers of parameters")

# %% [markdown]
# ## Turn the knob: activations
#
# Activations are padded too. Each bar shows how much a rank keeps at its peak. Every rank must reserve at least as
# much as the fullest one keeps. Which schedule leaves the largest part of that empty?

# %%
def bars(rule, every):
    def program(x):
        schedule = rule(4, 8)
        stages = tj.stages_of([LayerSpec(Mlp)] * 4, schedule)
        pairs = [(one, one) for one in x]
        return tj.train_batch(schedule, stages, pairs, mean_squares,
                              checkpoint_every=every)

    shape = jax.ShapeDtypeStruct((8, 4, 32, 32), np.float32)  # no numbers are needed
    kept = tj.run(program, Mesh(pp=4), shape).trace.peak_bytes.tolist()
    rows = [Row(f"rank {r}", {"kept": num, "empty room": max(kept) - num})
            for r, num in enumerate(kept)]
    share = 1 - sum(kept) / (4 * max(kept))
    return Bars(rows, f"At least {100 * share:.0f}% of the room is empty.")

choices = {"GPipe": (gpipe, None), "1F1B": (one_f_one_b, None),
           "1F1B, recomputed": (one_f_one_b, 1), "ZB-H1": (zb_h1, None)}
knob("Activations", "schedule", {name: bars(*how) for name, how in choices.items()},
     start="1F1B", about="bytes of one compiled program, 4 ranks", unit="B")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# 1F1B with recomputation leaves half of its room empty, although it needs the least room of all. It keeps only the
# input of a stage ([lab 15](15_recomputation.ipynb)). Ranks 1, 2 and 3 keep three, two and one of these, and all ranks
# have room for three. Rank 0 keeps none, because its inputs are the batch itself, which is in memory anyway. So without
# recomputation, rank 1 is the fullest under 1F1B: it keeps three microbatches, and rank 0 four that are a third
# smaller.
#
# </details>
#
# ## What it costs
#
# $m$ microbatches, $p$ ranks, one stage per rank, and $B = I + W$. Each exchange adds its own time, at most one per
# tick.
#
# | | ticks | time in lock-step |
# |---|---|---|
# | GPipe | $2(m + p - 1)$ | $(m + p - 1)(F + B)$ |
# | 1F1B | $2(m + p - 1)$ | up to $2(m + p - 1) \max(F, B)$ |
# | ZB-H1, if $F = I = W$ | $3m + p - 1$ | $(3m + p - 1) F$ |

# %%
for ranks, num in [(4, 8), (8, 32), (16, 64)]:
    for name, rule in rules.items():
        num_ticks = len(rule(ranks, num).by_tick())
        time = simulate(rule(ranks, num), lockstep=True).makespan
        idle = 1 - 3 * num / time
        print(f"{ranks:2} ranks, {num} microbatches, {name:6} {num_ticks:3} ticks,",
              f"{time:g} steps, {100 * idle:.0f}% idle")

# %% [markdown]
# Is lock-step worth it? One program is easy to launch, to compile and to shard further. Its price is the waiting: if
# $B = 2F$ and messages are free, 1F1B takes about a quarter longer than with one program per rank, and GPipe loses
# nothing. So lock-step is worth it where GPipe's activations fit, or where all actions take equal time.
#
# With one program per rank, a schedule can hide messages that take as long as a forward. Your task is to beat GPipe, in less
# memory.

# %%
pipeline_lab("gpipe", transfer=1, task="exchange")

# %% [markdown]
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
# With one program for all ranks, 1F1B takes 1,666 ms, GPipe 1,460 ms, and ZB-H1 1,496 ms. So here begin with GPipe, the
# fastest of these three, if it fits. ZB-H1's ticks are unequal, because W takes half as long as F.
#
# ## A bug to repair
#
# In each tick of this pipeline, a rank writes one row of `ys`. No error is raised, but the result is wrong. Run the
# check, and repair `my_pipeline`.

# %%
def my_pipeline(w, xs):  # w [1, D, D]   xs [m, b, D]   ->   [m, b, D] on every rank
    r, last, m = tj.axis_index("pp"), tj.axis_size("pp") - 1, len(xs)

    def tick(carry, t):
        message, ys = carry
        x = jnp.where(r == 0, xs[jnp.minimum(t, m - 1)], message)
        y = stage(w[0], x)
        message = tj.ppermute(y, "pp", [(i, i + 1) for i in range(last)])
        return (message, ys.at[t].set(y)), None

    ys = 0 * stage(w[0], xs)  # one row per microbatch
    (_, ys), _ = jax.lax.scan(tick, (ys[0], ys), jnp.arange(m + last))
    return tj.all_reduce(jnp.where(r == last, ys, 0), "pp")

# %%
from tplab.exercises.pipeline_in_jax import check_pipeline

check_pipeline(my_pipeline)

# %% [markdown]
# <details><summary>Why is there no error?</summary>
#
# The loop has $m + p - 1$ ticks, and `ys` has $m$ rows. JAX does not raise for an index that is out of range:
# `.at[].set` leaves the update out, and reading takes the nearest row.
#
# </details>
#
# ## Your turn: twice around the ring
#
# Give each rank two stages, as interleaving does. Rank $r$ has stages $r$ and $p + r$, so each microbatch goes around the
# ring twice. With as many microbatches as ranks, microbatch 0 comes back to rank 0 just when rank 0 is free again. Write
# this pipeline as one scan of $3p - 1$ ticks. In each tick a rank computes only one of its stages.
#
# <details><summary>A hint</summary>
#
# In tick $t$, rank $r$ has work number $t - r$. The first $p$ of these use its first matrix, and the next $p$ its second.
#
# </details>

# %%
def my_loop(w, xs):  # w [1, 2, D, D]   xs [p, b, D]   ->   [p, b, D] on every rank
    ...

# %%
from tplab.exercises.pipeline_in_jax import check_loop

check_loop(my_loop)

# %% [markdown]
# ## On Monday
#
# | here | JAX | elsewhere |
# |---|---|---|
# | `pipeline`, a scan with `ppermute` | [praxis](https://github.com/google/praxis) and [MaxText](https://github.com/AI-Hypercomputer/maxtext), with a `vmap` over stages | torch and Megatron run one program per rank |
# | `my_loop`, the ring | MaxText's `num_pipeline_repeats` | interleaved schedules |
# | the table of actions | write it yourself; or one program per stage, as in [JaxPP](https://arxiv.org/abs/2412.14374) | torch's `_PipelineScheduleRuntime` |
# | `checkpoint_every` | `jax.checkpoint` around the stage | `torch.utils.checkpoint` |
#
# ## To take away
#
# - A scan with a `ppermute` is a pipeline, and its gradient is a pipeline in the other direction: GPipe.
# - In lock-step each tick takes as long as its slowest rank. A schedule loses nothing if its actions take equal time, or
#   if in each tick all busy ranks do the same kind of work.
# - One program has one shape for all ranks, so every rank takes as much memory as the fullest one.

# %% [markdown]
# **Sources.** Huang et al. 2018, [GPipe](https://arxiv.org/abs/1811.06965). Xu et al. 2021,
# [GSPMD](https://arxiv.org/abs/2105.04663), on pipelines as a loop with shifted buffers. Xhebraj et al. 2024,
# [JaxPP](https://arxiv.org/abs/2412.14374). The JAX scaling book, [on training](https://jax-ml.github.io/scaling-book/training/).
#
# Next: [13 Pipeline memory](13_pipeline_memory.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
