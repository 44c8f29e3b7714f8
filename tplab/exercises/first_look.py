"""The exercise of lab 00: pass numbers around a ring, and keep the largest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import Verdict, grade
from tplab.exercises.exercise import RING, Exercise, Framework, Mistake, Seen, Tensors
from tplab.mesh import Mesh
from tplab.sharding import P


def _tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """One number per rank, in any order. On three ranks all are far below zero, so that a maximum which starts at 0, or
    at some number that is small enough elsewhere, is wrong."""
    first = -20_000_000_000.0 if mesh.size == 3 else 10.0
    step = 4096.0 if mesh.size == 3 else 1.0  # float32 can tell them apart
    return {"x": first + step * rng.permutation(mesh.size)}


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
    by_hand="`ring_shift`, one hop at a time",
    not_with=RING,
    fewest=lambda mesh, tensors: (mesh.size - 1) * tensors["x"].nbytes,
    mistakes=(
        Mistake(
            "result",
            "This is the rank's own number: nothing that arrives is compared with it.",
            lambda seen: seen.own["x"],
        ),
        Mistake(
            "result",
            "Here all numbers are negative, and your largest so far began at zero. Begin with the rank's own number.",
            lambda seen: np.maximum(seen.want, 0),
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
