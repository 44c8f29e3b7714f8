"""The exercises of lab 21: positions that go with the tokens, and a ring with a window that sends only what is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from tplab.exercises.check import Verdict, grade, not_started
from tplab.exercises.exercise import Exercise, Seen, Tensors, Wrong, own_part
from tplab.exercises.long_sequence import CAUSAL, MERGED, MESHES, NAMES, WIDTH, stays_finite
from tplab.exercises.plain_block import attend
from tplab.exercises.verdict import untouched
from tplab.mesh import Mesh
from tplab.sequence import TokenLayout
from tplab.sharding import P

# --- positions -----------------------------------------------------------------------------------------------------

TOKENS = P(None, None, "cp")


def _order(size: int, num_ranks: int) -> np.ndarray:
    return TokenLayout("zigzag", size, num_ranks).order


def _zigzag_tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """q, k, v [1, 2, S, d], in zigzag order."""
    num_ranks = mesh.axis_size("cp")
    each = 6 if num_ranks == 3 else 4
    return {name: rng.standard_normal((1, 2, each * num_ranks, WIDTH)) for name in NAMES}


def _rope(x: np.ndarray, positions: np.ndarray, base: float = 10_000.0) -> np.ndarray:
    half = x.shape[-1] // 2
    angles = positions[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _rotated(q: np.ndarray, k: np.ndarray, v: np.ndarray, order: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Causal attention over tokens in this order, with q and k rotated by these positions."""
    return attend(_rope(q, positions), _rope(k, positions), v, order[:, None] >= order)


def _with_positions(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The right output. Three ranks have six tokens each, and any other number of ranks four."""
    size = q.shape[-2]
    order = _order(size, 3 if size == 18 else size // 4)
    return _rotated(q, k, v, order, order)


Places = Callable[[int, int], np.ndarray]
"""(number of tokens, ranks) -> the positions that all ranks rotate by."""


def _with(places: Places) -> Wrong:
    """The mistake of rotating q and k by these positions."""

    def wrong(seen: Seen) -> np.ndarray:
        q, k, v = seen.tensors.values()
        size = q.shape[2]
        return seen.part(_rotated(q, k, v, _order(size, seen.size), places(size, seen.size)), 2)

    return wrong


POSITIONS = Exercise(
    name="layer_with_rope",
    tensors=_zigzag_tensors,
    specs=dict.fromkeys(NAMES, TOKENS),
    plain=_with_positions,
    results={"o": TOKENS},
    gradients=NAMES,
    meshes=MESHES,
    tolerance=CAUSAL.tolerance,
    by_hand="what each rank has: attention over the ring, and positions that a rank can work out for itself",
    mistakes={
        "o": {
            "The positions are those of consecutive tokens. In zigzag a rank holds two pieces of the sequence.\n"
            "Which positions do its tokens have?": _with(lambda size, num_ranks: np.arange(size)),
            "The positions begin at 0 on every rank. Which positions of the whole sequence do this rank's tokens "
            "have?": _with(lambda size, num_ranks: np.tile(np.arange(size // num_ranks), num_ranks)),
            "These are positions of the striped layout, and the tokens came in zigzag.": _with(
                lambda size, num_ranks: TokenLayout("striped", size, num_ranks).order
            ),
            "q and k are not rotated at all, so attention does not know where a token is.": _with(
                lambda size, num_ranks: np.zeros(size)
            ),
        },
    },
    reminders={
        "o": "Of 2p pieces, counted from 0, a rank has piece r and then piece 2p - 1 - r, each with rising positions.\n"
        "Rotate both q and k by these, and not v, and attend in the same layout."
    },
)


def check_positions(fn: Callable[..., Any]) -> Verdict:
    """Check that `fn`, in torch, is causal attention with RoPE over tokens in zigzag order.

    q, k, v [B, heads, S/cp, d]   ->   o [B, heads, S/cp, d]
    """
    return grade(fn, replace(POSITIONS, name=getattr(fn, "__name__", POSITIONS.name)))


# --- a window ------------------------------------------------------------------------------------------------------

CASES = ((3, 2), (3, 3), (3, 4), (3, 5), (4, 1), (4, 5), (4, 6), (5, 8), (5, 12), (3, 100))
"""(tokens on each rank, window): windows shorter than a tile, as long as one, and longer."""


def _hops(window: int, each: int, num_ranks: int) -> int:
    """How many ranks back the farthest key of a query is, with `each` tokens per rank."""
    return min(num_ranks - 1, ceil((window - 1) / each))


def _windowed(window: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    back = np.arange(len(q))[:, None] - np.arange(len(q))
    return attend(q, k, v, (back >= 0) & (back < window))


def _ring(window: int, seen: Seen, back: int = 1, wraps: bool = False) -> np.ndarray:
    """The output of a ring with enough hops, each of which brings the keys of the rank `back` places before; also
    across the ring's end if it `wraps`."""
    num_ranks, me, own = seen.size, seen.index, seen.own
    each = len(own["q"])
    cut = {name: seen.parts(seen.tensors[name]) for name in "kv"}
    steps = [t for t in range(_hops(window, each, num_ranks) + 1) if wraps or t <= me]
    k, v = (np.concatenate([cut[name][(me - back * t) % num_ranks] for t in steps]) for name in "kv")
    rows, columns = np.arange(each)[:, None], np.arange(each)
    away = np.concatenate([rows - columns + t * each for t in steps], 1)
    return attend(own["q"], k, v, (away >= 0) & (away < window))


def _window_exercise(each: int, window: int) -> Exercise:
    def fewest(mesh: Mesh, tensors: Tensors) -> int:
        num_ranks = mesh.axis_size("cp")
        return _hops(window, each, num_ranks) * 2 * tensors["k"].nbytes * (mesh.size // num_ranks)

    def tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
        return {name: rng.standard_normal((each * mesh.axis_size("cp"), WIDTH)) for name in NAMES}

    return replace(
        CAUSAL,
        tensors=tensors,
        plain=partial(_windowed, window),
        by_hand="`attend`, `merge` and hops (`ring_shift`)",
        fewest=fewest,
        excess="How many ranks back is the farthest key that a query sees, and how many ranks are there at all?",
        meshes=(Mesh(cp=2), Mesh(cp=3), Mesh(cp=5), Mesh(dp=2, cp=3), Mesh(cp=1)),
        mistakes={
            "o": {
                "Each rank sees its own tokens alone.": own_part,
                "The first ranks see keys from the end of the sequence: a ring has no beginning. Which ranks have no "
                "rank t places before them?": partial(_ring, window, wraps=True),
                "The keys come from the ranks after this one. Which way do they hop?": partial(_ring, window, back=-1),
            },
        },
        reminders={
            "o": "A token sees the last `window` tokens, itself included, on however many ranks they are.\n"
            "After t hops, k and v are those of rank r - t, and their `distance` is t times the tokens of a rank.\n"
            + MERGED
        },
    )


def check_window_ring(fn: Callable[..., Any]) -> Verdict:
    """Check that `fn`, in torch, is attention in which a token sees the last `window` tokens, with the fewest hops.

    q, k, v [S/cp, d], consecutive tokens, window   ->   o [S/cp, d]
    """
    name, verdict = getattr(fn, "__name__", "window_ring"), Verdict(None, "")
    if not_started(fn):
        return untouched(name, fn)
    for each, window in CASES:

        def windowed(q: Any, k: Any, v: Any, window: int = window) -> Any:
            return fn(q, k, v, window)

        verdict = grade(windowed, replace(_window_exercise(each, window), name=name), then=stays_finite)
        if not verdict.passed:
            verdict.text += f"\nThe window was {window}, with {each} tokens on each rank."
            return verdict
    sizes = ", ".join(f"{window} ({each})" for each, window in CASES)
    text = f"{name} is right.\nIt makes no hop too many for windows (and tokens on each rank) of {sizes}."
    return Verdict(True, text, verdict.panels)
