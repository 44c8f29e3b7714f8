"""An event: one thing that one rank did."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

KINDS = ("compute", "send", "receive", "collective", "wait")

VALUES_UP_TO = 64
"""Elements of a tensor; the values of a larger one are not kept."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing one rank did.

    rank, kind      the rank, and what kind of thing it did (one of KINDS)
    op              its name: "matmul", "ring_shift", "all_reduce", "F3"
    start, end      in seconds, or in unit times if `Trace.unit` is "steps". A message starts when its link begins to
                    carry it and ends when its last byte arrives
    axis, group     the mesh axis it runs along ("dp,tp" for two), and the ranks that take part
    peer            the other rank of a message
    bytes           send, collective: what this rank sends; receive: what it receives; compute: what it reads and writes
    flops           floating-point operations of a compute event
    shape, dtype    of the tensor that is sent or produced
    message         a send and its receive share this number, as do all ranks' events of one collective; -1: none
    step            the round of communication it belongs to: how many hops come before it; -1: none
    chunk           what is carried, as an index into `Trace.chunks`; -1: unknown
    contributors    the ranks whose data is in it; (): unknown
    values          what is carried, or what a collective returned, if it is small (bfloat16 and the like as float32)
    where           the line of the program; for what ZeRO 3 sends also the unit: "cell 2, line 5, for unit 3"
    held            compute: bytes that the rank keeps for backward passes afterwards; -1: unknown
    phase           "backward": it is part of a backward pass; "forward": it is not; "": unknown
    reduction       how a collective combines the ranks' inputs: "sum", "mean", "max", ...; "": it does not
    part            (index, count): a collective has left this rank with one of `count` equal parts; (): no part
    types           what a collective makes of the types of its tensors, "tp: P → I"; "" if `run` was not asked
    after           the event that held this one up, as an index into `Trace.events`: its result was needed, or it kept
                    the rank, the link or the network card busy. Of a receive it is the send, and of a wait what is
                    waited for. -1: nothing held it up, or that is unknown, as on real processes
    """

    rank: int
    kind: str
    op: str
    start: float
    end: float
    axis: str | None = None
    group: tuple[int, ...] = ()
    peer: int | None = None
    bytes: int = 0
    flops: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    message: int = -1
    step: int = -1
    chunk: int = -1
    contributors: tuple[int, ...] = ()
    values: np.ndarray | None = field(default=None, compare=False)
    where: str = ""
    held: int = -1
    phase: str = ""
    reduction: str = ""
    part: tuple[int, ...] = ()
    types: str = ""
    after: int = -1

    @property
    def duration(self) -> float:
        """end - start, in the unit of the trace."""
        return self.end - self.start


COLUMNS = tuple(field.name for field in fields(Event))
"""The fields of an event, in order."""
