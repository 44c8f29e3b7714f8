"""What each token is to predict. Labels are shifted before a sequence is cut: the label of a rank's last token is
usually on another rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tplab.sequence.mask import AttentionMask

IGNORED = -100
"""A label that no loss counts, as in torch."""


def next_tokens(ids: np.ndarray, documents: Sequence[int] = (), ignored: int = IGNORED) -> np.ndarray:
    """ids [.., S], whole   ->   labels [.., S]: the id that follows each one.

    The last token of the sequence has nothing to predict, and of `documents` (their lengths) each last one: `ignored`.
    """
    labels = np.full_like(ids, ignored)
    labels[..., :-1] = ids[..., 1:]
    place = AttentionMask(documents=tuple(documents)).in_document(np.arange(ids.shape[-1]), ids.shape[-1])
    labels[..., :-1][..., place[1:] == 0] = ignored
    return labels
