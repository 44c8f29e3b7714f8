"""The loss and its gradients: which of them is wrong, what usually causes it, and at which line."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tplab.checking.case import Case
from tplab.checking.causes import thread
from tplab.checking.clipping import clipped, early_clamp, early_clip, is_clipped
from tplab.checking.factors import divided_alone, scaled
from tplab.checking.facts import Facts, Found
from tplab.checking.gaps import gap
from tplab.checking.gradients import Holder, Wrong, grouped, judge_gradient
from tplab.checking.parts_of_loss import are_means_of_parts
from tplab.checking.same_model import Finding, named
from tplab.checking.sends import line_of_buckets, lines_of_reduction, mixing
from tplab.units import plain, ranks_text


def loss_and_gradients(facts: Facts) -> Found:
    """Compare the loss where backward passes begin, and all gradients. A loss may be scaled on purpose, and what it is
    averaged over decides whether it is right: so gradients judge it."""
    wrong, total = _wrong_gradients(facts)
    yield from _loss(facts, is_right=not wrong)
    if not wrong:
        of = f" of {all_of}" if (all_of := len(facts.reference.gradients(facts.number))) > total else ""
        noise = facts.reference.noise_of_gradients(facts.number) if facts.reference.again else 0.0
        rounding = f"; rounding changes them by {noise:.1g} of their largest element" * bool(noise)
        words = f"{total}{of} gradients are the reference's{rounding}" if total else "no gradients were seen"
        yield facts.row("gradient", True if total else None, words, count=total)
        return
    groups = grouped(wrong)
    for group in groups:
        is_all = len(groups) == 1 and len(group) == len(wrong) and len(wrong) >= 0.9 * total
        yield _Blame(Case(facts, group, is_all)).finding()
    told = {one.name for group in groups for one in group}
    if rest := [one.name for one in wrong if one.name not in told]:
        yield facts.row("gradient", None, f"those of {named(rest)} are wrong too, and may follow from it")


def _loss(facts: Facts, is_right: bool) -> Found:
    has, want = facts.losses(), facts.reference.loss(facts.number)
    if not has or not want:
        yield facts.row("loss", None, "no backward pass from a single number was seen")
        return
    mean, slack = float(np.mean(has)), facts.reference.slack_of_loss(facts.number)
    if gap(mean, want) <= slack:
        how = "the mean over ranks" if np.ptp(has) > min(slack, 1e-5 * abs(want)) else "the same on every rank"
        yield facts.row("loss", True, f"{mean:.6g}, {how}; the reference's is {want:.6g}")
    elif gap(sum(has), want) <= len(has) * slack and is_right:
        yield facts.row("loss", True, f"its parts on {len(has)} ranks add up to {want:.6g}, as in the reference")
    elif is_right:
        words = f"{mean:.6g} on average, {want:.6g} in the reference; it is scaled, as the gradients are the same"
        yield facts.row("loss", None, words)


def _wrong_gradients(facts: Facts) -> tuple[list[Wrong], int]:
    """Those that are wrong, in the order of the backward pass; and how many were judged. A script may take a norm
    before it divides by what it has added up, so none is wrong if the optimizer gets what it should."""
    wrong, count = _judged(facts, facts.reference.gradients(facts.number), is_final=False)
    is_measured = any(step.finals for step in facts.mine) and not any(step.norms for step in facts.mine)
    if wrong and is_measured and not _judged(facts, facts.reference.finals(facts.number), is_final=True)[0]:
        return [], count
    return wrong, count


def _judged(facts: Facts, whole: Mapping[str, np.ndarray], is_final: bool) -> tuple[list[Wrong], int]:
    found, count = list[Wrong](), 0
    for name in facts.reference.order:
        holders = []
        for rank, mine, place in facts.holders(name):
            step = facts.mine[rank]
            if mine in step.settings:  # an optimizer has it
                pieces = step.gradients | step.finals if is_final else step.gradients
                piece, parts = pieces.get(mine), [batch.get(mine) for batch in step.parts]
                holders.append(Holder(rank, place, None if piece is None else piece.values, parts))
        if holders:
            count += 1
            slack = facts.reference.slack_of_gradient(name, facts.number) if name in whole else 0.0
            if is_final and slack:
                before = facts.reference.gradients(facts.number)[name]
                slack *= float(np.abs(whole[name]).max() / max(np.abs(before).max(), 1e-300))
            if wrong := judge_gradient(name, whole.get(name), holders, slack):
                found.append(wrong)
    return found, count


class _Blame:
    """The finding for gradients that have the same fault."""

    def __init__(self, case: Case):
        self.case, self.facts, self.first, self.names = case, case.facts, case.first, case.names

    def finding(self) -> Finding:
        kind, factor = self.first.kind, self.first.factor
        if "BatchNorm" in self.facts.ours[0].kinds and kind in ("other", "means", "weights"):
            return self._batch_norm()
        if self.facts.line("early clip") and kind in ("by rank", "weights", "other"):
            return early_clip(self.case)
        if self.facts.line("early clamp") and kind in ("by rank", "weights", "other"):
            return early_clamp(self.case)
        if line := mixing(self.facts, self.names):
            return self._mixed(line)
        is_divided = kind == "scaled" and factor is not None and divided_alone(self.case, factor)
        if kind in ("scaled", "by rank") and not is_divided and is_clipped(self.case):
            return clipped(self.case)
        if kind == "scaled" and factor is not None:
            return scaled(self.case, factor)
        if kind == "other" and self._is_loss_off():
            return self._means_of_others() if are_means_of_parts(self.facts) else self._other_loss()
        causes = {"own": self._own, "missing": self._missing, "none": self._none, "means": self._means,
                  "microbatches": self._microbatches, "again": self._again}  # fmt: skip
        return causes.get(kind, self._other)()

    # --- parts of a sum ----------------------------------------------------------------------------------------------

    def _own(self) -> Finding:
        if self.case.is_all and (over := self._over_copies()):
            cause = (
                f"this collective is over {ranks_text(over)}, which saw the same samples: the gradients of ranks that "
                "saw others are not averaged. Use the group, or the axis, whose ranks divide the samples"
            )
        elif self.case.is_all:
            cause = (
                "ranks that hold copies step with different gradients, each with its own part: nothing averages "
                "them, or not those of every microbatch. Average them before the optimizer's step, or let the last "
                "microbatch be the one that DistributedDataParallel synchronises"
            )
        elif self.case.is_on_several_stages:
            cause = (
                f"several stages hold {named(self.names)}, as they do a tied embedding, and each has only the gradient "
                "of its own use: after the backward pass, add up the gradients of these copies over the ranks that "
                "hold them"
            )
            return self.case.fault(cause, "tied", where=self.case.step)
        elif line := self._of_the_others():
            cause = (
                f"the gradients of {named(self.names)} are not averaged over ranks: each rank has those of its own "
                "samples. Those of the others are added up here: look at what keeps these away, such as a bucket "
                "that is never full, or a list or a hook that they are not in"
            )
            return self.case.fault(cause, where=line)
        else:
            cause = (
                f"the gradients of {named(self.names)} are not added up over ranks: each rank has only the part that "
                "its own share of the work brings. The tensor that enters the shared work needs an identity whose "
                "backward pass is an all_reduce (Megatron's f), and where a parameter is applied to a part of the "
                "tokens, its gradient must be summed over ranks"
            )
        where = self._unsynchronised() if self.case.is_all else self.case.in_backward or self.case.left_out
        return self.case.fault(cause, "backward", where=where or self.case.backward)

    def _over_copies(self) -> tuple[int, ...]:
        """The ranks of the collective that gradients are added up in, if all of them saw the same samples."""
        sent = [sent.ranks for sent in self.facts.sent("reduction", "backward") if sent.where == self.case.reduction]
        is_within = bool(sent) and all(any(set(ranks) <= set(group) for group in self.facts.copies) for ranks in sent)
        return sent[0] if is_within and len(sent[0]) > 1 else ()

    def _of_the_others(self) -> str:
        """Where gradients are added up, where every rank saw samples of its own and these gradients are left out."""
        if self.case.left_out or self.case.reduction or any(len(group) > 1 for group in self.facts.copies):
            return ""
        return next(iter(lines_of_reduction(self.facts, self.case.others)), "") or line_of_buckets(self.facts)

    def _missing(self) -> Finding:
        cause = (
            "the sum over ranks leaves out some of them: its group is too small, or what is gathered is added up "
            "only in part"
        )
        return self.case.fault(cause, "experts", where=self._unsynchronised() if self.case.is_all else "")

    def _unsynchronised(self) -> str:
        """Where the model is called past the DistributedDataParallel that is around it, which then sends nothing."""
        is_past = (
            self.facts.line_of_script("wrapped")
            and not self.case.reduction
            and not self.facts.sent("backward", "reduction")
        )
        return self._not_synchronised() or (is_past and self.facts.line("call")) or self.case.where

    def _not_synchronised(self) -> str:
        """Where the script decides that gradients are not to be added up over ranks."""
        line = self.facts.line_of_script("no sync")
        return (self.facts.source.decision(line) or line) if line else ""

    def _none(self) -> Finding:
        cause = (
            "no gradient reaches the optimizer: the parameter takes no part in the loss, or its gradient was "
            "accumulated and never synchronised (no_sync, set_requires_gradient_sync)"
        )
        return self.case.fault(cause, "microbatches", where=self._not_synchronised() or self.case.backward)

    def _means(self) -> Finding:
        counts = [sum(count for _, count, _ in step.targets) for step in self.facts.mine]
        of = f" (here {', '.join(map(str, counts))}, rank by rank)" if len(set(counts)) > 1 else ""
        cause = (
            f"a mean of means: the loss of each rank or microbatch is the mean over its own targets{of}, and all of "
            "them count the same. Divide the sum of the losses by the number of targets of all"
        )
        return self.case.fault(cause, "means", where=self.case.made.first)

    def _means_of_others(self) -> Finding:
        """The reference's are too, and its microbatches have other samples."""
        mean, want = float(np.mean(self.facts.losses())), self.facts.reference.loss(self.facts.number)
        ours, theirs = ([count for step in steps for _, count, _ in step.targets]
                        for steps in (self.facts.mine, self.facts.theirs))  # fmt: skip
        cause = (
            "a mean of means: the loss of each microbatch is the mean over its own targets (here "
            f"{', '.join(map(str, ours))}; {', '.join(map(str, theirs))} in the reference), and all of them count the "
            "same, so it depends on which samples share a microbatch. Divide the sum of the losses by the number of "
            "targets of all"
        )
        where = next((line for step in self.facts.mine for _, _, line in step.targets), "") or self.case.made.first
        return self.facts.fault(
            "loss", "", f"{mean / want:.6g} times the reference's", mean / want, where, cause, thread=thread("means"),
            values=(f"{mean:.6g}", f"{want:.6g}"), lines=[self.facts.line("forward"), *self.case.lines],
        )  # fmt: skip

    def _microbatches(self) -> Finding:
        cause = "the accumulated gradients of the other microbatches are dropped before the step, as by zero_grad"
        return self.case.fault(cause, "microbatches", where=self.facts.line("zero_grad") or self.case.where)

    def _again(self) -> Finding:
        cause = (
            "what was added up over ranks after one microbatch is added up again after the next: reduce once, after "
            "the last one"
        )
        return self.case.fault(cause, "microbatches")

    def _mixed(self, line: str) -> Finding:
        what = "experts" if any("expert" in name for name in self.names) else "shards"
        cause = (
            f"this collective adds up gradients of different {what}: its group has ranks that hold different parts of "
            "the tensor. Use the group of ranks that hold copies"
        )
        where = self.facts.source.argument(line, "group") or line
        return self.case.fault(cause, "experts", f"mixed with the gradients of other {what}", where)

    # --- everything else ---------------------------------------------------------------------------------------------

    def _batch_norm(self) -> Finding:
        buffers = self.facts.ours[0].buffers
        name = next((name for name in buffers if "running" in name), self.names[0])
        cause = (
            "BatchNorm normalises by the mean and variance of the samples that it sees, which are each rank's own: "
            "convert it to SyncBatchNorm, or use a norm that does not mix samples"
        )
        forward = self.facts.line("forward")
        where = self.facts.ours[0].made.get("BatchNorm") or forward
        return self.facts.fault("buffers", name, "statistics of each rank's own samples", None, where, cause,
                                lines=[forward, *self.case.lines])  # fmt: skip

    def _is_loss_off(self) -> bool:
        has, want = self.facts.losses(), self.facts.reference.loss(self.facts.number)
        slack = self.facts.reference.slack_of_loss(self.facts.number)
        return bool(has and want and min(abs(np.mean(has) - want), abs(sum(has) - want)) > slack)

    def _other_loss(self) -> Finding:
        mean, want = float(np.mean(self.facts.losses())), self.facts.reference.loss(self.facts.number)
        since = ""
        if self.facts.number:
            since = (
                " In the step before it was right: look at parameters that begin as zeros, such as a bias that every "
                "rank adds before a sum"
            )
        cause = (
            "the forward pass computes something else from the same weights and samples: look at positions and masks "
            "of the parts, at labels, at what is added up more than once, and at what each rank computes from its part "
            f"alone, such as a maximum or a count.{since}"
        )
        words = f"{plain(mean / want) if abs(mean / want - 1) > 0.01 else f'{mean / want:.6g}'} times the reference's"
        values, where = (f"{mean:.6g}", f"{want:.6g}"), self.facts.line_of_value() or self.case.backward
        return self.facts.fault(
            "loss", "", words, mean / want, where, cause, thread=thread("labels"), values=values,
            lines=[self.facts.line("forward"), *self.case.lines],
        )  # fmt: skip

    def _other(self) -> Finding:
        if self.case.is_in_stages:
            cause = (
                "the loss is right and this gradient is not, though each stage has its layers whole: what a stage "
                "receives must be the gradient of the microbatch whose output it goes back through. Send and receive "
                "microbatches in the same order on both sides, and check the scale of what is sent back"
            )
            return self.case.fault(cause, "", where=self.case.in_backward)
        cause = (
            "the loss is right and this gradient is not: something between the two is wrong in the backward pass. A "
            "collective without its dual, such as a gather whose backward pass does not add up the parts of all "
            "ranks, or to_local() without grad_placements, leaves only a part of the sum"
        )
        return self.case.fault(cause, "backward", where=self.case.in_backward)
