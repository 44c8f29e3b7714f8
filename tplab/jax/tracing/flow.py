"""Where an array of a compiled module comes from, and what needs it: through copies, fusions, calls and loops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

import numpy as np

from tplab.jax.tracing.hlo import BRANCHES, Groups, Instruction, Module, iota
from tplab.mesh import Mesh

_VIEWS = {
    "bitcast", "copy", "reshape", "transpose", "convert", "bitcast-convert", "opt-barrier", "optimization-barrier",
    "copy-start", "slice", "dynamic-slice", "domain",
}  # fmt: skip
"""Instructions that pass on an array, or a piece of it, in another layout or type."""


_HANDED_ON = _VIEWS - {"slice", "dynamic-slice"} | {"get-tuple-element"}
_SHARDING = r"\bsharding=\{(?:(replicated)|devices=\[([\d,]+)\](?:<=(\S+?)|([\d,]+))[ }])"
"""The sharding of a parameter. For 2 x 1 pieces, each on 4 ranks: {devices=[2,1,4]<=[8] last_tile_dim_replicate}."""


class Spot(NamedTuple):
    """An instruction and its computation."""

    computation: str
    one: Instruction


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


class Flow:
    """Follows arrays through a module, backwards and forwards."""

    def __init__(self, module: Module, mesh: Mesh, names: Mapping[str, str] | None = None):
        """names   JAX's names of arguments -> the user's, if they differ"""
        self.module, self.mesh, self._names = module, mesh, names or {}
        self._made = {name: {one.name: one for one in ones} for name, ones in module.computations.items()}
        self.dtypes: dict[tuple[str, str], str] = {}  # in the program, as far as they are known
        self._callers: dict[str, Spot] = {}
        self._users: dict[tuple[str, str], list[Instruction]] = {}
        self._given: dict[str, dict[int, Spot]] = {}
        for name, ones in module.computations.items():
            for one in ones:
                for inner in one.called("calls", "to_apply", "condition", "body", "called_computations", *BRANCHES):
                    self._callers.setdefault(inner, Spot(name, one))
                for operand in one.operands:
                    self._users.setdefault((name, operand), []).append(one)

    # --- backwards -----------------------------------------------------------------------------------------------

    def inside(self, place: Spot) -> list[Spot]:
        """The instructions of a fusion; of any other instruction, itself."""
        if place.one.op != "fusion":
            return [place]
        name = place.one.called("calls")[0]
        return [Spot(name, one) for one in self.module.computations[name]]

    def operands(self, place: Spot) -> list[Spot]:
        made = self._made[place.computation]
        return [Spot(place.computation, made[name]) for name in place.one.operands if name in made]

    def source(self, place: Spot) -> Spot:
        """The instruction that made this array, or the program's parameter. Follows it through views, loops and
        collectives: a sum over ranks has the same source as its partial operands."""
        *_, source = self.back(place)
        return source

    def back(self, place: Spot | None) -> Iterator[Spot]:
        """This array, the array that it is a view of, and so on, up to its source."""
        indices: list[int] = []  # of the enclosing tuple elements
        seen: set[tuple[str, str, tuple[int, ...]]] = set()
        while place is not None and (key := (place.computation, place.one.name, tuple(indices))) not in seen:
            seen.add(key)
            yield place
            place = self._before(place, indices)

    def before(self, place: Spot) -> Spot | None:
        """One step back; None if the array is made here."""
        return self._before(place, [])

    def _before(self, place: Spot, indices: list[int]) -> Spot | None:
        computation, one = place
        given = self.operands(place)
        if one.op == "parameter":
            return self._argument(computation, int(one.given), indices)
        if one.op == "get-tuple-element":
            indices.append(one.index)
            return given[0]
        if one.op == "tuple" and indices:
            return given[indices.pop()]
        if one.op == "fusion" or one.op == "call":
            return self._root(one.called("calls", "to_apply")[0])
        if one.op == "dynamic-update-slice" and "/body/" in one.origin:
            return given[1]  # the row that a scan stores
        if one.op == "while" and indices:
            return self._root(one.called("body")[0])
        if given and one.collective:
            number = indices.pop() if indices else 0  # a start also returns its operands and others
            return given[number if number < len(given) and not one.is_start else 0]
        if given and (one.op in _VIEWS or one.op.endswith(("-done", "-update"))):
            return given[0]
        return None

    def is_moved(self, place: Spot) -> bool:
        """Whether an earlier collective has moved this array."""
        for before in self.back(place):
            if before.one.op not in (*_VIEWS, "get-tuple-element") or before.one.collective is not None:
                return before.one.collective in ("all_gather", "all_to_all", "ppermute", "broadcast")
        return False

    def _argument(self, computation: str, number: int, indices: list[int]) -> Spot | None:
        """The argument of a computation; in a loop, what an iteration leaves, if that is different."""
        caller = self._callers.get(computation)
        if caller is None or computation == self.module.entry:
            return None
        given = self.operands(caller)
        if caller.one.op == "while":
            body = caller.one.called("body")[0]
            return given[0] if not indices or self._is_constant(body, indices[-1]) else self._root(body)
        if caller.one.op == "conditional":
            return given[1 + caller.one.called(*BRANCHES).index(computation)]
        return given[number] if number < len(given) else None

    def _is_constant(self, body: str, index: int) -> bool:
        """Whether a loop leaves this element of its tuple unchanged."""
        root = self._root(body)
        place = self.operands(root)[index] if root.one.op == "tuple" else root
        while place.one.op in ("copy", "bitcast"):
            (place,) = self.operands(place)
        return (
            place.one.op == "get-tuple-element"
            and place.one.index == index
            and (self.operands(place)[0].one.op == "parameter")
        )

    def _root(self, computation: str) -> Spot:
        ones = self.module.computations[computation]
        return Spot(computation, next((one for one in ones if one.is_root), ones[-1]))

    def is_given(self, place: Spot) -> bool:
        """Whether it is a parameter of the program."""
        return place.one.op == "parameter" and place.computation == self.module.entry

    def slot(self, place: Spot) -> Slot | None:
        """The program's parameter at this place, as a whole; None for anything else."""
        if not self.is_given(place):
            return None
        one = place.one
        name = re.sub(r"""^arrays\[(['"])(.*)\1\]$""", r"\2", one.origin)  # the user's name, from `lowered`
        name = self._names.get(re.sub(r"^(Arg_\d+)\.\d+$", r"\1", name), name)
        pieces = self._pieces(one)
        array = one.arrays[0]
        if pieces is None:
            return Slot(name or one.name, array.dtype, array.shape, None)
        shape = tuple(size * count for size, (count, _) in zip(array.shape, pieces, strict=True))
        return Slot(name or one.name, array.dtype, shape, tuple(axis for _, axis in pieces))

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

    # --- forwards ------------------------------------------------------------------------------------------------

    def users(self, place: Spot) -> list[Spot]:
        """The instructions of the same computation that use it."""
        computation, one = place
        return [Spot(computation, user) for user in self._users.get((computation, one.name), ())]

    def needed_by(self, place: Spot, index: int | None = None) -> Iterator[Spot]:
        """The instructions that compute with this array, including those in a fusion, and in a loop's later iterations.

        index   which element, if it is a tuple
        """
        return (user for user, computes in self.walk(place, index) if computes)

    def walk(self, place: Spot, index: int | None = None) -> Iterator[tuple[Spot, bool]]:
        """The views and copies of this array, and, marked True, the instructions that compute with it."""
        computation, one = place
        pending = [place]
        if index is not None:
            users = self._users.get((computation, one.name), ())
            pending = [Spot(computation, user) for user in users if user.index == index]
        seen: set[tuple[str, str]] = set()
        while pending:
            computation, one = place = pending.pop(0)
            if (computation, one.name) in seen:
                continue
            seen.add((computation, one.name))
            yield place, False
            if one.is_root:
                pending += self._handed_out(place)
            for user in self._users.get((computation, one.name), ()):
                numbers = [number for number, name in enumerate(user.operands) if name == one.name]
                if user.op in ("fusion", "call"):
                    pending += self._parameters(user.called("calls", "to_apply")[0], numbers)
                elif user.op in _HANDED_ON or user.op.endswith(("-done", "-update")):
                    pending.append(Spot(computation, user))
                elif user.op == "tuple":
                    pending += self._elements(Spot(computation, user), numbers)
                else:
                    yield Spot(computation, user), True

    def _parameters(self, computation: str, numbers: list[int]) -> list[Spot]:
        if computation not in self._given:
            ones = self.module.computations[computation]
            self._given[computation] = {int(one.given): Spot(computation, one) for one in ones if one.op == "parameter"}
        return [place for number, place in self._given[computation].items() if number in numbers]

    def _handed_out(self, place: Spot) -> list[Spot]:
        """The fusion or call that returns this."""
        caller = self._callers.get(place.computation)
        return [caller] if caller is not None and caller.one.op in ("fusion", "call") else []

    def _elements(self, place: Spot, numbers: list[int]) -> list[Spot]:
        """Where these elements of a tuple are extracted, including in a loop that the tuple enters or goes around."""
        found, pending, seen = list[Spot](), [place], set[tuple[str, str]]()
        while pending:
            computation, one = pending.pop(0)
            if (computation, one.name) in seen:
                continue
            seen.add((computation, one.name))
            caller = self._callers.get(computation)
            if one.is_root and caller is not None and caller.one.op in ("while", "fusion", "call"):
                pending.append(caller)
            if one.op == "while":
                pending += self._parameters(one.called("body")[0], [0])
            for user in self._users.get((computation, one.name), ()):
                if user.op == "while":
                    pending.append(Spot(computation, user))
                elif user.op in ("fusion", "call"):
                    pending += self._parameters(user.called("calls", "to_apply")[0], [user.operands.index(one.name)])
                elif user.op == "get-tuple-element" and user.index in numbers:
                    found.append(Spot(computation, user))
        return found


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
