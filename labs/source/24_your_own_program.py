# %% [markdown]
# # 24 Your own program
#
# **What does my training script really send, and why does it hang?**
#
# Time: 50 minutes. Prerequisites: [lab 16](16_data_parallel.ipynb) for data parallelism and its buckets, and some experience
# with PyTorch.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/24_your_own_program.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/24_your_own_program.ipynb)
#
# ![A timeline of four ranks. In the second backward pass, all-reduces of gradients run while the ranks still compute.](images/24_your_own_program.png)
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
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tplab import Mesh
from tplab.torch import run

# %% [markdown]
# ## A script
#
# Your own code probably uses `torch.distributed`. With `distributed=True`, it is initialised on every simulated rank,
# and code that builds on it runs unchanged. Here is data-parallel training as the PyTorch tutorials teach it:

# %%
WIDTH = 512

def model():
    torch.manual_seed(0)
    layers = [[nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()] for _ in range(4)]
    return nn.Sequential(*[nn.Sequential(*layer) for layer in layers])

def batch(rows=256):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(rows, WIDTH, generator=generator)

def train(net, steps=2, rows=256):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        loss = net(batch(rows)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()

def ddp_training(steps=2, rows=256, bucket_cap_mb=1):
    net = DistributedDataParallel(model(), bucket_cap_mb=bucket_cap_mb)
    return train(net, steps, rows)

ddp = run(ddp_training, Mesh(dp=4), distributed=True, cluster="h100")

# %% [markdown]
# **By hand.** Four ranks add up eight numbers. If every rank sends its eight to rank 0, and rank 0 sends the sums back,
# rank 0 sends 3 x 8 = 24 numbers. In a ring all-reduce, each of R ranks sends 2(R-1)/R of the numbers, here 12.
#
# **Predict.** Our model has four matrices of 512 x 512 in float32. How many bytes of gradients does each of the four ranks
# send in one step, and all ranks in two steps?
#
# <details><summary>Answer</summary>
#
# The gradients take 4 x 512 x 512 x 4 B = 4 MiB. Each rank sends 2 x 3/4 of that, which is 6 MiB. Two steps on four ranks
# add up to 48 MiB.
# </details>

# %%
formula = 2 * 3 / 4 * (4 * WIDTH * WIDTH * 4)  # one rank, one step
one_rank = ddp.trace.bytes_sent(rank=0, op="all_reduce") // 2
all_ranks = ddp.trace.bytes_sent(op="all_reduce")
print(f"per rank, 1 step:   formula {formula:12,.0f} B, counted {one_rank:12,} B")
print(f"all ranks, 2 steps: formula {8 * formula:12,.0f} B, counted {all_ranks:12,} B")

# %% tags=["nbval-ignore-output"]
from tplab.trace import overlap, summary

print(summary(ddp.trace))

# %% [markdown]
# The summary lists everything that the four ranks sent to each other. In `cell 3, line 17`, cells are counted in the
# order in which you ran them. The times are modelled: tplab calculates them from the data sheets of an H100 and of
# NVLink, and assumes that operations are launched one by one, as they are without `torch.compile`.
#
# You did not write the broadcasts or the small `all_gather`. When DDP is constructed, the ranks compare the shapes of their
# parameters, and rank 0 sends its own to all others. Before the second forward pass, it also sends which parameters are
# in which bucket.
#
# ## Where the time goes
#
# Hover over the bars. Each one shows the line of your program that caused it.

# %% tags=["opening-picture"]
from tplab.widgets import Bars, Row, knob, timeline

timeline(ddp.trace)

# %% [markdown]
# The two steps look different. In the first one, a single `all_reduce` waits for the end of the backward pass. DDP does
# not yet know the order in which gradients become ready, so it puts them all in one bucket. In the second step there
# are four buckets, and three are sent during the backward pass.
#
# `overlap` says how much of the communication is hidden in the whole run, including start-up and the first step,
# neither of which hides anything. Its two figures are the same here, because a rank computes for longer than it sends.

# %%
print(overlap(ddp.trace))

# %% [markdown]
# ## Build it: DDP in five lines
#
# torch calls a hook when the gradient of a parameter is complete. This one averages the gradient, and waits for the result:

# %%
def by_hand():
    net = model()
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: dist.all_reduce(p.grad, op=dist.ReduceOp.AVG))
    return train(net)

hand = run(by_hand, Mesh(dp=4), distributed=True, cluster="h100")
for name, out in (("DDP", ddp), ("by hand", hand)):
    sent = out.trace.bytes_sent(rank=0, op="all_reduce")
    print(f"{name:8} loss {out.per_rank[0]:.6f}, all_reduce {sent:,} B per rank,",
          f"{overlap(out.trace).share:.1%} hidden")

# %% [markdown]
# Both train the same model and send the same gradients. Our version hides nothing, because it waits for each `all_reduce`.
#
# ## Turn the knob: larger buckets
#
# DDP fills a bucket with gradients until it has `bucket_cap_mb` MiB, and sends it when all are ready. (The default
# is 25 MiB, and 1 MiB for the first bucket.) Each of our matrices takes 1 MiB.
#
# **Predict.** With buckets of 1 MiB a third is hidden. Is more hidden with larger buckets, or less?

# %%
def bars(cap):
    args = 2, 256, cap  # steps, rows, bucket_cap_mb
    trace = run(ddp_training, Mesh(dp=4), *args, distributed=True,
                cluster="h100").trace
    found = overlap(trace)
    parts = {"hidden": found.hidden[0], "not hidden": found.exposed[0]}
    rows = [Row("communication", parts), Row("all", {"two steps": trace.makespan})]
    return Bars(rows, f"{found.share:.1%} of the communication is hidden.")

options = {cap: bars(cap) for cap in (1, 2, 3, 25)}
knob("Rank 0 in two steps", "bucket_cap_mb", options,
     about="modelled, h100, data sheet")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# The larger the buckets, the less is hidden: 16.7% with 2 MiB, and 16.5% with 3. If the first bucket may have 25 MiB too,
# nothing is: it holds the whole model, and is complete only when the backward pass has ended. Large buckets still pay off
# for many small layers, because each message has a latency ([lab 16](16_data_parallel.ipynb)).
#
# </details>
#
# ## FSDP: the same model in pieces
#
# DDP keeps the whole model on every rank. FSDP keeps only a quarter of each layer on each of our four ranks, and
# gathers a layer when it is needed. `device_mesh()` is the mesh of this run as PyTorch's `DeviceMesh`. The table has
# everything that rank 0 sends in each of the two runs:

# %%
from torch.distributed.fsdp import fully_shard
from tplab.torch import device_mesh
from tplab.trace import Traffic, traffic_table

def fsdp_training(steps=2, rows=256):
    net = model()
    for layer in net:
        fully_shard(layer, mesh=device_mesh())
    return train(fully_shard(net, mesh=device_mesh()), steps, rows)

fsdp = run(fsdp_training, Mesh(dp=4), distributed=True, cluster="h100")
columns = {"DDP": Traffic.of_trace(ddp.trace), "FSDP": Traffic.of_trace(fsdp.trace)}
print(traffic_table(columns))

# %% [markdown]
# In each step, FSDP needs three collectives per layer: an `all_gather` of the weights before the forward pass, another
# one before the backward pass (unless `reshard_after_forward=False`), and a `reduce_scatter` of the gradients. In each of
# them a rank sends (R-1)/R of the layer, half of what it sends in an `all_reduce`. So a step sends 3/2 of DDP's.
#
# **Decide.** Is that worth it when the ranks are in different nodes? Here the four ranks are first in one node, and
# then in two nodes of two ranks. We subtract a run of two steps from one of three, so that the start and the first step
# do not count:

# %%
from dataclasses import replace

from tplab.cost import NAMED

two_nodes = replace(NAMED["h100"], node_size=2)

def step_time(program, rows, cluster):  # in microseconds
    took = [run(program, Mesh(dp=4), steps, rows, distributed=True, cluster=cluster)
            .trace.makespan for steps in (2, 3)]
    return (took[1] - took[0]) * 1e6

cases = [("one node", "h100", 256), ("two nodes", two_nodes, 256),
         ("two nodes", two_nodes, 2048)]
for nodes, cluster, rows in cases:
    both = [step_time(each, rows, cluster) for each in (ddp_training, fsdp_training)]
    print(f"{nodes}, {rows:5,} rows per rank: DDP {both[0]:.0f} µs,",
          f"FSDP {both[1]:.0f} µs per step, {both[1] / both[0] - 1:.0%} more")

# %% [markdown]
# In this model of time, FSDP hides nothing; on GPUs it gathers the next layer while one computes, and loses less. It
# takes longer than DDP, above all across nodes, because it sends more. Our model fits on one GPU, so FSDP is a bad bargain.
# With more rows per rank there is more to compute for the same traffic, and FSDP loses a smaller share. A model that does
# not fit must be split somehow, and FSDP asks for the fewest changes to your code.
#
# ## It hangs
#
# Sooner or later a distributed program hangs. Under `torchrun`, nothing happens until the ranks that wait report a timeout: by
# [default](https://docs.pytorch.org/docs/stable/distributed.html) after 10 minutes with NCCL, and 30 with gloo, or as soon as it
# sees that another process has ended. A common way to get there is that only rank 0 validates:

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
# The error names the rank that waits, its line, and the ranks that will never join it.
#
# **A bug to repair.** Repair `train_and_validate` in two ways, and run the cell again after each. What does `loss` mean in
# the first, and what in the second?
#
# <details><summary>Answer</summary>
#
# If every rank calls `validate` and only rank 0 prints, `loss` is the mean over the batches of all ranks. If `validate`
# does not communicate, `loss` is that of rank 0's batch alone.
# </details>
#
# ## Calls that do not match
#
# Another classic mistake is a branch that depends on the data. A rank whose loss is large wants to log the mean over all ranks:

# %% tags=["nbval-ignore-output"]
def log_large_losses():
    net = DistributedDataParallel(model())
    loss = net(batch() * (1 + dist.get_rank())).pow(2).mean()
    if loss > 0.005:  # each rank looks at its own loss
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    loss.backward()

try:
    run(log_large_losses, Mesh(dp=4), distributed=True)
except Exception as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# Some ranks average one number, while the others are already adding up gradients. tplab compares every call with those of the other
# ranks before it computes anything. NCCL does not: its [manual](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html)
# calls the outcome undefined, which includes hangs and corrupted data. With `TORCH_DISTRIBUTED_DEBUG=DETAIL`, PyTorch compares the
# calls on real GPUs too.
#
# ## The twin: `jit` in JAX
#
# In JAX you say how the arrays are sharded, and XLA inserts the collectives that it needs. `trace` compiles the function
# and shows what it would send. Nothing is executed, so shapes are enough. (`tj.prepare(4)` gives JAX four CPU devices.)

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
# gradients with an `all_reduce`, because it compiles for a CPU here. `explain` says which line and which operand made
# XLA insert each collective:

# %% tags=["nbval-ignore-output"]
print(tj.explain(jitted, params, x))

# %% [markdown]
# ## On real processes
#
# `tplab.record` writes down what real ranks send and when, even if the run hangs or is killed, and `merge` makes one
# trace of their files. Here `torchrun` starts two processes on this machine, which talk over gloo. On GPUs the command
# is the same:

# %%
import tempfile
from pathlib import Path

from tplab.torch import launch
from tplab.trace import merge

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
layers = [nn.Linear(512, 512, bias=False) for _ in range(4)]
net = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
for step in range(2):
    net(torch.randn(8, 512)).pow(2).mean().backward()
dist.destroy_process_group()
"""
folder = Path(tempfile.mkdtemp())
(folder / "train.py").write_text(SCRIPT)
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
command = [*torchrun, "--nproc-per-node=2", "-m", "tplab.record", "train.py"]
subprocess.run(command, cwd=folder, check=True, capture_output=True)
recorded = merge(folder / "tplab_trace").trace
simulated = launch(folder / "train.py", ranks=2).trace
for name, trace in {"torchrun": recorded, "simulated": simulated}.items():
    sent = trace.select(rank=0, kind="collective", op="all_reduce")
    num_bytes = sent.bytes_sent(rank=0)
    print(f"{name:9} {len(sent.events)} all_reduces, {num_bytes:,} B per rank")

# %% [markdown]
# ## Your turn: send once per step
#
# A batch that does not fit in memory is computed in several equally large parts, whose gradients are added up. DDP
# sends the gradients in *every* backward pass, unless you tell it not to. `accumulate` gets `net`, a DDP model without
# gradients, and `batches`, the parts of its rank. `loss_of(net, batch)` is the mean loss of one part. Write
# `accumulate` so that it leaves the gradients of the mean loss over all parts of all ranks in `net`, and sends them
# only once. The activations of two parts must never be in memory at the same time. Leave everything else as it was: the
# caller's optimizer does the step.

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
# | a script for `torchrun` | `python -m tplab.torchrun --nproc-per-node 8 --cluster h100 train.py`. `--html run.html` makes a page that plays the run. If the script asks for GPUs: `--device cpu` |
# | the same, on real GPUs | `torchrun --nproc-per-node 8 -m tplab.record train.py`, then `python -m tplab.merge tplab_trace --html run.html` |
# | a script that you start from a notebook | `tplab.torch.launch("train.py", ["--lr", "0.1"], ranks=8)` |
# | a cell of a notebook | `%load_ext tplab`, then `%%ranks dp=4` on the first line of the cell |
# | a function | `run(fn, Mesh(dp=2, tp=4), distributed=True)` |
# | a JAX function with shardings | `tplab.jax.trace(fn, *args)` and `tplab.jax.explain(fn, *args)` |

# %% [markdown]
# ## To take away
#
# - In DDP, each rank sends 2(R-1)/R of the gradients per step, and can hide much of that behind the backward pass. In FSDP
#   it sends 3/2 as much by default, and stores 1/R of the model.
# - A program hangs where some ranks call a collective and others do not. Ask which rank waits, on which line, and for which
#   ranks.
# - You can look at a script before it gets expensive: eight simulated ranks on a laptop send the same bytes as eight GPUs
#   that use the ring algorithm.
#
# **Sources.** Li et al. 2020, [PyTorch Distributed](https://arxiv.org/abs/2006.15704) (buckets and overlap in DDP). Zhao et al.
# 2023, [PyTorch FSDP](https://arxiv.org/abs/2304.11277). [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html).
#
# Next: [25 Does it train the same model?](25_same_model.ipynb), for bugs that neither hang nor raise an error.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
