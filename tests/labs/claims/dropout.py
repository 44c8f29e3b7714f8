"""Lab 07: the memory of masks, and the effect of one mask on all ranks on the variance."""

import re

from tests.labs.entries import Claim
from tests.labs.prose import printed

MASKS = 80 * 2 * 4096 * 8192
"""Bytes: two masks outside, in each of 80 blocks, one byte per element."""


def variances() -> list[float]:
    """The variances with own masks, and with one mask on four ranks, as the lab counts them."""
    return [float(found) for found in re.findall(r"^o(?:wn masks|ne mask).* ([\d.]+)$", printed("07_dropout"), re.M)]


CLAIMS = (
    Claim("the variance is about $R$ times as large", lambda: abs(variances()[1] / variances()[0] / 4 - 1) < 0.1),
    Claim(
        "every rank would keep 5 GiB of them, or 0.6 GiB if eight ranks split the tokens",
        lambda: [MASKS / 2**30, MASKS / 2**30 / 8],
    ),
)
