"""A bias that is added more than once, or not at all, or to a sum that is wrong: it may explain an output's error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tplab.checking.verdict import Verdict, axis_sets
from tplab.layout import Layout, take
from tplab.mesh import Mesh


def of_bias(
    values: np.ndarray,
    pieces: Sequence[np.ndarray],
    whole: np.ndarray,
    layout: Layout,
    verdict: Verdict,
    mesh: Mesh,
    name: str = "its bias",
) -> Verdict:
    """A new verdict if one bias explains everything that is wrong with an output; otherwise the verdict unchanged.

    values    of the bias, which is the same on every rank
    pieces    of the output, one per rank; `whole` is the reference's
    name      the bias's name in the verdict
    """
    if verdict.ok or layout.split_dims or values.shape != whole.shape[-1:] or not np.any(values):
        return verdict
    size = float(np.abs(whole).max(initial=0))
    excess = [np.asarray(piece) - take(whole, layout, mesh, rank) for rank, piece in enumerate(pieces)]
    times = [float((e * values).sum() / max((np.broadcast_to(values, e.shape) ** 2).sum(), 1e-300)) for e in excess]
    slack = 10 * verdict.tolerance * size
    for names in axis_sets(mesh):
        parts = [np.asarray(piece) - values for piece in pieces]
        sums = [sum(parts[other] for other in mesh.group(rank, names)) + values for rank in mesh.ranks]
        if not _agree(pieces, mesh, names, slack) and all(
            np.abs(total - take(whole, layout, mesh, rank)).max(initial=0) <= slack for rank, total in enumerate(sums)
        ):
            label = " and ".join(map(repr, names))
            words = f"each rank has its own part plus {name}: an all_reduce over {label} is missing before the bias"
            return verdict._replace(words=words, mistake="partial", axes=())
        sums = [sum(np.asarray(pieces[other]) for other in mesh.group(rank, names)) + values for rank in mesh.ranks]
        if not _agree(pieces, mesh, names, slack) and all(
            np.abs(total - take(whole, layout, mesh, rank)).max(initial=0) <= slack for rank, total in enumerate(sums)
        ):
            label = " and ".join(map(repr, names))
            words = f"each rank has only its own part, without {name}: an all_reduce over {label} is missing"
            return verdict._replace(words=words, mistake="partial", axes=())
    if any(np.abs(e - t * values).max(initial=0) > slack for e, t in zip(excess, times)):
        return _of_the_sum(values, pieces, whole, layout, verdict, mesh, name)
    count = times[0] + 1
    words = f"{name} is added {count:.5g} times"
    if abs(count) < 1e-3:
        words = f"{name} is not added"
    elif abs(count - round(count)) < 1e-3:
        words += ", because every rank adds it before the sum; add it once, after the sum"
    return verdict._replace(words=words, mistake="bias", axes=())


def _of_the_sum(
    values: np.ndarray,
    pieces: Sequence[np.ndarray],
    whole: np.ndarray,
    layout: Layout,
    verdict: Verdict,
    mesh: Mesh,
    name: str,
) -> Verdict:
    """The verdict of what the bias was added to, if that is a multiple of the reference's: the sum is made once too
    often, or is a mean."""
    if verdict.mistake in ("scaled", "partial", "mean"):
        return verdict
    parts = [np.asarray(piece, np.float64) - values for piece in pieces]
    wanted = np.asarray(whole, np.float64) - values
    factors = {count: names for names in axis_sets(mesh) for count in (mesh.axis_size(names),)}
    size = float(np.abs(whole).max(initial=0))
    for count, names in factors.items():
        label = " and ".join(map(repr, names))
        reasons = {
            float(
                count
            ): f"{count} times the reference: the sum over the {count} ranks of {label} is made once too often",
            1 / count: f"1/{count} of the reference: it is divided by the {count} ranks of {label} (a mean, not a sum)",
        }
        for factor, reason in reasons.items():
            gap = max(float(np.abs(part - factor * wanted).max(initial=0)) for part in parts)
            if gap <= 10 * max(factor, 1.0) * verdict.tolerance * size:
                return verdict._replace(words=f"what {name} is added to is {reason}", mistake="scaled", axes=())
    return verdict


def _agree(pieces: Sequence[np.ndarray], mesh: Mesh, names: Sequence[str], slack: float) -> bool:
    """Whether the ranks of `names` hold the same: then none of them has only its part of a sum."""
    groups = mesh.groups(tuple(names))
    return all(
        np.abs(np.asarray(pieces[first]) - pieces[other]).max(initial=0) <= slack
        for first, *rest in groups
        for other in rest
    )
