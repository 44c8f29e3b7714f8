"""The figures of a simulated pipeline schedule, each beside the formula that gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tplab.schedules import Run
from tplab.widgets.units import plain, time_text

Shape = tuple[int, int, float, float, float, float]
"""p ranks, m microbatches, v stages a rank, F, I, W of a rank's share of one microbatch."""


class Fact(NamedTuple):
    """One figure: what it is, the figure, what stands behind it in small letters."""

    name: str
    figure: str
    note: str


class Formula(NamedTuple):
    """How the papers write it, and what it comes to. Sources: facts of each rule in tplab/schedules."""

    text: str
    value: Callable[..., float]


BUBBLE: dict[str, Formula] = {
    "gpipe": Formula("(p−1)(F+I+W)", lambda p, m, v, F, I, W: (p - 1) * (F + I + W)),
    "one_f_one_b": Formula("(p−1)(F+I+W)", lambda p, m, v, F, I, W: (p - 1) * (F + I + W)),
    "interleaved_1f1b": Formula("(p−1)(F+I+W)/v", lambda p, m, v, F, I, W: (p - 1) * (F + I + W) / v),
    "looped_bfs": Formula("(p−1)(F+I+W)/v", lambda p, m, v, F, I, W: (p - 1) * (F + I + W) / v),
    "zb_h1": Formula("(p−1)(F+I−W)", lambda p, m, v, F, I, W: (p - 1) * (F + I - W)),
}
"""Idle time of the busiest rank, by rule; exact for messages that take no time."""

PEAK: dict[str, Formula] = {
    "naive": Formula("1", lambda p, m, v: 1),
    "gpipe": Formula("m", lambda p, m, v: m),
    "one_f_one_b": Formula("p", lambda p, m, v: p),
    "interleaved_1f1b": Formula("p + (p−1)/v", lambda p, m, v: p + (p - 1) / v),
    "looped_bfs": Formula("m", lambda p, m, v: m),
    "zb_h1": Formula("p", lambda p, m, v: p),
    "zb_h2": Formula("2p−1", lambda p, m, v: 2 * p - 1),
    "zb_v": Formula("p", lambda p, m, v: p),
    "v_half": Formula("(p+2)//2", lambda p, m, v: (p + 2) // 2),
    "v_min": Formula("(p+4)//3", lambda p, m, v: (p + 4) // 3),
}
"""Microbatches held at once by the rank that holds most, where there are enough of them."""


def facts(run: Run) -> list[Fact]:
    """What is written under the picture of a run."""
    schedule, costs = run.schedule, run.costs
    p, m, v = schedule.num_ranks, schedule.num_microbatches, schedule.stages_per_rank
    unit = costs.unit

    def time(amount: float) -> str:
        return time_text(amount, unit, run.makespan)

    bubble = run.makespan - float(run.busy.max(initial=0.0))
    found = [Fact("makespan", time(run.makespan), ""), Fact("span", time(run.span), "")]
    note = ""
    shares = (costs.forward, costs.input_grad, costs.weight_grad)
    known = BUBBLE.get(schedule.name) if costs.transfer == 0 and costs.full_backward is None else None
    if known is not None and all(np.ndim(share) == 0 for share in shares):
        note = f"{known.text} / T = {time(known.value(p, m, v, *shares))} / {time(run.makespan)}"
        if abs(known.value(p, m, v, *shares) - bubble) > 1e-9 * max(run.makespan, 1):
            note += f"; counted {time(bubble)}"
    found.append(Fact("bubble, of the makespan", f"{plain(100 * run.bubble_fraction)} %", note))
    found.append(Fact("of the ideal time", f"{plain(100 * run.bubble_over_ideal)} %", ""))
    peak, held = PEAK.get(schedule.name), float(run.peak_activations.max(initial=0.0))
    note = "" if peak is None else f"{peak.text} = {plain(peak.value(p, m, v))}"
    found.append(Fact("peak microbatches", plain(held), note))
    best = run.bounds.makespan
    found.append(Fact("best possible", time(best), f"gap {plain(100 * run.gap)} %"))
    return found
