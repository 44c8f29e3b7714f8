"""docs/forecast.md: its numbers are those of the forecasts, and it has every run that it claims to have."""

import re

from tplab.forecast import measured
from website import forecast


def test_the_page_is_what_the_code_writes():
    assert forecast.PAGE.read_text(encoding="utf8") == forecast.page(), "run python -m website.forecast"


def test_every_run_and_every_source_is_on_the_page():
    text = forecast.page()
    rows = re.findall(r"^\| .* microbatch \d", text, re.MULTILINE)
    left_out = measured.split(measured.playbook())[1]
    assert len(rows) == len(measured.runs()) + len(left_out) > 50
    for line in measured.sources("runs"):
        assert line in text
