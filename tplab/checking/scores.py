"""Attention scores: whether the input of a softmax has the reference's scale, and is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tplab.checking.verdict import Verdict
from tplab.layout import Layout, take
from tplab.mesh import Mesh

MASKED = -3e4  # anything below is masked: -inf, the smallest float16, -1e9


def wrong_scores(
    want: Sequence[np.ndarray],
    told: Sequence[Sequence[np.ndarray]],
    mesh: Mesh,
    judge: Callable[[np.ndarray, Sequence[np.ndarray]], tuple[Layout, Verdict] | None],
) -> tuple[str, str] | None:
    """A mistake and the words for it, if the first wrong scores show one.

    want    the input of each softmax in the reference, in order
    told    the same for each rank's model
    judge   the layout and the verdict of a tensor; None if the ranks' shapes fit no layout
    """
    for index, whole in enumerate(want):
        pieces = [_without_mask(scores[index]) for scores in told if index < len(scores)]
        whole = _without_mask(whole)
        found = judge(whole, pieces) if len(pieces) == len(told) else None
        if found is None:
            return None
        layout, verdict = found
        if verdict.ok:
            continue
        wanted = [take(whole, layout, mesh, rank) for rank in mesh.ranks]
        if ratio := _ratio(pieces, wanted, 10 * verdict.tolerance * float(np.abs(whole).max(initial=0))):
            return "scale", (
                f"the scores that softmax takes are {ratio:.5g} times the reference's, so the factor before it "
                "differs; in most models it is 1/sqrt(d), where d is the width of one whole head"
            )
        if verdict.mistake == "partial":
            return "softmax", "softmax takes only this rank's part of the scores; heads must be sharded whole"
        return None
    return None


def _without_mask(scores: np.ndarray) -> np.ndarray:
    scores = np.asarray(scores, np.float64)
    return np.where(scores > MASKED, scores, 0.0)


def _ratio(pieces: Sequence[np.ndarray], wanted: Sequence[np.ndarray], slack: float) -> float | None:
    """The factor between all ranks' scores and those wanted; None if there is none."""
    weight = sum(float((want * want).sum()) for want in wanted)
    ratio = sum(float((piece * want).sum()) for piece, want in zip(pieces, wanted)) / max(weight, 1e-300)
    gap = max(float(np.abs(piece - ratio * want).max(initial=0)) for piece, want in zip(pieces, wanted))
    is_other = abs(ratio - 1) > 1e-3  # a factor of 1 is no difference: the scores are off in another way
    return ratio if ratio > 0 and is_other and gap <= slack * max(ratio, 1.0) else None
