"""What a loss of several ranks and microbatches is a mean of."""

from __future__ import annotations

from collections.abc import Sequence

from tplab.checking.facts import Facts
from tplab.checking.recording import Step


def are_means_of_parts(facts: Facts) -> bool:
    """Whether the losses of both runs are the same if each target counts once, and those of microbatches have unequally
    many targets."""
    ours, theirs = _mean_of_targets(facts.mine), _mean_of_targets(facts.theirs)
    slack = facts.reference.slack_of_loss(facts.number)
    return ours is not None and theirs is not None and abs(ours - theirs) <= 2 * slack


def _mean_of_targets(steps: Sequence[Step]) -> float | None:
    """The loss per target, if each microbatch's is a mean over its own; None if they have equally many."""
    total, counts = 0.0, list[int]()
    for step in steps:
        if not step.losses or len(step.losses) != len(step.targets):
            return None
        counts += [count for _, count, _ in step.targets]
        total += len(step.losses) * sum(value * count for (value, _), (_, count, _) in zip(step.losses, step.targets))
    return total / sum(counts) if sum(counts) and len(set(counts)) > 1 else None
