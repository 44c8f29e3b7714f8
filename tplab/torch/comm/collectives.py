"""Collectives over an axis of the mesh: what ranks send each other.

Every rank of an axis calls the same collectives in the same order. `start(op, x, ...)` begins one and returns a handle;
what the program does before `handle.wait()` overlaps with it.

All are differentiable, by the same convention as JAX's `shard_map`. What `all_reduce` and `broadcast` return
is *replicated*: every rank holds the same tensor and, in the backward pass, the same gradient of it. What the others
return is *varying*: each rank's gradient is what its own use of the tensor contributed, and contributions are added.

    op              y on the rank at index i                 backward: dx on the rank at index i
    all_reduce      sum_j x_j                                dy                          (mean: dy / R)
    all_gather      x_0 | x_1 | ... | x_(R-1)                reduce_scatter(dy)
    reduce_scatter  piece i of sum_j x_j                     all_gather(dy)              (mean: / R)
    all_to_all      piece i of x_0 | piece i of x_1 | ...    all_to_all(dy), dims exchanged
    broadcast       x_root                                   dy on the root, zeros elsewhere
    reduce          sum_j x_j on the root, zeros elsewhere   broadcast(dy)               (mean: / R)
    gather          x_0 | x_1 | ... on the root, else zeros  scatter(dy)
    scatter         piece i of x_root                        gather(dy)
    ppermute        x_j where (j, i) is a pair, else zeros   ppermute(dy) with the pairs reversed
    ring_shift      x_(i - shift)                            ring_shift(dy, -shift)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from tplab.comm import check_pairs, pairs_of, position_of, whole_number
from tplab.errors import ShapeError
from tplab.mesh import Axis
from tplab.torch.comm.autograd import do, start_on
from tplab.torch.comm.messages import receive, start_receive
from tplab.torch.ranks.outcomes import check_divides, check_reduction, check_tensor, dim_of
from tplab.torch.ranks.rank import Call, Peers, Pending, Place, this_rank

Handle = Pending
Params = ParamSpec("Params")


def axis_index(axis: Axis) -> int:
    """The position of this rank along `axis`, from 0."""
    return this_rank().place(axis).index


def axis_size(axis: Axis) -> int:
    """The number of ranks along `axis`."""
    return len(this_rank().place(axis).group)


def start(op: Callable[..., Any], x: Any, /, *args: Any, **kwargs: Any) -> Handle:
    """Begin a collective without waiting for it: `h = start(ring_shift, x, "tp")`, then `y = h.wait()`.

    `op` is any collective of this module. What the rank computes between the two overlaps with the communication. In
    the backward pass the roles are exchanged: the gradient's collective begins at `wait` and is waited for at `start`.
    start(receive, "pp", 0) reserves the next message from position 0.
    """
    if op is receive:
        return start_receive(x, *args, **kwargs)
    if begin := getattr(op, "begin", None):  # of several messages
        return begin(x, *args, **kwargs)
    call_of = getattr(op, "call_of", None)
    if call_of is None:
        raise TypeError(f"start needs a collective, as in start(ring_shift, x, 'tp'), not {op!r}")
    return start_on(call_of(x, *args, **kwargs), x)


def _collective(call_of: Callable[Concatenate[Tensor, Params], Call]) -> Callable[Concatenate[Tensor, Params], Tensor]:
    """Decorate a function that describes a call: the result makes the call and waits. `start` reads `.call_of`."""

    @wraps(call_of)
    def collective(x: Tensor, *args: Params.args, **kwargs: Params.kwargs) -> Tensor:
        return do(call_of(x, *args, **kwargs), x)

    collective.call_of = call_of  # type: ignore[attr-defined]
    collective.__annotations__ = {**call_of.__annotations__, "return": "Tensor"}
    return collective


@_collective
def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Call:
    """Combine what every rank of `axis` holds: `op` is sum, mean, max or min, element by element.

    x [...]   ->   y [...], the same bits on every rank; simulated ranks add up in the order of positions
    ring      2(R-1)/R of x is sent by each rank, in 2(R-1) hops
    backward  sum: dx = dy; mean: dy / R; max, min: dy to the ranks that hold the extreme, shared between equals
    Raises TypeError for the mean of whole numbers and the extreme of complex ones. A sum of booleans is "any".
    """
    check_reduction("all_reduce", op, check_tensor("all_reduce", x).dtype)
    return this_rank().call("all_reduce", axis, (op,))


@_collective
def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Call:
    """Concatenate what every rank of `axis` holds along `dim`; sizes along it may differ.

    x [.., n, ..]   ->   y [.., R n, ..], the same on every rank
    ring      each rank sends (R-1) pieces, in R-1 hops
    backward  dx = reduce_scatter(dy)
    """
    return this_rank().call("all_gather", axis, (dim_of(check_tensor("all_gather", x), dim, "all_gather"),))


@_collective
def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0, op: str = "sum") -> Call:
    """Combine what every rank of `axis` holds; each rank keeps one piece along `dim`.

    x [.., R n, ..]   ->   y [.., n, ..]: piece i on the rank at index i
    ring      each rank sends (R-1)/R of x, in R-1 hops
    backward  dx = all_gather(dy)   (mean: / R; max, min: to the ranks that hold the extreme, shared between equals)
    Raises ShapeError where R does not divide the dim; TypeError as all_reduce does.
    """
    dim = dim_of(check_tensor("reduce_scatter", x), dim, "reduce_scatter")
    check_reduction("reduce_scatter", op, x.dtype)
    return this_rank().call("reduce_scatter", axis, (dim, op, _equal_sizes("reduce_scatter", x, dim, axis)))


@_collective
def all_to_all(
    x: Tensor,
    axis: Axis,
    split_dim: int = 0,
    concat_dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> Call:
    """Cut x into one piece per rank along `split_dim`, give piece i to the rank at index i, join along `concat_dim`.

    x [.., R n, .., m, ..]   ->   y [.., n, .., R m, ..]
    cost      each rank sends (R-1)/R of x
    backward  dx = all_to_all(dy), dims exchanged

    sizes     the pieces are not equal: how many rows of x (along dim 0) go to each position
    received  with them, how many rows come from each position, which its sizes say:
              received = all_to_all(torch.tensor(sizes), axis).tolist()
              x [sum of sizes, ..]   ->   y [sum of received, ..]      backward: sizes and received exchanged
    Raises ShapeError where R does not divide `split_dim`, or where sizes do not add up to the rows of x.
    """
    check_tensor("all_to_all", x)
    split_dim, concat_dim = dim_of(x, split_dim, "all_to_all"), dim_of(x, concat_dim, "all_to_all")
    if sizes is not None or received is not None:
        return _uneven(x, axis, (split_dim, concat_dim), sizes, received)
    check_divides("all_to_all", x, split_dim, this_rank().place(axis))
    return this_rank().call("all_to_all", axis, (split_dim, concat_dim))


def _uneven(x: Tensor, axis: Axis, dims: tuple[int, int], sizes: Any, received: Any) -> Call:
    """An all_to_all of pieces that have sizes of their own, along dim 0."""
    place = this_rank().place(axis)
    if sizes is None or received is None or dims != (0, 0):
        raise ShapeError(
            "all_to_all: pieces of different sizes are cut and joined along dim 0, and need sizes, the rows for each "
            "position, and received, the rows from each: all_to_all(torch.tensor(sizes), axis).tolist()"
        )
    sizes, received = (tuple(operator.index(size) for size in each) for each in (sizes, received))
    for name, given in (("sizes", sizes), ("received", received)):
        if len(given) != len(place.group) or min(given) < 0:
            raise ShapeError(
                f"all_to_all: {name}={list(given)} must be {len(place.group)} numbers, 0 or more, one for each rank of "
                f"axis {place.label!r}"
            )
    if sum(sizes) != x.shape[0]:
        raise ShapeError(f"all_to_all: sizes={list(sizes)} add up to {sum(sizes)}, and x has {x.shape[0]} rows")
    return this_rank().call("all_to_all", axis, dims, splits=sizes, takes=received)


@_collective
def broadcast(x: Tensor, axis: Axis, root: int = 0) -> Call:
    """Give every rank of `axis` what the one at index `root` holds; the others' x only gives the shape.

    x [...]   ->   y [...] = x of the root
    backward  dx = dy on the root, zeros elsewhere
    """
    check_tensor("broadcast", x)
    return this_rank().call("broadcast", axis, (_root("broadcast", root, axis),))


@_collective
def reduce(x: Tensor, axis: Axis, root: int = 0, op: str = "sum") -> Call:
    """Combine what every rank of `axis` holds, as `all_reduce` does, for the one at index `root`.

    x [...]   ->   y [...] on the root, zeros elsewhere: added up in the order of positions
    backward  dx = broadcast(dy)   (mean: / R; max, min: to the ranks that hold the extreme, shared between equals)
    Raises MeshError where the axis has no such position; TypeError as all_reduce does.
    """
    check_reduction("reduce", op, check_tensor("reduce", x).dtype)
    return this_rank().call("reduce", axis, (_root("reduce", root, axis), op))


@_collective
def gather(x: Tensor, axis: Axis, root: int = 0, dim: int = 0) -> Call:
    """Concatenate what every rank of `axis` holds along `dim`, for the one at index `root`; sizes along it may differ.

    x [.., n, ..]   ->   y [.., R n, ..] on the root, zeros elsewhere
    backward  dx = scatter(dy)
    Raises MeshError where the axis has no such position.
    """
    dim = dim_of(check_tensor("gather", x), dim, "gather")
    return this_rank().call("gather", axis, (_root("gather", root, axis), dim))


@_collective
def scatter(x: Tensor, axis: Axis, root: int = 0, dim: int = 0) -> Call:
    """Cut what the rank at index `root` holds into one piece per rank of `axis`; the others' x only gives the shape.

    x [.., R n, ..]   ->   y [.., n, ..]: piece i of the root's x on the rank at index i
    cost      (R-1)/R of x is sent by the root
    backward  dx = gather(dy): on the root, zeros elsewhere
    Raises MeshError where the axis has no such position, ShapeError where R does not divide the dim.
    """
    dim = dim_of(check_tensor("scatter", x), dim, "scatter")
    return this_rank().call("scatter", axis, (_root("scatter", root, axis), dim, _equal_sizes("scatter", x, dim, axis)))


@_collective
def ppermute(x: Tensor, axis: Axis, perm: Sequence[tuple[int, int]]) -> Call:
    """Send x along pairs (from index, to index) of `axis`; a rank that is sent nothing gets zeros.

    x [...]   ->   y [...]: what the sender holds, in its shape
    backward  dx = ppermute(dy), pairs reversed
    Raises MeshError if a position is not on the axis, sends twice or receives twice.
    """
    check_tensor("ppermute", x)
    return this_rank().call("ppermute", axis, (pairs_of(perm),), _peers_in)


@_collective
def ring_shift(x: Tensor, axis: Axis, shift: int = 1) -> Call:
    """Pass x on around the ring of `axis`: what index i holds goes to index i + shift.

    x [...]   ->   y [...]: what index i - shift holds
    cost      x is sent once by each rank, in one hop
    backward  dx = ring_shift(dy, -shift)
    """
    check_tensor("ring_shift", x)
    if shift.__class__ is not int:
        shift = whole_number(shift, "ring_shift: shift")
    return this_rank().call("ring_shift", axis, (shift,), _neighbors)


def barrier(axis: Axis | None = None) -> None:
    """Wait until every rank of `axis` (of the whole mesh, if None) has arrived."""
    rank = this_rank()
    rank.do(rank.call("barrier", rank.mesh.axis_names if axis is None else axis), _NOTHING)


def _root(op: str, root: int, axis: Axis) -> int:
    place = this_rank().place(axis)
    return position_of(op, root, len(place.group), place.label)


def _equal_sizes(op: str, x: Tensor, dim: int, axis: Axis) -> tuple[int, ...]:
    """The size of each rank's piece along `dim`."""
    place = this_rank().place(axis)
    check_divides(op, x, dim, place)
    return (x.shape[dim] // len(place.group),) * len(place.group)


_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


def _neighbors(place: Place, shift: int) -> Peers:
    group, index = place.group, place.index
    return group[(index + shift) % len(group)], group[(index - shift) % len(group)]


def _peers_in(place: Place, pairs: tuple[tuple[int, int], ...]) -> Peers:
    check_pairs(pairs, len(place.group), place.label)
    target = next((place.group[b] for a, b in pairs if a == place.index), None)
    source = next((place.group[a] for a, b in pairs if b == place.index), None)
    return target, source
