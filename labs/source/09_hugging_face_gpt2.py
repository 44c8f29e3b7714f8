# %% [markdown]
# # 09 A Hugging Face GPT-2
#
# **How do you shard a model that you did not write, and know that the result is right?**
#
# Prerequisites: [lab 04](04_megatron_block.ipynb), and [lab 06](06_vocabulary.ipynb) for the loss. Time: 50 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/09_hugging_face_gpt2.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/09_hugging_face_gpt2.ipynb)
#
# ![Bars, one for each module of a GPT-2: of most of them, a rank holds a quarter; norms and positions are whole on every rank.](images/09_hugging_face_gpt2.png)
#
# *A plan shards a GPT-2 from the `transformers` library over four ranks. The bars show how many parameters of each
# module one rank holds. Every gradient equals that of the unsharded model. Nothing is downloaded: the model is made from
# its config.*

# %%
import subprocess
import sys

# On Colab, install tplab; torch, jax and ipywidgets are already there.
install = ["pip", "install", "-q", "git+https://github.com/tplab/tplab"]
if "google.colab" in sys.modules and subprocess.run(install).returncode:
    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")

# %%
import re

import numpy as np
import torch
import tplab.torch as tt
from torch import nn
from tplab import Mesh, P
from tplab.widgets import Bars, Row, knob, timeline
from transformers import GPT2Config, GPT2LMHeadModel

# %% [markdown]
# ## By hand: three matrices in one
#
# GPT-2 keeps query, key and value side by side in *one* matrix, `c_attn`.
#
# **Predict.** Cut its columns in the middle, and give one half to each of two ranks. What does rank 0 get?
#
# <details><summary>Answer</summary>
#
# All the queries and half of the keys. Once the attention is set to fewer heads, the shapes fit and no error is raised,
# but no rank has a whole head.
#
# </details>
#
# Here `q0` stands for the query of the first half of the heads:

# %%
columns = np.array(["q0", "q1", "k0", "k1", "v0", "v1"])
print("cut as one matrix:", *np.split(columns, 2))
parts = [np.split(part, 2) for part in np.split(columns, 3)]
by_part = [np.concatenate([part[rank] for part in parts]) for rank in range(2)]
print("cut part by part: ", *by_part)

# %% [markdown]
# So a fused matrix must be cut part by part. (`c_attn` is also a `Conv1D`, which stores its weight as [in, out], the
# transpose of what `nn.Linear` stores.)
#
# ## A plan of your own
#
# This makes a small GPT-2, with two blocks:

# %%
def gpt2(layers=2, width=64, heads=4, vocabulary=97, context=64):
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads}
    sizes |= {"vocab_size": vocabulary, "n_positions": context}
    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    no_ends = {"bos_token_id": 0, "eos_token_id": None}
    gelu = {"activation_function": "gelu_pytorch_tanh"}  # GPT-2's, as one kernel
    model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **no_ends, **gelu))
    model.loss_type = "ForCausalLM"  # otherwise transformers warns that it has none
    return model

ids = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(1))

# %% [markdown]
# Sharding a model from outside means replacing its layers. Start with the MLPs: `c_fc` becomes column-parallel and
# `c_proj` becomes row-parallel. A plan says which layer replaces which module, and `by_own_plan` carries it out:

# %%
class MyColumn(nn.Module):
    def __init__(self, given):  # given: a Conv1D, weight [in, out], bias [out]
        super().__init__()
        R, i = tt.axis_size("tp"), tt.axis_index("tp")
        self.weight = nn.Parameter(given.weight.detach().chunk(R, 1)[i].clone())
        self.bias = nn.Parameter(given.bias.detach().chunk(R)[i].clone())

    def forward(self, x):  # x [B, S, in]   ->   [B, S, out/tp]
        return tt.copy_to(x, "tp") @ self.weight + self.bias

class MyRow(nn.Module):
    def __init__(self, given):
        super().__init__()
        R, i = tt.axis_size("tp"), tt.axis_index("tp")
        self.weight = nn.Parameter(given.weight.detach().chunk(R)[i].clone())
        self.bias = nn.Parameter(given.bias.detach().clone())

    def forward(self, x):  # x [B, S, in/tp]   ->   [B, S, out]
        return tt.reduce_from(x @ self.weight + self.bias, "tp")

PLAN = {"mlp.c_fc": MyColumn, "mlp.c_proj": MyRow}

def by_own_plan(model):
    for name, module in list(model.named_modules()):
        for ending, layer in PLAN.items():
            if name.endswith(ending):
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, layer(module))
    return model

def loss_of(model, ids):
    return by_own_plan(model)(ids, labels=ids).loss.detach()

for mesh in (Mesh(tp=1), Mesh(tp=4)):
    print(f"{mesh}: loss {tt.run(loss_of, mesh, gpt2(), ids, out_specs=P()).value:.5f}")

# %% [markdown]
# The losses agree. Are we done?
#
# ## Is it right?
#
# A loss that looks the same proves little. A model with a wrong gradient also trains for a while, and people then
# [ask](https://github.com/NVIDIA/Megatron-LM/issues/1736) whether their gap is small enough. `check_parallel`
# compares everything with the unsharded model: outputs, loss, every gradient, and the parameters after a step. It
# measures how far rounding alone moves each of them.

# %%
one_batch = {"inputs": (ids,), "kwargs": {"labels": ids}}
mine = tt.check_parallel(by_own_plan, gpt2(), **one_batch, mesh=Mesh(tp=4))
print(mine.summary())
begins = mine.wrong[0]
print(f"\n{begins.title}:\n    {begins.words}")
print("\n" + "\n".join(mine.notes))

# %% [markdown]
# Read it from the top:
#
# - The summary counts what is wrong. Here every gradient is wrong, which says little: one wrong tensor makes everything after it
#   wrong.
# - So the report begins with what explains the rest. Here that is the first module in the forward pass whose output is
#   wrong, and the report names the cause: its bias is added once per rank.
# - If all outputs are right and only gradients are wrong, it begins with the first gradient that the backward pass
#   reaches.
# - The note explains why the loss did not show it: these biases are zero in a new model. For its checks,
#   `check_parallel` replaces constant parameters with other values.
#
# ## A bug to repair
#
# Fix `MyRow` above, run its cell, and then run this one. (The check takes torch layers. It runs whole models, which
# takes some seconds.)

# %% tags=["nbval-ignore-output"]
from tplab.exercises.hugging_face_gpt2 import check_row

check_row(MyRow)

# %% [markdown]
# ## A plan for the whole model
#
# tplab's `parallelize` does the same for whole models. Its plan says what happens to each module that has parameters, and
# `*` stands for any block. "column" and "row" are the layers above, `FusedColumn(parts=3)` cuts three matrices part by
# part, and "replicate" leaves a copy on every rank. "vocab" splits the vocabulary as in lab 06, both for the embedding and
# for the head that is **tied** to it: they are one matrix. "local" is a dropout between $f$ and $g$, where each rank draws
# its own mask ([lab 07](07_dropout.ipynb)). The other dropouts need no line, and draw one mask for all ranks.

# %%
plan = tt.gpt2_plan(gpt2())
for name, kind in plan.items():
    print(f"{name:34} {kind}")

# %% [markdown]
# The model's own `forward`, its loss and its `generate` stay as they are. In each attention module, the number of heads
# becomes what the rank has of them.
#
# Turn the knob: what does a rank hold with fewer ranks, and what never shrinks?

# %% tags=["opening-picture"]
def by_plan(model, **options):
    return tt.parallelize(model, tt.gpt2_plan(model), **options)

def sizes(model):  # of each line of the plan; h.* stands for every block
    found = {}
    for name, parameter in model.named_parameters():
        line = re.sub(r"\.\d+\.", ".*.", name.rpartition(".")[0])
        found[line] = found.get(line, 0) + parameter.numel()
    return found

def bars(ranks):
    whole, plan = sizes(gpt2()), tt.gpt2_plan(gpt2())
    here = tt.run(lambda: sizes(by_plan(gpt2())), Mesh(tp=ranks)).per_rank[0]
    rows = []
    for line, count in here.items():
        label = f"{line.removeprefix('transformer.')}: {plan[line]}"
        held = "a copy on every rank" if plan[line] == "replicate" else "on this rank"
        rows.append(Row(label, {held: count, "on other ranks": whole[line] - count}))
    total = sum(here.values())
    return Bars(rows, f"Rank 0 holds {total:,} of {sum(whole.values()):,} parameters.")

options = {ranks: bars(ranks) for ranks in (1, 2, 4)}
knob("A plan for GPT-2", "ranks", options, start=4, unit="",
     about="parameters; h.* stands for both blocks")

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# What a rank holds of a split module halves when the ranks double. Norms and positions never shrink, and neither do the
# biases of rows, which you can hardly see. In this toy, positions are a large part of the model. In GPT-2 they are 0.8 of
# 124 million parameters.
#
# </details>
#
# **Predict.** The model has two blocks. How many all-reduces does a training step need, forward and backward?
#
# <details><summary>Answer</summary>
#
# Ten. There are four per block: two forward (after the attention and after the MLP) and two backward (before them). The
# embedding adds one in the forward pass, and the head adds one in the backward pass. There is also one `all_gather` of the
# logits, because the model's own loss needs all of them. (With `gather_logits=False` they stay where they are, and the
# loss is that of lab 06.)
#
# </details>

# %%
def step(model, ids, **options):
    by_plan(model, **options)(ids, labels=ids).loss.backward()

for layers in (1, 2, 3):
    trace = tt.run(step, Mesh(tp=4), gpt2(layers), ids).trace
    ops = [event.op for event in trace.select(rank=0, kind="collective").events]
    print(f"{layers} blocks:", {op: ops.count(op) for op in sorted(set(ops))})

# %% [markdown]
# Here are the ten all-reduces in a step of two blocks at the sizes of GPT-2 medium (width 1,024, 50,257 vocabulary
# entries), with eight sequences of 1,024 tokens in bfloat16. The times are a **forecast** for four H100s, from the
# moment when the model has been made and cut. (±6 % is its median error on measured rows that its fit has not seen.) In the
# middle is the `all_gather`, and then every rank computes the loss of all the logits. This takes more time than the
# two blocks.

# %%
def modelled(ranks, sequences, layers, gpu="h100", **options):
    with torch.device("meta"):  # shapes without numbers: the clock needs no more
        model = gpt2(layers, 1024, 16, 50257, 1024).bfloat16()
        ids = torch.empty((sequences, 1024), dtype=torch.long)

    def program(model, ids):
        step(model, ids, **options)

    how = {"cluster": f"{gpu}-measured", "device": "meta"}
    return tt.run(program, Mesh(tp=ranks), model, ids, **how).trace

timeline(modelled(ranks=4, sequences=8, layers=2))

# %% [markdown]
# A plan is checked before anything is changed. If the model would fail, or compute something else, the error says why:

# %%
from tplab.errors import PlanError

def refused(model):
    try:
        tt.parallelize(model, plan | {"transformer.h.*.attn.c_attn": "column"})
    except PlanError as error:
        return str(error)

print(tt.run(refused, Mesh(tp=4), gpt2()).per_rank[0])

# %% [markdown]
# Now we run the check, including one step of AdamW:

# %%
def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)

for mesh in (Mesh(tp=1), Mesh(tp=2), Mesh(tp=4)):
    report = tt.check_parallel(by_plan, gpt2(), **one_batch, mesh=mesh, optimizer=adamw)
    print(f"{mesh}: {len(report.rows)} tensors, {len(report.wrong)} wrong")

# %% tags=["nbval-ignore-output"]
report

# %% [markdown]
# ## Train, and get the weights back
#
# `whole_state` puts the pieces together again under their old names. Here is the state after five steps of training,
# compared with the same five steps of the unsharded model. (`generate` works as well, with the keys and values of a rank's
# own heads in its cache.)

# %%
def train(model, ids):
    optimizer = adamw(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return model

def train_sharded(model, ids):
    return tt.whole_state(train(by_plan(model), ids))

state = tt.run(train_sharded, Mesh(tp=4), gpt2(), ids).per_rank[0]
unsharded = train(gpt2(), ids).state_dict()
apart = max((state[name] - value).abs().max() for name, value in unsharded.items())
print("equal after five steps, up to rounding:", bool(apart < 1e-4))  # a step is 1e-3

# %% [markdown]
# ## What it costs
#
# For $L$ layers, $T$ tokens, width $D$, a vocabulary of $V$ and $R$ ranks, each rank
#
# - holds $(12 L D^2 + V D)/R$ parameters, and a copy of what is replicated: norms, positions, some biases;
# - sends $2\frac{R-1}{R} T D$ numbers for each of the $4L + 2$ all-reduces.

# %%
sharded = tt.run(step, Mesh(tp=4), gpt2(), ids).trace
R, L, T, D = 4, 2, ids.numel(), 64
counted = sharded.bytes_sent(rank=0, op="all_reduce")
formula = (4 * L + 2) * 2 * (R - 1) * T * D * 4 // R  # float32: 4 bytes
print(f"{counted:,} bytes for the all-reduces; by the formula {formula:,}")
per_rank = tt.run(lambda: sum(sizes(by_plan(gpt2())).values()), Mesh(tp=4)).per_rank
print("parameters on each rank:", per_rank)

# %% [markdown]
# The last rank holds less than the others: it has 22 of the 97 vocabulary entries, and they have 25 each.
#
# How long does a step of all 24 blocks of GPT-2 medium take, forward and backward? This time the logits stay where they
# are:

# %%
for ranks, sequences in [(1, 8), (2, 8), (4, 8), (8, 8), (1, 1)]:
    trace = modelled(ranks, sequences, layers=24, gather_logits=False)
    took = f"{1e3 * trace.makespan:4.0f} ms (forecast)"
    print(f"H100s: {ranks}   sequences in total: {sequences}   {took}")

# %% [markdown]
# Is the forecast for one GPU right? (For more GPUs we have no measurement.) MosaicML
# [measured](https://github.com/mosaicml/llm-foundry/blob/061f2c7/scripts/train/benchmarking/README.md) a model of the
# same size, MPT-350m, on eight A100s, each with the whole model and 64 sequences of 1,024 tokens. With the
# optimizer's step, each GPU processed 64,813 tokens per second. Here is our forecast for one of these GPUs, without
# the optimizer:

# %%
trace = modelled(1, 64, layers=24, gpu="a100", gather_logits=False)
per_second = 64 * 1024 / trace.makespan
print(f"A100s: 1   sequences: 64   {per_second:,.0f} tokens/s (forecast)")

# %% [markdown]
# By the forecast, eight GPUs are only 2.3 times as fast as one: their matmuls are small, and they wait for about a
# hundred all-reduces. With Adam, 355 million parameters take 16 bytes each, which fits on one GPU. So it is better to
# give each of eight GPUs one sequence and the whole model. That takes 11 ms instead of 26, and about 3 ms more to add
# up the gradients ([lab 16](16_data_parallel.ipynb)). Shard a model if it does not fit, or if there are fewer sequences
# than GPUs.
#
# ## The same weights in JAX
#
# `transformers` no longer has JAX models, so only the weights move. `gpt2_params` turns the state of a GPT-2 into
# parameters of tplab's JAX GPT, and `shard_params` puts the pieces on the ranks of a mesh.

# %%
import tplab.jax as tj

model = gpt2()
config = tj.gpt2_config(model.config)
network = tj.GPT(config)
params = tj.gpt2_params(model.state_dict(), config)
params = tj.shard_params(params, network.specs, Mesh(tp=4))
specs = {"in_specs": (network.specs, P()), "out_specs": P(None, None, "tp")}
logits = tj.run(network, Mesh(tp=4), params, ids.numpy(), **specs).value
want = model(ids).logits.detach().numpy()
in_jax = np.asarray(logits)[..., :97]  # without the padding, which makes it 100 entries
print("logits:", "equal" if np.allclose(in_jax, want, atol=1e-4) else "off")

# %% [markdown]
# **What truly differs.** There is no module to change, so you cannot forget one. The program is a function of its
# parameters, and a tree of `P` with the same structure says how each of them is split.

# %% [markdown]
# ## Your turn: a plan for a Llama
#
# The Llama of this exercise differs from GPT-2 in three ways that matter here. Its head is not tied. (In some Llamas it
# is.) Its MLP, a **SwiGLU**, begins with two separate matrices, `gate_proj` and `up_proj`, and multiplies their results
# number by number: $\mathrm{silu}(xG) \odot xU$. And `q_proj`, `k_proj` and `v_proj` are separate, with **grouped
# queries**: several query heads share one key-value head.
#
# **Predict.** `small_llama()` has eight query heads and four key-value heads. Which heads does each of four ranks get? What
# would happen on eight ranks?
#
# <details><summary>Answer</summary>
#
# Each of four ranks gets two query heads, and the key-value head that these two share. Eight ranks would get half a
# key-value head each, and `parallelize` refuses.
# [vLLM](https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/layers/linear.py) copies heads in that case, so
# that two ranks hold the same one.
#
# </details>
#
# Write the plan. Print `small_llama()` to see its modules. Every module with parameters needs a line. A module that
# every rank should have whole is "replicate", but do not replicate a matrix.

# %%
from tplab.exercises.hugging_face_gpt2 import check_llama_plan, small_llama

def my_plan():
    ...

check_llama_plan(my_plan)

# %% [markdown]
# ## On Monday
#
# | here | transformers | torch | Megatron-LM | JAX |
# |---|---|---|---|---|
# | `parallelize(model, plan)` | `from_pretrained(..., distributed_config=DistributedConfig(tp_size=4))` | `parallelize_module(model, mesh, plan)` | layers written as parallel ones | a tree of `P` |
# | "column", "row" | "colwise", "rowwise" | `ColwiseParallel()`, `RowwiseParallel()` | `ColumnParallelLinear`, `RowParallelLinear` | `P(None, "tp")`, `P("tp", None)` |
# | `whole_state` | `save_pretrained` | `get_model_state_dict`, `full_tensor()` | `dist_checkpointing` | `jax.device_get` |
#
# ## To take away
#
# - You can shard a model from outside by naming which layers are split by columns, which by rows, and which are fused.
# - A plan can be checked before it runs: columns must meet rows, heads must stay whole, and tied weights must stay
#   tied.
# - Compare every gradient with the unsharded model. A loss that agrees proves little.
#
# **Sources.** Shoeybi et al. 2019, [Megatron-LM](https://arxiv.org/abs/1909.08053). [Megatron-LM to
# transformers](https://github.com/huggingface/transformers/issues/10321), an issue that asks for this. Radford et al.
# 2019, [GPT-2](https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf).
#
# Next: [10 Pipeline schedules](10_pipeline_schedules.ipynb), for models that have too many layers for one rank.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
