"""A stage of a pipeline: consecutive layers, run on one microbatch at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from tplab.pipeline.checks import check_group, outputs_of

Arrays = tuple[Array, ...]


@dataclass(frozen=True)
class Layer:
    """What is called in a stage: a layer with `init`, which is given its parameters first, or a function without any.

    called    the layer or function
    forward   what to call instead, with the layer and its parameters before the inputs
    bare      whether it is a function that takes parameters first, though it has no `init`
    """

    called: Any
    forward: Callable[..., Any] | None = None
    bare: bool = False

    @property
    def has_params(self) -> bool:
        return self.bare or hasattr(self.called, "init")

    def __call__(self, params: Any, inputs: Arrays, key: Any) -> Any:
        """The layer's output. Only a layer that has a parameter `key` is given one."""
        given: tuple[Any, ...] = (params, *inputs) if self.has_params else inputs
        function = self.called
        if self.forward is not None:
            function, given = self.forward, (self.called, *given)
        if key is not None and "key" in inspect.signature(function).parameters:
            return function(*given, key=key)
        return function(*given)

    def same_as(self, other: Layer) -> bool:
        """Whether it is known to do the same. A layer that cannot be compared counts as different."""
        try:
            return bool(self == other)
        except Exception:  # arrays in a layer, for one, are compared element by element
            return False


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of a model, run on one microbatch at a time.

    number             for messages
    checkpoint_every   only what enters each group of this many layers is kept; the rest is recomputed
    """

    layers: tuple[Layer, ...]
    number: int
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None:
            check_group(self.checkpoint_every)

    def __call__(
        self, params: Sequence[Any], inputs: Arrays, keys: Callable[[int], Any], finish: Callable[..., Arrays] | None
    ) -> Arrays:
        """The stage's outputs for `inputs`. `finish`, for the last stage: outputs -> loss, which it returns instead."""
        size = self.checkpoint_every or max(1, len(self.layers))
        starts = range(0, len(self.layers), size) or [0]
        for begin in starts:
            is_end = begin == starts[-1]

            def piece(params: Sequence[Any], inputs: Arrays, begin: int = begin, is_end: bool = is_end) -> Arrays:
                for place, layer in enumerate(self.layers[begin : begin + size], begin):
                    inputs = outputs_of(self.number, layer(params[place], inputs, keys(place)), Array)
                return finish(*inputs) if is_end and finish is not None else inputs

            inputs = (piece if self.checkpoint_every is None else jax.checkpoint(piece))(params, inputs)
        return inputs

    def same_as(self, other: Stage) -> bool:
        """Whether it does the same, given the same inputs."""
        return len(self.layers) == len(other.layers) and all(map(Layer.same_as, self.layers, other.layers))
