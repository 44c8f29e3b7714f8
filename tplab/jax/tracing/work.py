"""What an instruction of a compiled module computes: FLOPs, and bytes read and written."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from tplab.jax.tracing.hlo import Instruction, Module

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
    matmul   (m, n, k, batch) of that product
    """

    main: Instruction
    flops: int
    num_bytes: int
    matmul: tuple[int, int, int, int] | None = None


def work_of(module: Module, one: Instruction, operands: Sequence[Instruction]) -> Work:
    """What an instruction computes. A fusion counts everything inside it, but only the bytes that go in and out."""
    if one.op != "fusion":
        return Work(one, _flops(one, operands), _bytes(one, operands), _matmul(one, operands))
    inside = {inner.name: inner for inner in module.computations[one.called("calls")[0]]}
    flops, num_bytes, main, most, matmul = 0, 0, one, 0, None
    for inner in inside.values():
        its_operands = [inside[name] for name in inner.operands if name in inside]
        its_flops = _flops(inner, its_operands)
        flops += its_flops
        if is_product(inner) and its_flops > most:
            main, most, matmul = inner, its_flops, _matmul(inner, its_operands)
        if inner.op == "parameter":  # perhaps only a piece of it is read, or written in place
            pieces = [_piece(user, inner, inside) for user in inside.values() if inner.name in user.operands]
            whole = sum(array.num_bytes for array in inner.arrays)
            num_bytes += whole if None in pieces else sum(piece for piece in pieces if piece)
        if inner.is_root:
            piece = _piece(inner, inside[inner.operands[0]], inside) if inner.op == "dynamic-update-slice" else None
            num_bytes += sum(array.num_bytes for array in one.arrays) if piece is None else piece
    return Work(main, flops, num_bytes, matmul)


def is_product(one: Instruction) -> bool:
    """Whether it multiplies matrices, or convolves."""
    return one.op in ("dot", "convolution") or (one.op == "custom-call" and bool(_PRODUCT.search(one.attributes)))


_PRODUCT = re.compile(r'custom_call_target="[^"]*(?:matmul|gemm|dot)')


def _matmul(one: Instruction, operands: Sequence[Instruction]) -> tuple[int, int, int, int] | None:
    if len(operands) < 2:
        return None
    if one.op == "dot":
        left, right = (x.arrays[0] for x in operands[:2])
        k = math.prod(left.shape[dim] for dim in one.dims("lhs_contracting_dims"))
        batch = math.prod(left.shape[dim] for dim in one.dims("lhs_batch_dims"))
    elif one.op == "custom-call" and is_product(one):
        left, right, product = (x.arrays[0] for x in (*operands[:2], one))
        batch = math.prod(product.shape[:-2])
        k = math.isqrt(left.size * right.size // max(1, product.size * batch))
    else:
        return None
    each = max(1, k * batch)  # a dim may be empty
    return left.size // each, right.size // each, k, batch


def _flops(one: Instruction, operands: Sequence[Instruction]) -> int:
    """Floating-point operations: 2 per term of a product, none for a copy, else 1 per element of the larger side."""
    if one.op == "dot":
        contracted = [operands[0].arrays[0].shape[dim] for dim in one.dims("lhs_contracting_dims")]
        return 2 * one.arrays[0].size * math.prod(contracted)
    if one.op == "convolution":
        kernel, labels = operands[1].arrays[0], re.search(r"dim_labels=\w+_(\w+)->", one.attributes)
        features = kernel.shape[labels[1].index("o")] if labels else 1
        return 2 * one.arrays[0].size * (kernel.size // features)
    if is_product(one):
        left, right, product = (x.arrays[0] for x in (*operands[:2], one))  # [.., m, k] [.., k, n] -> [.., m, n]
        batch = math.prod(product.shape[:-2])
        return 2 * product.size * math.isqrt(left.size * right.size // max(1, product.size * batch))
    if one.op in _COPIES or one.op in FREE or one.op in PASSED_ON:
        return 0
    return max((array.size for x in (one, *operands) for array in x.arrays), default=0)


def _bytes(one: Instruction, operands: Sequence[Instruction]) -> int:
    """The bytes read and written: every operand and result; for an array read or updated in part, only that part."""
    if one.op == "dynamic-slice":
        return 2 * one.arrays[0].num_bytes
    if one.op == "dynamic-update-slice":
        return 2 * operands[1].arrays[0].num_bytes
    return sum(array.num_bytes for x in (one, *operands) for array in x.arrays)


def _piece(user: Instruction, array: Instruction, inside: dict[str, Instruction]) -> int | None:
    """How many bytes of an array this instruction of a fusion reads or writes; None if all."""
    if user.op == "dynamic-slice" and user.operands[0] == array.name:
        return user.arrays[0].num_bytes
    if user.op == "dynamic-update-slice" and user.operands[0] == array.name:
        return inside[user.operands[1]].arrays[0].num_bytes
    return None
