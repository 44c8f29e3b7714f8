"""The plans of all layouts, ranked by time if they fit. A forecast is made only on access."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, overload

import numpy as np

from tplab.cost import Cluster
from tplab.forecast.block import Block
from tplab.forecast.forecast import LOST, Forecast, forecast
from tplab.forecast.memory import bytes_of, room
from tplab.forecast.model import Model
from tplab.forecast.plan import Plan
from tplab.forecast.stacks import Stack
from tplab.forecast.step import seconds_of

TOO_LARGE, PERHAPS, SLOWER = "need more than", "may need more than", "fit, and lose most"
"""The beginnings of reasons why plans lost. All other reasons are those why layouts of ranks are refused."""
OF_PLANS = (TOO_LARGE, PERHAPS, SLOWER)

_LOSES = {"computing": "computing: in smaller pieces, or in a fuller stage"}
_LOSES |= {name: text for name, (text, _) in LOST.items()}
_LOSES |= {"ep": "messages of expert parallelism", "dp": "sending gradients and parameters"}


class Estimate(NamedTuple):
    """A plan, its seconds, and the bytes of its fullest rank, as computed for all plans of a search together."""

    plan: Plan
    seconds: float
    bytes: float


class Plans(Sequence[Forecast]):
    """The plans that surely fit, the fastest first: `found[0]` is the forecast of the best.

    considered   how many plans were possible
    lost         reason -> how many plans, the most first: numbers that do not divide (counted by layouts of ranks),
                 plans that do not fit and, for those that fit, the part of a step that costs them most compared with
                 the best
    seconds, held   of all plans of all blocks, concatenated; infinite for impossible plans
    order           the indices of the plans that fit, the fastest first
    """

    def __init__(self, blocks: Sequence[Block], refused: Counter[str], given: tuple[Model, Cluster, int, int, Stack]):
        _, cluster, _, _, stack = self._given = given  # with the batch and the sequence
        self.blocks, self.parts, self._refused = blocks, seconds_of(blocks, exact=False), refused
        self.room = room(cluster.chip, stack)
        possible = [
            block.is_possible[:, None, None]
            & ((_of_pairs(block, "copies")[:, None] > 1) | (np.array(block.zeros) == 0))[:, None, :, None]
            for block in blocks
        ]
        self.seconds, self.held = (
            np.concatenate([np.where(has, of, np.inf).ravel() for has, of in zip(possible, found)])
            for found in ([sum(of.values()) for of in self.parts], map(bytes_of, blocks))
        )
        self.ends = np.cumsum([math.prod(block.shape) for block in blocks])
        self._sort()

    def _sort(self) -> None:
        fitting = np.flatnonzero(self.held <= self.room.sure)
        self.order = fitting[np.argsort(self.seconds[fitting], kind="stable")]

    def time(self, most: int) -> None:
        """Time the first `most` plans again, with simulated pipelines."""
        chosen = dict[Any, list[tuple[int, int, int]]]()
        for index in self.order[:most].tolist():
            block, place = self._where(index)
            pair, how, zero, way = self.blocks[block].places(place)
            chosen.setdefault((block, how, way), []).append((index, pair, zero))
        parts = [self.blocks[at].part([pair for _, pair, _ in of], how, way) for (at, how, way), of in chosen.items()]
        for of, block, found in zip(chosen.values(), parts, seconds_of(parts) if parts else ()):
            seconds = np.broadcast_to(sum(found.values()), block.shape)
            for place, (index, _, zero) in enumerate(of):
                self.seconds[index] = seconds[place, 0, zero, 0]
        self._sort()

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, place: int) -> Forecast: ...
    @overload
    def __getitem__(self, place: slice) -> list[Forecast]: ...
    def __getitem__(self, place: int | slice) -> Forecast | list[Forecast]:
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        model, cluster, batch, sequence, stack = self._given
        return forecast(model, self.plan(place), cluster, batch=batch, sequence=sequence, stack=stack)

    def plan(self, place: int) -> Plan:
        """The plan of the forecast at this place."""
        return self.at(int(self.order[place]))

    def at(self, index: int) -> Plan:
        """The plan at this index of `seconds` and `held`."""
        block, place = self._where(index)
        return self.blocks[block].plan(place)

    def _where(self, index: int) -> tuple[int, int]:
        """(which block, the plan's index in it)."""
        block = int(np.searchsorted(self.ends, index, side="right"))
        return block, index - (int(self.ends[block - 1]) if block else 0)

    @property
    def considered(self) -> int:
        """The number of possible plans."""
        return int(np.isfinite(self.seconds).sum())

    @property
    def smallest(self) -> float:
        """Bytes per GPU of the plan that needs the least, whether it fits or not."""
        return float(self.held.min())

    @cached_property
    def lost(self) -> Mapping[str, int]:
        too_large = int((np.isfinite(self.held) & (self.held > self.room.most)).sum())
        each = f"the {self.room.sure / 2**30:.0f} GiB of a GPU"
        perhaps = self.considered - too_large - len(self)
        larger = Counter({f"{TOO_LARGE} {each}": too_large, f"{PERHAPS} {each}": perhaps})
        return MappingProxyType(dict((self._refused + larger + self._slower()).most_common()))

    def _slower(self) -> Counter[str]:
        """Which part of a step costs the plans that fit most, compared with the fastest one."""
        if not len(self):
            return Counter()
        parts = np.concatenate([
            np.stack([np.broadcast_to(of[name], block.shape).ravel() for name in _LOSES], axis=-1)
            for block, of in zip(self.blocks, self.parts)
        ])[self.order]  # fmt: skip
        worst = np.bincount(np.argmax(parts[1:] - parts[0], axis=-1), minlength=len(_LOSES))
        return Counter({f"{SLOWER} by {why}": int(many) for why, many in zip(_LOSES.values(), worst)})

    def notable(self, most: int = 150) -> list[Estimate]:
        """The plans to compare: the fastest, the fastest of each layout of ranks, and the Pareto front of time and
        memory, including plans that do not fit on a GPU.

        Plans that take over three times as long as the fastest that fits, or twice the memory of a GPU, are left out if
        there are others. These are estimates, without simulation.
        """
        seconds, held, usable = self.seconds, self.held, self.room.sure
        fastest = seconds[self.order[0]] if len(self) else seconds[np.argmin(held)]
        starts = np.cumsum([0, *(len(block.layouts) for block in self.blocks)])
        of = [block.of + start for block, start in zip(self.blocks, starts)]
        layouts = np.concatenate([np.repeat(one, math.prod(block.shape[1:])) for one, block in zip(of, self.blocks)])
        is_near = (seconds <= 3 * fastest) & (held <= 2 * max(usable, held.min()))
        near = np.flatnonzero(is_near)
        order = near[np.lexsort((held[near], seconds[near]))]
        smallest = np.minimum.accumulate(held[order])
        front = order[np.append(True, smallest[1:] < smallest[:-1])]
        of_layouts = list[np.ndarray]()
        for fits in (held <= usable, held > usable):
            some = near[fits[near]]
            some = some[np.argsort(seconds[some], kind="stable")]
            of_layouts.append(some[np.sort(np.unique(layouts[some], return_index=True)[1])])
        third = most // 3
        some = [_evenly(front, third), _evenly(of_layouts[0], third), _evenly(of_layouts[1], third // 2)]
        chosen = np.concatenate([self.order[: most // 8], *some, *of_layouts])
        places = [*dict.fromkeys(chosen.tolist())][:most]
        return [Estimate(self.at(place), float(seconds[place]), float(held[place])) for place in places]

    def __str__(self) -> str:
        lines = [f"{len(self):,} of {self.considered:,} plans fit"]
        for one in self[:5]:
            held = f"{one.peak.total / 2**30:.0f} GiB"
            lines.append(
                f"{one.seconds:9.3g} s  {one.tokens_per_second_per_gpu:9,.0f} tokens/s per GPU  {held:>8}  {one.plan}"
            )
        lines += [f"{count:9,} {reason}" for reason, count in self.lost.items()]
        return "\n".join(lines)

    __repr__ = __str__


def _of_pairs(block: Block, name: str) -> np.ndarray:
    """A property of each pair's layout."""
    return np.array([getattr(layout, name) for layout in block.layouts])[block.of]


def _evenly(found: np.ndarray, most: int) -> np.ndarray:
    """At most `most` entries, evenly spaced, including the first and the last."""
    return found[np.unique(np.linspace(0, len(found) - 1, min(len(found), most)).round().astype(int))]
