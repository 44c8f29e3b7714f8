# %% [markdown]
# # 22 Your own program
#
# **What does my training script really send, and why does it hang?**
#
# Time: 50 minutes. Prerequisites: [lab 16](16_data_parallel.ipynb) for data parallelism and its buckets, and some experience
# with PyTorch. If you have a script that runs under `torchrun`, keep it at hand for the end.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/22_your_own_program.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/22_your_own_program.ipynb)
#
# ![A timeline of four ranks. In the second backward pass, all-reduces of gradients run while the ranks still compute.](images/22_your_own_program.png)
#
# *Two training steps with PyTorch's DistributedDataParallel (DDP) on four simulated H100s. The program uses nothing from
# tplab. In the second step, the gradients travel while the backward pass is still running.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tplab import Mesh
from tplab.cost import NAMED
from tplab.torch import device_mesh, run
from tplab.trace import Traffic, overlap, summary, traffic_table
from tplab.widgets import timeline

# %% [markdown]
# ## A script
#
# In the earlier labs you wrote the program of one rank with tplab's collectives. Your own code probably uses
# `torch.distributed` instead. That works here too: with `distributed=True`, `torch.distributed` is initialized on every
# simulated rank, and everything built on it runs unchanged. Here is data-parallel training as the PyTorch tutorials
# teach it:

# %%
WIDTH = 512

def model():
    torch.manual_seed(0)
    layers = [[nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()] for _ in range(4)]
    return nn.Sequential(*[nn.Sequential(*layer) for layer in layers])

def batch():
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(256, WIDTH, generator=generator)

def train(net, steps=2):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        loss = net(batch()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

def ddp_training(steps=2):
    train(DistributedDataParallel(model(), bucket_cap_mb=1), steps)

ddp = run(ddp_training, Mesh(dp=4), distributed=True, cluster="h100")

# %% [markdown]
# **Predict.** The model has four matrices of 512 x 512 in float32. How many bytes of gradients does each of the four ranks
# send in one step, and all ranks in two steps?
#
# <details><summary>Answer</summary>
#
# The gradients take 4 x 512 x 512 x 4 B = 4 MiB. In a ring all-reduce each rank sends 2(R-1)/R of that, which is 6 MiB
# with four ranks. Two steps on four ranks add up to 48 MiB.
# </details>

# %%
formula = 2 * 3 / 4 * (4 * WIDTH * WIDTH * 4)  # one rank, one step
one_rank = ddp.trace.bytes_sent(rank=0, op="all_reduce") // 2
all_ranks = ddp.trace.bytes_sent(op="all_reduce")
print(f"per rank, 1 step:   formula {formula:12,.0f} B, counted {one_rank:12,} B")
print(f"all ranks, 2 steps: formula {8 * formula:12,.0f} B, counted {all_ranks:12,} B")

# %% tags=["nbval-ignore-output"]
print(summary(ddp.trace))

# %% [markdown]
# The summary lists everything that the four ranks sent to each other, by group and by operation. The times are modelled:
# tplab calculates them from the speeds of an H100 and of NVLink, and assumes that operations are launched one by one, as
# they are without `torch.compile`.
#
# You did not write the broadcasts or the small `all_gather`. When DDP is constructed, the ranks compare their numbers of
# parameters. Then rank 0 sends its parameters to every rank, so that all ranks start from the same model.
#
# ## Where the time goes
#
# Hover over the bars. Each one shows the line of your program that caused it.

# %% tags=["opening-picture"]
timeline(ddp.trace)

# %% [markdown]
# The two steps look different. In the first one, a single `all_reduce` waits for the end of the backward pass. DDP does
# not yet know the order in which gradients become ready, so it puts them all in one bucket. In the second step there are
# four buckets, and the first three are sent while the backward pass goes on, as in lab 16. Two tiny broadcasts before them
# make sure that all ranks fill the same buckets.
#
# `overlap` says how much of the traffic is hidden. It counts the whole run: the start and the first step, which hide
# nothing, are included. A rank can hide no more than it computes. Here it computes for longer than it sends, so all of
# the traffic could be hidden, and both figures are equal.

# %%
print(overlap(ddp.trace))

# %% [markdown]
# **Turn the knob.** What will `overlap` say with larger buckets? Change `bucket_cap_mb` above from 1 to 25. Run that cell
# again, then the timeline and `overlap`.
#
# <details><summary>What there is to find</summary>
#
# Nothing overlaps any more, because this model is so small that one bucket holds all of it. If you leave the argument
# out, the limit is 25 MiB too, but torch makes the first bucket small, so that a little still overlaps.
#
# </details>
#
# ## FSDP: the same model in pieces
#
# DDP keeps the whole model on every rank. FSDP keeps only a quarter of each layer on each of our four ranks, and gathers a
# layer when it is needed. `device_mesh()` gives PyTorch the mesh of this run, as a `DeviceMesh`:

# %%
def fsdp_training(steps=2):
    net = model()
    for layer in net:
        fully_shard(layer, mesh=device_mesh())
    train(fully_shard(net, mesh=device_mesh()), steps)

fsdp = run(fsdp_training, Mesh(dp=4), distributed=True, cluster="h100")
columns = {"DDP": Traffic.of_trace(ddp.trace), "FSDP": Traffic.of_trace(fsdp.trace)}
print(traffic_table(columns))

# %% [markdown]
# In each step, FSDP needs three collectives per layer: an `all_gather` of the weights before the forward pass, another one
# before the backward pass, and a `reduce_scatter` of the gradients. In each of them a rank sends (R-1)/R of the layer. In
# an `all_reduce` it sends twice that. So FSDP sends 3/2 of what DDP sends in a step, and stores a quarter of the model.
#
# **Decide.** Is that worth it when the ranks are in different nodes? Here the four ranks are first in one node, and then in
# two nodes of two ranks, so that every collective also crosses the slower network between the nodes. We subtract a run of
# two steps from one of six, so that the start and the first step do not count:

# %%
two_nodes = replace(NAMED["h100"], node_size=2)

def traced(program, steps, cluster):
    return run(program, Mesh(dp=4), steps, distributed=True, cluster=cluster).trace

for nodes, cluster in (("one node", "h100"), ("two nodes", two_nodes)):
    for program in (ddp_training, fsdp_training):
        short, long = (traced(program, steps, cluster) for steps in (2, 6))
        took = (long.makespan - short.makespan) / 4 * 1e6
        idle = long.idle_share().mean()
        print(f"{nodes}, {program.__name__}: {took:.0f} us per step, idle {idle:.0%}")

# %% [markdown]
# By the data sheet, a step of FSDP takes 30% longer than one of DDP in one node, and 45% longer across two, because its
# gathers cross the network as well. This model fits on one GPU, so that would be a bad bargain. But it is a toy: with 256
# rows per rank and layers of 512, there is too little computing to hide the traffic. With larger batches and layers,
# computing grows faster than traffic, and the difference all but disappears.
#
# ## It hangs
#
# Sooner or later a distributed program hangs. Under `torchrun`, nothing happens for ten minutes or more, and then the ranks
# that waited report a timeout. Here is a common way to get there. Only rank 0 validates:

# %% tags=["nbval-ignore-output"]
def validate(net, x):
    loss = net(x).pow(2).mean().detach()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss

def train_and_validate():
    net = DistributedDataParallel(model())
    train(net, steps=1)
    if dist.get_rank() == 0:
        print("loss", validate(net.module, batch()).item())

try:
    run(train_and_validate, Mesh(dp=4), distributed=True)
except Exception as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# The error names the rank that waits, the line where it waits, and the ranks that will never join it. Nothing had to time
# out, because tplab notices when no rank can continue.
#
# **A bug to repair.** Fix `train_and_validate` above. How many ways are there, and what does `loss` mean in each?
#
# <details><summary>Answer</summary>
#
# There are two. Every rank calls `validate` and only rank 0 prints: then `loss` is the mean over all ranks' batches. Or
# `validate` does not communicate: then `loss` is that of rank 0's batch alone.
# </details>
#
# ## Wrong without hanging
#
# Another classic mistake is a branch that depends on the data. To clip the gradients, the ranks ask for the largest norm,
# but each rank does so only if its own loss is large:

# %% tags=["nbval-ignore-output"]
def clip_sometimes():
    net = DistributedDataParallel(model())
    loss = net(batch() * (1 + dist.get_rank())).pow(2).mean()
    loss.backward()
    if loss > 0.005:
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    dist.all_reduce(weights, op=dist.ReduceOp.AVG)

try:
    run(clip_sometimes, Mesh(dp=4), distributed=True)
except Exception as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# Some ranks ask for the maximum of a norm, while others ask for the mean of their weights. NCCL does not compare the calls.
# It combines numbers that have nothing to do with each other, or it hangs. tplab compares every call with those of the
# other ranks before it computes anything. On real GPUs, PyTorch does so if you set `TORCH_DISTRIBUTED_DEBUG=DETAIL`.
#
# ## The twin: `jit` in JAX
#
# In JAX you do not have to write collectives. You say how the arrays are sharded, and XLA inserts the collectives that it
# needs. `trace` compiles the function and shows what it would send. Nothing is executed, so shapes are enough:

# %%
import jax
import jax.numpy as jnp
import tplab.jax as tj
from jax.sharding import NamedSharding, PartitionSpec

tj.prepare(4)
devices = jax.make_mesh((4,), ("dp",))

def loss(params, x):
    for w in params:
        x = jax.nn.relu(x @ w)
    return (x**2).mean()

def step(params, x):
    grads = jax.grad(loss)(params, x)
    return [w - 0.1 * g for w, g in zip(params, grads)]

def array(shape, *spec):
    sharding = NamedSharding(devices, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

x = array((1024, WIDTH), "dp")
for name, spec in (("like DDP", ()), ("like FSDP", ("dp",))):
    params = [array((WIDTH, WIDTH), *spec)] * 4
    jitted = jax.jit(step, out_shardings=[p.sharding for p in params])
    print(name, Traffic.of_trace(tj.trace(jitted, params, x)), sep="\n")

# %% [markdown]
# With replicated parameters, XLA sends exactly what DDP sends in a step: 6,291,456 bytes per rank. With sharded
# parameters, it gathers each layer once and keeps it for the backward pass, whereas FSDP gathers it again. It sums the
# gradients with an `all_reduce` because it compiles for a CPU here; for GPUs and TPUs it turns this into a
# `reduce_scatter`. `explain` says which line and which operand made XLA insert each collective:

# %% tags=["nbval-ignore-output"]
print(tj.explain(jitted, params, x))

# %% [markdown]
# ## Your turn: send once per step
#
# A batch that does not fit in memory is computed in several equally large parts, whose gradients are added up. DDP sends
# the gradients in *every* backward pass, unless you tell it not to. `accumulate` gets `net`, which is a DDP model, and
# the parts of its rank, `batches`. `loss_of(net, batch)` is the mean loss of one of them. Write `accumulate` so that it
# leaves the gradients of the mean loss over all batches and all ranks in `net`, and sends them only once. The activations
# of two parts must never be in memory at the same time.

# %%
from tplab.exercises.your_own_program import check_accumulate

def accumulate(net, loss_of, batches):
    ...

check_accumulate(accumulate)

# %% [markdown]
# ## On Monday
#
# | you have | you run |
# |---|---|
# | a script for `torchrun` | `python -m tplab.torchrun --nproc-per-node 8 --cluster h100 train.py` |
# | the same, on real GPUs | `torchrun --nproc-per-node 8 -m tplab.record train.py`, then `python -m tplab.merge tplab_trace --html run.html` |
# | the same, and a page that plays the run in any browser | `... --html run.html train.py` |
# | a script that asks for GPUs, on a laptop | `... --device cpu train.py` |
# | a script that you start from a notebook | `tplab.torch.launch("train.py", ["--lr", "0.1"], ranks=8)` |
# | a cell of a notebook | `%load_ext tplab`, then `%%ranks dp=4` on the first line of the cell |
# | a function | `run(fn, Mesh(dp=2, tp=4), distributed=True)` |
# | a JAX function with shardings | `tplab.jax.trace(fn, *args)` and `tplab.jax.explain(fn, *args)` |
#
# In a script, each rank imports its own copy of your modules. A module can therefore keep its process groups in a global
# variable, as Megatron-LM does. `torch.profiler`, loops that wait for a file, and checkpoints work too, and what a rank
# prints appears at once. `tplab.record` writes down what real ranks send and when, also if the run hangs or is killed.

# %% [markdown]
# ## To take away
#
# - In DDP, each rank sends 2(R-1)/R of the gradients per step, and can hide most of that behind the backward pass. In FSDP
#   it sends 3/2 as much and stores 1/R of the model.
# - Most hangs come from a collective that some ranks call and others do not. Ask which rank waits, on which line, and
#   for which ranks.
# - You can look at a script before it gets expensive: eight simulated ranks on a laptop send the same bytes as eight GPUs
#   that use the ring algorithm.
#
# **Sources.** Li et al. 2020, [PyTorch Distributed](https://arxiv.org/abs/2006.15704) (buckets and overlap in DDP). Zhao et al.
# 2023, [PyTorch FSDP](https://arxiv.org/abs/2304.11277). [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html).
#
# Next: [24 Three dimensions](24_three_dimensions.ipynb), which puts data, pipeline and tensor parallelism together.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
