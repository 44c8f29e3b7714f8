"""The rank of this process as its collectives see it: its clock, its journal, and the contents kept for the trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from tplab.errors import TplabError
from tplab.mesh import Mesh
from tplab.torch.processes.exchange import Exchange
from tplab.torch.ranks.provenance import Provenance
from tplab.torch.ranks.rank import Lines, Rank
from tplab.torch.ranks.values import Values, dtype_name
from tplab.trace.journal import Doing, Journal
from tplab.trace.label import UNKNOWN, Label

_ANYTHING = Doing("compute", "", UNKNOWN)


class RecordedRank(Rank):
    """The rank whose program this process runs.

    record     the number of messages whose contents this rank keeps
    cells      file name -> the number of its notebook cell
    hops       the number of rounds of communication so far
    """

    def __init__(self, rank: int, mesh: Mesh, exchange: Exchange, *, record: int, cells: dict[str, int]):
        super().__init__(rank, mesh)
        self.exchange, self.engine, self.journal = exchange, exchange.engine, Journal(rank)
        self.lines = _LinesOfNotebook(cells)
        self.hops = 0
        self.waits_in: Any = None  # the collective that it is waiting in
        self.has_returned = False
        self.num_in_flight = 0
        self.verdict: TplabError | None = None  # a mismatch or a deadlock that was found here
        self._ways: dict[int, int] = {}  # the hop until which the link to another rank is busy
        self._seen_at = 0.0
        self._doing: Doing | None = None
        self.values = Values(record)
        self.provenance = Provenance(self, lambda x, piece: rank + piece * mesh.size, record * mesh.size)

    # --- the program's own work ----------------------------------------------------------------------------------

    def start_watching(self) -> None:
        """Called before the program."""
        self._seen_at = self.journal.start = time.perf_counter()

    def stop_watching(self) -> None:
        """Called after the program."""
        self.journal.end = self.catch_up()
        self.provenance.meter.close()

    def catch_up(self, held: int = -1) -> float:
        """Record what this rank has computed since the last record, and what it holds now. Returns the time."""
        now = time.perf_counter()
        op, where, label, _ = self._doing or _ANYTHING
        self.journal.note("compute", self._seen_at, now, label, op=op, where=where, held=held)
        return now

    @contextmanager
    def doing(self, about: Doing) -> Iterator[None]:
        self.catch_up()
        self.go_on()
        self._doing = about
        try:
            yield
            self.catch_up(self.held)
        finally:
            self._doing = None
            self.go_on()

    def go_on(self) -> None:
        """Start a new span of computation."""
        self._seen_at = time.perf_counter()

    def way_is_free(self, target: int) -> int:
        """The first hop in which something can travel to `target`: after what this rank waited for and sent there."""
        return max(self.hops, self._ways.get(target, 0))

    def take_way(self, target: int, hop: int) -> None:
        self._ways[target] = max(hop + 1, self._ways.get(target, 0))

    # --- contents kept for the trace, as on simulated ranks --------------------------------------------------------

    def put_in(self, x: Tensor) -> Label:
        """The label of a tensor that is put into a collective."""
        return self.provenance.put_in(x) or Label(-1, (self.rank,))

    def added_to(self, op: str, x: Tensor, label: Label) -> None:
        if self._doing is None:
            now, values = time.perf_counter(), self.provenance.values.of(x)
            about = {"op": op, "shape": tuple(x.shape), "dtype": dtype_name(x.dtype), "values": values}
            self.journal.note("added", now, now, label, **about)


class _LinesOfNotebook(Lines):
    """Lines of a program whose notebook is in another process."""

    def __init__(self, cells: dict[str, int]):
        super().__init__()
        self._cells = cells

    def _text(self, filename: str, line: int) -> str:
        cell = self._cells.get(Path(filename).name)
        return super()._text(filename, line) if cell is None else f"cell {cell}, line {line}"
