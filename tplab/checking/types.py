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
NAMES: Mapping[Kind, str] = {"R": "replicated", "I": "invariant", "V": "varying", "P": "partial"}
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


class Cast(NamedTuple):
    """What makes a tensor of type `target` of one of type `source`, over R ranks. `call` is tplab's name for it, `y` is
    what the rank at index i gets, and `sends` is what travels: a collective, or "nothing"."""

    source: Kind
    target: Kind
    call: str
    y: str
    sends: str

    @property
    def backward(self) -> Cast:
        """The cast that its backward pass is."""
        return CASTS[DUALS[self.target], DUALS[self.source]]


def _casts(*casts: Cast) -> dict[tuple[Kind, Kind], Cast]:
    return {(cast.source, cast.target): cast for cast in casts}


CASTS: Mapping[tuple[Kind, Kind], Cast] = _casts(
    Cast("R", "R", "x", "x", "nothing"),
    Cast("R", "I", 'all_reduce(x, axis, "mean")', "x", "all_reduce"),
    Cast("R", "V", "piece(x)", "piece i of x", "nothing"),
    Cast("R", "P", "x / R", "x / R", "nothing"),
    Cast("I", "R", "copy_to(x, axis)", "x", "nothing"),
    Cast("I", "I", "x", "x", "nothing"),
    Cast("I", "V", "scatter_to(x, axis, dim)", "piece i of x", "nothing"),
    Cast("I", "P", "copy_to(x, axis) / R", "x / R", "nothing"),
    Cast("V", "R", "all_gather(x, axis, dim)", "x_0 | x_1 | ...", "all_gather"),
    Cast("V", "I", "gather_from(x, axis, dim)", "x_0 | x_1 | ...", "all_gather"),
    Cast("V", "V", "all_to_all(x, axis)", "piece i of x_0 | piece i of x_1 | ...", "all_to_all"),
    Cast("V", "P", "among_zeros(x)", "zeros but for piece i, which is x", "nothing"),
    Cast("P", "R", "copy_to(all_reduce(x, axis), axis)", "sum_j x_j", "all_reduce"),
    Cast("P", "I", "all_reduce(x, axis)", "sum_j x_j", "all_reduce"),
    Cast("P", "V", "reduce_scatter(x, axis, dim)", "piece i of sum_j x_j", "reduce_scatter"),
    Cast("P", "P", "x", "x", "nothing"),
)
"""The cast from each type to each other. Along one axis; x / R is one of several that have this type: any shares that
add up to one would do, such as x on one rank and zeros elsewhere."""


def table() -> str:
    """The casts as a table in Markdown, one row for each type that is taken."""
    head = "| from \\ to | " + " | ".join(f"**{kind}** {NAMES[kind]}" for kind in KINDS) + " |"
    lines = [head, "|---" * (len(KINDS) + 1) + "|"]
    for source in KINDS:
        cells = [_cell(CASTS[source, target]) for target in KINDS]
        lines.append(f"| **{source}** {NAMES[source]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(cast: Cast) -> str:
    if cast.call == "x":
        return "as it is"
    back = cast.backward
    sends = "sends nothing" if cast.sends == "nothing" else f"sends one {cast.sends}"
    backward = f"{back.source} → {back.target}" + ("" if back.sends == "nothing" else f", one {back.sends}")
    return f"`{cast.call}`<br>{sends}<br>*backward* {backward}"
