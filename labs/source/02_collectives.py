# %% [markdown]
# # 02 Collectives
#
# **What does each collective cost, and why is the ring hard to beat?**
#
# Time: one hour. Prerequisites: [lab 00](00_first_look.ipynb), and from [lab 01](01_split_a_layer.ipynb) what is summed over
# `tp` and what over `dp`.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/02_collectives.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/02_collectives.ipynb)
#
# ![Four ranks in a ring, four numbers each. Sums grow on three hops, then the finished sums go round on three more.](images/02_collectives.png)
#
# *Four ranks with four numbers each add up their columns. On the first three hops sums grow, on the last three they
# are handed to everybody. You will build this, count its bytes, and see that it cannot be done with fewer.*

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
from tplab import Mesh, P
from tplab.torch import axis_index, axis_size, ppermute, ring_shift, run, start
from tplab.torch import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from tplab.torch import ring_all_gather, ring_reduce_scatter
from tplab.widgets import animate, matrices, timeline

# %% [markdown]
# ## By hand: one table, seen from above
#
# A **collective** is something that all ranks of an axis do together. Four ranks hold four numbers each. Write them
# down as a table, a row for each rank. For you, who see all rows at once, each collective is a line of NumPy:

# %%
table = np.array([[0, 7, 6, 4], [4, 8, 0, 6], [2, 0, 5, 9], [7, 7, 7, 7]], dtype="float32")
sums = table.sum(0)
after = {
    "all_reduce": np.tile(sums, (4, 1)),  # every rank: all four sums
    "reduce_scatter": sums[:, None],  # rank i: sum i
    "all_to_all": table.T,  # rank i: number i of every rank
    "broadcast": np.tile(table[0], (4, 1)),  # every rank: what rank 0 has
}
drawn = ("all_to_all", "reduce_scatter", "all_reduce")
matrices({"before, a row a rank": table, **{name: after[name] for name in drawn}})

# %% [markdown]
# The last two of these tables differ by a fifth collective. `all_gather` begins where every rank has one number, and
# ends where everyone has them all. So an all-reduce is a reduce-scatter, then an all-gather. Keep that in mind.
#
# tplab's collectives do what the tables say:

# %%
rows = table.ravel()  # cut into four, a row a rank
for op in (all_reduce, reduce_scatter, all_to_all, broadcast):
    out = run(partial(op, axis="tp"), Mesh(tp=4), rows, in_specs=P("tp"))
    assert np.array_equal(np.stack(out.per_rank), after[op.__name__])

def in_two_steps(x):
    return all_gather(reduce_scatter(x, "tp"), "tp")

out = run(in_two_steps, Mesh(tp=4), rows, in_specs=P("tp"))
assert np.array_equal(np.stack(out.per_rank), after["all_reduce"])

# %% [markdown]
# But a rank does not see the table. It has its own row, and it can send. Everything below is built from one call:
# `ring_shift` gives a tensor to the next rank, and returns what came from the one before.
#
# ## Pass it on: all-gather
#
# **Predict.** Each rank passes on what it got last. In which order do the numbers come to rank 2 of four?
#
# <details><summary>Answer</summary>
#
# 2, 1, 0, 3: first its own, then that of its neighbour, then what the neighbour got one hop earlier. Place $k$ of the
# list on rank $i$ comes from rank $i - k$, counted round the ring.
#
# </details>

# %%
def pass_on(x):
    arrived = [x]
    for _ in range(axis_size("tp") - 1):
        arrived.append(ring_shift(arrived[-1], "tp"))
    return arrived

# %% [markdown]
# Two rings of four, side by side; rank $r$ begins with the number $r$. The rings never meet: a collective over `tp`
# stays in its row of the mesh.

# %%
grid, on_grid = Mesh(dp=2, tp=4), P(("dp", "tp"))
numbers = np.arange(8, dtype="float32")
out = run(pass_on, grid, numbers, in_specs=on_grid)
for rank, arrived in enumerate(out.per_rank):
    print("rank", rank, [int(x) for x in arrived])
    row, i = rank // 4, rank % 4
    assert [int(x) for x in arrived] == [4 * row + (i - k) % 4 for k in range(4)]
animate(out.trace)

# %% [markdown]
# `ring_all_gather` is the same loop in tplab, with more directions to choose from. (`ring_all_gather??` in a cell of
# your own shows its source.)

# %%
library = run(partial(ring_all_gather, axis="tp"), grid, numbers, in_specs=on_grid)
assert library.per_rank == out.per_rank

# %% [markdown]
# ## Add on the way: reduce-scatter
#
# Now what travels is a sum. It starts as some rank's first number; the next rank adds its second, the one after that
# its third, and the last adds its fourth and keeps the sum. By hand, for the one that ends on rank 0: it must have
# started on rank 1, so as to visit everybody.
#
# $$4 + 0 + 7 + 4 = 15$$
#
# Rank 1's first number, rank 2's second, rank 3's third, rank 0's fourth. On the table that is a diagonal which
# re-enters at the top; the next section makes it a column. Find the other three:

# %%
diagonals = [sum(int(table[(i + 1 + k) % 4, k]) for k in range(4)) for i in range(4)]
print(diagonals)
assert diagonals == [4 + 0 + 7 + 4, 2 + 7 + 6 + 6, 7 + 7 + 0 + 9, 0 + 8 + 5 + 7]

# %% [markdown]
# The program does not even ask which rank it is. First to leave is `parts[0]`; at hop $k$, `parts[k]` is added to
# what comes in.

# %%
def add_on(parts):  # parts [R, n]: in the order in which they join a sum that comes by
    total = parts[0]
    for hop in range(1, axis_size("tp")):
        total = ring_shift(total, "tp") + parts[hop]
    return total

two_tables = np.random.default_rng(42).integers(0, 10, (2, 4, 4)).astype("float32")
assert np.array_equal(two_tables[0], table)  # and another one for the second ring
parts = two_tables.reshape(32, 1)
out = run(add_on, grid, parts, in_specs=on_grid)
print([int(total) for total in out.per_rank])
assert [int(total) for total in out.per_rank] == [*diagonals, 19, 28, 15, 14]

# %% [markdown]
# 15, 21, 23, 20 on the first ring, as by hand. tplab's own, `ring_reduce_scatter`, sends the same messages:

# %%
library = run(partial(ring_reduce_scatter, axis="tp"), grid, parts, in_specs=on_grid)
assert library.per_rank == out.per_rank

def messages(trace):
    return [event for event in trace.events if event.kind == "send"]

def said(trace):
    sends = messages(trace)
    return [(e.step, e.rank, e.peer, e.bytes, e.contributors, e.values.tolist()) for e in sends]

assert said(library.trace) == said(out.trace)
print(len(said(out.trace)), "messages, the same in both")

# %% [markdown]
# ## All-reduce: add, then pass on
#
# The columns of the table are what we want added. So every rank cuts its tensor into $R$ **pieces** and puts them in
# such an order that the sum which ends on rank $i$ is that of piece $i$. It starts on rank $i + 1$, so rank $j$ must
# begin with piece $j - 1$ and go on with $j - 2$, $j - 3$, ... down to its own.
#
# Then the finished pieces are passed on, and sorted.

# %% tags=["opening-picture"]
def my_all_reduce(x):  # x: any shape whose size R divides
    R, i = axis_size("tp"), axis_index("tp")
    hops = np.arange(R)
    total = add_on(x.reshape(R, -1)[(i - 1 - hops) % R])  # the sum of piece i
    arrived = torch.stack(pass_on(total))  # place k: piece i - k
    return arrived[(i - hops) % R].reshape(x.shape)  # place j: piece j

ring = run(my_all_reduce, Mesh(tp=4), table, in_specs=P("tp"), out_specs=P())
assert np.array_equal(ring.value[0], sums)
animate(ring.trace)

# %% [markdown]
# Other sizes, other numbers of ranks; and several rings at once:

# %%
for mesh in (Mesh(tp=1), Mesh(tp=2), Mesh(tp=3), Mesh(tp=5), Mesh(tp=8), Mesh(dp=2, tp=6)):
    x = torch.randn(mesh.axis_size("tp"), 240, dtype=torch.float64)
    out = run(my_all_reduce, mesh, x, in_specs=P("tp"), out_specs=P())
    assert torch.allclose(out.value[0], x.sum(0), rtol=0, atol=1e-12)  # another order, other rounding
print("equal to the plain sum")

# %% [markdown]
# ## Why the busiest rank cannot send less
#
# What would you have done without a ring? Probably this: everybody sends to rank 0, rank 0 adds up and sends back. A
# **star**. `ppermute` sends along the pairs that you give it.

# %%
def star(x):
    R, i = axis_size("tp"), axis_index("tp")
    total = x
    for k in range(1, R):
        total = total + ppermute(x, "tp", [(k, 0)])  # zeros for all but rank 0
    for k in range(1, R):
        answer = ppermute(total, "tp", [(0, k)])
        total = answer if i == k else total
    return total

wheel = run(star, Mesh(tp=4), table, in_specs=P("tp"), out_specs=P())
assert np.array_equal(wheel.value[0], sums)

# %% [markdown]
# **Predict.** Each rank's tensor has 16 bytes. How many does each rank send, in the star and in the ring? How many
# all ranks together?
#
# <details><summary>Answer</summary>
#
# In the star rank 0 sends its 16 bytes three times, the others once. In the ring everybody sends six pieces of 4
# bytes. Together it is 96 bytes in both.
#
# </details>

# %%
in_star = [wheel.trace.bytes_sent(rank=rank) for rank in range(4)]
in_ring = [ring.trace.bytes_sent(rank=rank) for rank in range(4)]
print("star", in_star, "ring", in_ring)
assert in_star == [48, 16, 16, 16] and in_ring == [24, 24, 24, 24]
assert sum(in_star) == sum(in_ring) == 96
assert len(messages(ring.trace)) == 6 * 4  # at each of six steps, on each of four links

# %% [markdown]
# So the ring saves not a single byte. It shares them out: nobody is busier than anybody else, and every link carries
# something at every step.
#
# Can 96 be beaten? Follow one piece. The other $R - 1$ ranks' numbers must all leave home before the first rank can
# know the sum: $R - 1$ messages with an unfinished sum. At that moment $R - 1$ ranks do not know it, and each has to
# be told: $R - 1$ more. Count them, piece by piece: how many ranks' numbers are in each message?

# %%
sends = messages(ring.trace)
for piece in range(4):
    inside = [len(event.contributors) for event in sends if event.chunk == piece]
    assert inside == [1, 2, 3, 4, 4, 4]
print("every piece:", inside)

# %% [markdown]
# Three and three. Over a tensor of $n$ bytes that makes $2(R-1)\,n$ for all ranks, and if they share it evenly
#
# $$2\,\frac{R-1}{R}\,n$$
#
# for each: somebody sends at least that much, and in the ring nobody sends more (Patarasuk and Yuan 2009). One
# assumption is in it: only ranks add. With a switch that adds what passes through it, each rank sends its tensor
# once.

# %%
from tplab import cost
from tplab.cost import find

link = find("h100").inner_link  # any: the bytes are the same on all
for R in range(2, 65):
    n = 1024 * R
    least = cost.lower_bound("all_reduce", n, R, link).bytes
    assert cost.collective("all_reduce", n, R, link).bytes == least == 2 * (R - 1) * n / R

# %% [markdown]
# ## The rest of the family
#
# **broadcast.** Those who know tell those who do not. After one hop two ranks know, after two hops four: a **tree**.
# (The tensor is 1 MiB, on slow Ethernet, so that hops take their time.)

# %%
def tree(x):
    R, i, knowing = axis_size("tp"), axis_index("tp"), 1
    while knowing < R:
        pairs = [(k, k + knowing) for k in range(knowing) if k + knowing < R]
        news = ppermute(x, "tp", pairs)
        x = news if knowing <= i < 2 * knowing else x
        knowing *= 2
    return x

ranks = torch.arange(8.0).repeat_interleave(2**18)
out = run(tree, Mesh(tp=8), ranks, in_specs=P("tp"), out_specs=P(), cluster="ethernet")
assert (out.value == 0).all()  # what rank 0 had
assert out.trace.num_steps == 3
timeline(out.trace)

# %% [markdown]
# **all_to_all.** Everybody has something else for everybody. In round $k$ each rank sends to the rank $k$ places on:
# `ring_shift` takes the distance as its third argument.

# %%
def trade(x):
    R, i = axis_size("tp"), axis_index("tp")
    pieces = x.reshape(R, -1)
    got = {i: pieces[i]}
    for k in range(1, R):
        got[(i - k) % R] = ring_shift(pieces[(i + k) % R], "tp", k)
    return torch.stack([got[j] for j in range(R)]).reshape(x.shape)

out = run(trade, Mesh(tp=4), table, in_specs=P("tp"), out_specs=P("tp"))
assert np.array_equal(out.value, table.T)

# %% [markdown]
# **barrier.** Nobody goes on before everybody has come. It is an all-gather of nothing: whoever has heard, through
# however many neighbours, of all the others knows that they are there.

# %%
out = run(lambda: len(pass_on(torch.empty(0))), Mesh(tp=8))
assert (out.trace.num_steps, out.trace.bytes_sent()) == (7, 0)

# %% [markdown]
# ## What it costs
#
# $R$ ranks; $n$ is the size of the tensor that one rank puts in.
#
# | collective | hops | bytes that a rank sends |
# |---|---|---|
# | `all_gather` | $R-1$ | $(R-1)\,n$ |
# | `reduce_scatter` | $R-1$ | $\frac{R-1}{R}\,n$ |
# | `all_reduce` | $2(R-1)$ | $2\frac{R-1}{R}\,n$ |
# | `all_to_all` | $R-1$ | $\frac{R-1}{R}\,n$ |
# | `broadcast`, as a tree | $\lceil\log_2 R\rceil$ | $\lceil\log_2 R\rceil\,n$, the root |
# | `ring_shift`, `ppermute` | 1 | $n$ |
#
# `tplab.cost` has these formulas. Beside them, the bytes of the programs that you have just built:

# %%
built = {
    "all_gather": (pass_on, "ring"),
    "reduce_scatter": (lambda x: add_on(x.reshape(axis_size("tp"), -1)), "ring"),
    "all_reduce": (my_all_reduce, "ring"),
    "all_to_all": (trade, "ring"),
    "broadcast": (tree, "tree"),
    "ring_shift": (partial(ring_shift, axis="tp"), "ring"),
}
sizes = (2, 3, 5, 8)
lines = [f"{'ranks':<14}" + "".join(f"{R:>8}" for R in sizes)]
for name, (program, algorithm) in built.items():
    runs = [run(program, Mesh(tp=R), torch.ones(R, 120), in_specs=P("tp")) for R in sizes]
    counted = [out.trace.bytes_sent(rank=0) for out in runs]
    n = 120 * 4  # bytes a rank
    assert counted == [cost.collective(name, n, R, link, algorithm).bytes for R in sizes]
    lines.append(f"{name:<14}" + "".join(f"{count:>8,}" for count in counted))
print("\n".join(lines))

# %% [markdown]
# tplab's own collectives count the same, though each is a single event in the trace. On a tensor that does not divide
# evenly, ranks differ a little, and the sum over all of them is still $2(R-1)\,n$:

# %%
out = run(lambda x: all_reduce(x, "tp"), Mesh(tp=4), torch.ones(4, 10), in_specs=P("tp"))
counted = [out.trace.bytes_sent(rank=rank) for rank in range(4)]
print(counted)
assert counted == [cost.bytes_sent("all_reduce", 10, 4, 4, rank) for rank in range(4)]
assert sum(counted) == 2 * 3 * 10 * 4

# %% [markdown]
# ## Few hops or few bytes?
#
# So far we counted bytes. But every hop also costs something before its first byte arrives, the **latency**, and a
# ring of eight takes fourteen hops. Here is an all-reduce that takes three: exchange sums with your neighbour, then
# with the rank two places off, then four. It is called **recursive doubling**.

# %%
def doubling(x):  # R a power of two
    R, distance = axis_size("tp"), 1
    while distance < R:
        x = x + ppermute(x, "tp", [(k, k ^ distance) for k in range(R)])
        distance *= 2
    return x

eight = np.arange(64, dtype="float32").reshape(8, 8)
out = run(doubling, Mesh(tp=8), eight, in_specs=P("tp"), out_specs=P())
assert np.array_equal(out.value[0], eight.sum(0))
assert out.trace.num_steps == 3
assert out.trace.bytes_sent(rank=0) == 3 * 32  # the ring: 2 * 7/8 * 32 = 56
for event in messages(out.trace.select(rank=0)):
    print(f"round {event.step + 1}: rank 0 tells rank {event.peer} the sum of {list(event.contributors)}")

# %% [markdown]
# **Predict.** Three hops with the whole tensor, or fourteen with an eighth of it. Which is quicker for a hundred
# numbers? For a hundred million? What decides where they meet?
#
# <details><summary>Answer</summary>
#
# The few numbers want few hops, the many want few bytes. They meet where the bytes that the ring saves take as long
# as its eleven extra hops. So a network with a large product of latency and bandwidth keeps the few-hops way longer.
#
# </details>
#
# With a `cluster`, `run` gives every rank a clock. A message takes latency plus bytes over bandwidth, as the
# cluster's figures say, and so these **modelled** times are the same everywhere. We subtract the time
# spent adding: it is computing.

# %%
CLUSTERS = {"H100 node, NVLink": find("h100"), "1 Gb Ethernet": find("ethernet")}
BUILT = {"ring": my_all_reduce, "recursive_doubling": doubling}

def as_run(way, nbytes, cluster):
    x = torch.ones(8, nbytes // 4)
    trace = run(BUILT[way], Mesh(tp=8), x, in_specs=P("tp"), cluster=cluster).trace
    return trace.makespan - trace.busy().max()

def by_formula(way, nbytes, cluster):
    return cost.collective("all_reduce", nbytes, 8, cluster.inner_link, way).seconds

lines = []
for title, cluster in CLUSTERS.items():
    for nbytes in (2**10, 2**20):
        took = {way: as_run(way, nbytes, cluster) for way in BUILT}
        for way in BUILT:
            assert np.isclose(took[way], by_formula(way, nbytes, cluster), rtol=1e-9)
        times = "".join(f"  {way} {seconds * 1e6:,.0f} µs" for way, seconds in took.items())
        lines.append(f"{title:<18} {nbytes:>9,} bytes:{times}")
print("\n".join(lines))

# %% [markdown]
# The formulas agree with the runs, so they can draw what would take too long to run. Circles are runs. The third
# curve first exchanges halves, then quarters, then eighths, and comes back the same way: few hops *and* few bytes.
# Below the grey line nothing is possible, however clever: `cost.lower_bound`.

# %%
from tplab.widgets import curves

ways = ("ring", "recursive_doubling", "halving_doubling")
nbytes = 2.0 ** np.arange(8, 30.1, 0.25)
lines, floor, dots, meet = {}, {}, {}, {}
for title, cluster in CLUSTERS.items():
    link = cluster.inner_link
    lines[title] = {way: [by_formula(way, n, cluster) for n in nbytes] for way in ways}
    floor[title] = [cost.lower_bound("all_reduce", n, 8, link).seconds for n in nbytes]
    dots[title] = [(2**k, as_run(way, 2**k, cluster)) for k in (10, 15, 20) for way in BUILT]
    meet[title] = (14 - 3) / (3 - 2 * 7 / 8) * link.latency * link.bandwidth
curves(
    nbytes, lines, floor=floor, dots=dots, crossings=meet,
    title="All-reduce over eight ranks", about="modelled",
    sentence="Recursive doubling is quicker for small tensors, the ring for large ones.",
)

# %% [markdown]
# They meet at
#
# $$n = \frac{14 - 3}{3 - 2\cdot\frac78} \cdot \text{latency} \cdot \text{bandwidth}
# = 8.8 \cdot \text{latency} \cdot \text{bandwidth}$$
#
# Inside an H100 node that is 7 MiB. Ethernet has a 3,600th of the bandwidth but 26 times the latency: 54 KiB.
#
# Why then are there rings at all, with the third curve below them? Because it sends to ranks that are four places
# off, as if each pair had a cable. Where ranks are wired in a ring or torus, those messages share links with others,
# and the formula breaks. A ring only ever uses neighbours. It keeps its promise on any wiring.

# %%
for title, cluster in CLUSTERS.items():
    ring_takes = by_formula("ring", meet[title], cluster)
    assert np.isclose(ring_takes, by_formula("recursive_doubling", meet[title], cluster))

nvlink, ethernet = (cluster.inner_link for cluster in CLUSTERS.values())
assert round(nvlink.bandwidth / ethernet.bandwidth) == 3600
assert round(ethernet.latency / nvlink.latency) == 26
print(*(f"{title}: {size / 1024:,.0f} KiB" for title, size in meet.items()), sep="\n")

# %% [markdown]
# ## The same in JAX
#
# `add_on` and `pass_on` stay as they are: change the import, and they are JAX programs. Message by message they do
# the same, down to the values and to whose numbers are in them.

# %%
import jax.numpy as jnp
from tplab.jax import all_reduce, axis_index, axis_size, collectives_in, ring_shift, run

in_jax = run(add_on, grid, parts, in_specs=on_grid)
assert [int(total[0]) for total in in_jax.per_rank] == [*diagonals, 19, 28, 15, 14]
assert said(in_jax.trace) == said(library.trace)

# %% [markdown]
# **What differs: a rank does not know its number.** Python reads the program once for all ranks, so `axis_index` is
# not 0 or 3 but a value that only the running program has. It can be computed with, and it can index an *array*. It
# cannot index a Python list, nor decide an `if`.

# %%
def from_a_list(x):
    pieces = list(x[0])
    return pieces[axis_index("tp")]

try:
    run(from_a_list, Mesh(tp=4), table, in_specs=P("tp"))
except TypeError as error:
    print(type(error).__name__)

def from_an_array(x):
    return x[0][axis_index("tp")]

out = run(from_an_array, Mesh(tp=4), table, in_specs=P("tp"))
assert [float(x) for x in out.per_rank] == [0, 8, 5, 7]

# %% [markdown]
# That is why `my_all_reduce` sorts with an array of indices, `arrived[(i - hops) % R]`. Only its `torch.stack` has to
# become `jnp.stack`.

# %%
def my_all_reduce_in_jax(x):
    R, i = axis_size("tp"), axis_index("tp")
    hops = np.arange(R)
    total = add_on(x.reshape(R, -1)[(i - 1 - hops) % R])
    return jnp.stack(pass_on(total))[(i - hops) % R].reshape(x.shape)

in_jax = run(my_all_reduce_in_jax, Mesh(tp=4), table, in_specs=P("tp"))
for result in in_jax.per_rank:
    assert np.array_equal(result[0], sums)
assert [m[:4] for m in said(in_jax.trace)] == [m[:4] for m in said(ring.trace)]

# %% [markdown]
# **What differs: types that know what is the same everywhere.** With `out_specs=P()` torch compared the results, and
# was content. JAX goes by what can be *proved*. What came through a ring may differ from rank to rank, for all its
# types know, even where the numbers agree. `all_reduce` says by its name that its result is the same.

# %%
from tplab.errors import ReplicationError

try:
    run(my_all_reduce_in_jax, Mesh(tp=4), table, in_specs=P("tp"), out_specs=P())
except ReplicationError as error:
    print(error)

named = run(lambda x: all_reduce(x, "tp"), Mesh(tp=4), table, in_specs=P("tp"), out_specs=P())
assert np.array_equal(named.value[0], sums)

# %% [markdown]
# **What differs: XLA has the last word.** It compiles the whole program, and may merge or move what you wrote.
# `collectives_in` lists what it made of it. Here it kept our six hops apart, and knows nothing of their being an
# all-reduce; the other program it was told.

# %%
hops = collectives_in(my_all_reduce_in_jax, Mesh(tp=4), table, in_specs=P("tp"))
whole = collectives_in(lambda x: all_reduce(x, "tp"), Mesh(tp=4), table, in_specs=P("tp"))
print(hops, whole, sep="\n\n")
assert sum(hop.count * hop.bytes for hop in hops) == whole[0].bytes == 24

# %% [markdown]
# ## Start now, wait later
#
# A collective that nobody waits for takes no time, if there is something else to do meanwhile. `start` begins one and
# gives a handle; `wait` gives the result. Say the gradient `g` of one layer is ready to be summed, while another
# layer still has its product `x @ w` to do.

# %%
from tplab.torch import all_reduce, axis_index, axis_size, ring_shift, run

def one_after_the_other(g, x, w):
    g = all_reduce(g, "dp")
    return g, x @ w

def at_once(g, x, w):
    flight = start(all_reduce, g, "dp")
    y = x @ w
    return flight.wait(), y

work = torch.ones(1_200_000), torch.ones(512, 512), torch.ones(512, 512)
blocking = run(one_after_the_other, Mesh(dp=4), *work, cluster="laptop").trace
timeline(blocking)

# %%
overlapped = run(at_once, Mesh(dp=4), *work, cluster="laptop").trace
timeline(overlapped)

# %% [markdown]
# First a sum of two times, then the longer of the two. Asserted, on the modelled clock:

# %%
laptop = find("laptop")
summing = cost.collective("all_reduce", 4 * 1_200_000, 4, laptop.inner_link).seconds
flops, nbytes = cost.matmul_flops(512, 512, 512), cost.matmul_bytes(512, 512, 512, itemsize=4)
multiplying = laptop.compute_seconds(flops, nbytes)
assert np.isclose(blocking.makespan, summing + multiplying)
assert np.isclose(overlapped.makespan, max(summing, multiplying))
print(f"{blocking.makespan * 1e3:.2f} ms, then {overlapped.makespan * 1e3:.2f} ms")

# %% [markdown]
# Two warnings. Between `start` and `wait`, leave the tensor alone: tplab sends a copy, but real libraries read it
# while you write. And in JAX `start` exists so that the same text runs; it decides nothing. XLA asks only who needs
# whose result. The program *without* `start` overlaps as well:

# %%
import tplab.jax

def plain_jax(g, x, w):
    g = tplab.jax.all_reduce(g, "dp")
    return g, x @ w

arrays = [np.asarray(tensor) for tensor in work]
in_jax = tplab.jax.run(plain_jax, Mesh(dp=4), *arrays, cluster="laptop").trace
assert np.isclose(in_jax.makespan, overlapped.makespan)

# %% [markdown]
# ## Two axes: 8 x 2 or 4 x 4?
#
# Sixteen ranks. Along `dp` the batch is split, along `tp` the weights. One training step of two layers, as in lab 01, sends two kinds of things. Along `tp` **activations**: the
# sum of $Z$ forward and of $dX$ backward, $B/\text{dp} \times D$ each. Along `dp` **gradients**: of $A$ and of $B$,
# $D \times F/\text{tp}$ each.

# %%
from tplab.torch import copy_to, reduce_from

def step(x, a, b):  # x [B/dp, D]   a [D, F/tp]   b [F/tp, D]
    for tensor in (x, a, b):
        tensor.requires_grad_()
    z = reduce_from(torch.tanh(copy_to(x, "tp") @ a) @ b, "tp")
    z.square().mean().backward()
    return all_reduce(a.grad, "dp", op="mean"), all_reduce(b.grad, "dp", op="mean")

SPECS = (P("dp"), P(None, "tp"), P("tp"))

def sent_by_formula(batch, width, hidden, dp, tp, itemsize=4):
    """Bytes that one rank sends in a step, by axis."""
    activations, gradients = batch // dp * width * itemsize, width * hidden // tp * itemsize
    return {
        "tp": 2 * cost.collective("all_reduce", activations, tp, nvlink).bytes,
        "dp": 2 * cost.collective("all_reduce", gradients, dp, nvlink).bytes,
    }

# %% [markdown]
# **Predict.** Which of the two meshes sends fewer bytes?
#
# <details><summary>Answer</summary>
#
# It depends on the batch. Activations grow with it, gradients do not. Read the table below: with width 16 and hidden
# width 32 the two are equal at a batch of 64.
#
# </details>

# %%
D, F = 16, 32
lines = ["batch   mesh     along tp   along dp   together"]
for batch in (32, 64, 128):
    shapes = (batch, D), (D, F), (F, D)
    tensors = [torch.randn(shape, dtype=torch.float64) / 4 for shape in shapes]
    plain = run(step, Mesh(dp=1, tp=1), *tensors, in_specs=SPECS, out_specs=SPECS[1:]).value
    for dp, tp in ((8, 2), (4, 4)):
        out = run(step, Mesh(dp=dp, tp=tp), *tensors, in_specs=SPECS, out_specs=SPECS[1:])
        for gradient, right in zip(out.value, plain):
            assert torch.allclose(gradient, right, rtol=0, atol=1e-12)
        counted = {axis: out.trace.bytes_sent(rank=0, axis=axis) for axis in ("tp", "dp")}
        assert counted == sent_by_formula(batch, D, F, dp, tp, itemsize=8)
        numbers = *counted.values(), sum(counted.values())
        lines.append(f"{batch:>5}   {dp} x {tp}  " + "".join(f"{number:>11,}" for number in numbers))
print("\n".join(lines))

# %% [markdown]
# ## Turn the knob
#
# A layer as large language models have them, in bfloat16: width 4,096, hidden width 16,384. All ways to put sixteen
# ranks on two axes. Turn the batch, in tokens, and watch which mesh sends least. What moves, and which way?

# %%
from tplab.widgets import Bars, Row, bytes_text, knob

WIDTH, HIDDEN = 4096, 16384

def bars(batch):
    meshes = [(dp, 16 // dp) for dp in (16, 8, 4, 2, 1)]
    sent = {mesh: sent_by_formula(batch, WIDTH, HIDDEN, *mesh, itemsize=2) for mesh in meshes}
    total = {mesh: sum(parts.values()) for mesh, parts in sent.items()}
    least = min(total.values())
    best = [f"{dp} x {tp}" for (dp, tp), nbytes in total.items() if nbytes == least]
    rows = [
        Row(f"{dp} x {tp}", {"activations, tp": bar["tp"], "gradients, dp": bar["dp"]})
        for (dp, tp), bar in sent.items()
    ]
    return Bars(rows, f"Least: {' and '.join(best)}, with {bytes_text(least)} from each rank.")

knob(
    "Sixteen ranks, five meshes",
    "tokens in the batch",
    {batch: bars(batch) for batch in (2**k for k in range(9, 20))},
    start=2**15,
    about=f"data x tensor; two layers, width {WIDTH:,}, hidden width {HIDDEN:,}",
    unit="B",
)

# %% [markdown]
# With the batch the best mesh moves from tensor to data, a step each time the batch grows by four. From 4 x 4 to 8 x
# 2 the gradients grow by half of the $2DF$ weights and the activations shrink by half of $BD$. The two balance at
#
# $$B = 2F$$
#
# whatever the width. Here, 32,768 tokens.

# %%
def together(batch, dp, tp):
    return sum(sent_by_formula(batch, WIDTH, HIDDEN, dp, tp).values())

assert together(2 * HIDDEN, 8, 2) == together(2 * HIDDEN, 4, 4)
assert together(HIDDEN, 8, 2) > together(HIDDEN, 4, 4)
assert together(4 * HIDDEN, 8, 2) < together(4 * HIDDEN, 4, 4)

# %% [markdown]
# Bytes are not all alike, though. Sixteen H100s are two nodes of eight. The last axis of a mesh is the fastest, so
# neighbours along it share a node and its NVLink, nine times as fast as the network between nodes. Which axis should
# that be? The one that carries activations: nothing can be computed until they have arrived, while gradients can be
# summed in the background, with `start`.

# %%
h100, batch, itemsize = find("h100"), 2 * HIDDEN, 2
times, lines = [], []
for mesh in (Mesh(dp=4, tp=4), Mesh(dp=8, tp=2), Mesh(tp=4, dp=4)):
    sizes = {"tp": batch * WIDTH // mesh.shape["dp"], "dp": WIDTH * HIDDEN // mesh.shape["tp"]}
    took = {}
    for axis, elements in sizes.items():
        link = h100.group_link(mesh.group(0, axis))
        one = cost.collective("all_reduce", elements * itemsize, mesh.shape[axis], link)
        took[axis] = 2 * one.seconds
        lines.append(f"{mesh!s:<17} {axis} over {link.name:<15} {took[axis] * 1e3:.2f} ms")
    times.append(took)
print("\n".join(lines))

inside, fewer, across = times
assert sum(inside.values()) < min(sum(fewer.values()), sum(across.values()))
assert across["tp"] > 8 * inside["tp"]

# %% [markdown]
# **Predict.** A colleague averages gradients with `all_reduce(g, "dp") / world_size`. On `Mesh(dp=16, tp=1)` all
# tests pass. What happens on 8 x 2?
#
# <details><summary>Answer</summary>
#
# The sum runs over eight ranks and is divided by sixteen. Gradients are half of what they should be, and nothing
# fails: with SGD training is slower, with Adam, which does not care for the gradients' scale, one may never notice.
# Divide by the size of the group that was summed over: `op="mean"` does. Choosing the wrong one has happened to
# [others](https://github.com/deepspeedai/DeepSpeed/pull/6546), too.
#
# </details>

# %%
ones = torch.ones(1)
wrong = run(lambda g: all_reduce(g, "dp") / 16, Mesh(dp=8, tp=2), ones, out_specs=P()).value
right = run(lambda g: all_reduce(g, "dp", op="mean"), Mesh(dp=8, tp=2), ones, out_specs=P()).value
assert (wrong.item(), right.item()) == (0.5, 1.0)

# %% [markdown]
# ## A bug to repair
#
# Two conventions are about. In [NCCL's ring](https://github.com/NVIDIA/nccl/blob/master/src/device/all_reduce.h), as in
# ours, rank $i$ ends with the sum of piece $i$. In [Baidu's](https://github.com/baidu-research/baidu-allreduce), which
# made rings popular for training, it ends with piece $i + 1$. Both are right, each with its own second half. Here
# somebody has taken a half from each. Everything that is usually tested looks fine: ones add up, all ranks agree, the
# grand total and the norm are right.

# %%
def sum_up(x):
    R, i = axis_size("tp"), axis_index("tp")
    hops = np.arange(R)
    total = add_on(x.reshape(R, -1)[(i - hops) % R])
    return torch.stack(pass_on(total))[(i - hops) % R].reshape(x.shape)

assert (run(sum_up, Mesh(tp=4), torch.ones(4, 12), in_specs=P("tp"), out_specs=P()).value == 4).all()
mixed = run(sum_up, Mesh(tp=4), table, in_specs=P("tp"), out_specs=P()).value[0]
assert mixed.sum() == sums.sum() and mixed.norm() == torch.tensor(sums).norm()

# %% [markdown]
# The check runs it with other numbers, one piece a row. Mend `sum_up` above, run its cell, then this one.
#
# <details><summary>A hint</summary>
#
# With `i - hops`, rank $j$ begins with its own piece $j$. The sum that ends on rank $i$ began on rank $i + 1$. Which
# piece is it? Now either begin elsewhere, or sort the arrivals by what they are.
#
# </details>

# %%
from tplab.exercises.collectives import check_sum_up

check_sum_up(sum_up)

# %% [markdown]
# ## Both ways round
#
# A ring need not go up. tplab's rings know four directions: `up`, `down`, `both` (each piece the nearer way) and
# `split` (every piece cut in two, a half each way). What rank 0 of four returns, where rank $r$ has the pair $r$,
# $r + \frac12$. `both` lists the pieces as `up` does, whichever way they came; `split` the first halves, then the second:

# %%
pairs = torch.arange(4.0)[:, None] + torch.tensor([0, 0.5])
came = {}
for direction in ("up", "down", "both", "split"):
    gathering = partial(ring_all_gather, axis="tp", direction=direction)
    out = run(gathering, Mesh(tp=4), pairs.ravel(), in_specs=P("tp"))
    came[direction] = [piece.tolist() for piece in out.per_rank[0]]
    print(f"{direction:<5}  {out.trace.num_steps} rounds ", *came[direction])
assert came["both"] == came["up"] == [[0, 0.5], [3, 3.5], [2, 2.5], [1, 1.5]]
assert came["split"] == [[0], [3], [2], [1], [0.5], [1.5], [2.5], [3.5]]

# %% [markdown]
# Is that quicker? Behind a switch a rank has one way out, and both directions share it. On a torus, as TPUs are
# wired, it has a link to each neighbour, and a ring that goes one way round leaves half of them idle.

# %%
gain = {}
for cluster in ("tpu_v5e", "h100"):
    took = {}
    for direction in ("up", "both"):
        gathering = partial(ring_all_gather, axis="tp", direction=direction)
        out = run(gathering, Mesh(tp=5), torch.ones(1_000_000), cluster=cluster)
        took[direction] = out.trace.makespan
    gain[cluster] = round(took["up"] / took["both"], 1)
print(gain)
assert gain["tpu_v5e"] == 2.0 and gain["h100"] < 1.2

# %% [markdown]
# ## Your turn: gather both ways
#
# Write `gather` yourself, in torch. `x` is this rank's piece, `[1, n]`; return all of them, `[R, n]`, piece $j$ at place $j$, in
# `R // 2` rounds. Use `ring_shift` by 1 and by -1 only, and `start`, so that a hop up and a hop down share a round.
# Nobody should get a piece twice: with an even number of ranks, the last round goes one way only.
#
# <details><summary>A hint</summary>
#
# Two travellers, both `x` at first: `start(ring_shift, up, "tp", 1)` and `start(ring_shift, down, "tp", -1)`, then
# wait for both. After $h$ rounds one is piece $i - h$, the other $i + h$. Keep them in a dict; `torch.cat` them at the
# end.
#
# </details>

# %%
def gather(x):  # x [1, n]   ->   [R, n], the same on every rank of "tp"
    ...

# %%
from tplab.exercises.collectives import check_gather

check_gather(gather)

# %% [markdown]
# ## To take away
#
# - All-gather passes on, reduce-scatter adds on the way, and an all-reduce is one after the other.
# - In a ring all-reduce each rank sends $2\frac{R-1}{R}n$, and no method lets the busiest send less. The price is $2(R-1)$ hops:
#   small tensors want fewer.
# - Activations go along `tp`, gradients along `dp`. The batch decides which mesh sends least, the wiring which axis
#   goes where.
#
# **Sources.** Patarasuk and Yuan 2009, [Bandwidth optimal all-reduce](https://doi.org/10.1016/j.jpdc.2008.09.002).
# Thakur et al. 2005, [Collectives in MPICH](https://doi.org/10.1177/1094342005051521). Phillip Lippe, [Asynchronous
# linear
# layers](https://uvadlc-notebooks.readthedocs.io/en/latest/tutorial_notebooks/scaling/JAX/tensor_parallel_async.html)
# (the two rings and their numbers). Misha Laskin, [Sharding Large
# Models](https://www.mishalaskin.com/posts/tensor_parallel) (8 x 2 and 4 x 4).
#
# Next: [04 A Megatron block](04_megatron_block.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
