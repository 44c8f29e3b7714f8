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
    sources += [tables.source(name) for name in ("matmul_h100", "matmul_a100", "attention")]
    assert all(source in text for source in sources)
    assert "| H100, collectives | 111 |" in text
