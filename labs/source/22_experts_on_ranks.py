# %% [markdown]
# # 22 Experts on ranks
#
# **A token goes through 8 of 256 experts, and these are spread over 64 ranks. What has to travel?**
#
# Prerequisites: collectives from [lab 02](02_collectives.ipynb), data parallelism from [lab 16](16_data_parallel.ipynb), and nodes
# from [lab 19](19_axes_and_nodes.ipynb). Time: 50 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/22_experts_on_ranks.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/22_experts_on_ranks.ipynb)
#
# ![Two ranks. Each sends rows of its tokens to the other rank, which holds the experts that they have chosen, and gets the results back.](images/22_experts_on_ranks.png)
#
# *Four tokens, two on each rank. Every token goes through two of the four experts. First the ranks tell each other how many rows
# will come (`a` in the picture), then rows, the vectors of tokens, travel to their experts (`b`), and then the results travel
# back (`c`).
# We take the program apart below.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
from dataclasses import replace

import torch
import tplab.torch as tt
from tplab import Mesh, P, cost
from tplab.experts import Routing, contiguous, expected_copies, rows_between
from tplab.widgets import Bars, Row, animate, experts, knob

# %% tags=["opening-picture"]
EXPERTS, D = 4, 2
torch.manual_seed(0)
tokens = torch.randn(4, D, dtype=torch.float64)
matrices = torch.randn(EXPERTS, D, D, dtype=torch.float64)  # an expert is a matrix
chosen = torch.tensor([[0, 1], [2, 3], [2, 0], [3, 2]])
weight = torch.tensor([[0.6, 0.4]] * 4, dtype=torch.float64)

def mixture(x, choices, weights, w):  # [T/ep, D], [T/ep, k] twice, [E/ep, D, D]
    k, here = choices.shape[1], len(w)
    order = choices.flatten().argsort(stable=True)  # all choices, sorted by expert
    n = choices.flatten().bincount(minlength=EXPERTS)  # a: rows for each expert
    arriving = tt.all_to_all(n, "ep").view(-1, here)
    sent, come = n.view(-1, here).sum(1).tolist(), arriving.sum(1).tolist()
    r = x[order // k]  # b: the rows
    rows = tt.all_to_all(r, "ep", sizes=sent, received=come)
    expert = torch.arange(here).repeat(len(come))
    expert = expert.repeat_interleave(arriving.flatten())  # the expert of each row
    z = torch.einsum("nd,ndf->nf", rows, w[expert])  # c: their results
    back = tt.all_to_all(z, "ep", sizes=come, received=sent)
    y = back * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // k, y)

SPLIT = P("ep")  # each rank has its own tokens, and some of the experts
four = tokens, chosen, weight, matrices
out = tt.run(mixture, Mesh(ep=2), *four, in_specs=SPLIT, out_specs=SPLIT)
animate(out.trace)

# %% [markdown]
# A **mixture of experts** replaces the MLP of a block with many MLPs, the **experts**. For each token, a small matrix called
# the **router** scores all experts, and the token goes through the $k$ with the highest scores. Their results are added up, each
# multiplied by a weight that comes from its score. So each token uses only a few of the parameters: 37 of 671 billion in DeepSeek-V3.
# (A **shared expert** also gets all tokens.)
#
# **Expert parallelism** gives each rank some of the experts, each in one piece. The ranks have different tokens, as in data
# parallelism. So tokens travel to their experts (**dispatch**), and the results travel back (**combine**).
#
# ## By hand: four tokens
#
# Ranks 0 and 1 have two tokens each. Experts 0 and 1 are on rank 0, and experts 2 and 3 on rank 1. The tokens of the picture
# have chosen:

# %%
for t in range(4):
    print(f"token {t}, on rank {t // 2}: experts", *chosen[t].tolist())

# %% [markdown]
# **Predict.** How many rows leave each rank if a row is sent for every choice? And how many if a token is sent only once to
# each rank that has any of its experts?
#
# <details><summary>Answer</summary>
#
# For every choice, rank 0 sends two rows (token 1, for experts 2 and 3), and rank 1 sends one (token 2, for expert 0). Sent only
# once, token 1 needs one row. Rank 1 then computes both of its experts, and returns their weighted sum.
#
# </details>
#
# ## Build it
#
# The program of the picture has three exchanges:
#
# 1. Each rank sorts its choices by expert, so that all rows for one rank are neighbours. It tells the other ranks how many
#    rows they will get, in an all-to-all of `n`.
# 2. The rows travel in an all-to-all of unequal pieces. `sizes` says how many rows go to each rank, and `received` how many
#    come from each.
# 3. After the experts have computed, their results travel back. Sender and receiver change roles, so `sizes` and `received`
#    are swapped.
#
# Here is the same computation, one token at a time, compared with the program on 1, 2 and 4 ranks:

# %%
whole = torch.zeros_like(tokens)
for t in range(4):
    for e, share in zip(chosen[t], weight[t]):
        whole[t] += share * (tokens[t] @ matrices[e])

for ranks in (1, 2, 4):
    out = tt.run(mixture, Mesh(ep=ranks), *four, in_specs=SPLIT, out_specs=SPLIT)
    print(ranks, "ranks:", "equal" if torch.allclose(out.value, whole) else "off")

# %% [markdown]
# And `rows_between` counts the rows that you have predicted, from each rank (row) to each rank (column). The diagonal is what stays:

# %%
placement = contiguous(EXPERTS, 2)  # experts 0 and 1 on rank 0, 2 and 3 on rank 1
print(rows_between(chosen, placement))
print(rows_between(chosen, placement, once=True))

# %% [markdown]
# The backward pass needs no new code. The gradient of a row goes back the way the row came, so the same rows travel again. Only the
# counts do not: they are already known.
#
# `tt.MixtureOfExperts` has the router, experts with two matrices (three if they are gated, as in Llama), and four ways to send. Here
# two nodes of two ranks share eight experts:

# %%
rule = Routing(experts=8, top_k=2)  # a token goes through two of eight
x = torch.randn(64, 128)
h100s = replace(cost.find("h100"), node_size=2)  # modelled: two GPUs in a node

def layer(x, dispatch):  # 128 numbers in a row, and 64 inside an expert
    model = tt.MixtureOfExperts(128, 64, rule, ("node", "ep"), dispatch=dispatch)
    y, routed = model(x.requires_grad_())
    y.sum().backward()
    return y.detach(), routed.choices

results, both = {}, P(("node", "ep"))  # ranks of both axes share the experts
specs = {"in_specs": (both, None), "out_specs": (both, both), "cluster": h100s}
for dispatch in ("all_to_all", "per_rank", "gather", "two_levels"):
    done = tt.run(layer, Mesh(node=2, ep=2), x, dispatch, **specs)
    results[dispatch] = done.value[0]
    (seen,) = experts(done.trace, done.value[1]).layers
    rows = sum(level.pairs for level in seen.levels)  # from rank to rank
    across = rows[:2, 2:].sum() + rows[2:, :2].sum()
    sent = f"{rows.sum() - rows.trace()} rows in dispatch, {across} to the other node"
    print(f"{dispatch:<10} {sent}; in all {done.trace.bytes_sent():,} B")
same = [torch.allclose(y, results["gather"], atol=1e-6) for y in results.values()]
print("all equal" if all(same) else "off")

# %% [markdown]
# - `"all_to_all"` sends a row for each choice, as above.
# - `"per_rank"` sends a token once to each rank that has one of its experts.
# - `"gather"` sends every token to every rank, and adds up the results. Above, a row for two ranks of the other node counts
#   twice; in a ring it crosses once. It pays off if a token goes to nearly every *node* anyway.
# - `"two_levels"` sends a token once to each node, which passes it on to those that need it. (A row with
#   two hops counts twice.)
#
# The bytes are those of all ranks, forward and backward, with counts, weights, and the index of each row's expert.
#
# Play the layer that has just run: a row first goes to the rank with the same index in the other node, and from there to
# its expert. Hover over a block to see its rows.

# %%
experts(done.trace, done.value[1])

# %% [markdown]
# ## The twin in JAX
#
# XLA compiles a program before it knows what a router will choose, and needs the size of every message in advance. (JAX's
# `ragged_all_to_all` does not, but up to JAX 0.10 XLA cannot compile it for CPUs.) So here an expert has slots for a fixed number of
# tokens from each rank, and empty slots travel too. A choice that finds no free slot is **dropped**: the token does without that
# expert. The **capacity** is a factor: with 1.0 there are just enough slots if each rank's tokens choose all experts equally often.

# %%
import tplab.jax as tj
from jax import random

def dropped(capacity):  # ->   choices without a slot; bytes that rank 0 sends
    rule = Routing(experts=8, top_k=2, capacity=capacity)
    model = tj.MixtureOfExperts(128, 64, rule, "ep")

    def program(params, x):
        y, routed = model(params, x)
        return tj.all_reduce((routed.choices < 0).sum(), "ep"), y

    given = model.init(random.key(0)), x.numpy()
    split = {"in_specs": (model.specs, SPLIT), "out_specs": (P(), SPLIT)}
    done = tj.run(program, Mesh(ep=4), *given, **split)
    return int(done.value[0]), done.trace.bytes_sent(rank=0)

for capacity in (1.0, 1.5, 2.0, 4.0):
    lost, sent = dropped(capacity)
    print(f"capacity {capacity}: {lost:>2} of 128 choices dropped, {sent:,} B sent")

# %% [markdown]
# **The real difference.** Real loads are not equal, so in JAX either choices are dropped or empty slots are sent. In torch no empty
# slots are sent, and nothing is dropped unless you set a capacity. But every rank must know the sizes before the exchange can start.
#
# ## Turn the knob
#
# DeepSeek-V3 has 256 experts, and a token chooses 8 of them; here, at random.
#
# **Predict.** On 64 ranks in nodes of eight, what saves more: sending a token once to each rank, or once to each node?

# %%
v3 = Routing(256, 8)
limited = Routing(256, 8, groups=8, top_groups=4)  # 4 of 8 groups of experts

def bars(ranks):
    nodes = ranks // 8
    leave = {
        "to ranks, by choice": 8 * (1 - 1 / ranks),
        "to ranks, once to each": expected_copies(v3, ranks) * (1 - 1 / ranks),
        "to nodes, once to each": expected_copies(v3, nodes) * (1 - 1 / nodes),
        "to nodes, 4 of 8 groups": expected_copies(limited, nodes) * (1 - 1 / nodes),
    }
    drawn = [Row(name, {"leaving": round(n, 2)}) for name, n in leave.items()]
    return Bars(drawn, f"{ranks} ranks in {nodes} nodes; 8 of 256 experts.")

options = {ranks: bars(ranks) for ranks in (16, 32, 64)}
about = "on average, if a token chooses at random"
knob("Rows sent per token", "ranks", options, start=16, about=about, unit="")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# On 64 ranks, sending a token once to each rank saves hardly anything: its 8 experts are on 7.7 different ranks, and 7.6 rows leave
# its own. But they are in 5.3 nodes, so 4.6 rows leave its node if it is sent once to each. A row that has crossed the network
# once can be copied inside the node over NVLink. DeepSeek-V3 also restricts each token to 4 of 8 groups of experts. On 64 ranks
# each node has one group, so a token goes to four nodes at most, and 3.2 rows leave its own.
#
# </details>
#
# ## What it costs
#
# A token that is sent $n$ times costs $n$ rows of $D$ numbers in dispatch, and $n$ in combine. Here are 1,024 tokens on each of 32
# H100s in four nodes, with $D = 4096$ in bfloat16. They choose 8 of 64 experts at random:

# %%
choices = torch.rand(32 * 1024, 64).topk(8).indices

def forward(choices, dispatch):
    with torch.device("meta"):  # shapes without numbers
        x, share = (torch.empty(1024, n, dtype=torch.bfloat16) for n in (4096, 8))
        layer = tt.ParallelExperts(
            4096, 1024, Routing(64, 8), ("node", "ep"), dispatch=dispatch
        )
        return layer.bfloat16()(x, tt.Routed(choices, share, share, share))

for dispatch in results:
    on = {"in_specs": (both, None), "cluster": "h100", "keep_values": 0}
    run = tt.run(forward, Mesh(node=4, ep=8), choices, dispatch, **on)
    print(f"{dispatch:<10} {run.trace.makespan * 1e3:.1f} ms forward (modelled)")

# %% [markdown]
# Here a token has experts in 3.7 of the four nodes. `two_levels` sends it once to each of these, and the all-gather, a ring
# through all ranks, once to all four. Both beat a row per choice.
#
# DeepSeek's own kernels, DeepEP, send 8-bit numbers in dispatch and 16-bit numbers in combine. These are the bytes of one layer for 128
# tokens of one rank, with $D = 7168$ and a row for each choice. A dispatched row also carries a 4-byte scale for every 128 numbers:

# %%
num_rows = 128 * 8
there, back = num_rows * (7168 + 4 * 7168 // 128), num_rows * 2 * 7168
for name, total, microseconds in (("dispatch", there, 118), ("combine", back, 195)):
    rate = total / microseconds / 1e3
    print(f"{name}: {total:>10,} B in {microseconds} µs (measured): {rate:.0f} GB/s")

# %% [markdown]
# These are the low-latency kernels of [DeepEP](https://github.com/deepseek-ai/DeepEP) (MIT licence, docs/legacy.md) on 16 H800s, made
# for inference. (Those for training work in two levels.) The times are theirs. Our rates are within 2% of the 63 and 74 GB/s
# that they report. Both exceed the 50 GB/s of a network card (ConnectX-7), probably
# because 16 GPUs are two nodes, and about half of the rows stay inside one. In training, DeepSeek-V3 (DualPipe)
# computes one microbatch while the tokens of another travel, as `tt.train_batch(..., overlap=True)` does.

# %% [markdown]
# ## A bug to repair
#
# Here the mesh is $dp \times ep$: ranks along `ep` share the experts, and ranks along `dp` have copies of them. The gradients of
# the router are averaged over all ranks, and those of the experts over their copies. But these are `ep` times too large. Adam
# hides that factor, but SGD, the gradient norm and clipping do not. PyTorch users have met [gradients that are twice as
# large](https://github.com/pytorch/pytorch/issues/160285).

# %%
def average(router, experts):  # gradients; return new ones. See tt.axis_size("ep")
    router = tt.all_reduce(router, ("dp", "ep"), "mean")
    experts = tt.all_reduce(experts, "dp", "mean")
    return router, experts

# %%
from tplab.exercises.experts import check_average

check_average(average)

# %% [markdown]
# <details><summary>Why is it ep times too large?</summary>
#
# The loss of the batch is the mean of the losses of all $dp \cdot ep$ ranks. An expert computes tokens of all `ep` ranks that
# share the experts, so the gradient of all their losses is already in it: the backward pass of the exchanges added it up. Adding up
# the copies completes the sum over all ranks, and then it must be divided by $dp \cdot ep$. `tt.average_gradients(model, ("dp", "ep"))` does that.
#
# </details>
#
# ## Your turn: what is sent
#
# Write `rows_sent`, without `rows_between`: how many rows does each rank send to others, if a token is sent once to each
# rank that has any of its experts? `choices` is a NumPy array with the choices of all tokens. Rank 0 has the first T/ranks
# tokens, rank 1 the next ones, and so on. The experts are placed in the same way.

# %%
def rows_sent(choices, ranks, experts):  # choices [T, k]   ->   a number for each rank
    ...

# %%
from tplab.exercises.experts import check_rows_sent

check_rows_sent(rows_sent)

# %% [markdown]
# ## On Monday
#
# | here | torchtitan | Megatron-LM | JAX (MaxText) |
# |---|---|---|---|
# | `"ep"` | `--parallelism.expert_parallel_degree` | `--expert-model-parallel-size` | `ici_expert_parallelism` |
# | `dispatch="all_to_all"` | `all_to_all_single` with split sizes | `--moe-token-dispatcher-type alltoall` | `ragged_all_to_all` |
# | `dispatch="gather"` | | `--moe-token-dispatcher-type allgather` | all-gather and reduce-scatter |
# | `capacity` | | `--moe-expert-capacity-factor` | `capacity_factor` |
#
# ## To take away
#
# - Experts are spread over ranks, and tokens travel to them and back: besides the counts, two all-to-alls forward
#   and two backward.
# - What counts is how often a token crosses the network. With many ranks, sending it once per rank saves almost nothing, and
#   sending it once per node saves a lot, unless it has experts in nearly every node.
# - The gradient of an expert is a sum over the tokens of all ranks. Divide it by the number of all these ranks.
#
# **Sources.** Shazeer et al. 2017, [Outrageously large neural networks](https://arxiv.org/abs/1701.06538). Lepikhin et al. 2020,
# [GShard](https://arxiv.org/abs/2006.16668) (capacity). DeepSeek-AI 2024, [DeepSeek-V3](https://arxiv.org/abs/2412.19437) (671
# and 37 billion parameters; groups on nodes; DualPipe, section 3.2.1).
#
# Next: [23 Balance of experts](23_balance_of_experts.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
