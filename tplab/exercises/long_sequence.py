"""The exercises of lab 20: the gradients of ring attention, and a causal ring that computes only what is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tplab.exercises.check import Answer, Verdict, but, grade
from tplab.exercises.exercise import Exercise, Seen, Wrong, bytes_to_gather
from tplab.exercises.plain_block import attend, mixed
from tplab.exercises.slopes import slopes
from tplab.exercises.verdict import run_on
from tplab.mesh import Mesh
from tplab.sharding import P

TOKENS = P("cp")
NAMES = ("q", "k", "v")
MESHES = (Mesh(cp=2), Mesh(cp=3), Mesh(cp=4), Mesh(dp=2, cp=2), Mesh(cp=1), Mesh(cp=6))
LIBRARY = ("ring_attention", "gather_attention", "head_attention", "head_ring_attention")
WIDTH = 4


# --- the gradients -------------------------------------------------------------------------------------------------


def _tile(seen: Seen, query: int, key: int) -> np.ndarray:
    """The term of dq or dk from the tile of rank `query`'s queries and rank `key`'s keys."""
    q, k, v = seen.tensors.values()
    place, name = np.arange(len(q)) // len(seen.own["q"]), seen.result.removeprefix("d")
    tile = (place[:, None] == query) & (place == key)

    def through(one: np.ndarray) -> np.ndarray:
        other = {**seen.tensors, name: one}
        return mixed(np.where(tile, other["q"] @ other["k"].mT, q @ k.mT) / np.sqrt(WIDTH), v)

    return seen.parts(slopes(through, seen.tensors[name]))[query if name == "q" else key]


def _sum_of_tiles(tiles: Callable[[int, int], tuple[int, int]]) -> Wrong:
    """The sum, over the ranks j of a ring, of the terms from tile `tiles(this rank, j)` = (query, key)."""
    return lambda seen: np.sum([_tile(seen, *tiles(seen.index, j)) for j in range(seen.size)], 0)


_STALE = (
    "Every tile of the backward pass was computed with this rank's own k and v: `ctx.saved_tensors` has those.\n"
    "k and v do travel around the ring. Which line should use them?"
)
_TRAVEL = "dk and dv travel with the k and v that they belong to. Each rank adds to them what its tile gives."


GRADIENTS = Exercise(
    name="attention",
    tensors=lambda rng, mesh: {name: rng.standard_normal((3 * mesh.axis_size("cp"), WIDTH)) for name in NAMES},
    specs=dict.fromkeys(NAMES, TOKENS),
    plain=attend,
    results={"o": TOKENS},
    gradients=NAMES,
    not_with=LIBRARY,
    by_hand="hops (`ring_shift`)",
    fewest=lambda mesh, tensors: (
        # forward k and v, R - 1 hops; backward k, v, dk and dv, R hops
        (6 * mesh.axis_size("cp") - 2) * tensors["k"].nbytes * (mesh.size // mesh.axis_size("cp"))
    ),
    tolerance=1e-5,  # a program may compute in float32
    meshes=MESHES,
    mistakes={
        "dq": {
            _STALE: _sum_of_tiles(lambda me, _: (me, me)),
            "Only this rank's own tile was computed. Its queries have seen the keys of all ranks.": lambda seen: _tile(
                seen, seen.index, seen.index
            ),
            "One tile is missing: that of the keys which arrive last. A rank's own tile is one of R, for R "
            "ranks.": lambda seen: seen.want - _tile(seen, seen.index, (seen.index + 1) % seen.size),
        },
        "dk": {
            _STALE: _sum_of_tiles(lambda _, j: (j, j)),
            "The gradients for keys of other ranks were added to this rank's own dk and dv. Whose keys were "
            "they?": _sum_of_tiles(lambda me, j: (me, j)),
            "These are the gradients for another rank's keys. At every step, dk and dv must be where the keys are "
            "that they\n"
            "belong to. How many hops take them all the way home?": (
                lambda seen: seen.parts(seen.of(seen.tensors))[(seen.index + 1) % seen.size],
                lambda seen: seen.parts(seen.of(seen.tensors))[seen.index - 1],
            ),
            "dk and dv are exchanged.": lambda seen: seen.part(seen.exercise.right("dv", seen.tensors)),
        },
    },
    reminders={
        "o": "The lab's forward pass is right. What is different in yours?",
        "dq": "dq is the sum of what all tiles add to it. A tile has this rank's q, do and o, its log-sum-exp over the "
        "keys of all ranks,\nand k and v of the same rank.",
        "dk": _TRAVEL,
        "dv": _TRAVEL,
    },
)


MOST_KEPT = 8
"""The most that a rank may keep for the backward pass, in units of its q; q, k, v, o and the log-sum-exp take 4."""


def check_gradients(fn: Callable[..., Any]) -> Verdict:
    """Check that `fn`, in torch, is attention over the ranks of "cp" with the right gradients, and keeps little more
    for them than q, k, v, o and the log-sum-exp.

    q, k, v [S/cp, d]   ->   o [S/cp, d]
    """
    return grade(fn, replace(GRADIENTS, name=getattr(fn, "__name__", GRADIENTS.name)), then=_keeps_little)


def _keeps_little(answer: Answer) -> Verdict:
    kept, panels = _held(answer, 8)[-1], answer.verdict.panels
    few, many = (max(_held(answer, ranks, num_passes=2)) for ranks in (4, 8))
    if kept > MOST_KEPT:
        but(
            f"on {Mesh(cp=8)} a rank keeps {kept:.0f} times as much as its q\n"
            "for the backward pass. q, k, v, o and the log-sum-exp are only 4 times as much. Whose keys and values,\n"
            "or which tiles, are kept besides? Let them travel, and compute them, once more.",
            panels,
        )
    if many > 1.2 * few:
        but(
            f"in the backward pass a rank holds\n{few:.0f} times as much as its q on 4 ranks, and {many:.0f} times on "
            "8. One tile at a time is enough.",
            panels,
        )
    return answer.verdict


def _held(answer: Answer, num_ranks: int, num_passes: int = 1) -> list[float]:
    """The memory of the fullest rank over time, in units of its q: in a forward pass without gradients (0), in one
    with them (1), or in both passes (2)."""

    def program(*arguments: Any) -> Any:
        out = answer.fn(*(argument.requires_grad_(num_passes > 0) for argument in arguments))
        if num_passes == 2:
            out.sum().backward()
        return out.detach() if num_passes == 2 else out

    rng, mesh = np.random.default_rng(0), Mesh(cp=num_ranks)
    tensors = [rng.standard_normal((16 * num_ranks, 16)) for _ in NAMES]
    run = run_on(mesh, program, *tensors, in_specs=TOKENS, out_specs=TOKENS, count_memory=True)
    fullest = max(mesh.ranks, key=lambda rank: max(run.memory[rank].totals))
    return [int(total) / (16 * 16 * 8) for total in run.memory[fullest].totals]


# --- the causal ring -----------------------------------------------------------------------------------------------


Tile = tuple[int, bool]
"""(the rank whose k and v a tile uses, whether the tile is cut to a triangle)."""


def _over(seen: Seen, tiles: Sequence[Tile]) -> np.ndarray:
    """Attention of this rank's queries over these tiles, merged."""
    own = seen.own["q"]
    k, v = (np.concatenate([seen.parts(seen.tensors[name])[rank] for rank, _ in tiles]) for name in "kv")
    mask = [np.tri(len(own), dtype=bool) if cut else np.ones((len(own), len(own)), bool) for _, cut in tiles]
    return attend(own, k, v, np.concatenate(mask, 1))


def _merged(tiles: Callable[[int, int], list[Tile]]) -> Wrong:
    """The mistake of merging tiles(this rank, ranks)."""
    return lambda seen: _over(seen, tiles(seen.index, seen.size))


def _parts(seen: Seen) -> list[np.ndarray]:
    """The right partial results, not merged."""
    return [_over(seen, [(j, j == seen.index)]) for j in range(seen.index + 1)]


WEIGHED = "`merge` weighs them by their log-sum-exps."
MERGED = "`merge` returns o and its log-sum-exp, and the next merge needs both."

CAUSAL = replace(
    GRADIENTS,
    name="causal_ring",
    plain=lambda q, k, v: attend(q, k, v, np.tri(len(q), dtype=bool)),
    gradients=(),
    fewest=lambda mesh, tensors: 2 * bytes_to_gather(tensors["k"], mesh, "cp"),
    mistakes={
        "o": {
            "Each token sees all others, later ones too.": _merged(lambda me, num: [(j, False) for j in range(num)]),
            "Tiles of later ranks are merged too. All their keys are later than your queries: skip these tiles.": (
                _merged(lambda me, num: [(j, j == me) for j in range(num)])
            ),
            "Each rank sees the tiles of the ranks after it. At step t, the keys are those of rank r - t.": _merged(
                lambda me, num: [(j, j == me) for j in range(me, num)]
            ),
            "Tiles of earlier ranks were cut to a triangle. All their keys are earlier than your queries.": _merged(
                lambda me, num: [(j, True) for j in range(me + 1)]
            ),
            "This rank's own tile is needed only below its diagonal: pass `causal=True` there.": _merged(
                lambda me, num: [(j, False) for j in range(me + 1)]
            ),
            "Each rank sees its own tile alone. Merge those that come from earlier ranks.": _merged(
                lambda me, num: [(me, True)]
            ),
            "Every tile is there but that of rank 0's keys. At which step do these arrive?": _merged(
                lambda me, num: [(j, j == me) for j in range(min(1, me), me + 1)]
            ),
            f"The partial results were averaged. {WEIGHED}": lambda seen: np.mean(_parts(seen), 0),
            f"The partial results were added up. {WEIGHED}": lambda seen: np.sum(_parts(seen), 0),
        },
    },
    reminders={
        "o": "After t hops, k and v are those of rank r - t. An earlier rank's tile is needed whole, your own below\n"
        "its diagonal, and a later one not at all. " + MERGED
    },
)
MOST_MORE = 8
"""Growth of a rank's memory with four more ranks that is too much, in units of its q: that of their k and v."""

MOST_TILES = 0.75
"""On four ranks, 10 of 16 tiles are needed: 0.63 of the FLOPs of all tiles."""


def check_causal_ring(fn: Callable[..., Any]) -> Verdict:
    """Check that `fn`, in torch, is causal attention over the ranks of "cp", and computes no needless tile.

    q, k, v [S/cp, d], consecutive tokens   ->   o [S/cp, d]
    """
    return grade(fn, replace(CAUSAL, name=getattr(fn, "__name__", CAUSAL.name)), then=_skips_tiles)


def _skips_tiles(answer: Answer) -> Verdict:
    work = [_flops(answer, Mesh(cp=num_ranks)) for num_ranks in (4, 1)]
    share, busiest = sum(work[0]) / max(sum(work[1]), 1), max(work[0]) / max(sum(work[0]), 1)
    if share > MOST_TILES:
        but(
            f"four ranks together compute {min(share, 1):.0%} of the\n"
            "square of scores, and 10 of its 16 tiles would do. Which tiles are masked completely? Skip those,\n"
            "instead of computing and masking them.",
            answer.verdict.panels,
        )
    stays_finite(answer)
    few, many = (max(_held(answer, ranks, num_passes=0)) for ranks in (4, 8))
    if many - few >= MOST_MORE:
        but(
            f"a rank holds {few:.0f} times as much as its q on 4 ranks,\nand {many:.0f} times on 8. Merge each tile as "
            "it comes, and keep only the k and v that you pass on.",
            answer.verdict.panels,
        )
    return answer.says(
        f"Four ranks compute {share:.0%} of the square of scores, and the busiest one does {busiest:.0%} of that."
    )


def stays_finite(answer: Answer) -> Verdict:
    """Refuse partial results that are not kept by their log-sum-exps: large scores, of about 100, overflow in them."""
    mesh = answer.exercise.meshes[0]
    tensors = answer.tensors(mesh)
    found = answer.run(mesh, {**tensors, "q": 300 * tensors["q"]}).per_rank
    if not all(np.isfinite(np.asarray(one)).all() for one in found):
        but(
            "where scores are in the hundreds, it returns nan: their exponentials are too large for float32.\n"
            "Keep log-sum-exps, and let `merge` combine partial results.",
            answer.verdict.panels,
        )
    return answer.verdict


def _flops(answer: Answer, mesh: Mesh) -> list[float]:
    """The FLOPs of each rank, with tiles so large that nothing else matters."""
    rng = np.random.default_rng(0)
    trace = answer.run(mesh, {name: rng.standard_normal((256, 64)) for name in NAMES}, cluster="h100").trace
    return [float(trace.select(rank=rank, kind="compute").column("flops").sum()) for rank in mesh.ranks]
