"""The exercise of lab 15: recomputation that draws different random numbers the second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tplab.exercises.verdict import Verdict, beside, check, differs, refuse, right
from tplab.widgets.matrices import Panel, number_text

Forget = Callable[[Any, Any], tuple[Any, Any]]
Again = Callable[[Any, Any, Any], Any]

LAYERS, ROWS, WIDTH = 5, 3, 4


@check("my_forget and my_again", not_with=("checkpoint", "checkpoint_sequential"), functions=2)
def check_recomputed(forget: Forget, again: Again) -> Verdict:
    """Check that `forget(piece, x)` -> (y, kept) and `again(piece, kept, dy)` -> dx run a piece of a model without
    keeping its activations, and still give the gradients of a backward pass that kept them, even with dropout.

    x, y, dx, dy [B, D]. The gradients of the weights are added to `.grad`.
    """
    panels = [_compare(forget, again, dropout, every) for dropout in (0.0, 0.5) for every in (2, 1, LAYERS)]
    _look_at_memory(forget, again)
    _look_in_flight(forget, again)
    text = " are right: y, dx and every gradient of a weight, with dropout and without.\n"
    text += "The random generator is left as it was found, and two microbatches may be in flight."
    return right(text, panels[-1])


def _compare(forget: Forget, again: Again, dropout: float, every: int) -> list[Panel]:
    """Pictures of dx; refuses wrong results in two batches.

    The first pass may drop any numbers. The right gradients are those for the numbers that it dropped.
    """
    import torch

    where = f"{'with' if dropout else 'without'} dropout, a checkpoint every {every} of {LAYERS} layers"
    total: dict[str, Any] = {}
    dropped, panels = [], []
    with torch.random.fork_rng(devices=[]):
        layers, x, dy = _model(dropout)
        pieces = [torch.nn.Sequential(*layers[k : k + every]) for k in range(0, LAYERS, every)]
        torch.manual_seed(7)
        for batch in range(2):
            y, kept = x, []
            for piece in pieces:
                before, given = y, y.detach().clone()
                y, held = forget(piece, y)
                if wrong := _left_behind(piece) or _holds_too_much(y, held, before):
                    refuse(f": {wrong}", of="my_forget")
                if not torch.equal(before.nan_to_num(), given.nan_to_num()):
                    refuse(": it changes x in place.", of="my_forget")
                kept.append(held)
            masks = [layer[-1].masks[-1] for layer in layers]
            if dropout and all(mask.all() for mask in masks):
                refuse(f": no layer has dropped anything, {where}. Is it in eval mode?", of="my_forget")
            want = _plain(layers, x, dy, masks)
            _refuse_wrong({"y": want["y"]}, {"y": y}, where, dropout)
            state, dx = torch.get_rng_state(), dy
            for piece, held in zip(reversed(pieces), reversed(kept)):
                before, given = dx, dx.detach().clone()
                dx = again(piece, held, dx)
                if not isinstance(dx, torch.Tensor):
                    what = "None" if dx is None else f"a {type(dx).__name__}"
                    refuse(f": it returned {what}. It must return the gradient of the piece's input.", of="my_again")
                if wrong := _left_behind(piece):
                    refuse(f": {wrong}", of="my_again")
                if not torch.equal(before.nan_to_num(), given.nan_to_num()):
                    refuse(": it changes dy in place.", of="my_again")
            total = {name: total.get(name, 0) + one for name, one in want.items() if name not in ("y", "dx")}
            _refuse_wrong({"dx": want["dx"]}, {"dx": dx}, where, dropout)
            _refuse_wrong(total, _gradients(layers), where, dropout, want if batch else {})
            if not torch.equal(state, torch.get_rng_state()):
                refuse(
                    f": y and every gradient are right, {where}, but it leaves the random generator in another state "
                    "than it found it.\nWhat the program draws next is then not what it would have drawn. Put the "
                    "generator back, or see `torch.random.fork_rng`.",
                    of="my_again",
                )
            dropped.append(torch.stack(masks))
            panels = beside("yours, dx", dx.numpy(force=True), want["dx"].numpy(force=True))
    if dropout and (torch.equal(*dropped) or (dropped[0] == dropped[0][0]).all()):
        text = "every batch and every layer must drop different numbers.\nDoes your code seed the generator, or put it"
        refuse(f": y and every gradient are right, but {text} back after the forward pass?", of="my_forget")
    return panels


def _look_in_flight(forget: Forget, again: Again) -> None:
    """Refuse functions that are right for one microbatch after the other, but not with two in flight."""
    import torch

    with torch.random.fork_rng(devices=[]):
        layers, x, dy = _model(0.5)
        pieces = [torch.nn.Sequential(*layers[:2]), torch.nn.Sequential(*layers[2:])]
        torch.manual_seed(7)
        flights = []
        for scale in (1, 2):
            y, kept = x * scale, []
            for piece in pieces:
                y, held = forget(piece, y)
                kept.append(held)
            flights.append((kept, _plain(layers, x * scale, dy, [layer[-1].masks[-1] for layer in layers])["dx"]))
        for kept, want in flights:  # first in, first out
            dx = dy
            for piece, held in zip(reversed(pieces), reversed(kept)):
                dx = again(piece, held, dx)
            if not torch.allclose(dx, want, rtol=0, atol=1e-9):
                refuse(
                    ": dx is right for one microbatch at a time, but not with two in flight.\nUnder 1F1B, the one that "
                    "went forward first also goes back first. Is everything that my_again needs in `kept`?",
                    beside("yours, dx", dx.numpy(force=True), want.numpy(force=True)),
                    of="my_again",
                )


def _left_behind(piece: Any) -> str:
    """In words, a mode that a pass has changed for the rest of the program; "" if there is none."""
    import torch

    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        return "it leaves gradients switched off. Use `with torch.no_grad():`, which switches them on again."
    if not all(layer.training for layer in piece.modules()):
        return "it leaves layers in eval mode, in which dropout drops nothing."
    return ""


def _refuse_wrong(
    right: dict[str, Any], found: dict[str, Any], where: str, dropout: float, alone: dict[str, Any] | None = None
) -> None:
    """Refuse the first of the results that is wrong. `alone` has the gradients of the second batch alone."""
    for key, want in right.items():
        a, b = found[key].numpy(force=True), want.numpy(force=True)
        of = "my_forget" if key == "y" else "my_again"
        if a.shape != b.shape:
            refuse(f": {key} has shape {list(a.shape)}, {where}; the right one has shape {list(b.shape)}.", of=of)
        off = differs(a, b)
        if not off.any():
            continue
        hint = f"It is off by up to {number_text(float(np.abs(a - b).max()))}."
        if alone and np.allclose(a, alone[key].numpy(force=True), rtol=0, atol=1e-9):
            hint = "It is that of the second batch alone. As in torch, a backward pass adds to `.grad`."
        elif dropout and key == "y":
            hint = "It is not what the layers compute with the numbers that they have dropped."
        elif dropout:
            hint = "It is right without dropout. The second pass does not drop the same numbers as the first one."
        elif not a.any():
            hint = "It is zero: does the second pass go back to the weights?"
        elif np.allclose(a, 2 * b, rtol=0, atol=1e-9):
            hint = "It is twice what it should be."
        refuse(f": {key} is not right, {where}.\n{hint}", beside(f"yours, {key}", a, b, off, apart=True), of)


def _plain(layers: Sequence[Any], x: Any, dy: Any, masks: Sequence[Any]) -> dict[str, Any]:
    """y, dx and the gradients of one backward pass that drops these numbers."""
    import torch

    weights = dict(_weights(layers))
    start = y = x.detach().clone().requires_grad_()
    for layer, mask in zip(layers, masks):
        y = torch.tanh(layer[0](y)) * mask / (1 - layer[-1].p)
    dx, *grads = torch.autograd.grad(y, [start, *weights.values()], dy)
    return {"y": y.detach(), "dx": dx, **dict(zip(weights, grads))}


def _noted(dropout: float) -> Any:
    """A dropout that records its mask in each call."""
    from torch import nn

    class Noted(nn.Dropout):
        def __init__(self) -> None:
            super().__init__(dropout)
            self.masks: list[Any] = []

        def forward(self, input: Any) -> Any:
            y = super().forward(input)
            self.masks.append(y.detach() != 0)
            return y

    return Noted()


def _model(dropout: float, rows: int = ROWS) -> tuple[list[Any], Any, Any]:
    """(layers, x, dy), always the same."""
    import torch
    from torch import nn

    random = np.random.default_rng(0)
    layers = []
    for _ in range(LAYERS):
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), _noted(dropout)).double()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.from_numpy(random.normal(size=tuple(parameter.shape))))
        layers.append(layer)
    x, dy = torch.from_numpy(random.normal(size=(2, rows, WIDTH)))
    return layers, x, dy


def _look_at_memory(forget: Forget, again: Again) -> None:
    """Refuse a forward pass that keeps activations elsewhere, in a closure, an object, or a global; and memory that
    remains in use after the backward pass."""
    import torch

    from tplab.torch import LiveBytes

    with torch.random.fork_rng(devices=[]), LiveBytes() as live:
        layers, x, dy = _model(0.5, rows=256)
        x, size = x.clone(), x.nbytes
        piece, before = torch.nn.Sequential(*layers), live.now()
        held = forget(piece, x)
        for layer in layers:
            layer[-1].masks.clear()  # they are the check's
        kept, states = live.now() - before, 4 * torch.get_rng_state().nbytes
        again(piece, held[1], dy)
        for layer in layers:
            layer[-1].masks.clear()
        del held, x  # its return value counts too
        left = live.now() + size - before - sum(one.nbytes for one in _gradients(layers).values())
    if kept > 2 * size + states:
        text = f"for an x of {size:,} bytes, {kept:,} bytes are still in memory after it."
        refuse(f": {text} Something keeps activations.", of="my_forget")
    if left > size // 2:
        text = f"for an x of {size:,} bytes, {left:,} bytes are still in memory when its backward pass has ended."
        refuse(f": {text} What was kept must be forgotten then.", of="my_again")


def _holds_too_much(y: Any, kept: Any, x: Any) -> str:
    """In words, what a piece's forward pass keeps besides its input; "" if nothing."""
    import torch

    if not isinstance(y, torch.Tensor):
        return f"it must return y and what to keep, and y is {y!r}."
    tensors = list(_tensors(kept))
    if y.grad_fn is not None or any(one.grad_fn is not None for one in tensors):
        return "what it returns still has its graph, and the graph keeps every activation. Compute y without one."
    floats = sum(one.numel() for one in tensors if one.is_floating_point())
    if floats > x.numel():
        return f"it keeps {floats} numbers, and the input has {x.numel()}. Keep that, and compute the rest again."
    if (large := sum(one.numel() == x.numel() for one in tensors)) > 1:
        return f"it keeps {large} tensors as large as its input. Keep that, and draw the same numbers again."
    return ""


def _tensors(kept: Any) -> Iterator[Any]:
    import torch

    if isinstance(kept, torch.Tensor):
        yield kept
    elif isinstance(kept, dict):
        yield from (one for value in kept.values() for one in _tensors(value))
    elif isinstance(kept, tuple | list):
        yield from (one for value in kept for one in _tensors(value))


def _weights(layers: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for place, layer in enumerate(layers):
        for key, one in layer.named_parameters():
            yield f"the gradient of layer {place}'s {key.removeprefix('0.')}", one


def _gradients(layers: Sequence[Any]) -> dict[str, Any]:
    import torch

    return {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in _weights(layers)}
