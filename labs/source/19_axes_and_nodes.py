# %% [markdown]
# # 19 Axes and nodes
#
# **Sixteen ranks have two axes, data and tensor. Which mesh sends the fewest bytes, and which of its axes may cross the
# network?**
#
# Prerequisites: $f$ and $g$, which are `copy_to` and `reduce_from`, from [lab 01](01_split_a_layer.ipynb); nodes and
# cards from [lab 03](03_network_levels.ipynb); and gradients that are sent during the backward pass ([lab
# 16](16_data_parallel.ipynb)). Time: 40 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/19_axes_and_nodes.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/19_axes_and_nodes.ipynb)
#
# ![Five bars, one per mesh of sixteen ranks. Each has a part for activations and a part for gradients. The second mesh, 8 × 2, sends the least.](images/19_axes_and_nodes.png)
#
# *The bytes that a rank sends in one training step of two layers, for every way to put sixteen ranks on two axes.
# Activations travel along `tp`, and gradients along `dp`. With this batch, the mesh of 8 × 2 sends the least.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
import torch
import tplab.torch as tt
from tplab import Mesh, P, cost
from tplab.data.hiding import H100S
from tplab.widgets import Bars, Row, bytes_text, knob, shards, timeline

# %% [markdown]
# ## Two axes of one training step
#
# We train two layers like those of lab 01, $Z = \tanh(XA)\,B$, on a mesh with two **axes**: its ranks are the cells of a
# table. Those along one axis, `tp`, split the weights. Those along the other, `dp`, split the batch. Here is what each
# rank holds on a smaller mesh, 2 × 4:

# %%
shards(Mesh(dp=2, tp=4), x=((16, 8), P("dp")), a=((8, 16), P(None, "tp")))

# %% [markdown]
# Along `tp` a step all-reduces **activations**: $Z$ in the forward pass and $dX$ in the backward pass, each of size
# $N/\text{dp} \times D$, with batch $N$ and width $D$. Along `dp` it all-reduces **gradients**: of $A$ and of $B$, each
# of size $D \times F/\text{tp}$, with hidden width $F$.
#
# **By hand.** Take $N = 8$, $D = 2$ and $F = 4$ on a mesh of 2 × 2. In a ring all-reduce over two ranks, a rank sends as many
# numbers as it has. A rank's $Z$ and $dX$ are 4 × 2 each, which makes 16 numbers along `tp`. The gradients of its parts of
# $A$ and $B$ are 2 × 2 each, which makes 8 numbers along `dp`.

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
# **Predict.** In the picture at the top, 8 × 2 (`dp` × `tp`) sends fewer bytes than 4 × 4. Is that so for every
# batch? At which batch are the two equal, if the width is 16 and the hidden width is 32?
#
# <details><summary>Answer</summary>
#
# No. Activations grow with the batch, and gradients do not, so 4 × 4 sends less if the batch is small. The two are
# equal at a batch of 64, as the lines below show.
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
# So far, the ranks were simulated. Four **processes** of this machine send the same bytes, over gloo, and get the same
# gradients:

# %%
simulated, processes = (
    tt.run(step, Mesh(dp=2, tp=2), *tensors, in_specs=SPECS,
           out_specs=[P(None, "tp"), P("tp")], on=where)
    for where in ("simulated", "processes"))
for out in (simulated, processes):
    print({axis: out.trace.bytes_sent(rank=0, axis=axis) for axis in ("tp", "dp")})
print(all(map(torch.allclose, simulated.value, processes.value)))

# %% [markdown]
# **The twin.** In JAX, you do not write the all-reduce over `dp`. JAX knows that all ranks along `dp` have the same
# `a` and `b`, so it adds up their gradients by itself. We only divide by the number of copies. The same bytes travel:

# %%
import jax
import jax.numpy as jnp
import tplab.jax as tj

def step_in_jax(x, a, b):
    def loss(x, a, b):
        z = tj.reduce_from(jnp.tanh(tj.copy_to(x, "tp") @ a) @ b, "tp")
        return (z**2).mean()

    dx, *grads = jax.grad(loss, (0, 1, 2))(x, a, b)
    return dx, *[grad / tj.axis_size("dp") for grad in grads]

arrays = [tensor.numpy(force=True) for tensor in tensors]
in_jax = tj.run(step_in_jax, Mesh(dp=2, tp=2), *arrays, in_specs=SPECS, out_specs=SPECS)
print({axis: in_jax.trace.bytes_sent(rank=0, axis=axis) for axis in ("tp", "dp")})
print([bool(jnp.allclose(one, two.numpy(), atol=1e-5))
       for one, two in zip(in_jax.value[1:], simulated.value)])

# %% [markdown]
# ## Turn the knob
#
# Here are the two layers at the size of a large language model, in bfloat16, and every way to put sixteen ranks on
# two axes. Change the batch, in tokens. Which mesh sends the least, and how does the answer change as the batch
# grows?

# %% tags=["opening-picture"]
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
knob("Five meshes", "tokens", batches, start=2**16, about=about, unit="B")

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
# should be last? We take the batch at which 4 × 4 and 8 × 2 send the same number of bytes, and model the time of
# their all-reduces for two nodes of eight H100s: from the data sheet, and as a forecast with each of two networks,
# InfiniBand NDR and the playbook's network ([lab 03](03_network_levels.ipynb)).

# %%
BATCH = 2 * HIDDEN

def milliseconds(mesh, axis, cluster):  # of both all-reduces along this axis
    split = BATCH * WIDTH // mesh.shape["dp"], WIDTH * HIDDEN // mesh.shape["tp"]
    elements = dict(zip(("tp", "dp"), split))[axis]
    nbytes, group = 2 * elements, mesh.group(0, axis)
    return 2e3 * cluster.collective_seconds("all_reduce", nbytes, group)

for mesh in (Mesh(dp=4, tp=4), Mesh(dp=8, tp=2), Mesh(tp=4, dp=4)):
    print(mesh)
    for name in H100S:
        cluster = cost.find(*name)
        tp, dp = (milliseconds(mesh, axis, cluster) for axis in ("tp", "dp"))
        print(f"    tp {tp:.2f} ms, dp {dp:.2f} ms: {cluster.kind_on(mesh.size)}")

# %% [markdown]
# The first mesh and the third differ only in the order of the axes. By the data sheet, the ranks wait 0.47 ms for their
# activations if `tp` is last, and 2.04 ms if it is first. In the forecast, they wait 0.67 ms if it is last. If it is first,
# they wait 1.52 ms with InfiniBand NDR, and 4.08 ms with the playbook's network.
#
# With `tp` first, `dp` is faster, but it gains only about half of what `tp` loses: at this batch it sends half as many bytes.
# The next matmul needs the activations at once, while gradients can travel during the backward pass. **So the axis that
# carries activations should be last.** This is why tensor parallelism rarely leaves the node.
#
# ## See it run
#
# Now each gradient is sent as soon as it is computed. The picture shows the slower order, `tp` first.

# %%
def overlapped(x, a, b):
    for tensor in (x, a, b):
        tensor.requires_grad_()
    flights = []
    def send(grad):
        flights.append(tt.start(tt.all_reduce, grad, "dp", op="mean"))
    a.register_hook(send)
    b.register_hook(send)
    z = tt.reduce_from(torch.tanh(tt.copy_to(x, "tp") @ a) @ b, "tp")
    z.square().mean().backward()
    return [flight.wait() for flight in flights]

SHAPES = (BATCH, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
traces = {}
for mesh in (Mesh(dp=4, tp=4), Mesh(tp=4, dp=4)):
    large = [torch.empty(*size, dtype=torch.bfloat16, device="meta") for size in SHAPES]
    options = {"in_specs": SPECS, "cluster": "h100", "device": "meta"}
    traces[mesh] = tt.run(overlapped, mesh, *large, **options).trace
    took = traces[mesh].makespan * 1e3
    print(f"{mesh}: a step takes {took:.2f} ms (modelled, data sheet)")
timeline(traces[Mesh(tp=4, dp=4)])

# %% [markdown]
# The matmuls take the same time on both meshes. The difference is the idle time during the two long all-reduces over
# `tp`, one in the forward and one in the backward pass. The two short all-reduces are those of the gradients over
# `dp`: on this mesh they stay inside a node, although they do not need its fast links.
#
# Equal bytes do not take equal time. In the list of times above, `tp` and `dp` together take 1.4 ms on 8 × 2 and 1.5
# ms on 4 × 4 by the data sheet, but 3.6 and 3.0 ms with the playbook's network.

# %% [markdown]
# ## A bug to repair
#
# A colleague averages gradients over the data-parallel ranks. On `Mesh(dp=16, tp=1)` all tests pass. Then you train on
# `Mesh(dp=8, tp=2)`. No error is raised, and with plain SGD the loss still falls, only more slowly.

# %%
def average(gradient):  # this rank's gradient   ->   its mean over "dp"
    world_size = tt.axis_size(("dp", "tp"))
    return tt.all_reduce(gradient, "dp") / world_size

# %%
from tplab.exercises.axes_and_nodes import check_average

check_average(average)

# %% [markdown]
# Fix `average`, run its cell, then run the check again. [DeepSpeed](https://github.com/deepspeedai/DeepSpeed/pull/5555)
# once had a bug of this kind: it divided by the size of a group that was too large, and gradient norms were a quarter
# of what they should be. With Adam, whose step hardly depends on the scale of gradients, you may never notice.
#
# ## Your turn: the best mesh
#
# Write `best_mesh`, which says how to put `ranks` ranks on two axes so that a rank sends the fewest bytes in a step of the
# two layers above. `dp` times `tp` is `ranks`; `dp` must divide the batch, and `tp` the hidden width.

# %%
def best_mesh(batch, width, hidden, ranks):  # ->   (dp, tp)
    ...

# %%
from tplab.exercises.axes_and_nodes import check_best_mesh

check_best_mesh(best_mesh)

# %% [markdown]
# ## On Monday
#
# | here | torch | Megatron-LM | JAX |
# |---|---|---|---|
# | `Mesh(dp=8, tp=2)` | `init_device_mesh("cuda", (8, 2), mesh_dim_names=("dp", "tp"))` | `--tensor-model-parallel-size 2` | `jax.make_mesh((8, 2), ("dp", "tp"))` |
# | `mesh.groups("tp")` | `device_mesh["tp"].get_group()` | `get_tensor_model_parallel_group()` | the axis name, in `shard_map` |
# | the last axis is inside a node | the order of ranks in `torchrun` | `tp` is innermost; `--use-tp-pp-dp-mapping` exchanges `dp` and `pp` | `mesh_utils.create_hybrid_device_mesh` |
#
# ## To take away
#
# - Activations travel along `tp` and grow with the batch; gradients travel along `dp` and do not. 8 × 2 and 4 × 4 send
#   the same at a batch of $2F$.
# - The axis whose traffic cannot be hidden belongs inside the node.
# - Divide by the size of the group that you summed over.
#
# **Sources.** Misha Laskin, [Sharding Large Models](https://www.mishalaskin.com/posts/tensor_parallel) (8 × 2 and 4 ×
# 4). Narayanan et al. 2021, [Efficient Large-Scale Language Model Training](https://arxiv.org/abs/2104.04473) (tensor
# parallelism inside the node).
#
# Next: [20 A sequence too long for one rank](20_long_sequence.ipynb), and a third thing to split: the tokens.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
