"""Provenance: what a simulated rank notes of whose data it sends, receives and computes with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tplab.torch.private import graph_task
from tplab.torch.ranks.labels import Labels
from tplab.torch.ranks.names import name_in_program
from tplab.torch.ranks.values import VALUES_UP_TO, values_of
from tplab.trace.label import UNKNOWN, Label
from tplab.trace.recorder import Recorder

if TYPE_CHECKING:
    from tplab.torch.ranks.meter import Meter

NAMES_UP_TO = 64  # chunks of a rank; those that it sends later are not looked for in the program's variables
LABELS_UP_TO = 1024  # elements; a larger received tensor alone does not make us watch every operation


class Provenance:
    """What rank `rank` knows of whose data its tensors hold.

    The first thing that it sends is a new chunk of its own, as is whatever else it sends that does not descend from
    something received. Received tensors have labels, and `meter` hands them on to what is computed from them. Where
    that would cost more than it shows, the rank loses track: of what it computes from a large tensor, which nobody
    watches element by element; where operations are timed; and when contents have been kept of as many messages as
    was asked for. From there on it only knows the labels of what it passes on as it came.
    """

    def __init__(self, rank: int, labels: Labels, recorder: Recorder, meter: Meter, record: int, is_timed: bool):
        self.rank, self.labels = rank, labels
        self._recorder, self._meter, self._is_timed = recorder, meter, is_timed
        self._sent = Labels()  # sent again, it is the same chunk
        self._num_chunks = 0
        self._num_values_left = record  # of what this rank computes
        self.has_lost_track = False

    def of(self, x: Tensor) -> Label:
        """What is known of a tensor that is about to be sent."""
        label = self.labels.get(x) or self._sent.get(x)
        if label is None:
            label = UNKNOWN if self.has_lost_track else self._new_chunk(x)
        return label

    def starts_with(self, x: Tensor) -> None:
        """Take `x` for new data of this rank's own, if nothing else is known of it."""
        if self.labels.get(x) is None:
            self._new_chunk(x)

    def _new_chunk(self, x: Tensor) -> Label:
        name = name_in_program(x) if self._num_chunks < NAMES_UP_TO else ""
        label = Label(self._recorder.chunk(self.rank, self._num_chunks, name), (self.rank,))
        self._num_chunks += 1
        self._sent.set(x, label)
        return label

    def received(self, x: Tensor, label: Label) -> None:
        """Note what came, and follow its data from here on."""
        if label is not UNKNOWN:
            self.labels.set(x, label)
        if self.has_lost_track or self._meter.is_open:
            return
        # inside a backward pass the meter cannot be opened: the end of that pass would silently close it
        if x.numel() <= LABELS_UP_TO and not self._is_timed and graph_task() == -1:
            self._meter.open()
        else:
            self.has_lost_track = True

    def stop(self) -> None:
        """No more contents are kept."""
        self.has_lost_track = True
        if self._meter.is_open and self._meter.on_cost is None and graph_task() == -1:
            self._meter.close()

    def contents(self, x: Tensor, label: Label | None) -> dict[str, Any]:
        """What an event says of a tensor that was computed, where it holds received data."""
        if label is None or label is UNKNOWN:
            return {}
        values = None
        if self._num_values_left > 0 and x.numel() <= VALUES_UP_TO:
            self._num_values_left -= 1
            values = values_of(x)
        return {"chunk": label.chunk, "contributors": label.contributors, "values": values}
