"""The operations of one step, with their values and the gradients that came back. An operation whose inputs are right
and whose result is wrong is at fault; in the backward pass, likewise for gradients.

The ranks and the reference run the same script, so the n-th operation at a line of one is the n-th at that line of the
other. If R ranks share a loop, each rank runs a line once where the reference runs it R times, one part after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from tplab.checking.gaps import filled, largest
from tplab.checking.observed import PRECISION, Observed, deals, factor_between, find_spread, in_step, whose
from tplab.units import plain, ranks_text

T = TypeVar("T")
Key = tuple[str, str, int]
MOST_ROWS = 512
READS = {"item", "tolist", "__bool__", "__float__", "__int__", "__format__"}
"""Operations by which the program reads numbers of a tensor."""
MATMULS = {"matmul", "__matmul__", "mm"}
_REFERENCE = -1
"""The reference's index among the ranks."""


@dataclass(eq=False)  # compared by identity: those of two ranks may have equal fields
class Op:
    """One operation of a forward pass.

    key       its line, its name, and how often it ran there before
    lines     of all frames of the script that it ran in, the innermost first
    inputs    the numbers of the operations that made its inputs
    given     its inputs that need no gradient, by place; and the line that made each, if it was seen
    values    its results
    arrived   for each result its gradient, if any came
    passed    the gradients that it passes on, and to which: the number of an operation or the name of a parameter
    is_function   whether the program, or a library, has written its backward pass
    sent      the lines of collectives in its forward pass; sent_back: in its backward pass
    times     its factor, if it only multiplies by a number; compares: the number that it compares with
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
    times: float | None = None
    compares: float | None = None

    @property
    def line(self) -> str:
        return self.key[0]

    def at(self, place: int | None) -> np.ndarray | None:
        """Return the input at a place; the first result for None, and another one for ~place."""
        if place is None or place < 0:
            number = ~place if place else 0
            return self.values[number] if number < len(self.values) else None
        return self.given[place][0] if place in self.given else None


@dataclass
class Trail:
    """The operations of one rank in one step, in execution order. end: the one whose result is the loss."""

    ops: list[Op] = field(default_factory=list)
    end: int = -1


def reached(ends: Iterable[T], before: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """Return everything that `ends` depend on, themselves included, where `before` gives the direct dependencies."""
    waiting, found = [*ends], dict[T, None]()
    while waiting:
        if (one := waiting.pop()) not in found:
            found[one] = None
            waiting += before(one)
    return found


class Trails:
    """The trails of all ranks beside the reference's, in one step. sets_up: whether ranks run operations that it does
    not, and that are right, as those with which a script starts again"""

    def __init__(self, ours: Sequence[Trail], theirs: Trail, step: int = 0, sets_up: bool = False):
        self._sets_up, self.step = sets_up, step
        self._ours, self._trails = ours, [*ours, theirs]
        *self._by_key, self._theirs = ({op.key: op for op in trail.ops} for trail in self._trails)
        for name, runs in self._shared().items():
            self._theirs.update(_side_by_side(runs, self._by_key, self._theirs, name))
        self._of_values: dict[Key, bool] = {}
        self.precision = PRECISION

    def _shared(self) -> dict[tuple[str, str], int]:
        """Return the operations of loops that ranks share, and how often each rank runs them."""
        *mine, theirs = (Counter(key[:2] for key in ops) for ops in (*self._by_key, self._theirs))
        most = len(mine) if len(mine) > 1 else 0
        return {name: mine[0][name] for name, count in theirs.items()
                if count and {each[name] * most for each in mine} == {count}}  # fmt: skip

    # --- forward -----------------------------------------------------------------------------------------------------

    @property
    def _ends(self) -> Trail:
        """The trail of the first rank that has a loss."""
        return next((trail for trail in self._ours if trail.end >= 0), Trail())

    def _alike(self, op: Op) -> list[Op]:
        """Return all runs of the operation on the first rank that the reference has, too."""
        return [one for one in self._ours[0].ops if one.key[:2] == op.key[:2] and one.key in self._theirs]

    @property
    def suspects(self) -> tuple[list[Op], list[Op]]:
        """The operations with wrong results on the way to the loss that compare with another number than the reference;
        and the functions that send."""
        ops = [self._ends.ops[at] for at in sorted(self._wrong_ones(self._ends, None))]
        return [op for op in ops if self._other_limit(op.key)], [op for op in ops if op.sent]

    def _other_limit(self, key: Key) -> str:
        """Return words for an operation that compares with another number than the reference's; "" if it does not."""
        was, wanted = (ops[key].compares if key in ops else None for ops in (self._by_key[0], self._theirs))
        if was is None or wanted is None or was == wanted:
            return ""
        return (
            f"it compares with {plain(was)}, and in the reference with {plain(wanted)}. The number comes from what a "
            "rank has, as the capacity of an expert that is computed from the rank's own tokens, where that of all is "
            "meant, and what is compared with it must be of all, too"
        )

    def sums_after(self, begun: Sequence[Op]) -> list[str]:
        """Return the lines of collectives in functions with a wrong result, after the last of some operations."""
        ops, keys = self._ends.ops, {one.key for one in begun}
        start = max((at for at, op in enumerate(ops) if op.key in keys), default=len(ops))
        wrong = sorted(at for at in self._wrong_ones(self._ends, None) if at > start)
        return [*dict.fromkeys(line for at in wrong for line in ops[at].sent)]

    def alike(self, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return results that are equal on every rank, by words for them."""
        made = {op.key: op.values[0] for op in self._ours[0].ops if op.values and op.values[0].shape == shape}
        return {f"what {key[0]} computes": x for key, x in made.items()
                if all(key in ops and np.array_equal(x, ops[key].values[0]) for ops in self._by_key)}  # fmt: skip

    def wanted(self, op: Op) -> Iterator[tuple[str, dict[Any, dict[int, np.ndarray]]]]:
        """Yield how an operation differs, in words, and what it should return on each rank, whenever it runs: in each
        way in which the reference's values may be cut."""
        keys = [one.key for one in self._alike(op) if self.can_be_cut(one)]
        count = min((len(self._theirs[key].values) for key in keys), default=1)
        rest = [[*self._cuts(keys, ~place)] for place in range(1, count)]
        for number, found in enumerate(self._cuts(keys, None)):
            more = {(key, ~place): pieces for place, ways in enumerate(rest, 1)
                    for key, pieces in (ways[number].items() if number < len(ways) else ())}  # fmt: skip
            yield self._differs([((key, None), x) for key, x in found.items()] + [*more.items()]), found | more

    def faults(self, made: np.ndarray | None = None) -> Iterator[tuple[Op, Op]]:
        """Yield operations whose result may be replaced, each after the one that may be at fault: a wrong one with
        right inputs, or one without a counterpart in the reference. What is replaced is its own result, the last one of
        its line, or what is decided by it, as in a comparison, or by its indices. made: see `first_wrong`"""
        trail, known = self._ends, set[tuple[str, str]]()
        ops = {at: trail.ops[at] for at in sorted(self._wrong_ones(trail, made))}
        lasts, found = {op.line: op for op in ops.values()}, list[tuple[Op, Op]]()
        for op in (op for op in ops.values() if self._has_right_inputs(trail, op)):
            own = [op, lasts[op.line]]
            found += [(op, one) for one in own]
            found += [(op, one) for one in ops.values() if one not in own and self._is_decided(one, trail, own)]
        found += [(trail.ops[at], op) for op in ops.values() for at in op.inputs
                  if at in ops and not self.can_be_cut(trail.ops[at])]  # fmt: skip
        for op, one in found:
            if one.key[:2] not in known and self.can_be_cut(one):
                known.add(one.key[:2])
                yield op, one

    def _is_decided(self, op: Op, trail: Trail, by: Sequence[Op]) -> bool:
        """Return whether an operation takes an index from some others, or compares with them."""
        takes = [one for one in by if any(trail.ops[at] is one for at in op.inputs)]
        has_index = any(x.dtype.kind == "i" and x.size > 1 for one in takes for x in one.values)
        return bool(takes) and (has_index or any(x.dtype.kind == "b" for x in op.values))

    def reads(self) -> list[Op]:
        """Return where the program reads other numbers than in the reference."""
        found = list[Op]()
        for op in (op for op in self._ends.ops if op.key[1] in READS and op.key in self._theirs):
            want, held = self._theirs[op.key].values[0], [one.values[0] for one in self.ops_of(op.key)[0].values()]
            slack = self.precision * largest(want[np.isfinite(want)]) if want.dtype.kind == "f" else 0.0
            found += [op] * any(x.shape == want.shape and not np.allclose(x, want, 0, slack, True) for x in held)
        return found

    def numbers_at(self, op: Op) -> list[tuple[float, float]]:
        """Return the numbers by which a wrong operation and others of its line multiply on all ranks, if the reference
        multiplies by other numbers: both."""
        pairs = dict[float, float]()
        for one in [op, *(other for other in self._ends.ops if other.line == op.line)]:
            held, theirs = self.ops_of(one.key)
            numbers, want = {other.times for other in held.values()}, theirs and theirs.times
            if want and len(numbers) == 1 and (was := numbers.pop()) and abs(was - want) > 1e-6 * abs(want):
                pairs.setdefault(was, want)
            elif one is op:
                return []
        return [*pairs.items()]

    def makers_of(self, op: Op) -> list[Op]:
        """Return the operations that made the inputs of one."""
        return [self._ends.ops[at] for at in op.inputs]

    def can_be_cut(self, op: Op) -> bool:
        return next(self._cuts([op.key] if op.key in self._theirs else [], None), None) is not None

    def why_not_cut(self, op: Op) -> str:
        """Return in words why the reference's values cannot be put in place of an operation's."""
        held, theirs = self.ops_of(op.key)
        if theirs is None:
            return "the reference does not compute this"
        if len(held) < len(self._ours):
            return f"only {ranks_text([*held])} and the reference compute this"
        return "the reference computes this in another shape"

    def takes_parts(self, op: Op) -> bool:
        """Return whether an operation of the first rank that has a loss takes a part of a sum."""
        return bool(self._parts(self._ends, op))

    def has_right_inputs(self, op: Op) -> bool:
        """Return whether all inputs of an operation of the first rank that has a loss are right."""
        return self._has_right_inputs(self._ends, op)

    def _has_right_inputs(self, trail: Trail, op: Op) -> bool:
        return all(self._is_right(trail.ops[before]) for before in op.inputs)

    def _differs(self, wanted: Sequence[tuple[tuple[Key, int | None], Mapping[int, np.ndarray]]]) -> str:
        """Return in words how values differ from the expected ones: on all ranks, or on the first one where they do."""
        for (key, place), pieces in wanted:
            if limit := self._other_limit(key):
                return limit
            held = [ops[key].at(place) for ops in self._by_key]
            words = [difference(x, pieces[rank]) for rank, x in enumerate(held) if x is not None]
            if first := next(filter(None, words), ""):
                return f"it is {first}" if len({*words}) == 1 else f"on rank {words.index(first)}, it is {first}"
        return "it is another one"

    def products_of_parts(self) -> list[str]:
        """Return the lines of matmuls of whose results each rank has only a part along both dims."""
        found = dict[str, None]()
        for op in (op for op in self._ours[0].ops if op.key[1] in MATMULS):
            theirs, shape = self._theirs.get(op.key), tuple(len(self._ours) * size for size in op.values[0].shape)
            if theirs is not None and len(shape) == 2 and theirs.values[0].shape == shape:
                found[op.line] = None
        return [*found]

    def wanted_by(self, op: Op) -> Iterator[tuple[int, dict[Key, dict[int, np.ndarray]]]]:
        """Yield the places of an operation's inputs that are other parts of the reference's, or in another order, and
        the expected parts."""
        for place in op.given:
            spread = self._spread(op, lambda one, _, place=place: one.at(place))
            is_part = spread is not None and abs(spread.factor - 1) < 1e-2 and not spread.is_partial
            for found in self._cuts([other.key for other in self._alike(op) if place in other.given], place):
                if op.key not in found:
                    continue
                differs = not all(np.allclose(ops[op.key].given[place][0], found[op.key][rank], 1e-4, 1e-6)
                                  for rank, ops in enumerate(self._by_key))  # fmt: skip
                if any(self.mistaken(op.key, place, found[op.key])) or (is_part and differs):
                    yield place, found

    def mistaken(self, key: Key, place: int, pieces: Mapping[int, np.ndarray]) -> list[tuple[int, int]]:
        """Return the ranks that take another rank's part, and whose; [] if an input is no rank's part."""
        has = {rank: ops[key].given[place][0].astype(np.float64) for rank, ops in enumerate(self._by_key)}
        of = whose(has, pieces, 1e-6 * max(map(largest, has.values())))
        return [(rank, other) for rank, other in enumerate(of) if rank != other and -1 not in of]

    def ops_of(self, key: Key) -> tuple[dict[int, Op], Op | None]:
        """Return an operation on each rank that has it, and in the reference."""
        return {rank: ops[key] for rank, ops in enumerate(self._by_key) if key in ops}, self._theirs.get(key)

    def order_of_samples(self) -> list[int]:
        """Return, for the ranks' rows in rank order, the number of each in the reference, where the forward pass seems
        to go wrong; [] if they are not rows of it."""
        first = self.first_wrong()
        before = [self._ends.ops[at] for at in first.inputs[:1]] if first is not None else []
        for key in [op.key for op in (first, *before) if op is not None and op.key in self._theirs]:
            whole, parts = self._theirs[key].at(None), [ops[key].at(None) for ops in self._by_key if key in ops]
            if whole is None or whole.ndim != 2 or any(x is None or x.shape[1:] != whole.shape[1:] for x in parts):
                continue
            if found := _places(np.concatenate(parts).astype(np.float64), whole, 1e-4 * largest(whole)):  # type: ignore[arg-type]
                return found
        return []

    def parameters_of(self, op: Op) -> list[str]:
        """Return a rank's names of the parameters to which an operation, or one before it, passes gradients."""
        ops = next(trail.ops for trail in self._ours if op in trail.ops)
        return [to for one in (op, *(ops[at] for at in op.inputs)) for to, _ in one.passed if isinstance(to, str)]

    def parts_in(self, op: Op, made: np.ndarray | None = None) -> Iterator[list[Op]]:
        """Yield inputs of a wrong operation that are parts of a sum: the operations that made them, first those alone
        that depend on none of the others; and the first operations with parts that any wrong one depends on.

        made   see `first_wrong`
        """
        trail = next(trail for trail in self._ours if op in trail.ops)
        every = {one.key: one for at in self._wrong_ones(trail, made) for one in self._parts(trail, trail.ops[at])}
        begun = [*every.values()]
        while any(before := [self._parts(trail, one) for one in begun]):
            begun = [*{x.key: x for one, some in zip(begun, before) for x in some or [one]}.values()]
        own = self._parts(trail, op)
        alone = [one for one in own if not any(trail.ops[at] in own for at in self._behind(trail, one))]
        ways = [alone, own, begun]
        for some in [way for number, way in enumerate(ways) if way not in ways[:number]]:
            keys = {one.key[:2] for one in some}
            before = trail.ops[: trail.ops.index(op)]  # later ones may follow from it, as in a loop
            if some and all(self._is_part(one) for one in before if one.key[:2] in keys):
                yield some

    def _behind(self, trail: Trail, op: Op) -> dict[int, None]:
        """Return the numbers of all operations that an operation depends on."""
        return reached(op.inputs, lambda at: trail.ops[at].inputs)

    def _parts(self, trail: Trail, op: Op) -> list[Op]:
        return [one for at in dict.fromkeys(op.inputs) if self._is_part(one := trail.ops[at])]

    def _is_part(self, op: Op) -> bool:
        return (spread := self._spread_of(op, 0)) is not None and spread.is_partial

    def _cuts(self, keys: Sequence[Key], place: int | None) -> Iterator[dict[Key, dict[int, np.ndarray]]]:
        """Yield the reference's values of operations (`Op.at`) as each rank should have them: whole, or in chunks."""
        held = {key: [x.shape for ops in self._by_key if key in ops and (x := ops[key].at(place)) is not None]
                for key in keys}  # fmt: skip
        wholes = {key: x for key in keys if (x := self._theirs[key].at(place)) is not None}
        if not wholes or len(wholes) < len(held) or any(len(shapes) < len(self._ours) for shapes in held.values()):
            return
        ways = [deals(whole, held[key][0], len(self._ours)) if len({*held[key]}) == 1 else _uneven(whole, held[key])
                for key, whole in wholes.items()]  # fmt: skip
        for parts in in_step(ways):
            yield {key: {rank: filled(x, shape) for (rank, x), shape in zip(part.items(), held[key])}
                   for key, part in zip(wholes, parts)}  # fmt: skip

    def first_wrong(self, made: np.ndarray | None = None) -> Op | None:
        """Return the first operation with a wrong result and right inputs; None if none is seen.

        made   the result on the first rank to start from, if it is not the loss
        """
        trail = self._ends
        wrong = self._wrong_ones(trail, made)
        first = [at for at in wrong if self._has_right_inputs(trail, trail.ops[at])]
        return trail.ops[min(first)] if first else None

    def _wrong_ones(self, trail: Trail, made: np.ndarray | None) -> set[int]:
        """Return the operations that a wrong result depends on through wrong values only."""
        ends = [trail.end]
        if made is not None:
            ends = [at for at, op in enumerate(trail.ops) if any(np.array_equal(x, made) for x in op.values)]
        return {*reached((end for end in ends[-1:] if end >= 0), lambda number: [
            at for at in trail.ops[number].inputs if not self._is_right(trail.ops[at])
        ])}  # fmt: skip

    def _is_right(self, op: Op) -> bool:
        if op.key not in self._of_values:
            self._of_values[op.key] = all(self._is_right_value(op, number) for number in range(len(op.values)))
        return self._of_values[op.key]

    def _is_right_value(self, op: Op, number: int) -> bool:
        other = self._theirs.get(op.key)
        if other is None:
            return self._sets_up
        if len(other.values) != len(op.values):  # as for a tensor that is cut into one piece per rank, or gathered
            ops = self._ends.ops
            return all(at >= len(ops) or self._is_right(ops[at]) for at in op.inputs)
        spread = self._spread_of(op, number)
        if spread is None:
            return False
        of_all = other.values[number].size == 1 and spread.is_partial and spread.factor == len(self._ours)
        return spread.factor == 0 or abs(spread.factor - 1) < 10 * self.precision or of_all

    def _spread_of(self, op: Op, number: int) -> Observed | None:
        """Return how one of an operation's results is spread over the ranks."""
        found = lambda one, _: one.values[number] if number < len(one.values) else None  # noqa: E731
        return self._spread(op, found, self.precision)

    # --- backward ----------------------------------------------------------------------------------------------------

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
                    ways += _uneven(want, shapes) if len(shapes) == len(self._ours) > 1 and not ways else []
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
        names = {_REFERENCE: name, **held}
        return self._spread(op, lambda one, rank: _sum(one, names[rank]) if rank in names else None)

    def _passed_to(self, op: Op, to: Op) -> Observed | None:
        """Return the same for another operation."""

        def passed(one: Op, rank: int) -> np.ndarray | None:
            other = (self._theirs if rank == _REFERENCE else self._by_key[rank]).get(to.key)
            ops = self._trails[rank].ops
            return _sum(one, ops.index(other)) if other in ops else None

        return self._spread(op, passed)

    def _spread(
        self, op: Op, found: Callable[[Op, int], np.ndarray | None], precision: float = PRECISION
    ) -> Observed | None:
        """Return how a tensor of an operation, which `found` selects on each rank, is spread."""
        each = {_REFERENCE: self._theirs, **dict(enumerate(self._by_key))}
        held = {rank: found(ops[op.key], rank) for rank, ops in each.items() if op.key in ops}
        want, there = held.pop(_REFERENCE, None), {rank: x for rank, x in held.items() if x is not None}
        return find_spread(there, want, len(self._ours), precision) if there and want is not None else None


def _side_by_side(count: int, ranks: Sequence[Any], theirs: Mapping[Key, Op], name: tuple[str, str]) -> dict[Key, Op]:
    """Return the runs of a line in the reference's loop as ranks share them: the values of the run that each rank
    makes, one after the other along dim 0. Ranks have neighbouring runs, or take turns."""
    size, ways = len(ranks), list[dict[Key, Op]]()
    for first, step in (count, 1), (1, size):
        ways.append({})
        for turn in range(count):
            numbers = [rank * first + turn * step for rank in range(size)]
            runs = [theirs[*name, number] for number in numbers if (*name, number) in theirs]
            if len(runs) < size:
                return {}
            came = [place for place in runs[0].arrived if all(place in run.arrived for run in runs)]
            each = [*zip(*(run.values for run in runs))], [[run.arrived[place] for run in runs] for place in came]
            if not each[0] or any(
                x.shape != some[0].shape or not x.ndim for kind in each for some in kind for x in some
            ):
                return {}
            values, arrived = ([np.concatenate(some) for some in kind] for kind in each)
            ways[-1][*name, turn] = replace(runs[0], key=(*name, turn), values=values, passed=[],
                                            arrived=dict(zip(came, arrived)))  # fmt: skip
        parts = np.split(ways[-1][*name, 0].values[0], size)
        mine = [ops[*name, 0].values[0] for ops in ranks if (*name, 0) in ops]
        is_all = len(mine) == size
        if is_all and all(x.shape == part.shape and np.allclose(x, part, 1e-4, 1e-6) for x, part in zip(mine, parts)):
            return ways[-1]
    return ways[0]


def difference(got: np.ndarray, want: np.ndarray) -> str:
    """Return how a value differs from the right one: "2 times the reference's", or else the first elements; "" if it
    does not."""
    got, want, size = got.astype(np.float64), want.astype(np.float64), largest(want)
    factor = factor_between([(got, want)], 1e-4 * size)
    if factor is not None and abs(factor - 1) > 1e-3:
        return f"{plain(factor)} times the reference's"
    apart = np.flatnonzero(np.abs(got - want).reshape(-1) > 1e-5 * size)
    if not apart.size:
        return ""
    some = slice(int(apart[0]), int(apart[0]) + 4)
    first, second = (", ".join(f"{float(x):.5g}" for x in values.reshape(-1)[some]) for values in (got, want))
    if not got.any():
        return f"all zeros, where the reference has {second}, ... from element {some.start} on"
    if got.ndim > 1 and (rows := _places(got, want, 1e-5 * size)):
        moved = next(place for place, row in enumerate(rows) if row != place)
        return f"the reference's rows in another order: its row {moved} is the reference's row {rows[moved]}"
    if apart.size > 1 and np.ptp(more := (got - want).reshape(-1)[apart]) == 0:
        by = f"{plain(abs(more[0]))} {'more' if more[0] > 0 else 'less'}"
        return f"{by} than the reference's in {apart.size} of {got.size} places"
    return f"{first}, ... from element {some.start} on, where the reference has {second}, ..."


def _places(got: np.ndarray, want: np.ndarray, slack: float) -> list[int]:
    """Return the number of each row of a tensor among the expected rows; [] if one of them is not there."""
    if not got.size or got.size != want.size:
        return []
    got, want = (x.reshape(-1, x.shape[-1]) for x in (got, want))
    if got.shape != want.shape or len(got) > MOST_ROWS:
        return []
    found, is_free = list[int](), np.ones(len(want), bool)
    for row in got:
        begins_alike = (np.abs(want[:, :16] - row[:16]) <= slack).all(-1)
        there = np.flatnonzero(is_free & begins_alike)  # each of several equal rows counts once
        far = np.abs(want[there] - row).max(-1)
        if not far.size or not far.min() <= slack:
            return []
        found.append(int(there[far.argmin()]))
        is_free[found[-1]] = False
    return found


def _uneven(whole: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> Iterator[dict[int, np.ndarray]]:
    """Yield the whole cut along one dim into parts of these shapes, one for each rank."""
    if any(len(shape) != whole.ndim for shape in shapes):
        return
    for dim, size in enumerate(whole.shape):
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if rest == {(*whole.shape[:dim], *whole.shape[dim + 1 :])} and sum(shape[dim] for shape in shapes) == size:
            yield dict(enumerate(np.split(whole, np.cumsum([shape[dim] for shape in shapes])[:-1], dim)))


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
