# %% [markdown]
# # 06 Vocabulary and dropout
#
# **What must ranks tell each other to agree on a loss, and on which numbers to drop?**
#
# Time: one hour. Prerequisites: [lab 01](01_split_a_layer.ipynb), where $f$ and $g$ come from, and the block of
# [lab 04](04_megatron_block.ipynb).
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/06_vocabulary_and_dropout.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/06_vocabulary_and_dropout.ipynb)
#
# ![Four ranks in a ring. Three times every rank puts in a short tensor, and all end with the combined one.](images/06_vocabulary_and_dropout.png)
#
# *The loss of four tokens. Each rank has a quarter of their logits, and nobody ever gathers them. Three times the ranks
# combine one number a token: the largest logit, a sum, and the logit of the right word. Then all know the loss.*

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
from torch.nn import functional as F
from tplab import Mesh, P
from tplab.torch import all_reduce, axis_index, axis_size, copy_to, gather_from, reduce_from, run
from tplab.widgets import animate, matrices, timeline

# %% [markdown]
# ## By hand: ten words on four ranks
#
# To a model a word is a number, its **id**, and an **embedding** is a table with a row for each. In GPT-2 it has
# 50,257 rows of 768 numbers: 39 of the model's 124 million parameters. No rank should have to hold all of it, so each
# takes the rows of some words. Here are ten words; the rows say whose they are.

# %%
V = 10
table = 10 * np.arange(V)[:, None] + np.array([1.0, 2.0])  # row w: [10 w + 1, 10 w + 2]
most = -(-V // 4)  # ten over four, rounded up: 3
pieces = [table[most * rank : most * (rank + 1)] for rank in range(4)]
assert [len(piece) for piece in pieces] == [3, 3, 3, 1]
matrices({f"rank {rank}": piece for rank, piece in enumerate(pieces)}, "The rows of ten words, on four ranks")

# %% [markdown]
# All ranks read the same text. Each looks up the ids whose rows it has, and puts zeros where it has none.

# %%
ids = np.array([7, 2, 9, 4])

def look_up(rank):
    rows = np.zeros((len(ids), 2))
    for token, word in enumerate(ids):
        if word // most == rank:
            rows[token] = pieces[rank][word % most]
    return rows

found = [look_up(rank) for rank in range(4)]
assert (sum(found) == table[ids]).all()
panels = {f"rank {rank}": rows for rank, rows in enumerate(found)}
matrices({**panels, "the sum": sum(found)}, f"The words {ids.tolist()}: zeros and rows")

# %% [markdown]
# One `all_reduce` of [tokens, width], and everybody has the rows.
#
# **Predict.** Sums of floating-point numbers depend on the order, so in lab 02 we compared up to a rounding. Do we have
# to here?
#
# <details><summary>Answer</summary>
#
# No. Each word lies on exactly one rank, so in every sum at most one addend is not zero. Nothing is rounded: the
# embedding is right to the last bit, on any number of ranks.
#
# </details>

# %%
assert (np.count_nonzero(found, axis=0) == 1).all()

# %% [markdown]
# ## Build the embedding
#
# `P("tp")` cuts into equal pieces, and ten words cannot be had in four. Real vocabularies are like that:
# [250,682 words on 8 ranks](https://github.com/vllm-project/vllm/issues/440).

# %%
from tplab.errors import ShapeError

try:
    run(lambda table: table, Mesh(tp=4), table, in_specs=P("tp"))
except ShapeError as error:
    print(error)

# %% [markdown]
# There are two ways out. Pad the table to 12 rows that all can share; or let the last ranks have fewer words, as
# above. tplab's torch does the second. Then every rank must know where its words begin:

# %%
def own_words(vocab_size):  # the first word of this rank, and how many it has
    most = -(-vocab_size // axis_size("tp"))
    begin = min(axis_index("tp") * most, vocab_size)
    return begin, min(most, vocab_size - begin)

def own_rows(table):
    begin, count = own_words(len(table))
    return table[begin : begin + count]

def embed(rows, ids, vocab_size):  # rows [n, D]   ids [T]   ->   [T, D], the same on every rank
    begin, count = own_words(vocab_size)
    here = (ids >= begin) & (ids < begin + count)
    y = rows[torch.where(here, ids - begin, 0)]  # where the word is elsewhere: row 0 for now
    return reduce_from(y * here[:, None], "tp")  # and zeros in its place

for ranks in (1, 2, 3, 4, 5, 10):
    out = run(lambda table, ids: embed(own_rows(table), ids, V), Mesh(tp=ranks), table, ids, out_specs=P())
    assert (out.value.numpy() == table[ids]).all()

# %% [markdown]
# `VocabParallelEmbedding` is the same as a layer. It also minds what we did not: ids that are no words, and ranks that
# have no word at all, as the last two of seven here.

# %%
from tplab.torch import VocabParallelEmbedding

def layer(table, ids):
    embedding = VocabParallelEmbedding(V, 2, "tp").double()
    embedding.load_state_dict({"weight": own_rows(table)})
    return embedding(ids), len(embedding.weight)

for ranks in (4, 7):
    rows, counts = zip(*run(layer, Mesh(tp=ranks), table, ids).per_rank)
    assert all((y.numpy() == table[ids]).all() for y in rows)
    print(f"{ranks} ranks, words on each: {list(counts)}")

# %% [markdown]
# ## By hand: a loss without the logits
#
# At its other end the model gives each word a **logit** $z_v$. The loss of a token whose right word is $t$:
#
# $$-\log \frac{e^{z_t}}{\sum_v e^{z_v}} = \log \sum_v e^{z_v} - z_t$$
#
# Logits lie where their words lie. Let these be logarithms of small numbers, so that $e^z$ can be added in your head.
# The right word is number 3.

# %%
exps = [np.array(piece, float) for piece in ([1, 2, 1], [4, 1, 1], [2, 1, 2], [1])]
logits, target = np.log(np.concatenate(exps)), 3
sums = np.array([piece.sum() for piece in exps])
assert sums.tolist() == [4, 6, 5, 1]
by_rank = {f"rank {rank}": piece for rank, piece in enumerate(exps)}
matrices({**by_rank, "sums": sums}, "exp of the logits of ten words, on four ranks")

# %% [markdown]
# **Predict.** What is the loss? Which numbers must ranks tell each other to find it?
#
# <details><summary>Answer</summary>
#
# All exponentials together are $4 + 6 + 5 + 1 = 16$, the right word's is 4: the loss is $\log \frac{16}{4} = \log 4$.
# Each rank has one addend of the 16, and rank 1 alone knows the 4; the others can add 0 to it. Two sums of one number a
# token. Not one logit needs to be shown, but for the right word's.
#
# </details>

# %%
loss = np.log(sums.sum()) - logits[target]
assert np.isclose(loss, np.log(16 / 4))

# %% [markdown]
# Two sums, if we need not fear $e^{1000}$. A computer must: it is infinite. But the same number $m$ can be taken from
# every logit, since
#
# $$\log \sum_v e^{z_v - m} - (z_t - m) = \log \sum_v e^{z_v} - z_t$$
#
# With $m$ the largest logit of *all* words no exponent is above zero. That is the third number: a maximum.
#
# ## Build the loss

# %%
def cross_entropy(logits, ids, vocab_size):  # logits [T, n]   ids [T]   ->   [T], the same on every rank
    begin, count = own_words(vocab_size)
    largest = all_reduce(logits.detach().amax(-1), "tp", "max")  # [T]
    z = logits - largest[:, None]
    total = all_reduce(z.exp().sum(-1), "tp")  # [T]
    here = (ids >= begin) & (ids < begin + count)
    of_id = z.gather(-1, torch.where(here, ids - begin, 0)[:, None])[:, 0]
    of_id = all_reduce(torch.where(here, of_id, 0), "tp")  # [T]  zero from all ranks but one
    return total.log() - of_id

# %% [markdown]
# First the ten words, as by hand:

# %%
def own_columns(logits):
    return own_rows(logits.T).T

def loss_and_gradient(logits, ids):  # all logits on every rank, of which it takes its own
    own = own_columns(logits).clone().requires_grad_()
    loss = cross_entropy(own, ids, logits.shape[-1])
    loss.sum().backward()
    return loss.detach(), own.grad

by_hand = run(loss_and_gradient, Mesh(tp=4), logits[None], np.array([target])).per_rank
assert all(np.isclose(loss, np.log(4)) for loss, _ in by_hand)

# %% [markdown]
# Then other sizes, on other numbers of ranks, against torch's own loss: the gradient too, and with logits of ten
# thousand. Backward, every rank has all that it needs: $\partial\,\text{loss} / \partial z_v = e^{z_v} / \sum e^{z}$,
# less 1 for the right word. Nothing is sent.

# %%
rng = np.random.default_rng(0)
for ranks, scale in ((2, 1), (3, 1), (4, 1), (5, 1), (4, 1e4)):
    z, words = rng.normal(size=(6, 41)) * scale, rng.integers(0, 41, 6)
    plain = torch.tensor(z, requires_grad=True)
    right = F.cross_entropy(plain, torch.tensor(words), reduction="none")
    right.sum().backward()
    out = run(loss_and_gradient, Mesh(tp=ranks), z, words)
    for loss, _ in out.per_rank:
        assert torch.allclose(loss, right.detach(), rtol=1e-12, atol=1e-12)
    assert torch.allclose(torch.cat([grad for _, grad in out.per_rank], 1), plain.grad, rtol=1e-12, atol=1e-12)
    assert len(out.trace.select(rank=0, kind="collective")) == 3  # forward and backward together
print("equal to torch's loss on all logits")

# %% [markdown]
# The picture at the top is this: twelve words, four tokens. Each of a, b and c is one number a token.

# %% tags=["opening-picture"]
def loss_of_four_tokens(logits, ids):
    return cross_entropy(logits, ids, 12)

z = rng.normal(size=(4, 12))
out = run(loss_of_four_tokens, Mesh(tp=4), z, ids, in_specs=(P(None, "tp"), P()), out_specs=P())
assert out.trace.bytes_sent(rank=0) == 3 * 2 * 3 * 4 * 8 // 4  # three times 2 (R-1)/R of four numbers, 8 bytes each
animate(out.trace)

# %% [markdown]
# `vocab_parallel_cross_entropy` is the same, and adds up both sums in one message: the same bytes, fewer hops. Two
# options mean what they mean in torch. A token whose id is `ignore_index` does not count; all ranks see which. With
# `label_smoothing` the loss also needs the sum of all logits: one number a token more.

# %%
from tplab.torch import vocab_parallel_cross_entropy

def library(logits, ids, **options):
    return vocab_parallel_cross_entropy(own_columns(logits), ids, "tp", logits.shape[-1], **options)

z, words = rng.normal(size=(6, 41)), np.array([3, -100, 40, 7, -100, 11])
for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.1}):
    out = run(partial(library, **options), Mesh(tp=4), z, words, out_specs=P())
    assert torch.allclose(out.value, F.cross_entropy(torch.tensor(z), torch.tensor(words), **options))
    numbers = [event.shape for event in out.trace.select(rank=0, kind="collective").events]
    print(f"{options or 'no options'}: all_reduces of {numbers}")

# %% [markdown]
# That third sum is easily forgotten. [Megatron-LM](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/tensor_parallel/cross_entropy.py)
# smooths over each rank's own words: what ranks take for the loss then differs a little.

# %% [markdown]
# ## One table, used twice
#
# Where do logits come from? From a vector $x$ for each token, times the row of each word: $z = x W^\top$. GPT-2 takes
# the embedding's own table for $W$: the head is **tied** to it. And that fits: the rank that has a word's row computes
# its logit. It is a column-parallel layer, so $f$ stands before it, and behind it nothing is gathered.
#
# **Predict.** A table used twice has a gradient from each use. What is sent to add them up?
#
# <details><summary>Answer</summary>
#
# Nothing. A word's row lies on one rank, which looks it up *and* computes its logit. Autograd adds there.
#
# </details>

# %%
def step(table, ids, targets, untied_on=None):  # the smallest language model: look up, tanh, head, loss
    rows = own_rows(table).clone().requires_grad_()
    head = rows.detach().clone().requires_grad_() if axis_index("tp") == untied_on else rows
    x = torch.tanh(embed(rows, ids, V))
    logits = copy_to(x, "tp") @ head.T
    loss = vocab_parallel_cross_entropy(logits, targets, "tp", V)
    loss.backward()
    return loss.detach(), rows.grad

W, targets = rng.normal(size=(V, 3)), np.array([2, 9, 4, 6])
out = run(step, Mesh(tp=4), W, ids, targets)
losses, grads = zip(*out.per_rank)

as_rows, as_head = (torch.tensor(W, requires_grad=True) for _ in range(2))  # on one rank, each use on its own
plain = F.cross_entropy(torch.tanh(as_rows[ids]) @ as_head.T, torch.tensor(targets))
plain.backward()
assert all(torch.allclose(loss, plain) for loss in losses)
assert torch.allclose(torch.cat(grads), as_rows.grad + as_head.grad, rtol=1e-12, atol=1e-12)
assert [event.shape for event in out.trace.select(rank=0, kind="collective").events] == [(4, 3), (4,), (2, 4), (4, 3)]

# %% [markdown]
# Four all_reduces: the embedding's, the loss's maximum, its two sums in one, and backward that of $f$. None for the table. Of rank 2's words, 6 to 8,
# the text has only the 7, so the look-up has a gradient for one row. The head has one for all: every word that
# was not the right one should be less likely.

# %%
seven = slice(6, 9)
matrices({"as rows": as_rows.grad[seven], "as the head": as_head.grad[seven], "rank 2 has": grads[2]}, "Words 6, 7, 8")

# %% [markdown]
# Now let the tie be broken on one rank only: a checkpoint is loaded into a copy, or a module is moved after it was
# tied. No shape changes, no error is raised, and the first loss is right to the last digit.

# %%
broken_losses, broken = zip(*run(step, Mesh(tp=4), W, ids, targets, 2).per_rank)
assert all(torch.equal(loss, broken_losses[0]) and torch.equal(loss, losses[0]) for loss in broken_losses)
for rank in (0, 1, 3):
    assert torch.equal(broken[rank], grads[rank])
assert torch.allclose(broken[2], as_rows.grad[seven])  # what the head says is lost
matrices({"tied": grads[2], "its tie broken": broken[2], "lost": grads[2] - broken[2]}, "Rank 2: words 6, 7, 8")

# %% [markdown]
# From the first step on, rank 2 has two tables that drift apart: its words mean one thing when read and another when
# written. Only its own words do; the rest of the model hides it. And where just one of the two uses is sharded, the
# shapes go wrong: a library returned
# [N times as many logits](https://github.com/huggingface/transformers/pull/48824) as there are words.

# %% [markdown]
# ## The same in JAX
#
# `.detach()` becomes `stop_gradient`, `gather` becomes `take_along_axis`. JAX runs one program for all ranks, so all
# pieces have one width: 41 words on four ranks would be padded to 44. Here first 12 words, which divide.

# %%
import jax
import jax.numpy as jnp
import tplab.jax

def cross_entropy_in_jax(logits, ids):  # logits [T, n]   ids [T]   ->   [T]
    begin, n = tplab.jax.axis_index("tp") * logits.shape[-1], logits.shape[-1]
    largest = tplab.jax.all_reduce(jax.lax.stop_gradient(logits).max(-1), "tp", "max")
    z = logits - largest[:, None]
    total = tplab.jax.all_reduce(jnp.exp(z).sum(-1), "tp")
    here = (ids >= begin) & (ids < begin + n)
    of_id = jnp.take_along_axis(z, jnp.where(here, ids - begin, 0)[:, None], -1)[:, 0]
    return jnp.log(total) - tplab.jax.all_reduce(jnp.where(here, of_id, 0), "tp")

SPECS = P(None, "tp"), P()
z = rng.normal(size=(4, 12))
right = F.cross_entropy(torch.tensor(z), torch.tensor(ids), reduction="none")
out = tplab.jax.run(cross_entropy_in_jax, Mesh(tp=4), z, ids, in_specs=SPECS, out_specs=P())
assert np.allclose(out.value, right, rtol=1e-5)

# %% [markdown]
# **What differs: the loss is known to be the same.** With `out_specs=P()` torch has compared four losses. JAX's types
# knew before anything ran: it is made of `all_reduce`s.
#
# **What differs: padding.** **Predict.** Our ten words by hand, padded to twelve: two logits of 0 more. What does
# `cross_entropy_in_jax` say now, where $\log 4$ is right?
#
# <details><summary>Answer</summary>
#
# $e^0 = 1$, twice: the sum is 18, and the loss $\log \frac{18}{4}$. Worse, it depends on the number of ranks, which
# decides how much is padded.
#
# </details>

# %%
from tplab.jax import pad_vocabulary

padded = np.asarray(pad_vocabulary(logits[:, None], 4)).T  # [1, 12]
right_word = np.array([target])
counted = tplab.jax.run(cross_entropy_in_jax, Mesh(tp=4), padded, right_word, in_specs=SPECS, out_specs=P()).value
assert np.isclose(counted[0], np.log(18 / 4))

def masked(logits, ids):  # tplab's is told how many words there are, and leaves the padding out
    return tplab.jax.vocab_parallel_cross_entropy(logits, ids, "tp", V, "none")

out = tplab.jax.run(masked, Mesh(tp=4), padded, right_word, in_specs=SPECS, out_specs=P())
assert np.isclose(out.value[0], np.log(4))

# %% [markdown]
# **What differs: nobody can protest.** Id 10 is no word of ten. torch looks, and raises. A compiled program cannot, so
# JAX's loss is NaN, which nobody overlooks. (Plain `jnp` indexing would take the nearest word.)

# %%
from tplab.errors import RankError

no_word = np.array([10])
try:
    run(library, Mesh(tp=4), logits[None], no_word)
except RankError as error:
    print(error.__cause__)
out = tplab.jax.run(masked, Mesh(tp=4), padded, no_word, in_specs=SPECS, out_specs=P())
assert np.isnan(out.value[0])
assert jnp.arange(10)[jnp.asarray(no_word)].item() == 9

# %% [markdown]
# ## See it run
#
# The end of a small GPT with the words of GPT-2: head and loss, 128 tokens, on four ranks of an H100 node. The times
# are **modelled**. First with the logits gathered, then without.

# %%
WORDS, WIDTH, TOKENS = 50_257, 256, 128

def gathering(x, table, ids):
    logits = gather_from(x @ own_rows(table).T, "tp")
    return F.cross_entropy(logits, ids)

def parallel(x, table, ids):
    return vocab_parallel_cross_entropy(x @ own_rows(table).T, ids, "tp", WORDS)

torch.manual_seed(0)
large = torch.randn(TOKENS, WIDTH), torch.randn(WORDS, WIDTH) / 16, torch.randint(0, WORDS, (TOKENS,))
gathered = run(gathering, Mesh(tp=4), *large, out_specs=P(), cluster="h100")
timeline(gathered.trace)

# %%
kept = run(parallel, Mesh(tp=4), *large, out_specs=P(), cluster="h100")
assert torch.allclose(kept.value, gathered.value, rtol=1e-4)
timeline(kept.trace)

# %% [markdown]
# The long message is gone, and so is the work behind it that every rank did for all words. And yet it takes longer!
# Look at a lane: more than twenty small operations, and a GPU needs 5 µs to launch each. That is why libraries write
# this loss as [one kernel](https://github.com/linkedin/Liger-Kernel/pull/1260). Without the launches:

# %%
from tplab.cost import find

h100 = find("h100")
without_launches = []
for way, trace in (("gathered", gathered.trace), ("kept", kept.trace)):
    launches = len(trace.select(rank=0, kind="compute"))
    rest = trace.makespan - launches * h100.chip.launch
    without_launches.append(rest)
    print(f"{way:<9}{trace.makespan * 1e6:.0f} µs, {launches} launches; without them {rest * 1e6:.0f} µs")
assert kept.trace.makespan > gathered.trace.makespan
assert without_launches[0] > 1.4 * without_launches[1]

# %% [markdown]
# ## Turn the knob
#
# Now the messages alone. Bytes are not all that counts there either: three numbers a token are two `all_reduce`s, 28
# hops in a ring of eight, and gathering is seven. Turn the number of tokens. Which way wins when? Who has so few
# tokens?

# %%
from tplab import cost
from tplab.widgets import Bars, Row, knob

RANKS, link = 8, h100.inner_link

def seconds(op, nbytes):
    one = cost.collective(op, nbytes, RANKS, link)
    latency = one.hops * link.latency
    return {"latency": latency, "bytes": one.seconds - latency}

def bars(tokens):  # logits of 2 bytes, sums of 4
    gather = seconds("all_gather", tokens * -(-WORDS // RANKS) * 2)
    maximum, sums = (seconds("all_reduce", tokens * numbers * 4) for numbers in (1, 2))
    both = {part: maximum[part] + sums[part] for part in sums}
    rows = [Row("gather the logits", gather), Row("three numbers", both)]
    first, other = sorted(rows, key=lambda row: row.total)
    return Bars(rows, f"At {tokens:,} tokens: {first.label}, {other.total / first.total:.1f} times as fast.")

options = {tokens: bars(tokens) for tokens in (4**k for k in range(9))}
about = "messages only; 50,257 words on 8 H100s, modelled"
knob("The loss of GPT-2's logits", "tokens", options, start=4096, about=about)

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# For few tokens it is hops that count, and gathering has fewer. Leave out the bytes of the small sums, and both take
# as long where the bytes of the logits cost $28 - 7 = 21$ latencies:
#
# $$\text{tokens} = \frac{21 \cdot \text{latency} \cdot \text{bandwidth}}{(R - 1) \cdot 2V / R}$$
#
# Here about 200. Training has thousands of tokens at a time. But a server that writes text needs the next word of some
# sequences: a few tokens, whose logits
# [vLLM does gather](https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/layers/logits_processor.py).
#
# </details>

# %%
meet = 21 * link.latency * link.bandwidth / ((RANKS - 1) * 2 * WORDS / RANKS)
print(f"they meet at {meet:.0f} tokens")
totals = {tokens: [row.total for row in option.rows] for tokens, option in options.items()}
assert all((gather < sums) == (tokens < meet) for tokens, (gather, sums) in totals.items())

# %% [markdown]
# ## What it costs
#
# For $T$ tokens, width $D$, $V$ words, $R$ ranks, a rank
#
# - holds $VD/R$ weights and $TV/R$ logits,
# - sends $2\frac{R-1}{R}TD$ elements to embed (forward), and as many for the head (backward, $f$),
# - sends $3 \cdot 2\frac{R-1}{R}T$ elements for the loss. Gathered logits would be $\frac{R-1}{R}TV$.
#
# The ratio of the last two is $V / 6$, for any number of ranks and tokens. Count:

# %%
T, D, R, size = 8, 64, 4, 4  # size: bytes of a float32

def whole_step(ids):
    embedding = VocabParallelEmbedding(WORDS, D, "tp")
    loss = vocab_parallel_cross_entropy(embedding.logits(embedding(ids)), ids, "tp", WORDS)
    loss.backward()
    return embedding.weight.numel()

out = run(whole_step, Mesh(tp=R), np.arange(T))
sends = [event.bytes for event in out.trace.select(rank=0, kind="collective").events]
around = 2 * (R - 1) * size // R
assert sends == [around * T * D, around * T, around * 2 * T, around * T * D]  # embed, maximum, two sums, f
assert sum(out.per_rank) == WORDS * D and max(out.per_rank) == -(-WORDS // R) * D

gathers = run(lambda z: gather_from(own_columns(z), "tp"), Mesh(tp=R), torch.zeros(T, WORDS)).trace
small = 2 * (R - 1) * 3 * T * size  # all ranks together
assert gathers.bytes_sent() == (R - 1) * T * WORDS * size
print(f"{T} tokens, all ranks together: {gathers.bytes_sent():,} bytes of logits, or {small:,}")
print(f"{gathers.bytes_sent() / small:,.0f} times as many")
assert np.isclose(gathers.bytes_sent() / small, WORDS / 6)

# %% [markdown]
# ## Dropout: one mask or four?
#
# Dropout sets each number to zero with probability $p$, and divides the others by $1 - p$, so that the mean stays.
# In a tensor-parallel block (lab 04) it stands in two kinds of places:
#
# - **inside**, between $f$ and $g$: every rank has features, or heads, of its own;
# - **outside**, behind $g$: every rank has the same tensor, and drops from its copy.

# %% [markdown]
# **Predict.** Where must all ranks draw the same mask, and where must each draw its own? What goes wrong otherwise?
#
# <details><summary>Answer</summary>
#
# Outside the same: otherwise copies are copies no longer. Inside each its own: otherwise features on different ranks,
# which have nothing to do with each other, are always dropped together. The next cells show both.
#
# </details>

# %% [markdown]
# tplab's `dropout` is told along which axis ranks hold something else. Ones go in, $p = \frac12$: zeros and twos come
# out. First outside, then inside:

# %%
from tplab.torch import dropout

def masks(mesh, axis):
    return run(lambda: dropout(torch.ones(4, 4), 0.5, axis=axis), mesh).per_rank

outside = masks(Mesh(tp=4), None)
assert all(torch.equal(mask, outside[0]) for mask in outside)
matrices({f"rank {rank}": mask for rank, mask in enumerate(outside)}, "Outside: dropout(x, 0.5)")

# %%
inside = masks(Mesh(tp=4), "tp")
assert not any(torch.equal(inside[i], inside[j]) for i in range(4) for j in range(i))
matrices({f"rank {rank}": mask for rank, mask in enumerate(inside)}, 'Inside: dropout(x, 0.5, axis="tp")')

# %% [markdown]
# With data parallelism the ranks of `dp` have other samples, so there masks differ along `dp` too: `axis="dp"`
# outside, `("dp", "tp")` inside. Under sequence parallelism (lab 04) ranks have other tokens *outside* as well: `"tp"`
# [there too](https://github.com/PaddlePaddle/PaddleFleetX/pull/1005).

# %%
a, b, c, d = masks(Mesh(dp=2, tp=2), "dp")  # ranks 0 and 1 are one tp group, 2 and 3 the other
assert torch.equal(a, b) and torch.equal(c, d) and not torch.equal(a, c)

# %% [markdown]
# ## Different masks outside: copies drift apart
#
# torch's own `F.dropout` draws from a generator that each rank has for itself. Behind $g$ that is wrong, and one of
# our sources has it so. `run` compares what should be copies, and names the ranks:

# %%
from tplab.errors import ReplicationError

def behind_g(y):
    return F.dropout(reduce_from(y, "tp"), 0.5)

try:
    run(behind_g, Mesh(tp=4), torch.ones(4, 8), in_specs=P(None, "tp"), out_specs=P())
except ReplicationError as error:
    print(error)

# %% [markdown]
# Where nobody compares, training goes on. Take the weight of a norm, of which every rank has a copy. As long as all
# see the same gradient, the copies stay the same without a single message. Twenty steps later:

# %%
samples = torch.randn(20, 2, 2, 4)  # 20 steps; x and target of 2 tokens: the same on every rank, as behind g

def train(drop):
    gain = torch.ones(4, requires_grad=True)
    for x, target in samples:
        loss = ((drop(gain * x) - target) ** 2).mean()
        (grad,) = torch.autograd.grad(loss, gain)
        gain = (gain - 0.2 * grad).detach().requires_grad_()
    return gain.detach()

same = run(lambda: train(lambda x: dropout(x, 0.5)), Mesh(tp=4), out_specs=P())  # no complaint
drifted = run(lambda: train(lambda x: F.dropout(x, 0.5)), Mesh(tp=4)).per_rank
assert not any(torch.equal(drifted[0], other) for other in drifted[1:])
title = "One weight, four copies, each with masks of its own"
matrices({f"rank {rank}": gain for rank, gain in enumerate(drifted)}, title)

# %% [markdown]
# ## The same mask inside: features fall together
#
# Now the other mistake. It makes no noise: copies agree, and the mean is right. Eight hidden features, all 1, two on
# each rank, $p = \frac12$. How many of the eight does a token keep?
#
# **Predict.** How often does a token lose *all* of them?
#
# <details><summary>Answer</summary>
#
# With own masks eight coins must fall the same way: once in 256 tokens. With one mask for all ranks there are only two
# coins, each for a feature on every rank: once in 4.
#
# </details>

# %%
def num_kept(axis):
    def program():
        hidden = torch.ones(4096, 2)  # this rank's two features of 4096 tokens
        return all_reduce((dropout(hidden, 0.5, axis=axis) > 0).sum(-1), "tp")

    return run(program, Mesh(tp=4), out_specs=P()).value

coins = {"own masks": num_kept("tp"), "one mask": num_kept(None)}
print("features kept " + "".join(f"{k:>7}" for k in range(9)))
for name, counts in coins.items():
    shares = torch.bincount(counts, minlength=9) / len(counts)
    print(f"{name:<14}" + "".join(f"{share:>7.1%}" for share in shares))
    assert abs(counts.float().mean() - 4) < 0.1  # the mean shows nothing

# %% [markdown]
# In the sum behind $g$, independent features make up for each other. Coins that fall together do not: $R$ ranks on one
# mask give $R$ times the variance, here four, as if the layer were $R$ times narrower.

# %%
ratio = coins["one mask"].float().var() / coins["own masks"].float().var()
print(f"variance: {ratio:.1f} times as large")
assert abs(ratio - 4) < 0.4

# %% [markdown]
# ## Where the coins come from
#
# The usual recipe: give all ranks the same seed, and inside switch to a second generator, seeded with the rank's
# number. (In Megatron-LM: `with get_cuda_rng_tracker().fork()`.) It holds for as long as all ranks draw equally often.
# Let one of them draw a single number more, to shuffle a list or log a sample:

# %%
def one_seed_for_all(drop):
    def program():
        torch.manual_seed(1)  # of this rank's generator
        if axis_index("tp") == 2:
            torch.rand(1)
        return drop(torch.ones(4, 4))

    return program

try:
    run(one_seed_for_all(lambda x: F.dropout(x, 0.5)), Mesh(tp=4), out_specs=P())
except ReplicationError as error:
    print(str(error).split(", by")[0])
same = run(one_seed_for_all(lambda x: dropout(x, 0.5)), Mesh(tp=4), out_specs=P())  # tplab's: no complaint

# %% [markdown]
# tplab's `dropout` counts its own draws. A mask is made from the seed of the run, the number of the draw, and, along
# `axis`, the rank's coordinate: nobody's other numbers can put it out of step. And that answers the second half of the
# question at the top. To agree on a mask, ranks need tell each other nothing:

# %%
assert same.trace.bytes_sent() == 0

# %% [markdown]
# ## Keys in JAX
#
# JAX has no generator. Whoever wants random numbers brings a **key**, and the same key gives the same numbers. So
# `dropout` takes the key that all ranks share, and with `axis` folds the rank's coordinate in.

# %%
def jax_masks(axis):
    def program():
        return tplab.jax.dropout(jnp.ones((4, 4)), 0.5, key=jax.random.key(0), axis=axis)

    return program

for axis in (None, "tp"):
    per_rank = tplab.jax.run(jax_masks(axis), Mesh(tp=4)).per_rank
    agree = all(np.array_equal(mask, per_rank[0]) for mask in per_rank)
    print(f"axis={axis!r}: {'one mask' if agree else 'a mask a rank'}")
    assert agree == (axis is None)

# %% [markdown]
# **What truly differs.** There is no state that could get out of step, and a mask is known to be the same *before* it
# is drawn: its key is. A key of a rank's own is refused where copies must agree. In return there is a mistake that
# torch does not know: use a key twice, and two layers have the same mask. Split it.

# %%
try:
    tplab.jax.run(lambda: tplab.jax.dropout(jnp.ones(4), 0.5, key=tplab.jax.rank_key()), Mesh(tp=4))
except ValueError as error:
    print(error)

def two_layers(key_1, key_2):
    return [tplab.jax.dropout(jnp.ones((4, 4)), 0.5, key=key) for key in (key_1, key_2)]

key = jax.random.key(0)
first, second = tplab.jax.run(lambda: two_layers(key, key), Mesh(tp=4), out_specs=P()).value
assert np.array_equal(first, second)
first, second = tplab.jax.run(lambda: two_layers(*jax.random.split(key)), Mesh(tp=4), out_specs=P()).value
assert not np.array_equal(first, second)

# %% [markdown]
# ## All of it in a GPT
#
# Embedding, tied head, loss and dropout, in tplab's GPT with ten words. One seed, one model: on any number of ranks it
# has the same weights and drops the same numbers, so that the loss is the same. With dropout on.

# %%
from tplab.torch import GPT, GPTConfig

config = GPTConfig(vocab_size=V, width=24, num_layers=2, num_heads=4, context=8, dropout=0.1)
text = rng.integers(0, V, (3, 9))

def loss_of_gpt(text):
    return GPT(config).double().loss(text[:, :-1], text[:, 1:]).detach()

of_gpt = [run(loss_of_gpt, Mesh(tp=ranks), text, out_specs=P()).value for ranks in (1, 2, 4)]
assert torch.allclose(torch.stack(of_gpt), of_gpt[0], rtol=1e-12)

# %% [markdown]
# ## A bug to repair: one maximum less
#
# A colleague saves a message. *A rank that subtracts its own largest logit cannot overflow. Why ask the others?* All
# ranks agree on the result, it is never negative, it survives logits of 1000, and on one rank it is right. By hand,
# with the numbers from above: own maxima 2, 4, 2, 1 leave sums of 2, 1½, 2½, 1. Together 7.

# %%
def token_loss(logits, ids):  # logits [T, V/tp]   ids [T]   ->   [T], the same on every rank
    begin, n = axis_index("tp") * logits.shape[-1], logits.shape[-1]
    largest = logits.detach().amax(-1)
    z = logits - largest[:, None]
    total = all_reduce(z.exp().sum(-1), "tp")
    here = (ids >= begin) & (ids < begin + n)
    of_id = z.gather(-1, torch.where(here, ids - begin, 0)[:, None])[:, 0]
    return total.log() - all_reduce(torch.where(here, of_id, 0), "tp")

nothing = np.array([[-np.inf, -np.inf]])  # in rank 3's two empty places: exp of it is 0
ten = np.hstack([logits[None], nothing])
wrong = run(token_loss, Mesh(tp=4), ten, right_word, in_specs=SPECS, out_specs=P()).value
alone = run(token_loss, Mesh(tp=1), ten, right_word, in_specs=SPECS, out_specs=P()).value
print(f"exp of the loss: {wrong.exp().item():.0f} on four ranks, {alone.exp().item():.0f} on one")

# %% [markdown]
# Mend `token_loss`, run its cell, then this one. (What it prints should then be 4 twice.)

# %%
from tplab.exercises.vocabulary_and_dropout import check_token_loss

check_token_loss(token_loss)

# %% [markdown]
# <details><summary>A hint</summary>
#
# A sum of exponentials is in units of $e^m$. Either all ranks use one $m$; or each brings its sum to a common one
# before it is added up, with a factor $e^{m_i - m}$. Both need the same third number.
#
# </details>
#
# ## A bug to repair: two masks
#
# A block with dropout between its layers and behind them. Each of the two has the mask that the other should have.
# One of the mistakes `run` can see. The other only statistics would.

# %%
def block(x, a, b):  # x [T, D]   a [D, F/tp]   b [F/tp, D]   ->   [T, D], the same on every rank
    h = torch.relu(copy_to(x, "tp") @ a)
    h = dropout(h, 0.5)
    y = reduce_from(h @ b, "tp")
    return x + dropout(y, 0.5, axis="tp")

try:
    shapes = (4, 6), (6, 8), (8, 6)
    specs = P(), P(None, "tp"), P("tp", None)
    run(block, Mesh(tp=4), *(torch.ones(shape) for shape in shapes), in_specs=specs, out_specs=P())
except ReplicationError as error:
    print(str(error).split(", by")[0])

# %% [markdown]
# The check gives `block` weights from whose result every mask can be read: hidden feature $f$ adds $2^f$. Mend one
# mistake, and look at what it says of the other.

# %%
from tplab.exercises.dropout_masks import check_block

check_block(block)

# %% [markdown]
# ## Your turn: the most likely word
#
# To write text, a model needs the word with the largest logit. Find its id for each token, the lowest one where several
# are equally likely, without gathering logits: what you send must not grow with the vocabulary.
#
# <details><summary>A hint</summary>
#
# First how large the largest logit of all is, then who has it. `all_reduce` also knows `"min"`: what could a rank put
# in that has nothing to offer?
#
# </details>

# %%
def most_likely(logits):  # logits [T, V/tp]   ->   ids [T], the same on every rank
    ...

# %%
from tplab.exercises.vocabulary_and_dropout import check_most_likely

check_most_likely(most_likely)

# %% [markdown]
# ## To take away
#
# - A word's row lies on one rank: zeros from the others make one sum of the embedding, and a tied head needs none for
#   its table.
# - A loss needs three numbers a token: a maximum and two sums. Gathered logits are $V/6$ times as many numbers.
# - Dropout: one mask outside, a mask a rank inside. To agree, ranks share a seed, and send nothing.
#
# **Names.** Megatron-LM has `VocabParallelEmbedding` and `vocab_parallel_cross_entropy` too; `copy_to` and `reduce_from`
# are its $f$ and $g$. For `dropout(x, p)` it has torch's own, with one seed on all ranks, and for
# `dropout(x, p, axis="tp")` the same within `get_cuda_rng_tracker().fork()`.

# %% [markdown]
# **Sources.** Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053) (the vocabulary and its loss in
# section 3, dropout in appendix B). [Megatron-LM to
# transformers](https://github.com/huggingface/transformers/issues/10321) (where all of this was planned for a
# library). Bruno Magalhaes, *Distributed training of a GPT model, part 2* (`Megatron_f`, `Megatron_g`; there dropout
# follows $g$ with a generator a rank). [transformers
# 37051](https://github.com/huggingface/transformers/issues/37051) (tied tables, and vocabularies that do not divide).
#
# Next: [08 Overlap](08_overlap.ipynb). How to hide what must be sent.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
