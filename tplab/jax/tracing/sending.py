"""What a collective of a compiled module sends, as it was compiled, and as XLA for GPUs and TPUs would send it.

On CPUs XLA does two things differently. A sum of which each rank keeps a piece stays an all_reduce, and 16-bit numbers
are mostly sent as float32, the type in which a CPU computes with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tplab.cost import collectives as cost
from tplab.jax.tracing.flow import Flow, Spot
from tplab.jax.tracing.hlo import Array
from tplab.jax.tracing.narrow import narrow_after, narrow_before

_MOST_MAKING = 64  # instructions that make the index of a piece


class Carried(NamedTuple):
    """What one rank sends, and to which collective, by tplab's name."""

    op: str
    array: Array


def sent_by(flow: Flow, place: Spot, accelerator: bool = False) -> list[Carried]:
    """What a rank sends to a collective: one entry for each operand that is sent."""
    one, operands = place.one, flow.operands(place)
    # for a ragged exchange the first, assumed to be spread evenly; its other operands say where the pieces are
    operands = operands[:1] if one.op.startswith("ragged") else operands
    found = [Carried(str(one.collective), array) for given in operands for array in given.one.arrays]
    if not accelerator or len(found) != len(operands):
        return found
    indices = [None] if len(found) == 1 else range(len(found))
    return [
        Carried("reduce_scatter" if keeps_share(flow, place, index) else op, array._replace(dtype=dtype))
        for (op, array), index in zip(found, indices, strict=True)
        for dtype in [narrow_dtype(flow, place, index) or array.dtype]
    ]


def merged(sent: Iterable[Carried]) -> Iterator[Carried]:
    """The same, with those of one dtype concatenated, as XLA sends them."""
    listed = list(sent)
    for key in dict.fromkeys((op, array.dtype, array.bits) for op, array in listed):
        alike = [one for one in listed if (one.op, one.array.dtype, one.array.bits) == key]
        size = sum(one.array.size for one in alike)
        yield alike[0] if len(alike) == 1 else Carried(key[0], Array(key[1], (size,), key[2]))


def bytes_by_rank(flow: Flow, place: Spot, accelerator: bool = False) -> dict[str, tuple[int, ...]]:
    """What each rank sends to a collective, under the ring algorithm, for each operation that it is."""
    groups, found = flow.module.groups(place.one), dict[str, tuple[int, ...]]()
    sent = sent_by(flow, place, accelerator)
    for op in dict.fromkeys(op for op, _ in sent):
        by_rank = [0] * flow.mesh.size
        for _, array in merged(each for each in sent if each.op == op):
            for group in groups:
                for index, rank in enumerate(group[:1] if op == "ppermute" else group):  # of a pair, the first sends
                    by_rank[rank] += cost.bytes_sent(op, *array.units, len(group), index)
        found[op] = tuple(by_rank)
    return found


def keeps_share(flow: Flow, place: Spot, index: int | None = None) -> bool:
    """Whether every rank needs only a piece of a sum, or of its element `index`, where several are summed together."""
    one = place.one
    if not one.op.startswith("all-reduce"):
        return False
    size, rest = divmod(one.arrays[index or 0].size, len(flow.module.groups(one)[0]))
    users = list(flow.needed_by(place, index))
    return bool(users) and not rest and all(_is_own(flow, u) and u.one.arrays[0].size == size for u in users)


def kept_of_all(flow: Flow, place: Spot) -> int:
    """How many times as much a rank gathers as it keeps, where all that it does with it is to take a piece of it, by
    its own number; otherwise 0."""
    one = place.one
    users = list(flow.needed_by(place)) if one.op.startswith("all-gather") else []
    sizes = {user.one.arrays[0].size for user in users}
    is_cut = len(sizes) == 1 and all(_is_own(flow, user) for user in users)
    return one.arrays[-1].size // sizes.pop() if is_cut else 0


def _is_own(flow: Flow, place: Spot) -> bool:
    """Whether this takes a piece by the rank's own number: a slice of the program may be the same on every rank."""
    if place.one.op != "dynamic-slice":
        return False
    pending, seen = flow.operands(place)[1:], set[tuple[str, str]]()
    while pending and len(seen) < _MOST_MAKING:
        index = pending.pop(0)
        if index.one.op == "partition-id":
            return True
        key = index.computation, index.one.name
        if key not in seen and index.one.collective is None:
            seen.add(key)
            before = flow.before(index)
            pending += flow.operands(index) if before is None or index.one.op == "dynamic-slice" else [before]
    return False


def narrow_dtype(flow: Flow, place: Spot, index: int | None = None) -> str:
    """The dtype of what is sent as float32 only because XLA compiled for CPUs; "" where the program says float32."""
    one = place.one
    if not any(array.dtype == "float32" for array in one.arrays):
        return ""
    if not one.op.startswith("all-reduce"):
        return narrow_before(flow, flow.operands(place)[index or 0])
    found = [narrow_after(flow, place, each) for each in ([None] if index is None else range(len(one.arrays)))]
    if any(found):
        return found[index or 0]
    return "bfloat16" if any("promoted" in name for name in one.called("to_apply")) else ""
