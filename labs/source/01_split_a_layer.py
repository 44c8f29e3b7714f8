# %% [markdown]
# # 01 Split a layer
#
# **Why does a row-parallel layer need a sum, and a column-parallel one none?**
#
# One hour. Know first: matrix products, the chain rule, and [lab 00](00_first_look.ipynb).
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/01_split_a_layer.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/01_split_a_layer.ipynb)
#
# ![Four ranks, each with its own term of Z. Entry by entry the terms are added up round a ring, and the sums handed to all.](images/01_split_a_layer.png)
#
# *Two layers on four ranks. Each rank has worked out one term of the result. Now the terms travel: every entry is
# added up on its way round the ring, and then the finished sums go round.*

# %%
import subprocess
import sys

# On Colab, tplab joins the torch, jax and ipywidgets that are there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("no tplab: see above, then restart the runtime and try again")

# %%
import numpy as np
import torch
from tplab import Mesh, P
from tplab.torch import all_gather, all_reduce, axis_index, axis_size, ring_all_reduce, run
from tplab.widgets import animate, matrices, shards, timeline

# %% [markdown]
# ## By hand: two ways to cut a matrix
#
# A layer is a product, `Y = X A`. These numbers are small enough to check in your head. Two ranks are to share the
# work, and neither should have to hold all of `A`.

# %%
X = np.array([[1.0, 2], [3, 4]])
A = np.array([[1.0, 0, 2, 1], [0, 1, 1, 3]])
matrices({"X": X, "A": A, "Y = X A": X @ A})

# %% [markdown]
# **By columns.** Rank 0 takes the first two columns of `A`, rank 1 the others. Column 0 of `A` makes column 0 of `Y`
# and touches no other, so each rank ends with two *finished* columns.

# %%
left, right = X @ A[:, :2], X @ A[:, 2:]
assert (np.hstack([left, right]) == X @ A).all()
matrices({"rank 0": left, "rank 1": right}, "Columns of A give columns of Y")

# %% [markdown]
# **By rows.** Rank 0 takes row 0 of `A`, rank 1 row 1. Row 0 is only ever multiplied with column 0 of `X`, so each
# rank needs one column of `X`. But what it gets is as large as `Y`, and is not a piece of it. Take the upper right
# corner:
#
# $$Y_{03} = 1 \cdot 1 + 2 \cdot 3 = 1 + 6 = 7$$
#
# Rank 0 knows the 1, rank 1 the 6, and nobody the 7.

# %%
first, second = X[:, :1] @ A[:1], X[:, 1:] @ A[1:]
assert (first + second == X @ A).all()
matrices({"rank 0": first, "rank 1": second, "their sum": first + second}, "Rows of A give terms of Y")

# %% [markdown]
# That is the answer to the question at the top. An entry of `Y` is a sum over the *rows* of `A`:
#
# $$Y_{ij} = \sum_k X_{ik} A_{kj}$$
#
# Cut along `j`, the columns, and every sum stays on one rank. Cut along `k`, the rows, and every sum is cut in two:
# somebody has to finish it.
#
# `P` says which dim is split over which axis of the mesh: one entry per dim, `None` where every rank has all of it. `P()` is
# a tensor that every rank has whole. `shards` draws it, here for a larger product. Point at a rank.

# %%
shards(Mesh(tp=4), x=((8, 16), P()), a=((16, 12), P(None, "tp")))

# %%
shards(Mesh(tp=4), x=((8, 16), P(None, "tp")), a=((16, 12), P("tp", None)))

# %% [markdown]
# ## Two layers, one sum
#
# **Predict.** After the product comes an activation, say `relu`. Two ranks have split `A` by rows, and for some entry
# of `Y` rank 0 has the term 3 and rank 1 the term -2. Can each apply `relu` to its own term, and the terms be added
# later?
#
# <details><summary>Answer</summary>
#
# No. `relu(3 - 2)` is 1, and `relu(3) + relu(-2)` is 3. A function that is not linear must see the finished sum.
# Split by columns, every entry is finished, and `relu` can be applied where it lies.
#
# </details>

# %%
def relu(y):
    return np.maximum(y, 0)

assert relu(3 - 2) == 1
assert relu(3) + relu(-2) == 3

# %% [markdown]
# So the first matrix is cut by columns, the activation is applied on the spot, and the second matrix is cut by rows.
# Rank $i$ then has exactly those columns of $Y$ that its rows of $B$ ask for, and nothing needs to be sent in
# between:
#
# $$Y_i = f(X A_i) \qquad Z_i = Y_i B_i \qquad Z = \sum_i Z_i$$

# %%
B = np.array([[1.0, 1], [2, 1], [1, 0], [0, 1]])
Z = relu(X @ A) @ B
Z_0 = relu(X @ A[:, :2]) @ B[:2]
Z_1 = relu(X @ A[:, 2:]) @ B[2:]
assert (Z_0 + Z_1 == Z).all()
matrices({"rank 0: Z_0": Z_0, "rank 1: Z_1": Z_1, "Z_0 + Z_1": Z_0 + Z_1})

# %% [markdown]
# ## Build it
#
# One rank's program, with the shape of what *it* holds. `in_specs` cuts the arguments, `out_specs=P()` says that all
# ranks return the same, and `run` checks that they do.

# %%
def mlp(x, a, b):  # x [B, D]   a [D, F/tp]   b [F/tp, D]
    y = torch.relu(x @ a)  # [B, F/tp]  finished columns of Y
    z = y @ b  # [B, D]  this rank's term of Z
    return all_reduce(z, "tp")  # [B, D]  the sum of all terms, on every rank

SPECS = (P(), P(None, "tp"), P("tp", None))
out = run(mlp, Mesh(tp=2), X, A, B, in_specs=SPECS, out_specs=P())
assert (out.value.numpy() == Z).all()

# %% [markdown]
# One example on two ranks proves little. Other numbers, other sizes, more ranks, three and six among them, because
# powers of two hide mistakes:

# %%
rng = np.random.default_rng(0)
x, a, b = rng.normal(size=(5, 3)), rng.normal(size=(3, 12)), rng.normal(size=(12, 3))
for ranks in (1, 2, 3, 4, 6, 12):
    out = run(mlp, Mesh(tp=ranks), x, a, b, in_specs=SPECS, out_specs=P())
    assert np.allclose(out.value, relu(x @ a) @ b, rtol=0, atol=1e-12)
    print(Mesh(tp=ranks), "equal to the plain product")

# %% [markdown]
# `all_reduce` is a single call here. To see inside it, use the ring that tplab builds from single hops. Four ranks,
# the numbers from above: each rank has its term of `Z`, four entries. Watch one entry. It starts on one rank, gathers
# a term at each stop, and is finished after three hops; three more hops take it to everybody.

# %% tags=["opening-picture"]
def mlp_on_a_ring(x, a, b):
    return ring_all_reduce(torch.relu(x @ a) @ b, "tp")

out = run(mlp_on_a_ring, Mesh(tp=4), X, A, B, in_specs=SPECS, out_specs=P())
assert (out.value.numpy() == Z).all()
animate(out.trace)

# %% [markdown]
# And without the sum? Every rank returns its own term, so `out_specs=P()` is not true, and `run` says so:

# %%
from tplab.errors import ReplicationError

try:
    run(lambda x, a, b: torch.relu(x @ a) @ b, Mesh(tp=2), X, A, B, in_specs=SPECS, out_specs=P())
except ReplicationError as error:
    print(error)

# %% [markdown]
# ## To gather or not to gather
#
# Libraries give their column layer a switch, often called `gather_output`, and their row layer another,
# `input_is_parallel`. Gathered, every layer takes and gives whole tensors and can be used anywhere. Left apart, two
# layers fit into each other, and `Y` is never whole on any rank.

# %%
def column(x, a, gather_output):
    y = torch.relu(x @ a)
    return all_gather(y, "tp", dim=1) if gather_output else y

def row(y, b, input_is_parallel):
    if not input_is_parallel:  # keep the columns that belong to this rank's rows of b
        y = y.chunk(axis_size("tp"), dim=1)[axis_index("tp")]
    return all_reduce(y @ b, "tp")

def gathered(x, a, b):
    return row(column(x, a, gather_output=True), b, input_is_parallel=False)

def apart(x, a, b):
    return row(column(x, a, gather_output=False), b, input_is_parallel=True)

# %% [markdown]
# Both are right. One of them gathers columns, only to throw all but its own away again. Gather where somebody needs
# the whole output, and only there.

# %%
for program in (gathered, apart):
    out = run(program, Mesh(tp=2), X, A, B, in_specs=SPECS, out_specs=P())
    assert (out.value.numpy() == Z).all()
    gather, total = out.trace.bytes_sent(rank=0, op="all_gather"), out.trace.bytes_sent(rank=0)
    print(f"{program.__name__:>8}: each rank sends {total} bytes, {gather} of them to gather Y")
    assert gather == (X @ A[:, :2]).nbytes * (program is gathered)  # its own half of Y, to the other rank

# %% [markdown]
# ## How deep does one sum reach?
#
# Some overviews say that an MLP of any depth needs no more than the sum at its end. Stack three pairs of layers, and
# try.

# %%
def deep(x, pairs, sum_every_pair):
    for a, b in pairs:
        x = torch.tanh(x @ a) @ b
        if sum_every_pair:
            x = all_reduce(x, "tp")
    return x if sum_every_pair else all_reduce(x, "tp")

pairs = [(rng.normal(size=(3, 12)), rng.normal(size=(12, 3))) for _ in range(3)]
plain = x
for a_k, b_k in pairs:
    plain = np.tanh(plain @ a_k) @ b_k

for sum_every_pair in (True, False):
    specs = (P(), [SPECS[1:]] * 3, None)  # for x, for each pair, and None for what is no tensor
    out = run(deep, Mesh(tp=4), x, pairs, sum_every_pair, in_specs=specs, out_specs=P())
    sums = len(out.trace.select(rank=0, op="all_reduce", kind="collective"))
    right = np.allclose(out.value, plain)
    print(f"{len(pairs)} pairs of layers, all_reduce {sums} x: {'right' if right else 'wrong'}")
    assert right == sum_every_pair

# %% [markdown]
# After the first pair a rank holds a *term* of `Z`. The next pair applies `tanh` to it, and `tanh` must see the
# finished sum: the same reason as before. One reduction a column/row pair, however deep the network is.
#
# ## Backward, in one piece
#
# With a loss $L = \sum (Z - T)^2$ and $f = \tanh$, whose derivative is $1 - Y^2$, the chain rule goes from right to
# left:
#
# $$dZ = 2\,(Z - T) \qquad dB = Y^\top dZ \qquad dU = (dZ\, B^\top) \circ (1 - Y^2)$$
# $$dA = X^\top dU \qquad dX = dU\, A^\top$$
#
# `dX` is what the layer before needs in order to learn. From here on `X`, `A` and `B` are new numbers.

# %%
X, A, B = np.random.default_rng(50).normal(size=(3, 2, 2))
T = np.array([[-0.5, 0.5], [-0.5, 0.5]])

def loss(X, A, B):
    return ((np.tanh(X @ A) @ B - T) ** 2).sum()

def gradients(X, A, B, T):
    Y = np.tanh(X @ A)
    dZ = 2 * (Y @ B - T)
    dU = (dZ @ B.T) * (1 - Y**2)
    return {"dX": dU @ A.T, "dA": X.T @ dU, "dB": Y.T @ dZ}

# %% [markdown]
# A formula is a claim. Here is a test that knows nothing of it: nudge one entry up and down, and see how the loss
# changes.

# %%
import inspect

from tplab.exercises.split_a_layer import finite_differences

print(inspect.getsource(finite_differences))
grads = gradients(X, A, B, T)
assert np.allclose(grads["dX"], finite_differences(lambda X: loss(X, A, B), X))
assert np.allclose(grads["dA"], finite_differences(lambda A: loss(X, A, B), A))
assert np.allclose(grads["dB"], finite_differences(lambda B: loss(X, A, B), B))

# %% [markdown]
# ## Backward, split
#
# **Predict.** Rank $i$ holds $A_i$ (columns) and $B_i$ (rows), and has computed $Y_i$. `X`, `T` and, after the sum,
# `Z` are the same everywhere. Which of `dZ`, `dB`, `dA`, `dX` can it work out alone, and how do the pieces make the
# whole?
#
# <details><summary>Answer</summary>
#
# `dZ`: everybody for itself; no rank owns the loss. Then $dB_i = Y_i^\top dZ$, rows of `dB`, and $dA_i = X^\top
# dU_i$, columns of `dA`: each gradient is cut as its matrix is. But $dX = dU A^\top = \sum_i dU_i A_i^\top$ has a
# term from every rank. It needs a sum.
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

assert np.allclose(np.concatenate(dA_i, axis=1), grads["dA"])
assert np.allclose(np.concatenate(dB_i, axis=0), grads["dB"])
assert np.allclose(sum(dX_i), grads["dX"])
matrices({"rank 0's term of dX": dX_i[0], "rank 1's term": dX_i[1], "dX": sum(dX_i)})

# %% [markdown]
# ## f and g
#
# Forward, the split costs a sum where the ranks' work *ends*. Backward, it costs one where their work *begins*,
# because there the gradients come out. Megatron-LM gave the two places names, and so does tplab:
#
# | | forward | backward |
# |---|---|---|
# | $f$, `copy_to` | nothing | `all_reduce` |
# | $g$, `reduce_from` | `all_reduce` | nothing |
#
# Why nothing behind $g$? Every rank goes on to compute the same loss, so each has all of $dZ$ already; adding would count
# it twice. Put $f$ where a whole tensor enters divided work and $g$ where the result comes out, and autograd does the rest.

# %%
from tplab.torch import copy_to, reduce_from

def step(x, a, b, target):
    for tensor in (x, a, b):
        tensor.requires_grad_()
    y = torch.tanh(copy_to(x, "tp") @ a)  # f
    z = reduce_from(y @ b, "tp")  # g
    ((z - target) ** 2).sum().backward()
    return x.grad, a.grad, b.grad

in_torch = run(step, Mesh(tp=2), X, A, B, T, in_specs=(*SPECS, P()), out_specs=SPECS)
for name, grad in zip(("dX", "dA", "dB"), in_torch.value):
    assert np.allclose(grad, grads[name], rtol=0, atol=1e-12)
animate(in_torch.trace)

# %% [markdown]
# Forget $f$, and no error is raised. `a` and `b` even get the right gradients. But the layer *before* this one is told
# a part of its gradient, on each rank another part.

# %%
def step_without_f(x, a, b, target):
    for tensor in (x, a, b):
        tensor.requires_grad_()
    z = reduce_from(torch.tanh(x @ a) @ b, "tp")
    ((z - target) ** 2).sum().backward()
    return x.grad, a.grad, b.grad

per_rank = run(step_without_f, Mesh(tp=2), X, A, B, T, in_specs=(*SPECS, P())).per_rank
parts, a_grads, b_grads = zip(*per_rank)
assert np.allclose(np.hstack(a_grads), grads["dA"]) and np.allclose(np.vstack(b_grads), grads["dB"])
assert not np.allclose(parts[0], grads["dX"])
assert np.allclose(parts[0] + parts[1], grads["dX"])
matrices({"rank 0, without f": parts[0], "rank 1, without f": parts[1], "right": grads["dX"]}, "dX")

# %% [markdown]
# ## The same in JAX
#
# One import changes, `torch.tanh` becomes `jnp.tanh`, and `jax.grad` takes the place of `.backward()`. There is no
# `copy_to` in this program, and yet `dX` is right. Why?

# %%
import jax
import jax.numpy as jnp
from tplab.jax import reduce_from, run

def step_in_jax(x, a, b, target):
    def loss(x, a, b):
        z = reduce_from(jnp.tanh(x @ a) @ b, "tp")
        return ((z - target) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(x, a, b)

in_jax = run(step_in_jax, Mesh(tp=2), X, A, B, T, in_specs=(*SPECS, P()), out_specs=SPECS)
for name, grad in zip(("dX", "dA", "dB"), in_jax.value):
    assert np.allclose(grad, grads[name], rtol=1e-5, atol=1e-5)

# %% [markdown]
# JAX's types know along which axes a value may differ from rank to rank. `x` is the same on all of them, `a` is not.
# Where they meet, JAX turns `x` into a value that may differ. That is $f$; the transpose of this step is a sum. So
# the messages are the same as in torch, two sums, of `Z` and of `dX`. (JAX computes in float32 here, torch in
# float64.)

# %%
for out in (in_torch, in_jax):
    sums = out.trace.select(rank=0, kind="collective").events
    assert [(event.op, event.shape) for event in sums] == [("all_reduce", (2, 2)), ("all_reduce", (2, 2))]
assert in_torch.trace.bytes_sent() == 2 * in_jax.trace.bytes_sent()

# %% [markdown]
# By the same types JAX checks `out_specs` before anything runs. torch has only numbers: there, `run` compares them
# afterwards. Here again is the layer without its sum:

# %%
try:
    run(lambda x, a, b: jnp.tanh(x @ a) @ b, Mesh(tp=2), X, A, B, in_specs=SPECS, out_specs=P())
except ReplicationError as error:
    print(error)

# %% [markdown]
# One more thing differs. torch ran your lines in their order. JAX handed XLA one program, which it may rearrange:
# `collectives_in` lists what it made of it.

# %%
from tplab.jax import collectives_in

collectives_in(step_in_jax, Mesh(tp=2), X, A, B, T, in_specs=(*SPECS, P()), out_specs=SPECS)

# %% [markdown]
# ## Split the data instead
#
# There is a simpler way to use many ranks: each has *all* weights and a slice of the batch. Sixteen samples of three
# features on eight ranks are two a rank. Forward, nothing is sent.

# %%
from tplab.torch import all_reduce, copy_to, reduce_from, run

samples, w = rng.normal(size=(16, 3)), rng.normal(size=3)
out = run(lambda x, w: x @ w, Mesh(dp=8), samples, w, in_specs=(P("dp"), P()), out_specs=P("dp"))
assert np.allclose(out.value, samples @ w)
assert torch.stack(out.per_rank).shape == (8, 2)
assert out.trace.bytes_sent() == 0

# %% [markdown]
# And the reverse: the data everywhere, the model split. That takes something to split. A 2 × 2 matrix over eight
# ranks, as one published version of this example has it, cannot be:

# %%
from tplab.errors import ShapeError

try:
    run(lambda x, a: x @ a, Mesh(tp=8), X, A, in_specs=(P(), P(None, "tp")))
except ShapeError as error:
    print(error)

# %% [markdown]
# ## Both at once
#
# A mesh with two axes: along `dp` the batch is split, along `tp` the weights. Every rank has one block of rows and
# one of columns. Rank 0 and rank 4 hold the same piece of `a`, and see different samples.

# %%
shards(Mesh(dp=2, tp=4), x=((16, 8), P("dp", None)), a=((8, 16), P(None, "tp")))

# %% [markdown]
# Two kinds of sum now, over two axes. Along `tp` as before. Along `dp` each gradient, because the loss is a sum over
# samples, and each rank has seen only some of them. That is all there is to a data × tensor grid.

# %%
def grid_step(x, a, b, target):  # x [B/dp, D]   a [D, F/tp]   b [F/tp, D]   target [B/dp, D]
    for tensor in (a, b):
        tensor.requires_grad_()
    z = reduce_from(torch.tanh(copy_to(x, "tp") @ a) @ b, "tp")
    ((z - target) ** 2).sum().backward()
    return all_reduce(a.grad, "dp"), all_reduce(b.grad, "dp")

x, a, b, target = rng.normal(size=(16, 4)), rng.normal(size=(4, 8)), rng.normal(size=(8, 4)), rng.normal(size=(16, 4))
want = gradients(x, a, b, target)
specs = (P("dp"), P(None, "tp"), P("tp", None), P("dp"))
grids = {}
for mesh in (Mesh(dp=8, tp=1), Mesh(dp=4, tp=2), Mesh(dp=2, tp=4), Mesh(dp=1, tp=8)):
    out = run(grid_step, mesh, x, a, b, target, in_specs=specs, out_specs=specs[1:3])
    assert np.allclose(out.value[0], want["dA"]) and np.allclose(out.value[1], want["dB"])
    grids[mesh] = out.trace
    tp, dp = out.trace.bytes_sent(rank=0, axis="tp"), out.trace.bytes_sent(rank=0, axis="dp")
    print(f"{mesh}: right; rank 0 sends {tp:>3} bytes along tp and {dp:>3} along dp, together {tp + dp}")

# %% [markdown]
# At these sizes the grids send less than either way alone. Step through one: first `Z` is added up along `tp`, within each row of
# the grid; then, column by column, the two gradients along `dp`.

# %%
sent = [trace.bytes_sent(rank=0) for trace in grids.values()]
assert max(sent[1:3]) < min(sent[0], sent[3])
animate(grids[Mesh(dp=2, tp=4)])

# %% [markdown]
# ## See where the time goes
#
# With a `cluster`, every rank gets a clock: products cost what the chip's data sheet says, messages latency plus
# bytes over bandwidth. These are **modelled** times, the same on every machine. Here are four ranks of an H100 node,
# at sizes where a product takes some microseconds.

# %%
sizes = tokens, width, hidden = 1024, 1024, 4096
large = [torch.randn(*shape) for shape in ((tokens, width), (width, hidden), (hidden, width))]
on_h100 = run(mlp, Mesh(tp=4), *large, in_specs=SPECS, out_specs=P(), cluster="h100").trace
print(on_h100.table())
timeline(on_h100)

# %% [markdown]
# Tensor parallelism is sometimes praised for leaving no rank idle. Look at the end of each lane. The sum cannot begin
# before the last product is done, nothing is left to compute meanwhile, and so every rank waits for as long as it
# takes: the sum is *exposed*. (Cutting the product into pieces that overlap with the ring's hops hides it; a later
# lab does that.)

# %%
idle = on_h100.idle_share()
print("idle:", ", ".join(f"{share:.0%}" for share in idle))
assert (idle > 0.2).all()

# %% [markdown]
# The same program, with its products **measured** on the machine you sit at, and the messages modelled between two of
# its processes. Ranks that finish early wait for the last one: real computers are never quite even.

# %%
timeline(run(mlp, Mesh(tp=4), *large, in_specs=SPECS, out_specs=P(), clock="measured").trace)

# %% [markdown]
# ## Turn the knob
#
# Two layers of the size that large language models have, in bfloat16, on one to eight H100s. With more ranks there is
# less to compute on each; the sum stays. A rank's time, from shapes alone:

# %%
from tplab.cost import collective, find, matmul_bytes, matmul_flops

h100 = find("h100")

def seconds(ranks, tokens, width, hidden, dtype="bfloat16", size=2):  # size: bytes of one number
    mine = hidden // ranks
    up = matmul_flops(tokens, width, mine), matmul_bytes(tokens, width, mine, size)
    activation = tokens * mine, 2 * tokens * mine * size  # one operation an entry, which is read and written
    down = matmul_flops(tokens, mine, width), matmul_bytes(tokens, mine, width, size)
    computing = sum(h100.compute_seconds(flops, moved, dtype) for flops, moved in (up, activation, down))
    the_sum = collective("all_reduce", tokens * width * size, ranks, h100.group_link(range(ranks))).seconds
    return {"computing": computing, "the sum": the_sum}

# %% [markdown]
# What must be large for eight ranks to be worth having: the number of tokens, the width, or the hidden width? Turn
# the hidden width. Then set `TOKENS`, or `WIDTH`, to twice as much, run the cell again, and compare.

# %%
from tplab.widgets import Bars, Row, knob

TOKENS, WIDTH = 4096, 4096

def bars(hidden):
    parts = {ranks: seconds(ranks, TOKENS, WIDTH, hidden) for ranks in (1, 2, 4, 8)}
    total = {ranks: sum(part.values()) for ranks, part in parts.items()}
    rows = [Row("1 rank", parts[1])]
    rows += [Row(f"{ranks} ranks", parts[ranks], f"{total[1] / total[ranks]:.1f} × as fast") for ranks in (2, 4, 8)]
    return Bars(rows, f"On 8 ranks the sum takes {parts[8]['the sum'] / total[8]:.0%} of the time.")

options = {hidden: bars(hidden) for hidden in (1024, 2048, 4096, 8192, 16384, 32768, 65536)}
about = f"{TOKENS:,} tokens, width {WIDTH:,}, bfloat16, modelled on an H100 node"
knob("Two layers on more ranks", "hidden width", options, start=4096, about=about)

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# Only the hidden width matters. Tokens ($B$) and width ($D$) make products and sum longer alike; the hidden width
# ($F$) makes the products longer, and not the sum. Leave latencies and launches out, and $B$ and $D$ cancel:
#
# $$\frac{\text{computing}}{\text{the sum}} = \frac{4\,B D F / (R \cdot \text{FLOP/s})}{2\frac{R-1}{R} \cdot 2\,B D / (\text{B/s})} = \frac{F}{R - 1} \cdot \frac{\text{B/s}}{\text{FLOP/s}}$$
#
# An H100 does 2,198 operations while one byte travels to its neighbour. So on eight of them the sum takes about as
# long as the products where $F = 7 \cdot 2198 \approx 15{,}000$.
#
# </details>

# %%
assert round(h100.chip.peak("bfloat16") / h100.inner_link.bandwidth) == 2198
balanced = seconds(8, tokens=10**6, width=4096, hidden=7 * 2198)  # beside a million tokens latencies are nothing
assert abs(balanced["computing"] / balanced["the sum"] - 1) < 0.1

def share_of_the_sum(tokens, width, hidden):
    parts = seconds(8, tokens, width, hidden)
    return parts["the sum"] / sum(parts.values())

share = share_of_the_sum(4096, 4096, 4096)
assert abs(share_of_the_sum(8192, 4096, 4096) - share) < 0.02
assert abs(share_of_the_sum(4096, 8192, 4096) - share) < 0.02
assert share_of_the_sum(4096, 4096, 8192) < share - 0.1

# %% [markdown]
# ## What it costs
#
# For $B$ tokens, width $D$, hidden width $F$ and $R$ ranks, a rank
#
# - holds $2DF/R$ weights,
# - computes $4BDF/R$ operations in its two products,
# - sends $2\frac{R-1}{R}BD$ elements forward (`Z`), and as many backward (`dX`).
#
# Each formula beside what the trace counted, and `seconds` from above beside the clock of the run:

# %%
from tplab.sharding import local_shape

R, size = 4, 4  # ranks; bytes of a float32
tokens, width, hidden = sizes
weights = sum(int(np.prod(local_shape(t.shape, spec, Mesh(tp=R)))) for t, spec in zip(large[1:], SPECS[1:]))
assert weights == 2 * width * hidden // R
products = on_h100.select(rank=0, op="mm").column("flops").sum()
assert products == 4 * tokens * width * hidden // R
sent = on_h100.bytes_sent(rank=0)
assert sent == 2 * (R - 1) * tokens * width * size // R
predicted = sum(seconds(R, *sizes, "float32", size).values())
assert np.isclose(on_h100.makespan, predicted, rtol=1e-12)
print(f"{weights:,} weights, {products:,} operations, {sent:,} bytes, {on_h100.makespan * 1e6:.1f} µs")

# %% [markdown]
# ## A bug to repair
#
# This backward pass has been copied from tutorial to tutorial. It runs. It is split over the ranks as it should be, and
# agrees with the unsplit version of itself up to rounding. And it is wrong. (It also leaves out `dX`, so that no layer
# before it could learn. That much you can mend by now.)

# %%
def backward(x, a, b, target):  # x [B, D]   a [D, F/tp]   b [F/tp, K]   target [B, K]
    y = torch.tanh(x @ a)
    z = all_reduce(y @ b, "tp")
    dz = 2 * (z - all_gather(y, "tp", dim=1))
    db = y.T @ dz
    da = x.T @ ((dz @ b.T) * (1 - y**2))
    return da, db

specs = (*SPECS, P())
split = run(backward, Mesh(tp=2), X, A, B, T, in_specs=specs, out_specs=SPECS[1:])
plain = run(backward, Mesh(tp=1), X, A, B, T, in_specs=specs, out_specs=SPECS[1:])
assert all(torch.allclose(one, other) for one, other in zip(split.value, plain.value))
print("split and plain agree")

# %% [markdown]
# Two copies of one mistake agree. The check below asks somebody who cannot have copied it: it nudges every weight and
# watches the loss. Mend `backward` above, run its cell, then this one. The check also looks at what is sent, and at
# layers whose hidden width is not the width of their output.

# %%
from tplab.exercises.split_a_layer import check_backward

check_backward(backward)

# %% [markdown]
# <details><summary>One more hint</summary>
#
# Is there a tensor that `backward` takes and never looks at? And one that is gathered, although no formula above asks
# for it whole?
#
# </details>
#
# ## Your turn: a bias, once
#
# Write a row-parallel layer for input that every rank holds whole: `x @ w + bias`. This rank has some rows of `w`,
# all of `x`, and all of the bias. A well-known library had this one
# [wrong](https://github.com/huggingface/text-generation-inference/issues/1036).

# %%
def row_linear(x, w, bias):  # x [B, D]   w [D/tp, K]   bias [K]   ->   [B, K], the same on every rank
    ...

# %%
from tplab.exercises.split_a_layer import check_row_linear

check_row_linear(row_linear)

# %% [markdown]
# ## Your turn: a gated layer
#
# Many language models have three matrices here, not two ([Shazeer 2020](https://arxiv.org/abs/2002.05202)):
#
# $$Z = (\mathrm{silu}(X A) \circ X G)\, B$$
#
# Split it over `tp`, with as little traffic as you can, so that forward *and* backward are right.
# `torch.nn.functional.silu` is the activation; the check differentiates your function.

# %%
def gated(x, a, g, b):  # x [B, D]   a, g [D, F/tp]   b [F/tp, D]   ->   [B, D], the same on every rank
    ...

# %%
from tplab.exercises.split_a_layer import check_gated

check_gated(gated)

# %% [markdown]
# ## To take away
#
# - Columns of a matrix give finished columns of the result; rows give terms, and terms need a sum.
# - Columns first, then rows: one `all_reduce` forward ($g$, of `Z`) and one backward ($f$, of `dX`) for each pair of
#   layers.
# - The sum is exposed, and only the hidden width outweighs it. Check gradients against something that cannot share
#   your mistake.
#
# **Sources.** Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053) ($f$, $g$, columns then rows).
# Misha Laskin, [Sharding Large Models with Tensor Parallelism](https://www.mishalaskin.com/posts/tensor_parallel)
# (the 2 × 2 example). AWS, [Tensor parallelism
# overview](https://awsdocs-neuron.readthedocs-hosted.com/en/latest/libraries/neuronx-distributed/tensor_parallelism_overview.html)
# (`gather_output`, `input_is_parallel`).
#
# Next: [02 Collectives](02_collectives.ipynb), and what each of them costs.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
