"""The traffic of each rank in one step: which collectives over which axes, how large, how often, and for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from typing import NamedTuple, ParamSpec

from tplab.experts import expected_copies
from tplab.forecast.activations import Stage, held_parameters, stages_on
from tplab.forecast.model import Model
from tplab.forecast.plan import ITEMSIZE, Plan
from tplab.forecast.stacks import Stack, find_stack

Given = ParamSpec("Given")


class Sent(NamedTuple):
    """One kind of message of a rank.

    axis, ranks   the axis, and its number of ranks. "dp" includes the ranks of cp, which have the same parameters
    op            one of tplab.cost.OPS, or "send" to one other rank
    bytes         of the whole tensor, as `Cluster.collective_seconds` takes it
    count         how often this rank takes part in one step, or for one layer and one microbatch
    part          "layer", "embedding", "head", "boundary" (between stages), "norms", "tied", "gradients", "parameters"
    phase         "forward", "recompute", "backward", or "step": after all microbatches
    """

    axis: str
    ranks: int
    op: str
    bytes: int
    count: int
    part: str
    phase: str

    @property
    def total(self) -> float:
        """The bytes that the rank sends for all `count` of them, with the ring algorithm."""
        laps = {"all_reduce": 2, "send": 0}.get(self.op, 1)
        return self.count * self.bytes * (laps * (self.ranks - 1) / self.ranks if laps else 1)


def stored(make: Callable[Given, Iterator[Sent]]) -> Callable[Given, tuple[Sent, ...]]:
    """A generator of messages as a function that returns all of them, and keeps them for the next call."""

    def found(*given: Given.args, **named: Given.kwargs) -> tuple[Sent, ...]:
        return tuple(make(*given, **named))

    return wraps(make)(lru_cache(maxsize=4096)(found))  # type: ignore[return-value]  # the cache hides its parameters


@stored
def layer_traffic(
    model: Model, plan: Plan, sequence: int, stack: str | Stack = "megatron", node_size: int | None = None
) -> Iterator[Sent]:
    """What a rank sends for one layer and one microbatch.

    tp   the input of attention and of the MLP is gathered, and their output is summed: 2 all_reduces each way
         (Shoeybi et al. 2019), or with sequence_parallel 2 all_gathers and 2 reduce_scatters each way, and 2 more
         all_gathers backward if inputs are not kept whole (Korthikanti et al. 2022, section 4.2.2). If there are
         latents, these are gathered for attention instead, and their gradients summed: `Model.latent_width`
    cp   keys and values go around a ring: cp - 1 hops forward, and again backward, together with cp hops of their
         gradients, the last of which returns them to their owner (Liu et al. 2023)
    ep   tokens go to their experts and come back: 2 all_to_alls each way (Lepikhin et al. 2020). With sequence_parallel
         each rank sends its own tokens, and tp gathers nothing for the experts. `Plan.dispatch` decides the number of
         rows; with a skew, it is that of the fullest rank
    etp  the ranks that divide an expert exchange the rows that they received

    With matmuls in 8 bit, layers' activations that tp sends and parameters that ZeRO gathers have 8 bit, and the rest
    16. Transformer Engine sums activations in 16 bit, but with that, forecasts of the runs that were measured are worse

    node_size   how many neighbouring ranks form a node. "two_levels" sends a token to each node once; inside a node the
                axis is "ep inside". None: all ranks are in one node
    """
    stack = find_stack(stack, plan)
    tokens, size = plan.microbatch * sequence // plan.cp, plan.kept_size
    whole = tokens * model.hidden * ITEMSIZE[plan.dtype]
    forward = ["forward", "recompute"] if plan.recompute == "full" else ["forward"]
    is_one = plan.ep == 1 and plan.expert_tp == plan.tp and plan.dispatch in (None, "gather")  # MLP, whose tokens stay
    shares = model.experts > 0 and not is_one
    times = 1 if shares and plan.sequence_parallel and not model.shared_ffn else 2  # attention, and the MLP
    latents = tokens * model.latent_width * size  # gathered instead of one input
    if plan.tp > 1:
        for phase in [*forward, "backward"]:
            is_back, apart = phase == "backward", stack.plain and shares and model.shared_ffn > 0  # own sums
            sent: Counter[tuple[str, int]] = Counter({("all_reduce", whole): 2 + apart})
            if plan.sequence_parallel:
                again = times if is_back and not stack.plain else 0
                if stack.gathers_each:  # q, k and v; and of a gated MLP, both of its first matmuls
                    again = 2 + model.gated
                sent = Counter({("all_gather", whole): times + again, ("reduce_scatter", whole): times})
                enters = ["reduce_scatter"] + ["all_gather"] * (again > 0) if is_back else ["all_gather"]
            else:
                enters = ["all_reduce"] * is_back
            if model.kv_rank:
                sent.subtract((op, whole) for op in enters)
                sent.update((op, latents) for op in enters)
            for (op, num_bytes), count in (+sent).items():
                yield Sent("tp", plan.tp, op, num_bytes, count, "layer", phase)
        if plan.sequence_parallel and stack.plain:
            copied = 2 * (2 if model.norm == "layer" else 1) + (2 if model.bias else 0)
            yield Sent("tp", plan.tp, "all_reduce", model.hidden * size, copied, "norms", "backward")
            if model.experts:  # of the router; and of each sequence, how often each expert is chosen
                yield Sent("tp", plan.tp, "all_reduce", model.experts * model.hidden * size, 1, "layer", "backward")
                for phase in forward:
                    yield Sent("tp", plan.tp, "all_reduce", 8 * model.experts * plan.microbatch, 1, "layer", phase)
    if plan.cp > 1:
        pairs = 2 * tokens * model.kv_width // plan.tp * size
        for phase in forward:
            yield Sent("cp", plan.cp, "send", pairs, plan.cp - 1, "layer", phase)
        yield Sent("cp", plan.cp, "send", pairs, plan.cp - 1, "layer", "backward")
        gradients = pairs // size * max(size, 4) if stack.plain else pairs
        yield Sent("cp", plan.cp, "send", gradients, plan.cp, "layer", "backward")
    for phase in [*forward, "backward"] if shares else ():
        yield from _experts(model, plan, sequence, stack, node_size, phase)


def _experts(model: Model, plan: Plan, sequence: int, stack: Stack, node: int | None, phase: str) -> Iterator[Sent]:
    """The messages for the experts of a layer: a row of h numbers for each copy of a token, there and back; with plain
    layers also its choices (4 B each), weights (4 B each, and their gradients back) and the number of rows (8 B)."""
    k, ep, tokens = model.experts_per_token, plan.ep, plan.microbatch * sequence // plan.cp
    has_same = plan.tp > 1 and plan.expert_tp == plan.tp and not plan.sequence_parallel  # tokens, so sums are sent
    mine = tokens if has_same else tokens // plan.tp
    dispatch, nodes = plan.dispatch or "all_to_all", -(-ep * plan.expert_tp // (node or ep * plan.expert_tp))
    levels = list[tuple[str, int, bool, float]]()  # axis, ranks, whether they gather all rows, rows of one rank
    rows: float = mine * (k if dispatch == "all_to_all" else 1)
    if dispatch == "two_levels" and nodes > 1 and ep % nodes == 0:
        rows = mine * expected_copies(model.routing, nodes)
        levels.append(("ep", nodes, False, rows))
    if ep > 1:
        if dispatch in ("per_rank", "two_levels"):
            rows = mine * expected_copies(model.routing, ep)
        levels.append(("ep inside" if levels else "ep", ep // max(1, nodes * len(levels)), dispatch == "gather", rows))
        rows *= ep if dispatch == "gather" else 1
    if plan.expert_tp > 1 and not has_same:
        levels.append(("etp", plan.expert_tp, True, rows))
    load = 1.0 if dispatch == "gather" else plan.load(model, sequence)
    numbers = 0 if not stack.plain else 4 * (1 if dispatch == "all_to_all" else k)  # B of a row's choices, or weights
    for axis, ranks, is_gathered, of_rank in levels:
        whole = load * of_rank * (ranks if is_gathered else 1)
        there, back = ("all_gather", "reduce_scatter") if is_gathered else ("all_to_all", "all_to_all")
        sizes = [(op, whole * model.hidden * plan.kept_size) for op in (there, back)]
        if numbers and phase != "backward":
            sizes += [(there, whole * numbers), (there, 8 * ranks)]
        if numbers and dispatch != "all_to_all":  # otherwise the weights stay with their tokens
            sizes.append((back if phase == "backward" else there, whole * numbers))
        for (op, num_bytes), count in Counter(sizes).items():
            yield Sent(axis, ranks, op, round(num_bytes), count, "layer", phase)
    if numbers and has_same and phase == "backward":
        yield Sent("tp", plan.tp, "all_reduce", mine * 4 * k, 1, "layer", phase)


@stored
def traffic(
    model: Model,
    plan: Plan,
    batch: int,
    sequence: int,
    pipeline_rank: int = 0,
    stack: str | Stack = "megatron",
    node_size: int | None = None,
) -> Iterator[Sent]:
    """What a rank at this place of its pipeline sends in one step; `node_size` as in `layer_traffic`. Losses and
    gradient norms, one number each, are left out."""
    stack, times = find_stack(stack, plan), plan.microbatches(batch)
    for stage in stages_on(model, stack.cut(plan), pipeline_rank):
        layers, dense, is_first, is_last = stage.counts
        for sent, count in (
            (layer_traffic(model, plan, sequence, stack, node_size), layers),
            (layer_traffic(model.dense, plan, sequence, stack, node_size), dense),
            (embedding_traffic(model, plan, sequence, stack), is_first),
            (head_traffic(model, plan, sequence, stack), is_last),
            (_boundaries(model, plan, sequence, stage), 1),
        ):
            often = count * int(times * stage.share)
            yield from (one._replace(count=one.count * often) for one in sent if often)
    yield from step_traffic(model, plan, times, pipeline_rank, stack)


def bytes_by_axis(
    model: Model,
    plan: Plan,
    batch: int,
    sequence: int,
    stack: str | Stack = "megatron",
    node_size: int | None = None,
) -> list[dict[str, float]]:
    """For each pipeline rank: axis -> the bytes that it sends in one step, with the ring algorithm.

    node_size   how many neighbouring ranks form a node. `dispatch="two_levels"` sends a token to each node once, along
                "ep", and from there along "ep inside". None: all ranks are in one node, and everything is along "ep"
    """
    found = []
    for pipeline_rank in range(plan.pp):
        sums = Counter[str]()
        for sent in traffic(model, plan, batch, sequence, pipeline_rank, stack, node_size):
            sums[sent.axis] += sent.total  # type: ignore[assignment]  # a Counter may count fractions
        found.append(dict(sums))
    return found


@stored
def embedding_traffic(model: Model, plan: Plan, sequence: int, stack: Stack) -> Iterator[Sent]:
    """What a rank sends for one microbatch: each looks up its part of the vocabulary, and the results are summed."""
    if plan.tp == 1:
        return
    whole = plan.microbatch * sequence // plan.cp * model.hidden * plan.kept_size
    op = "reduce_scatter" if plan.sequence_parallel else "all_reduce"
    for phase in ("forward", "recompute") if stack.plain and plan.recompute == "full" else ("forward",):
        yield Sent("tp", plan.tp, op, whole, 1, "embedding", phase)
    if plan.sequence_parallel:
        yield Sent("tp", plan.tp, "all_gather", whole, 1, "embedding", "backward")
        if model.positions and stack.plain:
            yield Sent("tp", plan.tp, "all_gather", whole // plan.microbatch, 1, "embedding", "backward")


@stored
def head_traffic(model: Model, plan: Plan, sequence: int, stack: Stack) -> Iterator[Sent]:
    """What a rank sends for one microbatch: it has the logits of its part of the vocabulary, and the loss needs one
    maximum and two sums per token."""
    if plan.tp == 1:
        return
    tokens, size = plan.microbatch * sequence // plan.cp, plan.kept_size
    whole = tokens * model.hidden * size
    for phase in ("forward", "recompute") if stack.plain and plan.recompute == "full" else ("forward",):
        if plan.sequence_parallel:
            yield Sent("tp", plan.tp, "all_gather", whole, 1, "head", phase)
        yield Sent("tp", plan.tp, "all_reduce", tokens * max(size, 4), 1, "head", phase)
        yield Sent("tp", plan.tp, "all_reduce", 2 * tokens * max(size, 4), 1, "head", phase)
    if plan.sequence_parallel:
        if not stack.plain:
            yield Sent("tp", plan.tp, "all_gather", whole, 1, "head", "backward")
        else:
            norms = 2 if model.norm == "layer" else 1
            yield Sent("tp", plan.tp, "all_reduce", model.hidden * size, norms, "norms", "backward")
        yield Sent("tp", plan.tp, "reduce_scatter", whole, 1, "head", "backward")
    else:
        yield Sent("tp", plan.tp, "all_reduce", whole, 1, "head", "backward")


def _boundaries(model: Model, plan: Plan, sequence: int, stage: Stage) -> Iterator[Sent]:
    """The activations of a microbatch go to the next stage, their gradients to the previous one."""
    tokens = plan.microbatch * sequence // plan.cp // (plan.tp if plan.sequence_parallel else 1)
    for sends, phase in zip(stage.sends, ("forward", "backward")):
        if sends:
            yield Sent("pp", plan.pp, "send", tokens * model.hidden * plan.kept_size, 1, "boundary", phase)


@stored
def step_traffic(model: Model, plan: Plan, times: int, pipeline_rank: int, stack: Stack) -> Iterator[Sent]:
    """What a rank sends in a step of `times` microbatches of gradients, parameters, and what stages share. With ZeRO 2
    and 3 gradients are sent after every microbatch, and with ZeRO 3 parameters before every use."""
    plan = stack.cut(plan)
    grad, size = ITEMSIZE[plan.grad_dtype], ITEMSIZE[plan.dtype]
    held = held_parameters(model, plan, pipeline_rank, stack)
    for numbers, ranks, known in ((held.dense, plan.copies, held.embedding), (held.experts, plan.expert_copies, 0)):
        if ranks == 1 or not numbers:
            continue
        op = "reduce_scatter" if plan.zero else "all_reduce"
        often, phase = (times, "backward") if plan.zero > 1 else (1, "step")
        yield Sent("dp", ranks, op, numbers * grad, often, "gradients", phase)
        if plan.zero in (1, 2):
            yield Sent("dp", ranks, "all_gather", numbers * size, 1, "parameters", "step")
        elif plan.zero == 3:
            yield Sent("dp", ranks, "all_gather", numbers * size, times, "parameters", "forward")
            if plan.recompute == "full" and stack.gathers == 3:
                yield Sent("dp", ranks, "all_gather", numbers * size, times, "parameters", "recompute")
            late = numbers - known if stack.plain else numbers  # the embedding's backward pass needs no weight
            yield Sent("dp", ranks, "all_gather", late * size, times, "parameters", "backward")
    stages = stages_on(model, plan, pipeline_rank)
    if stages[0].share < 1:  # the other direction has replicas of these stages
        twice = model.tied and stack.plain and any(stage.is_first for stage in stages)
        copies = held.total - (held.words if twice else 0)
        yield Sent("pp", 2, "all_reduce", copies * grad, 1, "gradients", "step")
    if held.is_tied:
        yield Sent("pp", 2, "all_reduce", held.words * grad, 1, "tied", "step")
    if plan.tp > 1 and plan.sequence_parallel and not stack.plain:
        yield Sent("tp", plan.tp, "all_reduce", held.copied * grad, 1, "norms", "step")
