"""A rank's row while a rule builds it: an int array [actions, 4] of kind, stage, microbatch, joined."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

Row: TypeAlias = np.ndarray


def row(kind: ArrayLike, stage: ArrayLike, microbatch: ArrayLike) -> Row:
    """The actions of these columns, joined to nothing; numbers are repeated to the length of the others."""
    columns = np.broadcast_arrays(kind, stage, microbatch, 0)
    return np.stack(columns, axis=-1).astype(np.int32).reshape(-1, 4)
