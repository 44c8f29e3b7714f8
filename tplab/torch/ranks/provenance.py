"""Provenance: what a rank notes about which ranks' data it sends, receives and computes with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from tplab.torch.private import graph_task
from tplab.torch.ranks.labels import Labels
from tplab.torch.ranks.values import VALUES_UP_TO, values_of
from tplab.trace.label import UNKNOWN, Label

if TYPE_CHECKING:
    from tplab.torch.ranks.meter import Meter

LABELS_UP_TO = 1024  # elements; a larger received tensor alone does not make us watch every operation


class Provenance:
    """What rank `rank` knows about which ranks' data its tensors hold.

    The first thing that it sends is a new chunk of its own, as is everything else it sends that was not computed from
    something received. Received tensors have labels, and `meter` passes them on to what is computed from them. Where
    that would cost more than it shows, the rank loses track: of what it computes from a large tensor, which is not
    shown element by element; where operations are timed; and after very many operations. From then on it only knows the
    labels of what it passes on unchanged, and of the rest it says that it does not know.

    What collectives of all ranks return has data of all ranks, whatever went in. So only what a collective of some
    ranks returns has a label.

    number_of   (tensor, the number of chunks before it) -> the number of a new chunk
    keep        for how many results computed from received data the values are kept
    is_timed    whether operations are timed, so that following them would change the times
    """

    def __init__(
        self,
        rank: int,
        labels: Labels,
        meter: Meter,
        number_of: Callable[[Tensor, int], int],
        keep: int,
        is_timed: bool = False,
    ):
        self.rank, self.labels = rank, labels
        self._meter, self._number_of, self._is_timed = meter, number_of, is_timed
        self._sent = Labels()  # sent again, it is the same chunk
        self._num_chunks = 0
        self._num_values_left = keep
        self.has_lost_track = False

    def of(self, x: Tensor) -> Label:
        """What is known about a tensor that is about to be sent."""
        if self.has_lost_track and not self.labels.may_have(x) and not self._sent.may_have(x):
            return UNKNOWN
        if self._is_lost():
            return self._unchanged(self.labels, x) or self._unchanged(self._sent, x) or UNKNOWN
        label = self.labels.get(x) or self._sent.get(x)
        if label is None or (label.chunk < 0 and label.contributors):
            label = self._new_chunk(x, label)
        return label

    def put_in(self, x: Tensor) -> Label | None:
        """What is known about a tensor that this rank puts into a collective; None: it is the rank's own data."""
        if self._is_lost():
            return self._unchanged(self.labels, x) or UNKNOWN
        return self.labels.get(x)

    def _is_lost(self) -> bool:
        if self._meter.num_left < 0:
            self.stop()
        return self.has_lost_track

    def _unchanged(self, labels: Labels, x: Tensor) -> Label | None:
        """The label of a tensor, if it has not been written to unseen."""
        label = labels.get(x)
        return None if label is None or labels.is_changed(x) else label

    def starts_with(self, x: Tensor) -> None:
        """Treat `x` as new data of this rank's own, if nothing else is known about it."""
        if self.labels.get(x) is None:
            self._new_chunk(x)

    def _new_chunk(self, x: Tensor, made_from: Label | None = None) -> Label:
        contributors = made_from.contributors if made_from is not None else (self.rank,)
        label = Label(self._number_of(x, self._num_chunks), contributors)
        self._num_chunks += 1
        self._sent.set(x, label)
        return label

    def received(self, x: Tensor, label: Label | None) -> None:
        """Note what arrived, and follow its data from here on."""
        if label is not None and (label != UNKNOWN or not self.has_lost_track):
            self.labels.set(x, label)
        if self._is_lost() or self._meter.is_open:
            return
        # inside a backward pass the meter cannot be opened: the end of that pass would silently close it
        if x.numel() <= LABELS_UP_TO and not self._is_timed and graph_task() == -1:
            self._meter.open()
        else:
            self.has_lost_track = True

    def stop(self) -> None:
        """Stop following operations."""
        self.has_lost_track = True
        if self._meter.on_cost is None:
            self._meter.close()

    def values(self, x: Tensor) -> np.ndarray | None:
        """The contents of a tensor that was computed from received data, if they are kept."""
        if self._num_values_left <= 0 or x.numel() > VALUES_UP_TO:
            return None
        self._num_values_left -= 1
        return values_of(x)
