"""Gradients that the script has scaled by a wrong norm, or too early."""

from __future__ import annotations

import numpy as np

from tplab.checking.case import Case
from tplab.checking.causes import thread
from tplab.checking.same_model import Finding


def is_clipped(case: Case) -> bool:
    """Whether the script itself has scaled the gradients by the factor that is wrong, as it does to clip them."""
    if not case.is_all or any(step.norms for step in case.facts.mine):
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


def clipped(case: Case) -> Finding:
    """By another norm than the reference's."""
    facts, scales = case.facts, case.first.scales or (case.first.factor or 1.0,)
    factor = 1 / scales[0] if scales[0] else None
    words = facts.sizes.words(factor) if factor else "not the reference's"
    listed = ", ".join(f"{scale:.4g}" for scale in scales)
    cause = (
        f"all gradients are scaled by one number ({listed} times the reference's), as if they were clipped by "
        "another norm: that of a rank's own part, or one in which copies count several times"
    )
    lines = [facts.line("norm"), *facts.sums_of_numbers(), facts.line("scale"), facts.line("scale in"), case.step]
    where = facts.line_of_norm() or facts.line("scale") or case.step
    return facts.fault("norm", "", words, factor, where, cause, thread=thread("norm"), lines=lines)


def early_clip(case: Case) -> Finding:
    """By each rank's own norm, before gradients are averaged."""
    cause = (
        "each rank clips its own gradients by their norm, and they are averaged after that: average first, so "
        "that all ranks clip the same gradients by the same norm"
    )
    words, where = "each rank's own, from before the gradients are averaged", case.facts.line("early clip")
    lines = [*case.lines, case.facts.line("scale")]
    return case.facts.fault("norm", "", words, None, where, cause, thread=thread("norm"), lines=lines)


def early_clamp(case: Case) -> Finding:
    """By value, before gradients are averaged."""
    cause = (
        "each rank clips the elements of its own gradients, and they are averaged after that: average first, so that "
        "what is clipped is the gradient of the whole batch"
    )
    return case.fault(cause, "", "clipped by value before they are averaged", case.facts.line("early clamp"))
