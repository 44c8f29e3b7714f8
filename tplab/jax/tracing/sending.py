"""What a collective of a compiled module sends, as compiled, and as XLA for GPUs and TPUs would send it; and the dtype
of an array in the program, if XLA for CPUs computes with a wider one.

XLA for CPUs differs in two ways. A sum of which each rank keeps a piece stays an all_reduce, and 16-bit numbers are
mostly sent as float32, the type in which a CPU computes with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from tplab.cost import collectives as cost
from tplab.jax.tracing.flow import back, before, is_given, needed_by, walk
from tplab.jax.tracing.hlo import Array, Instruction
from tplab.jax.tracing.jaxprs import reached
from tplab.mesh import Mesh


def is_inserted(one: Instruction) -> bool:
    """Whether it is a conversion that is not in the program."""
    return one.op == "convert" and one.primitive != "convert_element_type"


def as_written(one: Instruction) -> Array:
    """The array that is made here, with the dtype that it has in the program.

    XLA for CPUs converts 8- and 16-bit operands of products and most other operations to float32, and the result back.
    On GPUs and TPUs these conversions do not exist. We distinguish them from the program's own by name: JAX calls its
    own "convert_element_type", while those that XLA inserts have no name, or that of the operation that they serve.

    Limitations: XLA may merge a conversion of the program with one of its own. If the program has
    `(x @ w).astype("float32")` with x and w in bfloat16, XLA drops both conversions of the result, and the product
    counts as writing float32. Between elementwise operations XLA may omit rounding to bfloat16 altogether; then arrays
    passed between fusions count as float32.
    """
    array = one.arrays[0]
    is_known = _is_float(array) or is_inserted(one)  # whole numbers that XLA of jaxlib 0.7 widens
    if len(one.arrays) > 1 or not is_known or array.itemsize == 1 or is_given(one):
        return array
    one.written = one.written or narrow_before(one) or narrow_after(one) or array.dtype
    return array._replace(dtype=one.written)


def narrow_before(one: Instruction) -> str:
    """The dtype from which XLA has widened this array; "" if it has not."""
    found = ""
    for made in back(one):
        if made.op == "convert":
            (given,) = made.operands
            if not is_inserted(made) or not _is_narrower(given.arrays[0], made.arrays[0]):
                return found
            found = given.arrays[0].dtype
        elif made.op == "broadcast" and not found:
            return narrow_before(made.operands[0])
    return found


def narrow_after(one: Instruction, index: int | None = None) -> str:
    """The dtype to which XLA converts this array, or the sum over ranks of it, after computing in a wider one; "" if it
    does not. An array that the program itself converts was wide, even if XLA sends both together.

    index   which element, if it is a tuple
    """
    array = narrowest = one.arrays[index or 0]
    sums: list[Instruction] = []
    for user, computes in walk(one, index):
        if computes:
            sums += [user] if user.collective in ("all_reduce", "reduce_scatter") else []
        elif user.op == "convert" and _is_narrower(user.arrays[0], narrowest):
            if not is_inserted(user):
                return "" if narrowest is array else narrowest.dtype
            narrowest = user.arrays[0]
    if narrowest is not array:
        return narrowest.dtype
    if len(sums) != 1 or len(sums[0].arrays) != len(sums[0].operands):
        return ""
    given = sums[0].operands
    number = next((n for n, operand in enumerate(given) if one in back(operand)), 0)
    return narrow_after(sums[0], number if len(given) > 1 else None)


def _is_narrower(one: Array, other: Array) -> bool:
    return _is_float(one) == _is_float(other) and one.itemsize < other.itemsize


def _is_float(array: Array) -> bool:
    return "float" in array.dtype


_MOST_MAKING = 64  # instructions that compute the index of a piece


class Carried(NamedTuple):
    """What one rank sends, and in which collective, by tplab's name."""

    op: str
    array: Array


def sent_by(one: Instruction, accelerator: bool = False) -> list[Carried]:
    """What a rank sends in a collective: one entry for each operand that is sent."""
    # for a ragged exchange the first, assumed to be spread evenly; its other operands say where the pieces are
    operands = one.operands[:1] if one.op.startswith("ragged") else one.operands
    found = [Carried(str(one.collective), array) for given in operands for array in given.arrays]
    if not accelerator or len(found) != len(operands):
        return found
    indices = [None] if len(found) == 1 else range(len(found))
    return [
        Carried("reduce_scatter" if keeps_share(one, index) else op, array._replace(dtype=dtype))
        for (op, array), index in zip(found, indices, strict=True)
        for dtype in [narrow_dtype(one, index) or array.dtype]
    ]


def merged(sent: Iterable[Carried]) -> Iterator[Carried]:
    """The same, with arrays of one dtype concatenated, as XLA sends them."""
    listed = list(sent)
    for key in dict.fromkeys((op, array.dtype, array.bits) for op, array in listed):
        alike = [one for one in listed if (one.op, one.array.dtype, one.array.bits) == key]
        size = sum(one.array.size for one in alike)
        yield alike[0] if len(alike) == 1 else Carried(key[0], Array(key[1], (size,), key[2]))


def bytes_by_rank(one: Instruction, mesh: Mesh, accelerator: bool = False) -> dict[str, tuple[int, ...]]:
    """Operation -> the bytes that each rank sends for it in a collective, with the ring algorithm."""
    groups, found = one.module.groups(one), dict[str, tuple[int, ...]]()
    sent = sent_by(one, accelerator)
    for op in dict.fromkeys(op for op, _ in sent):
        by_rank = [0] * mesh.size
        for _, array in merged(each for each in sent if each.op == op):
            for group in groups:
                if len(set(group)) == 1:  # a rank keeps its own piece
                    continue
                for index, rank in enumerate(group[:1] if op == "ppermute" else group):  # the first of a pair sends
                    by_rank[rank] += cost.bytes_sent(op, *array.units, len(group), index)
        found[op] = tuple(by_rank)
    return found


def keeps_share(one: Instruction, index: int | None = None) -> bool:
    """Whether every rank needs only a piece of a sum, or of its element `index` if several are summed together."""
    if not one.op.startswith("all-reduce"):
        return False
    size, rest = divmod(one.arrays[index or 0].size, len(one.module.groups(one)[0]))
    users = list(needed_by(one, index))
    return bool(users) and not rest and all(_is_own(user) and user.arrays[0].size == size for user in users)


def kept_of_all(one: Instruction) -> int:
    """The ratio of what a rank gathers to what it keeps, if it only takes a piece by its own number; otherwise 0."""
    users = list(needed_by(one)) if one.op.startswith("all-gather") else []
    sizes = {user.arrays[0].size for user in users}
    return one.arrays[-1].size // sizes.pop() if len(sizes) == 1 and all(map(_is_own, users)) else 0


def _is_own(one: Instruction) -> bool:
    """Whether this takes a piece by the rank's own number. A slice in the program may be the same on every rank."""

    def made_from(index: Instruction) -> Sequence[Instruction]:
        made = before(index, [])
        return index.operands if made is None or index.op == "dynamic-slice" else [made]

    indices = one.operands[1:] if one.op == "dynamic-slice" else []
    making = reached(indices, lambda index: [] if index.collective else made_from(index))
    return any(index.op == "partition-id" for index in islice(making, _MOST_MAKING))


def narrow_dtype(one: Instruction, index: int | None = None) -> str:
    """The dtype of an array that is sent as float32 only because XLA compiled for CPUs, otherwise ""."""
    if not any(array.dtype == "float32" for array in one.arrays):
        return ""
    if not one.op.startswith("all-reduce"):
        return narrow_before(one.operands[index or 0])
    found = [narrow_after(one, each) for each in ([None] if index is None else range(len(one.arrays)))]
    if any(found):
        return found[index or 0]
    return "bfloat16" if any("promoted" in name for name in one.called("to_apply")) else ""
