"""The samples of one step, the targets of its losses, and dropout's masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tplab.checking.causes import thread
from tplab.checking.facts import Facts, Found, NothingToTell, same
from tplab.checking.recording import FEWEST, Drawn, are_pieces, compared
from tplab.checking.repairs import Hypothesis, Repair
from tplab.checking.same_model import Row
from tplab.checking.samples import Samples, advice, compare_samples, on_several, samplers_by_rank, seeds_by_rank
from tplab.checking.sends import partitions
from tplab.units import ranks_text


class NeedsSamples(Exception):
    """The ranks draw their own data, which the reference can be given; the message says so, and how to avoid it.

    are_drawn   whether scripts draw it with torch, for as many microbatches on ranks as in the reference
    """

    def __init__(self, reason: str, are_drawn: bool):
        super().__init__(reason)
        self.are_drawn = are_drawn


_CAUSES = {
    "duplicates": "these ranks read the same samples, as if there were only one of them: cut the batch by rank, give "
    "the sampler num_replicas and rank, or draw from a different seed on each rank",
    "repeats": "in one step, a rank trains on these samples more often than the reference, and not on others: as where "
    "a loop has read its first batch before it starts, and then reads from the beginning",
    "missing": "what each rank cuts off is lost: let the parts add up to the batch",
    "orders": "each rank takes its part of an order of its own, so in an epoch several ranks see the same samples, and "
    "no rank sees some of the others: give all ranks' samplers one seed, and pass the same number to set_epoch",
    "parts": "these ranks hold parts of one model and work on its activations together, so they must read the same "
    "samples: give the sampler the number of the model's copies and the index of this one, not those of ranks",
}


def samples(facts: Facts, may_ask: bool) -> Found:
    """Compare the inputs of models. Raises NeedsSamples if `may_ask`, and NothingToTell."""
    found = compare_samples(facts.mine, facts.theirs)
    facts.copies, facts.is_padded = found.copies, found.is_padded
    forward = facts.line("forward")
    line = facts.line_of_data() or forward
    if found.ok:
        yield facts.row("samples", None if found.kind == "nothing" else True, found.words)
        return
    if padded := facts.line_of_script("padded"):
        raise NothingToTell(
            f"the DistributedSampler made at {padded} repeats samples so that all ranks have equally many "
            f"({found.words}): compare with a number of samples that the ranks can share equally, with drop_last=True, "
            "or with fewer --steps"
        )
    words, where, cause, ranks = found.words, line, _CAUSES.get(found.kind, ""), found.ranks
    if those := _one_model(facts):
        words, cause, ranks = f"ranks {', '.join(map(str, those))} share a model and see different samples", "", those
    elif shuffles := samplers_by_rank(facts.ours):
        numbers, where = shuffles
        listed = ", ".join(map(str, numbers))
        words = f"samplers shuffle by the seeds {listed}, so the ranks' samples are not parts of one order"
        cause, ranks = _CAUSES["orders"], ()
    elif not cause and (alike := _drawn_alike(facts)):
        words, where = f"the numbers drawn at {alike} are the same on all ranks, and their samples are not", alike
        cause = (
            "ranks draw the same random numbers here, from one seed, for samples that are not the same: draw those of "
            "the whole batch and cut them, or set another seed on each rank"
        )
    elif (
        not cause
        and found.factor == 1
        and not seeds_by_rank(facts.ours)
        and (count := on_several(facts.ours, facts.reference.seen[0]))
    ):
        words = f"{count} samples are on several ranks in the steps that were seen, and none is twice in the reference"
        cause = _CAUSES["orders"]
    elif not cause:
        if facts.goes_on:
            yield facts.fault("samples", f"{found.words}, which goes on", line, lines=[forward])
            return
        reason = f"the two runs did not see the same samples ({found.words}); {advice(facts.ours, found)}"
        if may_ask and (seeds_by_rank(facts.ours) or _can_be_fed(facts, found) or are_drawn(facts)):
            raise NeedsSamples(reason, are_drawn(facts))
        raise NothingToTell(reason)
    hypotheses = _dealt(facts, _ways(facts), cause, where) if cause else shared(facts)
    yield facts.fault("samples", words, where, factor=found.factor, ranks=ranks, lines=[line, forward],
                      hypotheses=hypotheses)  # fmt: skip


def shared(facts: Facts) -> Iterator[Hypothesis]:
    """Yield hypotheses if ranks that share a model see different samples, though all together see the reference's."""
    if ranks := _one_model(facts):
        ways = [way for way in partitions(facts) if any(set(ranks) <= set(group) for group in way)]
        yield from _dealt(facts, ways, _CAUSES["parts"], facts.line_of_data() or facts.line("forward"))


def _ways(facts: Facts) -> list[tuple[tuple[int, ...], ...]]:
    """Return the ways in which ranks may share the samples: one part per rank, or one per group of the script's."""
    return [tuple((rank,) for rank in range(facts.num_ranks)), *partitions(facts)]


def _dealt(facts: Facts, ways: list[tuple[tuple[int, ...], ...]], cause: str, line: str) -> Iterator[Hypothesis]:
    """Yield the reference's samples in as many parts as there are groups, if the size of each is that on a rank."""
    mine, theirs = facts.mine[0].samples, facts.theirs[0].samples
    if len(facts.reference.seen) > 1 or not mine or not theirs:
        return
    count, whole = (sum(len(next(iter(data.values()))) for data in samples) for samples in (mine, theirs))
    for way in ways:
        if len(way) * count == whole:
            whose = "rank" if len(way) == facts.num_ranks else "group of ranks"
            words = f"the reference's samples, where every {whose} has a part of its own"
            words = words if len(way) > 1 else "the reference's samples, all of them on every rank"
            repair = Repair("samples", words, groups=way, values={"seen": facts.reference.seen})
            yield Hypothesis(repair, cause, line)


def are_drawn(facts: Facts) -> bool:
    """Return whether scripts draw their samples with torch, so the reference can be given them instead."""
    microbatches = {len(step.samples) for step in (*facts.mine, *facts.theirs)}
    return len(microbatches) == 1 and all(step.draws for step in facts.mine)


def _drawn_alike(facts: Facts) -> str:
    """Return the line at which all ranks draw the same for their samples, and the reference draws for all; or ""."""
    first, *others = facts.mine
    for (line, turn), x in first.draws.items() if len(facts.copies) == facts.num_ranks else ():
        whole, tiled = facts.theirs[0].draws.get((line, turn)), np.concatenate([x] * facts.num_ranks)
        is_drawn_for_all = whole is not None and whole.shape == tiled.shape and not same(whole, tiled)
        if is_drawn_for_all and all(same(step.draws.get((line, turn), tiled), x) for step in others):
            return line
    return ""


def _can_be_fed(facts: Facts, found: Samples) -> bool:
    """Return whether the reference reads as many samples in another order, and all inputs of the loss were seen."""
    return found.factor == 1 and all(step.targets for seen in facts.ours for step in seen.steps if step.has_stepped)


def _one_model(facts: Facts) -> tuple[int, ...]:
    """Return ranks that add up activations of a layer of which each has a part, but do not see the same samples."""
    gathered = set[tuple[int, ...]]()
    for sent in facts.sent("forward"):
        if sent.op == "all_gather" and not sent.on:
            gathered.add(sent.ranks)  # gathered before the layer: each rank had its part of the samples
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
    """Compare the number of targets: a cut sequence may lose some. Padded rows are not cut, and padding may count."""
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
        "labels are shifted after the sequence is cut, so each part loses its last target: shift the whole "
        "sequence first, then cut"
    )
    words, values = f"{got} of the reference's {wanted} targets", (str(got), str(wanted))
    lines = [facts.line("forward"), facts.line("backward")]
    link, where = thread("labels"), facts.line("label") or chosen[0][0][2]
    steps = facts.reference.seen[0].steps
    whole = {number: (None, [x for x, _, _ in step.targets]) for number, step in enumerate(steps)}
    all_of = "the reference's targets, where each rank has those of its part of the sequence"
    repair = Repair("targets", all_of, values=whole)
    counted = replace(repair, words=f"{all_of}, and the loss divided by the number of all of them", by=got / wanted)
    yield facts.fault(
        "samples", words, where, names=["targets"], factor=got / wanted, values=values, lines=lines,
        hypotheses=[Hypothesis(repair, cause, where, link), Hypothesis(counted, cause, where, link)],
    )  # fmt: skip


def dropout(facts: Facts) -> Found:
    """Compare masks: ranks must drop the same from equal activations, and differently from parts of a layer. A script
    that is restarted on as many ranks may draw other masks than the run that goes on: that is not a fault."""
    for first, *others in facts.copies:
        drawn = facts.mine[first].masks
        for rank, a, b in ((other, *two) for other in others for two in zip(drawn, facts.mine[other].masks)):
            how = compared(a, b)
            if how == "one" and facts.are_parts(first, rank) and are_pieces(*_at(facts, a.where)):
                words = (
                    f"the same on rank {rank} as on rank {first}, for other activations: where ranks share a layer, "
                    "each drops by a mask of its own"
                )
                yield facts.fault("dropout", words, a.where, ranks=(first, rank))
                return
            if how == "two":
                cause = (
                    "these ranks work on the same activations, and each draws a dropout mask of its own: draw it from "
                    "a generator that has the same seed and state on all of them"
                )
                words = f"not the same on rank {rank} as on rank {first}, for the same activations"
                hypotheses = [Hypothesis(one, cause, one.line) for one in facts.of_one_seed]
                where = hypotheses[0].where if hypotheses else a.where
                yield facts.fault("dropout", words, where, ranks=(first, rank), lines=[a.where], hypotheses=hypotheses)
                return
    if facts.goes_on and len(facts.theirs) == facts.num_ranks and (row := _restored(facts)):
        yield row
    elif any(step.masks for step in facts.mine):
        yield facts.row("dropout", True, "masks were drawn but not used, because they would hide all other differences")


def _restored(facts: Facts) -> Row | None:
    sides = ((rank, *two) for rank in range(facts.num_ranks)
             for two in zip(facts.mine[rank].masks, facts.theirs[rank].masks))  # fmt: skip
    pairs = [(rank, a, b) for rank, a, b in sides if a.where == b.where and a.size == b.size >= FEWEST]
    if not pairs:
        return None
    ranks = sorted({rank for rank, a, b in pairs if a.mask != b.mask})
    how = (
        f"are not those of the run that goes on, on {ranks_text(ranks)}: where random numbers are was not restored "
        "(torch.get_rng_state of each rank, saved with the weights)"
        if ranks
        else "are those of the run that goes on"
    )
    return facts.row("dropout", True, f"masks {how}; they were drawn but not used")


def _at(facts: Facts, where: str) -> Iterator[list[Drawn]]:
    """Return all masks of the ranks at a line, and all of the reference."""
    return ([a for step in steps for a in step.masks if a.where == where] for steps in (facts.mine, facts.theirs))
