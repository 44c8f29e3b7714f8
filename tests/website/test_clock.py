"""docs/clock.md: its numbers are those of the clock, and it has every row that it claims to have."""

from tplab.cost import measured
from website import clock


def test_the_page_is_what_the_code_writes():
    assert clock.PAGE.read_text(encoding="utf8") == clock.page(), "run python -m website.clock"


def test_every_row_is_on_the_page():
    text = clock.page()
    assert text.count(" GPUs, ") == len(measured.collectives()) + 1  # and once in the text
    assert sum(text.count(f"| {op}, {n} node") for op in clock.OPS for n in (1, 2, 4, 8, 16, 32, 64)) >= 21
    for name in ("nccl", "matmul_h100", "matmul_a100", "network_h100"):
        assert measured.source(name) in text
    assert "| H100, collectives | 111 |" in text
