"""The exact search behind `partition`: the smallest largest share that consecutive layers allow.

A probe asks whether the layers can be cut so that no rank has more than a limit; binary search finds the least limit,
and a last probe just below it is the proof.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, product

import numpy as np

from tplab.errors import ShapeError
from tplab.schedules.placement import Placement, name_of

Number = int | float


@dataclass(frozen=True)
class Balance:
    """A partition to be found.

    costs       of each layer
    placement   the stages of each rank
    memory      what each layer takes on each rank, or None; limits: what each rank has
    """

    costs: Sequence[Number]
    placement: Placement
    memory: list[list[Number]] | None
    limits: list[Number]

    def bounds(self) -> list[int]:
        """The bounds of the best partition."""
        arms = list(zip(*self.placement))  # the j-th stage of each rank
        if any(len(held) != len(arms) for held in self.placement) or name_of(self.placement) in (
            "custom",
            "two directions",
        ):
            raise ShapeError("stages are partitioned for a linear, wrapped, V or wave placement; give one of those")
        total, low = sum(self.costs), self._bound()
        most, step = low, low / 1024
        while (found := self._probe(arms, min(most, total))) is None:  # the best is near the bound, and near it is fast
            if most >= total:
                raise ShapeError(
                    f"no partition into {len(arms) * len(self.placement)} stages keeps every rank within its memory of "
                    f"{', '.join(f'{limit:,}' for limit in self.limits)}; take more ranks, or allow more"
                )
            low, most, step = most, most + step, 2 * step
        best = self._largest(found)
        while best - low > 1e-9 * best:  # bisect
            middle = (low + best) / 2
            better = self._probe(arms, middle)
            low, best, found = (middle, best, found) if better is None else (low, self._largest(better), better)
        while (better := self._probe(arms, math.nextafter(best, -1))) is not None:  # that there is none is the proof
            if self._largest(better) >= best:  # the same share, added up in another order
                break
            best, found = self._largest(better), better
        return self._most_even(best) if len(arms) == 1 else found

    def _bound(self) -> Number:
        """What the busiest rank cannot be below.

        The ranks' shares add up to all layers, and each share is the sum of as many runs of layers as the rank has
        stages. With layers much alike there are few such sums, and the largest ones below a limit do not add up to all.
        """
        total, ranks, virtual = sum(self.costs), len(self.placement), len(self.placement[0])
        low = max(total / ranks, max(self.costs))
        ends = {rank for rank, held in enumerate(self.placement) if {0, ranks * virtual - 1} & set(held)}
        sums = {}
        for inner in (
            False,
            True,
        ):  # only the ranks of the first and the last stage can have the first or the last layer
            costs = self.costs[1:-1] if inner else self.costs
            prefix = np.array(list(accumulate(costs, initial=0)))
            one = some = np.unique((prefix[None, :] - prefix[:, None])[np.triu_indices(len(prefix), 1)])
            for _ in range(virtual - 1):
                if len(one) * len(some) > 1_000_000:
                    return low
                some = np.unique(one[:, None] + some[None, :])
            sums[inner] = some
        for most in np.unique(np.concatenate([sums[False], sums[True]])):
            if most >= low:
                share = {inner: some[np.searchsorted(some, most, "right") - 1] if len(some) and some[0] <= most else 0
                         for inner, some in sums.items()}  # fmt: skip
                if sum(share[rank not in ends] for rank in range(ranks)) >= total * (1 - 1e-12):
                    return most.item()
        return low

    def _largest(self, bounds: list[int]) -> Number:
        sums = list(accumulate(self.costs, initial=0))
        stage = [sums[b] - sums[a] for a, b in pairwise(bounds)]
        return max(sum(stage[s] for s in held) for held in self.placement)

    def _probe(self, arms: Sequence[Sequence[int]], most: float) -> list[int] | None:
        """Bounds with no rank above `most`, or None.

        An arm, one stage of each rank, is a contiguous run of layers; where arms meet is tried in every way. Then rank
        after rank takes its piece of each arm. (Furthest is not best here: a rank that gets further may leave the next
        one nothing but a layer that does not fit. So all reaches are kept.)
        """
        num_layers, ranks = len(self.costs), len(self.placement)
        meetings = [(0, *inner, num_layers) for inner in combinations(range(1, num_layers), len(arms) - 1)]
        meetings.sort(key=lambda meets: sum((b - a) ** 2 for a, b in pairwise(meets)))
        for meets in meetings:
            spans = list(pairwise(meets))
            if min(b - a for a, b in spans) >= ranks:
                ways = [
                    range(a, b) if arm[0] <= arm[-1] else range(b - 1, a - 1, -1) for (a, b), arm in zip(spans, arms)
                ]
                ends = _Fill(self, ways, most).ends()
                if ends is not None:
                    return sorted({0, num_layers, *ends})
        return None

    def _most_even(self, most: Number) -> list[int]:
        """Of all cuts into one stage a rank with no stage above `most`, those with the least sum of squares."""
        num_layers, ranks = len(self.costs), len(self.placement)
        sums = np.array(list(accumulate(self.costs, initial=0)))
        size = sums[None, :] - sums[:, None]  # of the layers a to b [a, b]
        legal = (size <= most) & np.triu(np.ones(size.shape, bool), 1)
        reach, came_from = np.full(num_layers + 1, np.inf), []
        reach[0] = 0.0
        for rank in range(ranks):
            allowed = legal
            if self.memory is not None:
                taken = np.array(list(accumulate(self.memory[rank], initial=0)))
                allowed = legal & (taken[None, :] - taken[:, None] <= self.limits[rank])
            through = np.where(allowed, reach[:, None] + size.astype(float) ** 2, np.inf)
            came_from.append(np.argmin(through, axis=0))
            reach = through.min(axis=0)
        bounds = [num_layers]
        for choice in reversed(came_from):
            bounds.append(int(choice[bounds[-1]]))
        return bounds[::-1]


class _Fill:
    """Rank after rank takes a piece of each arm; `ways` are the layers of each arm in the order in which it is filled.

    A reach is how many layers of each arm are taken. Reaches are kept as: those of the other arms -> a set of those of
    the last arm, as the bits of a number.
    """

    def __init__(self, problem: Balance, ways: Sequence[range], most: float):
        self.problem, self.most, self.ranks = problem, most, len(problem.placement)
        self.sizes = [len(way) for way in ways]
        self.costs = [list(accumulate((problem.costs[layer] for layer in way), initial=0)) for way in ways]
        self.memory = [[list(accumulate((row[layer] for layer in way), initial=0)) for way in ways]
                       for row in problem.memory or ()]  # fmt: skip
        self.ways = ways

    def ends(self) -> set[int] | None:
        """The bounds between stages, or None where no filling ends with full arms."""
        reached = [{(0,) * (len(self.sizes) - 1): 1}]
        for rank in range(self.ranks):
            reached.append(self._next(reached[-1], rank))
        reach = (tuple(self.sizes[:-1]), self.sizes[-1])
        if not reached[-1].get(reach[0], 0) >> reach[1] & 1:
            return None
        ends: set[int] = set()
        for rank in range(self.ranks, 0, -1):
            ends |= {_bound(way, at) for way, at in zip(self.ways, (*reach[0], reach[1]))}
            reach = self._before(reached[rank - 1], rank - 1, reach)
        return ends | {_bound(way, 0) for way in self.ways}

    def _next(self, before: dict[tuple[int, ...], int], rank: int) -> dict[tuple[int, ...], int]:
        """What can be reached with this rank too."""
        left, after = self.ranks - rank - 1, {}
        for others, lasts in before.items():
            for others_now in product(*(self._stops(at, size, left) for at, size in zip(others, self.sizes))):
                rest = sum(sums[-1] - sums[at] for sums, at in zip(self.costs, others_now)) + self.costs[-1][-1]
                least = bisect_left(
                    self.costs[-1], rest - left * self.most * (1 + 1e-12)
                )  # less leaves too much for the rest
                found, at = 0, 0
                while lasts >> at:
                    if lasts >> at & 1:
                        furthest = self._furthest(others, others_now, at, rank)
                        stops = self._stops(at, self.sizes[-1], left)
                        low, high = max(stops.start, least), min(stops.stop - 1, furthest)
                        if low <= high:
                            found |= (1 << high + 1) - (1 << low)
                    at += 1
                if found:
                    after[others_now] = after.get(others_now, 0) | found
        return after

    def _before(self, before: dict[tuple[int, ...], int], rank: int, reach: tuple[tuple[int, ...], int]):
        """A reach from which this rank's pieces lead to `reach`."""
        for others, lasts in before.items():
            if all(a < b for a, b in zip(others, reach[0])):
                for at in range(reach[1]):
                    if lasts >> at & 1 and self._furthest(others, reach[0], at, rank) >= reach[1]:
                        return others, at
        raise AssertionError("every reach was reached from somewhere")

    def _stops(self, at: int, size: int, left: int) -> range:
        """Where a piece that begins at `at` may end: it has a layer at least, and leaves one for each rank to come."""
        return range(at + 1, size - left + 1) if left else range(max(size, at + 1), size + 1)

    def _furthest(self, others: tuple[int, ...], others_now: tuple[int, ...], at: int, rank: int) -> int:
        """How far this rank can go in the last arm, given its pieces of the others; -1 where those are too much."""
        furthest = self.sizes[-1]
        limits = [(self.costs, self.most)] + ([(self.memory[rank], self.problem.limits[rank])] if self.memory else [])
        for sums, limit in limits:
            taken = sum(arm[b] - arm[a] for arm, a, b in zip(sums, others, others_now))
            if taken > limit:
                return -1
            low, high = at, furthest  # the last place where the sum of all pieces, taken together, is within the limit
            while low < high:
                middle = (low + high + 1) // 2
                if taken + (sums[-1][middle] - sums[-1][at]) <= limit:
                    low = middle
                else:
                    high = middle - 1
            furthest = low
        return furthest


def _bound(way: range, at: int) -> int:
    """The bound before the layer that comes next when `at` layers of the way are taken."""
    return way.start + at if way.step > 0 else way.start + 1 - at
