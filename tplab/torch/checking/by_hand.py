"""What a script computes by hand, outside of autograd's graph: it draws samples, shifts labels, takes the norm of its
gradients, scales and clips them, and averages its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tplab.torch.checking.names import address_of
from tplab.torch.checking.origins import ADDS, CLAMPS, MULTIPLIES, is_in_place, times
from tplab.torch.checking.watched_steps import WatchedSteps
from tplab.torch.private import local_of
from tplab.torch.ranks.rank import this_rank

_DRAWS = {"randint", "randperm", "randn", "rand", "normal", "multinomial"}
_SHIFTS = {"pad", "roll", "__getitem__", "__setitem__", "narrow", "cat", "concat", "where", "masked_fill", "shift"}
_IN_PLACE = {"mul_", "div_", "__imul__", "__idiv__", "__itruediv__", "_foreach_mul_", "_foreach_div_"}
NORMS = {"norm", "vector_norm", "linalg_vector_norm", "_foreach_norm", "sum", "dot", "vdot", "dist", "max"}
SQUARES = {"square", "pow", "__pow__"}
_CHANGES = {"forward": "buffer", "after": "parameter"}
"""What a script may change by hand, by the moment."""
LINE = "_tplab_shifted_at"
"""The attribute of a tensor that has the line at which it was last shifted, cut or padded, as targets are."""


class ByHand(WatchedSteps):
    """Notes the lines of one rank's step with such computations."""

    def compute(self, func: Any, args: Sequence[Any], found: Any) -> None:
        """Note a call of a torch function outside of autograd."""
        if self.is_looking:
            return
        step, moment = self.step, self.moment
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        writes = moment == "reduction" and is_in_place(name) and not self._made  # without an optimizer
        if writes and isinstance(first, Tensor) and self.names.at(address_of(first))[0] == "parameter":
            step.lines["step"] = self.origins.here()
        if name in _DRAWS and isinstance(found, Tensor):
            self.origins.draw(len(found) if found.dim() else 0)
        elif moment in _CHANGES and name.endswith("_") and not name.endswith("__"):
            for x in first if isinstance(first, list | tuple) else [first]:
                kind, names = self.names.at(address_of(x)) if isinstance(x, Tensor) else ("", ())
                if kind == _CHANGES[moment]:
                    step.lines |= {f"{kind} {one}": self.origins.here() for one in names}
        elif moment == "step" and name in NORMS | {"mean"} and isinstance(first, Tensor) and isinstance(found, Tensor):
            if found.numel() < first.numel():
                step.lines.setdefault("combined", self.origins.here())
        elif moment == "reduction" and (name in MULTIPLIES | NORMS | CLAMPS | ADDS):
            self._reduce(name, args, found)
        else:
            self._shift(name, first, found)

    def _shift(self, name: str, first: Any, found: Any) -> None:
        tensor = first if name == "__setitem__" else found
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64 or not tensor.dim():
            return
        if name in _SHIFTS:
            setattr(tensor, LINE, self.origins.here())
        elif isinstance(first, Tensor) and (line := getattr(first, LINE, "")):
            setattr(tensor, LINE, line)

    def _reduce(self, name: str, args: Sequence[Any], found: Any) -> None:
        many = [x for x in (args[0] if isinstance(args[0], list | tuple) else args[:1]) if isinstance(x, Tensor)]
        if not many:
            return
        if name in NORMS:
            is_number = isinstance(found, list | tuple) or (isinstance(found, Tensor) and found.numel() == 1)
            if is_number and many[0].is_floating_point() and many[0].numel() > 1:
                self.measure(many)
            if is_number and "scale" not in self.step.lines and sum(x.numel() for x in many) > 1:
                self.step.lines["norm"] = self.origins.here()
            return
        x = many[0]
        at = address_of(x)
        if x.is_meta or (self.names.at(at)[0] != "gradient" and at not in self.normed):
            return
        if name in CLAMPS:
            self.step.lines["clamp"] = self.origins.here()
            return
        if name in ADDS:
            if self._is_decay(x, args[1][0] if isinstance(args[1], list | tuple) else args[1]):
                self.step.lines["decay"] = self.origins.here()
            return
        chain, line, factor = this_rank().lines.chain(), self.origins.here(), times(name, args)
        if factor is not None and (line, factor) not in self.step.scaled:
            self.step.scaled.append((line, factor))
        if name in _IN_PLACE and "scale" not in self.step.lines:
            self.step.lines["scale in"] = line
            self.step.lines["scale"] = next((at for code, at in chain if code in self._backward_in), line)

    def _is_decay(self, gradient: Tensor, added: Any) -> bool:
        """Return whether the addend of a gradient is a multiple of its parameter."""
        owner = next((p for p in self.names.parameters() if p.grad is not None
                      and address_of(p.grad) == address_of(gradient)), None)  # fmt: skip
        if owner is None or not isinstance(added, Tensor) or added.shape != owner.shape:
            return False
        x, y = local_of(owner).detach().double().reshape(-1), local_of(added).detach().double().reshape(-1)
        return bool((y - x * (x @ y) / (x @ x).clamp(min=1e-30)).abs().max() <= 1e-5 * y.abs().max())
