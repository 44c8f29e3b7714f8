"""Where a parameter's gradient is: with the parameter, or with the piece of it that a sharded optimizer steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tplab.mesh import Axis
from tplab.torch.data.parameters import Key, Named, text
from tplab.torch.ranks.rank import this_rank


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


def note_owner(parameter: Tensor, piece: Tensor, owner: Owner, axis: Axis) -> None:
    """Note that `owner` steps `piece` in place of the whole parameter, as long as it exists, and other ranks of `axis`
    the other pieces."""
    _owners[parameter] = weakref.ref(piece), weakref.ref(owner), axis


def where_gradients_are(
    named: Named, cuts: Mapping[Tensor, tuple[str, ...]]
) -> Iterator[tuple[Key, Tensor, tuple[str, ...]]]:
    """(key, what has the parameter's gradient on this rank, the axes along which other ranks hold other pieces).

    cuts   these axes for the parameters, as far as known

    This is the parameter itself, or the piece to which a sharded optimizer has given its part of the gradient. Raises
    ValueError where that optimizer has not combined the gradients of the ranks yet.
    """
    for key, parameter in named:
        axes = cuts.get(parameter, ())
        of_piece, of_owner, axis = _owners.get(parameter) or (lambda: None, lambda: None, ())
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


_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
