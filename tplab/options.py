"""What both frameworks' `run` accepts."""

from __future__ import annotations

from typing import Any

import numpy as np

from tplab.mesh import Mesh


def check_run(fn: Any, mesh: Any, *, seed: Any, keep_values: Any) -> None:
    """Raise TypeError if `run` was not given a function and a mesh, and ValueError if a number makes no sense."""
    if not isinstance(mesh, Mesh) or not callable(fn):
        raise TypeError(f"run takes a function and a mesh, as run(f, Mesh(tp=4), ...), not {fn!r} and {mesh!r}")
    for name, given in (("seed", seed), ("keep_values", keep_values)):
        if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 0:
            raise ValueError(f"{name} is {given!r}; it must be a whole number, 0 or more")
