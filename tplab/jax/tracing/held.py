"""What the variables of a traced program hold on every rank: which ranks' data, and its values if they are small."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, Protocol

import jax
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


# --- what is still needed ---------------------------------------------------------------------------------------------


class Needed:
    """How far a jaxpr has been followed.

    held   what its variables hold so far
    now    the number of the equation that is followed
    """

    def __init__(self, jaxpr: Any, held: dict[Any, Held], keeps_arguments: bool):
        """keeps_arguments   whether the caller needs the arguments afterwards, as that of the whole program does"""
        self._eqns, self._held, self.now = jaxpr.eqns, held, 0
        readers = *(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars
        self._uses = Counter(id(atom) for atoms in readers for atom in atoms)
        self._last = {atom: place for place, atoms in enumerate(readers) for atom in atoms if not hasattr(atom, "val")}
        if keeps_arguments:
            self._last |= dict.fromkeys((*jaxpr.constvars, *jaxpr.invars), len(jaxpr.eqns))

    def is_used_once(self, atom: Any) -> bool:
        return self._uses[id(atom)] == 1

    def later(self, held: Held) -> bool:
        """Whether a later equation reads it, or a later iteration of the loop that is followed now."""
        eqn, params = self._eqns[self.now], self._eqns[self.now].params
        counts = (params.get(name, 0) for name in ("num_consts", "cond_nconsts", "body_nconsts"))
        again = eqn.invars[: sum(counts)] if eqn.primitive.name in ("scan", "while") else ()
        later = [atom for atom, place in self._last.items() if place > self.now]
        return any(self._held.get(atom) is held for atom in (*again, *later) if not hasattr(atom, "val"))


# --- names ------------------------------------------------------------------------------------------------------------


NAMES_UP_TO = 64  # chunks of a rank; later ones get no name
MOVES = {"copy", "dynamic_slice", "expand_dims", "gather", "pvary", "reshape", "rev", "slice", "squeeze", "transpose"}
"""Operations whose result has elements of their first operand, and nothing else."""


def name_in_program(x: Held, rank: int) -> str:
    """ "x" where it is the parameter x on `rank`; "x[3]" where it is piece 3 of x, cut into pieces of equal size.

    To find out which elements it has, the operations that made it are repeated on the elements' positions in x. It is
    "" where that is not known.
    """
    chain = []
    while x.moved is not None:
        chain.append(x.moved)
        x = x.moved[1][0]
    if not x.name or not x.size:
        return ""
    places: Any = np.arange(x.size, dtype=np.int32).reshape(x.shape)
    for eqn, inputs in reversed(chain):
        others = [held.values() for held in inputs[1:]]
        if any(values is None for values in others):
            return ""
        params = {key: None if key in ("sharding", "out_sharding") else value for key, value in eqn.params.items()}
        places = eqn.primitive.bind(jax.numpy.asarray(places), *(values[rank] for values in others if values), **params)
        places = places[0] if eqn.primitive.multiple_results else places
    places = np.asarray(places)
    if np.array_equal(places.ravel(), np.arange(x.size)):
        return x.name
    index = _index(places, x.shape)
    return "" if index is None else f"{x.name}[{index}]"


def _index(places: np.ndarray, shape: tuple[int, ...]) -> int | None:
    """Which piece of an array of `shape` has the elements at these positions: the pieces are equal parts of its
    elements in their order, or along one dim."""
    size, first = places.size, int(places.flat[0])
    if np.array_equal(places.ravel(), np.arange(first, first + size)):
        return first // size if not first % size and not int(np.prod(shape)) % size else None
    along = [np.unique(found) for found in np.unravel_index(places.ravel(), shape)]
    part = [dim for dim, found in enumerate(along) if len(found) < shape[dim]]
    if len(part) != 1 or np.prod([len(found) for found in along]) != size:
        return None
    found, whole = along[part[0]], shape[part[0]]
    is_piece = np.array_equal(found, np.arange(found[0], found[0] + len(found))) and not whole % len(found)
    return int(found[0]) // len(found) if is_piece and not found[0] % len(found) else None
