# %% [markdown]
# # 11 Run a pipeline
#
# **Does a pipeline compute the same gradients, and does it take the time that its schedule promised?**
#
# Prerequisites: the schedules of [lab 10](10_pipeline_schedules.ipynb), and `backward` in torch. Time: one hour.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/11_run_a_pipeline.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/11_run_a_pipeline.ipynb)
#
# ![A small GPT trains on four ranks. The upper boxes show when each forward and backward ran, and the lower ones when the schedule promised it. They agree.](images/11_run_a_pipeline.png)
#
# *A small GPT trains on four ranks with real tensors: eight microbatches under 1F1B. The filled boxes show what ran, and the
# outlines beneath show what the schedule promised. A message takes one step here, as long as a forward.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
from functools import partial

import torch
from torch.nn import functional as F
from tplab import Mesh
from tplab.pipeline import LayerSpec
from tplab.schedules import Costs, compare, gpipe, interleaved_1f1b, measured_costs
from tplab.schedules import naive, one_f_one_b, simulate, zb_h1, zb_v
from tplab.torch import GPTConfig, axis_index, axis_size, receive, run, send
from tplab.torch import split_batch, stages_of, train_batch
from tplab.torch.models.plain import PlainBlock, plain_layers, token_loss
from tplab.widgets import Bars, Row, knob, timeline

torch.set_num_threads(1)  # several threads do not pay off for tensors this small
p, m = 4, 8  # ranks, microbatches

# %% [markdown]
# ## By hand: two ranks, one microbatch
#
# Rank 0 has the weight $a = 2$, and rank 1 has $b = 5$. The input is 3, and the target is 28. Here is a forward pass, and
# then the backward pass:

# %%
a, b = 2, 5
y = a * 3  # on rank 0
error = b * y - 28  # on rank 1
db, dy = 2 * error * y, 2 * error * b  # on rank 1
da = dy * 3  # on rank 0 again
print(f"y {y}, loss {error**2}, db {db}, dy {dy}, da {da}")

# %% [markdown]
# Two numbers cross the cut: $y$ goes forward, and its gradient comes back. In torch, rank 0 sends $y$ without its graph.
# Rank 1 treats $y$ as an input that needs a gradient, and sends that gradient back. With it, rank 0 continues the
# backward pass through its own graph.

# %%
def two_ranks():
    if axis_index("pp") == 0:
        a = torch.tensor(2.0, requires_grad=True)
        y = a * 3
        send(y.detach(), "pp", 1)  # does not wait
        y.backward(receive("pp", 1))  # waits for the gradient
        return a.grad
    b = torch.tensor(5.0, requires_grad=True)
    y = receive("pp", 0).requires_grad_()
    ((b * y - 28) ** 2).backward()
    send(y.grad, "pp", 0)
    return b.grad

out = run(two_ranks, Mesh(pp=2))
print("gradients", *(grad.item() for grad in out.per_rank))
sent = out.trace.select(kind="send").events
print("messages", *(event.values.item() for event in sent))

# %% [markdown]
# ## Build it: a worker that follows a schedule
#
# A rank's row of the schedule says what it does, and its position says which ranks it exchanges messages with. With one
# stage per rank, no message needs a tag, because all ranks go through the microbatches in the same order. This is the
# row of rank 1 of three:

# %%
print(*one_f_one_b(ranks=3, microbatches=4).by_rank()[1])
# 1F2: on stage 1, the forward pass of microbatch 2

# %%
def train(schedule, stage, microbatches, loss):
    r, last, m = axis_index("pp"), axis_size("pp") - 1, len(microbatches)
    kept, total = {}, 0.0
    for action in schedule.by_rank()[r]:
        k = action.microbatch
        if action.kind == "F":
            x = microbatches[k][0] if r == 0 else receive("pp", r - 1).requires_grad_()
            y = stage(x)
            if r < last:
                send(y.detach(), "pp", r + 1)
            else:
                y = loss(y, microbatches[k][1]) / m
                total += y.item()
            kept[k] = x, y  # until the backward of this microbatch
        else:
            x, y = kept.pop(k)
            y.backward(receive("pp", r + 1) if r < last else None)  # adds to .grad
            if r > 0:
                send(x.grad, "pp", r - 1)
    return total

# %% [markdown]
# The model is a list of layers: an embedding, five transformer blocks, a norm and a head. `plain_layers` only describes
# them. Each rank makes the layers of its own stages, and no rank ever holds the whole model.

# %%
V, D, S = 61, 48, 16  # vocabulary, width, tokens in a sequence
layers = plain_layers(GPTConfig(V, D, num_layers=5, num_heads=4, context=64))
ids = torch.randint(V, (2 * m, S), generator=torch.Generator().manual_seed(1))
targets = (3 * ids + 1) % V
microbatches = split_batch(ids, targets, m)  # (input, target) pairs

def step(schedule, **options):  # a rank's program
    stages = stages_of(layers, schedule)
    train_batch(schedule, stages, microbatches, token_loss, **options)
    return gradients(stages)

def gradients(stages):  # by layer and name
    return {(layer, name): w.grad for number, stage in stages.items()
            for layer, module in enumerate(stage, stages.partition.bounds[number])
            for name, w in module.named_parameters()}

def apart(out, want):  # the largest difference, relative to the largest gradient
    largest = max(grad.abs().max() for grad in want.values())
    return max(((grad - want[key]).abs().max() / largest).item()
               for grads in out.per_rank for key, grad in grads.items())

# %% [markdown]
# Here is the run of the picture at the top:

# %% tags=["opening-picture"]
slow = Costs(message_bytes=1, bandwidth=1, links="queue")  # one step per message
ran = run(partial(step, one_f_one_b(p, m), costs=slow), Mesh(pp=p)).trace
timeline(ran, predicted=simulate(one_f_one_b(p, m), slow))

# %% [markdown]
# **Predict.** GPipe and 1F1B start with the same weights and the same microbatches. Are their gradients different, equal
# except for rounding, or equal to the last bit?
#
# <details><summary>Answer</summary>
#
# They are equal to the last bit. A schedule says *when* each term is computed, and not *which* terms there are. Both add
# the terms of microbatches 0, 1, 2, ... in this order. Another order would round differently.
#
# </details>

# %%
def on_rank(how, schedule):
    stage = stages_of(layers, schedule)[axis_index("pp")]
    how(schedule, stage, microbatches, token_loss)
    return [w.grad for w in stage.parameters()]

def all_gradients(how, rule):
    out = run(partial(on_rank, how, rule(p, m)), Mesh(pp=p))
    return [grad for grads in out.per_rank for grad in grads]

by_hand = all_gradients(train, gpipe)
others = (train, one_f_one_b), (train_batch, gpipe), (train_batch, one_f_one_b)
for how, rule in others:
    same = all(map(torch.equal, by_hand, all_gradients(how, rule)))
    print(f"{how.__name__:11} {rule.__name__:11} equal to the last bit: {same}")

# %% [markdown]
# `train_batch` is tplab's worker. It runs any schedule, even one with several stages per rank. We compare five
# schedules with one device that takes one microbatch after another. `stages_of` gives a layer the same weights,
# whichever rank it is on.

# %%
def one_device():
    stages = stages_of(layers, naive(ranks=1))  # the whole model is one stage
    for x, target in microbatches:
        (token_loss(stages[0](x), target) / m).backward()  # adds to .grad
    return gradients(stages)

want = run(one_device, Mesh(pp=1)).per_rank[0]
bytes_sent = {}
for rule in (gpipe, one_f_one_b, zb_h1, interleaved_1f1b, zb_v):
    out = run(partial(step, rule(p, m)), Mesh(pp=p))
    equal = apart(out, want) < 1e-4
    bytes_sent[rule] = out.trace.bytes_sent()
    print(f"{rule.__name__:17} {bytes_sent[rule]:7,} bytes sent, equal: {equal}")

# %% [markdown]
# Both workers divide each microbatch's loss by $m$. That is right only if all microbatches have the same number of
# targets. The general case is an exercise of [lab 16](16_data_parallel.ipynb). A pipeline needs no message for it,
# because its last rank has all targets.

# %% [markdown]
# ## Split the backward: I and W
#
# For a linear layer $y = x w$ the backward pass is two matmuls, and neither needs the other:
#
# $$\text{I:}\quad dx = dy\, w^T \qquad\qquad \text{W:}\quad dw = x^T dy$$
#
# Each takes as many FLOPs as the forward, so for linear layers alone $B = I + W = 2F$. `train_batch` splits the
# backward of any module in this way: I goes from the output to the input and keeps the gradient of each layer's output,
# and W computes the weights' gradients from these. The split computes nothing twice.
#
# **Predict.** In our GPT, which takes more FLOPs, I or W?
#
# <details><summary>Answer</summary>
#
# I does. Attention multiplies queries by keys, and scores by values. There are no weights in these matmuls, so their
# whole backward belongs to I.
#
# </details>

# %%
def flops_by_kind(rule):
    trace = run(partial(step, rule(p, m)), Mesh(pp=p), cluster="h100").trace
    found = dict.fromkeys("FBIW", 0)
    for event in trace.select(kind="compute").events:
        if event.where.startswith("stage"):  # an action, such as F3
            found[event.op[0]] += event.flops
    return found

split, whole = flops_by_kind(zb_h1), flops_by_kind(one_f_one_b)
print(f"B / F = {whole['B'] / whole['F']:.2f}")
print(f"I / W = {split['I'] / split['W']:.2f}")
print(f"(I + W) / B = {(split['I'] + split['W']) / whole['B']:.2f}")

# %% [markdown]
# $B / F$ is a little above 2, because fused attention computes its scores again in the backward pass.
#
# FLOPs are not seconds. Qi et al. measured $B = 1.48\,F$ and $I = 1.94\,W$ for a GPT of 1.5 billion parameters on A100s.
# So measure your own model before you choose a schedule.

# %% [markdown]
# ## See it run
#
# In the picture at the top, run and simulation used the same durations. That they agree shows that the ranks kept to the
# schedule, and no more. Now we measure seconds, and predict what has not been measured yet: **each batch from the one
# before**. Two ranks are real processes, and the model is wider, so that there is something to measure.
# `measured_costs` reads from the trace of one batch how long each action took. From that, the simulation predicts *when*
# each action of the next batch begins.
#
# **Predict.** What will be missing from this prediction?
#
# <details><summary>Answer</summary>
#
# No action takes the same time twice. And the simulation knows what an action computes and what it waits for, but not the
# time between actions, when messages are posted and copied. That matters less as the actions get longer. The difference is
# called the **residual**.
#
# </details>

# %% tags=["nbval-ignore-output"]
two = zb_h1(2, 4)
wider = plain_layers(GPTConfig(V, 192, num_layers=5, num_heads=4, context=64))
more = torch.randint(V, (16, 64))

def twelve_batches():
    stages = stages_of(wider, two)
    for _ in range(12):
        train_batch(two, stages, split_batch(more, more, 4), token_loss)

measured = run(twelve_batches, Mesh(pp=2), on="processes").trace
found = []
for k in range(2, 12):  # the first batches warm up
    before = measured_costs(two, measured, batch=k - 1)
    beside = compare(two, measured, before, batch=k)
    found.append((beside.predicted.makespan / beside.makespan, beside))
found.sort(key=lambda pair: pair[0])
least, middle, most = (found[place][0] for place in (0, 5, -1))
print(f"predicted / measured: {least:.2f} to {most:.2f}, half below {middle:.2f}")
timeline(measured, predicted=found[5][1])

# %% [markdown]
# The picture shows the batch with this last ratio. On a busy machine, single predictions can be far off.
#
# ## Turn the knob: how many microbatches?
#
# Lab 10 says that more microbatches make the bubble smaller. Here are four blocks, 1,024 wide, one on each of four H100s.
# The batch is 16 sequences of 1,024 tokens, cut into more and more microbatches. The times are modelled twice: at the peak
# rates of the data sheet with 5 µs for each launch, and as a forecast from kernels that were measured on H100s. Which number
# of microbatches is best?

# %%
wide = GPTConfig(32000, 1024, num_layers=4, num_heads=16, context=1024)

def wide_block():
    with torch.device("meta"):  # shapes without numbers: the clock needs no more
        return PlainBlock(wide).bfloat16()

def modelled(num, cluster):
    def program(x):  # [microbatches, sequences, tokens, width]
        stages = stages_of([LayerSpec(wide_block)] * p, one_f_one_b(p, num))
        return train_batch(one_f_one_b(p, num), stages, list(zip(x, x)), F.mse_loss)

    shape = num, 16 // num, 1024, 1024
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    trace = run(program, Mesh(pp=p), x, cluster=cluster, device="meta").trace
    return compare(one_f_one_b(p, num), trace)

def bars(num):
    rows, idle = [], []
    for name, cluster in [("data sheet", "h100"), ("forecast", "h100-measured")]:
        one = modelled(num, cluster)
        computing = one.busy.sum() / p
        idle.append(100 * (1 - computing / one.makespan))
        parts = {"computing": computing, "idle": one.makespan - computing}
        rows.append(Row(name, parts))
    ideal = 100 * (p - 1) / (num + p - 1)
    return Bars(rows, f"{idle[0]:.0f}% and {idle[1]:.0f}% of the time is idle; "
                      f"the formula (p-1)/(m+p-1) says {ideal:.0f}%.")

knob("One batch on four H100s", "microbatches",
     {num: bars(num) for num in (1, 2, 4, 8, 16)}, start=4, about="modelled")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# The bubble shrinks with every doubling, as the formula says, but the batch does not always get faster. By the
# data sheet, four microbatches are best, at 5.6 ms. By the forecast, eight are, at 7.2 ms. Beyond that, the
# batch takes longer again: every doubling gives a rank twice as many kernels, each half as large, and small kernels use
# a GPU badly. The formula is roughly right about the bubble, and silent about the rest.
#
# Larger microbatches can be cut further. The authors of the Ultra-Scale Playbook **measured** a 1B model on pipelines of
# four H100s, eight of them side by side, with sequences of 4,096 tokens. With 8, 16 and 32 microbatches, each GPU
# processed 27,235, 30,657 and 32,105 tokens per second. So 32 microbatches of one sequence were 1.18 times as fast as 8 of
# four sequences. The formula promises 1.26.
#
# </details>
#
# ## What it costs
#
# A batch has $m$ microbatches of $b$ sequences of $S$ tokens, each $D$ wide. Each of $p$ ranks has $v$ stages.
#
# | what | numbers sent by all ranks |
# |---|---|
# | an activation or a gradient over one cut | $bSD$ |
# | all $pv - 1$ cuts, in both directions | $2m(pv - 1)\,bSD$ |
# | under ZB-V, whose two middle stages are on one rank | $2m(2p - 2)\,bSD$ |
# | the loss, an all_reduce of one number | $2(p - 1)$ |
# | for comparison: one block, tensor-parallel over $p$ ranks | $8m(p-1)\,bSD$ |

# %%
per_microbatch = 2  # sequences; float32, and the loss in float64
num_cuts = {gpipe: p - 1, zb_h1: p - 1, interleaved_1f1b: 2 * p - 1, zb_v: 2 * p - 2}
for rule, cuts in num_cuts.items():
    formula = 4 * 2 * m * cuts * per_microbatch * S * D + 8 * 2 * (p - 1)
    print(f"{rule.__name__:17} formula {formula:7,}, sent {bytes_sent[rule]:7,}")

# %% [markdown]
# Five blocks under tensor parallelism would send 20 times as much as the three cuts of 1F1B. So pipelines go *between* nodes,
# where links are slow, and tensor parallelism stays inside a node.
#
# ## A bug to repair: a deadlock
#
# When a message takes as long as a forward, the ranks of 1F1B wait for messages. Running more forwards ahead would hide
# them. The goal is to be as fast as GPipe in a batch of any length, with as few microbatches held as that allows. Here
# is a first attempt:

# %%
for rule in (one_f_one_b, gpipe):
    print(f"{rule.__name__:11} {simulate(rule(p, m), slow).makespan:g} steps")

def ahead(rank, ranks):  # forwards before the first pair of forward and backward
    if rank == 0:
        return ranks - 1
    return 2 * (ranks - 1 - rank)

# %%
from tplab.errors import DeadlockError
from tplab.exercises.run_a_pipeline import check_ahead, running_ahead

stuck = running_ahead([ahead(rank, p) for rank in range(p)], m)
try:
    run(partial(on_rank, train, stuck), Mesh(pp=p))
    print("It ran to the end.")
except DeadlockError as error:
    print(*(line.split(" at ")[0] for line in str(error).splitlines()[:-1]), sep="\n")

# %% [markdown]
# On a real cluster, the program would hang until a timeout ended it. Simulated ranks notice at once that none of them
# can continue. Repair `ahead`, and rerun the cells from that one on:

# %%
check_ahead(ahead)

# %% [markdown]
# <details><summary>What the repair costs</summary>
#
# Hiding the messages takes memory: rank 0 now holds up to $2p - 1 = 7$ microbatches, instead of 4.
#
# </details>
#
# ## Your turn: a worker that splits its backward
#
# Teach `train` what to do for I and W, so that it can run ZB-H1. Start from a copy. There are three things to think about. An
# I must not add to `.grad`, but a W must. W needs the graph after I has used it. And rank 0 has no use for the gradient of
# its input. (`torch.autograd.grad(y, x, dy, retain_graph=True)` and `y.backward(dy, inputs=[...])` will help.)

# %%
def train_split(schedule, stage, microbatches, loss):
    ...

# %%
from tplab.exercises.run_a_pipeline import check_train_split

check_train_split(train_split)

# %% [markdown]
# ## On Monday
#
# | here | torch.distributed | Megatron | JAX |
# |---|---|---|---|
# | `train_batch(schedule, ...)` | `schedule.step(x, target=...)` | `forward_backward_func(...)` | [lab 12](12_pipeline_in_jax.ipynb) |
# | a stage | `PipelineStage(module, stage_index, num_stages, device)` | a model built with `pre_process`, `post_process` | a function and its parameters |
# | `send`, `receive` | `P2POp` and `batch_isend_irecv` | `p2p_communication` | `ppermute` |
#
# `Schedule.from_torch` reads the `pipeline_order` of one of torch's schedules, so you can simulate it before you train.
#
# ## To take away
#
# - A schedule says when, not what. Every legal schedule gives the same gradients as one device.
# - A run keeps the order of its schedule. How long it takes depends on its actions: simulate it with measured costs.
# - A pipeline sends little, but its ranks wait for their neighbours, and forever if their orders form a cycle.

# %% [markdown]
# **Sources.** Huang et al. 2018, [GPipe](https://arxiv.org/abs/1811.06965). Narayanan et al. 2021,
# [Megatron-LM](https://arxiv.org/abs/2104.04473), on pipelines between nodes. Qi et al. 2024,
# [Zero bubble](https://arxiv.org/abs/2401.10241), for I and W (they write B for our I). Throughput on 32 GPUs: the
# interactive plot of the [Ultra-Scale Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), Apache-2.0,
# commit 924e4d0. torch's
# [torch.distributed.pipelining](https://docs.pytorch.org/docs/stable/distributed.pipelining.html). Bruno Magalhães,
# [Pipeline parallelism on DeepSpeed](https://github.com/brunomaga/brunomaga.github.io/blob/37da981abf3304c154523aee6edd0d1557f193a8/_posts/2023-08-30-pipeline-parallelism.md).
#
# Next: [12 A pipeline in JAX](12_pipeline_in_jax.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
