"""A bias that is added more than once, or not at all, and may explain an output's whole error."""

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
    if layout.split_dims or values.shape != whole.shape[-1:] or not np.any(values):
        return verdict
    size = float(np.abs(whole).max(initial=0))
    excess = [np.asarray(piece) - take(whole, layout, mesh, rank) for rank, piece in enumerate(pieces)]
    times = [float((e * values).sum() / max((np.broadcast_to(values, e.shape) ** 2).sum(), 1e-300)) for e in excess]
    slack = 10 * verdict.tolerance * size
    for names in axis_sets(mesh):
        parts = [np.asarray(piece) - values for piece in pieces]
        sums = [sum(parts[other] for other in mesh.group(rank, names)) + values for rank in mesh.ranks]
        if all(
            np.abs(total - take(whole, layout, mesh, rank)).max(initial=0) <= slack for rank, total in enumerate(sums)
        ):
            label = " and ".join(map(repr, names))
            words = f"each rank has its own part plus {name}: an all_reduce over {label} is missing before the bias"
            return verdict._replace(words=words, mistake="partial", axes=())
    if any(np.abs(e - t * values).max(initial=0) > slack for e, t in zip(excess, times)):
        return verdict
    count = times[0] + 1
    words = f"{name} is added {count:.5g} times"
    if abs(count) < 1e-3:
        words = f"{name} is not added"
    elif abs(count - round(count)) < 1e-3:
        words += ", because every rank adds it before the sum; add it once, after the sum"
    return verdict._replace(words=words, mistake="bias", axes=())
