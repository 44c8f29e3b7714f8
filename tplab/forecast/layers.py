"""How long one layer of a model, each of its two ends, and what happens once per step take on one rank.

    gpu  = factor x computing + messages that are not hidden
    both = (gpu^8 + host^8)^(1/8): GPUs wait where Python takes longer to start a layer's kernels

Matmuls and collectives take the cluster's times. A causal mask leaves half of attention. Once per step gradients and
parameters are sent, and the optimizer runs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tplab.cost import Cluster
from tplab.forecast.activations import held_parameters, stages_on
from tplab.forecast.messages import over_cards, price, ranks_along, shown
from tplab.forecast.model import Model
from tplab.forecast.plan import ITEMSIZE, Plan
from tplab.forecast.stacks import Stack, constants
from tplab.forecast.traffic import embedding_traffic, head_traffic, layer_traffic, step_traffic

LOSS_BYTES = 20
"""Read and written per logit: a copy in float32, its maximum, its sum of exponentials, and the gradient."""
AXES = ("tp", "cp", "ep")


class Layer(NamedTuple):
    """Seconds of one layer, or of an end of the model, for one microbatch on one rank.

    forward, backward    as the pipeline sees them
    computing, recompute, tp, cp, ep, host     the same by reason: computing without and for recomputation, messages
                         that are not hidden, and the excess of the host's time
    ep_forward, ep_backward            what messages of experts add to `forward` and to `backward`
    travel_forward, travel_backward    the full duration of these messages, including the hidden part
    """

    forward: Any = 0.0
    backward: Any = 0.0
    computing: Any = 0.0
    recompute: Any = 0.0
    tp: Any = 0.0
    cp: Any = 0.0
    ep: Any = 0.0
    host: Any = 0.0
    ep_forward: Any = 0.0
    ep_backward: Any = 0.0
    travel_forward: Any = 0.0
    travel_backward: Any = 0.0


@lru_cache(maxsize=1 << 14)
def layer_seconds(model: Model, plan: Plan, cluster: Cluster, sequence: int, stack: Stack) -> Layer:
    """One layer. It does not depend on the plan's dp, pp, ZeRO stage and schedule: see `local`."""
    tokens = plan.microbatch * sequence // plan.cp
    more: dict[str, Any] = {"etp": plan.etp, "load": plan.load(model, sequence)}
    shapes = model.matmuls(tokens, sequence, plan.tp, plan.ep, sequence_parallel=plan.sequence_parallel, **more)
    plain = tuple(shape for name, shape in shapes.items() if name not in ("scores", "values"))
    there, back = _matmuls(cluster, plain, plan.chip_dtype)
    attention = _attention(model, plan, cluster, sequence, stack)
    kernels = stack.passes * from_memory(cluster, kernel_bytes(model, plan, sequence))
    added = from_memory(cluster, model.layer_on_rank(plan.tp, plan.ep, plan.etp) * (2 * ITEMSIZE[plan.grad_dtype] + 2))
    factor = stack.factor * correction(cluster, plan)
    forward = factor * (there + attention[0] + kernels)
    backward = factor * (back + attention[1] + 2 * kernels + added)
    again = {"none": 0.0, "selective": 0.0 if plan.flash else factor * attention[0], "full": forward}[plan.recompute]
    sent = layer_traffic(model, plan, sequence, stack, cluster.node_size)
    passes = (True, False)
    ways = [[shown(sent, model, plan, cluster, stack, axis, is_forward) for axis in AXES] for is_forward in passes]
    late = replace(plan, overlap=False)
    travel = [shown(sent, model, late, cluster, stack, "ep", is_forward) for is_forward in passes]
    under = {"ep_forward": ways[0][2], "ep_backward": ways[1][2]}
    under |= {"travel_forward": travel[0], "travel_backward": travel[1]}
    host = stack.host * (4 / 3 if plan.recompute == "full" else 1)
    if model.experts:
        ways[0][2], ways[1][2] = ways[0][2] + stack.routing / 3, ways[1][2] + stack.routing * 2 / 3
    tp, cp, ep = (sum(pair) for pair in zip(*ways))
    there, back = forward + sum(ways[0]), backward + again + sum(ways[1])
    gpu = there + back
    most = max(gpu, host)
    both = most * ((gpu / most) ** 8 + (host / most) ** 8) ** 0.125
    found = Layer(there * both / gpu, back * both / gpu, forward + backward, again, tp, cp, ep, both - gpu)
    return found._replace(**under) if plan.overlap else found


@lru_cache(maxsize=1 << 14)
def ends_seconds(model: Model, plan: Plan, cluster: Cluster, sequence: int, stack: Stack) -> tuple[Layer, Layer]:
    """(embedding, head): the head is the final norm, the logits and the loss, all in 16 bit."""
    tokens, size = plan.microbatch * sequence // plan.cp, plan.kept_size
    factor = stack.factor * correction(cluster, plan)
    stream = factor * from_memory(cluster, 2 * tokens * model.hidden * size)
    there, back = _matmuls(cluster, (model.head_matmul(tokens, plan.tp),), "bfloat16" if size == 2 else plan.dtype)
    loss = from_memory(cluster, tokens * model.vocab_on_rank(plan.tp) * LOSS_BYTES) / 2
    computing = (stream, 2 * stream), (factor * (there + loss) + stream, factor * (back + loss) + 2 * stream)
    found = []
    sends = embedding_traffic(model, plan, sequence, stack), head_traffic(model, plan, sequence, stack)
    for (forward, backward), sent in zip(computing, sends):
        tp = [shown(sent, model, plan, cluster, stack, "tp", is_forward) for is_forward in (True, False)]
        found.append(Layer(forward + tp[0], backward + tp[1], forward + backward, tp=sum(tp)))
    return found[0], found[1]


@lru_cache(maxsize=1 << 16)
def local(plan: Plan) -> Plan:
    """The plan reduced to what matters to one layer and microbatch: plans with the same reduction have equal layers."""
    dp = -(-plan.ep * plan.expert_tp // (plan.cp * plan.tp))
    return replace(plan, dp=dp, pp=1, virtual=1, zero=0, schedule="1f1b", balance="layers")


def kernel_bytes(model: Model, plan: Plan, sequence: int) -> float:
    """Bytes that a layer's norms, residuals, rotations and activations read and write forward, each tensor once."""
    tokens, size = plan.microbatch * sequence // plan.cp, plan.kept_size
    outside = model.hidden * (10 + 5 * model.dropout) + 2 * (model.q_rank + model.kv_rank)  # latents have norms
    outside /= plan.tp if plan.sequence_parallel else 1
    chosen = plan.load(model, sequence) * model.experts_per_token
    features = (chosen or 1) * model.ffn_width + model.shared_ffn
    inside = 2 * (model.attention_width + model.kv_width) + (3 if model.gated else 2) * features
    moved = 6 * model.hidden * chosen * plan.expert_tp  # tokens in the order of ranks, then of experts, and back
    return tokens * size * (outside + (inside + moved) / plan.tp)


def _attention(model: Model, plan: Plan, cluster: Cluster, sequence: int, stack: Stack) -> tuple[float, float]:
    """Scores, softmax and values: seconds forward and backward. With context parallelism, one kernel for the keys of
    each rank, halved by the causal mask: tokens are laid out so that ranks are balanced, as in Megatron."""
    dtype = "bfloat16" if plan.chip_dtype.startswith("float8") else plan.chip_dtype
    if plan.flash:
        one = sequence // plan.cp
        width = model.attention_width // model.heads  # with latents, the mean width: FLOPs and bytes are the same
        shape = plan.microbatch, model.heads // plan.tp, one, one, width, dtype, True
        kernel, kv_heads = _kernel(plan, cluster, stack), max(1, model.num_kv_heads // plan.tp)
        there, back = (
            plan.cp
            * cluster.chip.attention_seconds(*shape, way, kv_heads=kv_heads, kernel=kernel)
            / stack.attention_share
            for way in (False, True)
        )
        return there, back
    shapes = model.matmuls(plan.microbatch * sequence // plan.cp, sequence, plan.tp)
    pair = shapes["scores"], shapes["values"]
    forward, backward = _matmuls(cluster, pair, dtype)
    scores, size = pair[0][0] * pair[0][1] * pair[0][3], plan.kept_size
    mask = 2 * size + 1 if model.dropout else 0
    once = from_memory(cluster, scores * (2 * size + mask)), from_memory(cluster, scores * (3 * size + mask))
    return forward + once[0], backward + once[1]


def _kernel(plan: Plan, cluster: Cluster, stack: Stack) -> str | None:
    """The plan's attention kernel; otherwise the stack's or, if the chip does not have it, the chip's newest."""
    kernels = cluster.chip.kernels
    if plan.attention or kernels is None:
        return plan.attention
    return stack.attention if stack.attention in {kernel.name for kernel in kernels.attention} else None


@lru_cache(maxsize=1 << 16)
def _matmuls(cluster: Cluster, shapes: tuple[tuple[int, int, int, int], ...], dtype: str) -> tuple[float, float]:
    """Seconds forward, and backward: the input's gradient is [m, n] @ [n, k], the weight's [k, m] @ [m, n]."""
    of = cluster.chip.matmul_seconds
    forward = sum(of(m, n, k, dtype, batch) for m, n, k, batch in shapes)
    return forward, sum(of(m, k, n, dtype, batch) + of(k, n, m, dtype, batch) for m, n, k, batch in shapes)


def from_memory(cluster: Cluster, num_bytes: float) -> float:
    """Seconds to read or write this many bytes of a chip's memory."""
    reached = 1.0 if cluster.chip.kernels is None else cluster.chip.kernels.bandwidth
    return num_bytes / (cluster.chip.memory_bandwidth * reached)


def correction(cluster: Cluster, plan: Plan) -> float:
    """Seconds of training per second of its kernels run one by one, in 16 bit on a B200, besides the stack's factor.
    Fitted to four runs. No run of a dense model in 8 bit has been published."""
    if cluster.chip.kernels is None or ITEMSIZE[plan.dtype] < 2:
        return 1.0
    return next((by for name, by in constants()["chips"].items() if cluster.chip.name.startswith(name)), 1.0)


class Once(NamedTuple):
    """Seconds of one rank outside the layers: sending all gradients, sending all parameters, and its optimizer.

    first    ZeRO 3: the messages that nothing hides, the first layer's parameters and the last gradients
    hidden   the largest share of gradients that can be hidden: the last bucket never is
    """

    gradients: Any = 0.0
    parameters: Any = 0.0
    optimizer: Any = 0.0
    first: Any = 0.0
    hidden: Any = 0.0


@lru_cache(maxsize=1 << 14)
def once_seconds(model: Model, plan: Plan, place: int, cluster: Cluster, stack: Stack) -> Once:
    """The times of a rank at this place of its pipeline.

    Gradients and parameters are sent in buckets like torch's; with ZeRO 3, layer by layer.
    """
    plan = stack.cut(plan)
    held, stages = held_parameters(model, plan, place, stack), stages_on(model, plan, place)
    units = 1 + sum(stage.layers for stage in stages)
    if plan.zero == 3:
        cluster = over_cards(cluster, stack.cards)
    sums, most = {"gradients": 0.0, "parameters": 0.0, "tied": 0.0}, 1
    for one in step_traffic(model, plan, 1, place, stack):
        if one.part in sums and one.phase in ("step", "backward"):
            ranks = ranks_along(plan, "pp")[:: plan.pp - 1] if one.axis == "pp" else ranks_along(plan, "dp", one.ranks)
            buckets = units if plan.zero == 3 else max(1, round(one.bytes / stack.bucket))
            most = max(most, buckets)
            sums[one.part] += one.count * buckets * price(cluster, one.op, one.bytes / buckets, ranks).seconds
    kept = held.dense / plan.copies + held.experts / plan.expert_copies if plan.zero else held.total
    grad, size, state = ITEMSIZE[plan.grad_dtype], plan.kept_size, ITEMSIZE[plan.state_dtype or "float32"]
    # AdamW reads the gradient, reads and writes both moments and the parameter, and writes its narrower copy, if any
    moved = grad + 4 * state + 2 * max(size, state) + size * (size < state)
    optimizer = from_memory(cluster, kept * moved + 2 * grad * held.total) + sums["tied"]
    gradients, parameters = sums["gradients"], sums["parameters"]
    if plan.zero < 3:
        has_two_ways = any(stage.share < 1 for stage in stages)  # each waits for its twin's gradients
        can_hide = plan.overlap and not has_two_ways
        return Once(gradients, parameters, optimizer, hidden=min(stack.hidden[1], 1 - 1 / most) * can_hide)
    again = stack.gathers == 3 and plan.recompute == "full"
    early = stack.gathers == 2 or (stack.plain and not again)
    if not (early and plan.overlap):  # layers are gathered only when they are needed
        hidden = stack.hidden[1] if plan.overlap and not stack.plain else 0.0
        return Once(gradients, (1.5 if again else 1) * parameters, optimizer, hidden=hidden)
    return Once(gradients, parameters, optimizer, (gradients + parameters) / units, stack.hidden[1])


def at_end(plan: Plan, busy: Layer, once: Once, count: Any) -> tuple[Any, Any]:
    """(gradients and parameters that are not hidden, optimizer) in one step."""
    gradients, parameters = once.gradients, once.parameters
    if plan.zero < 3:
        late = gradients - np.minimum(busy.backward, once.hidden * gradients)
        return (count if plan.zero == 2 else 1) * late + parameters, once.optimizer
    sent = gradients + 2 * parameters
    late = np.maximum(0.0, parameters - busy.forward) + np.maximum(0.0, gradients + parameters - busy.backward)
    early = np.minimum(late + once.first, sent)
    needed = sent - np.minimum(busy.forward + busy.backward, once.hidden * sent)
    return count * np.where(np.equal(once.first, 0), needed, early), once.optimizer
