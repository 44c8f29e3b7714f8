"""Damage that a learner's function leaves behind: changed arguments, changed global state, activations in memory."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import saved_tensors_hooks


ARGUMENT = "which its caller may still need.\nCompute with a new tensor, such as a clone."
PARAMETER = "but a step is the optimizer's task.\nWrite the gradients only."


class Untouched:
    """Remembers tensors of torch and global state, to report later what has changed. The state is the generators of
    torch, NumPy and Python, torch's default dtype, and whether gradients are enabled.

    arguments    name -> tensor; other objects are ignored
    generators   whether to compare the generators
    gradients    whether to look for new gradients in the arguments' `.grad`
    instead      why an argument must not change, and what to do instead
    """

    def __init__(
        self, arguments: Mapping[str, Any], generators: bool = True, gradients: bool = False, instead: str = ARGUMENT
    ):
        self._instead = instead
        self._arguments = {name: one for name, one in arguments.items() if hasattr(one, "requires_grad")}
        self._before = {name: one.detach().clone() for name, one in self._arguments.items()}
        self._shared = {what: one[0]() for what, one in _shared().items() if generators or what not in GENERATORS}
        self._without = [name for name, one in self._arguments.items() if gradients and _gradient(one) is None]

    def damage(self) -> str:
        """What has changed, and why that is bad; "" if nothing has. Restores the global state."""
        changed = [what for what in self._shared if self._put_back(what)]
        for name, before in self._before.items():
            if not self._arguments[name].detach().nan_to_num().equal(before.nan_to_num()):
                return f"it changes {name} in place, {self._instead}"
        for name in self._without:
            if _gradient(self._arguments[name]) is not None:
                return (
                    f"it leaves a gradient in its argument {name}: called again with the same tensors, it would add to "
                    f"it and return twice as much.\nDifferentiate a copy, such as {name}.detach().clone(), or use "
                    "torch.autograd.grad."
                )
        if changed and changed[0] in GENERATORS:
            return (
                f"it leaves {changed[0]}'s global generator in another state, by drawing from it or by seeding it.\n"
                "Every random number that the rest of the program draws from it is then another one."
            )
        return f"it leaves {changed[0]} changed, for the rest of the program. Put it back." if changed else ""

    def _put_back(self, what: str) -> bool:
        """Restore one item of the global state. Return whether it had changed."""
        get, put = _shared()[what]
        is_changed = _bytes(get()) != _bytes(self._shared[what])
        if is_changed:
            put(self._shared[what])
        return is_changed


@contextmanager
def moved_on() -> Iterator[None]:
    """Advance the generators by one number inside, to notice a function that seeds one as its caller did."""
    before = {what: _shared()[what][0]() for what in GENERATORS if what in _shared()}
    np.random.random_sample()  # noqa: NPY002
    random.random()
    if torch := sys.modules.get("torch"):
        torch.rand((), device="cpu")
    try:
        yield
    finally:
        for what, state in before.items():
            _shared()[what][1](state)


def _bytes(state: Any) -> bytes:
    return pickle.dumps(state.numpy() if hasattr(state, "numpy") else state)


def _gradient(tensor: Any) -> Any:
    return tensor.grad if tensor.is_leaf else None


GENERATORS = ("torch", "NumPy", "Python")


def _shared() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """name -> (how to read this item of the global state, how to restore it)"""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "NumPy": (np.random.get_state, np.random.set_state),
        "Python": (random.getstate, random.setstate),
    }
    if torch := sys.modules.get("torch"):  # a program that has not imported it has not changed it
        found["torch"] = torch.get_rng_state, torch.set_rng_state
        found["torch's default dtype"] = torch.get_default_dtype, torch.set_default_dtype
        found["torch.set_grad_enabled"] = torch.is_grad_enabled, torch.set_grad_enabled
    return found


# --- activations that stay in memory ----------------------------------------------------------------------------------


class Graphs:
    """Watches forward passes: `with graphs.watch(): loss = net(x).mean()`.

    A backward pass frees the saved tensors of its graph unless it retains the graph. They are also freed with a graph
    to which no reference is left.
    """

    def __init__(self) -> None:
        self._saved: WeakSet[_Saved] = WeakSet()
        self._passes = 0

    def watch(self) -> saved_tensors_hooks:
        """The context of one forward pass."""
        from torch.autograd.graph import saved_tensors_hooks

        self._passes += 1
        number = self._passes

        def pack(tensor: Tensor) -> _Saved:
            saved = _Saved(tensor.detach(), number)
            self._saved.add(saved)
            return saved

        return saved_tensors_hooks(pack, lambda saved: saved.tensor)

    @property
    def alive(self) -> int:
        """How many forward passes still have activations in memory."""
        return len({saved.number for saved in self._saved})


class _Saved:
    """A tensor that autograd has saved in a forward pass. `detach` avoids a cycle with the graph."""

    def __init__(self, tensor: Tensor, number: int):
        self.tensor, self.number = tensor, number
