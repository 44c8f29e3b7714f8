# %% [markdown]
# # 10 Pipeline schedules
#
# **Where do the bubbles of a pipeline come from, and which of them can be filled?**
#
# Time: one hour. Prerequisites: [lab 00](00_first_look.ipynb). A schedule is a plan, and can be judged before anything runs.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/10_pipeline_schedules.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/10_pipeline_schedules.ipynb)
#
# ![Two schedules of four ranks and eight microbatches. The lower one, whose backward is split, ends sooner.](images/10_pipeline_schedules.png)
#
# *The same work on four ranks, twice. A box is one microbatch on one rank: F its forward, B its backward; below, B is
# split into I and W. Hatched: the **bubble**, time in which a rank idles. The strip under a rank: **activations**, what
# forwards keep for their backwards. First start to last end is the **makespan**.*

# %%
import subprocess
import sys

# On Colab, tplab joins the torch, jax and ipywidgets that are there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("no tplab: see above, then restart the runtime and try again")

# %%
import numpy as np
from tplab.schedules import Costs, Schedule, auto_schedule, check, faults, simulate
from tplab.schedules import gpipe, interleaved_1f1b, looped_bfs, naive, one_f_one_b
from tplab.schedules import v_half, v_min, zb_h1, zb_h2, zb_v
from tplab.widgets import gantt, pipeline_lab

# %% tags=["opening-picture"]
gantt(one_f_one_b(ranks=4, microbatches=8), zb_h1(ranks=4, microbatches=8))

# %% [markdown]
# ## By hand: one rank at a time
#
# Cut a model of eight layers into eight **stages**, one a rank. A stage needs what the stage before it has computed, so
# the ranks take turns: forward down the ranks, backward up again. Write a row for each rank, a column for each moment:

# %%
print(naive(ranks=8))
alone = simulate(naive(ranks=8), Costs(forward=1, input_grad=0.5, weight_grad=0.5))  # here B, both halves, is as long as F
print("idle:", alone.bubble_fraction)
assert alone.bubble_fraction == 7 / 8

# %% [markdown]
# Eight ranks, and the work of one. That is **vertical** parallelism: the model fits, and nothing gets quicker.
#
# So cut the batch as well, into **microbatches**. While rank 1 works on the first, rank 0 takes the second. When can
# stage $s$ do microbatch $k$? When the stage before it has done $k$, and it has itself done $k - 1$:

# %%
p, m = 4, 8  # ranks, one stage each; microbatches
F, B = 1, 2  # a backward costs about two forwards: the gradient of the input, and that of the weights
done = np.zeros((p, m))
for s in range(p):
    for k in range(m):
        done[s, k] = F + max(done[s - 1, k] if s else 0, done[s, k - 1] if k else 0)
print(done.astype(int))
assert done.max() == (m + p - 1) * F

# %% [markdown]
# Backward is the same upside down. All forwards, then all backwards, is **GPipe**:

# %%
all_f_then_all_b = gpipe(ranks=p, microbatches=m)
run = simulate(all_f_then_all_b)  # F = 1, B = I + W = 2
assert run.makespan == (m + p - 1) * (F + B) == 33
gantt(run)

# %% [markdown]
# Each rank works $m(F + B)$ and idles for the rest. As a share of all time:
#
# $$\frac{(p-1)(F+B)}{(m+p-1)(F+B)} = \frac{p-1}{m+p-1}$$
#
# **Predict.** 16 ranks. How many microbatches until less than a tenth is bubble?
#
# <details><summary>Answer</summary>
#
# $15 / (m + 15) < 0.1$ asks for more than 135. Each holds its activations until its backward has run, which is why
# one cannot simply take more.
#
# </details>

# %%
for ranks, microbatches in [(4, 8), (16, 135), (16, 136)]:
    counted = simulate(gpipe(ranks, microbatches)).bubble_fraction
    assert np.isclose(counted, (ranks - 1) / (microbatches + ranks - 1))
    print(f"{ranks} ranks, {microbatches} microbatches: {100 * counted:.2f} % idle")

# %% [markdown]
# ## One forward, one backward
#
# GPipe holds the activations of all $m$ microbatches. But the last rank could run its first backward at once, and then
# free that microbatch. **1F1B** does: rank $r$ runs $p - 1 - r$ forwards ahead, then takes a forward and a backward in
# turn. (PipeDream-Flush is another name for it.)
#
# **Predict.** With the same $m$: how much smaller is the bubble of 1F1B than that of GPipe?
#
# <details><summary>Answer</summary>
#
# Not at all. It is the same to the last step. What 1F1B saves is memory: rank 0 holds $p$ microbatches rather than $m$.
# With the memory saved one can *choose* a larger $m$, and that makes the bubble smaller.
#
# </details>

# %%
one = simulate(one_f_one_b(p, m))
assert one.makespan == run.makespan and one.bubble_fraction == run.bubble_fraction
print("GPipe holds", run.peak_activations.astype(int), "1F1B", one.peak_activations.astype(int))
assert list(one.peak_activations) == [p - r for r in range(p)] and (run.peak_activations == m).all()

# %% [markdown]
# Build it: the row of one rank, as text.

# %%
def row(rank, ranks, microbatches):
    ahead = min(ranks - 1 - rank, microbatches)
    cells = [f"F{k}" for k in range(ahead)]
    for k in range(microbatches - ahead):
        cells += [f"F{ahead + k}", f"B{k}"]
    cells += [f"B{k}" for k in range(microbatches - ahead, microbatches)]
    return " ".join(cells)

for rank in range(p):
    ours = row(rank, p, m).split()
    assert ours == [action.label for action in one_f_one_b(p, m).by_rank()[rank]]
print(row(1, p, m))

# %% [markdown]
# ## Why no order of F and B does better
#
# The last rank cannot begin before $p - 1$ forwards are through. It has $m(F+B)$ to do. And when it is done, its last
# gradient still has $p - 1$ backwards to go. So with whole backwards, one stage a rank, nothing ends before
#
# $$(p-1)F + m(F+B) + (p-1)B = (m+p-1)(F+B)$$
#
# tplab knows the bound of every schedule it simulates:

# %%
print(one.bounds.reason)
assert one.gap == run.gap == 0  # the gap: how far a makespan is above its bound

# %% [markdown]
# Three ways are left: make stages smaller, split the backward, or place stages differently.
#
# ## Smaller stages: interleaving
#
# Give each rank $v$ stages, each $1/v$ as large: rank 0 of four holds stages 0 and 4. The first forward reaches the last
# rank in $1/v$ of the time. Memory is counted in a rank's share of one microbatch, so one of its $v$ stages counts $1/v$.

# %%
for v in (2, 4):
    inter = simulate(interleaved_1f1b(p, m, virtual_stages=v))
    bubble = inter.makespan - m * (F + B)
    messages = sum(event.kind == "send" for event in inter.trace.events)
    print(f"v = {v}: bubble {bubble:g}, peak {inter.peak_activations.max():g}, {messages} messages")
    assert bubble == (p - 1) * (F + B) / v
    assert inter.peak_activations.max() == p + (p - 1) / v
    assert messages == 2 * m * (p * v - 1)  # a forward and a gradient over every cut
gantt(interleaved_1f1b(p, m, virtual_stages=2))

# %% [markdown]
# The price: more memory than the four microbatches of 1F1B, and 112 or 240 messages instead of 48. **Looped
# breadth-first** takes all microbatches through a stage before it turns to the next. Its bubble is the same and it holds
# them all, but a stage's weights are needed in one stretch: if data-parallel ranks share them, they are gathered once.

# %%
looped = simulate(looped_bfs(p, m, virtual_stages=2))
assert looped.makespan - m * (F + B) == (p - 1) * (F + B) / 2 and looped.peak_activations.max() == m

# %% [markdown]
# ## Split the backward
#
# A backward is two things. **I**, the gradient of the stage's input: the rank before waits for it. **W**, the gradient
# of the weights: nobody waits for it before the optimizer step. So W can fill holes. A microbatch is held until its W.
#
# **ZB-H1** puts W off: rank $r$ keeps $r$ of them in hand. The last gradient then goes up the ranks at I each, not at
# $I + W$, and the W in hand fill the time that it takes from rank $r$ to the top:

# %%
h1 = simulate(zb_h1(p, m))  # I = W = 1
assert h1.makespan - m * 3 == (p - 1) * (1 + 1 - 1) == 3  # (p-1)(F + I - W), while W is no longer than F or I
assert (h1.peak_activations == p).all()
print(h1.schedule)

# %% [markdown]
# **ZB-H2** runs twice as many forwards ahead, and holds $2p - 1$ microbatches for it. Its authors write that it has no
# bubble.
#
# **Predict.** With F = I = W, how much sooner than ZB-H1 is a step of ZB-H2 over?
#
# <details><summary>Answer</summary>
#
# Not at all, if a step is over when its last rank is done: 27 for both. "No bubble" counts each rank from its own first
# action to its own last: the **span**, 24. That pays only when a rank may start its next step while others still finish
# this one. Clipping by the norm of all gradients forbids it, unless one steps first and validates afterwards, as the
# authors do.
#
# </details>

# %%
h2 = simulate(zb_h2(p, m))
print("makespan", h1.makespan, h2.makespan, "span", h1.span, h2.span)
assert h1.makespan == h2.makespan == 27 and h2.span == m * 3
assert h2.peak_activations.max() == 2 * p - 1
gantt(h1, h2)

# %% [markdown]
# ## Place the stages as a V
#
# Rank $r$ of **ZB-V** holds stages $r$ and $2p - 1 - r$: down the ranks, and up again. Now the last stage lies where the
# first one is, and the last backward ends there too. **V-Half** and **V-Min** repeat one microbatch's pattern and push the
# copies together. They hold $\lfloor (p+2)/2 \rfloor$ and $\lfloor (p+4)/3 \rfloor$ microbatches where 1F1B holds $p$: here 3
# and 2 of 4, and with many ranks a half and a third. (Below, a line under a box marks a rank's second stage.)

# %%
for rule in (zb_v, v_half, v_min):
    v = simulate(rule(p, m))
    print(f"{v.schedule.name:8} makespan {v.makespan:g}, span {v.span:g}, peak {v.peak_activations.max():g}")
assert simulate(zb_v(p, m)).span == m * 3  # no rank idles between its first action and its last
assert simulate(v_half(p, m)).peak_activations.max() == (p + 2) // 2
assert simulate(v_min(p, m)).peak_activations.max() == (p + 4) // 3
gantt(zb_v(p, m), v_min(p, m))

# %% [markdown]
# ## In lock-step
#
# A pipeline can be written as one program for all ranks, a loop over **ticks**: in each tick every rank does one action,
# then messages are exchanged. (In JAX: one `lax.scan` inside `shard_map`.) Then a tick takes as long as its slowest rank.
#
# **Predict.** GPipe and 1F1B take 33. What do they take in lock-step, with F = 1 and B = 2?
#
# <details><summary>Answer</summary>
#
# GPipe still 33: ranks are in the same phase. 1F1B 40: of its 22 ticks 4 hold only F; in the other 18 some rank does a B,
# and those that do an F wait for it. ZB-H1 27: with I = W = F there is nothing to wait for.
#
# </details>

# %%
together = {rule.__name__: simulate(rule(p, m), lockstep=True).makespan for rule in (gpipe, one_f_one_b, zb_h1)}
print({name: float(steps) for name, steps in together.items()})
assert list(together.values()) == [33, 40, 27]

# %% [markdown]
# ## Turn the knobs
#
# Every number under a slider, every rule in the list. (On GitHub you see its picture; sliders want a notebook that runs.)
# One thing to find out: set `transfer` to 1. How many steps do 1F1B and ZB-H1 lose? And with 4 more microbatches? Hover
# over a bubble to see what a rank waits for; "critical path" shows what sets the makespan.

# %%
pipeline_lab("one_f_one_b", compare="zb_h1")

# %% [markdown]
# <details><summary>What is there to find</summary>
#
# 16 and 14; and 1F1B loses 6 more for every 4 microbatches. Rank 0 runs $p = 4$ forwards and then waits for the gradient
# of the first. That forward goes down over $p - 1 = 3$ cuts and its gradient comes up over 3: 6 messages, once every $p$
# microbatches. Who runs more forwards ahead pays for them once: ZB-H2 loses 3, GPipe 6, for more memory.
#
# </details>

# %%
slow = Costs(1, 1, 1, transfer=1)
for num in (8, 12, 24):
    lost = {
        rule.__name__: simulate(rule(p, num), slow).makespan - simulate(rule(p, num)).makespan
        for rule in (one_f_one_b, zb_h1, zb_h2, gpipe)
    }
    print(num, "microbatches:", {name: int(steps) for name, steps in lost.items()})
    assert lost["one_f_one_b"] == 16 + 6 * (num - 8) / p and (lost["zb_h2"], lost["gpipe"]) == (3, 6)

# %% [markdown]
# ## What it costs
#
# A rank's share of one microbatch takes $F$, $I$, $W$, and $B = I + W$. Messages take no time; $m$ is a multiple of $p$,
# and for ZB-V at least $2p - 1$.
#
# | schedule | bubble | microbatches held | messages |
# |---|---|---|---|
# | GPipe | $(p-1)(F+B)$ | $m$ | $2m(p-1)$ |
# | 1F1B | $(p-1)(F+B)$ | $p$ | $2m(p-1)$ |
# | interleaved 1F1B | $(p-1)(F+B)/v$ | $p + (p-1)/v$ | $2m(pv-1)$ |
# | looped breadth-first | $(p-1)(F+B)/v$ | $m$ | $2m(pv-1)$ |
# | ZB-H1 | $(p-1)\max(F, I, F+I-W)$ | $p$ | $2m(p-1)$ |
# | ZB-V, if $F = I = W$ | span: 0 | $p$ | $4m(p-1)$ |

# %%
# each formula beside what the simulation counts, for other sizes and costs than above
for ranks, num, f, i, w in [(2, 6, 1, 1, 0.75), (3, 9, 1, 1, 2), (6, 12, 1, 0.5, 1), (8, 24, 2, 2.5, 1)]:
    b, q = i + w, ranks - 1
    for rule, bubble, held, sent in [
        (gpipe, q * (f + b), num, q), (one_f_one_b, q * (f + b), ranks, q),
        (zb_h1, q * max(f, i, f + i - w), ranks, q),
        (interleaved_1f1b, q * (f + b) / 2, ranks + q / 2, 2 * ranks - 1),
        (looped_bfs, q * (f + b) / 2, num, 2 * ranks - 1),
    ]:
        counted = simulate(rule(ranks, num), Costs(f, i, w))
        assert np.isclose(counted.makespan - num * (f + b), bubble) and counted.peak_activations.max() == held
        assert sum(event.kind == "send" for event in counted.trace.events) == 2 * num * sent
    v = simulate(zb_v(ranks, num))
    assert (v.span, v.peak_activations.max()) == (3 * num, ranks)
    assert sum(event.kind == "send" for event in v.trace.events) == 4 * num * q
print("as counted")

# %% [markdown]
# ## A published table, to four digits
#
# Qi et al. (ICLR 2024) measured F, I, W and the transfer of GPT-like models on 8 to 32 GPUs, and tabulate what share of the
# time is bubble. The row of eight ranks and 24 microbatches, in milliseconds:

# %%
measured = Costs(18.522, 18.086, 9.337, transfer=0.601)
rates = {}
for rule in (one_f_one_b, zb_h1):
    step = simulate(rule(8, 24), measured)
    rates[rule.__name__] = 1 - 24 * (18.522 + 18.086 + 9.337) / step.makespan
rates["zb_h2"] = simulate(zb_h2(8, 24), measured).bubble_rate  # they give its span
published = {"one_f_one_b": "0.2431", "zb_h1": "0.1585", "zb_h2": "0.1083"}
for name, rate in rates.items():
    print(f"{name:12} published {published[name]}, simulated {rate:.4f}")
    assert f"{rate:.4f}" == published[name]

# %% [markdown]
# With real costs, W is half of I, and the schedule with "no bubble" idles for 10.8 % of its span.
#
# ## A bug to repair
#
# Here is 1F1B again, written from memory. It looks right. Run it, read what the check says, and mend it.

# %%
def my_row(rank, ranks, microbatches):
    ahead = min(rank, microbatches)
    cells = [f"F{k}" for k in range(ahead)]
    for k in range(microbatches - ahead):
        cells += [f"F{ahead + k}", f"B{k}"]
    cells += [f"B{k}" for k in range(microbatches - ahead, microbatches)]
    return " ".join(cells)

# %%
from tplab.exercises.pipeline_schedules import check_one_f_one_b

check_one_f_one_b(my_row)

# %% [markdown]
# `faults` and `check` judge any schedule in this way, before a single tensor is computed. torch's own `Schedule1F1B`
# writes down an order with a hole in it: for four ranks and eight microbatches the last rank's row has `3F8`, a microbatch
# that nobody has, and no `3F0`. (Seen in torch 2.13; the order is used for drawing only.) Here it is, written out:

# %%
from tplab.schedules import Action

rows = [[str(action) for action in actions] for actions in one_f_one_b(4, 8).by_rank()]
rows[3] = [cell if cell[1] == "B" else f"3F{int(cell[2:]) + 1}" for cell in rows[3]]
theirs = Schedule.from_csv("\n".join(",".join(cells) for cells in rows))
of_rank_3 = [fault for fault in faults(theirs) if fault.rank == 3]
print(of_rank_3[0])
assert of_rank_3 and not faults(one_f_one_b(4, 8))

# %% [markdown]
# ## Your turn: six puzzles
#
# Each puzzle asks for a schedule with F = I = W = 1. A whole B takes 2 steps. Return a picture as text, like ZB-H1 above: one
# row per rank, one cell per step, and dots where a rank idles. You may also write only the order of each row, without dots.
# Then every action runs as soon as it can. A rule of your own can write the rows, as `row` did.

# %%
from tplab.exercises.pipeline_schedules import PUZZLES, check_puzzle

for number, puzzle in PUZZLES.items():
    print(f"{number}. {puzzle}.")

# %% [markdown]
# Puzzle 1 has an answer already, which is not right. Change it, then go on with the others:

# %%
def puzzle_1():
    return """
        F0 F1 B0 .. B1 ..
        .. F0 F1 B0 .. B1 ..
        """.strip()

check_puzzle(1, puzzle_1)

# %%
def puzzle_2():
    ...

check_puzzle(2, puzzle_2)

# %%
def puzzle_5():
    ...

check_puzzle(5, puzzle_5)

# %% [markdown]
# ## To take away
#
# - Microbatches fill a pipeline; what is left, $(p-1)(F+B)$, no order of whole forwards and backwards removes. 1F1B saves
#   memory, not time.
# - Smaller stages divide the bubble by $v$ and multiply the messages by a little more. Splitting the backward fills it
#   with W.
# - Ask of every "zero bubble": span or makespan, at which costs, and at which memory?
#
# **Sources.** Huang et al. 2018, [GPipe](https://arxiv.org/abs/1811.06965). Narayanan et al. 2021,
# [Megatron-LM](https://arxiv.org/abs/2104.04473) (1F1B, interleaving). Qi et al. 2024,
# [Zero bubble](https://arxiv.org/abs/2401.10241) and [controllable memory](https://arxiv.org/abs/2405.15362). Lamy-Poirier
# 2022, [Breadth-first](https://arxiv.org/abs/2211.05953). Misha Laskin,
# [Sharding Large Models](https://www.mishalaskin.com/posts/tensor_parallel) (the naive pipeline).
#
# Next: [11 Run a pipeline](11_run_a_pipeline.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
