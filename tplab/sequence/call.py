"""The arguments of attention over a sequence that ranks share: the same for every scheme, in both frameworks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from tplab.errors import ShapeError
from tplab.mesh import Axis
from tplab.sequence.layout import AttentionMask, LayoutName, TokenLayout, layout_of
from tplab.sharding import names_in, share

Array = TypeVar("Array", bound=Any)
Function = TypeVar("Function", bound=Callable[..., Any])


class Call(NamedTuple):
    """One call, checked: `scale` is the factor of the scores, and the layout is that of the whole sequence."""

    op: str
    layout: TokenLayout
    mask: AttentionMask
    scale: float
    return_lse: bool


def over_axis(attend: Callable[..., Any], axis_size: Callable[[Axis], int]):
    """The function (q, k, v, axis, *, ...) that calls attend(call, q, k, v, axis), and has its name and docstring."""

    def attention(
        q: Array,
        k: Array,
        v: Array,
        axis: Axis,
        *,
        layout: LayoutName | TokenLayout = "contiguous",
        causal: bool = True,
        window: int | None = None,
        documents: Sequence[int] = (),
        scale: float | None = None,
        dropout: float = 0.0,
        return_lse: bool = False,
    ) -> Any:
        scale = check_attention(attend.__name__, q, k, v, scale, dropout)
        tokens = layout_of(layout, q.shape[2], axis_size(axis))
        mask = AttentionMask(causal, window, documents)
        return attend(Call(attend.__name__, tokens, mask, scale, return_lse), q, k, v, axis)

    return _as(attend, attention)


def over_two_axes(attend: Callable[..., Any], axis_size: Callable[[Axis], int]):
    """The same of two axes, (q, k, v, head_axis, ring_axis, *, ...), which share the sequence together."""

    def attention(
        q: Array,
        k: Array,
        v: Array,
        head_axis: Axis,
        ring_axis: Axis,
        *,
        layout: LayoutName | TokenLayout = "contiguous",
        causal: bool = True,
        window: int | None = None,
        documents: Sequence[int] = (),
        scale: float | None = None,
        dropout: float = 0.0,
        return_lse: bool = False,
    ) -> Any:
        scale = check_attention(attend.__name__, q, k, v, scale, dropout)
        both = *names_in(ring_axis), *names_in(head_axis)
        tokens = layout_of(layout, q.shape[2], axis_size(both))  # refuses an axis that is in both
        mask = AttentionMask(causal, window, documents)
        return attend(Call(attend.__name__, tokens, mask, scale, return_lse), q, k, v, head_axis, ring_axis)

    return _as(attend, attention)


def _as(attend: Callable[..., Any], attention: Function) -> Function:
    """`attention` with the name and docstring of `attend`, and its own signature."""
    wraps(attend, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=())(attention)
    del attention.__wrapped__  # type: ignore[attr-defined]
    return attention


# --- what can be wrong with them --------------------------------------------------------------------------------------


Shape = Sequence[int]


def check_attention(op: str, q: Any, k: Any, v: Any, scale: float | None, dropout: float) -> float:
    """The factor of the scores: `scale`, or 1/sqrt(d) if that is None.

    Raise ShapeError unless q is [B, h, n, d], k and v are [B, g, n, d], none of them empty, and g divides h; and
    ValueError unless all have one dtype of floating-point numbers and the factor is above 0. Refuse dropout.
    """
    dtypes = [str(x.dtype).removeprefix("torch.") for x in (q, k, v)]
    q, k, v = q.shape, k.shape, v.shape
    if dropout:
        raise NotImplementedError(
            f"{op}: dropout is {dropout}; dropout of attention weights is not implemented, because ranks would have to "
            "draw the same mask again in the backward pass; give 0, and drop from the output instead"
        )
    if len(q) != 4 or len(k) != 4 or tuple(k) != tuple(v):
        raise ShapeError(
            f"{op} takes q [batch, heads, tokens, width], and k and v of one shape [batch, kv heads, tokens, width], "
            f"but got {list(q)}, {list(k)} and {list(v)}"
        )
    if (q[0], *q[2:]) != (k[0], *k[2:]):
        raise ShapeError(f"{op}: q {list(q)} and k {list(k)} may differ in the number of heads, dim 1, and in no other")
    if 0 in (*q, *k):
        raise ShapeError(f"{op}: q {list(q)} and k {list(k)} are empty; each size must be 1 or more")
    if q[1] % k[1]:
        raise ShapeError(
            f"{op}: q has {q[1]} heads, and k {k[1]}, which does not divide them: each key and value head serves "
            "equally many query heads"
        )
    if len(set(dtypes)) > 1 or "float" not in dtypes[0]:
        raise ValueError(
            f"{op}: q is {dtypes[0]}, k {dtypes[1]} and v {dtypes[2]}; give all three one dtype, such as float32 or "
            "bfloat16"
        )
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"{op}: scale is {scale}, and must be a number above 0; leave it out for 1/sqrt({q[3]})")
    return q[3] ** -0.5 if scale is None else float(scale)


def check_heads_to_share(op: str, num_heads: int, num_kv_heads: int, num_ranks: int, axis: Axis) -> None:
    """Raise ShapeError unless the ranks of `axis` can share the heads."""
    share(num_heads, num_ranks, f"{op}: the number of heads is", axis=axis, why="heads are exchanged whole")
    if num_kv_heads % num_ranks:
        copies = -(-num_ranks // num_kv_heads)
        way_out = (
            f"repeat each {copies} times, which sends {copies} times as many bytes, or "
            if num_ranks % num_kv_heads == 0
            else ""
        )
        raise ShapeError(
            f"{op}: the number of key and value heads is {num_kv_heads}, which the {num_ranks} ranks of axis {axis!r} "
            f"cannot share equally: heads are exchanged whole;\n{way_out}use head_ring_attention, whose head axis has "
            f"fewer ranks"
        )


def check_rope(x: Shape, positions: Shape) -> int:
    """Half the width of a head. Raise ShapeError unless x is [.., n, d], d even, and there are n positions."""
    if len(x) < 2 or x[-1] % 2 or tuple(positions) != (x[-2],):
        raise ShapeError(
            f"rope takes x [.., n, d] with an even d, and n positions, but got x {list(x)} and positions "
            f"{list(positions)}"
        )
    return x[-1] // 2
