# %% [markdown]
# # 21 Balance
#
# **Why is a causal ring idle for almost half of the time, and which order of the tokens gives that time back?**
#
# Prerequisites: ring attention from [lab 20](20_long_sequence.ipynb). Time: 45 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/21_balance.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/21_balance.ipynb)
#
# ![Three squares of causal attention scores. In the first, the last rank has most of the tiles. In zigzag, all ranks have equally many scores, and in striped nearly.](images/21_balance.png)
#
# *Which rank computes which causal scores of 16 tokens, for three ways to give the tokens to four ranks. The bars show the
# work of each rank, step by step.*

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
from tplab.sequence import LAYOUTS, AttentionMask, TokenLayout
from tplab.sequence import attention_bytes, efficiency, load
from tplab.widgets import Bars, Row, knob, tiles, timeline

# %% tags=["opening-picture"]
CAUSAL = AttentionMask(causal=True)
tiles([TokenLayout(name, 16, 4) for name in LAYOUTS], CAUSAL)

# %% [markdown]
# ## By hand: eight tokens
#
# Eight tokens are on four ranks, two consecutive tokens on each. With a causal mask, the query at position $i$ needs the keys
# at positions 0 to $i$. This table counts the scores that each rank computes in each step of the ring. In step $t$, rank
# $r$ has the keys of rank $r - t$:

# %%
consecutive = TokenLayout("contiguous", 8, 4)
scores = load(consecutive, CAUSAL)  # one row per rank, one column per step
print(scores)

# %% [markdown]
# **Predict.** The ring is finished when its slowest rank is. How long does that take, counted in scores, and for what share of
# that time do the ranks compute?
#
# <details><summary>Answer</summary>
#
# The last rank computes 3 + 4 + 4 + 4 = 15 scores and never waits. Four ranks could compute 60 in that time, and together they
# compute 36, which is 60%.
#
# </details>

# %%
each = scores.sum(1)
print("scores of each rank:", each)
print(f"busy: {each.sum() / (len(each) * each.max()):.0%}")

# %% [markdown]
# With long sequences a rank's own tile is half a square. Then the ring takes as long as $p - \frac12$ full
# tiles, and the mean work of a rank is $\frac{p}{2}$ full tiles: the ranks compute for $p/(2p-1)$ of the time. On four
# ranks that is 57%, after 60% with 8 tokens and 58.6% with the 16 of the picture. With more ranks this approaches one half. The tokens at the end
# of the sequence have the most to do, and one rank has all of them.
#
# ## Build it
#
# So give each rank some early and some late tokens. Cut the sequence into $2p$ pieces. Rank $r$ gets piece $r$ and piece
# $2p - 1 - r$, which is piece $r$ counted from the end. This layout is called **zigzag**.

# %%
def zigzag(tokens, ranks):  # ->   the positions that each rank holds
    pieces = np.arange(tokens).reshape(2 * ranks, -1)
    return [np.concatenate([pieces[r], pieces[-1 - r]]) for r in range(ranks)]

def scores_of(positions):  # positions of each rank   ->   scores by rank and step
    ranks = range(len(positions))
    seen = lambda r, s: (positions[s][None] <= positions[r][:, None]).sum()
    return np.array([[seen(r, (r - t) % len(ranks)) for t in ranks] for r in ranks])

ours = zigzag(16, 4)
print(*ours, sep="\n")
print(scores_of(ours))
assert np.array_equal(ours, TokenLayout("zigzag", 16, 4).positions)

# %% [markdown]
# After the first step every rank computes 8 of the 16 scores of each tile. A query from an early piece never sees a late piece,
# and a query from a late piece sees every early one. Of the two other quarters of a tile, early with early and late with late,
# exactly one is needed: the first if the keys come from a lower rank, and the second if they come from a higher one.
#
# A third layout is **striped**: rank $r$ gets positions $r$, $r + p$, $r + 2p$ and so on. Each tile is then a triangle, with
# or without its diagonal.
#
# ## Turn the knob
#
# Here is the share of the time in which ranks compute, with 128 tokens per rank, if a step ends when its last rank is done.
# What happens to each layout as the number of ranks grows?

# %%
def bars(ranks):
    rows = []
    for name in LAYOUTS:
        busy = efficiency(TokenLayout(name, 128 * ranks, ranks), CAUSAL)
        rows.append(Row(name, {"computing": round(100 * busy, 1)}))
    return Bars(rows, f"Here p/(2p-1) is {ranks}/{2 * ranks - 1}.")

options = {ranks: bars(ranks) for ranks in (2, 4, 8, 16)}
about = "causal, 128 tokens per rank"
knob("A causal ring", "ranks", options, start=2, about=about, unit="%")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# Contiguous falls towards one half, zigzag stays at 100%, and striped at more than 99%. With $n$ tokens per rank, some
# striped tiles lack the $n$ scores of a diagonal. Together these are less than $1/n$ of all scores.
#
# </details>
#
# ## Labels and positions go with the tokens
#
# The layout is only an order: arrange the sequence in it, and cut it into equal pieces. What belongs to a token goes with
# it, such as its label and its position. The result comes in the same order, and `restore` puts it back. This is the same
# in both frameworks:

# %%
import tplab.jax as tj

TOKENS = P(None, None, "cp")  # [B, heads, tokens, d]
torch.manual_seed(0)
q, k, v = (torch.randn(1, heads, 48, 8) for heads in (4, 2, 2))
attention = torch.nn.functional.scaled_dot_product_attention
whole = attention(q, k, v, is_causal=True, enable_gqa=True)
layout = TokenLayout("zigzag", 48, 4)
arranged = [layout.arrange(x, dim=2).numpy() for x in (q, k, v)]
for framework in (tt, tj):
    def program(q, k, v, framework=framework):
        return framework.ring_attention(q, k, v, "cp", layout="zigzag")

    specs = {"in_specs": TOKENS, "out_specs": TOKENS}
    out = framework.run(program, Mesh(cp=4), *arranged, **specs)
    result = layout.restore(np.asarray(out.value), dim=2)
    same = np.allclose(result, whole, atol=1e-5)
    print(framework.__name__, "equal to 1e-5" if same else "off")

# %% [markdown]
# **What truly differs.** In torch, each rank runs the tiles that it needs. In JAX, all ranks run one compiled program. With
# striped, every tile has nearly the same shape, so the program needs no branch. With contiguous and zigzag, ranks need different
# parts of a tile at the same step, and the program branches.
#
# ## See it run
#
# Here is the attention layer of Llama 3 8B once more, on eight H100s with 8,192 tokens each, now causal, by the
# forecast of lab 20. First contiguous, and then zigzag:

# %%
def on_h100(layout, tokens=8192):
    def layer(q, k, v):
        return tt.ring_attention(q, k, v, "cp", layout=layout)

    meta = {"dtype": torch.bfloat16, "device": "meta"}
    sizes = [torch.empty(1, heads, 8 * tokens, 128, **meta) for heads in (32, 8, 8)]
    on = {"in_specs": TOKENS, "cluster": "h100-measured"}
    return tt.run(layer, Mesh(cp=8), *sizes, **on).trace

traces = {name: on_h100(name) for name in LAYOUTS}
for name, trace in traces.items():
    print(f"{name:<11} {trace.makespan * 1e3:.1f} ms (forecast)")
timeline(traces["contiguous"])

# %%
timeline(traces["zigzag"])

# %% [markdown]
# By counting scores, zigzag should be 15/8 times as fast. Here it is 1.7 times as fast: half a tile takes a little more
# than half as long as a whole one, and merging results takes time too. Keys from a lower rank are seen by both pieces
# of a rank's queries, and keys from a higher rank by the late piece alone. So the higher a rank is, the more it has to
# merge, which is the staircase in the picture.

# %% [markdown]
# ## What others have measured
#
# [ring-flash-attention](https://github.com/zhuzilin/ring-flash-attention) has all three layouts for GPUs. Its author measured
# this layer with 8,192 tokens on each of eight GPUs. Here is its speed, relative to FlashAttention with its work divided
# perfectly among eight GPUs (MIT licence, commit `8996282`):
#
# | layout | model | A100, forward | A100, both | H800, forward | H800, both |
# |---|---|---|---|---|---|
# | contiguous | 53.3% | 51.4% | 52.5% | 52.1% | 53.9% |
# | zigzag | 100% | 81.8% | 89.8% | 85.3% | 90.2% |
# | striped | 100% | 69.6% | 82.6% | 74.4% | 82.9% |
#
# On H800s, contiguous took 26.0 ms forward and zigzag 15.9 ms, so zigzag was 1.64 times as fast. The forecast, for
# H100s, is 12% and 8% above these times.
#
# For contiguous, balance explains nearly all of the loss. For the other two it explains nothing, and 10 to 30% of the time
# is still lost. A ring calls the kernel eight times on small tiles and merges the results. The balance of striped is
# nearly that of zigzag, so it does not explain why striped is slower.

# %% [markdown]
# ## What it costs: decide
#
# Balance costs no bytes. What are the alternatives? These are the bytes that a rank sends in the forward pass of this layer,
# with 32 query heads and 8 key and value heads:

# %%
SIZES = 8 * 8192, 8, 32, 8, 128  # tokens, ranks, heads, key and value heads, head width
for head_ranks in (1, 2, 4, 8):
    scheme = {1: "ring", 8: "head"}.get(head_ranks, "head_ring")
    sent = attention_bytes(scheme, *SIZES, head_ranks=head_ranks)
    name = f"heads {head_ranks} × ring {8 // head_ranks}"
    print(f"{name:<17} {sent.forward:>11,} B")

# %% [markdown]
# | | ring | heads | both |
# |---|---|---|---|
# | number of ranks | any; zigzag cuts the tokens into twice as many pieces | at most the number of key and value heads | more than with heads alone |
# | is the work balanced? | with zigzag | always: every rank has all tokens | with zigzag between the groups |
# | is the sending hidden? | with enough tokens | no: attention waits for it | that of the ring |
# | where to use it | across nodes | inside a node | heads inside, ring across |
#
# On one node with few ranks, exchange heads: it is simple, sends the least, and is balanced. Use a ring where heads run out,
# or where messages have to cross nodes and must be hidden.
#
# ## A bug to repair
#
# Most models tell attention where a token is by rotating $q$ and $k$ by an angle that depends on the position (RoPE).
# The function below gets this rank's tokens in zigzag order. Its outputs look fine, and the loss still falls, but ends
# slightly higher. Users of [long-context-attention](https://github.com/feifeibear/long-context-attention/issues/53) ran
# into it. Fix it for any number of ranks. (`tt.token_positions` has the answer, but work it out once yourself.)

# %%
def layer_with_rope(q, k, v):  # [B, heads, S/cp, d], arranged as zigzag
    n = q.shape[2]
    positions = tt.axis_index("cp") * n + torch.arange(n)
    q, k = tt.rope(q, positions), tt.rope(k, positions)
    return tt.ring_attention(q, k, v, "cp", layout="zigzag")

# %%
from tplab.exercises.balance import check_positions

check_positions(layer_with_rope)

# %% [markdown]
# ## Your turn: a window
#
# Some models let a token see only the last `window` tokens, itself included. Then consecutive tokens are a good layout again: a
# rank needs only keys that are less than `window` positions away, and they are on the ranks just before it. Write the forward
# pass `window_ring` for consecutive tokens, with as few hops as possible. `attend` gives you a tile: `distance` is the number
# of positions from its first key to its first query. (If a query sees no key of a tile, scores of -1e30 give that tile a
# weight of 0 in `merge`. With $-\infty$, the result of the tile would be 0/0.)

# %%
eight = TokenLayout("contiguous", 1024, 8)
for window in (128, 256):
    busy = efficiency(eight, AttentionMask(True, window))
    print(f"128 tokens per rank, window {window}: busy for {busy:.0%}")

# %% [markdown]
# So the ranks are nearly balanced, and most hops are not needed.

# %%
def attend(q, k, v, distance, window):  # q, k, v [n, d]   ->   o [n, d], lse [n, 1]
    i, j = torch.arange(len(q))[:, None] + distance, torch.arange(len(k))
    unseen = (j > i) | (i - j >= window)
    scores = (q @ k.T / q.shape[-1] ** 0.5).masked_fill(unseen, -1e30)
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse

def merge(o1, lse1, o2, lse2):
    lse = torch.logaddexp(lse1, lse2)
    return (lse1 - lse).exp() * o1 + (lse2 - lse).exp() * o2, lse

# %%
def window_ring(q, k, v, window):  # consecutive tokens: [S/cp, d]   ->   o [S/cp, d]
    ...

# %%
from tplab.exercises.balance import check_window_ring

check_window_ring(window_ring)

# %% [markdown]
# ## On Monday
#
# | here | torch | Megatron-LM | others |
# |---|---|---|---|
# | `layout="zigzag"` | load balancing in `context_parallel`, on by default | always, with `--context-parallel-size` | `zigzag_ring_flash_attn_func` |
# | `layout="striped"` | | | `stripe_flash_attn_func` |
# | `layout.arrange(...)`, `tt.token_positions` | `context_parallel(buffers=...)` does it for you | `get_batch_on_this_cp_rank` | |
# | `head_ring_attention` | | `--cp-comm-type a2a+p2p` | USP in long-context-attention |
#
# ## To take away
#
# - Under a causal mask late tokens have more to do. If one rank has all of them, the others wait: half of the time is lost.
# - Zigzag gives each rank early and late tokens. It costs no bytes, but labels and positions must be reordered too.
# - The best layout depends on the mask. With a window, consecutive tokens are nearly balanced, and most hops are not needed.
#
# **Sources.** Brandon et al. 2023, [Striped Attention](https://arxiv.org/abs/2311.09431). Zhu Zilin,
# [ring-flash-attention](https://github.com/zhuzilin/ring-flash-attention) (zigzag). Fang and Zhao 2024, [A unified sequence
# parallelism approach](https://arxiv.org/abs/2405.07719) (heads and rings on two axes).
#
# Next: [22 Experts on ranks](22_experts_on_ranks.ipynb), for models whose tokens choose where they are computed.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
