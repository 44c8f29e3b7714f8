"""From how many tokens per rank the messages of a training step are hidden behind its computing.

More tokens mean more computing but no more bytes, since gradients and parameters are as large as the model. So from
some number of tokens per rank on, computing takes longer than sending, and messages sent meanwhile cost no time. At
peak rates, F FLOP/s and B bytes/s, this number is (R-1)/R F/B for data parallelism and for ZeRO stage 3, whatever the
size of the model.

`tokens_to_hide` finds it for a transformer block in bfloat16 whose parameters travel as one message, from
`Cluster.collective_seconds` and `Chip.matmul_seconds`. A data sheet ("h100") has peak rates, and does not give a bound:
slower kernels hide more, and a slower network needs more tokens. A forecast ("h100-measured") gives realistic numbers.
`thresholds` compares both, for the networks of `H100S`.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal, NamedTuple, get_args

from tplab.cost import Cluster, find
from tplab.data.quantization import quantized_bytes
from tplab.errors import one_of

Scheme = Literal["data parallel", "ZeRO 3", "ZeRO++"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
WIDTH = 8192
"""The default width of the block, as in a model of 70 billion parameters."""


H100S: tuple[tuple[str, str], ...] = (
    ("h100", "infiniband-ndr"),
    ("h100-measured", "infiniband-ndr"),
    ("h100-measured", "playbook"),
)
"""The clusters of `thresholds`: nodes of 8 H100s and the network between them, as arguments of `tplab.cost.find`."""


class StepSeconds(NamedTuple):
    """Seconds that one block computes and sends, each by itself."""

    computing: float
    sending: float


class Threshold(NamedTuple):
    """How many tokens per rank hide the messages on a cluster.

    kind        what the number rests on, and the network: `Cluster.kind_on`
    low, high   the same if messages between nodes took less or more time, by the median error of their network; equal
                to tokens if the network was not measured, or if there is only one node
    """

    kind: str
    tokens: int
    low: int
    high: int

    def __str__(self) -> str:
        band = f" ({self.low:,} to {self.high:,})" if self.low < self.high else ""
        return f"{self.tokens:6,} tokens per rank{band}: {self.kind}"


def block_parameters(width: int = WIDTH) -> int:
    """The parameters of a block's four matrices: 12 D^2."""
    return sum(inputs * outputs for inputs, outputs in _matrices(width))


def step_seconds(
    scheme: Scheme, tokens: int, cluster: str | Cluster, num_ranks: int, width: int = WIDTH
) -> StepSeconds:
    """How long a block computes and how long it sends, in the passes whose messages can be hidden.

    M parameters, 2 bytes each; nbytes below is that of the whole tensor.

    scheme          computing               sending
    data parallel   backward                all_reduce of 2 M
    ZeRO 3          forward and backward    all_gather of 2 M, twice, and reduce_scatter of 2 M
    ZeRO++          forward and backward    all_gather of codes of 8 bits; all_gather of 2 M inside the node; all_to_all
                                            of codes of 4 bits inside the node, and of the node's sums across nodes

    Attention itself, which sends nothing, is left out, and so is the time for quantisation in ZeRO++.
    """
    known = find(cluster)
    one_of("scheme", scheme, SCHEMES)
    once = sum(known.chip.matmul_seconds(tokens, outputs, inputs, "bfloat16") for inputs, outputs in _matrices(width))
    passes = 2 if scheme == "data parallel" else 3  # the backward pass has two matmuls for each of the forward pass
    return StepSeconds(passes * once, _sending(scheme, block_parameters(width), known, num_ranks))


def tokens_to_hide(
    scheme: Scheme, cluster: str | Cluster, num_ranks: int, width: int = WIDTH, slower: float = 1.0
) -> int:
    """The least number of tokens per rank with which `computing` takes as long as `sending`.

    slower   a factor on the cluster's times for sending
    """

    def is_hidden(tokens: int) -> bool:
        computing, sending = step_seconds(scheme, tokens, cluster, num_ranks, width)
        return computing >= slower * sending

    enough = 1
    while not is_hidden(enough):
        enough *= 2
    return 1 + bisect_left(range(1, enough), True, key=is_hidden)


def thresholds(scheme: Scheme, num_ranks: int, width: int = WIDTH) -> list[Threshold]:
    """`tokens_to_hide` on H100s: by the data sheet, and as a forecast for each of two networks."""
    found = list[Threshold]()
    for name, fabric in H100S:
        cluster = find(name, fabric)
        of = cluster.fabric.error if cluster.fabric and num_ranks > (cluster.node_size or num_ranks) else None
        error = of.median if of else 0.0
        low, tokens, high = (tokens_to_hide(scheme, cluster, num_ranks, width, 1 + off) for off in (-error, 0.0, error))
        row = Threshold(cluster.kind_on(num_ranks), tokens, low, high)
        found += [row] if row not in found else []  # in one node the network does not matter
    return found


def _matrices(width: int) -> list[tuple[int, int]]:
    """Queries, keys and values; attention's output; and the two layers of the MLP."""
    return [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]


def _sending(scheme: Scheme, parameters: int, cluster: Cluster, num_ranks: int) -> float:
    plain = 2 * parameters
    if scheme == "data parallel":
        return cluster.collective_seconds("all_reduce", plain, num_ranks)
    if scheme == "ZeRO 3":
        gather, scatter = (cluster.collective_seconds(op, plain, num_ranks) for op in ("all_gather", "reduce_scatter"))
        return 2 * gather + scatter
    node = min(cluster.node_size or num_ranks, num_ranks)
    weights, gradients = (quantized_bytes(parameters, bits, 256) for bits in (8, 4))
    forward = cluster.collective_seconds("all_gather", weights.total, num_ranks)
    backward = cluster.collective_seconds("all_gather", plain, node)
    inside = cluster.collective_seconds("all_to_all", gradients.total, node)
    heads = range(0, num_ranks, node)  # the ranks that have the same piece, one per node
    return forward + backward + inside + cluster.collective_seconds("all_to_all", gradients.total / node, heads)
