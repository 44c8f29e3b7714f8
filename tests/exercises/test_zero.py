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


def step(
    op: str = "mean", reduces: bool = True, gathers: bool = True, returns_m: bool = True, decay: float = 0.9
) -> Callable[..., Any]:
    def program(w: torch.Tensor, dw: torch.Tensor, m: torch.Tensor) -> Any:
        size, index = len(m), tt.axis_index("dp")
        own = slice(index * size, (index + 1) * size)
        new_m = decay * m + (tt.reduce_scatter(dw, "dp", op=op) if reduces else dw[own])
        new = w[own] - 0.5 * new_m
        if gathers:
            return tt.all_gather(new, "dp"), new_m if returns_m else m
        w = w.clone()
        w[own] = new
        return w, new_m

    return program


def gathers_updates(w, dw, m):
    """As some implementations do: what each rank has to change is gathered, in place of the new rows."""
    m = 0.9 * m + tt.reduce_scatter(dw, "dp", op="sum") / tt.axis_size("dp")
    return w - tt.all_gather(0.5 * m, "dp"), m


def plain_data_parallelism(w, dw, m):
    """Every rank steps everything, with the momentum of all."""
    whole = 0.9 * tt.all_gather(m, "dp") + tt.all_reduce(dw, "dp", "mean")
    return w - 0.5 * whole, tt.scatter_to(whole, "dp", 0)


def gathers_the_gradient(w, dw, m):
    whole = 0.9 * tt.all_gather(m, "dp") + tt.all_gather(tt.reduce_scatter(dw, "dp", op="mean"), "dp")
    return w - 0.5 * whole, tt.scatter_to(whole, "dp", 0)


def keeps_all_of_m(w, dw, m):
    whole = 0.9 * tt.all_gather(m, "dp") + tt.all_reduce(dw, "dp", "mean")
    return w - 0.5 * whole, whole


def own_gradient(w, dw, m):
    whole = 0.9 * tt.all_gather(m, "dp") + dw
    return w - 0.5 * whole, m


def stepped_with_the_old_momentum(w, dw, m):
    new_m = 0.9 * m + tt.reduce_scatter(dw, "dp", op="mean")
    return w - 0.5 * tt.all_gather(m, "dp"), new_m


def in_place(w, dw, m):
    m.mul_(0.9).add_(tt.reduce_scatter(dw, "dp", op="mean"))
    return w - 0.5 * tt.all_gather(m, "dp"), m


def mean_of_models(w, dw, m):
    w, m = step(gathers=False)(w, dw, m)
    return tt.all_reduce(w, "dp", "mean"), m


def test_the_lab_shows_the_forgotten_gather():
    verdict = check_step(in_the_lab("def my_step(")["my_step"])
    expect(verdict, False, "This rank's own rows are new", "Which collective")
    assert verdict.panels


@pytest.mark.parametrize("fn", [step(), gathers_updates])
def test_its_repairs_pass(fn: Callable[..., Any]):
    verdict = check_step(fn)
    expect(verdict, True, "w, m equal the unsharded result")
    assert "do without" not in verdict.text


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (step(gathers=False), "This rank's own rows are new"),
        (own_gradient, "The other ranks' gradients are missing"),
        (step(op="sum"), "so the step is too long"),
        (step(reduces=False), "Each rank steps its rows with its own gradient"),
        (step(decay=1), "The momentum of before is multiplied by 0.9 first"),
        (stepped_with_the_old_momentum, "w is stepped with the momentum of before this step"),
        (lambda w, dw, m: (w - 0.5 * tt.all_reduce(dw, "dp", "mean"), m), "leaves out the momentum"),
        (step(returns_m=False), "w is right, but m is as it was before the step"),
        (lambda w, dw, m: step()(w, dw, m)[0], "it must return w, m, and it returned 1 value"),
        (keeps_all_of_m, "m has shape [4, 3] on rank 0"),
        (plain_data_parallelism, "it sends 288 bytes, where 192 would do"),
        (gathers_the_gradient, "ZeRO 1 sends as much as one all_reduce of the gradients"),
        (in_place, "it changes m in place"),
        (mean_of_models, "Every row takes only 1/dp of its step"),
    ],
)
def test_what_is_wrong_with_a_step_is_told(fn: Callable[..., Any], hint: str):
    expect(check_step(fn), False, hint)


def test_plain_data_parallelism_is_not_zero():
    """Its numbers are right, with pieces of the momentum as with the whole: it sends what it has no need of."""
    for fn in (plain_data_parallelism, gathers_the_gradient):
        expect(check_step(fn), False, "the numbers are right, but on Mesh(dp=2) it sends")


def test_a_layer_that_gathers_the_batch_too_is_refused():
    def whole(x: Any, piece: Any) -> Any:
        y = layer(tt.all_gather)(tt.all_gather(x, "dp", 0), piece)
        return tt.scatter_to(y, "dp", 0)

    expect(check_layer(whole), False)

    def more(x: Any, piece: Any) -> Any:
        unused = [tt.all_gather(x.detach(), "dp", 0) for _ in range(2)]
        return layer(tt.all_gather)(x + 0 * torch.stack(unused).sum(0)[: len(x)], piece)

    expect(check_layer(more), False, "and x stays on its rank")


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
    expect(verdict, True, "y, dx, dpiece equal the unsharded result", "It gathers once")
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


class _Summed(torch.autograd.Function):
    """Gathers a piece, and adds up the gradients of all pieces to keep those of one."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor) -> torch.Tensor:
        return tt.all_gather(piece, "dp")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return tt.all_reduce(grads[0], "dp").chunk(tt.axis_size("dp"))[tt.axis_index("dp")]


def one_gather_per_matrix(x: Any, piece: Any) -> Any:
    a, b = (tt.all_gather(piece, "dp", 0).reshape(2, *2 * x.shape[1:])[i] for i in range(2))
    return torch.relu(x @ a) @ b


class _Again(torch.autograd.Function):
    """The layer that frees its matrices, and gathers them again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, piece)
        return layer(tt.all_gather)(x, piece)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, piece = ctx.saved_tensors
        a, b = tt.all_gather(piece, "dp", 0).reshape(2, *2 * x.shape[1:])
        h = x @ a
        dh = grads[0] @ b.T * (h > 0)
        row = torch.cat([(x.T @ dh).flatten(), (h.relu().T @ grads[0]).flatten()])
        return dh @ a.T, tt.reduce_scatter(row, "dp")


def checkpointed(x: Any, piece: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(layer(tt.all_gather), x, piece, use_reentrant=False)


@pytest.mark.parametrize("fn", [_Again.apply, checkpointed])
def test_a_layer_that_gathers_again_is_not_said_to_gather_once(fn: Callable[..., Any]):
    verdict = check_layer(lambda x, piece: fn(x, piece))
    expect(verdict, True, "y, dx, dpiece equal the unsharded result")
    assert "gathers once" not in verdict.text


def beside_each_other(x: Any, piece: Any) -> Any:
    """Gathers first, and then takes the row for one matrix with a on its left."""
    a, b = tt.all_gather(piece, "dp", 0).reshape(x.shape[1], -1).chunk(2, dim=1)
    return torch.relu(x @ a) @ b


def transposed(x: Any, piece: Any) -> Any:
    a, b = tt.all_gather(piece, "dp", 0).reshape(2, *2 * x.shape[1:])
    linear = torch.nn.functional.linear
    return linear(linear(x, a).relu(), b)


def without_relu(x: Any, piece: Any) -> Any:
    a, b = tt.all_gather(piece, "dp", 0).reshape(2, *2 * x.shape[1:])
    return x @ a @ b


def test_a_layer_that_sends_too_much_is_refused():
    expect(check_layer(one_gather_per_matrix), False, "numbers are right", "gathers its whole row once")
    expect(check_layer(layer(lambda piece, *_: _Summed.apply(piece))), False, "numbers are right", "its own piece only")


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (without_relu, "The relu is missing"),
        (layer(lambda piece, *args: tt.all_gather(piece.detach(), *args)), "All of it is zero"),
        (in_two_places, "Gather first, and cut the row then."),
        (beside_each_other, "You cut the row as a matrix [D, 2 D]"),
        (transposed, "this is relu(x @ a.T) @ b.T"),
        (layer(tt.all_gather, first=1), "The two matrices are swapped"),
        (layer(tt.gather_from), "Which gather has a reduce_scatter as its backward pass?"),
        (layer(lambda piece, *args: tt.all_gather(_Mean.apply(piece), *args)), "Is it divided by R once too often?"),
        (layer(lambda piece, *_: piece.repeat(tt.axis_size("dp"))), "entries are off"),
    ],
    ids=[
        "no relu",
        "no gradient",
        "in two places",
        "beside",
        "transposed",
        "exchanged",
        "gather_from",
        "mean",
        "own piece",
    ],
)
def test_what_is_wrong_with_a_layer_is_told(fn: Callable[..., Any], hint: str):
    expect(check_layer(fn), False, hint, "Mesh(dp=2)")


def test_untouched_stubs():
    def my_layer(x, piece): ...

    expect(check_layer(my_layer), None, "not started")  # type: ignore[arg-type]
