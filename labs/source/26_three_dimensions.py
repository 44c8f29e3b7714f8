# %% [markdown]
# # 26 Three dimensions
#
# **What does each axis of a three-dimensional mesh send in a training step, and which of
# them may cross the network?**
#
# Prerequisites: [lab 11](11_run_a_pipeline.ipynb) for pipelines, [lab 17](17_zero.ipynb) for ZeRO, and
# [lab 19](19_axes_and_nodes.ipynb) for two axes on two nodes. Time: 50 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/26_three_dimensions.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/26_three_dimensions.ipynb)
#
# ![A training step on two nodes of four GPUs. With the pipeline across the nodes it is fastest, and with tensor parallelism across them it is slowest.](images/26_three_dimensions.png)
#
# *One training step on eight H100s, in two nodes of four. Only the order of the mesh's three axes differs, and with it
# the axis whose messages cross between nodes. Times of rank 0, modelled from data sheets (InfiniBand NDR). It waits for
# messages and for the last stage.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
import torch
import tplab.torch as tt
from tplab import Mesh, P
from tplab.data.text import Text, python_source
from tplab.exercises import three_dimensions
from tplab.exercises.three_dimensions import LARGE, LAYOUTS, NETWORKS, modelled
from tplab.schedules import one_f_one_b
from tplab.trace import overlap
from tplab.training.recipe import Recipe
from tplab.widgets import Bars, LossCurve, Row, bytes_text, knob, shards, timeline

torch.set_num_threads(1)  # several threads do not pay off for tensors this small

# %% [markdown]
# `modelled` runs one step on simulated ranks, on tensors that have shapes but no numbers, and its clock says how long
# the step would take on a cluster. A `Mesh` numbers ranks along its last axis first, so the ranks of that axis are
# neighbours. With nodes of four ranks, the first axis crosses from node to node.

# %% tags=["opening-picture"]
ORDERS = {"pipeline": ("pp", "dp", "tp"), "data": ("dp", "pp", "tp"),
          "tensor": ("tp", "dp", "pp")}

def bars(cluster):
    rows = []
    for name, order in ORDERS.items():
        trace = modelled(Mesh(**dict.fromkeys(order, 2)), cluster)
        busy = float(overlap(trace).computing[0])
        parts = {"computing": busy, "waiting": trace.makespan - busy}
        rows.append(Row(f"{name} across nodes", parts))
    first, *_, last = sorted(rows, key=lambda row: row.total)
    times = last.total / first.total
    return Bars(rows, f"Fastest: {first.label}; {last.label} takes {times:.1f} times"
                      f" as long. H100s, {cluster.kind_on(8)}.")

networks = {name: bars(cluster) for name, cluster in NETWORKS.items()}
knob("A step on 2 x 2 x 2 GPUs, in 2 nodes of 4", "between the nodes", networks,
     about="modelled", unit="s")

# %% [markdown]
# ## By hand: eight workers
#
# Eight workers can be one pipeline of eight stages, two pipelines of four stages, or four of two. Below, the rows of
# the tensor are eight layers. Each row of ranks is a pipeline, and the ranks in a column hold copies of the same stage.

# %%
for pipelines, stages in ((1, 8), (2, 4), (4, 2)):
    display(shards(Mesh(dp=pipelines, pp=stages), (8, 4), P("pp"), name="layers"))

# %% [markdown]
# With tensor parallelism inside each stage, there are three dimensions, and each rank is in one group per axis. Rank 5 of
# `Mesh(pp=2, dp=2, tp=2)` is at `pp=1, dp=0, tp=1`.
#
# **Predict.** Which rank works on the same batch as rank 5, with another part of the same layers? Which rank has the same
# weights? From which rank does rank 5 receive activations?
#
# <details><summary>Answer</summary>
#
# Rank 4 has the other part of the same layers, because neighbours differ along `tp`, the last axis. Rank 7 has the same
# weights and another part of the batch. Rank 1 has the previous stage.
#
# </details>

# %%
mesh = Mesh(pp=2, dp=2, tp=2)
for axis in ("tp", "dp", "pp"):
    print(axis, mesh.groups(axis), "rank 5:", mesh.group(5, axis))

# %% [markdown]
# This is the order of Megatron-LM: tensor-parallel ranks are neighbours, data-parallel ranks come next, and the stages of a
# pipeline are farthest apart.
#
# ## What each axis sends
#
# Take $L$ blocks of width $D$, a vocabulary of $V$, $m$ microbatches of $b$ sequences of length $S$ per pipeline, and 2
# ranks along each axis. A tensor of activations has $A = bSD$ numbers. The input and the output embedding are **tied**:
# the first and the last stage share one weight, and add up its gradients. In a ring `all_reduce`, a rank sends
# $2(R-1)/R$ times its input, which is once for $R = 2$:
#
# | axis | what | numbers sent by a rank in the first stage |
# |---|---|---|
# | tp | 4 all_reduces per block and microbatch, 1 for the embedding | $m (4 \cdot L/2 + 1) A$ |
# | pp | the output of the stage, per microbatch; the gradient of the tied embedding | $m A + VD/2$ |
# | dp | the averaging of all its gradients | the number of its parameters |
#
# **Predict.** The model at the top has 2 blocks of width 4,096, a vocabulary of 32,768, and 2 microbatches of 4
# sequences of 2,048 tokens. Which axis sends the most, and which the least? Count in units of $A$.
#
# <details><summary>Answer</summary>
#
# Tensor parallelism, with $2 \cdot (4 + 1) A = 10 A$. Here $VD/2$ is $2A$, so the pipeline sends $4A$. A rank has half of a
# block's $12 D^2$ parameters, half of the tied embedding, and all embeddings of positions: $3A + 2A + A/4 = 5.25 A$.
#
# </details>

# %%
A, m, blocks_per_stage = 4 * 2048 * 4096, 2, LARGE.num_layers // 2
blocks = blocks_per_stage * 12 * 4096**2 / 2  # parameters on a rank: half of each
embedding, positions = 32768 / 2 * 4096, 2048 * 4096  # those of the two embeddings
by_hand = {"tp": m * (4 * blocks_per_stage + 1) * A, "pp": m * A + embedding,
           "dp": blocks + embedding + positions}
trace = modelled(mesh, NETWORKS["InfiniBand"])
events = [event for event in trace.events if event.rank == 0]
for axis, numbers in by_hand.items():
    counted = sum(event.bytes for event in events if event.axis == axis
                  and event.kind in ("collective", "send"))
    print(f"{axis}: by hand {bytes_text(2 * numbers)}, counted {bytes_text(counted)}")

# %% [markdown]
# The formula leaves out the layer norms, which are too small to show. It also matters *when* the bytes travel. Here is
# a step with the pipeline across the nodes. The last large message of each rank is the gradient of the tied embedding.

# %%
timeline(trace)

# %% [markdown]
# The messages along `tp` are everywhere, and the next operation waits for each of them. Those along `pp` are rare, and
# a stage computes between them. Those along `dp` come once, at the end, and would cost less if they ran beside the
# backward pass, as in [lab 16](16_data_parallel.ipynb). So `tp` stays inside a node, and `dp` and `pp` may cross. Which
# of these two should be outermost depends on the model and the batch: a stage sends one activation per microbatch,
# however many blocks it has, but the gradients grow with every block.
#
# ## Build it
#
# The layers of a GPT are cut into stages, and are tensor-parallel inside a stage. Each data-parallel rank takes its own
# rows of the batch.

# %%
config = tt.GPTConfig(256, 32, num_layers=2, num_heads=4, context=32)
text = Text(python_source())

def loss_of(logits, targets):
    return tt.vocab_parallel_cross_entropy(logits, targets, "tp", config.vocab_size)

def step(mesh, clip=tt.clip_gradients):
    schedule = one_f_one_b(mesh.shape["pp"], 2)
    stages = tt.stages_of(tt.gpt_layers(config), schedule)
    ids, targets = map(torch.tensor, text.batch(0, size=8, length=32))
    rows = slice(tt.axis_index("dp"), None, mesh.shape["dp"])  # any split works
    pairs = tt.split_batch(ids[rows], targets[rows], 2)
    loss = tt.train_batch(schedule, stages, pairs, loss_of, data_axis="dp")
    specs = three_dimensions.stage_specs(config, stages.partition.bounds)
    norm = clip(stages, 1.0, specs)
    return loss, norm

one = tt.run(step, Mesh(dp=1, pp=1, tp=1), Mesh(dp=1, pp=1, tp=1)).per_rank[0]
out = tt.run(step, mesh, mesh)
for name, want, *got in zip(("loss", "norm"), one, *out.per_rank):
    apart = max(abs(x - want) for x in got).item()
    print(f"{name}: all 8 ranks agree with one device to 1e-5: {apart < 1e-5}")

# %% [markdown]
# ## Train it
#
# `train` is the step above in a loop, with AdamW, whose states are divided over the data-parallel ranks (ZeRO 1). The
# text is the source of Python's standard library, and a token is a byte. A script with this call runs under `torchrun`:

# %% tags=["nbval-ignore-output"]
import tempfile
from pathlib import Path

script = Path(tempfile.mkdtemp()) / "train_gpt.py"
script.write_text("""
import torch.distributed as dist
from tplab import Mesh
from tplab.data.text import Text, python_source
from tplab.torch import GPTConfig, train
from tplab.training.recipe import Recipe

config = GPTConfig(256, 32, num_layers=2, num_heads=4, context=32)
train(config, Text(python_source()), Mesh(dp=2), Recipe(steps=3, batch_size=8))
if dist.get_rank() == 0:
    print(dist.get_world_size(), "ranks of torchrun, over", dist.get_backend())
""")
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
command = [*torchrun, "--nproc-per-node=2", str(script)]
done = subprocess.run(command, capture_output=True, text=True)
print(done.stderr if done.returncode else done.stdout)

# %% [markdown]
# Now it trains on eight simulated ranks. The dotted line, under the other one, is one device.

# %%
def quiet(progress):
    pass

recipe = Recipe(steps=30, batch_size=8, evaluate_every=10)
alone = tt.train(config, text, Mesh(tp=1), recipe, show=quiet)
curve = LossCurve(30, title="Loss of a GPT on Python's source",
                  beside=("one device", alone.losses),
                  sentence="The loss on 2 x 2 x 2 ranks is that of one device.")
shown = display(curve, display_id=True)  # it draws while the model trains
both = tt.train(config, text, mesh, recipe, show=curve)
shown.update(curve)  # and this is its picture for readers without a kernel

# %%
apart = max(abs(a - b) for a, b in zip(alone.losses, both.losses))
print(f"30 steps on 8 ranks: losses agree with one device to 1e-4: {apart < 1e-4}")

# %% [markdown]
# ## The twin
#
# `tplab.jax.train` takes the same arguments and begins with the same weights, but a step is one compiled program for
# all ranks:

# %%
import tplab.jax as tj

short = Recipe(steps=3, batch_size=8)
twin = tj.train(config, text, Mesh(dp=2), short, show=quiet)
torchs = tt.train(config, text, Mesh(dp=2), short, show=quiet)
apart = max(abs(a - b) for a, b in zip(twin.losses, torchs.losses))
print(f"JAX and torch have the same three losses to 1e-4: {apart < 1e-4}")

# %% [markdown]
# ## Turn the knob
#
# At the top, InfiniBand joins the nodes, with 50 GB/s per GPU. What if it were 10 Gb Ethernet, with 1.25 GB/s? For
# each order, guess how many times as long a step takes. Then turn the knob, here once more.

# %%
knob("A step on 2 x 2 x 2 GPUs, in 2 nodes of 4", "between the nodes", networks,
     about="modelled", unit="s")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# On InfiniBand, by the data sheet, a step takes 41.5, 43.0 and 54.7 ms: only tensor parallelism across the nodes costs
# much. On Ethernet, a step takes 7.0 times as long with the pipeline across the nodes, 7.4 times with data parallelism,
# and 15 times with tensor parallelism. The forecasts for InfiniBand are 53, 55 and 67 ms, and those for the network of
# the Ultra-Scale Playbook ([lab 03](03_network_levels.ipynb)) are 57, 60 and 82 ms. The first two orders are close, and
# we know of no measurement that says which is ahead. [Lab 04](04_megatron_block.ipynb) has measurements of tensor
# parallelism across nodes.
#
# </details>

# %% [markdown]
# ## A bug to repair
#
# Gradients are clipped by the norm of *all* gradients. The code below calls torch's function on each rank, as you would
# on one device. Run the check and repair `my_clip`, without tplab's `clip_gradients`. Each rank holds a part of the
# model, some of which other ranks hold too, and the embedding is tied. The gradients have been averaged over "dp".
#
# - `for number, stage in stages.items()` goes through this rank's stages, and `stage.named_parameters()` has their names.
# - `"tp" in specs[number][name]` says whether the parameter is split over "tp".
# - `stages.tied` is a list with one entry per tied parameter: all its places, as `[(number, name), ...]`. Each of them
#   has the whole gradient already.

# %%
def my_clip(stages, max_norm, specs):
    torch.nn.utils.clip_grad_norm_(stages.parameters(), max_norm)

# %%
from tplab.exercises.three_dimensions import check_clipping

check_clipping(my_clip)

# %% [markdown]
# ## Your turn: three clusters
#
# You have eight H100 GPUs, the model from the top, and a batch of 16 sequences, in two microbatches per pipeline. The
# GPUs are in one node, in four machines of two, or in eight machines; between machines there is 10 Gb Ethernet for each
# GPU. Choose the fastest layout for each, by the data sheets. Gradients are averaged after the backward pass. Count what
# each rank sends, and remember that with $m$ microbatches a pipeline of $p$ even stages is idle for $(p-1)/(m+p-1)$ of
# the time. The check may take a minute or two.

# %%
print(", ".join(LAYOUTS))  # ranks along the last axis are neighbours

my_layouts = {
    "one node of 8": "",
    "4 machines of 2": "",
    "8 machines": "",
}

# %%
from tplab.exercises.three_dimensions import check_layouts

check_layouts(my_layouts)

# %% [markdown]
# <details><summary>Why each winner wins</summary>
#
# With two microbatches, two even stages are idle for a third of the time. Here they are idle for longer, because the
# last one also has the head. In one node, that costs more than the sending it saves. Of the layouts without a pipeline,
# `4 dp x 2 tp` sends the fewest bytes per rank. On four machines of two, all three dimensions are best: `tp` stays on
# NVLink, and with `pp` each rank averages only the gradients of its own stage across the network. On eight machines no
# axis has fast links. There, `4 dp x 2 pp` is the fastest, although three dimensions send a little less: messages of
# `tp` add to the time of a stage, and so to the bubble.
#
# In one node two layouts are close: 25 ms for `4 dp x 2 tp`, and 27 ms for `8 dp`, of which it spends 6 ms averaging
# gradients. If that were hidden behind the backward pass, `8 dp` would be the fastest.
#
# </details>
#
# ## On Monday
#
# | library | the three dimensions |
# |---|---|
# | Megatron-LM | `--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer`; the other ranks are data-parallel |
# | torchtitan | `tensor_parallel_degree`, `pipeline_parallel_degree`, `data_parallel_shard_degree` |
# | torch | `init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))` |
# | JAX | `jax.make_mesh((2, 2, 2), ("pp", "dp", "tp"))`, and shardings that name its axes |
#
# ## To take away
#
# - Tensor parallelism sends all the time, and ranks wait for every message. It belongs inside the node. Data
#   parallelism sends once per step.
# - What a pipeline sends does not grow with the number of its blocks, so it may cross slow links. The price is the
#   bubble: with few microbatches, a layout without it can be faster.
# - The mesh must not change the result. The square of the gradient norm is a sum over ranks that counts every copied
#   parameter once.

# %% [markdown]
# **Sources.** Narayanan et al. 2021, [Efficient large-scale training on GPU
# clusters](https://arxiv.org/abs/2104.04473). Shoeybi et al. 2019,
# [Megatron-LM](https://arxiv.org/abs/1909.08053). Rajbhandari et al. 2020, [ZeRO](https://arxiv.org/abs/1910.02054).
#
# Next: [27 Will it fit?](27_will_it_fit.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
