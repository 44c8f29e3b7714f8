"""The exercise of lab 03: gather in two levels, with few bytes across nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import Verdict, grade
from tplab.exercises.exercise import Exercise, Framework, Mistake, Seen
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


def check_gather_all(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Whether `fn` gathers every rank's row, and sends each row only once to each other node.

    x [1, n]   ->   y [R, n], row r from rank r, the same on every rank of axes "node" and "gpu"
    """
    verdict = grade(fn, GATHER_ALL, framework)
    if not verdict.passed:
        return verdict
    for mesh in GATHER_ALL.meshes:
        if fault := _too_much_across(_trace(fn, mesh, framework), mesh):
            return fault
    return Verdict(True, f"{verdict.text}\nEvery row crosses to each other node once.", verdict.panels)


def _trace(fn: Callable[..., Any], mesh: Mesh, framework: Framework) -> Trace:
    if framework == "torch":
        from tplab.torch import run
    else:
        from tplab.jax import run
    x = GATHER_ALL.tensors(np.random.default_rng(0), mesh)["x"].astype(np.float32)
    return run(fn, mesh, x, in_specs=GATHER_ALL.specs["x"]).trace


def _too_much_across(trace: Trace, mesh: Mesh) -> Verdict | None:
    """What is wrong with a gather that returns the right rows but sends more than it must from node to node."""
    if mesh.axis_size("node") == 1:
        return None
    row = 3 * 4  # bytes of three float32
    across = [(trace.bytes_sent(rank=rank) - trace.bytes_sent(rank=rank, axis="gpu")) / row for rank in mesh.ranks]
    enough = mesh.axis_size("node") - 1
    if max(across) <= enough:
        return None
    shape = mesh.axis_size("node"), mesh.axis_size("gpu")
    sent = np.array(across).reshape(shape)
    text = (
        f"gather_all: the numbers are right, but on {mesh} a GPU sends {max(across):.0f} rows over axes other than "
        f"gpu, where {enough} would do.\nOne row per node, one column per GPU: the rows that it sends to other nodes. "
        "Which of the two levels should come first?"
    )
    return Verdict(False, text, [Panel("yours", sent, sent > enough), Panel("enough", np.full(shape, enough))])
