"""Requests for shardings: the constraints and results of a program, as JAX traced it.

XLA propagates a requested sharding backwards through elementwise operations, and moves the array before them. So the
line of the request is further down than that of the collective. It is found here by following the array from the
operation that made it to the next constraint or result.

Every equation gets a number, which XLA keeps in the names of the instructions that it makes from the equation. So an
instruction can be traced back to its equation and its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from tplab.jax.tracing.jaxprs import (
    LAYOUTS,
    called,
    equations_of,
    is_transposed,
    line_outside,
    loop_parts,
    opened,
    product_dims,
)

_NOT_BY_ELEMENT = {
    "sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev", "dot_general", "transpose", "gather",
    "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "conv_general_dilated", "scan", "while", "cond",
    "cholesky", "fft", "top_k", "triangular_solve", "shard_map",
}  # fmt: skip
_NUMBER = re.compile(r"tplab\.eqn(\d+)\b")
_BATCHED = re.compile(r"tplab\.batched(\d+)\b")
_FREE = PartitionSpec.UNCONSTRAINED
COPIES = {*LAYOUTS, "broadcast_in_dim", "convert_element_type", "reshard", "sharding_constraint"}
"""Primitives whose result has the values of their operand."""
Dims = tuple[int | None, ...]
"""For each dim of an array, the dim of another array that it becomes; None if there is none."""


class Ask(NamedTuple):
    """A request for a sharding: its line, or the result of the program, and the spec, with an entry for each dim of the
    array. Inside vmap that is the array as written, without the batch dim."""

    line: str
    result: str
    spec: tuple[Any, ...]

    @property
    def axes(self) -> set[str]:
        """The axes that the spec names."""
        return {name for dim in self.spec for name in axes_of(dim)}

    @property
    def place(self) -> str:
        """Where the spec can be changed, in words."""
        return "there" if self.line else f"in out_shardings{f' of {self.result}' * bool(self.result)}"

    def __str__(self) -> str:
        of = f" of {self.result}" * bool(self.result)
        return f"{self.line or 'out_shardings'} asks for {spec_text(self.spec)}{of}"


class Asking(NamedTuple):
    """A request for an array: `dims` maps each dim of the array that is followed to one of the request's array, and
    `made` is the constraint's result."""

    ask: Ask
    dims: Dims
    made: tuple[int, ...]


class Equation(NamedTuple):
    """An equation, with calls inlined and arrays as numbers. `backward`: whether it belongs to a gradient, including
    recomputation."""

    name: str
    line: str
    backward: bool
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    eqn: Any


class Asked:
    """The requests in a program.

    jaxpr     the traced program; None if it is not known: then nothing is found
    results   the requested shardings of its results, in order; None for one that XLA may choose
    specs     replacements for the specs of some requests
    `numbered` is the same jaxpr, with the equations' numbers in their names and with these specs.
    """

    def __init__(self, jaxpr: Any, results: Sequence[Any] = (), specs: Mapping[Ask, Sequence[Any]] | None = None):
        self.steps: list[Equation] = []
        self.numbered, self.results = jaxpr, tuple(results)
        self._specs = specs or {}
        self._num_arrays = 0
        self._asks: dict[int, list[Asking]] = {}  # by array
        self._users: dict[int, list[Equation]] = {}
        self._links: dict[int, list[tuple[int, int]]] = {}  # array -> itself in a scan or outside, shift of dims
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._names: dict[str, int] = {}
        self.inputs: list[int] = []
        if jaxpr is None:
            return
        self._only_asks = _functions_that_only_ask(jaxpr.jaxpr)
        self.inputs = [self._new(v) for v in jaxpr.jaxpr.invars]
        outputs, numbered = self._read(jaxpr.jaxpr, self.inputs, "", False)
        self.numbered = jaxpr.replace(jaxpr=numbered)
        self._names = {name: number for number, name in enumerate(jaxpr.jaxpr.debug_info.arg_names or ())}
        self.results = self._results("", outputs, results, jaxpr.jaxpr.debug_info.result_paths or ())
        for step in self.steps:
            for number in step.reads:
                self._users.setdefault(number, []).append(step)

    def step_of(self, origin: str) -> Equation | None:
        """The equation that an instruction with this origin was made from; None if XLA merged several. If the origin
        lists several, the first that computes something."""
        found = []
        for path in origin.split(";"):
            numbers = _NUMBER.findall(path)
            # a call's number comes before those of what it calls
            if numbers and ("/(" not in path or len(set(numbers)) == 1):
                found.append(self.steps[int(numbers[-1])])
        return min(found, key=lambda step: step.name in COPIES, default=None)

    def argument(self, name: str) -> int | None:
        """The number of the argument with this name."""
        place = self._names.get(name)
        return None if place is None else self.inputs[place]

    def is_by_element(self, step: Equation) -> bool:
        """Whether it computes each element of its result from the elements at the same place."""
        return step.eqn is not None and any(_dims(step.eqn, place) for place in range(len(step.reads)))

    def reshaped(self, starts: Iterable[int]) -> tuple[int, ...] | None:
        """The shape to which the arrays are reshaped, if they have no other use."""
        users = [step for start in starts for step in self._users.get(start, ())]
        shapes = {tuple(step.eqn.outvars[0].aval.shape) if step.name == "reshape" else None for step in users}
        return shapes.pop() if len(shapes) == 1 else None

    def at(self, step: Equation) -> Asking | None:
        """The request of a constraint."""
        return next(iter(self._asks.get(step.reads[0], ())), None) if step.name == "sharding_constraint" else None

    def of(self, starts: Iterable[int], op: str = "", axis: str = "", until: Equation | None = None) -> Asking | None:
        """The request for an array. None if there are none or several.

        op, axis   the collective that moves it: of several requests, only one may need this collective
        until      only requests that are made before this step reads the array count
        """
        found: dict[Ask, Asking] = {}
        for start in starts:
            seen, asks = self._followed(start)
            if until is not None and not seen.isdisjoint(until.reads):
                continue
            for asking in asks:
                after = (self._followed(number)[0] for number in asking.made)
                if until is None or any(not reached.isdisjoint(until.reads) for reached in after):
                    found.setdefault(asking.ask, asking)
        if len(found) > 1 and op in ("all_gather", "all_to_all"):
            axes = set(axis.split(","))
            found = {ask: one for ask, one in found.items() if bool(ask.axes & axes) == (op == "all_to_all")}
        return next(iter(found.values())) if len(found) == 1 else None

    def dims_of(self, starts: Iterable[int], ask: Ask) -> Dims:
        """For each dim of an array, the dim of the requested array that it becomes."""
        found = (one for start in starts for one in self._followed(start)[1] if one.ask == ask)
        return next((one.dims for one in found), ())

    def through_product(self, step: Equation, starts: Iterable[int], dim: int) -> int | None:
        """The dim of a product's result that a dim of its operand becomes; None if the product sums over it."""
        if step.name != "dot_general" or not (given := set(starts) & set(step.reads)):
            return None
        dims = product_dims(step.eqn.params["dimension_numbers"], [atom.aval.ndim for atom in step.eqn.invars])
        return dims[0 if step.reads[0] in given else 1][dim]

    def is_asked_whole(self, starts: Iterable[int]) -> bool:
        """Whether any request is for the whole array on every rank."""
        return any(not any(asking.ask.spec) for start in starts for asking in self._followed(start)[1])

    def shape(self, starts: Iterable[int]) -> tuple[int, ...]:
        """The shape of the whole array; () if there are several."""
        shapes = {self._shapes.get(start, ()) for start in starts}
        return shapes.pop() if len(shapes) == 1 else ()

    def _followed(self, start: int) -> tuple[set[int], list[Asking]]:
        """The arrays that are made from one array element by element, up to requests, and these requests."""
        pending: list[tuple[int, Dims]] = [(start, tuple(range(len(self._shapes.get(start, ())))))]
        seen, found = set[int](), list[Asking]()
        while pending:
            number, dims = pending.pop()
            if number in seen:
                continue
            seen.add(number)
            for asking in self._asks.get(number, ()):
                found.append(asking._replace(dims=_after(dims, asking.dims)))
            for step in self._users.get(number, ()):
                if step.name == "sharding_constraint":
                    continue
                place = step.reads.index(number)
                next_dims = _transposed(step.eqn) if step.name == "transpose" else _dims(step.eqn, place)
                if next_dims is not None:
                    pending += [(made, _after(dims, next_dims)) for made in step.makes]
            for same, shift in self._links.get(number, ()):
                moved = tuple(None if dim is None or dim + shift < 0 else dim + shift for dim in dims)
                pending.append((same, moved))
        return seen, found

    # --- reading -------------------------------------------------------------------------------------------------

    def _new(self, atom: Any) -> int:
        self._num_arrays += 1
        self._shapes[self._num_arrays] = tuple(getattr(atom.aval, "shape", ()))
        return self._num_arrays

    def _read(self, jaxpr: Any, given: Sequence[int], where: str, is_backward: bool) -> tuple[list[int], Any]:
        """Read a jaxpr. Returns the numbers of its results, and the numbered jaxpr."""
        known = dict(zip(jaxpr.invars, given, strict=True)) | {v: self._new(v) for v in jaxpr.constvars}

        def number(atom: Any) -> int:
            return self._new(atom) if hasattr(atom, "val") else known[atom]

        eqns = []
        for eqn in jaxpr.eqns:
            line, reads = line_outside(eqn, jaxpr) or where, [number(atom) for atom in eqn.invars]
            backward = is_backward or is_transposed(eqn)
            place, params, made = len(self.steps), dict(eqn.params), [self._new(v) for v in eqn.outvars]
            self.steps.append(Equation(eqn.primitive.name, line, backward, (), (), None))  # those inside come later
            inner = called(eqn)
            for key, value in eqn.params.items():
                if inner is not None and value is inner:
                    made, params[key] = self._nested(inner, reads, line, backward)
                    if "out_shardings" in params:
                        params["out_shardings"] = self._results(line, made, params["out_shardings"], ())
                elif inner is None and eqn.primitive.name in ("scan", "while", "cond", "shard_map"):
                    several = isinstance(value, tuple | list)
                    bodies = list(value) if several else [value]
                    if not bodies or not all(hasattr(body, "eqns") for body in bodies):
                        continue
                    new = [self._body(eqn, key, body, reads, made, line, backward) for body in bodies]
                    params[key] = type(value)(new) if several else new[0]
            if inner is None:
                self.steps[place] = Equation(eqn.primitive.name, line, backward, tuple(reads), tuple(made), eqn)
            if eqn.primitive.name == "sharding_constraint":
                params["sharding"] = self._constraint(eqn, jaxpr, line, reads[0], made[0])
            known.update(zip(eqn.outvars, made, strict=True))
            source = eqn.source_info
            stack = source.name_stack.extend(f"tplab.eqn{place}")
            eqns.append(eqn.replace(params=params, source_info=source.replace(name_stack=stack)))
        return [number(atom) for atom in jaxpr.outvars], jaxpr.replace(eqns=eqns)

    def _nested(self, inner: Any, given: Sequence[int], line: str, backward: bool) -> tuple[list[int], Any]:
        outputs, numbered = self._read(opened(inner)[0], given, line, backward)
        return outputs, inner.replace(jaxpr=numbered) if hasattr(inner, "consts") else numbered

    def _body(
        self, eqn: Any, key: str, inner: Any, reads: list[int], made: Sequence[int], line: str, backward: bool
    ) -> Any:
        """Read a jaxpr that an equation runs. A scan passes rows and stacks results; loops feed their carry back."""
        name, inputs = eqn.primitive.name, opened(inner)[0].invars
        carry: list[int] = []
        if name == "scan":
            consts, carry, wholes = loop_parts(eqn, reads)
            rows = list(map(self._new, inputs[len(consts) + len(carry) :]))
            given = [*consts, *carry, *rows]
            for whole, row in zip(wholes, rows, strict=True):
                self._links.setdefault(whole, []).append((row, -1))
        elif name == "while":
            tests, consts, carry = loop_parts(eqn, reads)
            given = [*(tests if key == "cond_jaxpr" else consts), *carry]
        else:
            given = reads[1:] if name == "cond" else list(map(self._new, inputs))
        outputs, numbered = self._nested(inner, given, line, backward)
        if name == "shard_map" or key == "cond_jaxpr":
            return numbered
        for place, (output, result) in enumerate(zip(outputs, made, strict=True)):
            links = self._links.setdefault(output, [])
            if place < len(carry):
                links += [(result, 0), (carry[place], 0)]
            else:
                links.append((result, 1 if name == "scan" else 0))
        return numbered

    def _constraint(self, eqn: Any, jaxpr: Any, line: str, read: int, made: int) -> Any:
        """Note the request of a constraint. Returns its sharding, with the replaced spec if there is one."""
        sharding, num_dims = eqn.params["sharding"], len(eqn.outvars[0].aval.shape)
        if not isinstance(sharding, NamedSharding):
            return sharding
        spec = [*sharding.spec, *[None] * (num_dims - len(sharding.spec))]
        dims = list(range(num_dims))
        for batched in reversed(_BATCHED.findall(str(eqn.source_info.name_stack))):
            del dims[int(batched)]
        line = line_outside(eqn, jaxpr, self._only_asks) or line
        ask = Ask(line, "", tuple(spec[dim] for dim in dims))
        own = tuple(dims.index(dim) if dim in dims else None for dim in range(num_dims))
        self._asks.setdefault(read, []).append(Asking(ask, own, (made,)))
        for dim, names in zip(dims, self._specs.get(ask, ask.spec), strict=True):
            spec[dim] = names
        return _with_spec(sharding, spec)

    def _results(self, line: str, outputs: Sequence[int], shardings: Sequence[Any], paths: Sequence[str]) -> Any:
        """Note the requests of out_shardings. Returns the shardings, with replaced specs if there are any."""
        found = list(shardings)
        for place, (output, sharding) in enumerate(zip(outputs, shardings, strict=False)):
            if not isinstance(sharding, NamedSharding):
                continue
            num_dims = len(self._shapes[output])
            spec = (*sharding.spec, *[None] * (num_dims - len(sharding.spec)))
            ask = Ask(line, str(paths[place]) if len(outputs) > 1 and place < len(paths) else "", spec)
            self._asks.setdefault(output, []).append(Asking(ask, tuple(range(num_dims)), ()))
            found[place] = _with_spec(sharding, self._specs.get(ask, spec))
        return tuple(found)


def _with_spec(sharding: NamedSharding, spec: Sequence[Any]) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _functions_that_only_ask(jaxpr: Any) -> set[Any]:
    """The user's functions that only constrain arrays and compute nothing, such as wrappers of constraints."""
    asks, computes = set[Any](), set[Any]()
    for eqn, _ in equations_of(jaxpr):
        if (traceback := eqn.source_info.traceback) is not None:
            does = asks if eqn.primitive.name == "sharding_constraint" else computes
            does.update((frame.file_name, frame.function_start_line) for frame in traceback.frames)
    return asks - computes


def axes_of(dim: Any) -> tuple[str, ...]:
    """The axes that one dim of a spec names."""
    return () if dim is None or dim is _FREE else (dim,) if isinstance(dim, str) else tuple(dim)


def _after(first: Dims, then: Dims) -> Dims:
    return tuple(None if dim is None or dim >= len(then) else then[dim] for dim in first)


def _dims(eqn: Any, place: int) -> Dims | None:
    """For each dim of an operand of an elementwise equation, the corresponding dim of the result; None for any other
    equation, and for a scalar."""
    if eqn is None or eqn.primitive.name in _NOT_BY_ELEMENT or len(eqn.outvars) != 1:
        return None
    shape, result = eqn.invars[place].aval.shape, eqn.outvars[0].aval.shape
    if not shape:
        return None
    if eqn.primitive.name == "broadcast_in_dim":
        return tuple(eqn.params["broadcast_dimensions"])
    if eqn.primitive.name in ("reshape", "squeeze"):
        kept = [dim for dim, size in enumerate(result) if size > 1]
        found = iter(kept)
        dims = tuple(next(found, None) if size > 1 else None for size in shape)
        return dims if [size for size in shape if size > 1] == [result[dim] for dim in kept] else None
    return tuple(range(len(shape))) if shape == result else None


def _transposed(eqn: Any) -> Dims:
    order = list(eqn.params["permutation"])
    return tuple(order.index(dim) for dim in range(len(order)))


def spec_text(spec: Sequence[Any]) -> str:
    """A spec as written in a program: P('dp', None)."""
    dims = list(spec)
    while dims and dims[-1] is None:
        dims.pop()
    return f"P({', '.join('UNCONSTRAINED' if dim is _FREE else repr(dim) for dim in dims)})"
