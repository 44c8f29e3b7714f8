"""Lab 02: when few hops are faster, and NCCL beside the ring, as measured on eight A100s and eight H100s."""

import torch

import tplab.torch as tt
from tests.labs.entries import Claim, Given
from tests.labs.model import SHEET
from tplab import Mesh, P
from tplab.cost import collective, find
from tplab.cost.measured import collective_times

OPS = "all_gather", "all_reduce"


def ring(nbytes: float) -> float:
    return collective("all_reduce", nbytes, 8, SHEET.inner_link, "ring").seconds


def doubling(nbytes: float) -> float:
    return collective("all_reduce", nbytes, 8, SHEET.inner_link, "recursive_doubling").seconds


def bus_bandwidth(gpu: str, op: str) -> float:
    """The highest measured bus bandwidth."""
    laps = 2 if op == "all_reduce" else 1
    return max(laps * 7 / 8 * nbytes / seconds for nbytes, seconds in collective_times(gpu, op, 8))


def sends(op: str, ranks: int) -> float:
    """The share of its input that a rank sends."""
    return collective(op, 1.0, ranks, SHEET.inner_link, "ring").bytes


def star(receives_all: bool) -> float:
    """Milliseconds of lab 02's star of four, on Ethernet; `receives_all`: rank 0 receives three tensors at once."""

    def program(x: torch.Tensor) -> None:
        for k in (1, 2, 3):
            x = x + tt.ppermute(x, "tp", [(k, 0)])
        for k in (1, 2, 3):
            tt.ppermute(x, "tp", [(0, k)])

    large = torch.ones(4, 2**18)
    seconds = tt.run(program, Mesh(tp=4), large, in_specs=P("tp"), cluster="ethernet").trace.makespan
    return 1e3 * (seconds + (0 if receives_all else 2 * large[0].nbytes / find("ethernet").inner_link.bandwidth))


CLAIMS = (
    Claim("the star would take 51 ms, not 34", lambda: [star(False), star(True)]),
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
        "On A100s they nearly agree, at about 70% of the data sheet",
        lambda: (
            bus_bandwidth("a100", "all_reduce") < 1.1 * bus_bandwidth("a100", "all_gather")
            and all(0.65 < bus_bandwidth("a100", op) / find("a100").inner_link.bandwidth < 0.75 for op in OPS)
        ),
    ),
    Claim(
        "On H100s the all-reduce reaches a quarter more than the all-gather",
        lambda: 1.2 < bus_bandwidth("h100", "all_reduce") / bus_bandwidth("h100", "all_gather") < 1.3,
    ),
    Claim(
        "it always beats the ring",
        lambda: all(
            collective("all_reduce", 2.0**n, 8, link, "halving_doubling").seconds
            < collective("all_reduce", 2.0**n, 8, link, "ring").seconds
            for n in range(8, 31)
            for link in (SHEET.inner_link, find("ethernet").inner_link)
        ),
    ),
    Claim("Small tensors are faster with fewer hops", lambda: doubling(2**10) < ring(2**10)),
    Given("on 1 Gb Ethernet"),
)
