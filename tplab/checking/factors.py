"""Gradients off by a factor: where it is from, and what usually causes it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tplab.checking.case import Case
from tplab.checking.causes import thread
from tplab.checking.same_model import Finding
from tplab.checking.sends import line_of_loss

_CLOSE = 2e-3


def scaled(case: Case, factor: float) -> Finding:
    """Gradients that are a multiple of the reference's."""
    facts, times = case.facts, case.facts.times_loss()
    words = facts.sizes.words(factor)
    line = next((line for line, by in facts.scaled if _is(by, factor)), "")
    if line and not (case.is_all and case.made.scaling(factor)):
        cause = (
            "the script itself multiplies the gradients by this number, between the backward pass and the step, and "
            "they were right before"
        )
        return case.fault(cause, "loss", words, line)
    if line := divided_alone(case, factor):
        cause = (
            "the script divides the gradients by this number on one rank too, where there is nothing to average, so "
            "that the reference's are too small: divide by the number of ranks that are added up"
        )
        return case.fault(cause, "", words, line)
    if case.is_all and times is not None and abs(times / factor - 1) < 5e-3:
        return _scaled_loss(case, factor, words)
    if not case.is_all:
        return _scaled_some(case, factor, words)
    where = ""
    if not (case.reduction and _is(factor * _batches(case), 1)):
        where = case.made.scaling(factor)
    if not where and case.is_split and not case.reduction:
        line = case.in_backward  # of a collective: what else scales everything is before the backward pass
        where = line if line in {sent.where for sent in facts.sent("backward")} else ""
    where = where or (case.made.last if not case.reduction and not case.is_split else "")
    return case.fault(*_cause(case, factor), words, where)


def divided_alone(case: Case, factor: float) -> str:
    """The line that divides gradients by the factor in both runs, though not because of microbatches; "" for none."""
    if _is(factor, _batches(case)):
        return ""
    theirs = {at for step in case.facts.theirs for at in step.scaled}
    return next((at[0] for at in case.facts.scaled if at in theirs and _is(factor * at[1], 1)), "")


def _scaled_loss(case: Case, factor: float, words: str) -> Finding:
    """The loss is the same multiple."""
    facts = case.facts
    batches, theirs = (max(len(step.losses) for step in steps) for steps in (facts.mine, facts.theirs))
    mean, want = float(np.mean(facts.losses())), facts.reference.loss(facts.number)
    is_more = batches > theirs > 1 and _is(factor, batches / theirs)  # the reference's count in full, too
    of_batches = is_more or (batches > 1 and any(_is(factor, x) for x in (batches, 1 / batches, 1 / batches**2)))
    causes = list(_causes_of_batches(factor, batches, theirs)) if of_batches else []
    if not of_batches or (not is_more and _is(factor, facts.num_ranks) and case.made.scaling(1 / batches)):
        causes.append(_OF_RANKS[factor > 1])
    elif _is(factor, 1 / facts.num_ranks) and not case.made.scaling(1 / batches):
        causes = [_OF_RANKS[False]]
    where = line_of_loss(facts) or case.made.scaling(factor) or case.made.last
    if batches > 1 and factor > 1:
        where = case.backward
    values = f"{mean:.6g}", f"{want:.6g}"
    return facts.fault(
        "loss", "", words, factor, where, "; or ".join(causes), thread=thread("loss"), values=values, lines=case.lines
    )


_OF_RANKS = {
    True: "the loss is added up over ranks, or multiplied by their number, and gradients are averaged or added up "
    "again: let each rank's loss be the mean over its samples, and average the gradients",
    False: "the loss is divided by the number of ranks, or by a count of the samples or tokens of all of them, and "
    "gradients are averaged over ranks once more: do one of the two",
}


def _causes_of_batches(factor: float, batches: int, theirs: int) -> Iterator[str]:
    if factor < 1:
        yield f"the loss of each of {batches} microbatches is divided by their number twice: divide it once"
    else:
        of = f" ({theirs} in the reference)" if theirs > 1 else ""
        yield f"the loss of each of {batches} accumulated microbatches{of} counts in full: divide it by their number"


def _scaled_some(case: Case, factor: float, words: str) -> Finding:
    """Other gradients do not have the factor."""
    facts = case.facts
    shared = {name for seen in facts.ours for pair in seen.shared.items() for name in pair}
    if _is(factor, 2) and shared & set(case.names):
        cause = "the parameter is used in two places, and its gradient is added up for each of them"
        return case.fault(cause, "twice", words)
    where = case.left_out
    if any("expert" in name for name in case.names):
        cause = (
            "an expert's gradient has the parts of all ranks that sent it tokens: divide it by the number of "
            "ranks that the other gradients are averaged over, and add it up only over ranks that hold a copy of "
            "the expert"
        )
        return case.fault(cause, "experts", words, where)
    if case.is_added_up or _is_summed_by_hand(case, factor):
        cause = (
            "these gradients are added up over ranks, and others are averaged: average all of them, as each rank's "
            "loss is a mean"
        )
        return case.fault(cause, "loss", words)
    cause = f"only some parameters have this factor: {_IN_BACKWARD[factor > 1]}"
    return case.fault(cause, "backward", words, where or case.in_backward)


def _is_summed_by_hand(case: Case, factor: float) -> bool:
    """Whether ranks that saw samples of their own add up these gradients after the backward pass, and do no more."""
    is_own = all(len(group) == 1 for group in case.facts.copies)
    is_sum = case.reduction in {sent.where for sent in case.facts.sent("reduction") if sent.reduction == "sum"}
    return is_own and is_sum and not case.is_split and _is(factor, case.facts.num_ranks)


_IN_BACKWARD = {
    True: "in the backward pass they get a sum over ranks twice, or one over ranks whose gradients are already whole. "
    "The backward pass of an all_gather whose result every rank uses in the same way is a cut, and that of a sum is a "
    "copy: neither adds up",
    False: "the loss, or these gradients, are divided by the number of ranks of a group over which nothing adds them "
    "up",
}


def _cause(case: Case, factor: float) -> tuple[str, str]:
    """Of a factor that all gradients have, and the loss has not; and the key of its thread."""
    batches = _batches(case)
    if batches > 1 and _is(factor * batches, 1):
        cause = f"the loss of each of {batches} microbatches is divided by their number twice: by the script, and by "
        return cause + "the schedule or the library that accumulates the gradients", "microbatches"
    if case.is_split and case.where == case.backward:
        return _IN_BACKWARD[factor > 1], "backward" if factor > 1 else ""
    if factor > 1:
        return (
            "gradients are added up over ranks, and each rank's loss is already a mean, or scaled up: average the "
            "gradients, by dividing by the number of ranks or with ReduceOp.AVG",
            "loss",
        )
    return "gradients are averaged over ranks, and divided by their number once more", "loss"


def _batches(case: Case) -> int:
    return max(len(step.parts) for step in case.facts.mine)


def _is(factor: float, other: float) -> bool:
    return abs(factor / other - 1) < _CLOSE
