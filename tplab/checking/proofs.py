"""A comparison that looks for causes by trials in a new run of the model. It states a cause only if everything is right
with one of them: that is the repair."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np

from tplab.checking.comparison import Addend, Answer, Comparison
from tplab.checking.gaps import largest
from tplab.checking.observed import axis_sets, observed
from tplab.checking.report import ParallelReport, Row, folded, in_backward_order, where_it_begins
from tplab.checking.same_model import named
from tplab.checking.verdict import NEITHER, judge, label


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


FORWARD = ("activation", "output", "loss")
"""Kinds of rows that come before the backward pass."""

FACTS = ("tied", "fused", "missing", "not finite", "shape")
"""Mistakes that are themselves what is observed, without a further cause."""

MASKED = -3e4
"""Scores below this are masked: -inf, the smallest float16, -1e9."""

NOT_COMPARED = "gradients are not compared: no output has the shape of a piece of the reference's"


class Side(Protocol):
    """One of the two models on its mesh. Each query returns one answer per rank.

    order   the parameters in the order in which their gradients arrive, after `answer`
    """

    order: list[str]

    def outputs(self, at: Mapping[str, Any] | None = None) -> list[dict[str, np.ndarray]]: ...

    def answer(self, weights: Mapping[str, Any], optimizer: Any = None, at: Any = None) -> Sequence[Answer] | None:
        """Return None if a trial fails because not all ranks run the operations that it changes."""


class Check(Comparison):
    """A comparison of two sides.

    apart   weights that are one in the reference and several in the model: the other names, by each name
    notes   sentences about the whole
    """

    def __init__(self, *about: Any):
        super().__init__(*about)
        self.apart: dict[str, list[str]] = {}
        self.notes: list[str] = []

    def compare(
        self, theirs: Side, ours: Side, agains: Iterable[Side],
        trials: Callable[[Row, Callable[[Mapping[str, Any]], Any]], Iterable[Trial]], *, has_loss: bool,
        share_copies: bool, optimizer: Any = None, before: Mapping[str, np.ndarray],
    ) -> None:  # fmt: skip
        """Add rows for outputs, the loss, gradients, and parameters after a step, and their causes.

        agains   the reference with changed rounding
        trials   the trials for a wrong gradient of a model whose outputs are right; yielding them may run the model
        share_copies   see `weigh`
        before   the parameters before a step
        """
        outputs = {} if has_loss else theirs.outputs()[0]
        weights = {} if has_loss else self.weigh(outputs, ours.outputs(), share_copies)
        if not has_loss and not weights:
            self.compare_outputs([{"output": x, "loss": {}} for x in ours.outputs()], {"output": outputs, "loss": {}})
            self.notes.append(NOT_COMPARED)
            return
        on_one = {name: [whole] for name, (whole, _) in weights.items()}
        each = {name: each for name, (_, each) in weights.items()}
        want = (theirs.answer(on_one, optimizer) or [])[0]
        self.see_again(each_that_answers(agains, lambda side: side.answer(on_one)), want)
        told = ours.answer(each, optimizer, {}) or []
        self.compare_outputs(told, want)
        self.rows += self.gradients(told, want)
        for index, row in enumerate(self.rows):
            if row.kind == "gradient" and not row.ok and row.name in self.apart:
                self.rows[index] = self._tied(row, self.apart[row.name], told, want["gradient"])

        def answer(at: Mapping[str, Any]) -> Sequence[Answer] | None:
            return ours.answer(each, None, at)

        self.prove_gradients(theirs.order, told, want, lambda row: trials(row, answer), answer)
        if optimizer is not None:
            self.compare_step(told, want, before)

    def _tied(self, row: Row, apart: Sequence[str], told: Sequence[Answer], want: Mapping[str, Any]) -> Row:
        """Return the row of a weight that the reference uses twice: its gradient may be that of one use alone."""
        words = f"one weight with {apart[0]} in the reference ('tied'), and two in the model"
        parts = [[rank["gradient"][name] for name in (row.name, *apart)] for rank in told]
        if all(x is not None and x.shape == rank[0].shape for rank in parts for x in rank):
            both = [np.sum(np.stack(rank), axis=0) for rank in parts]
            if judge(both, want[row.name], self.layouts[row.name], self.mesh, self.rounding).ok:
                words += ": this is the gradient of one use, and those of both add up to the reference's"
        return replace(row, words=words, mistake="tied")

    @property
    def first_wrong(self) -> Row | None:
        """The first wrong row before the backward pass."""
        return next((row for row in self.rows if not row.ok and row.kind in FORWARD), None)

    def prove(self, row: Row, trials: Iterable[Trial], makes_right: Callable[[Trial], str]) -> str:
        """Enter the repair into a row: a trial with which a new run is right, or two if either would do. Return ""
        then, and otherwise the words for an unknown cause and the trials.

        makes_right   what is right with a trial: "all outputs are right"; "" for nothing
        """
        done, found = list[Trial](), list[tuple[Trial, str]]()
        for trial in trials:
            if len(found) == 2 or (found and (found[0][0].short != trial.short or "reductions" not in trial.at)):
                break
            done.append(trial)
            if right := makes_right(trial):
                found.append((trial, right))
        if not found:
            return not_known(done)
        self.enter(row, "; ".join(f"{right} {trial.words}" for trial, right in found), found[0][0].mistake)
        return ""

    def enter(self, row: Row, words: str, mistake: str = "") -> None:
        """Enter what is known of the cause into a row."""
        place = next(index for index, one in enumerate(self.rows) if (one.kind, one.name) == (row.kind, row.name))
        words = f"{self.rows[place].words.removesuffix(f'; {NEITHER}')}; {words}"
        self.rows[place] = replace(self.rows[place], words=words, mistake=mistake or self.rows[place].mistake, axes=())

    def scores(self, want: Sequence[np.ndarray], told: Sequence[Sequence[np.ndarray]]) -> list[Trial]:
        """Return trials for the first wrong inputs of softmaxes, if they are a multiple of the reference's or parts of
        a sum: after a softmax, neither would be visible.

        want, told   the input of each softmax in the reference, in order; and for each rank
        """
        for index, whole in enumerate(want):
            whole, *pieces = (
                np.where(x > MASKED, x, 0.0) for x in (whole, *(s[index] for s in told if index < len(s)))
            )
            slack = 10 * self.rounding.tolerance * largest(whole)
            found = observed(pieces, whole, self.mesh, slack) if len(pieces) == len(told) else None
            if found is not None and found.kind == "scaled" and found.factor > 0:
                text = f"{found.factor:.5g}"
                words = f"with the scores that softmax takes divided by {text}: they are {text} times the reference's"
                return [Trial(words, "another scale of the scores", {"scores": 1 / found.factor}, "scale")]
            if found is not None and found.is_partial and found.factor == 1:
                words = (
                    f"with the scores added up over {label(found.axes)} before softmax, which takes only a part of them"
                )
                return [Trial(words, "a sum of the scores", {"scores": found.axes}, "softmax")]
            if found is None or not found.is_right:
                return []
        return []

    def additions(self, row: Row, addend: Addend | None, place: str, kind: str = "exit") -> list[Trial]:
        """Return trials for an output: apply a parameter that every rank adds on one rank only; or add up parts, before
        each rank adds its own addend.

        place   of the output: a module, "" for the whole model. kind: "given" for a module's input
        """
        found = []
        if addend is not None and addend.count is not None:
            own = f"{place}.bias" if f"{place}.bias" in self.layouts else "bias"
            name = own if addend.name == "its bias" else addend.name
            for axes in axis_sets(self.mesh) if name in self.layouts else ():
                if abs(addend.count / self.mesh.axis_size(axes) - 1) < 1e-3:
                    words = (
                        f"with {addend.name} on one rank of {label(axes)} alone, so every rank adds it before the sum"
                    )
                    found.append(Trial(f"{words}: add it once, after it", "a bias on one rank", {"once": (name, axes)}))
        if row.mistake == "partial" and row.axes and row.layout == "copies":
            added = addend.values if addend is not None and addend.share else np.zeros(())
            where = f", before {addend.name} is added" if addend is not None and addend.share else ""
            words = f"with an all_reduce over {label(row.axes)} here{where}"
            found.append(Trial(words, "an all_reduce here", {kind: (place, row.axes, added)}))
        return found

    def prove_gradients(
        self, order: Sequence[str], told: Sequence[Answer], want: Answer, trials: Callable[[Row], Iterable[Trial]],
        answer: Callable[[Mapping[str, Any]], Sequence[Answer] | None],
    ) -> None:  # fmt: skip
        """If all outputs are right and gradients are not, look for a repair of the first wrong ones.

        trials   what to try on the model; `answer` runs it with the changes of a trial
        """
        rows = folded(in_backward_order(self.rows, order))
        first = [row for row in rows if row.kind == "gradient" and not row.ok and not row.follows]
        if self.first_wrong or any(row.kind == "value" and not row.ok for row in rows):
            return
        for row in first:
            if row.mistake not in FACTS:
                every, alike = self._sums(row)
                mended = partial(self._mended, row, rows, told, want, answer)
                if unknown := self.prove(row, chain(every, trials(row), alike), mended):
                    self.enter(row, unknown)

    def _mended(
        self, row: Row, rows: Sequence[Row], told: Sequence[Answer], want: Answer, answer: Any, trial: Trial
    ) -> str:
        """Return what is right with a trial: "" if it mends neither this gradient nor those behind it, or breaks
        one."""
        again = self._with_sums(told, *trial.at["gradients"]) if "gradients" in trial.at else answer(trial.at)
        if again is None:
            return ""
        now = {one.name: one.ok for one in self.gradients(again, want)}
        before = {one.name: one.ok for one in rows if one.kind == "gradient"}
        behind = [one.name for one in rows if one.kind == "gradient" and one.follows == row.title]
        mended = [name for name in (row.name, *behind) if now[name]]
        if not mended or any(ok and not now[name] for name, ok in before.items()):
            return ""
        if all(now.values()):
            return "all gradients are right"
        if "gradients" not in trial.at:
            return f"the gradient of {mended[0]} is right"
        return "all gradients of parameters are right" if all(now[name] for name in self.layouts) else ""

    def _sums(self, row: Row) -> tuple[list[Trial], list[Trial]]:
        """Return the trials for gradients after the backward pass: sum or average all of them, or those with the same
        mistake."""
        if row.mistake not in ("partial", "mean") or not row.axes:
            return [], []
        op, done = ("sum", "added up") if row.mistake == "partial" else ("mean", "averaged")
        alike = [
            one.name
            for one in self.rows
            if one.kind == "gradient" and one.mistake == row.mistake and one.axes == row.axes
        ]
        of = f"the gradient{'s' * (len(alike) > 1)} of {named(alike)} {done} over {label(row.axes)}"
        these = Trial(f"with {of}{', as copy_to(parameter, axis) does' * (op == 'sum')}", f"gradients {done} over "
                      f"{label(row.axes)}", {"gradients": (alike, row.axes, op)})  # fmt: skip
        words = f"with every gradient {done} over {label(row.axes)} after the backward pass"
        every = {"gradients": (list(self.layouts), row.axes, op)}
        return [these._replace(words=words, at=every)], [these]

    def _with_sums(self, told: Sequence[Answer], names: Sequence[str], axes: tuple[str, ...], op: str) -> list[Answer]:
        found: list[Answer] = []
        for rank, mine in enumerate(told):
            group = self.mesh.group(rank, axes)
            summed = {"gradient": dict(mine["gradient"]), "input": dict(mine["input"])}
            for kind, name in [(kind, name) for kind in summed for name in names if name in summed[kind]]:
                parts = [told[other][kind][name] for other in group]
                shapes = {None if part is None else part.shape for part in parts}
                if len(shapes) == 1 and None not in shapes:
                    summed[kind][name] = np.sum(parts, 0) / (len(group) if op == "mean" else 1)
            found.append(summed)
        return found

    def report(self, order: Sequence[str]) -> ParallelReport:
        """Return the report, with gradients in the order in which the reference's arrive, and `follows` filled in."""
        rows = folded(in_backward_order(self.rows, order))
        begins = where_it_begins(rows)
        return ParallelReport(rows, mesh=str(self.mesh), notes=[*self.notes, *([begins] if begins else [])])


def each_that_answers(sides: Iterable[Any], ask: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield the answer of the one rank of each side. A model may reject inputs that are slightly changed."""
    for side in sides:
        with suppress(Exception):
            yield ask(side)[0]
