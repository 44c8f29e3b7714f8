"""Lab 22: the rates of DeepEP's low-latency kernels, from the bytes that the lab counts."""

from tests.labs.entries import Claim

LAB = "22_experts_on_ranks"

ROWS = 128 * 8  # 128 tokens that choose 8 experts each
RATES = [ROWS * row / microseconds / 1e3 for row, microseconds in ((7168 + 224, 118), (2 * 7168, 195))]  # GB/s
PRINTED = (63, 74)  # deepseek-ai/DeepEP, docs/legacy.md, MIT: 16 H800s with ConnectX-7 cards

CLAIMS = (
    Claim(
        "Our rates are within 2% of the 63 and 74 GB/s that they report",
        lambda: all(abs(rate / printed - 1) < 0.02 for rate, printed in zip(RATES, PRINTED, strict=True)),
    ),
    Claim(
        "Both exceed the 50 GB/s of a network card (ConnectX-7), probably because 16 GPUs are two nodes",
        lambda: all(rate / 2 < 50 < rate for rate in RATES),
    ),
)
