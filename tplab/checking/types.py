"""Types: what a tensor is along an axis of a mesh, its gradient too, and the collectives as casts between them.

    type           the ranks' tensors of it                      its gradient
    R replicated   are equal, and each rank uses its own         P: every rank has its part of a sum
    I invariant    are equal, and all ranks use it alike         I: equal too
    V varying      differ; V(d): they are pieces, cut along d    V: each rank has that of its own tensor
    P partial      are the terms of a sum, which is meant        R: equal, as every term counts alike

A gradient's type is the *dual* of its tensor's. A cast from one type to another has a backward pass, which is a cast
too: from the dual of what it makes to the dual of what it takes. So whoever knows the casts knows all backward passes.
JAX's `shard_map` has these types as varying axes: what does not vary is I, and R, V and P all vary. The letters are
those of spmd_types (github.com/meta-pytorch/spmd_types).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["R", "I", "V", "P"]
KINDS: tuple[Kind, ...] = ("R", "I", "V", "P")
DUALS: Mapping[Kind, Kind] = {"R": "P", "I": "I", "V": "V", "P": "R"}
"""What the gradient of a tensor of each type is."""


class Type(NamedTuple):
    """What a tensor is along one axis.

    kind   R, I, V or P
    dim    of V: the dim along which the ranks' tensors are pieces of one; None where they are not, or it is not known
    op     of P: what makes a whole of the ranks' tensors: "sum" or "mean"; "" where only the program knows its factors
    top    of V, where dims were merged into `dim`: the elements that the one that is cut has, with all after it. 0: all
    """

    kind: Kind
    dim: int | None = None
    op: str = ""
    top: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether all ranks of the axis hold the same."""
        return self.kind in "RI"

    def __str__(self) -> str:
        if self.dim is not None:
            return f"{self.kind}({self.dim})"
        return f"{self.kind}({self.op})" if self.op == "mean" else self.kind


R, I, V, P = (Type(kind) for kind in KINDS)
