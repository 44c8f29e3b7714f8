"""The classifier of overlapped blocks, in either framework: how its parameters are sharded, blocking or overlapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tplab.mesh import Axis
from tplab.rings import async_weight, blocking_weight
from tplab.sharding import P

State = Mapping[str, Any]

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
