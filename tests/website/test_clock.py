"""docs/clock.md: its numbers are those of the clock, and it has every row that it claims to have."""

from benchmarks.fit import tables
from tplab.cost import measured
from website import clock


def test_the_page_is_what_the_code_writes():
    assert clock.PAGE.read_text(encoding="utf8") == clock.page(), "run python -m website.clock"


def test_every_row_is_on_the_page():
    text = clock.page()
    assert text.count(" GPUs, ") == len(measured.collectives()) + 1  # and once in the text
    assert sum(text.count(f"| {op}, {n} node") for op in clock.OPS for n in (1, 2, 4, 8, 16, 32, 64)) >= 21
    sources = [measured.source(name) for name in ("nccl", "network_h100", "ring_attention")]
    sources += [tables.source(name) for name in ("matmul_h100", "matmul_a100", "matmul_b200_8bit", "attention")]
    assert all(source in text for source in sources)
    assert "| H100, collectives | 111 |" in text


def test_rows_that_are_faster_than_the_data_sheet_are_counted():
    """By hand: a launch of 5 us, and the longer of FLOPs / peak and bytes / bandwidth of an H100."""
    rows = tables.matmuls("h100")
    at_peak = [5e-6 + max(2 * m * n * k / 989e12, 2 * (m * k + k * n + m * n) / 3.35e12) for m, n, k, _ in rows]
    faster = sum(peak > 1.02 * row.seconds for peak, row in zip(at_peak, rows))
    assert faster > 400 and f"| H100, matmuls | 1,452 | {faster} |" in clock.page()
