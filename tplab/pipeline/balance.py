"""The exact search behind `partition`: makes the largest share as small as consecutive layers allow.

A probe asks whether the layers can be cut so that no rank has more than a limit; binary search finds the lowest limit.
The proof is a lower bound for the busiest rank, or a probe that fails just below the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, combinations_with_replacement, pairwise

import numpy as np

from tplab.errors import ShapeError
from tplab.schedules.placement import Placement, name_of
from tplab.sharding import cut

Number = int | float
Limits = list[tuple[np.ndarray, Number]]
"""For the layers taken in each state, sums of their costs or memory; and how much more a rank may add to these."""


class Balance:
    """A partition to be found.

    costs       of each layer
    placement   the stages of each rank
    memory      what each layer needs on each rank, or None; limits: what each rank has
    """

    def __init__(
        self, costs: Sequence[Number], placement: Placement, memory: list[list[Number]] | None, limits: list[Number]
    ):
        self.costs, self.placement, self.memory, self.limits = costs, placement, memory, limits
        self.arms = list(zip(*placement))  # the j-th stage of each rank: together a run of layers
        if any(len(held) != len(self.arms) for held in placement) or name_of(placement) in ("custom", "two directions"):
            raise ShapeError("stages are partitioned for a linear, wrapped, V or wave placement; give one of those")

    def bounds(self) -> list[int]:
        """The bounds of the best partition."""
        is_whole = all(isinstance(cost, int) for cost in self.costs)
        total, low = sum(self.costs), self._bound()
        low = math.ceil(low) if is_whole else low
        most, step = low, max(low // 1024, 1) if is_whole else low / 1024
        while (found := self._probe(most)) is None:  # the best is near the bound, and probes near it are fast
            if most >= total:
                raise ShapeError(
                    f"no partition into {len(self.arms) * len(self.placement)} stages keeps every rank within its "
                    f"memory of {', '.join(f'{limit:,}' for limit in self.limits)}; take more ranks or allow more"
                )
            low, most, step = most, min(most + step, total), 2 * step
        best = self._largest(found)
        while most > low and best - low > (1 if is_whole else 1e-12 * best):
            middle = (low + best) // 2 if is_whole else (low + best) / 2
            better = self._probe(middle)
            low, best, found = (middle, best, found) if better is None else (low, self._largest(better), better)
        return found if len(self.arms) > 1 else self._most_even(best) or found

    def _bound(self) -> Number:
        """A lower bound for the busiest rank.

        The ranks' shares add up to all layers, and each share is the sum of as many runs of layers as the rank has
        stages. If layers are very similar, there are few such sums, and the largest ones below a limit may not add up
        to all layers.
        """
        total, ranks, last = sum(self.costs), len(self.placement), len(self.arms) * len(self.placement) - 1
        low = max(total / ranks, max(self.costs))
        num_ends = sum(0 in held or last in held for held in self.placement)
        sums = []
        for costs in (self.costs, self.costs[1:-1]):  # only the ranks of the first and last stage can have those layers
            prefix = np.array(list(accumulate(costs, initial=0)))
            one = some = np.unique((prefix[None, :] - prefix[:, None])[np.triu_indices(len(prefix), 1)])
            for _ in self.arms[1:]:
                if len(one) * len(some) > 1_000_000:
                    return low
                some = np.unique(one[:, None] + some[None, :])
            sums.append(np.append(0, some))
        limits = np.unique(np.concatenate(sums))
        at_ends, inside = (some[np.searchsorted(some, limits, "right") - 1] for some in sums)
        is_enough = num_ends * at_ends + (ranks - num_ends) * inside >= total * (1 - 1e-12)
        return max(low, limits[np.argmax(is_enough)].item()) if is_enough.any() else low

    def _largest(self, bounds: list[int]) -> Number:
        sums = list(accumulate(self.costs, initial=0))
        stage = [sums[b] - sums[a] for a, b in pairwise(bounds)]
        return max(sum(stage[s] for s in held) for held in self.placement)

    def _probe(self, most: Number) -> list[int] | None:
        """Bounds with no rank above `most`, or None."""
        if len(self.arms) == 1:
            return self._most_even(most)
        if len(self.placement) == 1:  # this rank has all layers, however they are cut
            fits = self.memory is None or sum(self.memory[0]) <= self.limits[0]
            pieces = cut(len(self.costs), len(self.arms), "even")[::-1]
            return [0, *accumulate(map(len, pieces))] if fits else None
        return next((bounds for meets in self._meetings if (bounds := self._filled(meets, most)) is not None), None)

    @cached_property
    def _meetings(self) -> list[tuple[int, ...]]:
        """Where the arms may begin and end, each with at least one layer for every rank; the most even ones first."""
        num_layers, ranks, arms = len(self.costs), len(self.placement), len(self.arms)
        spare = combinations_with_replacement(range(num_layers - ranks * arms + 1), arms - 1)
        meetings = [(0, *(ranks * k + more for k, more in enumerate(some, 1)), num_layers) for some in spare]
        return sorted(meetings, key=lambda meets: sum((b - a) ** 2 for a, b in pairwise(meets)))

    def _filled(self, meets: tuple[int, ...], most: Number) -> list[int] | None:
        """Bounds with no rank above `most`, where the arms begin and end at `meets`; or None.

        One rank after the other takes a piece of each arm. A state is how many layers of each arm are taken; it is an
        element of arrays with one dim per arm. It is not always best to get as far as possible, because the next layer
        may then not fit on the next rank. So we keep all states that can be reached.
        """
        ways = [range(a, b) if arm[0] <= arm[-1] else range(b - 1, a - 1, -1)
                for (a, b), arm in zip(pairwise(meets), self.arms)]  # fmt: skip
        costs, at = _sums(self.costs, ways), tuple(map(len, ways))
        reached, limits = [np.zeros(costs.shape, bool)], []
        reached[0][(0,) * len(ways)] = True
        for rank in range(len(self.placement)):
            limits.append([(costs, most)])
            if self.memory is not None:
                limits[-1].append((_sums(self.memory[rank], ways), self.limits[rank]))
            reached.append(_next(reached[-1], limits[-1]))
        if not reached[-1][at]:
            return None
        mean, bounds = costs[at] / len(self.placement), set()
        for before, limit in zip(reached[-2::-1], reversed(limits)):
            bounds |= {_bound(way, taken) for way, taken in zip(ways, at)}
            box = tuple(slice(taken) for taken in at)
            fits = np.logical_and.reduce([before[box], *(sums[box] >= sums[at] - most for sums, most in limit)])
            uneven = np.where(fits, abs(costs[at] - costs[box] - mean), np.inf)
            at = tuple(map(int, np.unravel_index(np.argmin(uneven), uneven.shape)))
        return sorted(bounds | {_bound(way, 0) for way in ways})

    def _most_even(self, most: Number) -> list[int] | None:
        """Among all cuts into one stage per rank with no stage above `most`, the one with the least sum of squares."""
        num_layers = len(self.costs)
        sums = np.array(list(accumulate(self.costs, initial=0)))
        size = sums[None, :] - sums[:, None]  # of the layers a to b [a, b]
        legal = (size <= most) & np.triu(np.ones(size.shape, bool), 1)
        reach, came_from = np.full(num_layers + 1, np.inf), []
        reach[0] = 0.0
        for rank in range(len(self.placement)):
            allowed = legal
            if self.memory is not None:
                taken = np.array(list(accumulate(self.memory[rank], initial=0)))
                allowed = legal & (taken[None, :] - taken[:, None] <= self.limits[rank])
            through = np.where(allowed, reach[:, None] + size.astype(float) ** 2, np.inf)
            came_from.append(np.argmin(through, axis=0))
            reach = through.min(axis=0)
        if reach[-1] == np.inf:
            return None
        bounds = [num_layers]
        for choice in reversed(came_from):
            bounds.append(int(choice[bounds[-1]]))
        return bounds[::-1]


def _sums(amounts: Sequence[Number], ways: Sequence[range]) -> np.ndarray:
    """The sum over all layers taken in each state [layers of each arm + 1]."""
    total = np.zeros((), int)
    for way in ways:
        total = np.add.outer(total, np.array(list(accumulate((amounts[layer] for layer in way), initial=0))))
    return total


def _next(reached: np.ndarray, limits: Limits) -> np.ndarray:
    """The states that can be reached with one more rank, which takes at least one layer of each arm."""
    after = np.zeros(reached.shape, bool)
    if len(limits) == 1:  # the earlier state with the most layers taken leaves the least to add
        ((sums, most),) = limits
        best = np.where(reached, sums, -1 - most)
        for dim in range(best.ndim):
            best = np.maximum.accumulate(best, dim)
        inside = (slice(1, None),) * best.ndim
        after[inside] = best[(slice(-1),) * best.ndim] >= sums[inside] - most
        return after
    furthest = np.maximum.accumulate(np.where(reached, np.arange(reached.shape[-1]), -1), -1)[..., :-1]
    for others in np.ndindex(reached.shape[:-1]):  # the same holds for the last arm, given the others
        box = tuple(slice(taken) for taken in others)
        fits = furthest[box] >= 0
        for sums, most in limits:
            fits &= np.take_along_axis(sums[box], np.maximum(furthest[box], 0), -1) >= sums[others][1:] - most
        after[others][1:] = fits.any(tuple(range(len(others))))
    return after


def _bound(way: range, taken: int) -> int:
    """The bound before the next layer, after `taken` layers of the way."""
    return way.start + taken if way.step > 0 else way.start + 1 - taken
