"""Tasks: the operations of a traced program on its ranks, and their costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tplab.jax.tracing.held import Held
from tplab.trace.label import Label


@dataclass(slots=True)
class Task:
    """One operation of the program, on each of `ranks`.

    kind      "compute"; "message": pairs of ranks; "collective": all ranks of each group together
    needs     the numbers of the tasks that must have ended on a rank before it can take part
    groups    all ranks, in groups along the axis; a message goes from one rank to another of the same group
    pairs     message: (from rank, to rank)
    labels    message: of what each sender sends. collective: of each rank's result. compute: of results made from
              received data, by rank
    adding    compute: the ranks that combine their own data with received data
    carried   message: the data sent. collective, compute: the result
    seconds   compute: for an action of a schedule, its time on the clock that counts steps; None: not an action
    held      compute: for an action, the bytes that the rank keeps for backward passes after it; -1: not an action
    together  message: all ranks of a group wait for each other before it, and until it has arrived
    phase     "forward" or "backward"; "": unknown
    reduction how a collective combines the ranks' inputs: "sum", "max", ...
    costs     the collective's name in tplab.cost, if it is not `op`
    rate      compute: the dtype at whose FLOP/s it runs, if it is not `dtype`
    matmul    compute: (m, n, k, batch) of a matmul, for chips whose kernels have been measured
    """

    kind: Literal["compute", "message", "collective"]
    op: str
    ranks: tuple[int, ...]
    needs: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    where: str
    flops: int = 0
    axis: str = ""
    groups: Sequence[tuple[int, ...]] = ()
    pairs: Sequence[tuple[int, int]] = ()
    labels: dict[int, Label] = field(default_factory=dict)
    adding: frozenset[int] = frozenset()
    carried: Held | None = None
    seconds: float | None = None
    held: int = -1
    together: bool = False
    costs: str = ""
    phase: str = ""
    reduction: str = ""
    rate: str = ""
    matmul: tuple[int, int, int, int] | None = None


_VIEWS = {
    "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "slice", "dynamic_slice", "split", "copy",
    "copy_p", "stop_gradient", "optimization_barrier", "random_wrap", "random_unwrap", "iota", "name", "empty",
    "debug_callback", "debug_print",
}  # fmt: skip
_COPIES = {
    "convert_element_type", "bitcast_convert_type", "concatenate", "pad", "gather", "rev", "dynamic_update_slice",
    "scatter", "device_put",
}  # fmt: skip


def is_free(name: str, inputs: Sequence[Held], outputs: Sequence[Held]) -> bool:
    """Whether an operation moves no data: a view, or numbers that locate others (an index, a shape)."""
    return name in _VIEWS or all(held.is_scalar for held in (*inputs, *outputs))


def flops_of(name: str, params: dict[str, Any], inputs: Sequence[Held], outputs: Sequence[Held]) -> int:
    """Floating-point operations: 2 per term of a product, none for a copy, else 1 per element of the larger side."""
    if name in _PRODUCTS:
        contracted, _, _, of_summands = _dims(params, inputs)
        return 2 * outputs[0].size * math.prod(inputs[0].shape[dim] for dim in contracted) // of_summands
    if name == "conv_general_dilated":
        kernel = inputs[1]
        return 2 * outputs[0].size * (kernel.size // kernel.shape[params["dimension_numbers"].rhs_spec[0]])
    if name in _COPIES:
        return 0
    if is_update(name):
        return inputs[-1].size
    return max(held.size for held in (*inputs, *outputs))


def matmul_of(name: str, params: dict[str, Any], inputs: Sequence[Held]) -> tuple[int, int, int, int] | None:
    """(m, n, k, batch) of a product, whose dims may be in any order. Groups count as if all had the same size."""
    if name not in _PRODUCTS:
        return None
    contracted, batched, of_rows, of_summands = _dims(params, inputs)
    left, right = inputs[:2]
    k = math.prod(left.shape[dim] for dim in contracted)
    batch = math.prod(left.shape[dim] for dim in batched)
    each = max(1, k * batch)  # a dim may be empty
    m, n = left.size // each, right.size // (each * of_rows)
    return -(-m // of_rows), n, -(-k // of_summands), batch * of_rows * of_summands


_PRODUCTS = {"dot_general", "ragged_dot_general"}


def _dims(params: dict[str, Any], inputs: Sequence[Held]) -> tuple[Sequence[int], Sequence[int], int, int]:
    """(the left operand's contracted dims, its batch dims, how many groups share its rows, how many share its
    summands). Groups share rows if each has its own matrix, as with experts, and summands in the gradients of these."""
    if (ragged := params.get("ragged_dot_dimension_numbers")) is None:
        (contracted, _), (batched, _) = params["dimension_numbers"]
        return contracted, batched, 1, 1
    (contracted, _), (batched, _) = ragged.dot_dimension_numbers
    (dim,), groups = ragged.lhs_ragged_dimensions, max(inputs[2].size, 1)
    return contracted, batched, 1 if dim in (*contracted, *batched) else groups, groups if dim in contracted else 1


def rate_of(name: str, inputs: Sequence[Held]) -> str:
    """The dtype of a product's operands, which decides its FLOP/s, whatever its result's; "" for anything else."""
    if name not in _PRODUCTS | {"conv_general_dilated"}:
        return ""
    return str(max((held.dtype for held in inputs[:2]), key=lambda dtype: dtype.itemsize))


def is_update(name: str) -> bool:
    """Whether it writes to a part of its first operand."""
    return name == "dynamic_update_slice" or name.startswith("scatter")


def bytes_of(name: str, inputs: Sequence[Held], outputs: Sequence[Held], is_copied: bool = False) -> int:
    """The bytes read and written: every operand and result, or the part of it that is used, as in `touched`.

    is_copied   whether a copy of the updated array is made first, because something else needs the array
    """
    if name == "gather":
        (rows,) = outputs
        return min(inputs[0].num_bytes, rows.num_bytes) + rows.num_bytes + inputs[1].num_bytes
    if not is_update(name):
        return sum(held.num_bytes for held in (*inputs, *outputs))
    whole, update = inputs[0], inputs[1] if name == "dynamic_update_slice" else inputs[2]
    touched = 2 * update.num_bytes
    if name.startswith("scatter"):
        touched = (2 if name == "scatter" else 3) * update.num_bytes + inputs[1].num_bytes
    return touched + (1 if whole.is_scalar else 2 if is_copied else 0) * whole.num_bytes  # zeros are only written
