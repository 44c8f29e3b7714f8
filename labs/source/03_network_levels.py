# %% [markdown]
# # 03 Levels of a network
#
# **Sixteen GPUs are in two nodes. How few bytes must cross the slow network between them, and how fast can they cross?**
#
# Prerequisites: reduce-scatter, all-gather and the ring of [lab 02](02_collectives.ipynb). Time: 50 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/03_network_levels.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/03_network_levels.ipynb)
#
# ![Two nodes with four GPUs each. They add up inside each node, then across the nodes, then gather inside each node.](images/03_network_levels.png)
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
from tplab.cost.measured import network
from tplab.widgets import Bars, Row, animate, bytes_text, knob, levels, matrices

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
# do messages cross the network, and each is only half as large as the tensor. Finally, an all-gather inside each node
# gives every GPU both halves.
#
# ## Build it
#
# On a mesh, the two levels are two axes. Each line of the program uses one of them.

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
# other node? And how many leave a node in total?
#
# <details><summary>Answer</summary>
#
# Each GPU all-reduces an eighth of the tensor with one GPU of the other node, so it sends
# $2 \cdot \frac12 \cdot \frac n8 = \frac n8$. Its node has eight such GPUs, so $n$ bytes leave the node.
#
# </details>
#
# ## It cannot be less
#
# Could a cleverer program send fewer bytes across? No. Look at a node from outside, as if it were one large rank. The
# other node needs the sums over this node's eight GPUs: $n$ bytes, which only this node can compute. So **each of two
# nodes must send $n$ bytes**, and our program sends just that.
#
# With $k$ nodes, each is one of $k$ large ranks. By the lower bound of lab 02, $2\,\frac{k-1}{k}\,n$ bytes leave each
# node if they share the work evenly. The number of GPUs in a node does not matter. What matters is how many of them can
# send at the same time.

# %%
n = 256  # bytes
for k in (2, 4, 8):
    trace = tt.run(two_levels, Mesh(node=k, gpu=8), torch.ones(n // 4)).trace
    leave = sum(trace.bytes_sent(rank=rank, axis="node") for rank in range(8))
    bound = 2 * (k - 1) * n // k
    print(f"{k} nodes: {leave} B leave each node, and the bound is {bound} B")

# %% [markdown]
# ## One ring, two levels, or eight rings
#
# In NVIDIA's DGX servers, every GPU has a **network card** of its own. A single ring over all sixteen GPUs leaves each
# node from only one GPU, through one card. The other seven cards are idle, and all ranks wait for this one. Here is that
# ring, our two levels, and the all-reduce of a library like NCCL, for 1 GiB of gradients. The times are **modelled** from data sheets: every
# link runs at its peak rate. (On torch's `meta` device, tensors have shapes but no numbers, so this run takes no memory.)

# %%
def one_ring(x):
    return tt.ring_all_reduce(x, ("node", "gpu"))

def library(x):
    return tt.all_reduce(x, ("node", "gpu"))

gradients = torch.empty(2**29, dtype=torch.bfloat16, device="meta")
for program in (one_ring, two_levels, library):
    mesh, where = Mesh(node=2, gpu=8), {"cluster": "h100", "device": "meta"}
    trace = tt.run(program, mesh, gradients, **where).trace
    name, took, sent = program.__name__, trace.makespan, trace.bytes_sent(rank=0)
    print(f"{name:<10} {took * 1e3:5.1f} ms, each GPU sends {bytes_text(sent)}")

# %% [markdown]
# All three send the same number of bytes. They differ in the route:
#
# - **One ring** sends $2 \cdot \frac{15}{16}\,n$ through one card: at 50 GB/s, 40.3 ms.
# - **Two levels** send $n$ per node through eight cards. While one level is busy, the other is idle, so their times add
#   up: 4.2 ms inside and 2.7 ms across.
# - **Eight rings**, as NCCL may use them, carry an eighth of the tensor each, and leave the node from eight different GPUs.
#   So a GPU sends over NVLink in seven rings, and over its card in one. Both go on at the same time, and the slower of the
#   two levels sets the pace:
#
# $$t = 2\,\frac{R-1}{R}\,n\,\max\left(\frac{7}{8\,B_\text{NVLink}},\;\; \frac{1}{8\,B_\text{card}}\right)$$
#
# plus the latency of the hops, for $R$ ranks. It is a maximum and not a sum.

# %% [markdown]
# ## Turn the knob
#
# How many cards should a node of eight H100s have? Change the number of nodes, and see where more cards stop helping.

# %%
NVLINK, CARD = 450e9, 50e9  # bytes per second, each way

def bars(nodes):
    rows, ranks = [], 8 * nodes
    for cards in (1, 2, 4, 8, 16):
        inside, across = 7 / 8 / NVLINK, 1 / cards / CARD
        seconds = 2 * (ranks - 1) / ranks * 2**30 * max(inside, across)
        pace = "NVLink sets the pace" if inside > across else "cards set the pace"
        label = f"{cards} card{'s' * (cards > 1)}"
        rows.append(Row(label, {"all-reduce": seconds * 1e3}, pace))
    where = f"{nodes} nodes of eight H100s"
    return Bars(rows, f"{where} all-reduce 1 GiB. By the formula, data sheet.")

knob("Cards per node", "nodes", {k: bars(k) for k in (2, 4, 8, 16)}, start=2, unit="ms")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# Every doubling halves the time, up to eight cards. Sixteen would save only another fifth: eight cards of 50 GB/s
# carry 400 GB/s, and NVLink, with 450 GB/s for seven eighths of the bytes, is enough for 514 GB/s. With one card per
# GPU, as in a DGX, the two levels are nearly balanced. On the data sheet, the number of nodes hardly matters.
#
# </details>
#
# ## What was measured
#
# On paper, more nodes hardly slow down an all-reduce. Is that so? Here is the bus bandwidth of lab 02,
# $2\,\frac{R-1}{R}\,\frac{n}{t}$, for 256 MB, beside the data sheet and tplab's forecast. It was measured on 1 to 64
# nodes of a real cluster, that of the Ultra-Scale Playbook. Other labs call its network **the playbook's network**.

# %%
nodes = [2**k for k in range(7)]
rows = [row for row in network() if row.op == "all_reduce"]
measured = [row.bus_bandwidth / 1e9 for row in rows]

def bus_bandwidth(name, R):  # GB/s of an all-reduce of 256 MB over R ranks
    seconds = cost.find(name).collective_seconds("all_reduce", 256e6, range(R))
    return 2 * (R - 1) / R * 256e6 / seconds / 1e9

sheet, forecast = (
    [bus_bandwidth(name, 8 * k) for k in nodes] for name in ("h100", "h100-measured")
)
levels(
    {"Bus bandwidth": {"data sheet": (nodes, sheet), "forecast": (nodes, forecast)}},
    measured={"Bus bandwidth": list(zip(nodes, measured))},
    by="users of one cluster, Ultra-Scale Playbook",
    along="nodes", doubling=True, unit="GB/s",
    title="What a network delivers", about="all-reduce of 256 MB, 8 H100s per node",
    sentence="On paper the bandwidth holds. Here it falls to less than a tenth.",
)

# %%
print("nodes  measured (range)   forecast (waiting for hops)  data sheet, in GB/s")
for k, row, *both in zip(nodes, rows, forecast, sheet):
    took = cost.find("h100-measured").collective_cost("all_reduce", 256e6, 8 * k)
    mean, low, high = (x / 1e9 for x in (row.bus_bandwidth, row.low, row.high))
    print(f"{k:5}  {mean:3.0f} ({low:3.0f} to {high:3.0f}) {both[0]:10.0f}",
          f"({took.latency / took.seconds:3.0%} of its time) {both[1]:13.0f}")

# %% [markdown]
# On one or two nodes the data sheet is right within a tenth. On 64 nodes it promises eleven times what was measured.
# The forecast gives two reasons. Each card reaches less of its bandwidth, as if others shared the network. And an
# all-reduce waits for its hops from node to node, on 64 nodes for 70 % of the time.
#
# The forecast was fitted to these points and to training steps on this cluster, so where it agrees, that proves little. On
# two nodes it is 40 % too low, and on 64 nodes 70 % too high. But there the users' own runs range from 12 to 177 GB/s.
# **Measure your network before you choose a layout.**
#
# ## The same in JAX
#
# XLA keeps the three collectives. The first and the last stay in a node, and the middle one pairs GPUs of different nodes.

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
# Hybrid sharding (HSDP) turns `two_levels` into a training step: between the second line and the third, each GPU updates
# the weights of its piece. Here is such a step. It has a mistake that no loss and no test of numbers will show, because its
# weights are right on every rank.
#
# **Predict.** The tensor has $n$ bytes, and there are two nodes of eight GPUs. How many bytes leave a node?

# %%
def hybrid_step(weights, gradient):  # both [n]   ->   the new weights [n]
    piece = tt.reduce_scatter(gradient, "node")
    piece = tt.all_reduce(piece, "gpu")
    own = weights.chunk(tt.axis_size("node"))[tt.axis_index("node")]
    return tt.all_gather(own - 0.1 * piece, "node")

where = {"cluster": "h100", "device": "meta"}
trace = tt.run(hybrid_step, Mesh(node=2, gpu=8), gradients, gradients, **where).trace
leave = sum(trace.bytes_sent(rank=rank, axis="node") for rank in range(8))
print(f"{trace.makespan * 1e3:.1f} ms, {leave / 2**30:.0f} GiB leave each node")

# %% [markdown]
# That is eight times the bound. Repair `hybrid_step`, run its cell, and then run the check.

# %%
from tplab.exercises.network_levels import check_hybrid_step

check_hybrid_step(hybrid_step)

# %% [markdown]
# For HSDP, PyTorch's `fully_shard` takes a mesh with two dims. It goes by their order: [the first replicates, the second
# shards](https://discuss.pytorch.org/t/fsdp-hsdp-with-device-mesh-multiple-replica-intra-node/209096). If you swap
# them, you have this bug.
#
# ## Your turn: gather on two levels
#
# Every GPU has one row. Write `gather_all`, which returns all rows on every GPU, in the order of the ranks. On $N$
# nodes, each GPU may send only $N - 1$ rows to other nodes, as many as there are other nodes. All other messages must
# stay inside a node, and they may bring each row to each GPU only once. Gradients must flow back to `x`. (They may be
# those of its own rank, or the sum over all ranks: the check says which you have.) A GPU's rank is node × (GPUs per
# node) + gpu.
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
from tplab.exercises.network_levels import check_gather_all

check_gather_all(gather_all)

# %% [markdown]
# ## On Monday
#
# | here | torch | NCCL | JAX |
# |---|---|---|---|
# | `tt.all_reduce(x, ("node", "gpu"))` | `dist.all_reduce(x)` over all ranks | several rings, or a tree, over all cards | `lax.psum(x, ("node", "gpu"))` |
# | bus bandwidth | | the column `busbw` of nccl-tests | |
# | `two_levels`, of gradients | `fully_shard` on a mesh of two dims (HSDP) | | parameters with `P("gpu")` |
# | nodes of a cluster | the order of ranks in `torchrun` | detected; `NCCL_TOPO_FILE` overrides it | `mesh_utils.create_hybrid_device_mesh` |
#
# You rarely write `two_levels` for one all-reduce: NCCL keeps both levels busy at once. You write its three steps when
# something happens between them, as in hybrid sharding.
#
# ## To take away
#
# - Two nodes that add up $n$ bytes must send $n$ bytes each, and $k$ nodes $2\,\frac{k-1}{k}\,n$, however many GPUs they have.
# - A hand-written ring uses one card per node. A library's rings use all of them, and the slower level sets the pace.
# - A data sheet has peak rates. On 64 nodes of one real cluster, less than a tenth of them was measured: measure yours.
#
# **Sources.** Bus bandwidths on 1 to 64 nodes: the interactive plot of the
# [Ultra-Scale Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), Apache-2.0, commit 924e4d0. NVIDIA,
# [nccl-tests](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md) (bus bandwidth). Hu et al. 2025,
# [Demystifying NCCL](https://arxiv.org/abs/2507.04786). Thakur et al. 2005, [Collectives in
# MPICH](https://doi.org/10.1177/1094342005051521). Zhao et al. 2023, [PyTorch FSDP](https://arxiv.org/abs/2304.11277)
# (hybrid sharding).
#
# Next: [04 A Megatron block](04_megatron_block.ipynb), where one layer becomes a whole transformer block.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
