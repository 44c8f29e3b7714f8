"""The operations of one step on each rank, and how those of all ranks and of the reference correspond.

The ranks and the reference run the same script, so the n-th operation at a line of one is the n-th at that line of the
other. If R ranks share a loop, each rank runs a line once where the reference runs it R times, one part after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from tplab.checking.observed import PRECISION, Observed, find_spread

T = TypeVar("T")
Key = tuple[str, str, int]
MOST_ROWS = 512
READS = {"item", "tolist", "__bool__", "__float__", "__int__", "__format__"}
"""Operations by which the program reads numbers of a tensor."""
MATMULS = {"matmul", "__matmul__", "mm"}
REFERENCE = -1
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


class Aligned:
    """The trails of all ranks beside the reference's, in one step. sets_up: whether ranks run operations that it does
    not, and that are right, as those with which a script starts again"""

    def __init__(self, ours: Sequence[Trail], theirs: Trail, step: int = 0, sets_up: bool = False):
        self._sets_up, self.step = sets_up, step
        self._ours, self._trails = ours, [*ours, theirs]
        *self._by_key, self._theirs = ({op.key: op for op in trail.ops} for trail in self._trails)
        for name, runs in self._shared().items():
            self._theirs.update(_side_by_side(runs, self._by_key, self._theirs, name))

    def _shared(self) -> dict[tuple[str, str], int]:
        """Return the operations of loops that ranks share, and how often each rank runs them."""
        *mine, theirs = (Counter(key[:2] for key in ops) for ops in (*self._by_key, self._theirs))
        most = len(mine) if len(mine) > 1 else 0
        return {name: mine[0][name] for name, count in theirs.items()
                if count and {each[name] * most for each in mine} == {count}}  # fmt: skip

    def ops_of(self, key: Key) -> tuple[dict[int, Op], Op | None]:
        """Return an operation on each rank that has it, and in the reference."""
        return {rank: ops[key] for rank, ops in enumerate(self._by_key) if key in ops}, self._theirs.get(key)

    def _spread(
        self, op: Op, found: Callable[[Op, int], np.ndarray | None], precision: float = PRECISION
    ) -> Observed | None:
        """Return how a tensor of an operation, which `found` selects on each rank, is spread."""
        each = {REFERENCE: self._theirs, **dict(enumerate(self._by_key))}
        held = {rank: found(ops[op.key], rank) for rank, ops in each.items() if op.key in ops}
        want, there = held.pop(REFERENCE, None), {rank: x for rank, x in held.items() if x is not None}
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
