"""What the labs say about speed and memory: each sentence, and the rows or the model that it must agree with.

There are three kinds of entries. `says` is a part of a sentence, as `tests.labs.prose` reads it in the lab.

    Claim    holds() is True, or has the values that the numbers in `says` are rounded from, one by one
    Quote    a cell of the lab prints it: each number in `says` is one of those in these printed lines, rounded
    Given    claims nothing: a size that the lab chooses, a definition, or what other software has for a default

To cover one more lab, add it to LABS: the tests then list each of its sentences that has no entry.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils import skip_init

import tplab.torch as tt
from tests.labs.prose import numbers, printed
from tplab import Mesh
from tplab.cost import Cluster, Link, find
from tplab.cost.measured import Network, network
from tplab.data.hiding import H100S, Scheme, step_seconds, tokens_to_hide
from tplab.forecast.measured import Run, Sharded, llmfoundry, playbook
from tplab.trace import overlap

NETWORKS = "03_network_levels"
DATA = "16_data_parallel"
ZERO = "17_zero"
QUANTISED = "18_quantised_communication"
AXES = "19_axes_and_nodes"

LABS = (NETWORKS, DATA, ZERO, QUANTISED, AXES)
"""The labs all of whose sentences about speed and memory have an entry."""


class Claim(NamedTuple):
    lab: str
    says: str
    holds: Callable[[], bool | Sequence[float]]


class Quote(NamedTuple):
    lab: str
    says: str
    lines: tuple[str, ...]


class Given(NamedTuple):
    lab: str
    says: str


SHEET, NDR, PLAYBOOK = (find(*on) for on in H100S)
ETHERNET = replace(SHEET, outer_link=Link("400 Gb/s for 8 GPUs", 20e-6, 50e9 / 8))

# ------------------------------------------------------------------------------------------------------ measured rows


@cache
def all_reduces() -> dict[int, Network]:
    """Nodes -> what was measured on the playbook's network."""
    return {row.nodes: row for row in network() if row.op == "all_reduce"}


def promised(cluster: Cluster, nodes: int) -> float:
    """The bus bandwidth of the same all_reduce as the model has it, over the measured one."""
    return all_reduces()[nodes].seconds / cluster.collective_seconds("all_reduce", 256e6, 8 * nodes)


@cache
def mpt() -> dict[int, Sharded]:
    """GPUs -> MPT-7B on H100s with 12,288 tokens for each."""
    return {r.gpus: r for r in llmfoundry() if (r.model, r.gpu, r.tokens) == ("7b", "h100_80gb", 12288)}


def mpt_slower(gpus: int) -> float:
    """By how many percent a GPU is slower than one of eight."""
    return 100 * (1 - mpt()[gpus].tokens_per_second / mpt()[8].tokens_per_second)


def mpt_sends(cluster: Cluster, gpus: int) -> float:
    """Seconds of the messages of its 32 blocks of width 4,096."""
    return 32 * step_seconds("ZeRO 3", 12288, cluster, gpus, 4096).sending


@cache
def three_billion() -> dict[int, Run]:
    """GPUs -> the playbook's fastest run of 3 billion parameters that only splits the batch."""
    found = dict[int, Run]()
    for run in playbook():
        if run.model.name == "playbook-3b" and run.plan.dp == run.plan.ranks:
            found[run.plan.dp] = min(found.get(run.plan.dp, run), run, key=lambda one: one.seconds)
    return found


# ----------------------------------------------------------------------------------------------------------- the model


def tokens(scheme: Scheme, ranks: int, *clusters: Cluster) -> list[int]:
    return [tokens_to_hide(scheme, cluster, ranks) for cluster in clusters]


def most_gpus(cluster: Cluster) -> int:
    """Over how many H100s, in whole nodes, 4 million tokens can be spread so that gradients hide."""
    few, many = 1, 1000  # nodes
    while many - few > 1:
        middle = (few + many) // 2
        enough = 8 * middle * tokens_to_hide("data parallel", cluster, 8 * middle) <= 4e6
        few, many = (middle, many) if enough else (few, middle)
    return 8 * few


def with_cards(cards: int, nodes: int) -> float:
    return replace(SHEET, cards=cards).collective_seconds("all_reduce", 2**30, 8 * nodes)


def gain(cluster: Cluster, tokens: int = 256) -> float:
    """How many times as fast a step is with ZeRO++, on 64 GPUs."""
    before, after = (step_seconds(scheme, tokens, cluster, 64) for scheme in ("ZeRO 3", "ZeRO++"))
    return max(before) / max(after)


def hidden(ranks: int, tokens: int) -> float:
    """The share of lab 16's gradients that is hidden, by the data sheet."""
    sizes = {"dtype": torch.bfloat16, "device": "meta"}
    model = nn.Sequential(*(skip_init(nn.Linear, 8192, 8192, bias=False, **sizes) for _ in range(16)))

    def step(x):
        tt.data_parallel(model, "dp", bucket_bytes=25e6, broadcast=False)
        model(x).mean().backward()

    x = torch.empty(tokens, 8192, dtype=torch.bfloat16, device="meta")
    return overlap(tt.run(step, Mesh(dp=ranks), x, cluster=SHEET).trace).share


def milliseconds(lab: str, line: str, network: str) -> float:
    """The first number with "ms" in the printed line that begins so and names this network."""
    (found,) = (one for one in printed(lab).splitlines() if one.startswith(line) and network in one)
    return numbers(found[len(line) : found.index(" ms")])[-1].value


def of_axes(order: str, axis: str, cluster: Cluster) -> float:
    """What lab 19 models for both all_reduces along an axis of 4 x 4 ranks, in ms."""
    mesh = Mesh(dp=4, tp=4) if order == "tp last" else Mesh(tp=4, dp=4)
    elements = 2 * 16384 // 4 * 4096 if axis == "tp" else 4096 * 16384 // 4
    return 2e3 * cluster.collective_seconds("all_reduce", 2 * elements, mesh.group(0, axis))


def dp_gains(cluster: Cluster) -> float:
    """What `dp` gains if `tp` comes first, as a share of what `tp` loses."""
    tp, dp = (of_axes("tp first", axis, cluster) - of_axes("tp last", axis, cluster) for axis in ("tp", "dp"))
    return -dp / tp


# ----------------------------------------------------------------------------------------------------------- sentences

CLAIMS = (
    Claim(
        NETWORKS,
        "it is much slower: in a cluster of H100s, each GPU sends 450 GB/s within its node and 50 GB/s across",
        lambda: [SHEET.inner_link.bandwidth / 1e9, SHEET.link(0, 8).bandwidth / 1e9],
    ),
    Claim(
        NETWORKS,
        "Every doubling halves the time, up to eight cards",
        lambda: all(1.9 < with_cards(c, k) / with_cards(2 * c, k) < 2.1 for c in (1, 2, 4) for k in (2, 4, 8, 16)),
    ),
    Claim(
        NETWORKS,
        "Sixteen would save only another tenth",
        lambda: all(0.08 < 1 - with_cards(16, k) / with_cards(8, k) < 0.12 for k in (2, 4, 8, 16)),
    ),
    Claim(
        NETWORKS,
        "eight cards of 50 GB/s carry 400 GB/s, and an NVLink port carries 450 GB/s",
        lambda: [50, 8 * SHEET.link(0, 8).bandwidth / 1e9, SHEET.inner_link.bandwidth / 1e9],
    ),
    Claim(
        NETWORKS,
        "On one or two nodes the data sheet is right within a tenth",
        lambda: all(abs(promised(SHEET, nodes) - 1) < 0.1 for nodes in (1, 2)),
    ),
    Claim(
        NETWORKS,
        "On 64 nodes it promises eleven times what was measured",
        lambda: round(promised(SHEET, 64)) == 11,
    ),
    Quote(NETWORKS, "on 64 nodes, 70 % of the time", ("   64   33 ( 12 to 177)         56 (70% of its time)",)),
    Claim(
        NETWORKS,
        "it is 40 % too low, and on 64 nodes 70 % too high",
        lambda: [100 * (1 - promised(PLAYBOOK, 2)), 64, 100 * (promised(PLAYBOOK, 64) - 1)],
    ),
    Claim(
        NETWORKS,
        "the users' own runs range from 12 to 177 GB/s",
        lambda: [all_reduces()[64].low / 1e9, all_reduces()[64].high / 1e9],
    ),
    Claim(
        NETWORKS,
        "On 64 nodes of one real cluster, less than a tenth of them was measured",
        lambda: promised(SHEET, 64) > 10,
    ),
    Given(NETWORKS, "for 1 GiB of gradients"),
    Given(NETWORKS, "the slower of the two levels sets the pace"),
    Given(NETWORKS, "the slower level sets the pace"),
    Given(NETWORKS, "for 256 MB on 1 to 64 nodes"),
    # ------------------------------------------------------------------------------------------------------------------
    Claim(DATA, "The gradients take 134 MB", lambda: [64 * 1024**2 * 2 / 1e6]),
    Quote(DATA, "about 70%", ("50 MB             2.90 ms, 71% hidden",)),
    Quote(
        DATA, "The size hardly matters between 5 and 50 MB", ("5 MB              2.92 ms", "50 MB             2.90 ms")
    ),
    Claim(
        DATA,
        "With 2,048 tokens, one node and two nodes hide nine tenths",
        lambda: all(0.85 < hidden(ranks, 2048) < 0.95 for ranks in (8, 16)),
    ),
    Claim(
        DATA,
        "a network card has only a ninth of NVLink's bandwidth",
        lambda: SHEET.inner_link.bandwidth == 9 * SHEET.link(0, 8).bandwidth,
    ),
    Claim(DATA, "$B$ is 400 GB/s: eight cards of 50 GB/s", lambda: [8 * SHEET.link(0, 8).bandwidth / 1e9, 50]),
    Claim(
        DATA,
        "about 1,900 tokens per rank inside a node, and about 2,500 tokens per rank on 64 GPUs",
        lambda: [*tokens("data parallel", 8, SHEET), *tokens("data parallel", 64, SHEET), 64],
    ),
    Claim(
        DATA,
        "a node needs about 1,400 tokens per rank",
        lambda: tokens("data parallel", 8, NDR),
    ),
    Claim(
        DATA,
        "measured matmuls are slower",
        lambda: (
            NDR.chip.matmul_seconds(1409, 32768, 8192, "bfloat16")
            > 1.2 * SHEET.chip.matmul_seconds(1409, 32768, 8192, "bfloat16")
        ),
    ),
    Claim(
        DATA,
        "64 GPUs need no more than a node",
        lambda: tokens("data parallel", 64, NDR) <= tokens("data parallel", 8, NDR),
    ),
    Claim(DATA, "they need about 3,300 tokens per rank", lambda: tokens("data parallel", 64, PLAYBOOK)),
    Claim(
        DATA,
        "the forecast says 2,700 GPUs, and the data sheet 1,600",
        lambda: [most_gpus(NDR), most_gpus(SHEET)],
    ),
    Claim(
        DATA,
        "it is only 600, because with 600 GPUs each needs about 6,500 tokens per rank",
        lambda: [most_gpus(PLAYBOOK), most_gpus(PLAYBOOK), *tokens("data parallel", 600, PLAYBOOK)],
    ),
    Claim(
        DATA,
        "each GPU has 8,192 tokens, more than the thresholds above ask for, and yet more than a third is lost",
        lambda: (
            max(tokens("data parallel", 128, SHEET, NDR, PLAYBOOK)) < 8192
            and 128 * three_billion()[128].seconds > 8 * three_billion()[8].seconds / (1 - 1 / 3)
        ),
    ),
    Given(DATA, "torch's own DistributedDataParallel uses 25 MiB"),
    Given(DATA, "More tokens per rank make the backward pass longer"),
    # ------------------------------------------------------------------------------------------------------------------
    Quote(ZERO, "the spike of 640 KiB", ("rank 0 holds at most 640 KiB (data parallel)",)),
    Claim(ZERO, "these alone are 120 GB (112 GiB)", lambda: [4 * 30, 4 * 30e9 / 2**30]),
    Claim(
        ZERO,
        "all messages hide from about 1,900 tokens per rank",
        lambda: tokens("ZeRO 3", 8, NDR) if tokens("ZeRO 3", 8, SHEET)[0] // 100 == 19 else False,
    ),
    Claim(
        ZERO,
        "about 2,200 tokens per rank with InfiniBand NDR and about 6,500 tokens per rank with the playbook's network",
        lambda: tokens("ZeRO 3", 64, NDR, PLAYBOOK),
    ),
    Claim(
        ZERO,
        "On 512 GPUs it is about 2,600 tokens per rank and about 20,500 tokens per rank",
        lambda: [512, *tokens("ZeRO 3", 512, NDR, PLAYBOOK)],
    ),
    Claim(
        ZERO,
        "a ring waits for each of its hops, and on the playbook's network a hop takes longer",
        lambda: PLAYBOOK.link(0, 8).latency > 3 * NDR.link(0, 8).latency,
    ),
    Claim(
        ZERO,
        "On 256 and 512 GPUs, each GPU is 5 and 9 % slower than on 8",
        lambda: [256, 512, mpt_slower(256), mpt_slower(512), 8],
    ),
    Claim(
        ZERO,
        "the messages alone would take longer than these steps took",
        lambda: all(mpt_sends(PLAYBOOK, gpus) > mpt()[gpus].seconds for gpus in (256, 512)),
    ),
    Claim(
        ZERO,
        "on 512 GPUs, even if the forecast were 30 % too high",
        lambda: mpt_sends(PLAYBOOK, 512) / 1.3 > mpt()[512].seconds,
    ),
    Claim(
        ZERO,
        "MosaicML's network was faster than that",
        lambda: mpt_sends(PLAYBOOK, 512) / 1.3 > mpt()[512].seconds,
    ),
    Claim(
        ZERO,
        "its messages fit into the step",
        lambda: all(mpt_sends(NDR, gpus) < row.seconds for gpus, row in mpt().items()),
    ),
    Claim(
        ZERO,
        "it would hide all of them",
        lambda: all(tokens_to_hide("ZeRO 3", NDR, gpus, 4096) < row.tokens for gpus, row in mpt().items()),
    ),
    Claim(
        ZERO,
        "hybrid sharding is slower, on the data sheet and in the forecast",
        lambda: all(
            milliseconds(ZERO, "hybrid:", name) > milliseconds(ZERO, "all 64:", name)
            for name in ("NDR, data sheet", "NDR, forecast")
        ),
    ),
    Quote(
        ZERO,
        "it takes 28.0 ms instead of 86.0 ms",
        ("all 64: 86.0 ms, 10% hidden (the playbook's network", "hybrid: 28.0 ms, 29% hidden (the playbook's network"),
    ),
    Given(ZERO, "and 16,384 tokens per rank, on eight H100s"),
    Given(ZERO, "GPUs of 80 GB (75 GiB)"),
    Given(ZERO, "as long as a layer computes for longer than its message takes"),
    # ------------------------------------------------------------------------------------------------------------------
    Quote(QUANTISED, "18% off instead of 13%", ("528 bytes, 18% off", "0 bytes, 13% off")),
    Claim(
        QUANTISED,
        "from about 2,500 tokens per rank, as in lab 17, and ZeRO++ from about 1,400 tokens per rank",
        lambda: [*tokens("ZeRO 3", 64, SHEET), 17, *tokens("ZeRO++", 64, SHEET)],
    ),
    Claim(
        QUANTISED,
        "with InfiniBand NDR is about 2,200 tokens per rank and about 1,300 tokens per rank; with the playbook's "
        "network, it is about 6,500 tokens per rank and about 2,400 tokens per rank",
        lambda: [tokens(scheme, 64, on)[0] for on in (NDR, PLAYBOOK) for scheme in ("ZeRO 3", "ZeRO++")],
    ),
    Claim(
        QUANTISED,
        "1.7 times as fast by the data sheets, 1.6 times with InfiniBand NDR, 2.7 times with the playbook's network, "
        "and 3.5 times on Ethernet",
        lambda: [gain(cluster) for cluster in (SHEET, NDR, PLAYBOOK, ETHERNET)],
    ),
    Claim(QUANTISED, "which is 3.25 GB for 13 billion parameters", lambda: [2 * 13 / 8, 13]),
    Given(QUANTISED, "off by more than half of $s$"),
    Given(QUANTISED, "are smaller than half of it, 0.25"),
    Given(QUANTISED, "an outlier, fifty times as large as a typical weight"),
    Given(QUANTISED, "as long as the slower of the two"),
    Given(QUANTISED, "Ethernet with 400 Gb/s per node"),
    # ------------------------------------------------------------------------------------------------------------------
    Quote(
        AXES,
        "the ranks wait 0.47 ms for their activations if tp is last, and 2.04 ms if it is first",
        ("tp 0.47 ms, dp 1.04 ms: InfiniBand NDR, data sheet", "tp 2.04 ms, dp 0.25 ms: InfiniBand NDR, data sheet"),
    ),
    Quote(AXES, "they wait 0.67 ms if it is last", ("tp 0.67 ms, dp 0.79 ms: InfiniBand NDR, forecast",)),
    Quote(
        AXES,
        "they wait 1.52 ms with InfiniBand NDR, and 4.08 ms with the playbook's network",
        ("tp 1.52 ms, dp 0.37 ms: InfiniBand NDR, forecast", "tp 4.08 ms, dp 0.37 ms: the playbook's network"),
    ),
    Claim(
        AXES,
        "dp is faster, but it gains only about half of what tp loses",
        lambda: all(0.45 < dp_gains(cluster) < 0.6 for cluster in (SHEET, NDR, PLAYBOOK)),
    ),
    Claim(
        AXES,
        "The picture shows the slower order, tp first",
        lambda: (
            milliseconds(AXES, "Mesh(tp=4, dp=4): a step takes", "")
            > milliseconds(AXES, "Mesh(dp=4, tp=4): a step takes", "")
        ),
    ),
    Given(AXES, "neighbours, so they share a node and have the fastest links"),
)
