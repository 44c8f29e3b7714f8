"""The texts of `layout_lab` about plans: names, figures and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from tplab.forecast import Forecast, Plan
from tplab.forecast.forecast import NAMES
from tplab.units import counted, plain

GIB = 2**30

PARTS = {"computing": "computing"} | {
    "recompute": "recomputation",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "experts",
    "pp": "between stages",
    "bubble": "bubble",
    "dp": "gradients",
    "optimizer": "optimizer",
    "host": "host",
}
"""The parts of a step -> the names of their bars."""
PART_HUES = {"computing": -1, "recompute": 7, "tp": 0, "cp": 4, "ep": 6, "pp": 3, "bubble": -2, "dp": 1,
    "optimizer": 2, "host": 5}  # fmt: skip
KIND_HUES = {"parameters": 0, "gradients": 1, "optimizer": 2, "gathered": 3, "activations": 4, "logits": 5,
    "buffers": -1}  # fmt: skip
KINDS = {**NAMES, "optimizer": "optimizer's states"}


def badge(one: Forecast) -> str:
    """The kind of the seconds, and the error of such forecasts."""
    if one.cluster.fitted is None:
        return "data sheet: at peak rates"
    if one.measured is None:
        return "forecast, outside what was measured"
    return f"forecast, {one.measured.low - 1:+.0%} to {one.measured.high - 1:+.0%}".replace("-", "−")


def seconds_text(one: Forecast) -> str:
    """ "29 s (26.2 to 32 s)"; with a data sheet "29 s at peak rates"; outside what was measured "29 s, outside ..."."""
    if one.cluster.fitted is None:
        return f"{plain(one.seconds)} s at peak rates"
    if one.low is None or one.high is None:
        return f"{plain(one.seconds)} s, outside what was measured"
    return f"{plain(one.seconds)} s ({plain(one.low)} to {plain(one.high)} s)"


def says(one: Forecast, best: Forecast) -> str:
    """A sentence about a plan: its seconds compared with the best's, the memory of its fullest rank, and why."""
    change = one.seconds / best.seconds - 1
    beside = f", {abs(change):.1%} {'faster' if change < 0 else 'slower'} than the best"
    beside = "" if one is best else beside if abs(change) >= 0.0005 else ", as long as the best"
    if one.surely_fits:
        fit = ", and is the fastest of those that fit" if one is best else ""
    else:
        fit = ", and may not fit" if one.fits else ", and does not fit"
    return f"takes {seconds_text(one)}{beside}{fit}. {one.why[0].upper()}{one.why[1:]}."


def held_text(one: Forecast) -> str:
    """ "44.4 of 79.2 GiB"."""
    return f"{one.peak.total / GIB:.1f} of {one.usable / GIB:.1f} GiB"


def sentence(best: Forecast, considered: int, fitting: int) -> str:
    """The result of the search, without a full stop."""
    where = f"{best.model.name or 'this model'} on {counted(best.plan.ranks, 'GPU')}"
    if not fitting:
        return f"{where}: none of {considered:,} plans fits. {best.plan} holds the least: {best.why}"
    many = f"{fitting:,} of {considered:,} plans fit"
    return f"{where}: {many}; the fastest is {best.plan}: {seconds_text(best)}, {held_text(best)} ({badge(best)})"


def measured_text(rows: Sequence[tuple[Plan, float, float | None]]) -> str:
    """ "7.25 s for dp 16, microbatch 1; 9.5 s, 61 GiB for dp 4, tp 2, pp 2, microbatch 1"."""
    return "; ".join(
        f"{plain(seconds)} s{'' if gib is None else f', {plain(gib)} GiB'} for {plan}" for plan, seconds, gib in rows
    )
