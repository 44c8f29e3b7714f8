"""A verdict: in words, what is observed of a tensor, given the ranks' pieces and the unsharded answer.

Most mistakes in tensor parallelism leave a mark in the numbers: a sum made once too often multiplies by the number of
ranks; a missing sum leaves each rank with its part, and the parts add up to the answer. The cause is a separate
question: see `tplab.checking.proofs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tplab.checking.gaps import largest
from tplab.checking.observed import Observed, axis_sets, fitted, observed
from tplab.layout import Layout, take
from tplab.mesh import Mesh
from tplab.units import ranks_text

NEITHER = "neither a multiple of the reference nor terms that add up to it"
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

TIMES = 4
"""A tensor may be off by this many times the reference's own rounding, because ranks add up in several other orders."""

NOISE = 0.25
"""A tensor that rounding moves by more than this, relative to its largest element, may consist of rounding alone. It is
then compared with the largest tensor of its kind."""


def coarsest(dtypes: Iterable[str]) -> str:
    """Return the dtype with the largest rounding error."""
    return max({*dtypes} & EPSILON.keys(), key=list(EPSILON).index, default="float32")


class Verdict(NamedTuple):
    """The result for one tensor.

    ok          whether it equals the answer, up to rounding
    error       how far off the worst rank is, relative to the largest element of the answer
    tolerance   how much error rounding can explain, also relative to it
    words       what was found, in words
    mistake     a keyword for it: "", "scaled", "partial", "mean", "disagree", "missing", "shape", "not finite", "tied",
                "values", "pieces", "fused", "bias", "scale", "softmax", "gather", "other"
    axes        the axes over which a sum is missing, or made once too often
    moved       how far rounding moves the reference itself, also relative to it; None if that was not measured
    """

    ok: bool
    error: float
    tolerance: float
    words: str
    mistake: str = ""
    axes: tuple[str, ...] = ()
    moved: float | None = None


@dataclass(frozen=True)
class Rounding:
    """How far rounding may take a tensor from the reference.

    It is measured: the reference runs again with every parameter and input changed by one unit in the last place, and
    with its sums in another order. `TIMES` as much is accepted, and 4 units in the last place in any case. If it was
    not measured, it is estimated from the sizes.

    dtype   "float64", "float32", "bfloat16", "float16": one rounding is eps of it, 2.2e-16, 1.2e-7, 7.8e-3 or 9.8e-4
    terms   of the longest sum: features, vocabulary entries or tokens. Rounding errors are practically random: n of
            them give sqrt(n) eps. Kernels add up 16-bit products in float32 and round once, so for 16 bits it is 1
    depth   how many such sums follow one another. From sizes, the limit is 8 eps sqrt(terms depth)
    moved   how far the reference moved; None if that was not measured
    among   the largest element among all tensors of this kind, with which a tensor of rounding alone is compared
    """

    dtype: str
    terms: int = 1
    depth: int = 1
    moved: float | None = None
    among: float = 0.0

    @classmethod
    def of(
        cls, parameters: Iterable[tuple[str, Sequence[int]]], inputs: Iterable[tuple[Sequence[int], bool]]
    ) -> Rounding:
        """Return the estimate from dtypes and sizes: the longest sum is over features, vocabulary entries or tokens.

        parameters   the dtype and the shape of each
        inputs       the shape of each, and whether its last dim is features (floating point) and not tokens
        """
        parameters = list(parameters)
        tokens = [math.prod(shape[:-1] if has_features else shape) for shape, has_features in inputs if len(shape)]
        terms = max([size for _, shape in parameters for size in shape] + tokens, default=1)
        depth = max(1, sum(len(shape) > 1 for _, shape in parameters))
        return cls(coarsest(dtype for dtype, _ in parameters), terms, depth)

    def measured(self, moved: float | None, among: float = 0.0) -> Rounding:
        return replace(self, moved=moved, among=among)

    @property
    def epsilon(self) -> float:
        return EPSILON.get(self.dtype, EPSILON["float32"])

    @property
    def tolerance(self) -> float:
        """The error that the sizes predict, relative to the largest element."""
        terms = 1 if self.dtype in ("bfloat16", "float16") else self.terms
        return 8 * self.epsilon * (terms * self.depth) ** 0.5

    def slack(self, size: float) -> float:
        """Return how far any element may be off in a tensor whose largest element is `size`."""
        own = self.tolerance * size if self.moved is None else max(TIMES * self.moved, 4 * self.epsilon * size)
        return max(own, 8 * self.epsilon * self.among) if self.is_noise(size) else own

    def is_noise(self, size: float) -> bool:
        """Return whether such a tensor may consist of rounding alone."""
        return size <= 8 * self.epsilon * self.among and (self.moved is None or self.moved >= NOISE * size)

    def words(self, error: float, moved: float | None) -> str:
        """Return the words for an error that is rounding."""
        if error == 0:
            return "equal to the last bit"
        if not moved:
            return f"within rounding ({error:.2g}; {self.dtype}, sums of up to {self.terms:,} terms)"
        return f"within rounding ({error:.2g}; {self.dtype}: one in the last place moves the reference by {moved:.2g})"


def judge(
    pieces: Sequence[np.ndarray | None], reference: np.ndarray | None, layout: Layout | None, mesh: Mesh,
    rounding: Rounding, *, what: str = "gradient",
) -> Verdict:  # fmt: skip
    """Compare what each rank has with its piece of the unsharded answer.

    pieces      one per rank of the mesh; None for a rank that has none
    reference   the whole tensor; None if there is none
    layout      how it is laid out on the mesh; None for any layout. A piece may be padded: elements beyond the layout's
                must be zeros
    what        "gradient", "output", "loss", "parameter"
    """
    known = [piece for piece in pieces if piece is not None]
    if reference is None or len(known) < len(pieces):
        return _judge_none(pieces, reference, what)
    size = largest(np.asarray(reference, np.float64))
    slack = rounding.slack(size)
    found = observed(known, reference, mesh, slack, layout)
    moved = None if rounding.moved is None else rounding.moved / (size or 1.0)
    if found.kind == "not finite":
        where = f"on {ranks_text(list(found.ranks))}" if found.ranks else "in the reference"
        words = f"not finite {where}, but finite in the reference"
        if not np.isfinite(reference).all():
            words = "not finite in the reference" + f", nor {where}" * bool(found.ranks)
        return Verdict(False, np.inf, 0.0, words, "not finite")
    if found.kind == "shape":
        return Verdict(False, np.inf, rounding.tolerance, _shape_words(known, reference, found.layout, mesh), "shape")
    if rounding.is_noise(size):  # such as the gradient of the key's bias, which softmax ignores
        error = max(largest(np.asarray(piece, np.float64)) for piece in known) / (rounding.among or 1.0)
        is_zero = error * (rounding.among or 1.0) <= slack
        words = "zero, as in the reference" if error == 0 else "zero up to rounding, as in the reference"
        words = words if is_zero else "not zero, but zero in the reference"
        return Verdict(is_zero, error, slack / (rounding.among or 1.0), words, moved=moved)
    error, tolerance = found.gap / size, slack / size
    if found.is_right:
        return Verdict(True, error, tolerance, rounding.words(error, moved), moved=moved)
    mistake, words, axes = explained(found, known, reference, mesh, slack, layout)
    return Verdict(False, error, tolerance, words, mistake, axes, moved)


def explained(
    found: Observed, pieces: Sequence[np.ndarray], reference: np.ndarray, mesh: Mesh, slack: float,
    layout: Layout | None = None,
) -> tuple[str, str, tuple[str, ...]]:  # fmt: skip
    """Return the mistake, the words for it, and the axes of an observation that is not right."""
    over, factor = label(found.axes), found.factor
    if found.kind == "scaled" and factor == 0:
        return "missing", "zero on every rank, but not in the reference", ()
    if found.kind == "scaled":
        counts = [names for names in axis_sets(mesh) if abs(factor / mesh.axis_size(names) - 1) < 1e-3]
        return "scaled", f"{times(factor)} on every rank{as_many(factor, mesh)}", next(iter(counts), ())
    if found.kind == "multiples":
        listed = ", ".join(f"{one:.5g}" for one in found.factors)
        return "scaled", f"a different multiple of the reference on each rank: {listed}", ()
    if found.kind == "parts" and factor == 1:
        return (
            "partial",
            f"each rank has only its own part, and over {over} the parts add up to the reference",
            found.axes,
        )
    if found.kind == "parts" and factor == mesh.axis_size(found.axes):
        return "mean", f"ranks disagree, and their mean over {over} is the reference", found.axes
    if found.kind == "parts":  # which sum that is, is not known
        return "partial", f"each rank has only its own part, and over {over} the parts add up to {times(factor)}", ()
    if found.kind == "pieces" and found.ranks:
        pairs = enumerate(found.ranks)
        listed = ", ".join(f"rank {rank} has that of rank {place}" for rank, place in pairs if rank != place)
        return "pieces", f"the right pieces on the wrong ranks: {listed}", ()
    if found.kind == "pieces":
        return "fused", f"cut as {found.layout}, but the layout given is {layout}", ()
    size = largest(np.asarray(reference, np.float64))
    if found.kind == "apart":
        free = {rank: np.asarray(piece, np.float64) for rank, piece in enumerate(pieces)}
        gap = max(largest(free[group[0]] - free[other]) for group in mesh.groups(found.axes) for other in group[1:])
        right = f"; only {ranks_text(list(found.ranks))} {'are' if len(found.ranks) > 1 else 'is'} right"
        words = f"ranks should hold copies, but they differ by {gap / size:.2g} of the largest element along {over}"
        return "disagree", words + right * bool(found.ranks), ()
    return "other", _rows(pieces, reference, found.layout, mesh, slack) or _off(found, size, mesh), ()


def times(factor: float) -> str:
    """Return the factor as words: 2 times the reference, or 1/2 of the reference."""
    if abs(factor + 1) < 1e-3:
        return "minus the reference"
    if 0 < factor < 0.9 and abs(1 / factor - round(1 / factor)) < 1e-3:
        return f"1/{round(1 / factor)} of the reference"
    text = f"{factor:.5g}" if f"{factor:.5g}" != "1" else f"{factor:.10g}"
    return f"{text} times the reference"


def as_many(factor: float, mesh: Mesh) -> str:
    """Return the axes whose number of ranks a factor is: (there are 3 ranks of 'tp')"""
    sets = [
        names
        for names in axis_sets(mesh)
        if any(abs(f / mesh.axis_size(names) - 1) < 1e-3 for f in (factor, 1 / factor))
    ]
    return f" (there are {mesh.axis_size(sets[0])} ranks of {' or of '.join(map(label, sets))})" if sets else ""


def _off(found: Observed, size: float, mesh: Mesh) -> str:
    is_copied = any(mesh.axis_size(name) > 1 for name in mesh.axis_names if name not in found.layout.spec.axis_names)
    same = ", the same on every rank" if is_copied else ""
    return f"off by {found.gap / size:.2g} of its largest element{same}; {NEITHER}"


def _rows(pieces: Sequence[np.ndarray], reference: np.ndarray, layout: Layout, mesh: Mesh, slack: float) -> str:
    """Return words if some rows or columns are right: one part of a fused weight, or one piece of a bias."""
    want = [take(np.asarray(reference, np.float64), layout, mesh, rank) for rank in mesh.ranks]
    gaps = [np.abs(fitted(np.asarray(g, np.float64), w.shape) - w) for g, w in zip(pieces, want) if w.size]
    for dim in range(np.ndim(reference)):
        others = tuple(other for other in range(np.ndim(reference)) if other != dim)
        wrong = [gap.max(axis=others) > slack for gap in gaps]
        count, of = sum(int(rows.sum()) for rows in wrong), sum(len(rows) for rows in wrong)
        if 0 < count <= of // 2:
            where = next(np.flatnonzero(rows)[0] for rows in wrong if rows.any())
            return f"wrong in {count} of {of} places along dim {dim} (the first at {where}), right in the others"
    return ""


def slack_of_step(before: np.ndarray, after: np.ndarray, gradient: np.ndarray | None, slack: float) -> np.ndarray:
    """Return how much gradient rounding of up to `slack` may change each parameter in a step from `before` to `after`.

    Adam divides a gradient by its own size, so rounding is a large part of a small element's step, and all of it if the
    gradient is only rounding error.
    """
    if gradient is None:
        return np.zeros_like(after)
    share = slack / np.maximum(np.abs(gradient.astype(np.float64)), 1e-300)
    return 2 * np.abs(after - before).max(initial=0) * np.minimum(1, share)


def label(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))


def _shape_words(pieces: Sequence[np.ndarray], reference: np.ndarray, layout: Layout, mesh: Mesh) -> str:
    for rank, piece in enumerate(pieces):
        want = take(reference, layout, mesh, rank).shape
        if fitted(piece, want).shape != want:
            return f"rank {rank} holds {list(piece.shape)}; {layout} of {list(reference.shape)} would be {list(want)}"
    raise ValueError("all pieces have the shapes of their layout")


def _judge_none(pieces: Sequence[np.ndarray | None], reference: np.ndarray | None, what: str) -> Verdict:
    without = [rank for rank, piece in enumerate(pieces) if piece is None]
    if reference is None:
        if len(without) == len(pieces):
            return Verdict(True, 0.0, 0.0, f"no {what}, as in the reference")
        if all(piece is None or not np.any(piece) for piece in pieces):
            return Verdict(True, 0.0, 0.0, "zero, and none in the reference")
        return Verdict(False, np.inf, 0.0, f"the reference has no {what} here, because it is not used there", "missing")
    if not np.any(reference):
        return Verdict(True, 0.0, 0.0, f"no {what}, and zero in the reference")
    where = "every rank" if len(without) == len(pieces) else ranks_text(without)
    why = "the loss does not depend on it there, or autograd does not see that it does"
    return Verdict(False, np.inf, 0.0, f"no {what} on {where}: {why}", "missing")
