"""A forward and a backward pass of one rank at once: what one of them sends travels while the other computes."""

from __future__ import annotations

import sys
from _thread import start_new_thread
from collections.abc import Callable
from threading import Lock, get_ident
from types import FrameType
from typing import Any

from tplab.torch.ranks.rank import around, enter, this_rank
from tplab.torch.ranks.turns import Released
from tplab.torch.ranks.watcher import Listener, watcher
from tplab.torch.ranks.world import inherited_state


class Pair:
    """A forward pass beside the backward pass that `run` is given. Each begins a collective, lets the other go on, and
    waits for the result when that one has begun its next or has ended. So both are computed one after the other, as
    one chip does it, and messages of either lie under what the other computes, unless they wait for the network. What
    counts rows is waited for at once: it is few bytes, and only a forward pass sends it.

    The forward pass has a thread of its own, since a backward pass cannot stop in its middle. It is the same rank, and
    the order in which both go on depends on the program alone. So it is the same on all ranks that run the same stage.
    """

    def __init__(self, forward: Callable[[], None]):
        self._forward, self._rank = forward, this_rank()
        self._goes_forward, self._goes_back = Lock(), Lock()
        self._goes_forward.acquire()
        self._goes_back.acquire()
        self._thread: int | None = None
        self._is_over = self._is_left = False
        self._error: BaseException | None = None

    def run(self, backward: Callable[[], None]) -> None:
        """Both, to their ends."""
        start_new_thread(self._live, (watcher().listeners, inherited_state(), sys._getframe()))
        self._rank.pair = self
        try:
            self.let_go_on()
            backward()
        except BaseException:
            self._is_left = True
            raise
        finally:
            self._rank.pair = None  # what is left of the forward pass has nothing to lie under
            if not self._is_over:
                self._goes_forward.release()
                self._goes_back.acquire()
        if self._error is not None:
            raise self._error

    def let_go_on(self) -> None:
        """Let the other pass go on until it has begun a collective, or to its end."""
        if get_ident() == self._thread:
            self._goes_back.release()
            self._goes_forward.acquire()
            if self._is_left:
                raise Released
        elif not self._is_over:
            self._goes_forward.release()
            self._goes_back.acquire()
        if self._error is not None:
            raise self._error

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
                    self._forward()
        except BaseException as error:
            self._error = error
        finally:
            for one in listeners:
                watcher().remove(one)
            self._is_over = True
            self._goes_back.release()
