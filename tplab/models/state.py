"""The state of a model, whole and in pieces: name -> array, of any framework; dicts may be nested.

Splitting and joining move bits but change none, so a state that was split and joined again is the same. The
classifier of overlapped blocks, in either framework, has its state converted here: blocking or overlapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tplab.errors import ShapeError, SpecError
from tplab.mesh import Axis, Mesh
from tplab.rings import async_weight, blocking_weight
from tplab.sharding import P, check_dims, held_by

State = Mapping[str, Any]
Join = Callable[[list[Any], int], Any]


def split_state(state: State, specs: State, mesh: Mesh) -> list[dict[str, Any]]:
    """The part of a whole state that each rank of `mesh` holds. (In JAX `run` does this itself: in_specs=layer.specs.)

    state   name -> whole array; dicts may be nested, as JAX's parameters are        specs   the same structure of P
    A dim that does not divide evenly is cut into pieces of ceil(n / R), the last ones smaller, like a vocabulary. For
    NumPy and torch, the pieces are views of the whole. Raises SpecError if the names of state and specs differ.
    """
    return [_each([state], specs, partial(_piece, mesh=mesh, rank=rank)) for rank in mesh.ranks]


def merge_state(states: Sequence[State], specs: State, mesh: Mesh, join: Join) -> dict[str, Any]:
    """The whole state made of these pieces: the reverse of split_state. If there are copies, the lowest rank's is used.

    join   concatenates pieces along a dim, as torch.cat and jnp.concatenate do
    """
    check_one_per_rank(states, mesh)
    return _each(states, specs, partial(_whole, mesh=mesh, join=join))


def check_one_per_rank(states: Sequence[State], mesh: Mesh) -> None:
    """Raise ShapeError unless there are as many states as ranks."""
    if len(states) != mesh.size:
        raise ShapeError(f"{mesh} has {mesh.size} ranks, but there are {len(states)} states; give one per rank")


def check_array(name: str, value: Any) -> None:
    """Raise SpecError if the value under a name in a state is not an array but a number, a dict or the like."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise SpecError(
            f"the state has a {type(value).__name__} under {name!r}; a state holds arrays: make an array of a number, "
            "and join the names of nested dicts by dots"
        )


def shard_paths(folder: str | Path, num_ranks: int, must_exist: bool = False) -> list[Path]:
    """The file of each rank. Raises FileNotFoundError if the files must exist and one does not."""
    paths = [Path(folder) / f"rank-{rank}-of-{num_ranks}.safetensors" for rank in range(num_ranks)]
    if must_exist and not all(path.exists() for path in paths):
        there = ", ".join(sorted(path.name for path in Path(folder).glob("rank-*.safetensors"))) or "no such file"
        has = f"has no files of {num_ranks} ranks ({paths[0].name}, ...)"
        raise FileNotFoundError(f"{folder} {has}, but {there}")
    return paths


def _each(
    states: Sequence[State], specs: State, change: Callable[[str, list[Any], P], Any], path: str = ""
) -> dict[str, Any]:
    """`change(name, values, spec)` for the values that the states have under each name, also in nested dicts."""
    for state in states:
        _check_names(state, specs)
    made = {}
    for key in states[0]:
        name, spec, values = path + key, specs[key], [state[key] for state in states]
        if isinstance(spec, Mapping) and all(isinstance(value, Mapping) for value in values):
            made[key] = _each(values, spec, change, f"{name}.")
        elif isinstance(spec, Mapping):
            raise SpecError(f"specs have a dict under {name!r}, where a state has none; give a P")
        else:
            for value in values:
                check_array(name, value)
            made[key] = change(name, values, spec)
    return made


def _whole(name: str, pieces: list[Any], spec: P, mesh: Mesh, join: Join) -> Any:
    """The whole array, joined along one dim after the other, from the ranks at position 0 of the other axes."""
    held = dict(enumerate(pieces))
    for dim, entry in enumerate(spec):
        if entry is not None:
            firsts = [rank for rank in held if mesh.index(rank, entry) == 0]
            groups = {first: mesh.group(first, entry) for first in firsts}
            for group in groups.values():
                _check_joinable(name, {rank: held[rank] for rank in group}, spec, dim)
            held = {first: join([held[rank] for rank in group], dim) for first, group in groups.items()}
    return held[0]


def _check_joinable(name: str, pieces: Mapping[int, Any], spec: P, dim: int) -> None:
    """Check that pieces to be joined along a dim agree in dtype, number of dims, and the size of every other dim."""
    (first, piece), *others = pieces.items()
    check_dims(spec, piece.shape, f"{name} of")
    for rank, other in others:
        shapes = [tuple(x.shape) for x in (piece, other)]
        rest = [(len(shape), shape[:dim] + shape[dim + 1 :]) for shape in shapes]
        if rest[0] != rest[1] or piece.dtype != other.dtype:
            raise ShapeError(
                f"{name} is {piece.dtype} {shapes[0]} on rank {first} and {other.dtype} {shapes[1]} on rank {rank}; "
                f"pieces that {spec} joins along dim {dim} may differ in the size of this dim only"
            )


def _piece(name: str, values: list[Any], spec: P, mesh: Mesh, rank: int) -> Any:
    (whole,) = values
    check_dims(spec, whole.shape, f"{name} of")
    return whole[(*(slice(held.start, held.stop) for held in held_by(whole.shape, spec, mesh, rank)), ...)]


def _check_names(state: State, specs: State) -> None:
    if state.keys() != specs.keys():
        missing, spare = sorted(specs.keys() - state.keys()), sorted(state.keys() - specs.keys())
        raise SpecError(
            "state and specs must have the same names; "
            + "; ".join(
                f"{what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
                for what, names in (("only in specs", missing), ("only in the state", spare))
                if names
            )
        )


_MODES = {"up": "gather", "down": "scatter"}
"""The layers of a block that have an overlapped form, and the mode of each."""


def classifier_specs(num_layers: int, axis: Axis = "tp", *, overlap: bool = True) -> dict[str, P]:
    """How the parameters of a ParallelClassifier are sharded: name in the state -> P.

    The whole shapes, for an input of I features, width W, hidden H, C classes, over R ranks:

        input            weight [W, I], bias [W]: split by features
        blocks.N.norm    weight [W]
        blocks.N.up      bias [H]   weight [H, W] split by rows    overlap: [R R, H/R, W/R], each rank's R pieces
        blocks.N.down    bias [W]   weight [W, H] split by columns overlap: [R R, W/R, H/R]
        output           weight [C, W] split by columns, bias [C] on every rank
    """
    specs = {"input.weight": P(axis), "input.bias": P(axis)}
    for number in range(num_layers):
        block = f"blocks.{number}"
        specs |= {f"{block}.norm.weight": P(axis), f"{block}.up.weight": P(axis), f"{block}.up.bias": P(axis)}
        specs |= {f"{block}.down.weight": P(axis) if overlap else P(None, axis), f"{block}.down.bias": P(axis)}
    return specs | {"output.weight": P(None, axis), "output.bias": P()}


def async_state(state: State, num_ranks: int, direction: str = "up") -> dict[str, Any]:
    """The whole state of a blocking block or classifier -> that of the overlapped one. Numbers move but do not change.

    state   flat or nested, of any framework; each `up.weight` and `down.weight` is reordered for the ring
    """

    def change(weight: Any, mode: str) -> Any:
        stacked = async_weight(weight, num_ranks, mode, direction)
        return stacked.reshape(-1, *stacked.shape[2:])

    return _changed(state, change)


def blocking_state(state: State, num_ranks: int, direction: str = "up") -> dict[str, Any]:
    """The reverse of async_state, bit for bit."""

    def change(pieces: Any, mode: str) -> Any:
        return blocking_weight(pieces.reshape(num_ranks, num_ranks, *pieces.shape[1:]), mode, direction)

    return _changed(state, change)


def _changed(state: State, change: Callable[[Any, str], Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in state.items():
        names = (*path, *name.split("."))
        if isinstance(value, Mapping):
            found[name] = _changed(value, change, names)
        elif names[-1] == "weight" and len(names) > 1 and names[-2] in _MODES:
            found[name] = change(value, _MODES[names[-2]])
        else:
            found[name] = value
    return found
