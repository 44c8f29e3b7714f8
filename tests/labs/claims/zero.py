"""Lab 17: the tokens from which ZeRO 3 hides its messages, and MPT-7B on 8 to 512 H100s."""

from functools import cache

from tests.labs.entries import Claim, Given, Quote
from tests.labs.model import NDR, PLAYBOOK, SHEET, tokens
from tests.labs.prose import milliseconds
from tplab.cost import H100_MEASURED, Cluster
from tplab.data.hiding import step_seconds, tokens_to_hide
from tplab.forecast.measured import Run, foundry
from tplab.forecast.memory import usable_bytes

LAB = "17_zero"


@cache
def mpt() -> dict[int, Run]:
    """GPUs -> the run of MPT-7B on H100s with 12,288 tokens per GPU."""
    chosen = [run for run in foundry() if (run.model.name, run.cluster) == ("mpt-7b", "h100-measured")]
    return {run.plan.ranks: run for run in chosen if run.tokens == 12288}


def mpt_slower(gpus: int) -> float:
    """How much slower a GPU is than one of eight, in percent."""
    return 100 * (1 - mpt()[gpus].tokens_per_second / mpt()[8].tokens_per_second)


def mpt_sends(cluster: Cluster, gpus: int) -> float:
    """Seconds of the messages of its 32 blocks of width 4,096."""
    return 32 * step_seconds("ZeRO 3", 12288, cluster, gpus, 4096).sending


CLAIMS = (
    Quote("the spike of 640 KiB", ("rank 0 holds at most 640 KiB (data parallel)",)),
    Claim("these alone are 112 GiB", lambda: [4 * 30e9 / 2**30]),
    Claim(
        "Inside a node, about 1,900 tokens per rank hide all messages",
        lambda: tokens("ZeRO 3", 8, NDR) if tokens("ZeRO 3", 8, SHEET)[0] // 100 == 19 else False,
    ),
    Claim(
        "a measured all_reduce is faster than a reduce_scatter and an all_gather",
        lambda: (
            step_seconds("data parallel", 2048, NDR, 8).sending
            < 0.9 * step_seconds("ZeRO 3", 2048, NDR, 8).sending * 2 / 3
        ),
    ),
    Claim(
        "the forecast is 2,600 with InfiniBand NDR, and 20,500 with the playbook's network",
        lambda: tokens("ZeRO 3", 512, NDR, PLAYBOOK),
    ),
    Claim(
        "On 256 and 512 GPUs, each GPU is 5 and 9 % slower than on 8",
        lambda: [256, 512, mpt_slower(256), mpt_slower(512), 8],
    ),
    Claim(
        "the messages alone would take longer than these steps took",
        lambda: all(mpt_sends(PLAYBOOK, gpus) > mpt()[gpus].seconds for gpus in (256, 512)),
    ),
    Claim(
        "on 512 GPUs, even if the forecast were 30 % too high",
        lambda: mpt_sends(PLAYBOOK, 512) / 1.3 > mpt()[512].seconds,
    ),
    Claim(
        "MosaicML's network was faster than that",
        lambda: mpt_sends(PLAYBOOK, 512) / 1.3 > mpt()[512].seconds,
    ),
    Claim(
        "its messages fit into the step",
        lambda: all(mpt_sends(NDR, gpus) < row.seconds for gpus, row in mpt().items()),
    ),
    Claim(
        "it would hide all of them",
        lambda: all(tokens_to_hide("ZeRO 3", NDR, gpus, 4096) < row.tokens for gpus, row in mpt().items()),
    ),
    Claim(
        "hybrid sharding is slower, on the data sheet and in the forecast",
        lambda: all(
            milliseconds(LAB, "hybrid:", name) > milliseconds(LAB, "all 64:", name)
            for name in ("NDR, data sheet", "NDR, forecast")
        ),
    ),
    Quote(
        "it takes 28.0 ms instead of 86.0 ms",
        ("all 64: 86.0 ms, 10% hidden (the playbook's network", "hybrid: 28.0 ms, 29% hidden (the playbook's network"),
    ),
    Given("and 16,384 tokens per rank, on eight H100s"),
    Claim(
        "An H100 lets a program use 79.2 of its 80 GiB",
        lambda: [usable_bytes(H100_MEASURED.chip) / 2**30, 80],
    ),
    Given("as long as a layer computes for longer than its message takes"),
)
