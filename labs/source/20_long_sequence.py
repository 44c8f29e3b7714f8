# %% [markdown]
# # 20 A sequence too long for one rank
#
# **How can a token attend to keys and values that another rank has?**
#
# Prerequisites: rings from [lab 02](02_collectives.ipynb), attention heads from [lab 04](04_megatron_block.ipynb), and
# hops that are hidden behind computation ([lab 08](08_overlap.ipynb)). Time: 50 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/20_long_sequence.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/20_long_sequence.ipynb)
#
# ![A square of attention scores, cut into tiles. In each step every rank computes one tile of its row.](images/20_long_sequence.png)
#
# *The attention scores of 16 tokens, cut into tiles for four ranks. A rank keeps its queries, the rows of the square.
# Keys and values travel around a ring. In each step, a rank computes the tile of its queries and the keys that it has
# now.*

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
from tplab.sequence import AttentionMask, TokenLayout
from tplab.sequence import attention_bytes, tokens_to_hide_hop
from tplab.widgets import Bars, Row, knob, tiles, timeline

# %% tags=["opening-picture"]
tiles(TokenLayout("contiguous", 16, 4), AttentionMask(causal=False))

# %% [markdown]
# ## Why attention is different
#
# A sequence of a million tokens does not fit on one GPU, so we give each rank some of the tokens. Norms and linear
# layers work on one token at a time and do not notice. (The gradients of their weights are summed over these ranks.)
# Attention does: a token's query is compared with the keys of other tokens, and some are on other ranks.
#
# This is **context parallelism**, and its axis is `cp`. We could gather all keys and values, but for a million tokens
# that is 4 GiB in each layer of Llama 3 8B, with its 8 key and value heads of width 128 in bfloat16.
#
# ## By hand: two partial softmaxes
#
# Take one query and six keys, three on rank 0 and three on rank 1. The exponentials of the scores are small whole numbers,
# and each value is one number:

# %%
weights = np.array([[1, 2, 1], [4, 2, 2]])  # exp(score), one row per rank
values = np.array([[8, 4, 0], [1, 2, 6]])

right = (weights * values).sum() / weights.sum()
partial = (weights * values).sum(1) / weights.sum(1)
print("attention over all six keys:", right)
print("over the three of each rank:", partial)

# %% [markdown]
# **Predict.** Each rank has computed softmax over its own three keys. The mean of 4 and 2.5 is 3.25, and the right
# answer is 3. Which one number must each rank send along with its result, so that the two can be combined?
#
# <details><summary>Answer</summary>
#
# The sum of its weights, which it divided by: 4 on rank 0, and 8 on rank 1. Together they give $(4 \cdot 4 + 8 \cdot
# 2.5) / (4 + 8) = 3$.
#
# </details>
#
# In real models a score may be 100, and $e^{100}$ is too large for many number formats. So ranks keep the *logarithm* of the
# sum, the **log-sum-exp** $\ell = \ln \sum_j e^{s_j}$. Two partial results $(o_1, \ell_1)$ and $(o_2, \ell_2)$ are
# merged by
#
# $$\ell = \ln(e^{\ell_1} + e^{\ell_2}), \qquad o = e^{\ell_1 - \ell}\, o_1 + e^{\ell_2 - \ell}\, o_2$$
#
# FlashAttention does the same inside one GPU, tile by tile.
#
# ## Build it
#
# `attend` computes one tile, and `merge` is the formula above. On the ring, each rank passes on the keys and values that
# it has just used:

# %%
def attend(q, k, v, causal=False):  # q [n, d]   k, v [m, d]   ->   o [n, d], lse [n, 1]
    scores = q @ k.T / q.shape[-1] ** 0.5
    if causal:  # query i sees keys 0 to i of this tile
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse

def merge(o1, lse1, o2, lse2):
    lse = torch.logaddexp(lse1, lse2)
    return (lse1 - lse).exp() * o1 + (lse2 - lse).exp() * o2, lse

def ring(q, k, v):  # the rank's own tokens: [S/cp, d] each
    o, lse = attend(q, k, v)
    for _ in range(tt.axis_size("cp") - 1):
        k, v = tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")
        o, lse = merge(o, lse, *attend(q, k, v))
    return o

torch.manual_seed(0)
q, k, v = (torch.randn(24, 8, dtype=torch.float64) for _ in range(3))
whole, _ = attend(q, k, v)
TOKENS = P("cp")
for ranks in (1, 2, 3, 4, 8):
    out = tt.run(ring, Mesh(cp=ranks), q, k, v, in_specs=TOKENS, out_specs=TOKENS)
    print(ranks, "ranks:", "equal" if torch.allclose(out.value, whole) else "off")

# %% [markdown]
# So far, the ranks were simulated. Three processes on this machine get the same result over gloo. In each of two
# hops, a rank sends the keys and values of 8 tokens, 8 numbers of 8 bytes each:

# %%
real = tt.run(ring, Mesh(cp=3), q, k, v, in_specs=TOKENS, out_specs=TOKENS,
              on="processes")
print("equal" if torch.allclose(real.value, whole) else "off")
print(f"rank 0 sends {real.trace.bytes_sent(rank=0):,} bytes")

# %% [markdown]
# tplab's version is `ring_attention`. It takes `[B, heads, tokens, d]`, starts the next hop before it computes a tile,
# and sends keys and values in one message.

# %%
def library(q, k, v):
    q, k, v = (x[None, None] for x in (q, k, v))  # one sequence, one head
    return tt.ring_attention(q, k, v, "cp", causal=False)[0, 0]

out = tt.run(library, Mesh(cp=3), q, k, v, in_specs=TOKENS, out_specs=TOKENS)
print("equal" if torch.allclose(out.value, whole) else "off")

# %% [markdown]
# ## The same in JAX
#
# The imports change, and the tile is written with `jax.nn`:

# %%
import jax
import jax.numpy as jnp
import tplab.jax as tj

def attend_in_jax(q, k, v):
    scores = q @ k.T / q.shape[-1] ** 0.5
    lse = jax.nn.logsumexp(scores, -1, keepdims=True)
    return jnp.exp(scores - lse) @ v, lse

def ring_in_jax(q, k, v):
    o, lse = attend_in_jax(q, k, v)
    for _ in range(tj.axis_size("cp") - 1):
        k, v = tj.ring_shift(k, "cp"), tj.ring_shift(v, "cp")
        o2, lse2 = attend_in_jax(q, k, v)
        both = jnp.logaddexp(lse, lse2)
        o, lse = jnp.exp(lse - both) * o + jnp.exp(lse2 - both) * o2, both
    return o

arrays = [np.float32(x) for x in (q, k, v)]
out = tj.run(ring_in_jax, Mesh(cp=3), *arrays, in_specs=TOKENS, out_specs=TOKENS)
print("equal to 1e-5" if np.allclose(out.value, whole, atol=1e-5) else "off")

# %% [markdown]
# **What truly differs.** In torch a rank can skip a tile. In JAX all ranks run one program, so a tile that only some of
# them need is wrapped in a `jax.lax.cond`. XLA decides whether a hop and a matmul run at the same time.
#
# ## See it run
#
# Here is one attention layer of Llama 3 8B, forward, with 32 query heads and 8 key and value heads, on a node of eight
# H100s, by the **forecast** `h100-measured`. Each rank has 2,048 of 16,384 tokens. Hover over a bar to see which keys a
# tile uses.

# %%
def layer(q, k, v):
    return tt.ring_attention(q, k, v, "cp", causal=False)

def sizes_only(tokens, heads):
    return torch.empty(1, heads, tokens, 128, dtype=torch.bfloat16, device="meta")

def on_h100(tokens, fn=layer):  # tokens of each rank
    sizes = [sizes_only(8 * tokens, heads) for heads in (32, 8, 8)]
    spec = P(None, None, "cp")
    return tt.run(fn, Mesh(cp=8), *sizes, in_specs=spec, cluster="h100-measured").trace

timeline(on_h100(2048))

# %% [markdown]
# The wide bars (*matmul*) are tiles, and they hide the messages below them. The narrow ones (*elementwise* and *copy*)
# are mostly `merge`, in float32. Together they take about a fifth as long as the tiles.
#
# ## Turn the knob
#
# A hop is hidden if it takes no longer than the tile that is computed at the same time. The knob compares a tile with a
# hop in a node, and with a hop to another node on two networks: InfiniBand NDR, and the playbook's network ([lab
# 03](03_network_levels.ipynb)). Guess what twice as many tokens do to each bar.

# %%
H100, PLAYBOOK = (cost.find("h100-measured", fabric=name)
                  for name in ("infiniband-ndr", "playbook"))
LINKS = {"NVLink": H100.link(0, 1), "InfiniBand NDR": H100.link(0, 8),
         "the playbook's network": PLAYBOOK.link(0, 8)}

def tile(n):  # n queries and n keys, 32 heads of width 128, FlashAttention 2
    sizes = 1, 32, n, n, 128
    return H100.chip.attention_seconds(*sizes, kv_heads=8, kernel="flash2")

def hop(n, link):
    return link.seconds(2 * n * 8 * 128 * 2)  # k and v, 8 heads, bfloat16

def bars(n):  # n tokens on each rank
    hops = {name: hop(n, link) for name, link in LINKS.items()}
    rows = [Row("a tile", {"computing": tile(n)})]
    rows += [Row(f"a hop, {name}", {"sending": took}) for name, took in hops.items()]
    hidden = [name for name, took in hops.items() if took <= tile(n)]
    return Bars(rows, f"The tile hides a hop over {', '.join(hidden) or 'no link'}.")

options = {2**k: bars(2**k) for k in range(8, 15)}
about = f"one layer of Llama 3 8B, forward, no mask; H100s, {H100.label}"
knob("A tile and a hop", "tokens per rank", options, start=1024, about=about, unit="s")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# With twice as many tokens, a long tile takes four times as long, because it has twice as many queries *and* keys. A
# hop takes only twice as long. So for any link there is a number of tokens per rank from which attention hides its
# messages. The number of ranks and the width of a head cancel out: with $h$ query heads and $g$ key and value heads of
# two bytes per number, a chip that computes $C$ FLOP/s and a link of $W$ bytes per second,
#
# $$n \ge \frac{g}{h}\, \frac{C}{W}$$
#
# </details>

# %%
for name, link in LINKS.items():
    least = next(n for n in range(1, 2**15) if hop(n, link) <= tile(n))
    since = f"from {least:,} tokens per rank" if least > 1 else "always"
    print(f"{name}: hidden {since} (forecast)")
sheet = cost.find("h100")
peak = sheet.chip.flops["bfloat16"]
for link in (sheet.link(0, 1), sheet.link(0, 8)):
    least = tokens_to_hide_hop(peak, link.bandwidth, 32, 8, computed=1)
    print(f"{link.name}, by the formula at peak rates: {least:,}")

# %% [markdown]
# Peak rates give no bound: a slower kernel hides more, and FlashAttention 2 reaches about a third of the
# peak on an H100. Besides, any kernel takes a minimum time: in a node, even the tile of one token takes longer than its hop.
# If a causal mask halves the work of a tile, the numbers of the formula double. In the backward pass, $dK$ and $dV$
# travel with $K$ and $V$.
#
# ## What it costs
#
# There are two other ways. Llama 3 was trained with an `all_gather` of all keys and values. DeepSpeed-Ulysses uses an
# `all_to_all`: before it, a rank has all heads of some tokens, and after it, some heads of all tokens. Here are the
# bytes that each of eight ranks sends for 8,192 tokens of its own in bfloat16, by formula and counted, and the time of
# both passes with a causal mask (forecast, `h100-measured`):

# %%
SCHEMES = (("ring", tt.ring_attention), ("gather", tt.gather_attention),
           ("head", tt.head_attention))

def both_ways(fn):
    def program(q, k, v):
        for tensor in (q, k, v):
            tensor.requires_grad_()
        fn(q, k, v, "cp").sum().backward()
    return program

for name, fn in SCHEMES:
    there, back = attention_bytes(name, 8 * 8192, 8, 32, 8, 128)
    trace = on_h100(8192, both_ways(fn))
    assert trace.bytes_sent(rank=0) == there + back
    took = f"{trace.makespan * 1e3:5.1f} ms"
    print(f"{name:<6} forward {there:>11,} B   backward {back:>11,} B   {took}")

# %% [markdown]
# | | what travels, forward | held during the pass | limit |
# |---|---|---|---|
# | ring | $K$ and $V$, $R-1$ hops | two pieces of $K$ and $V$ | enough tokens to hide the hops |
# | gather | the same bytes, at once | all of $K$ and $V$ | memory |
# | head | $Q$, $K$, $V$ and $O$, each once | all tokens of $h/R$ heads | $R$ must divide $h$ and $g$ |
#
# Backward, the ring also sends $dK$ and $dV$, in float32 and over one more hop, to take them home. With a
# ring or a gather, the other ranks wait for the last one, which has the most to do.
#
# **Measured.** The author of [ring-flash-attention](https://github.com/zhuzilin/ring-flash-attention) (commit
# `8996282`, MIT) ran this layer on eight H800s, with as many tokens in one sequence, and in packed documents:

# %%
from tplab.cost.measured import ring_attention

for run in ring_attention():
    if (run.gpu, run.passes) == ("H800", "fwd+bwd"):
        data = "one sequence" if run.api == "batch" else "documents"
        print(f"{data:<12}  {run.variant:<16} {run.seconds * 1e3:5.1f} ms")

# %% [markdown]
# By the forecast for H100s, the ring takes 111 ms, 16% longer than measured here. (Its FlashAttention 2 was fitted to
# two of these rows.) Zigzag and stripe, of the next lab, are rings whose ranks have about equal work, and are much
# faster. `llama3_allgather` is the gather. With documents, it is between ring and zigzag. We know of no measurement of
# the exchange of heads on this machine.
#
# **Decide.** Exchanging heads sends the fewest bytes, and gives all ranks the same work. But here $R$ can be at most 8,
# unless you copy key and value heads. A ring has no such limit, and enough tokens hide its hops.

# %% [markdown]
# ## A bug to repair
#
# Here is ring attention with its backward pass written out. It keeps only $q$, $k$, $v$, $o$ and the log-sum-exp, and
# computes each tile again. $K$ and $V$ travel once more, and the gradients $dK$ and $dV$ travel with them, so each rank adds
# what its queries contribute. After $R$ hops they are home.
#
# The forward pass is right, but on two or more ranks the gradients are wrong. This bug was [found in
# diffusers](https://github.com/huggingface/diffusers/issues/14265) in July 2026. First look for the line that decides
# which keys a tile is computed with. Keep what the forward pass saves: with the keys of all ranks the gradients would
# be right too, but each rank would hold the whole sequence.

# %%
class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ours = k, v
        o, lse = attend(q, k, v)
        for _ in range(tt.axis_size("cp") - 1):
            k, v = tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")
            o, lse = merge(o, lse, *attend(q, k, v))
        ctx.save_for_backward(q, *ours, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        _, k, v, _, _ = ctx.saved_tensors
        dq, dk, dv = 0, torch.zeros_like(k), torch.zeros_like(v)
        for _ in range(tt.axis_size("cp")):
            parts = tile_gradients(ctx, do)
            dq, dk, dv = (total + part for total, part in zip((dq, dk, dv), parts))
            k, v, dk, dv = (tt.ring_shift(x, "cp") for x in (k, v, dk, dv))
        return dq, dk, dv

def tile_gradients(ctx, do):  # what one tile adds to dq, dk, dv
    q, k, v, o, lse = ctx.saved_tensors
    scale = q.shape[-1] ** -0.5
    p = (q @ k.T * scale - lse).exp()
    ds = p * (do @ v.T - (do * o).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.T @ q, p.T @ do

def attention(q, k, v):
    return RingAttention.apply(q, k, v)

# %%
from tplab.exercises.long_sequence import check_gradients

check_gradients(attention)

# %% [markdown]
# ## Your turn: a causal ring
#
# In a language model, a token must not see later tokens. Write the forward pass `causal_ring`, from `attend`, `merge`,
# `ring_shift` and `axis_index`. The ranks hold consecutive parts of the sequence, and rank 0 the first. At step $t$ of
# the ring, which rank do your keys come from? You need either the whole tile, or its lower triangle (`causal=True`), or
# nothing of it. Skip the tiles that you do not need, but still pass keys and values on. Merge each tile as it comes,
# so that no rank holds the keys and values of all.

# %%
def causal_ring(q, k, v):  # [S/cp, d] each   ->   o [S/cp, d]
    ...

# %%
from tplab.exercises.long_sequence import check_causal_ring

check_causal_ring(causal_ring)

# %% [markdown]
# If yours is right, rank 0 computes one tile, and the last rank computes all of them. On four ranks, more than a third
# of the time is lost, and with more ranks the loss approaches one half.
#
# (Do not call `backward()` on it: a rank that skips a tile also skips the backward hops of its keys, and the others
# wait forever.)

# %% [markdown]
# ## On Monday
#
# | here | torch | Megatron-LM | others |
# |---|---|---|---|
# | the axis `cp` | `context_parallel(mesh, buffers=..., buffer_seq_dims=...)`, on DTensors | `--context-parallel-size` | `ParallelismConfig(cp_size=...)` in accelerate |
# | `ring_attention` | `set_rotate_method("alltoall")` | `--cp-comm-type p2p` | ring-flash-attention |
# | `gather_attention` | `set_rotate_method("allgather")`, the default | `--cp-comm-type all_gather` | Llama 3 |
# | `head_attention` | | `--cp-comm-type a2a` | Ulysses in DeepSpeed |
#
# ## To take away
#
# - Two partial softmaxes are merged exactly, if each comes with its log-sum-exp.
# - Tiles grow with the square of the tokens per rank, and messages only linearly. So enough tokens hide them.
# - A gather needs memory for all keys and values. An exchange of heads sends the fewest bytes, but on no more ranks than
#   there are key and value heads.
#
# **Sources.** Milakov and Gimelshein 2018, [Online normalizer calculation for
# softmax](https://arxiv.org/abs/1805.02867). Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135). Liu, Zaharia and Abbeel 2023, [Ring
# Attention](https://arxiv.org/abs/2310.01889). Jacobs et al. 2023, [DeepSpeed
# Ulysses](https://arxiv.org/abs/2309.14509). Grattafiori et al. 2024, [The Llama 3 herd of
# models](https://arxiv.org/abs/2407.21783) (section 3.3).
#
# Next: [21 Balance](21_balance.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
