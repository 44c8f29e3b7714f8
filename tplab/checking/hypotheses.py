"""What may make gradients wrong that have the same fault: each with the change of the run that would repair it.

Only what fits the numbers of the run is worth a new one: a factor that a line multiplies by, a sum over ranks that is
the reference's gradient, a count of targets. Which of them is the cause is decided by `repairs.proven`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tplab.checking.case import Case
from tplab.checking.causes import thread
from tplab.checking.clipping import of_clipping
from tplab.checking.recording import Seen, Sent
from tplab.checking.repairs import Hypothesis, Repair, close
from tplab.checking.same_model import named
from tplab.checking.sends import given_to, line_of_buckets, line_of_loss, mixing, partitions
from tplab.units import plain, ranks_text

_CLOSE = 2e-3
_ORDINALS = ("first", "second", "third")


def hypotheses(case: Case) -> list[Hypothesis]:
    """The likeliest first."""
    known = dict[str, Hypothesis]()
    for one in _Hypotheses(case).all():
        known.setdefault(f"{one.repair.kind} {one.repair.words}", one)
    return list(known.values())


class _Hypotheses:
    def __init__(self, case: Case):
        self.case, self.facts, self.names = case, case.facts, case.names
        self.kind, self.factor = case.first.kind, case.first.factor
        self.batches = max(len(step.parts) for step in case.facts.mine)

    def all(self) -> Iterator[Hypothesis]:
        yield from self._batch_norm()
        yield from of_clipping(self.case)
        yield from self._mixed()
        if self.kind == "scaled" and self.factor:
            yield from self._scaled(self.factor)
        if self.kind == "microbatches":
            yield from self._dropped()
        if self.kind == "again":
            yield from self._again()
        yield from self._unsynced()
        yield from self._unwaited()
        yield from self._tied()
        if self.kind == "means" or self._has_unequal_counts():
            yield from self._means()
        if self.kind != "scaled":
            yield from self._other_groups()
            yield from self._not_added_up()

    # --- a factor ----------------------------------------------------------------------------------------------------

    def _scaled(self, factor: float) -> Iterator[Hypothesis]:
        facts, case = self.facts, self.case
        theirs = {at for step in facts.theirs for at in step.scaled}
        for line, by in facts.scaled:
            if _is(by, factor) and not (case.is_all and case.made.scaling(factor)):
                cause = (
                    "the script itself multiplies the gradients by this number, between the backward pass and the "
                    "step, and they were right before"
                )
                yield self._factor(line, by, 1.0, cause, "loss")
            if (line, by) in theirs and _is(by * factor, 1) and not _is(factor, self.batches):
                cause = (
                    "the script divides the gradients by this number on one rank too, where there is nothing to "
                    "average, so that the reference's are too small: divide by the number of ranks that are added up"
                )
                words = f"no multiplication by {plain(by)} at {line} on one rank"
                repair = Repair("factor", words, line, was=by, of_reference=True)
                yield Hypothesis(repair, cause, line)
        times = facts.times_loss()
        if case.is_all and times is not None and abs(times / factor - 1) < 5e-3:
            yield from self._scaled_loss(factor)
            return
        for line, by in case.made.numbers if case.is_all else ():
            if _is(by, factor):
                yield self._factor(line, by, 1.0, _FACTOR_OF_ALL[factor > 1], "loss")
        yield from self._scaled_backward(factor)
        yield from self._scaled_sums(factor)
        if case.is_all and self.batches > 1 and _is(factor * self.batches, 1):
            cause = (
                f"the loss of each of {self.batches} microbatches is divided by their number twice: by the script, and "
                "by the schedule or the library that accumulates the gradients"
            )
            yield self._loss(1 / factor, cause, case.made.last, "microbatches")
        if case.is_all:
            yield from self._numbers_of_loss(factor, _OF_COUNTS[factor > 1])
            for sent in self._reductions() if factor < 1 else ():
                words = f"times {plain(1 / factor)} after {sent.where}"
                yield Hypothesis(Repair("mean", words, sent.where, by=factor), _AVERAGED, sent.where)
            if not case.reduction and not case.is_split and facts.sizes.named(factor):
                yield self._loss(1 / factor, _FACTOR_OF_ALL[factor > 1], case.made.last, "loss")
        else:
            yield from self._scaled_some(factor)

    def _scaled_loss(self, factor: float) -> Iterator[Hypothesis]:
        """The loss is the same multiple."""
        facts, case = self.facts, self.case
        if (line := line_of_loss(facts)) and factor > 1:
            words = f"the mean in place of the sum at {line}"
            yield Hypothesis(Repair("mean", words, line, by=factor), _OF_RANKS[True], line, thread("loss"))
        batches, theirs = (max(len(step.losses) for step in steps) for steps in (facts.mine, facts.theirs))
        is_more = batches > theirs > 1 and _is(factor, batches / theirs)  # the reference's count in full, too
        of_batches = is_more or (batches > 1 and any(_is(factor, x) for x in (batches, 1 / batches, 1 / batches**2)))
        is_divided = bool(case.made.scaling(1 / batches))
        causes = [*_causes_of_batches(factor, batches, theirs)] if of_batches else []
        if not of_batches or (not is_more and _is(factor, facts.num_ranks) and is_divided):
            causes.append(_OF_RANKS[factor > 1])
        elif _is(factor, 1 / facts.num_ranks) and not is_divided:
            causes = [_OF_RANKS[False]]
        cause = "; or ".join(causes)
        for line, by in case.made.numbers:
            if _is(by, factor):
                yield self._factor(line, by, 1.0, cause, "loss")
        if of_batches and factor > 1:
            yield self._loss(1 / factor, cause, case.backward, "loss")
        yield from self._numbers_of_loss(factor, cause)
        if facts.sizes.named(factor):
            yield self._loss(1 / factor, cause, case.made.scaling(factor) or case.made.last, "loss")

    def _numbers_of_loss(self, factor: float, cause: str) -> Iterator[Hypothesis]:
        """A line divides by a number that is a part of the right one, such as a count of the targets of all ranks."""
        if not self.facts.sizes.named(factor):
            return
        for line, by in self.case.made.numbers:
            if not any(_is(by, x) for x in (factor, 1.0, self.batches, 1 / self.batches)):
                yield self._factor(line, by, by / factor, cause, "loss")

    def _scaled_sums(self, factor: float) -> Iterator[Hypothesis]:
        """Collectives that these gradients, or anything in the backward pass, go through."""
        facts, case = self.facts, self.case
        others = {sent.reduction for sent in given_to(facts, case.others)}
        for sent in self._reductions():
            if sent.reduction == "sum" and _is(factor, len(sent.ranks)):
                cause = _ADDED_UP if sent.moment == "reduction" or sent.on else _SUMMED_TWICE
                if not case.is_all and others == {"mean"}:
                    cause = (
                        "these gradients are added up over ranks, and others are averaged: average all of them, as "
                        "each rank's loss is a mean"
                    )
                names = () if case.is_all or not sent.on else self._mine
                repair = Repair("mean", f"the mean in place of the sum at {sent.where}", sent.where, names)
                yield Hypothesis(repair, cause, sent.where, thread("loss"))
            if sent.reduction == "mean" and _is(factor * len(sent.ranks), 1):
                words = f"the sum in place of the mean at {sent.where}"
                yield Hypothesis(Repair("sum", words, sent.where, by=factor), _AVERAGED, sent.where)

    def _scaled_backward(self, factor: float) -> Iterator[Hypothesis]:
        """The backward pass of one operation multiplies."""
        if self.case.is_all and not self.case.is_split:
            return
        line = self.case.in_backward
        sent_back = [sent for sent in self.facts.sent("backward") if sent.reduction == "sum" and not sent.on]
        sums = [sent for sent in sent_back if _is(factor, len(sent.ranks)) and sent.size > 1]
        lines = sorted(dict.fromkeys(sent.where for sent in sums), key=lambda at: at != line)
        for at in lines if factor > 1 else ():
            count = len([sent for sent in self.facts.mine[0].sent if sent.moment == "backward" and sent.where == at])
            each = max(count // self.batches, 1)
            for turn in range(min(each, len(_ORDINALS))):
                of = "" if each == 1 else f", the {_ORDINALS[turn]} of {each}"
                words = f"no sum over ranks in the backward pass of {at}{of}"
                repair = Repair("skip", words, at, was=turn, times=each)
                yield Hypothesis(repair, f"{self._some}{_SUMMED_TWICE}", line or at, thread("backward"))
        if line:
            words = f"{plain(1 / factor)} times what comes back from {line}"
            repair = Repair("dual", words, line, by=1 / factor)
            cause = f"what comes back from this line in the backward pass is {plain(factor)} times the right gradient"
            yield Hypothesis(repair, f"{self._some}{cause}", line)

    def _scaled_some(self, factor: float) -> Iterator[Hypothesis]:
        """Other gradients do not have the factor, and no line that makes it was seen."""
        facts, case = self.facts, self.case
        shared = {name for seen in facts.ours for pair in seen.shared.items() for name in pair}
        repair = self._gradients("", (), 1 / factor, f"the gradients of {named(self.names)} times {plain(1 / factor)}")
        if _is(factor, 2) and shared & set(self.names):
            cause = "the parameter is used in two places, and its gradient is added up for each of them"
            yield Hypothesis(repair, cause, case.where, thread("twice"))
        if case.is_added_up or (
            _is(factor, facts.num_ranks) and case.reduction in {sent.where for sent in facts.sent("reduction")
                                                                if sent.reduction == "sum"} and not case.is_split
        ):  # fmt: skip
            cause = (
                "these gradients are added up over ranks, and others are averaged: average all of them, as each rank's "
                "loss is a mean"
            )
            yield Hypothesis(repair, cause, case.reduction, thread("loss"))
        held = {name: {rank for rank, _, _ in facts.holders(name)} for name in self.names}
        some_hold = all(0 < len(ranks) < facts.num_ranks for ranks in held.values())
        if (some_hold or any("expert" in name for name in self.names)) and facts.sizes.named(factor):
            cause = (
                "an expert's gradient has the parts of all ranks that sent it tokens: divide it by the number of ranks "
                "that the other gradients are averaged over, and add it up only over ranks that hold a copy of the "
                "expert"
            )
            yield Hypothesis(repair, cause, case.left_out or case.where, thread("experts"))

    # --- parts of a sum ----------------------------------------------------------------------------------------------

    def _not_added_up(self) -> Iterator[Hypothesis]:
        """The reference's gradient is a sum, or a mean, of those of ranks: nothing adds them up."""
        facts, case = self.facts, self.case
        line = "" if case.is_all or case.left_out else case.in_backward
        together = sorted(partitions(facts), key=lambda way: not self._are_copies(way))
        for way in together if line else ():
            words = f"a sum over ranks{self._of_ranks(way)} in the backward pass of {line}"
            cause, _, key = self._cause_of_parts(way)
            repair = Repair("dual", words, line, self._mine, way)
            yield Hypothesis(repair, cause if self.kind == "own" else _NO_DUAL, line, thread(key))
        for way in partitions(facts):
            for combine in ("sum", "mean"):
                if not self._is_right(way, combine):
                    continue
                cause, where, key = self._cause_of_parts(way)
                if combine == "mean" and not case.is_all and "Megatron" in cause:
                    cause, key = f"the gradients of {named(self.names)} are not averaged over ranks", ""
                of = f"{self._of_ranks(way)} of the gradients of {named(self.names)}"
                words = f"the {combine} over ranks{of}, before the step"
                yield Hypothesis(self._gradients(combine, way, 1.0, words), cause, where, thread(key))

    def _are_copies(self, way: tuple[tuple[int, ...], ...]) -> bool:
        """Whether ranks of one group saw the same samples."""
        return any(len(set(group) & set(copies)) > 1 for group in way for copies in self.facts.copies)

    def _of_ranks(self, way: tuple[tuple[int, ...], ...]) -> str:
        return "" if len(way) == 1 and len(way[0]) == self.facts.num_ranks else f" of {_listed(way)}"

    @property
    def _mine(self) -> tuple[str, ...]:
        """The ranks' own names for these parameters."""
        return tuple(sorted({mine for (_, mine), place in self.facts.places.items() if place.name in self.names}))

    def _cause_of_parts(self, way: tuple[tuple[int, ...], ...]) -> tuple[str, str, str]:
        """Cause, line, thread."""
        case = self.case
        if case.is_all and (over := self._over_copies()):
            cause = (
                f"this collective is over {ranks_text(over)}, which saw the same samples: the gradients of ranks that "
                "saw others are not averaged. Use the group, or the axis, whose ranks divide the samples"
            )
            return cause, case.reduction, "backward"
        if case.is_all:
            cause = (
                "ranks that hold copies step with different gradients, each with its own part: nothing averages "
                "them, or not those of every microbatch. Average them before the optimizer's step, or let the last "
                "microbatch be the one that DistributedDataParallel synchronises"
            )
            return cause, self._unsynchronised(), "backward"
        if case.is_on_several_stages:
            cause = (
                f"several stages hold {named(self.names)}, as they do a tied embedding, and each has only the gradient "
                "of its own use: after the backward pass, add up the gradients of these copies over the ranks that "
                "hold them"
            )
            return cause, case.step, "tied"
        if line := self._of_the_others():
            of_many = next(iter(given_to(self.facts, case.others)), None) is None
            cause = (
                f"the gradients of {named(self.names)} are not averaged over ranks: each rank has those of its own "
                f"samples. Those of the others are added up here{', many in one collective' if of_many else ''}: look "
                f"at what keeps these away{', such as a bucket that is never full' if of_many else ''}"
            )
            return cause, line, ""
        cause = (
            f"the gradients of {named(self.names)} are not added up over ranks: each rank has only the part that "
            "its own share of the work brings. The tensor that enters the shared work needs an identity whose "
            "backward pass is an all_reduce (Megatron's f), and where a parameter is applied to a part of the "
            "tokens, its gradient must be summed over ranks"
        )
        return cause, case.in_backward or case.left_out or case.backward, "backward"

    def _is_right(self, way: tuple[tuple[int, ...], ...], combine: str) -> bool:
        """Whether gradients that are combined so are the reference's, in the step that was seen."""
        facts = self.facts
        whole = facts.reference.gradients(facts.number)
        for name in self.names:
            held = {rank: (mine, place) for rank, mine, place in facts.holders(name)}
            for rank, (_, place) in held.items():
                group = next((group for group in way if rank in group), (rank,))
                parts = [facts.mine[other].gradients.get(held[other][0]) for other in group if other in held]
                there = [part.values.astype(np.float64) for part in parts if part is not None]
                if not there or name not in whole or len({x.shape for x in there}) > 1:
                    return False
                total = np.sum(there, axis=0) / (len(group) if combine == "mean" else 1)
                if not close(total, place.take(whole[name]), 1e-3):
                    return False
        return True

    def _over_copies(self) -> tuple[int, ...]:
        """The ranks of the collective that gradients are added up in, if all of them saw the same samples."""
        sent = [sent.ranks for sent in self.facts.sent("reduction", "backward") if sent.where == self.case.reduction]
        is_within = bool(sent) and all(any(set(ranks) <= set(group) for group in self.facts.copies) for ranks in sent)
        return sent[0] if is_within and len(sent[0]) > 1 else ()

    def _of_the_others(self) -> str:
        """Where gradients are added up, where every rank saw samples of its own and these gradients are left out."""
        if self.case.left_out or self.case.reduction or any(len(group) > 1 for group in self.facts.copies):
            return ""
        given = [sent.where for sent in given_to(self.facts, self.case.others)]
        return given[-1] if given else line_of_buckets(self.facts, self.case.others)

    def _unsynchronised(self) -> str:
        """Where the model is called past the DistributedDataParallel that is around it, which then sends nothing."""
        is_past = (
            self.facts.line_of_script("wrapped")
            and not self.case.reduction
            and not self.facts.sent("backward", "reduction")
        )
        return self.case.not_synchronised or (is_past and self.facts.line("call")) or self.case.where

    def _mixed(self) -> Iterator[Hypothesis]:
        """A collective adds up gradients of different parts."""
        if not (line := mixing(self.facts, self.names)):
            return
        what = "experts" if any("expert" in name for name in self.names) else "shards"
        cause = (
            f"this collective adds up gradients of different {what}: its group has ranks that hold different parts of "
            "the tensor. Use the group of ranks that hold copies"
        )
        where = self.facts.source.argument(line, "group") or line
        yield from self._in_place_of(line, cause, where)

    def _other_groups(self) -> Iterator[Hypothesis]:
        """A collective of these gradients is over another group than it should be."""
        if self.case.reduction and self.case.reduction != mixing(self.facts, self.names):
            cause = (
                "the sum over ranks leaves out some of them, or has some too many: its group is not that of the ranks "
                "that hold copies and saw other samples"
            )
            yield from self._in_place_of(self.case.reduction, cause, "")

    def _in_place_of(self, line: str, cause: str, where: str) -> Iterator[Hypothesis]:
        undone = float(np.prod([*dict(self.facts.scaled).values()])) or 1.0
        for way in sorted(partitions(self.facts), key=self._are_copies):
            if any(self.facts.holds_differ(name, group) for name in self.names for group in way):
                continue
            for combine, by in dict.fromkeys(itertools.product(("mean", "sum"), (1 / undone, 1.0))):
                times = f", times {plain(by)}," if by != 1 else ""
                words = f"the {combine} over ranks of {_listed(way)}{times} in place of the collective at {line}"
                repair = self._gradients(combine, way, by, words, line)
                yield Hypothesis(repair, cause, where, thread("experts"))
        held = self.case.copies_of_one
        if held and held not in partitions(self.facts):
            words = f"the mean over ranks of {_listed(held)}, in place of the collective at {line}"
            yield Hypothesis(self._gradients("mean", held, 1 / undone, words, line), cause, where, thread("experts"))

    def _tied(self) -> Iterator[Hypothesis]:
        if self.case.is_on_several_stages and self.kind != "scaled":
            cause, where, key = self._cause_of_parts(())
            groups = tuple({tuple(sorted({rank for rank, _, _ in self.facts.holders(name)})) for name in self.names})
            words = f"the sum over the ranks that hold {named(self.names)} of their gradients, before the step"
            yield Hypothesis(self._gradients("sum", groups, 1.0, words), cause, where, thread(key))

    # --- microbatches and targets ------------------------------------------------------------------------------------

    def _dropped(self) -> Iterator[Hypothesis]:
        if line := self.facts.line("zero_grad"):
            cause = "the accumulated gradients of the other microbatches are dropped before the step, as by zero_grad"
            words = f"gradients kept at {line} between two microbatches"
            also = [Repair("keep", words, line, of_reference=True)] if len(self.facts.theirs[0].losses) > 1 else []
            yield Hypothesis(Repair("keep", words, line), cause, line, thread("microbatches"), tuple(also))

    def _again(self) -> Iterator[Hypothesis]:
        cause = (
            "what was added up over ranks after one microbatch is added up again after the next: reduce once, after "
            "the last one"
        )
        for sent in self._reductions():
            words = f"{sent.where} after the last microbatch only"
            repair = Repair("last", words, sent.where, times=self.batches)
            yield Hypothesis(repair, cause, sent.where, thread("microbatches"))

    def _has_unequal_counts(self) -> bool:
        counts = [count for step in self.facts.mine for _, count, _ in step.targets]
        return len(set(counts)) > 1 and all(len(step.targets) == len(step.losses) for step in self.facts.mine)

    def _means(self) -> Iterator[Hypothesis]:
        """Each loss counts as much as it has targets."""
        facts = self.facts
        counts = [sum(count for _, count, _ in step.targets) for step in facts.mine]
        of = f" (here {', '.join(map(str, counts))}, rank by rank)" if len(set(counts)) > 1 else ""
        cause = (
            f"a mean of means: the loss of each rank or microbatch is the mean over its own targets{of}, and all of "
            "them count the same. Divide the sum of the losses by the number of targets of all"
        )
        where = self.case.made.first
        if self.kind == "other" and any(len(step.targets) > 1 for step in facts.theirs):
            ours, theirs = ([count for step in steps for _, count, _ in step.targets]
                            for steps in (facts.mine, facts.theirs))  # fmt: skip
            cause = (
                "a mean of means: the loss of each microbatch is the mean over its own targets (here "
                f"{', '.join(map(str, ours))}; {', '.join(map(str, theirs))} in the reference), and all of them count "
                "the same, so it depends on which samples share a microbatch. Divide the sum of the losses by the "
                "number of targets of all"
            )
            where = next((line for step in facts.mine for _, _, line in step.targets), "") or where
        for of, key in (("", lambda rank, batch: 0), (" among those of its rank", lambda rank, batch: rank),
                        (" among those of other ranks", lambda rank, batch: -1 - batch)):  # fmt: skip
            words = f"each microbatch's loss counted by its number of targets{of}"
            values, theirs = (_weights(seen, key) for seen in (facts.ours, facts.reference.seen))
            also = [Repair("loss", words, values=theirs, of_reference=True)] if _changes(theirs) else []
            if _changes(values):
                yield Hypothesis(Repair("loss", words, values=values), cause, where, thread("means"), tuple(also))

    # --- the rest ----------------------------------------------------------------------------------------------------

    def _batch_norm(self) -> Iterator[Hypothesis]:
        if "BatchNorm" in self.facts.ours[0].kinds and self.kind in ("other", "means", "weights", "own"):
            cause = (
                "BatchNorm normalises by the mean and variance of the samples that it sees, which are each rank's own: "
                "convert it to SyncBatchNorm, or use a norm that does not mix samples"
            )
            repair = Repair("statistics", "mean and variance of the samples of all ranks in BatchNorm")
            yield Hypothesis(repair, cause, self.facts.ours[0].made.get("BatchNorm") or self.facts.line("forward"))

    def _unsynced(self) -> Iterator[Hypothesis]:
        """The script keeps DistributedDataParallel or FSDP from adding up gradients, and does not let them again."""
        if line := self.facts.line_of_script("no sync"):
            cause = (
                "gradients are accumulated and never synchronised (no_sync, set_requires_gradient_sync): let the last "
                "microbatch of a step be the one that is"
            )
            if self.kind == "own":
                cause = self._cause_of_parts(())[0]
            words = f"gradients synchronised after each microbatch, also at {line}"
            yield Hypothesis(Repair("sync", words, line), cause, self.case.not_synchronised or line,
                             thread("microbatches"))  # fmt: skip

    def _unwaited(self) -> Iterator[Hypothesis]:
        """A collective that the script starts, and whose result it uses before it is there."""
        for line in dict.fromkeys(sent.where for sent in self.facts.sent("reduction", "backward") if sent.is_open):
            cause = "the script starts this collective and does not wait for it before the gradients are used"
            repair = Repair("wait", f"waiting at {line} for the collective that it starts", line)
            yield Hypothesis(repair, cause, line)

    def _reductions(self) -> list[Sent]:
        """Those that these gradients went through; else what adds up anything of many elements after the loss."""
        given = given_to(self.facts, self.names)
        later = given or [
            sent
            for sent in self.facts.sent("reduction", "backward")
            if sent.op in ("all_reduce", "reduce_scatter") and sent.size > 1 and not sent.on
        ]
        return list({sent.where: sent for sent in later}.values())

    @property
    def _some(self) -> str:
        return "" if self.case.is_all else "only some parameters have this factor: "

    def _factor(self, line: str, was: float, by: float, cause: str, key: str) -> Hypothesis:
        words = f"no multiplication by {plain(was)} at {line}"
        if by != 1:
            words = f"multiplication by {plain(by)} in place of {plain(was)} at {line}"
        return Hypothesis(Repair("factor", words, line, was=was, by=by), cause, line, thread(key))

    def _loss(self, by: float, cause: str, where: str, key: str) -> Hypothesis:
        words = f"{plain(by)} times the loss where the backward pass begins"
        return Hypothesis(Repair("loss", words, by=by), cause, where, thread(key))

    def _gradients(
        self, combine: str, groups: tuple[tuple[int, ...], ...], by: float, words: str, line: str = ""
    ) -> Repair:
        return Repair("gradients", words, line, self._mine, groups, combine, by=by)


def _changes(weights: dict[tuple[int, int, int], float]) -> bool:
    return any(abs(by - 1) > 1e-6 for by in weights.values())


def _weights(ranks: Sequence[Seen], key: Callable[[int, int], int]) -> dict[tuple[int, int, int], float]:
    """What each loss must be multiplied by, so that each target counts the same among those of one key: by rank, step
    and microbatch."""
    found = {}
    for number in range(min(seen.num_steps for seen in ranks)):
        groups: dict[int, dict[tuple[int, int], int]] = {}
        for rank, seen in enumerate(ranks):
            for batch, (_, own, _) in enumerate(seen.steps[number].targets):
                groups.setdefault(key(rank, batch), {})[rank, batch] = own
        for group in groups.values():
            mean = sum(group.values()) / len(group)
            found.update({(rank, number, batch): own / mean if mean else 1.0 for (rank, batch), own in group.items()})
    return found


_ADDED_UP = (
    "gradients are added up over ranks, and each rank's loss is already a mean, or scaled up: average the gradients, "
    "by dividing by the number of ranks or with ReduceOp.AVG"
)
_AVERAGED = (
    "gradients are averaged over ranks where they must be added up: they are divided by a number of ranks already, or "
    "each rank's gradient is only a part of the whole, as where what ranks gather passes no gradient back"
)
_FACTOR_OF_ALL = {True: _ADDED_UP, False: "gradients are averaged over ranks, and divided by their number once more"}
_OF_COUNTS = {
    True: "the loss is divided by a number that is too small, such as a count of one rank's samples or tokens, where "
    "the count of all ranks is meant",
    False: "the loss is divided by a number that is too large, such as a count to which copies of the same samples or "
    "tokens contribute several times, or that of all ranks where gradients are averaged once more",
}
_OF_RANKS = {
    True: "the loss is added up over ranks, or multiplied by their number, and gradients are averaged or added up "
    "again: let each rank's loss be the mean over its samples, and average the gradients",
    False: "the loss is divided by the number of ranks, or by a count of the samples or tokens of all of them, and "
    "gradients are averaged over ranks once more: do one of the two",
}
_SUMMED_TWICE = (
    "in the backward pass they get a sum over ranks twice, or one over ranks whose gradients are already whole. The "
    "backward pass of an all_gather whose result every rank uses in the same way is a cut, and that of a sum is a "
    "copy: neither adds up"
)


_NO_DUAL = (
    "the loss is right and this gradient is not: in the backward pass of this line the parts of all ranks are not "
    "added up, as by a collective without its dual, a gather whose backward pass does not add up the parts of all "
    "ranks, or to_local() without grad_placements"
)


def _causes_of_batches(factor: float, batches: int, theirs: int) -> Iterator[str]:
    if factor < 1:
        yield f"the loss of each of {batches} microbatches is divided by their number twice: divide it once"
    else:
        of = f" ({theirs} in the reference)" if theirs > 1 else ""
        yield f"the loss of each of {batches} accumulated microbatches{of} counts in full: divide it by their number"


def _listed(way: tuple[tuple[int, ...], ...]) -> str:
    return " and of ".join(ranks_text(group).removeprefix("ranks ") for group in way)


def _is(factor: float, other: float) -> bool:
    return abs(factor / other - 1) < _CLOSE
