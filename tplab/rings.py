"""The rings of both frameworks, and the order in which they move pieces: what each rank receives, or sends, hop by hop,
in each direction.

This file uses no framework: each gives `rings_over` what it does with its arrays. In JAX, a rank's index is known only
when the program runs. The overlapped layers keep their weights in this order too: `async_weight` and `blocking_weight`
convert them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from tplab.errors import ShapeError, one_of
from tplab.mesh import Axis
from tplab.sharding import share

if TYPE_CHECKING:
    import numpy as np

Direction = Literal["up", "down", "both", "split"]
DIRECTIONS = ("up", "down", "both", "split")


class RingPiece(NamedTuple):
    """A piece, or half of one, that a rank receives or sends.

    distance   how many hops away the owner is, counted in the direction of the ring; 0: the rank's own piece
    owner      the index of the rank that the piece comes from, or is meant for
    begin      the first element of the half, counted from the start of the piece; it has `size` elements
    """

    distance: int
    owner: Any
    begin: int
    size: int


class Lanes(NamedTuple):
    """A rank's pieces: those that travel up and those that travel down, each in the order of hops, and its own."""

    up: list[RingPiece]
    down: list[RingPiece]
    own: RingPiece

    def in_places(self, up: Sequence[Any], down: Sequence[Any]) -> list[Any]:
        """The values for the pieces of both lanes, in the order of the pieces' distances."""
        pairs = [*zip(self.up, up, strict=True), *zip(self.down, down, strict=True)]
        return [item for _, item in sorted(pairs, key=lambda pair: pair[0].distance)]


def gather_lanes(index: Any, num_ranks: int, size: int, direction: str) -> Lanes:
    """The pieces of `size` elements that the rank at `index` gets from the others, in the order of arrival.

    "up"      from index - 1, index - 2, ...
    "down"    from index + 1, index + 2, ...
    "both"    ceil((R-1)/2) as "up", floor((R-1)/2) as "down"; distances are counted as for "up"
    "split"   first halves (the larger ones if `size` is odd) as "up", second halves as "down"
    Raises ValueError for another direction.
    """
    one_of("direction", direction, DIRECTIONS)

    def pieces(way: int, begin: int = 0, length: int = size) -> list[RingPiece]:
        return [RingPiece(hops, (index + way * hops) % num_ranks, begin, length) for hops in range(1, num_ranks)]

    half = size - size // 2
    own = RingPiece(0, index, 0, size)
    if direction == "split":
        return Lanes(pieces(-1, 0, half), pieces(1, half, size - half), own)
    if direction == "down":
        return Lanes([], pieces(1), own)
    rising = pieces(-1)
    hops_up = num_ranks - 1 if direction == "up" else num_ranks // 2
    return Lanes(rising[:hops_up], rising[hops_up:][::-1], own)


def scatter_lanes(index: Any, num_ranks: int, size: int, direction: str) -> Lanes:
    """The parts of `size` elements that the rank at `index` adds to the sums of the others, in the order of hops.

    These are the same pieces as in gather_lanes. A sum travels towards its owner, so the part for the nearest owner
    comes last. With "both", the parts of the larger distances (counted as there) go up, and the others go down.
    """
    up, down, own = gather_lanes(index, num_ranks, size, direction)
    if direction == "both":
        ordered = [*up, *reversed(down)]
        nearest = num_ranks - 1 - num_ranks // 2
        return Lanes(ordered[nearest:], ordered[:nearest][::-1], own)
    return Lanes(up, down, own)


class RingAllGather(Protocol):
    def __call__(self, x: Any, axis: Axis, direction: Direction = "up", dim: int = -1) -> list[Any]: ...


class RingReduceScatter(Protocol):
    def __call__(self, parts: Sequence[Any], axis: Axis, direction: Direction = "up", dim: int = -1) -> Any: ...


def rings_over(
    module: str,
    *,
    axis_size: Callable[[Axis], int],
    ready: Callable[[Any, Axis], Any],
    starts: Callable[[Any], object],
    hop: Callable[[Any, Axis, int], Any],
    landed: Callable[[Any], Any],
    add: Callable[[Any, Any], Any],
    halves: Callable[[Any, int], tuple[Any, Any]],
    join: Callable[[Any, Any, int], Any],
    split: str,
) -> tuple[RingAllGather, RingReduceScatter]:
    """`ring_all_gather` and `ring_reduce_scatter` of a framework, in its `module`. All functions but the first take
    structures of arrays.

    ready    what a ring needs of the arrays     starts   is told of the arrays that are sent first
    hop      begins to pass arrays on            landed   waits for what arrives
    halves   cuts every array in two             join     the reverse          split   code that makes a list of parts
    """

    def ring_all_gather(x: Any, axis: Axis, direction: Direction = "up", dim: int = -1) -> list[Any]:
        """Every rank's x, in the order in which they arrive around a ring.

        x          an array, or any structure of arrays
        "up"       R pieces, place k from index i - k;  R-1 hops
        "down"     R pieces, place k from index i + k;  R-1 hops
        "both"     R pieces in the order of "up"; ceil((R-1)/2) hops up while floor((R-1)/2) go down
        "split"    2R halves, cut in two along `dim`: the first halves as "up", then the second halves as "down"
        cost       (R-1) x is sent by each rank
        """
        lanes = gather_lanes(0, axis_size(axis), 1, direction)  # the rank's index does not matter here
        first = second = x = ready(x, axis)
        if direction == "split":
            first, second = halves(x, dim)
        up, down = [first], [second]
        for number in range(max(len(lanes.up), len(lanes.down))):  # both at once
            goes_up, goes_down = number < len(lanes.up), number < len(lanes.down)
            rising = hop(up[-1], axis, 1) if goes_up else None
            sinking = hop(down[-1], axis, -1) if goes_down else None
            up += [landed(rising)] if goes_up else []
            down += [landed(sinking)] if goes_down else []
        return [*up, *down] if direction == "split" else [x, *lanes.in_places(up[1:], down[1:])]

    def ring_reduce_scatter(parts: Sequence[Any], axis: Axis, direction: Direction = "up", dim: int = -1) -> Any:
        """Add up one part of every rank's list: each rank ends with one sum.

        parts      R arrays (or structures of them), in the order in which ring_all_gather returns them
        "up"       index i gets sum_j parts_j[(j-1-i) mod R];  R-1 hops to i + 1
        "down"     index i gets sum_j parts_j[(i-j-1) mod R];  R-1 hops to i - 1
        "both"     the sums of "up"; ceil((R-1)/2) hops up while floor((R-1)/2) go down
        "split"    parts cut in two along `dim`: the first halves as "up", the second as "down", joined again
        cost       (R-1)/R of all parts is sent by each rank
        """
        num_ranks, parts = axis_size(axis), list(parts)
        if len(parts) != num_ranks:
            raise ShapeError(
                f"ring_reduce_scatter needs one part for each of the {num_ranks} ranks of axis {axis!r}, but got "
                f"{len(parts)}; {split.format(num_ranks)} makes a list of them"
            )
        first = second = parts = ready(parts, axis)
        lanes = scatter_lanes(0, num_ranks, 1, direction)  # the part at place k is for the rank at distance k + 1
        if direction == "split":
            first, second = zip(*(halves(part, dim) for part in parts), strict=True)
        rising, sinking = [first[p.distance - 1] for p in lanes.up], [second[p.distance - 1] for p in lanes.down]
        starts([rising[:1], sinking[:1]])
        up = down = None
        for number in range(max(len(rising), len(sinking))):  # both sums at once; a part is added before each hop
            going_up = hop(plus(up, rising[number]), axis, 1) if number < len(rising) else None
            going_down = hop(plus(down, sinking[number]), axis, -1) if number < len(sinking) else None
            up = up if going_up is None else landed(going_up)
            down = down if going_down is None else landed(going_down)
        if direction == "split":
            return join(plus(up, first[-1]), plus(down, second[-1]), dim)
        return plus(down, plus(up, parts[-1]))

    def plus(received: Any, part: Any) -> Any:
        return part if received is None else add(received, part)

    for made in (ring_all_gather, ring_reduce_scatter):
        made.__module__, made.__qualname__ = module, made.__name__
    return ring_all_gather, ring_reduce_scatter


# --- weights of the overlapped layers, kept in the order in which a ring brings what they multiply -------------------


def async_weight(weight: Any, num_ranks: int, mode: str, direction: str = "up") -> Any:
    """The weight of a blocking layer as the overlapped layers of R ranks keep it: the same numbers in another order.

    weight [F, D], whole, as in nn.Linear   ->   stacked [R (rank), R (arrival), F/R, D/R]
    "gather"    stacked[i, k] = rows of i, columns of (i-k) mod R: what multiplies the k-th piece of x that i gets
    "scatter"   stacked[j, k] = rows of (j-1-k) mod R, columns of j: what makes the k-th part of y that j sends
    direction   "up" and "both" as above; "down": (i+k) and (j+1+k). "split": each block's first half (of its columns
                for "gather", of its rows for "scatter"; the larger one of an odd number) as "up", the second as "down"

    Works for NumPy, torch and JAX arrays. Raises ShapeError if R does not divide F and D.
    """
    rows, columns = _block_sizes(weight.shape, num_ranks, mode, direction)
    order, rank = _order(num_ranks, columns if mode == "gather" else rows, mode, direction)
    if mode == "scatter":
        return weight.reshape(-1, num_ranks, columns)[order, rank].reshape(num_ranks, num_ranks, rows, columns)
    of_rank = weight.reshape(num_ranks, rows, -1).swapaxes(1, 2)  # [rank, D, F/R]
    return of_rank[rank, order].reshape(num_ranks, num_ranks, columns, rows).swapaxes(2, 3)


def blocking_weight(stacked: Any, mode: str, direction: str = "up") -> Any:
    """The reverse of async_weight: stacked [R, R, F/R, D/R] -> weight [F, D], bit for bit."""
    if len(stacked.shape) != 4 or stacked.shape[0] != stacked.shape[1]:
        raise ShapeError(
            f"blocking_weight takes [R, R, F/R, D/R], the pieces of each of R ranks, but got {list(stacked.shape)}; "
            "stacked.reshape(R, R, ...) makes it from the pieces of all ranks joined along dim 0"
        )
    num_ranks, _, rows, columns = stacked.shape
    shape = num_ranks * rows, num_ranks * columns
    _block_sizes(shape, num_ranks, mode, direction)
    order, rank = _order(num_ranks, columns if mode == "gather" else rows, mode, direction)
    back = order.argsort(axis=1)
    if mode == "scatter":
        return stacked.reshape(num_ranks, -1, columns)[rank, back].swapaxes(0, 1).reshape(shape)
    of_rank = stacked.swapaxes(2, 3).reshape(num_ranks, -1, rows)  # [rank, D, F/R]
    return of_rank[rank, back].swapaxes(1, 2).reshape(shape)


def _order(num_ranks: int, size: int, mode: str, direction: str) -> tuple[np.ndarray, np.ndarray]:
    """[rank, position] -> which element of a dim of R pieces a rank keeps there: piece by piece as they arrive or, for
    "scatter", as they leave, with its own last. Also returns the ranks [R, 1], for indexing."""
    import numpy as np  # here, so that `import tplab` stays quick

    order = []
    for rank in range(num_ranks):
        up, down, own = gather_lanes(rank, num_ranks, size, direction)
        last = num_ranks if mode == "scatter" else 0
        pieces = sorted([own, *up, *down], key=lambda piece: (piece.distance or last, piece.begin))
        order.append([piece.owner * size + piece.begin + place for piece in pieces for place in range(piece.size)])
    return np.array(order).reshape(num_ranks, num_ranks * size), np.arange(num_ranks)[:, None]


def _block_sizes(shape: Sequence[int], num_ranks: int, mode: str, direction: str) -> tuple[int, int]:
    """Rows and columns of one of the R x R blocks."""
    if mode not in ("gather", "scatter"):
        raise ValueError(f"mode is {mode!r}; it must be 'gather' or 'scatter': only these have a blocking form")
    one_of("direction", direction, DIRECTIONS)
    if len(shape) != 2:
        raise ShapeError(f"a weight is a matrix [F, D], as nn.Linear has it, not {list(shape)}")
    rows, columns = (share(size, num_ranks, f"dim {dim} of the weight has size") for dim, size in enumerate(shape))
    return rows, columns
