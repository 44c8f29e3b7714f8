"""Collectives of a rank that is a process, between their start and their wait."""

from __future__ import annotations

import time
from collections.abc import Mapping
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

from tplab.sharding import cut
from tplab.torch.private import no_dispatch, phase
from tplab.torch.processes.exchange import Arrived, Flight
from tplab.torch.processes.frames import INLINE_UP_TO, Header, Side, bytes_of
from tplab.torch.processes.recorded import RecordedRank
from tplab.torch.processes.waits import mismatch
from tplab.torch.ranks import outcomes as collectives
from tplab.torch.ranks.meeting import bytes_sent
from tplab.torch.ranks.rank import Call, Pending
from tplab.trace.journal import Group, Met, Sent, Taken
from tplab.trace.label import Label, of_collective


class ProcessPending(Pending):
    """A collective that has been started: its frames are on their way."""

    flight: Flight | None = None

    def __init__(self, rank: RecordedRank, call: Call, side: Side, number: int, tag: int, begun: float):
        self.rank, self.call, self.side, self.number, self.tag, self.begun = rank, call, side, number, tag, begun
        self.phase = phase()
        self.group: Group = call.place.group
        self._result: Tensor | None = None
        self._failure: BaseException | None = None
        self._landed: Event | None = None
        self._landed_at = 0.0

    # --- what each kind of collective does -------------------------------------------------------------------------

    def depart(self, x: Tensor) -> None:
        """Send what this rank has to send, as it is now: the program may write to `x` later."""
        raise NotImplementedError

    def arrive(self) -> Tensor:
        """Take what the others sent, and return this rank's result."""
        raise NotImplementedError

    def note(self, result: Tensor, arrival: float) -> None:
        """Write what has happened to the rank's journal, and advance its count of hops."""

    # --- waiting ---------------------------------------------------------------------------------------------------

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks from which nothing has come yet."""
        return () if self.flight is None else self.flight.missing

    def fly(self) -> None:
        """Continue in a separate thread, so that it really overlaps with what the rank computes."""
        if self.flight is not None:
            self._landed = Event()
            Thread(target=self._fly, args=(self._landed, torch.get_num_threads()), daemon=True).start()

    def _fly(self, landed: Event, num_threads: int) -> None:
        try:
            torch.set_num_threads(num_threads)  # a new thread would use all cores
            self._taken = self.arrive()
        except BaseException as error:
            self._failure = error
        self._landed_at = time.perf_counter()
        landed.set()

    def wait(self) -> Tensor:
        if self._result is None:
            now = self.rank.catch_up()
            with no_dispatch():  # what follows is no operation of the program
                self._result = self._land(now)
            self.rank.num_in_flight -= 1
            self.rank.go_on()
        return self._result

    def _land(self, now: float) -> Tensor:
        rank = self.rank
        rank.waits_in = self
        if self._landed is not None:
            self._landed.wait()
            if self._failure is not None:
                raise self._failure
            result, arrival = self._taken, self._landed_at
        else:
            was_there = self.flight is None or self.flight.has_arrived()
            result = self.arrive()
            arrival = now if was_there else time.perf_counter()
        rank.waits_in = None
        if arrival > now:
            rank.journal.waited.append((self.call.op, now, arrival, self.call.place.label, self.side.where))
        self.note(result, arrival)
        return result

    def check(self, header: Header) -> None:
        """Raise CollectiveMismatchError where another rank is in another collective."""
        if not header.side.agrees(self.side):
            self.rank.mismatch = mismatch(self.group, self.number, [self.side, header.side])
            raise self.rank.mismatch

    def tensor(self, arrived: Arrived, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What a rank sent, as a tensor of its own."""
        data = arrived.data
        if not data.numel():
            return torch.empty(shape, dtype=dtype, device="cpu")
        if arrived.header.inline:  # part of the frame: not aligned
            data = data.clone()
        return data.view(dtype).view(shape)


class Alone(ProcessPending):
    """A collective over a group of one rank, or a message from a rank to itself: nothing is sent."""

    def depart(self, x: Tensor) -> None:
        if self.call.peers is None:
            self._taken = collectives.results(self.call, [collectives.own(x)])[0]
        else:
            self._taken = collectives.own(x)
            self._label = self.rank.labels.get(x)

    def arrive(self) -> Tensor:
        return self._taken

    def note(self, result: Tensor, arrival: float) -> None:
        if self.call.peers is not None:
            self.rank.received(result, self._label)

    @property
    def sizes(self) -> tuple[int, ...] | None:
        return (self.side.shape[self.call.params[0]],) if self.call.op == "all_gather" else None


class Message(ProcessPending):
    """ppermute and ring_shift: a message to at most one rank, and one from at most one."""

    def depart(self, x: Tensor) -> None:
        assert self.call.peers is not None
        target, self.source = self.call.peers
        self.like = x
        outgoing = {}
        if target is not None:
            outgoing[target] = self.note_sent(x, target), self.payload(x)
        sources = [] if self.source is None else [self.source]
        self.flight = self.rank.exchange.start(self.tag, outgoing, sources)

    def payload(self, x: Tensor) -> Tensor | None:
        """What is sent with the header."""
        return collectives.own(x) if x.nbytes > INLINE_UP_TO else x  # a small one is copied into the frame

    def note_sent(self, x: Tensor, target: int) -> Header:
        rank, place, side = self.rank, self.call.place, self.side
        step = rank.way_is_free(target)
        rank.take_way(target, step)
        label, values = rank.content(x)
        rank.journal.sent.append(
            Sent(
                target,
                self.group,
                self.number,
                self.call.op,
                place.label,
                self.begun,
                x.nbytes,
                side.shape,
                side.dtype,
                step,
                label,
                values,
                side.where,
                self.phase,
            )
        )
        return Header(side, step, label)

    def arrive(self) -> Tensor:
        assert self.flight is not None
        arrived = self.flight.finish(self.check)
        like, self.like = self.like, None
        assert like is not None
        if self.source is None:
            return torch.zeros_like(like, memory_format=torch.contiguous_format, requires_grad=False)
        came = arrived[self.source]
        self.header = came.header
        return self.tensor(came, self.header.side.shape, like.dtype).to(like.device)

    def note(self, result: Tensor, arrival: float) -> None:
        if self.source is None:
            return
        rank = self.rank
        taken = Taken(arrival, self.side.where, self.phase)
        rank.journal.received[self.source, self.group, self.number] = taken
        rank.hops = max(rank.hops, self.header.hops + 1)
        rank.received(result, self.header.label)


class Receipt(Message):
    """The receive that matches a send: any shape and type, from a rank that says on which kind of device it had it."""

    def arrive(self) -> Tensor:
        assert self.flight is not None and self.source is not None
        came = self.flight.finish(self.check)[self.source]
        self.header = came.header
        x = self.tensor(came, came.header.side.shape, getattr(torch, came.header.side.dtype))
        return x.to(self.sent_with[-1])

    @property
    def sent_with(self) -> tuple[Any, ...]:
        return self.header.side.key[2]


class Together(ProcessPending):
    """The collectives in which every rank of the group waits for every other."""

    def depart(self, x: Tensor) -> None:
        self.labels = {self.call.place.index: self.rank.put_in(x)}
        self.prepare(collectives.own(x) if x.is_cpu else x.detach().cpu().contiguous())
        self.device = x.device
        header = Header(self.side, self.hop, self.labels[self.call.place.index])
        self.flight = self.start({index: (header, piece) for index, piece in self.pieces().items()})

    def prepare(self, x: Tensor) -> None:
        """Keep a copy of this rank's input, and the hop from which on its link is free."""
        self.x, self.inputs = x, [x] * len(self.group)
        self.next = self.group[(self.call.place.index + 1) % len(self.group)]
        self.hop = self.rank.way_is_free(self.next)
        self._sizes: tuple[int, ...] | None = None

    def start(self, outgoing: Mapping[int, tuple[Header, Tensor | None]]) -> Flight:
        """Send to the ranks at these positions, and expect something from each."""
        to_ranks = {self.group[index]: sent for index, sent in outgoing.items() if index != self.call.place.index}
        return self.rank.exchange.start(self.tag, to_ranks, to_ranks)

    def pieces(self) -> dict[int, Tensor | None]:
        """The part of this rank's tensor that the rank at each position needs."""
        op, params, x, indices = self.call.op, self.call.params, self.x, range(len(self.group))
        if op == "all_reduce" and x.nbytes > INLINE_UP_TO:
            return dict(enumerate(x.reshape(-1).split([*map(len, cut(x.numel(), len(self.group), "even"))])))
        if op == "reduce_scatter":
            return dict(enumerate(x.split(list(params[2]), params[0])))
        if op == "all_to_all":
            size = x.shape[params[0]] // len(self.group)
            return dict(enumerate(x.split([size] * len(self.group), params[0])))
        if op == "barrier" or (op == "broadcast" and self.call.place.index != params[0]):
            return dict.fromkeys(indices)
        return dict.fromkeys(indices, x)

    def arrive(self) -> Tensor:
        return self.combined(self.taken()).to(self.device)

    def taken(self) -> dict[int, Arrived]:
        """What has come from each other position, once everything has."""
        assert self.flight is not None
        arrived = self.flight.finish(self.check)
        self.hop = max(self.hop, *(came.header.hops for came in arrived.values()))
        found = {index: arrived[rank] for index, rank in enumerate(self.group) if rank in arrived}
        self.labels |= {index: came.header.label for index, came in found.items()}
        return found

    def _label(self, result: Tensor) -> Label:
        """Whose data is in the result. Only what some of the ranks have made needs to be followed."""
        is_all, index = len(self.group) == self.rank.mesh.size, self.call.place.index
        given = [Label(-1, (rank,)) if is_all else self.labels[place] for place, rank in enumerate(self.group)]
        label = of_collective(self.call.op, given, index, self.call.params[0] if self.call.op == "broadcast" else 0)
        if not is_all:
            self.rank.received(result, label)
        return label

    def combined(self, arrived: dict[int, Arrived]) -> Tensor:
        """The result, as `collectives.results` defines it, from this rank's own piece and those that it was sent."""
        op, params, x, index = self.call.op, self.call.params, self.x, self.call.place.index
        mine = self.pieces()[index]
        if op == "barrier":
            return x.new_empty(0)
        if op == "broadcast":
            return x if index == params[0] else self.tensor(arrived[params[0]], self.side.shape, x.dtype)
        assert mine is not None
        parts = {index: mine.contiguous()}
        for other, came in arrived.items():
            shape = came.header.side.shape if op == "all_gather" else tuple(mine.shape)
            parts[other] = self.tensor(came, shape, x.dtype)
        inputs = [parts[position] for position in range(len(self.group))]
        if op == "all_gather":
            self.inputs = inputs
            return collectives.joined(inputs, params[0])
        if op == "all_to_all":
            return collectives.joined(inputs, params[1])
        total = collectives.reduced(inputs, params[1] if op == "reduce_scatter" else params[0])
        return self._shared(total) if op == "all_reduce" and x.nbytes > INLINE_UP_TO else total

    def _shared(self, total: Tensor) -> Tensor:
        """The second round of a large all_reduce: every position's piece of the sum, joined."""
        index, num_ranks = self.call.place.index, len(self.group)
        result = torch.empty(self.side.shape, dtype=total.dtype, device="cpu")
        rows = result.view(-1).split([*map(len, cut(result.numel(), num_ranks, "even"))])
        rows[index].copy_(total)
        exchange, others = self.rank.exchange, [place for place in range(num_ranks) if place != index]
        coming = [exchange.receive(self.group[place], self.tag, bytes_of(rows[place])) for place in others]
        for place in others:  # no frames: all are known to be in the same collective
            exchange.send(self.group[place], self.tag, bytes_of(total))
        for work in coming:
            exchange.wait(work)
        return result

    def note(self, result: Tensor, arrival: float) -> None:
        rank, call, side = self.rank, self.call, self.side
        rank.hops = max(rank.hops, self.hop + 1)
        rank.take_way(self.next, self.hop)
        x, numels = self.inputs[call.place.index], [x.numel() for x in self.inputs]
        num_bytes = bytes_sent(call, x.shape, x.element_size(), numels, call.place.index)
        rank.journal.met.append(
            Met(
                self.group,
                self.number,
                call.op,
                call.place.label,
                self.begun,
                arrival,
                num_bytes,
                side.shape,
                side.dtype,
                self.hop,
                rank.values(result),
                side.where,
                self.phase,
                call.reduction,
                self._label(result),
            )
        )
        if call.op == "all_gather":
            self._sizes = tuple(x.shape[call.params[0]] for x in self.inputs)
        del self.x, self.inputs

    @property
    def sizes(self) -> tuple[int, ...] | None:
        return self._sizes
