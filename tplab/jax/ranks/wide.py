"""Double precision for a while, wherever the installed JAX keeps the switch."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax
import jax.experimental


def in_float64(wide: bool = True) -> AbstractContextManager[None]:
    """Inside, JAX computes in float64 what it is given in float64; with False, in float32 as it does by itself."""
    home = jax if hasattr(jax, "enable_x64") else jax.experimental  # jax 0.7, which Colab has
    return home.enable_x64(wide)  # type: ignore[attr-defined]
