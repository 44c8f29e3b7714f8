"""Where a parameter's gradient is: with the parameter, or with the piece of it that a sharded optimizer steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tplab.torch.data.parameters import Key, Named, text
from tplab.torch.layers.parameters import axes_of_cuts


class Owner(Protocol):
    """What combines the gradients of whole parameters and steps this rank's pieces of them."""

    @property
    def has_taken(self) -> bool:
        """Whether it has gradients that it has not given to the pieces yet."""
        ...

    @property
    def takes_whole(self) -> bool:
        """Whether whole gradients are already those of the whole batch."""
        ...


def note_owner(parameter: Tensor, piece: Tensor, owner: Owner) -> None:
    """Note that `owner` steps `piece` in place of the whole parameter, as long as it exists."""
    _owners[parameter] = weakref.ref(piece), weakref.ref(owner)


def where_gradients_are(named: Named) -> Iterator[tuple[Key, Tensor, tuple[str, ...]]]:
    """(key, what has the parameter's gradient on this rank, the axes along which other ranks hold other pieces).

    This is the parameter itself, or the piece to which a sharded optimizer has given its part of the gradient. Raises
    ValueError where that optimizer has not combined the gradients of the ranks yet.
    """
    for key, parameter in named:
        found = _owners.get(parameter)
        piece, owner = (None, None) if found is None else (found[0](), found[1]())
        if piece is not None and piece.grad is not None:
            parameter = piece
        elif owner is not None and (owner.has_taken or (parameter.grad is not None and not owner.takes_whole)):
            raise ValueError(
                f"the gradient of {text(key)} belongs to its sharded optimizer, which has not combined it over the "
                "ranks yet: call optimizer.reduce_gradients() first, and step afterwards. If your program averages "
                "gradients itself, make the optimizer with is_reduced=True"
            )
        yield key, parameter, axes_of_cuts(parameter)


_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
