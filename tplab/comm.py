"""What the collectives of both frameworks accept: both share each check and its message."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from tplab.errors import MeshError, ShapeError, one_of

REDUCTIONS = ("sum", "mean", "max", "min")


def check_reduction(op: str, reduction: str, dtype: Any, *, is_fraction: bool, is_complex: bool) -> None:
    """Raise ValueError for an unknown reduction, and TypeError for one that `dtype` does not support.

    The mean of integers need not be an integer, and complex numbers have no order. A sum of booleans is "any".
    """
    one_of("op", reduction, REDUCTIONS)
    if is_complex and reduction in ("max", "min"):
        raise TypeError(f"{op}: there is no {reduction} of {dtype}; reduce the real and imaginary parts on their own")
    if reduction == "mean" and not (is_fraction or is_complex):
        raise TypeError(f"{op}: the mean of {dtype} would not be whole numbers; convert to a floating-point type first")


def whole_number(given: Any, name: str) -> int:
    """`given` as an int. Raises TypeError for 1.0 and the like."""
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {given!r}") from None


def dim_of(shape: Sequence[int], dim: Any, op: str) -> int:
    """`dim` counted from the front. Raises ShapeError if a tensor of this shape does not have it."""
    dim = whole_number(dim, f"{op}: dim")
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(
            f"{op} along dim {dim}: the tensor has {len(shape)} dims {tuple(shape)}"
            + ("" if shape else "; reshape(1) makes a scalar a tensor of one element")
        )
    return dim % len(shape)


def root_of(root: Any, num_ranks: int, label: str) -> int:
    """The position from which `broadcast` sends. Raises MeshError if the axis does not have it."""
    root = whole_number(root, "broadcast: root")
    if not 0 <= root < num_ranks:
        raise MeshError(f"broadcast: axis {label!r} has positions 0 to {num_ranks - 1}; root={root} is not one")
    return root


def pairs_of(perm: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    """The permutation passed to `ppermute`, as pairs of ints. Raises TypeError."""
    return tuple(map(_pair, perm))


def check_pairs(pairs: Sequence[tuple[int, int]], num_ranks: int, label: str) -> None:
    """Raise MeshError if a position is not on the axis, sends twice or receives twice."""
    last, listed = num_ranks - 1, list(pairs)
    for side, positions in (("sends", [a for a, _ in pairs]), ("receives", [b for _, b in pairs])):
        for one in positions:
            if not 0 <= one < num_ranks:
                raise MeshError(f"ppermute: axis {label!r} has positions 0 to {last}; {one} in {listed} is not one")
            if positions.count(one) > 1:
                raise MeshError(f"ppermute: position {one} of axis {label!r} {side} twice in {listed}; once at most")


def _pair(given: Any) -> tuple[int, int]:
    try:
        source, target = given
        return operator.index(source), operator.index(target)
    except (TypeError, ValueError):
        raise TypeError(f"ppermute sends along pairs (from index, to index), as (0, 1); {given!r} is no pair") from None
