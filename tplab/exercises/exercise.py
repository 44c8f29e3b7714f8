"""Definitions of exercises: the requirements for a learner's function, and known mistakes with their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tplab.mesh import Axis, Mesh
from tplab.sharding import P

Tensors = dict[str, np.ndarray]
Framework = Literal["torch", "jax"]

# Two ranks first, for the smallest picture of a mistake. Three, because powers of two hide mistakes. An axis besides
# `tp`, because a program may mistake the world for its group. One rank, on which nothing is sent.
MESHES = (Mesh(tp=2), Mesh(tp=3), Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(tp=1))


@dataclass(frozen=True)
class Seen:
    """One rank of one trial, as input of a `Mistake`.

    tensors   the whole arguments        own    this rank's pieces of them
    want      this rank's right result   mesh, rank
    """

    tensors: Tensors
    own: Tensors
    want: np.ndarray
    mesh: Mesh
    rank: int


@dataclass(frozen=True)
class Mistake:
    """A known mistake: `wrong` predicts each rank's `result`, and `hint` is shown to the learner.

    It is recognised if its prediction holds on every rank.
    """

    result: str
    hint: str
    wrong: Callable[[Seen], np.ndarray]


@dataclass(frozen=True)
class Exercise:
    """The requirements for a learner's function.

    name        of the function
    tensors     (random generator, mesh) -> its arguments, whole, by name and in order
    specs       how each argument is sharded
    plain       arguments -> the right results, whole, by name: first the returned values, then the gradients.
                Given one rank's pieces, it computes the results of that rank alone
    results     how each returned value is sharded, in order
    also        the same for values that it may also return, before or after the results; recognised by their shapes
    gradients   the arguments whose gradient is also compared, for the loss sum(result * weight(result)); the gradient
                of "x" is the result "dx"
    mistakes    known mistakes, the likeliest first
    reminders   result -> the hint if it is wrong and no mistake explains it
    fewest      (mesh, arguments) -> the bytes that all ranks together must send; sending up to twice as much passes,
                with a remark
    excess      if given, sending more than `slack` times `fewest` is refused, with this hint
    surplus     the question in the remark, about the bytes in excess of `fewest`
    divided     the axis over which the work must be divided; computing everything on every rank is refused
    by_hand     if given, the building blocks of the program, in words; collectives are then refused
    not_with    the names of library functions that would solve the exercise
    is_precise  whether it is run again with fractional numbers that 16 bits cannot represent
    tolerance   the largest difference that counts as rounding, relative to the largest entry, in float64
    """

    name: str
    tensors: Callable[[np.random.Generator, Mesh], Tensors]
    specs: Mapping[str, P]
    plain: Callable[[Tensors], Tensors]
    results: Mapping[str, P]
    also: Mapping[str, P] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
    reminders: Mapping[str, str] = field(default_factory=dict)
    fewest: Callable[[Mesh, Tensors], int] | None = None
    excess: str = ""
    surplus: str = "what are the other {:,} for?"
    slack: float = 1.0
    divided: str = ""
    by_hand: str = ""
    not_with: tuple[str, ...] = ()
    is_precise: bool = False
    tolerance: float = 1e-9
    meshes: tuple[Mesh, ...] = MESHES


def own_part(plain: Callable[[Tensors], Tensors], result: str, hint: str) -> Mistake:
    """The mistake of keeping the result of this rank's own pieces."""
    return Mistake(result, hint, lambda seen: plain(seen.own)[result])


def added_up_again(result: str, axis: Axis, hint: str) -> Mistake:
    """The mistake of adding up copies that are the same on every rank of `axis`: R times too large."""
    return Mistake(result, hint, lambda seen: seen.want * seen.mesh.axis_size(axis))


def a_mean(result: str, axis: Axis, hint: str) -> Mistake:
    """The mistake of dividing a sum by the number of ranks along `axis`."""
    return Mistake(result, hint, lambda seen: seen.want / seen.mesh.axis_size(axis))


def added_over(result: str, axis: Axis, dim: int, plain: Callable[[Tensors], Tensors], hint: str) -> Mistake:
    """The mistake of adding up different pieces, split over `axis` along `dim`, as if they were copies."""

    def wrong(seen: Seen) -> np.ndarray:
        return np.sum(np.split(plain(seen.tensors)[result], seen.mesh.axis_size(axis), axis=dim), axis=0)

    return Mistake(result, hint, wrong)


RING = ("ring_all_reduce", "ring_all_gather", "ring_reduce_scatter")
"""The library's collectives that are made of hops, which a trace does not show as collectives."""


def bytes_of_a_sum(tensor: np.ndarray, mesh: Mesh) -> int:
    """The bytes that all ranks together send to add up a tensor over `tp`: 2(R-1) times its size in every group.

    An all_gather and a reduce_scatter of it together send just as many.
    """
    num_ranks = mesh.axis_size("tp")
    return 2 * (num_ranks - 1) * tensor.nbytes * (mesh.size // num_ranks)
