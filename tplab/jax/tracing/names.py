"""The name of an array in the program that sends it: the parameter that it is, or which piece of a parameter."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from tplab.jax.tracing.held import Held

NAMES_UP_TO = 64  # chunks of a rank; later ones get no name
MOVES = {"copy", "dynamic_slice", "expand_dims", "gather", "pvary", "reshape", "rev", "slice", "squeeze", "transpose"}
"""Operations whose result has elements of their first operand, and nothing else."""


def name_in_program(x: Held, rank: int) -> str:
    """ "x" where it is the parameter x on `rank`; "x[3]" where it is piece 3 of x, cut into pieces of equal size.

    To find out which elements it has, the operations that made it are repeated on the elements' positions in x. It is
    "" where that is not known.
    """
    chain = []
    while x.moved is not None:
        chain.append(x.moved)
        x = x.moved[1][0]
    if not x.name or not x.size:
        return ""
    places: Any = np.arange(x.size, dtype=np.int32).reshape(x.shape)
    for eqn, inputs in reversed(chain):
        others = [held.values() for held in inputs[1:]]
        if any(values is None for values in others):
            return ""
        params = {key: None if key in ("sharding", "out_sharding") else value for key, value in eqn.params.items()}
        places = eqn.primitive.bind(jax.numpy.asarray(places), *(values[rank] for values in others if values), **params)
        places = places[0] if eqn.primitive.multiple_results else places
    places = np.asarray(places)
    if np.array_equal(places.ravel(), np.arange(x.size)):
        return x.name
    index = _index(places, x.shape)
    return "" if index is None else f"{x.name}[{index}]"


def _index(places: np.ndarray, shape: tuple[int, ...]) -> int | None:
    """Which piece of an array of `shape` has the elements at these positions: the pieces are equal parts of its
    elements in their order, or along one dim."""
    size, first = places.size, int(places.flat[0])
    if np.array_equal(places.ravel(), np.arange(first, first + size)):
        return first // size if not first % size and not int(np.prod(shape)) % size else None
    along = [np.unique(found) for found in np.unravel_index(places.ravel(), shape)]
    part = [dim for dim, found in enumerate(along) if len(found) < shape[dim]]
    if len(part) != 1 or np.prod([len(found) for found in along]) != size:
        return None
    found, whole = along[part[0]], shape[part[0]]
    is_piece = np.array_equal(found, np.arange(found[0], found[0] + len(found))) and not whole % len(found)
    return int(found[0]) // len(found) if is_piece and not found[0] % len(found) else None
