"""`explain`: why each collective is in a compiled program, by the line and the operand that ask for it."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from tplab.cost import collectives as cost
from tplab.jax.tracing.asked import Ask, Asked
from tplab.jax.tracing.axes import axes_along, axes_in_order
from tplab.jax.tracing.compiled import Run, runs_of
from tplab.jax.tracing.exchange import EXCHANGES
from tplab.jax.tracing.flow import Flow, Place
from tplab.jax.tracing.hlo import Instruction
from tplab.jax.tracing.lowered import compiled_for
from tplab.jax.tracing.sending import Sent, keeps_share, kept_of_all, merged, narrow_dtype, sent_by
from tplab.jax.tracing.work import is_product
from tplab.mesh import Mesh

_WIDTH = 80  # columns: JupyterLab breaks longer lines inside words
_MARGIN = " " * 4


class Cause(NamedTuple):
    """Why a tensor is sent.

    where          the line of the program; "" where XLA does not know
    dtype, shape   those of what each rank sends
    operation      what needs it, or made it: "dot_general"
    operands       the arrays involved: arguments by name, with their shardings, others by what made them
    why            the reason in words
    """

    where: str
    dtype: str
    shape: tuple[int, ...]
    operation: str
    operands: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Explained:
    """One collective of a compiled program.

    op, axis      its name in tplab, and the axes of the mesh along which it runs
    bytes         what a rank sends each time, under the ring algorithm; the most, where ranks differ
    count         how often it runs; None where that is known only when it runs
    at_most       how often it runs at most: in a branch that may not be taken; None in a loop of unknown length
    is_written    whether it is in your program, as `lax.psum` in a `shard_map`; otherwise XLA inserted it
    is_backward   whether it belongs to a gradient
    causes        why: one for each tensor that it sends, as XLA may send several together
    """

    op: str
    axis: str
    bytes: int
    count: int | None
    at_most: int | None
    is_written: bool
    is_backward: bool
    causes: tuple[Cause, ...]

    @property
    def where(self) -> str:
        """The line of the program that the first tensor comes from."""
        return self.causes[0].where

    def __str__(self) -> str:
        times = "in a loop: " if self.at_most is None else f"{self.at_most} x "
        times = f"at most {times}" if self.at_most is not None and self.count is None else times
        backward = ", in the backward pass" if self.is_backward else ""
        lines = [f"{times}{self.op} along {self.axis}, {self.bytes:,} B{' each' * (self.count != 1)}{backward}"]
        texts = [
            f"{f'{cause.where}, ' if cause.where else ''}{cause.dtype}{list(cause.shape)}: {cause.why}"
            for cause in self.causes
        ]
        for text, number in Counter(texts).items():
            lines += textwrap.wrap(
                f"{number} x {text}" if number > 1 else text,
                _WIDTH,
                initial_indent=_MARGIN,
                subsequent_indent=_MARGIN,
                break_long_words=False,
                break_on_hyphens=False,
            )
        return "\n".join(lines)


class Explanation(tuple[Explained, ...]):
    """The collectives of a program in their order; prints as a sentence or two each."""

    title: str
    mesh: Mesh

    @property
    def bytes(self) -> int:
        """What a rank sends in total. Raises ValueError where that is known only when it runs."""
        for one in self:
            if one.count is None:
                raise ValueError(f"how often the {one.op} at {one.where} runs is known only when it runs")
        return sum(one.bytes * (one.count or 0) for one in self)

    def __repr__(self) -> str:
        known = sum(one.bytes * one.count for one in self if one.count is not None)
        more = ", and what only the running program decides" if any(one.count is None for one in self) else ""
        head = f"{self.title} on {self.mesh}: each rank sends {known:,} B{more}"
        return "\n".join([head, *map(str, self)]) if self else f"{self.title} on {self.mesh}: nothing is sent"


def explain(fn: Callable[..., Any], *args: Any, accelerator: bool = False, **kwargs: Any) -> Explanation:
    """Why XLA's program for `fn(*args, **kwargs)` sends what it sends: the line and the operand behind each collective.

        explain(jax.jit(train_step), params, batch)

    The arguments are those of `trace`, and so is `accelerator`. Nothing is run.

    A collective that is in your program is marked as such. One that XLA inserted is explained by what computes with its
    result, or made its operand: a sum over a dim that is sharded, an array that is needed whole or cut in another way.
    An argument is identified by its name and sharding, and an array between two operations by the one that made it.
    XLA carries a sharding that is asked for backwards, and moves an array before the operations that compute with it
    element by element: then the constraint or `out_shardings` that asks is named, and the spec that would send nothing.
    Lines are those that XLA kept with its instructions; JAX 0.7 gives it only the innermost, which may be a library's.
    """
    program = compiled_for(fn, args, kwargs)
    why = _Why(Flow(program.module, program.mesh, program.names), program.asked, accelerator)
    explanation = Explanation(one for run in runs_of(program.module) for one in why.explained(run))
    explanation.title, explanation.mesh = program.title, program.mesh
    return explanation


_WRITTEN = {*EXCHANGES, "psum_scatter", "pbroadcast", "ragged_all_to_all", "all_gather_reduced", "unreduced_psum"}
_ASKED = {"reshard", "sharding_constraint", "device_put"}
"""Primitives that say how an array is to lie."""
_MOST_OPERANDS = 4
_CONSTANT = ("constant", "iota", "partition-id", "broadcast")
_NAMES = {"argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}
"""What XLA knows as the reductions that it becomes."""


class _Why:
    """Finds causes in the flow of a module."""

    def __init__(self, flow: Flow, asked: Asked, accelerator: bool):
        self.asked = asked
        self.flow, self.module, self.mesh, self.accelerator = flow, flow.module, flow.mesh, accelerator

    def explained(self, run: Run) -> Iterator[Explained]:
        """One for each operation that a collective performs; none where each rank is alone."""
        one, groups = run.one, self.module.groups(run.one)
        axis, _ = axes_along(self.mesh, groups, one.collective == "ppermute")
        if not axis:
            return
        place, num_ranks = Place(run.computation, one), len(groups[0])
        sent = sent_by(self.flow, place, self.accelerator)
        causes = self._causes(place, sent, axis, num_ranks)
        for op in dict.fromkeys(op for op, _ in sent):
            num_bytes = sum(
                max(cost.bytes_sent(op, *array.units, num_ranks, index) for index in range(num_ranks))
                for _, array in merged(each for each in sent if each.op == op)
            )
            # the pieces of one array have one cause
            its_causes = tuple(cause for cause, each in zip(causes, sent, strict=False) if each.op == op)
            is_backward, is_written = one.phase == "backward", one.primitive in _WRITTEN
            yield Explained(op, axis, num_bytes, run.count, run.at_most, is_written, is_backward, its_causes)

    def _causes(self, place: Place, sent: list[Sent], axis: str, num_ranks: int) -> list[Cause]:
        operands = self.flow.operands(place)
        if place.one.collective in ("all_reduce", "reduce_scatter"):
            indices = [None] if len(operands) == 1 else range(len(operands))
            found = zip(operands, sent, indices, strict=False)
            return [self._of_sum(place, given, each, axis, num_ranks, index) for given, each, index in found]
        if place.one.op.startswith("all-to-all") and len(operands) > 1:  # pieces of one array
            array = sent[0].array
            pieces = sent[0]._replace(array=array._replace(shape=(len(operands), *array.shape)))
            return [self._of_move(place, operands[0], pieces, axis)]
        return [self._of_move(place, given, each, axis) for given, each in zip(operands, sent, strict=False)]

    def _of_sum(self, place: Place, given: Place, sent: Sent, axis: str, num_ranks: int, index: int | None) -> Cause:
        """A sum over ranks of what was computed from sharded arrays. `index` is its place among several."""
        made = self.flow.source(given)
        operation = _operation(made.one) or place.one.primitive or made.one.op
        where = self._line(place if index is None else made) or self._line(made) or self._line(place)
        operands = self._operands(made, where)
        of = f" of {' and '.join(operands)}" if operands else ""
        if (written := place.one.primitive) in _WRITTEN:
            operands = (self._text(made, where),)
            why = self._as_written(place, written, operands[0])
        elif is_product(made.one) or made.one.op == "reduce":
            what = "sums over" if is_product(made.one) or "add" in operation or "sum" in operation else "goes over"
            why = f"{operation}{of} {what} a dim that is sharded over {axis}, so each rank has only its part"
        else:
            why = f"after {operation}{of} each rank has only a part of the result"
        if sent.op == "all_reduce" and keeps_share(self.flow, place, index):
            why += f"; each rank keeps 1/{num_ranks} of the result: a reduce_scatter on GPUs and TPUs"
        why += self._as_wide(place, sent, index)
        return Cause(where, sent.array.dtype, sent.array.shape, operation, operands, why)

    def _of_move(self, place: Place, given: Place, sent: Sent, axis: str) -> Cause:
        """An array that is not where it is needed."""
        made, user = self.flow.source(given), self._user(place)
        where = self._line(place) or (self._line(user) if user else "") or self._line(made)
        array, operand = sent.array, self._text(made, where)
        wide = self._as_wide(place, sent, None)
        first = *self._in_program(made), self._argument(made)
        shape = self.asked.shape(*first)
        if not self.asked.is_asked_whole(*first):
            wide = self._as_kept(place, prod(shape)) + wide
        operation = place.one.primitive
        is_second = self.flow.is_moved(given)
        shards = " after another collective has moved it" if is_second else f", which is sharded over {axis}"
        if operation in _ASKED and (ask := self.asked.constraint_at(where)) is not None:
            why = self._as_asked(ask, place, made, sent, axis, operand + shards * (sent.op == "all_gather"))
            return Cause(where, array.dtype, array.shape, operation, (operand,), why + wide)
        if operation in _WRITTEN or operation in _ASKED:
            why = self._as_written(place, operation, operand)
            return Cause(where, array.dtype, array.shape, operation, (operand,), why + wide)
        operation, who, more = "", "the function returns", ""
        ask = None if user is not None else self.asked.of(*first, op=sent.op, axis=axis)
        gathered = self._gathered_dim(place, sent)
        if user is not None:
            operation, line, _ = used = self._in_program(user)
            who = f"{operation}{f' ({line})' * (line not in ('', where))} needs"
            found = self.asked.of(*used, op=sent.op, axis=axis)
            if found is not None and self.asked.is_by_element(*used):
                ask = found
            elif found is not None and (sent.op != "all_gather" or set(axis.split(",")) & found.axes):
                more = f"; {found} of its result"
            elif found is not None and (dim := self.asked.dim_of_product(line, first, gathered)) is not None:
                order = axes_in_order(self.mesh, self.module.groups(place.one))
                who, more = f"{operation} needs", f"; {found} of its result"
                if (spec := found.with_axis(dim, order)) is not None:
                    more += f", and with {found.remedy(spec)}"
        if ask is not None and axis in ask._replace(spec=ask.spec[gathered : gathered + 1]).axes:
            ask = None  # it asks for the pieces that there are
        num_pieces = prod(self.mesh.axis_size(name) for name in axis.split(","))
        if user is None and ask is None and 0 <= gathered < len(shape) and shape[gathered] % num_pieces:
            more = f": a result must be in equal pieces, and {num_pieces} does not divide {shape[gathered]}"
        if ask is not None:
            why = self._as_asked(ask, place, made, sent, axis, operand + shards * (sent.op == "all_gather"))
            return Cause(where, array.dtype, array.shape, operation, (operand,), why + wide)
        if user is not None and made.one.op == user.one.op == "reduce" and sent.op == "all_gather":
            operands = self._operands(made, where)
            why = f"{operation} of {' and '.join(operands)} goes over a dim that is sharded over {axis}, so each rank "
            why += "has only its part"
            return Cause(where, array.dtype, array.shape, operation, operands, why + wide)
        if user is not None and sent.op == "all_to_all" and user.one.origin == made.one.origin:
            why = f"XLA computes {operation} on pieces that are cut along another dim, and here moves its result back"
            return Cause(where, array.dtype, array.shape, operation, (operand,), why + wide)
        if sent.op == "all_gather" and (new_shape := self.asked.reshaped(*first)) is not None:
            operation, who = "reshape", "reshape needs"
            more = f": its pieces are no pieces of the new shape {list(new_shape)}" + more
            wide = self._as_kept(place) + self._as_wide(place, sent, None)
        why = {
            "all_gather": f"{who} all of {operand}{shards}",
            "all_to_all": f"{who} {operand} cut along another dim than it is",
        }.get(sent.op, f"{who} {operand} on other ranks than those that have it")
        return Cause(where, array.dtype, array.shape, operation, (operand,), why + more + wide)

    def _as_asked(self, ask: Ask, place: Place, made: Place, sent: Sent, axis: str, operand: str) -> str:
        """An array that is moved because somebody asks how it is to lie, and what to ask for instead."""
        why = {
            "all_gather": f"{ask}, which takes all of {operand}",
            "all_to_all": f"{ask}, which cuts {operand} along another dim than now",
        }.get(sent.op, f"{ask}, which puts {operand} on other ranks than those that have it")
        if (spec := self._as_it_is(ask, place, made, sent, axis)) is not None:
            why += f"; with {ask.remedy(spec)}"
        return why

    def _as_it_is(self, ask: Ask, place: Place, made: Place, sent: Sent, axis: str) -> tuple[Any, ...] | None:
        """The spec that the array has already, if we know it."""
        while self.flow.slot(made) is None and self.asked.is_by_element(*self._in_program(made)):
            sources = {self.flow.source(given) for given in self.flow.operands(made)}
            sources = {source for source in sources if source.one.op not in _CONSTANT}
            if len(sources) != 1 or made in sources:
                break
            made = sources.pop()
        if (slot := self.flow.slot(made)) is not None:
            if slot.axes is None or len(slot.axes) != ask.num_dims:
                return None
            return tuple(tuple(name.split(",")) if "," in name else name or None for name in slot.axes)
        dim = self._gathered_dim(place, sent)
        if dim < 0 or len(sent.array.shape) != ask.num_dims:
            return None
        return ask.with_axis(dim, axes_in_order(self.mesh, self.module.groups(place.one)))

    def _gathered_dim(self, place: Place, sent: Sent) -> int:
        """The dim of an array whose pieces are gathered; -1 if there is none, or several."""
        dims = place.one.dims("dimensions") if sent.op == "all_gather" else ()
        return dims[0] if len(dims) == 1 else -1

    def _argument(self, place: Place) -> int | None:
        """The number of the argument that an array is."""
        return None if self.flow.slot(place) is None else self.asked.argument(place.one.origin)

    def _in_program(self, place: Place) -> tuple[str, str, bool]:
        """An operation, as `Asked` knows it: its name, its line, and whether it is of the backward pass."""
        return self._name_in_program(place), self._line(place), place.one.phase == "backward"

    def _name_in_program(self, place: Place) -> str:
        """The program's name of an operation."""
        name = _operation(place.one) or place.one.op
        if name == "reduce" or name.startswith("reduce_window"):
            names = self.asked.names_at(self._line(place)) & _NAMES
            return names.pop() if len(names) == 1 else name
        names = self.asked.names_at(self._line(place))
        if name == "dynamic_slice" and "/while/body/" in place.one.origin and "scan" in names and name not in names:
            return "scan"  # takes a row of what it goes along
        return name

    def _user(self, place: Place) -> Place | None:
        """What computes with an array, in the program: before, XLA may pad or cut it, under the name of an argument, or
        of the loop into which it goes."""
        user = next(self.flow.needed_by(place), None)
        for _ in range(_MOST_OPERANDS):
            if user is None or ("/" in user.one.origin and user.one.primitive != "while"):
                break
            user = next(self.flow.needed_by(user), None)
        return user

    def _as_wide(self, place: Place, sent: Sent, index: int | None) -> str:
        """Where 16-bit numbers are sent as float32."""
        dtype = narrow_dtype(self.flow, place, index) if sent.array.dtype == "float32" else ""
        return f"; sent as {dtype} on GPUs" if dtype else ""

    def _as_kept(self, place: Place, size: int = 0) -> str:
        """Where ranks gather an array and keep only pieces of it. `size`: the number of elements of the whole, if it is
        gathered only to be cut in another way."""
        times = kept_of_all(self.flow, place)
        if times < 2:
            return ""
        words = f"; each rank keeps 1/{times} of what it gathers"
        if place.one.arrays[-1].size != size:
            return words
        return f"{words}, as XLA knows no direct way between the shardings (an involuntary full rematerialization)"

    def _as_written(self, place: Place, primitive: str, operand: str) -> str:
        who = "the gradient of your program has" if "transpose(" in place.one.origin else "your program has"
        return f"{who} {primitive.removesuffix('_invariant')} of {operand}"

    # --- what is it? ---------------------------------------------------------------------------------------------

    def _operands(self, made: Place, where: str) -> tuple[str, ...]:
        """What an operation of the program was computed from: XLA may have split it into several instructions."""
        found: dict[str, None] = {}
        pending, seen = [made], set[tuple[str, str]]()
        while pending and len(found) < _MOST_OPERANDS:
            place = pending.pop(0)
            for given in self.flow.operands(place):
                source = self.flow.source(given)
                key = source.computation, source.one.name
                if key in seen or source.one.op in _CONSTANT:
                    continue
                seen.add(key)
                is_part = source.one.op != "parameter" and source.one.origin in ("", made.one.origin)
                if is_part and not is_product(source.one):
                    pending.append(source)
                else:
                    found[self._text(source, where)] = None
        return tuple(found)

    def _text(self, place: Place, where: str) -> str:
        """An array, in the reader's terms."""
        if (slot := self.flow.slot(place)) is not None:
            return str(slot)
        name = _operation(place.one)
        if not name:
            return "a constant" if place.one.op in ("constant", "iota", "broadcast") else f"what {place.one.op} made"
        line = self._line(place)
        return f"the result of {name}{f' ({line})' * (line not in ('', where))}"

    def _line(self, place: Place) -> str:
        return self.module.where(place.one)


def _operation(one: Instruction) -> str:
    """JAX's name for what an instruction does. XLA puts transposes into products, and may keep only their names."""
    return "dot_general" if one.op == "dot" and "dot" not in one.primitive else one.primitive
