"""The comparison behind `check_parallel`, row by row: what all ranks computed beside what the reference computed.

Both frameworks run their models and pass in NumPy arrays; everything here is ordinary code on these arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from tplab.checking.gaps import gap, is_constant, largest
from tplab.checking.observed import agree, observed
from tplab.checking.report import Row
from tplab.checking.verdict import Rounding, Verdict, as_many, judge, label, slack_of_step, times
from tplab.errors import SpecError
from tplab.layout import Layout, take
from tplab.mesh import Mesh
from tplab.sharding import P

Answer = Mapping[str, Mapping[str, Any]]
"""What one rank computed, as arrays by name: "output", "loss", "gradient" (of each parameter), "input" (the gradient of
each input) and "parameter" (after an optimizer's step)."""

MOST_MOVED, MOST_TOLERANCES = 0.3, 1000
"""How far rounding may move an output of the reference: relative to it, and in multiples of the expected tolerance. If
it moves further, a decision of the reference depends on its last bits, and the run measures nothing."""


class Comparison:
    """The rows of a report found so far.

    layouts    how each parameter is laid out on the mesh
    in_specs   how the inputs are cut: ranks with pieces of them may each have their own part of the loss
    addends    what may be added to an output, by name: the whole of each bias and of each input
    added      the addend that explains everything wrong with an output, by the output's name
    mean_over  the axes along which each rank's loss is the mean over its own data
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

    def weigh(
        self, wanted: Mapping[str, np.ndarray], told: Sequence[Mapping[str, np.ndarray]], share_copies: bool
    ) -> dict[str, tuple[np.ndarray, list[np.ndarray]]]:
        """Return weights for each output if there is no loss: for the reference, and for each rank.

        share_copies   whether copies of an output share its weight: if the gradients of all ranks are added up, as by
                       jax.grad, each of n copies counts 1/n
        """
        found = {}
        for name in wanted:
            pieces = [rank.get(name) for rank in told]
            layout = self.layout_of(wanted[name], pieces)
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
        """Return how many ranks hold the same piece of an output; 1 if they hold parts of a sum."""
        spare = tuple(name for name in self.mesh.axis_names if name not in layout.spec.axis_names)
        slack = 100 * self.rounding.tolerance * max(map(largest, pieces))
        return self.mesh.axis_size(spare) if spare and agree(pieces, self.mesh.groups(spare), slack) else 1

    def see_again(self, agains: Iterable[Answer], want: Answer) -> None:
        """Keep the reference's answers under changed rounding, which show how far rounding moves each tensor. An answer
        that differs by more, as from a model that draws random numbers or takes a top-k, is ignored."""
        most = min(MOST_MOVED, MOST_TOLERANCES * self.rounding.tolerance)
        for again in agains:
            outputs = [(kind, name) for kind in ("output", "loss") for name in want[kind]]
            if all(_moved(want, again, *key) <= most * largest(want[key[0]][key[1]]) for key in outputs):
                self.agains.append(again)

    def rounding_of(self, kind: str, name: str, want: Answer, among: float = 0.0) -> Rounding:
        """Return how far rounding may move one tensor."""
        moved = [_moved(want, again, kind, name) for again in self.agains]
        return self.rounding.measured(max(moved) if moved and np.isfinite(max(moved)) else None, among)

    # --- rows --------------------------------------------------------------------------------------------------------

    def compare_outputs(self, told: Sequence[Answer], want: Answer) -> None:
        for name, whole in want["output"].items():
            row = self._row("output", name, told, want)
            addend = None if row.ok else self.addend_of(whole, _pieces(told, "output", name), self.addends)
            if addend is not None:
                self.added[name] = addend
                row = Row.of("output", name, whole.shape, row.layout, addend.verdict)
            self.rows.append(row)
        self.rows += [self._row("loss", name, told, want, Layout()) for name in want["loss"]]

    def gradients(self, told: Sequence[Answer], want: Answer) -> list[Row]:
        """Return a row for the gradient of each parameter and of each input."""
        among = _largest_gradient(want)
        rows = [self._row("gradient", name, told, want, layout, among) for name, layout in self.layouts.items()]
        return rows + [self._row("input", name, told, want, None, among) for name in want["input"]]

    def compare_step(self, told: Sequence[Answer], want: Answer, before: Mapping[str, np.ndarray]) -> None:
        """Compare the parameters after an optimizer step from `before`, up to what rounding of gradients explains."""
        among = _largest_gradient(want)
        for name, layout in self.layouts.items():
            whole, pieces = want["parameter"][name], _pieces(told, "parameter", name)
            size = 0.0 if (gradient := want["gradient"].get(name)) is None else largest(gradient)
            moves = self.rounding_of("gradient", name, want, among).slack(size)
            slack = slack_of_step(before[name], whole, gradient, max(moves, self.rounding.tolerance * among))
            for rank, piece in enumerate(pieces):
                cut, free = take(whole, layout, self.mesh, rank), take(slack, layout, self.mesh, rank)
                here = tuple(map(slice, cut.shape))
                if piece is not None and piece.ndim == cut.ndim and piece[here].shape == cut.shape:
                    pieces[rank] = piece = np.array(piece, np.float64)
                    piece[here] = np.where(np.abs(piece[here] - cut) <= free, cut, piece[here])
            self.rows.append(self._row("parameter", name, [{"parameter": {name: x}} for x in pieces], want, layout))

    def judge_output(
        self, whole: np.ndarray, pieces: Sequence[np.ndarray | None], moved: float | None = None
    ) -> tuple[Layout, Verdict] | None:
        """Return the layout and the verdict of one output; None if the ranks' shapes fit no layout."""
        layout = self.layout_of(whole, pieces)
        if layout is None:
            return None
        return layout, judge(pieces, whole, layout, self.mesh, self.rounding.measured(moved), what="output")

    def addend_of(
        self, whole: np.ndarray, pieces: Sequence[np.ndarray | None], addends: Mapping[str, np.ndarray]
    ) -> Addend | None:
        """Return the addend that explains everything that is wrong with an output, or None."""
        found, known = self.judge_output(whole, pieces), [piece for piece in pieces if piece is not None]
        if found is None or len(known) < len(pieces):
            return None
        named = {"its bias" if name == "bias" else name: values for name, values in addends.items()}
        return addend_of(named, known, whole, *found, self.mesh)

    def _row(
        self, kind: str, name: str, told: Sequence[Answer], want: Answer, layout: Layout | None = None,
        among: float = 0.0,
    ) -> Row:  # fmt: skip
        whole, pieces = want[kind].get(name), _pieces(told, kind, name)
        rounding, kind = self.rounding_of(kind, name, want, among), "gradient" if kind == "input" else kind
        if layout is None:
            layout = (None if whole is None else self.layout_of(whole, pieces)) or Layout()
        verdict = judge(pieces, whole, layout, self.mesh, rounding, what=kind)
        if kind == "loss" and self.split and verdict.mistake in ("partial", "mean", "disagree"):
            self.mean_over = set(verdict.axes) if verdict.mistake == "mean" else set()
            words = "each rank's part of it, as it has its part of the inputs"
            if verdict.mistake == "disagree":
                words += "; neither their sum nor their mean is the reference's"
            verdict = verdict._replace(ok=True, words=words, mistake="")
        here = self.in_specs[name].axis_names if kind == "gradient" and name in self.in_specs else ()
        if verdict.mistake == "scaled" and verdict.axes and set(verdict.axes) <= self.mean_over.intersection(here):
            words = (
                f"{verdict.words.partition(' (')[0]}, as each rank's loss is the mean over its own part of the input"
            )
            verdict = verdict._replace(ok=True, words=words, mistake="", axes=())
        shape = next((x.shape for x in (whole, *pieces) if x is not None), ())
        return Row.of(kind, name, shape, layout, verdict)

    def layout_of(
        self, whole: np.ndarray, pieces: Sequence[np.ndarray | None], likely: Collection[str] = ()
    ) -> Layout | None:
        """Return the layout of a tensor on the ranks, or None if a rank lacks it or none fits. likely: see
        `observed`"""
        known = [piece for piece in pieces if piece is not None]
        if len(known) < len(pieces):
            return None
        found = observed(known, whole, self.mesh, 100 * self.rounding.tolerance * largest(whole), likely=likely)
        return None if found.kind == "shape" else found.layout


def _moved(want: Answer, again: Answer, kind: str, name: str) -> float:
    """Return how far another answer of the reference is from the first."""
    one, other = want[kind].get(name), again.get(kind, {}).get(name)
    if one is None or other is None or np.shape(one) != np.shape(other):
        return np.inf
    return gap(one, other)


def _largest_gradient(want: Answer) -> float:
    return max((largest(g) for g in want["gradient"].values() if g is not None), default=0.0)


def _pieces(told: Sequence[Answer], kind: str, name: str) -> list[np.ndarray | None]:
    return [rank[kind].get(name) for rank in told]


def nudged(values: np.ndarray, epsilon: float, seed: int | np.random.Generator) -> np.ndarray:
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
    if values.size < 2 or not is_constant(values):
        return None
    return 0.1 * np.random.default_rng(crc32(name.encode())).standard_normal(values.shape)


# --- a bias or a residual that is added to a sum: without it, the rest may be a multiple, or parts --------------------


class Addend(NamedTuple):
    """An addend that explains everything that is wrong with an output.

    verdict   what is observed once the addend is set aside
    values    the addend, [*, D] or of the output's shape
    share     how often each rank adds it to its own part, if ranks hold parts
    count     how often it is added, if nothing else is wrong
    """

    verdict: Verdict
    name: str
    values: np.ndarray
    share: int | None = None
    count: float | None = None


def addend_of(
    addends: Mapping[str, np.ndarray], pieces: Sequence[np.ndarray], whole: np.ndarray, layout: Layout,
    verdict: Verdict, mesh: Mesh,
) -> Addend | None:  # fmt: skip
    """Return the one addend, or a residual and a bias together, that explains everything that is wrong with an output.

    addends   by name in the verdict: biases [D], and tensors of the output's shape, such as inputs
    pieces    of the output, one per rank; `whole` is the reference's
    """
    whole, got = np.asarray(whole, np.float64), [np.asarray(piece, np.float64) for piece in pieces]
    want = [take(whole, layout, mesh, rank) for rank in mesh.ranks]
    if verdict.ok or verdict.mistake == "not finite" or any(g.shape != w.shape for g, w in zip(got, want)):
        return None
    slack = min(10 * verdict.tolerance, verdict.error / 4) * largest(whole)  # well below the error to explain
    for name, values in _with_sums(addends, whole):
        added = [take(np.broadcast_to(values, whole.shape), layout, mesh, rank) for rank in mesh.ranks]
        apart, rest = (
            observed([g - share * a for g, a in zip(got, added)], whole - values, mesh, slack, layout)
            for share in (1, 0)
        )
        for share, found in (1, apart), (0, rest):
            if found.is_partial and found.factor == 1:
                own = f"adds {name} to its own part" if share else f"has only its own part, without {name}"
                words = f"each rank {own}: apart from that, over {label(found.axes)} the parts add up to the reference"
                return Addend(verdict._replace(words=words, mistake="partial", axes=found.axes), name, values, share)
        excess = [g - w for g, w in zip(got, want)]
        square = sum(float((a * a).sum()) for a in added)
        more = sum(float((e * a).sum()) for e, a in zip(excess, added)) / max(square, 1e-300)
        if all(largest(e - more * a) <= slack for e, a in zip(excess, added)):
            times_added = "not added" if abs(more + 1) < 1e-3 else f"added {more + 1:.5g} times"
            words = f"{name} {'are' if ' and ' in name else 'is'} {times_added}"
            return Addend(verdict._replace(words=words, mistake="bias", axes=()), name, values, count=more + 1)
        is_count = apart.kind == "scaled" and apart.factor and as_many(apart.factor, mesh)
        if is_count and verdict.mistake not in ("scaled", "partial", "mean"):
            words = f"apart from {name}, it is {times(apart.factor)}{as_many(apart.factor, mesh)}"
            return Addend(verdict._replace(words=words, mistake="scaled", axes=()), name, values)
    return None


def _with_sums(addends: Mapping[str, np.ndarray], whole: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each nonzero addend whose shape fits, then each residual together with each bias."""
    fits = {
        name: np.asarray(x, np.float64)
        for name, x in addends.items()
        if x.shape in (whole.shape, whole.shape[-1:]) and np.any(x)
    }
    yield from fits.items()
    for name, x in fits.items():
        for other, bias in fits.items():
            if x.shape == whole.shape and bias.shape != whole.shape:
                yield f"{name} and {other}", x + bias
