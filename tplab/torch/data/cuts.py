"""Which parameters ZeRO has cut: along which axis, and which piece of one a rank's optimizer steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
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


def note_cut(piece: Tensor, axis: Axis) -> None:
    """Note that this parameter is a rank's piece, and that the ranks of `axis` hold the others."""
    _axes[piece] = axis


def note_owner(parameter: Tensor, piece: Tensor, owner: Owner) -> None:
    """Note that `owner` steps `piece` in place of the whole parameter, as long as it exists."""
    _owners[parameter] = weakref.ref(piece), weakref.ref(owner)


def where_gradients_are(named: Named) -> Iterator[tuple[Key, Tensor, tuple[str, ...]]]:
    """(key, what has the parameter's gradient on this rank, the axes along which ZeRO has cut it).

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
        axis = _axes.get(parameter)
        yield key, parameter, () if axis is None else this_rank().mesh.names(axis)


_axes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
