"""The state of a model, whole and in pieces: name -> array, of any framework; a dict may hold further dicts.

Splitting and joining move bits and change none, so a state that was split for one mesh and joined again is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tplab.errors import ShapeError, SpecError
from tplab.mesh import Mesh
from tplab.sharding import P, cut

State = Mapping[str, Any]
Join = Callable[[list[Any], int], Any]


def split_state(state: State, specs: State, mesh: Mesh) -> list[dict[str, Any]]:
    """What each rank of `mesh` holds of a whole state, as the specs say.

    A dim that does not divide is cut into pieces of ceil(n / R), the last ones smaller, as a vocabulary is. NumPy's and
    torch's pieces are views of the whole. Raises SpecError where the names of state and specs differ.
    """
    return [_each(state, specs, lambda whole, spec, rank=rank: _piece(whole, spec, mesh, rank)) for rank in mesh.ranks]


def merge_state(states: Sequence[State], specs: State, mesh: Mesh, join: Join) -> dict[str, Any]:
    """The whole state that these pieces are of: the reverse of split_state. Of copies, the lowest rank's is taken.

    join   puts pieces behind one another along a dim, as torch.cat and jnp.concatenate do
    """
    check_one_a_rank(states, mesh)
    return _merged(states, specs, mesh, join)


def check_one_a_rank(states: Sequence[State], mesh: Mesh) -> None:
    """Raise ShapeError where there are not as many states as ranks."""
    if len(states) != mesh.size:
        raise ShapeError(f"{mesh} has {mesh.size} ranks, and there are {len(states)} states; give one a rank")


def shard_paths(folder: str | Path, num_ranks: int, must_exist: bool = False) -> list[Path]:
    """The file of each rank. Raises FileNotFoundError where one must exist and does not."""
    paths = [Path(folder) / f"rank-{rank}-of-{num_ranks}.safetensors" for rank in range(num_ranks)]
    if must_exist and not all(path.exists() for path in paths):
        there = ", ".join(sorted(path.name for path in Path(folder).glob("rank-*.safetensors"))) or "no such file"
        raise FileNotFoundError(f"{folder} has not the files of {num_ranks} ranks ({paths[0].name}, ...), but {there}")
    return paths


def _merged(states: Sequence[State], specs: State, mesh: Mesh, join: Join) -> dict[str, Any]:
    for state in states:
        _check_names(state, specs)
    return {
        name: _merged([state[name] for state in states], spec, mesh, join) if isinstance(spec, Mapping)
        else _whole([state[name] for state in states], spec, mesh, join)
        for name, spec in specs.items()
    }  # fmt: skip


def _whole(pieces: list[Any], spec: P, mesh: Mesh, join: Join) -> Any:
    """Joined along one dim after the other, the pieces of the ranks at position 0 of the other axes."""
    held = dict(enumerate(pieces))
    for dim, entry in enumerate(spec):
        if entry is not None:
            firsts = [rank for rank in held if mesh.index(rank, entry) == 0]
            held = {first: join([held[rank] for rank in mesh.group(first, entry)], dim) for first in firsts}
    return held[0]


def _piece(whole: Any, spec: P, mesh: Mesh, rank: int) -> Any:
    if len(spec) > len(whole.shape):
        shape = tuple(whole.shape)
        raise SpecError(f"{spec} has {len(spec)} entries, and the array {shape} has {len(shape)} dims; give one a dim")
    slices = []
    for dim, entry in enumerate(spec):
        if entry is None:
            slices.append(slice(None))
        else:
            piece = cut(whole.shape[dim], mesh.axis_size(entry), "ceil")[mesh.index(rank, entry)]
            slices.append(slice(piece.start, piece.stop))
    return whole[(*slices, ...)]


def _each(state: State, specs: State, change: Callable[[Any, P], Any]) -> dict[str, Any]:
    _check_names(state, specs)
    return {
        name: _each(value, specs[name], change) if isinstance(value, Mapping) else change(value, specs[name])
        for name, value in state.items()
    }


def _check_names(state: State, specs: State) -> None:
    if state.keys() != specs.keys():
        missing, spare = sorted(specs.keys() - state.keys()), sorted(state.keys() - specs.keys())
        raise SpecError(
            "state and specs must have the same names; "
            + "; ".join(
                f"{what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
                for what, names in (("only in specs", missing), ("only in the state", spare)) if names
            )
        )  # fmt: skip
