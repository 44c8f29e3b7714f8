"""The figures of a simulated pipeline schedule, each with its formula; and the names that papers give to schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tplab.schedules import Costs, Simulation, lower_bounds, simulate
from tplab.units import plain, time_text

PAPERS = {
    "naive": "naive", "gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved_1f1b": "interleaved 1F1B",
    "looped_bfs": "looped BFS", "zb_h1": "ZB-H1", "zb_h2": "ZB-H2", "interleaved_zb": "interleaved zero bubble",
    "zb_v": "ZB-V", "v_half": "V-Half", "v_min": "V-Min", "dualpipe": "DualPipe", "dualpipe_v": "DualPipeV",
    "auto": "automatic", "edited": "edited",
}  # fmt: skip


def paper_name(name: str, otherwise: str = "schedule") -> str:
    """ "1F1B" for one_f_one_b; a name of your own is unchanged; `otherwise` if there is no name."""
    return PAPERS.get(name, name) or otherwise


class Fact(NamedTuple):
    """One figure: its name, the figure itself, and the small text after it."""

    name: str
    figure: str
    note: str


class Formula(NamedTuple):
    """A formula as the papers write it, and its value. For sources, see the docstring of each rule in tplab/schedules.

    value   a function of p ranks, m microbatches, v stages per rank; for a bubble also of F, I, W of a rank's share of
            one microbatch, and of the time F&B of an overlapped pair
    """

    text: str
    value: Callable[..., float]


BUBBLE: dict[str, Formula] = {
    "naive": Formula("(p−1)m(F+I+W)", lambda p, m, v, F, I, W, FB: (p - 1) * m * (F + I + W)),
    "gpipe": Formula("(p−1)(F+I+W)", lambda p, m, v, F, I, W, FB: (p - 1) * (F + I + W)),
    "one_f_one_b": Formula("(p−1)(F+I+W)", lambda p, m, v, F, I, W, FB: (p - 1) * (F + I + W)),
    "interleaved_1f1b": Formula("(p−1)(F+I+W)/v", lambda p, m, v, F, I, W, FB: (p - 1) * (F + I + W) / v),
    "looped_bfs": Formula("(p−1)(F+I+W)/v", lambda p, m, v, F, I, W, FB: (p - 1) * (F + I + W) / v),
    "zb_h1": Formula("(p−1) max(F, I, F+I−W)", lambda p, m, v, F, I, W, FB: (p - 1) * max(F, I, F + I - W)),
}
"""Idle time of the busiest rank, by rule; exact for messages that take no time and whole groups of p microbatches."""

BUBBLE_OF_EQUAL: dict[str, Formula] = {
    "zb_h2": Formula("(p−1)F", lambda p, m, v, F, I, W, FB: (p - 1) * F),
    "interleaved_zb": Formula("(p−1)F/v", lambda p, m, v, F, I, W, FB: (p - 1) * F / v),
    "zb_v": Formula("(p−1)F/2", lambda p, m, v, F, I, W, FB: (p - 1) * F / 2),
    "dualpipe": Formula("(p/2−1)(F&B+B−3W)", lambda p, m, v, F, I, W, FB: (p / 2 - 1) * (FB + I - 2 * W)),
    "dualpipe_v": Formula("(p−1)(F&B+B−3W)/2", lambda p, m, v, F, I, W, FB: (p - 1) * (FB + I - 2 * W) / 2),
}
"""The same if F = I = W; F&B is the time of an overlapped pair. Exact for 2p microbatches and more.
If pairs hide work, ranks are busy for different times, and this is the idle time of the rank that idles most."""

PAIR = "overlapped pair, F&B"
WITHOUT, WITH = "without overlap", "with overlap 1"

LETTERS = (
    "p ranks, m microbatches, v stages per rank. F, I and W are the times of a rank's share of one microbatch, "
    "B = I + W, and T is the makespan."
)
MEANINGS = {
    "makespan": "The time from the first start to the last end of all ranks.",
    "span": "The longest time from a rank's own first start to its own last end. The zero-bubble papers report it, "
    "because a rank that is done can take its optimizer step.",
    "bubble, of the makespan": "The idle time of all ranks, divided by p × T: the lost share of their time.",
    "bubble, of the ideal time": "The same idle time, divided by the time in which the ranks work. Megatron-LM's "
    "(p−1)/m is this one.",
    PAIR: "A forward and a backward that run together, as in DualPipe. Without overlap a pair takes F + B. With it, "
    "that part of the shorter one is hidden behind the longer one. F and B then include their own messages, such as "
    "the all-to-all of experts: only that share can be hidden. This rule is tplab's assumption: DeepSeek's formula "
    "leaves F&B to be measured.",
    WITHOUT: "The makespan of the same schedule where nothing is hidden.",
    WITH: "The makespan of the same schedule where the shorter one of each pair is hidden completely.",
    "peak microbatches": "The most microbatches whose activations one rank holds at the same time.",
    "lower bound": "No schedule with these stages on these ranks, this kind of backward pass and these costs takes "
    "less time. The gap is what is left to gain.",
}
"""The meaning of each figure, in words."""

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
"""Microbatches held at once by the rank that holds the most, if there are enough microbatches."""


def facts(run: Simulation, limit: float | None = None) -> list[Fact]:
    """The text under the picture of a run. `limit` is the most microbatches that a rank may hold. If the run respects
    it, the lower bound is for schedules that respect it too."""
    schedule, costs = run.schedule, run.costs
    p, m, v = schedule.num_ranks, schedule.num_microbatches, schedule.stages_per_rank
    unit = costs.unit

    def time(amount: float) -> str:
        return time_text(amount, unit, run.makespan)

    has_pairs = bool(schedule.joined.any())
    bubble = float(run.idle.max(initial=0.0) if has_pairs else run.idle.min(initial=np.inf))
    found = [Fact("makespan", time(run.makespan), ""), Fact("span", time(run.span), "")]
    note = ideal = ""
    shares = (costs.forward, costs.input_grad, costs.weight_grad)
    plain_costs = all(np.ndim(share) == 0 for share in shares) and costs.stage_costs is None
    is_equal = plain_costs and shares[0] == shares[1] == shares[2]
    known = BUBBLE.get(schedule.name) or (BUBBLE_OF_EQUAL.get(schedule.name) if is_equal else None)
    if known is not None and plain_costs and costs.transfer == 0 and costs.full_backward is None:
        amount = known.value(p, m, v, *shares, pair_time(costs))
        note = f"{known.text} / T = {time(amount)} / {time(run.makespan)}"
        if abs(amount - bubble) > 1e-9 * max(run.makespan, 1):
            note += f"; counted {time(bubble)}"
        elif abs(run.bubble_fraction * run.makespan - bubble) > 1e-9 * max(run.makespan, 1):
            note += ", on the rank that idles most"
        elif abs(run.bubble_over_ideal * (run.makespan - bubble) - bubble) < 1e-9 * max(run.makespan, 1):
            work = "busy time" if has_pairs and costs.overlap else "m(F+I+W)"
            text = "(p−1)/m" if schedule.name in ("gpipe", "one_f_one_b") else f"{known.text} / {work}"
            ideal = f"{text} = {time(bubble)} / {time(run.makespan - bubble)}"
    found.append(Fact("bubble, of the makespan", f"{plain(100 * run.bubble_fraction)}%", note))
    found.append(Fact("bubble, of the ideal time", f"{plain(100 * run.bubble_over_ideal)}%", ideal))
    found += _of_pairs(run, time) if has_pairs else []
    peak, held = PEAK.get(schedule.name), float(run.peak_activations.max(initial=0.0))
    note = "" if peak is None or peak.text == "1" else f"{peak.text} = {plain(peak.value(p, m, v))}"
    found.append(Fact("peak microbatches", plain(held), note))
    keeps = limit is not None and held <= limit + 1e-9
    best = lower_bounds(schedule, costs, limit).makespan if keeps else run.bounds.makespan
    gap = f"gap {plain(round(100 * (run.makespan / best - 1), 9))}%" if best else ""
    found.append(Fact("lower bound", time(best), f"{gap}, holding {limit:g} at most" if keeps else gap))
    return found


def pair_time(costs: Costs) -> float:
    """F & B: how long an overlapped pair of a rank's forward and full backward takes, given `overlap`."""
    forward = float(np.asarray(costs.forward))
    backward = float(np.asarray(costs.input_grad)) + float(np.asarray(costs.weight_grad))
    return forward + backward - costs.overlap * min(forward, backward)


def _of_pairs(run: Simulation, time: Callable[[float], str]) -> list[Fact]:
    """The effect of overlapped pairs: how long they take, and how long the run takes without (or with) overlap."""
    costs = run.costs
    rule = f"F + B − {plain(costs.overlap)} × min(F, B)"
    plain_costs = all(np.ndim(share) == 0 for share in (costs.forward, costs.input_grad, costs.weight_grad))
    is_plain = plain_costs and costs.stage_costs is None and costs.full_backward is None
    figure, note = (time(pair_time(costs)), rule) if is_plain else (rule, "")
    other = simulate(run.schedule, replace(costs, overlap=0.0 if costs.overlap else 1.0), lockstep=run.lockstep)
    name = WITHOUT if costs.overlap else WITH
    bubble = f"bubble {plain(100 * other.bubble_fraction)}% of the makespan"
    return [Fact(PAIR, figure, note), Fact(name, time(other.makespan), bubble)]


def meanings(found: Iterable[Fact]) -> list[tuple[str, str]]:
    """What the letters and these figures mean: (name, words), each once, in order."""
    return [("letters", LETTERS), *((name, MEANINGS[name]) for name in dict.fromkeys(fact.name for fact in found))]
