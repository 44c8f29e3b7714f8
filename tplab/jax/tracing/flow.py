"""Where an array of a compiled module comes from, and what needs it: through copies, fusions, calls and loops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np

from tplab.jax.tracing.hlo import BRANCHES, Groups, Instruction, iota
from tplab.jax.tracing.jaxprs import reached
from tplab.mesh import Mesh

_VIEWS = {
    "bitcast", "copy", "reshape", "transpose", "convert", "bitcast-convert", "opt-barrier", "optimization-barrier",
    "copy-start", "slice", "dynamic-slice", "domain",
}  # fmt: skip
"""Instructions that pass on an array, or a piece of it, in another layout or type."""


_HANDED_ON = _VIEWS - {"slice", "dynamic-slice"} | {"get-tuple-element"}
_SHARDING = r"\bsharding=\{(?:(replicated)|devices=\[([\d,]+)\](?:<=(\S+?)|([\d,]+))[ }])"
"""The sharding of a parameter. For 2 x 1 pieces, each on 4 ranks: {devices=[2,1,4]<=[8] last_tile_dim_replicate}."""

# --- backwards --------------------------------------------------------------------------------------------------------


def inside(one: Instruction) -> list[Instruction]:
    """The instructions of a fusion; of any other instruction, itself."""
    return one.module.computations[one.called("calls")[0]] if one.op == "fusion" else [one]


def source(one: Instruction) -> Instruction:
    """The instruction that made this array, or the program's parameter. Follows it through views, loops and
    collectives: a sum over ranks has the same source as its partial operands."""
    *_, first = back(one)
    return first


def back(one: Instruction | None) -> Iterator[Instruction]:
    """This array, the array that it is a view of, and so on, up to its source."""
    indices: list[int] = []  # of the enclosing tuple elements
    seen: set[tuple[Instruction, tuple[int, ...]]] = set()
    while one is not None and (key := (one, tuple(indices))) not in seen:
        seen.add(key)
        yield one
        one = before(one, indices)


def before(one: Instruction, indices: list[int]) -> Instruction | None:
    """One step back; None if the array is made here. `indices`: of the enclosing tuple elements, which it changes."""
    given, root = one.operands, one.module.root
    if one.op == "parameter":
        return _argument(one, indices)
    if one.op == "get-tuple-element":
        indices.append(one.index)
        return given[0]
    if one.op == "tuple" and indices:
        return given[indices.pop()]
    if one.op == "fusion" or one.op == "call":
        return root(one.called("calls", "to_apply")[0])
    if one.op == "dynamic-update-slice" and "/body/" in one.origin:
        return given[1]  # the row that a scan stores
    if one.op == "while" and indices:
        return root(one.called("body")[0])
    if given and one.collective:
        number = indices.pop() if indices else 0  # a start also returns its operands and others
        return given[number if number < len(given) and not one.is_start else 0]
    return given[0] if given and (one.op in _VIEWS or one.is_end) else None


def is_moved(one: Instruction) -> bool:
    """Whether an earlier collective has moved this array."""
    for made in back(one):
        if made.op not in (*_VIEWS, "get-tuple-element") or made.collective is not None:
            return made.collective in ("all_gather", "all_to_all", "ppermute", "broadcast")
    return False


def _argument(one: Instruction, indices: list[int]) -> Instruction | None:
    """The argument of a computation; in a loop, what an iteration leaves, if that is different."""
    caller, number = one.module.callers.get(one.computation), int(one.given)
    if caller is None or one.computation == one.module.entry:
        return None
    if caller.op == "while":
        root = one.module.root(caller.called("body")[0])
        return caller.operands[0] if not indices or _is_constant(root, indices[-1]) else root
    if caller.op == "conditional":
        number = 1 + caller.called(*BRANCHES).index(one.computation)
    return caller.operands[number] if number < len(caller.operands) else None


def _is_constant(root: Instruction, index: int) -> bool:
    """Whether a loop, whose body has this root, leaves this element of its tuple unchanged."""
    place = root.operands[index] if root.op == "tuple" else root
    while place.op in ("copy", "bitcast"):
        (place,) = place.operands
    return place.op == "get-tuple-element" and place.index == index and place.operands[0].op == "parameter"


def is_given(one: Instruction) -> bool:
    """Whether it is a parameter of the program."""
    return one.op == "parameter" and one.computation == one.module.entry


@dataclass(frozen=True)
class Slot:
    """A parameter of the program: its name, as "params['w']", and the axes over which each dim is sharded."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...] | None

    def __str__(self) -> str:
        kind = f"{self.name} {self.dtype}{list(self.shape)}"
        if self.axes is None:
            return kind
        names = [tuple(axis.split(",")) if "," in axis else axis or None for axis in self.axes]
        while names and names[-1] is None:
            names.pop()
        return f"{kind} P({', '.join(map(repr, names))})"


@dataclass(frozen=True)
class Slots:
    """The parameters of a program on a mesh. `names`: JAX's names of arguments -> the user's, if they differ."""

    mesh: Mesh
    names: Mapping[str, str]

    def of(self, one: Instruction) -> Slot | None:
        """The program's parameter at this place, as a whole; None for anything else."""
        if not is_given(one):
            return None
        name = re.sub(r"""^arrays\[(['"])(.*)\1\]$""", r"\2", one.origin)  # the user's name, from `lowered`
        name = self.names.get(re.sub(r"^(Arg_\d+)\.\d+$", r"\1", name), name) or one.name
        pieces, array = self._pieces(one), one.arrays[0]
        if pieces is None:
            return Slot(name, array.dtype, array.shape, None)
        shape = tuple(size * count for size, (count, _) in zip(array.shape, pieces, strict=True))
        return Slot(name, array.dtype, shape, tuple(axis for _, axis in pieces))

    def _pieces(self, one: Instruction) -> list[tuple[int, str]] | None:
        """For each dim of a parameter, the number of pieces, and the axes over which it is cut."""
        match = re.search(_SHARDING, one.attributes)
        if match is None:
            return None
        num_dims = len(one.arrays[0].shape)
        if match[1]:
            return [(1, "")] * num_dims
        shape = tuple(map(int, match[2].split(",")))
        ranks = (iota(match[3]) if match[3] else np.array(list(map(int, match[4].split(","))))).reshape(shape)
        pieces = []
        for dim in range(num_dims):
            groups = np.moveaxis(ranks, dim, -1).reshape(-1, shape[dim]).tolist()
            pieces.append((shape[dim], ",".join(axes_in_order(self.mesh, tuple(map(tuple, groups))))))
        return pieces


# --- forwards ---------------------------------------------------------------------------------------------------------


def needed_by(one: Instruction, index: int | None = None) -> Iterator[Instruction]:
    """The instructions that compute with this array, including those in a fusion, and in a loop's later iterations.

    index   which element, if it is a tuple
    """
    return (user for user, computes in walk(one, index) if computes)


def walk(one: Instruction, index: int | None = None) -> Iterator[tuple[Instruction, bool]]:
    """The views and copies of this array, and, marked True, the instructions that compute with it."""
    starts = [one] if index is None else [user for user in one.users if user.index == index]
    return reached(((start, False) for start in starts), lambda pair: () if pair[1] else _uses(pair[0]))


def _uses(one: Instruction) -> Iterator[tuple[Instruction, bool]]:
    """The views and copies of an array that its users are or have, and, marked True, the users that compute with it."""
    caller = one.module.callers.get(one.computation)
    if one.is_root and caller is not None and caller.op in ("fusion", "call"):
        yield caller, False
    for user in one.users:
        numbers = [number for number, operand in enumerate(user.operands) if operand is one]
        if user.op in ("fusion", "call"):
            yield from ((same, False) for same in _entered(user, numbers))
        elif user.op == "tuple":
            yield from ((same, False) for same in _elements(user, numbers))
        else:
            yield user, user.op not in _HANDED_ON and not user.is_end


def _entered(one: Instruction, numbers: list[int]) -> list[Instruction]:
    """Operands of a fusion or call, by their numbers, as parameters inside it."""
    return one.module.parameters(one.called("calls", "to_apply")[0], numbers)


def _elements(one: Instruction, numbers: list[int]) -> list[Instruction]:
    """Where these elements of a tuple are extracted, including in a loop that the tuple enters or goes around."""

    def same(tuple_: Instruction) -> Iterator[Instruction]:
        module = tuple_.module
        caller = module.callers.get(tuple_.computation)
        if tuple_.is_root and caller is not None and caller.op in ("while", "fusion", "call"):
            yield caller
        if tuple_.op == "while":
            yield from module.parameters(tuple_.called("body")[0], [0])
        for user in tuple_.users:
            if user.op == "while":
                yield user
            elif user.op in ("fusion", "call"):
                yield from _entered(user, [user.operands.index(tuple_)])

    users = (user for place in reached([one], same) for user in place.users)
    return [user for user in users if user.op == "get-tuple-element" and user.index in numbers]


# --- axes of the mesh -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def axes_along(mesh: Mesh, groups: Groups, are_pairs: bool = False) -> tuple[str, Sequence[tuple[int, ...]]]:
    """The axes of the mesh along which the ranks of these groups differ, "dp,tp", and the groups; "" if each rank is
    alone. A group may have only some of the ranks along its axes; for pairs it has all of them."""
    places = [[mesh.coordinates(rank) for rank in group] for group in groups]
    names = [name for name in mesh.shape if any(at[name] != group[0][name] for group in places for at in group)]
    if not names:
        return "", ()
    along = mesh.groups(tuple(names))
    is_whole = set(map(frozenset, along)) == set(map(frozenset, groups))
    return ",".join(names), along if are_pairs or is_whole else groups


@lru_cache(maxsize=1024)
def axes_in_order(mesh: Mesh, groups: Groups) -> tuple[str, ...]:
    """The same axes, in the order in which they number the ranks of each group: the pieces of a dim that is sharded
    over ("tp", "dp") have another order than over ("dp", "tp")."""
    names = [name for name in axes_along(mesh, groups)[0].split(",") if name]
    for order in permutations(names) if names else ():
        if all(tuple(group) in mesh.groups(order) for group in groups):
            return order
    return tuple(names)
