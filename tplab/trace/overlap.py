"""Overlap: how much of a program's communication is hidden behind its computing, counted and by formula.

`overlap` reads it off any trace. `gather_seconds` and `scatter_seconds` are the modelled times of a linear layer,
blocking and overlapped, and the same that `run(..., cluster=...)` finds; `pays_from` is where the one becomes quicker
than the other. Below that, R small products cost more than the messages that they hide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tplab.cost import collectives as cost
from tplab.cost.cluster import Cluster, find
from tplab.sharding import share

if TYPE_CHECKING:
    import numpy as np

    from tplab.trace.trace import Trace

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


# --- counted ---------------------------------------------------------------------------------------------------------


class Overlap(NamedTuple):
    """Of each rank, in the unit of the trace's clock; what runs at once counts once.

    communication   time in which something was on its way to the rank, or a collective ran that it takes part in
    computing       time in which it computed
    hidden          time of both at once
    """

    communication: np.ndarray
    computing: np.ndarray
    hidden: np.ndarray

    @property
    def exposed(self) -> np.ndarray:
        """Communication beside which the rank did not compute."""
        return self.communication - self.hidden

    @property
    def possible(self) -> np.ndarray:
        """What can be hidden at most, by any order of the same work: a rank can hide no more than it computes.

        It is a bound from above. A ring whose hops are longer than the products beside them stays below it, at
        (R-1)/R of its computing: of R products the first (of a reduce_scatter) or the last (of an all_gather) has no
        hop beside it.
        """
        import numpy as np

        return np.minimum(self.communication, self.computing)

    @property
    def share(self) -> float:
        """Hidden / communication, over all ranks: 0 to 1. 1 where nothing is communicated."""
        return _ratio(self.hidden, self.communication)

    @property
    def share_of_possible(self) -> float:
        """Hidden / possible, over all ranks: 0 to 1."""
        return _ratio(self.hidden, self.possible)

    def __str__(self) -> str:
        return (
            f"{self.share:.1%} of the communication is hidden behind computing; "
            f"{self.share_of_possible:.1%} of what can be hidden"
        )


def overlap(trace: Trace) -> Overlap:
    """How much of the communication in a trace, of any origin, ran while the rank computed. n events: O(n log n)."""
    import numpy as np

    kind, rank = trace.column("kind"), trace.column("rank")
    start, end = trace.column("start"), trace.column("end")
    is_communication = (kind == "receive") | (kind == "collective")
    is_computing = kind == "compute"
    figures = []
    for number in trace.mesh.ranks:
        here = rank == number
        spans = [_union(start[here & kinds], end[here & kinds]) for kinds in (is_communication, is_computing)]
        both = _length(_union(*np.concatenate(spans).T))
        lengths = [_length(span) for span in spans]
        figures.append((*lengths, min(max(0.0, sum(lengths) - both), *lengths)))  # rounding may leave -1e-16
    return Overlap(*np.array(figures).T)


def _union(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The time that these spans cover, as spans that do not touch: [number, (start, end)]."""
    import numpy as np

    if not len(start):
        return np.empty((0, 2))
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    begins = np.append(True, start[1:] > end[:-1])
    return np.stack([start[begins], end[np.append(begins[1:], True)]], 1)


def _length(spans: np.ndarray) -> float:
    return float((spans[:, 1] - spans[:, 0]).sum())


def _ratio(part: np.ndarray, whole: np.ndarray) -> float:
    return float(part.sum() / whole.sum()) if whole.sum() > 0 else 1.0


# --- by formula ------------------------------------------------------------------------------------------------------


class Seconds(NamedTuple):
    """A layer's forward pass on the modelled clock."""

    blocking: float
    overlapped: float


def gather_seconds(
    tokens: int, in_features: int, out_features: int, num_ranks: int, cluster: str | Cluster, dtype: str = "bfloat16"
) -> Seconds:  # fmt: skip
    """all_gather(x) @ W.T of x [tokens, D/R] and W [F/R, D] on each of R ranks, without a bias; R = num_ranks.

    blocking     all_gather + product
    overlapped   first + (R-2) max(product, hop) + max(first, hop) - first + product
                 where first = x W_0.T, product: y += x W_k.T, hop: one message of x
    """
    layer = _Layer(tokens, in_features, out_features, num_ranks, find(cluster), dtype)
    x_bytes = tokens * layer.inputs * layer.itemsize
    gathered = cost.collective("all_gather", x_bytes, num_ranks, layer.link).seconds
    blocking = gathered + layer.product(in_features, layer.outputs)
    first, product = layer.product(layer.inputs, layer.outputs), layer.product(layer.inputs, layer.outputs, adds=True)
    if num_ranks == 1:
        return Seconds(blocking, first)
    hop = layer.link.seconds(x_bytes)
    return Seconds(blocking, max(first, hop) + (num_ranks - 2) * max(product, hop) + product)


def scatter_seconds(
    tokens: int, in_features: int, out_features: int, num_ranks: int, cluster: str | Cluster, dtype: str = "bfloat16"
) -> Seconds:  # fmt: skip
    """reduce_scatter(x @ W.T) of x [tokens, D/R] and W [F, D/R] on each of R ranks, without a bias.

    blocking     product + reduce_scatter
    overlapped   product + (R-1) (max(product, hop) + sum), where product = x W_k.T, hop: one message of y, sum: y += it
    """
    layer = _Layer(tokens, in_features, out_features, num_ranks, find(cluster), dtype)
    y_bytes = tokens * layer.outputs * layer.itemsize
    scattered = cost.collective("reduce_scatter", num_ranks * y_bytes, num_ranks, layer.link).seconds
    product, hop = layer.product(layer.inputs, layer.outputs), layer.link.seconds(y_bytes)
    total = layer.cluster.compute_seconds(tokens * layer.outputs, 3 * y_bytes, dtype)
    overlapped = product + (num_ranks - 1) * (max(product, hop) + total)
    return Seconds(layer.product(layer.inputs, out_features) + scattered, overlapped)


def pays_from(
    in_features: int, out_features: int, num_ranks: int, cluster: str | Cluster, dtype: str = "bfloat16",
    mode: str = "gather", limit: int = 1 << 20,
) -> int | None:  # fmt: skip
    """The fewest tokens, a power of two, from which on the overlapped layer is quicker than the blocking one; None
    where it is not with `limit` of them."""
    if mode not in ("gather", "scatter"):
        raise ValueError(f"mode is {mode!r}; it must be 'gather' or 'scatter'")
    seconds = gather_seconds if mode == "gather" else scatter_seconds
    tokens, found = limit, None
    while tokens:
        blocking, overlapped = seconds(tokens, in_features, out_features, num_ranks, cluster, dtype)
        if overlapped >= blocking:
            break
        tokens, found = tokens // 2, tokens
    return found


class _Layer:
    """A linear layer whose features are sharded over ranks 0 to R-1 of a cluster."""

    def __init__(self, tokens: int, in_features: int, out_features: int, num_ranks: int, cluster: Cluster, dtype: str):
        if dtype not in ITEMSIZE:
            raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(ITEMSIZE)}")
        self.tokens, self.cluster, self.dtype, self.itemsize = tokens, cluster, dtype, ITEMSIZE[dtype]
        self.inputs = share(in_features, num_ranks, "in_features is")
        self.outputs = share(out_features, num_ranks, "out_features is")
        self.link = cluster.group_link(range(num_ranks))

    def product(self, inputs: int, outputs: int, adds: bool = False) -> float:
        """x [tokens, inputs] @ w.T; `adds`: to y, which is then read as well."""
        num_bytes = cost.matmul_bytes(self.tokens, inputs, outputs, self.itemsize)
        num_bytes += self.tokens * outputs * self.itemsize * adds
        return self.cluster.compute_seconds(cost.matmul_flops(self.tokens, inputs, outputs), num_bytes, self.dtype)
