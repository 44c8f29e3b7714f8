"""A simulated rank's own work, on its clock and in its trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor

from tplab.cost.lanes import COMPUTE, MARK
from tplab.torch.private import phase
from tplab.torch.ranks.chronicle import Burst
from tplab.torch.ranks.meeting import Meeting, Site
from tplab.torch.ranks.meter import Cost, Meter
from tplab.torch.ranks.provenance import NAMES_UP_TO, Provenance, name_in_program
from tplab.torch.ranks.rank import Rank
from tplab.torch.ranks.turns import Seat
from tplab.torch.ranks.values import dtype_name
from tplab.torch.ranks.world import World
from tplab.trace.journal import Doing
from tplab.trace.label import Label


class ClockedRank(Rank):
    """A rank that is a thread of this process and takes turns, on the seat `seat`.

    On its `lane` of the log it records what it computes, sends and waits for, in the order of its program. The times of
    all that on the modelled clock are worked out later (`chronicle`): the program does not depend on them.

    A thread that its program starts has another object for the same rank (`beside`) and its own lane. `home` is the
    object of the first thread. The threads of a rank compute one at a time, also on the clock, and each waits on its
    own.
    """

    def __init__(self, rank: int, world: World, seat: Seat, home: Self | None = None):
        super().__init__(rank, world.mesh)
        self.world, self.seat, self.seed, self.lines = world, seat, world.seed, world.lines
        self.home: Self = home or self
        seat.member = self
        self.waits_in: tuple[Site, Meeting] | str | None = None
        self.log = world.chronicle.log
        self.lane = self.log.lane(rank)
        world.members.append(self)
        self.raised: list[str] = []  # errors that ended other threads, at `home`
        self.handlers: dict[int, Any] = {}  # of signals, as its program has set them, at `home`
        self.waits_as_always = False  # even if other threads of the rank could have the turn
        self._looked = "", 0  # what the program last looked for in vain, and how many times in a row
        self.began_at = ""  # for another thread: the line that started it
        self._called_from: FrameType | None = None
        self._asks_time = False
        self._is_timed = world.is_timed
        self._seen_at = 0.0
        self._doing: Burst | None = None
        self._prepares = False
        self._sites: dict[tuple[Any, ...], Site] = {}
        is_modelled = world.cluster is not None and not world.is_timed
        self._meter = Meter(self, self._computed if is_modelled else None)
        self.fuses_attention = world.fuses_attention
        self._provenance = Provenance(
            rank, self.labels, self._meter, self._number_of, world.values.left, world.is_timed
        )

    def start_watching(self) -> None:
        """Called in the rank's thread before its program."""
        if self._meter.on_cost is not None:
            self._meter.open()
        self._seen_at = self._now()

    def stop_watching(self) -> None:
        """Called in the rank's thread after its program."""
        self._stops()
        if self._meter.is_open:
            self._meter.close()

    def _computed(self, done: Cost) -> None:
        """Advance the modelled clock by one tensor operation."""
        if self._prepares:
            return
        cluster = self.world.cluster
        assert cluster is not None
        dtype = dtype_name(done.output.dtype)
        seconds = cluster.compute_seconds(done.flops, done.num_bytes, dtype, done.matmul, done.attention)
        entry = self.log.add(self.lane, COMPUTE, seconds)
        if self._doing is not None:
            self._doing.add(entry, done.flops, done.num_bytes)
            return
        self.world.chronicle.recorder.add(
            self.rank,
            "compute",
            done.op,
            entry,
            entry,
            bytes=done.num_bytes,
            flops=done.flops,
            shape=tuple(done.output.shape),
            dtype=dtype,
            phase=phase(),
            **self._contents(done.output, self.labels.get(done.output)),
        )

    def added_to(self, op: str, x: Tensor, label: Label) -> None:
        """Record an addition to what was received as an event of no length, if computing takes no time."""
        if self._meter.on_cost is None and self._doing is None:
            now = self.moment()
            self.world.chronicle.recorder.add(
                self.rank,
                "compute",
                op,
                now,
                now,
                shape=tuple(x.shape),
                dtype=dtype_name(x.dtype),
                phase=phase(),
                **self._contents(x, label),
            )

    def moment(self) -> int:
        return self.log.add(self.lane, MARK, self._now() - self._seen_at if self._is_timed else 0.0)

    def _contents(self, x: Tensor, label: Label | None) -> dict[str, Any]:
        """What an event says about a computed tensor that holds received data."""
        if label is None or label.chunk < 0:
            return {}
        return {"chunk": label.chunk, "contributors": label.contributors, "values": self._provenance.values.of(x)}

    def _number_of(self, x: Tensor, piece: int) -> int:
        """The number of a new chunk of this rank, with the program's name for it if there is one."""
        name = name_in_program(x) if piece < NAMES_UP_TO else ""
        return self.world.chronicle.recorder.chunk(self.rank, piece, name)

    def _now(self) -> float:
        """This machine's time in seconds. A GPU runs behind the program, so its queued work is waited for."""
        if self._is_timed and self.world.device is not None and self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return time.perf_counter()

    def _stops(self) -> None:
        """Advance a measured clock by the time that this rank has been running, since `_goes_on`."""
        if not self._is_timed:
            return
        entry = self.log.add(self.lane, COMPUTE, self._now() - self._seen_at)
        if self._doing is not None:
            self._doing.add(entry)
        else:
            self.world.chronicle.recorder.add(self.rank, "compute", "compute", entry, entry)

    def _goes_on(self) -> None:
        if self._is_timed:
            self._seen_at = self._now()

    @contextmanager
    def doing(self, about: Doing) -> Iterator[None]:
        self._stops()
        self._goes_on()
        self._doing = Burst(self.rank, about, self.log.add(self.lane, MARK, 0.0))
        try:
            yield
            self._stops()
            self._goes_on()
            if self.world.cluster is None and not self._is_timed:
                self._doing.end = self.log.add(self.lane, COMPUTE, about.takes)
            self._doing.held = self.held
            self.world.chronicle.bursts.append(self._doing)
        finally:
            self._doing = None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        before, self._prepares = self._prepares, True
        try:
            yield
        finally:
            self._prepares = before

    def label(self, origin_rank: int, piece: int, contributors: tuple[int, ...]) -> Label:
        return Label(self.world.chronicle.recorder.chunk(origin_rank, piece), contributors)
