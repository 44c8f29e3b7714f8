"""Which tokens of a sequence each rank holds, when ranks share it (context parallelism)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

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
