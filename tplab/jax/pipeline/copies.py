"""Copies of parameters on several ranks: their gradients are added up, or averaged, before the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tplab.errors import ScheduleError
from tplab.jax.comm import all_reduce, axis_index
from tplab.jax.pipeline.flat import Flat, Kind, cut
from tplab.jax.pipeline.stages import Blueprints, Tied
from tplab.mesh import Axis


class Copies(NamedTuple):
    """Elements that are one: `size` of them in the flat arrays of a kind, at each (rank, begin)."""

    kind: Kind
    size: int
    places: tuple[tuple[int, int], ...]


def add_copies(gradients: Flat, blueprints: Blueprints, tied: Tied) -> Flat:
    """Add up the gradients of what is tied by name, and of stages that several ranks hold; each copy gets the sum."""
    gradients = dict(gradients)
    for copies in [*_tied(blueprints, tied), *_twice(blueprints)]:
        gradients[copies.kind] = _added(gradients[copies.kind], copies, blueprints)
    return gradients


def mean(gradients: Flat, data_axis: Axis | None) -> Flat:
    """Over the data-parallel ranks."""
    if data_axis is None:
        return gradients
    return {kind: all_reduce(x, data_axis, "mean") for kind, x in gradients.items()}


def _added(x: Array, copies: Copies, blueprints: Blueprints) -> Array:
    """One all_reduce, to which ranks without a copy add zeros."""
    num_ranks = len(blueprints.placement)
    each = [[begin for rank, begin in copies.places if rank == place] for place in range(num_ranks)]
    most = max(map(len, each))
    table = np.array([begins + [-1] * (most - len(begins)) for begins in each], np.int32)
    begins = jnp.asarray(table)[axis_index(blueprints.axis)]

    def here(number: int) -> Array:
        return cut(x, jnp.maximum(begins[number], 0), copies.size)

    own = sum(jnp.where(begins[number] >= 0, here(number), 0) for number in range(most))
    total = all_reduce(own, blueprints.axis)
    for number in range(most):
        new = jnp.where(begins[number] >= 0, total, here(number))
        x = lax.dynamic_update_slice(x, new, (jnp.maximum(begins[number], 0),))
    return x


def _tied(blueprints: Blueprints, tied: Tied) -> Iterator[Copies]:
    for tie in tied:
        pieces = []
        for stage, name in tie:
            if not 0 <= stage < len(blueprints.stages):
                raise ScheduleError(
                    f"tied names stage {stage}; there are stages 0 to {len(blueprints.stages) - 1}"
                )
            names = blueprints.stages[stage].names()
            if name not in names:
                raise ScheduleError(
                    f"tied names parameter {name!r} of stage {stage}, which it does not have; it has "
                    f"{', '.join(names) or 'no parameters'}"
                )
            pieces.append(blueprints.stages[stage].layout.pieces[names.index(name)])
        (first, name), one = tie[0], pieces[0]
        for (stage, other), piece in zip(tie, pieces):
            if (piece.shape, piece.kind) != (one.shape, one.kind):
                raise ScheduleError(
                    f"parameter {name!r} of stage {first} is {_about(one.shape, one.kind)}, and its copy {other!r} of "
                    f"stage {stage} {_about(piece.shape, piece.kind)}; copies must have one shape and type"
                )
        places = [
            (rank, blueprints.begin(rank, stage)[one.kind] + piece.begin)
            for (stage, _), piece in zip(tie, pieces)
            for rank in blueprints.holders(stage)
        ]
        yield Copies(one.kind, one.size, tuple(places))


def _twice(blueprints: Blueprints) -> Iterator[Copies]:
    """Stages on several ranks, but for what is in a tie: that has been added up on all of them."""
    for number, stage in enumerate(blueprints.stages):
        holders = blueprints.holders(number)
        if len(holders) > 1:
            for kind, size in stage.layout.sizes.items():
                places = tuple((rank, blueprints.begin(rank, number)[kind]) for rank in holders)
                yield Copies(kind, size, places)


def _about(shape: Sequence[int], kind: Kind) -> str:
    return f"{kind.dtype} {list(shape)}"
