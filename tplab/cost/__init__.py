"""What things cost: clusters and their links, collectives by algorithm, products, and what layers keep."""

from tplab.cost.cluster import Chip, Cluster, Link, find
from tplab.cost.collectives import (
    OPS,
    Cost,
    algorithms,
    best,
    bytes_sent,
    collective,
    crossover_bytes,
    lower_bound,
    matmul_bytes,
    matmul_flops,
)

__all__ = [
    "OPS",
    "Chip",
    "Cluster",
    "Cost",
    "Link",
    "algorithms",
    "best",
    "bytes_sent",
    "collective",
    "crossover_bytes",
    "find",
    "lower_bound",
    "matmul_bytes",
    "matmul_flops",
]
