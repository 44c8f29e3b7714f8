"""Dropout whose masks agree between ranks that hold the same array, and differ between others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tplab.jax.comm.collectives import axis_index
from tplab.jax.ranks.context import this_mesh, varying_axes
from tplab.mesh import Axis


def dropout(x: Array, p: float, *, key: Any, axis: Axis | None = None) -> Array:
    """Each element of x set to zero with probability p, the others divided by 1 - p.

    key    the same on every rank; a new one for each draw, as always in JAX
    axis   the axis along which ranks hold different data and draw different masks; along others they draw the same.
           None: x is the same on every rank, outside the parallel regions, and stays so by JAX's types.
           "tp": x is sharded over tp, inside a region or under sequence parallelism.
           ("dp", "tp"), or "dp" outside the regions: with data parallelism, where each rank has its own batch
    backward  dx = dy times the same mask; nothing is sent

    Raises ValueError if by JAX's types the key differs along an axis, as `rank_key()` does, and x does not.
    For evaluation leave it out, or pass p=0.
    """
    if not 0 <= p < 1:
        raise ValueError(f"p is {p}; it is the share that is dropped, from 0 up to, but not including, 1")
    mesh = this_mesh()
    names = sorted(mesh.names(axis)) if axis is not None else []
    own = varying_axes(key) - varying_axes(x)  # in a pipeline both differ from stage to stage
    if own:
        raise ValueError(
            f"dropout's key differs along {', '.join(map(repr, sorted(own)))} already, and so would masks that are to "
            "agree; pass a key that is the same on every rank, and name in axis where masks are to differ"
        )
    if p == 0:
        return x
    for name in names:
        key = jax.random.fold_in(key, axis_index(name))
    kept = jax.random.uniform(key, x.shape, jnp.float32) >= p
    return jnp.where(kept, x / (1 - p), 0)
