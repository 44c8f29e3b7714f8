"""The section of docs/clock.md about data sheets: every figure of chips and links, and its source."""

from __future__ import annotations

from tplab.cost import Chip, data_sheets
from tplab.cost.link import Link, si
from website.device import table

DTYPES = ("bfloat16", "float8_e4m3fn", "int8", "float32", "float64")


def section() -> str:
    """All chips and links of `tplab.cost.data_sheets`."""
    known = vars(data_sheets).values()
    chips = [chip for chip in known if isinstance(chip, Chip)]
    links = [link for link in known if isinstance(link, Link)]
    figures = [
        [
            chip.name,
            *(si(chip.flops[dtype], "FLOP/s") if dtype in chip.flops else "" for dtype in DTYPES),
            si(chip.memory_bandwidth, "B/s"),
            si(chip.memory, "B"),
            si(chip.launch, "s"),
        ]
        for chip in chips
    ]
    speeds = [[link.name, si(link.bandwidth, "B/s"), si(link.latency, "s")] for link in links]
    sources = "".join(f"- {one.name}: {_linked(one.source)}\n" for one in (*chips, *links))
    head = ["chip", *(dtype.removesuffix("_e4m3fn") for dtype in DTYPES), "memory bandwidth", "memory", "launch"]
    return f"""\
## Data sheets

Peak rates without sparsity, bytes per second in one direction, and what every operation takes to start.

{table(head, figures)}
{table(["link, per GPU", "bandwidth", "latency"], speeds)}
Where the figures come from. "As quoted at" means that we read the figure there and not in the data sheet itself.

{sources}"""


def _linked(source: str) -> str:
    """The source with its addresses in angle brackets, so that Markdown links them."""
    words = [
        f"<{word.rstrip(',;.:')}>{word[len(word.rstrip(',;.:')) :]}" if word.startswith("https://") else word
        for word in source.split(" ")
    ]
    return " ".join(words)
