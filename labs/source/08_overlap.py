# %% [markdown]
# # 08 Overlap
#
# **How can a layer send its input around a ring and take hardly longer than its matmul?**
#
# Prerequisites: the ring of [lab 02](02_collectives.ipynb), and column-parallel and row-parallel
# layers ([lab 01](01_split_a_layer.ipynb)). Time: one hour.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/08_overlap.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/08_overlap.ipynb)
#
# ![A timeline of eight ranks. Each rank computes eight matmuls, and below seven of them a message is on its way.](images/08_overlap.png)
#
# *One linear layer on eight ranks of an H100 node. While a rank multiplies one piece of the input, the next piece is
# already on its way.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
from dataclasses import replace

import numpy as np
import torch
import tplab.torch as tt
from tplab import Mesh, P
from tplab.trace import overlap
from tplab.widgets import Bars, Row, knob, timeline

# %% [markdown]
# The input of the layer below is split by features, and its weight by output features. The times are **modelled** from
# the H100's data sheet, so sizes are enough: meta tensors have a shape but no numbers.

# %% tags=["opening-picture"]
FEATURES = P(None, "tp")  # [tokens, features]: each rank has some of the features

def layer(x, w):  # x [T, D/tp]   w [F/tp, D]   ->   [T, F/tp]
    return tt.all_gather_matmul(x, w, "tp")

def sizes_only(*shapes):
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]

SPECS = FEATURES, P("tp")

def on_h100(fn, *shapes, specs=SPECS, cluster="h100"):
    sizes = sizes_only(*shapes)
    return tt.run(fn, Mesh(tp=8), *sizes, in_specs=specs, cluster=cluster).trace

T, D, F = 8192, 8192, 32768
overlapped = on_h100(layer, (T, D), (F, D))
timeline(overlapped)

# %% [markdown]
# ## By hand: a matmul is a sum of matmuls
#
# Cut $X$ into columns and $W^T$ into rows, and multiply them piece by piece:
#
# $$X W^T = \sum_k X_k W_k^T$$
#
# You may add the terms in any order, for example in the order in which pieces arrive on a ring. On four ranks, rank 2
# has its own piece first, and then receives those of ranks 1, 0 and 3.

# %%
rng = np.random.default_rng(0)
X, W = rng.integers(-3, 4, (2, 8)), rng.integers(-3, 4, (4, 8))  # W [F, D], as in torch
terms = [X[:, 2 * k : 2 * k + 2] @ W[:, 2 * k : 2 * k + 2].T for k in range(4)]
assert np.array_equal(terms[2] + terms[1] + terms[0] + terms[3], X @ W.T)
print(X @ W.T)

# %% [markdown]
# ## Build it
#
# `start` begins a hop and returns a handle at once. `handle.wait()` is the line by which the piece must have arrived.
# Everything between the two can overlap with the message.

# %%
def gather_product(x, w):  # x [T, D/tp]   w [F/tp, D]   ->   all_gather(x) @ w.T
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    columns = w.chunk(R, 1)  # the columns of w for the features of rank 0, 1, ...
    piece, y = x, 0
    for k in range(R):  # the k-th piece comes from rank i - k
        handle = tt.start(tt.ring_shift, piece, "tp") if k < R - 1 else None
        y = y + piece @ columns[(i - k) % R].T
        piece = handle.wait() if handle else None
    return y

small = [torch.randn(*shape, dtype=torch.float64) for shape in ((6, 24), (48, 24))]
for mesh in (Mesh(tp=1), Mesh(tp=2), Mesh(tp=3), Mesh(tp=8)):
    ours = tt.run(gather_product, mesh, *small, in_specs=SPECS, out_specs=FEATURES)
    is_right = torch.allclose(ours.value, small[0] @ small[1].T)
    print(f"{mesh}:", "equal" if is_right else "off")

# %% [markdown]
# tplab's version is `all_gather_matmul`. It adds inside the matmul (`addmm`). Our `y +` is a separate operation that
# reads and writes the result once more.
#
# ## What is hidden
#
# Here is the same layer as one `all_gather`, followed by one matmul.

# %%
def blocking_layer(x, w):
    return tt.all_gather(x, "tp", -1) @ w.T

blocking = on_h100(blocking_layer, (T, D), (F, D))
timeline(blocking)

# %% [markdown]
# **Predict.** The picture at the top shows 596 µs for the overlapped layer. Here the `all_gather` takes 274 µs, and the
# matmul takes 561 µs (hover over them). Why is the overlapped layer 35 µs slower than the matmul alone?
#
# <details><summary>Answer</summary>
#
# It computes eight matmuls instead of one, so seven more have to be launched, at 5 µs each. All messages are hidden.
#
# </details>

# %%
for name, trace in [("blocking", blocking), ("overlapped", overlapped)]:
    sent = f"{trace.bytes_sent(rank=0):,} B sent by each rank"
    print(f"{name:10} {trace.makespan * 1e6:5.0f} µs, {sent}")
    print(f"{'':10} {overlap(trace)}")

# %% [markdown]
# Both layers send the same bytes. The overlapped one sends them while it computes. These times come from the chip's data
# sheet. The forecast `"h100-measured"`, which is fitted to measurements of H100 nodes, has slower messages and slower
# matmuls, so it promises a little less: 1.35 times as fast instead of 1.40.

# %%
for fn in (blocking_layer, layer):
    trace = on_h100(fn, (T, D), (F, D), cluster="h100-measured")
    print(f"{fn.__name__:15} {trace.makespan * 1e6:5.0f} µs, forecast")

# %% [markdown]
# In a whole training step the gain is smaller, because attention, norms and the other collectives take their time as well.
# PyTorch's team has [measured](https://github.com/pytorch/torchtitan/blob/main/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md)
# it with eight-way tensor parallelism in bfloat16: Llama 3.1 8B on 64 H100s became 1.10 times as fast, from 4,378 to
# 4,809 tokens per second and GPU, and 70B on 256 H100s 1.09 times.
#
# ## The other direction: a sum that travels
#
# A row-parallel layer ends with a `reduce_scatter`, and there the *sum* travels around the ring. The sum that will
# end up on rank $i$ starts on rank $i + 1$. Each rank on the way adds its own part, which it has computed while the
# sum was still coming.

# %%
def row_layer(x, w):  # x [T, D/tp]   w [F, D/tp]   ->   [T, F/tp]
    return tt.matmul_reduce_scatter(x, w, "tp")

def blocking_row_layer(x, w):
    return tt.reduce_scatter(x @ w.T, "tp", -1)

for fn in (blocking_row_layer, row_layer):
    trace = on_h100(fn, (T, F), (D, F), specs=(FEATURES, FEATURES))
    hidden = overlap(trace).share_of_possible
    print(f"{fn.__name__:18} {trace.makespan * 1e6:5.0f} µs, {hidden:.0%} hidden")

# %% [markdown]
# All of it is hidden, but the layer takes 140 µs longer than the one that gathers. When a sum arrives, a separate
# operation has to read it, add to it and write it. In the layer that gathers, the matmul itself adds.
#
# The two layers are a pair. The backward pass of an `all_gather` is a `reduce_scatter`, so the backward pass of an
# overlapped gather contains an overlapped `reduce_scatter`. In addition, $X$ travels around the ring once more for the
# gradient of the weight, because no rank has kept all of it:

# %%
def backward(forward):
    def program(x, w):
        forward(x.requires_grad_(), w.requires_grad_()).sum().backward()

    return program

both_ways = on_h100(backward(layer), (T, D), (F, D))
blocked = on_h100(backward(blocking_layer), (T, D), (F, D))
print(f"hidden: {overlap(both_ways).share_of_possible:.0%}")
ratio = both_ways.bytes_sent() / blocked.bytes_sent()
print(f"bytes: {ratio:.1f} × those of the blocking layer")

# %% [markdown]
# ## Tokens instead of features
#
# With sequence parallelism ([lab 05](05_block_memory.ipynb)), the input is split by *tokens*, and each rank has whole
# rows of $X$. This is the layer that torch and Megatron overlap. A piece that arrives then gives finished rows of the
# result, and nothing has to be added:

# %%
def gather_tokens(x, w):  # x [T/tp, D]   w [F/tp, D]   ->   [T, F/tp]
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    y = torch.empty(R * len(x), len(w), dtype=x.dtype, device=x.device)
    rows, piece = y.chunk(R), x
    for k in range(R):
        handle = tt.start(tt.ring_shift, piece, "tp") if k < R - 1 else None
        torch.mm(piece, w.T, out=rows[(i - k) % R])
        piece = handle.wait() if handle else None
    return y

by_tokens = P("tp"), P("tp")
ours = tt.run(gather_tokens, Mesh(tp=3), *small, in_specs=by_tokens, out_specs=FEATURES)
print("equal" if torch.allclose(ours.value, small[0] @ small[1].T) else "off")

for tokens in (8192, 256):
    print(f"{tokens:,} tokens")
    for fn in (blocking_layer, layer, gather_tokens):
        specs = by_tokens if fn is gather_tokens else SPECS
        trace = on_h100(fn, (tokens, D), (F, D), specs=specs)
        print(f"    {fn.__name__:15} {trace.makespan * 1e6:4.0f} µs")

# %% [markdown]
# With many tokens, the two overlapped layers take equally long. With few tokens, cutting them up is expensive: each of
# the eight small matmuls has to read the rank's whole weight from memory. If the features are cut up instead, each
# matmul reads only an eighth of it.

# %% [markdown]
# ## When does it pay?
#
# Eight small matmuls cost more than one large one, because each of them has to be launched and reads and writes the
# result. Take fewer tokens. When does the overlapped layer become slower? Guess first.

# %%
from tplab.cost import find, gather_seconds, pays_from

H100 = find("h100")

def bars(tokens):
    times = gather_seconds(tokens, D, F, 8, H100)
    launch = H100.chip.launch  # 5 µs per operation: an assumption
    rest = "computing and waiting"
    one = {"launches": launch, rest: times.blocking - launch}
    eight = {"launches": 8 * launch, rest: times.overlapped - 8 * launch}
    ratio = times.blocking / times.overlapped
    rows = [Row("blocking", one), Row("overlapped", eight, f"{ratio:.2f} × as fast")]
    return Bars(rows, "It pays." if ratio > 1 else "It does not pay.")

options = {2**k: bars(2**k) for k in range(3, 15)}
about = f"D = {D:,}, F = {F:,}, modelled: H100 data sheet"
knob("One layer on eight ranks", "tokens", options, start=8192, about=about)

# %%
for microseconds in (5, 2, 1, 0):
    chip = replace(H100.chip, launch=microseconds * 1e-6)
    least = pays_from(D, F, 8, replace(H100, chip=chip))
    print(f"at {microseconds} µs per launch: from {least} tokens on" if least > 1 else
          f"at {microseconds} µs per launch: always")  # fmt: skip
print(f"by the forecast: from {pays_from(D, F, 8, find('h100-measured'))} tokens on")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# At the 5 µs per launch that we assume, the overlapped layer is slower below 745 tokens. If the GPU always has
# operations waiting, or runs a CUDA graph, launches cost nearly nothing. Then overlapping always pays for this layer,
# even with few tokens: a hop takes 1.9 µs, and hides behind 2.5 µs of reading an eighth of the weight.
#
# In the forecast, a launch takes 2.4 µs and a hop at least 6.4 µs, so it pays from 171 tokens.
#
# For a narrower input, many tokens only make it worse. What is hidden grows with $D$, and the additional passes over
# the result grow with $F$. For $D = 2048$ and $F = 32768$, even if launches cost nothing, the overlapped layer takes
# 1.4 times as long with 4,096 tokens, and 1.5 times with 65,536.
#
# </details>
#
# The model leaves something out: messages also use part of the chip. On a GPU they take some multiprocessors, unless
# the copy engines move them. Here are smaller layers, **measured** on two processes of your machine, whose cores also
# copy the messages. Each picture is the fastest of six runs. Compare shapes, not lengths: the same matmul can take twice as
# long in another run.

# %%
def measured(fn):
    x, w = torch.randn(1024, 1024), torch.randn(2048, 1024)
    options = {"in_specs": SPECS, "on": "processes"}
    traces = [tt.run(fn, Mesh(tp=2), x, w, **options).trace for _ in range(6)]
    return min(traces, key=lambda trace: trace.makespan)

timeline(measured(blocking_layer))

# %%
timeline(measured(layer))

# %% [markdown]
# ## The same in JAX
#
# Only the import changes. These are the messages in the two programs that XLA compiled:

# %%
import tplab.jax as tj

def layer_in_jax(x, w):
    return tj.all_gather_matmul(x, w, "tp")

def blocking_layer_in_jax(x, w):
    return tj.all_gather(x, "tp", -1) @ w.T

x, w = (np.float32(array) for array in small)
for fn in (blocking_layer_in_jax, layer_in_jax):
    found = tj.collectives_in(fn, Mesh(tp=4), x, w, in_specs=SPECS)
    kinds = [one.op for one in found]
    print(fn.__name__, {kind: kinds.count(kind) for kind in kinds})

# %% [markdown]
# **What truly differs.** There is no handle. `ring_shift` returns the next piece, and the matmul does not depend on
# it, so the compiler *may* move the piece while the matmul runs. XLA's scheduler decides whether it does: on
# GPUs and TPUs it splits the message into a start and a done, and moves work in between. The CPU devices of this
# notebook do not overlap anything. If you draw the JAX trace on a modelled cluster, the overlap in it comes from
# tplab's model, so it shows what the data flow permits, and not what XLA did.

# %% [markdown]
# ## What it costs
#
# For the layer that gathers, on $R$ ranks, where all of $X$ has $n$ bytes:
#
# | | blocking | overlapped |
# |---|---|---|
# | bytes that a rank sends, forward | $\frac{R-1}{R}\,n$ | $\frac{R-1}{R}\,n$ |
# | forward and backward | $2\,\frac{R-1}{R}\,n$ | $3\,\frac{R-1}{R}\,n$ |
# | matmuls, forward | 1 | $R$, each $1/R$ as large |
# | time, forward | `all_gather` + matmul | about $R$ times a small matmul or a hop, whichever is longer |
# | kept for the backward pass | all of $X$ | this rank's piece of $X$ |
#
# The last row is a second gain: the overlapped layer keeps only $1/R$ of $X$. It gathers the rest again in the backward
# pass, which is why it sends more.
#
# There is one more cost, and no timeline shows it. A single matmul adds in float32 and rounds its result to bfloat16 once.
# The overlapped layer rounds after each of its eight matmuls:

# %%
torch.manual_seed(0)
rounded = [torch.randn(*shape).bfloat16() for shape in ((64, 2048), (512, 2048))]
right = rounded[0].double() @ rounded[1].double().T
for fn in (blocking_layer, layer):
    y = tt.run(fn, Mesh(tp=8), *rounded, in_specs=SPECS, out_specs=FEATURES).value
    print(f"{fn.__name__:15} relative error {(y - right).norm() / right.norm():.2%}")

# %% [markdown]
# On eight ranks the rounding error doubles, and with more ranks it grows further. For one bfloat16 layer among many
# that is usually harmless. Cutting up the tokens avoids it, because there every row of the result comes from one
# matmul.

# %% [markdown]
# ## A bug to repair
#
# This layer sends its pieces in both directions at once, which pays where a rank has a link to each neighbour, as on a
# TPU. It was overlapped as well, until someone tidied it up. Its numbers are right, so no test noticed. This does
# happen: in [torchtitan 1613](https://github.com/pytorch/torchtitan/issues/1613), training ran, but the overlap did not
# show up. Before you change anything, say in one sentence which line makes a rank wait, and what the rank could compute
# meanwhile. Then fix `tidied`, run its cell, and run the check.

# %%
def tidied(x, w):
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    columns = w.chunk(R, 1)
    up = down = x
    y = x @ columns[i].T
    for k in range(1, R // 2 + 1):
        going_up = tt.start(tt.ring_shift, up, "tp")
        going_down = tt.start(tt.ring_shift, down, "tp", -1)
        up, down = going_up.wait(), going_down.wait()
        y = y + up @ columns[(i - k) % R].T
        if 2 * k < R:  # else both have brought the same piece
            y = y + down @ columns[(i + k) % R].T
    return y

# %%
from tplab.exercises.overlap import check_gather_product

check_gather_product(tidied)

# %% [markdown]
# ## Your turn: the sum that travels
#
# Write the overlapped form of `reduce_scatter(x @ w.T)`. Two questions lead to it. The sum that ends on rank $i$
# starts on rank $i + 1$, so with which rows of `w` must rank $j$ begin? And what can a rank compute while a sum is on
# its way to it? (Both checks of this lab expect torch functions.)

# %%
def product_scatter(x, w):  # x [T, D/tp]   w [F, D/tp]   ->   y [T, F/tp]
    ...

# %%
from tplab.exercises.overlap import check_product_scatter

check_product_scatter(product_scatter)

# %% [markdown]
# ## On Monday
#
# | here | torch | Megatron-LM | JAX |
# |---|---|---|---|
# | `all_gather_matmul` | `torch.ops.symm_mem.fused_all_gather_matmul` | `--tp-comm-overlap`, in Transformer Engine | "collective matmul", which XLA can make from an `all_gather` and a matmul |
# | `matmul_reduce_scatter` | `torch.ops.symm_mem.fused_matmul_reduce_scatter` | the same option | the same |
# | `start`, `wait` | `async_op=True`, `work.wait()` | the same | the data flow, and XLA's scheduler |
# | `AsyncLinear`, the layer | async tensor parallelism, with `torch.compile` | `te.Linear` | `TPAsyncDense` in Lippe's tutorial |
#
# ## To take away
#
# - A matmul over split features is a sum of matmuls. Add them in the order in which the pieces arrive.
# - Overlap saves no bytes. It pays if the hidden hops take longer than the additional launches and passes over the
#   result: with a wide input, and many tokens or cheap launches. Our layer took 596 µs instead of 835, hardly more
#   than the 561 of its matmul. Rounding more often costs some precision in bfloat16.
# - Check overlap in a trace. The numbers stay right when it silently stops.
#
# **Sources.** Wang et al. 2023, [Overlap communication with dependent
# computation](https://dl.acm.org/doi/10.1145/3567955.3567959). Phillip Lippe, [Asynchronous linear layers with tensor
# parallelism](https://uvadlc-notebooks.readthedocs.io/en/latest/tutorial_notebooks/scaling/JAX/tensor_parallel_async.html),
# from which this lab grew. PyTorch, [Symmetric
# memory](https://docs.pytorch.org/docs/main/distributed/symmetric_memory.html).
#
# Next: [09 A Hugging Face GPT-2](09_hugging_face_gpt2.ipynb), and how to shard a model that someone else wrote.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
