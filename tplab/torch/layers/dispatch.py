"""Dispatch and combine: tokens travel to the ranks that hold their experts, and the results come back.

Each level receives T tokens and their choices among the experts that its ranks hold together, sends tokens on, lets the
next level compute them there, and adds up what comes back:

    level(x [T, D], choices [T, k], weights [T, k])   ->   y [T, D] = sum_j weights_j expert_choices_j(x)

So levels can be nested: first to the node that holds an expert, and then to the rank inside it. All are differentiable,
because the collectives are; the backward pass sends the same as the forward pass, in the other direction.

    per_rank     a token's row goes once to each rank that holds any of its experts, which returns their weighted sum
    per_choice   a row for each choice, which is weighted when it has come back
    gathered     all rows go to all ranks; each computes its own experts, or its parts of all experts
    local        the experts of this rank
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tplab.mesh import Axis
from tplab.torch.comm.autograd import do
from tplab.torch.comm.collectives import all_gather, all_to_all
from tplab.torch.ranks.rank import this_rank

Level = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [T, D], choices [T, k], weights [T, k]) -> y [T, D]. Experts count from 0 within a level; -1 is none. Without
weights, all are 1. Choices may be on the CPU and the rest on the device "meta", whose numbers cannot be read."""


def local(compute: Callable[[Tensor, Sequence[int]], Tensor], experts: int) -> Level:
    """The experts of this rank. compute(rows [N, D], counts [experts]) gets rows sorted by expert."""

    def level(x: Tensor, choices: Tensor, weights: Tensor | None) -> Tensor:
        token, slot = (choices >= 0).nonzero(as_tuple=True)
        expert = choices[token, slot]
        order = expert.argsort(stable=True)
        token, slot = token[order], slot[order]
        y = compute(x[token], expert.bincount(minlength=experts).tolist())
        if weights is not None:
            y = y * weights[token, slot, None].to(y.dtype)
        return _Summed.apply(y, token.to(y.device), len(x))  # type: ignore[return-value]

    return level


def per_rank(axis: Axis, experts: int, inner: Level) -> Level:
    """`experts` experts, of which each of the R ranks of `axis` holds E/R neighbours.

    sent   to other ranks: a row of D numbers, k choices (4 B each) and k weights for each token and rank that holds any
           of its experts, and a count (8 B) for each rank; back: the rows
    """
    num_ranks = len(this_rank().place(axis).group)
    here = experts // num_ranks

    def level(x: Tensor, choices: Tensor, weights: Tensor | None) -> Tensor:
        owners = torch.where(choices >= 0, choices // here, -1)
        goes = (owners[None] == torch.arange(num_ranks, device=owners.device)[:, None, None]).any(-1)  # [R, T]
        target, token = goes.nonzero(as_tuple=True)
        counts = goes.sum(1)
        sizes, received = counts.tolist(), all_to_all(counts, axis).tolist()

        def send(rows: Tensor) -> Tensor:
            return all_to_all(rows, axis, sizes=sizes, received=received)

        is_there = owners[token] == target[:, None]
        rows = send(x[token])
        chosen = send(torch.where(is_there, choices[token] % here, -1).to(torch.int32)).long()
        weighted = None if weights is None else send(weights[token] * is_there.to(weights.device))
        back = all_to_all(inner(rows, chosen, weighted), axis, sizes=received, received=sizes)
        return _Summed.apply(back, token.to(back.device), len(x))  # type: ignore[return-value]

    return level


def per_choice(level: Level) -> Level:
    """Each choice on its own, as if it were a token that has chosen one expert; the weights are not sent."""

    def each(x: Tensor, choices: Tensor, weights: Tensor | None) -> Tensor:
        num_choices = choices.shape[-1]
        y = level(x.repeat_interleave(num_choices, 0), choices.reshape(-1, 1), None).unflatten(0, (-1, num_choices))
        return (y if weights is None else y * weights[..., None].to(y.dtype)).sum(1)

    return each


def gathered(axis: Axis, experts: int, inner: Level, *, is_split: bool = False) -> Level:
    """Every rank of `axis` gets the tokens of all ranks, and returns to each the sum of what the ranks have computed.

    is_split   each rank holds a part of every expert, rather than some of the experts whole
    sent       (R-1) times its rows, choices (4 B each) and weights; back: (R-1) rows for each token; 8 B for its number
    """
    place = this_rank().place(axis)
    here = experts // len(place.group)

    def level(x: Tensor, choices: Tensor, weights: Tensor | None) -> Tensor:
        sizes = tuple(all_gather(torch.tensor([len(x)], device=choices.device), axis).tolist())
        rows = all_gather(x, axis)
        chosen = all_gather(choices.to(torch.int32), axis).long()
        weighted = None if weights is None else all_gather(weights, axis)
        if not is_split:
            is_mine = (chosen >= 0) & (chosen // here == place.index)
            chosen = torch.where(is_mine, chosen % here, -1)
        return do(this_rank().call("reduce_scatter", axis, (0, "sum", sizes)), inner(rows, chosen, weighted))

    return level


class _Summed(torch.autograd.Function):
    """rows [N, D], the token of each [N]   ->   [T, D], each token's sum. The backward pass needs only the tokens; that
    of torch's `index_add` also keeps the rows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, token: Tensor, tokens: int) -> Tensor:
        return rows.new_zeros(tokens, rows.shape[1]).index_add(0, token, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (token,) = ctx.saved_tensors
        return grads[0].index_select(0, token), None, None
