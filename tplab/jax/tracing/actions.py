"""Actions of a pipeline's schedule in a trace: each is one task of its rank, such as "F3" at "stage 1"."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from tplab.jax.tracing.held import Chunk, Held
from tplab.jax.tracing.tasks import Task
from tplab.trace.label import Label

_PREFIX = "tplab.action."
_NUM_NUMBERS = 4
STORE = "store"
"""The kind of a call that only stores what has arrived. It is not an action of the schedule, and not an event."""


def action(kind: str, function: Callable[..., Any], keeps: int = 0) -> Callable[..., Any]:
    """Mark `function` as an action of this kind for the trace. The action adds `keeps` to the bytes that the rank holds
    for backward passes; a negative number frees some.

    Its last four arguments describe the action: the stage, the microbatch, the rank where the microbatch begins, and
    how long the action takes on a clock that counts steps. They are for the trace; XLA removes them. STORE has none.
    """

    def called(*args: Any) -> Any:
        return function(*args)

    called.__name__ = f"{_PREFIX}{kind}.{keeps}"
    return jax.jit(called)


def kind_of_action(params: Mapping[str, Any]) -> str:
    """The kind of action of a call with these parameters, and the bytes it keeps, "F.1024"; "" if it is no action."""
    name = str(params.get("name", ""))
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else ""


class Actions:
    """Follows actions and the exchanges between them, in lock-step: an action comes after all earlier exchanges.

    tasks   the walk's list of tasks, to extend       chunk   (rank, microbatch) -> the number of the chunk
    """

    def __init__(self, tasks: list[Task], chunk: Chunk, num_ranks: int):
        self._tasks, self._chunk, self._num_ranks = tasks, chunk, num_ranks
        self._passed: dict[int, set[int]] = defaultdict(set)  # chunk of a microbatch -> ranks that have worked on it
        self._held = [0] * num_ranks  # bytes for backward passes
        self._before: tuple[int, ...] = ()  # the exchanges before the actions of this tick
        self._after: list[int] = []  # and those after them

    def follow(
        self,
        kind: str,
        inputs: list[Held],
        decided_by: tuple[int, ...],
        ranks: tuple[int, ...],
        run: Callable[[], list[Held]],
    ) -> list[Held]:
        """Follow an action of a kind such as "F.1024", which `run` walks through, as one opaque task per rank.

        decided_by   the numbers of the tasks that decided whether it runs at all
        """
        first, needs = len(self._tasks), {*decided_by, *(task for held in inputs for task in held.needs)}
        kind, _, keeps = kind.partition(".")
        results = run()
        if kind == STORE:
            del self._tasks[first:]
            return [Held(held, needs) for held in results]
        if self._after:
            self._before, self._after = tuple(self._after), []
        for rank in ranks:
            self._held[rank] += int(keeps)
        doing = self._doing(kind, inputs[-_NUM_NUMBERS:], ranks)
        labels: list[Label | None] = [None] * self._num_ranks
        for rank, task in doing.items():
            chunk = task.labels[rank].chunk
            self._passed[chunk].add(rank)
            labels[rank] = Label(chunk, tuple(sorted(self._passed[chunk])))
        last = self._merged(first, tuple(sorted({*needs, *self._before})), doing)
        same = set(map(id, inputs))
        return [held.made_by(last, held.labels if id(held) in same else labels) for held in results]

    def exchange(self, task: Task) -> int:
        """Add an exchange after the actions of a tick: all ranks wait for each other. Returns its number."""
        self._tasks.append(replace(task, together=True))
        self._after.append(len(self._tasks) - 1)
        return self._after[-1]

    def _doing(self, kind: str, numbers: list[Held], ranks: tuple[int, ...]) -> dict[int, Task]:
        """Each rank's action, with its label, its duration in steps, and the bytes that the rank holds afterwards; what
        it computes is still to come."""
        values = [held.values() or [0] * self._num_ranks for held in numbers]
        found = {}
        for rank in ranks:
            stage, microbatch, origin, seconds = (column[rank] for column in values)
            labels = {rank: Label(self._chunk(int(origin), int(microbatch), ""), ())}
            about = {"labels": labels, "seconds": float(seconds), "held": self._held[rank]}
            found[rank] = Task("compute", f"{kind}{microbatch}", (rank,), (), (), "", 0, f"stage {stage}", **about)
        return found

    def _merged(self, first: int, tail: tuple[int, ...], doing: Mapping[int, Task]) -> tuple[int, ...]:
        """Merge the tasks of an action, from `first` on, into one task per rank; `tail` is what they need.

        If ranks communicate within an action, as in tensor parallelism, there is one task before and one after that.
        Returns the numbers of the last ones.
        """
        made = self._tasks[first:]
        del self._tasks[first:]
        computing: list[Task] = []
        for task in [*made, None]:
            if task is not None and task.kind == "compute":
                computing.append(task)
                continue
            if computing or (task is None and len(self._tasks) == first):
                begin = len(self._tasks)
                self._tasks += [_one(computing, action, tail) for action in doing.values()]
                doing = {rank: replace(action, seconds=0.0) for rank, action in doing.items()}
                computing, tail = [], tuple(range(begin, len(self._tasks)))
            if task is not None:
                self._tasks.append(replace(task, needs=tail))
                tail = (len(self._tasks) - 1,)
        return tail


def _one(parts: list[Task], action: Task, needs: tuple[int, ...]) -> Task:
    """The action with the work of these parts: one task of one rank."""
    main = max(parts, key=lambda part: part.flops, default=action)
    work = {"num_bytes": sum(part.num_bytes for part in parts), "flops": sum(part.flops for part in parts)}
    return replace(action, needs=needs, shape=main.shape, dtype=main.dtype, **work)
