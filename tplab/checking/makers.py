"""Which of a script's lines made the loss as it is."""

from __future__ import annotations

from tplab.checking.facts import Facts

_CLOSE = 2e-3


class Makers:
    """The lines that made the number at which the backward pass of a step begins. Where none was seen, or the whole
    stands in one line, that of the backward pass.

    last    of the last operation before that line: libraries may put more into it
    first   of the operation that made a number out of many
    """

    def __init__(self, facts: Facts):
        self.backward = facts.line("backward")
        self.made = next((step.made for step in facts.mine if step.made), [])
        others = [line for line, _ in self.made if line != self.backward]
        self.last = others[0] if others else self.backward
        self.first = others[-1] if others else self.backward

    def scaling(self, factor: float) -> str:
        """The line that multiplies by this factor; "" if there is none."""
        lines = [line for line, times in self.made if times is not None and abs(times / factor - 1) < _CLOSE]
        return next((line for line in lines if line != self.backward), lines[0] if lines else "")
