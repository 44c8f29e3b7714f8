# %% [markdown]
# # 16 Data parallel
#
# **How can eight ranks learn from eight batches and hardly wait for one another?**
#
# Time: 50 minutes. Prerequisites: rings ([lab 02](02_collectives.ipynb)), networks ([lab 03](03_network_levels.ipynb)).
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/16_data_parallel.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/16_data_parallel.ipynb)
#
# ![A timeline of eight ranks. During the backward pass, all-reduces run beside the matmuls.](images/16_data_parallel.png)
#
# *One training step on eight H100s of one node (modelled, data sheet). Every rank holds the whole model and has its own
# batch. Each layer's gradient is averaged over the ranks while earlier layers are still computing theirs.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
from functools import partial

import torch
import tplab.torch as tt
from tplab import Mesh, P
from tplab.data.hiding import thresholds
from tplab.trace import overlap
from tplab.widgets import Bars, Row, knob, timeline
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

# %% [markdown]
# ## By hand: two replicas
#
# The model is $y = w x$ with $w = 2$, and the loss is $(w x - t)^2$, so its gradient is $2x\,(wx - t)$. Rank 0 has the
# example $x = 1,\ t = 1$, and rank 1 has $x = 3,\ t = 0$. Each rank holds a copy of $w$, a **replica**.

# %%
w, x, t, rate = 2.0, [1.0, 3.0], [1.0, 0.0], 0.05
gradients = [2 * x[r] * (w * x[r] - t[r]) for r in range(2)]
mean = sum(gradients) / 2
print("gradients:", gradients, "and their mean:", mean)
print("w after a step of each rank alone:", [round(w - rate * g, 2) for g in gradients])
print("w after a step with the mean:", round(w - rate * mean, 2))

# %% [markdown]
# With their own gradients, the replicas would drift apart. With the mean, they stay equal, as on one device with both
# examples: 19 is the gradient of the mean loss. So an `all_reduce` of the gradients is all the communication that
# data parallelism needs.
#
# ## Build it
#
# Every rank averages every gradient:

# %%
def step(model, inputs, targets):
    F.mse_loss(model(inputs), targets).backward()
    for p in model.parameters():
        p.grad = tt.all_reduce(p.grad, "dp", "mean")
    return [p.grad for p in model.parameters()]

torch.manual_seed(0)
small = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
batch = [torch.randn(24, n, dtype=torch.float64) for n in (6, 3)]
SPECS = P(), P("dp"), P("dp")  # every rank has the whole model, and its own rows
(alone,) = tt.run(step, Mesh(dp=1), small, *batch).per_rank
for R in (2, 3, 4, 8):
    together = tt.run(step, Mesh(dp=R), small, *batch, in_specs=SPECS).per_rank
    equal = all(map(torch.allclose, together[-1], alone))
    print(f"{R} ranks:", "equal to one device" if equal else "off")

# %% [markdown]
# **Predict.** The gradients are $M$ numbers, one per parameter. With 2 ranks, each rank sends $M$ numbers per step. How
# many does it send with 8 ranks, and how many with 1,000?
#
# <details><summary>Answer</summary>
#
# In a ring `all_reduce` ([lab 02](02_collectives.ipynb)), each rank sends $2\frac{R-1}{R}$ times its input. That is
# $1.75\,M$ with 8 ranks, $1.998\,M$ with 1,000, and never $2M$.
#
# </details>

# %%
M = sum(p.numel() for p in small.parameters())
for R in (2, 3, 4, 8):
    sent = tt.run(step, Mesh(dp=R), small, *batch, in_specs=SPECS).trace.bytes_sent()
    print(f"{R} ranks: {sent / R / 8:.1f} numbers per rank, 2(R-1)/R M =",
          f"{2 * (R - 1) / R * M:.1f}")

# %% [markdown]
# ## Buckets and overlap
#
# Every `all_reduce` also pays the latency of $2(R-1)$ hops, however small its input. A model has hundreds of parameter
# tensors, so their gradients are packed into **buckets**: flat buffers that travel as one message. `average_gradients`
# fills them if you give it `bucket_bytes`.
#
# Unless we say otherwise, times in this lab are **modelled** from data sheets, at their peak rates. That needs only
# sizes: meta tensors have no numbers.

# %%
SIZES = {"dtype": torch.bfloat16, "device": "meta"}

def mlp(layers, width):
    layer = partial(skip_init, nn.Linear, width, width, bias=False, **SIZES)
    return nn.Sequential(*[layer() for _ in range(layers)])

def on_h100(step, model, tokens, ranks=8, **options):  # tokens per rank
    x = torch.empty(tokens, model[0].in_features, **SIZES)
    step = partial(step, **options) if options else step
    return tt.run(step, Mesh(dp=ranks), model, x, cluster="h100").trace

def afterwards(model, x, bucket_bytes=None):
    model(x).mean().backward()
    tt.average_gradients(model, "dp", bucket_bytes=bucket_bytes)

many = mlp(64, 1024)  # 64 layers with 2 MB of gradients each
for bucket_bytes in (None, 25e6):
    trace = on_h100(afterwards, many, 4096, bucket_bytes=bucket_bytes)
    count = len(trace.select(rank=0, kind="collective"))
    print(f"{count:2} messages: {trace.makespan * 1e3:.2f} ms")

# %% [markdown]
# The backward pass begins at the loss, so the gradient of the *last* layer is complete first. If it leaves at once, it
# travels while other layers compute: such **overlap** hides a message. In torch,
# `p.register_post_accumulate_grad_hook(hook)` calls `hook(p)` when the gradient of `p` is complete.
# `data_parallel` puts such a hook on every parameter, and fills the buckets from the last parameter to the first. It
# starts the `all_reduce` of a bucket as soon as it is full. When the backward pass ends, the means are written to
# `p.grad`. Here it is with eight layers:

# %% tags=["opening-picture"]
def overlapped(model, x, bucket_bytes=25e6):
    tt.data_parallel(model, "dp", bucket_bytes=bucket_bytes, broadcast=False)
    model(x).mean().backward()

timeline(on_h100(overlapped, mlp(8, 4096), 4096))

# %% [markdown]
# **Predict.** The 64 layers above have 134 MB of gradients. How much of the sending is hidden with buckets of 5 MB, of
# 50 MB, and with a single bucket for everything?
#
# <details><summary>Answer</summary>
#
# Nearly all, about 70%, and nothing. The last bucket holds the gradients of the *first* layers. It is complete only
# when the backward pass is over, so nothing is left to hide it behind. Buckets of 50 MB are filled with whole layers
# and hold 48, 48 and 38 MB, so the last has 28% of the bytes. A single bucket *is* the last one.
#
# </details>

# %%
for size in (None, 5e6, 25e6, 50e6, 1e9):
    trace = on_h100(overlapped, many, 4096, bucket_bytes=size)
    label = "one per parameter" if size is None else f"{size / 1e6:.0f} MB"
    hidden = overlap(trace).share
    print(f"{label:17} {trace.makespan * 1e3:.2f} ms, {hidden:.0%} hidden")

# %% [markdown]
# The size hardly matters between 5 and 50 MB: small buckets hide more, but pay for more hops and launches. torch's own
# DistributedDataParallel uses 25 MiB.
#
# The next cell **measures** both on two processes, on GPUs if your machine has two. Without GPUs, the cores that
# compute also move the messages: little can be hidden, and times vary more than these two differ. The model assumes
# two idle laptop cores at their peak.

# %% tags=["nbval-ignore-output"]
layers = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])
rows, where = torch.randn(256, 512), "GPUs" if torch.cuda.device_count() > 1 else "CPU"
for program in (afterwards, overlapped):
    args = partial(program, bucket_bytes=2e6), Mesh(dp=2), layers, rows
    runs = [tt.run(*args, on="processes").trace.makespan for _ in range(4)]
    model = tt.run(*args, cluster="laptop").trace.makespan
    print(f"{program.__name__:10} {min(runs) * 1e3:.0f} ms measured ({where}),",
          f"{model * 1e3:.0f} ms modelled (laptop, assumed)")

# %% [markdown]
# ## Turn the knob: when are the gradients hidden?
#
# More tokens per rank make the backward pass longer, while the gradients stay as large as the model. How many hide the
# messages, inside a node and across two? Guess first.

# %%
big = mlp(16, 8192)  # 1.07 billion parameters

def row(ranks, tokens, where):
    trace = on_h100(overlapped, big, tokens, ranks)
    found = overlap(trace)
    computing = float(found.computing[0])
    parts = {"computing": computing, "waiting": trace.makespan - computing}
    return Row(where, parts, f"{found.share:.0%} hidden")

def bars(tokens):
    rows = [row(8, tokens, "8 ranks, a node"), row(16, tokens, "16 ranks, two nodes")]
    one, two = (f"{r.parts['waiting'] / r.total:.0%}" for r in rows)
    return Bars(rows, f"Waiting takes {one} of the step in one node, {two} in two.")

options = {2**k: bars(2**k) for k in range(9, 16)}
about = "1.07 billion parameters, bfloat16, modelled on H100 nodes"
knob("One step of a large model", "tokens per rank", options, start=512, about=about)

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# With 2,048 tokens, one node hides nine tenths and two nodes three quarters. With 4,096 tokens, both hide over nine tenths,
# although a network card has only a ninth of NVLink's bandwidth: the all-reduce uses all eight cards of a node at once,
# as in [lab 03](03_network_levels.ipynb).
#
# </details>
#
# ## What it costs: decide
#
# The backward pass of $M$ parameters and $T$ tokens per rank takes $4MT$ FLOPs. In bfloat16 the gradients take $2M$
# bytes, and each rank sends $2\frac{R-1}{R}$ times that. With $F$ FLOP/s and $B$ bytes/s per link, computing and sending
# take the same time if
#
# $$\frac{4MT}{F} = \frac{4M}{B}\,\frac{R-1}{R} \quad\Longrightarrow\quad T = \frac{R-1}{R}\,\frac{F}{B}$$
#
# The size of the model cancels. An H100 has 989 TFLOP/s and 450 GB/s, so eight need 1,923 tokens each. Between nodes,
# $B$ is 400 GB/s: eight cards of 50 GB/s. Here is the same from simulated runs, for a transformer block of width
# 8,192: at the data sheet's rates, and as a **forecast** from measured matmuls and collectives, with InfiniBand NDR and
# with the network of the Ultra-Scale Playbook (lab 03).

# %%
for ranks in (8, 16, 64):
    print(ranks, "H100s")
    for row in thresholds("data parallel", ranks):
        print(row)

# %% [markdown]
# At the data sheets' rates, about 1,900 tokens per rank are enough inside a node, and 2,500 on 64 GPUs. The forecast asks
# for 1,400 in a node: measured matmuls are slower, and hide more. With InfiniBand NDR, each
# of 64 GPUs needs no more than that. On the playbook's network it needs 3,300.
#
# **Decide.** Your batch has 4 million tokens. How many H100s can share it if all gradients are to stay hidden? The
# table shows how many tokens each GPU gets and needs.

# %%
print("GPUs   gets  needs: NDR, data sheet  NDR, forecast  playbook's, forecast")
for ranks in (256, 512, 1024, 2048, 4096):
    sheet, ndr, theirs = (row.tokens for row in thresholds("data parallel", ranks))
    print(f"{ranks:4} {4e6 / ranks:6,.0f} {sheet:23,} {ndr:14,} {theirs:21,}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# With InfiniBand NDR, what a GPU needs hardly changes: you can use 4 million / 2,490 = 1,600 GPUs by the data sheet, and
# 4 million / 1,470 = 2,700 by the forecast. On the playbook's network it grows, and the limit is about 600.
#
# </details>
#
# The authors of the Ultra-Scale Playbook trained 3 billion parameters with a million tokens per step on 8 to 128
# H100s. Here is each GPU's speed in percent of that in one node, measured and by the two forecasts:

# %%
from tplab import cost
from tplab.forecast import forecast
from tplab.forecast.measured import playbook

fastest = {}  # GPUs -> of the runs that only split the batch
for one in playbook():
    gpus = one.plan.dp
    if one.model.name == "playbook-3b" and gpus == one.plan.ranks:
        fastest[gpus] = min(fastest.get(gpus, one), one, key=lambda r: r.seconds)

def forecast_seconds(run, fabric):  # of a step
    on = cost.find("h100-measured", fabric)
    about = {"batch": run.batch, "sequence": run.sequence, "stack": run.stack}
    return forecast(run.model, run.plan, on, **about).seconds

columns = [{gpus: run.seconds for gpus, run in fastest.items()}]
for fabric in ("playbook", "infiniband-ndr"):
    columns.append({k: forecast_seconds(run, fabric) for k, run in fastest.items()})
print("nodes  measured  the playbook's network  InfiniBand NDR")
for gpus in fastest:
    speeds = [100 * 8 * took[8] / (gpus * took[gpus]) for took in columns]
    print("{:>5}  {:6.0f} %  {:20.0f} %  {:12.0f} %".format(gpus // 8, *speeds))

# %% [markdown]
# By the forecasts, each GPU is faster on two nodes than on one: the fastest run there has two sequences per microbatch
# instead of one. On 16 nodes each GPU has 8,192 tokens, more than the thresholds above ask for, and yet
# more than a third is lost. Those runs averaged float32, twice the bytes of bfloat16, and used ZeRO 1 ([lab
# 17](17_zero.ipynb)), whose gather of new parameters is not hidden. The forecast counts both. But its network was
# fitted to such runs, so its agreement with them proves little.
#
# ## Send once per step
#
# With **gradient accumulation**, a batch that is too large for memory is computed in parts, and their gradients are
# added up. The total has to be sent only once, with the last part:

# %%
def accumulated(model, x, parts=4, once=True):
    replicas = tt.data_parallel(model, "dp", bucket_bytes=25e6, broadcast=False)
    for number, part in enumerate(x.chunk(parts)):
        if once and number < parts - 1:
            with replicas.no_sync():
                (model(part).mean() / parts).backward()
        else:
            (model(part).mean() / parts).backward()

for once in (False, True):
    trace = on_h100(accumulated, big, 8192, ranks=16, once=once)
    sent, seconds = trace.bytes_sent(rank=0), trace.makespan
    label = "once" if once else "each time"
    print(f"{label:9}  {sent / 1e9:4.1f} GB from rank 0, {seconds * 1e3:.0f} ms")

# %% [markdown]
# ## The same in JAX: the types do it
#
# Parameters come in with `P()`, so their type says that they are the same on every rank of `dp`. The batch differs
# along `dp`. When JAX differentiates a function in which the two meet, it adds up what the ranks contribute to the
# gradient. `tj.data_parallel` sends it in buckets instead, and takes the mean:

# %%
import jax
import tplab.jax as tj

def loss(params, inputs, targets):
    hidden = jax.numpy.tanh(inputs @ params["first"])
    return ((hidden @ params["last"] - targets) ** 2).mean()

def by_types(params, inputs, targets):
    grads = jax.grad(loss)(params, inputs, targets)
    return jax.tree.map(lambda g: g / tj.axis_size("dp"), grads)  # the sum -> the mean

def by_buckets(params, inputs, targets):
    def with_buckets(params):
        return loss(tj.data_parallel(params, "dp"), inputs, targets)

    return jax.grad(with_buckets)(params)

keys = jax.random.split(jax.random.key(0), 4)
shapes = {"first": (6, 5), "last": (5, 3), "inputs": (24, 6), "targets": (24, 3)}
params = {name: jax.random.normal(k, shapes[name]) for k, name in zip(keys, shapes)}
data = params.pop("inputs"), params.pop("targets")
for fn in (by_types, by_buckets):
    out = tj.run(fn, Mesh(dp=4), params, *data, in_specs=SPECS, out_specs=P())
    calls = out.trace.select(rank=0, kind="collective").events
    sent, one = [event.shape for event in calls], out.value["last"][0, 0]
    print(f"{fn.__name__:10} all_reduces of {sent}, first number {one:.5f}")

# %% [markdown]
# **What really differs.** In torch, a gradient belongs to its rank until the program averages it, and you get no error
# if it never does. In JAX, the sum over the ranks is part of what `grad` means, and you divide it by $R$.
#
# ## What replicas must agree on, and a bug to repair
#
# | what | how replicas agree on it |
# |---|---|
# | initial parameters | drawn from one seed, or broadcast by rank 0, as `data_parallel` does |
# | data | each rank has its own part: `P("dp")` |
# | dropout | each rank drops different elements, from one seed: `dropout(x, p, axis="dp")` |
# | batch norm | a choice: each rank's own statistics, as DDP does, or those of the whole batch, `batch_norm(x, weight, bias, "dp")` |
# | clipping | by one norm, of the whole model's averaged gradients: `clip_gradients(model, 1.0)` |
# | the loss | is divided by the same number on every rank |
#
# The last row is easy to get wrong. A target of -100 marks padding, which does not count. On one rank, this loss is
# right. Run the check, and repair the loss.

# %%
def my_loss(logits, targets):  # logits [n, V]   targets [n], of this rank
    return F.cross_entropy(logits, targets)  # the mean over targets that are not -100

# %%
from tplab.exercises.data_parallel import check_loss

check_loss(my_loss)

# %% [markdown]
# <details><summary>A hint</summary>
#
# All ranks must divide the *sum* of their losses by the same number. Which one, if gradients are averaged over the ranks
# afterwards? `F.cross_entropy` has `reduction="sum"`, and `all_reduce` can add up counts.
#
# </details>
#
# Until 2024, [Hugging Face's Trainer](https://huggingface.co/blog/gradient_accumulation) made this mistake with gradient
# accumulation.
#
# ## Your turn: gradients that leave early
#
# Write the overlap yourself, without buckets. `my_replicas(model)` is called once, before the first step. It registers
# a hook on every parameter, and returns a function that is called after every backward pass and writes the means to
# `p.grad`. As always, torch adds a new gradient to what `p.grad` already has.
#
# <details><summary>A hint</summary>
#
# `flight = tt.start(tt.all_reduce, p.grad, "dp", "mean")` begins the `all_reduce` without waiting, and `flight.wait()`
# returns the mean. A hook that waits at once hides nothing.
#
# </details>

# %%
def my_replicas(model):
    ...

# %%
from tplab.exercises.data_parallel import check_replicas

check_replicas(my_replicas)

# %% [markdown]
# ## On Monday
#
# | here | torch | Megatron-LM | JAX |
# |---|---|---|---|
# | `data_parallel(model, "dp")` | `DistributedDataParallel(model)` | `--overlap-grad-reduce` | `jax.grad` of replicated parameters |
# | `bucket_bytes` | `bucket_cap_mb=25` | `--ddp-bucket-size`, in parameters | `xla_gpu_all_reduce_combine_threshold_bytes` |
# | `no_sync()` | `model.no_sync()` | `no_sync_func` | differentiate by `lax.pcast(params, "dp", to="varying")` (`pvary` before JAX 0.8) in each part, then one `lax.pmean` |
# | your `my_loss` | your own code | `--calculate-per-token-loss` | `lax.psum` of the counts |
#
# ## To take away
#
# - Data parallelism is one `all_reduce` of the gradients per step. Each rank sends less than $2M$ numbers.
# - The last layer's gradient is complete first. If gradients leave in buckets, all but the last bucket can be hidden.
# - Whether they are hidden depends on the tokens per rank and on $F/B$, and not on the size of the model.
#
# **Sources.** Li et al. 2020, [PyTorch Distributed](https://arxiv.org/abs/2006.15704). Goyal et al. 2017, [Accurate,
# large minibatch SGD](https://arxiv.org/abs/1706.02677). Austin et al. 2025, [How to scale your
# model](https://jax-ml.github.io/scaling-book/training). Measured tokens per second: the plot of the [Ultra-Scale
# Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), Apache-2.0, commit 924e4d0.
#
# Next: [17 ZeRO](17_zero.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
