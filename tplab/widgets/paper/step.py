"""The position of a playhead, as a trait."""

from __future__ import annotations

from typing import Any, SupportsFloat

import traitlets


class Step(traitlets.Float):
    """A position in steps, from 0 to the widget's `num_steps`; fractions are within a step."""

    def validate(self, obj: Any, value: Any) -> float:
        last = obj.num_steps
        if not isinstance(value, SupportsFloat) or not 0 <= float(value) <= last:
            raise traitlets.TraitError(f"step is {value!r}, and there are steps 0 to {last}; give one of those")
        return float(value)
