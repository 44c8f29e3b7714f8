"""A typed program: the type of every value that its steps make, the program's text with these types, and the faults."""

from __future__ import annotations

import linecache
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any, NamedTuple

from tplab.checking.source import NOTHING, function_around, statement
from tplab.checking.steps import Forbidden, Frame, Step, typed
from tplab.checking.types import DUALS, I, Type, V
from tplab.lines import line_text
from tplab.sharding import dims_cut

OnAxes = dict[str, Type]
"""Axis -> the type of a tensor along it."""

Look = Callable[[int, str], bool | None]
"""(value, axis) -> whether the ranks of the axis hold the same; None if that was not observed."""


@dataclass(frozen=True)
class Fault:
    """An operation that a type forbids: its line, the operation, the axis, why in words, and the way out."""

    where: str
    op: str
    axis: str
    words: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.where}: {self.words};\n{self.way_out}"


class Typed(NamedTuple):
    """A tensor with its types: its name, if it has one, its shape on one rank, and its type along each axis."""

    name: str
    shape: tuple[int, ...]
    types: Mapping[str, Type]

    def __str__(self) -> str:
        types = "  ".join(f"{axis}: {one}" for axis, one in self.types.items())
        return f"{self.name + ' ' if self.name else ''}{list(self.shape)}  {types}"

    def as_spmd_types(self) -> str:
        """Return its annotation: assert_type(h, {"dp": S(0), "tp": R})."""
        dims = Counter(one.dim for one in self.types.values())
        known = {axis: one._replace(dim=None if dims[one.dim] > 1 else one.dim) for axis, one in self.types.items()}
        types = ", ".join(f'"{axis}": {_as_spmd(str(one))}' for axis, one in known.items())
        return f"assert_type({self.name or '...'}, {{{types}}})"


def _as_spmd(text: str) -> str:
    """Return a type in the notation of spmd_types."""
    return re.sub(r"^P\(.*", "V", text.replace("V(", "S("))


def _as_spmd_cast(op: str, axis: str, source: str, target: str) -> str:
    """Return a collective as a call of spmd_types, with both types, and those of its backward pass, in a comment."""
    one, other = _as_spmd(source), _as_spmd(target)
    duals = [text if text[0] == "S" else DUALS[text] for text in (other, one)]  # type: ignore[index]
    note = f"# {one} -> {other}, backward {duals[0]} -> {duals[1]}"
    name = _SPMD.get((op, source[0] + target[0]))
    return f'{name}(..., "{axis}", src={one}, dst={other})  {note}' if name else f"# {op}: {note[2:]}"


_SPMD = {
    ("copy_to", "IR"): "convert", ("scatter_to", "IV"): "convert", ("all_gather", "VR"): "all_gather",
    ("all_gather", "VI"): "all_gather", ("all_reduce", "PI"): "all_reduce", ("all_reduce", "VI"): "all_reduce",
    ("reduce_scatter", "PV"): "reduce_scatter", ("reduce_scatter", "VV"): "reduce_scatter",
    ("all_to_all", "VV"): "all_to_all",
}  # fmt: skip
"""(tplab's collective, the types of its input and result) -> the function of spmd_types for it."""


class Typing:
    """Types the values of one rank's program, step by step: `types` by the number of the value, and `faults`.

    axes   those of the mesh that have more than one rank
    casts  (line, collective, phase) -> what it makes of types: "tp: P → I"
    look   whether values are the same on all ranks, as far as that was observed
    """

    def __init__(self, axes: Sequence[str], look: Look = lambda value, axis: None):
        self.axes, self._look = tuple(axes), look
        self.types: dict[int, OnAxes] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        self._faults: list[tuple[Fault, tuple[int, ...]]] = []  # with the values that the operation took
        self._takers: dict[int, list[Step]] = {}
        self._awaited: dict[int, list[Fault]] = {}  # sums, by value: faults unless the program divides them
        self._zeros: set[int] = set()
        self._constant: set[int] = set()
        self.casts: dict[tuple[str, str, str], list[str]] = {}

    def give(self, value: int, shape: Sequence[int], types: Mapping[str, Type], is_constant: bool = False) -> None:
        """Add a value that comes from outside, or whose type the program declares."""
        self.types[value], self.shapes[value] = {axis: types[axis] for axis in self.axes}, tuple(shape)
        if is_constant:
            self._constant.add(value)

    def take(self, step: Step) -> None:
        """Type the result of a step."""
        result = {axis: self._along(step, axis) for axis in self.axes}
        self.types[step.output], self.shapes[step.output] = result, step.shape
        if step.is_zero or (step.inputs and step.how in ("linear", "reshape") and self._zeros.issuperset(step.inputs)):
            self._zeros.add(step.output)
        if step.how != "cast" and self._constant.issuperset(step.inputs):
            self._constant.add(step.output)
        if step.how == "cast" and step.stack:
            self._note(step)
        for number in step.inputs:
            self._takers.setdefault(number, []).append(step)
            if (awaited := self._awaited.get(number)) is None:
                continue
            if step.factor or step.op == "div":
                awaited.clear()
            elif step.how in ("linear", "reshape") and len(step.inputs) == 1:
                self._awaited[step.output] = awaited

    def _note(self, step: Step) -> None:
        before, after = self.types[step.inputs[0]], self.types[step.output]
        text = ", ".join(f"{axis}: {before[axis]} → {after[axis]}" for axis in step.axes if axis in after)
        op = "all_gather" if step.op == "gather_from" else step.op
        found = self.casts.setdefault((line_text(*step.stack[0]), op, step.phase), [])
        if step.op == "gather_from" and found:
            found.pop()  # in torch, gather_from begins with an all_gather
        if text not in found:
            found.append(text)

    def is_constant(self, value: int) -> bool:
        """Return whether it depends on no value from outside."""
        return value in self._constant

    def _along(self, step: Step, axis: str) -> Type:
        given = [self.types[number][axis] for number in step.inputs]
        try:
            found = typed(step, axis, given, [number in self._zeros for number in step.inputs])
        except Forbidden as error:
            if step.how == "cast" and step.op != "gradient":
                if not self._constant.issuperset(step.inputs):
                    fault = self._made(step.stack, step.op, axis, error)
                    self._awaited.setdefault(step.output, []).append(fault)
            else:
                self.fault(step.stack, step.op, axis, error, step.inputs)
            found = typed(step, axis, [V], [False]) if step.how == "cast" and step.op != "gradient" else V
            if step.op == "gradient":
                found = Type("I")
        looks_equal = self._look(step.output, axis)
        if looks_equal is False and found.is_equal:
            return Type("V", step.narrows)
        return Type("R") if looks_equal and found == V else found

    def gradient(self, name: str, value: int, gradient: int, stack: Sequence[Frame], is_used: bool = True) -> None:
        """Check that a parameter that is equal on all ranks of an axis has a gradient that is equal, too. `look` knows
        the gradient by its negative number. A gradient that no optimizer has used may be left over from a sum that was
        made elsewhere, as in a bucket. If a gradient is a fault, its update is not reported as well."""
        for axis in self.axes:
            kind = self.types[gradient][axis].kind
            if not self.types[value][axis].is_equal or kind in "RI" or self._look(-gradient, axis) is not False:
                continue
            if not is_used and self._is_added_up(gradient, axis):
                continue
            self._faults = [(one, took) for one, took in self._faults if one.axis != axis or value not in took]
            words = (
                f"{name} is the same on every rank of {axis!r}, and its gradient is {self.types[gradient][axis]}: each "
                "rank has its own part, and nothing has added them up"
            )
            what = f"{name}.grad" if name.isidentifier() else "the gradient"
            way_out = (
                f"all_reduce({what}, {axis!r}) after backward(), or average_gradients, or copy_to where it is used"
            )
            self.fault(stack, "gradient", axis, Forbidden(words, way_out))

    def fault(self, stack: Sequence[Frame], op: str, axis: str, error: Forbidden, took: tuple[int, ...] = ()) -> None:
        self._faults.append((self._made(stack, op, axis, error), took))

    def _is_added_up(self, value: int, axis: str) -> bool:
        """Return whether a sum over the ranks of an axis has taken all of a value, or a tensor that it was added to."""
        size, seen, left = math.prod(self.shapes[value]), {value}, [value]
        while left:
            for step in self._takers.get(number := left.pop(), ()):
                if step.op in ("all_reduce", "reduce_scatter") and axis in step.axes:
                    if math.prod(self.shapes[number]) >= size:
                        return True
                elif step.how in ("linear", "product", "first", "reshape") and step.output not in seen:
                    seen.add(step.output)
                    left.append(step.output)
        return False

    @staticmethod
    def _made(stack: Sequence[Frame], op: str, axis: str, error: Forbidden) -> Fault:
        return Fault(line_text(*stack[0]) if stack else "?", op, axis, error.words, error.way_out)

    @property
    def faults(self) -> list[Fault]:
        """The faults, once for each line, operation and axis."""
        awaited = [fault for faults in self._awaited.values() for fault in faults]
        found = {(one.where, one.op, one.axis): one for one in reversed([*(one for one, _ in self._faults), *awaited])}
        return [*reversed(found.values())]

    def of(self, value: int, name: str = "") -> Typed:
        return Typed(name, self.shapes[value], self.types[value])


class Types:
    """The types of a program's tensors: `run(..., types=True).types`.

    arguments, results, gradients   `Typed` tensors: the program's arguments and results, and `.grad` of parameters
    lines      (file, line of a statement) -> the results of the statement, one for each way in which it was typed
    faults     what the types forbid, each with its line and the way out
    casts      (line, collective, phase) -> what it makes of types: "tp: P → I"
    note       what could not be observed; "" if that is nothing
    str()      the program's text with a type at each line, and the faults
    """

    def __init__(
        self, title: str, lines: Mapping[Frame, Sequence[Typed]], arguments: Sequence[Typed], results: Sequence[Typed],
        faults: Sequence[Fault], gradients: Sequence[Typed] = (), first: Frame | None = None, note: str = "",
        casts: Mapping[tuple[str, str, str], Sequence[str]] | None = None,
    ):  # fmt: skip
        self.title, self.lines, self.faults, self.first, self.note = title, lines, list(faults), first, note
        self.arguments, self.results, self.gradients = list(arguments), list(results), list(gradients)
        self.casts = {key: " or ".join(texts) for key, texts in (casts or {}).items()}

    def of(self, name: str) -> Typed:
        """Return the argument, or else the last tensor assigned to this name. Raises KeyError."""
        made = [one for found in self.lines.values() for one in found]
        for one in (*reversed(made), *self.arguments, *self.gradients, *self.results):
            if one.name == name:
                return one
        raise KeyError(f"no line of the program assigns a tensor to {name!r}")

    def at(self, where: str) -> Typed | None:
        """Return the result of the statement at a line, which is named as in traces: "cell 3, line 4"."""
        return next((found[-1] for frame, found in self.lines.items() if found and line_text(*frame) == where), None)

    def __str__(self) -> str:
        rows = [*self._text()]
        rows += [("gradient of " + one.name, str(Typed("", *one[1:]))) for one in self.gradients]
        rows += [("returns", str(one)) for one in self.results]
        count = len(self.faults)
        faults = ["", f"{count} fault{'s' * (count > 1)}:"] if count else ["", "no faults"]
        return self._page(f"types of {self.title}", rows, faults + [" ".join(str(one).split()) for one in self.faults])

    def _page(self, title: str, rows: Sequence[tuple[str, str]], below: Sequence[str] = ()) -> str:
        """Return rows of text and what is known about it, with sentences below."""
        width = min(max((len(text) for text, _ in rows), default=0), _MOST_WIDTH)
        lines = [f"{text:<{width}}   {one}".rstrip() for text, one in rows]
        notes = [*below, f"({self.note})"] if self.note else below
        return "\n".join([title, *lines, *(fill(note, 110, subsequent_indent="    ") for note in notes)])

    def as_spmd_types(self) -> str:
        """Return the program's text with the equivalent annotations of spmd_types (github.com/meta-pytorch/spmd_types):
        `assert_type(h, {"tp": S(1)})` for the result of a line, and for each collective its call there: `P -> I`.

        A dim that several axes cut is V there, as its order is not known, and so is a mean over part of a batch.
        """
        rows = [*self._text(lambda one: one.as_spmd_types(), self._casts_at)]
        return self._page(f"annotations of {self.title} for spmd_types", rows)

    def _casts_at(self, file: str, number: int) -> list[str]:
        """Return the collectives of a statement as calls of spmd_types."""
        lines = {line_text(file, line) for line in range(number, number + 20) if statement(file, line)[0] == number}
        return [
            _as_spmd_cast(op, *along)
            for (where, op, phase), texts in self.casts.items()
            if where in lines and phase == "forward"
            for along in re.findall(r"(\w+): (\S+) → (\w(?:\(\w+\))?)", texts)
        ]

    def __repr__(self) -> str:
        return f"Types of {self.title}: {len(self.lines)} lines, {len(self.faults)} faults"

    def _text(
        self, words: Callable[[Typed], str] = str, more: Callable[[str, int], list[str]] = lambda file, number: []
    ) -> Iterable[tuple[str, str]]:
        """Yield each line of the program with what is known about it: each tensor in `words`, after `more`."""
        for file, numbers in self._shown().items():
            for number in numbers:
                text = linecache.getline(file, number).rstrip()
                found = [*more(file, number), *dict.fromkeys(map(words, self.lines.get((file, number), ())))]
                if (file, number) == self.first:
                    found += map(words, self.arguments)
                for place, one in enumerate(found or [""]):
                    yield (f"{number:>4}  {text}" if not place else "", one)

    def _shown(self) -> dict[str, list[int]]:
        """Return the lines to show of each file: those with types, and whole functions if they are short."""
        shown: dict[str, set[int]] = {}
        for file, number in [*([self.first] if self.first else []), *self.lines]:
            around = function_around(file, number)
            if around is not None and around[1] - around[0] < _MOST_LINES:
                shown.setdefault(file, set()).update(range(around[0], around[1] + 1))
            else:
                shown.setdefault(file, set()).add(number)
        return {file: sorted(numbers) for file, numbers in shown.items()}


_MOST_WIDTH, _MOST_LINES = 88, 40


def lines_of(steps: Iterable[Step], typing: Typing) -> dict[Frame, list[Typed]]:
    """Return the results of each statement: of the last forward step in it or in its calls, one for each type."""
    last: dict[Frame, int] = {}
    found: dict[Frame, list[Typed]] = {}

    def close(frame: Frame) -> None:
        name = statement(*frame)[1]
        one = typing.of(last.pop(frame), name)
        if name != NOTHING and str(one) not in map(str, found.setdefault(frame, [])):
            found[frame].append(one)

    before: tuple[Frame, ...] = ()
    for step in steps:
        if step.phase != "forward" or step.is_aside:
            continue
        stack = tuple(dict.fromkeys((file, statement(file, line)[0]) for file, line in step.stack))
        for frame in before:
            if frame not in stack:
                close(frame)
        for frame in stack:
            last[frame] = step.output
            found.setdefault(frame, [])
        before = stack
    for frame in [*last]:
        close(frame)
    return found


def of_spec(spec: Sequence[Any], axes: Sequence[str]) -> OnAxes:
    """Return the types of a tensor that is laid out as a spec says: invariant along the axes that it does not name."""
    dims = dims_cut(spec)
    return {axis: Type("V", dims[axis]) if axis in dims else I for axis in axes}
