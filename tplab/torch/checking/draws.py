"""The samples that a script draws itself, with torch.randn and the like, on each of its ranks."""

from __future__ import annotations

from types import CodeType

import numpy as np
from torch import Tensor

from tplab.checking.recording import Step
from tplab.torch.checking.plan import Plan

DRAW_SAMPLES = {"rand", "randn", "randint", "normal"}
"""Functions of torch that draw a new tensor."""


class Draws:
    """What one rank draws outside of its model, by step: the line and the how-manieth time there -> who, and what."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._steps: dict[int, dict[tuple[str, int], tuple[CodeType, np.ndarray]]] = {}

    def draw(self, step: int, line: str, code: CodeType, found: Tensor) -> Tensor:
        """A tensor was drawn at a line, in a function of this code. Returns what the script is to get."""
        if type(found) is not Tensor or not found.dim() or found.is_meta:
            return found
        drawn = self._steps.setdefault(step, {})
        key = line, sum(at == line for at, _ in drawn)
        if self._plan.feed is not None:
            found = self._plan.feed.drawn(step, key, found)
        drawn[key] = code, self._plan.once(found)
        return found

    def close(self, number: int, step: Step) -> None:
        """Keep those of a step that are its samples, and what was drawn beside them for as many samples."""
        used = [*(x for data in step.samples for x in data.values()), *(values for values, _, _ in step.targets)]
        drawn, addresses = self._steps.pop(number, {}), {id(x) for x in used}
        codes = {code for code, x in drawn.values() if id(x) in addresses}
        sizes = {len(x) for _, x in drawn.values() if id(x) in addresses}
        step.draws = {key: x for key, (code, x) in drawn.items() if code in codes and len(x) in sizes}
