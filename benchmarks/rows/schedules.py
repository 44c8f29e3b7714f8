"""Pipeline schedules: ten thousand and a million actions simulated, a million generated and checked."""

from __future__ import annotations

from benchmarks.table import Row, seconds
from tplab.schedules import RULES, Costs, check, interleaved_1f1b, simulate, zb_h1
from tplab.widgets import pipeline_lab

COSTS = Costs(1, 1, 1, transfer=0.1)


def measure() -> list[Row]:
    small = zb_h1(ranks=16, microbatches=208)
    few = min(seconds(lambda: simulate(small, COSTS)) for _ in range(5))
    made = seconds(lambda: check(interleaved_1f1b(ranks=64, microbatches=1024, virtual_stages=8)))
    large = interleaved_1f1b(ranks=64, microbatches=1024, virtual_stages=8)
    many = seconds(lambda: simulate(large, COSTS))
    lab = pipeline_lab("one_f_one_b", ranks=16, microbatches=64)
    answers = {}
    for rule in RULES:
        if rule != "naive":  # it has only one microbatch
            answers[rule] = seconds(lambda rule=rule: setattr(lab, "settings", {**lab.settings, "rule": rule}))
            assert lab.run.schedule.name == rule, lab.notice
    slowest = max(answers, key=lambda rule: answers[rule])
    return [
        Row(f"simulate {len(small):,} actions, ZB-H1", "<= 30 ms", f"{few * 1e3:.0f} ms", few <= 0.03),
        Row(f"simulate {len(large):,} actions, interleaved", "<= 1 s", f"{many:.2f} s", many <= 1),
        Row("generate and check the same", "<= 2 s", f"{made:.2f} s", made <= 2),
        Row(
            f"`pipeline_lab`, 16 ranks, 64 microbatches: {len(answers)} rules, the slowest answer", "<= 100 ms",
            f"{answers[slowest] * 1e3:.0f} ms ({slowest})", answers[slowest] <= 0.1,
        ),
    ]  # fmt: skip
