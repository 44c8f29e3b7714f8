"""The exercises of lab 25: a mean over tokens that ranks have unequally many of, and a step with two bugs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from tplab.exercises.damage import Graphs, Untouched
from tplab.exercises.verdict import Verdict, beside, check, differs, hint, listed, refuse, refuse_damage, right, run_on
from tplab.mesh import Mesh
from tplab.widgets.matrices import Panel

if TYPE_CHECKING:
    from torch import Tensor, nn

WIDTH, HIDDEN, ROWS = 6, 12, 24


# --- a mean over tokens ----------------------------------------------------------------------------------------------

LENGTH = 10
TOKENS = {1: (5,), 2: (6, 2), 3: (1, 7, 4), 4: (3, 0, 8, 2)}
"""Ranks -> how many of the LENGTH tokens count on each of them."""
TOKEN_MESHES = (Mesh(dp=2, tp=1), Mesh(dp=4, tp=1), Mesh(dp=3, tp=2), Mesh(dp=1, tp=1))


@check()
def check_token_mean(token_mean: Callable[[Any, Any], Any]) -> Verdict:
    """Whether `token_mean(losses, mask)` is a loss whose gradients, averaged over 'dp', are those of the mean over all
    tokens of all ranks.

    losses, mask [tokens of this rank]   ->   a loss []; mask is 1 where a token counts and 0 elsewhere
    """
    panels: list[Panel] = []
    for mesh in TOKEN_MESHES:
        counts = TOKENS[mesh.axis_size("dp")]
        found, sent = _token_gradients(token_mean, mesh, counts)
        want = _whole_token_gradient(counts)
        shown = _panels(found[0], want, "your gradient of w")
        if text := _wrong_mean(found, want, mesh):
            refuse(f" on {mesh}, where the ranks of 'dp' have {listed(counts)} tokens: {text}", shown)
        if sent > 1.5 * 8 * LENGTH * (len(counts) - 1):
            text = f"the gradients are right, but rank 0 sends {sent:,} bytes, as if to gather all losses."
            way = f"The losses stay where they are. Which one number, of 8 bytes, do {len(counts)} ranks need?"
            refuse(f" on {mesh}: {text}\n{way}")
        panels = panels or shown
    meshes = ", ".join(map(str, TOKEN_MESHES))
    return right(f" is right.\nIts gradients are those of the mean over all tokens on {meshes}.", panels)


def _panels(found: Tensor, want: Tensor, title: str) -> list[Panel]:
    """A gradient beside the right one; what differs is marked."""
    got, best = found.double().numpy(force=True), want.numpy(force=True)
    return beside(title, got, best, differs(got, best, 1e-5 * abs(best).max()))


def _tokens(index: int, count: int) -> tuple[Tensor, Tensor]:
    """The inputs of one rank, [LENGTH, WIDTH], and which of them count."""
    import torch

    generator = torch.Generator().manual_seed(index)
    x = torch.randn(LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return x, (torch.randperm(LENGTH, generator=generator) < count).double()


def _token_gradients(
    token_mean: Callable[[Any, Any], Any], mesh: Mesh, counts: Sequence[int]
) -> tuple[list[Tensor], int]:
    """Each rank's gradient after averaging over 'dp', and the bytes rank 0 has sent."""
    import torch

    from tplab.torch import all_reduce, axis_index

    def program() -> Tensor:
        index = axis_index("dp")
        x, mask = _tokens(index, counts[index])
        w = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)
        losses = (x @ w).square()
        before = Untouched({"losses": losses, "mask": mask})
        loss = token_mean(losses, mask)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TypeError(f"it must return one number, as a tensor; it returned {_described(loss)}")
        refuse_damage(before)
        if loss.requires_grad:
            loss.sum().backward()
        if w.grad is None:
            raise ValueError(
                "its result does not depend on losses, so there is no gradient to average. Do not detach it; a rank "
                "without tokens needs a gradient of zeros too"
            )
        return all_reduce(w.grad, "dp", "mean")

    out = run_on(mesh, program, distributed=True)
    averaging = 2 * 8 * WIDTH * (len(counts) - 1) // len(counts)
    return out.per_rank, out.trace.bytes_sent(rank=0) - averaging


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a tensor [{', '.join(map(str, shape))}]" if shape is not None else f"{type(value).__name__}"


def _whole_token_gradient(counts: Sequence[int]) -> Tensor:
    import torch

    xs, masks = zip(*(_tokens(index, count) for index, count in enumerate(counts)))
    w = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)
    losses, mask = (torch.cat(xs) @ w).square(), torch.cat(masks)
    ((losses * mask).sum() / mask.sum()).backward()
    assert w.grad is not None
    return w.grad


def _wrong_mean(found: Sequence[Tensor], want: Tensor, mesh: Mesh) -> str:
    """What is wrong with the gradients; "" if nothing is."""
    ranks, parts = mesh.axis_size("dp"), mesh.axis_size("tp")
    if any(one.isnan().any() for one in found):
        return "the gradients are not numbers.\nA rank without tokens divides 0 by 0: what should all ranks divide by?"
    ratio = _ratio(found, want)
    if ratio is None:
        return (
            "the gradients are no multiple of the right ones.\nEach token must count alike, whichever rank it is on: "
            "all ranks divide the sum of their losses by the same number."
        )
    if abs(ratio - 1) < 1e-6:
        return ""
    known = {
        "Averaging divides by the number of ranks: who has done that already?": 1 / ranks,
        "Something is summed over the ranks that is already whole.": ranks,
        "The ranks of 'tp' have the same tokens: are these counted once for each of them?": 1 / parts,
    }
    why = hint(
        ratio, known, "What do you divide the sum by, and what does averaging over the ranks divide it by?", 1e-6
    )
    return f"the gradients are {ratio:.4g} times as large as they should be.\n{why}"


def _ratio(found: Sequence[Tensor], want: Tensor) -> float | None:
    """The one number by which all of these are a multiple of `want`; None if there is none."""
    scale = float((found[0].double() * want).sum() / want.square().sum())
    is_multiple = all(bool((one.double() - scale * want).norm() <= 1e-5 * want.norm()) for one in found)
    return scale if is_multiple else None


# --- a step ----------------------------------------------------------------------------------------------------------

STEP_MESHES = (Mesh(dp=2, tp=2), Mesh(dp=4, tp=1), Mesh(dp=1, tp=3), Mesh(dp=3, tp=2), Mesh(dp=1, tp=1))
WEIGHTS = {"scale": None, "up": 1, "down": 0}
"""Parameter -> the dim along which 'tp' cuts it."""


@check()
def check_step(step: Callable[[Any, Any, Any], Any]) -> Verdict:
    """Whether `step(net, x, y)` leaves the gradients of the mean squared error over the whole batch in `net`, and
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
        needed = 2 * (ranks - 1) * 8 * (WIDTH + 2 * WIDTH * HIDDEN // parts) // ranks
        if num_bytes > 2 * needed:
            refuse(
                f" on {mesh}: the gradients are right, but rank 0 sends {num_bytes:,} bytes along 'dp', and an "
                f"all_reduce of the gradients sends {needed:,}.\nDoes it gather rows of other ranks, or what the model "
                "makes of them?"
            )
    meshes = ", ".join(map(str, STEP_MESHES))
    return right(f" is right.\nThe loss and all gradients are those of one rank on {meshes}.", panels)


Seen = tuple[float, dict[str, Any]]
"""What one rank has after a step: the loss, and the gradient of each parameter."""


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
    """This rank's part of the model; it notes how many rows it is given."""
    import torch
    from torch import nn

    from tplab.torch import all_reduce, axis_index, axis_size, copy_to

    class MLP(nn.Module):
        scale: Tensor
        up: Tensor
        down: Tensor

        def __init__(self) -> None:
            super().__init__()
            for key, value in _whole().items():
                dim = WEIGHTS[key]
                piece = value if dim is None else value.chunk(axis_size("tp"), dim)[axis_index("tp")]
                self.register_parameter(key, nn.Parameter(piece.clone()))

        def forward(self, x: Tensor) -> Tensor:
            rows.append(len(x))
            with graphs.watch():
                h = torch.tanh(copy_to(x * self.scale, "tp") @ self.up)
                return all_reduce(h @ self.down, "tp")

    return MLP()


def _stepped(step: Callable[[Any, Any, Any], Any], mesh: Mesh) -> tuple[list[Seen], int]:
    """What each rank has after a step, and the bytes that rank 0 has sent along 'dp'. Refuses what it leaves behind."""
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
                refuse(f" on {mesh}: {key} has no gradient. Call loss.backward().")
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
    """A picture of a gradient, if the loss and all gradients are those of one device."""
    import torch

    whole = {key: value.requires_grad_() for key, value in _whole().items()}
    x, y = _batch()
    error = (torch.tanh(x * whole["scale"] @ whole["up"]) @ whole["down"] - y).square().mean()
    error.backward()
    panels: list[Panel] = []
    for (key, dim), (rank, (_, found)) in product(WEIGHTS.items(), enumerate(seen)):
        want = whole[key].grad
        assert want is not None
        piece = want if dim is None else want.chunk(mesh.axis_size("tp"), dim)[mesh.index(rank, "tp")]
        shown = _panels(found[key], piece, f"your gradient of {key}, rank {rank}")
        if not torch.allclose(found[key].double(), piece, rtol=1e-5, atol=1e-9):
            refuse(f" on {mesh}: the gradient of {key} {_gradient_hint(found[key].double(), piece, rank)}", shown)
        panels = panels or shown
    for rank, (loss, _) in enumerate(seen):
        if differs(loss, error.item(), 1e-5 * error.item()):
            refuse(
                f" on {mesh}: all gradients are right, and the loss that rank {rank} returns is "
                f"{loss / error.item():.4g} times that of the whole batch.\n"
                "Over which ranks is the loss the same, and over which is it a part?",
                panels,
            )
    return panels


def _gradient_hint(found: Tensor, want: Tensor, rank: int) -> str:
    ratio = _ratio([found], want)
    if ratio is None:
        return (
            f"on rank {rank} is no multiple of that of the whole batch.\nAre gradients combined that belong together, "
            "those of the copies along 'dp', and only those?"
        )
    return (
        f"on rank {rank} is {ratio:.4g} times that of the whole batch.\nWhat do the loss and the sum of the gradients "
        "divide it by?"
    )
