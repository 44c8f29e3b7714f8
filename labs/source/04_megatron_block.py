# %% [markdown]
# # 04 A Megatron block
#
# **A transformer block has six matrices. Why do the ranks that share it exchange data only four times in a training
# step, and why are there rarely more than eight ranks?**
#
# Prerequisites: what attention and a residual connection are; columns, rows, $f$ and $g$ from [lab
# 01](01_split_a_layer.ipynb). Time: one hour.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/04_megatron_block.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/04_megatron_block.ipynb)
#
# ![Four ranks compute, with four all-reduces between.](images/04_megatron_block.png)
#
# *Forward and backward pass of a block on four ranks. Twice in each, all ranks wait for an all-reduce. Nothing else is
# sent.*

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
from torch.nn import functional as F
from tplab import Mesh, P
from tplab.widgets import matrices, timeline

# %% [markdown]
# ## By hand: why f and g are a pair
#
# In lab 01, $f$ marked where a whole tensor enters divided work, and $g$ where the result comes out. $f$ adds up in the
# backward pass, and $g$ in the forward pass. Take two ranks and a single number, and write what the ranks hold as a
# column with one row per rank. Then $f$ and $g$ are small matrices, and the backward pass of $y = Mx$ is $dx = M^\top
# dy$:

# %%
f = np.array([[1.0], [1]])  # one shared number  ->  a copy for each of two ranks
g = np.array([[1.0, 1]])  # one number per rank  ->  their sum, which is shared
x, dy = np.array([[4.0]]), np.array([[2.0], [3]])
shown = {"x": x, "f x": f @ x, "dy": dy, "dx = dy, summed": f.T @ dy}
matrices(shown, "f copies in the forward pass, so it adds in the backward pass")

# %% [markdown]
# The transpose of copying is adding, and the transpose of adding is copying: $f^\top = g$.
#
# ## The MLP: which matrix is split by columns?
#
# Lab 01 split the first matrix by columns and the second by rows. Between them is `gelu`.
#
# **Predict.** What if you split the first by rows and the second by columns? How many collectives does the forward pass
# need?
#
# <details><summary>Answer</summary>
#
# Two. After the first matrix, each rank has a *term* of every hidden feature, and `gelu` must see the sum. After the
# second, each rank has some finished columns, which must be joined.
#
# </details>

# %%
def gelu(number):
    return F.gelu(torch.tensor(number)).item()

print(f"gelu(1 - 1) = {gelu(0.0):.2f}")
print(f"gelu(1) + gelu(-1) = {gelu(1.0) + gelu(-1.0):.2f}")

# %% [markdown]
# The hidden layer is also four times as wide as $x$. So the all-reduce in its middle alone would send four times as much
# as the one that lab 01's order needs. tplab's `tt.ParallelMLP` is column-first, like Megatron's. Llama's gated MLP
# (SwiGLU) has two matrices of columns and one of rows, and still needs one all-reduce in each pass.
#
# ## Attention: split between heads
#
# Like the MLP, a head reads $x$ through a few columns of three matrices, mixes tokens, and writes its result through a
# few rows of the output matrix.
#
# Here are two tokens and two heads of one feature each. All queries are zero, so each token takes the mean of the
# values up to and including its own.

# %%
def softmax(scores):
    return np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)

mean_so_far = softmax(np.array([[0, -np.inf], [0, 0]]))
values = np.array([[2.0, 1], [4, 3]])  # one row per token, one column per head
output = np.array([[1.0, 1], [0, 2]])  # one row per head
terms = [(mean_so_far @ values[:, [i]]) @ output[[i]] for i in (0, 1)]
whole = (mean_so_far @ values) @ output
matrices({"head 0's term": terms[0], "head 1's term": terms[1], "attention": whole})

# %% [markdown]
# Heads never look at each other. So a rank with whole heads computes its term of the result alone.
#
# **Predict.** There are two heads and four ranks. Can two ranks share a head, each with half of its features, if each
# does its own softmax and the results are added at the end?
#
# <details><summary>Answer</summary>
#
# No. A score is a sum over the head's features, so each of the two ranks has only a *term* of every score, and softmax
# must see the sum. Adding up the scores first is one more collective, of $S^2$ scores per head and sample.
#
# </details>
#
# ## Build it
#
# A norm must also see finished sums. So each half of the block has its own $f$ and $g$:
#
# ```
#  x ─┬─ norm ─ f ─ q,k,v ─ heads ─ o ─ g ─ + ─┬─ norm ─ f ─ a ─ gelu ─ b ─ g ─ + ─ y
#     └─────────────────────────────────────┘  └────────────────────────────────┘
#      [B, S, D]       n/tp heads               [B, S, D]  4D/tp features
#  on all ranks         per rank             on all ranks     per rank
# ```
#
# With all $n$ heads, of $d$ features each, `heads` is plain attention.

# %%
def heads(x, q, k, v, o):  # x [B, S, D]   q, k, v [n, D, d]   o [n, d, D]: n heads
    q, k, v = (torch.einsum("bsD,nDd->bnsd", x, w) for w in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.einsum("bnsd,ndD->bsD", y, o)  # the sum of these heads' terms

def norm(x, scale):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale

def block(x, w, f=tt.copy_to, g=tt.reduce_from):
    h = f(norm(x, w["scale_1"]), "tp")
    x = x + g(heads(h, w["q"], w["k"], w["v"], w["o"]), "tp")
    h = f(norm(x, w["scale_2"]), "tp")
    return x + g(F.gelu(h @ w["a"]) @ w["b"], "tp")

def plain_block(x, w):
    return block(x, w, f=lambda x, axis: x, g=lambda x, axis: x)

# %% [markdown]
# You can skim this cell, which sets up random weights and a training step. `SPECS` says how each weight is split.

# %%
COLUMNS, ROWS = P(None, "tp"), P("tp", None)
SPECS = {"scale_1": P(), **dict.fromkeys("qkvo", P("tp"))}
SPECS |= {"scale_2": P(), "a": COLUMNS, "b": ROWS}

def random_block(tokens, width, num_heads, dtype=torch.float64):  # x, dy, weights
    torch.manual_seed(0)
    D, d, n = width, width // num_heads, num_heads
    shapes = {"scale_1": (D,), **dict.fromkeys("qkv", (n, D, d)), "o": (n, d, D)}
    shapes |= {"scale_2": (D,), "a": (D, 4 * D), "b": (4 * D, D)}
    w = {name: torch.randn(size, dtype=dtype) / D**0.5 for name, size in shapes.items()}
    x, dy = (torch.randn(1, tokens, D, dtype=dtype) for _ in range(2))
    return x, dy, w

def training_step(x, dy, w, block):  # dy: what the next block would hand back
    x, w = x.requires_grad_(), {name: part.requires_grad_() for name, part in w.items()}
    y = block(x, w)
    y.backward(dy)
    return y.detach(), {"x": x.grad, **{name: part.grad for name, part in w.items()}}

GIVEN, TAKEN = (P(), P(), SPECS, None), (P(), {"x": P(), **SPECS})
small = random_block(tokens=12, width=24, num_heads=12)
want_y, want = tt.run(training_step, Mesh(tp=1), *small, plain_block).per_rank[0]

def close(one, other):
    return torch.allclose(one, other, rtol=0, atol=1e-10)

specs = {"in_specs": GIVEN, "out_specs": TAKEN}
for ranks in (2, 3, 4, 6, 12):
    y, grads = tt.run(training_step, Mesh(tp=ranks), *small, block, **specs).value
    right = [name for name in want if close(grads[name], want[name])]
    assert close(y, want_y) and len(right) == len(want)
print("y and the gradients of", ", ".join(right), "are those of the plain block")

# %% [markdown]
# ## See it run: four all-reduces
#
# We run a block of a seven-billion-parameter model on four H100s of one node, with times **modelled** from the data
# sheet. (On torch's `meta` device, tensors have shapes but no numbers.)

# %% tags=["opening-picture"]
def modelled(ranks, tokens=2048, cluster="h100"):
    with torch.device("meta"):
        large = random_block(tokens, width=4096, num_heads=32, dtype=torch.bfloat16)
    options = {"in_specs": GIVEN, "cluster": cluster, "device": "meta"}
    return tt.run(training_step, Mesh(tp=ranks), *large, block, **options).trace

timeline(modelled(4))

# %% [markdown]
# Two all-reduces come from $g$ in the forward pass, and two from $f$ in the backward pass. Each adds up a whole
# activation, so each rank sends $4 \cdot 2\frac{R-1}{R}BSD$ elements in a step.
#
# Next we **measure** a smaller block on one and on two processes of your machine, on GPUs if there are enough. The
# second process usually gains less than in the model of a `laptop`: real processes share the memory's bandwidth and
# copy each message. (Compare gains, not times.)

# %% tags=["nbval-ignore-output"]
smaller = random_block(tokens=256, width=512, num_heads=8, dtype=torch.float32)
torch.set_num_threads(1)  # one core per rank
for ranks in (1, 2):
    args = training_step, Mesh(tp=ranks), *smaller, block
    runs = [tt.run(*args, in_specs=GIVEN, on="processes") for _ in range(4)]
    took = 1e3 * min(out.trace.makespan for out in runs)
    model = 1e3 * tt.run(*args, in_specs=GIVEN, cluster="laptop").trace.makespan
    where = runs[0].per_rank[0][0].device.type
    print(f"tp={ranks}: {took:.0f} ms measured ({where}), {model:.0f} ms modelled")

# %% [markdown]
# **Predict.** Leave out the $f$ before the MLP. No error is raised. Which of these are wrong: `y`, the gradients of the
# MLP's matrices, of `scale_2`, of attention's matrices?
#
# <details><summary>Answer</summary>
#
# In the forward pass $f$ does nothing, so `y` is right. The MLP's matrices come after $f$, and their gradients are
# right too. Everything *before* it receives only this rank's part of a gradient: `scale_2`, attention, and every
# earlier block.
#
# </details>

# %%
def without_f(x, w):
    h = tt.copy_to(norm(x, w["scale_1"]), "tp")
    x = x + tt.reduce_from(heads(h, w["q"], w["k"], w["v"], w["o"]), "tp")
    h = norm(x, w["scale_2"])  # no f
    return x + tt.reduce_from(F.gelu(h @ w["a"]) @ w["b"], "tp")

out = tt.run(training_step, Mesh(tp=2), *small, without_f, in_specs=GIVEN)
parts = [grads["scale_2"] for _, grads in out.per_rank]
shown = {"rank 0": parts[0], "rank 1": parts[1]}
shown |= {"added": sum(parts), "right": want["scale_2"]}
first = {name: grad[:4] for name, grad in shown.items()}
matrices(first, "The gradient of scale_2, its first four entries")

# %% [markdown]
# Each rank would now train a different `scale_2`. With `out_specs`, as above, `run` compares the copies and raises an
# error.
#
# ## Why tensor parallelism stops at eight
#
# Here is the large block on more and more H100s, in nodes of eight, by the **forecast** `h100-measured`. Sixteen ranks,
# in two nodes, have two bars: one for NVIDIA's InfiniBand NDR, and one for the network of Hugging Face's Ultra-Scale
# Playbook ([lab 03](03_network_levels.ipynb)). (± is the forecast's median error on measured rows that its fit has not
# seen.) Operations that are as large on two ranks as on one are *not divided*. Change the number of tokens. How much
# does each doubling save?

# %%
from tplab import cost
from tplab.widgets import Bars, Row, knob

def parts_of(ranks, tokens, cluster):
    runs = [modelled(n, tokens, cluster).select(rank=0) for n in (1, 2, ranks)]
    computing = [run.select(kind="compute").events for run in runs]
    launch, parts = cluster.chip.launch, {}
    for one, two, here in zip(*computing, strict=True):
        part = "attention, gelu" if two.bytes < one.bytes else "not divided"
        part = "matmuls" if here.op in ("mm", "bmm") else part
        parts[part] = parts.get(part, 0) + here.end - here.start - launch
    parts["launches"] = launch * len(computing[0])
    nbytes = tokens * 4096 * 2
    parts["all-reduces"] = 4 * cluster.collective_seconds("all_reduce", nbytes, ranks)
    return parts

playbook, infiniband = (cost.find("h100-measured", fabric=name)
                        for name in ("playbook", "infiniband-ndr"))

def bars(tokens):
    rows = [Row(f"{n} rank{'s' * (n > 1)}", parts_of(n, tokens, playbook))
            for n in (1, 2, 4, 8)]
    rows += [Row(f"16 ranks, {name}", parts_of(16, tokens, cluster))
             for name, cluster in [("InfiniBand", infiniband), ("playbook", playbook)]]
    on_ib, on_playbook = (rows[3].total / row.total for row in rows[4:])
    return Bars(rows, f"16 ranks are {on_ib:.2f} times as fast as 8 ranks on InfiniBand"
                      f", and {on_playbook:.2f} times on the playbook's network.")

options = {tokens: bars(tokens) for tokens in (1024, 4096, 16384)}
kinds = playbook.kind_on(8), playbook.kind_on(16)
about = "H100s, bfloat16; in a node: {}; {}".format(*kinds)
knob("More and more ranks", "tokens", options, start=4096, about=about)

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# Inside the node, each doubling saves less than the one before. The matmuls get shorter, but norms and residuals are
# the same on every rank, there are as many launches as before, and an all-reduce takes about as long on eight ranks as
# on four.
#
# Between nodes, it depends on the network. At 4,096 tokens, sixteen ranks are a little faster than eight on
# InfiniBand, and less than half as fast on the playbook's network. Either way, it takes twice the GPUs. If there are enough
# samples, let the other eight GPUs train on their own ([lab 16](16_data_parallel.ipynb)). (With fused kernels there
# is less to compute, so all-reduces weigh more.)
#
# </details>
#
# **Measured.** For the playbook, Hugging Face trained models on up to 256 H100s. The two runs of a pair have the
# same number of GPUs and the same batch, but the second has twice the `tp` and half the `dp`. So each of its replicas
# has twice as many ranks and samples, and its speed-up is twice the ratio of the times. Here are the medians, and
# forecasts of the same steps on both networks. (A microbatch is a number of sequences of 4,096 tokens.)

# %%
from statistics import median
from tplab.forecast import Model, forecast
from tplab.forecast.measured import pairs

def seconds(run, cluster):  # None: as measured
    sizes = {"batch": run.batch, "sequence": run.sequence, "stack": run.stack}
    found = run if cluster is None else forecast(run.model, run.plan, cluster, **sizes)
    return found.seconds

print("tp       microbatch  pairs  measured             playbook  InfiniBand")
for few, many in ((4, 8), (8, 16)):
    for microbatch in (1, 2, 4):
        found = pairs(few, many, microbatch)
        taken = [[2 * seconds(a, on) / seconds(b, on) for a, b in found]
                 for on in (None, playbook, infiniband)]
        least, most = min(taken[0]), max(taken[0])
        print(f"{few} -> {many:<2} {microbatch:>10} {len(found):>7}   "
              "{:.2f} ({:.2f} to {:.2f})  {:>6.2f} {:>10.2f}".format(
                  median(taken[0]), least, most, *map(median, taken[1:])))

# %% [markdown]
# On this cluster, tensor parallelism stops paying at the boundary of the node: sixteen ranks process fewer tokens per
# second than eight. The playbook's network was fitted to these runs, so its column had to agree. We know of no run that
# tests the other. By the forecast, most of the cost is latency, paid four times per block. But eight is not a
# law: in an NVL72 rack, 72 GPUs share NVLink.
#
# ## A block of today
#
# Our block has GPT-3's matrices. [Llama 3 8B](https://arxiv.org/abs/2407.21783) has seven
# matrices per block, and still four all-reduces. Its 32 query heads share eight heads of keys and values (**grouped
# queries**). Sixteen ranks would hold each of these twice.
#
# With $N$ parameters, a block's matmuls (without scores) take $6\,BSN/R$ operations per step. Its all-reduces send
# $8\frac{R-1}{R}BSD$ elements. By the data sheet, both take the same time when
#
# $$R - 1 = \frac{3N}{8D} \cdot \frac{\text{B/s}}{\text{FLOP/s}}$$

# %%
sheet = cost.find("h100")
ratio = sheet.inner_link.bandwidth / sheet.chip.flops["bfloat16"]
for name in ("megatron-7.5b", "gpt3-175b", "llama3-8b"):
    model = Model.find(name)
    parameters, width = model.layer_parameters, model.hidden
    heads = f"{model.heads} query heads, {model.num_kv_heads} of keys"
    equal = 1 + 3 * parameters / (8 * width) * ratio
    print(f"{name:<13} width {width:>6,}, {heads}: N = {parameters / width**2:.1f} D²,"
          f" {equal:4.1f} ranks")

# %% [markdown]
# A block that is three times as wide can use about three times as many ranks.
#
# ## The same in JAX
#
# As in lab 01, JAX needs no $f$ to be right. Here is the block without $f$ and with it:

# %%
import jax
import jax.numpy as jnp
import tplab.jax as tj

def norm_in_jax(x, scale):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale

def heads_in_jax(x, q, k, v, o):
    q, k, v = (jnp.einsum("bsD,nDd->bsnd", x, w) for w in (q, k, v))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return jnp.einsum("bsnd,ndD->bsD", y, o)

def block_in_jax(x, w, f):
    h = f(norm_in_jax(x, w["scale_1"]))
    x = x + tj.reduce_from(heads_in_jax(h, w["q"], w["k"], w["v"], w["o"]), "tp")
    h = f(norm_in_jax(x, w["scale_2"]))
    hidden = jax.nn.gelu(h @ w["a"], approximate=False)
    return x + tj.reduce_from(hidden @ w["b"], "tp")

def step_in_jax(x, dy, w, f):
    y, backward = jax.vjp(lambda x, w: block_in_jax(x, w, f), x, w)
    return y, *backward(dy)

def with_f(h):
    return tj.copy_to(h, "tp")

def no_f(h):
    return h

arrays = jax.tree.map(np.asarray, small)
for f in (no_f, with_f):
    options = {"in_specs": GIVEN, "out_specs": (P(), P(), SPECS)}
    out = tj.run(step_in_jax, Mesh(tp=4), *arrays, f, **options)
    grads = {"x": out.value[1], **out.value[2]}
    off = max(np.abs(grads[name] - want[name].numpy()).max() for name in want)
    is_right = "right" if off < 1e-3 else "wrong"  # JAX computes in float32
    sums = len(out.trace.select(rank=0, kind="collective"))
    print(f"{f.__name__}: gradients {is_right}, {sums} all-reduces")

# %% [markdown]
# Both are right, but without $f$ there are six all-reduces. JAX's types put $f$ where `h` meets each of `q`, `k` and
# `v`. One `copy_to` before them turns three into one. (XLA on a GPU or TPU may combine the three.)
#
# ## A bug to repair
#
# This is the row-parallel layer of lab 01's exercise, as
# [text-generation-inference](https://github.com/huggingface/text-generation-inference/issues/1036) once had it. A bias
# often starts at zero, and then a test of a new layer passes. With a trained bias it looks like this:

# %%
def down(hidden, b, bias):  # hidden [B, S, H/tp]   b [H/tp, D]   bias [D]
    return tt.reduce_from(hidden @ b + bias, "tp")

features = P(None, None, "tp")  # how the hidden activation is split
rng, trained = np.random.default_rng(0), np.linspace(0.5, 1.5, 12)
data = rng.normal(size=(2, 6, 48)), rng.normal(size=(48, 12)), trained
split = {"in_specs": (features, ROWS, P()), "out_specs": P()}
one, four = (tt.run(down, Mesh(tp=ranks), *data, **split).value for ranks in (1, 4))
shown = {"1 rank": one, "4 ranks": four, "difference": four - one}
first = {name: y[0, 0, :4] for name, y in shown.items()} | {"bias": trained[:4]}
matrices(first, "y of the first token, its first four features")

# %% [markdown]
# The tool of [lab 09](09_hugging_face_gpt2.ipynb) catches this even in a new layer: it first replaces parameters that
# are all zeros.
#
# Fix `down`, run its cell, and then this one. The check refuses two repairs that are only good enough for inference:
# each rank adds a share of the bias, or only rank 0 adds it, as in
# [nano-vllm](https://github.com/GeeeekExplorer/nano-vllm/issues/99).

# %%
from tplab.exercises.megatron_block import check_down

check_down(down)

# %% [markdown]
# ## Your turn: half the all-reduces
#
# The block needs two pairs of $f$ and $g$ because the MLP reads what attention has written. In some models
# ([GPT-J](https://github.com/kingoflolz/mesh-transformer-jax), PaLM) both read the same input:
#
# $$h = \mathrm{norm}(x) \qquad y = x + \mathrm{heads}(h) + \mathrm{gelu}(h A)\, B$$
#
# Write it in torch, with as few all-reduces as you can. The weights are this rank's, as in `block`. You may use `norm`
# and `heads`. The check differentiates, so mind the gradient of `scale`.

# %%
def parallel_block(x, scale, q, k, v, o, a, b):  # x [B, S, D]   ->   [B, S, D]
    ...

# %%
from tplab.exercises.megatron_block import check_parallel_block

check_parallel_block(parallel_block)

# %% [markdown]
# ## On Monday
#
# | here | Megatron-LM | torch DTensor | JAX |
# |---|---|---|---|
# | `q`, `k`, `v`, `a` by columns | `ColumnParallelLinear` | `ColwiseParallel()` | `P(None, "tp")` |
# | `o`, `b` by rows | `RowParallelLinear` | `RowwiseParallel()` | `P("tp", None)` |
#
# ## To take away
#
# - Columns, then rows, need one all-reduce in each pass, if every rank has whole features or whole heads in between. A
#   block has two such pairs, so a training step has four all-reduces.
# - A forgotten $f$ or a bias that is added too early raises no error. Compare gradients, with parameters that are not
#   zero.
# - Over two nodes of the playbook's cluster, sixteen ranks process fewer tokens per second than eight, because every
#   all-reduce waits for the network.
#
# **Sources.** Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053). Chowdhery et al. 2022,
# [PaLM](https://arxiv.org/abs/2204.02311). Throughput on 16 GPUs: the interactive plot of the [Ultra-Scale
# Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), Apache-2.0, commit 924e4d0.
#
# Next: [05 Block memory](05_block_memory.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
