"""The exercises of lab 21: positions that go with the tokens, and a ring with a window that sends only what is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from tplab.exercises.check import Verdict, grade, not_started
from tplab.exercises.exercise import Exercise, Mistake, Seen, Tensors
from tplab.exercises.long_sequence import MESHES, NAMES, attend
from tplab.exercises.long_sequence import TOKENS as ROWS
from tplab.exercises.trials import weight
from tplab.exercises.verdict import untouched
from tplab.mesh import Mesh
from tplab.sequence import TokenLayout
from tplab.sharding import P

WIDTH = 4
ROUNDING = 1e-5
"""float32 inside is fine."""


# --- positions -----------------------------------------------------------------------------------------------------

TOKENS = P(None, None, "cp")


def _order(size: int, num_ranks: int) -> np.ndarray:
    return TokenLayout("zigzag", size, num_ranks).order


def _zigzag_tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """q, k, v [1, 2, S, d], in the order of zigzag. Where each position is, `place` says, for the plain answer."""
    num_ranks = mesh.axis_size("cp")
    each = 6 if num_ranks == 3 else 4
    return {name: rng.standard_normal((1, 2, each * num_ranks, WIDTH)) for name in NAMES}


def _rope(x: np.ndarray, positions: np.ndarray, base: float = 10_000.0) -> np.ndarray:
    half = x.shape[-1] // 2
    angles = positions[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _rotated(tensors: Tensors, order: np.ndarray, positions: np.ndarray, names: str = "qk") -> np.ndarray:
    """Causal attention over tokens that are in this order, q and k (or one of them) rotated by these positions."""
    q, k = (_rope(tensors[name], positions * (name in names)) for name in "qk")
    return attend(q, k, tensors["v"], order[:, None] >= order)


def _ranks_of(tensors: Tensors) -> int:
    """How many ranks these tokens are for: six tokens each on three, and four otherwise."""
    size = tensors["q"].shape[2]
    return 3 if size == 18 else size // 4


def _with_positions(tensors: Tensors) -> Tensors:
    """The right output, and the gradients of sum(o * weight(o))."""
    order = _order(tensors["q"].shape[2], _ranks_of(tensors))
    o = _rotated(tensors, order, order)
    q, k = (_rope(tensors[name], order) for name in ("q", "k"))
    do, scale = weight(o), WIDTH**-0.5
    scores = np.where(order[:, None] >= order, q @ k.swapaxes(-1, -2) * scale, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    ds = p * (do @ tensors["v"].swapaxes(-1, -2) - (do * o).sum(-1, keepdims=True)) * scale
    dq, dk = (_rope(grad, -order) for grad in (ds @ k, ds.swapaxes(-1, -2) @ q))  # turned back
    return {"o": o, "dq": dq, "dk": dk, "dv": p.swapaxes(-1, -2) @ do}


def _mistaken(positions: Callable[[int, int], np.ndarray], names: str = "qk") -> Callable[[Seen], np.ndarray]:
    """What comes out where q and k of all ranks are rotated by positions(number of tokens, ranks)."""

    def wrong(seen: Seen) -> np.ndarray:
        size, num_ranks = seen.tensors["q"].shape[2], seen.mesh.axis_size("cp")
        o = _rotated(seen.tensors, _order(size, num_ranks), positions(size, num_ranks), names)
        return np.split(o, num_ranks, 2)[seen.mesh.index(seen.rank, "cp")]

    return wrong


def _late(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Seen], np.ndarray]:
    """What comes out where the positions of each rank's late piece are changed so."""

    def positions(size: int, num_ranks: int) -> np.ndarray:
        early, late = _order(size, num_ranks).reshape(num_ranks, 2, -1).swapaxes(0, 1)
        return np.stack([early, change(late)], 1).ravel()

    return _mistaken(positions)


POSITIONS = Exercise(
    name="layer_with_rope",
    tensors=_zigzag_tensors,
    specs=dict.fromkeys(NAMES, TOKENS),
    plain=_with_positions,
    results={"o": TOKENS},
    gradients=NAMES,
    meshes=MESHES,
    tolerance=ROUNDING,
    by_hand="what each rank has: attention over the ring, and positions that a rank can work out for itself",
    mistakes=(
        Mistake(
            "o",
            "The positions are those of consecutive tokens. In zigzag a rank holds two pieces of the sequence.\n"
            "Which positions do its tokens have?",
            _mistaken(lambda size, _: np.arange(size)),
        ),
        Mistake(
            "o",
            "The positions begin at 0 on every rank. Which positions of the whole sequence do this rank's tokens have?",
            _mistaken(lambda size, num_ranks: np.tile(np.arange(size // num_ranks), num_ranks)),
        ),
        Mistake(
            "o",
            "These are positions of the striped layout, and the tokens came in zigzag.",
            _mistaken(lambda size, num_ranks: TokenLayout("striped", size, num_ranks).order),
        ),
        Mistake(
            "o",
            "q and k are not rotated at all, so attention does not know where a token is.",
            _mistaken(_order, ""),
        ),
        Mistake("o", "Only q is rotated. k needs its positions too.", _mistaken(_order, "q")),
        Mistake("o", "Only k is rotated. q needs its positions too.", _mistaken(_order, "k")),
        Mistake("o", "The late piece is not reversed: its positions rise as well.", _late(lambda late: late[:, ::-1])),
        Mistake(
            "o", "Piece 2p - 1 - r is the late one: pieces count from 0.", _late(lambda late: late + late.shape[1])
        ),
    ),
)


def check_positions(fn: Callable[..., Any]) -> Verdict:
    """Whether `fn`, in torch, is causal attention with RoPE over tokens in the order of zigzag.

    q, k, v [B, heads, S/cp, d]   ->   o [B, heads, S/cp, d]
    """
    return grade(fn, replace(POSITIONS, name=getattr(fn, "__name__", POSITIONS.name)))


# --- a window ------------------------------------------------------------------------------------------------------

CASES = ((3, 2), (3, 3), (3, 4), (3, 5), (4, 1), (4, 5), (4, 6), (5, 8), (5, 12), (3, 100))
"""(tokens on each rank, window): windows inside of a tile, as long as one, and longer."""


def _hops(window: int, each: int, num_ranks: int) -> int:
    """How many ranks back the farthest key is that a query sees, with `each` tokens on a rank."""
    return min(num_ranks - 1, ceil((window - 1) / each))


def _seen_in(window: int, positions: np.ndarray) -> np.ndarray:
    back = positions[:, None] - positions
    return (back >= 0) & (back < window)


def _windowed(window: int, tensors: Tensors) -> Tensors:
    q, k, v = (tensors[name] for name in NAMES)
    return {"o": attend(q, k, v, _seen_in(window, np.arange(len(q))))}


def _own_window(window: int, seen: Seen) -> np.ndarray:
    return _windowed(window, seen.own)["o"]


def _off_by_one(window: int, seen: Seen) -> np.ndarray:
    return np.split(_windowed(window + 1, seen.tensors)["o"], seen.mesh.axis_size("cp"))[_ring_index(seen)]


def _around_the_ring(window: int, seen: Seen) -> np.ndarray:
    """The first ranks also see keys from the end of the sequence, as if these came before their queries."""
    num_ranks, index = seen.mesh.axis_size("cp"), _ring_index(seen)
    each = len(seen.own["q"])
    hops, cut = _hops(window, each, num_ranks), {name: np.split(seen.tensors[name], num_ranks) for name in NAMES}
    back = range(hops, -1, -1)
    k, v = (np.concatenate([cut[name][(index - t) % num_ranks] for t in back]) for name in ("k", "v"))
    places = np.arange(each)[:, None] + hops * each - np.arange(len(k))
    return attend(cut["q"][index], k, v, (places >= 0) & (places < window))


def _ring_index(seen: Seen) -> int:
    return seen.mesh.index(seen.rank, "cp")


def _window_exercise(each: int, window: int) -> Exercise:
    def fewest(mesh: Mesh, tensors: Tensors) -> int:
        num_ranks = mesh.axis_size("cp")
        return _hops(window, each, num_ranks) * 2 * tensors["k"].nbytes * (mesh.size // num_ranks)

    def tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
        return {name: rng.standard_normal((each * mesh.axis_size("cp"), WIDTH)) for name in NAMES}

    return Exercise(
        name="window_ring",
        tensors=tensors,
        specs=dict.fromkeys(NAMES, ROWS),
        plain=partial(_windowed, window),
        results={"o": ROWS},
        not_with=("ring_attention", "gather_attention", "head_attention", "head_ring_attention"),
        by_hand="`attend`, `merge` and hops (`ring_shift`)",
        fewest=fewest,
        excess="How many ranks back is the farthest key that a query sees, and how many ranks are there at all?",
        tolerance=ROUNDING,
        meshes=(Mesh(cp=2), Mesh(cp=3), Mesh(cp=5), Mesh(dp=2, cp=3), Mesh(cp=1)),
        mistakes=(
            Mistake("o", "Each rank sees its own tokens alone.", partial(_own_window, window)),
            Mistake("o", "A token sees window + 1 tokens. It counts as one of them.", partial(_off_by_one, window)),
            Mistake(
                "o",
                "The first ranks see keys from the end of the sequence: a ring has no beginning. Which ranks have no "
                "rank t places before them?",
                partial(_around_the_ring, window),
            ),
        ),
    )


def check_window_ring(fn: Callable[..., Any]) -> Verdict:
    """Whether `fn`, in torch, is attention where a token sees the last `window` tokens, with as few hops as possible.

    q, k, v [S/cp, d], consecutive tokens, window   ->   o [S/cp, d]
    """
    name, verdict = getattr(fn, "__name__", "window_ring"), Verdict(None, "")
    if not_started(fn):
        return untouched(name, fn)
    for each, window in CASES:

        def windowed(q: Any, k: Any, v: Any, window: int = window) -> Any:
            return fn(q, k, v, window)

        verdict = grade(windowed, replace(_window_exercise(each, window), name=name))
        if not verdict.passed:
            verdict.text += f"\nThe window was {window}, with {each} tokens on each rank."
            return verdict
    sizes = ", ".join(f"{window} ({each})" for each, window in CASES)
    text = f"{name} is right.\nIt sends as little as possible for windows (and tokens on each rank) of {sizes}."
    return Verdict(True, text, verdict.panels)
