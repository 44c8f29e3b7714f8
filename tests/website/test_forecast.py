"""docs/forecast.md: its numbers are those of the forecasts, and it has every run that it claims to have."""

import re

from benchmarks.fit import steps as fit
from tplab.forecast import measured
from tplab.forecast.classes import known
from website import forecast, steps


def test_the_page_is_what_the_code_writes():
    assert forecast.PAGE.read_text(encoding="utf8") == forecast.page(), "run python -m website.forecast"


def test_every_run_and_every_source_is_on_the_page():
    text = forecast.PAGE.read_text(encoding="utf8")
    rows = re.findall(r"^\| .* microbatch \d", text, re.MULTILINE)
    assert len(rows) == len(measured.runs()) + -(-len(measured.playbook()) // steps.EVERY)
    for line in measured.sources("runs"):
        assert line in text
    foundry = re.findall(r"^\| mpt-\w+, .* nodes? \| (\d+) \|", text, re.MULTILINE)
    assert sum(map(int, foundry)) == len(measured.foundry())


def test_every_run_is_in_one_line_of_the_classes_and_none_is_left_out():
    text = forecast.PAGE.read_text(encoding="utf8").split("## The constants")[0]
    lines = re.findall(r"^\| [\w-]+, (?:dense|experts), .* \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert sum(int(steps) for steps, _ in lines) == len(fit.every()) > 900
    assert all(int(steps) <= int(rows) for steps, rows in lines)


def test_an_interval_is_tried_on_rows_that_it_was_not_made_of():
    """One of six rows is far from the others: with it the interval is wide enough, and without it not."""
    some = [run for run in measured.playbook() if run.plan.pp == 1 and run.plan.ranks == 8][:5]
    far = max(measured.playbook(), key=lambda run: steps.ratios()[run])
    assert forecast.inside(some) == 1 and forecast.inside([*some, far]) == 5 / 6


def test_the_guide_says_the_errors_of_these_classes():
    guide = " ".join((forecast.PAGE.parent / "using.md").read_text(encoding="utf8").split())
    for name, text in (
        (
            "nanotron, dense, tp in a node, no pipeline, H100, 16 bit, 2 to 32 nodes",
            "half are off by {} or less, and nine of ten by {}.",
        ),
        ("fsdp, dense, tp in a node, no pipeline, any chip, any dtype, any number of nodes", "it is {} and {}."),
    ):
        (of,) = (one for one in known().values() if one.name == name)
        assert f"({of.rows} steps), {text.format(f'{of.median:.1%}', f'{of.most:.1%}')}" in guide
