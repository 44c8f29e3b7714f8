"""The program that XLA compiled: its collectives, and the memory that it takes.

A trace shows the collectives in the source program. XLA may merge or split some, and if `jit` is given shardings, it
inserts the collectives that these need. They are listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from tplab import spare
from tplab.cost import collectives as cost
from tplab.jax.ranks.context import without_mesh
from tplab.jax.ranks.program import program_of
from tplab.jax.tracing.hlo import BRANCHES, Array, Groups, Instruction, Module
from tplab.mesh import Mesh


@dataclass(frozen=True)
class CompiledCollective:
    """One collective of a compiled program.

    op             its name in tplab
    shape, dtype   those of each rank's result ("all_to_all" often returns a tuple of pieces: their number comes first)
    bytes          what a rank sends each time, with the ring algorithm; the maximum over ranks
    groups         the groups of ranks that take part together; for a ppermute, its pairs (from, to)
    count          how often it runs; None if that is known only at run time
    at_most        the upper bound of `count`, for a branch that may not be taken; None in a loop of unknown length
    is_async       whether it is a start and a done, between which other instructions run (never on the CPU)
    origin         what it was made from, as a path of JAX's names: "jit(f)/shard_map/psum"
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    groups: Groups
    count: int | None
    at_most: int | None
    is_async: bool
    origin: str

    def __str__(self) -> str:
        times = times_text(self.count, self.at_most)
        between = "->" if self.op == "ppermute" else ","
        ranks = " ".join(between.join(map(str, group)) for group in self.groups)
        kind = ", async" if self.is_async else ""
        return f"{times} {self.op} {self.dtype}{list(self.shape)}, {self.bytes:,} bytes, ranks {ranks}{kind}"


def times_text(count: int | None, at_most: int | None) -> str:
    """ "3 x", "at most 3 x", "in a loop"."""
    if at_most is None:
        return "in a loop"
    return f"at most {at_most} x" if count is None else f"{at_most} x"


class CompiledCollectives(tuple[CompiledCollective, ...]):
    """The collectives of a compiled program, in program order; prints as one line each."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "no collectives"


def collectives_in(
    fn: Callable[..., Any], *args: Any, in_specs: Any = None, out_specs: Any = None, on: str = "simulated"
) -> CompiledCollectives:
    """The collectives in the program that XLA compiles from `fn`. Nothing is run.

    A rank's program, with the arguments of `run`:
        collectives_in(mlp, Mesh(tp=4), x, a, b, in_specs=..., out_specs=...)
    Any function of sharded arrays, jitted or not:
        collectives_in(jax.jit(train_step), params, batch)
    """
    return collectives_in_text(_compiled(fn, args, in_specs, out_specs, on).as_text() or "")


def temporary_bytes(
    fn: Callable[..., Any], *args: Any, in_specs: Any = None, out_specs: Any = None, on: str = "simulated"
) -> int:
    """The memory that compiled `fn` needs on each rank besides its arguments and results. Nothing is run.

    The arguments are those of `collectives_in`. All ranks run one program and need the same memory; XLA decides where
    each array is placed, and which arrays may reuse another's place.
    """
    return int(_compiled(fn, args, in_specs, out_specs, on).memory_analysis().temp_size_in_bytes)


def _compiled(fn: Callable[..., Any], args: tuple[Any, ...], in_specs: Any, out_specs: Any, on: str) -> Any:
    if args and isinstance(args[0], Mesh):
        mesh, *rest = args
        program = program_of(fn, mesh, in_specs, out_specs, on)
        with without_mesh(program.jax_mesh.devices.flat):
            compiled, arrays = program.compiled(fn, tuple(rest))
            lowered = compiled.jitted.lower(compiled.key(0), *compiled.place(arrays))
    else:
        lowered = (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args)  # type: ignore[attr-defined]
    with spare.returned():
        return lowered.compile()


def collectives_in_text(text: str) -> CompiledCollectives:
    """The collectives in the text of a compiled HLO module."""
    module = Module(text)
    return CompiledCollectives(one for run in runs_of(module) for one in _collective(module, run))


class Run(NamedTuple):
    """A collective in a compiled module.

    one              the instruction
    count, at_most   as in CompiledCollective
    is_async         whether it is a start and a done
    """

    one: Instruction
    count: int | None
    at_most: int | None
    is_async: bool


def runs_of(module: Module) -> Iterator[Run]:
    """The collectives of a compiled module, in order."""
    yield from _found(module, module.entry, 1, is_sure=True, is_async=False)


def _found(module: Module, name: str, most: int | None, is_sure: bool, is_async: bool) -> Iterator[Run]:
    """The collectives of one computation, and of the computations that it calls.

    most      how often it runs, or may run if it is not `is_sure`; None if unknown
    """
    for one in module.computations.get(name, ()):
        if one.collective:
            yield Run(one, most if is_sure else None, most, is_async or one.is_start)
            continue
        called = [(inner, most, is_sure) for inner in module.calls(one)]
        called += [(branch, most, False) for branch in one.called(*BRANCHES)]
        if one.op == "while":
            for part, more in (("condition", 1), ("body", 0)):  # the condition runs once more than the body
                times = None if most is None or one.trip_count is None else most * (one.trip_count + more)
                called += [(inner, times, is_sure) for inner in one.called(part)]
        for inner, times, is_sure_there in called:
            yield from _found(module, inner, times, is_sure_there, is_async or one.op == "async-start")


def _collective(module: Module, run: Run) -> Iterator[CompiledCollective]:
    one = run.one
    op, groups, arrays = str(one.collective), module.groups(one), one.arrays
    if one.op in ("all-gather-start", "collective-permute-start") and one.kind.startswith("("):
        arrays = arrays[1:2]  # a start returns its operand, the result, and device-specific values
    if op == "all_to_all" and len(arrays) > 1:
        arrays = [arrays[0]._replace(shape=(len(arrays), *arrays[0].shape))]
    for array in arrays:
        sent = _bytes_sent(op, array, len(groups[0]))
        yield CompiledCollective(
            op, array.shape, array.dtype, sent, groups, run.count, run.at_most, run.is_async, one.origin
        )


def _bytes_sent(op: str, array: Array, num_ranks: int) -> int:
    """The bytes that a rank sends, derived from what it receives."""
    elements, itemsize = array.units
    if op == "all_gather":
        elements //= num_ranks
    elif op == "reduce_scatter":
        elements *= num_ranks
    return max(cost.bytes_sent(op, elements, itemsize, num_ranks, index) for index in range(num_ranks))
