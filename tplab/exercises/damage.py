"""What a learner's function leaves behind: its arguments and the generators that the whole program draws from must be
as they were, and activations must not stay in memory."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from tplab.exercises.verdict import refuse

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import saved_tensors_hooks


class Untouched:
    """Remembers tensors of torch, and the global generators of torch, NumPy and Python, to say later what has changed.

    arguments    name -> tensor; anything else among them is not looked at
    generators   whether to look at the generators too
    gradients    whether to look at the arguments' `.grad` too
    """

    def __init__(self, arguments: Mapping[str, Any], generators: bool = True, gradients: bool = False):
        import torch

        self._arguments = {name: one for name, one in arguments.items() if isinstance(one, torch.Tensor)}
        self._before = {name: one.detach().clone() for name, one in self._arguments.items()}
        self._states = _states() if generators else {}
        self._without = [name for name, one in self._arguments.items() if gradients and _gradient(one) is None]

    def damage(self) -> str:
        """What has changed, and why that is bad; "" if nothing has."""
        import torch

        for name, before in self._before.items():
            if not torch.equal(self._arguments[name].detach().nan_to_num(), before.nan_to_num()):
                return (
                    f"it changes its argument {name} in place, which its caller may still need.\n"
                    f"Compute with a new tensor, such as {name}.clone()."
                )
        for name in self._without:
            if _gradient(self._arguments[name]) is not None:
                return (
                    f"it leaves a gradient in its argument {name}: called again with the same tensors, it would add to "
                    f"it and return twice as much.\nDifferentiate a copy, such as {name}.detach().clone(), or use "
                    "torch.autograd.grad."
                )
        for library, state in _states().items():
            if not np.array_equal(state, self._states.get(library, state)):
                return (
                    f"it leaves {library}'s global generator in another state, by drawing from it or by seeding it.\n"
                    "Every random number that the rest of the program draws from it is then another one."
                )
        return ""

    def refuse(self, but: str = "") -> None:
        """End a check if something has changed: ": it changes its argument ..."."""
        if harm := self.damage():
            refuse(f": {but}{harm}")


def _gradient(tensor: Any) -> Any:
    return tensor.grad if tensor.is_leaf else None


def _states() -> dict[str, np.ndarray]:
    import torch

    kind, keys, place, *_ = np.random.get_state()  # noqa: NPY002 - its state is what may have changed
    return {
        "torch": torch.get_rng_state().numpy(),
        "NumPy": np.append(keys, place) if kind == "MT19937" else np.zeros(0),
        "Python": np.array(random.getstate()[1], dtype=np.uint64),
    }


# --- activations that stay in memory ----------------------------------------------------------------------------------


class Graphs:
    """Watches forward passes: `with graphs.watch(): loss = net(x).mean()`.

    A backward pass gives the saved tensors of its graph back, unless it retains them. A graph that nothing refers to
    any more gives them back too.
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
