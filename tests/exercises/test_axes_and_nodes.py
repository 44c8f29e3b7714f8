"""The checks of lab 19: solutions pass in both frameworks, and each known mistake is told by name."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tplab.jax as tj
import tplab.torch as tt
from labs.source import build
from tests.exercises.test_exercises import expect
from tplab.exercises.axes_and_nodes import SIZES, check_average, check_best_mesh, sent


def in_the_lab(start: str) -> dict[str, Any]:
    """The names that the cell which begins so defines."""
    cells = [cell.source for cell in build.read_source("19_axes_and_nodes").cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"tt": tt}
    exec(next(source for source in cells if source.startswith(start)), names)
    return names


def test_the_labs_bug_is_told():
    expect(check_average(in_the_lab("def average")["average"]), False, "divided by the total number of ranks", "tp=3")


@pytest.mark.parametrize(
    "average",
    [
        lambda gradient: tt.all_reduce(gradient, "dp", op="mean"),
        lambda gradient: tt.all_reduce(gradient, "dp") / tt.axis_size("dp"),
        lambda gradient: tt.all_gather(tt.reduce_scatter(gradient, "dp"), "dp") / tt.axis_size("dp"),
    ],
)
def test_repairs_pass(average: Callable):
    expect(check_average(average), True, "mean equals the unsharded result")


def test_a_repair_in_jax_passes():
    expect(check_average(lambda gradient: tj.all_reduce(gradient, "dp", op="mean"), "jax"), True)


@pytest.mark.parametrize(
    ("average", "hint"),
    [
        (lambda gradient: tt.all_reduce(gradient, "dp"), "This is the sum over dp"),
        (lambda gradient: gradient, "the rank's own gradient"),
        (lambda gradient: tt.all_reduce(gradient, ("dp", "tp"), op="mean"), "the mean over all ranks"),
        (lambda gradient: tt.all_reduce(gradient, "tp", op="mean"), "the mean over tp"),
        (lambda gradient: tt.all_reduce(gradient, "dp") / 8, "Divide once, by the number of ranks along dp"),
        (lambda gradient: tt.all_reduce(gradient, "dp", op="mean") + torch.eye(12)[:, :1], "1 of 12 entries is off"),
        (lambda gradient: tt.all_reduce(gradient, "dp", op="mean") / tt.axis_size("dp"), "once too often"),
        (lambda gradient: tt.all_reduce(gradient, ("dp", "tp")) / tt.axis_size("dp"), "over nothing else"),
        (lambda gradient: tt.all_reduce(gradient, "dp") / tt.axis_size("tp"), "by the number of ranks along dp"),
    ],
    ids=["sum", "own", "all ranks", "tp", "eight", "one entry", "twice", "all ranks by dp", "dp by tp"],
)
def test_what_is_wrong_with_an_average_is_told(average: Callable, hint: str):
    verdict = check_average(average)
    expect(verdict, False, hint)
    assert verdict.panels


@pytest.mark.parametrize(
    "average",
    [
        lambda gradient: tt.all_reduce(tt.all_reduce(gradient, "dp", op="mean"), "dp", op="mean"),
        lambda gradient: torch.stack(tt.all_gather(gradient, "dp").chunk(tt.axis_size("dp"))).mean(0),
    ],
    ids=["again", "gathered"],
)
def test_an_average_that_sends_too_much_passes_with_a_remark(average: Callable):
    expect(check_average(average), True, "it sends", "would do: what are the other")


# ------------------------------------------------------------------------------------------------------------ best_mesh


def divisors(batch: int, hidden: int, ranks: int) -> list[tuple[int, int]]:
    return [
        (dp, ranks // dp)
        for dp in range(1, ranks + 1)
        if ranks % dp == 0 and batch % dp == 0 and hidden % (ranks // dp) == 0
    ]


def tried_out(batch: int, width: int, hidden: int, ranks: int) -> tuple[int, int]:
    return min(divisors(batch, hidden, ranks), key=lambda mesh: sum(sent(batch, width, hidden, *mesh).values()))


def without_the_width(batch: int, width: int, hidden: int, ranks: int) -> tuple[int, int]:
    """The width is a factor of both kinds of traffic, so it does not matter."""

    def total(mesh: tuple[int, int]) -> float:
        dp, tp = mesh
        return batch / dp * (tp - 1) / tp + hidden / tp * (dp - 1) / dp

    return min(reversed(divisors(batch, hidden, ranks)), key=total)


def by_least(weigh: Callable[..., float], allowed: bool = True) -> Callable[..., tuple[int, int]]:
    def best_mesh(batch: int, width: int, hidden: int, ranks: int) -> tuple[int, int]:
        every = divisors(batch if allowed else 0, hidden if allowed else 0, ranks)
        return min(every, key=lambda mesh: weigh(batch, width, hidden, *mesh))

    return best_mesh


def without_the_last_hop(n: int, d: int, f: int, dp: int, tp: int) -> float:
    """(R-1)/R makes no difference: it takes the same from every mesh, N D/R of activations and D F/R of gradients."""
    return n * d / dp + d * f / tp


def nearest_ratio(n: int, d: int, f: int, dp: int, tp: int) -> float:
    """By the root of hidden * ranks / batch, where both parts together would be least. Ratios count, not differences:
    a mesh sends N tp + F ranks / tp, which is the same on both sides of the root at equal ratios."""
    return abs(math.log(tp / math.sqrt(f * dp * tp / n)))


@pytest.mark.parametrize(
    "best_mesh", [tried_out, without_the_width, by_least(without_the_last_hop), by_least(nearest_ratio)]
)
def test_solutions_pass(best_mesh: Callable):
    verdict = check_best_mesh(best_mesh)
    expect(verdict, True, "fewest bytes, for every size")
    assert verdict.panels


@pytest.mark.parametrize(
    ("best_mesh", "hint"),
    [
        (by_least(lambda n, d, f, dp, tp: n * d / dp), "most bytes are gradients, dp"),
        (by_least(lambda *case: max(sent(*case).values())), "returns (2, 2) for batch 24, width 8, hidden width 8"),
        (by_least(lambda n, d, f, dp, tp: d * f / tp), "most bytes are activations, tp"),
        (by_least(lambda n, d, f, dp, tp: abs(dp - tp)), "less. In yours"),
        (by_least(lambda n, d, f, dp, tp: n * d * (tp - 1) / tp + d * f * (dp - 1) / dp), "less. In yours"),
        (by_least(lambda *case: sum(sent(*case).values()), allowed=False), "must divide the"),
        (
            lambda n, d, f, ranks: min(divisors(n, 0, ranks), key=lambda mesh: sum(sent(n, d, f, *mesh).values())),
            "must divide the batch of 8, and 2 the hidden width of 9",
        ),
        (by_least(lambda n, d, f, dp, tp: abs(tp - math.sqrt(f * dp * tp / n))), "(16, 1) for batch 122,880"),
        (by_least(lambda n, d, f, dp, tp: abs(dp - math.sqrt(n * dp * tp / f))), "(1, 16) for batch 2,176"),
        (lambda n, d, f, ranks: tried_out(n, d, f, ranks)[::-1], "With dp and tp exchanged, (2, 8), it would send"),
        (lambda n, d, f, ranks: (8, 2), "less. In yours"),
        (lambda n, d, f, ranks: ((n / (2 * f)) ** 0.5, ranks / (n / (2 * f)) ** 0.5), "two whole numbers"),
        (lambda n, d, f, ranks: (ranks, ranks), "dp times tp must be 16"),
        (lambda n, d, f, ranks: 16, "two whole numbers"),
        (lambda n, d, f, ranks: n / 0, "ZeroDivisionError"),
    ],
    ids=[
        "dp",
        "the larger part",
        "tp",
        "square",
        "whole sizes",
        "undivided",
        "hidden width undivided",
        "nearest to the root",
        "nearest dp",
        "swapped",
        "one case",
        "root",
        "both",
        "one",
        "raises",
    ],
)
def test_what_is_wrong_with_a_mesh_is_told(best_mesh: Callable, hint: str):
    expect(check_best_mesh(best_mesh), False, hint)


def test_the_stub_of_a_mesh_is_not_started():
    expect(check_best_mesh(in_the_lab("def best_mesh")["best_mesh"]), None, "best_mesh: not started")  # type: ignore[arg-type]


def test_cases_have_several_best_meshes():
    assert len({tried_out(*case) for case in SIZES}) >= 5
