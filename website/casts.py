"""The casts between the types of tensors on ranks, and the table of them in docs/types.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tplab.checking.types import DUALS, KINDS, Kind

NAMES: Mapping[Kind, str] = {"R": "replicated", "I": "invariant", "V": "varying", "P": "partial"}


class Cast(NamedTuple):
    """A conversion of a tensor of type `source` to type `target`, over R ranks. `call` is tplab's name for it, `y` the
    result on the rank at index i, and `sends` the collective that it needs, or "nothing"."""

    source: Kind
    target: Kind
    call: str
    y: str
    sends: str

    @property
    def backward(self) -> Cast:
        """The cast of its backward pass."""
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
"""The cast from each type to each other, along one axis. x / R is one of several possible results: any shares that add
up to one would do, such as x on one rank and zeros elsewhere."""


def table() -> str:
    """The casts as a table in Markdown, one row for each source type."""
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
