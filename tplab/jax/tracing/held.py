"""What the variables of a traced program hold on every rank: which ranks' data, and its values if they are small."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import InitVar, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tplab.jax.tracing.jaxprs import loop_parts
from tplab.trace.label import UNKNOWN, Label

MOST_ELEMENTS = 4096
"""The most elements of a tensor whose values are computed. Those of larger tensors, and of their results, are not."""
MOST_NUMBERS = 1 << 22
"""The same for tensors of whole numbers, because tables of a schedule may be larger."""

PerRank = list[Any]
Rule = Callable[[list[PerRank]], list[PerRank]]
"""The values of some variables on every rank -> those of the variables computed from them."""


Chunk = Callable[[int, int, str], int]
"""(rank, piece, name in the program) -> the number of the chunk that is this piece of what the rank held."""


@dataclass(slots=True, eq=False, repr=False)
class _Node:
    """A computation that is carried out when its results are first needed."""

    inputs: Sequence[Held]
    rule: Rule
    results: list[PerRank] | None = None


@dataclass(slots=True, eq=False, repr=False)  # it refers to what it was computed from, and so on
class Held:
    """The contents of one variable of type `aval`.

    needs          the tasks that must have ended on a rank before it exists there
    labels         each rank's label; None if the data is the rank's own
    shape, dtype   of each rank's array
    sent           the label under which a rank's own data was first sent
    is_scalar      whether it is a single number, or one number repeated, rather than data of a rank
    is_literal     whether it is a literal of the program
    name           its name if it is a parameter of the program, otherwise ""
    moved          the equation and its inputs, if it only selects or reorders elements
    """

    aval: InitVar[Any]
    after_tasks: InitVar[Iterable[int]] = ()
    labels: Sequence[Label | None] | None = None
    needs: tuple[int, ...] = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    dtype: Any = field(init=False)
    sent: dict[int, Label] = field(default_factory=dict, init=False)
    is_scalar: bool = field(init=False)
    is_literal: bool = False
    name: str = ""
    moved: tuple[Any, Sequence[Held]] | None = None
    _values: PerRank | None = None
    _node: _Node | None = None
    _place: int = 0

    def __post_init__(self, aval: Any, after_tasks: Iterable[int]):
        self.shape, self.dtype, self.is_scalar = tuple(aval.shape), aval.dtype, not aval.shape
        self.needs = tuple(sorted(set(after_tasks)))

    @classmethod
    def known(cls, aval: Any, values: PerRank | None, is_literal: bool = False) -> Held:
        """An input variable or a literal, with its values on every rank, or None."""
        return cls(aval, is_literal=is_literal, _values=values if is_small(aval) else None)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def num_bytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def is_known(self) -> bool:
        """Whether the values can be computed."""
        return self._values is not None or self._node is not None

    def label(self, rank: int) -> Label | None:
        return None if self.labels is None else self.labels[rank]

    def made_by(self, needs: Iterable[int], labels: Sequence[Label | None] | None) -> Held:
        """The same, as made by these tasks. Only the value of a single number is kept, since it may decide a branch."""
        held = Held(self, needs, labels)
        if not self.shape:
            held._values, held._node, held._place = self._values, self._node, self._place
        return held

    def after(self, needs: Iterable[int]) -> Held:
        """The same, but it exists only after these tasks have also ended."""
        if set(needs) <= set(self.needs):
            return self
        held = copy(self)
        held.needs = tuple(sorted({*self.needs, *needs}))
        return held

    def drop_part(self, inputs: Sequence[Held]) -> None:
        """Drop the part in its labels if a labelled input has another size: this is no longer that part of a tensor."""
        if self.labels is None or not any(label is not None and label.part for label in self.labels):
            return
        if any(held.labels is not None and held.size != self.size for held in inputs):
            self.labels = [label and label._replace(part=()) for label in self.labels]

    def values(self) -> PerRank | None:
        """The values on each rank; None if they are unknown, or too large to compute."""
        if self._values is None and self._node is not None:
            _carry_out(self._node)
            results = self._node.results
            self._values = results[self._place] if results else None
            self._node = None
        return self._values


def is_small(x: Any) -> bool:
    """Whether values of this shape and dtype are small enough to compute."""
    is_whole = jnp.issubdtype(x.dtype, jnp.integer)
    return math.prod(x.shape) <= (MOST_NUMBERS if is_whole else MOST_ELEMENTS)


def computed(outputs: Sequence[Held], inputs: Sequence[Held], rule: Rule) -> None:
    """Define the values of `outputs` by those of `inputs`. Nothing is computed yet."""
    if all(held.is_known for held in inputs) and all(is_small(held) for held in outputs):
        node = _Node(inputs, rule)
        for place, held in enumerate(outputs):
            held._node, held._place = node, place


def _carry_out(node: _Node) -> None:
    """Compute a node after everything it needs. This is a loop, because programs are deeper than Python's stack."""
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
        values: list[Any] = [held.values() for held in current.inputs]
        with suppress(Exception):  # the operation cannot run outside its program, so its values are not shown
            current.results = [] if any(value is None for value in values) else current.rule(values)
        current.results = current.results or []
        current.inputs = ()
        pending.pop()


def joined(inputs: Sequence[Held], ranks: Iterable[int], num_ranks: int) -> list[Label | None] | None:
    """The labels of each rank's result of a computation from `inputs`.

    The chunk is that of the first received operand. The contributors are those of all operands, and the rank itself if
    one of its own tensors is among them; unknown if those of any operand are.

    A single number among tensors with dims, such as a factor, does not count as data of the rank. Among single numbers
    it does, unless it is a literal of the program.
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

    held   the contents of its variables so far
    now    the number of the current equation
    """

    def __init__(self, jaxpr: Any, held: dict[Any, Held], keeps_arguments: bool):
        """keeps_arguments   whether the caller needs the arguments afterwards, as for the whole program"""
        self._eqns, self._held, self.now = jaxpr.eqns, held, -1
        readers = *(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars
        self._uses = Counter(id(atom) for atoms in readers for atom in atoms)
        self._last = {atom: place for place, atoms in enumerate(readers) for atom in atoms if not hasattr(atom, "val")}
        if keeps_arguments:
            self._last |= dict.fromkeys((*jaxpr.constvars, *jaxpr.invars), len(jaxpr.eqns))

    def is_used_once(self, atom: Any) -> bool:
        return self._uses[id(atom)] == 1

    def later(self, held: Held) -> bool:
        """Whether a later equation reads it, or a later iteration of the current loop."""
        eqn, name = self._eqns[self.now], self._eqns[self.now].primitive.name
        consts, more, _ = loop_parts(eqn, eqn.invars) if name in ("scan", "while") else ([], [], [])
        again = consts + more if name == "while" else consts
        later = [atom for atom, place in self._last.items() if place > self.now]
        return any(self._held.get(atom) is held for atom in (*again, *later) if not hasattr(atom, "val"))


# --- names ------------------------------------------------------------------------------------------------------------


NAMES_UP_TO = 64  # chunks of a rank; later ones have no name
MOVES = {"copy", "dynamic_slice", "expand_dims", "gather", "pvary", "reshape", "rev", "slice", "squeeze", "transpose"}
"""Operations whose result consists of elements of their first operand."""


def name_in_program(x: Held, rank: int) -> str:
    """ "x" for the parameter x on `rank`, "x[3]" for piece 3 of x if x is cut into equal pieces, otherwise "".

    To find out which elements it has, the operations that made it are repeated on the elements' positions in x.
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
