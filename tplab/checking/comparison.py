"""The comparison behind `check_parallel`: what all ranks computed beside what the unsharded reference did, row by row.

Both frameworks run their models and pass on NumPy arrays; everything here is ordinary code on these arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np

from tplab.checking.addend import of_addends
from tplab.checking.advice import advised, folded, in_backward_order, where_it_begins
from tplab.checking.report import ParallelReport, Row
from tplab.checking.scores import wrong_scores
from tplab.checking.verdict import EPSILON, NEITHER, Rounding, Verdict, judge, slack_of_step
from tplab.errors import SpecError
from tplab.layout import Layout, layout_of, take
from tplab.mesh import Mesh
from tplab.sharding import P

Answer = Mapping[str, Mapping[str, Any]]
"""What one rank computed, as arrays by name: "output", "loss", "gradient" (of each parameter), "input" (the gradient of
each input) and "parameter" (after an optimizer's step)."""

OTHER_DTYPE = {"float64": "float32"}
"""The dtype in which the reference runs once more, to see its rounding error; for all other dtypes it is float64."""

FORWARD = ("activation", "output", "loss")
"""Kinds of rows that come before the backward pass."""

MOST_OWN, MOST_TOLERANCES = 0.3, 1000
"""The largest gap between the reference in two dtypes that passes as rounding: relative, and in tolerances."""

NOT_COMPARED = "gradients are not compared: no output has the shape of a piece of the reference's"


class Comparison:
    """The rows of a report found so far.

    layouts    how each parameter is laid out on the mesh
    again      the reference's answer in another dtype (`OTHER_DTYPE`), if there is one: a sum whose terms cancel is
               less exact than others, and this shows it
    in_specs   how the inputs are cut: ranks that have pieces of them may each have their own part of the loss
    addends    what may be added to an output, by name: the whole of each bias and of each input
    largest    the largest element of any gradient of the reference
    mean_over  the axes along which each rank's loss is the mean over its own data
    """

    def __init__(self, mesh: Mesh, rounding: Rounding, layouts: Mapping[str, Layout], in_specs: Sequence[P]):
        self.mesh, self.rounding, self.layouts = mesh, rounding, layouts
        self.split = {name for spec in in_specs for name in spec.axis_names}
        self.in_specs = {f"input {index}": spec for index, spec in enumerate(in_specs)}
        self.addends: dict[str, np.ndarray] = {}
        self.rows: list[Row] = []
        self.largest = 0.0
        self.mean_over: set[str] = set()
        self.again: Answer | None = None

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
        groups = self.mesh.groups(spare) if spare else []
        slack = 100 * self.rounding.tolerance

        def agree(one: np.ndarray, other: np.ndarray) -> bool:
            return np.allclose(one, other, rtol=0, atol=slack * float(np.abs(one).max(initial=0)))

        is_copied = groups and all(agree(pieces[first], pieces[other]) for first, *rest in groups for other in rest)
        return self.mesh.axis_size(spare) if is_copied else 1

    def see_again(self, again: Answer | None, want: Answer) -> None:
        """Accept the reference's answer in another dtype, unless it is a different answer. A model that draws random
        numbers draws different ones in another dtype, and every mistake would pass as rounding."""
        self.again = again
        for kind in ("output", "loss"):
            for name, whole in want[kind].items():
                own = self._own_rounding(whole, kind, name)
                if own is not None and own > min(MOST_OWN, MOST_TOLERANCES * self.rounding.tolerance):
                    self.again = None
                    return

    def compare_outputs(self, told: Sequence[Answer], want: Answer) -> None:
        for name, whole in want["output"].items():
            self._add("output", name, whole, self._pieces(told, "output", name), None)
            if not self.rows[-1].ok:
                self._blame_an_addend(whole, self._pieces(told, "output", name))
        for name, whole in want["loss"].items():
            self._add("loss", name, whole, self._pieces(told, "loss", name), Layout())

    def _blame_an_addend(self, whole: np.ndarray, pieces: list[np.ndarray | None]) -> None:
        """If a bias or a residual explains everything that is wrong with the last output, say so."""
        found = self.judge_output(whole, pieces)
        known = [piece for piece in pieces if piece is not None]
        if found is None or len(known) < len(pieces):
            return
        layout, verdict = found
        named = {"its bias" if name == "bias" else name: values for name, values in self.addends.items()}
        blamed = of_addends(named, known, whole, layout, verdict, self.mesh)
        if blamed is not verdict:
            self.rows[-1] = Row.of("output", self.rows[-1].name, whole.shape, layout, blamed)

    @property
    def is_forward_wrong(self) -> bool:
        """Whether anything is wrong before the backward pass."""
        return any(not row.ok and row.kind in FORWARD for row in self.rows)

    def blame_scores(self, want: Sequence[Sequence[np.ndarray]], told: Sequence[Sequence[np.ndarray]]) -> None:
        """If an output or the loss is wrong because of the attention scores, say so.

        want, told   the inputs of the softmaxes, for each rank: of the reference, and of the model
        """
        found = wrong_scores(want[0], told, self.mesh, self.judge_output)
        if found and self.is_forward_wrong:
            self.blame(next(row for row in self.rows if not row.ok and row.kind in FORWARD), *found)

    def blame(self, row: Row, mistake: str, words: str) -> None:
        """Enter the cause into a row."""
        found = row.words.removesuffix(f"; {NEITHER}")
        self.rows[self.rows.index(row)] = replace(row, words=f"{found}; {words}", mistake=mistake, axes=())

    def report(self, order: Sequence[str], notes: Sequence[str] = ()) -> ParallelReport:
        """All rows, with gradients in the order in which the reference's arrive, what to do, and what follows from
        what."""
        cut = {name for layout in self.layouts.values() for name in layout.spec.axis_names}
        rows = folded(advised(in_backward_order(self.rows, order), cut, self.split))
        begins = where_it_begins(rows)
        return ParallelReport(rows, mesh=str(self.mesh), notes=[*notes, *([begins] if begins else [])])

    def compare_gradients(self, told: Sequence[Answer], want: Answer) -> None:
        known = [g for g in want["gradient"].values() if g is not None]
        self.largest = max((float(np.abs(g).max(initial=0)) for g in known), default=0.0)
        for name, layout in self.layouts.items():
            self._add("gradient", name, want["gradient"].get(name), self._pieces(told, "gradient", name), layout)
        for name, whole in want["input"].items():
            self._add("gradient", name, whole, self._pieces(told, "input", name), None, among="input")

    def compare_step(self, told: Sequence[Answer], want: Answer, before: Mapping[str, np.ndarray]) -> None:
        """Compare the parameters after an optimizer step from `before`, up to what rounding of gradients explains."""
        for name, layout in self.layouts.items():
            whole, pieces = want["parameter"][name], self._pieces(told, "parameter", name)
            slack = slack_of_step(before[name], whole, want["gradient"].get(name), self.rounding, self.largest)
            for rank, piece in enumerate(pieces):
                cut, free = take(whole, layout, self.mesh, rank), take(slack, layout, self.mesh, rank)
                here = tuple(map(slice, cut.shape))
                if piece is not None and piece.ndim == cut.ndim and piece[here].shape == cut.shape:
                    pieces[rank] = piece = np.array(piece, np.float64)
                    piece[here] = np.where(np.abs(piece[here] - cut) <= free, cut, piece[here])
            self._add("parameter", name, whole, pieces, layout)

    def judge_output(self, whole: np.ndarray, pieces: Sequence[np.ndarray | None]) -> tuple[Layout, Verdict] | None:
        """The layout and the verdict of one output; None if the ranks' shapes fit no layout."""
        layout = self._layout_of(whole, pieces)
        if layout is None:
            return None
        return layout, judge(pieces, whole, layout, self.mesh, self.rounding, what="output")

    def _add(
        self,
        kind: str,
        name: str,
        whole: np.ndarray | None,
        pieces: list[np.ndarray | None],
        layout: Layout | None,
        *,
        among: str = "",
    ) -> None:
        if layout is None:
            layout = (None if whole is None else self._layout_of(whole, pieces)) or Layout()
        own = self._own_rounding(whole, among or kind, name)
        largest = self.largest if kind == "gradient" else 0.0
        verdict = judge(pieces, whole, layout, self.mesh, self.rounding, what=kind, largest=largest, own=own)
        if kind == "loss" and self.split and verdict.mistake in ("partial", "mean"):
            self.mean_over = set(verdict.axes) if verdict.mistake == "mean" else set()
            words = "each rank's part of it, as it has its part of the inputs"
            verdict = verdict._replace(ok=True, words=words, mistake="")
        here = self.in_specs[name].axis_names if among == "input" and name in self.in_specs else ()
        if verdict.mistake == "scaled" and verdict.axes and set(verdict.axes) <= self.mean_over.intersection(here):
            words = f"{verdict.words.partition(':')[0]}, as each rank's loss is the mean over its own part of the input"
            verdict = verdict._replace(ok=True, words=words, mistake="", axes=())
        shape = next((x.shape for x in (whole, *pieces) if x is not None), ())
        self.rows.append(Row.of(kind, name, shape, layout, verdict))

    def _own_rounding(self, whole: np.ndarray | None, kind: str, name: str) -> float | None:
        """The reference's own rounding error, relative to its largest element.

        float32 and narrower dtypes are compared with float64; for float64, the error in float32 is scaled by its eps.
        """
        again = None if self.again is None else self.again.get(kind, {}).get(name)
        if again is None or whole is None or again.shape != whole.shape or not np.any(whole):
            return None
        gap = np.abs(np.asarray(whole, np.float64) - again).max() / np.abs(np.asarray(whole, np.float64)).max()
        other = OTHER_DTYPE.get(self.rounding.dtype)
        return float(gap) * (EPSILON[self.rounding.dtype] / EPSILON[other] if other else 1.0)

    def _pieces(self, told: Sequence[Answer], kind: str, name: str) -> list[np.ndarray | None]:
        return [rank[kind].get(name) for rank in told]

    def _layout_of(self, whole: np.ndarray, pieces: Sequence[np.ndarray | None]) -> Layout | None:
        shapes = [None if piece is None else piece.shape for piece in pieces]
        return layout_of(whole, pieces, shapes, self.mesh, 100 * self.rounding.tolerance)


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
