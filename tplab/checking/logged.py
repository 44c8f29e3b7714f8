"""What the script logs, compared with what its reference logs."""

from __future__ import annotations

import numpy as np

from tplab.checking.causes import thread
from tplab.checking.facts import Facts, Found
from tplab.checking.logs import Differs, compare_logs
from tplab.checking.repairs import Hypothesis, Repair
from tplab.checking.same_model import What
from tplab.checking.sends import line_of_loss


def log(facts: Facts) -> Found:
    again = facts.reference.again
    twice = again[0].steps[facts.number] if again and facts.number < len(again[0].steps) else None
    count, wrong = compare_logs(facts.mine, facts.theirs[0], twice, 32 * facts.reference.floor)
    if count and not wrong:
        words = f"{count} logged number{'s are' if count > 1 else ' is'} the reference's"
        yield facts.row("log", True, words, count=count)
    if not wrong:
        return
    rank, got, want = wrong[0]
    what: What = "evaluation" if got.is_evaluation else "log"
    factor, values = got.value / want.value if want.value else None, (f"{got.value:g}", f"{want.value:g}")
    proof = _proof(facts, wrong[0])
    is_named, times = factor is not None and bool(facts.sizes.named(factor)), facts.times_loss()
    if factor is not None and is_named and times is not None and abs(times / factor - 1) < 2e-3:
        backward = facts.line("backward")
        cause = (
            "the losses of all ranks are added up, and the backward pass of that sum adds nothing up: training is the "
            "same, but the loss where the backward pass begins, and the loss that is logged, are sums. Average it"
        )
        where = line_of_loss(facts) or backward
        lines = [backward, got.where]
        yield facts.fault(
            "loss",
            "",
            facts.sizes.words(factor),
            factor,
            where,
            "",
            values=values,
            lines=lines,
            hypotheses=[
                Hypothesis(
                    Repair("mean", f"the mean in place of the sum at {where}", where), cause, where, thread("loss")
                )
            ],
        )
        return
    if _is_own(facts, wrong[0]) and not is_named:
        words, factor = f"rank {rank}'s own", None
        cause = f"rank {rank} has logged what it computed from its own samples: average it over ranks first"
        proof = f"rank {rank} computed this number from its own samples"
    elif is_named and factor is not None and factor > 1:
        words = facts.sizes.words(factor)
        cause = (
            "training is the same, but what is logged is not: it is a sum over ranks that is divided by what one rank "
            "has, or is not divided at all. Divide it by the sum of the counts of all ranks"
        )
    else:
        words = facts.sizes.words(factor) if factor else "not the reference's"
        cause = (
            "training is the same, but what is logged is not: it is computed from one rank's own samples, or it is a "
            "mean of the means of batches or ranks that are not equally large. Add up sums and counts over ranks, then "
            "divide"
        )
    seen = "training is the same, but what is logged is not"
    yield facts.fault(
        what, got.label, words, factor, got.where, cause if proof else "", thread=thread("log") if proof else "",
        values=values, ranks=[rank], proof=proof, seen=seen,
    )  # fmt: skip


def _proof(facts: Facts, wrong: Differs) -> str:
    """How the right number follows from what ranks have computed; "" if it was not seen."""
    pairs = [pair for step in facts.mine for pair in step.evaluated]
    means = [float(np.mean([value for value, _ in step.evaluated])) for step in facts.mine if step.evaluated]
    slack = 2 * wrong.want.slack + 1e-4 * abs(wrong.want.value)
    if not pairs:
        return ""
    total = sum(count for _, count in pairs)
    if abs(sum(value * count for value, count in pairs) / total - wrong.want.value) <= slack:
        return "the mean of the same losses over all ranks, weighted by their targets, is what the reference logs"
    if abs(float(np.mean(means)) - wrong.want.value) <= slack:
        return "the mean over all ranks of these losses is what the reference logs"
    return ""


def _is_own(facts: Facts, wrong: Differs) -> bool:
    """Whether the logged number is one that the rank has computed itself."""
    step, got = facts.mine[wrong.rank], wrong.got
    losses = [value for value, _ in step.losses]
    evaluated = [value for value, _ in step.evaluated]
    own = [*losses, *evaluated]
    for values in (losses, evaluated):
        own += [sum(values), float(np.mean(values))] if values else []
    return any(abs(value - got.value) <= 2 * got.slack + 1e-4 * abs(value) for value in own)
