"""Hypotheses about gradients that share a fault, each with the change of the run that would repair it.

A new run is only worth its time for a change that fits the numbers of this run: a factor that a line multiplies by, a
sum over ranks that equals the reference's gradient, a count of targets. `repairs.proven` decides which is the cause.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tplab.checking.causes import thread
from tplab.checking.factors import Factors
from tplab.checking.forward import in_order
from tplab.checking.gaps import largest
from tplab.checking.recording import Seen
from tplab.checking.repairs import Groups, Hypothesis, Repair
from tplab.checking.same_model import named
from tplab.checking.sends import adds_up, given_to, line_of_buckets, listed, mixing, over, partitions
from tplab.units import plain, ranks_text


class Hypotheses(Factors):
    """Gradients that share a fault, and what may be its cause."""

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The hypotheses, the likeliest first."""
        known = dict[str, Hypothesis]()
        for one in self._all():
            known.setdefault(f"{one.repair.kind} {one.repair.words}", one)
        return list(known.values())

    def _all(self) -> Iterator[Hypothesis]:
        yield from in_order(self.facts, forward=False)
        yield from self._cut_off()
        yield from self._batch_norm()
        yield from self._clipped()
        yield from self._mixed()
        if self.kind == "scaled" and self.first.factor:
            yield from self.of_a_factor(self.first.factor)
        if self.kind == "microbatches":
            yield from self._dropped()
        if self.kind == "again":
            yield from self._again()
        yield from self._terms()
        yield from self._unsynced()
        yield from self._unwaited()
        yield from self._tied()
        if self.kind == "means" or self._has_unequal_counts():
            yield from self._means()
        if self.first.needed:
            yield self._weighted()
        if self.kind != "scaled":
            yield from self._other_groups()
            yield from self._not_added_up()
            yield from self._lost()

    # --- parts of a sum ----------------------------------------------------------------------------------------------

    def _not_added_up(self) -> Iterator[Hypothesis]:
        """Yield missing reductions: the reference's gradient is the sum, or the mean, of the ranks'."""
        facts = self.facts
        line = "" if self.is_all or self.left_out else self.in_backward
        lines = [(line, "")] * bool(line) + [(at, "function") for at in (facts.trails.unsummed if facts.trails else ())]
        together = sorted(partitions(facts), key=lambda way: not self._are_copies(way))
        lines[1:1] = [(line, "copies")] * bool(line)
        for (line, of), way in itertools.product(lines, together):
            alike = " of what ranks have alike there" * (of == "copies")
            words = f"a sum over {over(self.facts, way)} in the backward pass of {line}{alike}"
            cause, _, key = self._cause_of_parts(way)
            repair = Repair("dual", words, line, self.own_names, way, of)
            yield Hypothesis(repair, cause if self.kind == "own" else _NO_DUAL, line, thread(key))
        for way in partitions(facts):
            for combine in ("sum", "mean"):
                if not self._is_right(way, combine):
                    continue
                cause, where, key = self._cause_of_parts(way)
                if combine == "mean" and not self.is_all and "Megatron" in cause:
                    cause, key = f"the gradients of {named(self.names)} are not averaged over ranks", ""
                of = f"{over(self.facts, way)} of the gradients of {named(self.names)}"
                words = f"the {combine} over {of}, before the step"
                yield Hypothesis(self.combined(combine, way, 1.0, words), cause, where, thread(key))

    def _lost(self) -> Iterator[Hypothesis]:
        """Yield the repair that replaces the gradient that comes back to a result by the reference's."""
        facts = self.facts
        is_of_backward = self.kind == "other" and not facts.is_loss_off
        lost = facts.trails.lost_on_the_way() if facts.trails and is_of_backward else iter(())
        for op, words, wanted in itertools.islice(lost, 2):
            cause = (
                "the gradient that comes back to what this line computes is not the reference's, and what takes it "
                f"gets a right one: it is {words}. A part of it is lost on the way, as where a result that is sent to "
                "another rank, or put into a buffer, has no gradient of its own sent back"
            )
            what = f"the reference's gradient of what {op.line} computes"
            values = {(op.key, "back", place): each for place, each in wanted.items()}
            repair = Repair("put", what, op.line, values=values, times=self.facts.number)
            yield Hypothesis(repair, cause, op.line)

    def _are_copies(self, way: Groups) -> bool:
        """Return whether ranks of one group saw the same samples."""
        return any(len(set(group) & set(copies)) > 1 for group in way for copies in self.facts.copies)

    def _cause_of_parts(self, way: Groups) -> tuple[str, str, str]:
        """Return the cause, the line and the thread."""
        if self.is_all and (over := self._over_copies()):
            cause = (
                f"this collective is over {ranks_text(over)}, which saw the same samples: the gradients of ranks that "
                "saw different samples are not averaged. Use the group, or the axis, whose ranks divide the samples"
            )
            return cause, self.reduction, "backward"
        if self.is_all:
            cause = (
                "ranks that hold copies take the step with different gradients, each with its own part: nothing "
                "averages them, or only those of some microbatches are averaged. Average them before the optimizer's "
                "step, or let DistributedDataParallel synchronise at the last microbatch"
            )
            return cause, self._unsynchronised(), "backward"
        if self.is_on_several_stages:
            cause = (
                f"several stages hold {named(self.names)}, as with a tied embedding, and each has only the gradient "
                "of its own use. After the backward pass, add up the gradients of these copies over the ranks that "
                "hold them"
            )
            return cause, self.step, "tied"
        if line := self._of_the_others():
            of_many = next(iter(given_to(self.facts, self.others)), None) is None
            cause = (
                f"the gradients of {named(self.names)} are not averaged over ranks: each rank has those of its own "
                "samples. The gradients of other parameters are added up at this line"
                f"{', many in one collective' if of_many else ''}. Look for what keeps these out"
                f"{', such as a bucket that is never full' if of_many else ''}"
            )
            return cause, line, ""
        cause = (
            f"the gradients of {named(self.names)} are not added up over ranks: each rank has only the part that "
            "comes from its own share of the work. The tensor that enters the shared work needs an identity whose "
            "backward pass is an all_reduce (Megatron's f). If a parameter is applied to only a part of the tokens, "
            "its gradient must be summed over ranks"
        )
        return cause, self.in_backward or self.left_out or self.backward, "backward"

    def _is_right(self, way: Groups, combine: str) -> bool:
        """Return whether combining the gradients this way gives the reference's in the step that was seen."""
        whole = self.facts.reference.gradients(self.facts.number)
        slack = {name: 1e-3 * largest(whole[name]) for name in self.names if name in whole}
        return all(adds_up(self.facts, name, way, combine, slack.get(name, 0.0)) for name in self.names)

    def _over_copies(self) -> tuple[int, ...]:
        """Return the ranks of the collective that reduces the gradients if all saw the same samples, else ()."""
        sent = [sent.ranks for sent in self.facts.sent("reduction", "backward") if sent.where == self.reduction]
        is_within = bool(sent) and all(any(set(ranks) <= set(group) for group in self.facts.copies) for ranks in sent)
        return sent[0] if is_within and len(sent[0]) > 1 else ()

    def _of_the_others(self) -> str:
        """Return the line that reduces the other gradients, if every rank saw its own samples; or ""."""
        if self.left_out or self.reduction or any(len(group) > 1 for group in self.facts.copies):
            return ""
        given = [sent.where for sent in given_to(self.facts, self.others)]
        return given[-1] if given else line_of_buckets(self.facts, self.others)

    def _unsynchronised(self) -> str:
        """Return the line that calls the module inside DistributedDataParallel directly, so that nothing is sent."""
        is_past = (
            self.facts.line_of_script("wrapped") and not self.reduction and not self.facts.sent("backward", "reduction")
        )
        return self.not_synchronised or (is_past and self.facts.line("call")) or self.where

    def _mixed(self) -> Iterator[Hypothesis]:
        """Yield a collective that adds up gradients of different parts."""
        if not (line := mixing(self.facts, self.names)):
            return
        what = "experts" if any("expert" in name for name in self.names) else "shards"
        cause = (
            f"this collective adds up gradients of different {what}: its group has ranks that hold different parts of "
            "the tensor. Use the group of ranks that hold copies of the same part"
        )
        where = self.facts.source.argument(line, "group") or line
        yield from self._in_place_of(line, cause, where)

    def _other_groups(self) -> Iterator[Hypothesis]:
        """Yield a collective of these gradients whose group may be wrong."""
        if self.reduction and self.reduction != mixing(self.facts, self.names):
            cause = (
                "the sum over ranks leaves out some ranks, or includes too many: its group is not that of the ranks "
                "that hold copies and saw different samples"
            )
            if self.is_all and self._over_copies():
                cause = self._cause_of_parts(())[0]
            yield from self._in_place_of(self.reduction, cause, "")

    def _in_place_of(self, line: str, cause: str, where: str) -> Iterator[Hypothesis]:
        undone = float(np.prod([*dict(self.facts.scaled).values()])) or 1.0
        for way in sorted(partitions(self.facts), key=self._are_copies):
            if any(self.facts.holds_differ(name, group) for name in self.names for group in way):
                continue
            for combine, by in dict.fromkeys(itertools.product(("mean", "sum"), (1 / undone, 1.0))):
                times = f", times {plain(by)}," if by != 1 else ""
                words = f"the {combine} over {listed(way)}{times} in place of the collective at {line}"
                repair = self.combined(combine, way, by, words, line)
                over = {sent.ranks for sent in self.facts.sent("reduction", "backward") if sent.where == line}
                told = self._scaled_unlike() if over == {*way} else (cause, where, thread("experts"))
                yield Hypothesis(repair, *told)

    def _scaled_unlike(self) -> tuple[str, str, str]:
        """Return cause, line and thread if each rank's gradients, and the group that reduces them, are right."""
        for name, (rank, mine, place) in [(one, held) for one in self.names for held in self.facts.holders(one)]:
            sent = [one for one in given_to(self.facts, [name], rank) if {*one.names} == {mine}]
            size, whole = sum(one.size for one in sent), place.take(self.facts.reference.weights[name]).size
            if 0 < size < whole and any(one.is_sparse for one in sent):
                cause = (
                    f"this collective adds up {size} of the {whole} elements of a gradient, in the order in which each "
                    "rank has them, as the values of a sparse gradient: they are of other rows on other ranks. Add up "
                    "the sparse gradients with their indices, or make them dense first"
                )
                return cause, self.reduction, ""
            if 0 < size < whole:
                cause = f"only {size} of the {whole} elements of the gradient of {name} are combined over ranks"
                return cause, self.reduction, ""
        cause = (
            "the gradients of each rank are right after the backward pass, and so is their sum over the ranks of this "
            "collective: what is wrong is how the script changes them before, or after"
        )
        for turn in zip(*(step.scaled for step in self.facts.mine)):
            if len({line for line, _ in turn}) == 1 and len({by for _, by in turn}) > 1:
                numbers = ", ".join(plain(by) for _, by in turn)
                cause = (
                    f"ranks multiply their gradients by different numbers at this line ({numbers}) before they are "
                    "added up, so that no number makes up for it afterwards: use the same on all ranks, such as the "
                    "smallest"
                )
                return cause, turn[0][0], ""
        return cause, "", ""

    def _tied(self) -> Iterator[Hypothesis]:
        if self.is_on_several_stages and self.kind != "scaled":
            cause, where, key = self._cause_of_parts(())
            groups = tuple({tuple(sorted({rank for rank, _, _ in self.facts.holders(name)})) for name in self.names})
            words = f"the sum over the ranks that hold {named(self.names)} of their gradients, before the step"
            yield Hypothesis(self.combined("sum", groups, 1.0, words), cause, where, thread(key))

    # --- microbatches and targets ------------------------------------------------------------------------------------

    def _dropped(self) -> Iterator[Hypothesis]:
        if line := self.facts.line("zero_grad"):
            cause = (
                "the accumulated gradients of the other microbatches are dropped before the step, for example by "
                "zero_grad"
            )
            words = f"at {line}, gradients are kept between microbatches"
            also = [Repair("keep", words, line, of_reference=True)] if len(self.facts.theirs[0].losses) > 1 else []
            yield Hypothesis(Repair("keep", words, line), cause, line, thread("microbatches"), tuple(also))

    def _terms(self) -> Iterator[Hypothesis]:
        """Yield terms of the loss that are not divided by the number of microbatches, which differs from the
        reference's, or by the number of ranks that they are added up over."""
        facts = self.facts
        ours, theirs = (max(len(step.losses) for step in steps) for steps in (facts.mine, facts.theirs))
        terms = next((dict.fromkeys(step.terms) for step in facts.mine if step.terms and self.kind == "other"), ())
        added = sorted({len(sent.ranks) for sent in self.reductions if sent.reduction == "sum"})
        counts = [(ours, theirs)] * (ours != theirs) + [(size, 0) for size in added]
        for (count, other), (line, by) in itertools.product(counts, terms):
            of, also = (
                ("microbatches", f" ({other} in the reference)") if other else ("ranks", ", whose gradients add up")
            )
            cause = f"this term of the loss counts in full in each of {count} {of}{also}: divide it by their number"
            words = f"the multiplication by {plain(by)} at {line} is divided by the number of {of}"
            repairs = [Repair("factor", words, line, was=by, by=by / n, of_reference=n == other)
                       for n in (count, other) if n]  # fmt: skip
            yield Hypothesis(repairs[0], cause, line, thread("microbatches") * bool(other), tuple(repairs[1:]))

    def _again(self) -> Iterator[Hypothesis]:
        cause = (
            "what was added up over ranks after one microbatch is added up again after the next: reduce once, after "
            "the last one"
        )
        for sent in self.reductions:
            calls = sum(other.where == sent.where for other in self.facts.mine[0].sent)
            words = f"the collective at {sent.where} runs only after the last microbatch"
            repair = Repair("last", words, sent.where, times=calls - calls // self.batches)
            yield Hypothesis(repair, cause, sent.where, thread("microbatches"))

    def _has_unequal_counts(self) -> bool:
        counts = [count for step in self.facts.mine for _, count, _ in step.targets]
        return len(set(counts)) > 1 and all(len(step.targets) == len(step.losses) for step in self.facts.mine)

    def _means(self) -> Iterator[Hypothesis]:
        """Yield repairs that weight each loss by its number of targets."""
        facts = self.facts
        where, of = self.made_first, ""
        counts = [sum(count for _, count, _ in step.targets) for step in facts.mine]
        if self.kind == "other" and any(len(step.targets) > 1 for step in facts.theirs):
            where = next((line for step in facts.mine for _, _, line in step.targets), "") or where
            counts, theirs = ([count for step in steps for _, count, _ in step.targets]
                              for steps in (facts.mine, facts.theirs))  # fmt: skip
            of = f"; in the reference {', '.join(map(str, theirs))}"
        of = f" (here {', '.join(map(str, counts))}{of})" if len(set(counts)) > 1 else ""
        cause = (
            f"this is a mean of means: the loss of each rank or microbatch is the mean over its own targets{of}, and "
            "all of these means count the same, so the result depends on which samples are together. Divide the sum of "
            "all losses by the number of all targets"
        )
        ways: dict[str, Callable[[int, int], int]] = {
            "": lambda rank, batch: 0,
            " relative to the other microbatches of its rank": lambda rank, batch: rank,
            " relative to the same microbatch of other ranks": lambda rank, batch: -1 - batch,
        }
        for of, key in ways.items():
            words = f"each microbatch's loss weighted by its number of targets{of}"
            values, theirs = (_weights(seen, key) for seen in (facts.ours, facts.reference.seen))
            also = [Repair("loss", words, values=theirs, of_reference=True)] if _changes(theirs) else []
            if _changes(values):
                yield Hypothesis(Repair("loss", words, values=values), cause, where, thread("means"), tuple(also))

    def _weighted(self) -> Hypothesis:
        """Return the hypothesis that each part is right and only its weight is wrong."""
        values = {(rank, self.facts.number, batch): by for (rank, batch), by in self.first.needed}
        words = f"the loss of each rank and microbatch times {', '.join(plain(by) for by in values.values())}"
        cause = (
            "what each rank's microbatch has computed is right, and only how much it counts is not: look for a number "
            "of its own that divides its loss or gradients, such as a count of targets, a sum of weights or a padded "
            "length, where one for the whole batch is meant"
        )
        return Hypothesis(Repair("loss", words, values=values), cause, self.made_first)

    # --- the rest ----------------------------------------------------------------------------------------------------

    def _batch_norm(self) -> Iterator[Hypothesis]:
        if "BatchNorm" in self.facts.ours[0].kinds and self.kind in ("other", "means", "weights", "own"):
            cause = (
                "BatchNorm normalises by the mean and variance of the samples that it sees, which are only its own "
                "rank's: convert it to SyncBatchNorm, or use a norm that does not mix samples"
            )
            repair = Repair("statistics", "BatchNorm with the mean and variance of all ranks' samples")
            yield Hypothesis(repair, cause, self.facts.ours[0].made.get("BatchNorm") or self.facts.line("forward"))

    def _clipped(self) -> Iterator[Hypothesis]:
        """Yield changes that the script makes to gradients before they are averaged."""
        for done, cause in _EARLY.items():
            is_like = self.kind in ("by rank", "weights", "other") or (self.kind == "scaled" and done == "clip")
            if (is_like or done == "decay") and (line := self.facts.line(f"early {done}")):
                words = f"what {line} does to gradients is done after they are averaged or added up, not before"
                link = thread("norm") * (done == "clip")
                yield Hypothesis(Repair("late", words, line), cause, line, link)

    def _unsynced(self) -> Iterator[Hypothesis]:
        """Yield a script that turns off the synchronisation of DistributedDataParallel or FSDP for good."""
        if line := self.facts.line_of_script("no sync"):
            cause = (
                "gradients are accumulated and never synchronised (no_sync, set_requires_gradient_sync): synchronise "
                "at the last microbatch of each step"
            )
            if self.kind == "own":
                cause = self._cause_of_parts(())[0]
            words = f"gradients are synchronised after each microbatch, whatever {line} says"
            yield Hypothesis(Repair("sync", words, line), cause, self.not_synchronised or line,
                             thread("microbatches"))  # fmt: skip

    def _cut_off(self) -> Iterator[Hypothesis]:
        """Yield collectives of torch.distributed that pass no gradient back to their inputs."""
        facts = self.facts
        for line, op in {at: op for seen in facts.ours for at, op in seen.cut.items()}.items():
            words = f"{op} at {line} passes back the sum of all ranks' gradients of what it is given"
            cause = (
                f"{op} at {line} passes no gradient back, so what is computed from its result on any rank is lost to "
                "the gradient of what it is given: use the one of torch.distributed.nn.functional, or write its "
                "backward pass"
            )
            also = [Repair("through", words, line, of_reference=True)] if line in facts.reference.seen[0].cut else []
            yield Hypothesis(Repair("through", words, line), cause, line, thread("cut off"), tuple(also))

    def _unwaited(self) -> Iterator[Hypothesis]:
        """Yield a collective that the script starts and whose result it uses before waiting for it."""
        for line in dict.fromkeys(sent.where for sent in self.facts.sent("reduction", "backward") if sent.is_open):
            cause = "the script starts this collective and does not wait for it before the gradients are used"
            repair = Repair("wait", f"the collective that {line} starts is waited for at once", line)
            yield Hypothesis(repair, cause, line)


def _changes(weights: dict[tuple[int, int, int], float]) -> bool:
    return any(abs(by - 1) > 1e-6 for by in weights.values())


def _weights(ranks: Sequence[Seen], key: Callable[[int, int], int]) -> dict[tuple[int, int, int], float]:
    """Return the weight of each loss, by rank, step and microbatch, with which all targets of losses with the same key
    count equally."""
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


_EARLY = {
    "decay": "weight decay is added to each rank's gradient, and these are added up only afterwards, so that it counts "
    "once for each rank: add it when they have been added up",
    "clip": "each rank clips its own gradients by their norm, and they are averaged only afterwards: average first, so "
    "that all ranks clip the same gradients by the same norm",
    "clamp": "each rank clips the elements of its own gradients, and they are averaged only afterwards: average first, "
    "so that what is clipped is the gradient of the whole batch",
    "hook": "a hook changes each rank's own gradients, and they are averaged only afterwards: average first, and "
    "change the gradient of the whole batch",
}
_NO_DUAL = (
    "the loss is right and this gradient is wrong: in the backward pass of this line, the parts of all ranks are not "
    "added up. Examples are a collective without its dual, a gather whose backward pass does not add up the parts of "
    "all ranks, and to_local() without grad_placements"
)
