"""The state of a whole GPT, and the same numbers packed into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tplab.jax.pipeline.flat import Kind, Slot
from tplab.jax.pipeline.stages import Blueprints, Stages, blueprints_of
from tplab.jax.run import run
from tplab.mesh import Mesh
from tplab.models.gpt import GPTConfig, gpt_layer_name, gpt_specs
from tplab.models.state import merge_state, split_state
from tplab.pipeline.layer_spec import LayerSpec
from tplab.schedules import Schedule
from tplab.sharding import cut


def blueprints_on(mesh: Mesh, layers: Sequence[LayerSpec], schedule: Schedule, axis: str = "pp") -> Blueprints:
    """What `stages_of` would make of the layers on this mesh, without numbers. Nothing is compiled or run."""
    found = []

    def look(nothing: Any) -> Any:
        found.append(blueprints_of(layers, schedule, axis=axis))
        return nothing

    run(look, mesh, jax.ShapeDtypeStruct((), jnp.float32))
    return found[0]


class GPTPacking:
    """Which elements of the joined arrays of `Stages` are which parameter of a GPT.

    The joined array of a kind has a row per rank of the axes along which the kind differs: those of the pipeline, and
    of tensor parallelism for what is spread over it.
    """

    def __init__(self, blueprints: Blueprints, config: GPTConfig, mesh: Mesh, axis: str = "tp"):
        self.blueprints, self.config, self.mesh, self.axis = blueprints, config, mesh, axis
        self.specs = gpt_specs(config, axis)
        self.tp = Mesh(**{axis: mesh.axis_size(axis)})

    def pack(self, state: Mapping[str, Any]) -> Stages:
        """Stages of NumPy arrays, joined as Stages.specs say: name -> whole array goes in."""
        pieces = split_state({name: np.asarray(x) for name, x in state.items()}, self.specs, self.tp)
        rows = {kind: np.zeros((self._num_rows(kind), size), kind.dtype) for kind, size in self._sizes.items()}
        for rank, name, slot, begin in self._places():
            own = pieces[self.mesh.index(rank, self.axis)][name]
            room = rows[slot.kind][self._row(rank, slot.kind), begin : begin + slot.size].reshape(slot.shape)
            room[: len(own)] = own  # the last ranks have fewer words
        return Stages({kind: jnp.asarray(x.reshape(-1)) for kind, x in rows.items()}, self.blueprints)

    def unpack(self, stages: Stages) -> dict[str, np.ndarray]:
        """The state of the whole GPT: the reverse of `pack`."""
        rows = {k: np.asarray(x).reshape(self._num_rows(k), self._sizes[k]) for k, x in stages.flat.items()}
        states: list[dict[str, np.ndarray]] = [{} for _ in self.tp.ranks]
        for rank, name, slot, begin in self._places():
            index = self.mesh.index(rank, self.axis)
            x = rows[slot.kind][self._row(rank, slot.kind), begin : begin + slot.size].reshape(slot.shape)
            if name == "embedding.weight":
                x = x[: len(cut(self.config.vocab_size, self.tp.size, "ceil")[index])]
            states[index].setdefault(name, x)
        return merge_state(states, self.specs, self.tp, np.concatenate)

    def names_on(self, rank: int) -> list[str]:
        """The parameters that a rank has, each once."""
        return list(dict.fromkeys(name for holder, name, *_ in self._places() if holder == rank))

    @property
    def _sizes(self) -> Mapping[Kind, int]:
        return self.blueprints.sizes

    def _num_rows(self, kind: Kind) -> int:
        return self.mesh.axis_size(kind.axes)

    def _row(self, rank: int, kind: Kind) -> int:
        return self.mesh.index(rank, kind.axes)

    def _places(self) -> Iterator[tuple[int, str, Slot, int]]:
        """(rank, name in the whole state, its shape there, where it begins in the rank's row)."""
        about = self.blueprints
        assert about.partition is not None
        for rank in self.mesh.ranks:
            position = self.mesh.index(rank, about.axis)
            for stage in about.held(position):
                begin, blueprint = about.begin(position, stage), about.stages[stage]
                for name, slot in zip(blueprint.names(), blueprint.layout.slots, strict=True):
                    place, _, rest = name.partition(".")
                    whole = gpt_layer_name(self.config, about.partition.stages[stage][int(place)], rest)
                    yield rank, whole, slot, begin[slot.kind] + slot.begin
