"""Collectives of a rank that is a process, from start to wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

from tplab.torch.private import no_dispatch, phase
from tplab.torch.processes.exchange import Awaited
from tplab.torch.processes.frames import Header, Side, bytes_of
from tplab.torch.processes.recorded import RecordedRank
from tplab.torch.processes.waits import mismatch
from tplab.torch.ranks import outcomes, texts
from tplab.torch.ranks.meeting import bytes_sent
from tplab.torch.ranks.rank import Call, Pending
from tplab.trace.journal import Group
from tplab.trace.label import Label, of_all


class ProcessPending(Pending):
    """A collective that has been started: its frames are in flight.

    before   set when the group's previous collective is over
    over     set when this one is over
    """

    awaited: Awaited | None = None
    before: Event | None = None

    def __init__(self, rank: RecordedRank, call: Call, side: Side, number: int, tag: int, begun: float):
        self.rank, self.call, self.side, self.number, self.tag, self.begun = rank, call, side, number, tag, begun
        self.phase = phase()
        self.group: Group = call.place.group
        self.over = Event()
        self.ready: Any = None  # the GPU's position when the collective was started, and when the result is there
        self.done: Any = None
        self._flies = False
        self._taken: Tensor | None = None
        self._failure: BaseException | None = None
        self._result: Tensor | None = None

    # --- what differs between kinds of collectives -----------------------------------------------------------------

    def depart(self, x: Tensor) -> None:
        """Send this rank's data as it is now: the program may write to `x` later."""
        raise NotImplementedError

    def arrive(self) -> Tensor:
        """Wait for the others, and return this rank's result."""
        raise NotImplementedError

    def note(self, result: Tensor, arrival: float) -> None:
        """Record in the rank's journal what has happened, and advance its count of hops. A GPU is past reading what was
        sent by now, so that memory can be freed."""

    def noted(self, kind: str, end: float, label: Label, **about: Any) -> None:
        """Note in the rank's journal what this is, from the moment it begun until `end`."""
        side, call = self.side, self.call
        about |= {"op": call.op, "axis": call.place.label, "shape": side.shape, "dtype": side.dtype}
        about |= {"where": side.where, "phase": self.phase, "reduction": call.reduction}
        self.rank.journal.note(kind, self.begun, end, label, (self.group, self.number), **about)

    # --- waiting ---------------------------------------------------------------------------------------------------

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks whose frames have not arrived yet."""
        return tuple(self.awaited or ())

    def fly(self) -> None:
        """Continue in a separate thread, so that it really overlaps with what the rank computes."""
        if self.awaited is not None:
            self._flies = True
            about = torch.get_num_threads(), torch.is_inference_mode_enabled()  # a new thread has its own settings
            Thread(target=self._fly, args=about, daemon=True).start()

    def _fly(self, num_threads: int, is_inference: bool) -> None:
        torch.set_num_threads(num_threads)
        with torch.inference_mode(is_inference):
            self._travel()

    def _travel(self) -> None:
        try:
            if self.before is not None:
                self.before.wait()
            self._taken = self.arrive()
        except BaseException as error:
            self._failure = error
        self._landed_at = time.perf_counter()
        self.over.set()

    def wait(self) -> Tensor:
        if self._result is None:
            now = self.rank.catch_up()
            with no_dispatch():  # what follows is not an operation of the program
                self._result = self._land(now)
            self.rank.num_in_flight -= 1
            self.rank.go_on()
        return self._result

    def _land(self, now: float) -> Tensor:
        rank = self.rank
        rank.waits_in = self
        if self._flies:
            self.over.wait()
        else:
            self._travel()
        if self._failure is not None:
            raise self._failure
        result, self._taken = self._taken, None
        assert result is not None
        rank.engine.join(self.done, result)
        rank.waits_in = None
        arrival = now if self.awaited is None else self._landed_at
        if arrival > now:
            about: dict[str, Any] = {"op": self.call.op, "axis": self.call.place.label, "where": self.side.where}
            rank.journal.note("wait", now, arrival, **about)
        self.note(result, arrival)
        return result

    def check(self, other: Side) -> None:
        """Raise CollectiveMismatchError if another rank is in another collective."""
        if not other.agrees(self.side):
            self.rank.verdict = mismatch(self.group, self.number, [self.side, other])
            raise self.rank.verdict

    def check_room(self, sides: Sequence[Side]) -> None:
        """Raise CollectiveMismatchError if the ranks, in the order of positions, send more or less than this rank has
        room for."""
        if not self.call.takes:
            return
        index = self.call.place.index
        error = texts.no_room(self.call, index, [side.splits[index] for side in sides], lambda at: sides[at].text)
        if error is not None:
            self.rank.verdict = error
            raise error

    def keep(self, x: Tensor) -> Tensor:
        """The current values of x in one block of memory, from which they can be sent."""
        if not self.rank.engine.carries(self.call, x):
            x = x.cpu()
        kept = outcomes.own(x.detach().resolve_conj().resolve_neg())
        self.ready = self.rank.engine.now(kept)
        return kept


class Alone(ProcessPending):
    """A collective over a group of one rank, or a message from a rank to itself: nothing is sent."""

    def depart(self, x: Tensor) -> None:
        if self.call.peers is None:
            self.check_room([self.side])
            self._kept = outcomes.results(self.call, [outcomes.own(x)])[0]
        else:
            self._kept = outcomes.own(x)
            self._label = self.rank.labels.get(x)

    def arrive(self) -> Tensor:
        return self._kept

    def note(self, result: Tensor, arrival: float) -> None:
        if self.call.peers is not None:
            self.rank.provenance.received(result, self._label)

    @property
    def sizes(self) -> tuple[int, ...] | None:
        return (self.side.shape[self.call.dims[1]],) if self.call.row.gathers else None


class Message(ProcessPending):
    """A message to at most one rank, and one from at most one: ppermute, ring_shift, send and receive.

    An incoming message may have any shape, which its frame contains. A receive also learns its dtype and device there.
    """

    def depart(self, x: Tensor) -> None:
        assert self.call.peers is not None
        target, self.source = self.call.peers
        self.like, self.x = x, self.keep(x)
        outgoing = {} if target is None else {target: self._note_sent(x, target)}
        sources = [] if self.source is None else [self.source]
        self.awaited = self.rank.exchange.start(self.tag, outgoing, sources)
        if target is not None and self.x.is_cpu and x.numel():
            self.rank.exchange.send(target, self.tag, bytes_of(self.x))

    def _note_sent(self, x: Tensor, target: int) -> Header:
        rank = self.rank
        step = rank.way_is_free(target)
        rank.take_way(target, step)
        label, about = rank.provenance.of(x), {"values": rank.values.of(x), "peer": target}
        self.noted("message", self.begun, label, bytes=x.nbytes, step=step, **about)
        return Header(self.side, step, label)

    def arrive(self) -> Tensor:
        assert self.awaited is not None
        headers, engine = self.rank.exchange.finish(self.awaited, self.check), self.rank.engine
        with engine.after(self.ready):
            if self.source is None:
                result = torch.zeros_like(self.like, memory_format=torch.contiguous_format, requires_grad=False)
            else:
                self.header = headers[self.source]
                dtype = getattr(torch, self.header.side.dtype)
                result = torch.empty(self.header.side.shape, dtype=dtype, device=self.x.device)
            if self.x.is_cuda:
                engine.exchange(self.call, self.x, result)
            elif self.source is not None and result.numel():
                exchange = self.rank.exchange
                exchange.wait(exchange.receive(self.source, self.tag, bytes_of(result)))
            result = result.to(self.sent_with[-1] if self.call.op == "receive" else self.like.device)
            self.done = engine.now(result)
        return result

    def note(self, result: Tensor, arrival: float) -> None:
        del self.x, self.like
        if self.source is None:
            return
        rank = self.rank
        self.noted("taken", arrival, self.header.label, peer=self.source)
        rank.hops = max(rank.hops, self.header.hops + 1)
        rank.provenance.received(result, self.header.label)

    @property
    def sent_with(self) -> tuple[Any, ...]:
        return self.header.side.key[2]


class Together(ProcessPending):
    """The collectives in which every rank of the group waits for every other.

    Frames go ahead: once they have arrived from all ranks and agree, torch.distributed carries the tensors. A rank
    counts as arrived when it hands over its tensor.
    """

    def depart(self, x: Tensor) -> None:
        rank, index = self.rank, self.call.place.index
        self.next = self.group[(index + 1) % len(self.group)]
        self.hop = rank.way_is_free(self.next)
        self.header = Header(self.side, self.hop, rank.put_in(x))
        self.x, self.device = self.keep(x), x.device
        others = [other for other in self.group if other != rank.rank]
        self.awaited = rank.exchange.start(self.tag, dict.fromkeys(others, self.header), others)

    def arrive(self) -> Tensor:
        assert self.awaited is not None
        headers = {self.rank.rank: self.header, **self.rank.exchange.finish(self.awaited, self.check)}
        self.headers = [headers[rank] for rank in self.group]
        self.check_room([header.side for header in self.headers])
        self.hop = max(header.hops for header in self.headers)
        self.begun, engine = time.perf_counter(), self.rank.engine
        with self.rank.exchange.connected(), engine.after(self.ready):
            result = engine.together(self.call, self.x, [header.side.shape for header in self.headers])
            self.done = engine.now(result)
        return result.to(self.device)

    def note(self, result: Tensor, arrival: float) -> None:
        del self.x
        rank, call, side, index = self.rank, self.call, self.side, self.call.place.index
        rank.hops = max(rank.hops, self.hop + 1)
        rank.take_way(self.next, self.hop)
        numels = [torch.Size(header.side.shape).numel() for header in self.headers]
        num_bytes = bytes_sent(call, side.shape, getattr(torch, side.dtype).itemsize, numels, index)
        values = rank.values.of(result)
        self.noted("collective", arrival, self._label(result), bytes=num_bytes, step=self.hop, values=values)

    def _label(self, result: Tensor) -> Label:
        """The label of the result. Only results of some of the ranks need to be followed."""
        is_all, index = len(self.group) == self.rank.mesh.size, self.call.place.index
        given = [
            Label(-1, (rank,)) if is_all else header.label
            for rank, header in zip(self.group, self.headers, strict=True)
        ]
        label = of_all(self.call.op, given, self.call.root)[index]
        if not is_all:
            self.rank.provenance.received(result, label)
        return label

    @property
    def sizes(self) -> tuple[int, ...] | None:
        if not self.call.row.gathers or self._result is None:
            return None
        return tuple(header.side.shape[self.call.dims[1]] for header in self.headers)
