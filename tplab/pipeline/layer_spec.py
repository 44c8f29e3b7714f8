"""A layer that is not built yet: what to call to build it, on the rank that will hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class LayerSpec:
    """A layer to be built later: LayerSpec(cls, *args, **kwargs).build() is cls(*args, **kwargs).

        layers = [LayerSpec(Embedding, 65, 768), *[LayerSpec(Block, 768)] * 12, LayerSpec(Linear, 768, 65)]

    A list of specs is a model that takes no memory. Each rank builds only the layers of its own stages, so construction
    needs less memory with more stages. The idea and the name are DeepSpeed's.
    """

    key: str | None = None
    """The name that ties this layer's weight to other layers, if it is shared with any."""

    def __init__(self, cls: Callable[..., Any], *args: Any, **kwargs: Any):
        if not callable(cls):
            raise TypeError(f"LayerSpec takes what makes the layer, and its arguments; {cls!r} cannot be called")
        self.cls, self.args, self.kwargs = cls, args, kwargs

    @property
    def name(self) -> str:
        """The name of the class."""
        return _name_of(self.cls)

    def build(self) -> Any:
        """Build the layer; each call builds a new one."""
        return self.cls(*self.args, **self.kwargs)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((self.cls, len(self.args), *sorted(self.kwargs)))

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"LayerSpec({', '.join([self.name, *given])})"


class TiedSpec(LayerSpec):
    """A layer that shares its weight with every other layer of the same key.

        TiedSpec("embedding", Embedding, 65, 768)
        TiedSpec("embedding", Embedding, 65, 768, forward=lambda layer, x: x @ layer.weight.T)

    All of them start with the same values, whichever ranks they are on, and `train_batch` adds up their gradients.

    weight    the name of the tied parameter
    forward   what to call instead of the layer, with the layer as its first argument, before the inputs
    """

    def __init__(
        self,
        key: str,
        cls: Callable[..., Any],
        *args: Any,
        weight: str = "weight",
        forward: Callable[..., Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(cls, *args, **kwargs)
        self.key, self.weight, self.forward = key, weight, forward

    __hash__ = LayerSpec.__hash__


def layer_names(layers: Sequence[Any]) -> list[str]:
    """The name of each layer, for "type:regex" partitions and for printing.

    Raises TypeError for anything that is not a layer.
    """
    for place, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise TypeError(
                f"layer {place} is {layer!r}, which cannot be called; a layer is a LayerSpec, a layer that is there "
                "already, or a function"
            )
    names = (layer.name if isinstance(layer, LayerSpec) else _name_of(layer) for layer in layers)
    return [name.replace("<lambda>", "lambda") for name in names]


def ties(layers: Sequence[Any]) -> Mapping[str, list[int]]:
    """Key -> the layers that have it."""
    found: dict[str, list[int]] = {}
    for place, layer in enumerate(layers):
        if isinstance(layer, LayerSpec) and layer.key is not None:
            found.setdefault(layer.key, []).append(place)
    return found


def _name_of(x: Any) -> str:
    return getattr(x, "__name__", type(x).__name__)
