"""The exercise of lab 25: a step with two bugs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tplab.exercises.damage import Graphs, Untouched
from tplab.exercises.verdict import Verdict, beside, check, differs, refuse, refuse_damage, right, run_on
from tplab.mesh import Mesh
from tplab.sharding import P, split
from tplab.widgets.matrices import Panel

if TYPE_CHECKING:
    from torch import Tensor, nn

WIDTH, HIDDEN, ROWS = 6, 12, 24
STEP_MESHES = (Mesh(dp=2, tp=2), Mesh(dp=4, tp=1), Mesh(dp=1, tp=3), Mesh(dp=3, tp=2), Mesh(dp=1, tp=1))
WEIGHTS = {"scale": P(), "up": P(None, "tp"), "down": P("tp")}
"""How each parameter is sharded."""


@check()
def check_step(step: Callable[[Any, Any, Any], Any]) -> Verdict:
    """Check that `step(net, x, y)` leaves the gradients of the mean squared error over the whole batch in `net`, and
    returns that error on every rank.

    net     a tensor-parallel MLP; its `scale` is the same on all ranks, and `up` and `down` are cut along 'tp'
    x, y    [rows of this rank, WIDTH], cut along 'dp'
    """
    panels: list[Panel] = []
    for mesh in STEP_MESHES:
        seen, num_bytes = _stepped(step, mesh)
        shown = _compare(seen, mesh)
        panels = panels or shown
        ranks, parts = mesh.axis_size("dp"), mesh.axis_size("tp")
        needed = 2 * (ranks - 1) * 8 * (WIDTH + 2 * WIDTH * HIDDEN // parts + 1) // ranks  # and the loss
        if num_bytes > 2 * needed:
            refuse(
                f" on {mesh}: the gradients are right, but rank 0 sends {num_bytes:,} bytes along 'dp', and an "
                f"all_reduce of the gradients and the loss sends {needed:,}.\nWhat of it do the ranks not need?"
            )
    meshes = ", ".join(map(str, STEP_MESHES))
    return right(f" is right.\nThe loss and all gradients are those of one rank on {meshes}.", panels)


Seen = tuple[float, dict[str, Any]]
"""One rank's loss and gradient of each parameter after a step."""


def _whole() -> dict[str, Tensor]:
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes = {"scale": (WIDTH,), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {key: torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for key, shape in shapes.items()}


def _batch() -> tuple[Tensor, Tensor]:
    import torch

    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def _net(rows: list[int], graphs: Graphs) -> nn.Module:
    """This rank's part of the model. It adds the number of rows of each input to `rows`."""
    import torch
    from torch import nn

    from tplab.torch import all_reduce, copy_to
    from tplab.torch.layers.parameters import piece_of

    class MLP(nn.Module):
        scale: Tensor
        up: Tensor
        down: Tensor

        def __init__(self) -> None:
            super().__init__()
            for key, value in _whole().items():
                self.register_parameter(key, nn.Parameter(piece_of(value, WEIGHTS[key])))

        def forward(self, x: Tensor) -> Tensor:
            rows.append(len(x))
            with graphs.watch():
                h = torch.tanh(copy_to(x * self.scale, "tp") @ self.up)
                return all_reduce(h @ self.down, "tp")

    return MLP()


def _stepped(step: Callable[[Any, Any, Any], Any], mesh: Mesh) -> tuple[list[Seen], int]:
    """Each rank's loss and gradients after a step, and the bytes that rank 0 sent along 'dp'. Refuses damage."""
    from tplab.torch import axis_index, axis_size

    def program() -> Seen:
        rows, graphs = [], Graphs()
        net = _net(rows, graphs)
        x, y = (whole.chunk(axis_size("dp"))[axis_index("dp")].clone() for whole in _batch())
        before, weights = Untouched({"x": x, "y": y}), Untouched(dict(net.named_parameters()), generators=False)
        loss = step(net, x, y)
        parameters = dict(net.named_parameters())
        for key, parameter in parameters.items():
            if parameter.grad is None:
                refuse(f" on {mesh}: {key} has no gradient after the step. {EMPTY}")
        if graphs.alive:
            refuse(f" on {mesh}: the graph of this step is still in memory. Call backward() without retain_graph.")
        if frozen := [key for key, parameter in parameters.items() if not parameter.requires_grad]:
            refuse(f" on {mesh}: it leaves {frozen[0]} without requires_grad, so the next step would not train it.")
        refuse_damage(before, f"on {mesh}, ")
        if weights.damage():
            refuse(f" on {mesh}: {STEPPED}")
        if max(rows) > len(x):
            text = "the model gets more rows than the rank's own, so the ranks of 'dp' no longer share the work."
            refuse(f" on {mesh}: {text}")
        return _number(loss), {key: parameter.grad for key, parameter in parameters.items()}

    out = run_on(mesh, program, distributed=True)
    return out.per_rank, out.trace.bytes_sent(rank=0, axis="dp")


EMPTY = "Call loss.backward(), and leave what it gives in `.grad`: the caller's optimizer needs it."
STEPPED = "it changes the weights. Leave the gradients in `net`: the caller's optimizer does the step."


def _number(loss: Any) -> float:
    if loss is None:
        raise TypeError("it must return the loss; is a `return` missing?")
    if getattr(loss, "numel", lambda: 0)() == 1:
        return loss.item()
    if not isinstance(loss, int | float):
        raise TypeError(f"it must return the loss, one number; it returned {_described(loss)}")
    return float(loss)


def _compare(seen: Sequence[Seen], mesh: Mesh) -> list[Panel]:
    """A picture of a gradient; refuses a loss or gradients that differ from those of one device."""
    import torch

    whole = {key: value.requires_grad_() for key, value in _whole().items()}
    x, y = _batch()
    error = (torch.tanh(x * whole["scale"] @ whole["up"]) @ whole["down"] - y).square().mean()
    error.backward()
    right = {key: split(value.grad, WEIGHTS[key], mesh) for key, value in whole.items()}
    wrong = [
        (key, rank)
        for key, pieces in right.items()
        for rank, (_, found) in enumerate(seen)
        if not torch.allclose(found[key].double(), pieces[rank], rtol=1e-5, atol=1e-9)
    ]
    key, rank = wrong[0] if wrong else ("scale", 0)
    found, want = seen[rank][1][key], right[key][rank]
    panels = _panels(found, want, f"your gradient of {key}, rank {rank}")
    if wrong:
        hint = _gradient_hint(found.double(), want, rank, is_alone=len({key for key, _ in wrong}) == 1)
        refuse(f" on {mesh}: the gradient of {key} {hint}", panels)
    for rank, (loss, _) in enumerate(seen):
        if differs(loss, error.item(), 1e-5 * error.item()):
            refuse(
                f" on {mesh}: all gradients are right, and the loss that rank {rank} returns is "
                f"{loss / error.item():.4g} times that of the whole batch.\n"
                "Over which ranks is the loss the same, and over which is it a part?",
                panels,
            )
    return panels


def _gradient_hint(found: Tensor, want: Tensor, rank: int, is_alone: bool) -> str:
    ratio = _ratio(found, want)
    times = "no multiple of" if ratio is None else f"{ratio:.4g} times"
    asks = (
        "Those of the other parameters are right. What is done to this one alone?"
        if is_alone
        else "Are gradients combined that belong together, those of the copies along 'dp', and only those?"
        if ratio is None
        else "What do the loss and the sum of the gradients divide it by?"
    )
    return f"on rank {rank} is {times} that of the whole batch.\n{asks}"


def _panels(found: Tensor, want: Tensor, title: str) -> list[Panel]:
    """A gradient beside the right one, with differences marked."""
    got, best = found.double().numpy(force=True), want.numpy(force=True)
    return beside(title, got, best, differs(got, best, 1e-5 * abs(best).max()))


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a tensor [{', '.join(map(str, shape))}]" if shape is not None else f"{type(value).__name__}"


def _ratio(found: Tensor, want: Tensor) -> float | None:
    """The factor if `found` is a multiple of `want`, or else None."""
    scale = float((found * want).sum() / want.square().sum())
    return scale if (found - scale * want).norm() <= 1e-5 * want.norm() else None
