"""Decisions: which branch each rank took and how often it ran each loop, as reported by the program itself.

A jaxpr contains the branches and loops, but which branch runs, and how often a loop, may depend on values that exist
only at run time. To find out, such a program has a second form with one more result: a list that each rank fills in
program order. Its first element counts the entries. An entry is the index of the branch that a `cond` took, or the
number of iterations of a `while`, which comes before the entries of the iterations themselves.

This form is slower, since one list passes through every branch and loop and makes XLA keep the program's order. So it
runs only when the trace is read. Decisions that follow from the program's constants and the rank's index, as in a
pipeline's schedule, are computed without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec

from tplab.errors import TraceError
from tplab.jax.private import in_float64, is_float64
from tplab.jax.ranks.context import vary, varying_axes, without_mesh
from tplab.jax.ranks.program import Compiled, is_shape
from tplab.jax.tracing.held import is_small
from tplab.jax.tracing.jaxprs import called, equations_of, folded, inside, loop_parts, opened

MOST_ENTRIES = 16_384
"""The most entries that a program reports; later decisions are unknown."""

Asked = Callable[[], Array | None]
"""Returns the ranks' reports, concatenated. None if there is nothing to report, if nothing was run, or if another
transformation of JAX is still tracing the program."""


class Decisions:
    """The decisions that are unknown until the ranks' program, the one `shard_map` in the traced program, runs.

    jaxpr      the ranks' program
    reported   the ids of its `cond` and `while` equations that report
    """

    def __init__(self, closed: Any):
        self._closed = closed
        self._eqn = next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map")
        self.jaxpr, self.reported = self._eqn.params["jaxpr"], frozenset[int]()
        if any(eqn.primitive.name in ("cond", "while") for eqn, _ in equations_of(self.jaxpr)):
            # XLA removes dead code, so dead code must not report either.
            self.jaxpr, _ = dce_jaxpr(self.jaxpr, [True] * len(self.jaxpr.outvars), instantiate=True)
            self.reported = frozenset(_undecided(self.jaxpr, list(map(self._is_given, self._eqn.invars))))
        self._form = jax.jit(self._reporting) if self.reported else None
        self._has_effects = bool(closed.effects)

    def run(self, compiled: Compiled, placed: Sequence[Any], seed: int) -> tuple[Any, Asked]:
        """Run `compiled` with these arguments. Returns its results, and a function that obtains the ranks' reports."""
        if self._form is None or any(map(is_shape, placed)):
            return compiled(placed, seed), lambda: None
        # A program with effects must not run twice, and of several processes perhaps only one reads the trace.
        if self._has_effects or compiled.program.jax_mesh.is_multi_process:
            *outputs, reports = compiled(placed, seed, self._form)
            return compiled.structure.unflatten(outputs), lambda: reports
        form, wide = self._form, is_float64()

        def ask() -> Array | None:
            if any(isinstance(array, Tracer) for array in placed):
                return None
            if any(isinstance(array, jax.Array) and array.is_deleted() for array in placed):
                raise TraceError(
                    "which branches and loops the ranks ran depends on arguments that have been given away since "
                    "(donate_argnums); read .trace before that"
                )
            with without_mesh(compiled.program.jax_mesh.devices.flat), in_float64(wide):
                return compiled(placed, seed, form)[-1]

        return compiled(placed, seed), ask

    def _is_given(self, atom: Any) -> bool:
        """Whether an input of the ranks' program is an argument or is computed from one, rather than a constant."""
        return not hasattr(atom, "val") and atom not in self._closed.jaxpr.constvars

    def given(self, arguments: Sequence[Any]) -> list[tuple[Any, Any]]:
        """For each input of the ranks' program, the whole array and its spec, for these arguments."""
        known = dict(zip(self._closed.jaxpr.invars, arguments, strict=True))
        known.update(zip(self._closed.jaxpr.constvars, self._closed.consts, strict=True))
        wholes = (atom.val if hasattr(atom, "val") else known[atom] for atom in self._eqn.invars)
        return list(zip(wholes, self._eqn.params["in_specs"], strict=True))

    @property
    def inputs(self) -> list[tuple[Any, bool]]:
        """For each input of the ranks' program, its spec, and whether it is not a constant."""
        return [(spec, self._is_given(atom)) for spec, atom in zip(self._eqn.params["in_specs"], self._eqn.invars)]

    def names(self, of_arguments: Sequence[str]) -> list[str]:
        """For each input of the ranks' program, the argument's name; "" for an input that is not an argument."""
        known = dict(zip(self._closed.jaxpr.invars, of_arguments, strict=True))
        return ["" if hasattr(atom, "val") else known.get(atom, "") for atom in self._eqn.invars]

    def _reporting(self, *arguments: Any) -> Sequence[Any]:
        """The program with its report as one more result."""
        params, axes = self._eqn.params, self._eqn.params["mesh"].axis_names
        reporter = _Reporter(self.jaxpr, self.reported)

        def one_rank(*inputs: Any) -> tuple[Any, ...]:
            report = vary(jnp.zeros(reporter.num_entries + 1, jnp.int32), axes)
            outputs, report = reporter.run(self.jaxpr, inputs, report)
            return (*outputs, report)

        inputs, in_specs = zip(*self.given(arguments), strict=True)
        out_specs = (*params["out_specs"], PartitionSpec(axes))
        return jax.shard_map(one_rank, mesh=params["mesh"], in_specs=in_specs, out_specs=out_specs)(*inputs)


class Reports:
    """The reports of the ranks of a run, read in program order. `reports` is None if nothing was run, or if another
    transformation of JAX is still tracing the program.

    Raises TraceError for an entry that does not exist.
    """

    def __init__(self, reported: frozenset[int], reports: Array | None, num_ranks: int):
        self._reported = reported
        self._lists: list[np.ndarray | None] = [None] * num_ranks
        self._next = [1] * num_ranks
        for shard in [] if reports is None or isinstance(reports, Tracer) else reports.addressable_shards:
            entries = np.asarray(shard.data)
            self._lists[(shard.index[0].start or 0) // len(entries)] = entries

    def of(self, eqn: Any, ranks: Sequence[int], where: str) -> dict[int, int] | None:
        """What each of these ranks decided at `eqn`. None if that must be computed: if `eqn` does not report, or if not
        all of the ranks ran here, as when a program runs on shapes."""
        if id(eqn) not in self._reported:
            return None
        found = {rank: self._entry(rank, eqn, where) for rank in ranks if self._lists[rank] is not None}
        return found if len(found) == len(ranks) else None

    def why_unknown(self, eqn: Any) -> str:
        """Why a decision that is not reported may be unknown."""
        if id(eqn) in self._reported:
            return "not all ranks ran here; run it on arrays (not on shapes, not inside jit) and in one process"
        return "it depends on an operation that means nothing outside of the program"

    def _entry(self, rank: int, eqn: Any, where: str) -> int:
        entries, place = self._lists[rank], self._next[rank]
        assert entries is not None
        if place >= len(entries):
            decided, kept = int(entries[0]), len(entries) - 1
            why = f"the run decided {decided:,} branches and loops, of which {kept:,} are kept; trace a shorter run"
            raise unknown(eqn, where, why)
        self._next[rank] += 1
        return int(entries[place])


def unknown(eqn: Any, where: str, why: str) -> TraceError:
    """The error for an unknown decision."""
    if eqn.primitive.name == "cond":
        return TraceError(f"which branch the cond at {where} takes is not known: {why}")
    return TraceError(f"how often the while_loop at {where} runs is not known: {why}")


def _undecided(jaxpr: Any, given: Sequence[bool]) -> set[int]:
    """The ids of the equations whose decision depends on the arguments, or on more numbers than we compute.

    given   for each input of the jaxpr, whether it comes from an argument
    """
    found: set[int] = set()

    def follow(inner: Any, inputs: Sequence[bool]) -> list[bool]:
        """Which outputs are unknown, given which inputs are."""
        return folded(inner, inputs, outcomes, given=lambda _, aval: not is_small(aval))

    def outcomes(eqn: Any, inputs: list[bool], _: Any) -> list[bool]:
        found = results(eqn, inputs)
        return [value or not is_small(v.aval) for v, value in zip(eqn.outvars, found, strict=True)]

    def results(eqn: Any, inputs: list[bool]) -> list[bool]:
        name, params = eqn.primitive.name, eqn.params
        if (inner := called(eqn)) is not None:
            return follow(inner, inputs)
        if name == "cond":
            if inputs[0]:
                found.add(id(eqn))
            outcomes = [follow(branch, inputs[1:]) for branch in params["branches"]]
            return [inputs[0] or any(column) for column in zip(*outcomes, strict=True)]
        if name == "scan":
            consts, carry, rows = loop_parts(eqn, inputs)
            before, after = _settled(carry, lambda state: follow(params["jaxpr"], [*consts, *state, *rows]))
            return [*before, *after[len(before) :]]
        if name == "while":
            for_cond, for_body, carry = loop_parts(eqn, inputs)

            def once(state: list[bool]) -> list[bool]:
                (goes_on,) = follow(params["cond_jaxpr"], [*for_cond, *state])
                if goes_on:
                    found.add(id(eqn))
                return [goes_on or new for new in follow(params["body_jaxpr"], [*for_body, *state])]

            return _settled(carry, once)[0]
        return [any(inputs) or "callback" in name] * len(eqn.outvars)

    follow(jaxpr, [value or not is_small(v.aval) for v, value in zip(jaxpr.invars, given, strict=True)])
    return found


def _settled(carry: list[bool], body: Callable[[list[bool]], list[bool]]) -> tuple[list[bool], list[bool]]:
    """Which elements of a loop's carry, and of the results of its body, are unknown after any number of iterations."""
    while True:
        results = body(carry)
        merged = [old or new for old, new in zip(carry, results[: len(carry)], strict=True)]
        if merged == carry:
            return carry, results
        carry = merged


class _Reporter:
    """Runs a jaxpr and passes the report along. The chosen equations append to it."""

    def __init__(self, jaxpr: Any, reported: frozenset[int]):
        self._reported = reported
        self._entries: dict[int, int] = {}  # id of a jaxpr -> the most entries it makes, if known
        self.num_entries = self._count(jaxpr)

    def _count(self, jaxpr: Any) -> int:
        """The most entries that a jaxpr makes, up to MOST_ENTRIES."""
        jaxpr = opened(jaxpr)[0]
        if id(jaxpr) not in self._entries:
            count = 0
            for eqn in jaxpr.eqns:
                within = sum(map(self._count, inside(eqn)))
                if eqn.primitive.name == "scan":
                    within *= eqn.params["length"]
                elif eqn.primitive.name == "while" and within:
                    within = MOST_ENTRIES
                count += within + (id(eqn) in self._reported)
            self._entries[id(jaxpr)] = min(count, MOST_ENTRIES)
        return self._entries[id(jaxpr)]

    def run(self, inner: Any, inputs: Sequence[Any], report: Array) -> tuple[list[Any], Array]:
        """The outputs of a jaxpr, open or closed, and the report after it."""

        def visit(eqn: Any, values: list[Any], _: Any) -> Sequence[Any]:
            nonlocal report
            with eqn.ctx.manager:
                outputs, report = self._equation(eqn, values, report)
            return outputs

        return folded(inner, inputs, visit), report

    def _equation(self, eqn: Any, values: list[Any], report: Array) -> tuple[Sequence[Any], Array]:
        name, params = eqn.primitive.name, eqn.params
        reports = id(eqn) in self._reported or any(map(self._count, inside(eqn)))
        if (call := called(eqn)) is not None and (reports or name.startswith("custom_")):
            if params.get("prevent_cse"):
                values = lax.optimization_barrier(values)  # so that recomputation is not optimised away
            return self.run(call, values, report)
        if reports:
            return {"cond": self._cond, "while": self._while, "scan": self._scan}[name](eqn, values, report)
        outputs = eqn.primitive.bind(*values, **params)
        return outputs if eqn.primitive.multiple_results else [outputs], report

    def _cond(self, eqn: Any, values: list[Any], report: Array) -> tuple[Sequence[Any], Array]:
        index, *operands = values
        branches = eqn.params["branches"]
        if id(eqn) in self._reported:
            report = _written(report, report[0] + 1, index)
        ways = [lambda report, *operands, branch=branch: self.run(branch, operands, report) for branch in branches]
        return lax.switch(index, ways, report, *operands)

    def _while(self, eqn: Any, values: list[Any], report: Array) -> tuple[Sequence[Any], Array]:
        params, (for_cond, for_body, carry) = eqn.params, loop_parts(eqn, values)
        place, reports = report[0] + 1, id(eqn) in self._reported
        if reports:
            report = _written(report, place, place * 0)

        def condition(carry: Any, report: Array) -> tuple[Any, Array]:
            (goes_on,), report = self.run(params["cond_jaxpr"], [*for_cond, *carry], report)
            return goes_on, report

        def body(state: Any) -> Any:
            times, _, report, carry = state
            carry, report = self.run(params["body_jaxpr"], [*for_body, *carry], report)
            return times + reports, *condition(carry, report), carry

        # A condition cannot return a report, so it is moved to before the loop, and into the body.
        first = place * 0, *condition(carry, report), carry
        times, _, report, carry = lax.while_loop(lambda state: state[1], body, first)
        if reports:
            report = lax.dynamic_update_index_in_dim(report, times, place, 0)
        return carry, report

    def _scan(self, eqn: Any, values: list[Any], report: Array) -> tuple[Sequence[Any], Array]:
        params, (consts, carry, rows) = eqn.params, loop_parts(eqn, values)

        def body(state: Any, row: Any) -> Any:
            state, report = state
            outputs, report = self.run(params["jaxpr"], [*consts, *state, *row], report)
            return (outputs[: len(state)], report), outputs[len(state) :]

        (carry, report), rows = lax.scan(
            body,
            (carry, report),
            rows,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *rows], report


def _written(report: Array, place: Array, entry: Array) -> Array:
    """The report with one more entry, at `place`. Entries beyond its end overwrite the last place, but still count."""
    entry = vary(jnp.asarray(entry, jnp.int32), tuple(varying_axes(report)))
    return lax.dynamic_update_index_in_dim(report, entry, place, 0).at[0].set(place)
