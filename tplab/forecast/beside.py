"""A run beside its forecast: the time of a step, and the bytes that the run sent beside those of the plan."""

from __future__ import annotations

from collections import Counter

from tplab.errors import PlanError
from tplab.forecast.forecast import Forecast
from tplab.forecast.traffic import bytes_by_axis
from tplab.mesh import Mesh
from tplab.trace.event import Event
from tplab.trace.trace import Trace
from tplab.units import bytes_text, time_text


def beside(trace: Trace, found: Forecast) -> str:
    """The forecast of one step, and for each axis the bytes of the run, the bytes of a step, and their ratio.

    The ratio is the number of steps if the run sends exactly what the plan does. Broadcasts are left out, because
    scripts begin with them. Messages along several axes of the plan at once are "others", and have no formula.
    Raises PlanError if the plan has another number of ranks.
    """
    plan = found.plan
    if plan.ranks != trace.mesh.size:
        raise PlanError(f"the plan {plan} is of {plan.ranks} ranks, and the run had {trace.mesh.size}")
    said = Counter[str]()
    for sums in bytes_by_axis(found.model, plan, found.batch, found.sequence, found.stack):
        for axis, num_bytes in sums.items():
            said[axis] += round(num_bytes * plan.ranks // plan.pp)
    sent = Counter[str]()
    for event in (*trace.select(kind="collective").events, *trace.select(kind="send").events):
        if event.op != "broadcast":
            sent[_axis(event, plan.mesh, plan.ep)] += event.bytes
    took = time_text(found.seconds, "s")
    if found.low is not None and found.high is not None:
        took += f" ({time_text(found.low, 's')} to {time_text(found.high, 's')})"
    where = f"{found.cluster.name}, {found.cluster.kind_on(plan.ranks)}"
    lines = [f"a step of {found.model.name or 'the model'}, {plan}, would take {took} on {where}"]
    rows = [("group", "sent in this run", "in a step of the plan", "so many steps")]
    for axis in sorted({*said, *sent}):
        ratio = f"{sent[axis] / said[axis]:.2f}" if said[axis] else ""
        rows.append((axis, bytes_text(sent[axis]), bytes_text(said[axis]) if said[axis] else "", ratio))
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    lines += ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join(lines)


def _axis(event: Event, mesh: Mesh, expert_ranks: int) -> str:
    """The axis along which the ranks of a message differ. As in a forecast, "dp" includes gradients over cp. An
    all_to_all in a group as large as the plan's expert group counts as the experts'."""
    ranks = (event.rank, event.peer) if event.kind == "send" else event.group or mesh.ranks
    places = [mesh.coordinates(rank) for rank in ranks if rank is not None]
    if event.op == "all_to_all" and len(places) == expert_ranks > 1:
        return "ep"
    apart = [name for name in mesh.axis_names if len({place[name] for place in places}) > 1]
    if event.kind == "collective" and set(apart) <= {"dp", "cp"}:
        return "dp"
    return apart[0] if len(apart) == 1 else "others"
