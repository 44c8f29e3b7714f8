"""Lab 02: when few hops are faster, and NCCL beside the ring, as measured on eight A100s and eight H100s."""

from tests.labs.entries import Claim, Given
from tests.labs.model import SHEET
from tplab.cost import collective
from tplab.cost.measured import collective_times


def ring(nbytes: float) -> float:
    return collective("all_reduce", nbytes, 8, SHEET.inner_link, "ring").seconds


def doubling(nbytes: float) -> float:
    return collective("all_reduce", nbytes, 8, SHEET.inner_link, "recursive_doubling").seconds


def bus_bandwidth(gpu: str, op: str) -> float:
    """The most that was measured."""
    laps = 2 if op == "all_reduce" else 1
    return max(laps * 7 / 8 * nbytes / seconds for nbytes, seconds in collective_times(gpu, op, 8))


def sends(op: str, ranks: int) -> float:
    """Of its input."""
    return collective(op, 1.0, ranks, SHEET.inner_link, "ring").bytes


CLAIMS = (
    Claim(
        "An all-reduce sends less than twice its input on any number of ranks, and a reduce-scatter or an all-to-all "
        "less than once",
        lambda: all(
            sends("all_reduce", ranks) < 2 and sends("reduce_scatter", ranks) < 1 and sends("all_to_all", ranks) < 1
            for ranks in range(2, 1025)
        ),
    ),
    Claim(
        "Three hops are faster for a hundred numbers, fourteen for a hundred million",
        lambda: doubling(4 * 100) < ring(4 * 100) and ring(4 * 1e8) < doubling(4 * 1e8),
    ),
    Claim(
        "For small tensors NCCL is faster than our ring",
        lambda: all(
            seconds < ring(nbytes) for nbytes, seconds in sorted(collective_times("h100", "all_reduce", 8))[:5]
        ),
    ),
    Claim(
        "On A100s they nearly do",
        lambda: bus_bandwidth("a100", "all_reduce") < 1.1 * bus_bandwidth("a100", "all_gather"),
    ),
    Claim(
        "On H100s the all-reduce is a quarter faster than the all-gather",
        lambda: 1.2 < bus_bandwidth("h100", "all_reduce") / bus_bandwidth("h100", "all_gather") < 1.3,
    ),
    Claim("Small tensors are faster with fewer hops", lambda: doubling(2**10) < ring(2**10)),
    Given("where some links are slower than others"),
    Given("on 1 Gb Ethernet"),
)
