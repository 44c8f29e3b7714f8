"""The exercise of lab 15: recomputation that draws different random numbers the second time."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tplab.exercises.check import Verdict, not_started, untouched
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
    text = f"{name} are right: y, dx and every gradient of a weight, with dropout and without."
    return Verdict(True, f"{text}\nThe random numbers drawn afterwards are right too.", panels)


def _line_of(error: Exception, *functions: Callable[..., Any]) -> str:
    """The line of the learner's code that raised it; "" if unknown."""
    files = {fn.__code__.co_filename for fn in functions}
    mine = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files and frame.line]
    return f"\nin the line: {mine[-1]}" if mine else ""


def _compared(forget: Forget, again: Again, dropout: float, every: int) -> Verdict | list[Panel]:
    """The verdict on the first thing that is wrong or, if nothing is, pictures of dx."""
    import torch

    with torch.random.fork_rng(devices=[]):
        layers, x, dy = _model(dropout)
        plain = copy.deepcopy(layers)
        torch.manual_seed(7)
        start = x.clone().requires_grad_()
        y = torch.nn.Sequential(*plain)(start)
        following = torch.rand(1)
        y.backward(dy)
        right = {"y": y.detach(), "dx": start.grad, **_gradients(plain)}

        torch.manual_seed(7)
        got_y, kept, pieces = x, [], [torch.nn.Sequential(*layers[k : k + every]) for k in range(0, LAYERS, every)]
        for piece in pieces:
            before = got_y
            got_y, held = forget(piece, got_y)
            if wrong := _holds_too_much(got_y, held, before):
                return Verdict(False, f"my_forget: {wrong}")
            kept.append(held)
        got_dx = dy
        for piece, held in zip(reversed(pieces), reversed(kept)):
            got_dx = again(piece, held, got_dx)
            if got_dx is None:
                return Verdict(False, "my_again: it returned None. It must return the gradient of the piece's input.")
        afterwards = torch.rand(1)
    found = {"y": got_y, "dx": got_dx, **_gradients(layers)}
    where = f"{'with' if dropout else 'without'} dropout, a checkpoint every {every} of {LAYERS} layers"
    for key, want in right.items():
        a, b = found[key].numpy(force=True), want.numpy(force=True)
        if a.shape != b.shape:
            text = f"{key} has shape {list(a.shape)}, {where}; the right one has shape {list(b.shape)}."
            return Verdict(False, f"{_whose(key)}: {text}")
        off = np.abs(a - b) > 1e-9
        if off.any():
            text = f"{_whose(key)}: {key} is not right, {where}.\n{_hint(key, a, b, dropout)}"
            panels = [Panel(f"yours, {key}", a, off), Panel("right", b), Panel("yours - right", a - b, off)]
            return Verdict(False, text, panels)
    if dropout and not torch.equal(afterwards, following):
        return Verdict(
            False,
            "my_again: y and every gradient are right, but it leaves the random generator where the piece began. The "
            "next batch would draw the same masks again.\nPut the generator back, or see `torch.random.fork_rng`.",
        )
    return [Panel("yours, dx", found["dx"].numpy(force=True)), Panel("right", right["dx"].numpy(force=True))]


def _model(dropout: float) -> tuple[list[Any], Any, Any]:
    """(layers, x, dy), always the same."""
    import torch
    from torch import nn

    random = np.random.default_rng(0)
    layers = []
    for _ in range(LAYERS):
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)).double()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.from_numpy(random.normal(size=tuple(parameter.shape))))
        layers.append(layer)
    x, dy = torch.from_numpy(random.normal(size=(2, ROWS, WIDTH)))
    return layers, x, dy


def _holds_too_much(y: Any, kept: Any, x: Any) -> str:
    """What a piece's forward pass keeps besides its input, in words; "" if there is nothing."""
    import torch

    if not isinstance(y, torch.Tensor):
        return f"it must return y and what to keep, and y is {y!r}."
    tensors = list(_tensors(kept))
    if y.requires_grad or any(one.requires_grad for one in tensors):
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


def _gradients(layers: Sequence[Any]) -> dict[str, Any]:
    import torch

    found = {}
    for place, layer in enumerate(layers):
        for key, one in layer.named_parameters():
            name = f"the gradient of layer {place}'s {key.removeprefix('0.')}"
            found[name] = torch.zeros_like(one) if one.grad is None else one.grad
    return found


def _whose(key: str) -> str:
    return "my_forget" if key == "y" else "my_again"


def _hint(key: str, got: np.ndarray, want: np.ndarray, dropout: float) -> str:
    """A hint from what the wrong result looks like."""
    if key == "y" and dropout:
        return "The first pass must draw the numbers that it would have drawn without recomputation."
    if dropout:
        return "It is right without dropout. The second pass does not drop the same numbers as the first one."
    if not got.any():
        return "It is zero: does the second pass go back to the weights?"
    if np.allclose(got, 2 * want, rtol=0, atol=1e-9):
        return "It is twice what it should be."
    return f"It is off by up to {number_text(float(np.abs(got - want).max()))}."
