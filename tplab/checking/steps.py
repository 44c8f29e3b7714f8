"""Steps: the operations of a rank's program as far as types are concerned, and the typing rule for each.

Both frameworks translate their operations into steps, so the rules are written once. Along one axis:

    inputs                       result
    only R and I                 R, or I if all are I
    V(d), and R, I or V(d)       V of the dim that d becomes
    V(d), and d is summed        P: the ranks' sums are the terms of the sum over all of d (mean: P(mean))
    V in two ways                V, without a dim
    P, linear in it              P. All that is added to P must be P: anything replicated would count once for each rank
    P, not linear in it          a fault: f(x_0 + x_1) is not f(x_0) + f(x_1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tplab.checking.types import I, R, Type, V
from tplab.comm import ROWS

How = Literal["linear", "product", "first", "other", "unknown", "made", "reshape", "cast"]
Frame = tuple[str, int]
"""A file and a line."""
Dims = tuple[int | None, ...]


@dataclass(slots=True)
class Step:
    """One operation, which computes one value from others.

    op        its name in the program
    how       "linear": in all of its inputs together, as a sum. "product": linear in each. "first": in the first alone.
              "other": in none. "unknown". "made": it has no inputs. "reshape". "cast": see `cast`
    inputs    the numbers of the input values; output: of the result
    shapes    of the inputs; shape: of the output
    dims      for each input and each of its dims, the dim of the output that it becomes; None if it is gone
    over      the reduction over dims that are gone: "sum", "mean" or "other"
    mixes     dims of the output along which it is a softmax or a norm, which needs all of the dim
    cast      of a collective: its name; axes: those it runs along; dim, to: its dims; reduction: "sum", "mean", "max"
    narrows   the dim from which it selects a part that a further input or the program chooses
    factor    whether it multiplies or divides by single numbers, so that only the program knows the meaning of a sum
    adds      whether it adds a number, too
    is_zero   whether it makes zeros, which may be added to anything
    is_aside  whether it only accompanies the result of its line, as another view of the same memory
    stack     the program's lines that it comes from, the innermost first
    phase     "forward" or "backward"
    """

    op: str
    how: How
    inputs: tuple[int, ...] = ()
    output: int = -1
    shapes: tuple[tuple[int, ...], ...] = ()
    shape: tuple[int, ...] = ()
    dims: tuple[Dims, ...] = ()
    over: str = "other"
    mixes: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    dim: int | None = 0
    to: int = 0
    reduction: str = ""
    narrows: int | None = None
    factor: bool = False
    adds: bool = False
    is_zero: bool = False
    is_aside: bool = False
    stack: tuple[Frame, ...] = field(default=())
    phase: str = "forward"


class Forbidden(Exception):
    """An operation that a type does not allow: words, and the way out."""

    def __init__(self, words: str, way_out: str):
        super().__init__(words, way_out)
        self.words, self.way_out = words, way_out


def typed(step: Step, axis: str, given: Sequence[Type], zeros: Sequence[bool]) -> Type:
    """Return the type along `axis` of the result of a step on `given`. Raises Forbidden.

    zeros   for each input whether it is all zeros, which may be added to anything
    """
    if step.how == "cast":
        return _cast(step, axis, given[0]) if axis in step.axes else given[0]
    if step.how == "made" or not given:
        return I
    if step.narrows is not None and given[0].is_equal and any(one.kind == "V" for one in given[1:]):
        return Type("V", step.narrows)
    if any(one.kind == "P" for one in given):
        return _of_partial(step, axis, given, zeros)
    cuts = [_place(step, index, one) for index, one in enumerate(given) if one.kind == "V"]
    if not cuts:
        return R if any(one.kind == "R" for one in given) else I
    if cut_mixed := [cut.dim for cut in cuts if cut.dim in step.mixes]:
        raise Forbidden(
            f"{step.op} needs all of dim {cut_mixed[0]}, of which {axis!r} gives each rank a piece",
            f"gather that dim along {axis!r} first, or combine the ranks' maxima and sums by all_reduce",
        )
    first = cuts[0]
    if any(cut != first for cut in cuts) or first == _UNKNOWN or (step.how == "unknown" and not step.dims):
        return V
    if first == _GONE:
        whole = {"sum": "sum", "mean": "mean"}.get(step.over)
        if whole is None:
            return V
        return Type("P", op=whole if step.phase == "forward" and not step.factor else "")
    return first


_GONE, _UNKNOWN = Type("V", -1), V


def _place(step: Step, index: int, given: Type) -> Type:
    """Return where the cut of an input is in the output: a V with its dim, _GONE or _UNKNOWN."""
    if given.dim is None:
        return _UNKNOWN
    if step.how == "reshape":
        return reshaped(given, step.shapes[index], step.shape)
    dims = step.dims[index] if index < len(step.dims) else ()
    dim = dims[given.dim] if given.dim < len(dims) else None
    return _GONE if dim is None else given._replace(dim=dim)


def reshaped(cut: Type, before: Sequence[int], after: Sequence[int]) -> Type:
    """Return where a cut dim is after a reshape, such as [B, S, D] -> [B S, D] or back."""
    assert cut.dim is not None
    top = cut.top or before[cut.dim]  # counted from the end of its dim
    end = math.prod(before[cut.dim + 1 :]) * top  # and from the end of all
    below = 1
    for dim in reversed(range(len(after))):
        size = after[dim]
        if below < end <= below * size and size > 1 and end % below == 0:
            is_new = after[max(dim - 1, 0)] == 1 != before[max(cut.dim - 1, 0)]
            if is_new and not cut.top:
                return _UNKNOWN  # [S, h D] -> [S, 1, D], one of several heads, or one more dim
            top = end // below
            return cut._replace(dim=dim, top=0 if top == size else top)
        below *= size
    return _UNKNOWN


def _of_partial(step: Step, axis: str, given: Sequence[Type], zeros: Sequence[bool]) -> Type:
    partial = [one for one in given if one.kind == "P"]
    op = partial[0].op if all(one.op == partial[0].op for one in partial) and not step.factor else ""
    result = Type("P", op=op)
    first = f"all_reduce(x, {axis!r}) makes it whole first"
    if step.how == "reshape":
        return result
    if step.how == "unknown":
        return V
    if step.how == "other":
        raise Forbidden(f"{step.op} of a tensor that is only partial along {axis!r}: it is not linear", first)
    if step.how == "linear":
        others = [one for one, is_zero in zip(given, zeros) if one.kind != "P" and not is_zero]
        if any(one.is_equal for one in others) or step.adds:
            raise Forbidden(
                f"{step.op} of a tensor that is partial along {axis!r} and one that is the same on every rank: in the "
                "sum over the ranks, that one, such as a bias, would count once for each of them",
                f"add it after all_reduce(x, {axis!r}), or on one rank only",
            )
        return V if others else result
    if step.how == "first" and given[0].kind == "P" and len(partial) == 1:
        return result
    if step.op == "div" and all(one.kind == "P" and one.op == "sum" for one in given):
        return Type("P", op="mean")  # a sum divided by a count, both each rank's own
    if any(one == V for one in given) or (step.op == "div" and step.phase == "backward"):
        return V  # unknown; or the gradient of a sum divided by a count
    if len(partial) > 1 or step.how == "first" or any(one.kind == "V" for one in given):
        raise Forbidden(f"{step.op} of a tensor that is only partial along {axis!r} and one that differs, too", first)
    return result


def _cast(step: Step, axis: str, given: Type) -> Type:
    """Return the result of a collective along `axis`."""
    kind, op = given.kind, step.op
    if op == "copy_to":
        return R if kind == "I" else given
    if op == "gradient":  # of an invariant tensor
        if kind in "VP":
            raise Forbidden(
                f"what all_reduce has made is the same on every rank of {axis!r}, and each rank then uses it in its "
                "own way: each has only its part of the gradient, and all gradients before this line are partial, too",
                f"copy_to(y, {axis!r}) where it enters work that the ranks of {axis!r} divide",
            )
        return I
    if op == "gather_from":
        return I
    if op == "scatter_to":
        return Type("V", step.dim)
    if (row := ROWS.get(op)) is None:
        return V
    if row.combines:
        _check_sum(step, axis, given)
    if op == "all_to_all" and not (given.is_equal or given.dim == step.to):
        return V
    if op == "ring_shift" and given.is_equal:
        return R
    return Type("V", step.dim) if row.gives == "pieces" else Type(row.type)


def _check_sum(step: Step, axis: str, given: Type) -> None:
    """Raise Forbidden if the input of a reduction is not what the reduction makes a whole of."""
    if given.kind == "P" and given.op == "sum" and step.reduction == "mean":
        raise Forbidden(
            f"the ranks' tensors are the terms of a sum along {axis!r}, and their mean is 1/R of it over R ranks",
            f'{step.op}(x, {axis!r}, "sum")',
        )
    if given.kind == "P" and given.op == "mean" and step.reduction == "sum":
        raise Forbidden(
            f"each rank's tensor is a mean over its own part along {axis!r}, and their sum is R times the mean of all "
            "over R ranks",
            f'{step.op}(x, {axis!r}, "mean"); or, where ranks have unequally many, sums of all and of their numbers',
        )
    if given.kind == "P" and step.reduction in ("max", "min"):
        words = f"the {step.reduction} of the terms of a sum along {axis!r} is not that of the sum"
        raise Forbidden(words, f"all_reduce(x, {axis!r}) first")
    if given.is_equal and step.reduction == "sum" and step.phase == "forward":
        raise Forbidden(
            f"the tensor is the same on every rank of {axis!r} already, so that their sum is R times that over R ranks",
            f"leave {step.op} out, or scatter it: scatter_to(x, {axis!r}, dim)",
        )
