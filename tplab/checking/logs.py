"""The numbers that a script prints, compared with those that its reference prints in the same place."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tplab.checking.gaps import gap
from tplab.checking.recording import Step
from tplab.checking.reference import TIMES

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|nan|inf)(?![\w]|\.\d)")
_MEASURES = re.compile(r"loss|nll|ppl|perplexity|norm|acc|entropy|mse|err|bpb|bits|score|metric|eval", re.IGNORECASE)
_EVALUATES = re.compile(r"val|eval|test", re.IGNORECASE)
_TIMES = re.compile(r"time|sec|\bms\b|/s|tok|elapsed|mfu|flops|mem|gb|mib", re.IGNORECASE)


class Printed(NamedTuple):
    """A number in a line of output.

    label   the words before it
    slack   half of its last digit
    is_beside   whether it has decimals, and is in one line with something that says how well the model does
    """

    label: str
    value: float
    slack: float
    where: str
    is_beside: bool = False

    @property
    def is_measure(self) -> bool:
        """Whether it says how well the model does, and not how long something took, or how many ranks there are."""
        is_one = self.is_beside or bool(_MEASURES.search(self.label))
        return is_one and not _TIMES.search(self.label)

    @property
    def is_evaluation(self) -> bool:
        return bool(_EVALUATES.search(self.label))


class Differs(NamedTuple):
    rank: int
    got: Printed
    want: Printed


def compare_logs(ours: Sequence[Step], theirs: Step, again: Step | None, tolerance: float) -> tuple[int, list[Differs]]:
    """How many numbers were compared in one step, and those that differ.

    Lines are the same if they are but for their numbers. Where several ranks print a line with different numbers, each
    prints its own on purpose. `again` is another run of the reference: what it changes, such as times, is left out.
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
    """The lines of output by their text without numbers: the numbers of each line."""
    found: dict[str, list[list[Printed]]] = defaultdict(list)
    for text, where in _joined(step.prints):
        numbers = list(_numbers(text, where))
        if numbers:
            found[_NUMBER.sub("#", text)].append(numbers)
    return found


def _joined(prints: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Whole lines, each with the line of the program that has begun it."""
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
        is_beside = bool(digits and label and _MEASURES.search(text))
        yield Printed(label, float(match[0]), 0.5 * 10.0 ** -len(digits) * power, where, is_beside)
        end = match.end()
