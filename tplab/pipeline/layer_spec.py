"""A layer that is not there yet: what to call to make it, on the rank where it lives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class LayerSpec:
    """A layer to be made: LayerSpec(cls, *args, **kwargs).build() is cls(*args, **kwargs).

        layers = [LayerSpec(Embedding, 65, 768), *[LayerSpec(Block, 768)] * 12, LayerSpec(Linear, 768, 65)]

    A list of specs is a model that takes no memory. Each rank builds the layers of its own stages, so that what
    construction takes falls with the number of stages. The idea is DeepSpeed's, as is the name.
    """

    key: str | None = None
    """What this layer's weight is tied by, if it is one with another layer's."""

    def __init__(self, cls: Callable[..., Any], *args: Any, **kwargs: Any):
        if not callable(cls):
            raise TypeError(f"LayerSpec takes what makes the layer, and its arguments; {cls!r} cannot be called")
        self.cls, self.args, self.kwargs = cls, args, kwargs

    @property
    def name(self) -> str:
        """That of the class."""
        return getattr(self.cls, "__name__", type(self.cls).__name__)

    def build(self) -> Any:
        """Make the layer, new at each call."""
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

        TiedSpec("words", Embedding, 65, 768)
        TiedSpec("words", Embedding, 65, 768, forward=lambda layer, x: x @ layer.weight.T)

    All begin with the same values, whichever ranks they are on, and `train_batch` adds their gradients up.

    weight    the name of what is tied
    forward   what to call in place of the layer, with the layer before the inputs
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
    """What each layer is called, for "type:regex" partitions and for printing.

    Raises TypeError for anything that is not a layer.
    """
    for place, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise TypeError(
                f"layer {place} is {layer!r}, which cannot be called; a layer is a LayerSpec, a layer that is there "
                "already, or a function"
            )
    return [layer.name if isinstance(layer, LayerSpec) else _name(layer) for layer in layers]


def ties(layers: Sequence[Any]) -> Mapping[str, list[int]]:
    """Key -> the layers that have it."""
    found: dict[str, list[int]] = {}
    for place, layer in enumerate(layers):
        if isinstance(layer, LayerSpec) and layer.key is not None:
            found.setdefault(layer.key, []).append(place)
    return found


def _name(layer: Any) -> str:
    return getattr(layer, "__name__", type(layer).__name__).replace("<lambda>", "lambda")
