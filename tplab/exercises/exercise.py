"""What an exercise asks of a learner's function, and the mistakes that it knows by their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tplab.mesh import Axis, Mesh
from tplab.sharding import P

Tensors = dict[str, np.ndarray]
Framework = Literal["torch", "jax"]

# Two ranks first, for the smallest picture of what is wrong. Three, because powers of two hide mistakes. An axis beside
# `tp`, because a program may mistake the world for its group. One rank, on which nothing is sent.
MESHES = (Mesh(tp=2), Mesh(tp=3), Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(tp=1))


@dataclass(frozen=True)
class Seen:
    """One rank of one trial: what a `Mistake` can work with.

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
    """A known way to go wrong: `wrong` predicts what each rank then has for `result`; `hint` says what to think about.

    It is recognised if it explains what every rank has.
    """

    result: str
    hint: str
    wrong: Callable[[Seen], np.ndarray]


@dataclass(frozen=True)
class Exercise:
    """What a learner's function must do.

    name        of the function
    tensors     (random generator, mesh) -> its arguments, whole, by name and in order
    specs       how each argument is sharded
    plain       arguments -> the right results, whole, by name: first what the function returns, then the gradients.
                Given one rank's pieces, it computes what that rank would have without the others
    results     how each returned value is sharded, in order
    also        the same for values that it may also return, before or after the results; recognised by their shapes
    gradients   the arguments whose gradient is also compared, for the loss sum(result * weight(result)); the gradient
                of "x" is the result "dx"
    mistakes    known mistakes, the likeliest first
    reminders   what is said of a wrong result that no mistake explains, by its name
    fewest      (mesh, arguments) -> the bytes that all ranks together must send; sending up to twice as much passes,
                with a remark
    excess      if given, sending more than `slack` times `fewest` is refused, with this hint
    surplus     what the remark asks, of the bytes that are more than `fewest`
    divided     the axis over which the work must be divided; computing everything on every rank is refused
    by_hand     if given, what the program must be built from, in words; collectives are then refused
    not_with    the names of library functions that would do the exercise
    is_precise  whether it is run once more with numbers that 16 bits cannot hold, and that are no whole numbers
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
    """The mistake of adding up what is already the same on every rank of `axis`: R times too large."""
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
"""The library's own collectives made of hops, which are not seen as collectives in a trace."""


def bytes_of_a_sum(tensor: np.ndarray, mesh: Mesh) -> int:
    """The bytes that all ranks together send to add up a tensor over `tp`: 2(R-1) times its size in every group.

    An all_gather and a reduce_scatter of it together send just as many.
    """
    num_ranks = mesh.axis_size("tp")
    return 2 * (num_ranks - 1) * tensor.nbytes * (mesh.size // num_ranks)
