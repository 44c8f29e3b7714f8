"""The state of a whole GPT, and the same values packed into the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tplab.jax.comm.collectives import axis_index
from tplab.jax.data.shard_parameters import ShardedLayer, shard_parameters
from tplab.jax.data.unit import PIECE, is_sharded
from tplab.jax.pipeline.flat import Flat, Kind, Slot
from tplab.jax.pipeline.stages import Blueprint, Blueprints, Stages, blueprints_of
from tplab.jax.run import run
from tplab.mesh import Axis, Mesh
from tplab.models.gpt import GPTConfig, gpt_layer_name, gpt_specs
from tplab.models.state import merge_state, split_state
from tplab.pipeline.partition import LayerSpec, TiedSpec
from tplab.schedules import Schedule
from tplab.sharding import cut
from tplab.training.recipe import data_axes


def blueprints_on(
    mesh: Mesh, layers: Sequence[LayerSpec], schedule: Schedule, axis: str = "pp", on: str | None = None
) -> Blueprints:
    """The blueprints of the layers on this mesh, as of `stages_of`. Nothing is compiled or run."""
    found = []

    def look(nothing: Any) -> Any:
        found.append(blueprints_of(layers, schedule, axis=axis))
        return nothing

    run(look, mesh, jax.ShapeDtypeStruct((), jnp.float32), on=on)
    return found[0]


def sharded_layer(spec: LayerSpec, axis: Axis) -> LayerSpec:
    """The same layer, with its parameters cut over `axis` (ZeRO stage 3)."""
    if isinstance(spec, TiedSpec) and spec.key is not None:
        return TiedSpec(spec.key, _sharded, spec, axis, weight=f"{spec.weight}.{PIECE}")
    return LayerSpec(_sharded, spec, axis)


def _sharded(spec: LayerSpec, axis: Axis) -> ShardedLayer:
    layer = shard_parameters(spec.build(), axis)
    assert isinstance(layer, ShardedLayer)
    return layer


class _Packed(NamedTuple):
    """A parameter on a rank, and where its values are in the rank's row of a joined array.

    name    in the whole state          shape   of the rank's tensor-parallel piece, padded to the size of all ranks'
    held    which of its values, in row-major order: with ZeRO 3 those of the data-parallel rank, otherwise all
    """

    rank: int
    name: str
    shape: tuple[int, ...]
    held: range
    kind: Kind
    begin: int

    @property
    def columns(self) -> slice:
        return slice(self.begin, self.begin + len(self.held))


class GPTPacking:
    """Which elements of the joined arrays of `Stages` belong to which parameter of a GPT.

    The joined array of a kind has a row per rank of the axes along which the kind differs: that of the pipeline, those
    of tensor and expert parallelism for sharded parameters, and that of data parallelism for `sharded_layer`s.

    cut   the mesh of the axes along which parameters are cut: tensor parallelism, and the axis of experts
    """

    def __init__(self, blueprints: Blueprints, config: GPTConfig, mesh: Mesh, axis: str = "tp"):
        self.blueprints, self.config, self.mesh, self.axis = blueprints, config, mesh, axis
        self.specs, self._sizes = gpt_specs(config, axis), blueprints.sizes
        self.cut = Mesh(**{name: mesh.axis_size(name) for name in ("ep", axis) if name in mesh.axis_names})

    def pack(self, state: Mapping[str, Any]) -> Stages:
        """From name -> whole array to Stages of NumPy arrays, joined according to Stages.specs."""
        pieces = split_state({name: np.asarray(x) for name, x in state.items()}, self.specs, self.cut)
        rows = {kind: np.zeros((self._num_rows(kind), size), kind.dtype) for kind, size in self._sizes.items()}
        for place in self._places():
            own = pieces[self.position(place.rank)][place.name]
            whole = np.zeros(place.shape, place.kind.dtype)
            whole[: len(own)] = own  # the last ranks have fewer entries
            row = rows[place.kind][self._row(place.rank, place.kind)]
            row[place.columns] = whole.reshape(-1)[place.held.start : place.held.stop]
        return Stages({kind: jnp.asarray(x.reshape(-1)) for kind, x in rows.items()}, self.blueprints)

    def unpack(self, stages: Stages) -> dict[str, np.ndarray]:
        """The state of the whole GPT: the reverse of `pack`."""
        rows = {k: np.asarray(x).reshape(self._num_rows(k), self._sizes[k]) for k, x in stages.flat.items()}
        states: list[dict[str, np.ndarray]] = [{} for _ in self.cut.ranks]
        for place in self._places():
            state = states[self.position(place.rank)]
            whole = state.setdefault(place.name, np.zeros(place.shape, place.kind.dtype)).reshape(-1)
            row = rows[place.kind][self._row(place.rank, place.kind)]
            whole[place.held.start : place.held.stop] = row[place.columns]
        entries = cut(self.config.vocab_size, self.cut.axis_size(self.axis), "ceil")
        for position, state in enumerate(states):
            own = entries[self.cut.index(position, self.axis)]
            state["embedding.weight"] = state["embedding.weight"][: len(own)]
        return merge_state(states, self.specs, self.cut, np.concatenate)

    def where(self, end: str) -> Flat:
        """Inside a rank's program: ones for parameters whose names end in `end`, and zeros elsewhere."""
        about = self.blueprints

        def of_rank(rank: int) -> Callable[[], Flat]:
            stages = [about.stages[stage] for stage in about.held(rank)]
            each = [pair for stage in stages for pair in zip(stage.names(), stage.layout.slots, strict=True)]
            marks = [jnp.full(slot.shape, name.endswith(end), slot.kind.dtype) for name, slot in each]
            return lambda: about.layout(rank).pack(marks, about.sizes)

        return lax.switch(axis_index(about.axis), [*map(of_rank, range(len(about.placement)))])

    def position(self, rank: int) -> int:
        """The rank of `cut` that holds the same pieces."""
        return self.mesh.index(rank, self.cut.axis_names)

    def names_on(self, rank: int) -> list[str]:
        """The distinct names of the parameters of a rank."""
        return list(dict.fromkeys(place.name for place in self._places() if place.rank == rank))

    def _num_rows(self, kind: Kind) -> int:
        return self.mesh.axis_size(kind.axes)

    def _row(self, rank: int, kind: Kind) -> int:
        return self.mesh.index(rank, kind.axes)

    def _places(self) -> Iterator[_Packed]:
        about = self.blueprints
        assert about.partition is not None
        for rank in self.mesh.ranks:
            position = self.mesh.index(rank, about.axis)
            for stage in about.held(position):
                begin, blueprint = about.begin(position, stage), about.stages[stage]
                for name, slot, shape in zip(
                    blueprint.names(), blueprint.layout.slots, whole_shapes(blueprint), strict=True
                ):
                    place, _, rest = name.partition(".")
                    layer = about.partition.stages[stage][int(place)]
                    whole = gpt_layer_name(self.config, layer, rest.removesuffix(f".{PIECE}"))
                    held = range(slot.size)
                    if rest.endswith(f".{PIECE}"):
                        parts = cut(math.prod(shape), self.mesh.axis_size(data_axes(self.mesh)), "ceil")
                        held = parts[self.mesh.index(rank, data_axes(self.mesh))]
                    yield _Packed(rank, whole, shape, held, slot.kind, begin[slot.kind] + slot.begin)


def whole_shapes(blueprint: Blueprint) -> list[tuple[int, ...]]:
    """The whole shape of each parameter of a stage, even if ranks have pieces of it."""
    params = blueprint.structure.unflatten(blueprint.layout.slots)
    leaves = jax.tree.leaves(params, is_leaf=lambda x: is_sharded(x) or isinstance(x, Slot))
    return [leaf.whole_shape if is_sharded(leaf) else leaf.shape for leaf in leaves]
