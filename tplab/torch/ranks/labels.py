"""Labels: which ranks' data a tensor holds, as far as one rank knows."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from torch import Tensor

from tplab.trace.label import UNKNOWN, Label


class Labels:
    """Tensor -> label. Nothing is written to the tensors, which other ranks may share, and none is kept alive."""

    __slots__ = ("_entries", "_purge_at")

    def __init__(self) -> None:
        # by identity: tensors compare element by element
        self._entries: dict[int, tuple[ref[Tensor], Label, int]] = {}
        self._purge_at = 256

    def get(self, x: Tensor) -> Label | None:
        entry = self._entries.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def may_have(self, x: Tensor) -> bool:
        """Whether `x` may have a label; faster than `get`."""
        return id(x) in self._entries

    def is_changed(self, x: Tensor) -> bool:
        """Whether `x`, which has a label, has been written to since it got it."""
        return self._entries[id(x)][2] != _version(x)

    def set(self, x: Tensor, label: Label) -> None:
        self._entries[id(x)] = ref(x), label, _version(x)
        if len(self._entries) > self._purge_at:
            self._entries = {key: entry for key, entry in self._entries.items() if entry[0]() is not None}
            self._purge_at = 256 + 2 * len(self._entries)

    def drop(self, x: Tensor) -> None:
        self._entries.pop(id(x), None)

    def joined(self, operands: Iterable[Tensor], rank: int) -> Label | None:
        """The label of what `rank` computes from these: the first received chunk, the contributors of all, and this
        rank too if any operand is its own data. None if no operand has a label, UNKNOWN if one is unknown.

        A single number beside tensors with dims is a factor, not data of the rank. Among single numbers it is data.
        """
        known, takes_part = list[Label](), False
        operands = tuple(operands)
        are_numbers = all(x.dim() == 0 for x in operands)
        for x in operands:
            label = self.get(x)
            if label is not None:
                if not label.contributors:
                    return UNKNOWN
                known.append(label)
            elif are_numbers or x.dim() > 0:
                takes_part = True
        if not known:
            return None
        first = next((label for label in known if label.chunk >= 0), known[0])
        members = first.contributors  # possibly all ranks of a group, so that sets of them would be slow
        if all(label.contributors is members for label in known) and (not takes_part or rank in members):
            return first
        contributors = {rank} if takes_part else set[int]()
        contributors.update(*(label.contributors for label in known))
        return first if len(contributors) == len(members) else Label(first.chunk, tuple(sorted(contributors)))


def _version(x: Tensor) -> int:
    """How often `x` has been written to; tensors of inference mode do not count it."""
    return -1 if x.is_inference() else x._version
