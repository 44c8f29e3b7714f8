"""Dispatch and combine: tokens are sent to the ranks that hold their experts, and the results come back.

Each level takes T tokens and their choices among the experts that its ranks hold together, sends tokens to these ranks,
where the next level computes them, and adds up the returned results:

    level(x [T, D], choices [T, k], weights [T, k])   ->   y [T, D] = sum_j weights_j expert_choices_j(x)

So levels can be nested: first to the node that holds an expert, then to the rank inside it. All are differentiable,
since the collectives are; the backward pass sends as much as the forward pass, in the other direction.

    per_rank     a token's row goes once to each rank that holds any of its experts, which returns their weighted sum
    per_choice   a row for each choice, which is weighted after it has come back
    gathered     all rows go to all ranks; each computes its own experts, or its parts of all experts
    local        the experts of this rank

XLA needs all shapes before the choices are known. So each destination has slots for as many rows as may come, and empty
slots are sent as zeros. `room` is the most rows that one expert takes from a level's tokens: the capacity of the router
decides how much is sent. (torch sends only actual rows.)
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from tplab.jax.comm.collectives import all_gather, all_to_all, axis_index, axis_size, reduce_scatter
from tplab.mesh import Axis

Level = Callable[[Array, Array, Array | None, int], Array]
"""(x [T, D], choices [T, k], weights [T, k], room) -> y [T, D]. Experts count from 0 within a level, and -1 is none.
None for weights means 1."""


def local(compute: Callable[[Array], Array], experts: int) -> Level:
    """The experts of this rank. compute(rows [experts, N, D]) receives the rows of each, padded with zeros."""

    def level(x: Array, choices: Array, weights: Array | None, room: int) -> Array:
        chosen = choices[None] == jnp.arange(experts)[:, None, None]  # [experts, T, k]
        token = _slots(chosen.any(-1), min(room, len(x)))
        y = compute(_rows(x, token))
        if weights is not None:
            of_expert = jnp.where(chosen, weights[None], 0).sum(-1)  # [experts, T]
            y = y * jnp.take_along_axis(_padded(of_expert.T).T, token, 1)[..., None].astype(y.dtype)
        return _added(y, token, len(x))

    return level


def per_rank(axis: Axis, experts: int, inner: Level) -> Level:
    """Each of the R ranks of `axis` holds E/R neighbouring ones of `experts` experts.

    sent   to each other rank: min(T, E/R room) rows of D numbers, each with k choices (4 B each) and k weights; back:
           the rows
    """
    num_ranks = axis_size(axis)
    here = experts // num_ranks

    def level(x: Array, choices: Array, weights: Array | None, room: int) -> Array:
        is_there = (choices >= 0)[None] & (choices // here == jnp.arange(num_ranks)[:, None, None])  # [R, T, k]
        token = _slots(is_there.any(-1), min(len(x), here * room))  # [R, slots]

        def send(rows: Array) -> Array:
            return all_to_all(rows.reshape(-1, rows.shape[-1]), axis)

        def there(of_choices: Array, empty: int) -> Array:
            mine = jnp.where(is_there, of_choices, empty)
            return jnp.stack([_rows(row, slots, empty) for row, slots in zip(mine, token, strict=True)])

        chosen = send(there(choices % here, -1).astype(jnp.int32))
        weighted = None if weights is None else send(there(weights, 0))
        back = inner(send(_rows(x, token)), chosen, weighted, num_ranks * room)
        return _added(all_to_all(back, axis), token, len(x))

    return level


def per_choice(level: Level) -> Level:
    """Treat each choice as a token that has chosen one expert; the weights are not sent."""

    def each(x: Array, choices: Array, weights: Array | None, room: int) -> Array:
        num_choices = choices.shape[-1]
        y = level(jnp.repeat(x, num_choices, 0), choices.reshape(-1, 1), None, room)
        y = y.reshape(*choices.shape, x.shape[-1])
        return (y if weights is None else y * weights[..., None].astype(y.dtype)).sum(1)

    return each


def gathered(axis: Axis, experts: int, inner: Level, *, is_split: bool = False) -> Level:
    """Every rank of `axis` receives the tokens of all ranks, and each token's results are summed over the ranks.

    is_split   whether each rank holds a part of every expert, instead of some whole experts
    sent       (R-1) times its rows, choices (4 B each) and weights; back: (R-1) rows for each token
    """
    num_ranks = axis_size(axis)
    here = experts // num_ranks

    def level(x: Array, choices: Array, weights: Array | None, room: int) -> Array:
        rows, chosen = all_gather(x, axis), all_gather(choices.astype(jnp.int32), axis)
        weighted = None if weights is None else all_gather(weights, axis)
        if not is_split:
            is_mine = (chosen >= 0) & (chosen // here == axis_index(axis))
            chosen = jnp.where(is_mine, chosen % here, -1)
        return reduce_scatter(inner(rows, chosen, weighted, num_ranks * room), axis)

    return level


def _slots(goes: Array, slots: int) -> Array:
    """goes [places, T] -> [places, slots]: the tokens that go to each place, in order, and T where a slot is empty."""
    places, tokens = goes.shape
    place = jnp.where(goes, jnp.cumsum(goes, 1) - 1, slots)
    empty = jnp.full((places, slots), tokens) + 0 * place[:, :1]
    return empty.at[jnp.arange(places)[:, None], place].set(jnp.arange(tokens)[None], mode="drop")


def _padded(x: Array, empty: int = 0) -> Array:
    """x [T, ..] -> [T + 1, ..]: the last row is for empty slots."""
    return jnp.concatenate([x, jnp.full_like(x[:1], empty)])


def _rows(x: Array, token: Array, empty: int = 0) -> Array:
    """The rows of tokens [...]: x [T, D] -> [..., D]."""
    return _padded(x, empty)[token]


def _added(y: Array, token: Array, tokens: int) -> Array:
    """Rows of tokens, added up for each: y [.., D], token [..] -> [T, D]."""
    rows = y.reshape(-1, y.shape[-1])
    return jnp.zeros((tokens + 1, rows.shape[-1]), rows.dtype).at[token.reshape(-1)].add(rows)[:-1]
