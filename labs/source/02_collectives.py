# %% [markdown]
# # 02 Collectives
#
# **What does each collective cost, and why is the ring hard to beat?**
#
# Prerequisites: [lab 00](00_first_look.ipynb). Time: one hour, and as much again for all six puzzles.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/02_collectives.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/02_collectives.ipynb)
#
# ![Four ranks in a ring add up their columns in six hops.](images/02_collectives.png)
#
# *Four ranks, with four numbers each, add up their columns. On the first three hops the sums grow, and on the last
# three they are passed on to every rank.*

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
from tplab import Mesh, P, cost
from tplab.widgets import Bars, Row, animate, curves, knob, matrices, timeline

# %% [markdown]
# ## By hand: one table, seen from above
#
# A **collective** is an operation that all ranks of an axis do together. Four ranks hold four numbers each: a table
# with one row per rank. Here each collective is a line of NumPy:

# %%
table = np.array([[0, 7, 6, 4], [4, 8, 0, 6], [2, 0, 5, 9], [7, 7, 7, 7]], "float32")
sums = table.sum(0)
after = {
    "all_to_all": table.T,  # rank i: number i of every rank
    "reduce_scatter": sums[:, None],  # rank i: sum i
    "all_reduce": np.tile(sums, (4, 1)),  # every rank: all four sums
}
matrices({"before, one row per rank": table, **after})

# %% [markdown]
# An `all_gather` leads from the third table to the last: every rank gets the numbers of all ranks. So an all-reduce is a
# reduce-scatter followed by an all-gather:

# %%
rows = table.ravel()  # cut into four, one row per rank
for name, expected in after.items():
    collective = partial(getattr(tt, name), axis="tp")
    out = tt.run(collective, Mesh(tp=4), rows, in_specs=P("tp"))
    print(name, "as above:", np.array_equal(np.stack(out.per_rank), expected))

def in_two_steps(x):
    return tt.all_gather(tt.reduce_scatter(x, "tp"), "tp")

out = tt.run(in_two_steps, Mesh(tp=4), rows, in_specs=P("tp"))
print("in two steps:", np.array_equal(np.stack(out.per_rank), after["all_reduce"]))

# %% [markdown]
# A rank sees only its own row. So we build everything from `ring_shift`.
#
# ## Pass it on: all-gather
#
# **Predict.** Each rank passes on what it received last. In which order does rank 2 of four see the numbers?
#
# <details><summary>Answer</summary>
#
# 2, 1, 0, 3: first its own number, then what its neighbour had one hop earlier. On rank $i$, entry $k$ of the list
# comes from rank $i - k$, counted around the ring.
#
# </details>

# %%
def pass_on(x):
    arrived = [x]
    for _ in range(tt.axis_size("tp") - 1):
        arrived.append(tt.ring_shift(arrived[-1], "tp"))
    return arrived

out = tt.run(pass_on, Mesh(tp=4), np.arange(4), in_specs=P("tp"))
for rank, arrived in enumerate(out.per_rank):
    print(f"rank {rank} sees", [int(number) for number in arrived])

# %% [markdown]
# ## Add on the way: reduce-scatter
#
# Now a sum travels. It starts as one rank's first number. The next rank adds its second number, the one after that
# its third, and the last adds its fourth and keeps the sum. The sum that ends on rank 0 started on rank 1. It is $4 +
# 0 + 7 + 4 = 15$, a diagonal that wraps around. Find the other three.

# %%
def add_on(parts):  # R parts, in the order in which a passing sum collects them
    total = parts[0]
    for hop in range(1, tt.axis_size("tp")):
        total = tt.ring_shift(total, "tp") + parts[hop]
    return total

out = tt.run(add_on, Mesh(tp=4), table.reshape(16, 1), in_specs=P("tp"))
print([int(total) for total in out.per_rank])

# %% [markdown]
# ## All-reduce: add, then pass on
#
# We want the sums of the *columns*. So every rank cuts its tensor into $R$ **pieces**, and orders them so that rank $i$
# ends with the sum of piece $i$. This sum starts on rank $i + 1$. So rank $j$ must begin with piece $j - 1$, go on with
# $j - 2$, $j - 3$ and so on, and end with its own. Then the finished pieces are passed on and sorted.

# %% tags=["opening-picture"]
def my_all_reduce(x):  # x: any shape whose size R divides
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    pieces, hops = x.reshape(R, -1), np.arange(R)
    total = add_on([pieces[k] for k in (i - 1 - hops) % R])  # the sum of piece i
    arrived = torch.stack(pass_on(total))  # entry k: piece i - k
    return arrived[(i - hops) % R].reshape(x.shape)  # entry j: piece j

ring = tt.run(my_all_reduce, Mesh(tp=4), table, in_specs=P("tp"), out_specs=P())
print("the sums:", ring.value[0].tolist())
animate(ring.trace)

# %% [markdown]
# ## Why the busiest rank cannot send less
#
# Here is a simpler method, a **star**: every rank sends its tensor to rank 0, which adds them up and sends the sum
# back. `ppermute` sends along the pairs of ranks that you give it.

# %%
def star(x):
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    total = x
    for k in range(1, R):
        total = total + tt.ppermute(x, "tp", [(k, 0)])  # zeros for all ranks but rank 0
    for k in range(1, R):
        answer = tt.ppermute(total, "tp", [(0, k)])
        total = answer if i == k else total
    return total

wheel = tt.run(star, Mesh(tp=4), table, in_specs=P("tp"), out_specs=P())
print("the same sums:", torch.equal(wheel.value, ring.value))

# %% [markdown]
# **Predict.** Each rank's tensor takes 16 bytes. How many bytes does each rank send in the star, and which method sends
# more in total?
#
# <details><summary>Answer</summary>
#
# In the star, rank 0 sends 48 bytes and each other rank 16. In the ring, every rank sends six pieces of 4 bytes. The
# total is 96 bytes in both cases.
#
# </details>

# %%
for name, out in (("star", wheel), ("ring", ring)):
    sent = [out.trace.bytes_sent(rank=rank) for rank in range(4)]
    print(f"{name}: {sent} bytes, in total {sum(sent)}")
animate(wheel.trace)

# %% [markdown]
# The ring saves no bytes, but spreads them evenly. Here are both with a larger tensor on 1 Gb Ethernet, modelled from
# data sheets. The model limits only what a rank sends. If a link also limited what arrives, the star would take 51 ms,
# not 34. (An *idle* rank may be sending.)

# %%
large, options = torch.ones(4, 2**18), {"in_specs": P("tp"), "cluster": "ethernet"}
timeline(tt.run(star, Mesh(tp=4), large, **options).trace)

# %%
timeline(tt.run(my_all_reduce, Mesh(tp=4), large, **options).trace)

# %% [markdown]
# Can any method manage with fewer than 96 bytes? Follow one piece. Before any rank can know its sum, every other rank
# must have sent its part: $R - 1$ messages. Then the sum has to reach the other ranks: $R - 1$ more. Each line below
# says how many ranks' numbers are in each message of one piece:

# %%
sends = [event for event in ring.trace.events if event.kind == "send"]
for piece in range(4):
    print([len(event.contributors) for event in sends if event.chunk == piece])

# %% [markdown]
# For a tensor of $n$ bytes that is at least $2(R-1)\,n$ in total. If the ranks share it evenly, each of them sends
#
# $$2\,\frac{R-1}{R}\,n$$
#
# So some rank must send at least that much, and in the ring no rank sends more.
#
# If an all-reduce takes $t$ seconds, its **bus bandwidth** (`busbw`) is $2\frac{R-1}{R}\frac nt$: the rate at which every
# link of a ring must have sent. For an all-gather or a reduce-scatter, the factor is $\frac{R-1}{R}$, and $n$ is the
# whole tensor.
#
# ## What it costs
#
# One collective of the first picture is left, the all-to-all:

# %%
def trade(x):
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    pieces = x.reshape(R, -1)
    got = {i: pieces[i]}
    for k in range(1, R):  # in round k, send to the rank k places on
        got[(i - k) % R] = tt.ring_shift(pieces[(i + k) % R], "tp", k)
    return torch.stack([got[j] for j in range(R)]).reshape(x.shape)

out = tt.run(trade, Mesh(tp=4), table, in_specs=P("tp"), out_specs=P("tp"))
print("trade is an all_to_all:", np.array_equal(out.value, table.T))

# %% [markdown]
# $R$ is the number of ranks, and $n$ the size of one rank's input:
#
# | collective | hops | bytes that a rank sends |
# |---|---|---|
# | `all_gather` | $R-1$ | $(R-1)\,n$ |
# | `reduce_scatter` | $R-1$ | $\frac{R-1}{R}\,n$ |
# | `all_reduce` | $2(R-1)$ | $2\frac{R-1}{R}\,n$ |
# | `all_to_all` | $R-1$ | $\frac{R-1}{R}\,n$ |
# | `broadcast` from one rank (the root), as a tree | $\lceil\log_2 R\rceil$ | $\lceil\log_2 R\rceil\,n$ for the root |
#
# **Turn the knob:** with more and more ranks, which of the four that we built level off?

# %%
built = {
    "all_gather": pass_on,
    "reduce_scatter": lambda x: add_on(x.reshape(tt.axis_size("tp"), -1)),
    "all_reduce": my_all_reduce,
    "all_to_all": trade,
}

def bars(R):
    rows = []
    for name, program in built.items():
        trace = tt.run(program, Mesh(tp=R), torch.ones(R, 3072), in_specs=P("tp")).trace
        sent = trace.bytes_sent(rank=0)
        assert sent == cost.collective(name, 3072 * 4, R, "h100", "ring").bytes
        rows.append(Row(name, {"sent": sent}))
    most = max(rows, key=lambda row: row.total)
    return Bars(rows, f"A rank's input takes 12 KiB. {most.label} sends the most.")

knob("What rank 0 sends", "ranks", {R: bars(R) for R in (2, 3, 4, 6, 8)}, start=4,
     about="bytes counted", unit="B")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# An all-reduce sends less than twice its input on any number of ranks, and a reduce-scatter or an all-to-all less than once.
# The result of an all-gather grows with every rank, and so do its bytes.
#
# </details>
#
# ## Few hops or few bytes?
#
# Each hop also has a **latency**, the time before its first byte arrives, and a ring of eight ranks takes fourteen
# hops. **Recursive doubling** takes three: exchange sums with your neighbour, then with the rank two places away, then
# four.

# %%
def doubling(x):  # R a power of two
    R, distance = tt.axis_size("tp"), 1
    while distance < R:
        x = x + tt.ppermute(x, "tp", [(k, k ^ distance) for k in range(R)])
        distance *= 2
    return x

eight = np.arange(64, dtype="float32").reshape(8, 8)
out = tt.run(doubling, Mesh(tp=8), eight, in_specs=P("tp"), out_specs=P())
print("right:", np.array_equal(out.value[0], eight.sum(0)))
print(out.trace.bytes_sent(rank=0), "bytes sent by rank 0; in a ring", 2 * 7 * 32 // 8)
for event in out.trace.select(rank=0, kind="send").events:
    news = f"the sum of ranks {list(event.contributors)}"
    print(f"hop {event.step + 1}: rank 0 sends {news} to rank {event.peer}")
animate(out.trace)

# %% [markdown]
# **Predict.** Which is faster for a hundred numbers, three hops with the whole tensor or fourteen hops with an eighth
# of it? And for a hundred million? Where are the two equal?
#
# <details><summary>Answer</summary>
#
# Three hops are faster for a hundred numbers, fourteen for a hundred million. They are equal where the ring's eleven
# extra hops take as long as the bytes that it saves, at $\frac{14 - 3}{3 - 14/8} = 8.8$ times latency times bandwidth.
#
# </details>
#
# In this **modelled** picture a message takes its latency plus bytes over bandwidth. Bandwidths are from data sheets,
# NVLink's latency is from NCCL's source, and Ethernet's is assumed. The lines are formulas, the circles are runs, and
# the diamonds are NCCL on eight real H100s. Grey is below the lower bound.

# %%
from tplab.cost.measured import collective_times

BUILT = {"ring": my_all_reduce, "recursive_doubling": doubling}

def as_run(way, nbytes, cluster):
    x, where = torch.ones(8, nbytes // 4), {"in_specs": P("tp"), "cluster": cluster}
    trace = tt.run(BUILT[way], Mesh(tp=8), x, **where).trace
    return trace.makespan - trace.busy().max()  # without the additions

sizes = 2.0 ** np.arange(8, 30.1, 0.25)
lines, floor, dots, meet = {}, {}, {}, {}
networks = {"H100 node, NVLink": "h100", "1 Gb Ethernet": "ethernet"}
for title, cluster in networks.items():
    link = cost.find(cluster).inner_link
    lines[title] = {way: [cost.collective("all_reduce", n, 8, link, way).seconds
                          for n in sizes] for way in (*BUILT, "halving_doubling")}
    floor[title] = [cost.lower_bound("all_reduce", n, 8, link).seconds for n in sizes]
    dots[title] = [(n, as_run(way, n, cluster)) for n in (2**10, 2**15, 2**20)
                   for way in BUILT]
    meet[title] = (14 - 3) / (3 - 14 / 8) * link.latency * link.bandwidth
    print(f"{title}: equal at {meet[title] / 1024:,.0f} KiB")

curves(
    sizes, lines, floor=floor, dots=dots, crossings=meet, by="aiconfigurator",
    measured={"H100 node, NVLink": collective_times("h100", "all_reduce", 8)},
    title="All-reduce over eight ranks", about="modelled, data sheet; NCCL measured",
    sentence="Of the two that we built, recursive doubling is faster for small tensors,"
             " the ring for large ones.",
)

# %% [markdown]
# The third curve, halving-doubling, exchanges halves, then quarters, then eighths, and comes back the same way: few
# hops *and* few bytes. In this model it always beats the ring, but it assumes that any two ranks can talk at full
# speed, as through NVIDIA's switch. Where ranks are wired as a ring or a torus, messages to ranks four places away
# share links. A ring sends to neighbours only.
#
# For small tensors NCCL is faster than our ring. It has a protocol for them, LL, with shorter hops.
#
# **Predict.** In a ring, an all-reduce is a reduce-scatter and an all-gather. So both should reach the same bus
# bandwidth, at most the speed of the links. Do they?

# %%
for gpu in ("a100", "h100"):
    for op, laps in (("all_gather", 1), ("all_reduce", 2)):
        bus = max(laps * 7 / 8 * n / t for n, t in collective_times(gpu, op, 8))
        print(f"eight {gpu.upper()}s, {op}: at most {bus / 1e9:.0f} GB/s")

# %% [markdown]
# <details><summary>Answer</summary>
#
# On A100s they nearly agree, at about 70% of the data sheet. On H100s the all-reduce reaches a quarter more than the
# all-gather, its own second half. NVIDIA's newer switches can add (**NVLS**, or SHARP): each rank sends its tensor once
# and receives the sum once, about $n$ bytes instead of $2\frac{R-1}{R}n$.
#
# </details>
#
# ## The same loop in JAX

# %%
import jax.numpy as jnp
import tplab.jax as tj

def my_all_reduce_in_jax(x):
    R, i = tj.axis_size("tp"), tj.axis_index("tp")
    hops = np.arange(R)
    parts = x.reshape(R, -1)[(i - 1 - hops) % R]
    total = parts[0]
    for hop in hops[1:]:
        total = tj.ring_shift(total, "tp") + parts[hop]
    arrived = [total]
    for _ in hops[1:]:
        arrived.append(tj.ring_shift(arrived[-1], "tp"))
    return jnp.stack(arrived)[(i - hops) % R].reshape(x.shape)

in_jax = tj.run(my_all_reduce_in_jax, Mesh(tp=4), table, in_specs=P("tp"))
print(in_jax.per_rank[2][0])
print(in_jax.trace.bytes_sent(rank=2), "bytes sent by rank 2")

# %% [markdown]
# **A rank does not know its index while Python runs**, because Python runs once, for all ranks. So you can index an
# *array* with `axis_index`, but not a Python list.
#
# ## A bug to repair
#
# In [NCCL's ring](https://github.com/NVIDIA/nccl/blob/master/src/device/all_reduce.h), as in ours, rank $i$ ends with
# the sum of piece $i$. In [Baidu's](https://github.com/baidu-research/baidu-allreduce), it ends with piece $i + 1$.
# This program has the first half of one and the second half of the other. All ranks agree, and the result's total and norm
# are right.

# %%
def sum_up(x):
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    pieces, hops = x.reshape(R, -1), np.arange(R)
    total = add_on([pieces[k] for k in (i - hops) % R])
    return torch.stack(pass_on(total))[(i - hops) % R].reshape(x.shape)

mixed = tt.run(sum_up, Mesh(tp=4), table, in_specs=P("tp"), out_specs=P()).value[0]
matrices({"sum_up": mixed[None], "right": sums[None]})

# %% [markdown]
# Fix `sum_up` above, with `ring_shift` and $2(R-1)$ pieces from each rank. Run its cell, then this one.

# %%
from tplab.exercises.collectives import check_sum_up

check_sum_up(sum_up)

# %% [markdown]
# ## Your turn: six puzzles
#
# Each puzzle has two budgets: rounds, and the bytes that a rank may send. In a round, a rank may send one message and
# receive one, and in puzzle 3, one in each direction. A piece is three numbers of 4 bytes. Use only `ring_shift`,
# `ppermute` and, in puzzle 3, `start`.

# %%
from tplab.exercises.collective_puzzles import PUZZLES, check_puzzle

for number, puzzle in PUZZLES.items():
    print(f"{number}. {puzzle}")

# %% [markdown]
# Your program is also tried on other numbers of ranks. If it is in JAX, call `check_puzzle(1, puzzle_1, "jax")`. Here is an
# answer to puzzle 1 that is right but too slow:

# %%
def puzzle_1(x):
    for k in range(tt.axis_size("tp") - 1):
        x = x + tt.ppermute(x, "tp", [(k, k + 1)])
    return x

check_puzzle(1, puzzle_1)

# %%
def puzzle_2(x):
    ...

check_puzzle(2, puzzle_2)

# %% [markdown]
# In puzzle 3, `flight = tt.start(tt.ring_shift, x, "tp", 1)` begins a hop, and `flight.wait()` returns what arrived.
# Hops that you start before you wait share a round.

# %%
def puzzle_3(x):
    ...

check_puzzle(3, puzzle_3)

# %% [markdown]
# Solve puzzles 4 to 6 in cells like these. Puzzle 5 is the third curve above.
#
# ## On Monday
#
# | here | torch.distributed | JAX, inside `jax.shard_map` |
# |---|---|---|
# | `all_reduce` | `dist.all_reduce` | `lax.psum` |
# | `all_gather` | `dist.all_gather_into_tensor` | `lax.all_gather` |
# | `reduce_scatter` | `dist.reduce_scatter_tensor` | `lax.psum_scatter` |
# | `all_to_all` | `dist.all_to_all_single` | `lax.all_to_all` |
# | `ring_shift`, `ppermute` | `dist.batch_isend_irecv` | `lax.ppermute` |
# | `start`, `wait` | `async_op=True`, `work.wait()` | XLA decides |
#
# NCCL chooses between ring, tree and NVLS, unless you set `NCCL_ALGO`.
#
# ## To take away
#
# - A reduce-scatter adds on the way, an all-gather passes on, and an all-reduce does one after the other.
# - In a ring all-reduce each rank sends $2\frac{R-1}{R}n$ bytes. In any other method, some rank sends at least as much,
#   unless a switch adds.
# - The price is $2(R-1)$ hops. Small tensors are faster with fewer hops, and large ones only if any two ranks can talk
#   at full speed.
#
# **Sources.** Patarasuk and Yuan 2009, [Bandwidth optimal all-reduce](https://doi.org/10.1016/j.jpdc.2008.09.002).
# Thakur et al. 2005, [Collectives in MPICH](https://doi.org/10.1177/1094342005051521). Hu et al. 2025, [Demystifying
# NCCL](https://arxiv.org/abs/2507.04786). NVIDIA,
# [nccl-tests](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). Measured: the authors
# of [aiconfigurator](https://github.com/ai-dynamo/aiconfigurator), commit 095f58a, Apache-2.0.
#
# Next: [03 Levels of a network](03_network_levels.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
