# %% [markdown]
# # 06 Vocabulary
#
# **How can ranks agree on a loss when none of them has all the logits?**
#
# Prerequisites: [lab 01](01_split_a_layer.ipynb), which explains $f$ and $g$. Time: one hour.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/06_vocabulary.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/06_vocabulary.ipynb)
#
# ![Three numbers per token on each of four ranks, the combined numbers, and the loss that follows from them.](images/06_vocabulary.png)
#
# *The loss of four tokens, one per row. Each rank has the logits of a quarter of the vocabulary, and computes three
# numbers per token from them. The ranks combine these with one maximum and two sums.*

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
from tplab.widgets import animate, matrices, timeline

# %% [markdown]
# ## By hand: a vocabulary of ten on four ranks
#
# A model knows each entry of its vocabulary by a number, the **id**. The **embedding** is a table with one row per
# entry. In GPT-2 it has 39 of the 124 million parameters, in Llama 3 8B 525 million. To save memory, each rank gets
# the rows of some entries. Here are ten entries on four ranks:

# %%
V = 10
table = 10 * np.arange(V)[:, None] + np.array([1.0, 2])  # row v: [10 v + 1, 10 v + 2]
most = -(-V // 4)  # ten entries on four ranks, rounded up: 3
pieces = [table[most * rank : most * (rank + 1)] for rank in range(4)]
by_rank = {f"rank {rank}": piece for rank, piece in enumerate(pieces)}
matrices(by_rank, "The rows of ten entries, on four ranks")

# %% [markdown]
# Every rank reads the same tokens, looks up those whose rows it has, and writes zeros for the others.

# %%
ids = np.array([7, 2, 9, 4])

def look_up(rank):
    rows = np.zeros((len(ids), 2))
    for token, entry in enumerate(ids):
        if entry // most == rank:
            rows[token] = pieces[rank][entry % most]
    return rows

found = [look_up(rank) for rank in range(4)]
panels = {f"rank {rank}": rows for rank, rows in enumerate(found)}
matrices({**panels, "the sum": sum(found)}, "The rows of entries 7, 2, 9 and 4")

# %% [markdown]
# One `all_reduce` of a tensor [tokens, width] then gives every rank all the rows.
#
# **Predict.** A sum of floating-point numbers depends on the order of its terms. How much rounding do you expect in
# this one?
#
# <details><summary>Answer</summary>
#
# None. At most one term of each sum is not zero. So the embedding is right to the last bit, on any number of ranks.
#
# </details>
#
# ## Build the embedding
#
# Four ranks cannot share ten entries equally. You can pad the table, as Megatron-LM does, or give the last ranks fewer
# entries, as above and in tplab's torch layers. So each rank has to know where its entries begin:

# %%
def own_ids(vocab_size):  # this rank's first id, and how many it has
    most = -(-vocab_size // tt.axis_size("tp"))
    begin = min(tt.axis_index("tp") * most, vocab_size)
    return begin, min(most, vocab_size - begin)

def own_rows(table):
    begin, count = own_ids(len(table))
    return table[begin : begin + count]

def embed(rows, ids, vocab_size):  # rows [n, D]   ids [T]   ->   [T, D], replicated
    begin, count = own_ids(vocab_size)
    here = (ids >= begin) & (ids < begin + count)
    y = rows[torch.where(here, ids - begin, 0)]  # row 0 for ids of other ranks,
    return tt.reduce_from(y * here[:, None], "tp")  # which is then set to zero

def whole_to_rows(table, ids):
    return embed(own_rows(table), ids, V)

for mesh in (Mesh(tp=1), Mesh(tp=3), Mesh(tp=4), Mesh(tp=5)):
    rows = tt.run(whole_to_rows, mesh, table, ids, out_specs=P()).value
    print(f"{mesh}:", "equal" if (rows.numpy() == table[ids]).all() else "off")

# %% [markdown]
# ## By hand: a loss without the logits
#
# At the other end, the model predicts the *next* token. It computes a **logit** $z_v$ for each entry $v$. If the
# correct next token is entry $t$, the loss is
#
# $$-\log \frac{e^{z_t}}{\sum_v e^{z_v}} = \log \sum_v e^{z_v} - z_t$$
#
# A rank has the logits of its own entries, here logarithms of small integers. The correct entry is 3, rank 1's first.

# %%
exps = [np.array(piece, float) for piece in ([1, 2, 1], [4, 1, 1], [2, 1, 2], [1])]
logits, target = np.log(np.concatenate(exps)), 3
sums = np.array([piece.sum() for piece in exps])
by_rank = {f"rank {rank}": piece for rank, piece in enumerate(exps)}
matrices({**by_rank, "sums": sums}, "The exponentials of ten logits, on four ranks")

# %% [markdown]
# **Predict.** What is the loss? In the first picture, ranks combine a maximum, a sum of exponentials and the logit of the
# correct entry. Which of these can they do without here?
#
# <details><summary>Answer</summary>
#
# The exponentials add up to $4 + 6 + 5 + 1 = 16$, and that of the correct entry is 4. So the loss is
# $\log \frac{16}{4} = \log 4$. Each rank has one term of the 16. Only rank 1 has the logit of the correct entry, and
# the other ranks add 0 to it. That makes two sums, and no maximum.
#
# </details>

# %%
loss = np.log(sums.sum()) - logits[target]
print(f"exp(loss) = {np.exp(loss):.3g}")

# %% [markdown]
# A computer also needs the maximum, because $e^{1000}$ overflows. You may subtract the same number $m$ from every logit
# without changing the loss:
#
# $$\log \sum_v e^{z_v - m} - (z_t - m) = \log \sum_v e^{z_v} - z_t$$
#
# If $m$ is the largest logit on *all* ranks, no exponent is above zero.
#
# ## Build the loss

# %%
def cross_entropy(logits, ids, vocab_size):
    """logits [T, n]   ids [T]   ->   loss [T], replicated; this rank's three numbers"""
    begin, count = own_ids(vocab_size)
    own_m = logits.detach().amax(-1)  # [T]  the largest logit of each token
    m = tt.all_reduce(own_m, "tp", "max")
    z = logits - m[:, None]
    own_s = z.exp().sum(-1)  # [T]
    s = tt.all_reduce(own_s, "tp")
    here = (ids >= begin) & (ids < begin + count)
    own_z = z.gather(-1, torch.where(here, ids - begin, 0)[:, None])[:, 0]
    own_z = torch.where(here, own_z, 0)  # [T]  0 on all ranks but one
    z_t = tt.all_reduce(own_z, "tp")
    return s.log() - z_t, (own_m, own_s, own_z)

def loss_of_four_tokens(logits, ids):
    loss, three = cross_entropy(logits, ids, 12)
    return loss, torch.stack(three, 1)

rng = np.random.default_rng(0)
twelve = rng.integers(-2, 3, (4, 12)).astype(float)  # 4 tokens, 12 entries
SPECS = P(None, "tp"), P()
on_four = {"in_specs": SPECS, "out_specs": P()}
out = tt.run(loss_of_four_tokens, Mesh(tp=4), twelve, ids, in_specs=SPECS)
animate(out.trace)

# %% [markdown]
# Each of the three collectives combines one number per token. (In the picture, a is $m$, b is $s$ and c is $z_t - m$.)
# Below are these numbers, on each rank and combined. A row is a token, and the columns are $m$, $s$ and $z_t - m$. The
# vocabulary now has twelve entries, three on each rank, and the correct ones are 7, 2, 9 and 4.

# %% tags=["opening-picture"]
losses, put_in = zip(*out.per_rank)
panels = {f"rank {rank}": three.numpy() for rank, three in enumerate(put_in)}
combined = out.trace.select(kind="collective", rank=0).events
panels["max, sum, sum"] = np.stack([event.values for event in combined], 1)
panels["loss = log s - (z_t - m)"] = losses[0].numpy()[:, None]
title = "Largest logit m, sum of exponentials s, correct entry's logit minus m"
matrices(panels, title)

# %% [markdown]
# Now we compare the loss and its gradient with torch's own, even for logits as large as ten thousand. The backward pass
# sends nothing: the gradient of the loss with respect to $z_v$ is $e^{z_v} / \sum e^{z}$, minus 1 for the correct entry,
# and each rank already has these numbers.

# %%
def own_columns(logits):
    return own_rows(logits.T).T

def loss_and_gradient(logits, ids):
    own = own_columns(logits).clone().requires_grad_()
    loss, _ = cross_entropy(own, ids, logits.shape[-1])
    loss.sum().backward()
    return loss.detach(), own.grad

for ranks, scale in ((2, 1), (3, 1), (4, 1), (5, 1), (4, 1e4)):
    z, correct = rng.normal(size=(6, 41)) * scale, rng.integers(0, 41, 6)
    plain = torch.tensor(z, requires_grad=True)
    right = F.cross_entropy(plain, torch.tensor(correct), reduction="none")
    right.sum().backward()
    out = tt.run(loss_and_gradient, Mesh(tp=ranks), z, correct)
    found, grads = zip(*out.per_rank)
    is_right = all(torch.allclose(one, right.detach()) for one in found)
    is_right = is_right and torch.allclose(torch.cat(grads, 1), plain.grad)
    num_sums = len(out.trace.select(rank=0, kind="collective"))
    said = f"{'equal' if is_right else 'off'}; {num_sums} all_reduces"
    print(f"{ranks} ranks, logits of size {scale:,.0f}: {said}")

# %% [markdown]
# tplab's `vocab_parallel_cross_entropy` does the same. It puts both sums into one message: the same bytes, with fewer
# hops.
#
# ## One table, used twice
#
# Each token has a vector $x$, and the head multiplies it with one row per entry: $z = x W^\top$. In GPT-2 $W$ is the
# table of the embedding: its head is **tied** to it. The rank that has an entry's row also computes its logit. So the
# head is a column-parallel layer, with $f$ before it and nothing gathered after it.
#
# **Predict.** A table that is used twice receives a gradient from each use. What has to be sent to add the two up?
#
# <details><summary>Answer</summary>
#
# Nothing. Both uses of a row are on the same rank, and autograd adds their gradients there.
#
# </details>

# %%
def step(table, ids, targets, untied_on=None):  # look up, tanh, head, loss
    rows = own_rows(table).clone().requires_grad_()
    head = rows
    if tt.axis_index("tp") == untied_on:
        head = rows.detach().clone().requires_grad_()
    x = torch.tanh(embed(rows, ids, V))
    logits = tt.copy_to(x, "tp") @ head.T
    loss = tt.vocab_parallel_cross_entropy(logits, targets, "tp", V)
    loss.backward()
    return loss.detach(), rows.grad

W, targets = rng.normal(size=(V, 3)), np.array([2, 9, 4, 6])
out = tt.run(step, Mesh(tp=4), W, ids, targets)
losses, grads = zip(*out.per_rank)

whole = torch.tensor(W, requires_grad=True)  # the same on one rank
F.cross_entropy(torch.tanh(whole[ids]) @ whole.T, torch.tensor(targets)).backward()
is_right = torch.allclose(torch.cat(grads), whole.grad, rtol=1e-12, atol=1e-12)
print("the gradient of the table:", "equal" if is_right else "off")
for event in out.trace.select(rank=0, kind="collective").events:
    print(event.op, list(event.shape))

# %% [markdown]
# There are four all_reduces: one for the embedding, two for the loss (the maximum, then both sums), and that of $f$ in
# the backward pass. None is for the table.
#
# Now break the tie on one rank, as happens when loading a checkpoint gives the head its own copy. No error is raised,
# and the first loss is right. But rank 2 loses the part of its gradient that comes from the head:

# %%
broken_losses, broken = zip(*tt.run(step, Mesh(tp=4), W, ids, targets, 2).per_rank)
print("the same loss:", broken_losses[0].item() == losses[0].item())
panels = {"tied": grads[2], "tie broken": broken[2], "lost": grads[2] - broken[2]}
matrices(panels, "Rank 2: the gradient of the rows of entries 6, 7 and 8")

# %% [markdown]
# ## The same in JAX
#
# `detach` becomes `stop_gradient`, and `gather` becomes `take_along_axis`. JAX compiles one program for all ranks, so
# all pieces have the same width, and ten entries on four ranks are padded.

# %%
import jax
import jax.numpy as jnp
import tplab.jax as tj

def loss_in_jax(logits, ids):  # logits [T, n]   ids [T]   ->   [T], replicated
    begin, n = tj.axis_index("tp") * logits.shape[-1], logits.shape[-1]
    own_max = jax.lax.stop_gradient(logits).max(-1)
    z = logits - tj.all_reduce(own_max, "tp", "max")[:, None]
    total = tj.all_reduce(jnp.exp(z).sum(-1), "tp")
    here = (ids >= begin) & (ids < begin + n)
    of_id = jnp.take_along_axis(z, jnp.where(here, ids - begin, 0)[:, None], -1)[:, 0]
    return jnp.log(total) - tj.all_reduce(jnp.where(here, of_id, 0), "tp")

right = F.cross_entropy(torch.tensor(twelve), torch.tensor(ids), reduction="none")
ours = tj.run(loss_in_jax, Mesh(tp=4), twelve, ids, **on_four).value
print("twelve entries:", "equal" if np.allclose(ours, right, rtol=1e-5) else "off")

# %% [markdown]
# **Predict.** We pad the ten logits from above to twelve with two zeros. The right loss is $\log 4$. What does
# `loss_in_jax` return?
#
# <details><summary>Answer</summary>
#
# $e^0 = 1$, and there are two of these. So the sum is 18 and the loss is $\log \frac{18}{4}$.
#
# </details>

# %%
padded = np.asarray(tj.pad_vocabulary(logits[:, None], 4)).T  # [1, 12]
right_id = np.array([target])

def masked(logits, ids):  # tplab's loss knows that there are ten entries
    return tj.vocab_parallel_cross_entropy(logits, ids, "tp", V, "none")

for loss_of in (loss_in_jax, masked):
    one = tj.run(loss_of, Mesh(tp=4), padded, right_id, **on_four).value[0]
    print(f"{loss_of.__name__}: exp(loss) = {np.exp(one):.3g}")

# %% [markdown]
# In torch, tplab raises an error for an id that no entry has. A compiled JAX program cannot, so the loss is NaN instead.
#
# ## See it run
#
# Here is the forward pass of GPT-2's head and loss, in bfloat16 with 2,048 tokens on four ranks of an H100 node. The
# times are **forecast** (`h100-measured`). First with gathered logits:

# %%
SIZES = {"GPT-2": (50_260, 768), "Llama 3 8B": (128_256, 4096)}  # vocabulary, width

def gathering(x, head, ids):
    logits = tt.gather_from(tt.copy_to(x, "tp") @ head.T, "tp")
    return F.cross_entropy(logits.float(), ids)

def in_place(x, head, ids):
    logits = tt.copy_to(x, "tp") @ head.T
    entries = len(head) * tt.axis_size("tp")
    return tt.vocab_parallel_cross_entropy(logits, ids, "tp", entries)

def traced(fn, tokens, model="GPT-2"):
    entries, width = SIZES[model]
    shapes = (tokens, width), (entries, width)
    sizes = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes]
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    options = {"in_specs": (P(), P("tp"), P()), "cluster": "h100-measured"}
    return tt.run(fn, Mesh(tp=4), *sizes, ids, **options).trace

timeline(traced(gathering, 2048))

# %%
timeline(traced(in_place, 2048))

# %% [markdown]
# The long message is gone. Each rank now works on a quarter of the logits, but computing takes more than half as long as
# before: both ways convert logits to float32, but then torch's loss is one pass over them, and ours is four. Without the
# conversion, which Megatron and Hugging Face also make, gathering would take 726 µs instead of 1,083.
#
# Now turn the knob. The vocabulary of **Llama 3 8B** has 128,256 entries. (GPT-2's 50,257 are padded, so that 4 divides
# them.) With fewer tokens, which way is faster, and why?

# %%
from tplab.cost import find
from tplab.widgets import Bars, Row, bytes_text, knob

CLUSTER = find("h100-measured")

def parts(trace):  # of rank 0, where nothing overlaps
    computing = trace.select(rank=0, kind="compute")
    launches = len(computing) * CLUSTER.chip.launch
    busy = sum(event.duration for event in computing.events)
    rest = {"computing": busy - launches, "messages": trace.makespan - busy}
    return {"launches": launches, **rest}

def bars(tokens):
    rows, said = [], []
    for model in SIZES:
        both = [Row(f"{model}, {name}", parts(traced(fn, tokens, model)))
                for name, fn in (("gathered", gathering), ("3 numbers", in_place))]
        times = both[0].total / both[1].total
        faster, times = ("3 numbers", times) if times > 1 else ("gathering", 1 / times)
        said.append(f"{model}: {faster}, {times:.1f} times as fast.")
        rows += both
    return Bars(rows, " ".join(said))

options = {2**k: bars(2**k) for k in range(5, 14)}
about = f"forward pass on 4 ranks of an H100 node, bfloat16; {CLUSTER.label}"
knob("The loss of a model's logits", "tokens", options, start=2048, about=about)

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# With 32 tokens gathering is faster for both, and with 64 for GPT-2 only, because each of our many operations has to be
# launched. The forecast charges 2.4 µs per launch. Without launches, the three numbers always win. A compiler or
# a hand-written kernel ([Liger](https://github.com/linkedin/Liger-Kernel/pull/1260) has one) removes most of them.
#
# </details>
#
# ## What it costs
#
# For $T$ tokens, width $D$, a vocabulary of $V$ entries and $R$ ranks, each rank
#
# - holds $VD/R$ weights and $TV/R$ logits. If they are gathered, every rank holds $TV$, and as much again for the
#   gradient;
# - sends $2\frac{R-1}{R}TD$ elements for the embedding (forward), and as many for the head (backward, $f$);
# - sends $3 \cdot 2\frac{R-1}{R}T$ elements for the loss. Gathering would send $\frac{R-1}{R}TV$.
#
# Here are the bytes for 8,192 tokens, which is one sequence of Llama 3:

# %%
from tplab.forecast import Model, Plan
from tplab.forecast.activations import kept

for model, (entries, width) in SIZES.items():
    apart = [traced(fn, 8192, model).bytes_sent(rank=0) for fn in (gathering, in_place)]
    held = " of table, ".join(bytes_text(2 * entries * n) for n in (width, 8192))
    ratio = f"{apart[0] / apart[1]:,.0f} times {bytes_text(apart[1])}"
    print(f"{model:<10} {held} of logits; gathering sends {ratio}")
for ranks in (1, 4, 8):
    nbytes = kept(Model.find("llama3-8b"), Plan(tp=ranks), 8192).logits
    print(f"Llama 3 8B in Megatron, {ranks} rank(s): {bytes_text(nbytes)} for the loss")

# %% [markdown]
# The three numbers are float32 and the logits are bfloat16, so gathering sends $V/12$ times as many bytes. In the last
# lines, Megatron keeps the logits in float32 and their gradient in bfloat16. On one rank, the loss of a sequence takes as
# much memory as five or six blocks ([lab 05](05_block_memory.ipynb)).
#
# ## A bug to repair: one maximum too few
#
# A colleague saves a collective: "A rank that subtracts its own largest logit cannot overflow. Why ask the others?" All
# ranks agree on the result, and with a single rank it is right. On four, the sums from above become
# 2, 1.5, 2.5 and 1, and the correct entry's exponential becomes 1:

# %%
def token_loss(logits, ids):  # logits [T, V/tp]   ids [T]   ->   [T], replicated
    begin, n = tt.axis_index("tp") * logits.shape[-1], logits.shape[-1]
    largest = logits.detach().amax(-1)
    z = logits - largest[:, None]
    total = tt.all_reduce(z.exp().sum(-1), "tp")
    here = (ids >= begin) & (ids < begin + n)
    of_id = z.gather(-1, torch.where(here, ids - begin, 0)[:, None])[:, 0]
    return total.log() - tt.all_reduce(torch.where(here, of_id, 0), "tp")

empty = np.array([[-np.inf, -np.inf]])  # the two empty places of rank 3: exp is 0
ten = np.hstack([logits[None], empty])
for mesh in (Mesh(tp=1), Mesh(tp=4)):
    one = tt.run(token_loss, mesh, ten, right_id, **on_four).value
    print(f"{mesh}: exp(loss) = {one.exp().item():.3g}")

# %% [markdown]
# Fix `token_loss` until its cell prints 4 twice. Then run the check, which also compares gradients.

# %%
from tplab.exercises.vocabulary import check_token_loss

check_token_loss(token_loss)

# %% [markdown]
# ## Your turn: the most likely token
#
# To generate text, a model needs the entry with the largest logit. Find its id for each token, without gathering the
# logits: what you send must not grow with the vocabulary. If several entries are equally likely, take the lowest id.
# The check also uses 400,000 entries, and logits in bfloat16. With `framework="jax"` it takes a JAX function.
#
# <details><summary>A hint</summary>
#
# First find the largest logit, and then the lowest id that has it: `all_reduce` can also take the `"min"`. What should a
# rank without the largest logit contribute?
#
# </details>

# %%
def most_likely(logits):  # logits [T, V/tp]   ->   ids [T], replicated
    ...

# %%
from tplab.exercises.vocabulary import check_most_likely

check_most_likely(most_likely)

# %% [markdown]
# ## On Monday
#
# | here | Megatron-LM | torch DTensor | JAX |
# |---|---|---|---|
# | `VocabParallelEmbedding` | the same name | `RowwiseParallel` on `nn.Embedding` | a table with `P("tp", None)` |
# | `vocab_parallel_cross_entropy` | the same name | `loss_parallel()` | written with `lax.pmax` and `lax.psum`, or left to `jit` |
# | a tied head | `share_embeddings_and_output_weights` | one parameter in two modules | the same array used twice |
# | `gather_from` | `gather_from_tensor_model_parallel_region` | `redistribute` to `Replicate()` | `lax.all_gather` |
#
# ## To take away
#
# - Each entry's row is on one rank. The others add zeros, so a look-up is one all-reduce. Tying the head to the
#   table needs no message.
# - A loss needs three numbers per token: one maximum and two sums. Gathering the logits sends thousands of
#   times as many bytes.
# - With few tokens, launches decide: by the forecast, gathering is faster, unless one kernel computes the loss.
#
# **Sources.** Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053), section 3. [transformers
# 37051](https://github.com/huggingface/transformers/issues/37051) (tied tables, and vocabularies that do not divide).
# [vLLM 440](https://github.com/vllm-project/vllm/issues/440) (a vocabulary of 250,682 on 8 ranks).
#
# Next: [07 Dropout](07_dropout.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
