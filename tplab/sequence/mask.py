"""Which keys each query may see: all, those before it, a window of them, those of its own document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from operator import index

import numpy as np

from tplab.errors import ShapeError


@dataclass(frozen=True)
class AttentionMask:
    """What a query at position i sees of the keys at positions j.

    causal      j <= i
    window      |i - j| < window: with `causal`, a token sees itself and the window - 1 tokens before it
    documents   the lengths of documents that are packed into one sequence, in order: only keys of the same document

    Whatever is combined, each query sees one interval of positions, so no mask of S x S is ever needed.
    """

    causal: bool = True
    window: int | None = None
    documents: Sequence[int] = ()

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "documents", tuple(map(index, self.documents)))
        except TypeError:
            raise ShapeError(
                f"documents are {self.documents!r}; give their lengths in tokens, whole numbers, or () for one document"
            ) from None
        if self.window is not None and (isinstance(self.window, bool) or not isinstance(self.window, Integral)):
            raise ShapeError(f"window is {self.window!r}; give a whole number of tokens, or None for no window")
        if self.window is not None and self.window < 1:
            raise ShapeError(f"window is {self.window}; a token sees itself at least, which is a window of 1")
        if any(length < 1 for length in self.documents):
            raise ShapeError(f"documents {self.documents} are lengths; each must be 1 or more")

    def seen(self, positions: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """The first and the last position that each query sees: positions [n]   ->   [n], [n], both included.

        Raises ShapeError where the documents do not add up to the sequence.
        """
        starts, ends = self._bounds(num_tokens)
        document = np.searchsorted(ends, positions, "right")
        first, last = starts[document], ends[document] - 1
        if self.window is not None:
            first, last = np.maximum(first, positions - self.window + 1), np.minimum(last, positions + self.window - 1)
        return first, np.minimum(last, positions) if self.causal else last

    def in_document(self, positions: np.ndarray, num_tokens: int) -> np.ndarray:
        """The position of each token in its own document, which is what a model sees as its position."""
        starts, ends = self._bounds(num_tokens)
        return positions - starts[np.searchsorted(ends, positions, "right")]

    def _bounds(self, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Where each document begins, and where it ends."""
        documents = self.documents or (num_tokens,)
        if sum(documents) != num_tokens:
            raise ShapeError(
                f"documents {documents} have {sum(documents)} tokens, and the sequence has {num_tokens}; give the "
                "lengths of all documents of the whole sequence, padding included"
            )
        ends = np.cumsum(documents)
        return ends - np.array(documents), ends
