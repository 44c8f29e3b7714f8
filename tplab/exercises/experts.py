"""The exercises of lab 22: gradients of experts that are too large, and the rows that a dispatch sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tplab.exercises.check import grade
from tplab.exercises.exercise import Exercise, Seen, Tensors, Wrong, bytes_of_a_sum
from tplab.exercises.verdict import Case, Verdict, check, compare, on, refuse, right
from tplab.experts import Placement, contiguous, rows_between
from tplab.mesh import Mesh
from tplab.sharding import P

# --- gradients of experts --------------------------------------------------------------------------------------------

MESHES = (Mesh(dp=3, ep=2), Mesh(dp=2, ep=4), Mesh(dp=1, ep=3), Mesh(dp=3, ep=1), Mesh(dp=1, ep=1))
ALL = P(("dp", "ep"))
EXPERTS = 2  # per rank


def _gradients(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """Each rank's gradient of the router [E, D] and of its own experts [2, D, D], concatenated over the ranks."""
    experts = EXPERTS * mesh.axis_size("ep")
    sizes = {"router": (mesh.size * experts, 3), "experts": (mesh.size * EXPERTS, 3, 3)}
    return {name: rng.normal(size=size) for name, size in sizes.items()}


def _averaged(router: np.ndarray, experts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The router's gradients averaged over ranks; those of experts added up along dp, and divided by the ranks."""
    ranks = len(experts) // EXPERTS
    router = router.reshape(ranks, -1, 3)
    return router.mean(0), experts.reshape(-1, router.shape[1], 3, 3).sum(0) / ranks


def _fewest(mesh: Mesh, tensors: Tensors) -> int:
    """Bytes of two sums: of the router's gradients over all ranks, and of the experts' over each group of copies."""
    router, experts = (np.array_split(tensors[name], mesh.size)[0] for name in ("router", "experts"))
    return bytes_of_a_sum(router, mesh, ("dp", "ep")) + bytes_of_a_sum(experts, mesh, "dp")


def _times(by: Callable[[int, int], float]) -> Wrong:
    """The right gradient, times by(dp, ep)."""
    return lambda seen: seen.want * by(*seen.mesh.shape.values())


def _mean_over(axis: str, other: str) -> Wrong:
    """The mean over the ranks along one axis, which are at the same place along the other."""

    def wrong(seen: Seen) -> np.ndarray:
        whole = seen.tensors[seen.result].reshape(*seen.mesh.shape.values(), *seen.want.shape)
        return whole.mean(seen.mesh.axis_names.index(axis))[seen.mesh.index(seen.rank, other)]

    return wrong


AVERAGE = Exercise(
    name="average",
    tensors=_gradients,
    specs={"router": ALL, "experts": ALL},
    plain=_averaged,
    results={"router": P(), "experts": P("ep")},
    meshes=MESHES,
    fewest=_fewest,
    mistakes={
        "experts": {
            "The experts' gradients are averaged over their copies, along dp. But the tokens of all ranks are in\n"
            "them, and each of these ranks' losses is a mean. By which number must their sum be divided?": _times(
                lambda dp, ep: ep
            ),
            "Their mean over the copies is multiplied by the ranks along ep. Divide it by them.": _times(
                lambda dp, ep: ep * ep
            ),
            "The experts' gradients are averaged over ranks that hold different experts. Which ranks hold "
            "copies?": lambda seen: seen.tensors["experts"].reshape(-1, EXPERTS, 3, 3).mean(0),
            "The experts' gradients are added up over their copies, and not divided yet.": _times(
                lambda dp, ep: dp * ep
            ),
            "Now the experts' gradients are divided by the number of ranks along dp once too often.": _times(
                lambda dp, ep: 1 / dp
            ),
            "Their mean over the copies is divided by 2. How many ranks share the experts here?": _times(
                lambda dp, ep: ep / 2
            ),
            "Their sum over the copies is divided by the ranks along dp twice, and not by those along ep.": _times(
                lambda dp, ep: ep / dp
            ),
            "Their sum over the copies is divided by the ranks along ep alone. The losses of all ranks are in "
            "it.": _times(lambda dp, ep: dp),
            "Copies of an expert, along dp, have seen different tokens. Add up their gradients before you "
            "divide.": lambda seen: seen.own["experts"] / seen.mesh.size,
            "Copies of an expert, along dp, have seen different tokens. Add up their gradients; divide by all "
            "ranks.": lambda seen: seen.own["experts"] / seen.mesh.axis_size("ep"),
            "The experts' gradients are averaged over ranks that hold different experts, those along ep.": _mean_over(
                "ep", "dp"
            ),
        },
        "router": {
            "The router's gradients are averaged, and then divided by the ranks along ep once more.": _times(
                lambda dp, ep: 1 / ep
            ),
            "The router's gradients are added up. Each rank's loss is a mean, so take their mean.": _times(
                lambda dp, ep: dp * ep
            ),
            "This is the gradient of this rank's own loss. The router belongs to all ranks.": (
                lambda seen: seen.own["router"]
            ),
            "Every rank holds the whole router, so its gradient is the mean over all ranks.": _mean_over("dp", "ep"),
        },
    },
)


def check_average(fn: Callable[..., Any]) -> Verdict:
    """Check that `fn`, in torch, turns gradients into those of the mean loss over all ranks of dp and ep.

    router [E, D], of this rank's loss   experts [E/ep, D, D], of all losses whose tokens this rank computed
      ->   both, averaged over the whole batch
    """
    return grade(fn, AVERAGE)


# --- rows that are sent ----------------------------------------------------------------------------------------------

CASES: tuple[tuple[Sequence[Sequence[int]], int, int], ...] = (
    (((0, 1), (2, 3), (2, 0), (3, 2)), 2, 4),
    (((0, 3, 4), (1, 4, 3), (1, 0, 2), (4, 2, 3), (3, 1, 2), (0, 3, 2)), 3, 6),
    (((7, 6, 5, 4), (0, 2, 4, 6), (1, 0, 3, 2), (7, 5, 3, 1)), 4, 8),
    (((7, 1, 4), (4, 6, 5), (4, 5, 1), (2, 3, 0)), 2, 8),
    (((0,), (1,), (1,), (1,)), 1, 2),
)
"""(choices of all tokens, ranks, experts)."""


def _leave(choices: np.ndarray, placement: Placement, arrive: bool = False) -> np.ndarray:
    """The rows that each rank sends to others, or receives from them, if a token is sent to a rank only once [R]."""
    once = rows_between(choices, placement, once=True)
    return once.sum(0 if arrive else 1) - once.diagonal()


def _others(targets: np.ndarray, ranks: int) -> np.ndarray:
    """The number of other ranks that receive tokens of each rank."""
    return np.array([len({*own.flatten()} - {rank}) for rank, own in enumerate(np.split(targets, ranks))])


def _wrong_rows(choices: np.ndarray, ranks: int, experts: int) -> dict[str, np.ndarray]:
    """The rows that each rank sends, as each known mistake counts them."""
    placement, here = contiguous(experts, ranks), experts // ranks
    once, each = rows_between(choices, placement, once=True), rows_between(choices, placement)
    away = choices // here != np.arange(len(choices))[:, None] // (len(choices) // ranks)
    others = [len({*row} - {token // (len(choices) // ranks)}) for token, row in enumerate(choices // ranks)]
    in_turn = np.concatenate([choices[rank::ranks] for rank in range(ranks)])
    return {
        "It counts a row per choice. A token is sent once to a rank that has several of its experts.": (
            each.sum(1) - each.diagonal()
        ),
        "It also counts rows that stay where they are. They are not sent.": once.sum(1),
        "It counts the rows that arrive at each rank. How many leave it?": _leave(choices, placement, arrive=True),
        "It counts every choice, including those of experts on the token's own rank.": each.sum(1),
        "It deals experts out to the ranks in turn. Here neighbouring experts share a rank.": (
            _leave(choices % ranks * here, placement)
        ),
        "It deals tokens out to the ranks in turn. Here neighbouring tokens share a rank.": _leave(in_turn, placement),
        "It divides by the number of ranks to find an expert's rank. How many experts has each rank?": (
            np.reshape(others, (ranks, -1)).sum(1)
        ),
        "It counts tokens that leave. A token is sent to each other rank that has one of its experts.": (
            away.any(1).reshape(ranks, -1).sum(1)
        ),
        "It counts ranks that get something. How many rows do they get?": _others(choices // here, ranks),
        "It looks at the first choice of each token alone.": _leave(choices[:, :1], placement),
    }


@check(not_with=("rows_between", "tokens_between"))
def check_rows_sent(fn: Callable[..., Any]) -> Verdict:
    """Check that fn(choices, ranks, experts) counts the rows that each rank sends, if a token goes to a rank only once.

    choices [T, k]   of all tokens, the first T/ranks of which are on rank 0 and so on; experts are spread likewise
      ->   one number per rank
    """

    def cases() -> Iterator[Case]:
        for choices, ranks, experts in CASES:
            where = f"for {len(choices)} tokens, {ranks} ranks and {experts} experts"
            table = np.array(choices)
            given = table.copy()
            with on(where):
                got = fn(given, ranks, experts)
            if not np.array_equal(given, table):
                refuse(f": {where} it changes its argument `choices` in place. Take a copy, or compute something new.")
            try:
                found = np.asarray(got, dtype=float)
            except TypeError:
                refuse(f": {where} it returns {got!r}. It returns a list, an array or a tensor of {ranks} numbers.")
            if found.shape != (ranks,):
                refuse(f": {where} it returns {got!r}. It returns one number for each of the {ranks} ranks.")
            want, known = _leave(table, contiguous(experts, ranks)), _wrong_rows(table, ranks, experts)
            yield Case(found, want, known, f" is wrong {where}.", f"For the choices {table.tolist()}, ")

    compare(cases())
    return right(" is right: it counts what a dispatch sends, to the row.")
