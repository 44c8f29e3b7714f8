"""What asks how an array is to lie on the mesh: the constraints and results of a program, as JAX traced it.

XLA carries a sharding that is asked for backwards through operations that compute element by element, and moves the
array before them. So the line that asks is further down than the collective. It is found here, by following the array
from the operation that XLA names to the next constraint or result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from tplab.jax.private import scan_sizes
from tplab.jax.tracing.jaxprs import called, is_transposed, line_of, opened

_NOT_BY_ELEMENT = {
    "sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev", "dot_general", "transpose", "reshape",
    "gather", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "conv_general_dilated", "scan", "while",
    "cond", "cholesky", "fft", "top_k", "triangular_solve", "shard_map",
}  # fmt: skip


class Ask(NamedTuple):
    """Somebody who asks: the line, "" for a result of the program; the spec; the number of dims of the array."""

    line: str
    spec: tuple[Any, ...]
    num_dims: int

    @property
    def axes(self) -> set[str]:
        """The axes that the spec names."""
        return {name for dim in self.spec if dim is not None for name in ((dim,) if isinstance(dim, str) else dim)}

    def with_axis(self, dim: int, order: Sequence[str]) -> tuple[Any, ...] | None:
        """The spec with these axes along a dim; None if it has others there."""
        spec = [*self.spec, *[None] * (self.num_dims - len(self.spec))]
        if spec[dim] is not None:
            return None
        spec[dim] = tuple(order) if len(order) > 1 else order[0]
        return tuple(spec)

    def remedy(self, spec: Sequence[Any]) -> str:
        """What would happen if it asked for this spec."""
        return f"{spec_text(spec)} {'there' if self.line else 'in out_shardings'} it would not be sent"

    def __str__(self) -> str:
        return f"{self.line or 'out_shardings'} asks for {spec_text(self.spec)}"


class _Step(NamedTuple):
    """An equation, with calls written out. Arrays are numbers. `backward`: whether it is of a gradient, where what is
    recomputed is, too."""

    name: str
    line: str
    backward: bool
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    eqn: Any


class Asked:
    """The constraints and results of a program.

    jaxpr     what JAX traced; None if that is not known, and then nothing is found
    results   the shardings that are asked of its results, in order; None for one that XLA may choose
    """

    def __init__(self, jaxpr: Any, results: Sequence[Any] = ()):
        self._steps: list[_Step] = []
        self._numbers: list[int] = []
        self._results: dict[int, Ask] = {}
        self._users: dict[int, list[_Step]] = {}
        self._names: dict[str, int] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}
        self.inputs: list[int] = []
        if jaxpr is None:
            return
        self.inputs = [self._new() for _ in jaxpr.jaxpr.invars]
        self._shapes = _shapes(self.inputs, jaxpr.jaxpr.invars)
        outputs = self._read(jaxpr.jaxpr, self.inputs, "", False)
        self._names = {name: number for number, name in enumerate(jaxpr.jaxpr.debug_info.arg_names or ())}
        for output, atom, sharding in zip(outputs, jaxpr.jaxpr.outvars, results, strict=False):
            if isinstance(sharding, NamedSharding):
                self._results.setdefault(output, Ask("", tuple(sharding.spec), len(atom.aval.shape)))
        for step in self._steps:
            self._shapes |= _shapes(step.makes, step.eqn.outvars)
            for number in step.reads:
                self._users.setdefault(number, []).append(step)

    def names_at(self, line: str) -> set[str]:
        """The operations of a line."""
        return {step.name for step in self._steps if step.line == line}

    def argument(self, name: str) -> int | None:
        """The number of an argument of this name."""
        return self._names.get(name)

    def is_by_element(self, name: str, line: str, backward: bool) -> bool:
        """Whether the operations of this name at a line compute element by element."""
        found = self._steps_of(name, line, backward)
        return bool(found) and all(_by_element(step.eqn) for step in found)

    def reshaped(self, name: str, line: str, backward: bool, argument: int | None = None) -> tuple[int, ...] | None:
        """The shape into which the result of an operation is brought, or an argument, if nothing else is done to it."""
        users = [step for start in self._starts(name, line, backward, argument) for step in self._users.get(start, ())]
        shapes = {tuple(step.eqn.outvars[0].aval.shape) if step.name == "reshape" else None for step in users}
        return shapes.pop() if len(shapes) == 1 else None

    def constraint_at(self, line: str) -> Ask | None:
        """The one constraint of a line."""
        found = [step.eqn for step in self._steps if (step.name, step.line) == ("sharding_constraint", line)]
        specs = {
            tuple(eqn.params["sharding"].spec) for eqn in found if isinstance(eqn.params["sharding"], NamedSharding)
        }
        return Ask(line, specs.pop(), len(found[0].outvars[0].aval.shape)) if len(specs) == 1 else None

    def of(
        self, name: str, line: str, backward: bool, argument: int | None = None, *, op: str = "", axis: str = ""
    ) -> Ask | None:
        """Who asks how the result of an operation at a line is to lie, or an argument, by its number. None if nobody or
        several do. `op` sends it along `axis`: of several, only one may ask for what takes such a collective."""
        found = {ask for start in self._starts(name, line, backward, argument) for ask in self._asks(start)}
        if len(found) > 1 and op in ("all_gather", "all_to_all"):
            found = {ask for ask in found if bool(ask.axes & set(axis.split(","))) == (op == "all_to_all")}
        return found.pop() if len(found) == 1 else None

    def dim_of_product(self, line: str, given: tuple[str, str, bool, int | None], dim: int) -> int | None:
        """The dim of a product's result that a dim of its operand is; None where the product sums over it."""
        starts = set(self._starts(*given))
        for step in self._steps:
            if (step.name, step.line) != ("dot_general", line) or not starts & set(step.reads):
                continue
            side = 0 if step.reads[0] in starts else 1
            summed, batch = step.eqn.params["dimension_numbers"]
            free = [
                [d for d in range(len(atom.aval.shape)) if d not in summed[n] and d not in batch[n]]
                for n, atom in enumerate(step.eqn.invars)
            ]
            if dim in batch[side]:
                return batch[side].index(dim)
            return len(batch[0]) + side * len(free[0]) + free[side].index(dim) if dim in free[side] else None
        return None

    def is_asked_whole(self, name: str, line: str, backward: bool, argument: int | None = None) -> bool:
        """Whether one of those who ask wants the array whole on every rank."""
        starts = self._starts(name, line, backward, argument)
        return any(not any(ask.spec) for start in starts for ask in self._asks(start))

    def shape(self, name: str, line: str, backward: bool, argument: int | None = None) -> tuple[int, ...]:
        """The shape of the whole result of an operation, or of an argument; () if there are several."""
        shapes = {self._shapes.get(start, ()) for start in self._starts(name, line, backward, argument)}
        return shapes.pop() if len(shapes) == 1 else ()

    def _starts(self, name: str, line: str, backward: bool, argument: int | None) -> list[int]:
        if argument is not None:
            return [self.inputs[argument]] if argument < len(self.inputs) else []
        return [number for step in self._steps_of(name, line, backward) for number in step.makes]

    def _steps_of(self, name: str, line: str, backward: bool) -> list[_Step]:
        named = [step for step in self._steps if (step.name, step.backward) == (name, backward)]
        # XLA does not know the lines of what JAX's own functions do, nor, in JAX 0.7, of what is recomputed
        return [step for step in named if step.line == line] or (named if len(named) == 1 else [])

    def _asks(self, start: int) -> Iterator[Ask]:
        pending, seen = [start], set[int]()
        while pending:
            number = pending.pop()
            if number in seen:
                continue
            seen.add(number)
            if number in self._results:
                yield self._results[number]
            for step in self._users.get(number, ()):
                if step.name == "sharding_constraint":
                    sharding = step.eqn.params["sharding"]
                    if isinstance(sharding, NamedSharding):
                        yield Ask(step.line, tuple(sharding.spec), len(step.eqn.outvars[0].aval.shape))
                elif _by_element(step.eqn):
                    pending += step.makes

    # --- reading -------------------------------------------------------------------------------------------------

    def _new(self) -> int:
        self._numbers.append(len(self._numbers))
        return self._numbers[-1]

    def _read(self, jaxpr: Any, given: Sequence[int], where: str, is_backward: bool) -> list[int]:
        known = dict(zip(jaxpr.invars, given, strict=True)) | {variable: self._new() for variable in jaxpr.constvars}

        def number(atom: Any) -> int:
            return self._new() if hasattr(atom, "val") else known[atom]

        for eqn in jaxpr.eqns:
            line, reads = line_of(eqn, jaxpr) or where, [number(atom) for atom in eqn.invars]
            backward = is_backward or is_transposed(eqn)
            if (inner := called(eqn)) is not None:
                made = self._read(opened(inner)[0], reads, line, backward)
            if eqn.primitive.name == "scan":
                body = opened(eqn.params["jaxpr"])[0]
                first = sum(scan_sizes(eqn.params))
                rows = [self._new() for _ in reads[first:]]
                self._read(body, [*reads[:first], *rows], line, backward)
            if inner is None:
                made = [self._new() for _ in eqn.outvars]
                self._steps.append(_Step(eqn.primitive.name, line, backward, tuple(reads), tuple(made), eqn))
            known.update(zip(eqn.outvars, made, strict=True))
        return [number(atom) for atom in jaxpr.outvars]


def _shapes(numbers: Sequence[int], atoms: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    return {number: tuple(atom.aval.shape) for number, atom in zip(numbers, atoms, strict=True)}


def _by_element(eqn: Any) -> bool:
    if eqn.primitive.name in _NOT_BY_ELEMENT or len(eqn.outvars) != 1:
        return False
    shape = eqn.outvars[0].aval.shape
    return any(atom.aval.shape == shape for atom in eqn.invars)


def spec_text(spec: Sequence[Any]) -> str:
    """A spec as one writes it: P('dp', None)."""
    dims = list(spec)
    while dims and dims[-1] is None:
        dims.pop()
    return f"P({', '.join(map(repr, dims))})"
