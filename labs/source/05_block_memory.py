# %% [markdown]
# # 05 Block memory
#
# **What does a rank keep for a block's backward pass, and which part of that does tensor parallelism not divide?**
#
# Prerequisites: the block of [lab 04](04_megatron_block.ipynb); `all_gather` and `reduce_scatter` from [lab
# 02](02_collectives.ipynb). Time: 50 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/05_block_memory.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/05_block_memory.ipynb)
#
# ![Bars: with tensor parallelism alone, the part that is outside f and g stays whole; with the tokens split, it is divided too.](images/05_block_memory.png)
#
# *What each of eight ranks keeps of one layer of GPT-3, and of one of Llama 3 8B. Tensor parallelism divides what is between
# $f$ and $g$. The blue part is outside, and every rank keeps all of it. Splitting the tokens divides it as well.*

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
from tplab.cost import activation_tensors
from tplab.forecast import Model
from tplab.widgets import Bars, Row, knob, matrices, shards, timeline

# %% [markdown]
# ## By hand: what a backward pass needs
#
# The backward pass of a matmul $y = xw$ needs $x$, for $dw = x^\top dy$. For `gelu` or a norm it needs the input, for
# softmax the output, and for dropout the mask. So the forward pass keeps these tensors, the **activations**. In
# training they can take most of the memory.
#
# A number takes 2 bytes, and an entry of a mask 1 byte. For $s$ tokens, a batch of $b$, a width of $h$ and $a$ heads,
# Korthikanti et al. count this many bytes in GPT-3's block. The second term is the scores, one for each head and each
# pair of tokens:
#
# $$sbh \left(34 + 5\,\frac{as}{h}\right)$$
#
# **Predict.** GPT-3 has 96 layers, each 12,288 wide with 96 heads. What does one layer keep for 2,048 tokens, and what do
# all 96? An H100 has about 79 GiB for a program.
#
# <details><summary>Answer</summary>
#
# $\frac{as}{h}$ is 16, so it is $114 \cdot 2048 \cdot 12288$ bytes: 2.7 GiB for one layer, and 257 GiB for 96. This is
# for a batch of a single sequence.
#
# </details>
#
# This is the count:

# %%
GPT3 = {"sequence": 2048, "batch": 1, "width": 12288, "num_heads": 96}

def print_in_sbh(**sizes):
    sbh = sizes["sequence"] * sizes["batch"] * sizes["width"]
    for name, nbytes in activation_tensors(**sizes).items():
        print(f"{nbytes / sbh:5.1f} sbh  {name}")

print_in_sbh(**GPT3)

# %% [markdown]
# ## A block of today
#
# Hardly any new model is built like GPT-3. **Llama 3 8B** is trained without dropout. **Fused attention** keeps no scores:
# it computes them again in the backward pass. Four query heads share one head of keys and values. And the MLP multiplies
# *two* tensors of 14,336 features: up, and `silu` of gate (SwiGLU). A fused kernel keeps gate, up and the product.
#
# **Predict.** Does its block keep more than $34\,sbh$ bytes, or less?

# %%
model = Model.find("llama3-8b")
LLAMA3 = {"sequence": 8192, "batch": 1, "width": model.hidden, "num_heads": model.heads}
LLAMA3 |= {"kv_heads": model.kv_heads, "hidden": model.ffn, "gated": model.gated}
LLAMA3 |= {"dropout": model.dropout, "scores": False}
print_in_sbh(**LLAMA3)

# %% [markdown]
# That is $34\,sbh$ again, by chance: the wider MLP uses up exactly what the missing masks and the smaller keys and
# values save. Eager PyTorch also keeps `silu` of gate.
#
# ## Turn the knob
#
# Now $t$ ranks share the block. Everything between $f$ and $g$ is divided: the features of heads and MLP, and the
# scores. Every rank keeps the rest whole: the inputs of the norms and of $f$, and the masks after $g$. So a rank keeps
#
# $$sbh \left(10 + \frac{24}{t} + 5\,\frac{as}{ht}\right) \text{ of GPT-3's block}, \qquad
# sbh \left(8 + \frac{26}{t}\right) \text{ of Llama 3 8B's.}$$
#
# Change the number of ranks. (Further down, we build a block with its tokens split.)

# %% tags=["opening-picture"]
WHOLE = ("norm", "input of query, key, value", "input of up", "mask after")

def parts(sizes, ranks, **options):
    kept = {"outside f and g": 0, "between f and g": 0, "scores": 0}
    for name, nbytes in activation_tensors(num_ranks=ranks, **sizes | options).items():
        inside = not any(words in name for words in WHOLE)
        where = "between f and g" if inside else "outside f and g"
        kept["scores" if "scores" in name else where] += nbytes
    return kept

def bars(ranks):
    split = {"sequence_parallel": True}
    gpt3, llama3 = parts(GPT3, ranks), parts(LLAMA3, ranks)
    rows = [Row("GPT-3", gpt3), Row("GPT-3, tokens split", parts(GPT3, ranks, **split)),
            Row("GPT-3, split, no scores", parts(GPT3, ranks, scores=False, **split)),
            Row("Llama 3 8B", llama3),
            Row("Llama, tokens split", parts(LLAMA3, ranks, **split))]
    shares = [kept["outside f and g"] / sum(kept.values()) for kept in (gpt3, llama3)]
    sentence = "Outside f and g, with tensor parallelism alone: {:.0%} of GPT-3's block"
    return Bars(rows, (sentence + ", {:.0%} of Llama's.").format(*shares))

options = {ranks: bars(ranks) for ranks in (1, 2, 4, 8)}
about = "16 bits per number; sequences of 2,048 and of 8,192 tokens"
knob("What a rank keeps of one layer", "ranks", options, start=8, about=about, unit="B")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# The blue part does not shrink if only the heads and features are divided. For GPT-3 it is 240 MiB per layer, and 22.5 GiB
# for all 96, on every rank, however many ranks there are. On eight ranks it is 43% of what a rank keeps of GPT-3's block,
# and 71% of Llama's. If the tokens are split, it is divided like everything else. Then GPT-3's scores are the largest
# part, unless they are computed again.
#
# </details>
#
# ## Is the count right?
#
# That was a count on paper. `saved_tensors` lists what autograd really holds after a forward pass, apart from the
# parameters. Here is tplab's block with dropout, in bfloat16, on one of four ranks, beside the count:

# %%
from tplab.torch.models.gpt import Block, Parts

S, B, H, HEADS, R = 64, 2, 96, 12, 4
sizes = {"vocab_size": 1, "num_layers": 1, "context": S}
config = tt.GPTConfig(width=H, num_heads=HEADS, dropout=0.1, **sizes)

def kept(x, is_split):  # over tp alone, with its tokens whole or split
    block = Block(Parts(config, sequence_parallel=is_split)).bfloat16()
    return tt.saved_tensors(block, x.bfloat16().requires_grad_())

whole = tt.run(kept, Mesh(tp=R), torch.ones(B, S, H), False).per_rank[0]
counted = activation_tensors(S, B, H, HEADS, R, scores=False)
large = [tensor for tensor in whole if tensor.bytes > 2000]
for (name, nbytes), tensor in zip(counted.items(), large):
    both = f"{nbytes:>6,} B   kept: {tensor.bytes:>6,} B"
    print(f"{name:<31} {both}, {list(tensor.shape)}")

# %% [markdown]
# The count is right, tensor by tensor: $10 + \frac{24}{4} = 16$ times $sbh$. The formula leaves out only small tensors,
# such as the mean and the deviation of each token in a norm.
#
# ## Sequence parallelism: split the tokens
#
# Between $g$ and the next $f$ all ranks do the same work: the same residuals, norms and dropout. None of these mixes
# tokens. So give each rank some of the tokens there. A rank has only its own heads and hidden features, and every token
# needs all of them, so the part between $f$ and $g$ still sees all tokens. Therefore $f$ becomes an `all_gather` of
# tokens, and $g$ becomes a `reduce_scatter`:

# %%
shards(Mesh(tp=4), (12, 24), P("tp"), name="x, one row per token")

# %%
def norm(x, scale):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale

def plain_mlp(x, scale, a, b):  # the MLP half of a block: x [B, S, D]
    h = tt.copy_to(norm(x, scale), "tp")
    return x + tt.reduce_from(F.gelu(h @ a) @ b, "tp")

def split_mlp(x, scale, a, b):  # x [B, S/tp, D]
    h = tt.all_gather(norm(x, scale), "tp", 1)
    return x + tt.reduce_scatter(F.gelu(h @ a) @ b, "tp", 1)

# %% [markdown]
# **Predict.** The MLP half now has four collectives in a training step, instead of two. How many more bytes do they
# send? One gradient also comes out wrong. Which one?
#
# <details><summary>Answer</summary>
#
# They send no more bytes, because an all-reduce *is* a reduce-scatter and an all-gather. The gradient of `scale` is
# wrong: each rank has used `scale` on its own tokens, and has only their part of the gradient.
#
# </details>

# %%
def step(x, target, scale, a, b, mlp):
    leaves = [tensor.requires_grad_() for tensor in (x, scale, a, b)]
    ((mlp(*leaves) - target) ** 2).sum().backward()
    return dict(zip(("x", "scale", "a", "b"), (leaf.grad for leaf in leaves)))

TOKENS, WEIGHTS = P(None, "tp"), (P(), P(None, "tp"), P("tp"))

def given(tokens):
    return tokens, tokens, *WEIGHTS, None

shapes = ((2, 12, 24), (2, 12, 24), (24,), (24, 96), (96, 24))
torch.manual_seed(0)
small = [torch.randn(shape, dtype=torch.float64) / 5 for shape in shapes]
want = tt.run(step, Mesh(tp=1), *small, plain_mlp, in_specs=given(P())).per_rank[0]
plain = tt.run(step, Mesh(tp=4), *small, plain_mlp, in_specs=given(P()))
split = tt.run(step, Mesh(tp=4), *small, split_mlp, in_specs=given(TOKENS))
total = plain.trace.bytes_sent(), split.trace.bytes_sent()
print("all ranks send {:,} bytes; with split tokens, {:,} bytes".format(*total))
found = {f"rank {rank}": grads["scale"] for rank, grads in enumerate(split.per_rank)}
found |= {"added": sum(found.values()), "right": want["scale"]}
first = {name: grad[:4] for name, grad in found.items()}
matrices(first, "The gradient of scale, its first four entries")

# %% [markdown]
# [Megatron-LM #1446](https://github.com/NVIDIA/Megatron-LM/issues/1446) shows the gradient
# of a real model's last norm on four ranks: all four are different. Megatron adds them up in an extra step after the
# backward pass, which is easy to forget. There is a better way. All ranks share `scale`, and each uses it for its own tokens. This is exactly where $f$
# belongs:

# %%
def sequence_parallel(x, scale, a, b):
    return split_mlp(x, tt.copy_to(scale, "tp"), a, b)

out_specs = {"x": TOKENS, **dict(zip(("scale", "a", "b"), WEIGHTS))}
for ranks in (2, 3, 4, 6, 12):
    options = {"in_specs": given(TOKENS), "out_specs": out_specs}
    out = tt.run(step, Mesh(tp=ranks), *small, sequence_parallel, **options)
    off = max((out.value[name] - want[name]).abs().max() for name in want)
    assert off < 1e-10
    if ranks == 4:
        more = out.trace.bytes_sent() - plain.trace.bytes_sent()
        print(f"{more:,} bytes more, for the gradient of scale")

# %% [markdown]
# ## What it saves, and what it costs
#
# With split tokens a rank should keep $34\,sbh/t$. But for the gradients of the weights autograd keeps two inputs
# *gathered*: that of query, key and value, and that of up. On four ranks these are $2 \cdot 2 \cdot \frac34\,sbh$
# more, so a rank keeps $11.5\,sbh$ instead of $8.5\,sbh$. Megatron keeps only the rank's own tokens, and gathers a
# second time in the backward pass. It saves memory and pays with messages. `tt.gather_again` does the same:

# %%
def kept_again(x):
    block = Block(Parts(config, sequence_parallel=True)).bfloat16()
    return tt.saved_tensors(tt.gather_again(block), x.bfloat16().requires_grad_())

x = torch.ones(B, S, H)
halves = tt.run(kept, Mesh(tp=R), x, True, in_specs=(TOKENS, None)).per_rank[0]
again = tt.run(kept_again, Mesh(tp=R), x, in_specs=TOKENS).per_rank[0]
for name, found in (("whole", whole), ("split", halves), ("gathered again", again)):
    print(f"{name:<15} {found.bytes:>8,} bytes, {found.bytes / (S * B * H):5.2f} sbh")

# %% [markdown]
# Apart from the small tensors, these are $16$, $11.5$ and $8.5\,sbh$. What about time? Here is the MLP half at real
# size, on four H100s, **modelled** from their data sheet (with unfused norms, as in eager PyTorch). The timeline is
# that of the last program:

# %%
sizes = ((1, 2048, 4096), (1, 2048, 4096), (4096,), (4096, 16384), (16384, 4096))
big = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]
programs = {"whole": plain_mlp, "split": sequence_parallel}
programs["gathered again"] = tt.gather_again(sequence_parallel)
for name, mlp in programs.items():
    tokens = P() if mlp is plain_mlp else TOKENS
    options = {"in_specs": given(tokens), "cluster": "h100", "device": "meta"}
    trace = tt.run(step, Mesh(tp=4), *big, mlp, **options).trace
    print(f"{name:<15} {trace.makespan * 1e6:5,.0f} µs")
timeline(trace)

# %% [markdown]
# The three gathers are of `h`, of the gradient of `y`, and of `h` again. The short all-reduce at the end is for `scale`.
#
# By this model, splitting the tokens also saves a sixth of the time: the bytes are the same, and each rank does a quarter of
# the norms and residuals. The second gather takes back about 40 µs. How much you save depends on how long norms and
# dropout take. Megatron fuses them: Korthikanti et al. **measured** 19.0 ms instead of 19.6, forward and backward,
# for a layer of a 22-billion-parameter model on eight A100s, which is 3%.
#
# ## The same in JAX
#
# The names are the same. But this program has no $f$ for `scale`:

# %%
import jax
import jax.numpy as jnp
import tplab.jax as tj

def step_in_jax(x, target, scale, a, b):
    def loss(x, scale, a, b):
        root = jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        h = tj.all_gather(x / root * scale, "tp", 1)
        hidden = jax.nn.gelu(h @ a, approximate=False)
        y = x + tj.reduce_scatter(hidden @ b, "tp", 1)
        return ((y - target) ** 2).sum()

    grads = jax.grad(loss, (0, 1, 2, 3))(x, scale, a, b)
    return dict(zip(("x", "scale", "a", "b"), grads))

arrays = [np.asarray(tensor) for tensor in small]
options = {"in_specs": given(TOKENS)[:5], "out_specs": out_specs}
in_jax = tj.run(step_in_jax, Mesh(tp=4), *arrays, **options).value
off = max(np.abs(in_jax[name] - want[name].numpy()).max() for name in want)
print("every gradient is right:", off < 1e-4)  # JAX computes in float32

# %% [markdown]
# JAX's types know that tokens vary from rank to rank and that `scale` does not. Where the two meet, JAX adds $f$ by
# itself. So this sum cannot be forgotten.
#
# ## A bug to repair
#
# Here is the MLP half once more. Its output is right, and so is the loss, but not every gradient. Repair it, and let each
# rank do the norm of its own tokens alone.
#
# <details><summary>A hint</summary>
#
# There are two ways to gather. After `gather_from` all ranks do *the same*, so its backward pass takes this rank's
# piece of the gradient, and sends nothing. After `all_gather` each rank does something *different*, so its backward
# pass adds up the gradients of all ranks. (In Megatron, the argument `tensor_parallel_output_grad` decides.)
#
# </details>

# %%
def sequence_mlp(x, scale, a, b):  # x [B, S/tp, D]   ->   [B, S/tp, D]
    h = tt.gather_from(norm(x, tt.copy_to(scale, "tp")), "tp", 1)
    return x + tt.reduce_scatter(F.gelu(h @ a) @ b, "tp", 1)

# %%
from tplab.exercises.block_memory import check_sequence_mlp

check_sequence_mlp(sequence_mlp)

# %% [markdown]
# ## Your turn: a block with its tokens split
#
# Write the block of lab 04's exercise, $y = x + \mathrm{heads}(h) + \mathrm{gelu}(hA)\,B$ with $h = \mathrm{norm}(x)$,
# in torch. Each rank has some of the tokens and returns results for them. You may use `norm` from above and `heads`
# from below. Mind `scale`, send as little as you can, and let each rank do the norm of its own tokens alone. (You
# may gather again.)

# %%
def heads(x, q, k, v, o):  # x [B, S, D]   q, k, v [n, D, d]   o [n, d, D]
    q, k, v = (torch.einsum("bsD,nDd->bnsd", x, w) for w in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.einsum("bnsd,ndD->bsD", y, o)

# %%
def tokens_split(x, scale, q, k, v, o, a, b):  # x [B, S/tp, D]   ->   [B, S/tp, D]
    ...

# %%
from tplab.exercises.block_memory import check_tokens_split

check_tokens_split(tokens_split)

# %% [markdown]
# ## On Monday
#
# | here | Megatron-LM | torch | JAX |
# |---|---|---|---|
# | split tokens | `--sequence-parallel` | `SequenceParallel()` | `P(None, "tp")` for activations |
# | `all_gather`, tokens | `gather_from_sequence_parallel_region` | done by `DTensor` | `lax.all_gather` |
# | `reduce_scatter`, tokens | `reduce_scatter_to_sequence_parallel_region` | done by `DTensor` | `lax.psum_scatter` |
# | `copy_to(scale)` | `finalize_model_grads`, after the backward pass | done by `DTensor` | done by types |
# | `gather_again` | always | `torch.utils.checkpoint` | `jax.checkpoint` |
# | scores recomputed | `--recompute-activations`, or flash attention | `scaled_dot_product_attention` | `dot_product_attention` |
#
# ## To take away
#
# - GPT-3's block keeps $sbh(34 + 5as/h)$ bytes, and Llama 3 8B's keeps $34\,sbh$. Tensor parallelism divides what is between
#   $f$ and $g$, and leaves $10\,sbh$ or $8\,sbh$ on every rank.
# - Splitting the tokens outside $f$ and $g$ divides that part as well, and sends only a little more: the gradients of
#   the norms. To divide everything, gather the tokens again in the backward pass.
# - Ranks that share a parameter and use it on different tokens must add up its gradient.
#
# **Sources.** Korthikanti et al. 2022, [Reducing activation recomputation](https://arxiv.org/abs/2205.05198).
# Megatron-LM [#1446](https://github.com/NVIDIA/Megatron-LM/issues/1446) and
# [#443](https://github.com/NVIDIA/Megatron-LM/issues/443), where a user asks why the gradients of norms are added up.
#
# Next: [06 Vocabulary](06_vocabulary.ipynb), where the last matrix of the model is split.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
