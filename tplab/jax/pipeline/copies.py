"""Copies of parameters on several ranks: their gradients are added up, or averaged, before the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tplab.errors import ScheduleError
from tplab.jax.comm.collectives import all_reduce, axis_index, axis_size
from tplab.jax.pipeline.flat import Flat, Kind, cut
from tplab.jax.pipeline.stages import Blueprints
from tplab.jax.ranks.context import this_mesh
from tplab.mesh import Axis
from tplab.pipeline.checks import Tied, check_tied, check_tied_name

Places = Sequence[tuple[int, int]]
"""(rank, index in its flat array)."""


class Copies(NamedTuple):
    """Elements that are copies of each other: `size` of them in the flat arrays of a kind. The elements at `parts` are
    added up, and the sum goes to `places`."""

    kind: Kind
    size: int
    parts: Places
    places: Places


def add_copies(gradients: Flat, blueprints: Blueprints, tied: Tied) -> Flat:
    """Add up the gradients of stages that several ranks hold, then those of parameters tied by name. Each copy gets the
    sum."""
    gradients = dict(gradients)
    for copies in [*_twice(blueprints), *_tied(blueprints, tied)]:
        gradients[copies.kind] = _added(gradients[copies.kind], copies, blueprints)
    return gradients


def once(gradients: Flat, blueprints: Blueprints) -> Flat:
    """The gradients with every copy but the first set to zero, so that all ranks together have each once."""
    gradients = dict(gradients)
    for copies in [*_twice(blueprints), *_tied(blueprints, blueprints.tied)]:
        x = gradients[copies.kind]
        for is_here, begin in _here(copies.places[1:], blueprints):
            kept = jnp.where(is_here, 0, cut(x, begin, copies.size))
            x = lax.dynamic_update_slice(x, kept, (begin,))
        gradients[copies.kind] = x
    return gradients


def mean(gradients: Flat, data_axis: Axis | None) -> Flat:
    """The mean over the data-parallel ranks. These hold different experts, whose gradients are added up over the ranks
    that have copies, and divided by the number of all."""
    if data_axis is None:
        return gradients
    names, found = this_mesh().names(data_axis), dict(gradients)
    for kind, x in gradients.items():
        copies = tuple(name for name in names if name not in kind.axes)
        if copies == names:
            found[kind] = all_reduce(x, data_axis, "mean")
        else:
            found[kind] = (all_reduce(x, copies) if copies else x) / axis_size(data_axis)
    return found


def _added(x: Array, copies: Copies, blueprints: Blueprints) -> Array:
    """x with the copies summed by one all_reduce, to which ranks without a part contribute zeros."""
    own = [jnp.where(is_here, cut(x, begin, copies.size), 0) for is_here, begin in _here(copies.parts, blueprints)]
    total = all_reduce(sum(own), blueprints.axis)
    for is_here, begin in _here(copies.places, blueprints):
        new = jnp.where(is_here, total, cut(x, begin, copies.size))
        x = lax.dynamic_update_slice(x, new, (begin,))
    return x


def _here(places: Places, blueprints: Blueprints) -> list[tuple[Array, Array]]:
    """This rank's places as (whether there is one, its index), padded to the largest number of places of any rank."""
    each = [[begin for rank, begin in places if rank == place] for place in range(len(blueprints.placement))]
    most = max(map(len, each))
    table = np.array([begins + [-1] * (most - len(begins)) for begins in each], np.int32)
    return [(begin >= 0, jnp.maximum(begin, 0)) for begin in jnp.asarray(table)[axis_index(blueprints.axis)]]


def _tied(blueprints: Blueprints, tied: Tied) -> Iterator[Copies]:
    check_tied(tied, len(blueprints.stages))
    for tie in tied:
        slots = []
        for stage, name in tie:
            names = blueprints.stages[stage].names()
            check_tied_name(stage, name, names)
            slots.append(blueprints.stages[stage].layout.slots[names.index(name)])
        (first, name), one = tie[0], slots[0]
        for (stage, other), slot in zip(tie, slots):
            if (slot.shape, slot.kind) != (one.shape, one.kind):
                raise ScheduleError(
                    f"parameter {name!r} of stage {first} is {_about(one.shape, one.kind)}, and its copy {other!r} of "
                    f"stage {stage} {_about(slot.shape, slot.kind)}; copies must have one shape and type"
                )
        places = [
            [(rank, blueprints.begin(rank, stage)[one.kind] + slot.begin) for rank in blueprints.holders(stage)]
            for (stage, _), slot in zip(tie, slots)
        ]
        # the ranks that hold one stage already have the same sum
        yield Copies(one.kind, one.size, [first for first, *_ in places], [place for held in places for place in held])


def _twice(blueprints: Blueprints) -> Iterator[Copies]:
    """Stages on several ranks, whole."""
    for number, stage in enumerate(blueprints.stages):
        holders = blueprints.holders(number)
        if len(holders) > 1:
            for kind, size in stage.layout.sizes.items():
                places = [(rank, blueprints.begin(rank, number)[kind]) for rank in holders]
                yield Copies(kind, size, places, places)


def _about(shape: Sequence[int], kind: Kind) -> str:
    return f"{kind.dtype} {list(shape)}"
