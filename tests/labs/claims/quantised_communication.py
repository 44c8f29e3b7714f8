"""Lab 18: the gain of ZeRO++, by network."""

from dataclasses import replace

from tests.labs.entries import Claim, Given, Quote
from tests.labs.model import NDR, PLAYBOOK, SHEET, tokens
from tplab.cost import Cluster, Link
from tplab.data.hiding import step_seconds

ETHERNET = replace(SHEET, outer_link=Link("400 Gb/s for 8 GPUs", 20e-6, 50e9 / 8))


def gain(cluster: Cluster, tokens: int = 256) -> float:
    """How many times as fast a step is with ZeRO++, on 64 GPUs."""
    before, after = (step_seconds(scheme, tokens, cluster, 64) for scheme in ("ZeRO 3", "ZeRO++"))
    return max(before) / max(after)


CLAIMS = (
    Quote("18% off instead of 13%", ("528 bytes, 18% off", "0 bytes, 13% off")),
    Quote("is off by 9%, relative to its size", (" 2 ranks: ring   9% off",)),
    Quote("about 9%, twice as much, or four times?", (" 2 ranks: ring   9% off",)),
    Claim(
        "from about 2,200 tokens per rank by the forecast with InfiniBand NDR, and 19,600 on Ethernet by the data "
        "sheet",
        lambda: tokens("ZeRO 3", 64, NDR, ETHERNET),
    ),
    Claim(
        "1.6 times as fast by that forecast, and 3.5 times on that Ethernet",
        lambda: [gain(cluster) for cluster in (NDR, ETHERNET)],
    ),
    Claim(
        "the messages inside a node remain: the slower the network between nodes, the less they count",
        lambda: gain(SHEET) < gain(PLAYBOOK) < gain(ETHERNET) < 4,
    ),
    Claim("which is 3.25 GB for 13 billion parameters", lambda: [2 * 13 / 8, 13]),
    Given("off by more than half of $s$"),
    Given("None is off by more than half of the scale"),
    Given("are closer to 0 than half of it, 0.25"),
    Given("an outlier, fifty times as large as a typical weight"),
    Given("as long as the slower of the two"),
    Given("Ethernet with 400 Gb/s per node"),
    Given("InfiniBand NDR with 400 Gb/s per GPU"),
    Given("make a step four times as fast?"),
)
