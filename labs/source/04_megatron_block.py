# %% [markdown]
# # 04 A Megatron block
#
# **A transformer block has six matrices. Why do its ranks stop to talk only four times, and where?**
#
# Time: one hour. Prerequisites: what attention and a residual are; columns, rows, $f$ and $g$ from [lab
# 01](01_split_a_layer.ipynb); `all_gather` and `reduce_scatter` from [lab 02](02_collectives.ipynb).
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/04_megatron_block.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/04_megatron_block.ipynb)
#
# ![One training step of a block on four ranks: long stretches of computing, and four all_reduces between them.](images/04_megatron_block.png)
#
# *One training step of a block on four ranks. Grey is computing. Twice on the way forward and twice on the way back
# all of them wait for a sum. Every other line of the block runs without a word between the ranks.*

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
from torch.nn import functional as F
from tplab import Mesh, P
from tplab.torch import all_gather, copy_to, gather_from, reduce_from, reduce_scatter, run, scatter_to
from tplab.widgets import animate, matrices, shards, timeline

# %% [markdown]
# ## By hand: doors, seen from above
#
# $f$ stands where a whole tensor enters divided work, $g$ where the result comes out: **doors** (libraries say
# *regions*). Why is the backward pass of each the forward pass of the other? Write all ranks' numbers below each other: what they share once, what each
# has of its own in a row for each rank. For two ranks and one number, both doors are then matrices, and the backward
# pass of $y = Mx$ is $dx = M^\top dy$:

# %%
f = np.array([[1.0], [1]])  # a shared number  ->  a row for each of two ranks
g = np.array([[1.0, 1]])  # a row a rank  ->  a shared number
assert np.array_equal(f.T, g) and np.array_equal(g.T, f)

x, dy = np.array([[4.0]]), np.array([[2.0], [3]])
assert (f.T @ dy == 2 + 3).all()
matrices({"x": x, "f x": f @ x, "dy": dy, "dx = dy, summed": f.T @ dy}, "f copies forward, and so adds backward")

# %% [markdown]
# Two numbers, more doors. `scatter_to` leaves piece $i$ on rank $i$, and `gather_from` undoes that. From above,
# nothing happens: the same rows, other owners. `all_gather` gives every rank both numbers too; but there ranks go on each
# in its own way, so backward their parts are added up, while behind `gather_from` all go on alike. `reduce_scatter` adds
# up two pairs, and leaves one sum on each rank.

# %%
same = np.eye(2)
gathered, scattered = np.vstack([same, same]), np.hstack([same, same])
assert np.array_equal(gathered.T, scattered)
assert np.array_equal(gathered, np.kron(f, same))  # join, then copy
assert np.array_equal(scattered, np.kron(g, same))  # add up, then deal out
matrices({"scatter_to": same, "gather_from": same, "all_gather": gathered, "reduce_scatter": scattered})

# %% [markdown]
# Three pairs, each the other's transpose. tplab's regions do it on tensors of any shape. Off the trace, what each
# sends forward, and what autograd then sends backward:

# %%
def sent(trace, rank=0):
    return [event.op for event in trace.select(rank=rank, kind="collective").events]

def forward(x, region):
    return region(x.requires_grad_(), "tp")

def both(x, region):
    forward(x, region).sum().backward()

doors = {}
for region in (copy_to, reduce_from, scatter_to, gather_from, all_gather, reduce_scatter):
    there, and_back = (sent(run(way, Mesh(tp=2), torch.ones(4), region).trace) for way in (forward, both))
    doors[region] = there, and_back[len(there):]
    forward_text, backward_text = (", ".join(ops) or "-" for ops in doors[region])
    print(f"{region.__name__:<15}forward {forward_text:<15} backward {backward_text}")

for one, other in ((copy_to, reduce_from), (scatter_to, gather_from), (all_gather, reduce_scatter)):
    assert doors[one] == doors[other][::-1]

# %% [markdown]
# (Somebody once [asked Megatron-LM](https://github.com/NVIDIA/Megatron-LM/issues/19) for the proof. That was it.)
# There, and the first three in [Megatron-LM to transformers](https://github.com/huggingface/transformers/issues/10321),
# most have longer names:
#
# | here | in Megatron-LM |
# |---|---|
# | `copy_to`, $f$ | `copy_to_tensor_model_parallel_region` |
# | `reduce_from`, $g$ | `reduce_from_tensor_model_parallel_region` |
# | `scatter_to`, `gather_from` | `scatter_to_…`, `gather_from_tensor_model_parallel_region` |
# | `all_gather`, `reduce_scatter` | `gather_from_…`, `reduce_scatter_to_sequence_parallel_region` |
# | `ColumnParallelLinear`, `RowParallelLinear`, `gather_output`, `input_is_parallel` | the same, and so in AWS Neuron |
#
# Where there are more ranks than `tp`, consecutive ones are a tensor-parallel group, and the data-parallel groups run
# across:

# %%
mesh = Mesh(dp=2, tp=4)
print("tp:", *mesh.groups("tp"))
print("dp:", *mesh.groups("dp"))
assert mesh.groups("tp") == [(0, 1, 2, 3), (4, 5, 6, 7)]

# %% [markdown]
# ## The MLP: which cut first?
#
# Two matrices, `gelu` between them. Lab 01 cut the first by columns, the second by rows.
#
# **Predict.** Cut the other way round: how many collectives forward? Is there an activation for which it would be as
# good?
#
# <details><summary>Answer</summary>
#
# Two. Row-first, each rank has a *term* of every hidden feature, and `gelu` must see the sum: the first collective.
# The column-parallel layer then leaves pieces, and joining them is the second. There is none: even without `gelu`, each
# rank's columns of the second matrix need every rank's term.
#
# </details>

# %%
def gelu(x):
    return F.gelu(torch.tensor(x)).item()

print(f"gelu(1 + -1) = {gelu(1.0 - 1.0):.2f}, gelu(1) + gelu(-1) = {gelu(1.0) + gelu(-1.0):.2f}")
assert gelu(1.0 - 1.0) == 0
assert gelu(1.0) + gelu(-1.0) > 0.6

# %% [markdown]
# Both ways, each with its doors:

# %%
def column_first(x, a, b):  # x [.., D]   a [D, H/tp]   b [H/tp, D]
    hidden = F.gelu(copy_to(x, "tp") @ a)
    return reduce_from(hidden @ b, "tp")

def row_first(x, a, b):  # x [.., D]   a [D/tp, H]   b [H, D/tp]
    hidden = F.gelu(reduce_from(scatter_to(x, "tp") @ a, "tp"))
    return gather_from(copy_to(hidden, "tp") @ b, "tp")

COLUMNS, ROWS = P(None, "tp"), P("tp", None)
SPECS_OF = {column_first: (P(), COLUMNS, ROWS), row_first: (P(), ROWS, COLUMNS)}

# %% [markdown]
# Both give the plain answer. Count, forward and backward, with a hidden layer four times as wide, as transformers
# have it. What is summed in the middle of the row-first MLP is four times as large:

# %%
rng = np.random.default_rng(0)
x, a, b = rng.normal(size=(2, 6, 12)), rng.normal(size=(12, 48)), rng.normal(size=(48, 12))
plain = F.gelu(torch.tensor(x) @ torch.tensor(a)) @ torch.tensor(b)

def learn(x, a, b, mlp):
    y = mlp(x.requires_grad_(), a.requires_grad_(), b.requires_grad_())
    y.sum().backward()

counted = {}
for mlp, specs in SPECS_OF.items():
    out = run(mlp, Mesh(tp=3), x, a, b, in_specs=specs, out_specs=P())
    assert torch.allclose(out.value, plain, rtol=0, atol=1e-12)
    trace = run(learn, Mesh(tp=3), x, a, b, mlp, in_specs=(*specs, None)).trace
    there, and_back = sent(out.trace), sent(trace)[len(sent(out.trace)):]
    counted[mlp] = trace.bytes_sent(rank=0)
    print(f"{mlp.__name__:<13} forward {there}, backward {and_back}: {counted[mlp]:,} bytes from a rank")
assert counted[row_first] == 4.5 * counted[column_first]

# %% [markdown]
# One collective each way against two, and four and a half times the bytes. tplab's MLP is column-first; given the
# same weights, it is this one. (Its weights lie as in `torch.nn.Linear`, transposed.)

# %%
from tplab.torch import ParallelMLP

def of_tplab(x, a, b):
    mlp = ParallelMLP(12, 48, "tp", bias=False).double()
    mlp.load_state_dict({"up.weight": a.T, "down.weight": b.T})
    return mlp(x)

out = run(of_tplab, Mesh(tp=3), x, a, b, in_specs=SPECS_OF[column_first], out_specs=P())
assert torch.allclose(out.value, plain, rtol=0, atol=1e-12)

# %% [markdown]
# ## Attention: cut between heads
#
# A head reads all of $x$ with a few columns of three matrices, mixes tokens, and is read by a few rows of the output
# matrix. Columns, then rows: the MLP's shape again, with a head in the place of `gelu`.
#
# Small enough for your head: two tokens, two heads of one feature. Queries are zero, so that each token takes the
# mean of the values so far, its own included.

# %%
def softmax(scores):
    return np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)

mean_so_far = softmax(np.array([[0, -np.inf], [0, 0]]))
values = np.array([[2.0, 1], [4, 3]])  # a row a token, a column a head
output = np.array([[1.0, 1], [0, 2]])  # a row a head
whole = (mean_so_far @ values) @ output
head_0, head_1 = ((mean_so_far @ values[:, [i]]) @ output[[i]] for i in (0, 1))
assert (head_0 + head_1 == whole).all()
matrices({"head 0's term": head_0, "head 1's term": head_1, "attention": whole})

# %% [markdown]
# Heads never look at each other. A rank with whole heads can go from $x$ to its term of the result alone.
#
# **Predict.** Two heads, four ranks. Can two ranks share a head, each with half of its features, do their softmax,
# and add up at the end?
#
# <details><summary>Answer</summary>
#
# No. A score is a sum over the head's features, so each of the two has a *term* of every score, and softmax must see
# the sum. Each rank's softmax has rows that sum to one; added up, they sum to two.
#
# </details>

# %%
half_0, half_1 = np.array([[0, np.log(3)]]), np.array([[np.log(3), 0]])  # terms of the scores of one token
right = softmax(half_0 + half_1)
wrong = softmax(half_0) + softmax(half_1)
assert np.allclose(right.sum(), 1) and np.allclose(wrong.sum(), 2)
matrices({"softmax of rank 0's": softmax(half_0), "of rank 1's": softmax(half_1), "added up": wrong, "right": right})

# %% [markdown]
# This mistake has been published, with the sum after the softmax. tplab shards whole heads, and refuses anything
# else:

# %%
from tplab.errors import ShapeError
from tplab.torch import ParallelSelfAttention

try:
    run(lambda: ParallelSelfAttention(8, num_heads=2, axis="tp"), Mesh(tp=4))
except ShapeError as error:
    print(error)

# %% [markdown]
# ## Build it
#
# All heads that a rank has, at once. Outside of `run` these are all heads there are, and `heads` is plain attention.
# The ranks' part is the two doors around it.

# %%
def heads(x, q, k, v, o):  # x [B, S, D]   q, k, v [n, D, d]   o [n, d, D]: n heads of d features
    q, k, v = (torch.einsum("bsD,nDd->bnsd", x, w) for w in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    future = torch.full_like(scores[0, 0], -torch.inf).triu(1)  # not to be seen
    y = (scores + future).softmax(-1) @ v
    return torch.einsum("bnsd,ndD->bsD", y, o)  # the sum of these heads' terms

def attention(x, w):
    return reduce_from(heads(copy_to(x, "tp"), w["q"], w["k"], w["v"], w["o"]), "tp")

# %% [markdown]
# The MLP from above, a norm, and two residuals make the block. A norm is not linear either: it must see finished
# sums, as `gelu` must. That is why one pair of doors does not reach across both halves.

# %%
def norm(x, scale):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale

def block(x, w):
    x = x + attention(norm(x, w["scale_1"]), w)
    return x + column_first(norm(x, w["scale_2"]), w["a"], w["b"])

def plain_block(x, w):
    x = x + heads(norm(x, w["scale_1"]), w["q"], w["k"], w["v"], w["o"])
    return x + F.gelu(norm(x, w["scale_2"]) @ w["a"]) @ w["b"]

# %% [markdown]
# To try it: random weights, how they lie on the ranks, and one step of training.

# %%
WHOLE = P()
SPECS = {"scale_1": WHOLE, **dict.fromkeys("qkvo", P("tp")), "scale_2": WHOLE, "a": COLUMNS, "b": ROWS}

def random_block(batch, tokens, width, num_heads, dtype=torch.float64):  # x, target, weights
    torch.manual_seed(0)
    head, hidden = width // num_heads, 4 * width
    shapes = {"scale_1": (width,), **dict.fromkeys("qkv", (num_heads, width, head)), "o": (num_heads, head, width)}
    shapes |= {"scale_2": (width,), "a": (width, hidden), "b": (hidden, width)}
    w = {name: torch.randn(shape, dtype=dtype) / width**0.5 for name, shape in shapes.items()}
    return torch.randn(batch, tokens, width, dtype=dtype), torch.randn(batch, tokens, width, dtype=dtype), w

def training_step(x, target, w, block):
    x, w = x.requires_grad_(), {name: tensor.requires_grad_() for name, tensor in w.items()}
    y = block(x, w)
    ((y - target) ** 2).sum().backward()
    return y.detach(), {"x": x.grad, **{name: tensor.grad for name, tensor in w.items()}}

# %% [markdown]
# Held against the plain block, output and every gradient, on as many ranks as there are heads and on fewer. `run`
# itself checks what `P()` says: that the gradients of the norms' scales are the same on all ranks.

# %%
x, target, w = random_block(batch=2, tokens=12, width=24, num_heads=12)
want_y, want = training_step(x.clone(), target, {name: tensor.clone() for name, tensor in w.items()}, plain_block)

def close(one, other):
    return torch.allclose(one, other, rtol=0, atol=1e-10)

def on(mesh, block, tokens=WHOLE):
    given, gradients = (tokens, tokens, SPECS, None), {"x": tokens, **SPECS}
    return run(training_step, mesh, x, target, w, block, in_specs=given, out_specs=(tokens, gradients))

for ranks in (1, 2, 3, 4, 6, 12):
    y, grads = on(Mesh(tp=ranks), block).value
    assert close(y, want_y) and all(close(grads[name], want[name]) for name in want)
print("y and", len(want), "gradients are those of the plain block")

# %% [markdown]
# tplab's own block is in `tplab.torch.models.gpt`. Its weights are ours, with heads laid one below the other:

# %%
from tplab.torch import GPTConfig
from tplab.torch.models.gpt import Block

def of_tplab(x, w):
    sizes = {"vocab_size": 1, "width": 24, "num_layers": 1, "num_heads": 12, "context": 12}
    config = GPTConfig(**sizes, norm="rms", bias=False, activation="gelu")
    block = Block(config, "tp", sequence_dim=None, varies_along=None).double()
    state = {f"attention.{name}.weight": w[name[0]].mT.flatten(0, 1) for name in ("query", "key", "value")}
    state |= {"attention.output.weight": w["o"].flatten(0, 1).T, "mlp.up.weight": w["a"].T, "mlp.down.weight": w["b"].T}
    block.load_state_dict(state | {"norm_1.weight": w["scale_1"], "norm_2.weight": w["scale_2"]})
    return block(x)

out = run(of_tplab, Mesh(tp=4), x, w, in_specs=(P(), SPECS), out_specs=P())
assert close(out.value, want_y)

# %% [markdown]
# ## See it run: four sums
#
# Now a block as a model of seven billion parameters has it, on four H100s of one node. To compute it here would take
# long, and need not be: on torch's `meta` device tensors have shapes and no numbers. Every line runs, on the modelled
# clock. Step from sum to sum.

# %% tags=["opening-picture"]
with torch.device("meta"):
    large = random_block(batch=1, tokens=2048, width=4096, num_heads=32, dtype=torch.bfloat16)

def modelled(block, tokens=WHOLE):
    given = tokens, tokens, SPECS, None
    return run(training_step, Mesh(tp=4), *large, block, in_specs=given, cluster="h100", device="meta").trace

on_h100 = modelled(block)
animate(on_h100)

# %% [markdown]
# Which are they? Off the trace of the small block: two $g$'s forward, two $f$'s backward, each of all activations,
# `[B, S, D]`.

# %%
forward_only = run(block, Mesh(tp=4), x, w, in_specs=(P(), SPECS)).trace
step = on(Mesh(tp=4), block).trace
print("forward ", sent(forward_only))
print("backward", sent(step)[len(sent(forward_only)):])
assert sent(forward_only) == ["all_reduce"] * 2
assert sent(step) == ["all_reduce"] * 4
assert {event.shape for event in step.select(kind="collective").events} == {tuple(x.shape)}

# %% [markdown]
# **Predict.** Leave out one $f$, the one before the MLP. Nothing raises. Which of these are wrong: `y`, the gradients
# of the MLP's matrices, of `scale_2`, of attention's matrices?
#
# <details><summary>Answer</summary>
#
# Forward $f$ does nothing, so `y` and the loss are right. The MLP's matrices stand behind it, and are right too.
# Everything *before* it gets this rank's part of a gradient, on each rank another one: `scale_2`, all of attention,
# and every block below.
#
# </details>

# %%
def without_f(x, w):
    x = x + attention(norm(x, w["scale_1"]), w)
    return x + reduce_from(F.gelu(norm(x, w["scale_2"]) @ w["a"]) @ w["b"], "tp")

ranks = run(training_step, Mesh(tp=2), x, target, w, without_f, in_specs=(P(), P(), SPECS, None)).per_rank
assert all(close(y, want_y) for y, _ in ranks)
wrong = set()
for name, spec in {"x": P(), **SPECS}.items():
    pieces = [grads[name] for _, grads in ranks]
    whole = torch.cat(pieces, list(spec).index("tp")) if spec.axis_names else pieces[0]
    wrong |= set() if close(whole, want[name]) else {name}
print("right: y,", ", ".join(name for name in want if name not in wrong))
print("wrong:", ", ".join(name for name in want if name in wrong))
assert wrong == set(want) - {"a", "b"}

# %% [markdown]
# Each rank would now train another `scale_2`. `run` compares what should be copies, and says so:

# %%
from tplab.errors import ReplicationError

try:
    on(Mesh(tp=2), without_f)
except ReplicationError as error:
    print(error)

# %% [markdown]
# ## Sequence parallelism: what all ranks do alike
#
# Between $g$ and the next $f$ all ranks hold the same activations. Each adds the same residuals, takes the same
# norms, draws the same dropout, and *keeps* it all for the backward pass: the same work and the same memory $R$ times
# over. Norms do not mix tokens. So give each rank some of the tokens there, `P(None, "tp")` of `[B, S, D]`. Heads and
# hidden features, inside the doors, need all tokens as before.
#
# $f$ then has to gather tokens, and $g$ has to hand them out again:

# %%
shards(Mesh(tp=4), (12, 24), P("tp"), name="x")

# %%
def without_sums(x, w):  # x [B, S/tp, D]
    h = all_gather(norm(x, w["scale_1"]), "tp", 1)
    x = x + reduce_scatter(heads(h, w["q"], w["k"], w["v"], w["o"]), "tp", 1)
    h = all_gather(norm(x, w["scale_2"]), "tp", 1)
    return x + reduce_scatter(F.gelu(h @ w["a"]) @ w["b"], "tp", 1)

# %% [markdown]
# **Predict.** Eight collectives now, in place of four. How many more bytes? And one kind of gradient comes out wrong:
# which weights does a rank now use on other tokens than its neighbour?
#
# <details><summary>Answer</summary>
#
# No byte more: an all-reduce *is* a reduce-scatter and an all-gather. And the scales of the norms: each rank has used
# them on its own tokens, and knows those tokens' part of the gradient.
#
# </details>

# %%
TOKENS = P(None, "tp")
given = TOKENS, TOKENS, SPECS, None
out = run(training_step, Mesh(tp=4), x, target, w, without_sums, in_specs=given)
there = sent(run(without_sums, Mesh(tp=4), x, w, in_specs=(TOKENS, SPECS)).trace)
print("forward ", there)
print("backward", sent(out.trace)[len(there):])
assert len(sent(out.trace)) == 8
assert out.trace.bytes_sent() == step.bytes_sent()
pieces = [grads["scale_1"] for _, grads in out.per_rank]
assert not close(pieces[0], pieces[1])
assert close(sum(pieces), want["scale_1"])

# %%
first = {f"rank {rank}": part[:4] for rank, part in enumerate(pieces)}
first |= {"their sum": sum(pieces)[:4], "right": want["scale_1"][:4]}
matrices(first, "The gradient of scale_1, its first four entries")

# %% [markdown]
# [Megatron-LM #1446](https://github.com/NVIDIA/Megatron-LM/issues/1446) shows four such rows, of a real model's last
# norm, and in [#443](https://github.com/NVIDIA/Megatron-LM/issues/443) somebody asks why they should be added up.
# There a step of its own does it after the backward pass, and has to be remembered.
#
# Better that nobody has to. The ranks share `scale`, and each uses it in its own way: there is a door for that, $f$.

# %%
def sequence_block(x, w):  # x [B, S/tp, D]
    h = all_gather(norm(x, copy_to(w["scale_1"], "tp")), "tp", 1)
    x = x + reduce_scatter(heads(h, w["q"], w["k"], w["v"], w["o"]), "tp", 1)
    h = all_gather(norm(x, copy_to(w["scale_2"], "tp")), "tp", 1)
    return x + reduce_scatter(F.gelu(h @ w["a"]) @ w["b"], "tp", 1)

for ranks in (1, 2, 3, 4, 6, 12):
    y, grads = on(Mesh(tp=ranks), sequence_block, TOKENS).value
    assert close(y, want_y) and all(close(grads[name], want[name]) for name in want)
extra = on(Mesh(tp=4), sequence_block, TOKENS).trace.bytes_sent() - step.bytes_sent()
print(f"y and {len(want)} gradients are right, for {extra:,} bytes more: two sums of {x.shape[-1]} numbers each")
assert extra == 2 * 2 * 3 * w["scale_1"].nbytes  # two scales, 2(R-1) times each

# %% [markdown]
# tplab's layers do this by themselves once they are told `sequence_dim`, its norms once they are told
# `sequence_axis`. The one line behind it:

# %%
import inspect

from tplab.torch.layers.linear import shared

print(inspect.getsource(shared))

# %% [markdown]
# ## The same in JAX
#
# The names of the regions stay. First without any $f$, as in lab 01: JAX's types know where the shared `x` meets
# divided weights, and put $f$ in.

# %%
import jax
import jax.numpy as jnp
import tplab.jax as tj

def norm_in_jax(x, scale):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale

def heads_in_jax(x, q, k, v, o):
    q, k, v = (jnp.einsum("bsD,nDd->bsnd", x, w) for w in (q, k, v))
    return jnp.einsum("bsnd,ndD->bsD", jax.nn.dot_product_attention(q, k, v, is_causal=True), o)

def block_in_jax(x, w, enter, leave):
    h = enter(norm_in_jax(x, w["scale_1"]))
    x = x + leave(heads_in_jax(h, w["q"], w["k"], w["v"], w["o"]))
    h = enter(norm_in_jax(x, w["scale_2"]))
    return x + leave(jax.nn.gelu(h @ w["a"], approximate=False) @ w["b"])

# %%
def no_f(x, w):
    return block_in_jax(x, w, lambda h: h, lambda y: tj.reduce_from(y, "tp"))

def with_f(x, w):
    return block_in_jax(x, w, lambda h: tj.copy_to(h, "tp"), lambda y: tj.reduce_from(y, "tp"))

def split_tokens(x, w):
    return block_in_jax(x, w, lambda h: tj.all_gather(h, "tp", 1), lambda y: tj.reduce_scatter(y, "tp", 1))

def step_in_jax(x, target, w, block):
    return jax.grad(lambda x, w: ((block(x, w) - target) ** 2).sum(), (0, 1))(x, w)

arrays = np.asarray(x), np.asarray(target), {name: np.asarray(tensor) for name, tensor in w.items()}
in_jax = {}
for program, tokens in ((no_f, P()), (with_f, P()), (split_tokens, TOKENS)):
    given = tokens, tokens, SPECS, None
    out = tj.run(step_in_jax, Mesh(tp=4), *arrays, program, in_specs=given, out_specs=(tokens, SPECS))
    grads = {"x": out.value[0], **out.value[1]}
    assert all(np.allclose(grads[name], want[name], rtol=1e-4, atol=1e-4) for name in want)  # JAX computes in float32
    in_jax[program] = sent(out.trace)
    counts = ", ".join(f"{in_jax[program].count(op)} {op}" for op in dict.fromkeys(in_jax[program]))
    print(f"{program.__name__:<12} every gradient is right: {counts}")

# %% [markdown]
# All are right, and two things are worth a second look.
#
# **Without $f$: six sums, not four.** JAX puts $f$ in where `h` *meets* divided weights. That is at `q`, at `k` and
# at `v`: three doors, three sums backward, where one `copy_to` before them makes one. So in JAX $f$ is not needed to
# be right, but to be cheap. tplab's attention calls it once.
#
# **Split tokens: nobody wrote $f$ for the scales**, and their gradients are right. The types know that each rank's
# tokens vary and `scale` does not. #1446 cannot be written.

# %%
assert in_jax[no_f] == ["all_reduce"] * 6
assert in_jax[with_f] == ["all_reduce"] * 4
assert in_jax[split_tokens].count("all_gather") == in_jax[split_tokens].count("reduce_scatter") == 4
assert in_jax[split_tokens].count("all_reduce") == 2  # of the scales' gradients

# %% [markdown]
# Does XLA, which sees the whole program, merge the three? Not here, on CPU devices: six are left. `collectives_in` lists what it made of it:

# %%
given = P(), P(), SPECS, None
found = tj.collectives_in(step_in_jax, Mesh(tp=4), *arrays, no_f, in_specs=given, out_specs=(P(), SPECS))
print(found)
assert sum(collective.count for collective in found) == 6

# %% [markdown]
# ## See where the time goes
#
# The large block on four H100s, **modelled**. First as before, then with its tokens split:

# %%
timeline(on_h100)

# %%
on_tokens = modelled(sequence_block, TOKENS)
timeline(on_tokens)

# %% [markdown]
# The same bytes take the same time. But norms and residuals, the short bars between one product and the next door,
# are now of a quarter of the tokens.

# %%
from tplab.cost import collective, find

link = find("h100").inner_link
whole = large[0].nbytes
a_sum = collective("all_reduce", whole, 4, link).seconds
scattered, gathered = (collective(op, n, 4, link) for op, n in (("reduce_scatter", whole), ("all_gather", whole // 4)))
assert np.isclose(a_sum, scattered.seconds + gathered.seconds)
print(f"{on_h100.makespan * 1e6:,.0f} µs, with the tokens split {on_tokens.makespan * 1e6:,.0f} µs")
assert on_tokens.makespan < 0.9 * on_h100.makespan

# %% [markdown]
# And **measured**: the small block, its products timed on the machine you sit at, its messages modelled between two
# of its processes.

# %%
given = TOKENS, TOKENS, SPECS, None
timeline(run(training_step, Mesh(tp=4), x, target, w, sequence_block, in_specs=given, clock="measured").trace)

# %% [markdown]
# ## Turn the knob
#
# What does a rank keep of one layer, from its forward pass to its backward pass? For $s$ tokens of width $h$, a batch
# of $b$, $a$ heads, $t$ ranks, 16 bits a number and 8 an entry of a dropout mask, Korthikanti et al. count, in bytes,
#
# $$s b h \left(10 + \frac{24}{t} + 5\,\frac{a s}{h t}\right)$$
#
# The 10 lie between the doors: inputs of norms and of doors, masks of dropout. The 24 are inside: features of heads
# and MLP. The last are the scores, one for each pair of tokens; fused kernels do not keep them, but compute them
# again.
#
# Here are GPT-3's sizes. Turn the number of ranks. What does tensor parallelism not get rid of?

# %%
from tplab.cost import activation_tensors
from tplab.widgets import Bars, Row, bytes_text, knob

GPT_3 = {"sequence": 2048, "batch": 1, "width": 12288, "num_heads": 96}
INSIDE = ("query", "key", "value", "input of the output projection", "input of gelu", "input of down")

def parts(ranks, **options):
    kept = {"between the doors": 0, "inside": 0, "scores": 0}
    for name, nbytes in activation_tensors(**GPT_3, num_ranks=ranks, **options).items():
        kept["scores" if "scores" in name else "inside" if name in INSIDE else "between the doors"] += nbytes
    return kept

def bars(ranks):
    plain = parts(ranks)
    again = parts(ranks, sequence_parallel=True, scores=False)
    split = parts(ranks, sequence_parallel=True)
    rows = [Row("tensor parallel", plain), Row("tokens split, too", split), Row("scores recomputed, too", again)]
    between = plain["between the doors"]
    share = between / sum(plain.values())
    return Bars(rows, f"Tensor parallel, {bytes_text(between)} lie between the doors, {share:.0%} of all.")

options = {ranks: bars(ranks) for ranks in (1, 2, 4, 8, 16, 32)}
knob("What a rank keeps of one layer", "ranks", options, start=8, about="GPT-3's sizes, 16 bit", unit="B")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# The first part of the first bar does not shrink: 240 MiB a layer, 22.5 GiB for GPT-3's 96, on every rank, however
# many there are. On eight ranks that is 43 % of what is kept, on 32 three quarters. Split the tokens, and it is
# divided like everything else; the scores are then the next to go.
#
# </details>

# %%
sbh = 2048 * 1 * 12288
as_over_h = 96 * 2048 / 12288
for ranks in (1, 2, 4, 8, 16, 32):
    plain, split = parts(ranks), parts(ranks, sequence_parallel=True)
    assert plain["between the doors"] == 10 * sbh
    assert sum(plain.values()) == sbh * (10 + 24 / ranks + 5 * as_over_h / ranks)
    assert sum(split.values()) == sbh * (10 + 24 + 5 * as_over_h) / ranks
assert 10 * sbh == 240 * 2**20 and 96 * 240 / 1024 == 22.5
assert [round(10 * sbh / sum(parts(ranks).values()), 2) for ranks in (8, 32)] == [0.43, 0.75]

# %% [markdown]
# ## What it costs
#
# That was the paper's account. Is it true of torch? `saved_tensors` lists what autograd holds after a forward pass,
# parameters left out. tplab's block, in bfloat16, with dropout, on one of four ranks, beside the account, tensor by
# tensor:

# %%
from tplab.torch import saved_tensors

S, B, D, HEADS, R = 64, 2, 96, 12, 4
config = GPTConfig(vocab_size=1, width=D, num_layers=1, num_heads=HEADS, context=S, dropout=0.1)

def kept(x, sequence_dim):
    block = Block(config, "tp", sequence_dim, "tp" if sequence_dim else None).bfloat16()
    return saved_tensors(block, x.bfloat16().requires_grad_())

of_rank_0 = run(kept, Mesh(tp=R), torch.ones(B, S, D), None).per_rank[0]
account = activation_tensors(S, B, D, HEADS, R, scores=False)
large_ones = [tensor for tensor in of_rank_0 if tensor.bytes > 2000]
for (name, nbytes), tensor in zip(account.items(), large_ones):
    print(f"{name:<31}{nbytes:>7,}   kept: {tensor.bytes:>6,}, {tensor.dtype} {list(tensor.shape)}")
assert sorted(account.values()) == sorted(tensor.bytes for tensor in large_ones)

# %% [markdown]
# Together $10 + \frac{24}{4} = 16$ times $sbh$. What is small the paper leaves out: of each norm a mean and a
# deviation for each token, of each row of scores one number, in 32 bits, from which to compute them again.

# %%
sbh, small = S * B * D, 4 * S * B * 2 + 4 * HEADS * S * B // R
assert of_rank_0.bytes == sbh * (10 + 24 // R) + small

# %% [markdown]
# With split tokens it should be $34/t$. But autograd also keeps what `all_gather` has put together, whole, for the
# gradients of the weights. Megatron-LM keeps its own piece, and gathers a second time in the backward pass: memory
# for bytes. `gather_again` does the same.

# %%
from tplab.torch import gather_again

def kept_again(x):
    block = Block(config, "tp", 1, "tp").bfloat16()
    return saved_tensors(gather_again(block), x.bfloat16().requires_grad_())

small = 4 * S * B * 2 // R + 4 * HEADS * S * B // R
split = run(kept, Mesh(tp=R), torch.ones(B, S, D), 1, in_specs=(TOKENS, None)).per_rank[0]
again = run(kept_again, Mesh(tp=R), torch.ones(B, S, D), in_specs=TOKENS).per_rank[0]
assert again.bytes == sbh * 34 // R + small
assert split.bytes == again.bytes + 2 * (2 * sbh) * (R - 1) // R
print(f"{of_rank_0.bytes:,} bytes; tokens split {split.bytes:,}; gathered again {again.bytes:,}")

# %% [markdown]
# The rest of the bill. For $B$ sequences of $S$ tokens, width $D$ and $R$ ranks, a rank
#
# - holds $12 D^2 / R$ weights, and the scales of two norms;
# - computes $(24\,B S D^2 + 4\,B S^2 D) / R$ operations in the products of the forward pass, twice as many backward;
# - sends $8\,\frac{R-1}{R}\,B S D$ elements: four sums, of $2\frac{R-1}{R}$ each.
#
# Beside the large block, as it ran:

# %%
from tplab.sharding import local_shape

(B, S, D), R, large_w = large[0].shape, 4, large[2]
weights = sum(int(np.prod(local_shape(tensor.shape, SPECS[name], Mesh(tp=R)))) for name, tensor in large_w.items())
assert weights == 12 * D * D // R + 2 * D
products = sum(on_h100.select(rank=0, op=op).column("flops").sum() for op in ("mm", "bmm"))
assert products == 3 * (24 * B * S * D * D + 4 * B * S * S * D) // R
assert on_h100.bytes_sent(rank=0) == 8 * (R - 1) * B * S * D * 2 // R  # bfloat16
assert on_tokens.bytes_sent(rank=0) - on_h100.bytes_sent(rank=0) == 2 * 2 * (R - 1) * D * 2 // R
four_sums = 4 * a_sum
assert np.isclose(on_h100.makespan - on_h100.busy()[0], four_sums)
print(f"{weights:,} weights, {products:,} operations, {on_h100.bytes_sent(rank=0):,} bytes")
print(f"{on_h100.makespan * 1e6:,.1f} µs, of which {four_sums * 1e6:.1f} are spent in sums")

# %% [markdown]
# ## A bug to repair
#
# A row-parallel layer with its bias, as
# [text-generation-inference](https://github.com/huggingface/text-generation-inference/issues/1036) had it. It has a
# test, which passes: on four ranks a new layer gives the same output and the same gradients as on one.

# %%
def down(hidden, b, bias):  # hidden [B, S, H/tp]   b [H/tp, D]   bias [D]   ->   [B, S, D]
    return reduce_from(hidden @ b + bias, "tp")

def learned(ranks, bias):
    def program(*tensors):
        y = down(*(tensor.requires_grad_() for tensor in tensors))
        y.square().sum().backward()
        return y, [tensor.grad for tensor in tensors]
    specs = P(None, None, "tp"), ROWS, P()
    return run(program, Mesh(tp=ranks), hidden, b, bias, in_specs=specs, out_specs=(P(), list(specs))).value

hidden = rng.normal(size=(2, 6, 48))
one, four = learned(1, bias=np.zeros(12)), learned(4, bias=np.zeros(12))
assert close(one[0], four[0]) and all(close(*pair) for pair in zip(one[1], four[1]))
print("a new layer: output and gradients agree")

# %% [markdown]
# A transformer's biases begin at zero, and four times zero is zero. Behind $g$ every rank has the whole gradient, so
# each copy of the bias gets it once. The first step of training is the last one that agrees. A trained model, loaded on four ranks, is wrong from the start:

# %%
trained = np.linspace(0.5, 1.5, 12)
one, four = learned(1, trained)[0][0, 0], learned(4, trained)[0][0, 0]
first = {"one rank": one, "four ranks": four, "apart": four - one, "bias": trained}
matrices({name: array[:6] for name, array in first.items()}, "y of the first token, its first six features")

# %% [markdown]
# Can a test see it in a new layer? Yes, if it first gives other values to parameters that are all zeros or all ones.
# `check_parallel` does. It makes the parallel module on every rank, and compares its output and gradients with those of
# the whole one:

# %%
from torch import nn
from tplab.torch import check_parallel

class Down(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.weight = nn.Parameter(scatter_to(whole.weight.detach(), "tp"))  # this rank's columns
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, hidden):
        return down(hidden, self.weight.T, self.bias)

torch.manual_seed(0)
new = nn.Linear(48, 12).double()
nn.init.zeros_(new.bias)
features = P(None, None, "tp")  # how the hidden activation is split
print(check_parallel(Down, new, inputs=(torch.tensor(hidden),), in_specs=features, mesh=Mesh(tp=4)))

# %% [markdown]
# Mend `down`, run its cell, and those below it. The exercise's check looks at the gradients, too. Two repairs often
# seen, a share of the bias for each rank and all of it for rank 0, fail there, though their output is right.

# %%
from tplab.exercises.megatron_block import check_down

check_down(down)

# %% [markdown]
# <details><summary>A hint</summary>
#
# Which values are the same on all ranks: what stands before $g$, or what comes out of it? The bias is the same on all
# ranks.
#
# </details>
#
# ## Your turn: half the sums
#
# Six matrices, two pairs of doors: the second pair is needed because the MLP reads what attention has written,
# through a norm. Some models ([GPT-J](https://github.com/kingoflolz/mesh-transformer-jax), PaLM) let both read the
# same:
#
# $$h = \mathrm{norm}(x) \qquad y = x + \mathrm{heads}(h) + \mathrm{gelu}(h A)\, B$$
#
# Write it with as few sums as you can. The weights are this rank's, as in `block`; `norm` and `heads` are there to
# use. The check differentiates your function: mind the gradient of `scale`.

# %%
def parallel_block(x, scale, q, k, v, o, a, b):  # x [B, S, D]   ->   [B, S, D], the same on every rank
    ...

# %%
from tplab.exercises.megatron_block import check_parallel_block

check_parallel_block(parallel_block)

# %% [markdown]
# ## Your turn: and its tokens split
#
# The same block, where each rank has some of the tokens, and returns those. Mind `scale` again.

# %%
def tokens_split(x, scale, q, k, v, o, a, b):  # x [B, S/tp, D]   ->   [B, S/tp, D], this rank's tokens
    ...

# %%
from tplab.exercises.megatron_block import check_tokens_split

check_tokens_split(tokens_split)

# %% [markdown]
# ## To take away
#
# - Columns, then rows, need one sum forward ($g$) and one backward ($f$), if what stands between them sees whole
#   features or whole heads. A block has two such pairs: four sums.
# - Forget $f$, or a norm's sum, or add a bias too early, and nothing raises. Compare gradients, away from zero.
# - Splitting the tokens between the doors sends next to nothing more, and divides most of what tensor parallelism leaves
#   whole; to divide all of it, tokens are gathered once more backward.

# %% [markdown]
# **Sources.** Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053). Korthikanti et al. 2022,
# [Reducing activation recomputation](https://arxiv.org/abs/2205.05198). [Megatron-LM to
# transformers](https://github.com/huggingface/transformers/issues/10321). AWS, [Tensor parallelism
# overview](https://awsdocs-neuron.readthedocs-hosted.com/en/latest/libraries/neuronx-distributed/tensor_parallelism_overview.html).
# Chowdhery et al. 2022, [PaLM](https://arxiv.org/abs/2204.02311).
#
# Next: [06 Vocabulary](06_vocabulary.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
