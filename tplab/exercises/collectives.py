"""The exercises of lab 02: mend an all-reduce whose sums end in the wrong place, and gather in both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import Exercise, Framework, Mistake, Seen, Verdict, added_up_again, grade, own_part
from tplab.mesh import Mesh
from tplab.sharding import P
from tplab.trace.trace import Trace
from tplab.widgets.matrices import Panel

# --- the bug to repair ---------------------------------------------------------------------------------------------


def _shifted(places: int) -> Callable[[Seen], np.ndarray]:
    """The right pieces, each so many places too far to the left."""

    def wrong(seen: Seen) -> np.ndarray:
        pieces = seen.want.reshape(seen.mesh.axis_size("tp"), -1)
        return np.roll(pieces, -places, axis=0).reshape(seen.want.shape)

    return wrong


def _reversed_pieces(seen: Seen) -> np.ndarray:
    """Place j holds the sum of piece i - j: they came in that order, and nobody sorted them."""
    num_ranks, index = seen.mesh.axis_size("tp"), seen.mesh.index(seen.rank, "tp")
    pieces = seen.want.reshape(num_ranks, -1)
    return pieces[(index - np.arange(num_ranks)) % num_ranks].reshape(seen.want.shape)


SUM_UP = Exercise(
    name="sum_up",
    # One row a piece, so that pieces in the wrong place are seen at a glance.
    tensors=lambda rng, mesh: {"x": rng.integers(0, 10, (mesh.axis_size("tp"), mesh.axis_size("tp"), 3)).astype(float)},
    specs={"x": P("tp")},
    plain=lambda tensors: {"y": tensors["x"].sum(0, keepdims=True)},
    results={"y": P()},
    # Four ranks first: on two, "one place to the left" and "one place to the right" cannot be told apart.
    meshes=(Mesh(tp=4), Mesh(tp=3), Mesh(tp=2), Mesh(dp=2, tp=2), Mesh(tp=1)),
    mistakes=(
        Mistake(
            "y",
            "Every sum is right, but it is in the wrong place: the sum of piece j + 1 is where piece j belongs.\n"
            "Which piece does the rank at index i finish? And which piece does the last line assume that it is?",
            _shifted(1),
        ),
        Mistake(
            "y",
            "Every sum is right, but it is in the wrong place: the sum of piece j - 1 is where piece j belongs.\n"
            "You have corrected it twice, and one correction is enough.",
            _shifted(-1),
        ),
        Mistake("y", "The sums are in the order in which they arrived: place k has piece i - k.", _reversed_pieces),
        own_part(
            lambda tensors: {"y": tensors["x"].sum(0, keepdims=True)},
            "y",
            "This is the rank's own tensor: nothing is added to it.",
        ),
        added_up_again("y", "tp", "This is R times too large: it was added up twice."),
    ),
)


def check_sum_up(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Whether `fn` is an all-reduce.

    x [1, R, n]   ->   the sum of every rank's x, of the same shape, on every rank of axis "tp"
    """
    return grade(fn, SUM_UP, framework)


# --- in both directions ----------------------------------------------------------------------------------------------


def _arrival_order(step: int) -> Callable[[Seen], np.ndarray]:
    """The pieces as they come from one neighbour: place k from index i - k (step -1) or i + k (step 1)."""

    def wrong(seen: Seen) -> np.ndarray:
        index, num_ranks = seen.mesh.index(seen.rank, "tp"), seen.mesh.axis_size("tp")
        return seen.want[(index + step * np.arange(num_ranks)) % num_ranks]

    return wrong


def _alternating(seen: Seen) -> np.ndarray:
    """As they come from both sides in turn: i, i - 1, i + 1, i - 2, ..."""
    index, num_ranks = seen.mesh.index(seen.rank, "tp"), seen.mesh.axis_size("tp")
    away = [(hop + 1) // 2 * (-1 if hop % 2 else 1) for hop in range(num_ranks)]
    return seen.want[(index + np.array(away)) % num_ranks]


_IN_ORDER = "All pieces are there, in the order in which they came. Put piece j at place j."

GATHER = Exercise(
    name="gather",
    tensors=lambda rng, mesh: {"x": rng.integers(0, 10, (mesh.axis_size("tp"), 3)).astype(float)},
    specs={"x": P("tp")},
    plain=lambda tensors: {"y": tensors["x"]},
    results={"y": P()},
    meshes=(Mesh(tp=3), Mesh(tp=4), Mesh(tp=5), Mesh(tp=2), Mesh(dp=2, tp=3), Mesh(tp=8), Mesh(tp=1)),
    mistakes=(
        Mistake("y", _IN_ORDER, _arrival_order(-1)),
        Mistake("y", _IN_ORDER, _arrival_order(1)),
        Mistake("y", _IN_ORDER, _alternating),
    ),
)


def check_gather(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Whether `fn` gathers every rank's piece in R // 2 rounds of hops between neighbours, and sends nothing twice.

    x [1, n]   ->   y [R, n], piece j at place j, the same on every rank of axis "tp"
    """
    verdict = grade(fn, GATHER, framework)
    if not verdict.passed:
        return verdict
    for mesh in GATHER.meshes:
        if fault := _fault(_trace(fn, mesh, framework), mesh):
            return fault
    return Verdict(
        True, f"{verdict.text}\nOn R ranks it takes R // 2 rounds of hops, and every piece comes once.", verdict.panels
    )


def _trace(fn: Callable[..., Any], mesh: Mesh, framework: Framework) -> Trace:
    if framework == "torch":
        from tplab.torch import run
    else:
        from tplab.jax import run
    x = GATHER.tensors(np.random.default_rng(0), mesh)["x"].astype(np.float32)
    return run(fn, mesh, x, in_specs=GATHER.specs["x"]).trace


def _fault(trace: Trace, mesh: Mesh) -> Verdict | None:
    """What is wrong with a gather that gives the right result: other means, too many rounds, or too many bytes."""
    num_ranks, index = mesh.axis_size("tp"), [mesh.index(rank, "tp") for rank in mesh.ranks]
    if len(trace.select(kind="collective")):
        ops = ", ".join(sorted({event.op for event in trace.select(kind="collective").events}))
        return Verdict(False, f"gather is right, but {ops} does the work. Build it from ring_shift.")
    for event in trace.select(kind="send").events:
        away = (index[event.peer or 0] - index[event.rank]) % num_ranks
        if away not in (1, num_ranks - 1):
            text = f"gather is right, but on {mesh} rank {event.rank} sends to rank {event.peer}, {away} places on.\n"
            return Verdict(False, f"{text}Only neighbours are linked here: ring_shift by 1 and by -1.")
    came, times = _arrivals(trace, mesh)
    if trace.num_steps > num_ranks // 2:
        around = np.arange(num_ranks)
        up = (around[:, None] - around) % num_ranks
        nearest = np.minimum(up, num_ranks - up)
        text = (
            f"gather is right, but takes {trace.num_steps} rounds of hops on {mesh}, where {num_ranks // 2} will do.\n"
            "Row i, place j: the round in which rank i receives piece j. `start` begins a hop without waiting for it."
        )
        late = came > num_ranks // 2
        return Verdict(False, text, [Panel("yours", came, late), Panel("in the nearer direction", nearest)])
    sent, needed = trace.bytes_sent(), mesh.size * (num_ranks - 1) * 3 * 4  # float32
    if sent > needed:
        text = (
            f"gather is right and quick, but sends {sent:,} bytes on {mesh}, where {needed:,} will do.\n"
            "Row i, place j: how often rank i receives piece j. Once is enough, and it already has its own."
        )
        once = 1 - np.eye(num_ranks)
        return Verdict(False, text, [Panel("yours", times, times > once), Panel("enough", once)])
    return None


def _arrivals(trace: Trace, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """For rank i and the piece of rank j, in the first group of `tp`: the round in which it came, and how often."""
    group = mesh.groups("tp")[0]
    came, times = np.zeros((len(group), len(group))), np.zeros((len(group), len(group)))
    for event in trace.select(kind="receive").events:
        origin = trace.chunks[event.chunk][0] if event.chunk >= 0 else -1
        if event.rank in group and origin in group:
            place = group.index(event.rank), group.index(origin)
            came[place] = min(came[place] or np.inf, event.step + 1)
            times[place] += 1
    return came, times
