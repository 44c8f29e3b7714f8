# %% [markdown]
# # 23 Balance of experts
#
# **Half of the experts do next to nothing. What did the router learn, and who pays?**
#
# Prerequisites: experts on ranks from [lab 22](22_experts_on_ranks.ipynb). Time: 50 minutes.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tplab/tplab/blob/main/labs/23_balance_of_experts.ipynb) [![Open on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/tplab/tplab/main?urlpath=lab/tree/labs/23_balance_of_experts.ipynb)
#
# ![Four ranks with two experts each. Most rows go to two of the ranks, and the other two wait.](images/23_balance_of_experts.png)
#
# *Four ranks share eight experts. The router is untrained, and its tokens have much in common, so it sends most of them to the
# same few experts. One expert gets nothing. After some training without a remedy, half of them will get next to nothing. On the left you see
# the rows of each rank, in the middle what each expert computes, and on the right the time of each rank. Hover over anything to
# see its numbers.*

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
from tplab.experts import Routing, balanced, contiguous
from tplab.widgets import Bars, Row, experts, knob

# %% tags=["opening-picture"]
EXPERTS, K, D, RANKS = 8, 2, 16, 4
RULE, SPLIT, MESH = Routing(EXPERTS, K), P("ep"), Mesh(ep=RANKS)
torch.manual_seed(0)
topics = torch.randn(EXPERTS, D)  # each token is about one of eight topics,
common = 2 * torch.randn(D)  # and all tokens have this in common

def tokens(count, seed):  # ->   x [count, D], and the topic of each token
    rng = torch.Generator().manual_seed(seed)
    topic = torch.randint(EXPERTS, (count,), generator=rng).sort().values
    return topics[topic] + 0.3 * torch.randn(count, D, generator=rng) + common, topic

def layer(x):
    model = tt.MixtureOfExperts(D, 1024, RULE, "ep")
    return model(x)[1].choices  # what the router chose

specs = {"in_specs": SPLIT, "out_specs": SPLIT, "cluster": "laptop"}
out = tt.run(layer, MESH, tokens(1024, 0)[0], **specs)
experts(out.trace, out.value)

# %% [markdown]
# The times are modelled, for four cores of a laptop. On such a slow chip, the experts of this small layer take a visible time.
#
# ## By hand: who pays?
#
# The results of all experts must be back before the next layer can begin. So a layer takes as long as its busiest rank.
#
# **Predict.** Four ranks have one expert each, and 16 rows arrive: 9, 3, 2 and 2. How much longer do the experts compute than with
# equal loads? What fraction of the ranks' time is lost?
#
# <details><summary>Answer</summary>
#
# With equal loads each rank has 4 rows. Now the busiest has 9, so the experts take 9/4 = 2.25 times as long. The four ranks have time
# for 36 rows, and compute 16. So 56% of their time is lost.
#
# </details>
#
# ## Turn the knob: skew
#
# Here we choose the experts ourselves. Expert $e$ is chosen with a probability in proportion to $(e+1)^{-s}$, where $s$ is the skew.
# The layer is run for each $s$, and the bars are read from its trace.
#
# **Predict.** At which skew does the layer take twice as long as at 0?

# %%
def drawn(skew):  # ->   choices [1024, K], different experts for each token
    likely = torch.arange(1, EXPERTS + 1) ** -float(skew)
    rng = torch.Generator().manual_seed(1)
    return torch.multinomial(likely.expand(1024, -1), K, generator=rng)

def follow(x, choices):
    tt.MixtureOfExperts(D, 1024, RULE, "ep")(x, choices)

def bars(skew):
    x, choices = tokens(1024, 0)[0], drawn(skew)
    run = tt.run(follow, MESH, x, choices, in_specs=SPLIT, cluster="laptop")
    (seen,) = experts(run.trace, choices).layers  # what the picture above shows
    rows = []
    for rank, spent in enumerate(seen.spent):
        parts = {"dispatch": spent.arrived - spent.begin, "computing": spent.computing}
        parts |= {"waiting": spent.waits, "combine": spent.end - spent.met}
        rows.append(Row(f"rank {rank}", parts))
    return Bars(rows, f"Rows by expert: {seen.loads.sum(0).tolist()}.")

options = {skew: bars(skew) for skew in (0.0, 0.5, 1.0, 1.5, 2.0)}
unit = {"about": "modelled, laptop", "unit": "s"}
knob("Time of one layer", "skew", options, start=1.0, **unit)

# %% [markdown]
# <details><summary>What there is to discover</summary>
#
# It takes twice as long at a skew of about 1.5. All bars are equally long, because the other ranks wait for rank 0, which has the two most popular experts. A token
# chooses two different experts, so no expert ever has more than half of all rows. With top 1, one expert could have them all.
#
# </details>

# %%
for skew, shown in options.items():
    waits = sum(row.parts["waiting"] for row in shown.rows)
    waits /= sum(row.total for row in shown.rows)
    print(f"skew {skew}: {shown.rows[0].total * 1e3:.2f} ms, {waits:.0%} waiting")

# %% [markdown]
# **Measured.** NVIDIA's [aiconfigurator](https://github.com/ai-dynamo/aiconfigurator) (commit 095f58a, Apache-2.0) has timed the expert
# kernels of one H100 where four share the experts, with the sizes of Mixtral 8x7B (8 experts, top 2) and 12,288 tokens in bfloat16. With equal loads
# (`balanced` in its table for vLLM's Triton kernels) they take 5.35 ms. With loads drawn from a power law (`power_law_1.2`), the
# busiest of the four takes 9.99 ms. These times contain no exchange between GPUs. We have found no published timings of whole
# training steps at different skews.

# %%
print(f"{9.9899 / 5.3489:.2f} times as long")

# %% [markdown]
# ## A limit: capacity
#
# One way to bound the time is to drop the excess. With a capacity of 1.0, an expert takes only as many of a rank's tokens as
# it would get if all experts were chosen equally often. Further choices of it are dropped: these tokens do without it.
#
# **Predict.** Our untrained router favours a few experts. What fraction of its choices is dropped at 1.0?
#
# <details><summary>Answer</summary>
#
# About half. The layer becomes faster because it does less. And the router has no reason to choose better, because nothing in its
# loss says that all experts should be used.
#
# </details>

# %%
def bounded(x, routing):
    return tt.MixtureOfExperts(D, 1024, routing, "ep")(x)[1].choices

given = {**specs, "in_specs": (SPLIT, None)}
for capacity in (None, 2.0, 1.5, 1.0):
    routing = Routing(EXPERTS, K, capacity=capacity)
    run = tt.run(bounded, MESH, tokens(1024, 0)[0], routing, **given)
    (seen,) = experts(run.trace, run.value).layers
    seconds = max(spent.end - spent.begin for spent in seen.spent)
    lost = sum(seen.dropped) / 2048
    print(f"capacity {capacity}: {seconds * 1e3:.2f} ms, {lost:.0%} of choices dropped")

# %% [markdown]
# ## What does the router learn?
#
# Now we train a small layer. Each topic has a matrix of its own in `maps`. The layer has to learn to take off what all tokens have
# in common, and to multiply the rest of each token by the matrix of its topic. The tokens are sorted, so each rank has about two of the
# eight topics. In practice, one rank may get code while another gets French.

# %%
maps = torch.randn(EXPERTS, D, D) / D**0.5
data = [tokens(256, seed) for seed in range(120)]  # one batch per step
xs = torch.stack([x for x, _ in data], 1).double()  # [256, steps, D]
topic = torch.stack([topic for _, topic in data], 1)
ys = torch.einsum("tnd,tnde->tne", xs - common, maps[topic].double())

def train(over=None, rule=None):  # ->   loads [ranks, steps, E], losses [steps]
    def program(xs, ys):
        model = tt.MixtureOfExperts(D, 32, RULE, "ep").double()
        adam = torch.optim.Adam(model.parameters(), lr=3e-3)
        counted = "ep" if over == "global" else None  # along which ranks
        loads, losses = [], []
        for x, y in zip(xs.unbind(1), ys.unbind(1)):
            out, routed = model(x)
            loss = task = (out - y).square().mean()
            if over:  # a second loss, which the next section explains
                loss = task + 0.1 * tt.balance_loss(routed, over=over, axis=counted)
            adam.zero_grad()
            loss.backward()
            tt.average_gradients(model, "ep")  # as in the bug of lab 22, repaired
            adam.step()
            loads.append(tt.chosen_counts(routed))  # of this rank's tokens
            counts = tt.all_reduce(loads[-1], "ep")
            if rule and (new := rule(model.router.bias, counts, 0.02)) is not None:
                model.router.bias = new
            losses.append(tt.all_reduce(task.detach(), "ep", "mean"))
        return torch.stack(loads)[None], torch.stack(losses)

    both = {"in_specs": SPLIT, "out_specs": (SPLIT, P())}
    return tt.run(program, MESH, xs, ys, keep_values=0, **both).value

def report(name, result):
    loads, losses = result
    last = loads[:, -20:].double().mean(1)  # [ranks, E]
    used = (last > 0.05 * last.sum(1, keepdim=True)).sum(1).double().mean()
    print(f"{name}: loss {losses[-20:].mean():.3f}, a rank uses {used:.1f} experts")
    print("    rows by expert", last.sum(0).round().int().tolist())

plain = train()
report("no balance", plain)

# %% [markdown]
# These are rounded means of the last 20 of 120 steps. A rank uses an expert if more than 5% of the rank's choices fall on it. Half of the experts
# get no rows, or hardly any. An expert that is not chosen gets no gradient. So it does not learn, and does not become worth choosing.
#
# ## A loss that balances
#
# The usual remedy is a second loss, $E \sum_e f_e\,p_e$, where $f_e$ is the fraction of choices that fall on expert $e$, and $p_e$ is its
# mean score (a softmax: the scores of a token add up to 1). It is 1 if all experts are chosen equally often (but that is not its minimum). Over which tokens do we
# count $f_e$: over those of this rank (its *microbatch*), or over those of all ranks (the *global* batch)?
#
# **Predict.** With which does the layer learn more?
#
# <details><summary>Answer</summary>
#
# The global loss. The microbatch loss asks every rank to use all eight experts for its two topics, so experts can hardly specialise.
# The global loss only asks that all ranks together use them equally. It needs one all-reduce of 8 counts.
#
# </details>

# %%
report("microbatch", train("microbatch"))
report("global", train("global"))

# %% [markdown]
# With the seeds 0 to 19, the global loss always gave the lowest task loss of the three. With the microbatch loss, the layer
# learned less than without any balance in 15. With a factor of 0.01, as in Switch Transformers, and not the 0.1 of `train`, it
# learned more than without in 19, but the fullest expert had 82 to 170 rows, not 65 to 84.

# %% [markdown]
# ## A bias
#
# DeepSeek-V3 adds a bias $b_e$ to each expert's score when experts are **chosen**. The **weights** of their results come from the
# scores without it. After each step, the bias of an expert that was chosen more often than the mean falls by a fixed amount, the
# `rate`, and that of an expert chosen less often rises by it. (Its scores are sigmoids, and it also has a balance loss over each
# sequence, with a factor of 0.0001.)
#
# **Your turn.** Write the rule. `counts` are the choices of all ranks, as whole numbers. DeepSeek-V3 was trained with a rate of 0.001
# (and 0 at the end). Our training is short, so we take 0.02.

# %%
def update(bias, counts, rate):  # bias [E], counts [E]   ->   the next bias [E]
    ...

# %%
from tplab.exercises.balance_of_experts import check_update

check_update(update)

# %% [markdown]
# Here the layer is trained with your rule, and without a second loss. Until you have written the rule, the bias stays at 0, and
# this is the router without balance.

# %%
report("your rule", train(rule=update))

# %% [markdown]
# tplab has this rule as `tt.balanced_bias`. Here is the largest load of an expert over time. An equal share is 64 rows:

# %%
with_bias = train(rule=tt.balanced_bias)
for step in (0, 5, 10, 20, 40, 80, 119):
    print(f"step {step:>3}: at most {with_bias[0].sum(0)[step].max():>3} rows")
report("bias", with_bias)

# %% [markdown]
# Each of these numbers is of one step, and the topics of its tokens are random; `report` shows means. In this small task, the global
# loss does slightly better. But with a large factor, a second loss can pull the router away from
# the task. The bias adds nothing to the gradient.
#
# ## A bug to repair: the bias in the weights
#
# If the bias is also part of the weights, it changes what the layer computes, and experts that are rarely chosen count for
# more. [vLLM](https://github.com/vllm-project/vllm/pull/12002) once ran DeepSeek-V3 with this bug. Repair `choose`: for each token
# the `k` experts with the highest `scores + bias`, and weights in proportion to their `scores`, which add up to 1 for each
# token. The router learns the task through these weights, so they need their gradient.

# %%
def choose(scores, bias, k):  # [T, E], [E]   ->   choices [T, k], weights [T, k]
    best = (scores + bias).topk(k)
    return best.indices, best.values / best.values.sum(1, keepdim=True)

# %%
from tplab.exercises.balance_of_experts import check_choose

check_choose(choose)

# %% [markdown]
# ## Replicas: balance without changing the router
#
# When a trained model is used, its router must choose as it has learned to. But a popular expert can be on several ranks, and each of
# these **replicas** takes a part of its rows. DeepSeek's Expert Parallelism Load Balancer (EPLB) decides which experts get
# replicas, and puts experts with many rows beside experts with few. We give its method the loads of the router that we trained
# without balance.
#
# **Predict.** Four ranks have two slots for experts each. Can any placement without replicas be balanced? And if each rank has a
# third slot, which expert gets the most replicas?
#
# <details><summary>Answer</summary>
#
# No: a quarter of the 512 rows is 128, and expert 3 alone has 222. So it gets the most replicas. Each further slot takes the
# memory of one more expert on its rank. In training, the gradients of replicas would have to be added up.
#
# </details>

# %%
skewed = plain[0].sum(0)[-20:].double().mean(0).numpy()  # rows by expert
plans = {"in order": contiguous(EXPERTS, RANKS)}
plans |= {f"{n} slots": balanced(skewed, RANKS, slots=n) for n in (8, 12)}
for name, plan in plans.items():
    ranks = plan.load_of_ranks(skewed).round().astype(int).tolist()
    print(f"{name:<8} {plan.slots}\n    rows by rank {ranks}")

# %% [markdown]
# ## The twin in JAX
#
# The losses and the rule have the same names in JAX. There the bias is one of the parameters that you pass to the router, and it gets
# no gradient:

# %%
import jax.numpy as jnp
import tplab.jax as tj

print(tj.balanced_bias(jnp.zeros(4), jnp.array([9, 3, 2, 2]), 0.01))
print(tt.balanced_bias(torch.zeros(4), torch.tensor([9, 3, 2, 2]), 0.01))

# %% [markdown]
# **The real difference.** In torch the busiest rank is slow, and without a capacity nothing is dropped. XLA needs fixed sizes, so in
# JAX every rank computes all slots of its experts, including the empty ones. There you pay for skew with dropped choices, or with
# spare capacity on every rank.
#
# ## On Monday
#
# | here | torchtitan | Megatron-LM | JAX (MaxText) |
# |---|---|---|---|
# | `0.1 * balance_loss(...)` | | `--moe-aux-loss-coeff` | `load_balance_loss_weight` |
# | `over="microbatch"` | | `--moe-router-load-balancing-type aux_loss` | |
# | `over="global"` | | `--moe-router-load-balancing-type global_aux_loss` | |
# | `balanced_bias(..., 1e-3)` | `load_balance_coeff` | `--moe-router-enable-expert-bias` | `routed_bias`, `routed_bias_update_rate` |
# | `capacity` | | `--moe-expert-capacity-factor` | `capacity_factor` |
#
# ## To take away
#
# - A layer of experts takes as long as its busiest rank, and all other ranks pay by waiting.
# - A balance loss counts choices. Count them over all ranks, or a large factor makes every rank use all experts for its own tokens.
# - A bias balances without a gradient: it decides which experts are chosen, and not what their results weigh.
#
# **Sources.** Fedus et al. 2021, [Switch Transformers](https://arxiv.org/abs/2101.03961) (capacity, balance loss). Qiu et al. 2025,
# [Demons in the detail](https://arxiv.org/abs/2501.11873) (global batch). Wang et al. 2024,
# [Auxiliary-loss-free load balancing](https://arxiv.org/abs/2408.15664), and DeepSeek-AI 2024,
# [DeepSeek-V3](https://arxiv.org/abs/2412.19437) (the bias, replicas). [EPLB](https://github.com/deepseek-ai/EPLB) (MIT licence).
#
# Next: [24 Your own program](24_your_own_program.ipynb), for the scripts that you already have.

# %% [markdown]
# Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs
# share 2 GB of memory.
