# %% [markdown]
# # 18 Quantised communication
#
# **How can a training step send a quarter of the bytes between nodes, and does the model still learn?**
#
# Prerequisites: ZeRO-3 ([lab 17](17_zero.ipynb)), and the two levels of [lab 03](03_network_levels.ipynb).
# Time: 50 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/18_quantised_communication.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/18_quantised_communication.ipynb)
#
# ![Five bars of bytes. ZeRO-3 sends the most, and ZeRO++ a quarter of that.](images/18_quantised_communication.png)
#
# *Four transformer layers train on two nodes of four GPUs. The bars are the bytes that one GPU sends to the other node in
# a step.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
import torch
from torch import nn
import tplab.torch as tt
from tplab import Mesh, P, cost
from tplab.data.hiding import H100S, step_seconds, tokens_to_hide
from tplab.data.zero_plus_plus import SAVINGS, ZeroPlusPlus, secondary_bytes, step_bytes
from tplab.torch.models.plain import PlainBlock
from tplab.widgets import Bars, Row, animate, bytes_text, knob, levels, matrices

torch.set_num_threads(1)  # several threads do not pay off for tensors this small

# %% [markdown]
# In ZeRO-3, each GPU keeps one piece of the parameters. A step gathers all pieces twice and reduce-scatters the
# gradients. With $M$ parameters, a GPU receives nearly $3M$ numbers of 2 bytes. Each of ZeRO++'s three savings has a bar below.

# %% tags=["opening-picture"]
NODES = Mesh(node=2, gpu=4)
ALL = ("node", "gpu")  # a rank is a GPU of a node
CONFIG = tt.GPTConfig(32, 64, 4, num_heads=4, context=16)

def one_step(x, options):  # x [batch / ranks, tokens, width]
    layers = nn.Sequential(*[PlainBlock(CONFIG) for _ in range(4)])
    how = tt.zero_plus_plus("gpu", **options)
    tt.shard_parameters(layers, ALL, compute_dtype=torch.bfloat16, **how)
    layers(x).square().mean().backward()

def to_other_nodes(options):
    x = torch.randn(8, 16, 64, dtype=torch.bfloat16)
    trace = tt.run(one_step, NODES, x, options, in_specs=(P(ALL), None)).trace
    sent = {"forward gather": 0, "backward gather": 0, "gradients": 0, "scales": 0}
    for event in trace.select(kind="collective", rank=0, axis="node").events:
        name = f"{event.phase} gather" if event.op == "all_gather" else "gradients"
        sent["scales" if event.dtype == "float32" else name] += event.bytes
    return sent

counts, shown = {}, {}
for block in (32, 256):  # how many numbers share a scale
    counts[block] = {name: to_other_nodes({**how, "block": block})
                     for name, how in SAVINGS.items()}
    scales = bytes_text(counts[block]["ZeRO++"]["scales"])
    shown[block] = Bars([Row(name, parts) for name, parts in counts[block].items()],
                        f"All three leave a quarter, plus {scales} of scales.")
knob("What a GPU sends to the other node", "elements per scale", shown, start=256,
     about="one training step · bytes counted", unit="B")

# %% [markdown]
# ## By hand: codes and a scale
#
# To **quantise** numbers to 4 bits, divide them by a **scale**, and round. The scale makes the largest magnitude 7,
# since -7 to 7 fit into 4 bits. With 8 bits it becomes 127. One small **code** per number travels, along with the
# scale. The receiver multiplies:
#
# $$s = \frac{\max |x|}{7} \qquad c = \mathrm{round}(x / s) \qquad x' = c \, s$$
#
# Neighbouring codes stand for numbers that are $s$ apart, so no number is off by more than half of $s$. The largest
# weight below is 3.5, so the scale is 0.5.
#
# **Predict.** Which of the eight come back as 0? And what changes if each half has a scale of its own?
#
# <details><summary>Answer</summary>
#
# With one scale, 0.1, -0.2 and 0.04 are closer to 0 than half of it, 0.25, so they come back as 0. With two, the second
# half's scale is 0.1, and only 0.04 is lost. A **block** is a run of numbers that share a scale.
#
# </details>

# %%
x = torch.tensor([0.5, -1.0, 3.5, 2.2, 0.1, -0.2, 0.04, 0.7])

def and_back(x, bits, block):
    return tt.dequantize(tt.quantize(x, bits, block))

matrices({"x": x, "one scale: 0.5": and_back(x, 4, None),
          "a scale per block of 4: 0.5 and 0.1": and_back(x, 4, 4)})

# %% [markdown]
# ## Build it: gather codes
#
# ZeRO-3 gathers weights before a layer runs. We send their codes and scales instead. Each of two ranks has half of `x`.

# %%
def gather_codes(x):  # x [n]   ->   [R n], the numbers of every rank, rounded
    scale = x.abs().max() / 7
    codes = (x / scale).round().to(torch.int8)
    codes = tt.all_gather(codes.reshape(1, -1), "dp")  # [R, n]
    scales = tt.all_gather(scale.reshape(1, 1), "dp")  # [R, 1]
    return (codes * scales).flatten()

def in_full_size(x):
    return tt.all_gather(x, "dp")

def quantised(x):
    return tt.quantized_all_gather(x, "dp", bits=4, block=4)

for gather in (in_full_size, gather_codes, quantised):
    out = tt.run(gather, Mesh(dp=2), x, in_specs=P("dp"), out_specs=P())
    numbers = [round(number, 2) for number in out.value.tolist()]
    print(f"{gather.__name__:13} {out.trace.bytes_sent(rank=0):2} bytes  {numbers}")

# %% [markdown]
# Our codes take a byte each. tplab packs two into a byte, so four weights travel as 2 bytes of codes and 4 of scale.
# In a block of 256, the scale adds only 4 bytes to 128. Here are four ranks: codes (a) are gathered, then scales (b).

# %%
animate(tt.run(gather_codes, Mesh(dp=4), x, in_specs=P("dp"), out_specs=P()).trace)

# %% [markdown]
# ## Turn the knob: numbers that share a scale
#
# Here are 4,096 weights in 8 bits. One of them is an outlier, fifty times as large as a typical weight. The bars show
# the largest error in each eighth of the weights. Guess first: which bars get shorter if 512 weights share a scale?

# %%
generator = torch.Generator().manual_seed(0)
weights = 0.02 * torch.randn(4096, generator=generator)
weights[700] = 1.0  # the outlier

def errors(block):
    off = (and_back(weights, 8, block) - weights).abs().reshape(8, -1).amax(1) / 0.02
    rows = [Row(f"weights {512 * i} to {512 * i + 511}",
                {"largest error": 100 * float(e)}, "") for i, e in enumerate(off)]
    scales = tt.quantize(weights, 8, block).num_bytes.scales
    return Bars(rows, f"The scales add {scales:,} bytes to 4,096 bytes of codes.")

by_block = {block: errors(block) for block in (4096, 512, 128, 32)}
knob("Error of 4,096 weights in 8 bits", "weights per scale", by_block, start=4096,
     about="in percent of a typical weight, 0.02", unit="%")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# With a single scale, all weights pay for the outlier: the largest error is a fifth of a typical weight. With blocks of
# 512, only the outlier's block pays, and the other seven bars shrink to about a fifteenth. With blocks of 32, the scales
# add an eighth to the bytes.
#
# </details>
#
# ## Why gradients cannot take the ring
#
# A reduce-scatter also adds numbers, and a ring adds at every hop ([lab 02](02_collectives.ipynb)). Codes with
# different scales cannot be added, and $7 + 7$ does not fit into 4 bits. So each hop would turn codes into numbers, add,
# and round again.
#
# **Predict.** Around such a ring, the sum of two ranks' gradients is off by 9%, relative to its size. How far off is the
# sum of sixteen: about 9%, twice as much, or four times?
#
# <details><summary>Answer</summary>
#
# Nearly four times. A hop's error is in proportion to the sum so far. Errors are random, so their squares add up: to
# $1 + 2 + \dots + 15 = 120$ of those of one rank's numbers, while the square of the sum is that of 16. That is 120/16
# instead of 1/2, and $\sqrt{15} \approx 4$.
#
# </details>

# %%
def around_a_ring(pieces):  # pieces [R, n], one from each rank
    total = pieces[0]
    for piece in pieces[1:]:
        total = and_back(total, 4, 256) + piece  # the sum so far is rounded at each hop
    return total

def straight_to_the_owner(pieces):
    *others, own = pieces  # what others send is rounded once
    return sum(and_back(piece, 4, 256) for piece in others) + own

for ranks in (2, 4, 16, 64):
    pieces = torch.randn(ranks, 4096, generator=generator)
    right = pieces.sum(0)
    ring, straight = (((add(pieces) - right).norm() / right.norm()).item()
                      for add in (around_a_ring, straight_to_the_owner))
    print(f"{ranks:2} ranks: ring {ring:4.0%} off, straight {straight:4.0%} off")

# %% [markdown]
# So every rank sends its codes straight to the ranks that own the pieces, and these add in full precision. Each number is
# rounded only once, so the error of the sum, relative to its size, hardly grows with the number of ranks. This exchange
# is an **all_to_all**. It sends as many bytes as the ring.
#
# To send less to other nodes, ZeRO++ works on two levels. The ranks of a node exchange pieces and add them. Then only
# the *sums* cross, as codes again.

# %%
def one_level(x):  # x [R, n], a row for each rank   ->   [1, n]
    return tt.quantized_reduce_scatter(x, ALL, bits=4)

def two_levels(x):
    return tt.quantized_reduce_scatter(x, ALL, bits=4, inside="gpu")

gradients = torch.randn(8 * 8, 1024, generator=generator)
in_full = gradients.reshape(8, 8, 1024).sum(0)
for reduce in (one_level, two_levels):
    out = tt.run(reduce, NODES, gradients, in_specs=P(ALL), out_specs=P(ALL))
    off = (out.value - in_full).norm() / in_full.norm()
    sent = [out.trace.bytes_sent(rank=0, axis=axis) for axis in (ALL, "gpu", "node")]
    print(f"{reduce.__name__:10} over all {sent[0]:,}, inside {sent[1]:,},",
          f"across {sent[2]:,} bytes, {off:.0%} off")

# %% [markdown]
# On one level, four of seven pieces leave the node: 2,112 of the 3,696 bytes. On two levels a quarter of these do, 528.
# The price is a second rounding, 18% off instead of 13%, and twice as many bytes inside
# the node.
#
# ## Three savings
#
# - **qwZ**: weights travel in 8 bits, which halves both gathers.
# - **hpZ**: with $g$ GPUs per node, every GPU also keeps $1/g$ of the gathered parameters. So
#   the second gather stays inside the node.
# - **qgZ**: gradients travel as codes of 4 bits, on two levels.
#
# With $N$ nodes, each *node* sends $3M(N-1)/N$ numbers of 2 bytes to others. Now $3M$ becomes $\frac12 M$ for the first
# gather and $\frac14 M$ for the gradients. (tplab's ZeRO-3 already uses two levels, so qgZ saves by its 4 bits only.) The formula gives the trace's bytes, those of one GPU:

# %%
n = sum(p.numel() for p in PlainBlock(CONFIG).parameters()) // 8  # a GPU's share
for name, options in SAVINGS.items():
    how = ZeroPlusPlus("gpu", **options)
    across = step_bytes(n, 2, 4, how).across  # of one layer
    assert 4 * across.total == sum(counts[256][name].values())
    kept = 4 * secondary_bytes(n, 2, how)
    print(f"{name:20} {4 * across.codes:,} bytes + {4 * across.scales:,} of scales,",
          f"second pieces {kept:,}")

# %% [markdown]
# ## Does it still learn?
#
# A small GPT learns the Zen of Python, letter by letter, on two nodes of two GPUs. We train it with ZeRO-3, here in
# float32, with ZeRO++, and with too little precision: 4 bits for weights, and one scale for a whole message.

# %% tags=["nbval-ignore-output"]
import codecs
import contextlib
import io

with contextlib.redirect_stdout(io.StringIO()):
    import this  # it prints itself

text = codecs.decode(this.s, "rot13")
letters = sorted(set(text))
ids = torch.tensor([letters.index(letter) for letter in text])
LENGTH, STEPS = 32, 60

def train(batches, options, seed):  # batches [steps, batch / ranks, length + 1]
    torch.manual_seed(seed)
    config = tt.GPTConfig(len(letters), 64, 1, num_heads=4, context=LENGTH)
    first, last = nn.Embedding(len(letters), 64), nn.Linear(64, len(letters))
    model = nn.Sequential(first, PlainBlock(config), nn.LayerNorm(64), last)
    tt.shard_parameters(model, ALL, **tt.zero_plus_plus("gpu", **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in batches:
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(tt.all_reduce(loss.detach(), ALL, "mean"))
    return torch.stack(losses)

def losses(options, seed):
    chance = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - LENGTH, (STEPS, 16), generator=chance)
    batches = ids[starts[..., None] + torch.arange(LENGTH + 1)]
    return tt.run(train, Mesh(node=2, gpu=2), batches, options, seed,
                  in_specs=(P(None, ALL), None, None), out_specs=P()).value

too_little = dict(SAVINGS["ZeRO++"], weight_bits=4, block=None)
curves = {}
for name, options in {**SAVINGS, "too little": too_little}.items():
    if name in ("ZeRO-3", "ZeRO++", "too little"):
        runs = torch.stack([losses(options, seed) for seed in range(3)])
        ends = ", ".join(f"{end:.2f}" for end in runs[:, -20:].mean(1))
        print(f"{name:10} loss of the last 20 steps, for each seed: {ends}")
        curves[name] = range(1, STEPS + 1), runs.mean(0).tolist()
levels({"loss of each step": curves}, title="The Zen of Python, letter by letter",
       about="mean of three seeds", unit="", along="training steps", from_zero=False,
       sentence="ZeRO++ follows ZeRO-3. With too few bits, learning is slower.")

# %% [markdown]
# Seed by seed, the loss of ZeRO++ is 0.01 to 0.02 above that of ZeRO-3, and with too little precision it is 0.05 to 0.09
# above. The owner of a piece updates its parameters in full precision, so the rounding of weights does not
# add up over steps. Sixty steps of a tiny model do not show that a large model reaches the same loss.
#
# **The twin.** JAX returns the same numbers, bit for bit. XLA has one collective for codes and one for scales:

# %%
import tplab.jax as tj

def quantised_in_jax(x):
    return tj.quantized_all_gather(x, "dp", bits=8, block=4)

in_jax = tj.run(quantised_in_jax, Mesh(dp=2), x.numpy(), in_specs=P("dp")).per_rank[0]
print(in_jax.tolist() == and_back(x, 8, 4).tolist())
tj.collectives_in(quantised_in_jax, Mesh(dp=2), x.numpy(), in_specs=P("dp"))

# %% [markdown]
# ## Where it pays
#
# Bytes matter only where a GPU waits for them. Take 13 billion parameters, in 16 layers of width 8,192, on eight nodes
# of eight H100s, and suppose that computing and sending overlap completely. Then a step takes as long as the slower of
# the two. Data sheets give peak rates: InfiniBand NDR with 400 Gb/s per *GPU*, Ethernet with 400 Gb/s per *node*.
# **Forecasts** use measured matmuls and networks: InfiniBand NDR, and the ultra-scale playbook's
# ([lab 03](03_network_levels.ipynb)). With how many tokens on each GPU does ZeRO++ stop paying off? And does a quarter
# of the bytes make a step four times as fast?

# %%
from dataclasses import replace

h100 = cost.find("h100")
ETHERNET = cost.Link("400 Gb/s for 8 GPUs", 20e-6, 50e9 / 8)  # latency, B/s per card
names = ("InfiniBand NDR, data sheet", "InfiniBand NDR, forecast",
         "playbook's network, forecast")
CLUSTERS = {name: cost.find(*on) for name, on in zip(names, H100S)}
CLUSTERS["Ethernet, data sheet"] = replace(h100, outer_link=ETHERNET)

def times(tokens):
    rows, gains = [], []
    for where, cluster in CLUSTERS.items():
        before, after = (step_seconds(scheme, tokens, cluster, 64)
                         for scheme in ("ZeRO 3", "ZeRO++"))
        gains.append(f"{max(before) / max(after):.1f} times as fast ({where})")
        for name, (computing, sending) in {"ZeRO-3": before, "ZeRO++": after}.items():
            waiting = max(0.0, sending - computing)
            parts = {"computing": 16 * computing, "waiting": 16 * waiting}
            rows.append(Row(f"{where}: {name}", parts))
    return Bars(rows, f"With ZeRO++ a step is {', '.join(gains)}.")

TOKENS = 256, 512, 1024, 2048, 4096, 8192, 16384, 32768
by_tokens = {tokens: times(tokens) for tokens in TOKENS}
knob("A step of 13 billion parameters", "tokens per GPU", by_tokens, start=1024,
     about="64 H100s, modelled; data sheets, and two forecasts", unit="s")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# ZeRO++ stops paying off where ZeRO-3 hides its messages as well: from about 2,200 tokens per rank by the forecast with
# InfiniBand NDR, and 19,600 on Ethernet by the data sheet. It gains most where both wait. A step is then 1.6 times as
# fast by that forecast, and 3.5 times on that Ethernet. It is not four times, because the messages *inside* a node
# remain: the slower the network between nodes, the less they count. ZeRO++'s authors measured up to 2.16 times on 384
# GPUs. The model leaves out the limits of overlap, and the time that quantising takes. And hpZ needs $2M/g$ bytes on
# every GPU, which is 3.25 GB for 13 billion parameters.
#
# </details>

# %%
print(f"{'tokens per rank that hide all messages':38} ZeRO-3 ZeRO++")
for where, cluster in CLUSTERS.items():
    few, most = (round(tokens_to_hide(scheme, cluster, 64), -2)
                 for scheme in ("ZeRO++", "ZeRO 3"))
    print(f"{where:38} {most:6,} {few:6,}")

# %% [markdown]
# ## A bug to repair
#
# A code means nothing without its scale. [A pull request to vLLM](https://github.com/vllm-project/vllm/pull/54683)
# reports this bug: ranks quantise to 8-bit floats with a scale each, gather them, and dequantise all of them
# with one.
# Here it is with codes:

# %%
def with_one_scale(x):  # x [n]   ->   [R n]
    scale = x.abs().max() / 7
    codes = (x / scale).round().to(torch.int8)
    return tt.all_gather(codes, "dp") * scale  # this rank's scale, for all codes

wrong = tt.run(with_one_scale, Mesh(dp=2), x, in_specs=P("dp")).per_rank
matrices({"x": x, "what rank 0 reads": wrong[0], "what rank 1 reads": wrong[1]})

# %% [markdown]
# Now the same mistake in a sum: `add_up` reduce-scatters codes of float32 gradients. Run the check, then repair
# `add_up`. Codes may be `int8`.
#
# <details><summary>A hint</summary>
#
# `tt.all_to_all(codes, "dp")` sends row $i$ to rank $i$, and returns the rows that all ranks have sent to this one.
# Each row needs the scale of the rank that sent it.
#
# </details>

# %%
def add_up(x):  # x [R, n], row i for rank i, 8 divides n
    # ->   total [1, n], the sum of this rank's rows
    scale = x.abs().max() / 7
    codes = (x / scale).round().to(torch.int8)
    return tt.reduce_scatter(codes, "dp") * scale

# %%
from tplab.exercises.quantised_communication import check_add_up

check_add_up(add_up)

# %% [markdown]
# <details><summary>Why not one common scale?</summary>
#
# With the largest scale on all ranks, a `reduce_scatter` may add codes, as wider integers: from 19 ranks on, the sum of
# codes up to 7 can be above 127. And a rank with small gradients loses most of its bits.
#
# </details>

# %% [markdown]
# ## Your turn: reduce on two levels
#
# Write `reduce_twice`, in full precision, for the axes `"node"` and `"gpu"`. Row $r$ of `x` is for rank $r$, and with
# $G$ GPUs per node, rank = node × $G$ + gpu. Only sums of a whole node may cross: on $N$ nodes, $N-1$ rows from each
# GPU. Inside a node, $(G-1)N$ rows from each are enough. `tt.reduce_scatter(x, axis)` gives the first rows to index 0
# of the axis, the next to index 1, and so on.
#
# <details><summary>A hint</summary>
#
# Inside the node, gpu $g$ must get the rows for gpu $g$ of *every* node. First put them next to each other: `reshape`,
# `transpose`, `flatten`.
#
# </details>

# %%
def reduce_twice(x):  # x [R, n]   ->   total [1, n], the sum of all rows for this rank
    ...

# %%
from tplab.exercises.quantised_communication import check_reduce_twice

check_reduce_twice(reduce_twice)

# %% [markdown]
# ## On Monday
#
# | here | DeepSpeed, in `zero_optimization` | torch | JAX |
# |---|---|---|---|
# | `weight_bits=8` (qwZ) | `"zero_quantized_weights": true` | torchao's `enable_fsdp_float8_all_gather=True` | quantise, then `lax.all_gather` |
# | `secondary=True` (hpZ) | `"zero_hpz_partition_size": 8`, the GPUs of a node | `fully_shard(..., reshard_after_forward=8)` | |
# | `gradient_bits=4` (qgZ) | `"zero_quantized_gradients": true` | DDP's `quantization_perchannel_hook`, in 8 bits | quantise, then `lax.all_to_all` |
#
# ## To take away
#
# - The numbers of a block share a scale. None is off by more than half of the scale, and an outlier spoils only its own
#   block.
# - Codes with different scales can be gathered, but not added. Send them straight to the piece's owner, which adds in full precision.
# - What a node sends shrinks from $3M$ to $0.75M$, times $(N-1)/N$. This pays where links between nodes are slow, or the batch per GPU is small.
#
# **Sources.** Wang et al. 2023, [ZeRO++](https://arxiv.org/abs/2306.10209). DeepSpeed's
# [ZeRO++ tutorial](https://www.deepspeed.ai/tutorials/zeropp/). Bruno Magalhães,
# [a GPT on DeepSpeed and ZeRO](https://brunomaga.github.io/GPT-lite-DeepSpeed). PyTorch's
# [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
#
# Next: [19 Axes and nodes](19_axes_and_nodes.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
