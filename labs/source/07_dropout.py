# %% [markdown]
# # 07 Dropout
#
# **Which ranks must drop the same numbers, and how do they agree on them?**
#
# Prerequisites: [lab 01](01_split_a_layer.ipynb), which explains $f$ and $g$, and the block of [lab
# 04](04_megatron_block.ipynb). Time: 45 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/07_dropout.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/07_dropout.ipynb)
#
# ![The dropout masks of four ranks: the same mask four times in one row, four different masks in the other.](images/07_dropout.png)
#
# *Dropout on four ranks: 0 where a number is dropped, 2 where it is kept. Above, the ranks hold copies of one tensor,
# and draw the same mask. Below, each rank holds different features, and draws its own.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
from functools import partial

import numpy as np
import torch
import tplab.torch as tt
from torch.nn import functional as F
from tplab import Mesh, P
from tplab.errors import ReplicationError
from tplab.widgets import Bars, Row, knob, matrices

# %% [markdown]
# ## By hand: one mask or four?
#
# Dropout sets each number to zero with probability $p$, and divides the others by $1 - p$, so that the mean stays the
# same. A tensor-parallel block (lab 04) drops numbers in two kinds of places:
#
# - **inside**, between $f$ and $g$, where each rank has its own features or heads;
# - **outside**, after $g$, where every rank has a copy of the same tensor.
#
# **Predict.** What goes wrong if the ranks draw different masks outside? And what if they draw the same mask inside?
#
# <details><summary>Answer</summary>
#
# With different masks outside, the copies are no longer copies. With the same mask inside, features on different ranks
# are always dropped together.
#
# </details>
#
# tplab's `dropout` takes the axis along which the ranks hold different data. The input here is all ones and
# $p = \frac12$, so the output is zeros and twos.

# %% tags=["opening-picture"]
def masks(mesh, axis):
    return tt.run(lambda: tt.dropout(torch.ones(4, 4), 0.5, axis=axis), mesh).per_rank

outside, inside = masks(Mesh(tp=4), None), masks(Mesh(tp=4), "tp")
panels = {f"outside, rank {rank}": mask for rank, mask in enumerate(outside)}
panels |= {f"inside, rank {rank}": mask for rank, mask in enumerate(inside)}
matrices(panels, 'Outside: dropout(x, 0.5)    Inside: dropout(x, 0.5, axis="tp")')

# %% [markdown]
# With data parallelism, the ranks along `dp` have different samples, so their masks must differ too. The axis is then
# `"dp"` outside, and `("dp", "tp")` inside. Here every rank's mask is compared with every other's.

# %%
def compared(mesh, axis):
    per_rank = masks(mesh, axis)
    same = [[torch.equal(one, other) for other in per_rank] for one in per_rank]
    return np.array(same, float)

grid = Mesh(dp=2, tp=2)  # ranks 0 and 1 are one tp group, ranks 2 and 3 the other
axes = ("dp", ("dp", "tp"))
matrices({f"axis={axis!r}": compared(grid, axis) for axis in axes},
         "Row i, column j: 1 if ranks i and j draw the same mask")  # fmt: skip

# %% [markdown]
# ## Different masks outside: the copies drift apart
#
# torch's `F.dropout` draws from each rank's own generator, and `run` seeds each differently. After $g$, that is wrong.
# `run` compares copies, and names the ranks that differ:

# %%
def after_g(y):
    return F.dropout(tt.reduce_from(y, "tp"), 0.5)

try:
    tt.run(after_g, Mesh(tp=4), torch.ones(4, 8), in_specs=P(None, "tp"), out_specs=P())
except ReplicationError as error:
    print(error)

# %% [markdown]
# If nothing compares them, training simply continues. Take the weight of a norm. Every rank has a copy of it. As long
# as all ranks compute the same gradient, the copies stay the same and no message is needed. Here they are after 20
# steps of training with masks that differ:

# %%
torch.manual_seed(0)
samples = torch.randn(20, 2, 2, 4)  # 20 steps; x and target of 2 tokens, on every rank

def train(drop):
    gain = torch.ones(4, requires_grad=True)
    for x, target in samples:
        loss = ((drop(gain * x) - target) ** 2).mean()
        (grad,) = torch.autograd.grad(loss, gain)
        gain = (gain - 0.2 * grad).detach().requires_grad_()
    return gain.detach()

drifted = tt.run(lambda: train(lambda x: F.dropout(x, 0.5)), Mesh(tp=4)).per_rank
title = "Four copies of one weight, each trained with its own masks"
matrices({f"rank {rank}": gain for rank, gain in enumerate(drifted)}, title)

# %% [markdown]
# The model now has four different norms, and nothing has raised an error. With tplab's `dropout`, the four copies are
# still the same, and `out_specs=P()` accepts them:

# %%
same = tt.run(lambda: train(lambda x: tt.dropout(x, 0.5)), Mesh(tp=4), out_specs=P())
print("one weight:", list(same.value.shape), "bytes sent:", same.trace.bytes_sent())

# %% [markdown]
# ## The same mask inside: features are dropped together
#
# The other mistake is quieter: the copies agree, and the mean is right. Take eight hidden features, two on each rank,
# and $p = \frac12$. A token keeps some of the eight.
#
# **Predict.** How often does a token lose *all* of them?
#
# <details><summary>Answer</summary>
#
# If each rank draws its own mask, eight coins have to fall the same way, which happens once in 256 tokens. If all ranks
# use the same mask, there are only two coins, and each decides one feature on every rank. So it happens once in 4
# tokens.
#
# </details>

# %%
def num_kept(axis, ranks=4):
    def program():
        hidden = torch.ones(4096, 8 // ranks)  # this rank's features of 4096 tokens
        kept = tt.dropout(hidden, 0.5, axis=axis) > 0
        return tt.all_reduce(kept.sum(-1), "tp")

    return tt.run(program, Mesh(tp=ranks), out_specs=P()).value

coins = {"own masks": num_kept("tp"), "one mask": num_kept(None)}
print("kept     " + "".join(f"{k:>6}" for k in range(9)) + "   mean  variance")
for name, counts in coins.items():
    shares = "".join(f"{n / 4096:>6.1%}" for n in torch.bincount(counts, minlength=9))
    mean, variance = counts.float().mean(), counts.float().var()
    print(f"{name:<9}{shares}{mean:>7.2f}{variance:>10.2f}")

# %% [markdown]
# The noise of independent features partly cancels in a sum. If features are dropped together, it adds up.
#
# Turn the knob: share the eight features among more ranks or fewer. What happens to the variance, and why? Guess first.

# %%
def bars(ranks):
    own, one = (num_kept(axis, ranks).float().var().item() for axis in ("tp", None))
    rows = [Row("own masks", {"variance": own}), Row("one mask", {"variance": one})]
    return Bars(rows, f"With one mask, the variance is {one / own:.1f} times as large.")

options = {ranks: bars(ranks) for ranks in (1, 2, 4, 8)}
about = "variance over 4,096 tokens, eight features, p = 1/2"
knob("Features that a token keeps", "ranks", options, start=4, about=about, unit="")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# With the same mask on $R$ ranks, the variance is about $R$ times as large, as if the layer were $R$ times narrower. On
# eight ranks, a single coin decides for all features, so a token keeps all of them or none.
#
# </details>
#
# ## How ranks agree on a mask
#
# The usual recipe gives every rank two generators. The first has the same seed on all ranks, and is for the masks
# outside. The seed of the second also depends on the rank.
# Megatron-LM switches to the second with `get_cuda_rng_tracker().fork()`.

# %%
def two_generators(seed):
    shared = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(seed + 1 + tt.axis_index("tp"))

    def dropout(x, p, axis=None):
        generator = shared if axis is None else own
        return x * (torch.rand(x.shape, generator=generator) >= p) / (1 - p)

    return shared, dropout

# %% [markdown]
# The recipe works as long as all ranks draw equally often from the shared generator. Suppose that rank 2 draws one
# extra number from it, for example to choose a sample to log. Here is how many different masks four ranks then draw. It
# should be one outside and four inside:

# %%
def draw(ours, extra):
    shared, drop = two_generators(seed=1)
    if extra and tt.axis_index("tp") == 2:
        torch.rand(1, generator=shared)
    drop = drop if ours else tt.dropout
    return [drop(torch.ones(4, 4), 0.5, axis=axis) for axis in (None, "tp")]

cases = {"the recipe": (True, False), "the recipe, one extra draw": (True, True),
         "tplab's dropout, one extra draw": (False, True)}
for case, (ours, extra) in cases.items():
    per_rank = tt.run(partial(draw, ours, extra), Mesh(tp=4)).per_rank
    counts = [len({str(mask) for mask in drawn}) for drawn in zip(*per_rank)]
    print(f"{case:32} masks outside: {counts[0]}, inside: {counts[1]}")

# %% [markdown]
# tplab's `dropout` has no shared generator. It makes the mask from the seed of the run, a count of the draws so far,
# and, along `axis`, the rank's coordinate. No other random number can disturb it, only an extra call of `dropout`
# itself. So to agree on a mask, ranks share a seed, and send nothing.
#
# The backward pass has to agree as well. With activation recomputation ([lab 15](15_recomputation.ipynb)), dropout runs
# a second time, and needs the mask of the first. `torch.utils.checkpoint` restores torch's global generators for this.
# From their state, tplab's `dropout` recognises a repeated draw. Your own generator is not restored:

# %%
from torch.utils.checkpoint import checkpoint

def own_generator(x, p):
    return x * (torch.rand(x.shape, generator=GENERATOR) >= p)

def one_mask(drop):  # whether the recomputed mask is the one of the forward pass
    x = torch.ones(64, requires_grad=True)
    y = checkpoint(drop, x, p=0.5, use_reentrant=False)
    y.sum().backward()
    return torch.equal(y > 0, x.grad > 0)

GENERATOR = torch.Generator().manual_seed(0)
programs = {"torch": F.dropout, "own": own_generator, "tplab": tt.dropout}
for name, drop in programs.items():
    found = tt.run(partial(one_mask, drop), Mesh(tp=1)).per_rank[0]
    print(f"{name:6}{'the same mask' if found else 'another mask'}")

# %% [markdown]
# Another mask gives a wrong gradient, and again no error. This is why Megatron-LM has a `checkpoint` of its own, which
# also restores the second generator. A mask that is made from a key can simply be made again.
#
# ## Keys in JAX
#
# JAX has no generator with a state. You pass a **key**, and the same key always gives the same numbers. So `dropout`
# takes the key that all ranks share. If you name an axis, it combines the key with the rank's coordinate.

# %%
import jax
import jax.numpy as jnp
import tplab.jax as tj

def mask_in_jax(axis):
    return lambda: tj.dropout(jnp.ones((4, 4)), 0.5, key=jax.random.key(0), axis=axis)

for axis in (None, "tp"):
    per_rank = tj.run(mask_in_jax(axis), Mesh(tp=4)).per_rank
    agree = all(np.array_equal(mask, per_rank[0]) for mask in per_rank)
    found = "one mask for all ranks" if agree else "one mask per rank"
    print(f"axis={axis!r}: {found}")

# %% [markdown]
# **What truly differs.** There is no state that can get out of step. While JAX compiles, it tracks along which axes a
# value may differ. So tplab's `dropout` knows *before* a mask is drawn whether all ranks have the same key, and refuses
# one that already differs. On the other hand, JAX allows a mistake that a generator with a state makes unlikely. If you
# use a key twice, two layers get the same mask. Split the key instead:

# %%
def two_layers(key_1, key_2):
    return [tj.dropout(jnp.ones((4, 4)), 0.5, key=key) for key in (key_1, key_2)]

def one_key_twice():
    key = jax.random.key(0)
    return two_layers(key, key)

def split_key():
    return two_layers(*jax.random.split(jax.random.key(0)))

for program in (one_key_twice, split_key):
    first, second = tj.run(program, Mesh(tp=4), out_specs=P()).value
    found = "the same mask" if np.array_equal(first, second) else "different masks"
    print(f"{program.__name__}: {found}")

# %% [markdown]
# ## What it costs
#
# Dropout sends nothing, but it needs memory: each rank keeps the mask for the backward pass, one byte per number. For
# $T$ tokens and $D$ features on $R$ ranks, a mask inside takes $TD/R$ bytes. Outside it takes $TD$, unless sequence
# parallelism ([lab 05](05_block_memory.ipynb)) splits the tokens there. Then ranks have different tokens outside as
# well, so the axis is `"tp"` there, too. (PaddleFleetX once [missed
# that](https://github.com/PaddlePaddle/PaddleFleetX/pull/1005).) The count for $T = D = 1024$ and $R = 8$ agrees:

# %%
def mask_bytes(x, axis):
    layer = partial(tt.dropout, p=0.1, axis=axis)
    return sum(one.bytes for one in tt.saved_tensors(layer, x.requires_grad_()))

places = {"inside": (P(None, "tp"), "tp"), "outside": (P(), None),
          "outside, tokens split": (P("tp"), "tp")}
for place, (spec, axis) in places.items():
    specs = spec, None
    out = tt.run(mask_bytes, Mesh(tp=8), torch.ones(1024, 1024), axis, in_specs=specs)
    print(f"{place:21} {out.per_rank[0]:9,} bytes per rank")

# %% [markdown]
# Is that a lot? A block has two masks outside. With 80 blocks, $D = 8192$ and a sequence of 4,096 tokens, every rank
# would keep 5 GiB of them, or 0.6 GiB if eight ranks split the tokens. So combine dropout with sequence
# parallelism or recomputation. Many large models, such as [PaLM](https://arxiv.org/abs/2204.02311) (section 5), are pretrained without
# dropout.
#
# A good test of all this is a whole model with dropout *on*. Here is tplab's GPT on 1, 2 and 4 ranks, with one seed:

# %%
config = tt.GPTConfig(
    vocab_size=10, width=24, num_layers=2, num_heads=4, context=8, dropout=0.1
)
text = np.random.default_rng(0).integers(0, 10, (3, 9))

def loss_of_gpt(text):
    return tt.GPT(config).double().loss(text[:, :-1], text[:, 1:]).detach()

for ranks in (1, 2, 4):
    loss = tt.run(loss_of_gpt, Mesh(tp=ranks), text, out_specs=P()).value
    print(f"{Mesh(tp=ranks)}: loss {loss:.6f}")

# %% [markdown]
# This GPT has dropout outside only, so it drops the same numbers on any number of ranks, and the losses are equal. If
# it also had dropout inside, the masks would depend on the number of ranks. The model would be just as correct,
# but you could no longer compare the losses.

# %% [markdown]
# ## A bug to repair: two masks
#
# This block has one dropout inside and one outside. Its shapes are right, and it runs.

# %%
def block(x, a, b):  # x [T, D]   a [D, F/tp]   b [F/tp, D]   ->   [T, D], replicated
    h = torch.relu(tt.copy_to(x, "tp") @ a)
    h = tt.dropout(h, 0.5)
    y = tt.reduce_from(h @ b, "tp")
    return x + tt.dropout(y, 0.5, axis="tp")

# %% [markdown]
# The check gives `block` weights that make every mask readable from the result: hidden feature $k$ adds $2^k$, and each
# dropout doubles what it keeps. So 340 is $4 \cdot (1 + 4 + 16 + 64)$. Repair what it reports. `run` with `out_specs=P()`
# could see one of the mistakes; the other shows only in statistics. Which is which?

# %%
from tplab.exercises.dropout import check_block

check_block(block)

# %% [markdown]
# ## Your turn: a dropout of your own
#
# Write `drop` without tplab's `dropout`, and without messages. For each draw, all ranks get the same whole number as
# `key`. No two draws have the same key, and none may share a mask. The mask must be the same on ranks with the same
# coordinates along `axis`, and different on others. Earlier draws on a rank must not change it, and it must leave
# torch's global generator alone. A gradient must reach `x`. (`torch.Generator().manual_seed(...)` makes a new
# generator, and `tt.axis_index(axis)` is the rank's place along one axis or a tuple of axes; `None` is not an axis. The
# check takes a torch function, and tries it on up to 130 ranks.)
#
# <details><summary>A hint</summary>
#
# The seed has to be made from the key and the place. If you add the two, key 0 on rank 1 and key 1 on rank 0 have the
# same seed. If you multiply the key by 10 first, key 0 on rank 10 and key 1 on rank 0 have the same seed. Python's
# `hash` of a pair of whole numbers tells them apart. Leave the name of the axis out: `hash` of a text differs from one
# process to the next.
#
# </details>

# %%
def drop(x, p, key, axis=None):  # x of any shape   ->   the same shape
    ...

# %%
from tplab.exercises.own_dropout import check_drop

check_drop(drop)

# %% [markdown]
# ## On Monday
#
# | here | Megatron-LM | torch | JAX |
# |---|---|---|---|
# | `dropout(x, p)`, outside | `F.dropout`, with one seed on all ranks | `DTensor`'s random operations, replicated | `random.bernoulli` with a shared key |
# | `dropout(x, p, axis="tp")`, inside | the same within `get_cuda_rng_tracker().fork()` | `DTensor`, sharded | the key folded with `lax.axis_index("tp")` |
# | the seed of the run | `model_parallel_cuda_manual_seed` | `torch.manual_seed` on all ranks | `random.key` |
#
# ## To take away
#
# - Outside, where ranks hold copies, all ranks draw the same mask. Inside, each rank draws its own.
# - Different masks outside make copies drift apart. The same mask inside drops features together, so the number that a
#   token keeps has about $R$ times the variance. In ordinary training, neither raises an error.
# - To agree on a mask, ranks share a seed or a key, and send nothing.
#
# **Sources.** Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053), appendix B. [Megatron-LM to
# transformers](https://github.com/huggingface/transformers/issues/10321), an issue that plans all this for a library.
#
# Next: [08 Overlap](08_overlap.ipynb), and how to hide the time that messages take.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
