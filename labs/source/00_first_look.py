# %% [markdown]
# # 00 A first look
#
# **What travels when eight ranks add up their tensors?**
#
# Five minutes. You need to read Python; no GPU, and nothing about parallel programs.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/00_first_look.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/00_first_look.ipynb)
#
# ![Eight ranks in a ring. Each passes a number on to the next; after seven hops every rank has met all eight.](images/00_first_look.png)
#
# *Eight ranks, one number each. In every step each of them passes on the number that it has just received. The next
# two cells run this, and the picture is drawn from what they did.*

# %%
import subprocess
import sys

# On Colab, tplab joins the torch, jax and ipywidgets that are there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("no tplab: see above, then restart the runtime and try again")

# %% [markdown]
# ## One rank's program
#
# A **rank** is one worker. It has its own tensors and sees nobody else's; all it can do is send and receive. You
# write the program of *one* rank, and `run` runs it on every rank of a **mesh**: here eight ranks on one axis that we
# call `ring`.
#
# `ring_shift(x, "ring")` gives `x` to the next rank and returns what the rank before gave.
#
# Run the cell, then press play, or click on the picture and use the arrow keys. Point at anything to see what it
# holds.

# %% tags=["opening-picture"]
import numpy as np
from tplab import Mesh, P
from tplab.torch import axis_size, ring_shift, run
from tplab.widgets import animate

def add_up(x):  # x: this rank's own number
    total = passing = x
    for _ in range(axis_size("ring") - 1):
        passing = ring_shift(passing, "ring")
        total = total + passing
    return total

numbers = np.arange(8, dtype="float32")  # 0 for rank 0, 1 for rank 1, ...
in_torch = run(add_up, Mesh(ring=8), numbers, in_specs=P("ring"))
animate(in_torch.trace)

# %% [markdown]
# `in_specs=P("ring")` cut the eight numbers into one a rank. What each rank returned is in `per_rank`:

# %%
totals = [total.item() for total in in_torch.per_rank]
print(totals)
assert totals == [sum(range(8))] * 8

# %% [markdown]
# **Predict.** How many bytes did rank 0 send, all in all?
#
# <details><summary>Answer</summary>
#
# 28. To meet everybody, a number makes seven hops; in each hop rank 0 sends one float32, which is four bytes. `trace`
# has every message of the run, and what you see above is drawn from nothing else.
#
# </details>

# %%
trace = in_torch.trace
print(trace.num_steps, "hops,", trace.bytes_sent(rank=0), "bytes from rank 0,", trace.bytes_sent(), "from all")
assert trace.bytes_sent(rank=0) == 7 * 4

# %% [markdown]
# ## The same program in JAX
#
# The import is the switch. `add_up` stays as it is: it looks `ring_shift` up by name, and the name now means JAX's.

# %%
from tplab.jax import axis_size, ring_shift, run

in_jax = run(add_up, Mesh(ring=8), numbers, in_specs=P("ring"))
assert [total.item() for total in in_jax.per_rank] == totals
animate(in_jax.trace)

# %% [markdown]
# What differs lies underneath. In torch eight ranks ran `add_up` line by line, taking turns wherever one waits. JAX
# read `add_up` once, compiled it into one program for eight devices, and XLA ran that. What travelled is the same,
# message by message:

# %%
def messages(trace):
    return [(e.step, e.rank, e.peer, e.bytes) for e in trace.events if e.kind == "send"]

assert messages(in_torch.trace) == messages(in_jax.trace)
print(len(messages(in_jax.trace)), "messages, the same in both")

# %% [markdown]
# ## Change something
#
# Go back to `add_up` and run it again with
#
# - five ranks: `Mesh(ring=5)` and `np.arange(5, dtype="float32")`,
# - the ring turned round: `ring_shift(passing, "ring", -1)`,
# - one hop too few: `axis_size("ring") - 2`. Which number is missing on which rank?
#
# The cells after it `assert` what holds for eight ranks, so they will tell you what changed; put it back before you go
# on.
#
# And break it. A rank that fails is named at once, the others are let go, and the notebook lives on:

# %%
from tplab.errors import RankError
from tplab.torch import all_reduce, axis_index, run

def loses_its_number(x):
    if axis_index("ring") == 2:
        raise ValueError("where is my number?")
    return all_reduce(x, "ring")

try:
    run(loses_its_number, Mesh(ring=8), np.arange(8), in_specs=P("ring"))
except RankError as error:
    print(f"rank {error.rank} raised: {error.__cause__}")  # without `try` you see the line, too
    assert error.rank == 2

# %% [markdown]
# ## The same sum for a quarter of the bytes
#
# Now every rank has eight numbers, and we want all eight sums. Sending whole tensors round the ring, each rank sends
# seven times its eight numbers: 224 bytes. `ring_all_reduce` cuts the tensors into pieces. Watch the small marks
# under a chunk: they say whose numbers are in it. First sums grow, then finished sums go round.

# %%
from tplab.torch import axis_size, ring_all_reduce, ring_shift, run

def add_up_in_pieces(x):
    return ring_all_reduce(x, "ring")

tables = np.arange(64, dtype="float32")  # eight numbers a rank
whole = run(add_up, Mesh(ring=8), tables, in_specs=P("ring"))
pieces = run(add_up_in_pieces, Mesh(ring=8), tables, in_specs=P("ring"))
for one, other in zip(whole.per_rank, pieces.per_rank):
    assert one.tolist() == other.tolist()
few, many = pieces.trace.bytes_sent(rank=0), whole.trace.bytes_sent(rank=0)
print(f"{many} bytes from each rank in whole tensors, {few} in pieces")
assert 4 * few == many
animate(pieces.trace)

# %% [markdown]
# ## Your turn
#
# Every rank should end with the *largest* number of the ring. `torch.maximum(a, b)` compares two tensors. Replace the
# `...` and run both cells: the check runs your program on rings of several lengths, and if something is off it shows
# what, and where.

# %%
def largest(x):  # x [1]: this rank's own number
    ...

# %%
from tplab.exercises.first_look import check_largest

check_largest(largest)

# %% [markdown]
# ## To take away
#
# - You write one rank's program; `run` runs it on every rank of a mesh, in torch or in JAX.
# - A rank sees its own tensors only. Whatever it learns of others was sent, and the trace has it.
# - How a sum is passed on decides what it costs: 224 bytes or 56 for the same result.
#
# Next: [01 Split a layer](01_split_a_layer.ipynb), where ranks share one matrix product. [02
# Collectives](02_collectives.ipynb) tells why 56 is as low as it gets.

# %% [markdown]
# Before you open another lab, shut this one's kernel down (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
