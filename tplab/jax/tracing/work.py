"""What an instruction of a compiled module computes: FLOPs, their dtype, and bytes read and written."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from tplab.jax.tracing.flow import Flow, Spot
from tplab.jax.tracing.hlo import Array, Instruction
from tplab.jax.tracing.sending import as_written, is_inserted

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


class Work(NamedTuple):
    """main     the instruction that characterises it: a fusion's product, if it has one
    array    its result, or the first of several
    rate     the dtype in which it computes: that of a product's operands
    matmul   (m, n, k, batch) of that product
    """

    main: Instruction
    array: Array
    rate: str
    flops: int
    num_bytes: int
    matmul: tuple[int, int, int, int] | None = None


class Works:
    """The work of a module's instructions. Each is analysed once, however often it runs."""

    def __init__(self, flow: Flow):
        self._flow = flow
        self._known: dict[tuple[str, str], Work | None] = {}

    def of(self, place: Spot) -> Work | None:
        """The work of an instruction; None if it moves no data."""
        key = place.computation, place.one.name
        if key not in self._known:
            arrays = [array for x in (place, *self._flow.operands(place)) for array in x.one.arrays]
            is_free = place.one.op in FREE or all(array.size == 1 for array in arrays) or hands_on(self._flow, place)
            self._known[key] = None if is_free else self._of(place)
        return self._known[key]

    def _of(self, place: Spot) -> Work:
        """The work of an instruction. A fusion counts all FLOPs inside it, but only the bytes that go in and out."""
        flow, inside = self._flow, self._flow.inside(place)
        array = as_written(flow, place)
        flops = {inner.one.name: _flops(flow, inner) for inner in inside}
        products = [inner for inner in inside if is_product(inner.one)]
        about = sum(flops.values()), num_bytes(flow, place)
        if not products:
            return Work(self._named(place, inside), array, array.dtype, *about)
        main = max(products, key=lambda product: flops[product.one.name])
        factors = [as_written(flow, operand) for operand in flow.operands(main)[:2]]
        rate = max(factors, key=lambda factor: factor.itemsize).dtype
        return Work(main.one, array, rate, *about, _matmul(main.one, factors))

    def _named(self, place: Spot, inside: Sequence[Spot]) -> Instruction:
        """The instruction itself; for a fusion without a name from XLA, the last instruction inside it that has one."""
        named = [inner.one for inner in inside if inner.one.primitive and not is_inserted(inner.one)]
        return place.one if place.one.primitive or not named else named[-1]


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


def _flops(flow: Flow, place: Spot) -> int:
    """Floating-point operations: 2 per term of a product, none for a copy, else 1 per element of the larger side."""
    one, operands = place.one, [operand.one.arrays for operand in flow.operands(place)]
    if is_product(one) and (matmul := _matmul(one, [arrays[0] for arrays in operands[:2]])):
        return 2 * math.prod(matmul)
    if one.op == "convolution":
        kernel, labels = operands[1][0], re.search(r"dim_labels=\w+_(\w+)->", one.attributes)
        features = kernel.shape[labels[1].index("o")] if labels else 1
        return 2 * one.arrays[0].size * (kernel.size // features)
    if one.op == "scatter" and is_combining(flow, place):
        return operands[-1][0].size
    if one.op in _COPIES or one.op in FREE or one.op in PASSED_ON:
        return 0
    return max((array.size for arrays in (one.arrays, *operands) for array in arrays), default=0)


# --- bytes ------------------------------------------------------------------------------------------------------------


_PIECES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Instructions that update an array -> which operand is the update."""


def hands_on(flow: Flow, place: Spot) -> bool:
    """Whether it only passes its operand on: a view, or a conversion by XLA."""
    inside = [inner for inner in flow.inside(place) if inner.one.op != "parameter"]
    return bool(inside) and all(map(_is_view, inside))


def is_combining(flow: Flow, place: Spot) -> bool:
    """Whether it combines the update with the existing values, as in a sum, rather than replacing them."""
    called = (flow.module.computations.get(name, []) for name in place.one.called("to_apply"))
    return any(inner.is_root and inner.op != "parameter" for ones in called for inner in ones)


def num_bytes(flow: Flow, place: Spot) -> int:
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
    return _Touched(flow, place).num_bytes()


class _Touched:
    """An instruction, or the instructions inside a fusion, and their input arrays.

    body      the instructions, by name
    given     for each input array, its name here, and where it is made
    results   the names of the arrays that are returned
    """

    def __init__(self, flow: Flow, place: Spot):
        self.flow, self.place = flow, place
        inside, operands = flow.inside(place), flow.operands(place)
        self.body = {inner.one.name: inner for inner in inside if inner.one.op != "parameter"}
        self.given = [(operand.one.name, operand) for operand in operands]
        self.results = [place.one.name]
        if place.one.op == "fusion":
            self.given = [(x.one.name, operands[int(x.one.given)]) for x in inside if x.one.op == "parameter"]
            root = next(inner for inner in inside if inner.one.is_root).one
            self.results = root.operands if root.op == "tuple" else [root.name]

    def num_bytes(self) -> int:
        total, updates = 0, set[str]()
        for result in self.results:
            update = self.body.get(self._source(result))
            given = self._updated(update)
            if update is None or given is None:
                total += _whole(self.flow, self.body.get(result))
                continue
            updates.add(update.one.name)
            total += self._bytes(given, self._size_of_update(update))
            if not _is_last(self.flow, self.place, given):
                total += 2 * _whole(self.flow, given)
        for name, given in self.given:
            size = self._read(name, updates)
            total += _whole(self.flow, given) if size is None else self._bytes(given, size)
        return total

    def _source(self, name: str) -> str:
        """The array here that this is a view of."""
        while name in self.body and _is_view(self.body[name]):
            name = self.body[name].one.operands[0]
        return name

    def _updated(self, update: Spot | None) -> Spot | None:
        """The array that an instruction updates in place."""
        if update is None or update.one.op not in _UPDATES or len(update.one.arrays) > 1:
            return None
        return dict(self.given).get(self._source(update.one.operands[0]))

    def _size_of_update(self, update: Spot) -> int:
        return self.flow.operands(update)[_UPDATES[update.one.op]].one.arrays[0].size

    def _read(self, name: str, updates: set[str]) -> int | None:
        """How many elements of an array are read; None if all."""
        total = 0
        for user in self.body.values():
            if name not in user.one.operands:
                continue
            is_first = user.one.operands[0] == name and user.one.operands.count(name) == 1
            if _is_view(user) and user.one.name not in self.results:
                size = self._read(user.one.name, updates)
            elif is_first and user.one.op in _PIECES:
                size = user.one.arrays[0].size
            elif is_first and user.one.name in updates:
                size = self._size_of_update(user) if is_combining(self.flow, user) else 0
            else:
                size = None
            if size is None:
                return None
            total += size
        return total

    def _bytes(self, given: Spot, size: int) -> int:
        """The bytes of `size` elements of an input array."""
        array = as_written(self.flow, given)
        return array._replace(shape=(min(size, array.size),)).num_bytes


def _whole(flow: Flow, place: Spot | None) -> int:
    if place is None:  # a result that is an input
        return 0
    arrays: list[Array] = place.one.arrays if len(place.one.arrays) != 1 else [as_written(flow, place)]
    return sum(array.num_bytes for array in arrays)


def _is_view(place: Spot) -> bool:
    return place.one.op in ("bitcast", "reshape") or is_inserted(place.one)


def _is_last(flow: Flow, place: Spot, array: Spot) -> bool:
    """Whether nothing needs an array after the instruction at `place`. The caller needs what it has not donated."""
    order = {one.name: number for number, one in enumerate(flow.module.computations[place.computation])}
    pending, seen = [array], set[str]()
    while pending:
        same = pending.pop()
        if same.one.name in seen:
            continue
        seen.add(same.one.name)
        if flow.is_given(same) and int(same.one.given) not in flow.module.donated:
            return False
        users = [user for user in flow.users(same) if user.one.name != place.one.name]
        if any(order[user.one.name] > order[place.one.name] for user in users):
            return False
        pending += [user for user in users if hands_on(flow, user)]
        if same.one.op == "get-tuple-element":
            elements = flow.users(flow.operands(same)[0])
            pending += [user for user in elements if user.one.op == same.one.op and user.one.index == same.one.index]
        elif hands_on(flow, same):
            pending += flow.operands(same)[:1]
    return True
