"""How ranks are watched: for how many steps, and with which samples and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from tplab.checking.recording import Arrays
from tplab.checking.repairs import Repair
from tplab.torch.checking.handed import Handed
from tplab.torch.checking.pieces import array_of


class Enough(BaseException):
    """A rank has made as many steps as were asked for. Scripts that catch exceptions do not catch this one."""


@dataclass(frozen=True)
class Plan:
    """How ranks are watched.

    steps    after this many steps of its optimizer a rank ends, before the next one begins
    feed     the samples to use in place of the program's draws
    weights  the weights to begin with in place of the program's, by name
    ends     whether ranks end after these steps; otherwise they continue, unwatched, and dropout is not changed
    nudges   whether weights and samples are changed in their last digit
    traced   the step of which every operation is recorded; None for none
    repairs  changes of the run; board: the exchange between ranks for them
    arrays   all arrays that are kept
    """

    steps: int
    feed: Handed | None = None
    weights: Mapping[str, np.ndarray] | None = None
    ends: bool = True
    nudges: bool = False
    traced: int | None = None
    repairs: tuple[Repair, ...] = ()
    board: dict[Any, dict[int, Any]] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=Arrays)

    def once(self, x: Tensor) -> np.ndarray:
        return self.arrays.once(array_of(x))
