"""Checks that the pipelines of both frameworks share: microbatches, results of stages, losses, tied parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from tplab.errors import MeshError, ScheduleError, ShapeError
from tplab.mesh import Axis, Mesh
from tplab.pipeline.partition import Partition, ties
from tplab.sharding import cut, share

Tied = Sequence[Sequence[tuple[int, str]]]
"""Groups of tied parameters; each parameter is given by its place, (stage, name)."""
Placed = tuple[tuple[tuple[int, str], ...], ...]


def check_data_axis(mesh: Mesh, axis: Axis, data_axis: Axis | None) -> None:
    """Raise MeshError if a pipeline's stages and its replicas are along the same axis."""
    both = set() if data_axis is None else set(mesh.names(axis)).intersection(mesh.names(data_axis))
    if both:
        raise MeshError(
            f"data_axis is {data_axis!r}, and the pipeline runs along axis={axis!r}: ranks along {min(both)!r} hold "
            'different stages, and no copies, as in axis="pp", data_axis="dp"'
        )


def mean_already(what: str, axes: Iterable[str]) -> ValueError:
    """The error for a gradient that would be averaged twice."""
    return ValueError(
        f"{what}: shard_parameters makes its gradient the mean over {', '.join(map(repr, axes))} in the backward pass, "
        "so nothing is left to average there; leave it out, in train_batch by average=False. Where other parameters of "
        "the model need it, cut this one with op='sum'"
    )


def check_tied(tied: Any, num_stages: int) -> None:
    """Raise ScheduleError unless `tied` lists (stage, name) for stages that exist."""
    for tie in tied if _is_list(tied) else [tied]:
        for place in tie if _is_list(tie) else [tie]:
            if not (_is_list(place) and len(place) == 2 and isinstance(place[0], int) and isinstance(place[1], str)):
                raise ScheduleError(
                    f"tied has {place!r} where it must say (stage, name), a list of them for each parameter that is "
                    'one, as [[(0, "embedding.weight"), (3, "head.weight")]]'
                )
            if not 0 <= place[0] < num_stages:
                raise ScheduleError(f"tied names stage {place[0]}; there are stages 0 to {num_stages - 1}")


def check_tied_name(stage: int, name: str, names: Collection[str]) -> None:
    """Raise ScheduleError if a stage has no parameter of this name."""
    if name not in names:
        raise ScheduleError(
            f"tied names parameter {name!r} of stage {stage}, which it does not have; it has "
            f"{', '.join(names) or 'no parameters'}"
        )


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


def tied_in(layers: Sequence[Any], made: Partition, name_in: Callable[[Any], str]) -> Placed:
    """The (stage, name) of every parameter, for each key that ties them. name_in: a layer -> the parameter's name."""
    found = []
    for places in ties(layers).values():
        stages = [made.stage_of(place) for place in places]
        names = [f"{place - made.bounds[stage]}.{name_in(layers[place])}" for place, stage in zip(places, stages)]
        if len(places) > 1:
            found.append(tuple(zip(stages, names)))
    return tuple(found)


# --- while a pipeline runs --------------------------------------------------------------------------------------------


def check_group(size: Any) -> None:
    """Raise ScheduleError unless `checkpoint_every` is a number of layers."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ScheduleError(f"checkpoint_every is {size!r}; it is a number of layers, 1 or more")


def outputs_of(stage: int, outputs: Any, kind: type) -> tuple[Any, ...]:
    """What a stage returned, as a tuple. Raises ScheduleError unless all are of this kind: a Tensor or an Array."""
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    if not found or not all(isinstance(x, kind) for x in found):
        what = f"a {type(outputs).__name__}"
        if isinstance(outputs, tuple):
            what = f"a tuple of {', '.join(type(x).__name__ for x in outputs) or 'nothing'}"
        name = _name(kind)
        must = f"{'an' if name == 'array' else 'a'} {name}, or a tuple of {name}s"
        raise ScheduleError(f"stage {stage} returned {what}; it must return {must}")
    return found


def check_loss(value: Any, kind: type, has_gradient: Callable[[Any], bool], microbatch: str = "a microbatch") -> None:
    """Raise ShapeError unless a loss is one number that has a gradient."""
    if not isinstance(value, kind) or len(value.shape) or not has_gradient(value):  # type: ignore[attr-defined]
        what = f"a {type(value).__name__}"
        if isinstance(value, kind):
            what = f"a {value.dtype} {_name(kind)} {list(value.shape)}"  # type: ignore[attr-defined]
        raise ShapeError(
            f"the loss of {microbatch} is {what}; it must be one number, of floating point: .mean() gives one"
        )


def _name(kind: type) -> str:
    """ "tensor" or "array", without the module that JAX includes in its class's name."""
    return kind.__name__.rpartition(".")[2].lower()


def no_way_back(stage: int) -> ScheduleError:
    """The error for a stage none of whose inputs can have a gradient."""
    return ScheduleError(
        f"nothing that enters stage {stage} is of floating point, so no gradient can flow back to stage {stage - 1}; "
        "cut the model elsewhere"
    )


# --- a batch, cut into microbatches -----------------------------------------------------------------------------------


def split_batch(inputs: Any, targets: Any, num_microbatches: int) -> list[tuple[Any, Any]]:
    """A batch as microbatches for `train_batch`: pairs of equal slices along dim 0, of tensors or tuples of tensors.

    Raises ShapeError if the batch cannot be cut into equal slices: the mean of the microbatches' means would not be the
    mean of the batch. Raises TypeError for anything but a tensor or a tuple of tensors.
    """
    sides = [x if isinstance(x, tuple) else (x,) for x in (inputs, targets)]
    for what, side in zip(("inputs", "targets"), sides):
        for x in side:
            if not getattr(x, "shape", ()):
                kind = "a tensor without dims" if hasattr(x, "shape") else f"an object of type {type(x).__name__}"
                raise TypeError(
                    f"split_batch cuts tensors along dim 0, and the {what} have {kind}; give a tensor, or a tuple of "
                    "tensors"
                )
    sizes = {x.shape[0] for side in sides for x in side}
    if len(sizes) != 1:
        raise ShapeError(f"inputs and targets have batches of {', '.join(map(str, sorted(sizes)))}; they must agree")
    (size,) = sizes
    share(size, num_microbatches, "the batch has size", sharers="microbatches")

    def part(given: Any, piece: range) -> Any:
        if isinstance(given, tuple):
            return tuple(x[piece.start : piece.stop] for x in given)
        return given[piece.start : piece.stop]

    return [(part(inputs, piece), part(targets, piece)) for piece in cut(size, num_microbatches, "equal")]


def check_microbatches(microbatches: Sequence[Any], expected: int) -> Sequence[tuple[Any, Any]]:
    """Return the pairs. Raises ScheduleError unless there is one for each microbatch of the schedule."""
    if len(microbatches) != expected:
        raise ScheduleError(
            f"the schedule has {expected} microbatches, but {len(microbatches)} were given; "
            f"split_batch(x, y, {expected}) makes as many of a batch"
        )
    for number, pair in enumerate(microbatches):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ScheduleError(
                f"microbatch {number} is a {type(pair).__name__}; it must be a pair (input, target), as split_batch "
                "gives them"
            )
    return microbatches
