"""Types in JAX: a rank's traced program as steps that the rules can type.

JAX's own types say along which axes each array varies. An array that does not vary is invariant, whatever a rule says.
For one that varies, the rules decide whether it is replicated, varying or partial, which JAX does not distinguish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from typing import Any

import jax

from tplab.checking.source import beginning
from tplab.checking.steps import Dims, How, Step
from tplab.checking.typed import OnAxes, Types, Typing, lines_of, of_spec
from tplab.checking.types import I, R, Type
from tplab.jax.private import varying_axes_of
from tplab.jax.ranks.program import Compiled
from tplab.jax.tracing.exchange import EXCHANGES
from tplab.jax.tracing.jaxprs import (
    called,
    folded,
    frames_of,
    is_transposed,
    loop_parts,
    opened,
    own_frames,
    product_dims,
)
from tplab.jax.tracing.trace import decisions_of
from tplab.mesh import Mesh


def types_of(fn: Callable[..., Any], compiled: Compiled) -> Types:
    """The types of a compiled program."""
    program, decisions = compiled.program, decisions_of(compiled)
    mesh, jaxpr = program.mesh, decisions.jaxpr
    typist = _Typist(mesh)
    arguments = []
    names = decisions.names(compiled.names)
    for variable, name, (spec, is_given) in zip(jaxpr.invars, names, decisions.inputs, strict=True):
        number = typist.given(variable.aval, of_spec(spec, typist.axes), not is_given)
        arguments.append((name, number))
    results = typist.follow(jaxpr, [number for _, number in arguments])
    paths = [path for path, _ in jax.tree.flatten_with_path(compiled.structure.unflatten(results))[0]]
    is_joined = program.out_specs is not None
    typing = typist.typing
    return Types(
        f"{program.title} on {mesh}",
        lines_of(typist.steps, typing),
        [typing.of(number, name) for name, number in arguments if name],
        [
            typing.of(number if is_joined else typist.before_stacking(number), jax.tree_util.keystr(path))
            for path, number in zip(paths, results, strict=True)
        ],
        typing.faults,
        first=beginning(fn),
        casts=typing.casts,
    )


class _Typist:
    """Follows a jaxpr and types the results of each equation. `steps` are the program's steps, in order."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.axes = [name for name in mesh.axis_names if mesh.shape[name] > 1]
        self.typing = Typing(self.axes)
        self.steps: list[Step] = []
        self._num = 0
        self._numbers: dict[int, float] = {}  # values that are literals of the program
        self._maxima: dict[int, tuple[int, Dims]] = {}  # the maximum of a value, over which of its dims
        self._made: dict[int, Step] = {}

    def given(self, aval: Any, types: OnAxes, is_constant: bool) -> int:
        self._num += 1
        self.typing.give(self._num, aval.shape, types, is_constant)
        return self._num

    def before_stacking(self, number: int) -> int:
        """The value that a rank returned, before `run` declared it to vary and gave a single number a dim."""
        for op in ("copy_to", "reshape"):
            step = self._made.get(number)
            if step is not None and step.op == op and (op == "copy_to" or step.shapes == ((),)):
                number = step.inputs[0]
        return number

    def follow(self, inner: Any, inputs: Sequence[int], stack: Any = (), back: bool = False) -> list[int]:
        """The values of the outputs of a jaxpr, open or closed. `stack` has the lines from which it was called."""
        jaxpr, _ = opened(inner)
        uses = Counter(id(atom) for eqn in jaxpr.eqns for atom in eqn.invars)
        divided = {id(eqn.invars[0]): eqn for eqn in jaxpr.eqns if eqn.primitive.name == "div"}

        def visit(eqn: Any, inputs: list[int], _: Any) -> list[int]:
            lines, is_back = own_frames(frames_of(eqn, jaxpr)) or stack, back or is_transposed(eqn)
            over = divided.get(id(eqn.outvars[0])) if eqn.outvars else None
            count = getattr(over.invars[1], "val", None) if over is not None and uses[id(eqn.outvars[0])] == 1 else None
            return self._equation(eqn, inputs, lines, is_back, count)

        return folded(inner, inputs, visit, self._constant)

    def _constant(self, value: Any, aval: Any) -> int:
        """A literal, or a constant of the program."""
        is_literal = not isinstance(value, jax.Array)
        is_zero = is_literal and _is(value, 0)
        number = self._take(Step("literal", "made", shape=tuple(aval.shape), is_zero=is_zero), aval)
        if is_literal and not aval.shape:
            self._numbers[number] = float(value) if aval.dtype.kind in "fiub" else 0.0
        return number

    def _equation(self, eqn: Any, inputs: list[int], stack: Any, back: bool, count: Any) -> list[int]:
        """The values that an equation makes. `count` is the divisor in its only use."""
        name, params, avals = eqn.primitive.name, eqn.params, [variable.aval for variable in eqn.outvars]
        about: dict[str, Any] = {"stack": stack, "phase": "backward" if back else "forward"}
        if name in EXCHANGES:
            return [
                self._exchange(eqn, x, aval, about, count) for x, aval in zip(inputs[: len(avals)], avals, strict=True)
            ]
        if name in ("pvary", "pcast"):
            names = params.get("axes", params.get("axis_name", ()))
            return [self._varied(x, aval, (names,) if isinstance(names, str) else tuple(names), about)
                    for x, aval in zip(inputs, avals, strict=True)]  # fmt: skip
        if name == "axis_index":
            number = self._take(Step(name, "made", shape=(), **about), avals[0])
            self.typing.types[number] |= {axis: Type("V") for axis in self.axes if axis in str(params["axis_name"])}
            return [number]
        if (inner := called(eqn)) is not None:
            return self.follow(inner, inputs, stack, back)
        if name == "scan":
            return self._scan(eqn, inputs, about, back)
        if name == "while":
            _, consts, carry = loop_parts(eqn, inputs)
            for _ in range(2):
                carry = self.follow(params["body_jaxpr"], [*consts, *carry], stack, back)
            return carry
        if name == "cond":
            outcomes = [self.follow(branch, inputs[1:], stack, back) for branch in params["branches"]]
            return [self._either(inputs[0], column, aval, about) for column, aval in zip(zip(*outcomes), avals)]
        return [self._compute(eqn, inputs, aval, about) for aval in avals]

    # --- calls and loops -----------------------------------------------------------------------------------------

    def _scan(self, eqn: Any, inputs: list[int], about: dict[str, Any], back: bool) -> list[int]:
        """Follow a scan for two rounds, since the first may change the types of the initial carry."""
        body, (consts, carry, xs) = eqn.params["jaxpr"], loop_parts(eqn, inputs)
        num_carry, rows = len(carry), list[int]()
        avals = [variable.aval for variable in body.jaxpr.invars[len(consts) + num_carry :]]
        for _ in range(2):
            row = [self._linear("scan", x, aval, _without(aval.ndim + 1, (0,)), about) for x, aval in zip(xs, avals)]
            outputs = self.follow(body, [*consts, *carry, *row], about["stack"], back)
            carry, rows = outputs[:num_carry], outputs[num_carry:]
        avals = [variable.aval for variable in eqn.outvars[num_carry:]]
        found = [self._linear("scan", x, aval, range(1, aval.ndim), about) for x, aval in zip(rows, avals, strict=True)]
        return [*carry, *found]

    def _linear(self, op: str, x: int, aval: Any, dims: Iterable[int | None], about: dict[str, Any]) -> int:
        """A step that only moves the elements of x; `dims` says where its dims are in the result."""
        return self._step(op, "linear", [x], aval, about, dims=(tuple(dims),))

    def _either(self, which: int, values: Sequence[int], aval: Any, about: dict[str, Any], op: str = "cond") -> int:
        """One of several values, selected by `which`, for all elements or for each."""
        same = tuple(range(len(aval.shape)))
        chosen = self._step(op, "linear", list(values), aval, about, dims=(same,) * len(values))
        by = same[: len(self.typing.shapes[which])]
        return self._step(op, "product", [which, chosen], aval, about, dims=(by, same))

    # --- equations -----------------------------------------------------------------------------------------------

    def _take(self, step: Step, aval: Any) -> int:
        """Type the result of a step, and correct it by JAX's own types."""
        self._num += 1
        step.output = self._num
        self.typing.take(step)
        varying = varying_axes_of(aval)
        for axis, found in self.typing.types[self._num].items():
            if axis not in varying:
                self.typing.types[self._num][axis] = I
            elif found == I and step.inputs and not self.typing.is_constant(self._num):
                self.typing.types[self._num][axis] = R
        self._made[self._num] = step
        if step.stack:
            self.steps.append(step)
        return self._num

    def _step(self, op: str, how: How, inputs: Sequence[int], aval: Any, about: dict[str, Any], **more: Any) -> int:
        shapes = tuple(self.typing.shapes[x] for x in inputs)
        return self._take(Step(op, how, tuple(inputs), shapes=shapes, shape=tuple(aval.shape), **about, **more), aval)

    def _varied(self, x: int, aval: Any, names: tuple[str, ...], about: dict[str, Any]) -> int:
        if x in self._numbers or self.typing.is_constant(x):
            number = self._linear("copy", x, aval, range(aval.ndim), about)
            self._numbers.update({number: self._numbers[x]} if x in self._numbers else {})
            return number
        number = self._step("copy_to", "cast", [x], aval, about, axes=names)
        if x in self._maxima:
            self._maxima[number] = self._maxima[x]
        return number

    def _exchange(self, eqn: Any, x: int, aval: Any, about: dict[str, Any], count: Any) -> int:
        exchange, params, name = EXCHANGES[eqn.primitive.name], eqn.params, eqn.primitive.name
        op, names = exchange.name_in(eqn), exchange.names(params)
        reduction = exchange.reduction(op)
        if reduction == "sum" and _is(count, prod(self.mesh.shape[one] for one in names)):
            reduction = "mean"
        dim, to = exchange.dims(params)
        op = "gather_from" if name == "all_gather_invariant" else op
        return self._step(op, "cast", [x], aval, about, axes=names, reduction=reduction, dim=dim, to=to)

    def _compute(self, eqn: Any, inputs: list[int], aval: Any, about: dict[str, Any]) -> int:
        name = eqn.primitive.name
        if not inputs:
            return self._take(Step(name, "made", shape=tuple(aval.shape), **about), aval)
        made = self._made.get(inputs[0]) if name == "div" else None
        if made is not None and made.op == "reduce_sum" and inputs[1] in self._numbers:
            size = prod(made.shapes[0]) / max(prod(made.shape), 1)
            if self._numbers[inputs[1]] == size:
                return self._step("mean", "linear", made.inputs, aval, about, dims=made.dims, over="mean")
        if made is not None and made.reduction == "mean":
            return self._linear("mean", inputs[0], aval, range(aval.ndim), about)
        if name == "select_n":
            return self._either(inputs[0], inputs[1:], aval, about, "where")
        how, dims, more = _rule(eqn, [self.typing.shapes[x] for x in inputs], tuple(aval.shape))
        if name in ("mul", "div"):
            others = inputs if name == "mul" else inputs[1:]
            more["factor"] = any(x in self._numbers or (self._size(x) == 1 < prod(aval.shape)) for x in others)
        if name == "sub" and (found := self._maxima.get(inputs[1])) is not None and found[0] == inputs[0]:
            more["mixes"] = found[1]
            name = "softmax"
        number = self._step(name, how, inputs, aval, about, dims=dims, **more)
        if name == "reduce_max":
            self._maxima[number] = inputs[0], eqn.params["axes"]
        elif name in ("broadcast_in_dim", "stop_gradient", "max", "reshape", "convert_element_type"):
            source = next((x for x in inputs if x in self._maxima), None)
            if source is not None:
                self._maxima[number] = self._maxima[source]
        return number

    def _size(self, x: int) -> int:
        return prod(self.typing.shapes[x])


def _is(value: Any, number: float) -> bool:
    """Whether a literal is this single number."""
    return value is not None and jax.numpy.shape(value) == () and not isinstance(value, str) and bool(value == number)


_LINEAR = {
    "add", "sub", "add_any", "neg", "convert_element_type", "copy", "copy_p", "stop_gradient", "reduce_precision",
    "real", "imag", "rev", "optimization_barrier", "sharding_constraint", "mesh_cast", "device_put",
}  # fmt: skip


def _rule(
    eqn: Any, shapes: Sequence[tuple[int, ...]], shape: tuple[int, ...]
) -> tuple[How, tuple[Dims, ...], dict[str, Any]]:
    """How an equation uses its operands, how their dims map to the result's, and further fields of the step."""
    name, params, ndim = eqn.primitive.name, eqn.params, len(shapes[0])
    same = tuple(range(ndim))
    if name == "dot_general":
        return "product", product_dims(params["dimension_numbers"], list(map(len, shapes))), {"over": "sum"}
    if name.startswith(("reduce_", "arg")) and "axes" in params:
        how, over = ("linear", "sum") if name == "reduce_sum" else ("other", "other")
        return how, (_without(ndim, params["axes"]),), {"over": over}
    if name == "broadcast_in_dim":
        return "linear", (tuple(params["broadcast_dimensions"]),), {}
    if name == "reshape":
        return "reshape", (), {}
    if name == "transpose":
        return "linear", (tuple(list(params["permutation"]).index(dim) for dim in same),), {}
    if name == "squeeze":
        return "linear", (_without(ndim, params["dimensions"]),), {}
    if name == "expand_dims":
        left = [dim for dim in range(len(shape)) if dim not in params["dimensions"]]
        return "linear", (tuple(left),), {}
    if name in ("slice", "dynamic_slice", "pad"):
        changed = [dim for dim in same if shapes[0][dim] != shape[dim]]
        dims = tuple(None if dim in changed else dim for dim in same)
        how = "first" if name == "dynamic_slice" else "linear"
        return how, (dims, *[()] * (len(shapes) - 1)), {"narrows": changed[0] if len(changed) == 1 else None}
    if name in ("concatenate", "dynamic_update_slice"):
        return "linear", tuple(tuple(range(len(one))) for one in shapes), {}
    if name == "gather":
        return "first", _of_gather(params, shapes, shape), {}
    if name in ("scatter-add", "scatter_add"):
        return "linear", _of_scatter(params, shapes), {"over": "sum"}
    if all(_fits(one, shape) for one in shapes):
        dims = tuple(tuple(range(len(one))) for one in shapes)
        if eqn.outvars[0].aval.dtype == bool:
            return "unknown", dims, {}
        kinds: dict[str, How] = {"mul": "product", "div": "first"}
        return ("linear" if name in _LINEAR else kinds.get(name, "other")), dims, {}
    return "unknown", (), {}


def _without(ndim: int, gone: Collection[int]) -> Dims:
    """Where the dims of an array are in another without the dims in `gone`."""
    kept = iter(range(ndim))
    return tuple(None if dim in gone else next(kept) for dim in range(ndim))


def _fits(one: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an operand of an elementwise operation may have this shape: single numbers and dims of size 1 repeat."""
    return not one or (len(one) == len(shape) and all(size in (1, whole) for size, whole in zip(one, shape)))


def _of_gather(params: Any, shapes: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> tuple[Dims, Dims]:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    hidden = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    offsets = iter(numbers.offset_dims)
    whole = [None if dim in hidden else next(offsets) for dim in range(len(shapes[0]))]
    operand = tuple(to if sizes[dim] == shapes[0][dim] else None for dim, to in enumerate(whole))
    others = [dim for dim in range(len(shape)) if dim not in numbers.offset_dims]
    return operand, (*others[: len(shapes[1]) - 1], None)


def _of_scatter(params: Any, shapes: Sequence[tuple[int, ...]]) -> tuple[Dims, ...]:
    """For the array that is updated, the indices, and the updates, of which those for one place are summed."""
    numbers = params["dimension_numbers"]
    left = [dim for dim in range(len(shapes[0])) if dim not in numbers.inserted_window_dims]
    windows = dict(zip(numbers.update_window_dims, left))
    updates = tuple(windows.get(dim) for dim in range(len(shapes[2])))
    return tuple(range(len(shapes[0]))), (None,) * len(shapes[1]), updates
