# %% [markdown]
# # 17 ZeRO
#
# **Training takes sixteen bytes per parameter. Which of them does every rank need?**
#
# Prerequisites: the collectives of [lab 02](02_collectives.ipynb) and the replicas of
# [lab 16](16_data_parallel.ipynb). Time: 50 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/17_zero.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/17_zero.ipynb)
#
# ![Four bars of bytes per parameter: 16 in data parallelism, 7 under ZeRO 1, 5.5 under ZeRO 2, and 4 under ZeRO 3.](images/17_zero.png)
#
# *Four ranks train one model with Adam. The bars show the bytes per parameter that a rank holds after a backward pass,
# counted in real tensors. Activations are gone by then.*

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
from torch import nn
import tplab.torch as tt
from tplab import Mesh, P, cost
from tplab.data.hiding import H100S, step_seconds, thresholds
from tplab.data.pieces import Pieces
from tplab.data.zero import StateBytes, bytes_per_parameter, state_bytes
from tplab.forecast.measured import foundry
from tplab.trace import overlap
from tplab.widgets import Bars, Row, knob, memory_timeline, timeline

torch.set_num_threads(1)  # several threads do not pay off for tensors this small
AdamW = partial(torch.optim.AdamW, lr=0.01)

# %% [markdown]
# In mixed precision, a parameter and its gradient are bfloat16, and take 2 bytes each. The optimizer, Adam, keeps three
# more numbers in float32: a **master copy** of the parameter, its momentum and its variance. That makes $2 + 2 + 12 =
# 16$ bytes.
#
# In data parallelism every rank keeps all of them. The *Zero Redundancy Optimizer* (ZeRO) divides more of them over the
# ranks at each stage:
#
# - **Stage 1** divides the optimizer's states.
# - **Stage 2** also divides the gradients.
# - **Stage 3** also divides the parameters: *fully sharded* data parallelism, FSDP.
#
# The part that one rank keeps is called its **piece** here, and its *shard* elsewhere.
#
# **Predict.** The picture is of four ranks. How many bytes does each stage take on eight?
#
# <details><summary>Answer</summary>
#
# Stage 1 takes $4 + \frac{12}8 = 5.5$, stage 2 takes $2 + \frac{14}8 = 3.75$, and stage 3 takes $\frac{16}8 = 2$. Without
# ZeRO it is still 16.
#
# </details>

# %% tags=["opening-picture"]
def net(layers=4, width=64):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

def kept(stage):
    """The bytes that this rank keeps after a step and one more backward pass."""
    model = net() if stage == 3 else net().bfloat16()
    if stage == 3:  # pieces in float32, from which bfloat16 is gathered
        tt.shard_parameters(model, "dp", compute_dtype=torch.bfloat16)
        optimizer = AdamW(model.parameters())
    else:
        shard = tt.shard_gradients if stage == 2 else tt.shard_optimizer
        optimizer = shard(AdamW, model.parameters(), "dp", master_dtype=torch.float32)
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(8, 64, dtype=torch.bfloat16)).sum().backward()
    if stage < 3:
        return optimizer.num_bytes()
    averages = [x for s in optimizer.state.values() for x in s.values() if x.dim()]
    weights = list(model.parameters())
    kinds = weights, [w.grad for w in weights], averages
    return [sum(x.nbytes for x in kind) for kind in kinds]

names = {"data parallel": 0, "ZeRO 1": 1, "ZeRO 2": 2, "ZeRO 3": 3}

def bars(ranks):
    rows = []
    for name, stage in names.items():  # stage 0: a copy is what one rank alone keeps
        sizes = tt.run(kept, Mesh(dp=ranks if stage else 1), stage).per_rank[0]
        kinds = "parameters", "gradients", "optimizer"
        rows.append(Row(name, {k: n / (4 * 64 * 64) for k, n in zip(kinds, sizes)}))
    totals = ", ".join(f"{row.total:g}" for row in rows)
    return Bars(rows, f"On {ranks} ranks, each keeps {totals} bytes per parameter.")

knob("Bytes per parameter", "ranks", {n: bars(n) for n in (2, 4, 8)}, start=4,
     about="counted in real tensors of a rank", unit="B")

# %% [markdown]
# At stage 3 this program keeps its pieces in float32, as PyTorch's FSDP does. So the 16 bytes are 4 for the parameter,
# 4 for its gradient, and 8 for Adam's momentum and variance.
#
# ## By hand: who holds what
#
# Here is how a weight of 10 numbers and a bias of 3 are divided over four ranks. Digits are positions, and a dot is
# padding.

# %%
print(Pieces(((2, 5), (3,)), 4))

# %% [markdown]
# Adam updates each number on its own, so a rank can update its piece without the others. First it needs its piece of
# the *averaged* gradient, which it gets from a `reduce_scatter`. Then an `all_gather` gives every rank all new
# parameters.
#
# **Predict.** Data parallelism averages gradients with an `all_reduce`, in which each rank sends $2 \frac{R-1}{R}$ times
# the gradients. How much more does stage 1 send? And what does stage 3 add?
#
# <details><summary>Answer</summary>
#
# Stage 1 sends no more: an `all_reduce` *is* a `reduce_scatter` and an `all_gather`, and ZeRO only puts the
# optimizer's step in between. With one microbatch, stage 2 sends as much, but its `reduce_scatter` runs during the
# backward pass. In stage 3 parameters are gathered for the forward pass and again for the backward pass: three times
# $\frac{R-1}{R}$ instead of two.
#
# </details>

# %%
def step(stage, x, and_look):
    model = net().double()
    if stage == 3:
        tt.shard_parameters(model, "dp")
    shard = {1: tt.shard_optimizer, 2: tt.shard_gradients}.get(stage)
    weights = model.parameters()
    optimizer = shard(AdamW, weights, "dp") if shard else AdamW(weights)
    model(x).square().mean().backward()
    if stage == 0:
        tt.average_gradients(model, "dp")
    optimizer.step()
    return model(x) if and_look else x  # a look at the new model costs messages too

x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).double()
alone = tt.run(step, Mesh(dp=1), 0, x, True).per_rank[0]
one_pass = 3 / 4 * 4 * 64 * 64 * 8  # (R-1)/R of all parameters, in bytes
for name, stage in names.items():
    out, looked = (tt.run(step, Mesh(dp=4), stage, x, and_look, out_specs=P("dp"),
                          in_specs=(P(), P("dp"), P())) for and_look in (False, True))
    sent = out.trace.bytes_sent(rank=0)
    print(f"{name:13} sends {sent / one_pass:.2f} times (R-1)/R of the parameters")
    assert torch.allclose(looked.value, alone, rtol=0, atol=1e-12)

# %% [markdown]
# Every stage gives the same numbers as one device. Stage 3 sends 2.75 and not 3: the input needs no gradient, so the
# backward pass never gathers the first of the four layers.
#
# ## Build it: a stage-3 layer
#
# A rank holds some rows of a weight. The layer gathers all rows, uses them, and frees them.

# %%
class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, piece):  # x [B, D]   piece [F/R, D]
        w = tt.all_gather(piece, "dp")  # [F, D]
        ctx.save_for_backward(x, piece)
        return x @ w.T

    @staticmethod
    def backward(ctx, dy):
        x, piece = ctx.saved_tensors
        w = tt.all_gather(piece, "dp")  # once more
        return dy @ w, tt.reduce_scatter(dy.T @ x, "dp", op="mean")

def by_hand(x):
    layers = [tt.scatter_to(layer.weight, "dp", 0).detach() for layer in net().double()]
    for piece in layers:
        x = Gathered.apply(x, piece.requires_grad_())
    x.square().mean().backward()
    return [piece.grad.flatten() for piece in layers]

def by_tplab(x):
    model = tt.shard_parameters(net().double(), "dp")
    model(x).square().mean().backward()
    return [piece.grad for piece in model.parameters()]

ours, theirs = (
    tt.run(fn, Mesh(dp=4), x, in_specs=P("dp")) for fn in (by_hand, by_tplab)
)
equal = [
    torch.allclose(a, b, rtol=0, atol=1e-12)
    for ranks in zip(ours.per_rank, theirs.per_rank)
    for a, b in zip(*ranks)
]
print("gradients equal:", all(equal))
print("passes:", [out.trace.bytes_sent(0) / one_pass for out in (ours, theirs)])

# %% [markdown]
# A pass is $\frac{R-1}{R}$ of the parameters: ours makes three, and tplab 2.75. tplab gathers all parameters of a
# layer, a **unit**, in one message.
#
# ## The twin in JAX
#
# In JAX, parameters are an argument of the layer. A sharded layer takes pieces instead, and its gradients are pieces too.

# %%
import tplab.jax as tj  # before JAX is used
import jax

def in_jax(x, weights):
    layers = tj.shard_parameters([lambda w, x: x @ w.T] * 4, "dp")
    pieces = layers.shard(weights)  # this rank's
    return jax.grad(lambda pieces: (layers(pieces, x) ** 2).mean())(pieces)

weights = [layer.weight.detach().numpy() for layer in net()]
twin = tj.run(in_jax, Mesh(dp=4), x.float().numpy(), weights, in_specs=(P("dp"), P()))
print("passes:", twin.trace.bytes_sent(0) / (one_pass / 2))  # float32 is half as large
gaps = [
    abs(one.piece - two.numpy()).max()
    for ranks in zip(twin.per_rank, ours.per_rank)
    for one, two in zip(*ranks)
]
print("gradients equal in float32:", bool(max(gaps) < 1e-6))

# %% [markdown]
# The gather defines its own backward pass, as our class does. Often this is left to the compiler: you give the
# parameters a `NamedSharding`, and XLA inserts the gathers.
#
# ## See it run: memory over time
#
# Here are two steps of eight layers in float32: 4 bytes for a parameter, 4 for its gradient, 8 for Adam's two averages.
# The dashed line is the sum by formula.

# %%
EACH = StateBytes(parameters=4, gradients=4, optimizer=8)
LAYER = 64 * 64  # parameters

def two_steps(stage):
    model = net(8)
    if stage == 3:
        tt.shard_parameters(model, "dp")
    shard = {1: tt.shard_optimizer, 2: tt.shard_gradients}.get(stage)
    if shard:  # a message per layer
        optimizer = shard(AdamW, model.parameters(), "dp", bucket_bytes=4 * LAYER)
    else:
        optimizer = AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(32, 64)).sum().backward()
        if stage == 0:
            tt.average_gradients(model, "dp")
        optimizer.step()

runs, formula = {}, {}
for name, stage in names.items():
    runs[name] = tt.run(two_steps, Mesh(dp=4), stage, count_memory=True).memory
    formula[name] = state_bytes(stage, [LAYER] * 8, 4, 0, EACH)._asdict()
memory_timeline(runs, formula, title="Two steps of eight layers")

# %% [markdown]
# In stage 1 the gradients stay whole until the step. Between steps there are none, and the curve is below the line. In stage
# 2 they leave layer by layer. In stage 3 a layer is whole, or *gathered*, only while it runs. (The first hump is the set-up:
# the model before it is divided.)
#
# The formula counts states only. Activations, which no stage divides, and gathered layers come on top. So do Adam's
# intermediate results (the small teeth). In data parallelism, the spike of 640 KiB comes from `average_gradients`, which
# holds the means beside the gradients that they replace.
#
# ## See it run: time
#
# With **prefetch**, the gather of a layer starts one layer early, and no rank waits for gradients to leave. Here are
# four layers of 8,192 by 8,192 and 16,384 tokens per rank, on eight H100s (modelled, data sheet):

# %%
def big(prefetch):
    with torch.device("meta"):
        model = net(4, 8192).bfloat16()
        tt.shard_parameters(model, "dp", prefetch=prefetch)
        x = torch.empty(16384, 8192, dtype=torch.bfloat16, requires_grad=True)
        model(x).sum().backward()

traces = {}
for prefetch in (False, True):
    trace = tt.run(big, Mesh(dp=8), prefetch, cluster="h100").trace
    first = trace.select(kind="collective").start
    traces[prefetch] = trace.since(first)  # without making the weights
for prefetch, trace in traces.items():
    hidden = overlap(trace).share
    seconds = trace.makespan
    print(f"prefetch={prefetch!s:5}  {1e3 * seconds:5.1f} ms, {hidden:.0%} hidden")
timeline(traces[True])

# %% [markdown]
# Three of the twelve messages have nothing to hide behind: the first gather, the first gather of the backward pass
# (of the layer that has just been used, and could have stayed), and the last gradients. Hover over a message to see
# which unit it is for. Prefetch costs one more whole layer in memory. (We assume that messages do not slow down
# computing.)
#
# ## Turn the knob: how many ranks?
#
# Take a model of 30 billion parameters. An H100 lets a program use 79.2 of its 80 GiB. Guess first: how many ranks
# does each stage need?

# %%
from tplab.cost import H100_MEASURED
from tplab.forecast.memory import usable_bytes

LIMIT = usable_bytes(H100_MEASURED.chip)

def sizes(ranks):
    rows = []
    for name, stage in names.items():
        each = bytes_per_parameter(stage, ranks)._asdict()
        row = {kind: 30e9 * size for kind, size in each.items()}
        fits = f"fits into {LIMIT / 2**30:.1f} GiB" if sum(row.values()) < LIMIT else ""
        rows.append(Row(name, row, fits))
    fitting = ", ".join(row.label for row in rows if row.note) or "none"
    return Bars(rows, f"On {ranks} ranks, these fit: {fitting}.")

knob("States of 30 billion parameters", "ranks",
     {ranks: sizes(ranks) for ranks in (1, 2, 4, 8, 16, 32, 64)}, start=4,
     about="by formula, without activations", unit="B")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# Stage 3 fits on 8 ranks or more, and stage 2 on 32 or more. Stage 1 never fits: it keeps 4 bytes per parameter on any
# number of ranks, and these alone are 112 GiB.
#
# </details>
#
# ## What it costs
#
# With $M$ parameters, $R$ ranks, and mixed precision with Adam, each rank keeps and sends:
#
# | | bytes per parameter | elements sent per step |
# |---|---|---|
# | data parallel | $16$ | $2M\frac{R-1}{R}$ |
# | ZeRO 1 | $4 + 12/R$ | $2M\frac{R-1}{R}$ |
# | ZeRO 2 | $2 + 14/R$ | $2M\frac{R-1}{R}$; with $k$ microbatches $(k + 1) M\frac{R-1}{R}$ |
# | ZeRO 3 | $16/R$ | $3M\frac{R-1}{R}$; with $k$ microbatches $3k M\frac{R-1}{R}$ |
#
# **Decide.** When does a gather cost time? A layer's forward pass takes 2 FLOPs per parameter and token, and its gather
# moves 2 bytes per parameter. The backward pass doubles both. So what matters is the number of tokens per rank, and
# not the size of the model, as in [lab 16](16_data_parallel.ipynb). For the blocks of a transformer:

# %%
for ranks in (8, 64, 512):
    print(ranks, "H100s")
    for row in thresholds("ZeRO 3", ranks):
        print(row)

# %% [markdown]
# Inside a node, about 1,900 tokens per rank hide all messages. In the forecast that is more than in [lab
# 16](16_data_parallel.ipynb), because a measured `all_reduce` is faster than a `reduce_scatter` and an `all_gather`.
# Between nodes, it depends on the network: on 512 GPUs, the forecast is 2,600 with InfiniBand NDR, and 20,500 with the
# playbook's network ([lab 03](03_network_levels.ipynb)).
#
# MosaicML [measured](https://github.com/mosaicml/llm-foundry/blob/061f2c7/scripts/train/benchmarking/README.md) MPT-7B,
# 32 blocks of width 4,096, with FSDP at stage 3. Each H100 had 12,288 tokens. The last two columns are
# forecasts of the time that the blocks' messages take alone:

# %%
def is_shown(run):
    about = run.model.name, run.cluster, run.tokens
    return about == ("mpt-7b", "h100-measured", 12288)

runs_of_mpt = [run for run in foundry() if is_shown(run)]
runs_of_mpt.sort(key=lambda run: run.plan.ranks)
print("             measured                    forecast, messages alone")
print("GPUs  tokens/s of a GPU     step   InfiniBand NDR  playbook's network")
for run in runs_of_mpt:
    about = run.plan.ranks, 4096
    networks = [cost.find(*on) for on in H100S[1:]]
    blocks = [step_seconds("ZeRO 3", run.tokens, on, *about) for on in networks]
    sent = [32 * block.sending for block in blocks]
    worth = run.tokens_per_second / runs_of_mpt[0].tokens_per_second
    print(f"{run.plan.ranks:4} {run.tokens_per_second:9,.0f} ({worth:4.0%})",
          f"{run.seconds:9.2f} s {sent[0]:14.2f} s {sent[1]:17.2f} s")

# %% [markdown]
# On 256 and 512 GPUs, each GPU is 5 and 9 % slower than on 8. On the playbook's network, the messages alone would take
# longer than these steps took; on 512 GPUs, even if the forecast were 30 % too high. So MosaicML's network was faster
# than that. The forecast with InfiniBand NDR is nearer: its messages fit into the step. But it would hide all of them,
# and these runs do lose something.
#
# ## Too few tokens: shard inside each node
#
# With fewer tokens than the threshold, ranks wait for their parameters. There are three ways out: use stage 1, send
# fewer bits per number ([lab 18](18_quantised_communication.ipynb)), or divide parameters only inside each node:
# *hybrid* sharding, HSDP. Then only a piece of the gradients is all-reduced across nodes. Here are full and hybrid sharding
# on eight nodes. Each rank has 2,048 tokens:

# %%
def eight_nodes(axis, replicate_axis):
    with torch.device("meta"):
        model = net(8, 8192).bfloat16()
        tt.shard_parameters(model, axis, replicate_axis=replicate_axis)
        x = torch.empty(2048, 8192, dtype=torch.bfloat16, requires_grad=True)
        model(x).sum().backward()

choices = {"all 64": (("node", "gpu"), None), "hybrid": ("gpu", "node")}
for name, axes in choices.items():
    for on in H100S:
        cluster = cost.find(*on)
        trace = tt.run(eight_nodes, Mesh(node=8, gpu=8), *axes, cluster=cluster).trace
        trace = trace.since(trace.select(kind="collective").start)
        hidden = overlap(trace).share
        took = 1e3 * trace.makespan
        print(f"{name}: {took:4.1f} ms, {hidden:.0%} hidden ({cluster.kind_on(64)})")

# %% [markdown]
# With InfiniBand NDR, hybrid sharding is slower, on the data sheet and in the forecast. (We know of no measurement.)
# Its two levels take turns, while a `reduce_scatter` over all ranks uses NVLink and the network cards at once. On the
# playbook's network it takes 28.0 ms instead of 86.0 ms, because fewer bytes cross the network, in fewer hops. The price is
# memory: $16/8$ bytes per parameter instead of $16/64$.
#
# ## A bug to repair
#
# Here is stage 1 for one matrix and gradient descent with momentum, $m \leftarrow 0.9\,m + dW$ and $W \leftarrow W -
# 0.5\,m$. Each rank keeps only its own rows of $m$. Run the check, then repair `my_step`, without sending more than
# data parallelism, and without changing its arguments in place.

# %%
def my_step(w, dw, m):  # w [D, F], on every rank; dw [D, F], this rank's own gradient
    size = len(m)  # m [D/dp, F], this rank's rows of the momentum
    begin = size * tt.axis_index("dp")
    m = 0.9 * m + tt.reduce_scatter(dw, "dp", op="mean")
    w = w.clone()
    w[begin : begin + size] -= 0.5 * m
    return w, m

# %%
from tplab.exercises.zero import check_layer, check_step

check_step(my_step)

# %% [markdown]
# ## Your turn: two matrices, one message
#
# Write `relu(x @ a) @ b` as a unit: all its parameters travel in one message. `a` [D, D] and then `b` [D, D] make up
# a single row of numbers, and `piece` is this rank's part of the row. The loss is a sum over the whole batch, so the
# gradient of `piece` must be summed over all ranks. Do you need a class as above?

# %%
def my_layer(x, piece):  # x [B/dp, D]   piece [2 D D / dp]   ->   y [B/dp, D]
    ...

check_layer(my_layer)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The backward pass of `tt.all_gather` is a `reduce_scatter`. A class is needed only to gather a second time.
#
# </details>
#
# ## On Monday
#
# | here | PyTorch | DeepSpeed, Megatron | JAX |
# |---|---|---|---|
# | `shard_optimizer` | `ZeroRedundancyOptimizer` | `"stage": 1`; `--use-distributed-optimizer` | optimizer states with a `NamedSharding` over the data axis |
# | `shard_gradients` | FSDP2 with `reshard_after_forward=False` comes close | `"stage": 2` | gradients constrained to that sharding |
# | `shard_parameters` | `fully_shard(layer)`, then `fully_shard(model)` | `"stage": 3`; `--use-megatron-fsdp` with `--data-parallel-sharding-strategy optim_grads_params` | parameters with that sharding |
# | `replicate_axis` | a two-dimensional mesh (HSDP) | MiCS | two mesh axes |
#
# ## To take away
#
# - An `all_reduce` is a `reduce_scatter` and an `all_gather`. With the optimizer's step in between, its states need no
#   copies.
# - With one microbatch, stages 1 and 2 send as much as data parallelism. Stage 3 sends half as much again, and its memory
#   falls as $1/R$.
# - A gather that begins one layer ahead costs no time, as long as a layer computes for longer than its message takes.

# %% [markdown]
# **Sources.** Rajbhandari et al. 2020, [ZeRO](https://arxiv.org/abs/1910.02054). Zhao et al. 2023,
# [PyTorch FSDP](https://arxiv.org/abs/2304.11277). PyTorch's
# [FSDP2](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) and
# [ZeroRedundancyOptimizer](https://docs.pytorch.org/docs/stable/distributed.optim.html). DeepSpeed's
# [ZeRO tutorial](https://www.deepspeed.ai/tutorials/zero/).
#
# Next: [18 Quantised communication](18_quantised_communication.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
