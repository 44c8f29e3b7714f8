"""Lab 08: when an overlapped layer is faster, by the model; and measurements of PyTorch's team."""

from dataclasses import replace

from tests.labs.entries import Claim, Given
from tests.labs.model import SHEET
from tplab.cost import Cluster, find, gather_seconds, pays_from, scatter_seconds

D, F = 8192, 32768
AT_ONCE = replace(SHEET, chip=replace(SHEET.chip, launch=0.0))
"""The data sheet, if launches cost nothing."""


FORECAST = find("h100-measured")
LARGE = gather_seconds(8192, D, F, 8, SHEET)
MATMUL = SHEET.chip.matmul_seconds(8192, F // 8, D, "bfloat16")


def faster(cluster: Cluster) -> float:
    """How many times as fast the overlapped layer is as the blocking one, with 8,192 tokens."""
    times = gather_seconds(8192, D, F, 8, cluster)
    return times.blocking / times.overlapped


def times_as_long(tokens: int, width: int, features: int) -> float:
    """The time of the overlapped layer over that of the blocking one, on eight ranks, if launches cost nothing."""
    times = gather_seconds(tokens, width, features, 8, AT_ONCE)
    return times.overlapped / times.blocking


CLAIMS = (
    Claim(
        "has slower messages and slower matmuls, so it promises a little less",
        lambda: (
            FORECAST.chip.matmul_seconds(8192, F // 8, D, "bfloat16") > MATMUL
            and FORECAST.collective_seconds("all_gather", 2 * 8192 * D, 8)
            > SHEET.collective_seconds("all_gather", 2 * 8192 * D, 8)
        ),
    ),
    Claim("1.35 times as fast instead of 1.40", lambda: [faster(FORECAST), faster(SHEET)]),
    Given(
        "Llama 3.1 8B on 64 H100s became 1.10 times as fast, from 4,378 to 4,809 tokens per second and GPU, and 70B on"
    ),
    Claim(
        "the layer takes 140 µs longer than the one that gathers",
        lambda: [1e6 * (scatter_seconds(8192, F, D, 8, SHEET).overlapped - LARGE.overlapped)],
    ),
    Claim("the overlapped layer is slower below 745 tokens", lambda: [pays_from(D, F, 8, SHEET) or 0]),
    Claim(
        "Then overlapping always pays for this layer, even with few tokens",
        lambda: all(times_as_long(2**k, D, F) < 1 for k in range(17)),
    ),
    Claim(
        "For a narrower input, many tokens only make it worse",
        lambda: times_as_long(8, 2048, F) < 1 < times_as_long(4096, 2048, F) < times_as_long(65536, 2048, F),
    ),
    Claim(
        "the overlapped layer takes 1.4 times as long with 4,096 tokens, and 1.5 times with 65,536",
        lambda: [times_as_long(4096, 2048, F), 4096, times_as_long(65536, 2048, F), 65536],
    ),
    Given("the fastest of six runs"),
    Given("a hop, whichever is longer"),
    Claim(
        "596 µs instead of 835, hardly more than the 561 of its matmul",
        lambda: [1e6 * LARGE.overlapped, 1e6 * LARGE.blocking, 1e6 * MATMUL],
    ),
    Claim(
        "with a wide input, and many tokens or cheap launches",
        lambda: pays_from(D, F, 8, FORECAST) == 171 and pays_from(2048, F, 8, SHEET) is None,
    ),
    Given("if the hidden hops take longer than the additional launches"),
)
