"""What an instruction of a compiled module computes: FLOPs, their dtype, and bytes read and written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from tplab.jax.tracing.flow import inside, is_given
from tplab.jax.tracing.hlo import Array, Instruction
from tplab.jax.tracing.jaxprs import reached
from tplab.jax.tracing.sending import as_written, is_inserted
from tplab.jax.tracing.tasks import Task

PASSED_ON = {
    "bitcast", "copy-start", "opt-barrier", "optimization-barrier", "domain", "get-tuple-element", "recv",
}  # fmt: skip
"""Operations that pass on their operand, as every "-done" and "-update" does."""

FREE = {
    "constant", "iota", "partition-id", "replica-id", "after-all", "reshape", "broadcast", "add-dependency",
    "get-dimension-size", "rng-get-and-update-state", "parameter", "tuple",
}  # fmt: skip
"""Operations that move no data."""

_COPIES = {
    "copy", "transpose", "concatenate", "slice", "dynamic-slice", "dynamic-update-slice", "pad", "reverse", "gather",
    "convert", "bitcast-convert", "reduce-precision", "scatter",
}  # fmt: skip


class Works(dict[Instruction, Task | None]):
    """The work of a module's instructions, as tasks of `ranks` that need nothing; None for an instruction that moves no
    data. Each is analysed once, however often it runs."""

    def __init__(self, ranks: tuple[int, ...]):
        self.ranks = ranks

    def __missing__(self, one: Instruction) -> Task | None:
        arrays = [array for x in (one, *one.operands) for array in x.arrays]
        is_free = one.op in FREE or all(array.size == 1 for array in arrays) or hands_on(one)
        self[one] = work = None if is_free else self._of(one)
        return work

    def _of(self, one: Instruction) -> Task:
        """A fusion counts all FLOPs inside it, but only the bytes that go in and out. It is named after its product, if
        it has one; else, if XLA gives it no name, after the last instruction inside it that has one."""
        array, parts = as_written(one), {part: _flops(part) for part in inside(one)}
        rate, matmul = array.dtype, None
        if products := list(filter(is_product, parts)):
            main = max(products, key=parts.__getitem__)
            factors = [as_written(operand) for operand in main.operands[:2]]
            rate, matmul = max(factors, key=lambda factor: factor.itemsize).dtype, _matmul(main, factors)
        else:
            named = [part for part in parts if part.primitive and not is_inserted(part)]
            main = one if one.primitive or not named else named[-1]
        op, where = main.primitive or one.primitive or one.op, one.module.where(main) or one.module.where(one)
        about = array.shape, array.dtype, num_bytes(one), where, sum(parts.values())
        return Task("compute", op, self.ranks, (), *about, phase=main.phase, rate=rate, matmul=matmul)


def is_product(one: Instruction) -> bool:
    """Whether it is a matrix product or a convolution."""
    return one.op in ("dot", "convolution") or (one.op == "custom-call" and bool(_PRODUCT.search(one.attributes)))


_PRODUCT = re.compile(r'custom_call_target="[^"]*(?:matmul|gemm|dot)')


def _matmul(one: Instruction, factors: Sequence[Array]) -> tuple[int, int, int, int] | None:
    """(m, n, k, batch) of a matrix product, from the arrays that it multiplies; None for a convolution."""
    if len(factors) < 2 or one.op == "convolution":
        return None
    left, right = factors
    if one.op == "dot":
        k = math.prod(left.shape[dim] for dim in one.dims("lhs_contracting_dims"))
        batch = math.prod(left.shape[dim] for dim in one.dims("lhs_batch_dims"))
    else:
        product = one.arrays[0]  # [.., m, k] [.., k, n] -> [.., m, n]
        batch = math.prod(product.shape[:-2])
        k = math.isqrt(left.size * right.size // max(1, product.size * batch))
    each = max(1, k * batch)  # a dim may be empty
    return left.size // each, right.size // each, k, batch


def _flops(one: Instruction) -> int:
    """Floating-point operations: 2 per term of a product, none for a copy, else 1 per element of the larger side."""
    operands = [operand.arrays for operand in one.operands]
    if is_product(one) and (matmul := _matmul(one, [arrays[0] for arrays in operands[:2]])):
        return 2 * math.prod(matmul)
    if one.op == "convolution":
        kernel, labels = operands[1][0], re.search(r"dim_labels=\w+_(\w+)->", one.attributes)
        features = kernel.shape[labels[1].index("o")] if labels else 1
        return 2 * one.arrays[0].size * (kernel.size // features)
    if one.op == "scatter" and is_combining(one):
        return operands[-1][0].size
    if one.op in _COPIES or one.op in FREE or one.op in PASSED_ON:
        return 0
    return max((array.size for arrays in (one.arrays, *operands) for array in arrays), default=0)


# --- bytes ------------------------------------------------------------------------------------------------------------


_PIECES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Instructions that update an array -> which operand is the update."""


def hands_on(one: Instruction) -> bool:
    """Whether it only passes its operand on: a view, or a conversion by XLA."""
    parts = [part for part in inside(one) if part.op != "parameter"]
    return bool(parts) and all(map(_is_view, parts))


def is_combining(one: Instruction) -> bool:
    """Whether it combines the update with the existing values, as in a sum, rather than replacing them."""
    called = (one.module.computations.get(name, []) for name in one.called("to_apply"))
    return any(inner.is_root and inner.op != "parameter" for ones in called for inner in ones)


def num_bytes(one: Instruction) -> int:
    """The bytes that an instruction reads and writes: of arrays used in part, only that part.

        slice, dynamic-slice    the piece, read and written
        gather                  the rows, read and written, and the indices
        dynamic-update-slice    the update, read and written
        scatter                 the update, read and written, and the indices; the existing values are read too if both
                                are combined, as in a sum

    A fusion reads its operands and writes its results, or the parts of them that it uses. XLA counts in the same way
    (HloCostAnalysis in xla/service/hlo_cost_analysis.cc, read at openxla/xla 001918b), but it reads the existing values
    for every scatter. Arrays have the dtypes of the program (`as_written`).

    An update is in place if nothing needs the array afterwards. Otherwise XLA makes a copy first, as a separate
    instruction. For CPUs it instead converts a narrow array back and forth, so that the update needs no copy: there we
    add the copy that GPUs and TPUs make.
    """
    return _Touched(one).num_bytes()


class _Touched:
    """An instruction, or the instructions inside a fusion, and their input arrays.

    body      the instructions
    given     for each input array, what stands for it here, and where it is made
    results   the arrays that are returned
    """

    def __init__(self, one: Instruction):
        self.one = one
        self.body = [part for part in inside(one) if part.op != "parameter"]
        self.given = [(operand, operand) for operand in one.operands]
        self.results = [one]
        if one.op == "fusion":
            self.given = [(x, one.operands[int(x.given)]) for x in inside(one) if x.op == "parameter"]
            root = next(part for part in inside(one) if part.is_root)
            self.results = root.operands if root.op == "tuple" else [root]

    def num_bytes(self) -> int:
        total, updates = 0, set[Instruction]()
        for result in self.results:
            update = self._source(result)
            given = self._updated(update)
            if given is None:
                total += _whole(result) if result in self.body else 0  # otherwise it is an input
                continue
            updates.add(update)
            total += _bytes(given, _size_of_update(update))
            if not _is_last(self.one, given):
                total += 2 * _whole(given)
        for here, given in self.given:
            size = self._read(here, updates)
            total += _whole(given) if size is None else _bytes(given, size)
        return total

    def _source(self, one: Instruction) -> Instruction:
        """The array here that this is a view of."""
        while one in self.body and _is_view(one):
            one = one.operands[0]
        return one

    def _updated(self, update: Instruction) -> Instruction | None:
        """The array that an instruction updates in place."""
        if update not in self.body or update.op not in _UPDATES or len(update.arrays) > 1:
            return None
        return dict(self.given).get(self._source(update.operands[0]))

    def _read(self, one: Instruction, updates: set[Instruction]) -> int | None:
        """How many elements of an array are read; None if all."""
        total = 0
        for user in self.body:
            if one not in user.operands:
                continue
            is_first = user.operands[0] is one and user.operands.count(one) == 1
            if _is_view(user) and user not in self.results:
                size = self._read(user, updates)
            elif is_first and user.op in _PIECES:
                size = user.arrays[0].size
            elif is_first and user in updates:
                size = _size_of_update(user) if is_combining(user) else 0
            else:
                size = None
            if size is None:
                return None
            total += size
        return total


def _size_of_update(update: Instruction) -> int:
    return update.operands[_UPDATES[update.op]].arrays[0].size


def _bytes(given: Instruction, size: int) -> int:
    """The bytes of `size` elements of an input array."""
    array = as_written(given)
    return array._replace(shape=(min(size, array.size),)).num_bytes


def _whole(one: Instruction) -> int:
    arrays: list[Array] = one.arrays if len(one.arrays) != 1 else [as_written(one)]
    return sum(array.num_bytes for array in arrays)


def _is_view(one: Instruction) -> bool:
    return one.op in ("bitcast", "reshape") or is_inserted(one)


def _is_last(one: Instruction, array: Instruction) -> bool:
    """Whether nothing needs an array after an instruction. The caller needs what it has not donated."""
    order = {each: number for number, each in enumerate(one.module.computations[one.computation])}

    def same(array: Instruction) -> Iterator[Instruction]:
        yield from (user for user in array.users if user is not one and hands_on(user))
        if array.op == "get-tuple-element":
            elements = array.operands[0].users
            yield from (user for user in elements if user.op == array.op and user.index == array.index)
        elif hands_on(array):
            yield from array.operands[:1]

    for each in reached([array], same):
        if is_given(each) and int(each.given) not in one.module.donated:
            return False
        if any(order[user] > order[one] for user in each.users if user is not one):
            return False
    return True
