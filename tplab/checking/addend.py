"""An addend: a bias or a residual that is added to a sum. Without it, the rest of an output may be a multiple of the
reference's or parts of it; or the addend itself is added several times, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tplab.checking.gaps import largest
from tplab.checking.observed import observed
from tplab.checking.verdict import Verdict, as_many, label, times
from tplab.layout import Layout, take
from tplab.mesh import Mesh


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
