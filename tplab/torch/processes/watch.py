"""A watch: a rank that stands still says in the store what it waits for. If no rank can go on, the run ends."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

from tplab.errors import TplabError
from tplab.mesh import Mesh
from tplab.torch.processes.rank import ProcessRank
from tplab.torch.processes.waits import Report, verdict

LOOK_EVERY = 0.25
"""Seconds between two looks; the second look that finds a rank in one wait reports it."""


class Watch:
    """The watch over one rank of one run, from when it is made until `close`.

    store       of this run alone, where ranks read each other's reports
    break_off   called once it is certain that no rank can go on, and the rank's verdict says why: it closes the
                connections that the rank waits on, so that its program wakes up
    """

    def __init__(self, rank: ProcessRank, store: Any, break_off: Callable[[], None]):
        self._rank, self._store, self._break_off = rank, store, break_off
        self._is_over = Event()
        self._thread = Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        seen = posted = None
        while not self._is_over.wait(LOOK_EVERY):
            waits_in = "the others, at its end" if self._rank.has_returned else self._rank.waits_in
            if waits_in is not None and waits_in is seen:
                if waits_in is not posted:
                    self._store.set(str(self._rank.rank), self._rank.report().to_text())
                    posted = waits_in
                if not self._rank.has_returned and (error := self._judged(self._rank.mesh)):  # else one that waits will
                    self._rank.verdict = error
                    self._break_off()
                    return
            seen = waits_in

    def _judged(self, mesh: Mesh) -> TplabError | None:
        reports = {
            rank: Report.from_text(self._store.get(str(rank))) for rank in mesh.ranks if self._store.check([str(rank)])
        }
        return verdict(reports, mesh)
