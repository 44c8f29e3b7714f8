"""The lines at which a script creates its optimizers and their settings, its data and its layers; and those that
computed its loss: each operation that returned a single number, and its factor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.overrides import TorchFunctionMode

from tplab.checking.trail import reached
from tplab.torch.private import transform
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


# --- the lines of a loss ----------------------------------------------------------------------------------------------

Made = tuple[str, float | None]
"""A line, and the factor of its operation if it only multiplies."""

_KEY = "tplab made at"
_BETWEEN = 4
"""How many nodes without a line may come before one that has it: wrappers such as DDP insert some."""


class NumbersMade(TorchFunctionMode):
    """A mode that marks each node of autograd's graph whose result is a single number with its line.

    line    returns the line that runs
    call    calls the function
    others  is called with every other function, its arguments and its result
    """

    def __init__(
        self,
        line: Callable[[], str],
        call: Callable[..., Any],
        others: Callable[[Callable[..., Any], Sequence[Any], Any], None],
    ):
        super().__init__()
        self._line, self._call, self._others = line, call, others

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = self._call(func, args, kwargs or {})
        if transform() is not None:
            return found  # inside a torch.func transform, tensors have no values
        if isinstance(found, Tensor) and (node := node_of(found)) is not None:
            if found.numel() == 1:
                node.metadata.setdefault(_KEY, (self._line(), times(getattr(func, "__name__", ""), args)))
        else:
            self._others(func, (*args, *(kwargs or {}).values()), found)
        return found


def node_of(x: Tensor) -> Any:
    """Return the autograd node of a tensor, if torch gives it: not for a view that was written to without gradients."""
    try:
        return x.grad_fn
    except RuntimeError:
        return None


_MULTIPLIES = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "_foreach_mul_"}
_DIVIDES = {"div", "div_", "__truediv__", "true_divide", "divide", "__idiv__", "__itruediv__", "_foreach_div_"}
MULTIPLIES = _MULTIPLIES | _DIVIDES
CLAMPS = {"clamp_", "clip_", "clamp_min_", "clamp_max_", "_foreach_clamp_min_", "_foreach_clamp_max_"}
ADDS = {"add_", "__iadd__", "_foreach_add_", "add", "__add__"}
_COMPARES = {"lt", "le", "gt", "ge", "less", "greater", "less_equal", "greater_equal",
             "__lt__", "__le__", "__gt__", "__ge__"}  # fmt: skip


def is_in_place(name: str) -> bool:
    """Return whether the function of this name writes to its first argument."""
    return name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def times(name: str, args: Sequence[Any]) -> float | None:
    """Return the factor that the function of this name multiplies its tensor by; None if it does something else."""
    numbers = [float(x) for x in args[:2] if _is_constant(x)]
    if len(args) < 2 or len(numbers) != 1:
        return None
    if name in _MULTIPLIES:
        return numbers[0]
    return 1 / numbers[0] if name in _DIVIDES and numbers[0] and _is_constant(args[1]) else None


def compares(name: str, args: Sequence[Any]) -> float | None:
    """Return the number that the function of this name compares its tensor with, or None."""
    return float(args[1]) if name in _COMPARES and len(args) > 1 and _is_constant(args[1]) else None


def _is_constant(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.numel() == 1 and not x.requires_grad and not x.is_meta and type(x) is Tensor
    return isinstance(x, int | float)


def made(x: Tensor) -> list[Made]:
    """Return the lines that computed a number, the last one first, as far back as there were only numbers."""
    return [found for node in _chain(x.grad_fn) if (found := node.metadata.get(_KEY))]


def terms(x: Tensor) -> list[tuple[str, float]]:
    """Return the lines that multiply terms of a number, and their factors, except for those in its `made`."""
    first = [*_chain(x.grad_fn)]
    known = reached(first, lambda node: [one for one, _ in node.next_functions if one and one.metadata.get(_KEY)])
    return [at for node in known if node not in first and (at := node.metadata[_KEY])[1] is not None]


def _chain(node: Any) -> Iterator[Any]:
    """Yield the nodes that computed a number."""
    between = 0
    while node is not None and between <= _BETWEEN:
        yield node
        between = 0 if _KEY in node.metadata else between + 1
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        node = next((parent for parent in parents if _KEY in parent.metadata), parents[0] if parents else None)
