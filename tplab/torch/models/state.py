"""The state of a model, whole or one piece per rank; written to files and read from them for any mesh.

The files are safetensors: one file for the whole state, or one per rank. Files of one mesh can be read for another: 2
ranks can load what 4 ranks have saved. Bits are only moved, never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tplab.mesh import Mesh
from tplab.models import state as pure
from tplab.sharding import P

State = Mapping[str, Tensor]


def split_state(state: State, specs: Mapping[str, P], mesh: Mesh) -> list[dict[str, Tensor]]:
    """Each rank's piece of a whole state: model.load_state_dict(split_state(...)[rank]).

    state   name -> whole tensor        specs   name -> P, as gpt_specs returns them
    A dim that does not divide, such as a vocabulary, is cut into pieces of ceil(n / R), of which the last are smaller.
    The pieces have their own memory. Raises SpecError where the names of state and specs differ.
    """
    pieces = pure.split_state(_detached(state), specs, mesh)
    return [{n: x.clone(memory_format=torch.contiguous_format) for n, x in piece.items()} for piece in pieces]


def merge_state(states: Sequence[State], specs: Mapping[str, P], mesh: Mesh) -> dict[str, Tensor]:
    """The whole state from the pieces of the ranks of `mesh`: the reverse of split_state, bit for bit.

    states   one per rank, as in run(...).per_rank. Where ranks hold copies, the lowest rank's is used
    Raises ShapeError where the number of states is not the number of ranks, SpecError where names differ.
    """
    return pure.merge_state([_detached(state) for state in states], specs, mesh, torch.cat)


def save_state(state: State, path: str | Path) -> None:
    """Write a state to one safetensors file.

    Tied weights are written once under each name. Raises SpecError for anything that is not a tensor.
    """
    from safetensors.torch import save_file

    written: dict[str, Tensor] = {}
    met: set[int] = set()
    for name, x in _detached(state).items():
        x = x.contiguous()
        memory = x.untyped_storage().data_ptr()
        written[name] = x.clone() if memory in met else x  # safetensors refuses two names for the same memory
        met.add(memory)
    save_file(written, str(path))


def load_state(path: str | Path) -> dict[str, Tensor]:
    """Read a state that save_state has written."""
    from safetensors.torch import load_file

    return load_file(str(path))


def save_shards(states: Sequence[State], mesh: Mesh, folder: str | Path) -> None:
    """Write the states of the ranks of `mesh` to one file each: rank-0-of-4.safetensors, ..."""
    pure.check_one_per_rank(states, mesh)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path, state in zip(pure.shard_paths(folder, mesh.size), states, strict=True):
        save_state(state, path)


def load_shards(folder: str | Path, specs: Mapping[str, P], saved_on: Mesh, mesh: Mesh) -> list[dict[str, Tensor]]:
    """Read the files written by the ranks of the mesh `saved_on`, as the states of the ranks of `mesh`."""
    states = [load_state(path) for path in pure.shard_paths(folder, saved_on.size, must_exist=True)]
    return states if mesh == saved_on else split_state(merge_state(states, specs, saved_on), specs, mesh)


def _detached(state: State) -> dict[str, Tensor]:
    for name, value in state.items():
        pure.check_array(name, value)
    return {name: torch.as_tensor(value).detach() for name, value in state.items()}
