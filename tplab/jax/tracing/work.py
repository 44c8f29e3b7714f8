"""What an instruction of a compiled module computes: FLOPs, their dtype, and bytes read and written."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from tplab.jax.tracing.flow import Flow, Place
from tplab.jax.tracing.hlo import Array, Instruction
from tplab.jax.tracing.narrow import as_written, is_inserted
from tplab.jax.tracing.touched import hands_on, is_combining, num_bytes

PASSED_ON = {
    "bitcast", "copy-start", "opt-barrier", "optimization-barrier", "domain", "get-tuple-element", "recv",
}  # fmt: skip
"""What gives on what it is given, as every "-done" and "-update" does."""

FREE = {
    "constant", "iota", "partition-id", "replica-id", "after-all", "reshape", "broadcast", "add-dependency",
    "get-dimension-size", "rng-get-and-update-state", "parameter", "tuple",
}  # fmt: skip
"""What moves no data."""

_COPIES = {
    "copy", "transpose", "concatenate", "slice", "dynamic-slice", "dynamic-update-slice", "pad", "reverse", "gather",
    "convert", "bitcast-convert", "reduce-precision", "scatter",
}  # fmt: skip


class Work(NamedTuple):
    """main     the instruction that characterises it: a fusion's product, if it has one
    array    what it makes, or the first of several
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
    """What the instructions of a module compute. Each is worked out once, however often it runs."""

    def __init__(self, flow: Flow):
        self._flow = flow
        self._known: dict[tuple[str, str], Work | None] = {}

    def of(self, place: Place) -> Work | None:
        """What an instruction computes; None if it moves no data."""
        key = place.computation, place.one.name
        if key not in self._known:
            arrays = [array for x in (place, *self._flow.operands(place)) for array in x.one.arrays]
            is_free = place.one.op in FREE or all(array.size == 1 for array in arrays) or hands_on(self._flow, place)
            self._known[key] = None if is_free else self._of(place)
        return self._known[key]

    def _of(self, place: Place) -> Work:
        """A fusion counts everything inside it, but only the bytes that go in and out."""
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

    def _named(self, place: Place, inside: Sequence[Place]) -> Instruction:
        """The instruction itself; of a fusion to which XLA gave no name, the last inside it that has one."""
        named = [inner.one for inner in inside if inner.one.primitive and not is_inserted(inner.one)]
        return place.one if place.one.primitive or not named else named[-1]


def is_product(one: Instruction) -> bool:
    """Whether it multiplies matrices, or convolves."""
    return one.op in ("dot", "convolution") or (one.op == "custom-call" and bool(_PRODUCT.search(one.attributes)))


_PRODUCT = re.compile(r'custom_call_target="[^"]*(?:matmul|gemm|dot)')


def _matmul(one: Instruction, factors: Sequence[Array]) -> tuple[int, int, int, int] | None:
    if len(factors) < 2 or one.op == "convolution":
        return None
    left, right = factors
    if one.op == "dot":
        k = math.prod(left.shape[dim] for dim in one.dims("lhs_contracting_dims"))
        batch = math.prod(left.shape[dim] for dim in one.dims("lhs_batch_dims"))
    else:
        product = one.arrays[0]
        batch = math.prod(product.shape[:-2])
        k = math.isqrt(left.size * right.size // max(1, product.size * batch))
    each = max(1, k * batch)  # a dim may be empty
    return left.size // each, right.size // each, k, batch


def _flops(flow: Flow, place: Place) -> int:
    """Floating-point operations: 2 per term of a product, none for a copy, else 1 per element of the larger side."""
    one, operands = place.one, [operand.one.arrays for operand in flow.operands(place)]
    if one.op == "dot":
        return 2 * one.arrays[0].size * math.prod(operands[0][0].shape[dim] for dim in one.dims("lhs_contracting_dims"))
    if one.op == "convolution":
        kernel, labels = operands[1][0], re.search(r"dim_labels=\w+_(\w+)->", one.attributes)
        features = kernel.shape[labels[1].index("o")] if labels else 1
        return 2 * one.arrays[0].size * (kernel.size // features)
    if is_product(one):
        left, right, product = operands[0][0], operands[1][0], one.arrays[0]  # [.., m, k] [.., k, n] -> [.., m, n]
        batch = math.prod(product.shape[:-2])
        return 2 * product.size * math.isqrt(left.size * right.size // max(1, product.size * batch))
    if one.op == "scatter" and is_combining(flow, place):
        return operands[-1][0].size
    if one.op in _COPIES or one.op in FREE or one.op in PASSED_ON:
        return 0
    return max((array.size for arrays in (one.arrays, *operands) for array in arrays), default=0)
