"""Gradients that the script clips too early."""

from __future__ import annotations

from collections.abc import Iterator

from tplab.checking.case import Case
from tplab.checking.causes import thread
from tplab.checking.repairs import Hypothesis, Repair


def of_clipping(case: Case) -> Iterator[Hypothesis]:
    """Gradients that are averaged before they are clipped."""
    facts, kind = case.facts, case.first.kind
    if facts.line("early clip") and kind in ("by rank", "weights", "other", "scaled"):
        cause = (
            "each rank clips its own gradients by their norm, and they are averaged only afterwards: average first, so "
            "that all ranks clip the same gradients by the same norm"
        )
        yield _early("norm", facts.line("early clip"), cause)
    if facts.line("early clamp") and kind in ("by rank", "weights", "other"):
        cause = (
            "each rank clips the elements of its own gradients, and they are averaged only afterwards: average first, "
            "so that what is clipped is the gradient of the whole batch"
        )
        yield _early("", facts.line("early clamp"), cause)


def _early(key: str, line: str, cause: str) -> Hypothesis:
    """What clips before the average is left out, and what it would do comes after it."""
    words = f"clipping at {line} after the gradients are averaged, not before"
    return Hypothesis(Repair("late", words, line), cause, line, thread(key))
