"""Lab 03: the bandwidth of a network on a data sheet, in the forecast, and measured on the playbook's cluster."""

from functools import cache

from tests.labs.entries import Claim, Given, Quote
from tests.labs.model import PLAYBOOK, SHEET
from tplab.cost import Cluster
from tplab.cost.measured import Network, network

NVLINK, CARD = SHEET.inner_link.bandwidth, SHEET.link(0, 8).bandwidth


@cache
def all_reduces() -> dict[int, Network]:
    """nodes -> the measured all_reduce on the playbook's network."""
    return {row.nodes: row for row in network() if row.op == "all_reduce"}


def promised(cluster: Cluster, nodes: int) -> float:
    """The modelled bus bandwidth of the same all_reduce over the measured one."""
    return all_reduces()[nodes].seconds / cluster.collective_seconds("all_reduce", 256e6, 8 * nodes)


def with_cards(cards: int, nodes: int) -> float:
    """Seconds over cards or NVLink, whichever is slower. Seven of a GPU's eight rings leave it over NVLink."""
    ranks = 8 * nodes
    slower = max(1 / (cards * SHEET.link(0, 8).bandwidth), 7 / 8 / SHEET.inner_link.bandwidth)
    return 2 * (ranks - 1) / ranks * 2**30 * slower


CLAIMS = (
    Claim(
        "it is much slower: in a cluster of H100s, each GPU sends 450 GB/s within its node and 50 GB/s across",
        lambda: [SHEET.inner_link.bandwidth / 1e9, SHEET.link(0, 8).bandwidth / 1e9],
    ),
    Claim("through one card: at 50 GB/s, 40.3 ms", lambda: [CARD / 1e9, 1e3 * 2 * 15 / 16 * 2**30 / CARD]),
    Claim("4.2 ms inside and 2.7 ms across", lambda: [1e3 * 2 * 7 / 8 * 2**30 / NVLINK, 1e3 * 2**30 / 8 / CARD]),
    Claim(
        "Every doubling halves the time, up to eight cards",
        lambda: all(1.9 < with_cards(c, k) / with_cards(2 * c, k) < 2.1 for c in (1, 2, 4) for k in (2, 4, 8, 16)),
    ),
    Claim("Sixteen would save only another fifth", lambda: 0.18 < 1 - with_cards(16, 2) / with_cards(8, 2) < 0.25),
    Claim(
        "eight cards of 50 GB/s carry 400 GB/s, and NVLink, with 450 GB/s for seven eighths of the bytes, is enough "
        "for 514 GB/s",
        lambda: [bandwidth / 1e9 for bandwidth in (CARD, 8 * CARD, NVLINK, NVLINK / (7 / 8))],
    ),
    Claim(
        "On one or two nodes the data sheet is right within a tenth",
        lambda: all(abs(promised(SHEET, nodes) - 1) < 0.1 for nodes in (1, 2)),
    ),
    Claim(
        "On 64 nodes it promises eleven times what was measured",
        lambda: round(promised(SHEET, 64)) == 11,
    ),
    Quote("on 64 nodes for 70 % of the time", ("   64   33 ( 12 to 177)         56 (70% of its time)",)),
    Claim(
        "it is 40 % too low, and on 64 nodes 70 % too high",
        lambda: [100 * (1 - promised(PLAYBOOK, 2)), 64, 100 * (promised(PLAYBOOK, 64) - 1)],
    ),
    Claim(
        "the users' own runs range from 12 to 177 GB/s",
        lambda: [all_reduces()[64].low / 1e9, all_reduces()[64].high / 1e9],
    ),
    Claim(
        "On 64 nodes of one real cluster, less than a tenth of them was measured",
        lambda: promised(SHEET, 64) > 10,
    ),
    Given("for 1 GiB of gradients"),
    Given("the slower of the two levels sets the pace"),
    Given("the slower level sets the pace"),
    Given("for 256 MB"),
)
