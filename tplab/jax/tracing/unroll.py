"""`trace`: the trace of any function that XLA has compiled, with the collectives that `jit` inserted for its shardings.

The compiled module is the program of every rank: the partitioner has cut the arrays, and has inserted, merged and moved
collectives. Its instructions become tasks, one per fusion, with loops of known length unrolled. They run on the
modelled clock, and a group of ranks is named after the axes of the mesh that it spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tplab.comm import check_counts
from tplab.cost.cluster import Cluster
from tplab.cost.named import find
from tplab.errors import TraceError
from tplab.jax.tracing.flow import axes_along
from tplab.jax.tracing.hlo import BRANCHES, Instruction, Module
from tplab.jax.tracing.lowered import compiled_for
from tplab.jax.tracing.sending import merged, sent_by
from tplab.jax.tracing.tasks import Task
from tplab.jax.tracing.trace import recorded
from tplab.jax.tracing.walk import MOST_ITERATIONS
from tplab.jax.tracing.work import PASSED_ON, Works
from tplab.mesh import Mesh
from tplab.trace.label import Label
from tplab.trace.recorder import Recorder
from tplab.trace.trace import Trace


def trace(
    fn: Callable[..., Any],
    *args: Any,
    cluster: str | Cluster | None = None,
    branch: int | None = None,
    trips: int | None = None,
    accelerator: bool = False,
    **kwargs: Any,
) -> Trace:
    """What every rank would do in `fn(*args, **kwargs)`, as XLA compiled it. Nothing is run.

        trace(jax.jit(train_step), params, batch, cluster="h100")

    fn           any function of JAX arrays, jitted or not (jax.jit, pmap, nnx.jit, eqx.filter_jit); `shard_map`, `scan`
                 and the rest may be inside
    args         arrays, or jax.ShapeDtypeStructs with shardings, and anything else that `fn` takes
    cluster      the modelled clock's figures, as in `run`
    branch       which branch of a `lax.cond` or `lax.switch` to follow: 0 is the one for False. Without it, all
                 branches must send the same, and the one with the most computation is followed
    trips        the assumed number of iterations of a loop whose length is known only at run time
    accelerator  on CPUs: send what GPUs and TPUs would send. A sum of which each rank keeps a piece is a reduce_scatter
                 there, and bfloat16 is sent as such, while on CPUs it is sent as float32

    Ranks are numbered like the devices of the mesh. The mesh is the one over which the arguments, the results or the
    function itself are sharded. If there are several, it is the one with the most axes; if there is none, it has one
    axis, "devices". XLA compiles for the devices of that mesh. On the modelled clock, communication and computation
    overlap wherever the data flow allows it, as in `run`; in XLA's own order they may overlap less. A product has the
    dtype of its operands in your program, even if XLA for CPUs makes them float32, and an array that is read or updated
    in part takes the time of that part.
    Raises TraceError if only the running program knows what is sent.
    """
    check_counts(**{name: n for name, n in (("branch", branch), ("trips", trips)) if n is not None})
    known = None if cluster is None else find(cluster)
    made = compiled_for(fn, args, kwargs)
    how = {"branch": branch, "trips": trips, "accelerator": accelerator}
    return unrolled(made.module, Recorder(made.mesh, made.title, "jax"), known, **how)


def unrolled(module: Module, recorder: Recorder, cluster: Cluster | None = None, **how: Any) -> Trace:
    """The trace of a compiled module on the recorder's mesh. `how` to unroll it: see `Unroll`."""
    program = Unroll(module, recorder.mesh, recorder.chunk, Works(tuple(recorder.mesh.ranks)), **how)
    program.run(module.entry, [])
    return recorded(recorder, program.tasks, set(range(len(program.tasks))), cluster, record=0)


MOST_TASKS = 100_000
"""The most tasks of a program. Each is an event on every rank."""
WRITTEN_OUT = 1_000
"""The most tasks for which a loop that sends nothing is unrolled; a longer one is shown as one task."""

Value = tuple[int, ...] | list[Any]
"""The numbers of the tasks that must end before a value exists; for a tuple, one such entry for each element."""


@dataclass
class Unroll:
    """Follows a module and collects the ranks' `tasks`.

    chunk        (rank, piece) -> the number of the chunk, for messages
    branch       which branch is taken if it depends on data; None: any of them, if all send the same
    trips        how often a loop runs if it depends on data; None: unknown
    accelerator  whether to send as on GPUs and TPUs, though XLA compiled for CPUs
    """

    module: Module
    mesh: Mesh
    chunk: Callable[[int, int], int]
    works: Works
    branch: int | None = None
    trips: int | None = None
    accelerator: bool = False
    tasks: list[Task] = field(default_factory=list)
    num_messages: int = 0

    def run(self, name: str, parameters: Sequence[Value]) -> Value:
        """Follow a computation. Returns its result."""
        values: dict[Instruction, Value] = {}
        result: Value = ()
        for one in self.module.computations[name]:
            values[one] = self._instruction(one, [values[operand] for operand in one.operands], parameters)
            if one.is_root:
                result = values[one]
        return result

    def _instruction(self, one: Instruction, values: list[Value], parameters: Sequence[Value]) -> Value:
        if one.op == "parameter":
            return parameters[int(one.given)] if parameters else ()
        if one.op == "tuple":
            return values
        if one.op in ("send", "recv") and "is_host_transfer=true" not in one.attributes:
            raise TraceError(
                f"{one.name}, which was {one.origin or 'made by XLA'}, is one half of a message, a form that XLA gives "
                "some messages for GPUs and that tplab does not read; compile without it: "
                "XLA_FLAGS=--xla_gpu_collective_permute_decomposer_threshold=9223372036854775807"
            )
        if one.op == "get-tuple-element" and isinstance(values[0], list):
            return values[0][one.index]
        if values and (one.op in PASSED_ON or one.is_end):
            return values[0]
        needs = tuple(sorted(_needs(values)))
        if one.collective:
            return self._collective(one, needs)
        if calls := self.module.calls(one):
            return self.run(calls[0], values)
        if one.op == "while":
            return self._while(one, values[0])
        if one.op == "conditional":
            return self._conditional(one, values)
        work = self.works[one]
        return needs if work is None else self._add(replace(work, needs=needs))

    def _add(self, task: Task) -> tuple[int]:
        if len(self.tasks) == MOST_TASKS:
            raise TraceError(
                f"the program runs more than {MOST_TASKS:,} operations on every rank, with its loops written out; "
                "trace fewer iterations: one step of training in place of many, or a shorter scan"
            )
        self.tasks.append(task)
        return (len(self.tasks) - 1,)

    # --- what is computed and sent -------------------------------------------------------------------------------

    def _collective(self, one: Instruction, needs: tuple[int, ...]) -> Value:
        groups, is_message = self.module.groups(one), one.collective == "ppermute"
        axis, along = axes_along(self.mesh, groups, is_message)
        if not axis:
            return needs
        ranks = tuple(self.mesh.ranks) if is_message else tuple(sorted(rank for group in along for rank in group))
        where = next((line for x in (one, *one.operands) if (line := self.module.where(x))), "")
        numbers: list[int] = []
        for op, array in merged(sent_by(one, self.accelerator)):
            task = Task(
                "message" if is_message else "collective",
                op,
                ranks,
                needs,
                array.shape,
                array.dtype,
                array.num_bytes,
                where,
                axis=axis,
                groups=along,
                costs=op,
                phase=one.phase,
                reduction=self.module.reduction(one),
            )
            if is_message:
                task.pairs = [(source, target) for source, target in groups]
                task.labels = {s: Label(self.chunk(s, self.num_messages), (s,)) for s, _ in groups}
                self.num_messages += 1
            numbers += self._add(task)
        return tuple(numbers)

    # --- loops and branches --------------------------------------------------------------------------------------

    def _while(self, one: Instruction, carry: Value) -> Value:
        (condition,), (body,) = one.called("condition"), one.called("body")
        where = self.module.where(one) or one.origin or one.name
        times, first = one.trip_count, len(self.tasks)
        is_decided = times is None
        if times is None:
            times = self.trips if self.trips is not None else 1
        decided = _needs(self.run(condition, [carry]))
        for iteration in range(times):
            before = len(self.tasks)
            carry = self.run(body, [_after(carry, decided)])
            decided = _needs(self.run(condition, [carry]))
            num_tasks = len(self.tasks) - before
            if is_decided and self.trips is None and len(self.tasks) > first:
                raise TraceError(
                    f"how often the loop at {where} runs is known only when it runs. Say how often to follow it: "
                    "trace(..., trips=10); or give it a length that XLA knows, as lax.scan and lax.fori_loop do"
                )
            is_long = num_tasks * times > WRITTEN_OUT or one.primitive.startswith("scatter")  # XLA's own, for CPUs
            if iteration == 0 and is_long and all(task.kind == "compute" for task in self.tasks[before:]):
                return _all(carry, self._as_one(before, times, one, where))
            if num_tasks and times > MOST_ITERATIONS:
                raise TraceError(
                    f"the loop at {where} runs {times:,} times, and a trace writes out {MOST_ITERATIONS:,} at most of "
                    "a loop in which ranks talk to each other; trace a shorter one"
                )
            if not num_tasks:
                break
        return _after(carry, decided)

    def _as_one(self, first: int, times: int, one: Instruction, where: str) -> tuple[int]:
        """Replace the tasks from `first` on, repeated `times` times, by a single one. Returns its number."""
        parts = self.tasks[first:]
        del self.tasks[first:]
        needs = tuple(sorted({need for part in parts for need in part.needs if need < first}))
        flops, num_bytes = sum(part.flops for part in parts), sum(part.num_bytes for part in parts)
        main = max(parts, key=lambda part: part.flops)
        op = one.primitive or one.op
        work = {"flops": times * flops, "num_bytes": times * num_bytes, "matmul": None}
        task = replace(main, op=op, needs=needs, where=where, **work)
        return self._add(task)

    def _conditional(self, one: Instruction, values: list[Value]) -> Value:
        branches = one.called(*BRANCHES)
        where, wanted = self.module.where(one) or one.origin or one.name, self.branch
        if wanted is None:
            tried = [self._tried(branch) for branch in branches]
            sends = [_sends(tasks) for tasks in tried]
            if any(sent != sends[0] for sent in sends):
                listed = "\n".join(f"  {number}: {_listed(sent)}" for number, sent in enumerate(sends))
                raise TraceError(
                    f"which branch the conditional at {where} takes is known only when it runs, and its branches send "
                    f"different things:\n{listed}\n"
                    "Say which one to follow: trace(..., branch=1). Of lax.cond, 0 is the branch for False"
                )
            chosen = max(range(len(branches)), key=lambda n: sum(t.flops + t.num_bytes for t in tried[n]))
        elif 0 <= wanted < len(branches):
            chosen = wanted
        else:
            raise TraceError(
                f"branch is {wanted}, and the conditional at {where} has branches 0 to {len(branches) - 1}"
            )
        decided = _needs(values[:1])
        return _after(self.run(branches[chosen], [_after(values[1 + chosen], decided)]), decided)

    def _tried(self, branch: str) -> list[Task]:
        """The tasks of a branch."""
        trial = replace(self, chunk=lambda *_: 0, tasks=[], num_messages=0)
        trial.run(branch, [()])
        return trial.tasks


# --- values ----------------------------------------------------------------------------------------------------------


def _needs(value: Value) -> set[int]:
    return set(value) if isinstance(value, tuple) else {number for element in value for number in _needs(element)}


def _after(value: Value, needs: set[int]) -> Value:
    """The value, but it exists only after these tasks have also ended."""
    if not needs:
        return value
    return tuple(sorted(needs.union(value))) if isinstance(value, tuple) else [_after(x, needs) for x in value]


def _all(value: Value, task: tuple[int]) -> Value:
    """A value of this structure, made entirely by one task."""
    return task if isinstance(value, tuple) else [_all(element, task) for element in value]


# --- branches, in words -----------------------------------------------------------------------------------------------


def _sends(tasks: Sequence[Task]) -> list[tuple[str, str, int]]:
    return [(task.op, task.axis, task.num_bytes) for task in tasks if task.kind != "compute"]


def _listed(sends: Sequence[tuple[str, str, int]]) -> str:
    shown = [f"{op} of {num_bytes:,} B along {axis}" for op, axis, num_bytes in sends[:3]]
    more = f", and {len(sends) - 3} more" if len(sends) > 3 else ""
    return (", ".join(shown) or "nothing") + more
