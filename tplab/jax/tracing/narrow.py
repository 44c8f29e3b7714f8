"""The dtype that an array has in the program, where XLA's CPU computes with a wider one.

XLA for CPUs converts 8- and 16-bit operands of products, and of most else, to float32, and the result back. On GPUs and
TPUs these converts do not exist. We tell them from the program's own by their names: JAX calls its own
"convert_element_type", while those that XLA inserts have no name, or that of the operation that they serve.

What this cannot tell apart: XLA may merge a convert of the program with one of its own. Where the program says
`(x @ w).astype("float32")`, and x and w are bfloat16, XLA drops both converts of the result, and the product counts as
one that writes float32. Between elementwise operations XLA may leave out rounding to bfloat16 altogether. Then what one
fusion gives to another counts as float32.
"""

from __future__ import annotations

from tplab.jax.tracing.flow import Flow, Spot
from tplab.jax.tracing.hlo import Array, Instruction


def is_inserted(one: Instruction) -> bool:
    """Whether it is a convert that the program does not have."""
    return one.op == "convert" and one.primitive != "convert_element_type"


def as_written(flow: Flow, place: Spot) -> Array:
    """The array that is made here, with the dtype that it has in the program."""
    array, key = place.one.arrays[0], (place.computation, place.one.name)
    if len(place.one.arrays) > 1 or not _is_float(array) or array.itemsize == 1 or flow.is_given(place):
        return array
    if key not in flow.dtypes:
        flow.dtypes[key] = narrow_before(flow, place) or narrow_after(flow, place) or array.dtype
    return array._replace(dtype=flow.dtypes[key])


def narrow_before(flow: Flow, place: Spot) -> str:
    """The dtype from which XLA has widened this array; "" if it has not."""
    found = ""
    for before in flow.back(place):
        if before.one.op == "convert":
            (given,) = flow.operands(before)
            if not is_inserted(before.one) or not _is_narrower(given.one.arrays[0], before.one.arrays[0]):
                return found
            found = given.one.arrays[0].dtype
        elif before.one.op == "broadcast" and not found:
            return narrow_before(flow, flow.operands(before)[0])
    return found


def narrow_after(flow: Flow, place: Spot, index: int | None = None) -> str:
    """The dtype to which XLA converts what it has computed in a wider one, or the sum over ranks of it; "" if it does
    not. What the program itself converts was wide, also where XLA sends both together.

    index   which element, where it is a tuple
    """
    array = narrowest = place.one.arrays[index or 0]
    sums: list[Spot] = []
    for user, computes in flow.walk(place, index):
        if computes:
            sums += [user] if user.one.collective in ("all_reduce", "reduce_scatter") else []
        elif user.one.op == "convert" and _is_narrower(user.one.arrays[0], narrowest):
            if not is_inserted(user.one):
                return "" if narrowest is array else narrowest.dtype
            narrowest = user.one.arrays[0]
    if narrowest is not array:
        return narrowest.dtype
    if len(sums) != 1 or len(sums[0].one.arrays) != len(flow.operands(sums[0])):
        return ""
    given = flow.operands(sums[0])
    number = next((n for n, operand in enumerate(given) if place in flow.back(operand)), 0)
    return narrow_after(flow, sums[0], number if len(given) > 1 else None)


def _is_narrower(one: Array, other: Array) -> bool:
    return _is_float(one) and _is_float(other) and one.itemsize < other.itemsize


def _is_float(array: Array) -> bool:
    return "float" in array.dtype
