"""What the variables of a traced program hold on every rank: which ranks' data, and its values if they are small."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from tplab.trace.label import UNKNOWN, Label

MOST_ELEMENTS = 4096
"""Of a tensor whose values are worked out. A larger one, and what is computed from it, is not looked into."""
MOST_NUMBERS = 1 << 22
"""Of one of whole numbers: tables that say who does what may be larger."""

PerRank = list[Any]
Rule = Callable[[list[PerRank]], list[PerRank]]
"""The values of some variables on every rank -> those of the variables computed from them."""


class Chunk(Protocol):
    """The number of the chunk that is piece `piece` of what a rank held, known in the program as `name`."""

    def __call__(self, origin_rank: int, piece: int, name: str = "") -> int: ...


class _Node:
    """A computation that is carried out when its results are first asked for."""

    __slots__ = ("inputs", "results", "rule")

    def __init__(self, inputs: Sequence[Held], rule: Rule):
        self.inputs, self.rule = inputs, rule
        self.results: list[PerRank] | None = None


class Held:
    """What one variable holds.

    shape, dtype   of each rank's array
    needs          the tasks that must have ended on a rank before it exists there
    labels         each rank's label; None where the data is the rank's own
    sent           the label under which a rank's own data was first sent
    is_scalar      whether it is a single number, or one repeated: not a tensor of a rank's own
    is_literal     whether it is written as a number in the program
    name           the parameter of the program that it is, or ""
    moved          the equation and what it read, if it only picks or reorders elements
    """

    __slots__ = (
        "_node",
        "_place",
        "_values",
        "dtype",
        "is_literal",
        "is_scalar",
        "labels",
        "moved",
        "name",
        "needs",
        "sent",
        "shape",
    )

    def __init__(self, aval: Any, needs: Iterable[int] = (), labels: Sequence[Label | None] | None = None):
        self.shape, self.dtype = tuple(aval.shape), aval.dtype
        self.needs = tuple(sorted(set(needs)))
        self.labels = labels
        self.sent: dict[int, Label] = {}
        self.is_scalar = not self.shape
        self.is_literal = False
        self.name = ""
        self.moved: tuple[Any, Sequence[Held]] | None = None
        self._values: PerRank | None = None
        self._node: _Node | None = None
        self._place = 0

    @classmethod
    def known(cls, aval: Any, values: PerRank | None) -> Held:
        """A variable that is given, with its values on every rank, or None."""
        held = cls(aval)
        held._values = values if is_small(held) else None
        return held

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def num_bytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def is_known(self) -> bool:
        """Whether the values can be worked out."""
        return self._values is not None or self._node is not None

    def label(self, rank: int) -> Label | None:
        return None if self.labels is None else self.labels[rank]

    def made_by(self, needs: Iterable[int], labels: Sequence[Label | None] | None) -> Held:
        """The same, as made by these tasks. Of its values only a number is kept, as it may decide something."""
        held = Held(self, needs, labels)
        if not self.shape:
            held._values, held._node, held._place = self._values, self._node, self._place
        return held

    def after(self, needs: Iterable[int]) -> Held:
        """The same, but it does not exist before these tasks have ended too."""
        if set(needs) <= set(self.needs):
            return self
        held = copy(self)
        held.needs = tuple(sorted({*self.needs, *needs}))
        return held

    def drop_part(self, inputs: Sequence[Held]) -> None:
        """It is no longer the part of a tensor that one of `inputs` was, if it has another size."""
        if self.labels is None or not any(label is not None and label.part for label in self.labels):
            return
        if any(held.labels is not None and held.size != self.size for held in inputs):
            self.labels = [label and label._replace(part=()) for label in self.labels]

    def values(self) -> PerRank | None:
        """What each rank holds; None where that is not known, or is too large to work out."""
        if self._values is None and self._node is not None:
            _carry_out(self._node)
            results = self._node.results
            self._values = results[self._place] if results else None
            self._node = None
        return self._values


def is_small(x: Any) -> bool:
    """Whether the values of this shape and dtype are worth working out."""
    is_whole = jnp.issubdtype(x.dtype, jnp.integer)
    return math.prod(x.shape) <= (MOST_NUMBERS if is_whole else MOST_ELEMENTS)


def computed(outputs: Sequence[Held], inputs: Sequence[Held], rule: Rule) -> None:
    """Say how the values of `outputs` follow from those of `inputs`. Nothing is computed yet."""
    if all(held.is_known for held in inputs) and all(is_small(held) for held in outputs):
        node = _Node(inputs, rule)
        for place, held in enumerate(outputs):
            held._node, held._place = node, place


def _carry_out(node: _Node) -> None:
    """Work out a node, after everything it needs. This is a loop, as programs are deeper than Python's stack."""
    pending = [node]
    while pending:
        current = pending[-1]
        if current.results is not None:
            pending.pop()
            continue
        nodes = [held._node for held in current.inputs if held._values is None and held._node is not None]
        if before := [node for node in nodes if node.results is None]:
            pending += before
            continue
        values = [held.values() for held in current.inputs]
        current.results = [] if any(value is None for value in values) else _applied(current.rule, values)
        current.inputs = ()
        pending.pop()


def _applied(rule: Rule, values: list[Any]) -> list[PerRank]:
    try:
        return rule(values)
    except Exception:  # an operation without meaning outside its program: its values are not shown
        return []


def joined(inputs: Sequence[Held], ranks: Iterable[int], num_ranks: int) -> list[Label | None] | None:
    """The labels of what each rank computes from `inputs`.

    The chunk is that of the first operand that was received. The contributors are those of all operands, and the rank
    itself if a tensor of its own is among them; unknown if one of them is.

    A single number beside tensors with dims is a factor, say, and no data of the rank. Among single numbers it is,
    unless it is written out in the program.
    """
    if all(held.labels is None for held in inputs):
        return None
    labels: list[Label | None] = [None] * num_ranks
    are_numbers = all(not held.shape for held in inputs)
    tensors = [held for held in inputs if not (held.is_literal if are_numbers else held.is_scalar)]
    for rank in ranks:
        received = [label for held in inputs if (label := held.label(rank)) is not None]
        if not received:
            continue
        if not all(label.contributors for label in received):
            labels[rank] = UNKNOWN
            continue
        members = {member for label in received for member in label.contributors}
        if any(held.label(rank) is None for held in tensors):
            members.add(rank)
        first = next((label for label in received if label.chunk >= 0), received[0])
        labels[rank] = Label(first.chunk, tuple(sorted(members)), first.part)
    return labels
