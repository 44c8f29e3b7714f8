"""Gradients that the script has scaled by a wrong norm, or too early."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tplab.checking.case import Case
from tplab.checking.causes import thread
from tplab.checking.repairs import Hypothesis, Repair


def is_clipped(case: Case) -> bool:
    """Whether the script itself has scaled the gradients by the factor that is wrong, as it does to clip them."""
    if not case.is_all or case.first.kind not in ("scaled", "by rank") or any(step.norms for step in case.facts.mine):
        return False
    factor, times = case.first.factor or 1.0, case.facts.times_loss()
    if case.first.kind == "by rank" or _reference_clips(case):
        return True
    return not case.facts.sizes.named(factor) and (times is None or abs(times / factor - 1) > 5e-3)


def _reference_clips(case: Case) -> bool:
    step = case.facts.theirs[0]
    for name, piece in step.gradients.items():
        parts = [batch[name] for batch in step.parts if name in batch]
        if parts and piece.values.size == len(parts[0]) and np.any(total := np.sum(parts, axis=0)):
            flat = piece.values.reshape(-1)
            return abs(float((flat * total).sum() / (total * total).sum()) - 1) > 1e-3
    return False


def of_clipping(case: Case) -> Iterator[Hypothesis]:
    """The reference's norm, and gradients that are averaged before they are clipped."""
    facts, kind = case.facts, case.first.kind
    if facts.line("early clip") and kind in ("by rank", "weights", "other", "scaled"):
        cause = (
            "each rank clips its own gradients by their norm, and they are averaged after that: average first, so "
            "that all ranks clip the same gradients by the same norm"
        )
        yield _early("norm", facts.line("early clip"), cause)
    if facts.line("early clamp") and kind in ("by rank", "weights", "other"):
        cause = (
            "each rank clips the elements of its own gradients, and they are averaged after that: average first, so "
            "that what is clipped is the gradient of the whole batch"
        )
        yield _early("", facts.line("early clamp"), cause)
    for line in _lines(case) if is_clipped(case) else ():
        cause = (
            "all gradients are scaled by one number, as if they were clipped by another norm: that of a rank's own "
            "part, or one in which copies count several times"
        )
        numbers = {
            number: dict(step.scaled).get(line)
            for number in range(len(facts.reference.seen[0].steps))
            for step in facts.reference.steps(number)[:1]
        }
        words = f"the number that the reference multiplies gradients by at {line}"
        where = facts.line_of_norm() or facts.line("scale") or case.step
        yield Hypothesis(Repair("numbers", words, line, values=numbers), cause, where, thread("norm"))


def _lines(case: Case) -> list[str]:
    """Where the script multiplies gradients by another number than the reference does."""
    theirs = {line: by for step in reversed(case.facts.theirs) for line, by in step.scaled}
    return list(dict.fromkeys(
        line for line, by in case.facts.scaled if line in theirs and abs(by - theirs[line]) > 1e-3 * abs(by)
    ))  # fmt: skip


def _early(key: str, line: str, cause: str) -> Hypothesis:
    """What clips before the average is left out, and what it would do comes after it."""
    words = f"clipping at {line} after the gradients are averaged, not before"
    return Hypothesis(Repair("late", words, line), cause, line, thread(key))
