"""What things cost: clusters and links, collectives by algorithm, matrix products, overlap, and saved activations."""

from tplab.cost.activations import SavedTensor, SavedTensors, activation_bytes, activation_tensors
from tplab.cost.algorithms import OPS, Cost, algorithms
from tplab.cost.chip import Chip
from tplab.cost.cluster import Cluster
from tplab.cost.collectives import (
    best,
    bytes_sent,
    collective,
    crossover_bytes,
    lower_bound,
)
from tplab.cost.data_sheets import (
    A100,
    B200,
    ETHERNET_1G,
    ETHERNET_10G,
    H100,
    ICI_V5E,
    INFINIBAND_HDR,
    INFINIBAND_NDR,
    LAPTOP,
    LAPTOP_CORE,
    LOOPBACK,
    NVLINK_3,
    NVLINK_4,
    NVLINK_5,
    TPU_V5E,
)
from tplab.cost.fabric import Fabric
from tplab.cost.link import Link
from tplab.cost.matmul import matmul_bytes, matmul_flops
from tplab.cost.named import (
    A100_MEASURED,
    A100_NODE,
    B200_MEASURED,
    B200_NODE,
    H100_MEASURED,
    H100_NODE,
    NAMED,
    SLOW_ETHERNET,
    THIS_LAPTOP,
    TPU_V5E_RING,
    find,
)
from tplab.cost.overlap import gather_seconds, pays_from, scatter_seconds

__all__ = [
    "A100",
    "A100_MEASURED",
    "A100_NODE",
    "B200",
    "B200_MEASURED",
    "B200_NODE",
    "ETHERNET_1G",
    "ETHERNET_10G",
    "H100",
    "H100_MEASURED",
    "H100_NODE",
    "ICI_V5E",
    "INFINIBAND_HDR",
    "INFINIBAND_NDR",
    "LAPTOP",
    "LAPTOP_CORE",
    "LOOPBACK",
    "NAMED",
    "NVLINK_3",
    "NVLINK_4",
    "NVLINK_5",
    "OPS",
    "SLOW_ETHERNET",
    "THIS_LAPTOP",
    "TPU_V5E",
    "TPU_V5E_RING",
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
    "crossover_bytes",
    "find",
    "gather_seconds",
    "lower_bound",
    "matmul_bytes",
    "matmul_flops",
    "pays_from",
    "scatter_seconds",
]
