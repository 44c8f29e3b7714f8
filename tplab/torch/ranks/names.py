"""The name of a tensor in the program that sends it: the variable it is, or which piece of a variable."""

from __future__ import annotations

import dis
import sys
from types import FrameType
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from tplab.torch.ranks.program import is_program

NAMES_UP_TO = 64
"""Chunks of a rank. Those that it sends later are not looked for in the program's variables."""

_PLAIN = (Tensor, Parameter)


def name_in_program(x: Tensor) -> str:
    """ "Z" where x is the program's variable Z; "x[3]" where it is piece 3 of x, cut into pieces of equal size.

    Pieces come first: if a piece also has a variable of its own, the name of the whole says more. The search goes from
    the program's outermost function inwards, and in each function follows the order in which variables are made,
    arguments first. Where several variables of a function are this tensor, it has the name in the function's call. ""
    if none is found.
    """
    memory = _memory(x)
    if memory is None:
        return ""
    first = given = ""
    for frame in reversed(_frames()):
        here = []
        for name, value in _tensors(frame):
            if _memory(value) != memory:
                continue
            index = _piece(value, x)
            if index is not None:
                return f"{name}[{index}]"
            if value.numel() == x.numel() and value.storage_offset() == x.storage_offset():
                here.append(name)
        if len(here) > 1 and not given:
            given = next((name for name in here if name in _written(frame)), "")
        first = first or "".join(here[:1])
    return given or first


def _memory(x: Tensor) -> tuple[int, Any] | None:
    """Where a tensor's numbers are, and their dtype; None if it has none, as on torch's meta device."""
    if type(x) not in _PLAIN or x.device.type == "meta" or not x.numel():
        return None
    try:
        return x.untyped_storage().data_ptr(), x.dtype
    except (RuntimeError, NotImplementedError):  # torch.func wraps tensors that have no memory of their own
        return None


def _frames() -> list[FrameType]:
    """The functions of the program that are running, the innermost first."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        if is_program(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    return frames


def _tensors(frame: FrameType) -> list[tuple[str, Tensor]]:
    """The function's variables that are tensors, its arguments first."""
    names = frame.f_code.co_varnames + frame.f_code.co_cellvars
    values = frame.f_locals
    return [(name, values[name]) for name in dict.fromkeys(names) if type(values.get(name)) in _PLAIN]


def _written(frame: FrameType) -> set[str]:
    """The names that are written in the expression which the function evaluates now."""
    steps = [step for step in dis.get_instructions(frame.f_code) if step.positions and step.positions.lineno]
    now = next((step.positions for step in reversed(steps) if step.offset <= frame.f_lasti), None)
    if now is None or now.col_offset is None:
        return set()
    found = [step.argval for step in steps if step.opname.startswith("LOAD_") and _is_inside(step.positions, now)]
    return {name for names in found for name in (names if isinstance(names, tuple) else (names,))}


def _is_inside(place: Any, whole: Any) -> bool:
    begin, end = (place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset)
    return (whole.lineno, whole.col_offset) <= begin and end <= (whole.end_lineno, whole.end_col_offset)


def _piece(whole: Tensor, x: Tensor) -> int | None:
    """Which piece of `whole` x is: the pieces are equal parts along one dim, or of the elements in their order."""
    if not 0 < x.numel() < whole.numel():
        return None
    offset = int(x.storage_offset() - whole.storage_offset())
    if x.is_contiguous() and whole.is_contiguous():
        index, rest = divmod(offset, x.numel())
        return index if not rest and not whole.numel() % x.numel() and 0 <= offset < whole.numel() else None
    differ = [dim for dim in range(x.dim()) if x.dim() == whole.dim() and x.shape[dim] != whole.shape[dim]]
    if len(differ) != 1 or x.stride() != whole.stride():
        return None
    (dim,) = differ
    index, rest = divmod(offset, int(x.stride(dim) * x.shape[dim]))
    return index if not rest and not whole.shape[dim] % x.shape[dim] else None
