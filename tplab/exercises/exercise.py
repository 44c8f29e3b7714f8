"""Definitions of exercises: the requirements for a learner's function, and known mistakes with their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tplab.exercises.slopes import slopes
from tplab.mesh import Axis, Mesh
from tplab.sharding import P, split

Tensors = dict[str, np.ndarray]
Framework = Literal["torch", "jax"]

# Two ranks first, for the smallest picture of a mistake. Three, because powers of two hide mistakes. An axis besides
# `tp`, because a program may mistake the world for its group. One rank, on which nothing is sent.
MESHES = (Mesh(tp=2), Mesh(tp=3), Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(tp=1))


@dataclass(frozen=True)
class Seen:
    """One rank of one trial, for which a known mistake predicts a wrong result.

    exercise, result   whose it is, and the name of the result
    tensors            the whole arguments        own    this rank's pieces of them
    want               this rank's right result   mesh, rank
    """

    exercise: Exercise
    result: str
    tensors: Tensors
    own: Tensors
    want: np.ndarray
    mesh: Mesh
    rank: int

    @property
    def size(self) -> int:
        """The number of ranks along the first axis that all meshes of the exercise have."""
        return self.mesh.axis_size(self.exercise.axes[0])

    @property
    def index(self) -> int:
        """This rank's place along that axis."""
        return self.mesh.index(self.rank, self.exercise.axes[0])

    def parts(self, array: np.ndarray, dim: int = 0) -> list[np.ndarray]:
        """An array in one part per rank of that axis."""
        return np.split(array, self.size, dim)

    def part(self, array: np.ndarray, dim: int = 0) -> np.ndarray:
        """This rank's part of an array."""
        return self.parts(array, dim)[self.index]

    def of(self, tensors: Tensors) -> np.ndarray:
        """The plain result, of other arguments."""
        return self.exercise.right(self.result, tensors)


Wrong = Callable[[Seen], np.ndarray]
"""A known mistake: it predicts each rank's result, and is recognised if its prediction holds on every rank."""

Mistakes = Mapping[str, Wrong | tuple[Wrong, ...]]
"""hint -> the mistake, or several that get the same hint; the likeliest first."""


@dataclass(frozen=True)
class Exercise:
    """The requirements for a learner's function.

    name        of the function
    tensors     (random generator, mesh) -> its arguments, whole, by name and in order
    specs       how each argument is sharded
    plain       arguments -> the right results, whole, in order. Given one rank's pieces, it computes the results of
                that rank alone. If there are gradients, it counts dims from the end and computes with complex numbers
    results     how each returned value is sharded, in order
    also        the same for values that it may also return, before or after the results; recognised by their shapes
    gradients   the arguments whose gradient is also compared, for the loss sum(result * weight(result)); the gradient
                of "x" is the result "dx"
    mistakes    result -> its known mistakes
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
    plain: Callable[..., Any]
    results: Mapping[str, P]
    also: Mapping[str, P] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()
    mistakes: Mapping[str, Mistakes] = field(default_factory=dict)
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

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that all of its meshes have."""
        first, *others = (mesh.axis_names for mesh in self.meshes)
        return tuple(axis for axis in first if all(axis in names for names in others))

    def right(self, result: str, tensors: Tensors) -> np.ndarray:
        """A right result of these arguments, or gradient, whole."""
        returned = [*self.results, *self.also]
        if result in returned:
            found = self.plain(*tensors.values())
            return found[returned.index(result)] if isinstance(found, tuple) else found
        key = result.removeprefix("d")
        return slopes(lambda one: self.plain(*{**tensors, key: one}.values()), tensors[key])

    def known(self, result: str) -> list[tuple[str, Wrong]]:
        """The mistakes in a result, each with its hint."""
        of = {hint: one if isinstance(one, tuple) else (one,) for hint, one in self.mistakes.get(result, {}).items()}
        return [(hint, wrong) for hint, wrongs in of.items() for wrong in wrongs]

    def on_ranks(self, result: str, whole: np.ndarray, mesh: Mesh) -> list[np.ndarray]:
        """Each rank's piece of a whole result or gradient."""
        of = {**self.results, **self.also, **{f"d{key}": self.specs[key] for key in self.gradients}}
        return split(whole, of[result], mesh)

    def seen(self, result: str, tensors: Tensors, mesh: Mesh) -> list[Seen]:
        """A trial with these arguments, as each rank sees it."""
        pieces = {key: split(array, self.specs[key], mesh) for key, array in tensors.items()}
        wants = self.on_ranks(result, self.right(result, tensors), mesh)
        owns = [{key: pieces[key][rank] for key in pieces} for rank in mesh.ranks]
        return [Seen(self, result, tensors, owns[rank], wants[rank], mesh, rank) for rank in mesh.ranks]


def own_part(seen: Seen) -> np.ndarray:
    """The mistake of keeping the result of this rank's own pieces."""
    return seen.of(seen.own)


def added_up_again(seen: Seen) -> np.ndarray:
    """The mistake of adding up copies that are the same on every rank: R times too large."""
    return seen.want * seen.size


def added_over(dim: int) -> Wrong:
    """The mistake of adding up different pieces, split along `dim`, as if they were copies."""
    return lambda seen: np.sum(seen.parts(seen.of(seen.tensors), dim), axis=0)


RING = ("ring_all_reduce", "ring_all_gather", "ring_reduce_scatter")
"""The library's collectives that are made of hops, which a trace does not show as collectives."""


def bytes_to_gather(tensor: np.ndarray, mesh: Mesh, axis: Axis = "tp") -> int:
    """The bytes that all ranks together send to gather a tensor over an axis, or to reduce it to pieces: R - 1 times
    its size in every group."""
    num_ranks = mesh.axis_size(axis)
    return (num_ranks - 1) * tensor.nbytes * (mesh.size // num_ranks)


def bytes_of_a_sum(tensor: np.ndarray, mesh: Mesh, axis: Axis = "tp") -> int:
    """The same to add it up on every rank, which is as much as to reduce and to gather it."""
    return 2 * bytes_to_gather(tensor, mesh, axis)
