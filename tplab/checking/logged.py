"""The numbers that the script logs, compared with those of the reference."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from tplab.checking.causes import thread
from tplab.checking.facts import Facts, Found
from tplab.checking.forward import of_value
from tplab.checking.gaps import gap, near
from tplab.checking.recording import Step
from tplab.checking.reference import TIMES
from tplab.checking.repairs import Hypothesis, Repair
from tplab.checking.same_model import What, named
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
    if rest := [*dict.fromkeys(one.got.label for one in wrong if one.got.label != got.label)]:
        facts.suspects.update(rest)  # each may have a cause of its own
        yield facts.row("log", None, f"{named(rest)} differs too" if len(rest) == 1 else f"{named(rest)} differ too")
    what: What = "evaluation" if got.is_evaluation else "log"
    factor, values = got.value / want.value if want.value else None, (f"{got.value:g}", f"{want.value:g}")
    proof = _proof(facts, wrong[0])
    is_named, times = factor is not None and bool(facts.sizes.named(factor)), facts.times_loss()
    if factor is not None and is_named and times is not None and near(times, factor):
        backward = facts.line("backward")
        cause = (
            "the losses of all ranks are added up, and the backward pass of that sum adds nothing up: training is the "
            "same, but the loss where the backward pass begins, and the loss that is logged, are sums. Average it"
        )
        where = line_of_loss(facts) or backward
        repair = Repair("scale", f"the mean in place of the sum at {where}", where, by=1 / max(round(factor), 1))
        yield facts.fault("loss", facts.sizes.words(factor), where, factor=factor, values=values,
                          lines=[backward, got.where],
                          hypotheses=[Hypothesis(repair, cause, where, thread("loss"))])  # fmt: skip
        return
    words, seen = facts.sizes.words(factor), "training is the same, but what is logged is not"
    cause = (
        f"{seen}: it is of one rank's own samples, a sum over ranks that is divided by what one rank has, or a mean of "
        "the means of batches or ranks that are not equally large. Add up sums and counts over ranks, then divide"
    )
    if _is_own(facts, wrong[0]) and not is_named:
        words, factor = f"rank {rank}'s own", None
        cause = f"rank {rank} has logged what it computed from its own samples: average it over ranks first"
        proof = f"rank {rank} computed this number from its own samples"
    facts.wants_trails = facts.wants_trails or not proof
    reads = facts.trails.reads() if facts.trails and not proof else []
    tried = [replace(one, cause=f"{seen}: {one.cause}")
             for one in chain(*(of_value(facts, read.values[0])[1] for read in reads[: -3 : -1]))]  # fmt: skip
    yield facts.fault(
        what, words, got.where, names=[got.label], factor=factor, cause=cause if proof else "", hypotheses=tried,
        thread=thread("log") if proof else "", values=values, ranks=[rank], proof=proof, seen=seen,
    )  # fmt: skip


def _proof(facts: Facts, wrong: Differs) -> str:
    """Return how the right number follows from numbers that ranks computed; "" if it was not seen."""
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
    """Return whether the rank computed the logged number from its own samples alone."""
    step, got = facts.mine[wrong.rank], wrong.got
    losses = [value for value, _ in step.losses]
    evaluated = [value for value, _ in step.evaluated]
    own = [*losses, *evaluated]
    for values in (losses, evaluated):
        own += [sum(values), float(np.mean(values))] if values else []
    if theirs := [value for value, _ in facts.theirs[0].losses]:  # backward may be called on a multiple of it
        own += [value * wrong.want.value / (float(np.mean(theirs)) or 1.0) for value in own]
    return any(abs(value - got.value) <= 2 * got.slack + 1e-4 * abs(value) for value in own)


_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|nan|inf)(?![\w]|\.\d)")
_MEASURES = re.compile(
    r"loss|nll|ppl|perplexity|norm|acc|entropy|mse|err|bpb|bits|score|metric|eval|\bf1\b|\bauc|iou|bleu|rouge|recall",
    re.IGNORECASE,
)
_VALIDATES = re.compile(r"\b(val|valid|validation|test)\b", re.IGNORECASE)
_EVALUATES = re.compile(r"val|eval|test", re.IGNORECASE)
_TIMES = re.compile(r"time|sec|\bms\b|/s|tok|took|elapsed|duration|mfu|flops|mem|gb|mib", re.IGNORECASE)
_UNIT = re.compile(r"\s*([mun]?s|sec\w*|min|minutes?|h|hours?|[kmg]i?b|[a-z]+/s\w*)\b(?!\s*[:=\d])", re.IGNORECASE)


class Printed(NamedTuple):
    """A number in a line of output.

    label   the words before it
    slack   half of its last digit
    is_time whether it is a duration or an amount
    is_beside   whether it has decimals and shares the line with a measure of the model's quality
    """

    label: str
    value: float
    slack: float
    where: str
    is_time: bool = False
    is_beside: bool = False

    @property
    def is_measure(self) -> bool:
        """Whether it measures the model's quality, and not a duration or a number of ranks."""
        return not self.is_time and (self.is_beside or bool(_MEASURES.search(self.label)))

    @property
    def is_evaluation(self) -> bool:
        return bool(_EVALUATES.search(self.label))


class Differs(NamedTuple):
    rank: int
    got: Printed
    want: Printed


def compare_logs(ours: Sequence[Step], theirs: Step, again: Step | None, tolerance: float) -> tuple[int, list[Differs]]:
    """Return how many numbers of one step were compared, and those that differ.

    Lines correspond if they are equal up to their numbers. A line that several ranks print with different numbers is
    each rank's own on purpose. Numbers that change in `again`, another run of the reference, are left out: times, say.
    """
    wanted, twice = _lines(theirs), _lines(again) if again is not None else {}
    printed = [_lines(step) for step in ours]
    count, found = 0, []
    for text, lines in wanted.items():
        printers = [rank for rank, mine in enumerate(printed) if text in mine]
        if not printers:
            continue
        if len(printers) > 1 and len({str([[n.value for n in x] for x in printed[r][text]]) for r in printers}) > 1:
            continue
        for turn, numbers in enumerate(lines):
            mine = printed[printers[0]][text]
            if turn >= len(mine):
                break
            others = twice.get(text, [])
            for place, (got, want) in enumerate(zip(mine[turn], numbers)):
                same = others[turn][place].value if turn < len(others) else want.value
                slack, moved = 2 * want.slack + tolerance * abs(want.value), gap(same, want.value)
                if not want.is_measure or moved > max(slack, 0.01 * abs(want.value)):
                    continue
                slack = max(slack, TIMES * moved)
                count += 1
                if gap(got.value, want.value) > slack:
                    found.append(Differs(printers[0], got, want))
    return count, found


def _lines(step: Step) -> dict[str, list[list[Printed]]]:
    """Return the numbers of each line of output, by the line's text without numbers."""
    found: dict[str, list[list[Printed]]] = defaultdict(list)
    for text, where in _joined(step.prints):
        numbers = list(_numbers(text, where))
        if numbers:
            found[_NUMBER.sub("#", text)].append(numbers)
    return found


def _joined(prints: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield whole lines of output, each with the line of the program that began it."""
    begun, at = "", ""
    for text, where in prints:
        at = at if begun else where
        *ended, begun = (begun + text).split("\n")
        for line in ended:
            yield line, at
            at = where
    if begun:
        yield begun, at


def _numbers(text: str, where: str) -> Iterator[Printed]:
    end = 0
    for match in _NUMBER.finditer(text):
        digits = match[0].partition("e")[0].partition("E")[0].partition(".")[2]
        power = float("1e" + match[0].lower().partition("e")[2]) if "e" in match[0].lower() else 1.0
        label = text[end : match.start()].strip(" :=,;|'\"{}[]()->")
        is_beside = bool(digits and label and (_MEASURES.search(text) or _VALIDATES.search(label)))
        is_time = bool(_TIMES.search(label) or _UNIT.match(text, match.end()))
        yield Printed(label, float(match[0]), 0.5 * 10.0 ** -len(digits) * power, where, is_time, is_beside)
        end = match.end()
