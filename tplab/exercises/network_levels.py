"""The exercises of lab 03: a step of hybrid sharding, and a gather in two levels, with few bytes across nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tplab.exercises.check import Answer, Verdict, but, grade
from tplab.exercises.exercise import Exercise, Framework, Seen, Wrong, own_part
from tplab.exercises.slopes import weight
from tplab.exercises.trials import trials
from tplab.exercises.verdict import on, refuse
from tplab.mesh import Mesh
from tplab.sharding import P
from tplab.widgets.matrices import Panel

MESHES = (Mesh(node=2, gpu=3), Mesh(node=3, gpu=2), Mesh(node=2, gpu=2), Mesh(node=2, gpu=1), Mesh(node=1, gpu=3))


# --- a bug to repair: a step of hybrid sharding --------------------------------------------------------------------


def _added_along(axis: str) -> Wrong:
    """The mistake of adding up the gradients of this rank's group along one axis."""

    def wrong(seen: Seen) -> np.ndarray:
        gpus = seen.mesh.axis_size("gpu")
        table, (node, gpu) = seen.tensors["gradient"].reshape(-1, gpus, 2 * seen.mesh.size), divmod(seen.rank, gpus)
        return seen.of(seen.tensors | {"gradient": table[:, gpu] if axis == "node" else table[node]})

    return wrong


HYBRID_STEP = Exercise(
    name="hybrid_step",
    tensors=lambda rng, mesh: {
        "weights": rng.integers(-9, 10, 2 * mesh.size).astype(float),
        "gradient": rng.integers(-9, 10, 2 * mesh.size**2).astype(float),
    },
    specs={"weights": P(), "gradient": P(("node", "gpu"))},
    plain=lambda weights, gradient: weights - 0.1 * gradient.reshape(-1, weights.size).sum(0),
    results={"new": P()},
    reminders={"new": "Is each gradient added up once, and the step 0.1? Are the weights those of its own piece?"},
    is_precise=True,
    meshes=MESHES,
    mistakes={
        "new": {
            "Each rank makes a step with its own gradient.": own_part,
            "The gradients of a node are added up, but not those of other nodes.": _added_along("gpu"),
            "Gradients are added up across the nodes, but not inside a node.": _added_along("node"),
            "The step is made with the mean of the gradients. Here it takes their sum.": lambda seen: seen.of(
                seen.tensors | {"gradient": seen.tensors["gradient"] / seen.mesh.size}
            ),
        }
    },
)


def check_hybrid_step(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` makes a step with the sum of all ranks' gradients, and sends as little as possible across nodes.

    weights [n], the same on every rank; gradient [n], each rank's own   ->   weights - 0.1 * sum of gradients [n]
    """
    return grade(fn, HYBRID_STEP, framework, _sends_little_across)


def _sends_little_across(answer: Answer) -> Verdict:
    for mesh in answer.exercise.meshes:
        nodes, gpus = mesh.axis_size("node"), mesh.axis_size("gpu")
        trace, n = answer.run(mesh).trace, answer.tensors(mesh)["weights"].size
        sent = [trace.bytes_sent(rank=rank) - trace.bytes_sent(rank=rank, axis="gpu") for rank in mesh.ranks]
        table, bound = np.reshape(sent, (nodes, gpus)) / 4, 2 * (nodes - 1) * n / nodes  # numbers in float32
        if (most := table.sum(1).max()) > bound:
            but(
                f"on {mesh} the GPUs of a node send {most:.0f} numbers in messages that may leave it, where "
                f"{bound:.0f} would do.\nOn which axis should the gradient be cut before it crosses the network, and "
                "what adds up the pieces?\nOne row per node, one column per GPU: the numbers that it sends.",
                [Panel("yours", table, table > bound / gpus), Panel("enough", np.full(table.shape, bound / gpus))],
            )
    return answer.says("Each node sends no more to the others than it must.")


# --- your turn: gather on two levels -------------------------------------------------------------------------------


def _gpus_first(seen: Seen) -> np.ndarray:
    """All rows, ordered by GPU and then by node: the order of arrival if nodes are gathered first."""
    nodes, gpus = seen.mesh.axis_size("node"), seen.mesh.axis_size("gpu")
    return seen.want.reshape(nodes, gpus, -1).swapaxes(0, 1).reshape(seen.want.shape)


GATHER_ALL = Exercise(
    name="gather_all",
    tensors=lambda rng, mesh: {"x": rng.integers(0, 10, (mesh.size, 2 + mesh.axis_size("gpu"))).astype(float)},
    specs={"x": P(("node", "gpu"))},
    plain=lambda x: x,
    results={"y": P()},
    is_precise=True,
    meshes=MESHES,
    mistakes={
        "y": {
            "All rows are there, ordered by GPU and then by node. Row r must come from rank r, that is, ordered by "
            "node and then by GPU.": _gpus_first,
            "All rows are there, but in the wrong order. They arrive ordered by GPU and then by node, so `reshape` "
            "them to [GPUs, nodes, n], and not to [nodes, GPUs, n].": lambda seen: _gpus_first(
                replace(seen, want=_gpus_first(seen))
            ),
        },
    },
)


def check_gather_all(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` gathers every rank's row, sends each row only once to each other node and to each GPU of a node,
    and lets gradients through.

    x [1, n]   ->   y [R, n], row r from rank r, the same on every rank of axes "node" and "gpu"
    """
    return grade(fn, GATHER_ALL, framework, _gathers_once)


def _gathers_once(answer: Answer) -> Verdict:
    again = "Each row must reach each GPU once. Which of your messages bring a row that is already there?"
    few_rows(answer, again, added=ADDED)
    return answer.says(f"Every row crosses to each other node once. {_what_flows_back(answer)}")


ADDED = (
    "Something is added up here. If rows are joined by adding them to zeros, the zeros travel too, and then the sums.\n"
    "Nothing has to be added: `all_gather` sends each row once."
)


def few_rows(answer: Answer, again: str, added: str = "", late: str = "") -> None:
    """Refuse a two-level program that sends more rows of x to other nodes, or inside the nodes, than necessary. Inside,
    the total over all ranks counts: in some ways to gather, one of them sends more than its share.

    again   the hint for too many rows inside   added   the hint if rows are added up needlessly
    late    the hint for too many rows to other nodes, if the program rightly begins inside the nodes
    """
    for mesh in answer.exercise.meshes:
        nodes, gpus = mesh.axis_size("node"), mesh.axis_size("gpu")
        trace, row = answer.run(mesh).trace, 4 * answer.tensors(mesh)["x"].shape[1]  # bytes in float32
        inside = np.array([trace.bytes_sent(rank=rank, axis="gpu") for rank in mesh.ranks]) / row
        across = np.array([trace.bytes_sent(rank=rank) for rank in mesh.ranks]) / row - inside
        begins = next((event.axis for event in trace.events if event.kind in ("collective", "send")), "")
        first = late if late and begins == "gpu" else "Which of the two levels should come first?"
        if "," in begins:
            first = "It begins with all ranks at once. Use one level at a time: which of the two should come first?"
        if any(event.dtype == "float64" for event in trace.events):
            first = again = "It sends 8 bytes per number, and those of x take 4."
        for sent, enough, is_inside, where, why in (
            (across, nodes - 1, False, "in messages that may leave its node", first),
            (inside, (gpus - 1) * nodes, True, "inside its node", again),
        ):
            if (sent.sum() <= enough * mesh.size) if is_inside else nodes == 1 or sent.max() <= enough:
                continue
            if added and any(event.reduction and (event.axis == "gpu") == is_inside for event in trace.events):
                why = added
            table = sent.reshape(nodes, gpus)
            but(
                f"on {mesh} a GPU sends {sent.max():.0f} rows {where}, where {enough} would do.\n{why}\nOne row per "
                f"node, one column per GPU: the rows that it sends {where}.",
                [Panel("yours", table, table > enough), Panel("enough", np.full(table.shape, enough))],
            )


def _what_flows_back(answer: Answer) -> str:
    """A sentence on the gradient that a row receives, true on every mesh. Refuses a gather that lets none through, or
    leaves damage behind.

    Which gradient is right depends on the use of the rows: `all_gather` adds up all ranks' gradients for a row, and
    `gather_from` takes its owner's. Both are accepted.
    """
    said = list(GRADIENTS)
    for mesh in GATHER_ALL.meshes:
        tensors = answer.tensors(mesh)
        with on(mesh):
            *_, trial = trials(answer.framework, answer.fn, replace(GATHER_ALL, gradients=("x",)), mesh, tensors)
        if trial.damage:
            but(trial.damage)
        once, got = weight(tensors["x"]), np.concatenate([found["dx"] for found in trial.found])
        fits = [text for text, times in GRADIENTS.items() if np.allclose(got, times(mesh) * once, rtol=0, atol=1e-4)]
        if not fits:
            refuse(
                f": the rows are right, but the gradient of x is not, on {mesh}. Is something cut off on the way, by "
                "`detach` or `stop_gradient`?\nOne row per rank: the gradient of a loss that weights every entry of y.",
                [Panel("yours, dx", got), Panel("right", mesh.size * once)],
            )
        said = [text for text in said if text in fits]
    if not said:
        but("it adds up gradients over other ranks on one mesh than on another.")
    return said[0]


GRADIENTS: dict[str, Callable[[Mesh], int]] = {
    "The gradient of a row is its owner's: right if all ranks then do the same work.": lambda _: 1,
    "The gradient of a row is the sum of all ranks' gradients for it: right if each rank then does different work.": (
        lambda mesh: mesh.size
    ),
    "The gradient of a row is the sum of those along gpu, but not along node.": lambda mesh: mesh.axis_size("gpu"),
    "The gradient of a row is the sum of those along node, but not along gpu.": lambda mesh: mesh.axis_size("node"),
}
"""A sentence on each possible gradient of a row -> the number of ranks whose gradients it adds up."""
