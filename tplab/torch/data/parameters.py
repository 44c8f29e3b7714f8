"""The parameters of a model by name, in whatever form the model is given; and where their gradients are."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tplab.mesh import Axis
from tplab.torch.ranks.rank import this_rank

Key = str | tuple[int, str]
"""A parameter's name; in a pipeline (stage, name)."""
Model = nn.Module | Mapping[int, nn.Module] | Mapping[str, Tensor] | Iterable[Tensor]
"""Anything with parameters: a module, `Stages`, parameters by name, or a list of them."""
Named = Sequence[tuple[Key, Tensor]]
"""Parameters with their names."""


def readable_again(model: Any) -> Any:
    """The same model; an iterator, such as `model.parameters()`, becomes a list."""
    return list(model) if isinstance(model, Iterator) else model


def trainable(model: Model, but: Collection[Key] = ()) -> Named:
    """The trainable parameters, each once and in the order of the model, except the names in `but`."""
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
    """Return the gradient. Raises TypeError if it is sparse, because ranks would have different rows of it."""
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"{text(key)} has a sparse gradient, whose rows differ between ranks; create it with sparse=False"
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


# --- where gradients are ----------------------------------------------------------------------------------------------


class Owner:
    """Combines the gradients of whole parameters over ranks, and owns this rank's pieces of them.

    in_backward   whether it takes gradients during the backward pass, so that no other owner finds them
    """

    in_backward = False

    @property
    def has_taken(self) -> bool:
        """Whether it has gradients that it has not yet given to the pieces."""
        return False

    @property
    def takes_whole(self) -> bool:
        """Whether whole gradients are already those of the whole batch."""
        return True


def note_owner(parameter: Tensor, piece: Tensor, owner: Owner, axis: Axis) -> None:
    """Note that `owner`, while it exists, steps `piece` instead of the whole parameter, and other ranks of `axis` the
    other pieces. Raises ValueError if another owner takes the gradient before this one could, or if the parameter is
    itself a piece, of which ranks of `axis` hold others."""
    of_piece, of_owner, along = _owners.get(parameter) or _NO_OWNER
    earlier, names = of_owner(), this_rank().mesh.names
    is_cut = of_piece() is parameter and not set(names(along)).isdisjoint(names(axis))
    if earlier is not None and (earlier.in_backward or is_cut):
        raise ValueError(
            f"the gradient of this parameter {list(parameter.shape)} is combined during the backward pass already, by "
            "shard_parameters or an earlier shard_gradients: step what shard_parameters has cut with an ordinary "
            "optimizer, and make one sharded optimizer for a model"
        )
    _owners[parameter] = weakref.ref(piece), weakref.ref(owner), axis


def where_gradients_are(
    named: Named, cuts: Mapping[Tensor, tuple[str, ...]]
) -> Iterator[tuple[Key, Tensor, tuple[str, ...]]]:
    """(key, the tensor with the parameter's gradient on this rank, the axes along which other ranks hold other pieces).

    cuts   these axes by parameter, as far as known

    The tensor is the parameter itself, or the piece to which a sharded optimizer has given its part of the gradient.
    Raises ValueError if that optimizer has not combined the ranks' gradients yet.
    """
    for key, parameter in named:
        axes = cuts.get(parameter, ())
        of_piece, of_owner, axis = _owners.get(parameter) or _NO_OWNER
        piece, owner = of_piece(), of_owner()
        if piece is not None and piece.grad is not None:
            parameter, axes = piece, (*axes, *this_rank().mesh.names(axis))
        elif owner is not None and (owner.has_taken or (parameter.grad is not None and not owner.takes_whole)):
            raise ValueError(
                f"the gradient of {text(key)} belongs to its sharded optimizer, which has not combined it over the "
                "ranks yet: call optimizer.reduce_gradients() first, and step afterwards. If your program averages "
                "gradients itself, make the optimizer with is_reduced=True"
            )
        yield key, parameter, axes


_NO_OWNER: Any = lambda: None, lambda: None, ()
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
