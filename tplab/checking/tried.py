"""Trials in a new run of the model: if everything is right with one, it is the repair, and the cause is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Reduction(NamedTuple):
    """An all_reduce where the program calls it: the op, the axis as text, and the line.

    op    how it combines what the ranks hold: "sum", "mean", "max" or "min"
    """

    op: str
    axis: str
    line: str

    def __str__(self) -> str:
        call = f"all_reduce(x, {self.axis!r}{'' if self.op == 'sum' else f', {self.op!r}'})"
        return f"{call} in {self.line}"


class Trial(NamedTuple):
    """A change to the model in a new run.

    words    the change as a phrase: "with a sum in place of all_reduce(x, 'tp', 'mean') in model.py:7"
    short    its kind, for the list of what was tried
    mistake  the keyword for the mistake if this is the repair; "" keeps the observed one
    at       what is changed, and how: "reductions" (by all_reduce: another result), "gathers" (each is of the other
             kind), "scores" (of softmaxes: a factor, or axes over which they are added up), "entrance" (modules, and
             the axes of copy_to at their inputs), "exit" and "given" (a module, axes, an addend: its output or input is
             added up without the addend), "parameters" (name -> layout and values), "loss" (axes over which it is
             averaged), "gradients" (names, axes, "sum" or "mean"), "once" (a parameter, and the axes of which only the
             first rank has it)
    """

    words: str
    short: str
    at: Mapping[str, Any]
    mistake: str = ""


LEFT_OUT, UNDIVIDED, SUMMED, AVERAGED = "left out", "undivided", "summed", "averaged"
"""The trials for an all_reduce: leave it out if all ranks hold the same; multiply its result by the number of ranks; a
sum in place of a mean, a maximum or a minimum; a mean if ranks do not hold the same."""

SAME = 1e-4
"""Relative: a larger difference means that ranks do not hold the same."""

_WORDS = {
    LEFT_OUT: ("without {}, which adds up what is the same on every rank", "leaving out an all_reduce"),
    UNDIVIDED: ("if what {} returns is not divided by the number of ranks", "an all_reduce that is not divided"),
    SUMMED: ("with a sum in place of {}", "a sum in place of another all_reduce"),
    AVERAGED: ("with a mean in place of {}", "a mean in place of an all_reduce"),
}

MOST_TRIALS = 8


def of_reductions(found: Sequence[Reduction], observed: str, is_backward: bool = False) -> list[Trial]:
    """Return trials for the all_reduces that a program calls, the first ones first.

    observed   what is wrong, in words: divisions are tried only if something is 1/R of the reference
    """
    trials, left_aside = [], {UNDIVIDED} if " 1/" not in f" {observed}" else set[str]()
    for how, (words, short) in _WORDS.items():
        those = [one for one in dict.fromkeys(found) if (one.op != "sum") == (how == SUMMED)]
        if how not in left_aside and (how != AVERAGED or is_backward):
            trials += [Trial(words.format(one), short, {"reductions": {one: how}}) for one in those[:MOST_TRIALS]]
    return trials


def not_known(trials: Iterable[Trial]) -> str:
    """Return the words for an unknown cause, with what was tried."""
    listed = list(dict.fromkeys(trial.short for trial in trials))
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return "cause not known" + (f"; tried: {', '.join(listed[:3])}{more}" if listed else "")
