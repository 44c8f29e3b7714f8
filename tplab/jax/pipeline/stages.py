"""A model as a list of layers, cut into stages. Each rank initialises its own stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tplab.errors import ScheduleError
from tplab.jax.comm.collectives import axis_index, axis_size
from tplab.jax.pipeline.flat import Flat, Kind, Packing, kind_of, largest
from tplab.jax.pipeline.passes import Layer, is_float
from tplab.jax.ranks.context import run_key, this_mesh
from tplab.mesh import Axis
from tplab.pipeline.checks import Tied, tied_in
from tplab.pipeline.partition import LayerSpec, Partition, TiedSpec, cut_layers, layer_names, ties
from tplab.schedules import Schedule
from tplab.schedules.check import require_ranks
from tplab.schedules.placement import Placement, one_way
from tplab.sharding import P


@dataclass(frozen=True)
class Blueprint:
    """One stage without its values: its layers, and the structure and layout of its parameters."""

    layers: tuple[Layer, ...]
    structure: Any
    layout: Packing

    def names(self) -> list[str]:
        """The name of each parameter: "0.up.weight" is in the stage's first layer."""
        tree = self.structure.unflatten(range(len(self.layout.slots)))
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        bare = len(self.layers) == 1 and self.layers[0].bare
        return [jax.tree_util.keystr(path[bare:], simple=True, separator=".") for path in paths]


@dataclass(frozen=True)
class Blueprints:
    """All stages of a model, and which ranks hold them. The same on every rank."""

    stages: tuple[Blueprint, ...]
    placement: Placement
    axis: Axis
    partition: Partition | None = None
    tied: tuple[tuple[tuple[int, str], ...], ...] = ()

    @property
    def sizes(self) -> dict[Kind, int]:
        """The number of elements of each kind on a rank, padded to the rank that has the most."""
        return largest(self.layout(rank) for rank in range(len(self.placement)))

    def layout(self, rank: int) -> Packing:
        """The layout of all parameters of a rank: stage after stage, in the order of the placement."""
        return Packing.of(
            (slot.shape, slot.kind) for stage in self.held(rank) for slot in self.stages[stage].layout.slots
        )

    def held(self, rank: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.placement[rank]))

    def begin(self, rank: int, stage: int) -> dict[Kind, int]:
        """The index at which the parameters of a stage begin in the flat arrays of a rank that holds it."""
        begin = dict.fromkeys(self.sizes, 0)
        for other in self.held(rank):
            if other == stage:
                return begin
            for kind, size in self.stages[other].layout.sizes.items():
                begin[kind] += size
        raise ScheduleError(f"position {rank} does not hold stage {stage}")

    def holders(self, stage: int) -> list[int]:
        """The positions along the axis that hold a stage."""
        return [rank for rank, held in enumerate(self.placement) if stage in held]


@jax.tree_util.register_pytree_node_class
class Stages:
    """The parameters of this rank's stages, and how to run them. Pass it to `train_batch`.

    It is a pytree whose leaves are the parameters, packed into flat arrays, one per dtype, and padded with zeros to the
    size of the rank that has the most. So `jax.tree.map` and optax accept it and its gradients; P("pp") puts it on the
    mesh.

    stages[n]   on a rank that holds stage n, its parameters, a list with one entry per layer. On other ranks, arrays of
                the same shapes without meaning. Outside `run`, where P("pp") has joined the ranks' stages, any stage
    partition   which layers each stage has             tied   which parameters are tied, by stage and name
    """

    def __init__(self, flat: Flat, blueprints: Blueprints):
        self.flat, self.blueprints = flat, blueprints

    @property
    def partition(self) -> Partition | None:
        return self.blueprints.partition

    @property
    def tied(self) -> Tied:
        return self.blueprints.tied

    @property
    def specs(self) -> Stages:
        """The specs of the parameters, for in_specs and out_specs: P("pp") is enough unless some are also sharded over
        another axis."""
        return Stages({kind: P(kind.axes) for kind in self.flat}, self.blueprints)  # type: ignore[misc]

    def __getitem__(self, stage: int) -> Any:
        about = self.blueprints
        if not 0 <= stage < len(about.stages):
            raise ScheduleError(f"there is no stage {stage}; there are stages 0 to {len(about.stages) - 1}")
        holders, sizes = about.holders(stage), about.sizes
        begins = [about.begin(rank, stage) for rank in holders]
        begin: Any = begins[0]
        is_joined = any(x.shape[0] != sizes[kind] for kind, x in self.flat.items())
        if is_joined:
            begin = {kind: begins[0][kind] + holders[0] * size for kind, size in sizes.items()}
        elif any(other != begin for other in begins):
            table = np.zeros((len(about.placement), len(sizes)), np.int32)
            table[holders] = [list(other.values()) for other in begins]
            begin = dict(zip(sizes, jnp.asarray(table)[axis_index(about.axis)]))
        blueprint = about.stages[stage]
        return blueprint.structure.unflatten(blueprint.layout.unpack(self.flat, begin))

    __iter__ = None  # a rank's stages are unknown while the program is traced

    def __repr__(self) -> str:
        return f"Stages of {len(self.blueprints.stages)} over {len(self.blueprints.placement)} ranks"

    def tree_flatten(self) -> tuple[list[Array], tuple[tuple[Kind, ...], Blueprints]]:
        kinds = tuple(sorted(self.flat))
        return [self.flat[kind] for kind in kinds], (kinds, self.blueprints)

    @classmethod
    def tree_unflatten(cls, about: tuple[tuple[Kind, ...], Blueprints], leaves: Sequence[Any]) -> Stages:
        return cls(dict(zip(about[0], leaves)), about[1])


def stages_of(
    layers: Sequence[Any],
    schedule: Schedule,
    method: str | Sequence[float] = "parameters",
    *,
    axis: Axis = "pp",
    bounds: Sequence[int] | None = None,
) -> Stages:
    """Cut a model into the stages of `schedule`, and initialise those of this rank. Call it inside a rank's program.

    layers    LayerSpecs, layers that already exist, and functions (which have no parameters). A layer is an object with
              `init(key)`, which returns its parameters, and is called with them and its inputs. A layer or function
              that has a parameter `key` receives its own key, derived from the random key of the batch
    method    what is balanced over the ranks: see `tplab.pipeline.partition`
    bounds    the cuts, if they are known: stage s has the layers bounds[s] to bounds[s + 1] - 1

    A layer's initial weights depend only on the seed of the run and the layer's place in the list. So the model is the
    same with any number of ranks and stages, and data-parallel copies agree. Each rank initialises only its own layers.
    """
    about = blueprints_of(layers, schedule, method, axis=axis, bounds=bounds)
    first = {place: tied[0] for tied in ties(layers).values() for place in tied}

    def params_of(stage: int) -> list[Any]:
        made = about.partition
        assert made is not None
        held = zip(about.stages[stage].layers, made.stages[stage], strict=True)
        return [_init(layer, first.get(place, place)) for layer, place in held]

    def of_rank(rank: int) -> Callable[[], Flat]:
        return lambda: about.layout(rank).pack(
            [leaf for stage in about.held(rank) for leaf in jax.tree.leaves(params_of(stage))], about.sizes
        )

    return Stages(lax.switch(axis_index(axis), list(map(of_rank, range(schedule.num_ranks)))), about)


def blueprints_of(
    layers: Sequence[Any],
    schedule: Schedule,
    method: str | Sequence[float] = "parameters",
    *,
    axis: Axis = "pp",
    bounds: Sequence[int] | None = None,
) -> Blueprints:
    """The blueprints of `stages_of`, without values, for existing parameters. Called inside a rank's program."""
    label = ",".join(this_mesh().names(axis))
    require_ranks(schedule, axis_size(axis), label)
    made = cut_layers(
        num_parameters(layers),
        schedule.num_stages,
        method,
        names=layer_names(layers),
        placement=one_way(schedule.placement, schedule.num_stages),
        bounds=bounds,
    )
    built = [_layer(layer) for layer in layers]
    stages = []
    for places in made.stages:
        held = tuple(built[place] for place in places)
        leaves, structure = jax.tree.flatten(_types(lambda held=held: [_init(layer, 0) for layer in held]))
        stages.append(Blueprint(held, structure, _layout(leaves, axis)))
    return Blueprints(tuple(stages), schedule.placement, axis, made, tied_in(layers, made, lambda layer: layer.weight))


def alike(function: Callable[..., Any], params: Any, schedule: Schedule, axis: Axis) -> Stages:
    """Stages that all run `function(params, x)`. `params`: of this rank's single stage, or a list, one per stage."""
    counts = {len(set(held)) for held in schedule.placement}
    (num_held,) = counts if len(counts) == 1 else (0,)
    given = [params] if num_held == 1 else params
    if not num_held or not isinstance(given, list | tuple) or len(given) != num_held:
        raise ScheduleError(
            f"each position of axis {axis!r} holds {' or '.join(map(str, sorted(counts)))} stages; with a function "
            "give a list of as many parameters, in the order of schedule.placement, or use stages_of"
        )
    trees = [jax.tree.flatten([tree]) for tree in given]
    layouts = [_layout(leaves, axis) for leaves, _ in trees]
    if any((layout, structure) != (layouts[0], trees[0][1]) for layout, (_, structure) in zip(layouts, trees)):
        raise ScheduleError(
            "the stages that one function runs must have parameters of one structure and the same shapes; stages_of "
            "takes layers of any shapes"
        )
    blueprint = Blueprint((Layer(function, bare=True),), trees[0][1], layouts[0])
    about = Blueprints((blueprint,) * schedule.num_stages, schedule.placement, axis)
    leaves = [jnp.asarray(leaf) for leaves, _ in trees for leaf in leaves]
    return Stages(about.layout(0).pack(leaves, about.sizes), about)


def as_params(stages: Stages) -> Any:
    """The params that were passed to `alike`, from the stages that it returned."""
    about = stages.blueprints
    one, each = about.stages[0], []
    for number in range(len(about.held(0))):
        begin = {kind: number * size for kind, size in one.layout.sizes.items()}
        each += one.structure.unflatten(one.layout.unpack(stages.flat, begin))
    return each[0] if len(each) == 1 else each


def num_parameters(layers: Sequence[Any]) -> list[int]:
    """The number of parameters of each layer. Only shapes are computed.

    A function has none: an embedding inside a lambda is neither counted nor trained.
    """
    counts: dict[LayerSpec, int] = {}

    def count(layer: Any) -> int:
        built = _layer(layer)
        if not built.has_params:
            return 0
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(built.called.init, jax.random.key(0))))

    found = []
    for layer in layers:
        if isinstance(layer, LayerSpec):
            if layer not in counts:
                counts[layer] = count(layer)
            found.append(counts[layer])
        else:
            found.append(count(layer))
    return found


def _layer(layer: Any) -> Layer:
    if isinstance(layer, LayerSpec):
        return Layer(layer.build(), layer.forward if isinstance(layer, TiedSpec) else None)
    return Layer(layer)


_OF_LAYERS = 0x5A17
"""Distinguishes the keys of layers from others derived from the run's seed."""


def _init(layer: Layer, place: int) -> Any:
    """The layer's initial parameters, for its place in the model."""
    if not layer.has_params:
        return ()
    return layer.called.init(jax.random.fold_in(jax.random.fold_in(run_key(), _OF_LAYERS), place))


def _types(function: Callable[[], Any]) -> Any:
    """The types of what a function returns, without running it."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)()
    return jax.tree.structure(shapes).unflatten(closed.out_avals)


def _layout(leaves: Sequence[Any], axis: Axis) -> Packing:
    """The layout of parameters. They always differ along the pipeline's axis."""
    for leaf in leaves:
        if not is_float(leaf):
            raise ScheduleError(
                f"a parameter {list(leaf.shape)} is {leaf.dtype}; parameters are trained, and must be of floating "
                "point: keep other arrays in the layer itself"
            )
    names = this_mesh().names(axis)
    return Packing.of((tuple(leaf.shape), kind_of(leaf, names)) for leaf in leaves)
