"""The inputs of models and the targets of losses, until a backward pass has used them; and the samples among the draws
of a script itself, with torch.randn and the like.

Data that no backward pass uses, as in a warm-up or a skipped batch, are not samples of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import numpy as np
from torch import Tensor

from tplab.checking.recording import Step
from tplab.torch.checking.handed import Plan
from tplab.torch.private import pytree, transform


@dataclass
class Call:
    """A call of a model, or of a loss.

    lines  where it is made, and where its data come from; see `Step`
    """

    samples: dict[str, Any] | None = None
    target: tuple[Any, int, str] | None = None
    lines: dict[str, str] = field(default_factory=dict)
    is_used: bool = False

    def returns(self, found: Any) -> None:
        """Mark the call as used as soon as a gradient reaches its results. If none can, it counts as used."""
        if self.samples is None and self.target is None:
            return
        tensors = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor) and x.requires_grad]
        if not tensors or transform() is not None:
            self.is_used = True
        for x in tensors:
            (x.register_hook if x.grad_fn is None else x.grad_fn.register_prehook)(self._use)  # type: ignore[attr-defined]

    def _use(self, _: Any) -> None:
        self.is_used = True


class Pending:
    """The calls that do not belong to a step yet."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def add(self, call: Call) -> Call:
        self._calls.append(call)
        return call

    def move(self, step: Step) -> None:
        """Move the calls that were used to this step, in their order."""
        used = [call for call in self._calls if call.is_used]
        self._calls = [call for call in self._calls if not call.is_used]
        step.samples += [call.samples for call in used if call.samples is not None]
        step.targets += [call.target for call in used if call.target is not None]
        for call in used:
            step.lines |= {key: line for key, line in call.lines.items() if key not in step.lines}


DRAW_SAMPLES = {"rand", "randn", "randint", "normal"}
"""Functions of torch that draw a new tensor."""


class Draws:
    """The draws of one rank outside of its model, by step: (line, number of the draw there) -> code and tensor."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._steps: dict[int, dict[tuple[str, int], tuple[CodeType, np.ndarray]]] = {}

    def draw(self, step: int, line: str, code: CodeType, found: Tensor) -> Tensor:
        """Note a tensor that was drawn at a line, in a function of this code. Return the tensor for the script."""
        if type(found) is not Tensor or not found.dim() or found.is_meta:
            return found
        drawn = self._steps.setdefault(step, {})
        key = line, sum(at == line for at, _ in drawn)
        if self._plan.feed is not None:
            found = self._plan.feed.drawn(step, key, found)
        drawn[key] = code, self._plan.once(found)
        return found

    def close(self, number: int, step: Step) -> None:
        """Keep the draws of a step that are its samples, and those of the same functions for as many samples."""
        used = [*(x for data in step.samples for x in data.values()), *(values for values, _, _ in step.targets)]
        drawn, addresses = self._steps.pop(number, {}), {id(x) for x in used}
        codes = {code for code, x in drawn.values() if id(x) in addresses}
        sizes = {len(x) for _, x in drawn.values() if id(x) in addresses}
        step.draws = {key: x for key, (code, x) in drawn.items() if code in codes and len(x) in sizes}
