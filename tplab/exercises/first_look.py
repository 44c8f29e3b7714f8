"""The exercise of lab 00: pass numbers around a ring, and keep the largest."""

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
    return {"result": tensors["x"].max(keepdims=True)}


def _met(seen: Seen, num_hops: int) -> np.ndarray:
    """The numbers that a rank has seen after this many hops up the ring."""
    index = seen.mesh.index(seen.rank, "ring")
    return np.array([seen.tensors["x"][(index - hop) % len(seen.tensors["x"])] for hop in range(num_hops + 1)])


LARGEST = Exercise(
    name="largest",
    tensors=_tensors,
    specs={"x": P("ring")},
    plain=_plain,
    results={"result": P()},
    # Nine ranks: the lab's ring has eight, and on eight or fewer a program that always makes seven hops is right.
    meshes=(Mesh(ring=4), Mesh(ring=3), Mesh(ring=2), Mesh(ring=9), Mesh(ring=1)),
    fewest=lambda mesh, tensors: (mesh.size - 1) * tensors["x"].nbytes,
    mistakes=(
        Mistake(
            "result",
            "This is the rank's own number: nothing that arrives is compared with it.",
            lambda seen: seen.own["x"],
        ),
        Mistake(
            "result",
            "One number is missing: this is the largest of all the others. With R ranks, a number needs R - 1 hops to "
            "reach every rank, and the check uses rings of several lengths: axis_size gives R.",
            lambda seen: _met(seen, len(seen.tensors["x"]) - 2).max(keepdims=True),
        ),
        Mistake(
            "result",
            "This is the largest of two numbers. Pass on the number that has just arrived.",
            lambda seen: _met(seen, 1).max(keepdims=True),
        ),
        Mistake(
            "result",
            "This is the number that arrived last. Compare each one with the largest so far.",
            lambda seen: _met(seen, len(seen.tensors["x"]) - 1)[-1:],
        ),
        Mistake(
            "result",
            "This is the sum of the ring. Keep the larger of two numbers (torch.maximum) instead of adding them.",
            lambda seen: seen.tensors["x"].sum(keepdims=True),
        ),
    ),
)


def check_largest(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Whether `fn`, the program of one rank, finds the largest number of its ring.

    x [1]   ->   largest [1], the same on every rank of axis "ring"
    """
    return grade(fn, LARGEST, framework)
