"""From a jaxpr to tasks: every equation of a rank's program, in order, with loops unrolled and calls inlined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from tplab.comm import ROWS
from tplab.errors import TraceError
from tplab.jax.tracing.actions import Actions, kind_of_action
from tplab.jax.tracing.decisions import Reports, unknown
from tplab.jax.tracing.exchange import EXCHANGES
from tplab.jax.tracing.held import (
    MOVES,
    NAMES_UP_TO,
    Chunk,
    Held,
    Needed,
    PerRank,
    computed,
    is_small,
    joined,
    name_in_program,
)
from tplab.jax.tracing.jaxprs import (
    called,
    equations_of,
    followed,
    inside,
    is_transposed,
    line_of,
    loop_parts,
    opened,
    written,
)
from tplab.jax.tracing.tasks import Task, bytes_of, flops_of, is_free, is_update, matmul_of, rate_of
from tplab.mesh import Mesh
from tplab.trace.label import Label, of_all

Ranks = tuple[int, ...]
Needs = tuple[int, ...]

MOST_ITERATIONS = 10_000  # of a while_loop


class Walk:
    """Follows a program on all ranks at once and collects their `tasks`; `chunk` numbers the chunks."""

    def __init__(self, mesh: Mesh, chunk: Chunk, reports: Reports):
        self.mesh, self._chunk, self._reports = mesh, chunk, reports
        self.tasks: list[Task] = []
        self.kept: list[int] = []  # tasks with an effect, which run even if no result needs them
        self._num_chunks = [0] * mesh.size
        self._actions = Actions(self.tasks, chunk, mesh.size)
        self._phase = "forward"
        self._needed: list[Needed] = []  # of the enclosing jaxprs, the whole program's first
        self._decided: tuple[Needs, int] = (), 0  # what the current branch depends on, and the number of tasks then

    def run(self, inner: Any, args: Sequence[Held], ranks: Ranks, where: str) -> list[Held]:
        """The outputs of a jaxpr, open or closed, once `ranks` have run it. `where` is the line that calls it."""
        (jaxpr, consts), phase = opened(inner), self._phase
        held = dict(zip(jaxpr.invars, args, strict=True))
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            held[variable] = Held.known(variable.aval, [value] * self.mesh.size)
        needed = Needed(jaxpr, held, keeps_arguments=not self._needed)
        self._needed.append(needed)

        def visit(eqn: Any, inputs: list[Held], _: Any) -> list[Held]:
            needed.now += 1
            self._phase = "backward" if is_transposed(eqn) else phase
            if (product := self._product_that_adds(eqn, inputs, needed, ranks)) is not None:
                return [self._added(product, eqn, inputs, ranks)]
            return self._equation(eqn, inputs, ranks, line_of(eqn, jaxpr) or where)

        def literal(value: Any, aval: Any) -> Held:
            return Held.known(aval, [value] * self.mesh.size, is_literal=True)

        try:
            return followed(jaxpr.eqns, held, jaxpr.outvars, visit, literal)
        finally:
            self._phase = phase
            self._needed.pop()

    def _equation(self, eqn: Any, inputs: list[Held], ranks: Ranks, where: str) -> list[Held]:
        name, params = eqn.primitive.name, eqn.params
        if name in EXCHANGES:
            if name == "ragged_all_to_all":  # the data, as if spread evenly; then where each rank's rows are
                inputs = [Held(eqn.invars[0].aval, {task for held in inputs for task in held.needs})]
            return [self._exchange(eqn, x, out.aval, ranks, where) for x, out in zip(inputs, eqn.outvars, strict=True)]
        if name in ("pvary", "pcast"):
            return inputs  # a statement about types
        if name == "axis_index":
            names = params["axis_name"]
            return [Held.known(eqn.outvars[0].aval, [np.int32(self.mesh.index(r, names)) for r in self.mesh.ranks])]
        if (inner := called(eqn)) is not None:
            if kind := kind_of_action(params):
                self._phase = "forward" if kind.startswith("F") else "backward"
                about = kind, inputs, self._decided[0], ranks
                return self._actions.follow(*about, lambda: self.run(inner, inputs, ranks, where))
            return self.run(inner, inputs, ranks, where)
        if name == "scan":
            return self._scan(eqn, inputs, ranks, where)
        if name in ("cond", "while"):
            decided = self._decided
            try:
                return (self._cond if name == "cond" else self._while)(eqn, inputs, ranks, where)
            except TraceError:
                if self._must_know(eqn):
                    raise
                needs = {task for held in inputs for task in held.needs}
                return [Held(variable.aval, needs) for variable in eqn.outvars]
            finally:
                self._decided = decided
        return self._compute(eqn, inputs, ranks, where)

    # --- computing -----------------------------------------------------------------------------------------------

    def _compute(self, eqn: Any, inputs: list[Held], ranks: Ranks, where: str) -> list[Held]:
        name = eqn.primitive.name
        labels = joined(inputs, ranks, self.mesh.size)
        needs = {task for held in inputs for task in held.needs}
        outputs = [Held(variable.aval, needs, labels) for variable in eqn.outvars]
        for held in outputs:
            held.drop_part(inputs)
        has_effect = "callback" in name or "debug" in name
        if not is_free(name, inputs, outputs):
            first = outputs[0] if outputs else inputs[0]
            # what is needed later cannot be overwritten
            copies = is_update(name) and any(needed.later(inputs[0]) for needed in self._needed)
            number = self._add(
                Task(
                    "compute",
                    name,
                    ranks,
                    tuple(sorted(needs)),
                    first.shape,
                    str(first.dtype),
                    bytes_of(name, inputs, outputs, copies),
                    where,
                    flops_of(name, eqn.params, inputs, outputs),
                    carried=first,
                    rate=rate_of(name, inputs),
                    matmul=matmul_of(name, eqn.params, inputs),
                    **_about(labels, inputs),
                )
            )
            for held in outputs:
                held.needs = (number,)
        elif inputs and all(held.is_scalar for held in inputs):
            for held in outputs:
                held.is_scalar = True
        if has_effect:
            self.kept += sorted(needs.union(self._decided[0]))
        computed(outputs, inputs, partial(_bound, eqn, self.mesh.size))
        if name in MOVES and is_small(outputs[0]):
            outputs[0].moved = eqn, inputs
        return outputs

    def _product_that_adds(self, eqn: Any, inputs: list[Held], needed: Needed, ranks: Ranks) -> int | None:
        """The product into which an addition can be fused, as in y += x w: it has no other use, and the other summand
        was computed before it. (If the summand is received, the fused product would have to wait for it.)"""
        if eqn.primitive.name not in ("add", "add_any") or inputs[0].shape != inputs[1].shape:
            return None
        for atom, held, other in zip(eqn.invars, inputs, reversed(inputs), strict=True):
            if len(held.needs) == 1 and needed.is_used_once(atom):
                task = self.tasks[held.needs[0]]
                is_product = task.op == "dot_general" and task.shape == held.shape and task.ranks == ranks
                if is_product and all(n < held.needs[0] and self.tasks[n].kind == "compute" for n in other.needs):
                    return held.needs[0]
        return None

    def _added(self, product: int, eqn: Any, inputs: list[Held], ranks: Ranks) -> Held:
        """The sum, fused into the product, which then also reads the other summand."""
        task = self.tasks[product]
        other = inputs[0] if inputs[1].needs == (product,) else inputs[1]
        made = inputs[1] if inputs[1].needs == (product,) else inputs[0]
        labels = joined([made, other], ranks, self.mesh.size)  # y += x w is about the piece x, whatever is in y
        result = Held(eqn.outvars[0].aval, (product,), labels)
        computed([result], inputs, partial(_bound, eqn, self.mesh.size))
        about = {"num_bytes": task.num_bytes + other.num_bytes, "carried": result, **_about(labels, [made, other])}
        self.tasks[product] = replace(task, needs=tuple(sorted({*task.needs, *other.needs})), **about)
        return result

    def _exchange(self, eqn: Any, x: Held, aval: Any, ranks: Ranks, where: str) -> Held:
        """A collective: one task for all ranks, unless the axis has only one."""
        exchange, params = EXCHANGES[eqn.primitive.name], eqn.params
        op, names = exchange.name_in(eqn), exchange.names(params)
        groups = exchange.groups(params, self.mesh)
        result = Held(aval, x.needs)
        only = exchange.root(eqn) if ROWS[op].gives == "root" else None
        computed([result], [x], lambda values: [exchange.apply(params, groups, values[0], only)])
        if len(groups[0]) == 1:
            result.labels = x.labels
            return result
        about: dict[str, Any] = {
            "ranks": ranks, "needs": x.needs, "shape": x.shape, "dtype": str(x.dtype), "num_bytes": x.num_bytes,
            "where": written(eqn, where), "axis": ",".join(names), "groups": groups,
        }  # fmt: skip
        if exchange.op == "ppermute":
            pairs = [(group[a], group[b]) for group in groups for a, b in params["perm"] if group[a] in ranks]
            sent = {a: self._label_of(x, a) for a, b in sorted(pairs) if a != b}
            labels: list[Label | None] = [None] * self.mesh.size
            for a, b in pairs:
                labels[b] = x.label(a) if a == b else sent[a]
            result.labels = labels
            about["groups"] = self.mesh.groups(names)  # in the order of the names, not of the pairs
            task = Task("message", op, pairs=pairs, labels=sent, carried=x, **about)
            number = self._actions.exchange(self._waiting(task)) if op == "send" else self._add(task)
        else:
            given = self._after(op, groups, x, exchange.root(eqn))
            if len(groups[0]) < self.mesh.size:  # the result of a collective of all ranks has data of them all
                result.labels = [given.get(rank) for rank in self.mesh.ranks]
            about |= {"costs": exchange.op, "reduction": exchange.reduction(op), "labels": given}
            number = self._add(Task("collective", op, carried=result, **about))
        result.needs = (number,)
        return result

    def _after(self, op: str, groups: Sequence[Ranks], x: Held, root: int) -> dict[int, Label]:
        """The label of each rank's result of a collective on x."""
        labels: dict[int, Label] = {}
        for group in groups:
            is_all = len(group) == self.mesh.size
            given = [None if is_all else x.label(rank) for rank in group]
            known = [label or Label(-1, (rank,)) for label, rank in zip(given, group, strict=True)]
            labels |= dict(zip(group, of_all(op, known, root), strict=True))
        return labels

    def _label_of(self, x: Held, rank: int) -> Label:
        """The label under which `rank` sends x: the label of received data, or a new chunk for its own data."""
        known = x.label(rank)
        label = known if known is not None and (known.chunk >= 0 or not known.contributors) else x.sent.get(rank)
        if label is None:
            name = name_in_program(x, rank) if self._num_chunks[rank] < NAMES_UP_TO else ""
            members = known.contributors if known is not None else (rank,)
            label = x.sent[rank] = Label(self._chunk(rank, self._num_chunks[rank], name), members)
            self._num_chunks[rank] += 1
        return label

    def _add(self, task: Task) -> int:
        self.tasks.append(self._waiting(task))
        return len(self.tasks) - 1

    def _waiting(self, task: Task) -> Task:
        """The task in the program's phase, which waits for the decision that it runs at all."""
        task.phase = self._phase
        task.needs = tuple(sorted({*task.needs, *self._decided[0]}))
        return task

    # --- loops and branches -----------------------------------------------------------------------------------------

    def _scan(self, eqn: Any, inputs: list[Held], ranks: Ranks, where: str) -> list[Held]:
        """Follow every iteration."""
        params, (consts, carry, xs) = eqn.params, loop_parts(eqn, inputs)
        body, length, num_carry = params["jaxpr"], params["length"], len(carry)
        avals = [variable.aval for variable in body.jaxpr.invars[len(consts) + num_carry :]]
        rows: list[list[Held]] = [[] for _ in eqn.outvars[num_carry:]]
        for place in reversed(range(length)) if params["reverse"] else range(length):
            row = [_item(x, aval, place) for x, aval in zip(xs, avals, strict=True)]
            results = self.run(body, [*consts, *carry, *row], ranks, where)
            carry = results[:num_carry]
            for column, result in zip(rows, results[num_carry:], strict=True):
                column.append(result)
        if params["reverse"]:
            rows = [column[::-1] for column in rows]
        ys = [self._stacked(v.aval, column, ranks) for v, column in zip(eqn.outvars[num_carry:], rows, strict=True)]
        return [*carry, *ys]

    def _stacked(self, aval: Any, rows: list[Held], ranks: Ranks) -> Held:
        stacked = Held(aval, {task for row in rows for task in row.needs}, joined(rows, ranks, self.mesh.size))
        computed([stacked], rows, lambda values: [[np.stack(column) for column in zip(*values, strict=True)]])
        return stacked

    def _while(self, eqn: Any, inputs: list[Held], ranks: Ranks, where: str) -> list[Held]:
        """Follow the iterations of each rank."""
        params = eqn.params
        for_cond, for_body, carry = loop_parts(eqn, inputs)
        counts = self._reports.of(eqn, ranks, where)
        for times in range(MOST_ITERATIONS):
            (goes_on,) = self.run(params["cond_jaxpr"], [*for_cond, *carry], ranks, where)
            if counts is None:
                values = self._goes_on(eqn, goes_on, times, ranks, where)
            else:
                values = {rank: counts[rank] > times for rank in ranks}
            ranks = tuple(rank for rank in ranks if values[rank])
            self._wait_for(goes_on)
            if not ranks:
                return [held.after(self._decided[0]) for held in carry]
            results = self.run(params["body_jaxpr"], [*for_body, *carry], ranks, where)
            both = zip(results, carry, strict=True)
            carry = [self._either([(ranks, new), (self.mesh.ranks, old)]) for new, old in both]
        raise TraceError(
            f"the while_loop at {where} has run {MOST_ITERATIONS:,} times without coming to an end; "
            "a trace writes loops out, so trace a shorter one"
        )

    def _cond(self, eqn: Any, inputs: list[Held], ranks: Ranks, where: str) -> list[Held]:
        """Follow the branch that each rank takes."""
        branches, (which, *operands) = eqn.params["branches"], inputs
        values = self._reports.of(eqn, ranks, where) or self._known(eqn, which, where)
        taken = {rank: min(max(int(values[rank]), 0), len(branches) - 1) for rank in ranks}
        self._wait_for(which)
        outcomes = []
        for place in sorted(set(taken.values())):
            takers = tuple(rank for rank in ranks if taken[rank] == place)
            outcomes.append((takers, self.run(branches[place], operands, takers, where)))
        columns = zip(*(results for _, results in outcomes), strict=True)
        takers = [takers for takers, _ in outcomes]
        chosen = [self._either(list(zip(takers, column, strict=True))) for column in columns]
        return [held.after(self._decided[0]) for held in chosen]

    def _goes_on(self, eqn: Any, decision: Held, times: int, ranks: Ranks, where: str) -> PerRank:
        """Whether each rank continues a loop after `times` iterations, if the decision is computed here."""
        return self._known(eqn, decision, where)

    def _known(self, eqn: Any, decision: Held, where: str) -> PerRank:
        """What each rank decides at an equation whose decision is computed here."""
        values = decision.values()
        if values is None:
            raise unknown(eqn, where, self._reports.why_unknown(eqn))
        return values

    def _must_know(self, eqn: Any) -> bool:
        """Whether a branch or a loop contains more than computations of indices."""
        return any(
            inner.primitive.name in EXCHANGES or any(variable.aval.shape for variable in inner.outvars)
            for jaxpr in inside(eqn)
            for inner, _ in equations_of(jaxpr)
        )

    def _wait_for(self, decision: Held) -> None:
        """Make everything from here on, until `_decided` is restored, wait for this decision too."""
        needs, since = self._decided
        if all(number < since for number in decision.needs):  # otherwise the last of them waited for the others
            decision = decision.after(needs)
        self._decided = decision.needs, len(self.tasks)

    def _either(self, choices: list[tuple[Iterable[int], Held]]) -> Held:
        """A value that different ranks computed in different ways: for each rank, the first choice that includes it."""
        if len(choices) == 1 or all(held is choices[0][1] for _, held in choices):
            return choices[0][1]
        chosen: list[int] = [0] * self.mesh.size
        for place, (ranks, _) in reversed(list(enumerate(choices))):
            for rank in ranks:
                chosen[rank] = place
        helds = [held for _, held in choices]
        labels = [helds[place].label(rank) for rank, place in enumerate(chosen)]
        result = Held(helds[0], {task for held in helds for task in held.needs}, labels if any(labels) else None)
        computed([result], helds, lambda values: [[values[place][rank] for rank, place in enumerate(chosen)]])
        return result


def _about(labels: Sequence[Label | None] | None, inputs: Sequence[Held]) -> dict[str, Any]:
    """For a computation: each rank's label of the result, and the ranks on which it gains contributors."""
    known = {rank: label for rank, label in enumerate(labels or ()) if label is not None and label.chunk >= 0}
    received = {rank: [label for held in inputs if (label := held.label(rank)) is not None] for rank in known}
    first = {rank: next(label for label in labels if label.chunk >= 0) for rank, labels in received.items()}
    adding = frozenset(rank for rank, label in known.items() if len(label.contributors) > len(first[rank].contributors))
    return {"labels": known, "adding": adding}


def _item(x: Held, aval: Any, place: int) -> Held:
    """Row `place` of x."""
    item = Held(aval, x.needs, x.labels)
    computed([item], [x], lambda values: [[value[place] for value in values[0]]])
    return item


def _bound(eqn: Any, num_ranks: int, values: list[PerRank]) -> list[PerRank]:
    """Evaluate the equation with JAX for one rank after another, but only once for ranks with the same operands."""
    params = {key: None if key in ("sharding", "out_sharding") else value for key, value in eqn.params.items()}
    results, found = [], {}
    for operands in zip(*values, strict=True) if values else [()] * num_ranks:
        key = tuple(map(id, operands))
        if key not in found:
            result = eqn.primitive.bind(*operands, **params)
            found[key] = [_plain(item) for item in (result if eqn.primitive.multiple_results else [result])]
        results.append(found[key])
    return [list(column) for column in zip(*results, strict=True)]


def _plain(value: Any) -> Any:
    """A NumPy array, which unlike JAX's does not belong to a mesh. Random keys cannot be converted."""
    return value if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended) else np.asarray(value)
