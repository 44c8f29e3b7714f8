"""The position of a playhead, as a trait."""

from __future__ import annotations

import math
from typing import Any

import traitlets


class Step(traitlets.Float):
    """A position in steps, from 0 to the widget's `num_steps`; fractions are within a step."""

    def validate(self, obj: Any, value: Any) -> float:
        position = super().validate(obj, float(value) if isinstance(value, int) else value)
        last = obj.num_steps
        if not (math.isfinite(position) and 0 <= position <= last):
            raise traitlets.TraitError(f"step is {value!r}, and this trace has steps 0 to {last}; give one of those")
        return position
