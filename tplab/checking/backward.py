"""The gradients that came back to the operations of one step, and where they go wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tplab.checking.differences import difference
from tplab.checking.observed import Observed, uneven
from tplab.checking.trail import REFERENCE, Aligned, Key, Op, Trail


class Backward(Aligned):
    """The queries about gradients."""

    def line_of_gradient(self, held: Mapping[int, str], name: str) -> str:
        """Return the line of the operation that makes the gradient of a parameter wrong; "" if none is seen.

        held   the parameter's name on each rank that has it; name: in the reference
        """
        rank = min(held)
        trail, consumers = self._ours[rank], self._consumers(self._ours[rank])
        for number, op in enumerate(trail.ops):
            if any(to == held[rank] for to, _ in op.passed):
                start = self._passed(op, held, name)
                right = len(held) if start is not None and start.is_partial else 1
                if start is not None and abs(start.factor / right - 1) < 1e-2:
                    continue  # it is right, or the mean of all parts is: each may be of the rank's own samples
                found = self._climb(trail, consumers, number, start)
                if found:
                    return found
        return ""

    def lost_on_the_way(self) -> Iterator[tuple[Op, str, dict[int, dict[int, np.ndarray]]]]:
        """Yield operations to whose results another gradient comes back than the reference's, though what takes them
        gets a right one: the operation, how the gradient differs, and the expected ones by number of the result."""
        known = set[Key]()
        for trail in self._ours:
            consumers = self._consumers(trail)
            for number, op in reversed([*enumerate(trail.ops)]):
                theirs = self._theirs.get(op.key)
                above = [trail.ops[at] for at in consumers.get(number, ())]
                spreads = [self._arrived(one, at) for one in above for at in one.arrived]
                if (
                    op.key in known
                    or op.sent
                    or not theirs
                    or any(abs(x.factor - 1) > 1e-2 for x in spreads if x and x.factor)
                ):
                    continue
                known.add(op.key)
                wanted, words = dict[int, dict[int, np.ndarray]](), list[str]()
                for place in sorted({*op.arrived} & {*theirs.arrived}):
                    arrived = {rank: x for rank, one in self.ops_of(op.key)[0].items()
                               if (x := one.arrived.get(place)) is not None}  # fmt: skip
                    want, shapes = theirs.arrived[place], [x.shape for x in arrived.values()]
                    ways = (
                        [dict.fromkeys(arrived, want)] if {*shapes} == {want.shape} and want.any() and want.ndim else []
                    )
                    ways += uneven(want, shapes) if len(shapes) == len(self._ours) > 1 and not ways else []
                    told = [[*filter(None, (difference(x, way[rank]) for rank, x in arrived.items()))] for way in ways]
                    if told and all(told):
                        wanted[place], words = ways[0], [*words, told[0][0]]
                if wanted:
                    yield op, words[0], wanted

    def _climb(self, trail: Trail, consumers: Mapping[int, list[int]], number: int, wrong: Observed | None) -> str:
        """Go from an operation that passes on a wrong gradient towards the loss, to the one that makes it wrong."""
        to: int | None = None
        known = set[int]()
        while number not in known:
            known.add(number)
            op = trail.ops[number]
            arrived = [self._arrived(op, at) for at in op.arrived]
            if to is None and wrong is not None and wrong.is_partial:  # of a parameter, in parts by samples
                wrong = next((one for one in arrived if _is_of_samples(one, wrong)), wrong)
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
        """Return the line to blame if an operation gets a right gradient and passes on a wrong one.

        to   the operation that gets the wrong one: it is to blame if its backward pass should add up gradients, and
             does not
        """
        if to is not None and to.is_function and not to.sent_back and (wrong is None or wrong.is_partial):
            is_gather = bool(to.sent) and bool(to.inputs) and _size(to) > _size(trail.ops[to.inputs[0]])
            if not to.sent or is_gather:
                return to.returned or to.line
        if op.is_function and op.returned:
            arrived = [x.factor for at in op.arrived if (x := self._arrived(op, at)) is not None]
            divides = wrong is not None and max(arrived, default=0.0) > 1.01 * wrong.factor
            return op.sent_back[-1] if op.sent_back and not divides else op.returned
        healthy = [other for other in trail.ops if other is not op and other.key[:2] == op.key[:2]
                   and self._is_summed(trail, other)]  # fmt: skip
        shared = {line for other in healthy for line in other.lines}
        return next((line for line in op.lines if line not in shared), op.line) if healthy else op.line

    @property
    def unsummed(self) -> list[str]:
        """The lines of functions that send only in their forward pass, and get parts of a gradient."""
        ops = [op for op in self._ours[0].ops if op.is_function and op.sent and not op.sent_back]
        arrived = [(op.line, self._arrived(op, at)) for op in ops for at in op.arrived]
        return [*dict.fromkeys(line for line, spread in arrived if spread is not None and spread.is_partial)]

    @property
    def sent_back(self) -> set[str]:
        """The lines of collectives in the backward passes of functions."""
        return {line for op in self._ours[0].ops if op.is_function for line in op.sent_back}

    def _is_summed(self, trail: Trail, op: Op) -> bool:
        """Return whether the parts that an operation passes on are added up at once."""
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
        """Return how the gradient of one of an operation's results is spread."""
        return self._spread(op, lambda one, _: one.arrived.get(number))

    def _passed(self, op: Op, held: Mapping[int, str], name: str) -> Observed | None:
        """Return how the gradient that an operation passes on to a parameter is spread."""
        names = {REFERENCE: name, **held}
        return self._spread(op, lambda one, rank: _sum(one, names[rank]) if rank in names else None)

    def _passed_to(self, op: Op, to: Op) -> Observed | None:
        """Return the same for another operation."""

        def passed(one: Op, rank: int) -> np.ndarray | None:
            other = (self._theirs if rank == REFERENCE else self._by_key[rank]).get(to.key)
            ops = self._trails[rank].ops
            return _sum(one, ops.index(other)) if other in ops else None

        return self._spread(op, passed)


def _is_like(spread: Observed | None, wrong: Observed | None) -> bool:
    """Return whether a gradient is wrong in the same way, or in an unknown way."""
    if spread is None or spread.factor == 0:
        return True
    is_same_kind = wrong is not None and spread.is_partial == wrong.is_partial
    return wrong is not None and is_same_kind and abs(spread.factor - wrong.factor) < 1e-2 * abs(wrong.factor)


def _is_of_samples(spread: Observed | None, wrong: Observed) -> bool:
    """Return whether each rank has the part of a parameter's gradient that comes from its samples, with its factor."""
    if spread is None or spread.is_partial or abs(spread.factor - 1) <= 1e-2:
        return False
    return abs(spread.factor / wrong.factor - 1) < 1e-2


def _sum(op: Op, to: int | str) -> np.ndarray | None:
    """Return the sum of all that an operation passes on to one place."""
    there = [x for at, x in op.passed if at == to]
    return np.sum(there, axis=0) if there and len({x.shape for x in there}) == 1 else None


def _size(op: Op) -> int:
    return sum(x.size for x in op.values)
