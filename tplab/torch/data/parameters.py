"""The parameters of a model by name, whatever the model is given as: a module, stages of a pipeline, or parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Key = str | tuple[int, str]
"""A parameter's name; in a pipeline (stage, name)."""
Model = nn.Module | Mapping[int, nn.Module] | Mapping[str, Tensor] | Iterable[Tensor]
"""What has parameters: a module, `Stages`, parameters by name, or a list of them."""
Named = Sequence[tuple[Key, Tensor]]
"""Parameters with their names."""


def readable_again(model: Any) -> Any:
    """The same model. What can be read only once, such as `model.parameters()`, becomes a list."""
    return list(model) if isinstance(model, Iterator) else model


def trainable(model: Model, but: Collection[Key] = ()) -> Named:
    """The parameters that are trained, each once and in the order of the model, except the names in `but`."""
    found: dict[Tensor, Key] = {}
    for key, parameter in _named(model):
        if key in but:
            continue
        if isinstance(parameter, tuple):
            raise TypeError(
                f"{text(key)} is a pair of a name and a parameter; give the module, or dict(model.named_parameters())"
            )
        if not isinstance(parameter, Tensor):
            raise TypeError(
                f"{text(key)} is of type {type(parameter).__name__}; give a module, the stages of a pipeline, "
                "parameters by name, or a list of parameters"
            )
        if parameter.requires_grad:
            found.setdefault(parameter, key)
    return [(key, parameter) for parameter, key in found.items()]


def state_of(model: Model) -> list[Tensor]:
    """All parameters, including frozen ones, and buffers, each once."""
    held: list[Any] = list(model.values()) if isinstance(model, Mapping) else [model]
    buffers = [x for module in held if isinstance(module, nn.Module) for x in module.buffers()]
    return list(dict.fromkeys([*(parameter for _, parameter in _named(model)), *buffers]))


def text(key: Key) -> str:
    """A parameter's name in errors."""
    return f"parameter {key!r}" if isinstance(key, str) else f"parameter {key[1]!r} of stage {key[0]}"


def check_dense(key: Key, gradient: Tensor) -> Tensor:
    """The gradient. Raises TypeError if it is sparse, as ranks would have different rows of it."""
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"{text(key)} has a sparse gradient, which has other rows on every rank; make it with sparse=False"
        )
    return gradient


def _named(model: Any) -> Iterable[tuple[Key, Any]]:
    if isinstance(model, nn.Module):
        return model.named_parameters()
    if isinstance(model, Tensor):
        return [("0", model)]
    if not isinstance(model, Mapping):
        return [(str(number), parameter) for number, parameter in enumerate(model)]
    if not any(isinstance(module, nn.Module) for module in model.values()):
        return model.items()
    return [((stage, name), p) for stage, module in model.items() for name, p in module.named_parameters()]
