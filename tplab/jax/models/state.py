"""The state of a model, whole or one piece per rank; written to files and read from them, for any mesh.

The files are safetensors: one file for the whole state, or one per rank. Files can be read for another mesh: 2 ranks
can load what 4 ranks saved. Bits are only moved, never changed. Names in files are joined by dots, as in torch, so that
each framework can read the other's files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from tplab.errors import SpecError
from tplab.jax.layers.parameters import Params, nested
from tplab.mesh import Mesh
from tplab.models import state as pure

State = Mapping[str, Any]


split_state = pure.split_state


def merge_state(states: Sequence[State], specs: State, mesh: Mesh) -> Params:
    """The whole parameters, of which each rank of `mesh` holds a piece: the reverse of split_state, bit for bit.

    states   one per rank, as in run(...).per_rank. If ranks hold copies, the lowest rank's is used
    Raises ShapeError if the number of states is not the number of ranks, SpecError if names differ.
    """
    return pure.merge_state(states, specs, mesh, jnp.concatenate)


def save_state(state: State, path: str | Path) -> None:
    """Write a state to one safetensors file. Raises SpecError for anything that is not an array."""
    from safetensors.flax import save_file

    save_file({name: jnp.asarray(x) for name, x in _flat(state).items()}, str(path))


def load_state(path: str | Path) -> Params:
    """Read a state written by save_state, nested again."""
    from safetensors.flax import load_file

    return nested(load_file(str(path)))


def save_shards(states: Sequence[State], mesh: Mesh, folder: str | Path) -> None:
    """Write the states of the ranks of `mesh` to one file each: rank-0-of-4.safetensors, ..."""
    pure.check_one_per_rank(states, mesh)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path, state in zip(pure.shard_paths(folder, mesh.size), states, strict=True):
        save_state(state, path)


def load_shards(folder: str | Path, specs: State, saved_on: Mesh, mesh: Mesh) -> list[Params]:
    """Read the files written by the ranks of the mesh `saved_on`, as the states of the ranks of `mesh`."""
    states = [load_state(path) for path in pure.shard_paths(folder, saved_on.size, must_exist=True)]
    return states if mesh == saved_on else split_state(merge_state(states, specs, saved_on), specs, mesh)


def _flat(state: State, prefix: str = "") -> dict[str, Any]:
    """{"norm": {"weight": w}} -> {"norm.weight": w}"""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            inner = _flat(value, f"{prefix}{name}.")
        else:
            pure.check_array(prefix + name, value)
            inner = {prefix + name: value}
        if twice := found.keys() & inner.keys():
            raise SpecError(f"the state has two arrays named {min(twice)!r}, one of them nested; rename one")
        found |= inner
    return found
