"""The trace of a run, from what JAX traced.

A compiled program does not report when its parts ran, but its jaxpr has all of them: every collective with its axes and
shapes, and the computations in between. They run on the modelled clock, with overlap wherever the data flow allows it,
as in XLA. Dead code is removed, also as in XLA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.core import Tracer

from tplab.cost import collectives as cost
from tplab.cost.cluster import Cluster
from tplab.jax.ranks.program import Compiled
from tplab.jax.tracing.decisions import Decisions, Reports
from tplab.jax.tracing.divergence import refuse_divergence
from tplab.jax.tracing.held import Held, is_small
from tplab.jax.tracing.jaxprs import reached
from tplab.jax.tracing.tasks import Task
from tplab.jax.tracing.timing import Part, Timing
from tplab.jax.tracing.walk import Walk
from tplab.mesh import Mesh
from tplab.sharding import P, split
from tplab.trace.event import VALUES_UP_TO
from tplab.trace.label import UNKNOWN
from tplab.trace.recorder import Recorder
from tplab.trace.trace import Trace


def trace_of(
    compiled: Compiled, arrays: Sequence[Any], reports: jax.Array | None, cluster: Cluster | None, record: int
) -> Trace:
    """The trace of `compiled`.

    arrays    its arguments; None for an argument whose values should not be shown
    reports   its ranks' reports of their decisions; None if nothing was run
    Raises TraceError if it depends on an unknown decision.
    """
    mesh, decisions = compiled.program.mesh, decisions_of(compiled)
    recorder = Recorder(mesh, compiled.program.title, "jax")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        walk = Walk(mesh, recorder.chunk, Reports(decisions.reported, reports, mesh.size))
        pieces = zip(decisions.jaxpr.invars, decisions.given(arrays), strict=True)
        inputs = [Held.known(variable.aval, _pieces(*given, variable.aval, mesh)) for variable, given in pieces]
        for held, name in zip(inputs, decisions.names(compiled.names), strict=True):
            held.name = name
        results = walk.run(decisions.jaxpr, inputs, tuple(mesh.ranks), "?")
        needed = [*walk.kept, *(task for held in results for task in held.needs)]  # for results, or for an effect
        alive = set(reached(needed, lambda number: walk.tasks[number].needs))
        return recorded(recorder, walk.tasks, alive, cluster, record)


def recorded(recorder: Recorder, tasks: Sequence[Task], alive: set[int], cluster: Cluster | None, record: int) -> Trace:
    """The trace of the tasks that are `alive`, on the clock of `cluster`, with the values of `record` of them."""
    num_ranks = recorder.mesh.size
    hops = Timing(tasks, alive, num_ranks, None)
    times = hops if cluster is None else Timing(tasks, alive, num_ranks, cluster)
    taking = _Taking(recorder, record)
    taking.down(tasks, hops, times, timed=cluster is not None)
    after = taking.after(times)
    if cluster is None:
        return recorder.trace(unit="steps", after=after)
    return recorder.trace(cluster=cluster.name, figures=cluster.kind_on(num_ranks), after=after)


def decisions_of(compiled: Compiled) -> Decisions:
    """The decisions of a compiled program. Raises DeadlockError if its ranks could wait for each other forever."""
    if compiled not in _decisions:
        decisions = Decisions(compiled.jaxpr)
        refuse_divergence(decisions.jaxpr, compiled.program.mesh)
        _decisions[compiled] = decisions
    return _decisions[compiled]


_decisions: WeakKeyDictionary[Compiled, Decisions] = WeakKeyDictionary()


def _pieces(whole: Any, spec: Any, aval: Any, mesh: Mesh) -> list[Any] | None:
    """Every rank's piece, of type `aval`, of an argument; None if it is unknown or not small."""
    if whole is None or isinstance(whole, Tracer) or not is_small(aval):
        return None
    if isinstance(whole, jax.Array) and not whole.is_fully_addressable:  # another process has some of it
        if not whole.is_fully_replicated:
            return None
        whole = whole.addressable_data(0)
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        whole = np.asarray(whole, aval.dtype)  # on the host; random keys have to stay on their devices
    return split(whole, P(*spec), mesh) if len(spec) else [whole] * mesh.size


class _Taking:
    """Records events, with the values of the first `record` small messages."""

    def __init__(self, recorder: Recorder, record: int):
        self.recorder, self.left = recorder, record
        self.parts: list[Part] = []  # the part of each note; for a wait, the part it waits for

    def down(self, tasks: Sequence[Task], hops: Timing, times: Timing, timed: bool) -> None:
        for number, task in enumerate(tasks):
            spans, rounds = times.spans[number], hops.spans[number]
            if task.kind == "message":
                self._message(number, task, spans, rounds)
            elif task.kind == "collective":
                self._collective(number, task, spans, rounds)
            else:
                self._compute(number, task, spans, timed)
        for rank, start, end, number, after in times.waits():
            task = tasks[number]
            self.recorder.add(rank, "wait", task.op, start, end, axis=task.axis, where=task.where, phase=task.phase)
            self.parts.append(after)

    def after(self, times: Timing) -> list[int]:
        """For each note, the one that held it up, or -1."""
        note_of: dict[Part, int] = {}
        for note, part in enumerate(self.parts):
            note_of.setdefault(part, note)
        found = []
        for note, part in enumerate(self.parts):
            cause = times.after[part] if note_of[part] == note else part  # a wait's part is its cause
            while cause in times.after and cause not in note_of:  # it took no time and is not an event
                cause = times.after[cause]
            found.append(note_of.get(cause, -1))
        return found

    def _compute(self, number: int, task: Task, spans: dict[int, Any], timed: bool) -> None:
        """If computing takes no time, only actions and additions to received data are events, without duration."""
        for rank, span in spans.items():
            if not timed and rank not in task.adding and task.seconds is None:
                continue
            about: dict[str, Any] = {}
            if (label := task.labels.get(rank)) is not None:
                about = {"chunk": label.chunk, "contributors": label.contributors, "values": self._values(task, rank)}
            if timed:
                about |= {"bytes": task.num_bytes, "flops": task.flops}
            self._add(number, rank, "compute", task, span, held=task.held, **about)

    def _message(self, number: int, task: Task, spans: dict[int, Any], rounds: dict[int, Any]) -> None:
        group_of = {rank: group for group in task.groups for rank in group}
        for source, target in sorted(task.pairs):
            if source in spans:
                label, values = task.labels[source], self._values(task, source)
                about = {"peer": target, "axis": task.axis, "group": group_of[source], "bytes": task.num_bytes}
                about |= {"step": int(rounds[source].start), "chunk": label.chunk, "contributors": label.contributors}
                self._add(number, source, "message", task, spans[source], values=values, **about)

    def _collective(self, number: int, task: Task, spans: dict[int, Any], rounds: dict[int, Any]) -> None:
        elements, itemsize = int(np.prod(task.shape, dtype=np.int64)), 0
        for group in task.groups:
            if group[0] not in spans:
                continue
            message = self.recorder.next_message()
            if task.num_bytes < elements:  # packed: several elements share a byte
                elements = task.num_bytes
            itemsize = task.num_bytes // elements if elements else 0
            for index, rank in enumerate(group):
                num_bytes = cost.bytes_sent(task.costs, elements, itemsize, len(group), index)
                label, values = task.labels.get(rank, UNKNOWN), self._values(task, rank)
                about = {"step": int(rounds[rank].start), "contributors": label.contributors, "part": label.part}
                about |= {"axis": task.axis, "group": group, "bytes": num_bytes, "reduction": task.reduction}
                self._add(number, rank, "collective", task, spans[rank], message=message, values=values, **about)

    def _add(self, number: int, rank: int, kind: str, task: Task, span: Any, **about: Any) -> None:
        """Record a rank's part in a task."""
        self.parts.append((number, rank))
        about |= {"shape": task.shape, "dtype": task.dtype, "where": task.where, "phase": task.phase}
        self.recorder.add(rank, kind, task.op, *span, **about)

    def _values(self, task: Task, rank: int) -> np.ndarray | None:
        """The values that the task carries, if they are small and not too many have been kept."""
        carried = task.carried
        if carried is None or carried.size > VALUES_UP_TO or self.left <= 0:
            return None
        values = carried.values()
        if values is None:
            return None
        self.left -= 1
        array = np.asarray(values[rank])
        return array.astype(np.float32) if array.dtype.kind == "V" else np.array(array)  # bfloat16 and the like
