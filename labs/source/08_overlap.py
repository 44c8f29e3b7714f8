# %% [markdown]
# # 08 Overlap
#
# **How can a layer send its input around the ring, and take hardly longer for it?**
#
# Time: one hour. Prerequisites: the ring of [lab 02](02_collectives.ipynb), the layers of [lab 04](04_megatron_block.ipynb).
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/08_overlap.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/08_overlap.ipynb)
#
# ![A timeline of eight ranks. On each, eight products stand in a row; under seven of them a message travels.](images/08_overlap.png)
#
# *One linear layer on eight ranks of an H100 node. While a piece of the input is multiplied, the next piece is on its
# way.*

# %%
import subprocess
import sys

# On Colab, tplab joins the torch, jax and ipywidgets that are there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("no tplab: see above, then restart the runtime and try again")

# %%
from functools import partial

import numpy as np
import torch
from tplab import Mesh, P
from tplab.cost import gather_seconds, pays_from
from tplab.trace import overlap
from tplab.torch import AsyncLinear, all_gather, all_gather_matmul, axis_index, axis_size, matmul_reduce_scatter
from tplab.torch import reduce_scatter, ring_all_gather, ring_reduce_scatter, ring_shift, run, start
from tplab.widgets import Bars, Row, knob, timeline

FEATURES = P(None, "tp")  # [tokens, features]: each rank has some of the features

# %% tags=["opening-picture"]
def layer(x, w):  # x [T, D/tp]   w [F/tp, D]   ->   [T, F/tp]
    return all_gather_matmul(x, w, "tp")

def sizes_only(tokens, *weight):  # tensors without numbers: on the modelled clock, sizes are all that counts
    shapes = [(tokens, weight[1]), weight]
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]

T, D, F = 8192, 8192, 32768
on_h100 = {"in_specs": (FEATURES, P("tp")), "cluster": "h100"}
overlapped = run(layer, Mesh(tp=8), *sizes_only(T, F, D), **on_h100)
timeline(overlapped.trace)

# %% [markdown]
# ## By hand: a product is a sum of products
#
# Cut $X$ by columns and $W^T$ by rows, and multiply piece by piece:
#
# $$X W^T = \sum_k X_k W_k^T$$
#
# The terms may be added in any order: in the order, say, in which pieces come round a ring. To rank 2 of four, passed on
# from rank to rank, come its own, then those of ranks 1, 0 and 3.

# %%
rng = np.random.default_rng(0)
X, W = rng.integers(-3, 4, (2, 8)), rng.integers(-3, 4, (4, 8))  # W [F, D], as torch stores it
terms = [X[:, 2 * k : 2 * k + 2] @ W[:, 2 * k : 2 * k + 2].T for k in range(4)]
assert np.array_equal(sum(terms), X @ W.T)
assert np.array_equal(terms[2] + terms[1] + terms[0] + terms[3], X @ W.T)  # as they come to rank 2
print(X @ W.T)

# %% [markdown]
# ## In which order do pieces come?
#
# Eight ranks in two rings of four; rank $r$ has the number $r$. "up" passes pieces to the next rank, "down" to the one
# before, "both" half of them each way at once, and "split" half of *every* piece each way. (Lists are in ring order,
# whatever came first.)
#
# **Predict.** Four ranks, "both": how many hops until everybody has everything?
#
# <details><summary>Answer</summary>
#
# Two: one piece from each side at the first hop, the last one at the second, when one direction is unused. So it is in
# every ring of an even number of ranks. "split" keeps both busy, with twice the messages, and needs three hops.
#
# </details>

# %%
grid = Mesh(data=2, model=4)
pairs = torch.stack([torch.arange(8.0), torch.arange(8.0) + 0.5], 1)  # two numbers a rank, so that they can be halved
arrived = {}
for direction in ("up", "down", "both", "split"):
    ring = partial(ring_all_gather, axis="model", direction=direction)
    out = run(ring, grid, pairs, in_specs=P(("data", "model")))
    arrived[direction] = [[piece[0, 0].item() for piece in pieces] for pieces in out.per_rank]
    print(f"{direction:5} {out.trace.num_steps} hops, rank 0:", *(f"{number:g}" for number in arrived[direction][0]))
assert arrived["up"][5] == [5, 4, 7, 6] and arrived["down"][5] == [5, 6, 7, 4]
assert arrived["both"] == arrived["up"]
assert arrived["split"][0] == [0, 3, 2, 1, 0.5, 1.5, 2.5, 3.5]

# %% [markdown]
# ## Build it
#
# `start` begins a hop and gives a handle; `handle.wait()` is where the piece must be there. What stands between the two
# overlaps.

# %%
def gather_product(x, w):  # x [T, D/tp]   w [F/tp, D]   ->   all_gather(x) @ w.T
    R, i = axis_size("tp"), axis_index("tp")
    columns = w.chunk(R, 1)  # of w: those for the features of rank 0, 1, ...
    piece, y = x, 0
    for k in range(R):  # piece k comes from rank i - k
        flight = start(ring_shift, piece, "tp") if k < R - 1 else None
        y = y + piece @ columns[(i - k) % R].T
        piece = flight.wait() if flight else None
    return y

x, w = torch.randn(6, 24, dtype=torch.float64), torch.randn(48, 24, dtype=torch.float64)
for mesh in (Mesh(tp=1), Mesh(tp=2), Mesh(tp=3), Mesh(tp=8)):
    specs = {"in_specs": (FEATURES, P("tp")), "out_specs": FEATURES}
    ours, theirs = (run(fn, mesh, x, w, **specs).value for fn in (gather_product, layer))
    assert torch.allclose(ours, x @ w.T, rtol=0, atol=1e-12)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
print("equal to the plain product")

# %% [markdown]
# ## What is hidden
#
# The same layer as one all_gather and one product, on the same modelled machine.
#
# **Predict.** The all_gather takes 275 µs, the product 561. What will the overlapped layer take?
#
# <details><summary>Answer</summary>
#
# Nearly what the product takes: 596 µs. The 35 µs more are what it costs to launch seven more products, 5 µs each.
#
# </details>

# %%
def blocking_layer(x, w):
    return all_gather(x, "tp", -1) @ w.T

blocking = run(blocking_layer, Mesh(tp=8), *sizes_only(T, F, D), **on_h100)
timeline(blocking.trace)

# %%
for name, trace in [("blocking", blocking.trace), ("overlapped", overlapped.trace)]:
    print(f"{name:10} {trace.makespan * 1e6:5.0f} µs   {overlap(trace)}")
assert overlap(blocking.trace).share == 0
assert overlap(overlapped.trace).share_of_possible > 0.9
assert overlapped.trace.bytes_sent() == blocking.trace.bytes_sent()

# %% [markdown]
# Not a byte less is sent. It is sent while something else is done. (What can be hidden: the smaller of a rank's
# communication and its computing.)
#
# ## The other direction: a sum that travels
#
# A row-parallel layer ends in a reduce_scatter: a *sum* goes round. Rank $i + 1$ starts the sum that will end on rank $i$;
# each rank on the way adds its product, computed while the sum is still coming.
#
# With the table of lab 02, up and down. (`parts[k]` is the k-th to join a sum: turned round, other numbers meet. A layer
# chooses its parts by receiver, and both directions give the same sums.)

# %%
tables = np.random.default_rng(42).integers(0, 10, (2, 4, 4)).astype("float32").reshape(32, 1)
for direction in ("up", "down"):
    ring = partial(ring_reduce_scatter, axis="tp", direction=direction)
    ends = run(ring, Mesh(dp=2, tp=4), tables, in_specs=P(("dp", "tp")))
    print(direction, [int(total) for total in ends.per_rank])
    assert [int(t) for t in ends.per_rank] == {
        "up": [15, 21, 23, 20, 19, 28, 15, 14], "down": [11, 18, 27, 23, 16, 22, 18, 20]
    }[direction]

# %%
def row_layer(x, w):  # x [T, D/tp]   w [F, D/tp]   ->   [T, F/tp]
    return matmul_reduce_scatter(x, w, "tp")

def blocking_row_layer(x, w):
    return reduce_scatter(x @ w.T, "tp", -1)

specs = (FEATURES, P(None, "tp"))
value = run(row_layer, Mesh(tp=4), x, w, in_specs=specs, out_specs=FEATURES).value
assert torch.allclose(value, x @ w.T, rtol=0, atol=1e-12)
for fn in (blocking_row_layer, row_layer):
    trace = run(fn, Mesh(tp=8), *sizes_only(T, D, F), in_specs=specs, cluster="h100").trace
    print(f"{fn.__name__:18} {trace.makespan * 1e6:5.0f} µs   {overlap(trace)}")
assert overlap(trace).share_of_possible > 0.9

# %% [markdown]
# All is hidden, and yet it takes 140 µs more than the gather: each sum that arrives is added by an operation of its own,
# which reads and writes it. In the gather the product itself adds.
#
# ## Backward
#
# The two are a pair. The gradient of an all_gather is a reduce_scatter, so the gradient of an overlapped gather is an
# overlapped scatter; for the weight's gradient $X$ goes round once more, since nobody has kept it whole. Both overlap:

# %%
def step(x, w):
    x, w = x.requires_grad_(), w.requires_grad_()
    all_gather_matmul(x, w, "tp").sum().backward()
    return x.grad, w.grad

dx, dw = run(step, Mesh(tp=4), x, w, in_specs=(FEATURES, P("tp")), out_specs=(FEATURES, P("tp"))).value
assert torch.allclose(dx, torch.ones(6, 48, dtype=torch.float64) @ w) and torch.allclose(dw, x.sum(0).expand(48, 24))
def blocking_step(x, w):
    blocking_layer(x.requires_grad_(), w.requires_grad_()).sum().backward()

both_ways, blocked = (run(fn, Mesh(tp=8), *sizes_only(T, F, D), **on_h100).trace for fn in (step, blocking_step))
print(overlap(both_ways))
print(f"{both_ways.bytes_sent() / blocked.bytes_sent():.1f} times the bytes of the blocking layer")
assert overlap(both_ways).share_of_possible > 0.9
assert 2 * both_ways.bytes_sent() == 3 * blocked.bytes_sent()  # x, dx, and x once more

# %% [markdown]
# ## Turn the knob: when does it not pay?
#
# Eight small products cost more than one large one: each is launched by itself, and adds to what is there. Take fewer
# tokens: where does the overlapped layer become the slower one? Guess first.

# %%
def bars(tokens):
    times = gather_seconds(tokens, 8192, 32768, 8, "h100")
    note = f"{times.blocking / times.overlapped:.2f} x as fast"
    rows = [Row("blocking", {"the layer": times.blocking}), Row("overlapped", {"the layer": times.overlapped}, note)]
    better = "The overlapped layer is quicker." if times.overlapped < times.blocking else "Overlapping does not pay."
    return Bars(rows, better)

knob("One layer on eight ranks", "tokens", {2**k: bars(2**k) for k in range(3, 15)}, start=8192, about="modelled · H100")

# %%
least = pays_from(8192, 32768, 8, "h100")
print("it pays from", least, "tokens on")
assert gather_seconds(least, 8192, 32768, 8, "h100").overlapped < gather_seconds(least, 8192, 32768, 8, "h100").blocking
fewer = gather_seconds(least // 2, 8192, 32768, 8, "h100")
assert fewer.overlapped >= fewer.blocking
predicted = gather_seconds(T, D, F, 8, "h100")  # and the formula is what the clock of the run says
assert np.isclose(predicted.overlapped, overlapped.trace.makespan, rtol=1e-9)
assert np.isclose(predicted.blocking, blocking.trace.makespan, rtol=1e-9)

# %% [markdown]
# ## A layer
#
# `AsyncLinear` is this as a module, in three modes: "gather", "scatter", and "none", where each rank multiplies what it has
# and nothing is sent. It keeps its weight in the order in which pieces arrive, so that no columns are looked up: rank
# $i$'s block $k$ has the columns for rank $i - k$. To the weight of a blocking layer that is a permutation, which
# `async_weight` and `blocking_weight` apply:

# %%
from tplab.rings import async_weight, blocking_weight

whole = torch.arange(16).reshape(4, 4)  # [F, D]; four ranks, one row and one column each
stacked = async_weight(whole, 4, "gather")  # [rank i, place k, F/R, D/R]
print(stacked[:, :, 0, 0])
assert all(stacked[i, k, 0, 0] == whole[i, (i - k) % 4] for i in range(4) for k in range(4))
assert torch.equal(blocking_weight(stacked, "gather"), whole)
scattered = async_weight(whole, 4, "scatter")
assert all(scattered[j, k, 0, 0] == whole[(j - 1 - k) % 4, j] for j in range(4) for k in range(4))

def made():
    return AsyncLinear(24, 48, "tp", mode="gather")(torch.ones(6, 24 // axis_size("tp"))).shape

print(run(made, Mesh(tp=4)).per_rank[0])

# %% [markdown]
# ## A classifier of such layers
#
# Norm, gather in, activation, scatter out, residual: a block whose residual stream stays sharded by features. (The norm
# sums one number a token over the ranks.) `ParallelClassifier` has three of them, as in the tutorial that this lab grew
# from: 784 features in, 512 wide, ten classes. A batch of noise with random labels, to be learnt by heart in 17 steps of
# AdamW; with `overlap=True` and `False`, from one seed:

# %%
from tplab.torch import ParallelClassifier

def train(images, labels, overlapping):
    model = ParallelClassifier(784, 512, 10, "tp", overlap=overlapping)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(17):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, (model(images).argmax(1) == labels).float().mean().item()

images = torch.randn(128, 784, generator=torch.Generator().manual_seed(42))
labels = torch.randint(0, 10, (128,), generator=torch.Generator().manual_seed(43))
results = {way: run(train, Mesh(tp=4), images, labels, way, seed=42).per_rank[0] for way in (True, False)}
apart = max(abs(a - b) for a, b in zip(results[True][0], results[False][0]))
print("accuracy", results[True][1], results[False][1], "losses agree:", apart < 1e-4)
assert results[True][1] == results[False][1] == 1.0
assert apart < 1e-4  # float32: the same sums, in another order

# %% [markdown]
# ## The same in JAX
#
# The import is the switch.

# %%
import tplab.jax as tj

def layer_in_jax(x, w):
    return tj.all_gather_matmul(x, w, "tp")

def blocking_layer_in_jax(x, w):
    return tj.all_gather(x, "tp", -1) @ w.T

small = np.float32(x), np.float32(w)
specs = {"in_specs": (FEATURES, P("tp")), "out_specs": FEATURES}
in_jax = tj.run(layer_in_jax, Mesh(tp=4), *small, **specs)
assert np.allclose(in_jax.value, x @ w.T, atol=1e-4)
for fn in (blocking_layer_in_jax, layer_in_jax):
    kinds = [one.op for one in tj.collectives_in(fn, Mesh(tp=4), *small, in_specs=specs["in_specs"])]
    print(fn.__name__, {kind: kinds.count(kind) for kind in kinds})

# %% [markdown]
# What differs: there is no handle. `ring_shift` returns the next piece, and nothing yet depends on it; that it may travel
# while a product runs follows from the data flow. Whether it does is for XLA to decide. On GPUs and TPUs it has a
# scheduler for that; on the CPU devices of this notebook a copy in memory is all there is to hide. What can be shown is
# that the same messages travel:

# %%
jax_trace = tj.run(layer_in_jax, Mesh(tp=4), *small, cluster="h100", **specs).trace
torch_trace = run(gather_product, Mesh(tp=4), *map(torch.tensor, small), cluster="h100", **specs).trace
def hops(trace):
    return sorted((e.step, e.rank, e.peer, e.bytes) for e in trace.events if e.kind == "send")

assert hops(jax_trace) == hops(torch_trace)
print(len(hops(jax_trace)), "messages, the same in both")

# %% [markdown]
# ## What it costs
#
# The layer with a gather, $R$ ranks, $n$ bytes in all of $X$:
#
# | | blocking | overlapped |
# |---|---|---|
# | bytes a rank sends, forward | $\frac{R-1}{R}\,n$ | $\frac{R-1}{R}\,n$ |
# | forward and backward | $2\,\frac{R-1}{R}\,n$ | $3\,\frac{R-1}{R}\,n$ |
# | products | 1 | $R$, each $1/R$ as large |
# | time, forward | all_gather + product | about max(product, hop) $R$ times |
# | kept for backward | the whole $X$ | this rank's piece of $X$ |

# %%
whole_x = T * D * 2  # bytes
products = [trace.select(rank=0, kind="compute") for trace in (blocking.trace, overlapped.trace)]
assert products[0].column("flops").sum() == 2 * T * D * F // 8
for trace in (blocking.trace, overlapped.trace):
    assert trace.bytes_sent(rank=0) == 7 * whole_x // 8
print([len(trace) for trace in products], "operations on rank 0")

# %% [markdown]
# ## A bug to repair
#
# This layer was overlapped too, until somebody tidied it up. Its numbers are right, so no test noticed. (It happens: in
# [torchtitan 1613](https://github.com/pytorch/torchtitan/issues/1613) a model trained, and its overlap was not there.)

# %%
def tidied(x, w):
    R, i = axis_size("tp"), axis_index("tp")
    columns = w.chunk(R, 1)
    piece, y = x, 0
    for k in range(R):
        y = y + piece @ columns[(i - k) % R].T
        if k < R - 1:
            piece = start(ring_shift, piece, "tp").wait()
    return y

# %%
from tplab.exercises.overlap import check_gather_product

check_gather_product(tidied)

# %% [markdown]
# ## Your turn: the sum that travels
#
# Write the overlapped `reduce_scatter(x @ w.T)`. Two questions lead to it. The sum that ends on rank $i$ starts on rank
# $i + 1$: so which rows of `w` must rank $j$ begin with? And what can a rank compute while a sum is on its way to it?

# %%
def product_scatter(x, w):  # x [T, D/tp]   w [F, D/tp]   ->   y [T, F/tp]
    ...

# %%
from tplab.exercises.overlap import check_product_scatter

check_product_scatter(product_scatter)

# %% [markdown]
# ## To take away
#
# - A product over sharded features is a sum of products; add them in the order in which pieces arrive.
# - Overlap saves no bytes. It pays where a hidden hop took longer than one more launch and one more pass over the result:
#   with many tokens.
# - Look for it in a trace: numbers stay right when it silently stops. (Times here are modelled. On a real GPU a message
#   also takes a little of the chip.)

# %% [markdown]
# **Sources.** Wang et al. 2023, [Overlap communication with dependent
# computation](https://dl.acm.org/doi/10.1145/3567955.3567959). Phillip Lippe, [Asynchronous linear layers with tensor
# parallelism](https://uvadlc-notebooks.readthedocs.io/en/latest/tutorial_notebooks/scaling/JAX/tensor_parallel_async.html)
# (`async_gather`, `async_scatter`, `TPAsyncDense`, `TPNorm`; it says that a split gather gives 2N - 1 pieces: there are 2N).
#
# Next: [09 A Hugging Face GPT-2](09_hugging_face_gpt2.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
