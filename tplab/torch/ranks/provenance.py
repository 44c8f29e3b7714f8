"""Provenance: which ranks' data a rank sends, receives and computes with, and the program's names for it."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from tplab.torch.private import graph_task
from tplab.torch.ranks.labels import Labels
from tplab.torch.ranks.meter import Cost, Meter
from tplab.torch.ranks.program import is_program, outwards
from tplab.torch.ranks.rank import Rank
from tplab.torch.ranks.values import Values
from tplab.trace.label import UNKNOWN, Label

LABELS_UP_TO = 1024  # elements; a larger received tensor is no reason to follow every operation


class Provenance:
    """What a rank knows about which ranks' data its tensors hold.

    The first tensor that it sends is a new chunk of its own, as is every later one that was not computed from received
    data. Received tensors have labels, which `meter` passes on to what is computed from them. The rank loses track
    where that would cost more than it shows: of what it computes from a large tensor, whose elements are not shown;
    where operations are timed; and after very many operations. From then on it knows only the labels of what it passes
    on unchanged, and reports all others as unknown.

    A collective of all ranks returns data of all ranks, whatever its inputs. So only the result of a collective of some
    ranks has a label.

    number_of   (tensor, the number of earlier chunks) -> the number of a new chunk
    keep        how many results computed from received data keep their values
    on_cost     as for a `Meter`
    is_timed    whether operations are timed, so that following them would change the times
    """

    def __init__(
        self,
        rank: Rank,
        number_of: Callable[[Tensor, int], int],
        keep: int,
        on_cost: Callable[[Cost], None] | None = None,
        is_timed: bool = False,
    ):
        self.rank, self.labels, self.meter = rank.rank, rank.labels, Meter(rank, on_cost)
        self._number_of, self._is_timed = number_of, is_timed
        self._sent = Labels()  # a tensor that is sent again is the same chunk
        self._num_chunks = 0
        self.values = Values(keep)  # of tensors that were computed from received data
        self.has_lost_track = False

    def of(self, x: Tensor) -> Label:
        """The label of a tensor that is about to be sent."""
        if self.has_lost_track and not self.labels.may_have(x) and not self._sent.may_have(x):
            return UNKNOWN
        if self._is_lost():
            return self._unchanged(self.labels, x) or self._unchanged(self._sent, x) or UNKNOWN
        label = self.labels.get(x) or self._sent.get(x)
        if label is None or (label.chunk < 0 and label.contributors):
            label = self._new_chunk(x, label)
        return label

    def put_in(self, x: Tensor) -> Label | None:
        """The label of a tensor that this rank contributes to a collective; None: its own data."""
        if self._is_lost():
            return self._unchanged(self.labels, x) or UNKNOWN
        return self.labels.get(x)

    def _is_lost(self) -> bool:
        if self.meter.num_left < 0:
            self.stop()
        return self.has_lost_track

    def _unchanged(self, labels: Labels, x: Tensor) -> Label | None:
        """The label of a tensor, if it has not been written to since."""
        label = labels.get(x)
        return None if label is None or labels.is_changed(x) else label

    def starts_with(self, x: Tensor) -> None:
        """Treat `x` as new data of this rank, if it has no label."""
        if self.labels.get(x) is None:
            self._new_chunk(x)

    def _new_chunk(self, x: Tensor, made_from: Label | None = None) -> Label:
        contributors = made_from.contributors if made_from is not None else (self.rank,)
        label = Label(self._number_of(x, self._num_chunks), contributors)
        self._num_chunks += 1
        self._sent.set(x, label)
        return label

    def received(self, x: Tensor, label: Label | None) -> None:
        """Label what arrived, and follow its data from here on."""
        if label is not None and (label != UNKNOWN or not self.has_lost_track):
            self.labels.set(x, label)
        if self._is_lost() or self.meter.is_open:
            return
        # inside a backward pass the meter cannot be opened: the end of that pass would silently close it
        if x.numel() <= LABELS_UP_TO and not self._is_timed and graph_task() == -1:
            self.meter.open()
        else:
            self.has_lost_track = True

    def stop(self) -> None:
        """Stop following operations."""
        self.has_lost_track = True
        if self.meter.on_cost is None:
            self.meter.close()


# --- the name of a tensor in the program that sends it ----------------------------------------------------------------


NAMES_UP_TO = 64
"""How many chunks of a rank are looked up in the program's variables."""

_PLAIN = (Tensor, Parameter)


def name_in_program(x: Tensor) -> str:
    """ "Z" where x is the program's variable Z; "x[3]" where it is piece 3 of x, cut into pieces of equal size.

    Pieces come first: the name of the whole says more than a piece's own variable. The search goes from the program's
    outermost function inwards, and in each function follows the order in which variables are made, arguments first. Of
    several variables of a function that are this tensor, it takes the one in the running expression. Else "".
    """
    memory = _memory(x)
    if memory is None:
        return ""
    first = given = ""
    frames = [frame for frame in outwards(sys._getframe(1)) if is_program(frame.f_code.co_filename)]
    for frame in reversed(frames):
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
    """The address of a tensor's memory, and its dtype; None if it has none, as on the meta device."""
    if type(x) not in _PLAIN or x.device.type == "meta" or not x.numel():
        return None
    try:
        return x.untyped_storage().data_ptr(), x.dtype
    except (RuntimeError, NotImplementedError):  # torch.func wraps tensors that have no memory of their own
        return None


def _tensors(frame: FrameType) -> list[tuple[str, Tensor]]:
    """The function's variables that are tensors, its arguments first."""
    names = frame.f_code.co_varnames + frame.f_code.co_cellvars
    values = frame.f_locals
    return [(name, values[name]) for name in dict.fromkeys(names) if type(values.get(name)) in _PLAIN]


def _written(frame: FrameType) -> set[str]:
    """The names in the expression that the function is evaluating."""
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
    """The index of x among equal pieces of `whole`, along one dim or of its elements in order; or None."""
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
