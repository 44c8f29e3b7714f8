"""The lines at which a script creates its optimizers and their settings, its data and its layers; and at which it
computes outside of autograd's graph: draws samples, shifts labels, takes the norm of its gradients, scales and clips
them, and averages its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from tplab.checking.recording import Step
from tplab.torch.checking.made import MULTIPLIES, times
from tplab.torch.checking.names import Names, address_of
from tplab.torch.private import local_of
from tplab.torch.ranks.rank import this_rank

Setting = tuple[float, ...]
"""The value of an optimizer's setting for each of its groups of parameters."""


class Origins:
    """The lines of one rank at which things were created."""

    def __init__(self) -> None:
        self._loader = ""
        self._drawn: tuple[str, int] = "", 0
        self._lines: dict[int, str] = {}
        self._settings: dict[int, dict[str, tuple[Setting, str]]] = {}
        self._loaded: dict[int, str] = {}
        self._kept: list[Any] = []  # so that their ids are not reused

    def here(self) -> str:
        return next((line for _, line in this_rank().lines.chain()), "")

    def make(self, thing: Any) -> None:
        """Note the line of a thing that is being created: that of the call of its class, not of its own `__init__`."""
        inits = {getattr(vars(kind).get("__init__"), "__code__", None) for kind in type(thing).__mro__}
        self._lines[id(thing)] = next((line for code, line in this_rank().lines.chain() if code not in inits), "")
        self._kept.append(thing)

    def of(self, thing: Any) -> str:
        """Return the line at which a thing was created, or ""."""
        return self._lines.get(id(thing), "")

    def read(self, loader: Any) -> None:
        """Note the line of a loader that samples are taken from, or of its sampler if the script has created that."""
        self._loader = self.of(getattr(loader, "sampler", None)) or self.of(loader)

    def draw(self, rows: int) -> None:
        """Note that this many rows of random numbers are drawn: they may become samples."""
        self._drawn = self.here(), rows

    def use_data(self, lines: dict[str, str], rows: int) -> None:
        """Note, when the model is called with this many rows, the lines of the "loader", and of the numbers "drawn"
        since the last call, unless they were cut afterwards."""
        line, drawn = self._drawn
        for key, at in (("loader", self._loader), ("drawn", line if drawn == rows else "")):
            if at:
                lines.setdefault(key, at)
        self._drawn = "", 0

    # --- optimizers --------------------------------------------------------------------------------------------------

    def set(self, optimizer: Optimizer, line: str) -> None:
        """Note the line of settings that are new, or that a schedule has changed."""
        known = self._settings.setdefault(id(optimizer), {})
        for key, values in _settings(optimizer).items():
            if key not in known or known[key][0] != values:
                known[key] = values, line

    def load(self, optimizer: Optimizer) -> None:
        self._loaded[id(optimizer)] = line = self.here()
        self.set(optimizer, line)

    def lines(self, optimizer: Optimizer) -> dict[str, str]:
        """Return the line of each setting, unless it was changed by hand; and under "loaded", that of the states."""
        known, now = self._settings.get(id(optimizer), {}), _settings(optimizer)
        found = {f"set {key}": line for key, (values, line) in known.items() if now.get(key) == values and line}
        return found | ({"loaded": self._loaded[id(optimizer)]} if id(optimizer) in self._loaded else {})


def _settings(optimizer: Optimizer) -> dict[str, Setting]:
    groups = optimizer.param_groups
    keys = [key for key, x in groups[0].items() if isinstance(x, int | float)] if groups else []
    return {key: tuple(float(group.get(key, 0)) for group in groups) for key in keys}


_DRAWS = {"randint", "randperm", "randn", "rand", "normal", "multinomial"}
_SHIFTS = {"pad", "roll", "__getitem__", "__setitem__", "narrow", "cat", "concat", "where", "masked_fill", "shift"}
_IN_PLACE = {"mul_", "div_", "__imul__", "__idiv__", "__itruediv__", "_foreach_mul_", "_foreach_div_"}
NORMS = {"norm", "vector_norm", "linalg_vector_norm", "_foreach_norm", "sum", "dot", "vdot", "dist", "max"}
SQUARES = {"square", "pow", "__pow__"}
_CHANGES = {"forward": "buffer", "after": "parameter"}
"""What a script may change by hand, by the moment."""
CLAMPS = {"clamp_", "clip_", "clamp_min_", "clamp_max_", "_foreach_clamp_min_", "_foreach_clamp_max_"}
ADDS = {"add_", "__iadd__", "_foreach_add_", "add", "__add__"}
_LINE = "_tplab_shifted_at"


class ByHand:
    """Notes the lines of one rank's step with such computations.

    is_measured   is called with the tensors whose norm the script takes
    """

    def __init__(self, names: Names, origins: Origins, is_measured: Callable[[Sequence[Tensor]], None],
                 normed: Mapping[int, Tensor]):  # fmt: skip
        self._names, self._origins, self._is_measured, self._normed = names, origins, is_measured, normed

    def see(self, func: Any, args: Sequence[Any], found: Any, step: Step, moment: str, inside: set[CodeType]) -> None:
        """Note a call of a torch function.

        moment   where the rank is in its step: see `Sent`
        inside   the functions in which its last backward pass began
        """
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if name in _DRAWS and isinstance(found, Tensor):
            self._origins.draw(len(found) if found.dim() else 0)
        elif moment in _CHANGES and name.endswith("_") and not name.endswith("__"):
            for x in first if isinstance(first, list | tuple) else [first]:
                kind, names = self._names.at(address_of(x)) if isinstance(x, Tensor) else ("", ())
                if kind == _CHANGES[moment]:
                    step.lines |= {f"{kind} {one}": self._origins.here() for one in names}
        elif moment == "step" and name in NORMS | {"mean"} and isinstance(first, Tensor) and isinstance(found, Tensor):
            if found.numel() < first.numel():
                step.lines.setdefault("combined", self._origins.here())
        elif moment == "reduction" and (name in MULTIPLIES | NORMS | CLAMPS | ADDS):
            self._reduce(name, args, found, step, inside)
        else:
            self._shift(name, first, found)

    def label(self, target: Tensor) -> str:
        """Return the line at which the target of a loss was last shifted, cut or padded, or ""."""
        return getattr(target, _LINE, "")

    def _shift(self, name: str, first: Any, found: Any) -> None:
        tensor = first if name == "__setitem__" else found
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64 or not tensor.dim():
            return
        if name in _SHIFTS:
            setattr(tensor, _LINE, self._origins.here())
        elif isinstance(first, Tensor) and (line := getattr(first, _LINE, "")):
            setattr(tensor, _LINE, line)

    def _reduce(self, name: str, args: Sequence[Any], found: Any, step: Step, inside: set[CodeType]) -> None:
        many = [x for x in (args[0] if isinstance(args[0], list | tuple) else args[:1]) if isinstance(x, Tensor)]
        if not many:
            return
        if name in NORMS:
            is_number = isinstance(found, list | tuple) or (isinstance(found, Tensor) and found.numel() == 1)
            if is_number and many[0].is_floating_point() and many[0].numel() > 1:
                self._is_measured(many)
            if is_number and "scale" not in step.lines and sum(x.numel() for x in many) > 1:
                step.lines["norm"] = self._origins.here()
            return
        x = many[0]
        at = address_of(x)
        if x.is_meta or (self._names.at(at)[0] != "gradient" and at not in self._normed):
            return
        if name in CLAMPS:
            step.lines["clamp"] = self._origins.here()
            return
        if name in ADDS:
            if self._is_decay(x, args[1][0] if isinstance(args[1], list | tuple) else args[1]):
                step.lines["decay"] = self._origins.here()
            return
        chain, line, factor = this_rank().lines.chain(), self._origins.here(), times(name, args)
        if factor is not None and (line, factor) not in step.scaled:
            step.scaled.append((line, factor))
        if name in _IN_PLACE and "scale" not in step.lines:
            step.lines["scale in"] = line
            step.lines["scale"] = next((at for code, at in chain if code in inside), line)

    def _is_decay(self, gradient: Tensor, added: Any) -> bool:
        """Return whether the addend of a gradient is a multiple of its parameter."""
        owner = next((p for p in self._names.parameters() if p.grad is not None
                      and address_of(p.grad) == address_of(gradient)), None)  # fmt: skip
        if owner is None or not isinstance(added, Tensor) or added.shape != owner.shape:
            return False
        x, y = local_of(owner).detach().double().reshape(-1), local_of(added).detach().double().reshape(-1)
        return bool((y - x * (x @ y) / (x @ x).clamp(min=1e-30)).abs().max() <= 1e-5 * y.abs().max())
