"""Gradients that share a fault, what is known about them, and the possible sources of a factor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tplab.checking.causes import thread
from tplab.checking.facts import Facts
from tplab.checking.gaps import near
from tplab.checking.gradients import Wrong
from tplab.checking.recording import Sent
from tplab.checking.repairs import Groups, Hypothesis, Repair
from tplab.checking.same_model import named
from tplab.checking.sends import given_to, line_of_loss, lines_of_reduction
from tplab.units import plain

_ORDINALS = ("first", "second", "third")


class Factors:
    """Gradients that share a fault.

    is_all     whether every gradient has the fault
    others     the parameters whose gradients do not have it
    reduction  the line at which they are added up over ranks, or ""
    where      the line to name if nothing better is known
    batches    how many microbatches a step has
    made       each line that computed the number on which `backward` is called, the last one first, and its factor if
               it only multiplies by a number; `numbers` are those with a factor, that of the backward pass last
    made_last  the line of the last operation before that of the backward pass, in which a library may compute more
    made_first the line of the operation that reduced many numbers to one. Both are the line of the backward pass if
               nothing else was seen
    """

    def __init__(self, facts: Facts, group: Sequence[Wrong], is_all: bool):
        self.facts, self.first, self.is_all = facts, group[0], is_all
        self.kind, self.names = group[0].kind, [one.name for one in group]
        self.others = [name for name in facts.reference.order if name not in self.names]
        self.backward, self.step = facts.line("backward"), facts.line("step")
        reduction = lines_of_reduction(facts, self.names)
        self.reduction = reduction[0] if reduction else ""
        self.where = self.reduction or self.backward
        self.lines = [*reduction, self.backward, facts.line("scale"), self.step]
        self.batches = max(len(step.parts) for step in facts.mine)
        self.made = next((step.made for step in facts.mine if step.made), [])
        before = [line for line, _ in self.made if line != self.backward] or [self.backward]
        self.made_last, self.made_first = before[0], before[-1]
        known = [(line, by) for line, by in self.made if by is not None]
        self.numbers = sorted(known, key=lambda at: at[0] == self.backward)

    def scaling(self, factor: float) -> str:
        """Return the line that computes the loss and multiplies by this factor; "" if there is none."""
        lines = [line for line, times in self.numbers if near(times, factor)]
        return lines[0] if lines else ""

    def is_of_both(self, line: str) -> bool:
        """Return whether a line multiplies the loss by the same number in the reference."""
        theirs = {made for step in self.facts.theirs for made in step.made}
        return bool(line) and all(made in theirs for made in self.made if made[0] == line)

    @property
    def own_names(self) -> tuple[str, ...]:
        """The ranks' own names for these parameters."""
        return tuple(sorted({mine for (_, mine), place in self.facts.places.items() if place.name in self.names}))

    @property
    def reductions(self) -> list[Sent]:
        """The collectives that reduce these gradients; else all that reduce several elements after the loss."""
        later = given_to(self.facts, self.names) or [
            sent
            for sent in self.facts.sent("reduction", "backward")
            if sent.op in ("all_reduce", "reduce_scatter") and sent.size > 1 and not sent.on
        ]
        return list({sent.where: sent for sent in later}.values())

    def combined(self, how: str, groups: Groups, by: float, words: str, line: str = "") -> Repair:
        """Return the repair that combines the gradients over groups of ranks, or only multiplies them. See `Repair`."""
        return Repair("gradients", words, line, self.own_names, groups, how, by=by)

    @property
    def in_backward(self) -> str:
        """The line whose backward pass makes the gradients wrong, or ""."""
        return next((line for name in self.names if (line := self.facts.line_of_gradient(name))), "")

    @property
    def left_out(self) -> str:
        """The line that keeps these gradients out of a collective that reduces others, or ""."""
        past = lines_of_reduction(self.facts, self.others) if not self.reduction else []
        return self.facts.source.way_past(past[0]) if past else ""

    @property
    def not_synchronised(self) -> str:
        """The line where the script turns off the synchronisation of gradients, or ""."""
        line = self.facts.line_of_script("no sync")
        return (self.facts.source.decision(line) or line) if line else ""

    @property
    def is_added_up(self) -> bool:
        """Whether collectives sum these gradients but average others."""
        mine, others = ({sent.reduction for sent in given_to(self.facts, names)} for names in (self.names, self.others))
        return mine == {"sum"} and others == {"mean"}

    @property
    def is_split(self) -> bool:
        """Whether ranks hold different parts of any of them."""
        return any(len(self.facts.groups(name)) > 1 for name in self.names)

    @property
    def is_on_several_stages(self) -> bool:
        """Whether several ranks hold these parameters whole, and every other parameter is on a single rank."""
        held = {name: {rank for rank, _, _ in self.facts.holders(name)} for name in self.facts.reference.order}
        are_copies = not self.is_split and all(len(held[name]) > 1 for name in self.names)
        others = [held[name] for name in self.others]
        return are_copies and all(len(ranks) == 1 for ranks in others) and len(set().union(*others)) > 1

    # --- a factor ----------------------------------------------------------------------------------------------------

    def of_a_factor(self, factor: float) -> Iterator[Hypothesis]:
        """Yield hypotheses, the likeliest first: a line with this very factor before one whose number may be wrong."""
        yield from self._scaled_by_hand(factor)
        times = self.facts.times_loss()
        if self.is_all and times is not None and abs(times / factor - 1) < 5e-3:
            yield from self._scaled_loss(factor)
            return
        of_all = self._of_all(factor)
        for line, by in self.numbers if self.is_all else ():
            if near(by, factor):
                yield _factor(line, by, 1.0, *of_all)
        yield from self._scaled_backward(factor)
        yield from self._scaled_sums(factor)
        if not self.is_all:
            yield from self._scaled_some(factor)
            return
        if self._is_of_batches(factor):
            yield _loss(factor, self.made_last, *of_all)
        yield from self._numbers_of_loss(factor, _OF_COUNTS[factor > 1])
        for sent in self.reductions if factor < 1 else ():
            words = f"multiplication by {plain(1 / factor)} after {sent.where}"
            yield Hypothesis(Repair("scale", words, sent.where, by=1 / factor), _AVERAGED, sent.where)
        if not self.reduction and not self.is_split and self.facts.sizes.named(factor):
            yield _loss(factor, self.made_last, *of_all)

    def _scaled_by_hand(self, factor: float) -> Iterator[Hypothesis]:
        """Yield lines at which the script itself multiplies the gradients, before the step."""
        theirs = {at for step in self.facts.theirs for at in step.scaled}
        of_loss = self.scaling(factor) if self.is_all else ""
        when = "between the backward pass and the step"
        for line, by in self.facts.scaled:
            if near(by, factor) and (not of_loss or ((line, by) not in theirs and self.is_of_both(of_loss))):
                cause = f"the script itself multiplies the gradients by this number {when}, and they were right before"
                yield _factor(line, by, 1.0, cause)
            if (line, by) in theirs and near(by * factor, 1) and not near(factor, self.batches):
                cause = (
                    "the script divides the gradients by this number on one rank too, where there is nothing to "
                    "average, so the reference's are too small: divide by the number of ranks that are added up"
                )
                words = f"no multiplication by {plain(by)} at {line} on one rank"
                yield Hypothesis(Repair("factor", words, line, was=by, of_reference=True), cause, line)
            if self.is_all and (line, by) not in theirs and self._is_of_other_ranks(by, by / factor):
                cause = (
                    f"the script itself multiplies the gradients by a number of ranks {when}, and not by that of the "
                    f"{len(self.facts.copies)} ranks, or groups of ranks, that saw samples of their own"
                )
                yield _factor(line, by, by / factor, cause)

    def _is_of_other_ranks(self, has: float, wants: float) -> bool:
        """Return whether `has` is a number of ranks, or its inverse, and `wants` is that of the ranks that saw
        different samples."""
        count = len(self.facts.copies)
        those = (count, 1 / count) if count > 1 else ()
        is_one = any(near(wants, x) and not near(has, x) and (has - 1) * (x - 1) > 0 for x in those)
        return is_one and bool(self.facts.sizes.named(has))

    def _is_of_batches(self, factor: float) -> bool:
        return self.batches > 1 and near(factor * self.batches, 1)

    def _of_all(self, factor: float) -> tuple[str, str]:
        """Return the cause of a factor that all gradients share, and the key of its thread."""
        may_be_of_ranks = bool(self.reductions) and near(factor * self.facts.num_ranks, 1)
        if self._is_of_batches(factor) and not may_be_of_ranks:
            cause = f"the loss of each of {self.batches} microbatches is divided by their number twice: once by "
            return f"{cause}the script, and once more by what accumulates or scales the gradients", "microbatches"
        less = "gradients are averaged over ranks, and divided by their number once more"
        return _ADDED_UP if factor > 1 else less, "loss"

    def _scaled_loss(self, factor: float) -> Iterator[Hypothesis]:
        """Yield hypotheses for a loss that is the same multiple of the reference's."""
        facts = self.facts
        of_ranks = _OF_RANKS[factor > 1]
        if (line := line_of_loss(facts)) and factor > 1:
            words = f"the mean in place of the sum at {line}"
            cause = of_ranks if self.reductions else "the losses of ranks are added up, where their mean is meant"
            yield Hypothesis(Repair("scale", words, line, by=1 / factor), cause, line, thread("loss"))
        if not self.reductions:  # nothing sums or averages gradients
            of_ranks = "the loss is multiplied by a number that is not the reference's"
        batches, theirs = (max(len(step.losses) for step in steps) for steps in (facts.mine, facts.theirs))
        is_more = batches > theirs > 1 and near(factor, batches / theirs)  # so do the reference's microbatches
        of_batches = is_more or (batches > 1 and any(near(factor, x) for x in (batches, 1 / batches, 1 / batches**2)))
        is_divided = bool(self.scaling(1 / batches))
        causes = [_of_batches(factor, batches, theirs)] * of_batches
        if not of_batches or (not is_more and near(factor, facts.num_ranks) and is_divided):
            causes.append(of_ranks)
        elif near(factor, 1 / facts.num_ranks) and not is_divided:
            causes = [of_ranks]
        cause = "; or ".join(causes)
        for line, by in self.numbers:
            if near(by, factor):
                yield _factor(line, by, 1.0, cause)
        if of_batches and factor > 1:
            yield _loss(factor, self.backward, cause)
        yield from self._numbers_of_loss(factor, cause)
        if facts.sizes.named(factor):
            yield _loss(factor, self.scaling(factor) or self.made_last, cause)

    def _numbers_of_loss(self, factor: float, cause: str) -> Iterator[Hypothesis]:
        """Yield lines whose number may be off by the factor, such as a count of one rank's targets."""
        for line, by in self.numbers if self.facts.sizes.named(factor) else ():
            if not any(near(by, x) for x in (factor, 1.0, self.batches, 1 / self.batches)):
                yield _factor(line, by, by / factor, cause)

    def _scaled_sums(self, factor: float) -> Iterator[Hypothesis]:
        """Yield collectives that reduce these gradients, or anything in the backward pass."""
        for sent in self.reductions:
            if sent.reduction == "sum" and near(factor, len(sent.ranks)):
                are_parts = self.is_all and len(self.reductions) == 1 and len(self.facts.copies) == self.facts.num_ranks
                cause = _ADDED_UP if sent.moment == "reduction" or sent.on or are_parts else _SUMMED_TWICE
                if not self.is_all and self.ways_of(self.others) == {"mean"}:
                    cause = _SOME_ADDED_UP
                names = () if self.is_all or not sent.on else self.own_names
                words = f"the mean in place of the sum at {sent.where}"
                repair = Repair("scale", words, sent.where, names, by=1 / len(sent.ranks))
                yield Hypothesis(repair, cause, sent.where, thread("loss"))
            if sent.reduction == "mean" and near(factor * len(sent.ranks), 1):
                words = f"the sum in place of the mean at {sent.where}"
                yield Hypothesis(Repair("scale", words, sent.where, by=1 / factor), _AVERAGED, sent.where)

    def _scaled_backward(self, factor: float) -> Iterator[Hypothesis]:
        """Yield operations whose backward pass may multiply."""
        if self.is_all and not self.is_split:
            return
        line, some = self.in_backward, "" if self.is_all else "only some parameters have this factor: "
        sent_back = [sent for sent in self.facts.sent("backward") if sent.reduction == "sum" and not sent.on]
        sums = [sent for sent in sent_back if near(factor, len(sent.ranks)) and sent.size > 1]
        lines = sorted(dict.fromkeys(sent.where for sent in sums), key=lambda at: at != line)
        for at in lines if factor > 1 else ():
            count = len([sent for sent in self.facts.mine[0].sent if sent.moment == "backward" and sent.where == at])
            each = max(count // self.batches, 1)
            for turn in range(min(each, len(_ORDINALS))):
                of = "sum" if each == 1 else f"{_ORDINALS[turn]} of {each} sums"
                words = f"the {of} over ranks in the backward pass of {at} is left out"
                repair = Repair("skip", words, at, was=turn, times=each)
                yield Hypothesis(repair, f"{some}{_SUMMED_TWICE}", line or at, thread("backward"))
        if line:
            words = f"{plain(1 / factor)} times the gradient that comes back from {line}"
            cause = f"{some}the gradient that comes back from this line in the backward pass is {plain(factor)} times "
            yield Hypothesis(Repair("dual", words, line, by=1 / factor), f"{cause}the right one", line)

    def _scaled_some(self, factor: float) -> Iterator[Hypothesis]:
        """Yield causes of a factor that other gradients do not have and no visible line explains. A reference on
        several ranks may itself be wrong, and a run in which the two agree would not show which one is."""
        facts = self.facts
        if len(facts.theirs) > 1:
            return
        shared = {name for seen in facts.ours for pair in seen.shared.items() for name in pair}
        repair = self.combined("", (), 1 / factor, f"the gradients of {named(self.names)} times {plain(1 / factor)}")
        if near(factor, 2) and shared.issuperset(self.names):
            cause = "the parameter is used in two places, and its gradient is added up once for each of them"
            yield Hypothesis(repair, cause, self.where, thread("twice"))
        sums = [sent.where for sent in facts.sent("reduction") if sent.reduction == "sum"]
        is_added_up = self.ways_of(self.names) == {"sum"} and self.ways_of(self.others) == {"mean"}
        if is_added_up or (near(factor, facts.num_ranks) and self.reduction in sums and not self.is_split):
            yield Hypothesis(repair, _SOME_ADDED_UP, self.reduction, thread("loss"))
        held = {name: {rank for rank, _, _ in facts.holders(name)} for name in self.names}
        some_hold = all(0 < len(ranks) < facts.num_ranks for ranks in held.values())
        sent = [sent for sent in facts.sent("forward", "between") if sent.op == "all_to_all"]
        are_stacked = not self.reduction and all(len(facts.groups(name)) > 1 for name in self.names)
        are_stacked = are_stacked and bool(self.ways_of(self.others)) and len(facts.copies) == facts.num_ranks
        are_sent = any(some_hold or (are_stacked and near(factor, len(one.ranks))) for one in sent)
        if (are_sent or any("expert" in name for name in self.names)) and facts.sizes.named(factor):
            cause = (
                "an expert's gradient contains the parts of all ranks that sent it tokens: divide it by the number of "
                "ranks that the other gradients are averaged over, and add it up only over ranks that hold a copy of "
                "the expert"
            )
            yield Hypothesis(repair, cause, self.left_out or self.where, thread("experts"))

    def ways_of(self, names: Sequence[str]) -> set[str]:
        """Return how collectives reduce these gradients: "sum", "mean"."""
        return {sent.reduction for sent in given_to(self.facts, names)}


def _loss(factor: float, where: str, cause: str, key: str = "loss") -> Hypothesis:
    """Return the hypothesis that the whole loss has this factor."""
    words = f"{plain(1 / factor)} times the loss where the backward pass begins"
    return Hypothesis(Repair("loss", words, by=1 / factor), cause, where, thread(key))


def _factor(line: str, was: float, by: float, cause: str, key: str = "loss") -> Hypothesis:
    """Return the hypothesis that a line multiplies by a number that should be another one."""
    words = f"no multiplication by {plain(was)} at {line}"
    if by != 1:
        words = f"multiplication by {plain(by)} in place of {plain(was)} at {line}"
    return Hypothesis(Repair("factor", words, line, was=was, by=by), cause, line, thread(key))


def _of_batches(factor: float, batches: int, theirs: int) -> str:
    if factor < 1:
        return f"the loss of each of {batches} microbatches is divided by their number twice: divide it only once"
    of = f" ({theirs} in the reference)" if theirs > 1 else ""
    return f"the loss of each of {batches} accumulated microbatches{of} counts in full: divide it by their number"


_ADDED_UP = (
    "gradients are added up over ranks, although each rank's loss is already a mean, or is scaled up: average the "
    "gradients, by dividing by the number of ranks or with ReduceOp.AVG"
)
_SOME_ADDED_UP = (
    "these gradients are added up over ranks, and others are averaged: average all of them, because each rank's loss "
    "is a mean"
)
_AVERAGED = (
    "gradients are averaged over ranks, but they must be added up: either they are already divided by a number of "
    "ranks, or each rank's gradient is only a part of the whole, for example because a gather passes no gradient back"
)
_OF_COUNTS = {
    True: "the loss is divided by a number that is too small, such as a count of one rank's samples or tokens, where "
    "the count over all ranks is meant",
    False: "the loss is divided by a number that is too large, such as a count that includes copies of the same "
    "samples or tokens several times, or the count over all ranks where gradients are averaged as well",
}
_OF_RANKS = {
    True: "the loss is added up over ranks, or multiplied by their number, and gradients are averaged or added up "
    "again: let each rank's loss be the mean over its samples, and average the gradients",
    False: "the loss is divided by the number of ranks, or by a count of the samples or tokens of all of them, and "
    "gradients are averaged over ranks once more: do only one of the two",
}
_SUMMED_TWICE = (
    "in the backward pass, these gradients go through a sum over ranks twice, or through one over ranks whose "
    "gradients are already whole. If every rank uses the result of an all_gather in the same way, its backward pass is "
    "a cut, and the backward pass of a sum is a copy: neither adds anything up"
)
