"""Lab 19: the cost of the order of two axes."""

from tests.labs.entries import Claim, Given, Quote
from tests.labs.model import NDR, PLAYBOOK, SHEET
from tests.labs.prose import milliseconds
from tplab import Mesh
from tplab.cost import Cluster

LAB = "19_axes_and_nodes"


def of_axes(order: str, axis: str, cluster: Cluster) -> float:
    """The modelled ms of lab 19's two all_reduces along an axis of 4 x 4 ranks."""
    mesh = Mesh(dp=4, tp=4) if order == "tp last" else Mesh(tp=4, dp=4)
    elements = 2 * 16384 // 4 * 4096 if axis == "tp" else 4096 * 16384 // 4
    return 2e3 * cluster.collective_seconds("all_reduce", 2 * elements, mesh.group(0, axis))


def in_total(dp: int, cluster: Cluster) -> float:
    """The ms of all all_reduces on dp x 16/dp ranks, tp last."""
    mesh = Mesh(dp=dp, tp=16 // dp)
    sizes = {"tp": 2 * 16384 * 4096 // dp, "dp": 4096 * 16384 // (16 // dp)}
    each = (cluster.collective_seconds("all_reduce", 2 * size, mesh.group(0, axis)) for axis, size in sizes.items())
    return 2e3 * sum(each)


def dp_gains(cluster: Cluster) -> float:
    """The gain of `dp` if `tp` comes first, as a share of the loss of `tp`."""
    tp, dp = (of_axes("tp first", axis, cluster) - of_axes("tp last", axis, cluster) for axis in ("tp", "dp"))
    return -dp / tp


CLAIMS = (
    Quote(
        "the ranks wait 0.47 ms for their activations if tp is last, and 2.04 ms if it is first",
        ("tp 0.47 ms, dp 1.04 ms: InfiniBand NDR, data sheet", "tp 2.04 ms, dp 0.25 ms: InfiniBand NDR, data sheet"),
    ),
    Quote("they wait 0.67 ms if it is last", ("tp 0.67 ms, dp 0.79 ms: InfiniBand NDR, forecast",)),
    Quote(
        "they wait 1.52 ms with InfiniBand NDR, and 4.08 ms with the playbook's network",
        ("tp 1.52 ms, dp 0.37 ms: InfiniBand NDR, forecast", "tp 4.08 ms, dp 0.37 ms: the playbook's network"),
    ),
    Claim(
        "dp is faster, but it gains only about half of what tp loses",
        lambda: all(0.45 < dp_gains(cluster) < 0.6 for cluster in (SHEET, NDR, PLAYBOOK)),
    ),
    Claim(
        "take 1.4 ms on 8 × 2 and 1.5 ms on 4 × 4 by the data sheet, but 3.6 and 3.0 ms with the playbook's network",
        lambda: [
            *(in_total(8, SHEET), 8, 2, in_total(4, SHEET), 4, 4),
            *(in_total(dp, PLAYBOOK) for dp in (8, 4)),
        ],
    ),
    Claim(
        "The picture shows the slower order, tp first",
        lambda: (
            milliseconds(LAB, "Mesh(tp=4, dp=4): a step takes", "")
            > milliseconds(LAB, "Mesh(dp=4, tp=4): a step takes", "")
        ),
    ),
    Given("neighbours, so they share a node and have the fastest links"),
)
