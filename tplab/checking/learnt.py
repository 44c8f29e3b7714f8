"""Why runs that agree may still tell nothing: a script that shares no work agrees with itself."""

from __future__ import annotations

from collections.abc import Iterator

from tplab.checking.facts import Facts, same
from tplab.checking.recording import Seen
from tplab.checking.same_model import named
from tplab.units import ranks_text


def nothing_learnt(facts: Facts, num_steps: int) -> str:
    """Why it is no news that all of the steps are the reference's; "" if it is."""
    if not any(seen.has_sent for seen in facts.ours):
        return (
            "no rank has sent anything to another, so each of them trains a model of its own, as the reference does: "
            "call torch.distributed.init_process_group, and give the model to DistributedDataParallel or average its "
            "gradients"
        )
    if lost := facts.on_no_rank:
        return (
            f"{named(lost)} of the reference was found on no rank, and it is not known to which of the reference's "
            f"parameters {named(facts.unplaced)} belong: give them the reference's names, or its weights at the start"
        )
    if twice := next(_twice(facts), ()):
        line = facts.line_of_data() or facts.line("forward")
        return (
            f"{ranks_text(twice)} hold copies of the model and all see the same samples (at {line}), so together "
            "they do only what one of them does alone: cut the batch by rank, give the loader a DistributedSampler, or "
            "draw from a different seed on each rank"
        )
    if not any(_has_changed(seen, number) for seen in facts.ours for number in range(num_steps)):
        freed = facts.line_of_script("freed")
        why = (
            f"The optimizer made at {freed} holds parameters whose memory is freed, as is the case with those that "
            "FSDP has gathered: create it before the model is called"
            if freed
            else "Check that the optimizer holds the model's parameters, and that its learning rate is not 0"
        )
        return f"no parameter has changed in {num_steps} steps, neither on the ranks nor in the reference. {why}"
    return ""


_SUMS = ("backward", "reduction")


def _twice(facts: Facts) -> Iterator[tuple[int, ...]]:
    """Ranks that do the same though they average their gradients, or though there are no others: they saw the same
    samples, hold the same parts, and have computed the same gradients."""
    first = [seen.steps[0] for seen in facts.ours]
    for group in facts.copies:
        sums = [sent.ranks for step in first for sent in step.sent if sent.moment in _SUMS and sent.size > 1]
        if len(group) < 2 or (len(facts.copies) > 1 and not any(len({*group} & {*ranks}) > 1 for ranks in sums)):
            continue
        if "FSDPModule" in facts.ours[0].kinds:  # which shows no gradient before it adds them up
            if all(sent.op == "all_gather" for rank in group for sent in first[rank].sent if sent.moment == "forward"):
                yield group
            continue
        if any(facts.holds_differ(name, group) for name in facts.reference.weights):
            continue
        parts = [[x for batch in first[rank].parts for x in batch.values()] for rank in group]
        if parts[0] and all(len(one) == len(parts[0]) and all(map(same, one, parts[0])) for one in parts):
            yield group


def _has_changed(seen: Seen, number: int) -> bool:
    step, before = seen.steps[number], seen.steps[number - 1].parameters if number else seen.weights
    return any(
        name in before and not same(piece.values, before[name].values) for name, piece in step.parameters.items()
    )
