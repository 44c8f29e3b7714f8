"""A forward and a backward pass of one rank at once: the messages of one travel while the other computes."""

from __future__ import annotations

import contextvars
import sys
from _thread import start_new_thread
from collections.abc import Callable
from functools import partial
from threading import Lock, get_ident
from types import FrameType
from typing import Any

import torch

from tplab.torch.ranks.process_state import generators, put_states
from tplab.torch.ranks.rank import around, enter, this_rank
from tplab.torch.ranks.simulated import SimulatedRank
from tplab.torch.ranks.turns import Released
from tplab.torch.ranks.watcher import Listener, watcher
from tplab.torch.ranks.world import Inherited


class Pair:
    """A forward pass that runs beside the backward pass given to `run`. Each pass starts a collective, lets the other
    one continue, and waits for the result when the other has started its next collective or has ended. So they compute
    in turns, as on one chip, and the messages of one travel while the other computes, unless the network is busy.
    Collectives of whole numbers, such as counts of rows, are waited for at once: they are small, and only a forward
    pass sends them.

    The forward pass has its own thread, because a backward pass cannot stop in its middle. It is the same rank, and the
    order of turns depends on the program alone. So it is the same on all ranks that call the same collectives. Each
    pass continues its own random numbers.
    """

    def __init__(self, forward: Callable[[], None]):
        self._forward, self._rank = forward, this_rank()
        if isinstance(self._rank, SimulatedRank) and torch.distributed.is_initialized():
            raise NotImplementedError(
                "overlap=True runs forward passes in a thread that torch.distributed does not know: leave it out where "
                "the program of simulated ranks calls init_process_group"
            )
        self._gate = self._rank.gate if isinstance(self._rank, SimulatedRank) else None
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
        self._generators = generators(self._device)
        self._goes_forward, self._goes_back = Lock(), Lock()
        self._goes_forward.acquire()
        self._goes_back.acquire()
        self._thread: int | None = None
        self._is_over = self._is_left = False
        self._error: BaseException | None = None

    def run(self, backward: Callable[[], None]) -> None:
        """Run both passes to their ends."""
        given = watcher().listeners, Inherited.here(self._device).state, sys._getframe()
        start_new_thread(partial(contextvars.copy_context().run, self._live, *given), ())
        self._rank.pair = self
        try:
            self.let_go_on()
            backward()
        except BaseException:
            self._is_left = True
            raise
        finally:
            self._rank.pair = None  # the rest of the forward pass overlaps with nothing
            if not self._is_over:
                self._switch(self._goes_forward, self._goes_back)
        if self._error is not None:
            raise self._error

    def let_go_on(self) -> None:
        """Let the other pass continue until it has started a collective, or ends."""
        if get_ident() == self._thread:
            self._switch(self._goes_back, self._goes_forward)
            if self._is_left:
                raise Released
        elif not self._is_over:
            self._switch(self._goes_forward, self._goes_back)
        if self._error is not None:
            raise self._error

    def _switch(self, other: Lock, own: Lock) -> None:
        """Switch from this thread to the other, and back. Ctrl-C ends the one that runs."""
        rank = self._rank
        states = [one.get_state() for one in self._generators]
        own_of_pass = rank.seed, rank.draws, rank.drawn, rank.unit
        if self._gate is not None:
            self._gate.close()
        other.release()
        own.acquire()
        rank.seed, rank.draws, rank.drawn, rank.unit = own_of_pass
        put_states(self._generators, states)
        if self._gate is not None:
            self._gate.open()

    def _live(self, listeners: tuple[Listener, ...], state: Callable[[], Any], frame: FrameType) -> None:
        self._goes_forward.acquire()
        self._thread = get_ident()
        try:
            if not self._is_left:
                enter(self._rank)
                around(frame)
                with state():
                    for one in listeners:
                        watcher().add(one)
                    self._run_forward()
        except BaseException as error:
            self._error = error
        finally:
            for one in listeners:
                watcher().remove(one)
            self._is_over = True
            self._goes_back.release()

    def _run_forward(self) -> None:
        if self._gate is None:
            return self._forward()
        try:
            self._gate.open()
            self._forward()
        finally:
            self._gate.close()
