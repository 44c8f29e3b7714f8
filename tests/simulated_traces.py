"""Small random programs on a modelled clock, which give traces, and know their own critical path."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tplab import Mesh, Trace
from tplab.trace import Recorder
from tplab.trace.event import KINDS


@dataclass
class Simulation:
    """Ranks that compute, send, receive and take part in collectives. Each event records the event it waited for.

    A rank has one port: a message occupies it for `carried` and arrives a `latency` later, and a collective occupies
    the port of each member. Each rank has its own clock; `last` is the event that set it. Unless it `has_queues`, a
    port carries any number of messages at once.
    """

    num_ranks: int
    has_queues: bool = True
    recorder: Recorder = field(init=False)
    causes: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    of_collective: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        self.recorder = Recorder(Mesh(tp=self.num_ranks), "random program", "torch")
        self.clock, self.last = [0.0] * self.num_ranks, [-1] * self.num_ranks
        self.free, self.holder = [0.0] * self.num_ranks, [-1] * self.num_ranks
        self.inbox: list[list[tuple[int, float]]] = [[] for _ in range(self.num_ranks)]
        self.num_messages = 0

    def compute(self, rank: int, duration: float) -> None:
        start = self.clock[rank]
        event = self._add(self.last[rank], rank, "compute", "matmul", start, start + duration, flops=7)
        self._arrive(rank, event, start + duration)

    def send(self, rank: int, peer: int, carried: float, latency: float) -> None:
        """Send without blocking the rank."""
        start, cause = self.clock[rank], self.last[rank]
        if self.has_queues and self.free[rank] > start:
            start, cause = self.free[rank], self.holder[rank]
        end = start + carried + latency
        about: dict[str, Any] = {
            "axis": "tp",
            "bytes": 8,
            "message": self.num_messages,
            "chunk": self.recorder.chunk(rank, 0),
        }
        event = self._add(cause, rank, "send", "ring_shift", start, end, peer=peer, **about)
        self._add(event, peer, "receive", "ring_shift", start, end, peer=rank, **about)
        self.free[rank], self.holder[rank] = start + carried, event
        self.inbox[peer].append((event, end))
        self.num_messages += 1

    def receive(self, rank: int) -> None:
        """Wait for the oldest message that has not been received."""
        if self.inbox[rank]:
            self._wait(rank, *self.inbox[rank].pop(0))

    def collective(self, ranks: list[int], duration: float, blocking: bool) -> None:
        start, cause = max((self.clock[rank], self.last[rank]) for rank in ranks)
        for rank in ranks:
            if self.has_queues and self.free[rank] > start:
                start, cause = self.free[rank], self.holder[rank]
        about: dict[str, Any] = {"axis": "tp", "group": tuple(ranks), "bytes": 4, "message": self.num_messages}
        for rank in ranks:
            event = self._add(cause, rank, "collective", "all_reduce", start, start + duration, **about)
            self.free[rank], self.holder[rank] = start + duration, event
            if blocking:
                self._wait(rank, event, start + duration)
            else:
                self.inbox[rank].append((event, start + duration))
        self.num_messages += 1

    def trace(self, is_noted: bool = True) -> Trace:
        """The trace, with the cause of each event, as on the modelled clock, or without, as of real processes."""
        return self.recorder.trace(cluster="made up", after=self.causes if is_noted else ())

    def critical_path(self) -> list[int]:
        """The numbers of its events, without those of no duration, since two paths may differ only in these."""
        path = [max(range(len(self.ends)), key=lambda event: (self.ends[event], event))]
        while self.causes[path[0]] >= 0:
            path.insert(0, self.causes[path[0]])
        return [self.numbers[event] for event in path if self.lengths[event]]

    def _wait(self, rank: int, event: int, end: float) -> None:
        if end > self.clock[rank]:
            self._add(-1, rank, "wait", "ring_shift", self.clock[rank], end)
            self.ends[-1] = -1.0  # a wait is neither a cause nor the end of a path
            self._arrive(rank, event, end)

    def _arrive(self, rank: int, event: int, time: float) -> None:
        self.clock[rank], self.last[rank] = time, event

    def _add(self, cause: int, rank: int, kind: str, op: str, start: float, end: float, **about: Any) -> int:
        """Add an event whose `where` is its number. All events of one collective have the same number."""
        event = len(self.causes)
        self.numbers.append(self.of_collective.setdefault(about["message"], event) if kind == "collective" else event)
        self.recorder.add(rank, kind, op, start, end, where=str(self.numbers[event]), **about)
        self.causes.append(cause)
        self.lengths.append(end - start)
        self.ends.append(-1.0 if kind == "receive" else end)
        return event


def simulate(seed: int, num_ranks: int, num_steps: int, latency: float = 0.3, has_queues: bool = True) -> Simulation:
    """A random program. Durations are random reals, so that no two paths are equally long; one in five is 0."""
    rng = random.Random(seed)
    simulation = Simulation(num_ranks, has_queues)
    for _ in range(num_steps):
        rank = rng.randrange(num_ranks)
        choice = rng.random()
        if choice < 0.35 or num_ranks == 1:
            simulation.compute(rank, rng.choice([0, 1, 1, 1, 1]) * rng.random())
        elif choice < 0.6:
            peer = rng.choice([other for other in range(num_ranks) if other != rank])
            simulation.send(rank, peer, rng.random(), latency)
        elif choice < 0.85:
            simulation.receive(rank)
        else:
            ranks = sorted(rng.sample(range(num_ranks), rng.randint(1, num_ranks)))
            simulation.collective(ranks, rng.random(), rng.random() < 0.7)
    return simulation


def simulations(has_queues: bool = True) -> st.SearchStrategy[Simulation]:
    latencies, queues = st.sampled_from([0.0, 0.3]), st.just(has_queues)
    return st.builds(simulate, st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 150), latencies, queues)


def arbitrary(seed: int, num_events: int) -> Trace:
    """Arbitrary events, mostly inconsistent, many at the same time and many of no duration."""
    rng = random.Random(seed)
    mesh = Mesh(dp=2, tp=rng.randint(1, 2))
    recorder = Recorder(mesh, rng.choice(["", "ein Ring, \u2192"]), rng.choice(["torch", "jax", "schedule"]))
    chunks = [recorder.chunk(rank, 0) for rank in mesh.ranks]
    values = [None, np.full((2, 2), np.nan, np.float32), np.array([1j, 2]), np.array(True), np.zeros((0, 3))]
    for event in range(num_events):
        start = float(rng.randint(0, 4))
        recorder.add(
            rng.choice(mesh.ranks),
            rng.choice(KINDS),
            rng.choice(["matmul", "ring_shift", "all_reduce"]),
            start,
            start + rng.randint(0, 4),
            axis=rng.choice([None, "dp", "tp", "dp,tp"]),
            group=tuple(rng.sample(mesh.ranks, rng.randint(0, 2))),
            peer=rng.choice([None, *mesh.ranks]),
            bytes=rng.randint(0, 2**50),
            flops=rng.randint(0, 9),
            shape=rng.choice([(), (3,), (2, 2), (0, 3)]),
            dtype=rng.choice(["float32", ""]),
            message=rng.randint(-1, 5),
            step=rng.randint(-1, 5),
            chunk=rng.choice([-1, *chunks]),
            contributors=tuple(rng.sample(mesh.ranks, rng.randint(0, 2))),
            values=rng.choice(values),
            where=f"cell {event}",
        )
    return recorder.trace(rng.choice(["modelled", "measured"]), rng.choice(["s", "steps"]), rng.choice([None, "h100"]))


def arbitrary_traces(min_size: int = 0) -> st.SearchStrategy[Trace]:
    return st.builds(arbitrary, st.integers(0, 2**32), st.integers(min_size, 30))
