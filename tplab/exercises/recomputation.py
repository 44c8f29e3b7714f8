"""The exercise of lab 15: recomputation that draws different random numbers the second time."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tplab.exercises.calls import library_call
from tplab.exercises.check import Verdict, borrowed, not_started, untouched
from tplab.widgets.matrices import Panel, number_text

Forget = Callable[[Any, Any], tuple[Any, Any]]
Again = Callable[[Any, Any, Any], Any]

LAYERS, ROWS, WIDTH = 5, 3, 4


def check_recomputed(forget: Forget, again: Again) -> Verdict:
    """Whether `forget(piece, x)` -> (y, kept) and `again(piece, kept, dy)` -> dx run a piece of a model without keeping
    its activations, and still give the gradients of a backward pass that kept them, even with dropout.

    x, y, dx, dy [B, D]. The gradients of the weights are added to `.grad`.
    """
    name = "my_forget and my_again"
    if not_started(forget) or not_started(again):
        return untouched(name)
    for fn in (forget, again):
        if lazy := library_call(fn, ("checkpoint", "checkpoint_sequential")):
            return borrowed(name, lazy)
    panels: list[Panel] = []
    for dropout in (0.0, 0.5):
        for every in (2, 1, LAYERS):
            try:
                found = _compared(forget, again, dropout, every)
            except Exception as error:
                return Verdict(False, f"{name}: {type(error).__name__}: {error}{_line_of(error, forget, again)}")
            if isinstance(found, Verdict):
                return found
            panels = found
    if verdict := _keeps_more(forget) or _in_flight(forget, again):
        return verdict
    text = f"{name} are right: y, dx and every gradient of a weight, with dropout and without."
    return Verdict(
        True, f"{text}\nThe random generator is left as it was found, and two microbatches may be in flight.", panels
    )


def _line_of(error: Exception, *functions: Callable[..., Any]) -> str:
    """The line of the learner's code that raised it; "" if unknown."""
    files = {fn.__code__.co_filename for fn in functions}
    mine = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files and frame.line]
    return f"\nin the line: {mine[-1]}" if mine else ""


def _compared(forget: Forget, again: Again, dropout: float, every: int) -> Verdict | list[Panel]:
    """The verdict on the first thing that is wrong in two batches or, if nothing is, pictures of dx.

    Which numbers the first pass drops is its own affair. The right gradients are those for these numbers.
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
            got_y, kept = x, []
            for piece in pieces:
                before, given = got_y, got_y.detach().clone()
                got_y, held = forget(piece, got_y)
                if wrong := _left_behind(piece) or _holds_too_much(got_y, held, before):
                    return Verdict(False, f"my_forget: {wrong}")
                if not torch.equal(before, given):
                    return Verdict(False, "my_forget: it changes x in place.")
                kept.append(held)
            masks = [layer[-1].masks[-1] for layer in layers]
            if dropout and all(mask.all() for mask in masks):
                return Verdict(False, f"my_forget: no layer has dropped anything, {where}. Is it in eval mode?")
            right = _plain(layers, x, dy, masks)
            if wrong := _wrong(right, {"y": got_y}, where, dropout):
                return wrong
            state, got_dx = torch.get_rng_state(), dy
            for piece, held in zip(reversed(pieces), reversed(kept)):
                before, given = got_dx, got_dx.detach().clone()
                got_dx = again(piece, held, got_dx)
                if not isinstance(got_dx, torch.Tensor):
                    what = "None" if got_dx is None else f"a {type(got_dx).__name__}"
                    text = f"it returned {what}. It must return the gradient of the piece's input."
                    return Verdict(False, f"my_again: {text}")
                if wrong := _left_behind(piece):
                    return Verdict(False, f"my_again: {wrong}")
                if not torch.equal(before, given):
                    return Verdict(False, "my_again: it changes dy in place.")
            total = {name: total.get(name, 0) + one for name, one in right.items() if name not in ("y", "dx")}
            found = _gradients(layers)
            alone = {name: right[name] for name in total}
            if wrong := _wrong({"dx": right["dx"]}, {"dx": got_dx}, where, dropout) or _wrong(
                total, found, where, dropout, alone if batch else {}
            ):
                return wrong
            if not torch.equal(state, torch.get_rng_state()):
                return Verdict(
                    False,
                    f"my_again: y and every gradient are right, {where}, but it leaves the random generator in another "
                    "state than it found it.\nWhat the program draws next is then not what it would have drawn. Put "
                    "the generator back, or see `torch.random.fork_rng`.",
                )
            dropped.append(torch.stack(masks))
            panels = [Panel("yours, dx", got_dx.numpy(force=True)), Panel("right", right["dx"].numpy(force=True))]
    if dropout and (torch.equal(*dropped) or (dropped[0] == dropped[0][0]).all()):
        text = "every batch and every layer must drop other numbers. Does your code seed the generator?"
        return Verdict(False, f"my_forget: y and every gradient are right, but {text}")
    return panels


def _in_flight(forget: Forget, again: Again) -> Verdict | None:
    """The verdict on functions that are right for one microbatch after the other, but not with two in flight."""
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
                return Verdict(
                    False,
                    "my_again: dx is right for one microbatch at a time, but not with two in flight.\nUnder 1F1B, the "
                    "one that went forward first also goes back first. Is everything that my_again needs in `kept`?",
                    [Panel("yours, dx", dx.numpy(force=True)), Panel("right", want.numpy(force=True))],
                )
    return None


def _left_behind(piece: Any) -> str:
    """What a pass has changed for the rest of the program; "" if nothing has changed."""
    import torch

    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        return "it leaves gradients switched off. Use `with torch.no_grad():`, which switches them on again."
    if not all(layer.training for layer in piece.modules()):
        return "it leaves layers in eval mode, in which dropout drops nothing."
    return ""


def _wrong(
    right: dict[str, Any], found: dict[str, Any], where: str, dropout: float, alone: dict[str, Any] | None = None
) -> Verdict | None:
    """The verdict on the first of the results that is wrong. `alone` has the gradients of the second batch alone."""
    for key, want in right.items():
        if key not in found:
            continue
        a, b = found[key].numpy(force=True), want.numpy(force=True)
        if a.shape != b.shape:
            text = f"{key} has shape {list(a.shape)}, {where}; the right one has shape {list(b.shape)}."
            return Verdict(False, f"{_whose(key)}: {text}")
        off = np.abs(a - b) > 1e-9
        if off.any():
            hint = _hint(key, a, b, dropout)
            if alone and np.allclose(a, alone[key].numpy(force=True), rtol=0, atol=1e-9):
                hint = "It is that of the second batch alone. As in torch, a backward pass adds to `.grad`."
            text = f"{_whose(key)}: {key} is not right, {where}.\n{hint}"
            panels = [Panel(f"yours, {key}", a, off), Panel("right", b), Panel("yours - right", a - b, off)]
            return Verdict(False, text, panels)
    return None


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
    """A dropout that notes what it keeps, each time."""
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


def _keeps_more(forget: Forget) -> Verdict | None:
    """The verdict on a forward pass that keeps activations somewhere else: in a closure, an object, or a global."""
    import torch

    from tplab.torch import LiveBytes

    with torch.random.fork_rng(devices=[]), LiveBytes() as live:
        layers, x, _ = _model(0.5, rows=256)
        piece, before = torch.nn.Sequential(*layers), live.now()
        held = forget(piece, x)
        for layer in layers:
            layer[-1].masks.clear()  # they are the check's
        kept, states = live.now() - before, 4 * torch.get_rng_state().nbytes
    if kept <= 2 * x.nbytes + states:
        return None
    text = f"for an x of {x.nbytes:,} bytes, {kept:,} bytes are still in memory after it. Something keeps activations."
    return Verdict(False, f"my_forget: {text}" if held else "")


def _holds_too_much(y: Any, kept: Any, x: Any) -> str:
    """What a piece's forward pass keeps besides its input, in words; "" if there is nothing."""
    import torch

    if not isinstance(y, torch.Tensor):
        return f"it must return y and what to keep, and y is {y!r}."
    tensors = list(_tensors(kept))
    if y.grad_fn is not None or any(one.grad_fn is not None for one in tensors):
        return "what it returns still has its graph, and the graph keeps every activation. Compute y without one."
    floats = sum(one.numel() for one in tensors if one.is_floating_point())
    if floats > x.numel():
        return f"it keeps {floats} numbers, and the input has {x.numel()}. Keep that, and compute the rest again."
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


def _whose(key: str) -> str:
    return "my_forget" if key == "y" else "my_again"


def _hint(key: str, got: np.ndarray, want: np.ndarray, dropout: float) -> str:
    """A hint from what the wrong result looks like."""
    if key == "y" and dropout:
        return "It is not what the layers compute with the numbers that they have dropped."
    if dropout:
        return "It is right without dropout. The second pass does not drop the same numbers as the first one."
    if not got.any():
        return "It is zero: does the second pass go back to the weights?"
    if np.allclose(got, 2 * want, rtol=0, atol=1e-9):
        return "It is twice what it should be."
    return f"It is off by up to {number_text(float(np.abs(got - want).max()))}."
