"""Lab 18: what ZeRO++ gains, and on which network."""

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
    Claim(
        "from about 2,500 tokens per rank, as in lab 17, and ZeRO++ from about 1,400 tokens per rank",
        lambda: [*tokens("ZeRO 3", 64, SHEET), 17, *tokens("ZeRO++", 64, SHEET)],
    ),
    Claim(
        "with InfiniBand NDR is about 2,200 tokens per rank and about 1,300 tokens per rank; with the playbook's "
        "network, it is about 6,500 tokens per rank and about 2,400 tokens per rank",
        lambda: [tokens(scheme, 64, on)[0] for on in (NDR, PLAYBOOK) for scheme in ("ZeRO 3", "ZeRO++")],
    ),
    Claim(
        "1.7 times as fast by the data sheets, 1.6 times with InfiniBand NDR, 2.7 times with the playbook's network, "
        "and 3.5 times on Ethernet",
        lambda: [gain(cluster) for cluster in (SHEET, NDR, PLAYBOOK, ETHERNET)],
    ),
    Claim("which is 3.25 GB for 13 billion parameters", lambda: [2 * 13 / 8, 13]),
    Given("off by more than half of $s$"),
    Given("are smaller than half of it, 0.25"),
    Given("an outlier, fifty times as large as a typical weight"),
    Given("as long as the slower of the two"),
    Given("Ethernet with 400 Gb/s per node"),
)
