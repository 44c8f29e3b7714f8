"""Watches a training script on simulated ranks, step by step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tplab.checking.recording import Seen
from tplab.checking.repairs import Repair
from tplab.checking.trail import Trail
from tplab.torch.checking.handed import Handed
from tplab.torch.checking.made import NumbersMade
from tplab.torch.checking.mending import Board
from tplab.torch.checking.plan import Enough, Plan
from tplab.torch.checking.stand_ins import StandIns
from tplab.torch.checking.watched import Watched
from tplab.torch.ranks.rank import current_rank_or_none, this_rank


class Watch:
    """Inside it, programs on simulated ranks are watched; `around` must be around the program of each rank.

    steps   after this many steps of its optimizer a rank ends, where the next one would begin
    seen    of each rank
    stopped the ranks that were ended after these steps
    feed    the samples to use in the place of those that the program draws
    weights the weights to begin with in the place of those that the program draws, by name
    nudges  whether weights at the start, and samples, are changed in their last digit
    traced  the step of which every operation is recorded, in `trails`; None for none
    ends    whether ranks end after these steps; otherwise they go on, unwatched, and dropout is as it is
    repairs changes of the run
    """

    def __init__(
        self,
        num_ranks: int,
        steps: int,
        *,
        feed: Handed | None = None,
        weights: Mapping[str, np.ndarray] | None = None,
        ends: bool = True,
        nudges: bool = False,
        traced: int | None = None,
        repairs: Sequence[Repair] = (),
    ):
        self._plan = Plan(steps, feed, weights, ends, nudges, traced, tuple(repairs), Board())
        self.seen = [Seen() for _ in range(num_ranks)]
        self.has_ended = [False] * num_ranks
        self.stopped = set[int]()
        self._ranks: dict[int, Watched] = {}
        self._stand_ins = StandIns(self.here)
        self.trails: dict[int, Trail] = {}

    @property
    def has_enough(self) -> bool:
        """Whether every rank has made all steps, or has ended by itself."""
        return all(end or seen.num_steps >= self._plan.steps for end, seen in zip(self.has_ended, self.seen))

    @contextmanager
    def around(self) -> Iterator[None]:
        rank = this_rank().rank
        self._ranks[rank] = watched = Watched(self._plan, self.seen[rank])
        sys.stdout, stdout = _Noted(sys.stdout, watched.print), sys.stdout  # type: ignore[assignment]
        try:
            with NumbersMade(watched.line, watched.call, watched.compute), self._tracing(watched, rank):
                yield
            self.has_ended[rank] = True
        except Enough:
            self.stopped.add(rank)
        finally:
            sys.stdout = stdout
            watched.settle()
            watched.close()

    @contextmanager
    def _tracing(self, watched: Watched, rank: int) -> Iterator[None]:
        if self._plan.traced is None:
            yield
            return
        self.trails[rank] = watched.recorder.trail
        with watched.recorder:
            yield

    def here(self) -> Watched | None:
        """The rank whose program this thread runs."""
        rank = current_rank_or_none()
        watched = None if rank is None else self._ranks.get(rank.rank)
        return None if watched is None or watched.has_enough else watched

    def __enter__(self) -> Watch:
        self._stand_ins.__enter__()
        if any(one.kind == "sync" for one in self._plan.repairs):
            self._stand_ins.see_fsdp()
        if self._plan.traced is not None or self._plan.repairs:
            self._stand_ins.see_functions()
        return self

    def __exit__(self, *_: object) -> None:
        self._stand_ins.__exit__()


class _Noted:
    """A stream whose text is also noted."""

    def __init__(self, stream: Any, note: Callable[[str], None]):
        self._stream, self._note = stream, note

    def write(self, text: str) -> int:
        self._note(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
