"""The exercises of lab 00: pass numbers around a ring, and add them up or keep the largest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tplab.exercises.check import Answer, Verdict, but, grade
from tplab.exercises.exercise import RING, Exercise, Framework, Seen, Tensors, own_part
from tplab.mesh import Mesh
from tplab.sharding import P

# Nine ranks: the lab's ring has eight, and on eight ranks or fewer a maximum over seven hops is right.
MESHES = (Mesh(ring=4), Mesh(ring=3), Mesh(ring=2), Mesh(ring=9), Mesh(ring=1))


def _tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """One number per rank, in random order. On three ranks all are far below zero, so a maximum that starts at 0, or at
    a number that is small enough elsewhere, is wrong."""
    first = -20_000_000_000.0 if mesh.size == 3 else 10.0
    step = 4096.0 if mesh.size == 3 else 1.0  # float32 can tell them apart
    return {"x": first + step * rng.permutation(mesh.size)}


def _met(seen: Seen, num_hops: int | None = None) -> np.ndarray:
    """The numbers that a rank has seen after this many hops up the ring, or after R - 1."""
    num_hops = seen.size - 1 if num_hops is None else max(0, num_hops)
    return np.array([seen.tensors["x"][(seen.index - hop) % seen.size] for hop in range(num_hops + 1)])


TOO_FEW = "The number of the next rank is missing: it needs R - 1 hops, and the last number to arrive counts too."
SEVEN = (
    "These are seven hops, which is right on eight ranks. The check uses rings of several lengths: axis_size gives R."
)


# --- the bug to repair ---------------------------------------------------------------------------------------------


def _counted_often(seen: Seen) -> np.ndarray:
    """The sum if every rank adds each arriving sum to its own, and passes the result on."""
    sums = seen.tensors["x"]
    for _ in sums[1:]:
        sums = sums + np.roll(sums, 1)
    return sums[[seen.index]]


TOTAL = Exercise(
    name="total_of_ring",
    tensors=lambda rng, mesh: {"x": 10 + rng.permutation(mesh.size).astype(float)},
    specs={"x": P("ring")},
    plain=lambda x: x.sum(keepdims=True),
    results={"result": P()},
    meshes=MESHES,
    by_hand="`ring_shift`, one hop at a time",
    not_with=RING,
    fewest=lambda mesh, tensors: (mesh.size - 1) * tensors["x"].nbytes,  # each number makes R - 1 hops
    mistakes={
        "result": {
            "Some numbers are counted more than once: the sum that arrives and the sum that you add it to have numbers "
            "in common.\nWhich number is certainly not in the sum that arrives?": _counted_often,
            "This is the rank's own number: nothing that arrives is added to it.": own_part,
            "The same number arrives in every hop: each rank sends its own again. Pass on the number that has just "
            "arrived.": lambda seen: seen.own["x"] + (seen.size - 1) * _met(seen, 1)[-1:],
            TOO_FEW: lambda seen: _met(seen, seen.size - 2).sum(keepdims=True),
            SEVEN: lambda seen: _met(seen, 7).sum(keepdims=True),
            "The rank's own number is counted twice. Is there one hop too many?": lambda seen: (
                seen.want + seen.own["x"]
            ),
            "This is the number that arrived last. Add up all that arrive.": lambda seen: _met(seen)[-1:],
        }
    },
)


def _between_neighbours(answer: Answer) -> Verdict:
    """Refuse messages that skip a rank."""
    for trace in answer.traces:
        for event in trace.events:
            if event.peer is not None and (event.peer - event.rank) % trace.mesh.size not in (1, trace.mesh.size - 1):
                but(
                    f"on {trace.mesh} rank {event.rank} exchanges messages with rank {event.peer}, which is not its "
                    "neighbour.\nPass on what has just arrived, one hop at a time.",
                    answer.verdict.panels,
                )
    return answer.verdict


def check_total(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn`, the program of one rank, adds up the numbers of its ring.

    x [1]   ->   their sum [1], the same on every rank of axis "ring"
    """
    return grade(fn, TOTAL, framework, _between_neighbours)


# --- the exercise --------------------------------------------------------------------------------------------------


LARGEST = replace(
    TOTAL,
    name="largest",
    tensors=_tensors,
    plain=lambda x: x.max(keepdims=True),
    mistakes={
        "result": {
            "This is the rank's own number: nothing that arrives is compared with it.": own_part,
            "Here all numbers are negative, and your largest so far began at zero. Begin with the rank's own number.": (
                lambda seen: np.maximum(seen.want, 0)
            ),
            TOO_FEW: lambda seen: _met(seen, seen.size - 2).max(keepdims=True),
            SEVEN: lambda seen: _met(seen, 7).max(keepdims=True),
            "The rank's own number is missing: this is the largest of those that arrive, and of 0.": (
                lambda seen: _met(seen)[1:].max(keepdims=True, initial=0)
            ),
            "The rank's own number is missing: this is the largest of those that arrive.": (
                lambda seen: _met(seen)[1:].max(keepdims=True, initial=-np.inf)
            ),
            "This is the largest of two numbers. Pass on the number that has just arrived.": (
                lambda seen: _met(seen, 1).max(keepdims=True)
            ),
            "This is the number that arrived last. Compare each one with the largest so far.": (
                lambda seen: _met(seen)[-1:]
            ),
            "This is the sum of the ring. Keep the larger of two numbers (torch.maximum) instead of adding them.": (
                lambda seen: seen.tensors["x"].sum(keepdims=True)
            ),
        }
    },
)


def check_largest(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn`, the program of one rank, finds the largest number of its ring.

    x [1]   ->   largest [1], the same on every rank of axis "ring"
    """
    return grade(fn, LARGEST, framework, _between_neighbours)
