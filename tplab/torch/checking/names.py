"""The names of a rank's parameters, as in the unwrapped model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from tplab.torch.private import local_of

WRAPPERS = {"module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module"}
"""The attributes in which wrappers, such as DistributedDataParallel, keep the module inside them."""


OF_A_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
FLAT = "FullyShardedDataParallel"
"""The wrapper that turns all parameters in it into one flat parameter: FSDP before `fully_shard`."""


class _At(NamedTuple):
    """The tensor at an address: a parameter, its gradient, or a buffer."""

    kind: str
    name: str
    owner: Tensor

    @property
    def address(self) -> int | None:
        """Its present address; None for a gradient that is gone."""
        x = self.owner.grad if self.kind == "gradient" else self.owner
        return None if x is None else address_of(x)


class Names:
    """Names of parameters. They come from the modules that the script calls, or whose parameters it asks for: the
    largest first. Parameters of no module are numbered in order of appearance."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._roots: list[nn.Module] = []
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that their ids are not reused
        self._is_stale = self._is_busy = False
        self._at: dict[int, _At] = {}

    def note(self, module: nn.Module) -> None:
        if not self._is_busy and not any(module is known for known in self._modules):
            self._modules.append(module)
            self._is_stale = True

    def of(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            self._is_stale = True
        self._update()
        if id(parameter) not in self._names:
            number = sum(name.startswith("parameter ") for name in self._names.values())
            self._names[id(parameter)] = f"parameter {number}"
            self._kept.append(parameter)
        return self._names[id(parameter)]

    def known(self, number: int) -> str:
        """Return the name of the parameter with this id, or ""."""
        self._update()
        return self._names.get(number, "")

    def parameters(self) -> list[Tensor]:
        self._update()
        return [p for root in self._roots for p in root.parameters() if not p.is_meta]

    def shared(self) -> dict[str, str]:
        """Return the other names of tied parameters -> the first name. A tied parameter has several names in one
        module; another name may also come from a larger module that was met later."""
        self._update()
        found: dict[str, str] = {}
        for root in self._roots:
            names: dict[int, list[str]] = {}
            for name, p in _named(root, self._prefix(root)):
                names.setdefault(id(p), []).append(name)
            for number, several in names.items():
                if len(several) > 1:
                    found |= {name: self._names[number] for name in several if name != self._names[number]}
        return found

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        self._update()
        for root in self._roots:
            for name, x in root.named_buffers():
                if x.is_meta:
                    continue
                yield self._prefix(root) + unwrapped(name), x

    def kinds(self) -> set[str]:
        """Return the kinds of modules that compute over all samples of a batch, or have flat parameters."""
        modules = [module for root in self._roots for module in root.modules()]
        found = {"BatchNorm" for m in modules if isinstance(m, OF_A_BATCH)}
        mros = {kind.__name__ for module in modules for kind in type(module).__mro__}
        return found | mros & {FLAT, "FSDPModule"}

    def at(self, address: int) -> tuple[str, tuple[str, ...]]:
        """Return the kind of tensor at this address, parameter, gradient or buffer, and its name."""
        known = self._at.get(address)
        if known is None or known.address != address:  # or another gradient has replaced the one there
            self._update()
            self._at = {}
            for p in [*self.parameters(), *self._kept]:
                for kind in ("parameter", "gradient"):
                    self._is_at(_At(kind, self._names.get(id(p), ""), p))
            for name, x in self.buffers():
                if address_of(x) not in self._at:
                    self._is_at(_At("buffer", name, x))
            known = self._at.get(address)
        return ("", ()) if known is None else (known.kind, (known.name,) * bool(known.name))

    def is_sparse(self, address: int) -> bool:
        """Return whether a sparse gradient was found at this address."""
        known = self._at.get(address)
        gradient = None if known is None or known.kind != "gradient" else known.owner.grad
        return gradient is not None and gradient.layout is not torch.strided

    def _is_at(self, one: _At) -> None:
        if one.address is not None:
            self._at[one.address] = one

    def _update(self) -> None:
        if not self._is_stale or self._is_busy:
            return
        self._is_busy = True  # the loop below asks modules for their parameters, too
        by_size = sorted(self._modules, key=lambda module: -sum(1 for _ in module.modules()))
        self._roots, inside, held = [], set[int](), set[int]()
        for module in by_size:
            ids = {id(x) for x in (*module.parameters(), *module.buffers())}
            if id(module) not in inside and not ids <= held:
                self._roots.append(module)
            inside |= {id(part) for part in module.modules()}
            held |= ids
        self._roots.sort(key=lambda root: next(i for i, module in enumerate(self._modules) if module is root))
        for root in self._roots:
            for name, parameter in _named(root, self._prefix(root)):
                if id(parameter) not in self._names:
                    self._names[id(parameter)] = name
                    self._kept.append(parameter)
        self._is_stale = self._is_busy = False

    def _prefix(self, root: nn.Module) -> str:
        if [root] == [one for one in self._roots if next(one.parameters(), None) is not None]:
            return ""
        alike = [other for other in self._roots if type(other) is type(root)]
        number = next(i for i, other in enumerate(alike) if other is root)
        return f"{type(root).__name__}{number if len(alike) > 1 else ''}."


def parameters_of(optimizers: Iterable[Optimizer]) -> list[Any]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def address_of(x: Tensor) -> int:
    """Return the address of this rank's part of a tensor; of a sparse one, that of its values. The id of one that has
    none, such as the result of a collective that torch has not waited for."""
    x = local_of(x)
    x = x._values() if x.layout is torch.sparse_coo else x
    try:
        return x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x)
    except RuntimeError:
        return id(x)


def unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _named(root: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, parameter in root.named_parameters(remove_duplicate=False):
        yield prefix + unwrapped(name), parameter
