"""Types of a tensor, and of its gradient, along an axis of a mesh, and the collectives as casts between them.

    type           the ranks' tensors of it                      its gradient
    R replicated   are equal, and each rank uses its own         P: every rank has its part of a sum
    I invariant    are equal, and all ranks use it alike         I: equal too
    V varying      differ; V(d): they are pieces, cut along d    V: each rank has that of its own tensor
    P partial      are the terms of a sum, which is meant        R: equal, as every term counts alike

A gradient's type is the *dual* of its tensor's. The backward pass of a cast is a cast from the dual of its result to
the dual of its input, so the casts determine all backward passes. JAX's `shard_map` expresses these types as varying
axes: I does not vary, and R, V and P do. The letters are those of spmd_types (github.com/meta-pytorch/spmd_types).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["R", "I", "V", "P"]
KINDS: tuple[Kind, ...] = ("R", "I", "V", "P")
DUALS: Mapping[Kind, Kind] = {"R": "P", "I": "I", "V": "V", "P": "R"}
"""The type of the gradient of a tensor of each type."""


class Type(NamedTuple):
    """The type of a tensor along one axis.

    kind   R, I, V or P
    dim    of V: the dim along which the ranks' tensors are pieces of one; None if they are not, or if it is not known
    op     of P: how the ranks' tensors combine to the whole: "sum" or "mean"; "" if only the program knows its factors
    top    of V, if dims were merged into `dim`: the elements of the dim that is cut, with all after it. 0: all
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
