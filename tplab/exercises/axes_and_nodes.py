"""The exercises of lab 19: average over the right group, and find the mesh that sends the fewest bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import Verdict, grade
from tplab.exercises.exercise import Exercise, Framework, added_up_again, bytes_of_a_sum, own_part
from tplab.exercises.verdict import check, on, refuse, right
from tplab.mesh import Mesh
from tplab.sharding import P
from tplab.widgets.matrices import Panel

# --- the bug to repair -----------------------------------------------------------------------------------------------


ROWS = 12
"""Rows of a rank's gradient, divisible by 2, 3 and 4."""


AVERAGE = Exercise(
    name="average",
    # The gradients of all samples of the batch, stacked; one column per piece of the weight.
    tensors=lambda rng, mesh: {
        "gradient": rng.integers(0, 10, (ROWS * mesh.axis_size("dp"), mesh.axis_size("tp"))).astype(float)
    },
    specs={"gradient": P("dp", "tp")},
    plain=lambda gradient: gradient.reshape(-1, ROWS, gradient.shape[1]).mean(0),
    results={"mean": P(None, "tp")},
    fewest=lambda mesh, tensors: bytes_of_a_sum(tensors["gradient"][:ROWS, :1], mesh, "dp"),
    meshes=(Mesh(dp=2, tp=3), Mesh(dp=4, tp=2), Mesh(dp=3, tp=1), Mesh(dp=1, tp=4)),
    mistakes={
        "mean": {
            "It is too small by a factor: the sum runs over the ranks of dp, but it is divided by the total number of "
            "ranks.\nDivide by the size of the group that the sum runs over.": lambda seen: (
                seen.want / seen.mesh.axis_size("tp")
            ),
            "This is the mean over all ranks. Along tp, ranks have different pieces of the gradient, "
            "and pieces must not be mixed.": (lambda seen: seen.of(seen.tensors).mean(1, keepdims=True)),
            "This is the mean over tp. Along tp, ranks have different pieces of the gradient; the samples differ along "
            "dp.": (lambda seen: seen.part(seen.tensors["gradient"]).mean(1, keepdims=True)),
            "This is the rank's own gradient: nothing is added to it.": own_part,
            "This is the sum over dp. The mean is the sum divided by the size of the group.": added_up_again,
        },
    },
    reminders={
        "mean": "Add up the gradients over dp and over nothing else. Divide once, by the number of ranks along dp "
        "(op='mean' does)."
    },
)


def check_average(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` averages gradients over "dp", and over nothing else.

    gradient [..], this rank's   ->   its mean over the ranks of axis "dp"; along "tp", ranks have different pieces
    """
    return grade(fn, AVERAGE, framework)


# --- the best mesh ---------------------------------------------------------------------------------------------------

SIZES = (
    (32_768, 4096, 16_384, 16),
    (2**12, 4096, 16_384, 16),
    (2**18, 4096, 16_384, 16),
    (2**14, 1000, 12_288, 12),
    (96, 8, 48, 6),
    (14, 8, 4, 8),  # a batch that 4 does not divide
    (8, 512, 9, 4),  # a hidden width that neither 2 nor 4 divides
    (2**16, 8192, 28_672, 64),
    (24, 8, 8, 4),  # the mesh whose two terms are most similar sends a third more
    (122_880, 4096, 16_384, 16),  # the best tp would be 1.46: 1 is nearer, and 2 sends less
    (2176, 4096, 16_384, 16),  # the same of dp
    (10, 10, 10, 1),
)
"""(batch, width, hidden, ranks) of the cases."""


def sent(batch: int, width: int, hidden: int, dp: int, tp: int) -> dict[str, float]:
    """The elements that a rank sends in a step: two all-reduces of activations along tp, two of gradients along dp."""
    return {
        "activations, tp": 4 * (tp - 1) / tp * batch * width / dp,
        "gradients, dp": 4 * (dp - 1) / dp * width * hidden / tp,
    }


def _meshes(batch: int, hidden: int, ranks: int) -> list[tuple[int, int]]:
    pairs = [(dp, ranks // dp) for dp in range(1, ranks + 1) if ranks % dp == 0]
    return [(dp, tp) for dp, tp in pairs if batch % dp == 0 and hidden % tp == 0]


@check("best_mesh")
def check_best_mesh(fn: Callable[..., Any]) -> Verdict:
    """Check that `fn(batch, width, hidden, ranks)` returns a (dp, tp) with which a rank sends the fewest bytes."""
    for case in SIZES:
        batch, width, hidden, ranks = case
        where = f"for batch {batch:,}, width {width:,}, hidden width {hidden:,}, {ranks} ranks"
        with on(where):
            given = fn(*case)
        if fault := _fault(given, case):
            refuse(f" returns {given!r} {where}.\n{fault}", _panels(case, given))
    text = " finds a mesh that sends the fewest bytes, for every size tried.\n"
    return right(f"{text}One row per mesh, one column for activations and one for gradients.", _panels(SIZES[0]))


def _is_pair(given: Any) -> bool:
    whole = (int, np.integer)
    return (
        isinstance(given, tuple | list)
        and len(given) == 2
        and all(isinstance(number, whole) and not isinstance(number, bool) for number in given)
    )


def _fault(given: Any, case: tuple[int, int, int, int]) -> str | None:
    """The fault in an answer, in words; None if it is right."""
    batch, width, hidden, ranks = case
    if not _is_pair(given):
        return "It must be two whole numbers, (dp, tp)."
    dp, tp = (int(n) for n in given)
    if dp * tp != ranks:
        return f"dp times tp must be {ranks}."
    allowed = _meshes(batch, hidden, ranks)
    if (dp, tp) not in allowed:
        return f"{dp} must divide the batch of {batch:,}, and {tp} the hidden width of {hidden:,}."
    total = {mesh: sum(sent(batch, width, hidden, *mesh).values()) for mesh in allowed}
    mine, least = total[dp, tp], min(total.values()) * (1 + 1e-9)
    if mine <= least:
        return None
    parts = sent(batch, width, hidden, dp, tp)
    more, turned = max(parts, key=parts.__getitem__), total.get((tp, dp), mine) <= least
    exchanged = f" With dp and tp exchanged, ({tp}, {dp}), it would send the fewest." if turned else ""
    return f"Another mesh sends {1 - least / mine:.0%} less. In yours, most bytes are {more}.{exchanged}"


def _panels(case: tuple[int, int, int, int], given: Any = None) -> list[Panel]:
    """The activations and gradients that a rank sends on each possible mesh, in percent of the least total. The mesh
    that the learner chose is marked."""
    batch, width, hidden, ranks = case
    meshes = _meshes(batch, hidden, ranks)
    table = np.array([list(sent(batch, width, hidden, *mesh).values()) for mesh in meshes])
    least = table.sum(1).min()
    if not least:
        return []
    marked = np.array([[_is_pair(given) and tuple(given) == mesh] * 2 for mesh in meshes])
    title = ", ".join(f"{dp} × {tp}" for dp, tp in meshes)
    return [Panel(f"{title}: in % of the least", np.round(100 * table / least), marked)]
