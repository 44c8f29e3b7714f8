"""Which activations a learner's function keeps in memory: those that autograd has saved and not yet given back."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import saved_tensors_hooks


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
