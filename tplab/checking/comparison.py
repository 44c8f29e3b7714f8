"""The comparison behind `check_parallel`: what all ranks computed beside what the unsharded reference did, row by row.

Both frameworks run their models and pass on NumPy arrays; everything here is ordinary code on these arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from tplab.checking.addend import Addend, addend_of
from tplab.checking.observed import agree, axis_sets, largest, observed
from tplab.checking.report import ParallelReport, Row, folded, in_backward_order, where_it_begins
from tplab.checking.tried import Trial, not_known
from tplab.checking.verdict import NEITHER, Rounding, Verdict, judge, label, slack_of_step
from tplab.errors import SpecError
from tplab.layout import Layout, take
from tplab.mesh import Mesh
from tplab.sharding import P

Answer = Mapping[str, Mapping[str, Any]]
"""What one rank computed, as arrays by name: "output", "loss", "gradient" (of each parameter), "input" (the gradient of
each input) and "parameter" (after an optimizer's step)."""

FORWARD = ("activation", "output", "loss")
"""Kinds of rows that come before the backward pass."""

FACTS = ("tied", "fused", "missing", "not finite", "shape")
"""Mistakes that are what is observed, and have no other cause."""

MOST_MOVED, MOST_TOLERANCES = 0.3, 1000
"""How far rounding may move an output of the reference: relative, and in what its sizes let expect. Where it moves
further, the reference decides something by its last bits, and nothing is measured."""

MASKED = -3e4
"""Scores below are masked: -inf, the smallest float16, -1e9."""

NOT_COMPARED = "gradients are not compared: no output has the shape of a piece of the reference's"


class Side(Protocol):
    """One of the two models on its mesh. Its questions are answered for each rank.

    order   the parameters in the order in which their gradients arrive, after `answer`
    """

    order: list[str]

    def outputs(self, at: Mapping[str, Any] | None = None) -> list[dict[str, np.ndarray]]: ...

    def answer(self, weights: Mapping[str, Any], optimizer: Any = None, at: Any = None) -> Sequence[Answer] | None:
        """None where a trial fails, as ranks do not all run what it needs."""


class Comparison:
    """The rows of a report found so far.

    layouts    how each parameter is laid out on the mesh
    in_specs   how the inputs are cut: ranks that have pieces of them may each have their own part of the loss
    addends    what may be added to an output, by name: the whole of each bias and of each input
    added      what explains all that is wrong with an output, by name
    mean_over  the axes along which each rank's loss is the mean over its own data
    apart      names of weights that are one in the reference and several in the model, by the name of each
    """

    def __init__(self, mesh: Mesh, rounding: Rounding, layouts: Mapping[str, Layout], in_specs: Sequence[P]):
        self.mesh, self.rounding, self.layouts = mesh, rounding, layouts
        self.split = {name for spec in in_specs for name in spec.axis_names}
        self.in_specs = {f"input {index}": spec for index, spec in enumerate(in_specs)}
        self.addends: dict[str, np.ndarray] = {}
        self.added: dict[str, Addend] = {}
        self.rows: list[Row] = []
        self.mean_over: set[str] = set()
        self.agains: list[Answer] = []
        self.apart: dict[str, list[str]] = {}
        self.notes: list[str] = []

    def compare(
        self,
        theirs: Side,
        ours: Side,
        agains: Iterable[Side],
        trials: Callable[[Row, Callable[[Mapping[str, Any]], Any]], Iterable[Trial]],
        *,
        has_loss: bool,
        share_copies: bool,
        optimizer: Any = None,
        before: Mapping[str, np.ndarray],
    ) -> None:
        """Add rows for outputs, the loss, gradients, and parameters after a step, and their causes.

        agains   the reference where rounding is changed
        trials   what to try on a model whose outputs are right, where a gradient is not; it may run the model, too
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
        self.see_again(((side.answer(on_one) or [None])[0] for side in agains), want)
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

    def weigh(
        self, wanted: Mapping[str, np.ndarray], told: Sequence[Mapping[str, np.ndarray]], share_copies: bool
    ) -> dict[str, tuple[np.ndarray, list[np.ndarray]]]:
        """Weights for each output, if there is no loss: for the reference, and for each rank.

        share_copies   whether copies of an output share its weight: if the gradients of all ranks are added up, as by
                       jax.grad, each of n copies counts 1/n
        """
        found = {}
        for name in wanted:
            pieces = [rank.get(name) for rank in told]
            layout = self._layout_of(wanted[name], pieces)
            if layout is None:
                continue
            whole = np.random.default_rng(crc32(name.encode())).standard_normal(wanted[name].shape)
            count = self._num_copies(layout, pieces) if share_copies else 1
            stacked = [np.zeros(piece.shape) for piece in pieces if piece is not None]
            for rank, weights in enumerate(stacked):
                cut = take(whole, layout, self.mesh, rank)
                weights[tuple(map(slice, cut.shape))] = cut / count
            found[name] = whole, stacked
        return found

    def _num_copies(self, layout: Layout, pieces: Sequence[Any]) -> int:
        """How many ranks hold the same piece of an output; 1 if they hold parts of a sum."""
        spare = tuple(name for name in self.mesh.axis_names if name not in layout.spec.axis_names)
        slack = 100 * self.rounding.tolerance * max(map(largest, pieces))
        return self.mesh.axis_size(spare) if spare and agree(pieces, self.mesh.groups(spare), slack) else 1

    def see_again(self, agains: Iterable[Answer | None], want: Answer) -> None:
        """What the reference answers where rounding is changed shows how far that moves each tensor. An answer that is
        another one, as of a model that draws random numbers or takes the largest of some, says nothing."""
        most = min(MOST_MOVED, MOST_TOLERANCES * self.rounding.tolerance)
        for again in agains:
            outputs = [(kind, name) for kind in ("output", "loss") for name in want[kind]]
            if again is not None and all(
                _moved(want, again, *key) <= most * largest(want[key[0]][key[1]]) for key in outputs
            ):
                self.agains.append(again)

    def rounding_of(self, kind: str, name: str, want: Answer, among: float = 0.0) -> Rounding:
        """How far rounding may take one tensor."""
        moved = [_moved(want, again, kind, name) for again in self.agains]
        return self.rounding.measured(max(moved) if moved and np.isfinite(max(moved)) else None, among)

    # --- rows --------------------------------------------------------------------------------------------------------

    def compare_outputs(self, told: Sequence[Answer], want: Answer) -> None:
        for name, whole in want["output"].items():
            pieces = _pieces(told, "output", name)
            row = self._row("output", name, whole, pieces, None, self.rounding_of("output", name, want))
            addend = None if row.ok else self.addend_of(whole, pieces, self.addends)
            if addend is not None:
                self.added[name] = addend
                row = Row.of("output", name, whole.shape, row.layout, addend.verdict)
            self.rows.append(row)
        for name, whole in want["loss"].items():
            pieces, rounding = _pieces(told, "loss", name), self.rounding_of("loss", name, want)
            self.rows.append(self._row("loss", name, whole, pieces, Layout(), rounding))

    def gradients(self, told: Sequence[Answer], want: Answer) -> list[Row]:
        """A row for the gradient of each parameter and of each input."""
        among = max((largest(g) for g in want["gradient"].values() if g is not None), default=0.0)
        wanted = [("gradient", name, want["gradient"].get(name), layout) for name, layout in self.layouts.items()]
        wanted += [("input", name, whole, None) for name, whole in want["input"].items()]
        return [
            self._row(
                "gradient", name, whole, _pieces(told, kind, name), layout, self.rounding_of(kind, name, want, among)
            )
            for kind, name, whole, layout in wanted
        ]

    def compare_step(self, told: Sequence[Answer], want: Answer, before: Mapping[str, np.ndarray]) -> None:
        """Compare the parameters after an optimizer step from `before`, up to what rounding of gradients explains."""
        among = max((largest(g) for g in want["gradient"].values() if g is not None), default=0.0)
        for name, layout in self.layouts.items():
            whole, pieces, gradient = (
                want["parameter"][name],
                _pieces(told, "parameter", name),
                want["gradient"].get(name),
            )
            moves = self.rounding_of("gradient", name, want, among).slack(
                0.0 if gradient is None else largest(gradient)
            )
            slack = slack_of_step(before[name], whole, gradient, max(moves, self.rounding.tolerance * among))
            for rank, piece in enumerate(pieces):
                cut, free = take(whole, layout, self.mesh, rank), take(slack, layout, self.mesh, rank)
                here = tuple(map(slice, cut.shape))
                if piece is not None and piece.ndim == cut.ndim and piece[here].shape == cut.shape:
                    pieces[rank] = piece = np.array(piece, np.float64)
                    piece[here] = np.where(np.abs(piece[here] - cut) <= free, cut, piece[here])
            self.rows.append(self._row("parameter", name, whole, pieces, layout, self.rounding))

    def _tied(self, row: Row, apart: Sequence[str], told: Sequence[Answer], want: Mapping[str, Any]) -> Row:
        """For a weight that the reference uses twice, whether a wrong gradient is that of one use alone."""
        words = f"one weight with {apart[0]} in the reference ('tied'), and two in the model"
        parts = [[rank["gradient"][name] for name in (row.name, *apart)] for rank in told]
        if all(x is not None and x.shape == rank[0].shape for rank in parts for x in rank):
            both = [np.sum(np.stack(rank), axis=0) for rank in parts]
            if judge(both, want[row.name], self.layouts[row.name], self.mesh, self.rounding).ok:
                words += ": this is the gradient of one use, and those of both add up to the reference's"
        return replace(row, words=words, mistake="tied")

    def judge_output(
        self, whole: np.ndarray, pieces: Sequence[np.ndarray | None], moved: float | None = None
    ) -> tuple[Layout, Verdict] | None:
        """The layout and the verdict of one output; None if the ranks' shapes fit no layout."""
        layout = self._layout_of(whole, pieces)
        if layout is None:
            return None
        return layout, judge(pieces, whole, layout, self.mesh, self.rounding.measured(moved), what="output")

    def addend_of(
        self, whole: np.ndarray, pieces: Sequence[np.ndarray | None], addends: Mapping[str, np.ndarray]
    ) -> Addend | None:
        """What is added to an output and explains all that is wrong with it."""
        found, known = self.judge_output(whole, pieces), [piece for piece in pieces if piece is not None]
        if found is None or len(known) < len(pieces):
            return None
        named = {"its bias" if name == "bias" else name: values for name, values in addends.items()}
        return addend_of(named, known, whole, *found, self.mesh)

    def _row(
        self,
        kind: str,
        name: str,
        whole: np.ndarray | None,
        pieces: list[np.ndarray | None],
        layout: Layout | None,
        rounding: Rounding,
    ) -> Row:
        if layout is None:
            layout = (None if whole is None else self._layout_of(whole, pieces)) or Layout()
        verdict = judge(pieces, whole, layout, self.mesh, rounding, what=kind)
        if kind == "loss" and self.split and verdict.mistake in ("partial", "mean"):
            self.mean_over = set(verdict.axes) if verdict.mistake == "mean" else set()
            words = "each rank's part of it, as it has its part of the inputs"
            verdict = verdict._replace(ok=True, words=words, mistake="")
        here = self.in_specs[name].axis_names if kind == "gradient" and name in self.in_specs else ()
        if verdict.mistake == "scaled" and verdict.axes and set(verdict.axes) <= self.mean_over.intersection(here):
            words = (
                f"{verdict.words.partition(' (')[0]}, as each rank's loss is the mean over its own part of the input"
            )
            verdict = verdict._replace(ok=True, words=words, mistake="", axes=())
        shape = next((x.shape for x in (whole, *pieces) if x is not None), ())
        return Row.of(kind, name, shape, layout, verdict)

    def _layout_of(self, whole: np.ndarray, pieces: Sequence[np.ndarray | None]) -> Layout | None:
        known = [piece for piece in pieces if piece is not None]
        if len(known) < len(pieces):
            return None
        found = observed(known, whole, self.mesh, 100 * self.rounding.tolerance * largest(whole))
        return None if found.kind == "shape" else found.layout

    # --- causes ------------------------------------------------------------------------------------------------------

    @property
    def first_wrong(self) -> Row | None:
        """What is first wrong before the backward pass."""
        return next((row for row in self.rows if not row.ok and row.kind in FORWARD), None)

    def prove(self, row: Row, trials: Iterable[Trial], makes_right: Callable[[Trial], str]) -> str:
        """Enter the repair into a row: a trial with which a new run is right, or two if either would do. What to say
        instead where there is none: the cause is not known, and what was tried; "" if it is proven.

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
        """What to try on the first inputs of softmaxes that are not the reference's, if they are a multiple of them or
        parts: a softmax of parts is no part of anything.

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

    def additions(self, row: Row, addend: Addend | None, place: str) -> list[Trial]:
        """What to try on an output: a parameter that is added as often as an axis has ranks is there on one rank only;
        or parts are added up, before what each rank adds to its own.

        place   of the output: a module, "" for the whole model
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
            found.append(Trial(words, "an all_reduce here", {"exit": (place, row.axes, added)}))
        return found

    def prove_gradients(
        self,
        order: Sequence[str],
        told: Sequence[Answer],
        want: Answer,
        trials: Callable[[Row], Iterable[Trial]],
        answer: Callable[[Mapping[str, Any]], Sequence[Answer] | None],
    ) -> None:
        """Where all outputs are right and gradients are not, look for a repair of the first wrong ones.

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
        """What is right with a trial: nothing if neither this gradient nor one behind it is, or others turn wrong."""
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
        """What is tried on gradients after the backward pass: all are added up or averaged, or those that are like this
        one."""
        if row.mistake not in ("partial", "mean") or not row.axes:
            return [], []
        op, done = ("sum", "added up") if row.mistake == "partial" else ("mean", "averaged")
        alike = [
            one.name
            for one in self.rows
            if one.kind == "gradient" and one.mistake == row.mistake and one.axes == row.axes
        ]
        over, named = label(row.axes), ", ".join(alike[:3]) + ", .." * (len(alike) > 3)
        every = f"with every gradient {done} over {over} after the backward pass"
        these = (
            f"with the gradient{'s' * (len(alike) > 1)} of {named} {done} over {over}, as copy_to(parameter, axis) does"
        )
        short = f"gradients {done} over {over}"
        return (
            [Trial(every, short, {"gradients": (list(self.layouts), row.axes, op)})],
            [
                Trial(
                    these.removesuffix(", as copy_to(parameter, axis) does") if op == "mean" else these,
                    short,
                    {"gradients": (alike, row.axes, op)},
                )
            ],
        )

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

    def report(self, order: Sequence[str], notes: Sequence[str] = ()) -> ParallelReport:
        """All rows, with gradients in the order in which the reference's arrive, and what follows from what."""
        rows = folded(in_backward_order(self.rows, order))
        begins = where_it_begins(rows)
        return ParallelReport(rows, mesh=str(self.mesh), notes=[*notes, *self.notes, *([begins] if begins else [])])


def _moved(want: Answer, again: Answer, kind: str, name: str) -> float:
    """How far another answer of the reference is from the first."""
    one, other = want[kind].get(name), again.get(kind, {}).get(name)
    if one is None or other is None or np.shape(one) != np.shape(other):
        return np.inf
    gap = largest(np.asarray(one, np.float64) - np.asarray(other, np.float64))
    return gap if np.isfinite(gap) else np.inf


def _pieces(told: Sequence[Answer], kind: str, name: str) -> list[np.ndarray | None]:
    return [rank[kind].get(name) for rank in told]


def nudged(values: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
    """These numbers in float64, each one unit in the last place up or down."""
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], values.shape)
    return np.asarray(values, np.float64) * (1 + epsilon * signs)


def each_input(in_specs: Any, num_inputs: int) -> list[P]:
    """A P for each input. Raises SpecError if their number is different."""
    if in_specs is None or isinstance(in_specs, P):
        return [in_specs or P()] * num_inputs
    if len(in_specs) != num_inputs:
        raise SpecError(
            f"in_specs has {len(in_specs)} entries, but there are {num_inputs} inputs; give one for each input"
        )
    return [spec or P() for spec in in_specs]


def noise_for(name: str, values: np.ndarray) -> np.ndarray | None:
    """Noise for a constant parameter, as biases and norms are at the start: a bias of zeros could be added any number
    of times without any effect. None if the parameter is not constant."""
    if values.size < 2 or not (values == values.flat[0]).all():
        return None
    return 0.1 * np.random.default_rng(crc32(name.encode())).standard_normal(values.shape)
