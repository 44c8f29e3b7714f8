"""Watches a training script on simulated ranks, step by step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tplab.checking.recording import Seen
from tplab.checking.trail import Trail
from tplab.torch.checking.handed import Enough, Plan
from tplab.torch.checking.origins import NumbersMade
from tplab.torch.checking.stand_ins import StandIns
from tplab.torch.checking.watched import Watched
from tplab.torch.ranks.printing import Output
from tplab.torch.ranks.rank import current_rank_or_none, this_rank


class Watch:
    """Inside it, programs on simulated ranks are watched; `around` must be around the program of each rank.

    seen    the recording of each rank
    stopped the ranks that were ended after the steps of the plan
    trails  every operation of the step that is traced, by rank
    """

    def __init__(self, num_ranks: int, plan: Plan):
        self._plan = plan
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
        self.trails[rank] = watched.recorder.trail
        sys.stdout, stdout = _Noted(sys.stdout, watched.print), sys.stdout  # type: ignore[assignment]
        try:
            with NumbersMade(watched.line, watched.call, watched.compute):
                yield
            self.has_ended[rank] = True
        except Enough:
            self.stopped.add(rank)
        finally:
            sys.stdout = stdout
            watched.settle()
            watched.close()

    def here(self) -> Watched | None:
        """Return the rank whose program this thread runs."""
        rank = current_rank_or_none()
        watched = None if rank is None else self._ranks.get(rank.rank)
        return None if watched is None or watched.has_enough else watched

    def __enter__(self) -> Watch:
        self._stand_ins.__enter__()
        if any(one.kind == "sync" for one in self._plan.repairs):
            import torch.distributed.fsdp  # noqa: F401  # now, and not only once a model is called

            self._stand_ins.see_fsdp()
        if self._plan.traced is not None or self._plan.repairs:
            self._stand_ins.see_functions()
        return self

    def __exit__(self, *_: object) -> None:
        self._stand_ins.__exit__()


class _Noted(Output):
    """A stream whose text is also recorded."""

    def __init__(self, stream: Any, note: Callable[[str], None]):
        super().__init__(stream, lambda: 0)
        self._note = note

    def put(self, rank: int, text: str) -> None:
        self._note(text)
        self.stream.write(text)
