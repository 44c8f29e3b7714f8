"""The exercise of lab 03: gather in two levels, with few bytes across nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tplab.exercises.check import Verdict, grade, raised
from tplab.exercises.exercise import Exercise, Framework, Mistake, Seen
from tplab.exercises.trials import run_of, trials, weight
from tplab.mesh import Mesh
from tplab.sharding import P
from tplab.trace.trace import Trace
from tplab.widgets.matrices import Panel


def _gpus_first(seen: Seen) -> np.ndarray:
    """All rows, ordered by GPU and then by node: the order of arrival if nodes are gathered first."""
    nodes, gpus = seen.mesh.axis_size("node"), seen.mesh.axis_size("gpu")
    return seen.want.reshape(nodes, gpus, -1).swapaxes(0, 1).reshape(seen.want.shape)


GATHER_ALL = Exercise(
    name="gather_all",
    tensors=lambda rng, mesh: {"x": rng.integers(0, 10, (mesh.size, 3)).astype(float)},
    specs={"x": P(("node", "gpu"))},
    plain=lambda tensors: {"y": tensors["x"]},
    results={"y": P()},
    is_precise=True,
    meshes=(Mesh(node=2, gpu=3), Mesh(node=3, gpu=2), Mesh(node=2, gpu=2), Mesh(node=2, gpu=1), Mesh(node=1, gpu=3)),
    mistakes=(
        Mistake(
            "y",
            "All rows are there, ordered by GPU and then by node. Row r must come from rank r, that is, ordered by "
            "node and then by GPU.",
            _gpus_first,
        ),
    ),
)


ROW = 3 * 4  # bytes of three float32


def check_gather_all(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Whether `fn` gathers every rank's row, sends each row only once to each other node and to each GPU of a node, and
    lets gradients through.

    x [1, n]   ->   y [R, n], row r from rank r, the same on every rank of axes "node" and "gpu"
    """
    verdict = grade(fn, GATHER_ALL, framework)
    if not verdict.passed:
        return verdict
    for mesh in GATHER_ALL.meshes:
        trace = _trace(fn, mesh, framework)
        if fault := _too_much_across(trace, mesh) or _too_much_inside(trace, mesh):
            return fault
    if fault := _cut_off(fn, framework):
        return fault
    return Verdict(True, f"{verdict.text}\nEvery row crosses to each other node once.", verdict.panels)


def _trace(fn: Callable[..., Any], mesh: Mesh, framework: Framework) -> Trace:
    x = GATHER_ALL.tensors(np.random.default_rng(0), mesh)["x"].astype(np.float32)
    return run_of(framework)(fn, mesh, x, in_specs=GATHER_ALL.specs["x"]).trace


def _too_much_across(trace: Trace, mesh: Mesh) -> Verdict | None:
    """What is wrong with a gather that returns the right rows but sends more than it must from node to node."""
    if mesh.axis_size("node") == 1:
        return None
    across = [(trace.bytes_sent(rank=rank) - trace.bytes_sent(rank=rank, axis="gpu")) / ROW for rank in mesh.ranks]
    enough = mesh.axis_size("node") - 1
    if max(across) <= enough:
        return None
    hint = ADDED if _adds(trace, inside=False) else "Which of the two levels should come first?"
    return _wasteful(mesh, across, enough, "over axes other than gpu", "to other nodes", hint)


def _too_much_inside(trace: Trace, mesh: Mesh) -> Verdict | None:
    """The same for what it sends from GPU to GPU of a node. All ranks together count: in some ways to gather, one of
    them sends more than its share."""
    inside = [trace.bytes_sent(rank=rank, axis="gpu") / ROW for rank in mesh.ranks]
    enough = (mesh.axis_size("gpu") - 1) * mesh.axis_size("node")
    if sum(inside) <= enough * mesh.size:
        return None
    again = "Each row must reach each GPU once. Which of your messages bring a row that is already there?"
    hint = ADDED if _adds(trace, inside=True) else again
    return _wasteful(mesh, inside, enough, "inside its node", "inside its node", hint)


ADDED = (
    "You join the rows by adding them to zeros, so the zeros travel too, and then the sums.\n"
    "Nothing has to be added here: `all_gather` sends each row once."
)


def _adds(trace: Trace, inside: bool) -> bool:
    """Whether something is added up inside the nodes, or across them."""
    return any(event.reduction and (event.axis == "gpu") == inside for event in trace.events)


def _wasteful(mesh: Mesh, sent: list[float], enough: int, along: str, where: str, hint: str) -> Verdict:
    table = np.array(sent).reshape(mesh.axis_size("node"), mesh.axis_size("gpu"))
    text = (
        f"gather_all: the numbers are right, but on {mesh} a GPU sends {max(sent):.0f} rows {along}, where {enough} "
        f"would do.\n{hint}\nOne row per node, one column per GPU: the rows that it sends {where}."
    )
    return Verdict(False, text, [Panel("yours", table, table > enough), Panel("enough", np.full(table.shape, enough))])


def _cut_off(fn: Callable[..., Any], framework: Framework) -> Verdict | None:
    """What is wrong with a gather that returns the right rows but lets no gradient through, or leaves damage behind.

    How often the gradient counts depends on who uses the rows: `all_gather` adds up what all ranks say of a row, and
    `gather_from` takes what its owner says. Both are right.
    """
    mesh = GATHER_ALL.meshes[0]
    tensors = GATHER_ALL.tensors(np.random.default_rng(0), mesh)
    try:
        *_, trial = trials(framework, fn, replace(GATHER_ALL, gradients=("x",)), mesh, tensors)
    except Exception as error:
        return Verdict(False, raised(error, fn, GATHER_ALL.name, mesh))
    if trial.damage:
        return Verdict(False, f"gather_all: the numbers are right, but {trial.damage}")
    once, got = weight(tensors["x"]), np.concatenate([found["dx"] for found in trial.found])
    copies = 1, mesh.axis_size("node"), mesh.axis_size("gpu"), mesh.size
    if any(np.allclose(got, num * once, rtol=0, atol=1e-4) for num in copies):
        return None
    text = (
        f"gather_all: the rows are right, but the gradient of x is not, on {mesh}. Is something cut off on the way, "
        "by `detach` or `stop_gradient`?\nOne row per rank: the gradient of a loss that weights every entry of y."
    )
    return Verdict(False, text, [Panel("yours, dx", got), Panel("right", mesh.size * once)])
