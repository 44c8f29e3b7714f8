"""The plans of all layouts, those that fit in the order of their time; each is made only when it is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tplab.forecast.grid import Grid
from tplab.forecast.memory import Room
from tplab.forecast.plan import Plan

TOO_LARGE, PERHAPS, SLOWER = "need more than", "may need more than", "fit, and lose most"
"""How reasons for which plans lost begin. The others are those for which layouts of ranks are refused."""

_LOSES = {
    "computing": "by computing in smaller pieces",
    "recompute": "by recomputation",
    "tp": "by messages of tensor parallelism",
    "cp": "by messages of context parallelism",
    "ep": "by messages of expert parallelism",
    "host": "by waiting for the host",
    "bubble": "by the pipeline's bubble",
    "pp": "by messages between stages",
    "dp": "by sending gradients and parameters",
    "optimizer": "by the optimizer",
}


class Estimate(NamedTuple):
    """A plan, its seconds, and the bytes of its fullest rank, by the formulas of the grid."""

    plan: Plan
    seconds: float
    bytes: float


class Ranking(Sequence[Plan]):
    """The plans that surely fit, the fastest first.

    seconds, held   of all plans of all grids, one after another; infinite where a plan is impossible
    order           the places there of those that fit
    """

    def __init__(self, grids: Sequence[Grid], room: Room):
        self.grids, self.room = grids, room
        self.seconds = np.concatenate([grid.seconds.ravel() for grid in grids])
        self.held = np.concatenate([grid.held.ravel() for grid in grids])
        self.ends = np.cumsum([grid.seconds.size for grid in grids])
        fitting = np.flatnonzero(self.held <= room.sure)
        self.order = fitting[np.argsort(self.seconds[fitting], kind="stable")]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> Plan:  # type: ignore[override]  # only one at a time
        return self.at(int(self.order[place]))

    def at(self, index: int) -> Plan:
        """The plan at this index of `seconds` and `held`."""
        grid = int(np.searchsorted(self.ends, index, side="right"))
        return self.grids[grid].plan(index - (int(self.ends[grid - 1]) if grid else 0))

    def remove(self, places: Sequence[int]) -> None:
        """Those at these places of the order do not fit after all."""
        self.order = np.delete(self.order, places)

    @property
    def considered(self) -> int:
        """How many plans are possible."""
        return int(np.isfinite(self.seconds).sum())

    def lost(self) -> Counter[str]:
        """Reason -> how many of the possible plans are not the best for it."""
        return self._too_large() + self._slower()

    def _too_large(self) -> Counter[str]:
        too_large = int((np.isfinite(self.held) & (self.held > self.room.most)).sum())
        each = f"the {self.room.sure / 2**30:.0f} GiB of a GPU"
        perhaps = self.considered - too_large - len(self)
        return Counter({f"{TOO_LARGE} {each}": too_large, f"{PERHAPS} {each}": perhaps})

    def _slower(self) -> Counter[str]:
        """Which part of a step takes plans that fit longest, beside the fastest one."""
        if not len(self):
            return Counter()
        tables = [
            np.stack([np.broadcast_to(grid.reasons[name], grid.seconds.shape).ravel() for name in _LOSES], axis=-1)
            for grid in self.grids
        ]
        parts = np.concatenate(tables)[self.order]
        worst = np.bincount(np.argmax(parts[1:] - parts[0], axis=-1), minlength=len(_LOSES))
        return Counter({f"{SLOWER} {why}": int(many) for why, many in zip(_LOSES.values(), worst)})

    def notable(self, most: int) -> list[Estimate]:
        """See `Plans.notable`."""
        seconds, held, usable = self.seconds, self.held, self.room.sure
        fastest = seconds[self.order[0]] if len(self) else seconds[np.argmin(held)]
        is_near = (seconds <= 3 * fastest) & (held <= 2 * max(usable, held.min()))
        near = np.flatnonzero(is_near)
        order = near[np.lexsort((held[near], seconds[near]))]
        smallest = np.minimum.accumulate(held[order])
        front = order[np.append(True, smallest[1:] < smallest[:-1])]
        starts, of_layouts = np.append(0, self.ends[:-1]), list[np.ndarray]()
        for fits in (held <= usable, held > usable):
            times = np.where(is_near & fits, seconds, np.inf)
            fastest_of = starts + np.array([np.argmin(part) for part in np.split(times, starts[1:])])
            fastest_of = fastest_of[np.argsort(times[fastest_of], kind="stable")]
            of_layouts.append(fastest_of[np.isfinite(times[fastest_of])])
        third = most // 3
        some = [_evenly(front, third), _evenly(of_layouts[0], third), _evenly(of_layouts[1], third // 2)]
        chosen = np.concatenate([self.order[: most // 8], *some, *of_layouts])
        places = [*dict.fromkeys(chosen.tolist())][:most]
        return [Estimate(self.at(place), float(seconds[place]), float(held[place])) for place in places]


def _evenly(found: np.ndarray, most: int) -> np.ndarray:
    """The first, the last, and evenly many of those between."""
    return found[np.unique(np.linspace(0, len(found) - 1, min(len(found), most)).round().astype(int))]
