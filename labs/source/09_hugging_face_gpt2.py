# %% [markdown]
# # 09 A Hugging Face GPT-2
#
# **How do I shard a model that I did not write, and know that it is right?**
#
# Time: one hour. Prerequisites: [lab 04](04_megatron_block.ipynb) and [lab 06](06_vocabulary.ipynb).
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/09_hugging_face_gpt2.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/09_hugging_face_gpt2.ipynb)
#
# ![A timeline of four ranks, forward and backward through two layers of a GPT-2, with ten sums between them.](images/09_hugging_face_gpt2.png)
#
# *One training step of a GPT-2 from the `transformers` library, sharded over four ranks by a plan of eleven lines. Every
# gradient is that of the whole model. Nothing is downloaded: the model is made from its config.*

# %%
import subprocess
import sys

# On Colab, tplab joins the torch, jax and ipywidgets that are there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("no tplab: see above, then restart the runtime and try again")

# %%
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from tplab import Mesh, P
from tplab.torch import FusedColumn, check_parallel, gpt2_plan, parallelize, run, whole_state
from tplab.widgets import timeline

# %%
def gpt2(layers=2, words=97):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=64, n_head=4, n_positions=64, vocab_size=words,
                        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=None)  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model

ids = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(1))

# %% tags=["opening-picture"]
def step(model, ids):
    parallelize(model, gpt2_plan(model))
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss

sharded = run(step, Mesh(tp=4), gpt2(), ids, cluster="h100")
timeline(sharded.trace)

# %% [markdown]
# ## By hand: three matrices in one
#
# GPT-2 has query, key and value in *one* matrix, `c_attn`, side by side. Give two ranks a half each, and see what they
# get. `q0` is the first head's query:

# %%
columns = np.array(["q0", "q1", "k0", "k1", "v0", "v1"])
halves = np.split(columns, 2)
print("cut in one piece:   ", *halves)
in_parts = [np.concatenate([part[rank : rank + 1] for part in np.split(columns, 3)]) for rank in range(2)]
print("each part by itself:", *in_parts)
assert in_parts[0].tolist() == ["q0", "k0", "v0"]

# %% [markdown]
# Rank 0 would have both queries and one key: shapes fit, nothing complains, and no head is whole. A layer of this kind
# is a `FusedColumn(3)`. (It is also a `Conv1D`, which stores its weight as [in, out], the transpose of `nn.Linear`'s:
# its columns are dim 1.)
#
# ## A plan
#
# A plan says what becomes of each module that has parameters; `*` is any block. "column" and "row" are layers of lab 04,
# "vocab" shares out words as in lab 06, "replicate" leaves copies. "local" is a dropout among sharded activations: a mask
# of each rank's own.

# %%
plan = gpt2_plan(gpt2())
for name, kind in plan.items():
    print(f"{name:34} {kind}")
assert plan["transformer.h.*.attn.c_attn"] == FusedColumn(3)

# %% [markdown]
# `parallelize(model, plan)` swaps those modules for ones that hold this rank's piece of the same weights. The model's own
# `forward`, its loss and its `generate` stay as they are. Attention gets told how many heads it has left.
#
# **Predict.** Two layers, forward and backward. How many all_reduces?
#
# <details><summary>Answer</summary>
#
# Ten. Four a layer: two forward (after attention, after the MLP), two backward (before them). One forward after the
# embedding, one backward before the head. And one all_gather, of the logits, for a loss that wants them whole.
#
# </details>

# %%
def counts(trace):
    kinds = [event.op for event in trace.select(rank=0).events if event.kind == "collective"]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

for layers in (1, 2, 3):
    found = counts(run(step, Mesh(tp=4), gpt2(layers), ids).trace)
    print(f"L = {layers}: {found}")
    assert found == {"all_gather": 1, "all_reduce": 4 * layers + 2}

# %% [markdown]
# ## Is it right?
#
# Losses that look alike prove nothing: with a wrong gradient a model trains too, for a while. (People ask whether their
# gap is small enough: [Megatron-LM 1736](https://github.com/NVIDIA/Megatron-LM/issues/1736).) `check_parallel` compares
# everything with the whole model: outputs, loss, each gradient, and the parameters after a step, up to the rounding
# that dtype and sizes explain.

# %%
def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)

def by_plan(whole):
    return parallelize(whole, gpt2_plan(whole))

for ranks in (1, 2, 4):
    both = {"inputs": (ids,), "kwargs": {"labels": ids}}
    report = check_parallel(by_plan, gpt2(), **both, mesh=Mesh(tp=ranks), optimizer=adamw)
    print(f"tp = {ranks}: {len(report.rows)} tensors, {len(report.wrong)} wrong")
    assert report.ok

# %% tags=["nbval-ignore-output"]
report

# %% [markdown]
# What it calls rounding is in the last column. (On your machine the last digits may differ.)
#
# ## Train, and take the weights back
#
# `whole_state` puts the pieces together again, under the names they had, bit for bit:

# %%
def there_and_back(model):
    return whole_state(parallelize(model, gpt2_plan(model)))

back = run(there_and_back, Mesh(tp=4), gpt2()).per_rank[0]
assert all(torch.equal(back[name], value) for name, value in gpt2().state_dict().items())
print(len(back), "tensors, the same bits")

# %% [markdown]
# And after five steps of AdamW, sharded and whole:

# %%
def train(model, ids):
    optimizer = adamw(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return model

def train_sharded(model, ids):
    return whole_state(train(parallelize(model, gpt2_plan(model)), ids))

in_pieces = run(train_sharded, Mesh(tp=4), gpt2(), ids).per_rank[0]
in_one = train(gpt2(), ids).state_dict()
assert in_pieces.keys() == in_one.keys()
apart = {name: (in_pieces[name] - in_one[name]).abs().max().item() for name in in_one}
print("equal up to rounding:", max(apart.values()) < 1e-4)
assert max(apart.values()) < 1e-4  # of steps of 1e-3: Adam divides by the gradient's size, also where it is rounding

# %% [markdown]
# ## Generate
#
# Greedy decoding with a cache of keys and values, each rank keeping those of its own heads. Token for token the same, as
# long as all ranks see the same logits:

# %%
def generate(model, ids):
    parallelize(model.eval(), gpt2_plan(model))
    return model.generate(ids[:, :4], attention_mask=torch.ones_like(ids[:, :4]), max_new_tokens=12, do_sample=False,
                          pad_token_id=0)  # fmt: skip

def alone(model, ids):
    return model.eval().generate(ids[:, :4], attention_mask=torch.ones_like(ids[:, :4]), max_new_tokens=12,
                                 do_sample=False, pad_token_id=0)  # fmt: skip

tokens = run(generate, Mesh(tp=4), gpt2(), ids).per_rank
assert all(torch.equal(one, alone(gpt2(), ids)) for one in tokens)
print("the same 12 tokens on", len(tokens), "ranks as on one")

# %% [markdown]
# ## Turn the knob: who needs all the logits?
#
# A loss that wants whole logits gathers tokens × vocabulary numbers. With `gather_logits=False` they stay where they are,
# and the loss is that of [lab 06](06_vocabulary.ipynb): three numbers a token. Take more words:

# %%
def loss_only(model, ids, gather):
    parallelize(model, gpt2_plan(model), gather_logits=gather)
    with torch.no_grad():
        return model(ids, labels=ids).loss

from tplab.widgets import Bars, Row, knob

def bars(words):
    rows, totals = [], {}
    for gather in (True, False):
        trace = run(loss_only, Mesh(tp=4), gpt2(1, words), ids, gather).trace
        logits = trace.bytes_sent(rank=0) - 3 * 2 * 3 * ids.numel() * 64 * 4 // 4  # without the three sums of [2, 16, 64]
        totals[gather] = logits
        rows.append(Row("gathered" if gather else "left in place", {"for the loss": logits}))
    return Bars(rows, f"Gathering sends {totals[True] / totals[False]:.0f} times as many bytes."), totals

sizes = {words: bars(words) for words in (97, 500, 2000, 8000)}
assert len({totals[False] for _, totals in sizes.values()}) == 1  # it does not depend on the vocabulary
knob("Bytes that rank 0 sends for the loss", "words", {words: shown for words, (shown, _) in sizes.items()}, unit="B")

# %% [markdown]
# ## Plans that are refused
#
# What would fail, or worse, run and compute something else, is refused before it runs, with the reason:

# %%
from tplab.errors import PlanError

def refused(mesh, **changes):
    def program(model):
        parallelize(model, {**gpt2_plan(model), **{f"transformer.h.*.{k}": kind for k, kind in changes.items()}})
    try:
        run(program, mesh, gpt2())
    except PlanError as error:
        return str(error)

for said in (
    refused(Mesh(tp=4), **{"attn.c_attn": "column"}),
    refused(Mesh(tp=4), **{"mlp.c_proj": "replicate"}),
    refused(Mesh(tp=4), **{"mlp.c_fcc": "column"}),
    refused(Mesh(tp=3)),
):
    print(said, end="\n\n")
    assert said

# %% [markdown]
# ## The same weights in JAX
#
# `transformers` has no JAX models any more, so the weights move: `gpt2_params` turns a GPT-2's state into parameters of
# tplab's JAX GPT (you built such a block in lab 04), `shard_params` puts the pieces where a mesh wants them.

# %%
import tplab.jax as tj

model = gpt2()
config = tj.gpt2_config(model.config)
network = tj.GPT(config)
params = tj.shard_params(tj.gpt2_params(model.state_dict(), config), network.specs, Mesh(tp=4))
specs = {"in_specs": (network.specs, P()), "out_specs": P(None, None, "tp")}
logits = tj.run(network, Mesh(tp=4), params, ids.numpy(), **specs).value
want = model(ids).logits.detach().numpy()
assert np.allclose(np.asarray(logits)[..., :97], want, atol=1e-4)  # behind the 97 words: padding, up to 100
print("logits", want.shape, "equal")

# %% [markdown]
# What differs: there is no module to change, so nothing can be forgotten in one. The program is a function of parameters,
# and a tree of `P` of the same structure says where each of them lies.

# %% [markdown]
# ## Next to it: DTensor, and jit with shardings
#
# Two others can do this. torch's `parallelize_module` takes a plan as ours and makes tensors that know how they lie
# (`DTensor`). XLA needs no plan: told where the parameters lie, it works out for an *unsharded* program what must be
# sent. The same GPT-2 on four ranks, a step by each, and what rank 0 sends.
#
# **Predict.** Which of the three sends least?

# %%
from functools import partial

import jax
from torch.distributed.tensor.parallel import loss_parallel
from tplab.jax.models.plain import plain_loss
from tplab.torch import GPT, gpt2_state
from tplab.torch.models.dtensor import shard_with_dtensor, whole, with_dtensor
from tplab.torch.models.plain import PlainGPT
from tplab.trace import Traffic, traffic_table

model = gpt2(words=96)
config = tj.gpt2_config(model.config)
state = {name: torch.tensor(array) for name, array in gpt2_state(model.state_dict(), config).items()}
text, targets = ids % 96, ids.roll(-1, 1) % 96

def step_by_tplab(text, targets):
    GPT(config).loss(text, targets).backward()

def step_by_dtensor(mesh):
    sharded = shard_with_dtensor(PlainGPT(config).load(state), mesh, share_input=False)
    with loss_parallel():
        loss = sharded.loss(text, targets)
        loss.backward()
    return whole(loss).item()

loss, by_dtensor = with_dtensor(step_by_dtensor, 4)
assert abs(loss - PlainGPT(config).load(state).loss(text, targets).item()) < 1e-4
params = tj.shard_params(tj.gpt2_params(model.state_dict(), config), tj.GPT(config).specs, Mesh(tp=4))
step_by_jit = jax.jit(jax.value_and_grad(partial(plain_loss, config=config)))
sent = {
    "tplab": Traffic.of_trace(run(step_by_tplab, Mesh(tp=4), text, targets).trace),
    "DTensor": by_dtensor,
    "jit": Traffic.of_compiled(tj.collectives_in(step_by_jit, params, text.numpy(), targets.numpy())),
}
print(traffic_table(sent))
assert sent["tplab"].total.count == 4 * 2 + 2 + 2  # four a layer, embedding and head, two for the loss
assert sent["DTensor"].total.count == 6 * 2 + 2 + 3

# %% [markdown]
# Query, key and value are three layers, and both of the others put $f$ in front of each: three sums backward, where one
# before all three would do. (With `share_input=True`, DTensor is told so, and needs four a layer too.) And the loss sums
# twice what tplab sums at once. Nobody is wrong; the numbers are equal. What is sent follows from where $f$ stands.

# %% [markdown]
# ## What it costs
#
# $L$ layers, $T$ tokens, width $D$, $V$ words, $R$ ranks:
#
# | | a rank |
# |---|---|
# | parameters | $(12 L D^2 + V D)/R$, and what is replicated: norms, positions, some biases |
# | sums, forward and backward | $(4L + 2)$ of $T D$ numbers, of each it sends $2\frac{R-1}{R}$ |
# | for the loss | $T V$ numbers gathered, or $3 T$ summed |

# %%
L, T, D, R = 2, ids.numel(), 64, 4
sums = sharded.trace.bytes_sent(rank=0, op="all_reduce")
assert sums == (4 * L + 2) * 2 * (R - 1) * T * D * 4 // R
held = run(lambda model: sum(p.numel() for p in parallelize(model, gpt2_plan(model)).parameters()), Mesh(tp=R), gpt2())
all_of_it = sum(parameter.numel() for parameter in gpt2().parameters())
print("parameters", all_of_it, "whole,", held.per_rank, "on each rank;", f"{sums:,} bytes of sums")
split, copies = 12 * L * D**2 + 97 * D + 7 * L * D, (64 + 2) * D + 6 * L * D  # positions, norms, two biases a block
assert split + copies == all_of_it and held.per_rank[-1] < split / R + copies <= held.per_rank[0]

# %% [markdown]
# ## A bug to repair
#
# Somebody has written their own row-parallel layer and put it into every MLP. On a new model the loss is not off at all,
# since these biases begin at zero. `check_parallel` gives what is constant other values while it looks. Let it say where
# the mistake begins, and mend the layer. (It is the bug of
# [text-generation-inference 1036](https://github.com/huggingface/text-generation-inference/issues/1036).)

# %%
from torch import nn
from tplab.torch import all_reduce, axis_index, axis_size

class MyRow(nn.Module):
    def __init__(self, given, axis):  # given: a Conv1D, weight [in, out], bias [out]
        super().__init__()
        self.axis = axis
        mine = given.weight.detach().chunk(axis_size(axis))[axis_index(axis)]
        self.weight, self.bias = nn.Parameter(mine.clone()), nn.Parameter(given.bias.detach().clone())

    def forward(self, x):  # x [B, S, in/tp]   ->   [B, S, out]
        return all_reduce(x @ self.weight + self.bias, self.axis)

# %%
from tplab.exercises.hugging_face_gpt2 import check_row

check_row(MyRow)

# %% [markdown]
# ## Your turn: a plan for a Llama
#
# A Llama has `q_proj`, `k_proj`, `v_proj` apart, a gate beside `up_proj`, and a head of its own. Write its plan. Print
# `small_llama()` to see its modules. Everything with parameters must be named; what stays whole is "replicate".

# %%
from tplab.exercises.hugging_face_gpt2 import check_llama_plan, small_llama

def my_plan():
    ...

check_llama_plan(my_plan)

# %% [markdown]
# ## To take away
#
# - A model is sharded from outside by naming which layers are columns, which are rows, and what is fused in them.
# - A plan can be checked before it runs: columns must meet rows, heads must stay whole, tied weights must stay tied.
# - Whether a sharded model is right is a question with an answer: hold every gradient against the whole one.
#
# **Sources.** [Megatron-LM to transformers](https://github.com/huggingface/transformers/issues/10321) (the wish: "GPT2
# would be perfect"). Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053). Radford et al. 2019, GPT-2.
#
# Next: [10 Pipeline schedules](10_pipeline_schedules.ipynb), for when one layer is not what is too large.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
