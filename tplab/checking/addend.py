"""An addend: what is added to a sum, such as a bias or a residual. It is added more than once, or not at all, or to a
sum that is wrong: that may explain an output's error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tplab.checking.verdict import Verdict, axis_sets
from tplab.layout import Layout, take
from tplab.mesh import Mesh


def of_addends(
    addends: Mapping[str, np.ndarray],
    pieces: Sequence[np.ndarray],
    whole: np.ndarray,
    layout: Layout,
    verdict: Verdict,
    mesh: Mesh,
) -> Verdict:
    """A new verdict if one addend explains everything that is wrong with an output, or a residual and a bias together;
    otherwise the verdict unchanged.

    addends   by name in the verdict: biases [D], and tensors of the output's shape, such as inputs
    pieces    of the output, one per rank; `whole` is the reference's
    """
    if verdict.ok:
        return verdict
    for name, values in _with_sums(addends, whole):
        found = _of_addend(values, pieces, whole, layout, verdict, mesh, name)
        if found is not verdict:
            return found
    return verdict


def _with_sums(addends: Mapping[str, np.ndarray], whole: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Each addend that fits and is not zero, then each residual together with each bias."""
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


def _of_addend(
    values: np.ndarray,
    pieces: Sequence[np.ndarray],
    whole: np.ndarray,
    layout: Layout,
    verdict: Verdict,
    mesh: Mesh,
    name: str,
) -> Verdict:
    everywhere = np.broadcast_to(values, whole.shape)
    added = [take(everywhere, layout, mesh, rank) for rank in mesh.ranks]
    want = [take(whole, layout, mesh, rank) for rank in mesh.ranks]
    got = [np.asarray(piece, np.float64) for piece in pieces]
    if any(g.shape != w.shape for g, w in zip(got, want)):
        return verdict
    size = float(np.abs(whole).max(initial=0))
    slack = min(10 * verdict.tolerance, verdict.error / 4) * size  # less than what is to be explained
    for names in axis_sets(mesh, without=layout.spec.axis_names):
        if _agree(got, mesh, names, slack):
            continue
        label = " and ".join(map(repr, names))
        groups = [mesh.group(rank, names) for rank in mesh.ranks]
        for share, words in (
            (1, f"each rank adds {name} to its own part: an all_reduce over {label} is missing before that"),
            (0, f"each rank has only its own part, without {name}: an all_reduce over {label} is missing"),
        ):
            sums = [sum(got[other] - share * added[other] for other in group) for group in groups]
            if all(_largest(total + a - w) <= slack for total, a, w in zip(sums, added, want)):
                return verdict._replace(words=words, mistake="partial", axes=())
    excess = [g - w for g, w in zip(got, want)]
    times = [float((e * a).sum() / max((a**2).sum(), 1e-300)) for e, a in zip(excess, added)]
    if any(_largest(e - times[0] * a) > slack for e, a in zip(excess, added)):
        return _of_the_sum(added, got, want, slack, verdict, mesh, name)
    count = times[0] + 1
    are = "are" if " and " in name else "is"
    words = f"{name} {are} added {count:.5g} times"
    if abs(count) < 1e-3:
        words = f"{name} {are} not added"
    elif any(abs(count - mesh.axis_size(names)) < 1e-3 for names in axis_sets(mesh)):
        words += ", because every rank adds it before the sum; add it once, after the sum"
    return verdict._replace(words=words, mistake="bias", axes=())


def _of_the_sum(
    added: Sequence[np.ndarray],
    got: Sequence[np.ndarray],
    want: Sequence[np.ndarray],
    slack: float,
    verdict: Verdict,
    mesh: Mesh,
    name: str,
) -> Verdict:
    """The verdict of the rest of the output, if that is a multiple of the reference's: the sum is made once too often,
    or is a mean."""
    if verdict.mistake in ("scaled", "partial", "mean"):
        return verdict
    for names in axis_sets(mesh):
        count, label = mesh.axis_size(names), " and ".join(map(repr, names))
        for factor, reason in (
            (count, f"{count} times the reference: the sum over the {count} ranks of {label} is made once too often"),
            (
                1 / count,
                f"1/{count} of the reference: it is divided by the {count} ranks of {label} (a mean, not a sum)",
            ),
        ):
            gaps = (_largest(g - a - factor * (w - a)) for g, w, a in zip(got, want, added))
            if max(gaps) <= max(factor, 1.0) * slack:
                return verdict._replace(words=f"apart from {name}, it is {reason}", mistake="scaled", axes=())
    return verdict


def _agree(pieces: Sequence[np.ndarray], mesh: Mesh, names: Sequence[str], slack: float) -> bool:
    """Whether the ranks of `names` hold the same: then none of them has only its part of a sum."""
    groups = mesh.groups(tuple(names))
    return all(_largest(pieces[first] - pieces[other]) <= slack for first, *rest in groups for other in rest)


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0))
