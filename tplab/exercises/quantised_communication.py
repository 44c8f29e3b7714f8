"""The exercises of lab 18: add up codes of different scales, and reduce in two levels with few bytes across nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import Answer, Verdict, but, grade
from tplab.exercises.exercise import Exercise, Framework, Seen, Tensors, Wrong
from tplab.exercises.network_levels import few_rows
from tplab.exercises.verdict import differs, refuse
from tplab.mesh import Mesh
from tplab.sharding import P

# --- the bug to repair: codes of different scales ------------------------------------------------------------------


def _of_different_scales(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """Integer multiples of each rank's own step, at most 7 steps: 4 bits represent them exactly, with one scale per
    rank or per row. One row per rank has a number of 7 or -7 steps; the others have only 0, 3 and -3 steps."""
    num_ranks = mesh.axis_size("dp")
    codes = 3 * rng.integers(-1, 2, (num_ranks, num_ranks, 24))
    codes[..., 0] = 3
    for rank in range(num_ranks):
        row = (rank + 1) % num_ranks
        codes[rank, row] = rng.integers(-6, 7, 24)
        codes[rank, row, 0] = 7 * (-1) ** rank
    steps = 0.1 * 2.0 ** rng.permutation(np.arange(num_ranks))  # which float16 cannot represent
    return {"x": (codes * steps[:, None, None]).reshape(num_ranks * num_ranks, 24).astype(np.float32)}


def _by_rank(x: np.ndarray, num_ranks: int) -> np.ndarray:
    """[sender, receiver, n]"""
    return x.reshape(num_ranks, num_ranks, -1)


def _sum_for_each(x: np.ndarray) -> np.ndarray:
    return _by_rank(x, round(len(x) ** 0.5)).sum(0)


def _for_this(seen: Seen) -> np.ndarray:
    """What every rank has for this one [sender, n]."""
    return _by_rank(seen.tensors["x"], seen.size)[:, seen.index]


def _times_one_scale(scale: Callable[[np.ndarray, int], float]) -> Wrong:
    """The sum of codes, times scale(scales of all ranks, this rank's index)."""

    def wrong(seen: Seen) -> np.ndarray:
        scales = np.abs(_by_rank(seen.tensors["x"], seen.size)).max((1, 2)) / 7
        return (_for_this(seen) / scales[:, None]).sum(0)[None] * scale(scales, seen.index)

    return wrong


def _common_scale(seen: Seen) -> np.ndarray:
    """The sum of codes that all use the largest scale, times that scale."""
    scale = np.abs(seen.tensors["x"]).max() / 7
    return (_for_this(seen) / scale).round().sum(0)[None] * scale


def _down_to_one(seen: Seen) -> np.ndarray:
    """The sum of codes from -1 to 1, with the largest magnitude as each rank's scale."""
    scales = np.abs(_by_rank(seen.tensors["x"], seen.size)).max((1, 2))[:, None]
    return ((_for_this(seen) / scales).round() * scales).sum(0)[None]


ADD_UP = Exercise(
    name="add_up",
    tensors=_of_different_scales,
    specs={"x": P("dp")},
    plain=_sum_for_each,
    results={"total": P("dp")},
    meshes=(Mesh(dp=2), Mesh(dp=3), Mesh(dp=4), Mesh(dp=1)),
    mistakes={
        "total": {
            "These are sums of codes, times this rank's scale. The other ranks' codes have scales of their own: a code "
            "of 7 is 7 times the scale of the rank that sent it.\n"
            "Multiply each rank's codes by that rank's scale, and then add.": _times_one_scale(
                lambda scales, index: scales[index]
            ),
            "These are sums of codes, times the mean of all scales. Each rank's codes need the scale of that "
            "rank.": _times_one_scale(lambda scales, index: scales.mean()),
            "These are sums of codes, times the largest scale. Each rank's codes need the scale of that "
            "rank.": _times_one_scale(lambda scales, index: scales.max()),
            "These are sums of codes. A code times the scale of its rank is a number.": _times_one_scale(
                lambda scales, index: 1.0
            ),
            "These are sums of codes that have one common scale, the largest. Such codes can be added, so this is "
            "close. But the numbers\nof a rank with a smaller scale are rounded to steps that are too coarse for them. "
            "Keep each rank's own scale.": _common_scale,
            "These codes are -1, 0 and 1, since the scale is the largest magnitude. 4 bits hold codes from -7 to "
            "7.": _down_to_one,
            "These are sums of numbers in half precision. Send codes and scales.": lambda seen: (
                _for_this(seen).astype(np.float16).astype(float).sum(0)[None]
            ),
        },
    },
    not_with=("quantized_reduce_scatter",),
    tolerance=1e-6,  # a scale may be float32
)
NOISE = 1.15
"""The largest error, relative to that of 4-bit codes rounded to nearest with each rank's scale. Rounding toward zero
nearly doubles the error, and one common scale makes it larger still."""


def check_add_up(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` adds up numbers that ranks send as codes, and sends no unquantised number.

    x [R, n], row i for the rank at index i of "dp"   ->   total [1, n], the sum of the rows for this rank
    x is float32, and 8 divides n. The numbers are integer multiples of each rank's own step: 4 bits represent them
    exactly.
    """
    verdict = grade(fn, ADD_UP, framework, _few_bytes)
    if "entries are off" not in verdict.text:
        return verdict
    answer = Answer(fn, ADD_UP, framework, [], verdict)
    try:  # other codes, of 8 bits or with a scale for each block, may be right too
        if not (is_close := _noise(answer) <= NOISE) and not _is_bounded(answer):
            return verdict
        if too_many := _too_many_bytes(answer):
            return Verdict(False, f"add_up: {too_many}")
        few, many = (_noise(answer, num_ranks, 1.0) for num_ranks in (2, 8))
        most = _worst(answer)
    except Exception:
        return verdict
    if not many <= GROWTH * few:
        return Verdict(False, f"add_up: the more ranks, the larger its error.\n{AGAIN}")
    if differs(most, 0, 1):
        return Verdict(False, f"add_up: one number is off by {most:.1f} times half of the scale.\n{CUT_OFF}")
    sent = f"On {ADD_UP.meshes[2]} a rank sends {_sent_to_add_up(answer)} bytes of codes and scales."
    return Verdict(True, f"add_up is right: {CLOSE if is_close else BOUNDED}.\n{sent}")


def _few_bytes(answer: Answer) -> Verdict:
    if not (noise := _noise(answer)) <= NOISE:
        refuse(
            f": for numbers between two codes, its error is {noise:.1f} times as large as it must be.\nWhich code is "
            "the nearest? To turn 2.9 into int8 gives 2."
        )
    if too_many := _too_many_bytes(answer):
        but(too_many)
    sent, in_full = _sent_to_add_up(answer), 3 * 24 * 4  # rows for three other ranks, in float32
    return answer.says(
        f"On {ADD_UP.meshes[2]} a rank sends {sent} bytes of codes and scales; numbers in full would take {in_full}."
    )


def _too_many_bytes(answer: Answer) -> str:
    """The objection to a rank that sends more than codes and scales; "" if it does not."""
    mesh = ADD_UP.meshes[2]
    if (sent := _sent_to_add_up(answer)) <= ENOUGH:
        return ""
    events = answer.run(mesh).trace.select(rank=0, op="all_gather").events
    why = "Each rank gets rows that are for others. `all_to_all` sends a row only to the rank that it is for."
    why = why if any(event.bytes > ENOUGH for event in events) else "Send the codes along with the scales."
    return f"on {mesh} a rank sends {sent} bytes. Codes of a byte each, and scales, take {ENOUGH} at most.\n{why}"


CLOSE = "for numbers between two codes, its error is not larger than that of codes of 4 bits with each rank's own scale"
BOUNDED = "no sum is off by more than half of all ranks' scales of 4 bits together"
AGAIN = (
    "Are sums rounded again on their way, or do ranks share a scale? Send each number as one code of its own rank's "
    "scale, straight to the rank that adds it up."
)
CUT_OFF = (
    "A rounded number is off by half of the scale at most. Is the largest one cut off? With 4 bits, codes end at 7, so "
    "the scale is a seventh of the largest magnitude."
)
GROWTH = 1.6
"""The largest growth of the error from two ranks to eight, relative to that of numbers rounded once. It is 1.3 if a
rank does not round its own numbers, and 2 around a ring in which every hop rounds the sum so far."""
ENOUGH = 3 * (24 + 4 * 4)
"""Bytes that a rank of four sends: codes of a byte each, and with each row all scales of the rank."""


def _sent_to_add_up(answer: Answer) -> int:
    return answer.run(ADD_UP.meshes[2]).trace.bytes_sent(rank=0)


def _worst(answer: Answer) -> float:
    """The largest error for numbers of one rank (the other's are tiny), relative to half of the 4-bit scale. Also tried
    with all of them negative."""
    x = np.random.default_rng(1).normal(size=(2, 2, 768)).astype(np.float32)
    x[1] *= 2.0**-12
    x[0, 1, 5] = 2 * np.abs(x).max()
    halves, off = (np.abs(x).max((1, 2)) / 14).sum(), list[np.ndarray]()
    for sent in (x, -np.abs(x)):
        found = answer.run(Mesh(dp=2), {"x": sent.reshape(4, -1)}).per_rank[1]
        off.append(np.abs(np.asarray(found) - sent.sum(0)[1]))
    return float(np.max(off) / halves)


def _is_bounded(answer: Answer) -> bool:
    """Whether the error is as small as that of 4 bits if all rows are equally large, and otherwise within half of the
    scales, as for codes with a zero point, which do not represent 0 itself."""
    off, _, most = _errors(answer)
    return _noise(answer, outlier=1.0) <= NOISE and float(np.abs(off).max()) <= most


def _noise(answer: Answer, num_ranks: int = 3, outlier: float = 200.0) -> float:
    """The error relative to that of 4 bits and one scale per rank, for the receiver with the largest ratio."""
    off, best, _ = _errors(answer, num_ranks, outlier)
    return float(np.sqrt((off**2).mean(1) / (best**2).mean(1)).max())


def _errors(answer: Answer, num_ranks: int = 3, outlier: float = 200.0) -> tuple[np.ndarray, np.ndarray, float]:
    """The errors of the sums [R, n] for numbers that are not multiples of a step, those of 4 bits and one scale per
    rank, and the bound of the latter: half of all scales. One row of each sender is `outlier` times as large as the
    others, so large that even codes of 8 bits with another row's scale cannot represent it."""
    x = np.random.default_rng(0).normal(size=(num_ranks, num_ranks, 768)).astype(np.float32)
    for rank in range(num_ranks):
        x[rank] *= 2 ** (rank % 3) / 20
        x[rank, (rank + 1) % num_ranks] *= outlier
    scales = np.abs(x).max((1, 2), keepdims=True) / 7
    best = ((x / scales).round() * scales - x).sum(0)
    found = answer.run(Mesh(dp=num_ranks), {"x": x.reshape(num_ranks * num_ranks, -1)}).per_rank
    off = np.concatenate([np.asarray(one) for one in found]) - x.sum(0)
    return off, best, float(scales.sum() / 2)


# --- reduce in two levels ------------------------------------------------------------------------------------------


def _piece_of(order: Callable[[int, int, int, int], int]) -> Wrong:
    """The sum for the rank at position `order(node, gpu, nodes, gpus)`, on the rank of this node and gpu."""

    def wrong(seen: Seen) -> np.ndarray:
        nodes, gpus = seen.mesh.axis_size("node"), seen.mesh.axis_size("gpu")
        place = order(seen.mesh.index(seen.rank, "node"), seen.mesh.index(seen.rank, "gpu"), nodes, gpus)
        return _by_rank(seen.tensors["x"], seen.mesh.size).sum(0)[place][None]

    return wrong


REDUCE_TWICE = Exercise(
    name="reduce_twice",
    tensors=lambda rng, mesh: {"x": rng.integers(-9, 10, (mesh.size**2, 3)).astype(float)},
    specs={"x": P(("node", "gpu"))},
    plain=_sum_for_each,
    results={"total": P(("node", "gpu"))},
    not_with=("quantized_reduce_scatter",),
    is_precise=True,
    meshes=(Mesh(node=2, gpu=3), Mesh(node=3, gpu=2), Mesh(node=2, gpu=4), Mesh(node=2, gpu=1), Mesh(node=1, gpu=3)),
    mistakes={
        "total": {
            "Every sum is right, but it is another rank's. Inside the node, the first rows go to gpu 0; and the first "
            "rows of x are for the ranks of node 0.\nPut the rows in another order before you reduce.": _piece_of(
                lambda node, gpu, nodes, gpus: gpu * nodes + node
            ),
            "Every sum is right, but it is another rank's. The first G rows of x are for the G GPUs of node 0.\n"
            "Which of the two sizes comes first in `reshape`?": _piece_of(
                lambda node, gpu, nodes, gpus: (q := gpu * nodes + node) % gpus * nodes + q // gpus
            ),
            'Every sum is right, but it is another rank\'s. In this order of the rows, "gpu" comes before '
            '"node".': _piece_of(lambda node, gpu, nodes, gpus: (q := node * gpus + gpu) % nodes * gpus + q // nodes),
            "This is a row of this rank's own x: nothing is added to it.": lambda seen: seen.own["x"][seen.rank][None],
        },
    },
)


def check_reduce_twice(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` reduces in two levels, and sends only a node's sums to other nodes.

    x [R, n], row r for rank r   ->   total [1, n], the sum of all ranks' rows for this rank
    """
    return grade(fn, REDUCE_TWICE, framework, _only_sums_cross)


def _only_sums_cross(answer: Answer) -> Verdict:
    few_rows(
        answer,
        "Each GPU needs the node's sums for its own index only, one row for each node.",
        late="Inside the node is the right place to begin. Which of its sums does another node need?",
    )
    return answer.says("Only sums of a node cross to other nodes.")
