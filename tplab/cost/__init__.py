"""Cost models: clusters and links, collectives by algorithm, matrix products, overlap, and saved activations."""

from tplab.cost.activations import SavedTensor, SavedTensors, activation_bytes, activation_tensors
from tplab.cost.algorithms import OPS, Cost, algorithms
from tplab.cost.chip import Chip
from tplab.cost.cluster import Cluster
from tplab.cost.collectives import (
    best,
    bytes_sent,
    collective,
    lower_bound,
)
from tplab.cost.data_sheets import (
    A100,
    B200,
    B300,
    GB200,
    GB300,
    H100,
    H200,
)
from tplab.cost.fabric import Fabric
from tplab.cost.link import Link
from tplab.cost.named import (
    H100_MEASURED,
    NAMED,
    find,
)
from tplab.cost.overlap import gather_seconds, pays_from, scatter_seconds

__all__ = [
    "A100",
    "B200",
    "B300",
    "GB200",
    "GB300",
    "H100",
    "H100_MEASURED",
    "H200",
    "NAMED",
    "OPS",
    "Chip",
    "Cluster",
    "Cost",
    "Fabric",
    "Link",
    "SavedTensor",
    "SavedTensors",
    "activation_bytes",
    "activation_tensors",
    "algorithms",
    "best",
    "bytes_sent",
    "collective",
    "find",
    "gather_seconds",
    "lower_bound",
    "pays_from",
    "scatter_seconds",
]
