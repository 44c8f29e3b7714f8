"""Simulated ranks: how a rank performs its collectives, and records them in its log and its trace."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from tplab.cost.lanes import ISSUE, ROUND, SEND, WAIT
from tplab.errors import CollectiveMismatchError
from tplab.torch.private import graph_task, no_dispatch, num_modes, phase
from tplab.torch.ranks.clocked import ClockedRank
from tplab.torch.ranks.meeting import Group, Meeting, Site, bytes_sent, unfit
from tplab.torch.ranks.outcomes import kept, own, results, settled
from tplab.torch.ranks.rank import Call, Pending
from tplab.torch.ranks.texts import mismatch
from tplab.torch.ranks.turns import Released
from tplab.torch.ranks.watcher import Begun, begins, met
from tplab.trace.label import UNKNOWN, Label


class SimulatedRank(ClockedRank):
    """The messages and collectives of a rank that is a thread of this process and takes turns with the others."""

    # --- collectives ---------------------------------------------------------------------------------------------

    def begin(self, call: Call, x: Tensor) -> Pending:
        if num_modes():
            begun = begins()
            with no_dispatch():  # what follows is not an operation of the program
                return self._begun(call, x, begun)
        return self._begun(call, x)

    def do(self, call: Call, x: Tensor, is_lent: bool = False) -> Tensor:
        """Run a collective to completion. With `is_lent`, the result is read-only."""
        if num_modes():
            with no_dispatch():
                result = self._done(call, x, is_lent)
            met(call, x, result)
            return result
        return self._done(call, x, is_lent)

    def finish(self, site: Site, meeting: Meeting, x: Tensor, begun: Begun | None, is_lent: bool) -> Tensor:
        """Wait for the result of a collective that this rank has started. With `is_lent`, it is read-only."""
        self._stops()
        with no_dispatch():
            if site.call.peers is None:
                result = self._outcome(site, meeting, is_lent)
            else:
                result = self._received(site, meeting, x)
        if num_modes():
            met(site.call, x, result, begun)
        self._goes_on()
        return result

    def _begun(self, call: Call, x: Tensor, begun: Begun | None = None) -> Pending:
        self._stops()
        site = self._site(call, x)
        meeting = self._arrive(site)
        if call.peers is None:
            self.world.chronicle.overlaps = True
            label = None if site.group.is_all else self.provenance.put_in(x)
            self._put_in(site, kept(x), label, meeting)
        elif site.target is not None:
            self._send(site, x, meeting)
        self._goes_on()
        return _Pending(self, site, meeting, x, begun)

    def _done(self, call: Call, x: Tensor, is_lent: bool) -> Tensor:
        """Start a collective and wait for it. Only a message is copied: this thread cannot write to `x` now."""
        self._stops()
        site = self._site(call, x)
        meeting = self._arrive(site)
        if call.peers is None:
            label = None if site.group.is_all else self.provenance.put_in(x)
            self._put_in(site, x if x.is_contiguous() else x.contiguous(), label, meeting)
            result = self._outcome(site, meeting, is_lent)
        else:
            sent = self._send(site, x, meeting) if site.target is not None else None
            result = self._received(site, meeting, x)
            if sent is not None and site.source is None and call.op == "ppermute":
                self.log.add(self.lane, ROUND, sent, site.wait_form)
        self._goes_on()
        return result

    def _site(self, call: Call, x: Tensor) -> Site:
        world = self.world
        frame = self._called_from or world.lines.frame(above=3)
        code = frame.f_code
        key = (call, x.shape, x.dtype, id(code), frame.f_lasti, graph_task() == -1, self.unit)
        site = self._sites.get(key)
        if site is None:
            ranks = call.place.group
            group = world.groups.setdefault(ranks, Group(ranks, world.mesh.size))
            where = self.written(self._line(frame))
            site = self._sites[key] = Site(call, x, self.rank, group, where, phase(), code, world.chronicle)
        return site

    def _arrive(self, site: Site) -> Meeting:
        """Note this rank's arrival in the meeting of the group that this call belongs to. Returns the meeting."""
        if self.turns.failure is not None:
            raise Released
        if (watches := self.turns.watches).naps:
            watches.goes_on()
        group, index = site.group, site.index
        number = group.num_calls[index]
        group.num_calls[index] = number + 1
        meeting = group.open.get(number)
        if meeting is None:
            meeting = group.open[number] = Meeting(number, site.signature)
        elif meeting.signature is not site.signature:
            raise self._mismatch(meeting, site)
        meeting.sites[index] = site
        if len(meeting.sites) == group.size:
            del group.open[number]
            if site.call.op == "receive" and meeting.waiting:  # a sender may wait for this receive
                self.turns.ready.extend(meeting.waiting)
                meeting.waiting.clear()
        return meeting

    def _send(self, site: Site, x: Tensor, meeting: Meeting) -> int | None:
        """Put this rank's message where its receiver finds it. Returns its log entry; None if sent to itself."""
        world, rank, payload, num_bytes = self.world, self.rank, own(x), site.num_bytes
        target: int = site.target  # type: ignore
        if target == rank:
            meeting.messages[target] = payload, None, self.labels.get(x) or UNKNOWN, -1, site
            return None
        entry = self.log.add(self.lane, SEND, site.log_form)
        label, values = self.provenance.of(x), world.values.of(payload) if site.is_small else None
        number = world.chronicle.recorder.next_message()
        world.chronicle.recorder.note(
            site.form, entry, entry, num_bytes, number, 0, label.chunk, label.contributors, values
        )
        meeting.messages[target] = payload, entry, label, number, site
        if meeting.waiting:
            for seat in [seat for seat in meeting.waiting if seat.rank == target]:
                meeting.waiting.remove(seat)
                self.turns.ready.append(seat)
        if self.turns.watches.by_seat:
            self.look()
        return entry

    def _put_in(self, site: Site, x: Tensor, label: Label | None, meeting: Meeting) -> None:
        """Add this rank's tensor and label to the meeting. The last rank to arrive computes every rank's result."""
        meeting.inputs[site.index] = x.detach() if x.requires_grad else x
        if label is not None:
            meeting.labels[site.index] = label
        ranks, world, call = site.group.ranks, self.world, site.call
        if len(ranks) > 1:
            if not meeting.entries:
                meeting.log_number = self.log.next_collective()
            meeting.entries[site.index] = self.log.add(self.lane, ISSUE, meeting.log_number, site.log_form)
        if len(meeting.inputs) < len(ranks):
            return
        if call.takes is not None and (error := unfit(meeting)) is not None:
            self.turns.fail(error)  # ends the run, even if the program goes on
            raise error
        since = time.perf_counter()
        inputs = [meeting.inputs[index] for index in range(len(ranks))]
        splits = [meeting.sites[index].call.splits or () for index in range(len(ranks))] if call.splits else ()
        meeting.outputs = dict(enumerate(results(call, inputs, splits)))
        if len(ranks) == 1:
            return
        number = world.chronicle.recorder.next_message()
        labels = meeting.labels = site.group.labels_after(call, meeting.labels)
        for index in range(len(ranks)):
            other = meeting.sites[index]
            num_sent = other.num_sent
            if num_sent is None:
                x = inputs[index]
                num_sent = bytes_sent(other.call, x.shape, x.element_size(), [y.numel() for y in inputs], index)
                if call.op != "all_gather":  # the sizes of other ranks' inputs may change
                    other.num_sent = num_sent
            values = world.values.of(meeting.outputs[index])
            entry, label = meeting.entries[index], labels[index]
            world.chronicle.recorder.note(
                other.form, entry, entry, num_sent, number, 0, -1, label.contributors, values, label.part
            )
        turns = self.turns
        turns.core.has_met(since, len(ranks))
        turns.ready.extend(meeting.waiting)
        meeting.waiting.clear()

    def _outcome(self, site: Site, meeting: Meeting, is_lent: bool) -> Tensor:
        """This rank's result of a collective that is not between pairs, once it is ready."""
        if meeting.outputs is None:
            self._wait(site, meeting)
        self._wait_on_clock(site, meeting.entries.get(site.index))
        result: Tensor = meeting.outputs.pop(site.index)  # type: ignore
        if not site.group.is_all and site.group.size > 1:
            self.provenance.received(result, meeting.labels[site.index])
        return result if is_lent else settled(result)

    def _received(self, site: Site, meeting: Meeting, x: Tensor) -> Tensor:
        """The message to this rank, once it has arrived; zeros like `x` if no rank sends one."""
        if site.source is None:
            return _zeros_like(x)
        message = meeting.messages.pop(self.rank, None)
        if message is None:
            self._wait(site, meeting)
            message = meeting.messages.pop(self.rank)
        result, entry, label, number, sent = message
        if site.where != sent.where or site.phase != sent.phase:
            self.world.chronicle.recorder.taken(number, site.where, site.phase)
        if label is not UNKNOWN or not self.provenance.has_lost_track:
            self.provenance.received(result, label)
        self._wait_on_clock(site, entry)
        return result

    def _wait_on_clock(self, site: Site, entry: int | None) -> None:
        """Advance this rank's clock to the time when this log entry arrives."""
        if entry is not None:
            self.log.add(self.lane, WAIT, entry, site.wait_form if self.home is self else -1)  # no other thread's waits

    def _wait(self, site: Site, meeting: Meeting) -> None:
        meeting.waiting.append(self)
        self.waits_in = site, meeting
        self.turns.pass_on(self)
        self.waits_in = None

    # --- what torch.distributed needs besides collectives ----------------------------------------------------------

    def await_receiver(self, sent: _Pending) -> None:
        """Wait until the receiving rank is ready to receive this, as large messages do in real networks."""
        site, meeting = sent.site, sent.meeting
        if site.target == self.rank:
            return
        self._stops()
        if len(meeting.sites) < site.group.size:
            self._wait(site, meeting)
        self._goes_on()

    def fetch(self, pending: _Pending) -> Tensor:
        """This rank's result of a collective. Its clock does not wait yet: it waits when the program does."""
        meeting = pending.meeting
        self._stops()
        if meeting.outputs is None:
            with no_dispatch():
                self._wait(pending.site, meeting)
        self._goes_on()
        return meeting.outputs[pending.site.index]  # type: ignore

    def has_come(self, pending: _Pending) -> bool:
        """Whether a wait would end at once. If not, other ranks have a turn."""
        site, meeting = pending.site, pending.meeting
        if site.call.peers is None:
            here = meeting.outputs is not None
        else:
            here = len(meeting.sites) == site.group.size and (site.source is None or self.rank in meeting.messages)
        if not here:
            self.give_way()
        return here

    def _mismatch(self, meeting: Meeting, site: Site) -> CollectiveMismatchError:
        """The error for a call that differs from the collective of the others in its group. It ends the run."""
        sides = [(rank, str(side)) for rank, side in (meeting.first, (self.rank, site))]
        error = mismatch(meeting.number, site.call.place.label, site.group.ranks, sides)
        self.waits_in = site, meeting
        self.turns.fail(error)
        return error


class _Pending(Pending):
    __slots__ = ("begun", "meeting", "rank", "result", "site", "x")

    def __init__(self, rank: SimulatedRank, site: Site, meeting: Meeting, x: Tensor, begun: Begun | None):
        self.rank, self.site, self.meeting, self.begun = rank, site, meeting, begun
        self.x: Tensor | None = x  # the shape of the zeros that it returns if no rank sends
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        return settled(self.read())

    def read(self) -> Tensor:
        if self.result is None:
            assert self.x is not None
            self.result = self.rank.here().finish(self.site, self.meeting, self.x, self.begun, is_lent=True)
            self.x = None
        return self.result

    @property
    def sizes(self) -> tuple[int, ...] | None:
        call, inputs = self.site.call, self.meeting.inputs
        if not call.row.gathers or self.result is None:
            return None
        return tuple(inputs[index].shape[call.dims[1]] for index in range(len(inputs)))

    @property
    def sent_with(self) -> tuple[Any, ...]:
        return self.meeting.sites[0].call.params


def _zeros_like(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format, requires_grad=False)
