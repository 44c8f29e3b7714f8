"""What each collective returns, as a function of all ranks' inputs. No communication happens here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from tplab import comm
from tplab.sharding import share
from tplab.torch.private import is_lazy, lazy_copy, no_dispatch
from tplab.torch.ranks.rank import MESSAGES, UNWAITED, Call, Pending, Place


def results(call: Call, inputs: Sequence[Tensor], splits: Sequence[Sequence[int]] = ()) -> list[Tensor]:
    """Each rank's result: a separate tensor for every position.

    `splits` has, for each position, the sizes of its pieces along dim 0, if ranks split their inputs themselves. Sums
    are added up in the order of positions. If only the root gets a result, the others get zeros, or an empty tensor if
    ranks say what they have room for.
    """
    row, num_ranks, (cut_dim, join_dim) = call.row, len(inputs), call.dims

    def cut(x: Tensor, index: int) -> Sequence[Tensor]:
        sizes = splits[index] if splits else call.about.get("sizes")
        return x.chunk(num_ranks, cut_dim) if sizes is None else x.split(list(sizes), cut_dim)

    def merge(parts: Sequence[Tensor]) -> Tensor:
        return reduced(parts, call.reduction) if row.combines else joined(parts, join_dim)

    found = row.outcomes(inputs, cut, merge, call.root)
    if row.gives == "all":
        return _copies(found[0], num_ranks)  # type: ignore[arg-type]
    whole = found[call.root] if row.gives == "root" and call.takes is None else None
    others = [x.new_empty(0) for x in inputs] if whole is None else [_zeros(whole) for _ in inputs]
    return [other if y is None else y for other, y in zip(others, found, strict=True)]


def reduced(inputs: Sequence[Tensor], reduction: str) -> Tensor:
    """The inputs combined elementwise, in the order given, in new memory: the same bits whichever rank computes it.

    Types of 16 bits or fewer are added up in float32 and rounded once at the end.
    """
    dtype = inputs[0].dtype
    wide = _WIDE.get(dtype, dtype)
    if reduction in ("max", "min"):
        pick = torch.maximum if reduction == "max" else torch.minimum
        if dtype is torch.uint64:
            return _flipped(reduce(pick, map(_flipped, inputs))).view(dtype)
        extreme = reduce(pick, [x.to(wide) for x in inputs])
        return extreme.to(dtype) if len(inputs) > 1 else own(inputs[0])
    terms = inputs if wide is dtype else [x.to(wide) for x in inputs]
    if reduction in _BINARY:
        total = own(terms[0])
        for x in terms[1:]:
            _BINARY[reduction](total, x, out=total)
        return total if wide is dtype else total.to(dtype)
    first, *rest = terms
    total = first + rest[0] if rest else own(first)
    for x in rest[1:]:
        total += x
    if reduction == "mean":
        total /= len(inputs)
    return total if wide is dtype else total.to(dtype)


def signature(call: Call, x: Tensor) -> tuple[Any, ...]:
    """What must be the same on every rank of the group for their calls to be one collective.

    Raises TypeError for a tensor that is not dense.
    """
    if x.layout is not torch.strided:
        raise TypeError(f"{call.op} sends dense tensors, not {x.layout}; x.to_dense() makes one")
    if call.op in MESSAGES:
        return ()  # the receiver accepts any
    if call.peers is not None or call.op == "barrier":
        return call.key, x.dtype, None  # a message may have any shape
    shape: tuple[int, ...] = x.shape
    if call.row.gathers and "dim" in call.about:
        dim = call.about["dim"]
        shape = (*shape[:dim], -1, *shape[dim + 1 :])
    if call.splits is not None:  # only sender and receiver know the size of each piece
        shape = (-1, *shape[1:])
    return call.key, x.dtype, shape


def own(x: Tensor) -> Tensor:
    """A contiguous copy of `x` in new memory."""
    try:
        return x.clone() if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    except NotImplementedError:  # for dtypes of raw bits
        return x.contiguous().view(BITS[x.itemsize]).clone().view(x.dtype)


def lend(x: Tensor) -> Tensor:
    """Let copies of x share its memory from here on, until one of them is written to. Returns x. So far only torch may
    refer to that memory, which cannot be resized."""
    if _may_share(x):
        with no_dispatch():
            lazy_copy(x)
    return x


def kept(x: Tensor) -> Tensor:
    """The same as `own`, but free if x is lent."""
    is_lent = is_lazy(x) and x.is_contiguous() and x.nbytes == x.untyped_storage().nbytes()
    return lazy_copy(x) if is_lent else own(x)


def settled(x: Tensor) -> Tensor:
    """x itself, which no longer shares its memory."""
    if is_lazy(x):
        x.data_ptr()
    return x


def _may_share(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.nbytes >= SHARED_FROM and x.nbytes == x.untyped_storage().nbytes()


def check_tensor(op: str, x: Any) -> Tensor:
    """Return `x`. Raises TypeError if it is not a tensor."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Pending):
        raise TypeError(f"{op}: {UNWAITED}")
    raise TypeError(f"{op} sends a torch.Tensor, not {type(x).__name__}; torch.as_tensor converts numbers")


@cache
def check_reduction(op: str, reduction: str, dtype: torch.dtype) -> None:
    """Raise ValueError for an unknown reduction, TypeError for one that `dtype` does not have."""
    if dtype in WITHOUT_KERNELS and reduction in comm.REDUCTIONS:
        raise TypeError(f"{op}: there is no {reduction} of {dtype}; x.view(torch.uint8) turns it into numbers")
    comm.check_reduction(op, reduction, dtype, is_fraction=dtype.is_floating_point, is_complex=dtype.is_complex)


def check_divides(op: str, x: Tensor, dim: int, place: Place) -> None:
    """Raise ShapeError if dim `dim` of `x` cannot be cut into one equal piece per rank."""
    share(x.shape[dim], len(place.group), f"{op}: dim {dim} has size", axis=place.label)


def dim_of(x: Tensor, dim: int, op: str) -> int:
    """`dim` counted from the front. Raises ShapeError if `x` does not have it."""
    return comm.dim_of(x.shape, dim, op)


def joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """The pieces, concatenated along `dim`, in new memory."""
    if len(pieces) == 1:
        return own(pieces[0])
    dtype = pieces[0].dtype
    if dtype not in WITHOUT_KERNELS:
        return torch.cat(list(pieces), dim)
    return torch.cat([piece.contiguous().view(BITS[dtype.itemsize]) for piece in pieces], dim).view(dtype)


def _copies(x: Tensor, count: int) -> list[Tensor]:
    """x itself and copies of it. Large copies share their memory until they are `settled`."""
    copy = lazy_copy if _may_share(x) else own
    return [x, *(copy(x) for _ in range(count - 1))]


def _zeros(like: Tensor) -> Tensor:
    if like.dtype in WITHOUT_KERNELS:
        return torch.zeros_like(like.view(BITS[like.itemsize])).view(like.dtype)
    return torch.zeros_like(like)


def _flipped(x: Tensor) -> Tensor:
    """uint64 numbers as int64 numbers in the same order, and back."""
    return x.view(torch.int64) ^ torch.iinfo(torch.int64).min


# The type to add up in, if it is a different one. torch has no arithmetic on large unsigned numbers; their sums wrap
# around in int64 as they would in their own type.
_WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16), torch.float32),
    **{getattr(torch, name): torch.float32 for name in dir(torch) if name.startswith("float8_")},
    **dict.fromkeys((torch.uint16, torch.uint32, torch.uint64), torch.int64),
    torch.complex32: torch.complex64,
}
_BINARY: dict[str, Callable[..., Tensor]] = {
    "product": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}
"""Reductions that only torch.distributed has."""
SHARED_FROM = 1 << 14  # bytes; up to here a copy takes no longer
BITS = {1: torch.uint8, 2: torch.int16}
WITHOUT_KERNELS = {
    getattr(torch, name)
    for name in ("bits8", "bits1x8", "bits2x4", "bits4x2", "bits16", "float4_e2m1fn_x2")
    if hasattr(torch, name)
}
"""Dtypes of raw bits: they can be moved, but have no arithmetic."""
