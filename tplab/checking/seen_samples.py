"""The samples of one step, the targets that losses compare with, and dropout's masks."""

from __future__ import annotations

import numpy as np

from tplab.checking.causes import thread
from tplab.checking.facts import Facts, Found
from tplab.checking.samples import Samples, advice, compare_samples, samplers_by_rank, seeds_by_rank


class NeedsSamples(Exception):
    """The ranks draw data of their own, which the reference can be given; the text says so, and how to avoid it.

    are_drawn   whether scripts draw them with torch, for as many microbatches on ranks as in the reference
    """

    def __init__(self, reason: str, are_drawn: bool):
        super().__init__(reason)
        self.are_drawn = are_drawn


class OtherSamples(Exception):
    """The two runs cannot be compared: they did not see the same samples. The text says how they can."""


_CAUSES = {
    "duplicates": "these ranks read the same samples, as if there were one of them: cut the batch by rank, give the "
    "sampler num_replicas and rank, or draw from a seed for each rank",
    "missing": "what each rank cuts off is lost: let the parts add up to the batch",
    "orders": "each rank takes its part of an order of its own, so in an epoch several ranks have the same samples, "
    "and some samples are on none: give all ranks' samplers one seed, and set_epoch the same number",
    "parts": "these ranks hold parts of one model, and work on its activations together, so they must read the same "
    "samples: give the sampler the number and the place of a model's copy, and not those of a rank",
}


def samples(facts: Facts, may_ask: bool) -> Found:
    """Compare what models were called with. Raises NeedsSamples where `may_ask`, and OtherSamples."""
    found = compare_samples(facts.mine, facts.theirs)
    facts.copies, facts.is_padded = found.copies, found.is_padded
    forward = facts.line("forward")
    line = facts.line_of_data() or forward
    if found.ok:
        yield facts.row("samples", None if found.kind == "nothing" else True, found.words)
        return
    if ranks := _one_model(facts):
        words = f"ranks {', '.join(map(str, ranks))} share a model and see different samples"
        yield facts.fault("samples", "", words, found.factor, line, _CAUSES["parts"], ranks=ranks, lines=[forward])
    elif shuffles := samplers_by_rank(facts.ours):
        numbers, line = shuffles
        listed = ", ".join(map(str, numbers))
        words = f"samplers shuffle by the seeds {listed}, so those of the ranks are not parts of one order"
        yield facts.fault("samples", "", words, None, line, _CAUSES["orders"], lines=[forward])
    elif found.kind in _CAUSES:
        cause = _CAUSES[found.kind]
        yield facts.fault("samples", "", found.words, found.factor, line, cause, ranks=found.ranks, lines=[forward])
    else:
        reason = f"the two runs did not see the same samples ({found.words}); {advice(facts.ours, found)}"
        if may_ask and (seeds_by_rank(facts.ours) or _can_be_fed(facts, found) or are_drawn(facts)):
            raise NeedsSamples(reason, are_drawn(facts))
        raise OtherSamples(reason)


def are_drawn(facts: Facts) -> bool:
    """Whether scripts draw their samples with torch: the reference can be given them where it draws its own."""
    microbatches = {len(step.samples) for step in (*facts.mine, *facts.theirs)}
    return len(microbatches) == 1 and all(step.draws for step in facts.mine)


def _can_be_fed(facts: Facts, found: Samples) -> bool:
    """Whether the reference reads as many samples in another order, and all that the loss depends on was seen."""
    return found.factor == 1 and all(step.targets for seen in facts.ours for step in seen.steps if step.has_stepped)


def _one_model(facts: Facts) -> tuple[int, ...]:
    """Ranks that add up activations of a layer of which each has a part, but do not see the same samples."""
    gathered = set[tuple[int, ...]]()
    for sent in facts.sent("forward"):
        if sent.op == "all_gather" and not sent.on:
            gathered.add(sent.ranks)  # before the layer: each rank had a part of its samples
        together = next((group for group in facts.copies if set(sent.ranks) <= set(group)), None)
        if (
            together
            or sent.on
            or sent.size == 1
            or sent.op not in ("all_reduce", "reduce_scatter")
            or len(sent.ranks) < 2
            or sent.ranks in gathered
        ):
            continue
        if any(facts.holds_differ(name, sent.ranks) for name in facts.reference.weights):
            return sent.ranks
    return ()


def targets(facts: Facts) -> Found:
    """Labels may be lost where a sequence is cut. Where rows are padded, no sequence is, and padding may count."""
    if facts.is_padded:
        return
    having = {rank: step.targets for rank, step in enumerate(facts.mine) if step.targets}
    by_samples = [having[group[0]] for group in facts.copies if group[0] in having]
    by_content = {tuple(id(values) for values, _, _ in found): found for found in having.values()}
    chosen = by_samples if len(by_samples) == len(facts.copies) else list(by_content.values())
    wanted = sum(count for step in facts.theirs[:1] for _, count, _ in step.targets)
    got = sum(count for found in chosen for _, count, _ in found)
    if not 0 < got < wanted:
        return
    cause = (
        "labels are shifted after the sequence is cut, so that each part loses its last target: shift the whole "
        "sequence first, then cut"
    )
    words, values = f"{got} of the reference's {wanted} targets", (str(got), str(wanted))
    lines = [facts.line("forward"), facts.line("backward")]
    link, where = thread("labels"), facts.line("label") or chosen[0][0][2]
    yield facts.fault("samples", "targets", words, got / wanted, where, cause, thread=link, values=values, lines=lines)


def dropout(facts: Facts) -> Found:
    """Ranks that work on the same activations must drop the same."""
    for first, *others in facts.copies:
        for rank in others:
            for a, b in zip(facts.mine[first].masks, facts.mine[rank].masks):
                if np.isclose(a.given, b.given, rtol=1e-4) and a.mask != b.mask:
                    cause = (
                        "these ranks work on the same activations, and each draws a dropout mask of its own: draw it "
                        "from a generator that has the same seed and state on all of them"
                    )
                    words = f"another one on rank {rank} than on rank {first}, for the same activations"
                    seeds = seeds_by_rank(facts.ours)
                    where = seeds[1] if seeds else a.where
                    yield facts.fault("dropout", "", words, None, where, cause, ranks=(first, rank), lines=[a.where])
                    return
    if any(step.masks for step in facts.mine):
        yield facts.row("dropout", True, "masks were drawn and not used: they would hide all other differences")
