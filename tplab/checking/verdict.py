"""A verdict: says what is wrong with a tensor, given what the ranks hold and the unsharded answer.

Most mistakes in tensor parallelism leave a mark in the numbers: a sum made once too often multiplies by the number of
ranks; a missing sum leaves each rank with its part, and the parts add up to the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from tplab.layout import Layout, layouts_for, take
from tplab.mesh import Mesh
from tplab.units import ranks_text

_SMALL = 0.02
"""Relative to the largest element: one part of a sum more or less would not leave so small an error."""

NEITHER = "neither a multiple of the reference nor parts of it"
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class Verdict(NamedTuple):
    """What was found for one tensor.

    ok          whether it equals the answer, up to rounding
    error       how far off the worst rank is, relative to the largest element of the answer
    tolerance   how much error rounding can explain, also relative to it
    words       what was found, in words
    mistake     a keyword for it: "", "scaled", "partial", "mean", "disagree", "missing", "shape", "not finite", "tied",
                "values", "pieces", "fused", "bias", "scale", "softmax", "gather", "other"
    axes        the axes over which a sum is missing, or made once too often
    """

    ok: bool
    error: float
    tolerance: float
    words: str
    mistake: str = ""
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rounding:
    """How far a sum may be off because its terms were added in another order.

    dtype   "float64", "float32", "bfloat16", "float16": one rounding is eps of it, 2.2e-16, 1.2e-7, 7.8e-3 or 9.8e-4
    terms   of the longest sum: features, vocabulary entries or tokens. Rounding errors are practically random: n of
            them give sqrt(n) eps. Kernels add up 16-bit products in float32 and round once, so for 16 bits it is 1
    depth   how many such sums follow one another

    The limit is 8 eps sqrt(terms depth), relative to the largest element: a larger error needs another explanation.
    Sums whose terms cancel lose more. So if `own` is known, the reference's own rounding error, 4 times that is
    accepted too.
    """

    dtype: str
    terms: int = 1
    depth: int = 1

    @classmethod
    def of(
        cls, parameters: Iterable[tuple[str, Sequence[int]]], inputs: Iterable[tuple[Sequence[int], bool]]
    ) -> Rounding:
        """From dtypes and sizes: the longest sum is over features, vocabulary entries or tokens.

        parameters   the dtype and the shape of each
        inputs       the shape of each, and whether its last dim is features (floating point) and not tokens
        """
        parameters = list(parameters)
        tokens = [math.prod(shape[:-1] if has_features else shape) for shape, has_features in inputs if len(shape)]
        dtypes = [dtype for dtype, _ in parameters if dtype in EPSILON]
        terms = max([size for _, shape in parameters for size in shape] + tokens, default=1)
        depth = max(1, sum(len(shape) > 1 for _, shape in parameters))
        return cls(max(dtypes, key=list(EPSILON).index, default="float32"), terms, depth)

    @property
    def tolerance(self) -> float:
        terms = 1 if self.dtype in ("bfloat16", "float16") else self.terms
        return 8 * EPSILON.get(self.dtype, EPSILON["float32"]) * (terms * self.depth) ** 0.5

    def within(self, own: float | None) -> float:
        return max(self.tolerance, 4 * own) if own is not None else self.tolerance

    def words(self, error: float, own: float | None = None) -> str:
        about = f"{self.dtype}, sums of up to {self.terms:,} terms"
        if own is not None and error > self.tolerance:
            about += f"; rounding takes the reference itself {own:.2g} off"
        return "equal to the last bit" if error == 0 else f"within rounding ({error:.2g}; {about})"


NOISE = 0.02
"""A gradient that is nothing but rounding has other numbers in another dtype, though by chance they may differ by less
than their size. One that is not is known better than this, however small it is."""


def judge(
    pieces: Sequence[np.ndarray | None],
    reference: np.ndarray | None,
    layout: Layout,
    mesh: Mesh,
    rounding: Rounding,
    *,
    what: str = "gradient",
    largest: float = 0.0,
    own: float | None = None,
) -> Verdict:
    """Compare what each rank has with its piece of the unsharded answer.

    pieces      one per rank of the mesh; None for a rank that has none
    reference   the whole tensor; None if there is none
    layout      how it is laid out on the mesh. A piece may be padded: elements beyond the layout's must be zeros
    what        "gradient", "output", "loss", "parameter"
    largest     the largest element among all tensors of this kind: anything below its rounding error counts as zero
    own         the reference's own rounding error, relative to its largest element
    """
    if reference is None or any(piece is None for piece in pieces):
        return _judge_none(pieces, reference, what)
    got = [np.asarray(piece, np.float64) for piece in pieces]
    reference = np.asarray(reference, np.float64)
    want = [take(reference, layout, mesh, rank) for rank in mesh.ranks]
    got = [_without_padding(piece, w.shape) for piece, w in zip(got, want)]
    for rank, (g, w) in enumerate(zip(got, want)):
        if g.shape != w.shape:
            return Verdict(
                False,
                np.inf,
                rounding.tolerance,
                f"rank {rank} holds {list(g.shape)}; {layout} of {list(reference.shape)} would be {list(w.shape)}",
                "shape",
            )
    if not all(np.isfinite(g).all() for g in got):
        ranks = [rank for rank, g in enumerate(got) if not np.isfinite(g).all()]
        if np.isfinite(reference).all():
            words = f"not finite on {ranks_text(ranks)}, but finite in the reference"
            return Verdict(False, np.inf, 0, words, "not finite")
        return Verdict(False, np.inf, 0, f"not finite in the reference, nor on {ranks_text(ranks)}", "not finite")

    size = _largest(reference)
    is_noise = own is None or own > NOISE
    if size <= rounding.tolerance * largest and is_noise:  # such as the gradient of key's bias, which softmax ignores
        error = max(map(_largest, got)) / (largest or 1.0)
        is_zero = error <= (rounding.tolerance if largest else 0.0)
        words = "zero, as in the reference" if error == 0 else "zero up to rounding, as in the reference"
        words = words if is_zero else "not zero, but zero in the reference"
        return Verdict(is_zero, error, rounding.tolerance, words)
    tolerance = rounding.within(own)
    error = max(_largest(g - w) for g, w in zip(got, want)) / size
    if error <= tolerance:
        return Verdict(True, error, tolerance, rounding.words(error, own))
    case = _Case(got, want, reference, layout, mesh, tolerance, what)
    mistake, words, axes = case.explained()
    return Verdict(False, error, tolerance, words, mistake, axes)


def slack_of_step(
    before: np.ndarray, after: np.ndarray, gradient: np.ndarray | None, rounding: Rounding, largest: float
) -> np.ndarray:
    """How much rounding of the gradients may change each parameter in a step from `before` to `after`.

    Adam divides a gradient by its own size, so rounding is a large part of a small element's step, and all of it if the
    gradient is only rounding error.
    """
    if gradient is None:
        return np.zeros_like(after)
    share = rounding.tolerance * largest / np.maximum(np.abs(gradient.astype(np.float64)), 1e-300)
    return 2 * np.abs(after - before).max(initial=0) * np.minimum(1, share)


Answer = tuple[str, str, tuple[str, ...]]
"""A mistake, the words for it, and the axes over which a sum is missing or made too often."""


class _Case:
    """A tensor that is wrong, and the questions that its numbers can answer."""

    def __init__(
        self,
        got: list[np.ndarray],
        want: list[np.ndarray],
        reference: np.ndarray,
        layout: Layout,
        mesh: Mesh,
        tolerance: float,
        what: str,
    ):
        self.got, self.want, self.reference = got, want, reference
        self.layout, self.mesh, self.tolerance, self.what = layout, mesh, tolerance, what
        self.size = _largest(reference)

    def explained(self) -> Answer:
        for question in (self._zero, self._scaled, self._partial, self._pieces, self._disagree, self._rows):
            if answer := question():
                return answer
        error = max(_largest(g - w) for g, w in zip(self.got, self.want)) / max(self.size, 1e-300)
        if error < _SMALL and self._are_copies():
            words = (
                f"off by {error:.2g} of its largest element, the same on every rank: no sum is missing or made too "
                "often; a function (such as GELU's tanh approximation), a constant (such as eps) or a dtype differs"
            )
            return "other", words, ()
        return "other", f"off by {error:.2g} of its largest element; {NEITHER}", ()

    def _close(self, got: np.ndarray, want: np.ndarray, slack: float = 1.0) -> bool:
        return got.shape == want.shape and _largest(got - want) <= slack * self.tolerance * self.size

    def _are_copies(self) -> bool:
        """Whether all ranks that should hold the same hold the same: then none of them has only its part of a sum."""
        return self._gap() <= self.tolerance * self.size

    def _gap(self) -> float:
        spare = tuple(name for name in self.mesh.axis_names if name not in self.layout.spec.axis_names)
        groups = self.mesh.groups(spare) if spare else []
        return max(
            (_largest(self.got[a] - self.got[b]) for group in groups for a, b in combinations(group, 2)), default=0.0
        )

    def _zero(self) -> Answer | None:
        ranks = [r for r in self.mesh.ranks if _largest(self.got[r]) == 0 and _largest(self.want[r]) > 0]
        if len(ranks) == len([w for w in self.want if w.size]):
            return "missing", "zero on every rank, but not in the reference", ()
        return None

    def _scaled(self) -> Answer | None:
        scales = []
        for g, w in zip(self.got, self.want):
            if _largest(w) <= self.tolerance * self.size:
                continue  # no element of the answer here is informative
            scale = float((g * w).sum() / (w * w).sum())
            if not self._close(g, scale * w, slack=max(abs(scale), 1.0)) or _largest(g) == 0:
                return None
            scales.append(scale)
        if not scales or all(abs(scale - 1) <= 4 * self.tolerance for scale in scales):
            return None  # a factor of 1 is no difference
        first = scales[0]
        if all(abs(scale - first) <= 4 * self.tolerance * max(abs(first), 1) for scale in scales):
            return self._multiple(first)
        if self.reference.size == 1:
            return None  # a single number is a multiple of any other
        listed = ", ".join(f"{scale:.5g}" for scale in scales)
        return "scaled", f"a different multiple of the reference on each rank: {listed}", ()

    def _multiple(self, scale: float) -> Answer:
        close = 1e-3 + 4 * self.tolerance
        for names in axis_sets(self.mesh):
            count, label = self.mesh.axis_size(names), _label(names)
            if abs(scale / count - 1) < close:
                words = (
                    f"{scale:.5g} times the reference on every rank: the sum over the {count} ranks of {label} is made "
                    "once too often"
                )
                return "scaled", words, names
            if abs(scale * count - 1) < close:
                words = (
                    f"1/{count} of the reference on every rank: divided by the {count} ranks of {label} once too often "
                    "(a mean instead of a sum, or a division by the number of all ranks)"
                )
                return "scaled", words, ()
        if abs(scale + 1) < close:
            return "scaled", "minus the reference on every rank", ()
        factor = f"{scale:.5g}" if f"{scale:.5g}" != "1" else f"{scale:.10g}"
        return "scaled", f"{factor} times the reference on every rank", ()

    def _partial(self) -> Answer | None:
        for names in axis_sets(self.mesh, without=self.layout.spec.axis_names):
            groups = self.mesh.groups(names)
            total = {rank: np.sum([self.got[other] for other in group], axis=0) for group in groups for rank in group}
            label, count = _label(names), self.mesh.axis_size(names)
            if all(self._close(total[rank], self.want[rank], slack=count) for rank in self.mesh.ranks):
                words = (
                    "each rank has only its own part, and the parts add up to the reference: an all_reduce over "
                    f"{label}"
                )
                return "partial", f"{words} is missing", names
            if all(self._close(total[rank], count * self.want[rank], slack=count) for rank in self.mesh.ranks):
                words = f"ranks disagree, and their mean is the reference: an all_reduce with op='mean' over {label}"
                return "mean", f"{words} is missing", names
            if not self._are_copies() and (scale := self._scale_of_sum(total, count)):
                words = (
                    f"each rank has only its own part, and together they are {scale:.5g} times too large: the sum over "
                    f"{label}"
                )
                return "partial", f"{words} is made in the wrong place", ()
        return None

    def _scale_of_sum(self, total: dict[int, np.ndarray], count: int) -> float | None:
        """The factor between the parts' sum and the answer, if it is the same on every rank."""
        pairs = [
            (total[r], self.want[r]) for r in self.mesh.ranks if _largest(self.want[r]) > self.tolerance * self.size
        ]
        scales = [float((t * w).sum() / (w * w).sum()) for t, w in pairs]
        is_one = max(scales) - min(scales) <= 4 * count * self.tolerance and abs(scales[0]) > 1e-6
        fits = is_one and all(self._close(t, scales[0] * w, slack=count * max(abs(scales[0]), 1)) for t, w in pairs)
        return scales[0] if fits else None

    def _pieces(self) -> Answer | None:
        """Every rank has a piece of the answer, but another rank's; or the pieces are cut differently."""
        if not self.layout.spec.axis_names:
            return None
        places = []
        for g in self.got:
            found = next((rank for rank in self.mesh.ranks if self._close(g, self.want[rank])), None)
            places.append(found)
        if all(place is not None for place in places):
            listed = ", ".join(
                f"rank {rank} has that of rank {place}" for rank, place in enumerate(places) if rank != place
            )
            return "pieces", f"the right pieces on the wrong ranks: {listed}", ()
        for layout in layouts_for(self.reference.shape, [g.shape for g in self.got], self.mesh):
            cut = [take(self.reference, layout, self.mesh, rank) for rank in self.mesh.ranks]
            if layout != self.layout and all(self._close(g, w) for g, w in zip(self.got, cut)):
                return "fused", f"cut as {layout}, but the layout given is {self.layout}", ()
        return None

    def _disagree(self) -> Answer | None:
        gap = self._gap()
        spare = [name for name in self.mesh.axis_names if name not in self.layout.spec.axis_names]
        if gap <= self.tolerance * self.size:
            return None
        right = [rank for rank in self.mesh.ranks if self._close(self.got[rank], self.want[rank])]
        some = f"; only {ranks_text(right)} {'are' if len(right) > 1 else 'is'} right" if right else ""
        words = f"ranks should hold copies, but they differ by {gap / self.size:.2g} of the largest element along"
        return "disagree", f"{words} {_label(tuple(spare))}{some}", ()

    def _rows(self) -> Answer | None:
        """Some rows or columns are right: one part of a fused weight, or one piece of a bias."""
        for dim in range(self.reference.ndim):
            wrong = [np.abs(g - w).max(axis=_others(g.ndim, dim)) > self.tolerance * self.size
                     for g, w in zip(self.got, self.want) if g.size]  # fmt: skip
            count, of = sum(int(rows.sum()) for rows in wrong), sum(len(rows) for rows in wrong)
            if 0 < count <= of // 2:
                first = next(rows for rows in wrong if rows.any())
                where = np.flatnonzero(first)
                words = (
                    f"wrong in {count} of {of} places along dim {dim} (the first at {where[0]}), right in the others"
                )
                return "other", words, ()
        return None


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
    return Verdict(False, np.inf, 0.0, f"no {what} on {where}: it takes no part in the loss there", "missing")


def _without_padding(piece: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The piece without the trailing zeros that make the last ranks' pieces as large as the others'."""
    if piece.ndim != len(shape) or any(size < wanted for size, wanted in zip(piece.shape, shape)):
        return piece
    cut = piece[tuple(slice(0, size) for size in shape)]
    return piece if np.count_nonzero(piece) != np.count_nonzero(cut) else cut


def axis_sets(mesh: Mesh, without: Sequence[str] = ()) -> Iterator[tuple[str, ...]]:
    """The mesh's axes with more than one rank: each alone, and all combinations."""
    names = [name for name in mesh.axis_names if mesh.axis_size(name) > 1 and name not in without]
    for count in range(1, len(names) + 1):
        yield from combinations(names, count)


def _label(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))


def _others(ndim: int, dim: int) -> tuple[int, ...]:
    return tuple(other for other in range(ndim) if other != dim)


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0))
