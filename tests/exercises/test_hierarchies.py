"""The checks of lab 03: solutions pass in both frameworks, and each known mistake is told by name."""

from collections.abc import Callable
from typing import Any

import pytest

import tplab.jax as tj
import tplab.torch as tt
from labs.source import build
from tests.exercises.test_exercises import expect
from tplab.exercises.hierarchies import check_average, check_gather_all

# ------------------------------------------------------------------------------------------------------------ average


def in_the_lab(start: str) -> dict[str, Any]:
    """The names that the cell which begins so defines."""
    cells = [cell.source for cell in build.read_source("03_hierarchies").cells if cell.cell_type == "code"]
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
        (lambda gradient: tt.all_reduce(gradient, "dp") / 8, "entries are off"),
    ],
    ids=["sum", "own", "all ranks", "tp", "eight"],
)
def test_what_is_wrong_with_an_average_is_told(average: Callable, hint: str):
    verdict = check_average(average)
    expect(verdict, False, hint)
    assert verdict.panels


# --------------------------------------------------------------------------------------------------------- gather_all


def across_first(ops: Any) -> Callable:
    def gather_all(x):
        rows = ops.all_gather(ops.all_gather(x, "node"), "gpu")  # ordered by GPU, then by node
        by_gpu = rows.reshape(ops.axis_size("gpu"), ops.axis_size("node"), -1)
        return by_gpu.swapaxes(0, 1).reshape(rows.shape)

    return gather_all


def test_gathering_across_first_passes():
    expect(check_gather_all(across_first(tt)), True, "Every row crosses to each other node once.")
    expect(check_gather_all(across_first(tj), "jax"), True, "Every row crosses to each other node once.")


@pytest.mark.parametrize(
    ("gather_all", "hint"),
    [
        (lambda x: tt.all_gather(tt.all_gather(x, "node"), "gpu"), "ordered by GPU and then by node"),
        (lambda x: tt.all_gather(tt.all_gather(x, "gpu"), "node"), "a GPU sends 3 rows over axes other than gpu"),
        (lambda x: tt.all_gather(x, ("node", "gpu")), "a GPU sends 5 rows over axes other than gpu, where 1 would do"),
        (lambda x: tt.all_gather(x, "gpu"), "shape [3, 3]"),
    ],
    ids=["unsorted", "inside first", "one ring", "inside only"],
)
def test_what_is_wrong_with_a_gather_is_told_and_shown(gather_all: Callable, hint: str):
    verdict = check_gather_all(gather_all)
    expect(verdict, False, hint, "Mesh(node=2, gpu=3)")
    assert verdict.panels


def test_the_labs_stub_is_not_started():
    expect(check_gather_all(in_the_lab("def gather_all")["gather_all"]), None, "gather_all: not started")  # type: ignore[arg-type]
