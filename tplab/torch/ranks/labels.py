"""Labels: which ranks' data a tensor holds, as far as one rank knows."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from torch import Tensor

from tplab.trace.label import Label


class Labels:
    """Tensor -> label. Nothing is written to the tensors, which other ranks may also hold, and none is kept alive."""

    __slots__ = ("_entries", "_purge_at")

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[Tensor], Label]] = {}  # by identity: tensors compare element by element
        self._purge_at = 256

    def get(self, x: Tensor) -> Label | None:
        entry = self._entries.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def set(self, x: Tensor, label: Label) -> None:
        self._entries[id(x)] = ref(x), label
        if len(self._entries) > self._purge_at:
            self._entries = {key: entry for key, entry in self._entries.items() if entry[0]() is not None}
            self._purge_at = 256 + 2 * len(self._entries)

    def drop(self, x: Tensor) -> None:
        self._entries.pop(id(x), None)

    def joined(self, operands: Iterable[Tensor], rank: int) -> Label | None:
        """The label of what `rank` computes from these: the first one's chunk, the contributors of all, and this rank
        too if any operand is its own data. None if no operand has a label."""
        first, contributors, takes_part = None, set(), False
        for x in operands:
            label = self.get(x)
            if label is not None:
                first = first or label
                contributors.update(label.contributors)
            elif x.dim() > 0:
                takes_part = True
        if first is None:
            return None
        if takes_part:
            contributors.add(rank)
        if len(contributors) == len(first.contributors):
            return first
        return Label(first.chunk, tuple(sorted(contributors)))
