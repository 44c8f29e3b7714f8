"""The section of docs/clock.md about networks between nodes: measurements on each, beside the clock's times."""

from __future__ import annotations

from benchmarks.fit import fabrics as fit
from benchmarks.fit.least import summary
from tplab import cost
from tplab.cost import measured
from tplab.cost.measured import Between, fabrics
from tplab.units import bytes_text
from website.device import table, us

INTRODUCTION = """\
## Networks between nodes

A cluster is nodes and a fabric that joins them: `find("h100-measured", fabric="infiniband-ndr")`. By itself,
"h100-measured" has the playbook's network, "h200-measured" and "b200-measured" have InfiniBand NDR, and "a100-measured"
has HDR.

A ring over nodes waits for each of its hops, and then its bytes take as long as the slower of two levels: NCCL inside a
node, and the network cards between nodes. Latencies add up, and bytes overlap. Of the bandwidth that the cards promise,
two nodes reach a share, and more nodes reach less, because others use the network too, and the slowest card sets the
pace. NCCL may instead take a tree over the nodes, for an all_reduce of few bytes on many nodes: the clock takes what is
faster. An all_to_all sends to each rank by itself, so it begins once per rank, and only what leaves the node uses the
cards. For R ranks in k nodes, of which each has g ranks and c cards, with S bytes:

```
B            = bandwidth of a card x reached / k^fall
ring         = laps [(k-1) hop + (R-k) near] + max(inside a node, start + laps (R-1)/R S / (c B))
tree         = 2 ceil(log2 k) tree + max(inside a node, start + S / (c B))
all_to_all   = begin + (R-1) peer + max(inside a node, S (R-g)/R / (card x by_peers))
```

An all_reduce has two laps, an all_gather and a reduce_scatter have one. If several groups of ranks send at once, they
share the cards.
"""


def pair(error: tuple[float, float]) -> str:
    return f"{100 * error[0]:.1f}, {100 * error[1]:.0f} %"


def off(found: float, true: float) -> str:
    return f"{100 * (found / true - 1):+.0f} %"


def summaries() -> list[list[str]]:
    """One line per measured network: its rows, and the errors on fitted rows and on rows that were left out."""
    lines = []
    for key in fit.NAMES:
        fabric, rows = fabrics()[key], fit.rows_of(key)
        seen = pair(summary(fit.errors(key, fabric, rows)))
        lines.append([f"{fabric.name}", str(len(rows)), seen, pair(fabric.error) if fabric.error else "too few rows"])
    return lines


def section() -> str:
    return "\n".join([INTRODUCTION, _constants(), _playbook(), _between("efa-p5"), _between("infiniband-ndr"), _few()])


def _constants() -> str:
    names, lines = ("reached", "fall", "hop", "near", "tree", "begin", "peer", "by_peers"), list[list[str]]()
    for key, fabric in fabrics().items():
        values = [(name, getattr(fabric, name)) for name in names]
        cells = [
            f"{of:.2f}" if name in ("reached", "fall", "by_peers") else f"{1e6 * of:,.0f} us" for name, of in values
        ]
        error = pair(fabric.error) if fabric.error else "none"
        lines.append([f"{fabric.name} (`{key}`)", *cells, error])
    return table(["fabric", *names, "error on rows left out"], lines)


def _playbook() -> str:
    lines: list[list[str]] = []
    on, sheet = cost.find("h100-measured"), cost.find("h100")
    for row in measured.network():
        found, at_peak = (c.collective_seconds(row.op, measured.NETWORK_BYTES, 8 * row.nodes) for c in (on, sheet))
        rates = [f"{row.bus_bandwidth * row.seconds / seconds / 1e9:.0f}" for seconds in (row.seconds, found, at_peak)]
        band = f"{row.low / 1e9:.0f} to {row.high / 1e9:.0f}"
        lines.append([_over(row.op, row.nodes), rates[0], band, rates[1], off(found, row.seconds), rates[2]])
    head = ["256 MB", "measured", "band", "forecast", "seconds off by", "data sheet"]
    return f"""\
### {fabrics()["playbook"].name[0].upper()}{fabrics()["playbook"].name[1:]}

{measured.source("network_h100")}.
Bus bandwidth at 256 MB in GB/s, on nodes of 8 H100s: what passes each rank's link. All rows are of one size, so how
long hops take is fitted to the playbook's training steps as well. The steps count more, because the band around each
mean is wide. So the forecast is not the mean of the band; it is
{_off_by("playbook")}.

{table(head, lines)}"""


def _between(key: str) -> str:
    lines: list[list[str]] = []
    on, sheet = (cost.find(name, fabric=key) for name in ("h100-measured", "h100"))
    for row in fit.rows_of(key):
        found, at_peak = (c.collective_seconds(row.op, row.bytes, 8 * row.nodes) for c in (on, sheet))
        size = f"{_over(row.op, row.nodes)}, {_size(row)}"
        lines.append([size, us(row.seconds), us(found), off(found, row.seconds), us(at_peak)])
    head = ["microseconds", "measured", "forecast", "off by", "data sheet"]
    return f"""\
### {fabrics()[key].name}

{measured.source("between", key)}.
{_ABOUT[key]}

{table(head, lines)}"""


def _off_by(key: str) -> str:
    error = fabrics()[key].error
    assert error is not None
    median, most = (f"{100 * share:.0f} %" for share in error)
    return f"off by {median} at the median of rows left out, and nine of ten are within {most}"


_ABOUT = {
    "efa-p5": "Sizes are of the whole tensor; of an all_to_all, what each GPU has. The forecast is\n"
    f"{_off_by('efa-p5')}.",
    "infiniband-ndr": "Two sizes of an all_to_all on two nodes are all that we have, and both constants are fitted to "
    "them, so nothing is known\nof the error. A hop is NCCL's own constant.",
}


def _few() -> str:
    ndr = cost.find("h100-measured", fabric="infiniband-ndr")
    seconds = ndr.collective_seconds("all_reduce", 8, 16)
    return f"""\
With that hop, an all_reduce of 8 bytes over two nodes takes {us(seconds)} us; 46 to 48 us were measured (NVIDIA/nccl,
issue 1244). HDR has NDR's constants with half of its bandwidth, and those of Ethernet are assumed.
"""


def _over(op: str, nodes: int) -> str:
    return f"{op}, {nodes} node{'s' * (nodes > 1)}"


def _size(row: Between) -> str:
    return bytes_text(int(row.bytes))
