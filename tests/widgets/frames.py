"""What the picture of a score shows at one moment, read from its columns alone; static/score.js says the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tplab.trace.trace import Trace
from tplab.widgets.score.holds import GONE
from tplab.widgets.score.score import COLLECTIVE, COMPUTE, SEND, Score, score


@dataclass(frozen=True)
class Frame:
    """What is drawn with the playhead at `position`.

    round        which round of communication it shows, from 1; 0 before the first
    flights      (bar, how far it has come: 0 to 1) for every message on its way
    together     the same for every rank's part of a collective
    computing    the same for what ranks compute
    cells        (rank, item) -> index into Score.holds
    arriving     the (rank, item) cells that a message is on its way to, or a collective
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
    """The picture at `position`, in rounds of communication: 0 is the start, 2 is when the second round is over."""
    piece = of if isinstance(of, Score) else score(of)
    position = min(max(float(position), 0.0), float(piece.num_steps))
    time, bars, holds = piece.time(position), piece.bars, piece.holds
    running = (bars["start"] < time) & (time < bars["end"])

    def under_way(kind: int) -> list[tuple[int, float]]:
        rows = np.flatnonzero(running & (bars["kind"] == kind)).tolist()
        return [(row, float((time - bars["start"][row]) / (bars["end"][row] - bars["start"][row]))) for row in rows]

    flights = under_way(SEND)
    num = int(np.searchsorted(holds["time"], time, side="right"))
    cells = {
        (rank, item): place
        for place, (rank, item) in enumerate(zip(holds["rank"][:num].tolist(), holds["item"][:num].tolist()))
    }
    cells = {cell: place for cell, place in cells.items() if holds["state"][place] != GONE}
    together = under_way(COLLECTIVE)
    coming = [("peer", row) for row, _ in flights] + [("rank", row) for row, _ in together]
    arriving = {(int(bars[to][row]), int(bars["item"][row])) for to, row in coming if bars["item"][row] >= 0}
    weights = np.where(bars["end"] <= time, bars["bytes"], 0)
    sent = np.bincount(bars["rank"], weights=weights, minlength=piece.trace.mesh.size)
    return Frame(
        position=position,
        time=time,
        round=min(-int(-position // 1), piece.num_steps),
        flights=flights,
        together=together,
        computing=under_way(COMPUTE),
        cells=cells,
        arriving=arriving,
        sent=sent.tolist(),
    )
