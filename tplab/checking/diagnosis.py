"""Finds what is first wrong with a script on many ranks, from the recordings of its run and of the reference's.

The steps are compared in order, each from its weights and samples to its loss, gradients, norm, optimizer, parameters,
buffers and log. What comes after a fault follows from it and is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tplab.checking.blame import loss_and_gradients
from tplab.checking.facts import Facts, Found, NothingToTell, same
from tplab.checking.logged import log
from tplab.checking.norms import norm
from tplab.checking.recording import Seen
from tplab.checking.reference import TIMES, Reference
from tplab.checking.same_model import NOT_FINITE, TITLES, Finding, Row, SameModel, What, named, of_idle, titled
from tplab.checking.samples import seeds_by_rank
from tplab.checking.seen_samples import dropout, samples, targets
from tplab.checking.starts import weights
from tplab.checking.trails import Trails
from tplab.checking.updates import buffers, parameters, settings, skipped, states
from tplab.units import ranks_text

_AFTER = {
    "dropout": (targets, dropout),
    "gradient": (loss_and_gradients,),
    "norm": (norm,),
    "optimizer": (settings, states),
    "parameters": (parameters,),
    "buffers": (buffers,),
    "log": (log,),
}
"""The comparisons after the samples, in order."""


_CERTAIN = ("weights", "samples", "dropout", "optimizer")
"""Faults that cannot come from random numbers that a model draws in its forward pass."""


class Diagnosis:
    """Compares the recording of the ranks with that of the reference.

    ours, theirs   of each rank, and of each rank of the reference; again: of a second run of the reference, whose sums
                   are in another order
    about          what is compared, in words
    handed         the ranks' samples, if the reference was given them; with `is_drawn`, everything that the ranks draw
    trails         every operation of the first wrong step; `facts.wants_trails` says whether they would help
    """

    def __init__(
        self, ours: Sequence[Seen], theirs: Sequence[Seen], again: Sequence[Seen] | None = None, *, about: str = "",
        notes: Sequence[str] = (), handed: Any = None, trails: Trails | None = None,
    ):  # fmt: skip
        self.about, self.handed, self.notes = about, handed, list(notes)
        kinds = {kind for one in ours for kind in one.kinds}
        if "torch.compile" in kinds:
            self.notes.append("torch.compile left the programs as they are: what it changes was not compared")
        if any(row is not None for one in ours for _, row in one.random):
            self.notes.append("what the model draws in its forward pass was made the same for every sample")
        self.facts = Facts(ours, Reference(theirs, again, kinds), trails)
        self.notes += of_idle((rank, place.name) for (rank, _), place in self.facts.idle.items())
        self.rows: list[Row] = []
        self.findings, self.logged = list[Finding](), list[Finding]()

    def report(self, may_ask: bool = False) -> SameModel:
        """Return the report. With `may_ask`, raise NeedsWeights or NeedsSamples if the reference must run again with
        those of the ranks."""
        seen = [*self.facts.ours, *self.facts.reference.seen]
        count, reason = min(one.num_steps for one in seen), ""
        try:
            for self.facts.number in range(count):
                self._compare_step(may_ask and not self.facts.number)
                if self.findings:
                    break
            else:
                self.facts.number = count
                if not self.handed and all(len(one.steps) > count for one in seen):  # logged after the last step
                    self._collect(log(self.facts), self.logged)
                reason = nothing_learnt(self.facts, count)
        except NothingToTell as error:
            reason = str(error)
        self.findings += [] if reason else self.logged
        is_certain = not self.findings or self.findings[0].what in _CERTAIN or self.findings[0].is_not_finite
        if not is_certain and (chance := self._of_chance() or self._not_fed()):
            self.findings, reason = [], chance
        if reason and not self.findings:
            self.rows = [row if row.ok is not False else replace(row, ok=None, factor=None) for row in self.rows]
        self.notes.append(self._about_rounding())
        report = SameModel(self.rows, self.findings, notes=self.notes, reason=reason, about=self.about)
        report.suspects, report.has_right_loss = self.facts.suspects, not self.facts.is_loss_off
        return report

    def _of_chance(self) -> str:
        """Return why a difference may come from random numbers that the reference draws differently; "" if it
        cannot."""
        ours = {drawn for seen in self.facts.ours for drawn in seen.random}
        theirs = {drawn for seen in self.facts.reference.seen for drawn in seen.random}
        unlike = sorted({line for line, row in ours | theirs if row is None or (line, row) not in ours & theirs})
        if not unlike:
            return ""
        seeds = seeds_by_rank(self.facts.ours)
        seeded = f", on the ranks from the seeds {', '.join(map(str, seeds[0]))} set at {seeds[1]}" if seeds else ""
        return (
            f"random numbers are drawn at {unlike[0]}{seeded}, and the reference draws others: "
            f"{self.findings[0].title} may differ because of them ({self.findings[0].text_of_factor}). Draw them with "
            "torch for each sample, or for the whole batch from one seed before the model is called"
        )

    def _not_fed(self) -> str:
        """Return why a difference may come from data that the reference was not given; "" if it was given all."""
        if not self.handed or self.handed.is_drawn or (step := self.facts.mine[0]).targets or not step.losses:
            return ""
        return (
            "the reference was given what the model is called with, as each rank draws its own, and not what the loss "
            f"at {step.losses[0][1]} compares with: {self.findings[0].title} may differ because of that "
            f"({self.findings[0].text_of_factor}). Use one of torch's loss functions, or draw the whole batch from one "
            "seed and cut it"
        )

    def _compare_step(self, may_ask: bool) -> None:
        for compare in (skipped, finite):
            if not self.findings:
                self._collect(compare(self.facts))
        if self.facts.number == 0 and not self.findings:
            self._collect(weights(self.facts, may_ask))
        if self.findings:
            self._follows("samples")
        elif self.handed:
            self.rows.append(self.facts.row("samples", None, "the reference was given those that the ranks drew"))
        else:
            self._collect(samples(self.facts, may_ask))
        for what, comparisons in _AFTER.items():
            for compare in comparisons:
                if self.findings:
                    if what != "dropout":
                        self._follows(what)  # type: ignore[arg-type]
                    break
                if not (what == "log" and self.handed and seeds_by_rank(self.facts.ours)):
                    self._collect(compare(self.facts), self.logged if what == "log" else self.findings)

    def _collect(self, found: Found, findings: list[Finding] | None = None) -> None:
        """Keep rows and findings; further findings about what a finding is about are left out."""
        findings = self.findings if findings is None else findings
        for one in found:
            if isinstance(one, Row):
                self.rows.append(one)
                continue
            if not any((one.what, one.name) == (known.what, known.name) for known in findings):
                findings.append(one)
            name = one.name + (f" and {len(one.others)} more" if one.others else "")
            factor = None if one.what == "samples" else one.factor  # a ratio of counts, not of values
            self.rows.append(Row(one.what, one.step, False, one.text_of_factor, name, factor))

    def _follows(self, what: What) -> None:
        if not any(row.what == what and row.step == self.facts.number for row in self.rows):
            words = f"not judged: it follows from {self.findings[0].title}"
            self.rows.append(self.facts.row(what, None, words))

    def _about_rounding(self) -> str:
        reference = self.facts.reference
        of = ", in which the ranks compute or send and the reference does not" if reference.is_finer else ""
        far = f"up to {reference.floor:.2g} of their largest element"
        text = f"{reference.dtype}{of}: gradients off by {far} count as equal"
        if reference.again:
            text += (
                f", and so are those off by up to {TIMES} times the reference's own rounding: it changes by "
                f"{max(map(reference.noise_of_gradients, range(self.facts.number + 1))):.2g} with another order of "
                "summation and another last digit of weights and samples"
            )
        return text


# --- numbers that are not finite are compared first, because NaN propagates -------------------------------------------

_Number = tuple[What, str, np.ndarray, str]
"""The quantity, its name, its values and its line."""


def finite(facts: Facts) -> Found:
    """Yield quantities that are not finite on ranks only. Raises NothingToTell if the reference's are not finite."""
    ours = [_not_finite(seen, facts.number) for seen in facts.ours]
    theirs = [one for seen in facts.reference.seen for one in _not_finite(seen, facts.number)]
    for what in TITLES:  # in the order of a step
        mine = {rank: [one for one in found if one[0] == what] for rank, found in enumerate(ours)}
        mine = {rank: found for rank, found in mine.items() if found}
        if here := next((one for one in theirs if one[0] == what), None):
            also = f" and on {ranks_text(tuple(mine))}" if mine else ""
            raise NothingToTell(
                f"{titled(what, here[1])} in step {facts.number} is not finite ({_listed([here, *theirs])}, at "
                f"{here[3]}) in the reference{also}: repair that first, because NaN does not equal anything"
            )
        if mine:
            rank, found = next(iter(mine.items()))
            line = found[0][3]
            words = f"{NOT_FINITE} ({_listed(ours[rank])}); it is finite in the reference"
            yield facts.fault(what, words, line, names=[name for _, name, _, _ in found], ranks=mine,
                              lines=[facts.line("forward"), facts.line("backward"), facts.line("step")])  # fmt: skip
            return


def _not_finite(seen: Seen, number: int) -> list[_Number]:
    """Return one rank's values that are not finite. Weights and buffers may begin so: masks hold -inf, say."""
    step = seen.steps[number]
    backward, end = step.lines.get("backward", ""), step.lines.get("step", "")
    found: list[Any] = [("loss", "", np.array(value), line) for value, line in step.losses]
    found += [("gradient", name, piece.values, backward) for name, piece in step.gradients.items()]
    found += [("norm", "", np.array(value), line) for value, line, _ in step.norms]
    found += [("optimizer", f"{key} of {name}", piece.values, end) for (name, key), piece in step.states.items()]
    for what, begun in ("parameters", seen.weights), ("buffers", seen.buffers):
        found += [(what, name, piece.values, end) for name, piece in getattr(step, what).items()
                  if name not in begun or np.isfinite(begun[name].values).all()]  # fmt: skip
    return [one for one in found if one[2].dtype.kind == "f" and not np.isfinite(one[2]).all()]


def _listed(found: Sequence[_Number]) -> str:
    """Return the kind of the first value, NaN or infinite; for an infinity, also the first quantity that has NaN."""
    values = found[0][2]
    if np.isnan(values).any():
        return "NaN"
    later = next((TITLES[one[0]] for one in found if np.isnan(one[2]).any()), "")
    return "infinite" + (f", and then NaN in {later}" if later else "")


# --- agreement may prove nothing: a script that shares no work agrees with itself -------------------------------------


def nothing_learnt(facts: Facts, num_steps: int) -> str:
    """Return why agreement in all of the steps is no evidence; "" if it is evidence."""
    if not any(seen.has_sent for seen in facts.ours):
        return (
            "no rank has sent anything to another, so each of them trains a model of its own, as the reference does: "
            "call torch.distributed.init_process_group, and give the model to DistributedDataParallel or average its "
            "gradients"
        )
    if lost := facts.on_no_rank:
        return (
            f"no rank was found to hold the reference's {named(lost)}, and none of the reference's parameters is known "
            f"to be {named(facts.unplaced)}: begin with the reference's names, or with its weights"
        )
    if twice := next(_twice(facts), ()):
        line = facts.line_of_data() or facts.line("forward")
        where = f" (at {line})" if line else ""
        return (
            f"{ranks_text(twice)} hold copies of the model and all see the same samples{where}, so together "
            "they do only what one of them does alone: cut the batch by rank, give the loader a DistributedSampler, or "
            "draw from a different seed on each rank"
        )
    if not any(_has_changed(seen, number) for seen in facts.ours for number in range(num_steps)):
        freed = facts.line_of_script("freed")
        why = (
            f"The optimizer made at {freed} holds parameters whose memory was freed, such as those that "
            "FSDP has gathered: create it before the model is called"
            if freed
            else "Check that the optimizer holds the model's parameters, and that its learning rate is not 0"
        )
        return f"no parameter has changed in {num_steps} steps, neither on the ranks nor in the reference. {why}"
    return ""


_SUMS = ("backward", "reduction")


def _twice(facts: Facts) -> Iterator[tuple[int, ...]]:
    """Yield groups of ranks that repeat each other's work although they average their gradients, or although there are
    no other groups: they see the same samples, hold the same parts and compute the same gradients."""
    first = [seen.steps[0] for seen in facts.ours]
    for group in facts.copies:
        sums = [sent.ranks for step in first for sent in step.sent if sent.moment in _SUMS and sent.size > 1]
        if len(group) < 2 or (len(facts.copies) > 1 and not any(len({*group} & {*ranks}) > 1 for ranks in sums)):
            continue
        if "FSDPModule" in facts.ours[0].kinds:  # whose gradients are visible only after the reduction
            if all(sent.op == "all_gather" for rank in group for sent in first[rank].sent if sent.moment == "forward"):
                yield group
            continue
        marks = [[sent.mark for sent in first[rank].sent if sent.mark is not None] for rank in group]
        if any(one != marks[0] for one in marks):  # they add up different parts of the work
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
