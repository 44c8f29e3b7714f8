"""The bug of lab 02: an all-reduce whose sums end in the wrong place. Its puzzles are in `collective_puzzles`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import Answer, Verdict, but, grade
from tplab.exercises.exercise import RING, Exercise, Framework, Mistakes, Seen, bytes_of_a_sum, own_part
from tplab.mesh import Mesh
from tplab.sharding import P

# --- the bug to repair ---------------------------------------------------------------------------------------------


def _shifted(places: int, hint: str) -> Mistakes:
    """The mistake of shifting every piece too far to the left by this many places."""

    def wrong(seen: Seen) -> np.ndarray:
        pieces = seen.want.reshape(seen.size, -1)
        return np.roll(pieces, -places, axis=0).reshape(seen.want.shape)

    where = f"the sum of piece j {places:+} is where piece j belongs".replace("+", "+ ").replace("-", "- ")
    return {f"Every sum is right, but it is in the wrong place: {where}.\n{hint}": wrong}


def _reversed_pieces(seen: Seen) -> np.ndarray:
    """Place j holds the sum of piece i - j: the pieces arrived in that order and were not sorted."""
    pieces = seen.want.reshape(seen.size, -1)
    return pieces[(seen.index - np.arange(seen.size)) % seen.size].reshape(seen.want.shape)


PIECE_BY_PIECE = (
    "A rank needs only 2(R - 1) messages of one piece: R - 1 to add up, and R - 1 to pass on what is finished."
)
WHICH = "Which piece does the rank at index i finish? And which piece does the last line assume that it is?"

SUM_UP = Exercise(
    name="sum_up",
    # One row per piece, so that a piece in the wrong place is visible at a glance.
    tensors=lambda rng, mesh: {"x": rng.integers(0, 10, (mesh.axis_size("tp"), mesh.axis_size("tp"), 3)).astype(float)},
    specs={"x": P("tp")},
    plain=lambda x: x.sum(0, keepdims=True),
    results={"y": P()},
    # Four ranks first: on two, "one place to the left" and "one place to the right" are the same.
    meshes=(Mesh(tp=4), Mesh(tp=3), Mesh(tp=2), Mesh(dp=2, tp=2), Mesh(tp=1)),
    mistakes={
        "y": {
            **_shifted(1, WHICH),
            **_shifted(-1, "If you have corrected both halves: one correction is enough."),
            **_shifted(2, WHICH),
            **_shifted(-2, WHICH),
            "The sums are in the order in which they arrived: place k has piece i - k.": _reversed_pieces,
            "This is the rank's own tensor: nothing is added to it.": own_part,
        },
    },
    by_hand="`ring_shift`, as above",
    not_with=RING,
    fewest=lambda mesh, tensors: bytes_of_a_sum(tensors["x"][0], mesh),
    excess=PIECE_BY_PIECE,
    is_precise=True,
)


def check_sum_up(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` is an all-reduce made of hops, in which each rank adds up one piece.

    x [1, R, n]   ->   the sum of every rank's x, of the same shape, on every rank of axis "tp"
    """
    return grade(fn, SUM_UP, framework, _shared)


def _shared(answer: Answer) -> Verdict:
    """Refuse a rank that sends more than the others. The total does not show that: a star sends as much as a ring."""
    for trace in answer.traces:
        sent = [trace.bytes_sent(rank=rank) for rank in trace.mesh.ranks]
        if max(sent) > sum(sent) / len(sent):
            busiest, share = sent.index(max(sent)), sum(sent) // len(sent)
            text = f"on {trace.mesh} rank {busiest} sends {max(sent):,} bytes, where in a ring each sends {share:,}"
            but(f"{text}.\n{PIECE_BY_PIECE}")
    return answer.verdict
