"""The checks of lab 17: solutions pass in both frameworks, and each known mistake is told by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tplab.torch as tt
from labs.source import build
from tests.exercises.test_exercises import expect
from tplab import Mesh
from tplab.exercises import zero
from tplab.exercises.check import grade
from tplab.exercises.zero import check_layer, check_step

# --------------------------------------------------------------------------------------------------- the bug to repair


def in_the_lab(start: str) -> dict[str, Any]:
    """The names that the cell which begins so defines."""
    cells = [cell.source for cell in build.read_source("17_zero").cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"torch": torch, "tt": tt}
    exec(next(source for source in cells if source.startswith(start)), names)
    return names


def step(op: str = "mean", reduces: bool = True, gathers: bool = True) -> Callable[..., Any]:
    def program(w: torch.Tensor, dw: torch.Tensor) -> torch.Tensor:
        size, index = len(w) // tt.axis_size("dp"), tt.axis_index("dp")
        own = slice(index * size, (index + 1) * size)
        mine = tt.reduce_scatter(dw, "dp", op=op) if reduces else dw[own]
        new = w[own] - 0.5 * mine
        if gathers:
            return tt.all_gather(new, "dp")
        w = w.clone()
        w[own] = new
        return w

    return program


def test_the_lab_shows_the_forgotten_gather():
    verdict = check_step(in_the_lab("def my_step(")["my_step"])
    expect(verdict, False, "This rank's own rows are new", "Which collective")
    assert verdict.panels


def test_its_repairs_pass():
    verdict = check_step(step())
    expect(verdict, True, "w equals the unsharded result")
    assert "do without" not in verdict.text
    twice = lambda w, dw: w - 0.5 * tt.all_reduce(tt.all_reduce(dw, "dp", "mean"), "dp", "mean")  # noqa: E731
    expect(check_step(twice), True, "is there a collective that you can do without?")


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (step(gathers=False), "This rank's own rows are new"),
        (lambda w, dw: w - 0.5 * dw, "The other ranks' gradients are missing"),
        (step(op="sum"), "R times too long"),
        (step(reduces=False), "entries are off"),
    ],
    ids=["stale", "own", "sum", "not reduced"],
)
def test_what_is_wrong_with_a_step_is_told(fn: Callable[..., Any], hint: str):
    expect(check_step(fn), False, hint, "Mesh(dp=2)")


# --------------------------------------------------------------------------------------------------------- one message


def layer(gather: Callable[..., Any], first: int = 0) -> Callable[..., Any]:
    def program(x: Any, piece: Any) -> Any:
        matrices = gather(piece, "dp", 0).reshape(2, x.shape[1], x.shape[1])
        h = x @ matrices[first]
        return (h * (h > 0)) @ matrices[1 - first]

    return program


def test_a_layer_of_two_matrices_passes_in_both_frameworks():
    import tplab.jax as tj

    verdict = check_layer(layer(tt.all_gather))
    expect(verdict, True, "y, dx, dpiece equal the unsharded result")
    assert "do without" not in verdict.text
    in_jax = grade(layer(tj.all_gather), replace(zero.LAYER, meshes=(Mesh(dp=3),)), "jax")
    expect(in_jax, True, "y, dx, dpiece equal the unsharded result")


def in_two_places(x: Any, piece: Any) -> Any:
    a, b = (tt.all_gather(half, "dp", 0).reshape(x.shape[1], -1) for half in piece.chunk(2))
    return torch.relu(x @ a) @ b


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] / tt.axis_size("dp")


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (in_two_places, "Gather first, and cut the row then."),
        (layer(tt.all_gather, first=1), "The two matrices are swapped"),
        (layer(tt.gather_from), "gather_from is for ranks that all do the same afterwards"),
        (layer(lambda piece, *args: tt.all_gather(_Mean.apply(piece), *args)), "This is the mean"),
        (layer(lambda piece, *_: piece.repeat(tt.axis_size("dp"))), "entries are off"),
    ],
    ids=["in two places", "exchanged", "gather_from", "mean", "own piece"],
)
def test_what_is_wrong_with_a_layer_is_told(fn: Callable[..., Any], hint: str):
    expect(check_layer(fn), False, hint, "Mesh(dp=2)")


def test_untouched_stubs():
    def my_layer(x, piece): ...

    expect(check_layer(my_layer), None, "not started")  # type: ignore[arg-type]
