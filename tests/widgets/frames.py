"""The picture of a score at one moment, from which its scenes are drawn. static/score.js computes the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tplab.trace.trace import Trace
from tplab.widgets.paper.scene import When
from tplab.widgets.score.score import COLLECTIVE, COMPUTE, SEND, Score, score
from tplab.widgets.score.table import coming, held


@dataclass(frozen=True)
class Frame:
    """The drawing with the playhead at `position`.

    round        the current round of communication, from 1; 0 before the first
    flights      (bar, its progress from 0 to 1) for every message in flight
    together     the same for every rank's part of a collective
    computing    the same for the ranks' computations
    cells        (rank, item) -> index into Score.holds
    arriving     the (rank, item) cells to which a message or a collective is on its way
    sent         bytes that each rank has sent
    """

    position: float
    time: float
    round: int
    flights: list[tuple[int, float]]
    together: list[tuple[int, float]]
    computing: list[tuple[int, float]]
    cells: dict[tuple[int, int], int]
    arriving: set[tuple[int, int]]
    sent: list[float]


def frame(of: Trace | Score, position: float) -> Frame:
    """The picture at `position`, in rounds of communication: 0 is the start, and 2 the end of the second round."""
    piece = of if isinstance(of, Score) else score(of)
    position = min(max(float(position), 0.0), float(piece.num_steps))
    time, bars = piece.time(position), piece.bars

    def under_way(kind: int) -> list[tuple[int, float]]:
        rows = np.flatnonzero((bars["kind"] == kind) & (bars["start"] < time) & (time < bars["end"])).tolist()
        return [(row, When(float(bars["start"][row]), float(bars["end"][row])).share(time)) for row in rows]

    return Frame(
        position=position,
        time=time,
        round=min(-int(-position // 1), piece.num_steps),
        flights=under_way(SEND),
        together=under_way(COLLECTIVE),
        computing=under_way(COMPUTE),
        cells={cell: hold for cell, holds in held(piece).items() for hold, a, b in holds if a < time <= b},
        arriving={cell for cell, spans in coming(piece).items() if any(a < time <= b for a, b in spans)},
        sent=np.bincount(bars["rank"], np.where(bars["end"] <= time, bars["bytes"], 0), piece.trace.mesh.size).tolist(),
    )
