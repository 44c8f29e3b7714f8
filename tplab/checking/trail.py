"""The operations of one step, with the values that they made and the gradients that came back: where a value, or a
gradient, is right on one side and wrong on the other, there is the fault.

The ranks and the reference run the same script, so that the n-th operation at a line of the one is the n-th at that
line of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tplab.checking.observed import Observed, deals, factor_between, find_spread, in_step
from tplab.units import plain

Key = tuple[str, str, int]
_REFERENCE = -1
"""The reference's place among the ranks."""


@dataclass
class Op:
    """One operation of a forward pass.

    key       its line, its name, and how often it ran there before
    lines     of all frames of the script that it ran in, the innermost first
    inputs    the numbers of the operations that made what it takes
    given     what it takes that needs no gradient, by place; and the line at which that was made, if it was seen
    values    its results
    arrived   for each result its gradient, if any came
    passed    the gradients that it passes on, and to which: the number of an operation or the name of a parameter
    is_function   whether the program, or a library, has written its backward pass
    sent      the lines of collectives in its forward pass; sent_back: in its backward pass
    returned  the line at which its backward pass returns, if that is the script's
    """

    key: Key
    lines: list[str]
    inputs: list[int]
    values: list[np.ndarray]
    arrived: dict[int, np.ndarray] = field(default_factory=dict)
    passed: list[tuple[int | str, np.ndarray]] = field(default_factory=list)
    is_function: bool = False
    sent: list[str] = field(default_factory=list)
    sent_back: list[str] = field(default_factory=list)
    returned: str = ""
    given: dict[int, tuple[np.ndarray, str]] = field(default_factory=dict)

    @property
    def line(self) -> str:
        return self.key[0]

    def at(self, place: int | None) -> np.ndarray | None:
        """What it takes at a place; its first result for None."""
        if place is None:
            return self.values[0] if self.values else None
        return self.given[place][0] if place in self.given else None


@dataclass
class Trail:
    """The operations of one rank in one step, in the order in which they ran. end: the one whose result is the loss."""

    ops: list[Op] = field(default_factory=list)
    end: int = -1


class Trails:
    """Those of all ranks beside the reference's."""

    def __init__(self, ours: Sequence[Trail], theirs: Trail):
        self._ours, self._trails = ours, [*ours, theirs]
        *self._by_key, self._theirs = ({op.key: op for op in trail.ops} for trail in self._trails)
        self._of_values: dict[Key, bool] = {}

    # --- forward -----------------------------------------------------------------------------------------------------

    def wanted_at(self, line: str) -> Iterator[tuple[str, dict[Key, dict[int, np.ndarray]]]]:
        """What the operation that goes wrong at a line, or that ends it, should give on each rank, whenever it runs, in
        each way in which the reference's may be cut; and how what it gives on the last rank differs, in words."""
        at = [op for trail in self._ours[:1] for op in trail.ops if op.line == line and op.values]
        first, *others = dict.fromkeys(op.key[1] for op in reversed(at)) or [""]
        wrong = self.first_wrong()
        own = [wrong.key[1]] if wrong is not None and wrong.line == line else []
        for name in [*dict.fromkeys([*own, first, *others])][:2]:
            keys = [op.key for op in at if op.key[1] == name and op.key in self._theirs]
            for found in self._cuts(keys, None):
                yield difference(self._by_key[-1][keys[0]].values[0], found[keys[0]][len(self._ours) - 1]), found

    def wanted_by(self, op: Op) -> Iterator[tuple[int, dict[Key, dict[int, np.ndarray]]]]:
        """Likewise, the places of what an operation takes, where it is another part of the reference's."""
        alike = [other for other in self._ours[0].ops if other.key[:2] == op.key[:2] and other.key in self._theirs]
        for place in op.given:
            for found in self._cuts([other.key for other in alike if place in other.given], place):
                if op.key in found and any(self.mistaken(op.key, place, found[op.key])):
                    yield place, found

    def made_at(self, op: Op, place: int) -> str:
        """The line that made what an operation takes, or else its own."""
        return op.given[place][1] or op.line

    def mistaken(self, key: Key, place: int, pieces: Mapping[int, np.ndarray]) -> list[tuple[int, int]]:
        """The ranks that take another rank's part, and whose; [] if any takes what is nobody's."""
        found = []
        for rank, ops in enumerate(self._by_key):
            has = ops[key].given[place][0].astype(np.float64)
            slack = 1e-6 * float(np.abs(has).max(initial=0))
            of = [other for other, piece in pieces.items() if np.abs(piece - has).max(initial=0) <= slack]
            if not of:
                return []
            found += [(rank, of[0])] * (rank not in of)
        return found

    def value(self, rank: int, key: Key) -> np.ndarray | None:
        """The result of an operation on a rank."""
        return self._by_key[rank][key].at(None) if key in self._by_key[rank] else None

    def values_of(self, key: Key) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """The result of an operation on each rank that has it, and the reference's."""
        held = {rank: x for rank in range(len(self._ours)) if (x := self.value(rank, key)) is not None}
        return held if key in self._theirs else {}, self._theirs[key].values[0] if key in self._theirs else np.zeros(0)

    def _cuts(self, keys: Sequence[Key], place: int | None) -> Iterator[dict[Key, dict[int, np.ndarray]]]:
        """The reference's values of operations (`Op.at`) as each rank should have them: whole, or in chunks."""
        held = {key: [x.shape for ops in self._by_key if key in ops and (x := ops[key].at(place)) is not None]
                for key in keys}  # fmt: skip
        wholes = {key: x for key in keys if (x := self._theirs[key].at(place)) is not None}
        if len(wholes) < len(held) or any(shapes != shapes[:1] * len(self._ours) for shapes in held.values()):
            return
        ways = [deals(whole, held[key][0], len(self._ours)) for key, whole in wholes.items()]
        yield from (dict(zip(wholes, parts)) for parts in in_step(ways))

    def first_wrong(self) -> Op | None:
        """The first operation whose result is wrong, though all that it takes is right; None if none is seen."""
        trail = next((trail for trail in self._ours if trail.end >= 0), None)
        if trail is None:
            return None
        found, waiting, known = list[int](), [trail.end], set[int]()
        while waiting:
            number = waiting.pop()
            if number in known or (number != trail.end and self._is_right(trail.ops[number])):
                continue
            known.add(number)
            wrong = [at for at in trail.ops[number].inputs if not self._is_right(trail.ops[at])]
            waiting += wrong
            if not wrong:
                found.append(number)
        return trail.ops[min(found)] if found else None

    def _is_right(self, op: Op) -> bool:
        if op.key not in self._of_values:
            self._of_values[op.key] = all(self._is_right_value(op, number) for number in range(len(op.values)))
        return self._of_values[op.key]

    def _is_right_value(self, op: Op, number: int) -> bool:
        other = self._theirs.get(op.key)
        if other is None:
            return False
        if len(other.values) != len(op.values):  # as of a tensor that is cut into one piece for each rank
            return True
        pieces = {r: ops[op.key].values[number] for r, ops in enumerate(self._by_key) if op.key in ops
                  and number < len(ops[op.key].values)}  # fmt: skip
        spread = find_spread(pieces, other.values[number], len(self._ours))
        if spread is None:
            return False
        of_all = other.values[number].size == 1 and spread.is_partial and spread.factor == len(self._ours)
        return spread.factor == 0 or abs(spread.factor - 1) < 1e-2 or of_all

    # --- backward ----------------------------------------------------------------------------------------------------

    def line_of_gradient(self, held: Mapping[int, str], name: str) -> str:
        """The line of the operation that makes the gradient of a parameter wrong; "" if none is seen.

        held   the parameter's name on each rank that has it; name: in the reference
        """
        rank = min(held)
        trail, consumers = self._ours[rank], self._consumers(self._ours[rank])
        for number, op in enumerate(trail.ops):
            if any(to == held[rank] for to, _ in op.passed):
                start = self._passed(op, held, name)
                right = len(held) if start is not None and start.is_partial else 1
                if start is not None and abs(start.factor / right - 1) < 1e-2:
                    continue  # it is right, or the mean of all parts is: of that, samples may be the parts
                found = self._climb(trail, consumers, number, start)
                if found:
                    return found
        return ""

    def _climb(self, trail: Trail, consumers: Mapping[int, list[int]], number: int, wrong: Observed | None) -> str:
        """From an operation that passes on something wrong towards the loss, to the one that makes it so."""
        to: int | None = None
        known = set[int]()
        while number not in known:
            known.add(number)
            op = trail.ops[number]
            arrived = [self._arrived(op, at) for at in op.arrived]
            if not arrived or not any(_is_like(spread, wrong) for spread in arrived):
                last = trail.ops[to] if to is not None else None
                return self._line(trail, consumers, op, last, wrong) if arrived else ""
            above = [(at, self._passed_to(trail.ops[at], op)) for at in consumers.get(number, ())]
            if not above:
                return ""
            like = [pair for pair in above if _is_like(pair[1], wrong)]
            mixed = [pair for pair in above if pair[1] is not None and pair[1].is_partial]
            if not like and len(above) > 1 and mixed:
                wrong = mixed[0][1]
            if not (like or mixed):
                return ""
            to, number = number, (like or mixed)[0][0]
        return ""

    def _line(
        self, trail: Trail, consumers: Mapping[int, list[int]], op: Op, to: Op | None, wrong: Observed | None
    ) -> str:
        """What to blame where an operation gets a gradient that is right and passes on one that is not.

        to   the operation that gets it: one whose backward pass was written to add up what it gets, and does not, is
             to blame
        """
        if to is not None and to.is_function and not to.sent_back and (wrong is None or wrong.is_partial):
            is_gather = bool(to.sent) and bool(to.inputs) and _size(to) > _size(trail.ops[to.inputs[0]])
            if not to.sent or is_gather:
                return to.returned or to.line
        if op.is_function and op.returned:
            return op.sent_back[-1] if op.sent_back else op.returned
        healthy = [other for other in trail.ops if other is not op and other.key[:2] == op.key[:2]
                   and self._is_summed(trail, other)]  # fmt: skip
        shared = {line for other in healthy for line in other.lines}
        return next((line for line in op.lines if line not in shared), op.line) if healthy else op.line

    def _is_summed(self, trail: Trail, op: Op) -> bool:
        """Whether the parts that an operation passes on are added up at once."""
        makers = [trail.ops[to] for to, _ in op.passed if isinstance(to, int)]
        return any(maker.is_function and maker.sent_back for maker in makers)

    def _consumers(self, trail: Trail) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, op in enumerate(trail.ops):
            for to, _ in op.passed:
                if isinstance(to, int) and number not in found.setdefault(to, []):
                    found[to].append(number)
        return found

    def _arrived(self, op: Op, number: int) -> Observed | None:
        """How the gradient of one of an operation's results is spread."""
        return self._spread(op, lambda one, _: one.arrived.get(number))

    def _passed(self, op: Op, held: Mapping[int, str], name: str) -> Observed | None:
        """How the gradient that an operation passes on to a parameter is spread."""
        names = {_REFERENCE: name, **held}
        return self._spread(op, lambda one, rank: _sum(one, names[rank]) if rank in names else None)

    def _passed_to(self, op: Op, to: Op) -> Observed | None:
        """Likewise, to another operation."""

        def passed(one: Op, rank: int) -> np.ndarray | None:
            other = (self._theirs if rank == _REFERENCE else self._by_key[rank]).get(to.key)
            return None if other is None else _sum(one, self._trails[rank].ops.index(other))

        return self._spread(op, passed)

    def _spread(self, op: Op, found: Callable[[Op, int], np.ndarray | None]) -> Observed | None:
        """How what is found of an operation on each rank is spread."""
        each = {_REFERENCE: self._theirs, **dict(enumerate(self._by_key))}
        held = {rank: found(ops[op.key], rank) for rank, ops in each.items() if op.key in ops}
        want, there = held.pop(_REFERENCE, None), {rank: x for rank, x in held.items() if x is not None}
        return find_spread(there, want, len(self._ours)) if there and want is not None else None


def difference(got: np.ndarray, want: np.ndarray) -> str:
    """How a value differs from the right one: "it is 2 times the reference's", and otherwise the first elements."""
    got, want, size = got.astype(np.float64), want.astype(np.float64), float(np.abs(want).max(initial=0))
    factor = factor_between([(got, want)], 1e-4 * size)
    if factor is not None and abs(factor - 1) > 1e-3:
        return f"it is {plain(factor)} times the reference's"
    apart = np.flatnonzero(np.abs(got - want).reshape(-1) > 1e-5 * size)
    some = slice(int(apart[0]), int(apart[0]) + 4) if apart.size else slice(0, 4)
    listed = (", ".join(f"{float(x):.5g}" for x in values.reshape(-1)[some]) for values in (got, want))
    first, second = listed
    return f"from element {some.start} on, the last rank has {first}, ..., where the reference has {second}, ..."


def _is_like(spread: Observed | None, wrong: Observed | None) -> bool:
    """Whether a gradient is wrong in the same way, or in a way that nobody knows."""
    if spread is None or spread.factor == 0:
        return True
    is_same_kind = wrong is not None and spread.is_partial == wrong.is_partial
    return wrong is not None and is_same_kind and abs(spread.factor - wrong.factor) < 1e-2 * abs(wrong.factor)


def _sum(op: Op, to: int | str) -> np.ndarray | None:
    """All that an operation passes on to one place."""
    there = [x for at, x in op.passed if at == to]
    return np.sum(there, axis=0) if there and len({x.shape for x in there}) == 1 else None


def _size(op: Op) -> int:
    return sum(x.size for x in op.values)
