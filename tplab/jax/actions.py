"""Actions of a pipeline's schedule in a trace: all that a rank computes in one is one task, "F3" at "stage 1"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from tplab.jax.held import Label
from tplab.jax.tasks import Task

_PREFIX = "tplab.action."
STORE = "store"
"""An action that only puts away what has arrived: it is none of the schedule's, and not told of."""
NUMBERS = ("stage", "microbatch", "origin", "seconds")
"""What the last arguments of an action are: the origin is the rank where the microbatch begins."""


def action(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which computes an action of this kind, so that the trace knows it as one. Its last arguments are
    NUMBERS; for XLA they mean nothing."""

    def called(*args: Any) -> Any:
        return function(*args)

    called.__name__ = _PREFIX + kind
    return jax.jit(called)


def kind_of_action(params: Mapping[str, Any]) -> str:
    """The kind of action that a call with these parameters is; "" if none."""
    name = str(params.get("name", ""))
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else ""


@dataclass(frozen=True)
class Doing:
    """What a rank does: its name, the chunk that it works on, and how long it takes where time is counted in steps."""

    op: str
    where: str
    chunk: int
    seconds: float


def merge(tasks: list[Task], first: int, entering: Iterable[int], doing: Mapping[int, Doing]) -> tuple[int, ...]:
    """Put in the place of `tasks[first:]`, those of one action on several ranks, one a rank; they need `entering`.

    Where ranks talk to each other in an action, as in tensor parallelism, it is one before and one after.
    Returns the numbers of the last ones.
    """
    made, tail = tasks[first:], tuple(sorted(set(entering)))
    del tasks[first:]
    seconds = {rank: about.seconds for rank, about in doing.items()}
    computing: list[Task] = []
    for task in [*made, None]:
        if task is not None and task.kind == "compute":
            computing.append(task)
            continue
        if computing or (task is None and len(tasks) == first):
            numbers = []
            for rank, about in doing.items():
                numbers.append(len(tasks))
                tasks.append(_one(computing, rank, about, tail, seconds.pop(rank, 0.0)))
            computing, tail = [], tuple(numbers)
        if task is not None:
            tasks.append(replace(task, needs=tail))
            tail = (len(tasks) - 1,)
    return tail


def _one(parts: list[Task], rank: int, about: Doing, needs: tuple[int, ...], seconds: float) -> Task:
    """All of them as one task of one rank."""
    largest = max(parts, key=lambda part: part.flops, default=None)
    return Task(
        "compute", about.op, (rank,), needs, () if largest is None else largest.shape,
        "" if largest is None else largest.dtype, sum(part.num_bytes for part in parts), about.where,
        sum(part.flops for part in parts), labels={rank: Label(about.chunk, ())}, seconds=seconds,
    )  # fmt: skip
