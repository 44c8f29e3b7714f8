"""Overlapped linear layers on the modelled clock: formulas for their forward pass, blocking and overlapped.

`gather_seconds` and `scatter_seconds` return the same times as `run(..., cluster=...)`; `pays_from` says from which
size the overlapped layer is faster. Below that size, R small products cost more than the messages that they hide.
"""

from __future__ import annotations

from typing import NamedTuple

from tplab.cost import collectives as cost
from tplab.cost.cluster import Cluster
from tplab.cost.kernels import matmul_bytes, matmul_flops
from tplab.cost.named import find
from tplab.errors import one_of
from tplab.sharding import share

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Seconds(NamedTuple):
    """A layer's forward pass on the modelled clock."""

    blocking: float
    overlapped: float


def gather_seconds(
    tokens: int, in_features: int, out_features: int, num_ranks: int, cluster: str | Cluster, dtype: str = "bfloat16"
) -> Seconds:
    """all_gather(x) @ W.T of x [tokens, D/R] and W [F/R, D] on each of R ranks, without a bias; R = num_ranks.

    blocking     all_gather + product
    overlapped   first + (R-2) max(product, hop) + max(first, hop) - first + product
                 where first = x W_0.T, product: y += x W_k.T, hop: one message of x
    """
    layer = _Layer(tokens, in_features, out_features, num_ranks, find(cluster), dtype)
    x_bytes = tokens * layer.inputs * layer.itemsize
    gathered = cost.collective("all_gather", x_bytes, num_ranks, layer.cluster).seconds
    blocking = gathered + layer.product(in_features, layer.outputs)
    first, product = layer.product(layer.inputs, layer.outputs), layer.product(layer.inputs, layer.outputs, adds=True)
    if num_ranks == 1:
        return Seconds(blocking, first)
    hop = layer.link.seconds(x_bytes)
    return Seconds(blocking, max(first, hop) + (num_ranks - 2) * max(product, hop) + product)


def scatter_seconds(
    tokens: int, in_features: int, out_features: int, num_ranks: int, cluster: str | Cluster, dtype: str = "bfloat16"
) -> Seconds:
    """reduce_scatter(x @ W.T) of x [tokens, D/R] and W [F, D/R] on each of R ranks, without a bias.

    blocking     product + reduce_scatter
    overlapped   product + (R-1) (max(product, hop) + sum), where product = x W_k.T, hop: one message of y, sum: y += it
    """
    layer = _Layer(tokens, in_features, out_features, num_ranks, find(cluster), dtype)
    y_bytes = tokens * layer.outputs * layer.itemsize
    scattered = cost.collective("reduce_scatter", num_ranks * y_bytes, num_ranks, layer.cluster).seconds
    product, hop = layer.product(layer.inputs, layer.outputs), layer.link.seconds(y_bytes)
    total = layer.cluster.compute_seconds(tokens * layer.outputs, 3 * y_bytes, dtype)
    overlapped = product + (num_ranks - 1) * (max(product, hop) + total)
    return Seconds(layer.product(layer.inputs, out_features) + scattered, overlapped)


def pays_from(
    in_features: int,
    out_features: int,
    num_ranks: int,
    cluster: str | Cluster,
    dtype: str = "bfloat16",
    mode: str = "gather",
    limit: int = 1 << 20,
) -> int | None:
    """The number of tokens from which the overlapped layer is faster than the blocking one, or None if it is not faster
    even with `limit` tokens. Tries powers of two first, then the numbers between the last two."""
    one_of("mode", mode, ("gather", "scatter"))
    seconds = gather_seconds if mode == "gather" else scatter_seconds

    def pays(tokens: int) -> bool:
        blocking, overlapped = seconds(tokens, in_features, out_features, num_ranks, cluster, dtype)
        return overlapped < blocking

    tokens, found = limit, None
    while tokens and pays(tokens):
        tokens, found = tokens // 2, tokens
    if found is None:
        return None
    while found - tokens > 1:
        middle = (tokens + found) // 2
        tokens, found = (tokens, middle) if pays(middle) else (middle, found)
    return found


class _Layer:
    """A linear layer whose features are sharded over ranks 0 to R-1 of a cluster."""

    def __init__(self, tokens: int, in_features: int, out_features: int, num_ranks: int, cluster: Cluster, dtype: str):
        one_of("dtype", dtype, ITEMSIZE)
        self.tokens, self.cluster, self.dtype, self.itemsize = tokens, cluster, dtype, ITEMSIZE[dtype]
        self.inputs = share(in_features, num_ranks, "in_features is")
        self.outputs = share(out_features, num_ranks, "out_features is")
        self.link = cluster.group_link(range(num_ranks))

    def product(self, inputs: int, outputs: int, adds: bool = False) -> float:
        """x [tokens, inputs] @ w.T; with `adds`, it is added to y, which is then read as well."""
        num_bytes = matmul_bytes(self.tokens, inputs, outputs, self.itemsize)
        num_bytes += self.tokens * outputs * self.itemsize * adds
        flops, matmul = matmul_flops(self.tokens, inputs, outputs), (self.tokens, outputs, inputs, 1)
        return self.cluster.compute_seconds(flops, num_bytes, self.dtype, matmul)
