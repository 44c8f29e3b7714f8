# %% [markdown]
# # 03 Hierarchies
#
# **Sixteen GPUs are in two nodes. Which messages should cross the slow network between the nodes, and how few bytes are
# enough?**
#
# Prerequisites: columns, rows, $f$ and $g$ from [lab 01](01_split_a_layer.ipynb); reduce-scatter and all-gather from
# [lab 02](02_collectives.ipynb). Time: 50 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/03_hierarchies.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/03_hierarchies.ipynb)
#
# ![Two nodes with four GPUs each. They add up inside each node, then across the nodes, then gather inside each node.](images/03_hierarchies.png)
#
# *Two nodes with four GPUs each add up a tensor in three steps: inside each node, across the nodes, and inside each
# node again. Each GPU sends only a quarter of the tensor to the other node.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
import numpy as np
import torch
import tplab.torch as tt
from tplab import Mesh, P, cost
from tplab.widgets import Bars, Row, animate, bytes_text, knob, matrices, shards

# %% [markdown]
# ## By hand: add up inside first
#
# Inside a **node**, which is one machine, GPUs are connected by NVLink. Between nodes there is a network, and it is
# much slower: in a cluster of H100s, each GPU sends 450 GB/s within its node and 50 GB/s across. So we count the bytes
# that cross it separately.
#
# Take two nodes with two GPUs each. Every GPU has a row of four numbers, and all of them need the four sums. First, the
# GPUs of a node do a reduce-scatter: each GPU ends with half of its node's sums.

# %%
table = np.array([[0, 7, 6, 4], [4, 8, 0, 6], [2, 0, 5, 9], [7, 7, 7, 7]], "float32")
node_0, node_1 = table[:2].sum(0), table[2:].sum(0)
halves = np.stack([node_0[:2], node_0[2:], node_1[:2], node_1[2:]])
across = np.stack([halves[0] + halves[2], halves[1] + halves[3]] * 2)
gathered = np.concatenate([across[[0, 0, 2, 2]], across[[1, 1, 3, 3]]], axis=1)
steps = {"1: inside": halves, "2: across": across, "3: inside": gathered}
matrices({"one row per GPU": table, **steps})

# %% [markdown]
# Then the two GPUs that have the *same half* add up across the nodes: row 0 with row 2, and row 1 with row 3. Only now
# do messages cross the network, and they are only half as large as the tensor. Finally, an all-gather inside each node
# gives every GPU both halves.
#
# ## Build it
#
# On a mesh the hierarchy is two axes. Each line of the program uses one of them.

# %% tags=["opening-picture"]
def two_levels(x):
    piece = tt.reduce_scatter(x, "gpu")  # inside each node
    piece = tt.all_reduce(piece, "node")  # across, with the GPUs that have this piece
    return tt.all_gather(piece, "gpu")  # inside each node

numbers = np.arange(64, dtype="float32")  # 8 numbers for each of 8 GPUs
BOTH = P(("node", "gpu"))  # dim 0 is split over both axes
out = tt.run(two_levels, Mesh(node=2, gpu=4), numbers, in_specs=BOTH, out_specs=P())
assert np.array_equal(out.value, numbers.reshape(8, 8).sum(0))
animate(out.trace)

# %% [markdown]
# **Predict.** The tensor has $n$ bytes, and there are two nodes of eight GPUs. How many bytes does one GPU send to the
# other node? How many bytes would it send to its neighbour in a single ring of all sixteen?
#
# <details><summary>Answer</summary>
#
# Across the nodes it all-reduces an eighth of the tensor with one other GPU:
# $2 \cdot \frac12 \cdot \frac n8 = \frac n8$. In a single ring every GPU sends $2 \cdot \frac{15}{16}\,n$ to its
# neighbour, and for two of the sixteen GPUs that neighbour is in the other node. All the others have to wait for those
# two.
#
# </details>
#
# Here are both, for 1 GiB of gradients. The times are **modelled** from data sheets. (On torch's `meta` device,
# tensors have shapes but no numbers, so this run takes no memory.)

# %%
def one_ring(x):
    return tt.all_reduce(x, ("node", "gpu"))

gradients = torch.empty(2**29, dtype=torch.bfloat16, device="meta")
for nodes in (2, 4):
    for program in (one_ring, two_levels):
        mesh = Mesh(node=nodes, gpu=8)
        trace = tt.run(program, mesh, gradients, cluster="h100", device="meta").trace
        total = bytes_text(trace.bytes_sent(rank=0))
        took = f"{program.__name__:<10} {trace.makespan * 1e3:4.1f} ms"
        print(f"{mesh}, {took}: each GPU sends {total}")
    within = bytes_text(trace.bytes_sent(rank=0, axis="gpu"))
    across = bytes_text(trace.bytes_sent(rank=0, axis="node"))
    print(f"    two_levels sends {within} within the node and {across} across")

# %% [markdown]
# Each GPU sends the same number of bytes either way. With two levels, most of them stay on the fast links.
#
# The model sends all bytes of a single ring through one network card per node, and this makes the difference so large.
# NCCL runs several rings, one per card, and is about as fast as our two levels. You think in levels when you place
# collectives yourself. Hybrid sharding (HSDP) takes these steps, and gathers updated weights in the last.
#
# ## Two axes of one training step
#
# Now sixteen ranks train the two layers of lab 01. Along one axis, `tp`, they split the weights. Along the other, `dp`,
# they split the batch. This is **data parallelism**: ranks with the same weights see different samples, so they must
# average the gradients of these weights. Here is what each rank of a 2 × 4 mesh holds:

# %%
shards(Mesh(dp=2, tp=4), x=((16, 8), P("dp")), a=((8, 16), P(None, "tp")))

# %% [markdown]
# Along `tp` a step sums **activations**: $Z$ in the forward pass and $dX$ in the backward pass, each of size
# $N/\text{dp} \times D$, with batch $N$ and width $D$. Along `dp` it sums **gradients**: of $A$ and of $B$, each of
# size $D \times F/\text{tp}$, with hidden width $F$.

# %%
def step(x, a, b):  # x [N/dp, D]   a [D, F/tp]   b [F/tp, D]
    for tensor in (x, a, b):
        tensor.requires_grad_()
    z = tt.reduce_from(torch.tanh(tt.copy_to(x, "tp") @ a) @ b, "tp")
    z.square().mean().backward()
    return [tt.all_reduce(grad, "dp", op="mean") for grad in (a.grad, b.grad)]

def in_all_reduce(elements, itemsize, ranks):  # the bytes that a rank sends: see lab 02
    return 2 * (ranks - 1) * elements * itemsize // ranks

def sent_by_formula(batch, width, hidden, dp, tp, itemsize):
    return {
        "tp": 2 * in_all_reduce(batch // dp * width, itemsize, tp),  # Z and dX
        "dp": 2 * in_all_reduce(width * hidden // tp, itemsize, dp),  # of A and of B
    }

# %% [markdown]
# **Predict.** Which mesh sends fewer bytes, 8 × 2 (`dp` × `tp`) or 4 × 4?
#
# <details><summary>Answer</summary>
#
# It depends on the batch. Activations grow with the batch, and gradients do not. In the lines below, with width 16 and
# hidden width 32, the two are equal at a batch of 64.
#
# </details>

# %%
D, F = 16, 32
SPECS = P("dp"), P(None, "tp"), P("tp")
for batch in (32, 64, 128):
    tensors = torch.randn(batch, D), torch.randn(D, F), torch.randn(F, D)
    for dp, tp in ((8, 2), (4, 4)):
        trace = tt.run(step, Mesh(dp=dp, tp=tp), *tensors, in_specs=SPECS).trace
        counted = {axis: trace.bytes_sent(rank=0, axis=axis) for axis in ("tp", "dp")}
        assert counted == sent_by_formula(batch, D, F, dp, tp, itemsize=4)
        total = sum(counted.values())
        print(f"batch {batch:>3}, {dp} × {tp}: {counted}, in total {total:,} bytes")

# %% [markdown]
# ## Turn the knob
#
# Here are the two layers at the size of a large language model, in bfloat16, and every way to put sixteen ranks on two
# axes. Change the batch, in tokens. Which mesh sends the least, and which way does it move as the batch grows?

# %%
WIDTH, HIDDEN = 4096, 16384
MESHES = [(16, 1), (8, 2), (4, 4), (2, 8), (1, 16)]

def bars(batch):
    sent = {mesh: sent_by_formula(batch, WIDTH, HIDDEN, *mesh, 2) for mesh in MESHES}
    total = {mesh: sum(parts.values()) for mesh, parts in sent.items()}
    least = min(total.values())
    best = " and ".join(f"{dp} × {tp}" for dp, tp in MESHES if total[dp, tp] == least)
    rows = []
    for (dp, tp), parts in sent.items():
        named = {"activations, tp": parts["tp"], "gradients, dp": parts["dp"]}
        rows.append(Row(f"{dp} × {tp}", named))
    return Bars(rows, f"The least: {best}, with {bytes_text(least)} from each rank.")

batches = {2**k: bars(2**k) for k in range(9, 20)}
about = f"data × tensor; two layers, width {WIDTH:,}, hidden width {HIDDEN:,}, bfloat16"
knob("Five meshes", "tokens", batches, start=2**12, about=about, unit="B")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# As the batch grows, the best mesh moves from tensor to data parallelism, by one step each time the batch grows by a
# factor of four. From 4 × 4 to 8 × 2, a rank sends $DF$ more elements of gradients and $\frac12 ND$ fewer of
# activations. So the two meshes are equal at
#
# $$N = 2F$$
#
# whatever the width is. Here that is 32,768 tokens.
#
# </details>
#
# ## Which axis stays inside the node?
#
# The ranks along the last axis of a mesh are neighbours, so they share a node and have the fastest links. Which axis
# should be last? We take the batch at which 4 × 4 and 8 × 2 send the same number of bytes, and model the time of their
# sums, for two nodes of eight H100s. Each sum is done on two levels:

# %%
h100, batch = cost.find("h100"), 2 * HIDDEN

def seconds_of_sum(nbytes, group):  # inside each node, then across
    gpus = sum(rank < 8 for rank in group)  # ranks of the group in each node
    nodes = len(group) // gpus
    inside = cost.collective("all_reduce", nbytes, gpus, h100.inner_link)
    across = cost.collective("all_reduce", nbytes / gpus, nodes, h100.outer_link)
    return inside.seconds + across.seconds

for mesh in (Mesh(dp=4, tp=4), Mesh(dp=8, tp=2), Mesh(tp=4, dp=4)):
    sizes = {
        "tp": batch * WIDTH // mesh.shape["dp"],
        "dp": WIDTH * HIDDEN // mesh.shape["tp"],
    }
    for axis, elements in sizes.items():
        one = seconds_of_sum(2 * elements, mesh.group(0, axis))
        both = 2 * one * 1e3  # Z and dX, or the gradients of A and B
        print(f"{mesh!s:<17} sums along {axis}: {both:4.2f} ms")

# %% [markdown]
# In total, the first two meshes take about equally long. But sums of activations are on the critical path: the next
# product needs them, so the ranks wait. A gradient of the weights is needed only at the optimizer step. It can be
# summed in the background while the backward pass goes on.
#
# The first mesh and the third differ only in the order of the axes. With `tp` last, the ranks wait 0.47 ms for their
# activations. With `tp` first, they wait 1.66 ms. So the axis that carries activations should be last. This is why
# tensor parallelism rarely leaves the node, and its size is rarely above 8.
#
# ## The same in JAX
#
# The program is the same, and XLA keeps its three collectives. Look at the ranks: the first and the last stay in a
# node, and the middle one pairs GPUs of different nodes.

# %%
import tplab.jax as tj

def two_levels_in_jax(x):
    piece = tj.reduce_scatter(x, "gpu")
    piece = tj.all_reduce(piece, "node")
    return tj.all_gather(piece, "gpu")

in_jax = tj.run(two_levels_in_jax, Mesh(node=2, gpu=4), numbers, in_specs=BOTH)
print(np.array_equal(in_jax.per_rank[5], out.value))
tj.collectives_in(two_levels_in_jax, Mesh(node=2, gpu=4), numbers, in_specs=BOTH)

# %% [markdown]
# ## A bug to repair
#
# A colleague averages gradients over the data-parallel ranks. On `Mesh(dp=16, tp=1)` all tests pass. Then somebody
# trains on `Mesh(dp=8, tp=2)`. No error is raised, and the loss goes down, just more slowly.

# %%
def average(gradient):  # this rank's gradient   ->   its mean over "dp"
    world_size = tt.axis_size(("dp", "tp"))
    return tt.all_reduce(gradient, "dp") / world_size

# %%
from tplab.exercises.hierarchies import check_average

check_average(average)

# %% [markdown]
# Fix `average`, run its cell, then run the check again. [DeepSpeed](https://github.com/deepspeedai/DeepSpeed/pull/5555)
# once had a bug of this kind: it divided by the size of a group that was too large, and gradient norms were a quarter
# of what they should be. With Adam, which ignores the scale of gradients, you may never notice.
#
# ## Your turn: gather on two levels
#
# Every GPU has one row. Write `gather_all`, which returns all rows on every GPU, in the order of the ranks. On $N$
# nodes, each GPU may send only $N - 1$ rows to other nodes, as many as there are other nodes. All other messages must
# stay inside a node. A GPU's rank is node × (GPUs per node) + gpu.
#
# `tt.all_gather(x, axis)` joins along dim 0, and `tt.axis_size(axis)` tells you how many ranks there are.
#
# <details><summary>A hint</summary>
#
# There are two orders: first inside the node and then across, or first across and then inside. One of them sends each
# row across once. Its rows arrive in a different order, so sort them: `reshape`, `transpose`, `flatten`.
#
# </details>

# %%
def gather_all(x):  # x [1, n]   ->   [R, n], row r from rank r
    ...

# %%
from tplab.exercises.hierarchies import check_gather_all

check_gather_all(gather_all)

# %% [markdown]
# ## On Monday
#
# | here | torch | Megatron-LM | JAX |
# |---|---|---|---|
# | `Mesh(dp=8, tp=2)` | `init_device_mesh("cuda", (8, 2), mesh_dim_names=("dp", "tp"))` | `--tensor-model-parallel-size 2`, innermost by default | `jax.make_mesh((8, 2), ("dp", "tp"))` |
# | `mesh.groups("tp")` | `device_mesh["tp"].get_group()` | `get_tensor_model_parallel_group()` | the axis name, in `shard_map` |
# | `two_levels`, of gradients | `fully_shard` on a mesh of two dims (HSDP) | `--num-distributed-optimizer-instances` | parameters with `P("gpu")` |
# | nodes of a cluster | the order of ranks in `torchrun` | the same | `mesh_utils.create_hybrid_device_mesh` |
#
# ## To take away
#
# - Add up inside the node, then across, then gather inside. With $n$ bytes and $G$ GPUs per node, each sends less than
#   $2n/G$ across.
# - Activations travel along `tp`, gradients along `dp`. The batch decides which mesh sends the least; 8 × 2 and 4 × 4
#   are equal at a batch of $2F$.
# - The axis whose sums cannot be hidden belongs inside the node. Divide by the size of the group that you summed over.
#
# **Sources.** Misha Laskin, [Sharding Large Models](https://www.mishalaskin.com/posts/tensor_parallel) (8 × 2 and 4 ×
# 4). Thakur et al. 2005, [Collectives in MPICH](https://doi.org/10.1177/1094342005051521). Zhao et al. 2023, [PyTorch
# FSDP](https://arxiv.org/abs/2304.11277) (hybrid sharding).
#
# Next: [04 A Megatron block](04_megatron_block.ipynb), where one layer becomes a whole transformer block.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
