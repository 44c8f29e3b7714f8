# %% [markdown]
# # 11 Run a pipeline
#
# **Does a pipeline compute the same gradients, and does it take the time that its schedule promised?**
#
# Time: an hour and a half. Prerequisites: the schedules of [lab 10](10_pipeline_schedules.ipynb), and the clocks of
# [lab 01](01_split_a_layer.ipynb). There a schedule was a plan. Here it runs.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/11_run_a_pipeline.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/11_run_a_pipeline.ipynb)
#
# ![Four ranks that pass microbatches on, what each of them holds, and a timeline: forwards and backwards, messages beneath.](images/11_run_a_pipeline.png)
#
# *Eight microbatches pass four ranks, as 1F1B has it; the picture is drawn from the run. On this clock a message takes a step
# too, so that 1F1B takes 49 steps and not 33; the 50th adds up the losses.*

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
from torch import nn
from torch.nn import functional as F
from tplab import Mesh
from tplab.schedules import Costs, compare, measured_costs, naive, simulate
from tplab.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zb_v
from tplab.torch import axis_index, axis_size, receive, run, send, split_batch, stages_of, train_batch
from tplab.widgets import Bars, Row, animate, knob, timeline

torch.set_default_dtype(torch.float64)  # so that "the same gradients" can be taken at its word
torch.set_num_threads(1)  # the products are small; more threads would wait for each other
p, m = 4, 8  # ranks, microbatches

# %% tags=["opening-picture"]
def my_stage(rank):
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

inputs, targets = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(0))
microbatches = split_batch(inputs, targets, m)  # (input, target) pairs

def one_batch():
    return train_batch(one_f_one_b(p, m), my_stage(axis_index("pp")), microbatches, F.mse_loss, costs=Costs())

animate(run(one_batch, Mesh(pp=p)).trace)

# %% [markdown]
# ## By hand: two ranks, one microbatch
#
# Rank 0 has the weight $a = 2$, rank 1 has $b = 5$. The input is 3, the target 28. Forward, then backward:

# %%
x, a, b, target = 3, 2, 5, 28
y = a * x  # on rank 0
loss = (b * y - target) ** 2  # on rank 1, as is the next line
db, dy = 2 * (b * y - target) * y, 2 * (b * y - target) * b
da = dy * x  # on rank 0 again
assert (y, loss, db, dy, da) == (6, 4, 24, 20, 60)

# %% [markdown]
# Two numbers cross the cut: $y$ on the way down, its gradient on the way back. As programs: rank 1 takes $y$ as an input
# that wants a gradient. Rank 0 sends $y$ without its graph, which ends here, and takes the graph up again with the
# gradient that comes back.

# %%
def two_ranks():
    if axis_index("pp") == 0:
        a = torch.tensor(2.0, requires_grad=True)
        y = a * 3
        send(y.detach(), "pp", 1)  # goes on at once
        y.backward(receive("pp", 1))  # waits
        return a.grad
    b = torch.tensor(5.0, requires_grad=True)
    y = receive("pp", 0).requires_grad_()
    loss = (b * y - 28) ** 2
    loss.backward()
    send(y.grad, "pp", 0)
    return b.grad

out = run(two_ranks, Mesh(pp=2))
print("gradients", *(grad.item() for grad in out.per_rank))
print("messages", *(event.values.item() for event in out.trace.select(kind="send").events))
assert [grad.item() for grad in out.per_rank] == [da, db]

# %% [markdown]
# ## Build it: a worker that follows a schedule
#
# A row of a schedule says what its rank does, and the rank's place says with whom. With one stage a rank messages need no
# names: the k-th that rank 0 sends to rank 1 is the k-th that rank 1 takes, since both go through the microbatches in one
# order. Here is the row of rank 1 of three:

# %%
print(*one_f_one_b(ranks=3, microbatches=4).by_rank()[1])  # stage 1: F0, F1, then a backward and a forward in turn

# %%
def train(schedule, stage, microbatches, loss):
    r, last, m = axis_index("pp"), axis_size("pp") - 1, len(microbatches)
    kept, total = {}, 0.0
    for action in schedule.by_rank()[r]:
        k = action.microbatch
        if action.kind == "F":
            x = microbatches[k][0] if r == 0 else receive("pp", r - 1).requires_grad_()
            y = stage(x) if r < last else loss(stage(x), microbatches[k][1]) / m
            if r < last:
                send(y.detach(), "pp", r + 1)
            else:
                total += y.item()
            kept[k] = x, y  # until its backward: what the peak of lab 10 counts
        else:
            x, y = kept.pop(k)
            y.backward(receive("pp", r + 1) if r < last else None)  # adds to .grad of the weights
            if r > 0:
                send(x.grad, "pp", r - 1)
    return total

# %% [markdown]
# **Predict.** GPipe and 1F1B, same weights, same microbatches. Are the gradients different, equal but for rounding, or
# equal to the last bit?
#
# <details><summary>Answer</summary>
#
# To the last bit. A schedule says *when* each term is computed. Which terms there are it does not say, and both add those
# of microbatch 0, 1, 2, ... in this order. (A schedule with another order would differ by rounding.)
#
# </details>

# %%
def on_rank(how, schedule):
    stage = my_stage(axis_index("pp"))
    loss = how(schedule, stage, microbatches, F.mse_loss)
    return loss, [weight.grad for weight in stage.parameters()]

def accumulated():  # one device, one microbatch after another
    stages = [my_stage(rank) for rank in range(p)]
    for x, target in microbatches:
        for stage in stages:
            x = stage(x)
        (F.mse_loss(x, target) / m).backward()
    return [[weight.grad for weight in stage.parameters()] for stage in stages]

def pipelined(how, schedule):
    return run(partial(on_rank, how, schedule), Mesh(pp=p)).per_rank

plain = accumulated()
ours_gpipe, ours, theirs = (pipelined(train, gpipe(p, m)), pipelined(train, one_f_one_b(p, m)),
                            pipelined(train_batch, one_f_one_b(p, m)))  # fmt: skip
for rank in range(p):
    for k, want in enumerate(plain[rank]):  # of each weight
        grad = ours[rank][1][k]
        assert torch.equal(grad, ours_gpipe[rank][1][k]) and torch.equal(grad, theirs[rank][1][k])
        assert torch.allclose(grad, want, rtol=0, atol=1e-15)
assert np.isclose(ours[-1][0], theirs[0][0])  # the loss: ours is on the last rank, train_batch returns it on all
print("three pipelines, one result")

# %% [markdown]
# ## A GPT in four stages
#
# A model is a list of layers. `LayerSpec` only says how to make one, so that each rank makes those of its own stages, and
# nobody ever holds the whole. Embedding and head share one matrix: `TiedSpec`. `PlainBlock` is a transformer block in
# torch's own layers.

# %%
from tplab.models import GPTConfig
from tplab.pipeline import LayerSpec, TiedSpec
from tplab.torch.models.plain import PlainBlock

V, D, S = 61, 48, 16  # words, width, sequence
config = GPTConfig(V, D, num_layers=4, num_heads=4, context=S)

class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(S, D))

    def forward(self, x):
        return x + self.weight

head = TiedSpec("words", nn.Embedding, V, D, forward=lambda words, x: x @ words.weight.T)
layers = [TiedSpec("words", nn.Embedding, V, D), LayerSpec(Positions), *[LayerSpec(PlainBlock, config)] * 4,
          LayerSpec(nn.LayerNorm, D), head]
print(run(lambda: stages_of(layers, one_f_one_b(p, m)), Mesh(pp=p)).per_rank[0].partition)

# %% [markdown]
# One batch, by five schedules. With two stages a rank (interleaved, V) there are eight, of one layer each; so gradients are
# named by the layer's place in the model. All are held against one device that takes one microbatch after another. It
# begins with the same weights: those that `stages_of` draws depend on the seed of the run and the layer's place alone.

# %%
ids = torch.randint(V, (2 * m, S), generator=torch.Generator().manual_seed(1))
batch = split_batch(ids, (3 * ids + 1) % V, m)  # a rule to learn: the same word always has the same answer

def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

def gradients(stages):
    found = {}  # (place of the layer, name) -> gradient. A TiedSpec with a `forward` keeps its module as "layer"
    for number, stage in stages.items():
        for layer, module in enumerate(stage, start=stages.partition.bounds[number]):
            found |= {(layer, name.removeprefix("layer.")): w.grad for name, w in module.named_parameters()}
    return found

def step(schedule, **options):
    stages = stages_of(layers, schedule)
    return train_batch(schedule, stages, batch, cross_entropy, **options), gradients(stages)

def one_device():
    stages = stages_of(layers, naive(ranks=1))  # the whole model is one stage
    stages[0][-1].layer.weight = stages[0][0].weight
    losses = [cross_entropy(stages[0](x), target) / m for x, target in batch]
    sum(losses).backward()
    return sum(losses).detach(), gradients(stages)

want_loss, want = run(one_device, Mesh(pp=1)).per_rank[0]

# %%
def apart(per_rank):
    """The largest difference to one device, of the loss and of any gradient, relative."""
    found = [abs(loss - want_loss) / want_loss for loss, _ in per_rank]
    for _, grads in per_rank:
        found += [(grad - want[key]).abs().max() / want[key].abs().max() for key, grad in grads.items()]
    return max(found)

sent = {}
for rule in (gpipe, one_f_one_b, zb_h1, interleaved_1f1b, zb_v):
    result = run(partial(step, rule(p, m)), Mesh(pp=p))
    sent[rule] = result.trace.bytes_sent()
    assert apart(result.per_rank) < 1e-12
    assert set().union(*(grads for _, grads in result.per_rank)) == set(want)
    print(f"{rule.__name__:17} {len(want)} gradients equal, {sent[rule]:9,} bytes sent")

# %% [markdown]
# ## One matrix on two ranks
#
# **Predict.** Rank 0 has a copy of the word matrix for the embedding, rank 3 one for the head. Suppose that nobody adds
# up their gradients (`tied=[]`). Does training stop with an error, fail to learn, or seem to work?
#
# <details><summary>Answer</summary>
#
# It seems to work. Each copy has the gradient of its own use only, and takes steps of its own. The loss falls, and what
# is trained is another model, with two matrices. A check of gradients sees it in the first batch.
#
# </details>

# %%
def three_steps(options):
    stages, losses = stages_of(layers, one_f_one_b(p, m)), []
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.02)
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(train_batch(one_f_one_b(p, m), stages, batch, cross_entropy, **options).item())
        optimizer.step()
    return losses, [w for w in stages.parameters() if w.shape == (V, D)]

for options in ({}, {"tied": []}):
    (losses, first), *_, (_, last) = run(partial(three_steps, options), Mesh(pp=p)).per_rank
    same = torch.equal(first[0], last[0])
    print("nobody adds up: " if options else "as it should be:", *(f"{loss:.1f}" for loss in losses), f"copies equal: {same}")
    assert losses[2] < losses[1] < losses[0] and same == (not options)

parts = [grads for _, grads in run(partial(step, one_f_one_b(p, m), tied=[]), Mesh(pp=p)).per_rank]
one, other, right = parts[0][0, "weight"], parts[3][len(layers) - 1, "weight"], want[0, "weight"]
assert torch.allclose(one + other, right, rtol=0, atol=1e-15)  # added up, they are right
print(f"rank 0's alone is off by {(one - right).norm() / right.norm():.0%} in the first batch")

# %% [markdown]
# ## Split the backward: what I and W are
#
# For a linear layer $y = x w$ a backward is two products, and nothing in one needs the other:
#
# $$\text{I:}\quad dx = dy\, w^T \qquad\qquad \text{W:}\quad dw = x^T dy$$
#
# Each has as many FLOPs as the forward: hence B = 2 F. I needs the weights and not $x$; W needs $x$ and $dy$, which are
# kept until then.

# %%
x, w, dy = torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[1.0, 0], [2, 1]]), torch.tensor([[1.0, 1], [0, 2]])
dx, dw = dy @ w.T, x.T @ dy
print("dx", dx.int().tolist(), "dw", dw.int().tolist())
auto = torch.autograd.grad(x.requires_grad_() @ w.requires_grad_(), (x, w), dy)
assert torch.equal(auto[0], dx) and torch.equal(auto[1], dw)

# %% [markdown]
# `train_batch` splits any module like this: I walks the graph from output to input and keeps the gradient of each layer's
# output; W goes from there to the layer's weights. Nothing is computed twice.
#
# **Predict.** In our GPT, which is larger, I or W?
#
# <details><summary>Answer</summary>
#
# I. Attention multiplies queries with keys, and scores with values. There are no weights in these products, so all of
# their backward is I. Below, in FLOPs:
#
# </details>

# %%
from torch.utils.flop_counter import FlopCounterMode

def flops_by_kind(rule):
    trace = run(partial(step, rule(p, m)), Mesh(pp=p), cluster="h100").trace  # this clock counts FLOPs
    found = {}
    for event in trace.select(kind="compute").events:
        if event.where.startswith("stage"):  # an action: "F3" of "stage 1"
            found[event.op[0]] = found.get(event.op[0], 0) + event.flops
    return found

def products(rule):  # FLOPs of matrix products only, in a whole batch on one rank
    with FlopCounterMode(display=False) as counter:
        step(rule(1, m))
    return counter.get_total_flops()

split, whole = flops_by_kind(zb_h1), flops_by_kind(one_f_one_b)
print(f"B is {whole['B'] / whole['F']:.1f} F; of B, I is {split['I'] / whole['B']:.0%} and W {split['W'] / whole['B']:.0%}")
assert split["I"] > split["W"] and np.isclose(split["I"] + split["W"], whole["B"], rtol=0.01)
# nothing is computed twice: torch's own counter sees the same products in both
assert run(partial(products, zb_h1), Mesh(pp=1)).per_rank == run(partial(products, one_f_one_b), Mesh(pp=1)).per_rank

# %% [markdown]
# ## See it run
#
# `costs=` says how long actions take on the clock that counts steps. With F = I = W = 1, and messages that take their link
# for one step each (`links="queue"`: the next one waits for the link), every action of the real run must stand where the
# simulation of lab 10 puts it.

# %%
schedule, queue = zb_h1(p, m), Costs(message_bytes=1, bandwidth=1, links="queue")
stepped = run(partial(step, schedule, costs=queue), Mesh(pp=p)).trace
promised = simulate(schedule, queue)
on_paper = compare(schedule, stepped, queue)
assert on_paper.residual == 0 and not on_paper.lag.any()  # not one action is late
timeline(stepped, predicted=promised)

# %% [markdown]
# ## Measured over predicted
#
# Now in seconds. `clock="measured"` times what each rank computes, here, on this machine. (Simulated ranks take turns, and
# each has a clock of its own; messages are modelled. With `on="processes"` they would be real.) Stages are made once. The
# first batch warms up; of three more, the quickest is shown.

# %% tags=["nbval-ignore-output"]
stages = run(partial(stages_of, layers, schedule), Mesh(pp=p)).per_rank

def four_batches():
    for _ in range(4):
        train_batch(schedule, stages[axis_index("pp")], batch, cross_entropy)

measured = run(four_batches, Mesh(pp=p), clock="measured").trace
beside = min((compare(schedule, measured, batch=k) for k in (1, 2, 3)), key=lambda one: one.makespan)
timeline(measured, predicted=beside)

# %% [markdown]
# How long each action takes is not predicted here: that was measured, and put into the costs. Predicted is when each can
# begin. What is left over, the **residual**, is what the simulation does not know of.
#
# **Predict.** Suppose that every F took the average F, every I the average I, every W the average W. Would the step be
# over sooner or later than it was?
#
# <details><summary>Answer</summary>
#
# Sooner, as a rule. No two runs of an action take the same time, and stages are not alike: the last has the head and the
# loss. All wait for whichever is slowest at that moment.
#
# </details>

# %% tags=["nbval-ignore-output"]
costs = measured_costs(schedule, measured, batch=beside.batch)
means = [float(np.mean(cost)) for cost in (costs.forward, costs.input_grad, costs.weight_grad)]
average = Costs(*means, costs.transfer, unit="s")
for name, seconds in [
    ("predicted, with the averages", simulate(schedule, average).makespan),
    ("predicted, each action's own time", beside.predicted.makespan), ("measured", beside.makespan),
]:
    print(f"{name:35} {1e3 * seconds:6.1f} ms")

# %% [markdown]
# The residual is time between actions: the worker posts messages, and adds up the gradients of the shared matrix (grey
# above). So no run is quicker than predicted:

# %%
assert beside.residual >= -1e-9 * beside.makespan
assert np.isclose(beside.predicted.busy.sum(), beside.busy.sum())  # the same work; only its place in time is predicted

# %% [markdown]
# ## The same in JAX
#
# The import is the switch; what torch adds to `.grad`, JAX returns. A JAX layer is an object with `init` and a call. These
# begin with the weights of torch's modules, so that there is one right answer for both.

# %%
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import tplab.jax as tj
from tplab import P

jax.config.update("jax_enable_x64", True)

@dataclass(frozen=True)
class Layer:
    function: Callable
    weights: dict = field(compare=False)  # two layers are one program if they have one function

    def init(self, key):
        return self.weights

    def __call__(self, w, x):
        return self.function(w, x)

def weights_of(modules):
    return [{name.removeprefix("layer."): w.detach().numpy() for name, w in one.named_parameters()} for one in modules]

def in_jax(layers_of, schedule, loss, weights, inputs, targets, **options):  # inputs [microbatches, ...]
    def program(weights, inputs, targets):
        stages = tj.stages_of(layers_of(weights), schedule)
        return tj.train_batch(schedule, stages, list(zip(inputs, targets)), loss, **options)

    return tj.run(program, Mesh(pp=p), weights, inputs, targets, out_specs=(P(), P("pp")))

# %% [markdown]
# What truly differs: in torch each rank walks its own row, as fast as messages come. tplab's JAX executor is *one* program
# for all: a loop over the schedule's ticks. In each, a rank does what the table has for it; then all exchange messages. A
# tick is over when its slowest rank is: **lock-step**.
#
# **Predict.** In lock-step GPipe takes 33, 1F1B 40, ZB-H1 27 (lab 10; messages free). Which is best when an exchange takes
# as long as a forward?
#
# <details><summary>Answer</summary>
#
# ZB-H1 and GPipe, by a hair: 52 and 53. ZB-H1 gains by equal actions and loses by more of them: 27 ticks and not 22, with
# an exchange after each in which anybody has something to send.
#
# </details>

# %% [markdown]
# The trace of a JAX program is that of what was traced, so shapes will do: nothing is compiled here.

# %%
def jax_stage(w, x):
    return jnp.tanh(x @ w["0.weight"].T + w["0.bias"])

def small(weights):
    return [Layer(jax_stage, w) for w in weights]

shape = jax.ShapeDtypeStruct((m, 2, 4), np.float64)  # of inputs and targets
shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), weights_of(map(my_stage, range(p)))), shape, shape
for rule in (gpipe, one_f_one_b, zb_h1):
    trace = in_jax(small, rule(p, m), lambda y, t: ((y - t) ** 2).mean(), *shapes, costs=Costs()).trace
    paper = simulate(rule(p, m), lockstep=True)
    exchanged = simulate(rule(p, m), Costs(transfer=1), lockstep=True)  # the run's clock counts an exchange as a step
    in_lockstep = compare(exchanged, trace)
    assert in_lockstep.residual == 0 and not in_lockstep.lag.any()
    print(f"{rule.__name__:12} messages free {paper.makespan:g}, with exchanges {in_lockstep.makespan:g}")
    assert (paper.makespan, in_lockstep.makespan) == {gpipe: (33, 53), one_f_one_b: (40, 61), zb_h1: (27, 52)}[rule]
    if rule is one_f_one_b:
        shown = timeline(trace, predicted=in_lockstep)
assert sum(any(a and a.kind == "B" for a in tick) for tick in one_f_one_b(p, m).by_tick()) == 18
shown

# %% [markdown]
# So in lock-step choose differently: ranks in one phase, or actions of one length, and few ticks where exchanges are slow.
#
# And the GPT. Its parts in JAX, with the names that torch gives the weights:

# %%
def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

def norm(w, x, name=""):
    return jax.nn.standardize(x, epsilon=1e-5) * w[f"{name}weight"] + w[f"{name}bias"]

def block(w, x):
    h = norm(w, x, "norm_1.")
    q, k, v = (linear(w, f"attention.{name}", h).reshape(*x.shape[:2], 4, -1) for name in ("query", "key", "value"))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
    shares = jax.nn.softmax(jnp.where(jnp.tri(S, dtype=bool), scores, -jnp.inf))
    x = x + linear(w, "attention.output", jnp.einsum("bhst,bthd->bshd", shares, v).reshape(x.shape))
    return x + linear(w, "mlp.down", jax.nn.gelu(linear(w, "mlp.up", norm(w, x, "norm_2."))))

def jax_cross_entropy(logits, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()

# %% [markdown]
# Eight stages, two a rank, a layer each. Stages of the same layers share one compiled branch, as the four blocks do. Shapes
# may differ: what a rank holds is packed into one flat array, for one program for all wants one shape for all.

# %%
def gpt(weights):
    words, positions, *blocks, last, head = weights
    return [TiedSpec("words", Layer, lambda w, ids: w["weight"][ids], words), Layer(lambda w, x: x + w["weight"], positions),
            *[Layer(block, w) for w in blocks], Layer(norm, last),
            TiedSpec("words", Layer, lambda w, x: x @ w["weight"].T, head)]

model = run(lambda: stages_of(layers, naive(ranks=1))[0], Mesh(pp=1)).per_rank[0]
sides = [torch.stack(side).numpy() for side in zip(*batch)]
loss, grads = in_jax(gpt, interleaved_1f1b(p, m), jax_cross_entropy, weights_of(model), *sides).value
assert np.isclose(loss, want_loss, rtol=1e-12)
for (layer, name), grad in want.items():  # a layer each: layer n is all of stage n
    assert np.allclose(grads[layer][0][name], grad, rtol=1e-12, atol=1e-14)
print(len(want), "gradients of JAX equal torch's")

# %% [markdown]
# ## Two pipelines side by side
#
# Four ranks can also be two pipelines of two stages. Each takes half of the microbatches, and stage by stage the gradients
# are averaged over `dp`.

# %%
def two_pipelines():
    schedule = one_f_one_b(2, m // 2)
    stages, mine = stages_of(layers, schedule), batch[axis_index("dp") :: 2]
    return train_batch(schedule, stages, mine, cross_entropy, data_axis="dp"), gradients(stages)

side_by_side = run(two_pipelines, Mesh(dp=2, pp=2))
assert apart(side_by_side.per_rank) < 1e-12
along = {axis: side_by_side.trace.bytes_sent(axis=axis) for axis in ("dp", "pp")}
num_parameters = sum(grad.numel() for grad in want.values())  # the tied matrix twice
assert along["dp"] == 8 * 2 * (num_parameters + 2)  # each gradient all-reduced by 2 ranks, and a loss in each stage
print(f"gradients, along dp: {along['dp']:,} bytes; activations and theirs, along pp: {along['pp']:,}")

# %% [markdown]
# ## Turn the knob: how many microbatches?
#
# Lab 10 says: the more, the smaller the bubble. Here are four transformer blocks, 1,024 wide, one on each of four modelled
# H100s; the batch is 16 sequences of 1,024 tokens, cut into more and more microbatches. (Tensors without numbers: on this
# clock sizes are all that counts.) Which number is best? Guess first.

# %%
wide = GPTConfig(32000, 1024, num_layers=4, num_heads=16, context=1024)

def wide_block():
    with torch.device("meta"):
        return PlainBlock(wide).bfloat16()

def on_h100(num):
    def program(x):  # [microbatches, sequences, tokens, width]
        stages = stages_of([LayerSpec(wide_block)] * p, one_f_one_b(p, num))
        return train_batch(one_f_one_b(p, num), stages, [(part, part) for part in x], F.mse_loss)

    x = torch.empty(num, 16 // num, 1024, 1024, dtype=torch.bfloat16, device="meta")
    return compare(one_f_one_b(p, num), run(program, Mesh(pp=p), x, cluster="h100", device="meta").trace)

def bars(num, one):
    computing, alone = one.busy.sum() / p, steps[1].busy.sum()
    here = {"computing": computing, "idle": one.makespan - computing}
    rows = [Row("one rank", {"computing": alone}), Row("four ranks", here, f"{alone / one.makespan:.2f} x as fast")]
    return Bars(rows, f"{16 // num} sequences a microbatch: {100 * here['idle'] / one.makespan:.0f} % of the time is idle.")

steps = {num: on_h100(num) for num in (1, 2, 4, 8, 16)}
knob("One batch on four ranks", "microbatches", {num: bars(num, one) for num, one in steps.items()}, start=4,
     about="modelled · H100")  # fmt: skip

# %% [markdown]
# <details><summary>What is there to find</summary>
#
# Eight. From 8 to 16 the bubble still shrinks, and the step gets longer: every rank launches twice as many operations, each
# half as large, and adds up twice as many gradients. The formula $(p-1)/(m+p-1)$ is nearly right about the bubble. It says
# nothing about the rest.
#
# </details>

# %%
times = [one.makespan for one in steps.values()]
idle = [1 - one.busy.sum() / p / one.makespan for one in steps.values()]
assert idle == sorted(idle, reverse=True)  # always less idle
assert min(times) == times[3] < times[4]  # and yet 16 is slower than 8
for num, share in zip(steps, idle):
    print(f"{num:2} microbatches: {1e3 * steps[num].makespan:4.1f} ms, idle {share:.0%}, by the formula {(p - 1) / (num + p - 1):.0%}")
    assert np.isclose(share, (p - 1) / (num + p - 1), atol=0.02)  # the formula of lab 10

# %% [markdown]
# ## What it costs
#
# $m$ microbatches of $b$ sequences of $S$ tokens, $D$ wide; $p$ ranks, $v$ stages a rank. Numbers sent in one batch:
#
# | what | how much |
# |---|---|
# | an activation or a gradient over one cut | $bSD$ |
# | all $pv - 1$ cuts, there and back | $2m(pv - 1)\,bSD$ |
# | in a V: its middle cut lies within a rank | $2m(2p - 2)\,bSD$ |
# | the tied matrix; in a V one rank has both copies | $2VD$; 0 |
# | the loss, an all_reduce of one number | $2(p - 1)$ |
# | to compare: one block, tensor-parallel over $p$ ranks | $8m(p-1)\,bSD$ |

# %%
from tplab.cost import bytes_sent

b, itemsize = 2, 8  # sequences a microbatch; float64
for rule, cuts, ties in [(gpipe, p - 1, 2), (zb_h1, p - 1, 2), (interleaved_1f1b, 2 * p - 1, 2), (zb_v, 2 * p - 2, 0)]:
    assert sent[rule] == (2 * m * cuts * b * S * D + ties * V * D + 2 * (p - 1)) * itemsize  # as counted above

reduced = sum(bytes_sent("all_reduce", b * S * D, itemsize, p, rank) for rank in range(p))
assert 4 * 4 * m * reduced == 16 * (2 * m * (p - 1) * b * S * D * itemsize)  # four blocks, four all_reduces each

# %% [markdown]
# Four blocks under tensor parallelism would send 16 times what three cuts do. That is why pipelines go *between* nodes,
# where links are slow, and tensor parallelism stays within one.
#
# ## A bug to repair: a deadlock
#
# When a message takes as long as a forward, 1F1B takes 49 steps where GPipe takes 39 (lab 10). More forwards ahead would
# hide the messages. Somebody doubled their number, on all ranks but the first: that one holds the most already.

# %%
def ahead(rank, ranks):  # forwards before the first pair of forward and backward
    if rank == 0:
        return ranks - 1
    return 2 * (ranks - 1 - rank)

# %%
from tplab.errors import DeadlockError
from tplab.exercises.run_a_pipeline import check_ahead, running_ahead

stuck = running_ahead([ahead(rank, p) for rank in range(p)], m)
try:
    run(partial(on_rank, train, stuck), Mesh(pp=p))
except DeadlockError as error:
    print(*(line.split(" at ")[0] for line in str(error).splitlines()[:-1]), sep="\n")  # and at which line, which differs
else:
    print("ran through")

# %% [markdown]
# On a real cluster nothing is printed: it hangs, until somebody's timeout ends it. Simulated ranks see at once that none can
# go on, and where each waits. `train_batch` would not have begun: it checks its schedule. The check below says who waits for
# whom. Mend `ahead`, and run from there again:

# %%
check_ahead(ahead)

# %% [markdown]
# ## Your turn: a worker that splits its backward
#
# Teach `train` what to do for I and W, so that it runs ZB-H1. Start from a copy. Three things to think about: an I must not
# add to `.grad`, a W must; W needs the graph after I has used it; and who asks for the gradient of the model's input?
# (`torch.autograd.grad(y, x, dy, retain_graph=True)` and `y.backward(dy, inputs=[...])` are of use.)

# %%
def train_split(schedule, stage, microbatches, loss):
    ...

# %%
from tplab.exercises.run_a_pipeline import check_train_split

check_train_split(train_split)

# %% [markdown]
# ## To take away
#
# - A schedule says when, never what: any legal one gives the gradients of plain accumulation, if each loss is divided by
#   $m$ and copies of a shared matrix add up theirs.
# - A run keeps to its schedule, at the speed of its actions: all wait for the slowest stage, and in lock-step for the
#   slowest action of every tick.
# - A pipeline sends little, and waits: for its neighbours, and forever where an order has a cycle. Check it before it runs.

# %% [markdown]
# **Sources.** Huang et al. 2018, [GPipe](https://arxiv.org/abs/1811.06965). Narayanan et al. 2021,
# [Megatron-LM](https://arxiv.org/abs/2104.04473) (pipelines between nodes). Qi et al. 2024,
# [Zero bubble](https://arxiv.org/abs/2401.10241) (I and W). Bruno Magalhães,
# [Pipeline parallelism on DeepSpeed](https://brunomaga.github.io) (a model as a list of layers, `train_batch`).
#
# Next: [12 A pipeline in JAX](12_pipeline_in_jax.ipynb).

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
