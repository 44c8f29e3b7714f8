# %% [markdown]
# # 01 Split a layer
#
# **Why does a row-parallel layer need an all-reduce, when a column-parallel layer does not?**
#
# Prerequisites: matmuls, the chain rule, and the all-reduce of [lab 00](00_first_look.ipynb). Time: an hour and a
# quarter.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/01_split_a_layer.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/01_split_a_layer.ipynb)
#
# ![Four ranks, each with its own term of Z. The terms are added up around a ring, and the sums are passed on.](images/01_split_a_layer.png)
#
# *Two layers split over four ranks. Each rank has computed one term of the result, Z. The all-reduce adds up each entry
# on its way around the ring, and then passes on the sums.*

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
from tplab import Mesh, P
from tplab.widgets import animate, matrices, shards, timeline

# %% [markdown]
# ## By hand: two ways to split a matrix
#
# A layer is a matmul, `Y = X A`. Two ranks will share it, and neither should hold all of `A`.

# %%
X = np.array([[1.0, 2], [3, 4]])
A = np.array([[1.0, 0, 2, 3], [0, 1, -1, -2]])
matrices({"X": X, "A": A, "Y = X A": X @ A})

# %% [markdown]
# **By columns.** Rank 0 holds the first two columns of `A`, and rank 1 holds the other two. Column 0 of `A` produces
# column 0 of `Y` and nothing else, so each rank ends up with two *finished* columns.

# %%
left, right = X @ A[:, :2], X @ A[:, 2:]
matrices({"rank 0": left, "rank 1": right}, "Columns of A give columns of Y")

# %% [markdown]
# **By rows.** Rank 0 holds row 0 of `A`, and rank 1 holds row 1. Row 0 is only ever multiplied by column 0 of `X`, so
# each rank needs one column of `X`. The result on each rank is as large as `Y`, but it is not a piece of `Y`. Look at
# the upper right corner, $1 \cdot 3 + 2 \cdot (-2)$. Rank 0 knows the 3, rank 1 knows the −4, and no rank knows the −1.

# %%
first, second = X[:, :1] @ A[:1], X[:, 1:] @ A[1:]
terms = {"rank 0": first, "rank 1": second, "their sum": first + second}
matrices(terms, "Rows of A give terms of Y")

# %% [markdown]
# This answers the question at the top. In $Y_{ij} = \sum_k X_{ik} A_{kj}$, splitting the columns of `A` means splitting
# $j$, and every sum stays on one rank. Splitting the rows means splitting $k$. Then every sum is divided between the
# ranks, and they have to add up their terms: an all-reduce.
#
# `P` says how a tensor is split. It has one entry per dim: the name of a mesh axis, or `None` for a dim that is not
# split. Dims without an entry are not split either, so `P()` describes a tensor that every rank has whole. Hover over a
# rank.

# %%
shards(Mesh(tp=4), x=((8, 16), P()), a=((16, 12), P(None, "tp")))

# %%
shards(Mesh(tp=4), x=((8, 16), P(None, "tp")), a=((16, 12), P("tp", None)))

# %% [markdown]
# ## Two layers, one all-reduce
#
# **Predict.** After the matmul comes an activation, say `relu`. If `A` is split by rows, rank 0 has the term 3 of the
# upper right entry, and rank 1 has the term −4. Can each rank apply `relu` to its own term, before the terms are added?
#
# <details><summary>Answer</summary>
#
# No. `relu(3 - 4)` is 0, but `relu(3) + relu(-4)` is 3. A function that is not linear must see the finished sum. When
# `A` is split by columns, every entry is finished.
#
# </details>
#
# So split the first matrix by columns and the second by rows. Rank $i$ then has the columns of $Y$ that its rows of $B$
# need, and nothing is sent between the two layers:
#
# $$Y_i = \mathrm{relu}(X A_i) \qquad Z_i = Y_i B_i \qquad Z = \sum_i Z_i$$

# %%
def relu(y):
    return np.maximum(y, 0)

B = np.array([[1.0, 1], [2, 1], [1, 0], [0, 1]])
Z = relu(X @ A) @ B
Z_0 = relu(X @ A[:, :2]) @ B[:2]
Z_1 = relu(X @ A[:, 2:]) @ B[2:]
matrices({"rank 0: Z_0": Z_0, "rank 1: Z_1": Z_1, "Z_0 + Z_1": Z_0 + Z_1, "Z": Z})

# %% [markdown]
# ## Build it
#
# Here is one rank's program, with the shapes of what it holds. `in_specs` says how the arguments are split.
# `out_specs=P()` says that all ranks return the same tensor, and `run` checks it.

# %%
def mlp(x, a, b):  # x [N, D]   a [D, F/tp]   b [F/tp, D]
    y = torch.relu(x @ a)  # [N, F/tp]  finished columns of Y
    z = y @ b  # [N, D]  this rank's term of Z
    return tt.all_reduce(z, "tp")  # [N, D]  the sum of all terms, on every rank

SPECS = (P(), P(None, "tp"), P("tp", None))
rng = np.random.default_rng(0)
x, a, b = rng.normal(size=(5, 3)), rng.normal(size=(3, 12)), rng.normal(size=(12, 3))
for ranks in (1, 2, 3, 4, 6, 12):  # powers of two alone would hide some mistakes
    out = tt.run(mlp, Mesh(tp=ranks), x, a, b, in_specs=SPECS, out_specs=P())
    difference = np.abs(out.value.numpy() - relu(x @ a) @ b).max()
    print(f"{Mesh(tp=ranks)}: {'equal' if difference < 1e-12 else 'not equal'}")

# %% [markdown]
# `ring_all_reduce` does the same in single hops. Follow one entry: it collects a term at each stop, and three more hops
# bring the sum to every rank.

# %% tags=["opening-picture"]
def mlp_on_a_ring(x, a, b):
    z = torch.relu(x @ a) @ b
    return tt.ring_all_reduce(z, "tp")

out = tt.run(mlp_on_a_ring, Mesh(tp=4), X, A, B, in_specs=SPECS, out_specs=P())
animate(out.trace)

# %% [markdown]
# What if you forget the all-reduce? Then each rank returns its own term, and `run` raises an error:

# %%
from tplab.errors import ReplicationError

def without_the_sum(x, a, b):
    return torch.relu(x @ a) @ b

try:
    tt.run(without_the_sum, Mesh(tp=2), X, A, B, in_specs=SPECS, out_specs=P())
except ReplicationError as error:
    print(error)

# %% [markdown]
# ## Backward
#
# Take the loss $\sum (Z - T)^2$ with a target $T$, and $Y = \tanh U$ with $U = XA$. (Unlike relu, tanh is smooth. Its
# derivative is $1 - Y^2$.) The chain rule gives ($\circ$ multiplies entry by entry):
#
# $$dZ = 2\,(Z - T) \qquad dB = Y^\top dZ \qquad dU = (dZ\, B^\top) \circ (1 - Y^2)$$
# $$dA = X^\top dU \qquad dX = dU\, A^\top$$
#
# The previous layer needs `dX` to learn. To test the formulas, we nudge each entry and see how the loss changes.

# %%
from tplab.exercises.split_a_layer import finite_differences

X, A, B = np.random.default_rng(50).normal(size=(3, 2, 2))
T = np.array([[-0.5, 0.5], [-0.5, 0.5]])

def loss(X, A, B):
    return ((np.tanh(X @ A) @ B - T) ** 2).sum()

def gradients(X, A, B, T):
    Y = np.tanh(X @ A)
    dZ = 2 * (Y @ B - T)
    dU = (dZ @ B.T) * (1 - Y**2)
    return {"dX": dU @ A.T, "dA": X.T @ dU, "dB": Y.T @ dZ}

grads = gradients(X, A, B, T)
slopes = {
    "dX": finite_differences(lambda X: loss(X, A, B), X),
    "dA": finite_differences(lambda A: loss(X, A, B), A),
    "dB": finite_differences(lambda B: loss(X, A, B), B),
}
for name, slope in slopes.items():
    print(name, "agrees" if np.allclose(grads[name], slope) else "differs")

# %% [markdown]
# **Predict.** Rank $i$ holds $A_i$ (columns) and $B_i$ (rows), and has $Y_i$. Every rank has `X`, `T` and the finished
# `Z`. Each rank needs `dZ`, its rows of `dB`, its columns of `dA`, and `dX`. Which of these can it compute alone?
#
# <details><summary>Answer</summary>
#
# All but `dX`. It computes `dZ` from `Z` and `T`. Then $dB_i = Y_i^\top dZ$ is the rank's rows of `dB`, and
# $dA_i = X^\top dU_i$ is its columns of `dA`. But $dX = \sum_i dU_i A_i^\top$ has one term from every rank.
#
# </details>

# %%
dZ = 2 * (np.tanh(X @ A) @ B - T)
dX_i, dA_i, dB_i = [], [], []
for i in (0, 1):
    A_i, B_i = A[:, i : i + 1], B[i : i + 1]
    Y_i = np.tanh(X @ A_i)
    dU_i = (dZ @ B_i.T) * (1 - Y_i**2)
    dX_i.append(dU_i @ A_i.T)
    dA_i.append(X.T @ dU_i)
    dB_i.append(Y_i.T @ dZ)

print("dA, joined:", np.allclose(np.concatenate(dA_i, axis=1), grads["dA"]))
print("dB, joined:", np.allclose(np.concatenate(dB_i, axis=0), grads["dB"]))
terms = {"rank 0's term": dX_i[0], "rank 1's term": dX_i[1], "added": sum(dX_i)}
matrices({**terms, "right": grads["dX"]}, "dX")

# %% [markdown]
# ## f and g
#
# The forward pass adds up where the divided work *ends*. The backward pass adds up where it *begins*, because the
# gradient comes out there. Megatron-LM calls the two operations $f$ and $g$:
#
# | | forward | backward |
# |---|---|---|
# | $f$, `copy_to` | nothing | `all_reduce` |
# | $g$, `reduce_from` | `all_reduce` | nothing |
#
# Why does $g$ do nothing in the backward pass? Every rank computes the same loss, so it already has all of $dZ$, and
# another all-reduce would count it once per rank. In the program you write $f$ and $g$, and autograd does the rest. (In
# torch, `reduce_from` is another name for `tt.all_reduce`, which passes the gradient on unchanged.)

# %%
def step(x, a, b, target, enter=tt.copy_to):
    for tensor in (x, a, b):
        tensor.requires_grad_()
    y = torch.tanh(enter(x, "tp") @ a)  # f
    z = tt.reduce_from(y @ b, "tp")  # g
    ((z - target) ** 2).sum().backward()
    return x.grad, a.grad, b.grad

TWO, ALL = Mesh(tp=2), (*SPECS, P())  # the specs of x, a, b and the target
in_torch = tt.run(step, TWO, X, A, B, T, in_specs=ALL, out_specs=SPECS)
for name, grad in zip(("dX", "dA", "dB"), in_torch.value):
    is_right = np.allclose(grad, grads[name], rtol=0, atol=1e-12)
    print(name, "right" if is_right else "wrong")
for event in in_torch.trace.select(rank=0, kind="collective").events:
    print(f"{event.phase}: {event.op}, {list(event.shape)}")

# %% [markdown]
# If you forget $f$, no error is raised, and `dA` and `dB` are still right. But the *previous* layer receives only a
# part of its gradient, a different one on each rank:

# %%
def step_without_f(x, a, b, target):
    return step(x, a, b, target, enter=lambda x, axis: x)

per_rank = tt.run(step_without_f, TWO, X, A, B, T, in_specs=ALL).per_rank
parts = [dx for dx, da, db in per_rank]
shown = {f"rank {rank}, without f": part for rank, part in enumerate(parts)}
matrices({**shown, "right": grads["dX"]}, "dX")

# %% [markdown]
# ## The same in JAX
#
# This program has no `copy_to`, and yet its `dX` is right. Why?

# %%
import jax
import jax.numpy as jnp
import tplab.jax as tj

def step_in_jax(x, a, b, target):
    def loss(x, a, b):
        z = tj.reduce_from(jnp.tanh(x @ a) @ b, "tp")
        return ((z - target) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(x, a, b)

in_jax = tj.run(step_in_jax, TWO, X, A, B, T, in_specs=ALL, out_specs=SPECS)
for name, grad in zip(("dX", "dA", "dB"), in_jax.value):
    is_right = np.allclose(grad, grads[name], rtol=1e-5, atol=1e-5)  # float32
    print(name, "right" if is_right else "wrong")

# %% [markdown]
# JAX's types record along which axes a value may differ from rank to rank. `x` is the same on all ranks, and `a` is
# not. Where the two meet, JAX converts `x` to a value that may differ. This conversion is $f$: its backward pass is an
# all-reduce. So JAX runs the same two all-reduces as torch. `collectives_in` lists them in the program that XLA
# compiled:

# %%
tj.collectives_in(step_in_jax, TWO, X, A, B, T, in_specs=ALL, out_specs=SPECS)

# %% [markdown]
# ## What it costs
#
# Take $N$ tokens, width $D$, hidden width $F$ and $R$ ranks. Then each rank
#
# - holds $2DF/R$ weights,
# - does $4NDF/R$ operations in its two matmuls,
# - sends $2\frac{R-1}{R}ND$ elements forward (`Z`), and the same number backward (`dX`).
#
# With a `cluster`, times are **modelled**, so they are the same on every machine. In `"h100"` they come from the data
# sheet: peak rates, plus 5 µs for each launch and the latency of each message. Real GPUs do not reach these rates.
# `"h100-measured"` is a **forecast** from what others have measured. Here are four ranks of a node:

# %%
from tplab.cost import find

R, size = 4, 4  # ranks; bytes per float32
sizes = tokens, width, hidden = 1024, 1024, 4096
shapes = (tokens, width), (width, hidden), (hidden, width)
large = [torch.randn(*shape) for shape in shapes]
options = {"in_specs": SPECS, "out_specs": P()}
on_h100 = tt.run(mlp, Mesh(tp=R), *large, **options, cluster="h100").trace
computed = on_h100.select(rank=0, op="mm").column("flops").sum()
sent = on_h100.bytes_sent(rank=0)
assert computed == 4 * tokens * width * hidden // R
assert sent == 2 * (R - 1) * tokens * width * size // R
print(f"per rank: {computed:,} operations, {sent:,} bytes sent,")
time, waits = on_h100.makespan * 1e6, on_h100.idle_share()[0]
print(f"{time:.1f} µs, of which it waits {waits:.0%}")
for name in ("h100", "h100-measured"):
    alone = find(name).collective_seconds("all_reduce", tokens * width * size, ranks=R)
    print(f"the all-reduce alone: {alone * 1e6:.1f} µs on {name}")
timeline(on_h100)

# %% [markdown]
# The authors of [aiconfigurator](https://github.com/ai-dynamo/aiconfigurator) measured NCCL's all-reduce of these 4 MiB
# on four H100s: 42.2 µs, while the data sheet promises 25.4.
#
# The all-reduce begins when nothing is left to compute. It is **exposed**: every rank waits for it. [Lab
# 08](08_overlap.ipynb) shows how to hide it.
#
# Now the computing is **measured** on your machine, and only the messages are modelled:

# %%
tt.run(mlp, Mesh(tp=4), *large, **options, clock="measured")  # to warm up
timeline(tt.run(mlp, Mesh(tp=4), *large, **options, clock="measured").trace)

# %% [markdown]
# Real computing never takes exactly the same time on all ranks, and the all-reduce has to wait for the slowest.
#
# When are eight ranks worth having? Change the hidden width. Then set `TOKENS` to 256 and run the cell again.

# %%
from tplab.widgets import Bars, Row, knob

TOKENS, WIDTH = 4096, 4096

def seconds(ranks, hidden, cluster):
    chip, mine = cluster.chip, hidden // ranks
    up = chip.matmul_seconds(TOKENS, mine, WIDTH, "bfloat16")
    moved = 2 * TOKENS * mine * 2  # each entry is read and written, with 2 bytes
    activation = chip.seconds(TOKENS * mine, moved, "bfloat16")
    down = chip.matmul_seconds(TOKENS, WIDTH, mine, "bfloat16")
    reduce = cluster.collective_seconds("all_reduce", TOKENS * WIDTH * 2, ranks)
    return {"computing": up + activation + down, "all-reduce": reduce}

def rows_of(hidden, cluster):
    rows = [Row("1 rank", seconds(1, hidden, cluster))]
    for n in (2, 4, 8):
        parts = seconds(n, hidden, cluster)
        faster = rows[0].total / sum(parts.values())
        rows.append(Row(f"{n} ranks", parts, f"{faster:.1f} × as fast"))
    return rows

def bars(hidden):
    rows = rows_of(hidden, find("h100-measured"))
    *_, sheet = rows_of(hidden, find("h100"))
    share = rows[-1].parts["all-reduce"] / rows[-1].total
    sentence = f"On 8 ranks the all-reduce takes {share:.0%} of the time."
    return Bars(rows, f"{sentence} By the data sheet, they are {sheet.note}.")

widths = {hidden: bars(hidden) for hidden in (2**n for n in range(10, 17))}
kind = find("h100-measured").label
about = f"{TOKENS:,} tokens, width {WIDTH:,}, bfloat16, H100 node: {kind}"
knob("Two layers on more ranks", "hidden width", widths, start=4096, about=about)

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# A wider hidden layer makes the computing longer, but not the all-reduce, so eight ranks gain more. With 256 tokens
# they are slower than one up to a width of 4,096, because latencies and launches take most of the time. With many
# tokens, only $F$ and the hardware matter. By its data sheet, an H100 does 2,198 bfloat16 operations in the time that
# it takes to send one byte. With 2 bytes per element, all-reduce and matmuls then take the same time at $F = (R - 1)
# \cdot 2198$, about 15,000 on eight ranks. Surprisingly, the forecast for 4,096 tokens agrees: real matmuls miss the
# data sheet by about as much as real messages do.
#
# </details>

# %% [markdown]
# ## A bug to repair
#
# This backward pass follows a [tutorial](https://www.mishalaskin.com/posts/tensor_parallel). It runs, but one line is
# wrong. (`all_gather` gives every rank all columns of `y`. You may leave out `dX`, as it does.)

# %%
def backward(x, a, b, target):  # x [N, D]   a [D, F/tp]   b [F/tp, K]   target [N, K]
    y = torch.tanh(x @ a)
    z = tt.all_reduce(y @ b, "tp")
    dz = 2 * (z - tt.all_gather(y, "tp", dim=1))
    db = y.T @ dz
    da = x.T @ ((dz @ b.T) * (1 - y**2))
    return da, db

specs = (*SPECS, P())
split = tt.run(backward, Mesh(tp=2), X, A, B, T, in_specs=specs, out_specs=SPECS[1:])
unsplit = tt.run(backward, Mesh(tp=1), X, A, B, T, in_specs=specs, out_specs=SPECS[1:])
same = all(torch.allclose(one, other) for one, other in zip(split.value, unsplit.value))
print("the same gradients on one rank and on two:", same)

# %% [markdown]
# Both have the same mistake, so they agree. The check nudges every weight and watches the loss. Fix `backward` above,
# run its cell, and then this one.

# %%
from tplab.exercises.split_a_layer import check_backward

check_backward(backward)

# %% [markdown]
# ## Your turn
#
# **A bias, added once.** Write a row-parallel layer in torch, `x @ w + bias`. Each rank holds some rows of `w`, all of
# `x` and all of the bias. The check also compares the gradients of `w` and of the bias, on every rank.

# %%
def row_linear(x, w, bias):  # x [N, D]   w [D/tp, K]   bias [K]   ->   [N, K]
    ...

# %%
from tplab.exercises.split_a_layer import check_row_linear

check_row_linear(row_linear)

# %% [markdown]
# **A gated layer.** Many language models add a third matrix, $C$, to these two layers ([Shazeer
# 2020](https://arxiv.org/abs/2002.05202)):
#
# $$Z = (\mathrm{silu}(X A) \circ X C)\, B$$
#
# Split it over `tp`, in torch, with as few messages as you can. (`torch.nn.functional.silu` is the activation.) The
# check compares all gradients.

# %%
def gated(x, a, c, b):  # x [N, D]   a, c [D, F/tp]   b [F/tp, D]   ->   [N, D]
    ...

# %%
from tplab.exercises.split_a_layer import check_gated

check_gated(gated)

# %% [markdown]
# ## On Monday
#
# | here | Megatron-LM | torch DTensor | JAX |
# |---|---|---|---|
# | split by columns | `ColumnParallelLinear` | `ColwiseParallel` | `P(None, "tp")` |
# | split by rows | `RowParallelLinear` | `RowwiseParallel` | `P("tp", None)` |
# | $f$, `copy_to` | `copy_to_tensor_model_parallel_region` | done by `DTensor` | done by JAX's types |
# | $g$, `reduce_from` | `reduce_from_tensor_model_parallel_region` | done by `DTensor` | `lax.psum` |
#
# Without `DTensor` you write $f$ and $g$ yourself. Autograd ignores `dist.all_reduce`, which works in place. The
# all-reduce of `torch.distributed.nn.functional` adds up *again* in the backward pass: used as $g$, it makes every
# gradient before it $R$ times too large.
#
# ## To take away
#
# - Columns of a matrix give finished columns of the result. Rows give terms, and terms need an all-reduce.
# - Columns first, then rows: each pair of layers needs one `all_reduce` forward ($g$, of `Z`) and one backward ($f$, of
#   `dX`).
# - The all-reduce is exposed. Splitting pays when there are enough tokens and the hidden width is large.
#
# **Sources.** Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053) ($f$, $g$, columns then rows).
# Misha Laskin, [Sharding Large Models with Tensor Parallelism](https://www.mishalaskin.com/posts/tensor_parallel)
# (the 2 × 2 example). The measured all-reduce is from aiconfigurator, commit 095f58a, Apache-2.0.
#
# Next: [02 Collectives](02_collectives.ipynb), and what each of them costs.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
