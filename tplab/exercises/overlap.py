"""The exercises of lab 08: layers that must be right and must hide what they send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tplab.cost.kernels import matmul_flops
from tplab.exercises.check import Answer, Verdict, grade
from tplab.exercises.drawn import Timed
from tplab.exercises.exercise import Exercise, Seen
from tplab.exercises.slopes import weight
from tplab.exercises.verdict import Refused, on
from tplab.mesh import Mesh
from tplab.sharding import P
from tplab.trace.overlap import overlap
from tplab.trace.trace import Trace

FEATURES, ROWS, COLUMNS = P(None, "tp"), P("tp"), P(None, "tp")
MESHES = (Mesh(tp=2), Mesh(tp=3), Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(tp=1))
TOKENS, WIDTH, NUM_RANKS = 8192, 8192, 8
ENOUGH = 0.9
"""The fraction of the hideable communication that must be hidden, on eight ranks of a modelled H100 node."""

MOST_WORK = 1.2
"""The most that a rank may compute, as a multiple of its own matmul; additions are small compared with it."""


def _pieces_times(seen: Seen, columns: Callable[[int], int]) -> np.ndarray:
    """The sum over k of the k-th piece to arrive, from rank i - k, times the columns for rank `columns(k)`."""
    pieces, parts = seen.parts(seen.tensors["x"], 1), seen.parts(seen.own["w"], 1)
    return np.sum([pieces[seen.index - k] @ parts[columns(k) % seen.size].T for k in range(seen.size)], 0)


def _last_twice(seen: Seen) -> np.ndarray:
    last = (seen.index + seen.size // 2) % seen.size
    piece, part = (seen.parts(array, 1)[last] for array in (seen.tensors["x"], seen.own["w"]))
    return seen.want + (seen.size % 2 == 0) * (piece @ part.T)


def _sum_of_terms(way: int, part: int | None, seen: Seen) -> np.ndarray:
    """A rank's sum if each rank k places before it, on a ring in direction `way`, adds its term for the rank k places
    before itself; or, with `part`, for the rank `part` places after itself."""
    x, w = (seen.parts(seen.tensors[key], 1) for key in ("x", "w"))
    total = np.zeros(())
    for k in range(seen.size):
        rank = (seen.index - way * k) % seen.size
        to = rank - way * k if part is None else rank + part
        total = total + x[rank] @ seen.parts(w[rank])[to % seen.size].T
    return total


GATHER = Exercise(
    name="gather_product",
    tensors=lambda rng, mesh: {
        "x": rng.integers(-3, 4, (3, 2 * mesh.axis_size("tp"))).astype(float),
        "w": rng.integers(-3, 4, (4 * mesh.axis_size("tp"), 2 * mesh.axis_size("tp"))).astype(float),
    },
    specs={"x": FEATURES, "w": ROWS},
    plain=lambda x, w: x @ w.mT,
    results={"y": FEATURES},
    gradients=("x", "w"),
    is_precise=True,
    tolerance=1e-5,  # float32 will do
    not_with=("all_gather_matmul",),
    mistakes={
        "y": {
            "The k-th piece to arrive comes from rank i - k. Multiply it by the columns of w for that "
            "rank.": lambda seen: _pieces_times(seen, lambda k: k),
            "This is the product of the rank's own piece alone. Add the products of the pieces that "
            "arrive.": lambda seen: seen.own["x"] @ seen.part(seen.own["w"], 1).T,
            "Each piece is multiplied by the columns of w for the piece that comes from the other side. From which "
            "rank does it come?": lambda seen: _pieces_times(seen, lambda k: seen.index + k),
            "Where the number of ranks is even, both ways bring the same last piece, and its product is added "
            "twice.": _last_twice,
        },
    },
    meshes=MESHES,
)

SCATTER = replace(
    GATHER,
    name="product_scatter",
    specs={"x": FEATURES, "w": COLUMNS},
    not_with=("matmul_reduce_scatter",),
    mistakes={
        "y": {
            "This is the rank's own term alone. Add it to the sum that arrives, and pass that on.": lambda seen: (
                seen.part(seen.own["x"] @ seen.own["w"].T, 1)
            ),
            "This is the sum for the next rank. Which part must a rank add last, so that its own sum ends with "
            "it?": lambda seen: seen.parts(seen.of(seen.tensors), 1)[(seen.index + 1) % seen.size],
            "Each sum adds up terms for different ranks. On which rank does it end, and which rows of w are that "
            "rank's?": tuple(partial(_sum_of_terms, way, part) for way in (1, -1) for part in (None, -1, 1, 0)),
        },
        "dx": {
            "This is what comes back from this rank's own part of y alone. The other ranks' parts depend on its x, "
            "too.": lambda seen: (
                seen.part(weight(seen.tensors["x"] @ seen.tensors["w"].T), 1) @ seen.part(seen.own["w"])
            ),
        },
    },
)


def check_gather_product(fn: Callable[..., Any]) -> Verdict:
    """Check that `fn`, in torch, computes all_gather(x) @ w.T and hides its messages. Remarks on a single direction.

    x [T, D/tp]   w [F/tp, D]   ->   y [T, F/tp]
    """
    return _graded(fn, GATHER, _way)


def _way(trace: Trace) -> str:
    """A remark on pieces that skip ranks, that all travel in one direction, or that no rank needs."""
    peers = {event.peer for event in trace.events if event.rank == 0 and event.kind == "send"}
    way = FAR if not peers <= {1, NUM_RANKS - 1} else ONE_WAY if len(peers) < 2 else ""
    if (pieces := _pieces(trace)) > (NUM_RANKS if len(peers) == 2 else NUM_RANKS - 1):  # both directions may meet
        way += (
            f"\nEach of {NUM_RANKS} ranks sends {pieces:g} pieces, and {NUM_RANKS - 1} would do: is each of them used?"
        )
    return way.lstrip()


def _pieces(trace: Trace) -> float:
    """How many pieces a rank sends, of x or of the sum, in bfloat16."""
    return trace.bytes_sent(rank=0) / (2 * TOKENS * WIDTH // NUM_RANKS)


ONE_WAY = (
    "All pieces now travel in one direction, in nearly twice as many hops. Where a rank has a link to each neighbour,\n"
    "as on a TPU, that takes longer: can you keep both directions?"
)


FAR = (
    "Your pieces go straight to ranks that are several places away, as links between all ranks of a node allow. Where "
    "a\nrank has links to its neighbours alone, as on a TPU, each such message takes several hops: can you pass pieces "
    "on?"
)


def check_product_scatter(fn: Callable[..., Any]) -> Verdict:
    """Check that `fn`, in torch, computes reduce_scatter(x @ w.T) and hides its messages. Remarks on a needless hop.

    x [T, D/tp]   w [F, D/tp]   ->   y [T, F/tp]
    """
    return _graded(fn, SCATTER, _needless_hop)


def _needless_hop(trace: Trace) -> str:
    pieces = _pieces(trace)
    text = f"Each of {NUM_RANKS} ranks sends {pieces:g} pieces of the sum, and {NUM_RANKS - 1} would do."
    return f"{text} Does the first one hold anything?" if pieces > NUM_RANKS - 1 else ""


def _graded(fn: Callable[..., Any], exercise: Exercise, remark: Callable[[Trace], str]) -> Verdict:
    def hidden_at_a_real_size(answer: Answer) -> Verdict:
        with on(Mesh(tp=NUM_RANKS)):
            trace = traced(fn, exercise)
        hidden = overlap(trace).share_of_possible
        flops = max(trace.select(rank=rank, kind="compute").column("flops").sum() for rank in range(NUM_RANKS))
        times = flops * NUM_RANKS / matmul_flops(TOKENS, 4 * WIDTH, WIDTH)
        if hidden < ENOUGH:
            wrong = (
                f"it hides {hidden:.0%} of the communication that it could hide.\nBelow is your layer with {TOKENS:,} "
                "tokens on a modelled H100 node. What does a rank compute\nwhile each message travels? Matmuls before "
                "or after it do not hide it."
            )
        elif times > MOST_WORK:
            wrong = f"a rank computes {times:.1f} times as much as in one matmul.\n"
            wrong += "Behind each hop, multiply only one piece."
        else:
            text = (
                f"{answer.verdict.text}\n{hidden:.0%} of the communication that can be hidden is hidden. Below is your "
                f"layer with {TOKENS:,} tokens\non a modelled H100 node."
            )
            return Timed(True, f"{text}\n{remark(trace)}".rstrip(), trace)
        raise Refused(Timed(False, f": the numbers are right, but {wrong}", trace))

    return grade(fn, replace(exercise, name=getattr(fn, "__name__", exercise.name)), then=hidden_at_a_real_size)


def traced(fn: Callable[..., Any], exercise: Exercise) -> Trace:
    """The trace of `fn` at a real size, on meta tensors, which have a shape but no numbers."""
    import torch

    from tplab.torch import run

    inputs, outputs = (WIDTH, 4 * WIDTH) if exercise is GATHER else (4 * WIDTH, WIDTH)  # the two layers of an MLP
    x = torch.empty(TOKENS, inputs, dtype=torch.bfloat16, device="meta")
    w = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    specs = tuple(exercise.specs.values())

    def on_meta(x: Any, w: Any) -> Any:
        with torch.device("meta"):  # for the tensors that `fn` creates
            return fn(x, w)

    return run(on_meta, Mesh(tp=NUM_RANKS), x, w, in_specs=specs, cluster="h100").trace
