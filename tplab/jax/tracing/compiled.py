"""What XLA made of a program: the collectives in the compiled module, and the memory that it takes.

A trace shows the collectives that a program asks for. XLA may merge or split some, and where `jit` is given shardings
it inserts those that it needs. They are listed here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from tplab.cost import collectives as cost
from tplab.jax.ranks.context import without_mesh
from tplab.jax.ranks.program import program_of
from tplab.mesh import Mesh

Groups = tuple[tuple[int, ...], ...]

_OPS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "ppermute",
    "collective-broadcast": "broadcast",
}


@dataclass(frozen=True)
class CompiledCollective:
    """One collective of a compiled program.

    op             its name in tplab
    shape, dtype   of what each rank gets ("all_to_all" often gets a tuple of pieces: their number comes first)
    bytes          what a rank sends each time, under the ring algorithm; the most, where they differ
    groups         the ranks that do it together; of a ppermute, its pairs (from, to)
    count          how often it runs; None where that is known only when it runs
    at_most        how often it runs at most: of a branch that may not be taken; None in a loop of unknown length
    is_async       whether it is a start and a done, between which others run (on the CPU never)
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
        times = "in a loop" if self.at_most is None else f"{self.at_most} x"
        if self.at_most is not None and self.count is None:
            times = f"at most {times}"
        between = "->" if self.op == "ppermute" else ","
        ranks = " ".join(between.join(map(str, group)) for group in self.groups)
        kind = ", async" if self.is_async else ""
        return f"{times} {self.op} {self.dtype}{list(self.shape)}, {self.bytes:,} bytes, ranks {ranks}{kind}"


class CompiledCollectives(tuple[CompiledCollective, ...]):
    """The collectives of a compiled program, in the order in which they stand there; prints as one line each."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "no collectives"


def collectives_in(
    fn: Callable[..., Any], *args: Any, in_specs: Any = None, out_specs: Any = None, on: str = "simulated"
) -> CompiledCollectives:
    """The collectives that XLA compiled `fn` to. Nothing is run.

    A rank's program, with the arguments of `run`:
        collectives_in(mlp, Mesh(tp=4), x, a, b, in_specs=..., out_specs=...)
    Any function of sharded arrays, jitted or not:
        collectives_in(jax.jit(train_step), params, batch)
    """
    return collectives_in_text(_compiled(fn, args, in_specs, out_specs, on).as_text() or "")


def temporary_bytes(
    fn: Callable[..., Any], *args: Any, in_specs: Any = None, out_specs: Any = None, on: str = "simulated"
) -> int:
    """The memory that `fn`, compiled, takes on each rank beside its arguments and results. Nothing is run.

    Arguments are those of `collectives_in`. All ranks run one program and need the same memory; XLA decides where each
    array is placed, and which arrays may reuse the place of another.
    """
    return int(_compiled(fn, args, in_specs, out_specs, on).memory_analysis().temp_size_in_bytes)


def _compiled(fn: Callable[..., Any], args: tuple[Any, ...], in_specs: Any, out_specs: Any, on: str) -> Any:
    if args and isinstance(args[0], Mesh):
        mesh, *rest = args
        with without_mesh():
            compiled, arrays = program_of(fn, mesh, in_specs, out_specs, on).compiled(fn, tuple(rest))
            lowered = compiled.jitted.lower(compiled.key(0), *compiled.place(arrays))
    else:
        lowered = (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args)  # type: ignore[attr-defined]
    return lowered.compile()


def collectives_in_text(text: str) -> CompiledCollectives:
    """The collectives in the text of a compiled HLO module."""
    computations, entry = _computations(text)
    partitions = re.search(r"num_partitions=(\d+)", text)
    everyone = (tuple(range(int(partitions[1]) if partitions else 1)),)
    return CompiledCollectives(_found(computations, entry, everyone, _Times(1, 1), is_async=False))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Name -> instructions of each computation, and which is the program's."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif line.startswith(" "):
            lines.append(line)
    return computations, entry


_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(_OPS)})(-start)?\(")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:true_computation|false_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_LOOP = re.compile(r" while\(.* condition=%?([\w.\-]+), body=%?([\w.\-]+)")


class _Times(NamedTuple):
    """How often a computation runs, and at most; None where it is not known."""

    count: int | None
    at_most: int | None

    def by(self, times: int | None) -> _Times:
        if times is None:
            return _Times(None, None)
        return _Times(*(None if known is None else known * times for known in self))


def _found(
    computations: dict[str, list[str]], name: str, everyone: Groups, times: _Times, is_async: bool
) -> Iterator[CompiledCollective]:
    """The collectives of one computation, and of those that it calls."""
    for line in computations.get(name, ()):
        if match := _COLLECTIVE.search(line):
            op, started = _OPS[match[2]], bool(match[3])
            groups = _groups(line) or everyone
            shapes = _shapes(match[1])
            if started and op in ("all_gather", "ppermute") and match[1].startswith("("):
                shapes = shapes[1:2]  # a start gives its operand, the result, and what else the chip needs
            if op == "all_to_all" and len(shapes) > 1:
                shapes = [(shapes[0][0], (len(shapes), *shapes[0][1]))]
            origin = re.search(r'op_name="([^"]*)"', line)
            for dtype, shape in shapes:
                sent = _bytes_sent(op, shape, dtype, len(groups[0]))
                yield CompiledCollective(
                    op, shape, dtype, sent, groups, *times, started or is_async, origin[1] if origin else ""
                )
            continue
        called = [(inner, times) for inner in _CALLED.findall(line)]
        for one, several in _BRANCHES.findall(line):
            for branch in (one or several).split(","):
                called.append((branch.strip().lstrip("%"), _Times(None, times.at_most)))
        if loop := _LOOP.search(line):
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            length = int(trips[1]) if trips else None
            called.append((loop[1], times.by(None if length is None else length + 1)))  # once more, to see its end
            called.append((loop[2], times.by(length)))
        for inner, how_often in called:
            yield from _found(computations, inner, everyone, how_often, is_async or " async-start(" in line)


def _shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays in a type: "(f32[8,4]{1,0}, s32[])" -> [("float32", (8, 4)), ("int32", ())]."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text)
    return [(_dtype(name), tuple(map(int, dims.split(","))) if dims else ()) for name, dims in found]


def _dtype(name: str) -> str:
    """NumPy's name of a type that XLA names."""
    if name == "pred":
        return "bool"
    if name.startswith("f8"):
        return f"float8_{name[2:]}"
    kinds = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
    return re.sub(r"^(bf|f|s|u|c)(?=\d)", lambda match: kinds[match[1]], name)


def _bytes_sent(op: str, shape: tuple[int, ...], dtype: str, num_ranks: int) -> int:
    """What a rank sends, from the shape of what it gets."""
    try:
        itemsize = jax.numpy.dtype(dtype).itemsize
    except TypeError:  # a type that NumPy does not have
        itemsize = 1
    elements = math.prod(shape)
    if op == "ppermute":
        return elements * itemsize
    if op == "all_gather":
        elements //= num_ranks
    elif op == "reduce_scatter":
        elements *= num_ranks
    return max(cost.bytes_sent(op, elements, itemsize, num_ranks, index) for index in range(num_ranks))


def _groups(line: str) -> Groups:
    """Ranks by group: "{{0,1},{2,3}}" as written, or "[2,2]<=[4]": 0 to 3 in two rows of two; perhaps transposed."""
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", line):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", match[1]))
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, source, order = ([int(n) for n in part.split(",")] if part else None for part in match.groups())
        assert shape is not None
        assert source is not None
        ranks = np.arange(math.prod(source)).reshape(source).transpose(order).reshape(shape)
        return tuple(tuple(group) for group in ranks.tolist())
    return ()
