"""The bytes that an instruction of a compiled module reads and writes: of arrays used in part, only that part.

    slice, dynamic-slice    the piece, read and written
    gather                  the rows, read and written, and the indices
    dynamic-update-slice    the update, read and written
    scatter                 the update, read and written, and the indices; what is there is read too where both are
                            combined, as in a sum

A fusion reads its operands and writes its results, and those that it uses in part only in part. XLA counts in the same
way (HloCostAnalysis in xla/service/hlo_cost_analysis.cc, read at openxla/xla 001918b), but it reads what is there for
every scatter. Arrays have the dtypes of the program (`narrow`).

An update is in place if nothing needs the array afterwards. Where something does, XLA makes a copy first, which is an
instruction of its own. For CPUs it converts a narrow array to and fro instead, so that the update needs no copy: there
we add the one that GPUs and TPUs make.
"""

from __future__ import annotations

from tplab.jax.tracing.flow import Flow, Place
from tplab.jax.tracing.hlo import Array
from tplab.jax.tracing.narrow import as_written, is_inserted

_PIECES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""And which of their operands is the update."""


def hands_on(flow: Flow, place: Place) -> bool:
    """Whether it only hands its operand on: a view, or what XLA has converted."""
    inside = [inner for inner in flow.inside(place) if inner.one.op != "parameter"]
    return bool(inside) and all(map(_is_view, inside))


def is_combining(flow: Flow, place: Place) -> bool:
    """Whether it adds to what is there, or combines both in another way: a scatter that does not just set it."""
    called = (flow.module.computations.get(name, []) for name in place.one.called("to_apply"))
    return any(inner.is_root and inner.op != "parameter" for ones in called for inner in ones)


def num_bytes(flow: Flow, place: Place) -> int:
    """The bytes that an instruction reads and writes."""
    return _Touched(flow, place).num_bytes()


class _Touched:
    """An instruction, or those inside a fusion, and the arrays that they are given.

    body      the instructions, by name
    given     for each array that is given, what it is called here, and where it is made
    results   the names of the arrays that are returned
    """

    def __init__(self, flow: Flow, place: Place):
        self.flow, self.place = flow, place
        inside, operands = flow.inside(place), flow.operands(place)
        self.body = {inner.one.name: inner for inner in inside if inner.one.op != "parameter"}
        self.given = [(operand.one.name, operand) for operand in operands]
        self.results = [place.one.name]
        if place.one.op == "fusion":
            self.given = [(x.one.name, operands[int(x.one.given)]) for x in inside if x.one.op == "parameter"]
            root = next(inner for inner in inside if inner.one.is_root).one
            self.results = root.operands if root.op == "tuple" else [root.name]

    def num_bytes(self) -> int:
        total, updates = 0, set[str]()
        for result in self.results:
            update = self.body.get(self._source(result))
            given = self._updated(update)
            if update is None or given is None:
                total += _whole(self.flow, self.body.get(result))
                continue
            updates.add(update.one.name)
            total += self._bytes(given, self._size_of_update(update))
            if not _is_last(self.flow, self.place, given):
                total += 2 * _whole(self.flow, given)
        for name, given in self.given:
            size = self._read(name, updates)
            total += _whole(self.flow, given) if size is None else self._bytes(given, size)
        return total

    def _source(self, name: str) -> str:
        """What this is a view of, here."""
        while name in self.body and _is_view(self.body[name]):
            name = self.body[name].one.operands[0]
        return name

    def _updated(self, update: Place | None) -> Place | None:
        """The array that an instruction updates in place."""
        if update is None or update.one.op not in _UPDATES or len(update.one.arrays) > 1:
            return None
        return dict(self.given).get(self._source(update.one.operands[0]))

    def _size_of_update(self, update: Place) -> int:
        return self.flow.operands(update)[_UPDATES[update.one.op]].one.arrays[0].size

    def _read(self, name: str, updates: set[str]) -> int | None:
        """How many elements of an array are read; None if all."""
        total = 0
        for user in self.body.values():
            if name not in user.one.operands:
                continue
            is_first = user.one.operands[0] == name and user.one.operands.count(name) == 1
            if _is_view(user) and user.one.name not in self.results:
                size = self._read(user.one.name, updates)
            elif is_first and user.one.op in _PIECES:
                size = user.one.arrays[0].size
            elif is_first and user.one.name in updates:
                size = self._size_of_update(user) if is_combining(self.flow, user) else 0
            else:
                size = None
            if size is None:
                return None
            total += size
        return total

    def _bytes(self, given: Place, size: int) -> int:
        """Those of so many elements of an array that is given."""
        array = as_written(self.flow, given)
        return array._replace(shape=(min(size, array.size),)).num_bytes


def _whole(flow: Flow, place: Place | None) -> int:
    if place is None:  # a result that is given already
        return 0
    arrays: list[Array] = place.one.arrays if len(place.one.arrays) != 1 else [as_written(flow, place)]
    return sum(array.num_bytes for array in arrays)


def _is_view(place: Place) -> bool:
    return place.one.op in ("bitcast", "reshape") or is_inserted(place.one)


def _is_last(flow: Flow, place: Place, array: Place) -> bool:
    """Whether nothing needs an array after the instruction at `place`. The caller needs what it has not donated."""
    order = {one.name: number for number, one in enumerate(flow.module.computations[place.computation])}
    pending, seen = [array], set[str]()
    while pending:
        same = pending.pop()
        if same.one.name in seen:
            continue
        seen.add(same.one.name)
        if flow.is_given(same) and int(same.one.given) not in flow.module.donated:
            return False
        users = [user for user in flow.users(same) if user.one.name != place.one.name]
        if any(order[user.one.name] > order[place.one.name] for user in users):
            return False
        pending += [user for user in users if hands_on(flow, user)]
        if same.one.op == "get-tuple-element":
            elements = flow.users(flow.operands(same)[0])
            pending += [user for user in elements if user.one.op == same.one.op and user.one.index == same.one.index]
        elif hands_on(flow, same):
            pending += flow.operands(same)[:1]
    return True
