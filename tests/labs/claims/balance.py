"""Lab 21: how evenly layouts share causal attention, and what its author measured of ring-flash-attention."""

from tests.labs.entries import Claim, Given, Quote
from tests.labs.prose import milliseconds
from tplab.cost import H100
from tplab.cost.measured import RingAttention, ring_attention
from tplab.sequence import AttentionMask, LayoutName, TokenLayout, efficiency

LAB = "21_balance"
VARIANTS = {"contiguous": "ring", "zigzag": "zigzag", "striped": "stripe"}
GPUS = ("A100", "H800")


def measured(layout: str, gpu: str, passes: str) -> RingAttention:
    (row,) = (r for r in ring_attention() if (r.api, r.gpu, r.passes, r.variant) == ("batch", gpu, passes, layout))
    return row


def reached(name: str) -> list[float]:
    """What a row of the lab's table has after the model's number."""
    return [100 * measured(VARIANTS[name], gpu, passes).efficiency for gpu in GPUS for passes in ("fwd", "fwd+bwd")]


def model(name: LayoutName, tokens: int = 128, ranks: int = 8) -> float:
    return 100 * efficiency(TokenLayout(name, tokens * ranks, ranks), AttentionMask(True))


def of_the_peak() -> float:
    """What FlashAttention alone reaches on an H800, of the FLOP/s of its data sheet, which are an H100's."""
    flops = 4 * 65536**2 / 2 * 32 * 128 / 8
    return flops / measured("ring", "H800", "fwd").ideal / H100.peak("bfloat16")


def clock(name: str) -> float:
    return milliseconds(LAB, name)


CLAIMS = (
    Quote("which is 60%", ("busy: 60%",)),
    Given("for sequences of 128 tokens per rank"),
    Claim(
        "zigzag stays at 100%, and striped at more than 99%",
        lambda: all(model("zigzag", ranks=p) == 100 and model("striped", ranks=p) > 99 for p in (2, 4, 8, 16)),
    ),
    Claim("Here it is 1.64 times as fast", lambda: [clock("contiguous") / clock("zigzag")]),
    Claim(
        "zigzag should be 15/8 times as fast",
        lambda: abs(model("zigzag", 8192) / model("contiguous", 8192) - 15 / 8) < 0.001,
    ),
    Claim(
        "| contiguous | 53.3% | 51.4% | 52.5% | 52.1% | 53.9% |",
        lambda: [model("contiguous", 8192), *reached("contiguous")],
    ),
    Claim("| zigzag | 100% | 81.8% | 89.8% | 85.3% | 90.2% |", lambda: [model("zigzag", 8192), *reached("zigzag")]),
    Claim("| striped | 100% | 69.6% | 82.6% | 74.4% | 82.9% |", lambda: [model("striped", 8192), *reached("striped")]),
    Claim(
        "contiguous took 26.0 ms forward and zigzag 15.9",
        lambda: [1e3 * measured(layout, "H800", "fwd").seconds for layout in ("ring", "zigzag")],
    ),
    Claim(
        "That is 2.6 times as long as on our clock",
        lambda: (
            [1e3 * measured("ring", "H800", "fwd").seconds / clock("contiguous")]
            if round(1e4 * measured("zigzag", "H800", "fwd").seconds / clock("zigzag")) == 26
            else False
        ),
    ),
    Claim("kernels reach about a third of the peak", lambda: abs(of_the_peak() - 1 / 3) < 0.02),
    Claim(
        "For the other two it explains nothing, and 10 to 30% of the time is still lost",
        lambda: [100 - max(reached("zigzag")), 100 - min(reached("striped"))],
    ),
    Given("The ring is finished when its slowest rank is"),
)
