"""The exercises of lab 12: a pipeline that stores its outputs in the wrong rows, and one that goes around twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tplab.exercises.check import Answer, Verdict, but, grade
from tplab.exercises.exercise import Exercise, Mistakes, Seen, Wrong, added_up_again
from tplab.mesh import Mesh
from tplab.sharding import P
from tplab.units import counted

MICROBATCHES, ROWS, WIDTH = 5, 1, 3
MESHES = (Mesh(pp=2), Mesh(pp=3), Mesh(pp=4), Mesh(pp=1))

# --- the bug: outputs in the wrong rows ------------------------------------------------------------------------------


def _stage(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The lab's stage. It does not map 0 to 0, so that a rank's outputs before its first microbatch are visible."""
    return np.tanh(x @ w + 0.1)


def _plain(w: np.ndarray, xs: np.ndarray) -> np.ndarray:
    """... stage(w[1], stage(w[0], xs)) ..."""
    for place in range(w.shape[-3]):
        xs = _stage(w[..., place, :, :], xs)
    return xs


def _of_zeros(seen: Seen) -> np.ndarray:
    """The last rank's outputs before the first microbatch arrives: zeros that have passed through 1, 2, ... stages."""
    w, zeros = seen.tensors["w"], np.zeros_like(seen.want)[: len(seen.tensors["w"]) - 1]
    return np.array([_plain(w[len(w) - 1 - tick :], one) for tick, one in enumerate(zeros)]).reshape(zeros.shape)


def _of_ticks(rows: Callable[[np.ndarray, int], np.ndarray]) -> Wrong:
    """rows(the last rank's outputs in all ticks, the ticks before its first microbatch)."""

    def wrong(seen: Seen) -> np.ndarray:
        zeros = _of_zeros(seen)
        return rows(np.concatenate([zeros, seen.want]), len(zeros))

    return wrong


def _of_one_rank(seen: Seen, rank: int) -> np.ndarray:
    """A rank's outputs in the last rank's ticks: rank r is `last - r` microbatches ahead, then repeats the last."""
    ahead = seen.size - 1 - rank
    return _plain(seen.tensors["w"][: rank + 1], seen.tensors["xs"])[
        np.minimum(np.arange(MICROBATCHES) + ahead, MICROBATCHES - 1)
    ]


NOT_SHARED: Mistakes = {
    "Only the last rank has the outputs. All ranks should return them.": (
        lambda seen: seen.want * (seen.rank == seen.size - 1)
    )
}
OFTEN: Mistakes = {
    "This is R times the right gradient. JAX cannot know that what you return is the same on every rank, as after\n"
    "`all_gather`, so it adds up the gradients of all R copies. It knows after `all_reduce`: there, let all ranks but\n"
    "one add zeros.": added_up_again,
}


OF_THE_FIRST = "These are the first rank's outputs, and not the last's."
ALL_ADDED = "Every rank has added its own outputs. Only those of the last rank are wanted."
EACH_ITS_OWN = "Every rank returns its own outputs. All ranks should return those of the last rank."
PIPELINE = Exercise(
    name="my_pipeline",
    tensors=lambda rng, mesh: {
        "w": rng.integers(-3, 4, (mesh.axis_size("pp"), WIDTH, WIDTH)) / 4,
        "xs": rng.integers(-2, 3, (MICROBATCHES, ROWS, WIDTH)).astype(float),
    },
    specs={"w": P("pp"), "xs": P()},
    plain=_plain,
    results={"ys": P()},
    gradients=("w",),
    mistakes={
        "ys": {
            "These are the last rank's outputs from tick 0 on. In its first ticks no microbatch has reached it yet,\n"
            "so it computes with zeros. In which tick does microbatch 0 reach the last rank?": _of_ticks(
                lambda ticks, early: ticks[:MICROBATCHES]
            ),
            "The last row is right, because the last microbatch is written into it last. The others are not. In which\n"
            "tick does microbatch 0 reach the last rank, and in which row does it belong?": _of_ticks(
                lambda ticks, early: np.concatenate([ticks[: MICROBATCHES - 1], ticks[-1:]])
            ),
            "Your rows are shifted in the wrong direction.": _of_ticks(
                lambda ticks, early: np.concatenate([0 * ticks[:early], ticks])[:MICROBATCHES]
            ),
            "In its first ticks, the last rank computes with zeros. These outputs were added to the last "
            "rows.": _of_ticks(
                lambda ticks, early: np.concatenate([ticks[early:MICROBATCHES], ticks[MICROBATCHES:] + ticks[:early]])
            ),
            "It begins one tick too late: microbatch 0 is missing.": _of_ticks(
                lambda ticks, early: np.concatenate([ticks[early + 1 :], ticks[-1:]])
            ),
            "These are the right outputs in the wrong rows. In which tick is each computed?": (
                _of_ticks(lambda ticks, early: np.roll(ticks[early:], -1, 0)),
                _of_ticks(lambda ticks, early: np.roll(ticks[early:], early, 0)),
            ),
            "The last rows are missing. In which tick does the last rank finish?": _of_ticks(
                lambda ticks, early: np.concatenate([ticks[early:MICROBATCHES], ticks[:early]])
            ),
            OF_THE_FIRST: lambda seen: _of_one_rank(seen, 0),
            ALL_ADDED: lambda seen: np.sum([_of_one_rank(seen, rank) for rank in seen.mesh.ranks], axis=0),
            EACH_ITS_OWN: lambda seen: _of_one_rank(seen, seen.rank),
            **NOT_SHARED,
            "All outputs are zero: do you take them from the rank that has them?": lambda s: 0 * s.want,
        },
        "dw": OFTEN,
    },
    meshes=MESHES,
)


def check_pipeline(fn: Callable[..., Any]) -> Verdict:
    """Check that `fn(w, xs)`, in JAX, sends microbatches through the stages of all ranks, tanh(x @ w[0] + 0.1).

    w [1, D, D], this rank's own   xs [m, B, D]   ->   [m, B, D], the same on every rank of "pp"
    """
    hint = "In which tick does the last microbatch leave the last rank?"
    too_much = "Compute only the stage of the microbatch of this tick."
    return _typed(grade(fn, PIPELINE, "jax", lambda answer: _in_ticks(answer, MICROBATCHES + 4 - 2, hint, too_much)))


def _typed(verdict: Verdict) -> Verdict:
    """The verdict, with a shorter text if JAX rejected the initial value of a loop."""
    if "manual ax" in verdict.text and "do not match" in verdict.text:
        verdict.text = (
            f"{verdict.text.partition(':')[0]}: a loop begins with a value that is the same on every rank, and goes on "
            "with one that\nmay differ, as a message does. JAX wants one type for both. Begin with zeros that may "
            'differ: 0 times what a\nstage returns, or `jax.lax.pcast(zeros, "pp", to="varying")` (`pvary` before JAX '
            "0.8)."
        )
    return verdict


FOUR = Mesh(pp=4)
MANY_ROWS = 20
"""Enough rows of a microbatch that choosing a matrix, even by a matmul, is little work compared with multiplying by it.
The trace still keeps the values of such a microbatch."""


def _in_ticks(answer: Answer, exchanges: int, too_slow: str, too_much: str) -> Verdict:
    """The verdict; refuses a wrong number of exchanges, too much work between them, and needless ticks.

    exchanges   the fewest on four ranks. One more passes: the last tick may send a needless message
    too_slow, too_much   the hints
    """
    trace = next(trace for trace in answer.traces if trace.mesh == FOUR)  # of the forward pass, which comes first
    took = max(len(trace.select(rank=rank, kind="send").events) for rank in FOUR.ranks)
    ticks, matmuls = _ticks(answer) if exchanges <= took <= exchanges + 1 else (0, 0)
    if took < exchanges:
        but(
            f"on {FOUR} a rank sends {counted(took, 'message')} to another. A pipeline needs at least {exchanges}.\n"
            "Send one microbatch at a time, from each rank to the next, with `ppermute`."
        )
    if took > exchanges + 1:
        but(f"on {FOUR} the ranks exchange messages {took} times, where {exchanges} would do.\n{too_slow}")
    if matmuls > 1:
        but(f"on {FOUR} a rank does {matmuls} matmuls per tick, where one stage needs 1.\n{too_much}")
    if ticks > exchanges + 1:
        but(
            f"on {FOUR} it takes {ticks} ticks, where {exchanges + 1} would do.\nIn one of them no rank computes "
            "anything that is needed, and all ranks take the time for it: the bubble is longer. Leave it out."
        )
    return answer.verdict


def _ticks(answer: Answer) -> tuple[int, int]:
    """The most ticks in which a rank does matmuls of a stage's size, and the most of them that a rank does in one tick;
    a batched one counts several times.

    A rank's tick ends when it sends. Work before the first send does not count if rank 0 does not send its result:
    there the program may compute an output only for its shape.
    """
    tensors = answer.tensors(FOUR)
    tensors = {**tensors, "xs": np.repeat(tensors["xs"], MANY_ROWS, axis=1)}
    trace = answer.run(FOUR, tensors, cluster="h100").trace
    output = _stage(tensors["w"].reshape(-1, WIDTH, WIDTH)[0], tensors["xs"][0])
    first = trace.select(rank=0, kind="send").events[0].values
    has_begun = first is not None and np.allclose(first, output, atol=1e-4)
    of_a_stage, most, longest = 2 * ROWS * MANY_ROWS * WIDTH**2, 0.0, 0
    for rank in FOUR.ranks:
        stages, num_sent, has_exchanged, ticks = 0.0, 0, False, set[int]()
        for event in trace.select(rank=rank).events:
            if event.op == "dot_general":
                stages += event.flops / of_a_stage
                most = max(most, stages if has_exchanged else 0)
                if round(stages) and (num_sent or has_begun):
                    ticks.add(num_sent)
            elif event.kind in ("send", "receive"):
                stages, has_exchanged = 0.0, True
                num_sent += event.kind == "send"
        longest = max(longest, len(ticks) if num_sent else 0)
    return longest, round(most)


# --- the exercise: twice around the ring -----------------------------------------------------------------------------

ROUNDS = 2
Choice = Callable[[int, int, int, int], int]


def _around(w: np.ndarray, xs: np.ndarray) -> np.ndarray:
    """Stage r + round * R is w[r, round]: each round takes every microbatch through all R ranks."""
    return _plain(np.concatenate([w[..., number, :, :] for number in range(ROUNDS)], axis=-3), xs)


def _with(choice: Choice) -> Wrong:
    """The outputs if a rank uses w[choice(round, microbatch, rank, R)]."""

    def wrong(seen: Seen) -> np.ndarray:
        w, ranks = seen.tensors["w"], seen.size
        ys = []
        for k, x in enumerate(seen.tensors["xs"]):
            for number in range(ROUNDS):
                for rank in range(ranks):
                    x = _stage(w[rank, choice(number, k, rank, ranks)], x)
            ys.append(x)
        return np.stack(ys)

    return wrong


def _once(seen: Seen, number: int, times: int = 1) -> np.ndarray:
    """The outputs of one round alone, which begins with `times` xs."""
    return _plain(seen.tensors["w"][:, number], times * seen.tensors["xs"])


def _ring(seen: Seen, step: int = 1) -> np.ndarray:
    """Each rank's outputs in the last R ticks if rank r does work number t - r in tick t, and sends `step` ranks on.

    [R, ranks, B, D]
    """
    w, xs = seen.tensors["w"], seen.tensors["xs"]
    ranks, messages, ys = range(len(w)), 0 * xs, []
    for t in range(3 * len(w) - 1):
        given = [xs[t] if r == 0 and t < len(w) else messages[(r - step) % len(w)] for r in ranks]
        messages = np.stack([_stage(w[r, int(t - r >= len(w))], x) for r, x in zip(ranks, given)])
        ys.append(messages)
    return np.stack(ys[-len(w) :])


LOOP = replace(
    PIPELINE,
    name="my_loop",
    tensors=lambda rng, mesh: {
        "w": rng.integers(-3, 4, (mesh.axis_size("pp"), ROUNDS, WIDTH, WIDTH)) / 4,
        "xs": rng.integers(-2, 3, (mesh.axis_size("pp"), ROWS, WIDTH)).astype(float),
    },
    plain=_around,
    mistakes={
        "ys": {
            "The second round begins with zeros. In that round, which rank must send to rank 0?": lambda seen: _once(
                seen, -1, times=0
            ),
            "These are the outputs of the first round. In which ticks does the last rank compute those of the "
            "second?": lambda seen: _once(seen, 0),
            "In its second round, rank 0 takes xs again. It should continue with what it receives.": (
                lambda seen: _once(seen, -1),
                lambda seen: np.tile(_once(seen, -1)[-1:], (len(seen.want), 1, 1)),  # always its last microbatch
            ),
            "Both rounds have used the first of a rank's matrices.": _with(lambda number, k, rank, ranks: 0),
            "The first round has used a rank's second matrix, and the second round its first.": _with(
                lambda number, k, rank, ranks: 1 - number
            ),
            "Each rank has run both of its stages in one tick. Between them, a microbatch goes around the "
            "ring.": lambda seen: _plain(seen.tensors["w"].reshape(-1, WIDTH, WIDTH), seen.tensors["xs"]),
            "Rank r begins its second round r ticks later than rank 0, but all ranks have changed to their second\n"
            "matrix in the same tick.": _with(
                lambda number, k, rank, ranks: min(number + (k + rank >= ranks), ROUNDS - 1)
            ),
            "The two matrices take turns from one piece of work to the next. The first R pieces use the first "
            "matrix.": _with(lambda number, k, rank, ranks: (k + number * ranks) % 2),
            "Each rank changes to its second matrix one tick too late. With which number does the second round "
            "begin?": _with(lambda number, k, rank, ranks: int(k + number * ranks > ranks)),
            "Messages go around the ring in the wrong direction.": lambda seen: _ring(seen, -1)[:, -1],
            EACH_ITS_OWN: lambda seen: _ring(seen)[:, seen.rank],
            ALL_ADDED: lambda seen: _ring(seen).sum(1),
            OF_THE_FIRST: lambda seen: _ring(seen)[:, 0],
            **NOT_SHARED,
        },
        "dw": OFTEN,
    },
)


def check_loop(fn: Callable[..., Any]) -> Verdict:
    """Check that `fn(w, xs)`, in JAX, sends one microbatch per rank twice around the ring, through the stages
    tanh(x @ w[0, 0] + 0.1) of all ranks and then through those of w[0, 1], without a pause in between.

    w [1, 2, D, D], this rank's own   xs [R, B, D]   ->   [R, B, D], the same on every rank of "pp"
    """
    hint = "Microbatch 0 can be back on rank 0 in tick R, and the last one leaves the last rank in tick 3R - 2."
    too_much = "Choose one of the two matrices first, and then multiply."
    return _typed(grade(fn, LOOP, "jax", lambda answer: _in_ticks(answer, ROUNDS * 4 + 4 - 2, hint, too_much)))
