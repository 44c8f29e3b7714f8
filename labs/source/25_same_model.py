# %% [markdown]
# # 25 Does it train the same model?
#
# **Six ranks train, and the loss falls. Is it the model that one rank would train?**
#
# Time: one hour. Prerequisites: `copy_to` from [lab 01](01_split_a_layer.ipynb), averaged gradients from
# [lab 16](16_data_parallel.ipynb), and scripts on simulated ranks from [lab 24](24_your_own_program.ipynb).
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/25_same_model.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/25_same_model.ipynb)
#
# ![Bars of the loss after 40 steps, for a right script and six wrong ones.](images/25_same_model.png)
#
# *The loss of a script after 40 steps on 3 x 2 simulated ranks, and of six versions with a bug in the function that
# names the bar. All of them learn, and three have a lower loss than the right script.*

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
import torch.distributed as dist
import tplab.torch as tt
from torch import nn
from tplab import Mesh
from tplab.torch import all_reduce, axis_size, copy_to, scatter_to

# %% [markdown]
# ## A script
#
# A bug that stops a program is found the same day. This lab is about bugs that stop nothing.
#
# Our script trains a small tensor-parallel MLP on several data-parallel ranks. It accumulates the gradients of five
# microbatches, averages them over `dp`, and clips them.

# %%
WIDTH, HIDDEN, BATCH, PARTS = 8, 32, 30, 5
MESH = Mesh(dp=3, tp=2)

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        up = torch.randn(WIDTH, HIDDEN) / 3
        down = torch.randn(HIDDEN, WIDTH) / 6
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up = nn.Parameter(scatter_to(up, "tp", dim=1))
        self.down = nn.Parameter(scatter_to(down, "tp", dim=0))

    def forward(self, x):
        x = copy_to(x * self.scale, "tp")
        h = torch.tanh(x @ self.up)
        y = h @ self.down
        return all_reduce(y, "tp")

def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return scatter_to(x, "dp", dim=0)

def backward(net, batch):
    total = torch.zeros(())
    for x in batch.chunk(PARTS):
        error = net(x) - x.flip(1)
        loss = error.square().mean() / PARTS
        loss.backward()
        total += loss.detach()
    return total

def average(net):
    for p in net.parameters():
        p.grad = all_reduce(p.grad, "dp", "mean")

def norm(net):
    cut = net.up.grad.square().sum() + net.down.grad.square().sum()
    whole = net.scale.grad.square().sum()
    return (all_reduce(cut, "tp") + whole).sqrt()

def report(loss):
    return all_reduce(loss, "dp", "mean")

# %%
def train(steps=3, model=MLP, backward=backward, average=average, norm=norm,
          report=report, log=print):  # fmt: skip
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        loss = report(backward(net, batch_of(step)))
        average(net)
        nn.utils.clip_grads_with_norm_(net.parameters(), 0.4, norm(net))
        optimizer.step()
        if dist.get_rank() == 0:
            log(f"loss {loss:.4f}")
    return loss.item()

out = tt.run(train, MESH, distributed=True)

# %% [markdown]
# This is one step on simulated H100s. For each microbatch, one `all_reduce` along `tp` adds up the outputs, and one in the
# backward pass adds up a gradient. Four along `dp` average the loss and the gradients, and the last one makes the norm:

# %%
from tplab.widgets import timeline

def one_step(**changes):
    train(1, log=str, **changes)

timeline(tt.run(one_step, MESH, distributed=True, cluster="h100").trace)

# %% [markdown]
# ## Types: what is a tensor to the ranks?
#
# Along one axis of the mesh, a tensor has one of four types:
#
# | type | what the ranks have |
# |---|---|
# | **R**, replicated | the same. Each rank uses its copy in its own way, so gradients are terms of a sum |
# | **I**, invariant | the same. All ranks use it in the same way, so the gradients are the same as well |
# | **V**, varying | pieces of one tensor. V(1): cut along dim 1 |
# | **P**, partial | terms of a sum that has not been taken yet |
#
# **By hand.** Two ranks hold 1 and 2. If the type is V, the tensor is [1, 2], and each rank may compute `tanh` of its own
# number. If it is P, the tensor is 3. But tanh(1) + tanh(2) is 1.73, and tanh(3) is 1.00. So a nonlinear function of a P is
# a bug, and only the type shows it.
#
# **Predict.** In `forward`, which types do `x` (after `copy_to`), `h`, `y` and the result have along `tp`? Which type does
# `loss` have along `dp`?
#
# <details><summary>Answer</summary>
#
# x is R, h is V(1), y is P, and the result is I. The loss is P along dp: each rank has the loss of its own rows. `report`
# adds them up and divides by 3.
# </details>
#
# With `types=True`, `run` works out the type of every tensor:

# %%
print(tt.run(one_step, MESH, types=True, distributed=True).types)

# %% [markdown]
# A type changes at a collective, `copy_to` or `scatter_to`, where pieces meet in a product, or where a sum or a mean
# runs over a dim that is cut.
#
# ## Build it: compare with one rank
#
# Types say what a line may do, not whether its numbers are right. `scale` is the same on all ranks, so each must have the
# gradient that one rank alone computes. **Version 1**, `Model1`, lacks `copy_to`:

# %%
class Model1(MLP):
    def forward(self, x):
        h = torch.tanh(x * self.scale @ self.up)
        y = h @ self.down
        return all_reduce(y, "tp")

def gradient(model):
    net = model()
    backward(net, batch_of(0))
    average(net)
    return f"{net.scale.grad[0]:.5f}"

for model in (MLP, Model1):
    one = tt.run(gradient, Mesh(dp=1, tp=1), model, distributed=True).per_rank[0]
    six = tt.run(gradient, MESH, model, distributed=True).per_rank
    print(f"{model.__name__:6} one rank: {one}   six ranks: {', '.join(six)}")

# %% [markdown]
# The outputs of `Model1` are exactly right, and its gradients are not. The two numbers add up to the right one, so a sum
# along `tp` is missing. `same_model`, the doctor, compares everything in the order of a training step, first for the
# script and then for `Model1`:

# %% tags=["nbval-ignore-output"]
def doctor(**changes):
    def script():
        train(**changes)

    return tt.same_model(script, mesh=MESH, steps=1)

print(doctor())
print(doctor(model=Model1).first)

# %% [markdown]
# There is no factor, because the missing terms are no multiple of the others. The doctor proves no cause here, but types will
# name it. The same happened in [torchtitan](https://github.com/pytorch/torchtitan/issues/1805).
#
# The doctor stops at the first difference, because the others follow from it. We have 3 x 2 ranks and five microbatches, so
# that a factor tells you where it comes from. On 2 x 2 ranks, a factor of 2 could come from either axis. The doctor needs
# simulated ranks, because it looks at the tensors of all ranks after each operation.

# %% [markdown]
# ## Five more bugs to repair
#
# Each version replaces one function of the script. Guess what is wrong and by which factor, and then run the doctor.
# To find the cause, it runs the script again with one thing changed. If the step is right then, the change is the
# proof. It numbers cells in the order they ran.
#
# Repair a copy with a name of its own until the doctor prints `None`. The cells below need the versions as they are. A
# mean over unequally many tokens, as in [lab 16](16_data_parallel.ipynb), is one more such bug.
#
# **Version 2.** `average`, now with `torch.distributed`.

# %% tags=["nbval-ignore-output"]
def average_2(net):
    group = tt.device_mesh().get_group("dp")
    for p in net.parameters():
        dist.all_reduce(p.grad, group=group)

print(doctor(average=average_2).first)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Gradients are 3 times as large: the default of all_reduce is a sum. Pass dist.ReduceOp.AVG.
# </details>
#
# [Megatron-LM](https://github.com/NVIDIA/Megatron-LM/issues/906) had such a factor. Adam hides it, because its step hardly
# depends on the size of gradients.
#
# **Version 3.** This model has one `copy_to` more, which does nothing in the forward pass.

# %% tags=["nbval-ignore-output"]
class Model3(MLP):
    def forward(self, x):
        return copy_to(super().forward(x), "tp")

print(doctor(model=Model3).first)

# %% [markdown]
# <details><summary>Answer</summary>
#
# All gradients are 2 times as large. Both ranks of tp use the result of forward in the same way, so each of them already has
# the whole gradient, and copy_to adds the two up.
# </details>
#
# A user of [torchtitan's experts](https://github.com/pytorch/pytorch/issues/160285) found doubled gradients behind
# equivalent loss curves.
#
# **Version 4.** `zero_grad` has moved.

# %% tags=["nbval-ignore-output"]
def backward_4(net, batch):
    total = torch.zeros(())
    for x in batch.chunk(PARTS):
        net.zero_grad()
        error = net(x) - x.flip(1)
        loss = error.square().mean() / PARTS
        loss.backward()
        total += loss.detach()
    return total

print(doctor(backward=backward_4).first)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Only the last microbatch counts, and it is still divided by five. The loss is right, because it is added up separately.
# </details>
#
# [RAE](https://github.com/bytetriper/RAE/issues/67) had this bug.
#
# **Version 5.** This is the norm as you would compute it on one GPU.

# %% tags=["nbval-ignore-output"]
def norm_5(net):
    return nn.utils.get_total_norm([p.grad for p in net.parameters()])

print(doctor(norm=norm_5).first)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Each rank takes the norm of its own half of up and down, and of scale. That is about 1/√2 of the right norm, and a different
# number on each rank of tp. So the ranks clip by different factors, and the copies of scale drift apart.
# </details>
#
# In [torchtitan](https://github.com/pytorch/torchtitan/issues/766), norms differed from rank to rank.
#
# **Version 6.** The last one is short.

# %% tags=["nbval-ignore-output"]
def report_6(loss):
    return loss

print(doctor(report=report_6).first)

# %% [markdown]
# <details><summary>Answer</summary>
#
# The model is right. Rank 0 logs the loss of its own rows, which is off by a different factor in each step.
# </details>
#
# ## Turn the knob
#
# Would you have found them in the loss? Look after 1, 10 and 40 steps.

# %% tags=["opening-picture"]
from tplab.widgets import Bars, Row, knob

VERSIONS = {
    "right": {},
    "1, model": {"model": Model1},
    "2, average": {"average": average_2},
    "3, model": {"model": Model3},
    "4, backward": {"backward": backward_4},
    "5, norm": {"norm": norm_5},
    "6, report": {"report": report_6},
}

def loss_after(steps, changes):
    def script():
        return train(steps, log=str, **changes)

    return tt.run(script, MESH, distributed=True).per_rank[0]

def bars(steps):
    after = {name: loss_after(steps, each) for name, each in VERSIONS.items()}
    rows = [Row(name, {"loss": loss}) for name, loss in after.items()]
    return Bars(rows, "Which of them would you suspect?")

options = {steps: bars(steps) for steps in (1, 10, 40)}
knob("Seven scripts", "steps", options, start=40, about="mean squared error", unit="")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# After one step, only version 6 differs. In the first nine steps the norm is above 0.4, and clipping takes any factor
# out, so versions 2 and 3 still equal the right script after ten. Later they take larger steps than they should, as
# version 5 does from the start, and here that even lowers the loss. After 40 steps only version 4 stands out, and it
# looks like a learning rate that is too small.
#
# </details>
#
# ## What it costs
#
# A missing sum is cheaper than a right one. In five microbatches, `copy_to` sends the gradient of `x`, [2, 8] in float32,
# through five ring all-reduces. With two ranks, 5 x 2(R-1)/R x 64 B is 320 B:

# %%
for model in (MLP, Model1, Model3):
    trace = tt.run(gradient, MESH, model, distributed=True).trace
    sent = trace.bytes_sent(rank=0, axis="tp")
    print(f"{model.__name__:6} rank 0 sends {sent} B along tp")

# %% [markdown]
# With 4,096 tokens of 4,096 bfloat16 numbers, each of these all-reduces sends 32 MiB per rank. The doctor costs a few runs
# of a small model on a CPU. **Decide:** run it for each new layout, before it gets a GPU.
#
# ## Types find it without a reference
#
# Some bugs give a tensor a type that cannot be right. Then types name the line, as in version 1. There, `scale` has a
# gradient that is P along `tp`: each rank has only the terms that come through its own columns of `up`. `copy_to` turns I
# into R, and its backward pass is the missing sum.

# %% tags=["nbval-ignore-output"]
version_1 = partial(one_step, model=Model1)
typed = tt.run(version_1, MESH, types=True, distributed=True).types
print(*typed.faults, sep="\n")

# %% [markdown]
# Version 4 has no wrong type: it drops terms, and the rest has the right type. So types judge lines, and the doctor judges
# numbers.
#
# **The twin.** In JAX, a `jit` over sharded arrays is one program, which XLA divides, so bugs 1, 2, 3 and 5 cannot happen. In
# `shard_map` you write the collectives, and they can. `shard_map` also tracks over which axes a value varies (`check_vma`).
# `w` is the same on all devices, so `jax.grad` adds up its gradient over `dp`. The mean below, which would be right in torch,
# comes too late:

# %% tags=["nbval-ignore-output"]
import jax
import jax.numpy as jnp
import tplab.jax as tj
from jax.sharding import PartitionSpec as Spec

tj.prepare(4)

def make_step(mesh):
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return {"loss": jax.lax.pmean(loss, "dp"), "grad": jax.lax.pmean(grad, "dp")}

    specs = {"in_specs": (Spec(), Spec("dp")), "out_specs": Spec()}
    return jax.jit(jax.shard_map(step, mesh=mesh, **specs))

w, x = jnp.ones((8, 8)), jnp.arange(96.0).reshape(12, 8) / 96
print(tj.same_model(make_step, (w, x), mesh=Mesh(dp=4)).first)

# %% [markdown]
# The repair divides `grad` by `jax.lax.axis_size("dp")`. With `check_vma=False`, nothing is added up, and the mean is right.
#
# ## Your turn: two bugs on 2 x 2 ranks
#
# This step has two bugs that cancel each other in the loss, but not in the gradients. Repair both. Your step must be
# right on any mesh, and each rank may use only its own rows. The doctor points at one bug, and the types at the other.

# %% tags=["nbval-ignore-output"]
def step(net, x, y):
    loss = (net(x) - y).square().mean() / (axis_size("dp") * axis_size("tp"))
    loss.backward()
    for p in net.parameters():
        p.grad = all_reduce(p.grad, "dp")
    return all_reduce(loss.detach(), ("dp", "tp"))

def train_2x2():
    net = MLP()
    x = batch_of(0)
    loss = step(net, x, x.flip(1))
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return round(loss.item(), 4)

SQUARE = Mesh(dp=2, tp=2)
for mesh in (SQUARE, Mesh(dp=1, tp=1)):
    print(mesh, "loss", tt.run(train_2x2, mesh).per_rank[0])
print(tt.same_model(train_2x2, mesh=SQUARE).first)
print(*tt.run(train_2x2, SQUARE, types=True, distributed=True).types.faults)

# %% tags=["nbval-ignore-output"]
from tplab.exercises.same_model import check_step

check_step(step)

# %% [markdown]
# ## On Monday
#
# | you have | you run |
# |---|---|
# | a script for `torchrun` | `python -m tplab.doctor --nproc-per-node 4 train.py` |
# | a script whose batch size is per rank | `... --reference-args "--batch-size 32"` with the batch of all four |
# | a report for a colleague | `... --html report.html` |
# | no run on one rank to compare with | `python -m tplab.torchrun --check-copies ...`, which compares the ranks' copies |
# | a cell of a notebook | `%%ranks dp=3 tp=2 --doctor` on its first line |
# | a JAX step | `tplab.jax.same_model(make_step, args, mesh=Mesh(dp=4))` |

# %% [markdown]
# ## To take away
#
# - A falling loss says little. Compare the first step on many ranks with that on one rank.
# - Give each axis a different size. Then a factor names the axis. If there is no factor, terms are missing.
# - Each tensor is R, I, V or P along each axis. Collectives turn one type into another, and each has its counterpart in
#   the backward pass.
#
# **Sources.** The threads linked above. [spmd_types](https://github.com/meta-pytorch/spmd_types) has these types for torch, and
# [JAX's shard_map](https://docs.jax.dev/en/latest/notebooks/shard_map.html) has varying axes.
#
# Next: [26 Three dimensions](26_three_dimensions.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
