# %% [markdown]
# # 00 A first look
#
# **What travels when eight ranks add up their numbers?**
#
# Prerequisites: a reading knowledge of Python. You need no GPU and no knowledge of parallel programs. Time: 20
# minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/00_first_look.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/00_first_look.ipynb)
#
# ![Eight ranks in a ring. Each passes a sum to the next rank, which adds its own number. After seven hops every rank has the sum of all eight.](images/00_first_look.png)
#
# *Eight ranks start with one number each. In every step, each rank sends its sum to the next rank, receives one, and
# adds its own number to it. After seven steps every sum is 250. (If the picture does not move, it shows step 4.) It
# was drawn from a run of the program below.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %% [markdown]
# ## One rank's program
#
# A **rank** is one worker. It has its own tensors and cannot see any other rank's tensors; ranks share numbers only by
# sending and receiving them. You write the program of *one* rank, and `run` runs it on every rank of a **mesh**. Our
# mesh has eight ranks along one axis, which we call `ring`.
#
# `ring_shift(x, "ring")` sends `x` to the next rank and returns what the previous rank sent.
#
# Run the cell, then press play. The number in a box is the sum that this rank has so far, and a number on a line is on
# its way. The marks under each number in the table show whose numbers are in it.
# Hover over anything to see its contents.

# %% tags=["opening-picture"]
import numpy as np
import torch
import tplab.torch as tt
from tplab import Mesh, P
from tplab.widgets import animate

def add_up(x):  # x: this rank's own number
    total = x
    for _ in range(tt.axis_size("ring") - 1):
        total = tt.ring_shift(total, "ring") + x
    return total

numbers = np.array([13, 41, 22, 35, 17, 53, 29, 40], dtype="float32")
in_torch = tt.run(add_up, Mesh(ring=8), numbers, in_specs=P("ring"))
animate(in_torch.trace)

# %% [markdown]
# `in_specs=P("ring")` split the eight numbers along the axis `ring`, so each rank received one. `per_rank` lists what
# each rank returned:

# %%
totals = [total.item() for total in in_torch.per_rank]
print(totals)

# %% [markdown]
# **Predict.** In each step every rank sends one float32, which takes four bytes. So each of the eight ranks has sent 28
# bytes at the end. How many bytes would sixteen ranks send, all of them together? Is that twice as many as eight ranks
# send?
#
# <details><summary>Answer</summary>
#
# 960 bytes: sixteen ranks make fifteen steps, and 16 · 15 · 4 = 960. Eight ranks send 8 · 28 = 224 bytes together. So
# twice as many ranks send more than four times as many bytes: in total, $R$ ranks send $R\,(R - 1)$ messages.
#
# </details>
#
# `trace` records every message of the run. The animation is drawn from it, and from nothing else.

# %%
trace = in_torch.trace
print(f"{trace.num_steps} steps; rank 0 sent {trace.bytes_sent(rank=0)} bytes,")
print(f"and all eight ranks together sent {trace.bytes_sent()} bytes")
assert trace.bytes_sent(rank=0) == 7 * 4

# %% [markdown]
# ## The same program in JAX
#
# tplab has the same functions for JAX, under the same names. Only the import changes:

# %%
import tplab.jax as tj

def add_up_in_jax(x):
    total = x
    for _ in range(tj.axis_size("ring") - 1):
        total = tj.ring_shift(total, "ring") + x
    return total

in_jax = tj.run(add_up_in_jax, Mesh(ring=8), numbers, in_specs=P("ring"))
print([total.item() for total in in_jax.per_rank])

# %% [markdown]
# The difference is under the hood. In torch, eight ranks ran `add_up` line by line, and took turns whenever one of them
# had to wait. JAX read the function once and compiled it into one program for eight devices. Yet the same messages
# travelled:

# %%
def messages(trace):
    return [(e.step, e.rank, e.peer, e.bytes) for e in trace.events if e.kind == "send"]

assert messages(in_torch.trace) == messages(in_jax.trace)
print(len(messages(in_jax.trace)), "messages, the same in both frameworks")

# %% [markdown]
# ## Change something
#
# Go back to `add_up` and try these changes, one at a time:
#
# - Use five ranks: `Mesh(ring=5)` and `numbers[:5]`.
# - Send in the other direction: `tt.ring_shift(total, "ring", -1)`.
# - Leave out one hop: `tt.axis_size("ring") - 2`. Which number is missing on which rank?
#
# <details><summary>What there is to discover</summary>
#
# Five ranks need only four steps, so each sends 16 bytes. The direction changes nothing but the route. With one hop too
# few, the number of the next rank is missing on every rank, because it would be the last to arrive.
#
# </details>
#
# When a rank fails, tplab names it at once and stops the others, and the notebook keeps working:

# %%
from tplab.errors import RankError

def loses_its_number(x):
    if tt.axis_index("ring") == 2:
        raise ValueError("where is my number?")
    return tt.ring_shift(x, "ring")

try:
    tt.run(loses_its_number, Mesh(ring=8), np.arange(8), in_specs=P("ring"))
except RankError as error:
    print(f"rank {error.rank} raised: {error.__cause__}")

# %% [markdown]
# ## A bug to repair
#
# A colleague has rewritten `add_up` with one variable fewer. The new version runs, and it is right on two ranks, but
# not on eight:

# %%
def total_of_ring(x):  # x [1], this rank's own number   ->   the sum [1]
    for _ in range(tt.axis_size("ring") - 1):
        x = x + tt.ring_shift(x, "ring")
    return x

for ranks in (2, 8):
    out = tt.run(total_of_ring, Mesh(ring=ranks), numbers[:ranks], in_specs=P("ring"))
    print(f"{ranks} ranks: {out.per_rank[0].item()} instead of {numbers[:ranks].sum()}")

# %% [markdown]
# The check below says what is wrong. Repair the program, still with `ring_shift` and one hop at a time, run its cell,
# and then run the check.

# %%
from tplab.exercises.first_look import check_total

check_total(total_of_ring)

# %% [markdown]
# ## Cut it into pieces
#
# Adding up a tensor over all ranks, so that every rank ends with the result, is called an **all-reduce**. You will meet
# it in nearly every lab.
#
# Now every rank has a tensor of eight numbers. If ranks pass on whole tensors, as above, each of them sends eight
# numbers seven times: 224 bytes. `ring_all_reduce` cuts the tensors into eight pieces, and each rank sends only one
# piece at a time. In the first seven steps the sums grow; in the next seven the finished sums travel around the ring.
#
# **Predict.** That is twice as many steps. How many bytes does each rank send now?
#
# <details><summary>Answer</summary>
#
# Fourteen steps with one number of four bytes are 56 bytes. This is only a quarter, although every rank ends with the
# same eight sums.
#
# </details>
#
# The small marks under a piece show which ranks' numbers are in it.

# %%
def add_up_in_pieces(x):
    return tt.ring_all_reduce(x, "ring")

tables = np.arange(64, dtype="float32")  # eight numbers per rank
whole = tt.run(add_up, Mesh(ring=8), tables, in_specs=P("ring"))
pieces = tt.run(add_up_in_pieces, Mesh(ring=8), tables, in_specs=P("ring"))
assert all(torch.equal(a, b) for a, b in zip(whole.per_rank, pieces.per_rank))
print(f"each rank sends {whole.trace.bytes_sent(rank=0)} bytes in whole tensors")
print(f"and {pieces.trace.bytes_sent(rank=0)} bytes in pieces")
animate(pieces.trace)

# %% [markdown]
# tplab has all of this in one call, `all_reduce`, which also sends 56 bytes:

# %%
def add_up_in_one_call(x):
    return tt.all_reduce(x, "ring")

one_call = tt.run(add_up_in_one_call, Mesh(ring=8), tables, in_specs=P("ring"))
same = all(torch.equal(a, b) for a, b in zip(one_call.per_rank, pieces.per_rank))
print("the same sums:", same, "with", one_call.trace.bytes_sent(rank=0), "bytes")

# %% [markdown]
# ## What it costs
#
# With $R$ ranks and tensors of $n$ bytes, each rank sends $(R - 1)\,n$ bytes in whole tensors, and
# $2\,\frac{R - 1}{R}\,n$ bytes in pieces.
#
# **Predict.** Are pieces always faster? Here are both ways on eight H100 GPUs, with eight numbers and with 4,096 ×
# 4,096, the size of one matrix in a seven-billion-parameter model. The times are modelled from the GPU's data sheet.
# (On torch's `meta` device, tensors have shapes but no numbers.)

# %%
for size in (8, 4096 * 4096):
    tensors = torch.empty(8 * size, device="meta")
    for program in (add_up, add_up_in_pieces):
        options = {"in_specs": P("ring"), "cluster": "h100"}
        trace = tt.run(program, Mesh(ring=8), tensors, **options).trace
        sent, time = trace.bytes_sent(rank=0), trace.makespan * 1e6
        print(f"{program.__name__:<16} sends {sent:>11,} bytes in {time:5,.0f} µs")

# %% [markdown]
# <details><summary>Answer</summary>
#
# No. In this model each addition takes 5 µs to start on the GPU (a **launch**), and each message 1.9 µs before its first
# byte arrives (the **latency** of the link). With eight numbers that is nearly all of the time. Both ways add seven
# times, so seven steps are faster than fourteen. With a large tensor the bytes decide: in pieces, it takes less than a
# third of the time.
#
# </details>

# %% [markdown]
# ## Your turn
#
# Every rank should end up with the *largest* number in the ring, passed on with `ring_shift`, one hop at a time.
# `torch.maximum(a, b)` returns the larger of two tensors, element by element. Replace the `...` and run both cells. The
# check runs your program on rings of several lengths, with other numbers. If something is off, it shows what, and on
# which rank.

# %%
def largest(x):  # x [1], this rank's own number   ->   the largest [1]
    ...

# %%
from tplab.exercises.first_look import check_largest

check_largest(largest)

# %% [markdown]
# ## On Monday
#
# | here | torch.distributed | JAX, inside `jax.shard_map` |
# |---|---|---|
# | `run(f, Mesh(ring=8))` | `torchrun --nproc-per-node 8` | `jax.shard_map(f, mesh=...)` |
# | `axis_index`, `axis_size` | `dist.get_rank()`, `dist.get_world_size()` | `lax.axis_index`, `lax.axis_size` |
# | `ring_shift` | `dist.batch_isend_irecv` | `lax.ppermute` |
# | `all_reduce` | `dist.all_reduce` | `lax.psum` |
#
# `dist.all_reduce` overwrites its tensor, and autograd, which computes torch's gradients, does not know about it. [Lab
# 01](01_split_a_layer.ipynb) says what that means for gradients.
#
# ## To take away
#
# - You write one rank's program; `run` runs it on every rank of a mesh, in torch or in JAX.
# - A rank sees only its own tensors. Whatever it learns about the others was sent, and the trace has every message.
# - An all-reduce adds up a tensor over all ranks. In pieces, each of eight ranks sends a quarter of the bytes: 56 instead
#   of 224, for the same result.
#
# Next: [01 Split a layer](01_split_a_layer.ipynb), where ranks share one matmul. [02 Collectives](02_collectives.ipynb)
# explains why 56 bytes are the least that the busiest rank can send.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
