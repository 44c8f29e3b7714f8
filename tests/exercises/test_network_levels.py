"""The check of lab 03: solutions pass in both frameworks, and each known mistake is told by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tplab.jax as tj
import tplab.torch as tt
from labs.source import build
from tests.exercises.test_exercises import expect
from tplab.exercises.network_levels import check_gather_all


def in_the_lab(start: str) -> dict[str, Any]:
    """The names that the cell which begins so defines."""
    cells = [cell.source for cell in build.read_source("03_network_levels").cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"tt": tt}
    exec(next(source for source in cells if source.startswith(start)), names)
    return names


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


def test_digits_are_not_lost():
    """Small whole numbers go through bfloat16 and through int unharmed; others do not."""
    right = across_first(tt)
    for dtype in (torch.bfloat16, torch.int32):
        expect(
            check_gather_all(lambda x, dtype=dtype: right(x.to(dtype)).to(x.dtype)),
            False,
            "right for small whole numbers",
        )
    expect(check_gather_all(lambda x: right(x.float())), True, "")


def test_the_labs_stub_is_not_started():
    expect(check_gather_all(in_the_lab("def gather_all")["gather_all"]), None, "gather_all: not started")  # type: ignore[arg-type]
