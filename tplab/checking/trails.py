"""The trails of all ranks beside the reference's. An operation whose inputs are right and whose result is wrong is at
fault; in the backward pass, likewise for gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tplab.checking.backward import Backward
from tplab.checking.differences import difference, rows_in
from tplab.checking.gaps import filled, largest
from tplab.checking.observed import PRECISION, Observed, deals, in_step, uneven, whose
from tplab.checking.trail import MATMULS, READS, Key, Op, Trail, reached
from tplab.units import plain, ranks_text


class Trails(Backward):
    """The queries about results, and those about gradients."""

    def __init__(self, ours: Sequence[Trail], theirs: Trail, step: int = 0, sets_up: bool = False):
        super().__init__(ours, theirs, step, sets_up)
        self._of_values: dict[Key, bool] = {}
        self.precision = PRECISION

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

    def order_of_samples(self) -> list[int]:
        """Return, for the ranks' rows in rank order, the number of each in the reference, where the forward pass seems
        to go wrong; [] if they are not rows of it."""
        first = self.first_wrong()
        before = [self._ends.ops[at] for at in first.inputs[:1]] if first is not None else []
        for key in [op.key for op in (first, *before) if op is not None and op.key in self._theirs]:
            whole, parts = self._theirs[key].at(None), [ops[key].at(None) for ops in self._by_key if key in ops]
            if whole is None or whole.ndim != 2 or any(x is None or x.shape[1:] != whole.shape[1:] for x in parts):
                continue
            if found := rows_in(np.concatenate(parts).astype(np.float64), whole, 1e-4 * largest(whole)):  # type: ignore[arg-type]
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
        ways = [deals(whole, held[key][0], len(self._ours)) if len({*held[key]}) == 1 else uneven(whole, held[key])
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
