# %% [markdown]
# # 10 Pipeline schedules
#
# **Where do the bubbles of a pipeline come from, and which of them can be filled?**
#
# Prerequisites: [lab 00](00_first_look.ipynb). Time: an hour and a quarter.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/10_pipeline_schedules.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/10_pipeline_schedules.ipynb)
#
# ![Two schedules of four ranks. The lower one, whose backward is split into two parts, ends sooner.](images/10_pipeline_schedules.png)
#
# *The same work on four ranks, twice. A box is one pass of one microbatch: F is forward, and B is backward, which the
# lower schedule splits into I and W. The hatched places, where a rank idles, are the **bubble**. The strip under a rank
# shows the microbatches whose **activations** it keeps for the backward pass. The **makespan** is the time from the
# first start to the last end.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
import numpy as np
from tplab.schedules import Costs, gpipe, interleaved_1f1b, naive, one_f_one_b
from tplab.schedules import simulate, v_half, zb_h1, zb_h2, zb_v
from tplab.widgets import gantt, pipeline_lab

# %% tags=["opening-picture"]
gantt(one_f_one_b(ranks=4, microbatches=8), zb_h1(ranks=4, microbatches=8))

# %% [markdown]
# ## By hand: one rank at a time
#
# Cut a model into four **stages**, one per rank. Each stage needs the output of the one before it. So the ranks take
# turns. (A row is a rank, and a column is a time step.)

# %%
print(naive(ranks=4))

# %% [markdown]
# But four ranks are no faster than one. So we cut the batch into **microbatches**. While rank 1 works on the first, rank
# 0 takes the second.
#
# When can stage $s$ run the forward of microbatch $k$? When the stage before it is done with $k$, and stage $s$ itself
# is done with $k - 1$:

# %%
p, m = 4, 8  # ranks, with one stage each; microbatches
F, B = 1, 2  # a backward is two matmuls per layer, a forward is one
done = np.zeros((p, m))
for s in range(p):
    for k in range(m):
        before = done[s - 1, k] if s else 0
        done[s, k] = F + max(before, done[s, k - 1] if k else 0)
print(done.astype(int))

# %% [markdown]
# The last forward ends at $(m + p - 1) F$. The backwards mirror the forwards. In **GPipe** all forwards come
# before all backwards, so its makespan is $(m + p - 1)(F + B)$:

# %%
all_f_then_all_b = simulate(gpipe(ranks=p, microbatches=m))  # F = 1, B = I + W = 2
gantt(all_f_then_all_b)

# %% [markdown]
# Each rank works for $m(F + B)$ and idles for the rest, $(p - 1)(F + B)$. That is
#
# $$\frac{p-1}{m+p-1} \text{ of the makespan}$$
#
# **Predict.** With 16 ranks, how many microbatches make the bubble less than a tenth of the makespan?
#
# <details><summary>Answer</summary>
#
# At least 136: $15 / (m + 15) < 0.1$ if $m > 135$. Under GPipe a rank keeps the activations of all of them.
#
# </details>

# %%
for ranks, microbatches in [(4, 8), (16, 135), (16, 136)]:
    idle = simulate(gpipe(ranks, microbatches)).bubble_fraction
    print(f"{ranks} ranks, {microbatches} microbatches: {100 * idle:.2f}% idle")

# %% [markdown]
# ## One forward, one backward
#
# The last rank can run its first backward right after its first forward, and free that microbatch. In **1F1B**, rank
# $r$ runs $p - 1 - r$ forwards ahead, and then alternates forwards and backwards.
#
# **Predict.** With the same $m$, how much smaller is 1F1B's bubble than GPipe's?
#
# <details><summary>Answer</summary>
#
# It is the same. But rank 0 keeps $p$ microbatches instead of $m$. So you can choose a larger $m$, which makes the bubble
# smaller.
#
# </details>

# %%
one = simulate(one_f_one_b(p, m))
for run in (all_f_then_all_b, one):
    print(f"{run.makespan:g} steps, kept {run.peak_activations.astype(int)}")
assert one.makespan == all_f_then_all_b.makespan

# %% [markdown]
# This function writes the row of one rank:

# %%
def row(rank, ranks, microbatches):
    ahead = min(ranks - 1 - rank, microbatches)
    cells = [f"F{k}" for k in range(ahead)]
    for k in range(microbatches - ahead):
        cells += [f"F{ahead + k}", f"B{k}"]
    cells += [f"B{k}" for k in range(microbatches - ahead, microbatches)]
    return " ".join(cells)

for rank in range(p):
    tplabs = [action.label for action in one_f_one_b(p, m).by_rank()[rank]]
    same = row(rank, p, m).split() == tplabs
    print(f"{row(rank, p, m)}   same as tplab's: {same}")

# %% [markdown]
# With one stage per rank, equal stages and free messages, **no order of F and B does better**. The last rank waits for
# $p - 1$ forwards and has $m(F+B)$ to do, and its last gradient needs $p - 1$ backwards to reach rank 0:
#
# $$(p-1)F + m(F+B) + (p-1)B = (m+p-1)(F+B)$$
#
# With other costs, either GPipe or 1F1B can be faster:

# %%
slow = [2, 1, 1, 1]
for name, costs in [("equal stages, free messages", Costs()),
                    ("a slow first stage", Costs(slow, slow, slow)),
                    ("messages as long as a forward", Costs(transfer=1))]:
    steps = [simulate(rule(p, m), costs).makespan for rule in (gpipe, one_f_one_b)]
    print(f"{name:29} GPipe {steps[0]:g}, 1F1B {steps[1]:g}")

# %% [markdown]
# With equal stages and free messages, only a change of the work itself can fill the bubble: smaller stages, or a split
# backward.
#
# ## Smaller stages: interleaving
#
# Give each rank $v$ stages, each $1/v$ as large. With $v = 2$, rank 0 of four has stages 0 and 4. The first forward
# reaches the last rank in $1/v$ of the time, so the bubble is $1/v$ as long. (Each of these stages counts as $1/v$ of a
# microbatch kept.)

# %%
def figures(schedule):
    run = simulate(schedule)
    bubble, kept = run.makespan - m * (F + B), run.peak_activations.max()
    messages = sum(event.kind == "send" for event in run.trace.events)
    return f"bubble {bubble:g} steps, keeps {kept:g} microbatches, {messages} messages"

print("v = 1:", figures(one_f_one_b(p, m)))
for v in (2, 4):
    print(f"v = {v}:", figures(interleaved_1f1b(p, m, virtual_stages=v)))
gantt(interleaved_1f1b(p, m, virtual_stages=2))

# %% [markdown]
# The price is more messages and more memory. The extra memory is $(p-1)/v$ microbatches, so it is largest with $v = 2$.
#
# ## Split the backward
#
# A backward has two parts. **I** is the gradient of the stage's input, which the rank before it waits for. **W** is the
# gradient of the weights, which no rank needs before the optimizer step. So W can fill bubbles. A microbatch's
# activations are kept until its W.
#
# **ZB-H1** delays W: rank $r$ saves $r$ weight-gradient passes for the end of the step, where they fill bubbles.
#
# **ZB-H2** runs twice as many forwards ahead, and keeps $2p - 1$ microbatches. Qi et al. write that it has no bubble.
#
# **Predict.** With F = I = W, how much sooner does a step of ZB-H2 end than one of ZB-H1?
#
# <details><summary>Answer</summary>
#
# Not at all, if a step ends when its last rank is done: 27 for both. "No bubble" counts each rank from its own first
# action to its own last. This **span** is 24. It matters only if a rank may start its next step while others finish this
# one.
#
# </details>

# %%
h1, h2 = simulate(zb_h1(p, m)), simulate(zb_h2(p, m))
def times(run):
    kept = run.peak_activations.max()
    ends = f"makespan {run.makespan:g} steps, span {run.span:g} steps"
    return f"{ends}, keeps {kept:g} microbatches"

print("ZB-H1:", times(h1))
print("ZB-H2:", times(h2))
gantt(h1, h2)

# %% [markdown]
# Can a schedule have no bubble in its span without twice the memory? Yes, if each rank has an early stage *and* a late
# one. In **ZB-V** rank $r$ has stages $r$ and $2p - 1 - r$, so microbatches go down the ranks and up again. **V-Half**
# uses the same places to keep even fewer microbatches, but its span has a bubble:

# %%
down_and_up, half = simulate(zb_v(p, m)), simulate(v_half(p, m))
print("ZB-V:  ", times(down_and_up))
print("V-Half:", times(half))
gantt(down_and_up, half)

# %% [markdown]
# ## Turn the knobs
#
# Set `transfer` to 1. Then add 4 microbatches twice. How many steps does 1F1B lose each time, and why? Hover over a
# bubble to see what the rank waits for.

# %%
pipeline_lab("one_f_one_b", compare="zb_h1")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# With 8 microbatches 1F1B loses 16 steps. Every 4 more cost another 6: rank 0 runs 4 forwards and then waits for the
# gradient of the first, which takes 6 messages, down and up again. GPipe runs all forwards ahead, so it loses only 6.
# With such messages, it is faster than 1F1B and ZB-H1.
#
# </details>

# %%
def lost(schedule):
    return simulate(schedule, Costs(transfer=1)).makespan - simulate(schedule).makespan

for rule in (one_f_one_b, zb_h1, zb_h2, gpipe):
    steps = [int(lost(rule(p, num))) for num in (8, 12, 16, 24)]
    print(f"{rule.__name__:12} with 8, 12, 16 and 24 microbatches: {steps}")

# %% [markdown]
# Now go back to the knobs, and choose the task *No more memory than 1F1B*.
#
# ## What it costs
#
# $F$, $I$ and $W$ are a rank's share of one microbatch, $B = I + W$, messages are free, and $m$ is a multiple of $p$, at
# least $2p$. The bubble is that of the makespan, or of the span where the table says so.
#
# | schedule | bubble | microbatches kept | messages |
# |---|---|---|---|
# | GPipe | $(p-1)(F+B)$ | $m$ | $2m(p-1)$ |
# | 1F1B | $(p-1)(F+B)$ | $p$ | $2m(p-1)$ |
# | interleaved 1F1B | $(p-1)(F+B)/v$ | $p + (p-1)/v$ | $2m(pv-1)$ |
# | ZB-H1 | $(p-1)\max(F, I, F+I-W)$ | $p$ | $2m(p-1)$ |
# | ZB-H2, if $F = I = W$ | span: 0 | $2p - 1$ | $2m(p-1)$ |
# | ZB-V, if $F = I = W$ | span: 0 | $p$ | $4m(p-1)$ |
#
# Real costs are not equal. These schedules are **simulated** with costs that Qi et al. **measured** on 8 A100s:

# %%
profile = Costs(18.522, 18.086, 9.337, transfer=0.601)  # ms
rules = {"GPipe": gpipe(8, 24), "1F1B": one_f_one_b(8, 24), "ZB-H1": zb_h1(8, 24),
         "ZB-H2": zb_h2(8, 24), "ZB-V": zb_v(8, 24), "V-Half": v_half(8, 24)}
for v in (2, 4):
    rules[f"interleaved, v = {v}"] = interleaved_1f1b(8, 24, virtual_stages=v)
for name, schedule in rules.items():
    run = simulate(schedule, profile)
    idle, kept = 1 - 24 * 45.945 / run.makespan, run.peak_activations.max()
    print(f"{name:<18} {idle:5.1%} idle, keeps {kept:4.1f} microbatches")

# %% [markdown]
# ZB-H2 still idles for 10.8% of the makespan, which here is also its span: rank 0 begins first and ends last. In this
# simulation, stages are equal and splitting costs nothing. Qi et al. *measured* up to 23% more throughput than 1F1B in
# about the same memory, and up to 31% with more memory.

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
#
# [Lab 13](13_pipeline_memory.ipynb) explains why ZB-H1 keeps more bytes than 1F1B.

# %% [markdown]
# ## A bug to repair
#
# Here is 1F1B as a rule with a mistake: run the next forward if the rank may keep one more microbatch, and the next
# backward otherwise. Run the check, and repair `my_row`.

# %%
def my_row(rank, ranks, microbatches):
    cells, forwards, backwards = [], 0, 0
    while backwards < microbatches:
        kept = forwards - backwards
        if forwards < microbatches and kept <= ranks - rank:
            cells.append(f"F{forwards}")
            forwards += 1
        else:
            cells.append(f"B{backwards}")
            backwards += 1
    return " ".join(cells)

# %%
from tplab.exercises.pipeline_schedules import check_one_f_one_b

check_one_f_one_b(my_row)

# %% [markdown]
# ## Your turn: six puzzles
#
# In each puzzle F = I = W = 1, so a whole B takes 2 steps. Return each rank's actions in order, as text with one row
# per rank. (Write I0 and W0 where B0 is split.) Every action runs as soon as it can.

# %%
from tplab.exercises.pipeline_schedules import PUZZLES, check_puzzle

for number, puzzle in PUZZLES.items():
    print(f"{number}. {puzzle}.")

# %% [markdown]
# The answer to puzzle 1 is too slow. Correct it, then solve the others in cells like these. (5 and 6 are hard: allow
# another half an hour.)

# %%
def puzzle_1():
    return """
        F0 B0 F1 B1
        F0 B0 F1 B1
        """

check_puzzle(1, puzzle_1)

# %%
def puzzle_2():
    ...

check_puzzle(2, puzzle_2)

# %%
def puzzle_5():  # beats 1F1B, which takes 33 steps and keeps four microbatches
    ...

check_puzzle(5, puzzle_5)

# %% [markdown]
# ## On Monday
#
# | here | torch.distributed.pipelining | Megatron, DeepSpeed |
# |---|---|---|
# | GPipe | `ScheduleGPipe` | |
# | 1F1B | `Schedule1F1B` | the default of both |
# | interleaved 1F1B | `ScheduleInterleaved1F1B` | `--num-layers-per-virtual-pipeline-stage` |
# | zero bubble | `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble` | |
#
# `Schedule.from_torch` reads torch's schedules, `to_csv` writes a file that torch loads, and `auto_schedule` searches for a
# schedule that keeps to a memory limit. JAX itself has none: see [lab 12](12_pipeline_in_jax.ipynb).
#
# ## To take away
#
# - With one equal stage per rank and free messages, no order of F and B has a smaller bubble than $(p-1)(F+B)$. 1F1B
#   saves memory, not time.
# - Smaller stages divide the bubble by $v$ and multiply the messages. A split backward fills the bubble with W.
# - When a schedule promises "zero bubble", ask: span or makespan, at which costs, and in how much memory?

# %% [markdown]
# **Sources.** Huang et al. 2018, [GPipe](https://arxiv.org/abs/1811.06965). Narayanan et al. 2021,
# [Megatron-LM](https://arxiv.org/abs/2104.04473). Qi et al. 2024, [Zero bubble](https://arxiv.org/abs/2401.10241) and
# [controllable memory](https://arxiv.org/abs/2405.15362).
#
# Next: [11 Run a pipeline](11_run_a_pipeline.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
