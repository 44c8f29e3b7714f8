"""The exercise of lab 00: pass numbers round a ring, and keep the largest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import Exercise, Framework, Mistake, Seen, Tensors, Verdict, grade
from tplab.mesh import Mesh
from tplab.sharding import P


def _tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """One number per rank, in any order."""
    return {"x": rng.permutation(np.arange(10.0, 10.0 + mesh.axis_size("ring")))}


def _plain(tensors: Tensors) -> Tensors:
    return {"largest": tensors["x"].max(keepdims=True)}


def _met(seen: Seen, num_hops: int) -> np.ndarray:
    """The numbers that have been on a rank after so many hops up the ring."""
    index = seen.mesh.index(seen.rank, "ring")
    return np.array([seen.tensors["x"][(index - hop) % len(seen.tensors["x"])] for hop in range(num_hops + 1)])


LARGEST = Exercise(
    name="largest",
    tensors=_tensors,
    specs={"x": P("ring")},
    plain=_plain,
    results={"largest": P()},
    meshes=(Mesh(ring=4), Mesh(ring=3), Mesh(ring=2), Mesh(ring=8), Mesh(ring=1)),
    mistakes=(
        Mistake(
            "largest",
            "It is this rank's own number: nothing that was passed on is compared with it.",
            lambda seen: seen.own["x"],
        ),
        Mistake(
            "largest",
            "It is the largest of all but one: with R ranks, a number needs R - 1 hops to reach every rank.",
            lambda seen: _met(seen, len(seen.tensors["x"]) - 2).max(keepdims=True),
        ),
        Mistake(
            "largest",
            "It is the largest of two: the number to pass on next is the one that has just arrived.",
            lambda seen: _met(seen, 1).max(keepdims=True),
        ),
        Mistake(
            "largest",
            "It is the number that arrived last: compare each one with the largest so far.",
            lambda seen: _met(seen, len(seen.tensors["x"]) - 1)[-1:],
        ),
        Mistake(
            "largest",
            "It is the sum of the ring: keep the larger of two numbers (torch.maximum), rather than adding them.",
            lambda seen: seen.tensors["x"].sum(keepdims=True),
        ),
    ),
)


def check_largest(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Whether `fn`, the program of one rank, finds the largest number of its ring.

    x [1]   ->   largest [1], the same on every rank of axis "ring"
    """
    return grade(fn, LARGEST, framework)
