"""docs/clock.md: its numbers are those of the clock, and it has every row that it claims to have."""

import re

from benchmarks.fit import tables
from tplab.cost import Chip, data_sheets, measured
from tplab.cost.link import Link
from tplab.cost.measured import between, fabrics
from website import clock


def test_the_page_is_what_the_code_writes():
    assert clock.PAGE.read_text(encoding="utf8") == clock.page(), "run python -m website.clock"


def test_every_row_is_on_the_page():
    text = clock.page()
    assert len(re.findall(r"^\| \d GPUs, ", text, re.MULTILINE)) == len(measured.collectives())
    sources = [measured.source(name) for name in ("nccl", "network_h100", "ring_attention")]
    sources += [measured.source("between", name) for name in ("efa-p5", "infiniband-ndr")]
    sources += [tables.source(name) for name in ("matmul_h100", "matmul_a100", "matmul_b200_8bit", "attention")]
    assert all(source in text for source in sources)
    assert "| H100, collectives | 111 |" in text


def test_every_row_of_every_network_is_on_the_page_and_so_is_its_error():
    text = clock.page().split("## Networks between nodes")[1].split("## On a GPU")[0]
    rows = re.findall(rf"^\| (?:{'|'.join(clock.OPS)}), \d+ nodes?", text, re.MULTILINE)
    assert len(rows) == len(measured.network()) + len([row for row in between() if row.fabric != "playbook"])
    for key, fabric in fabrics().items():
        error = f"{100 * fabric.error.median:.1f}, {100 * fabric.error.most:.0f} %" if fabric.error else "none"
        assert re.search(rf"^\| {fabric.name} \(`{key}`\) .* \| {error} \|$", text, re.MULTILINE)


def test_every_figure_of_data_sheets_has_its_source_on_the_page():
    text = clock.page().split("## Data sheets")[1]
    known = [one for one in vars(data_sheets).values() if isinstance(one, (Chip, Link))]
    assert len(known) > 20
    for one in known:
        assert f"\n| {one.name} |" in text and f"\n- {one.name}: " in text
        assert one.source.replace("https://", "<https://").split("https://")[0] in text


def test_rows_that_are_faster_than_the_data_sheet_are_counted():
    """By hand: a launch of 5 us, and the longer of FLOPs / peak and bytes / bandwidth of an H100."""
    rows = tables.matmuls("h100")
    at_peak = [5e-6 + max(2 * m * n * k / 989e12, 2 * (m * k + k * n + m * n) / 3.35e12) for m, n, k, _ in rows]
    faster = sum(peak > 1.02 * row.seconds for peak, row in zip(at_peak, rows))
    assert faster > 400 and f"| H100, matmuls | 1,452 | {faster} |" in clock.page()
