"""What models are called with, and what losses compare with, until a backward pass has used it.

What none uses, such as that of a warm-up, or a batch that is skipped, is no sample of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tplab.checking.recording import Step
from tplab.torch.private import pytree, transform


@dataclass
class Call:
    """A call of a model, or of a loss.

    lines  where it is made, and where its data are from; see `Step`
    """

    samples: dict[str, Any] | None = None
    target: tuple[Any, int, str] | None = None
    lines: dict[str, str] = field(default_factory=dict)
    is_used: bool = False

    def returns(self, found: Any) -> None:
        """It is used as soon as a gradient reaches what it has returned. If none can, nobody knows, and it is."""
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
    """The calls that no step has yet."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def add(self, call: Call) -> Call:
        self._calls.append(call)
        return call

    def move(self, step: Step) -> None:
        """What was used belongs to this step, in the order of the calls."""
        used = [call for call in self._calls if call.is_used]
        self._calls = [call for call in self._calls if not call.is_used]
        step.samples += [call.samples for call in used if call.samples is not None]
        step.targets += [call.target for call in used if call.target is not None]
        for call in used:
            step.lines |= {key: line for key, line in call.lines.items() if key not in step.lines}
