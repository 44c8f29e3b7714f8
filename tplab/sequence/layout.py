"""Which tokens of a sequence each rank holds, when ranks share it (context parallelism), and which scores it computes.

At step t of a ring over p ranks, rank r has the keys of rank r - t, and computes the scores of its own queries with
them: a tile. A mask may leave all, some or none of these n x n scores. Those that it leaves fit in a box, often smaller
than n x n: under a causal mask and zigzag, every tile but the first is half a square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from numbers import Integral
from operator import index
from typing import Any, Literal, get_args

import numpy as np

from tplab.errors import ShapeError, one_of
from tplab.models.checks import LayoutName
from tplab.sharding import cut, share

LAYOUTS: tuple[LayoutName, ...] = get_args(LayoutName)


@dataclass(frozen=True)
class TokenLayout:
    """How the S tokens of a sequence are laid out over p ranks: n = S/p tokens on each.

        TokenLayout("zigzag", 8, 2)

                     contiguous    zigzag        striped
        rank 0       0 1 2 3       0 1 6 7       0 2 4 6
        rank 1       4 5 6 7       2 3 4 5       1 3 5 7

    contiguous   piece r of p
    zigzag       pieces r and 2p-1-r of 2p: under a causal mask all ranks have equally much to do
    striped      positions r, r + p, r + 2p, ... (Brandon et al. 2023, "Striped attention")

    A token's id, label, position and document go with it. So reorder each whole array by `arrange`, and cut it in equal
    pieces, as `P` does; `restore` puts the ranks' results back in order.
    Raises ShapeError if p (zigzag: 2p) does not divide S.
    """

    name: LayoutName
    num_tokens: int
    num_ranks: int

    def __post_init__(self) -> None:
        one_of("layout", self.name, LAYOUTS)
        if self.name == "zigzag":
            share(self.num_tokens, 2 * self.num_ranks, "the number of tokens is", sharers="pieces (two for each rank)")
        else:
            share(self.num_tokens, self.num_ranks, "the number of tokens is")

    @cached_property
    def positions(self) -> np.ndarray:
        """[p, n]: row r has the positions in the sequence of the tokens that rank r holds, in ascending order."""
        size, num_ranks = self.num_tokens, self.num_ranks
        if self.name == "striped":
            return np.arange(size).reshape(-1, num_ranks).T.copy()
        if self.name == "contiguous":
            return np.array([*cut(size, num_ranks, "equal")]).reshape(num_ranks, -1)
        pieces = cut(size, 2 * num_ranks, "equal")
        return np.array([[*pieces[r], *pieces[-1 - r]] for r in range(num_ranks)]).reshape(num_ranks, -1)

    @cached_property
    def order(self) -> np.ndarray:
        """[S]: the positions of rank 0's tokens, then rank 1's, and so on."""
        return self.positions.reshape(-1)

    def arrange(self, x: Any, dim: int = -1) -> Any:
        """x [.., S, ..], whole along `dim`   ->   the same in the order of ranks: its equal pieces are theirs.

        Works for NumPy, torch and JAX arrays.
        """
        return self._taken(x, dim, self.order)

    def restore(self, x: Any, dim: int = -1) -> Any:
        """The reverse of `arrange`: the ranks' pieces, joined   ->   the sequence in its own order."""
        return self._taken(x, dim, self.order.argsort())

    def shared_positions(self, group: int) -> np.ndarray:
        """[p / group, group n]: the positions that each `group` of neighbouring ranks holds together, ascending."""
        share(self.num_ranks, group, "the number of ranks is", sharers="ranks that exchange heads")
        return np.sort(self.positions.reshape(self.num_ranks // group, -1))

    def exchanged(self, group: int) -> np.ndarray:
        """[group n]: the order in which tokens of `group` neighbouring ranks, one after the other, are ascending. It is
        the same for every such group."""
        return self.positions[:group].reshape(-1).argsort()

    def _taken(self, x: Any, dim: int, order: np.ndarray) -> Any:
        dim = range(len(x.shape))[dim]
        if x.shape[dim] != self.num_tokens:
            raise ShapeError(
                f"dim {dim} of {list(x.shape)} is not a sequence of {self.num_tokens} tokens; give the whole sequence, "
                "and cut it afterwards"
            )
        return x[(*(slice(None),) * dim, order)]

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}   {' '.join(map(str, row))}" for rank, row in enumerate(self.positions))


def layout_of(layout: LayoutName | TokenLayout, num_here: int, num_ranks: int) -> TokenLayout:
    """The layout by this name of a sequence of which each rank has `num_here` tokens; a TokenLayout must fit them."""
    if not isinstance(layout, TokenLayout):
        return TokenLayout(layout, num_here * num_ranks, num_ranks)
    if (layout.num_tokens, layout.num_ranks) != (num_here * num_ranks, num_ranks):
        raise ShapeError(
            f"the layout is for {layout.num_tokens} tokens over {layout.num_ranks} ranks, but {num_ranks} ranks have "
            f"{num_here} tokens each: {num_here * num_ranks}"
        )
    return layout


@dataclass(frozen=True)
class AttentionMask:
    """Which keys, at positions j, a query at position i sees.

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

        Raises ShapeError if the documents do not add up to the sequence.
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


Kind = Literal["skipped", "full", "causal", "masked"]


@dataclass(frozen=True, eq=False)
class Tile:
    """The scores of one rank's queries with the keys that it has at one step.

    source    the index of the rank whose keys these are
    kind      "skipped": no score is left; "full": all of the box; "causal": its lower triangle, diagonal included;
              "masked": in row i of the box, columns begins[i] to ends[i] - 1
    queries   the rows of the box, among this rank's queries
    keys      the columns of the box, among the keys of `source`
    begins, ends   [rows of the box], counted from the first column of the box
    entries   how many scores are computed
    """

    source: int
    kind: Kind
    queries: slice
    keys: slice
    begins: np.ndarray
    ends: np.ndarray
    entries: int


@lru_cache(maxsize=16)  # all layers of a model ask for the same ones
def tiles_of(layout: TokenLayout, mask: AttentionMask, group: int = 1) -> tuple[tuple[Tile, ...], ...]:
    """tiles[r][t]: what rank r computes at step t of a ring.

    group   so many neighbouring ranks exchange heads first and share their tokens, so the ring is over p / group; r is
            an index on that ring
    """
    held = layout.shared_positions(group)
    num = len(held)
    return tuple(
        tuple(_tile((r - t) % num, held[r], held[(r - t) % num], layout.num_tokens, mask) for t in range(num))
        for r in range(num)
    )


def load(layout: TokenLayout, mask: AttentionMask, group: int = 1) -> np.ndarray:
    """[p (rank), p (step)]: the number of scores that each rank computes at each step of a ring."""
    return np.array([[tile.entries for tile in row] for row in tiles_of(layout, mask, group)])


def efficiency(layout: TokenLayout, mask: AttentionMask, group: int = 1) -> float:
    """The share of time in which ranks compute, if each step of the ring lasts as long as its slowest rank's.

    For a causal mask: contiguous p/(2p-1) of long sequences, zigzag 1, striped (n + 1/p)/(n + 1).
    """
    scores = load(layout, mask, group)
    return float(scores.sum() / (len(scores) * scores.max(0).sum()))


def _tile(source: int, queries: np.ndarray, keys: np.ndarray, num_tokens: int, mask: AttentionMask) -> Tile:
    first, last = mask.seen(queries, num_tokens)
    begins, ends = np.searchsorted(keys, first, "left"), np.searchsorted(keys, last, "right")
    rows = np.flatnonzero(begins < ends)
    if not rows.size:
        return Tile(source, "skipped", slice(0, 0), slice(0, 0), begins[:0], ends[:0], 0)
    box = slice(int(rows[0]), int(rows[-1]) + 1)
    columns = slice(int(begins[rows].min()), int(ends[rows].max()))
    begins, ends = begins[box] - columns.start, np.maximum(ends, begins)[box] - columns.start
    entries, num_rows, num_columns = int((ends - begins).sum()), len(begins), columns.stop - columns.start
    kind: Kind = "masked"
    if entries == num_rows * num_columns:
        kind = "full"
    elif num_rows == num_columns and not begins.any() and (ends == np.arange(1, num_rows + 1)).all():
        kind = "causal"
    return Tile(source, kind, box, columns, begins, ends, entries)
