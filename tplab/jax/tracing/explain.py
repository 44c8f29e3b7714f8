"""`explain`: why each collective is in a compiled program, by the line and the operand that need it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from tplab.jax.tracing.asked import COPIES, Ask, Asking, Equation, axes_of
from tplab.jax.tracing.compiled import Run, runs_of, times_text
from tplab.jax.tracing.exchange import EXCHANGES
from tplab.jax.tracing.flow import Slots, axes_along, axes_in_order, is_moved, needed_by, source
from tplab.jax.tracing.hlo import Instruction
from tplab.jax.tracing.lowered import Lowered, compiled_for
from tplab.jax.tracing.proposals import Proposal, proposals, wrapped
from tplab.jax.tracing.sending import Carried, bytes_by_rank, keeps_share, kept_of_all, narrow_dtype, sent_by
from tplab.jax.tracing.work import is_product
from tplab.mesh import Mesh


class Cause(NamedTuple):
    """Why a tensor is sent.

    where          the line of the program; "" if XLA does not record it
    dtype, shape   of the array that each rank sends
    operation      the operation that needs it, or made it: "dot_general"
    operands       the arrays involved: arguments by name and sharding, others by the operation that made them
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
    by_rank       the bytes that each rank sends each time, with the ring algorithm
    count         how often it runs; None if that is known only at run time
    at_most       the upper bound of `count`, for a branch that may not be taken; None in a loop of unknown length
    is_written    whether it is in your program, as `lax.psum` in a `shard_map`; otherwise XLA inserted it
    is_backward   whether it belongs to a gradient
    causes        one for each tensor that it sends, since XLA may send several together
    """

    op: str
    axis: str
    by_rank: tuple[int, ...]
    count: int | None
    at_most: int | None
    is_written: bool
    is_backward: bool
    causes: tuple[Cause, ...]

    @property
    def bytes(self) -> int:
        """The bytes that a rank sends each time; the maximum over ranks."""
        return max(self.by_rank)

    @property
    def where(self) -> str:
        """The line of the program of the first tensor."""
        return self.causes[0].where

    def __str__(self) -> str:
        times = f"{times_text(self.count, self.at_most)}{':' * (self.at_most is None)} "
        backward = ", in the backward pass" if self.is_backward else ""
        lines = [f"{times}{self.op} along {self.axis}, {self.bytes:,} B{' each' * (self.count != 1)}{backward}"]
        texts = [
            f"{f'{cause.where}, ' if cause.where else ''}{cause.dtype}{list(cause.shape)}: {cause.why}"
            for cause in self.causes
        ]
        for text, number in Counter(texts).items():
            lines.append(wrapped(f"{number} x {text}" if number > 1 else text))
        return "\n".join(lines)


class Explanation(tuple[Explained, ...]):
    """The collectives of a program in order; prints as a sentence or two each.

    proposals   specs with which less would be sent
    """

    title: str
    mesh: Mesh
    proposals: tuple[Proposal, ...]

    @property
    def bytes(self) -> int:
        """The bytes that a rank sends in total; the maximum over ranks. Raises ValueError if that is known only at run
        time."""
        for one in self:
            if one.count is None:
                raise ValueError(f"how often the {one.op} at {one.where} runs is known only when it runs")
        return max(self._by_rank())

    def _by_rank(self) -> list[int]:
        """The bytes that each rank sends, as far as they are known."""
        return [sum(one.by_rank[rank] * (one.count or 0) for one in self) for rank in self.mesh.ranks]

    def __repr__(self) -> str:
        if not self:
            return f"{self.title} on {self.mesh}: nothing is sent"
        by_rank = self._by_rank()
        who = "each rank sends" if len(set(by_rank)) == 1 else "a rank sends at most"
        more = ", and what only the running program decides" if any(one.count is None for one in self) else ""
        head = f"{self.title} on {self.mesh}: {who} {max(by_rank):,} B{more}"
        return "\n".join([head, *map(str, self), *map(str, self.proposals)])


def explain(fn: Callable[..., Any], *args: Any, accelerator: bool = False, **kwargs: Any) -> Explanation:
    """Why XLA's program for `fn(*args, **kwargs)` sends what it sends: the line and the operand behind each collective.

        explain(jax.jit(train_step), params, batch)

    The arguments are those of `trace`, and so is `accelerator`. Nothing is run.

    A collective that is in your program is marked as such. One that XLA inserted is explained by the operation that
    uses its result or made its operand: a sum over a sharded dim, an array that is needed whole or with another
    sharding. An argument is identified by its name and sharding, and an intermediate array by the operation that made
    it. XLA propagates requested shardings backwards, and moves an array before the elementwise operations on it: then
    the constraint or `out_shardings` that requests the sharding is named, by the line that calls your helpers.
    `proposals` are other specs for these requests. The program is compiled with each, at most 12 times, and the specs
    with which less is sent are kept.
    On GPUs, XLA may combine collectives, make each a start and a done, or fuse it with a product (a windowed einsum).
    So a step may have more or fewer collectives there than here.
    """
    program = compiled_for(fn, args, kwargs, numbered=True)
    why = _Why(program, accelerator)
    explanation = Explanation(one for run in runs_of(program.module) for one in why.explained(run))
    explanation.title, explanation.mesh = program.title, program.mesh
    explanation.proposals = tuple(proposals(program, why.proposed, accelerator))
    return explanation


_WRITTEN = {*EXCHANGES, "psum_scatter", "pbroadcast", "ragged_all_to_all", "all_gather_reduced", "unreduced_psum"}
_ASKED = {"reshard", "sharding_constraint", "device_put"}
"""Primitives that request a sharding."""
_MOST_OPERANDS = 4
_CONSTANT = ("constant", "iota", "partition-id", "broadcast")


class _Why:
    """Finds causes in a compiled program."""

    def __init__(self, program: Lowered, accelerator: bool):
        self.proposed: dict[Ask, dict[int, list[tuple[str, ...]]]] = {}  # by request: the axes along each dim
        self.module, self.mesh, self.accelerator = program.module, program.mesh, accelerator
        self.asked, self.slots = program.asked, Slots(program.mesh, program.names)

    def explained(self, run: Run) -> Iterator[Explained]:
        """One for each operation that a collective performs; none if each rank is alone in its group."""
        place = run.one
        axis, _ = axes_along(self.mesh, self.module.groups(place), place.collective == "ppermute")
        if not axis:
            return
        sent = sent_by(place, self.accelerator)
        causes = self._causes(place, sent, axis)
        for op, by_rank in bytes_by_rank(place, self.mesh, self.accelerator).items():
            # pieces of one array share one cause
            its_causes = tuple(cause for cause, each in zip(causes, sent, strict=False) if each.op == op)
            is_backward, is_written = place.phase == "backward", place.primitive in _WRITTEN
            yield Explained(op, axis, by_rank, run.count, run.at_most, is_written, is_backward, its_causes)

    def _causes(self, place: Instruction, sent: list[Carried], axis: str) -> list[Cause]:
        operands = place.operands
        if place.collective in ("all_reduce", "reduce_scatter"):
            indices = [None] if len(operands) == 1 else range(len(operands))
            found = zip(operands, sent, indices, strict=False)
            return [self._of_sum(place, given, each, axis, index) for given, each, index in found]
        if place.op.startswith("all-to-all") and len(operands) > 1:  # pieces of one array
            array = sent[0].array
            pieces = sent[0]._replace(array=array._replace(shape=(len(operands), *array.shape)))
            return [self._of_move(place, operands[0], pieces, axis)]
        return [self._of_move(place, given, each, axis) for given, each in zip(operands, sent, strict=False)]

    def _of_sum(self, place: Instruction, given: Instruction, sent: Carried, axis: str, index: int | None) -> Cause:
        """A sum over ranks of a value computed from sharded arrays. `index` is its place among several."""
        made = source(given)
        operation, own = self._name(made), place.primitive
        where = self._line(place if index is None else made) or self._line(made) or self._line(place)
        is_sum = is_product(made) or made.op == "reduce" or operation == "dot_general"
        operands = self._operands(made, where)
        if not is_sum and own.startswith("reduce_") and own not in _WRITTEN:  # of one element per rank: XLA removed it
            operation, operands, is_sum = own, (self._text(made, where),), True
        of = f" of {' and '.join(operands)}" if operands else ""
        if (written := place.primitive) in _WRITTEN:
            operands = (self._text(made, where),)
            own = place if index is None or made.phase == "backward" else made  # XLA gives all of them one name
            why = self._as_written(own, written, operands[0])
        elif is_sum:
            what = "sums over" if any(word in operation for word in ("dot", "conv", "add", "sum")) else "goes over"
            why = f"{operation}{of} {what} a dim that is sharded over {axis}, so each rank has only its part"
        else:
            why = f"after {operation}{of} each rank has only a part of the result"
        if sent.op == "all_reduce" and keeps_share(place, index):
            kept = f"1/{len(self.module.groups(place)[0])} of the result"
            why += f"; each rank keeps {kept}: a reduce_scatter on GPUs and TPUs"
        why += self._as_wide(place, sent, index)
        return Cause(where, sent.array.dtype, sent.array.shape, operation, operands, why)

    def _of_move(self, place: Instruction, given: Instruction, sent: Carried, axis: str) -> Cause:
        """An array that is not where it is needed."""
        made, user = source(given), self._user(place)
        where = self._line(place) or (self._line(user) if user else "") or self._line(made)
        operand, operation, primitive = self._text(made, where), place.primitive, place.primitive
        starts, own = self._arrays(made), self.asked.step_of(place.origin)
        used = None if user is None else self.asked.step_of(user.origin)
        shape, gathered, is_gather = self.asked.shape(starts), self._gathered_dim(place, sent), sent.op == "all_gather"
        wide = self._as_wide(place, sent, None)
        if not self.asked.is_asked_whole(starts):
            wide = self._as_kept(place, prod(shape)) + wide
        is_second = is_moved(given)
        shards = " after another collective has moved it" if is_second else f", which is sharded over {axis}"

        def cause(why: str, operands: tuple[str, ...] = ()) -> Cause:
            return Cause(where, sent.array.dtype, sent.array.shape, operation, operands or (operand,), why + wide)

        if primitive in _WRITTEN:
            return cause(self._as_written(place, primitive, operand))
        asking, more = self.asked.at(own) if own is not None and primitive in _ASKED else None, ""
        if asking is None and user is None:
            asking = self.asked.of(starts, sent.op, axis)
        elif asking is None and used is not None:
            asking = self.asked.of(starts, sent.op, axis, until=used)
            after = self.asked.of(used.makes, sent.op, axis)
            if asking is None and after is not None and self.asked.is_by_element(used):
                asking = self.asked.of(starts, sent.op, axis) or after
            elif asking is None and after is not None:
                more = self._as_asked_after(after, place, made, used, sent, axis)
        if asking is not None and self._moves(asking, place, sent, axis):  # not for the existing pieces
            where = asking.ask.line or where
            return cause(self._as_asked(asking, place, made, sent, self._text(made, where) + shards * is_gather))
        if primitive in _ASKED:
            return cause(self._as_written(place, primitive, operand))
        operation, who = "", "the function returns"
        if user is not None:
            operation, line = self._name(user), self._line(user)
            who = f"{operation}{f' ({line})' * (line not in ('', where) and not more)} needs"
        num_pieces = prod(self.mesh.axis_size(name) for name in axis.split(","))
        if user is None and 0 <= gathered < len(shape) and shape[gathered] % num_pieces:
            more = f": a result must be in equal pieces, and {num_pieces} does not divide {shape[gathered]}"
        if user is not None and made.op == user.op == "reduce" and is_gather:
            operands = self._operands(made, where)
            over = f"goes over a dim that is sharded over {axis}, so each rank has only its part"
            return cause(f"{operation} of {' and '.join(operands)} {over}", operands)
        if user is not None and sent.op == "all_to_all" and user.origin == made.origin:
            back = "on pieces that are cut along another dim, and here moves its result back"
            return cause(f"XLA computes {operation} {back}")
        if is_gather and (new_shape := self.asked.reshaped(starts)) is not None:
            operation, who = "reshape", "reshape needs"
            more = f": its pieces are no pieces of the new shape {list(new_shape)}" + more
            wide = self._as_kept(place) + self._as_wide(place, sent, None)
        moved = {"all_gather": f"all of {operand}{shards}", "all_to_all": f"{operand} cut along another dim than it is"}
        return cause(f"{who} {moved.get(sent.op, f'{operand} on other ranks than those that have it')}{more}")

    def _moves(self, asking: Asking, place: Instruction, sent: Carried, axis: str) -> bool:
        """Whether a request requires that an array is moved: it does not if it is for the pieces that are gathered."""
        dim = self._gathered_as_asked(asking, place, sent)
        return dim is None or axis not in axes_of(asking.ask.spec[dim])

    def _gathered_as_asked(self, asking: Asking, place: Instruction, sent: Carried) -> int | None:
        """The gathered dim, as a dim of the requested array. A scan may have stacked arrays that were made in it."""
        dim = self._gathered_dim(place, sent) - max(len(sent.array.shape) - len(asking.dims), 0)
        return asking.dims[dim] if 0 <= dim < len(asking.dims) else None

    def _as_asked_after(
        self, asking: Asking, place: Instruction, made: Instruction, used: Equation, sent: Carried, axis: str
    ) -> str:
        """The request for the result of the operation that needs an array, in words."""
        ask, gathered = asking.ask, self._gathered_dim(place, sent)
        if self.slots.of(made) is not None:
            self._propose(ask, self._as_it_is(asking, place, made, sent))
        if sent.op != "all_gather" or set(axis.split(",")) & ask.axes:
            return f"; {ask} of its result"
        dim = self.asked.through_product(used, self._arrays(made), gathered)
        if dim is None or asking.dims[dim] is None:
            return ""
        self._propose(ask, {asking.dims[dim]: axes_in_order(self.mesh, self.module.groups(place))})
        return f"; {ask} of its result"

    def _as_asked(self, asking: Asking, place: Instruction, made: Instruction, sent: Carried, operand: str) -> str:
        """The reason in words for an array that is moved because of a request."""
        self._propose(asking.ask, self._as_it_is(asking, place, made, sent))
        return {
            "all_gather": f"{asking.ask}, which takes all of {operand}",
            "all_to_all": f"{asking.ask}, which cuts {operand} along another dim than now",
        }.get(sent.op, f"{asking.ask}, which puts {operand} on other ranks than those that have it")

    def _propose(self, ask: Ask, axes: Mapping[int | None, Sequence[str]]) -> None:
        """Note along which axes each dim is cut before the array is moved for a request."""
        for dim, names in axes.items():
            if dim is not None:
                self.proposed.setdefault(ask, {}).setdefault(dim, []).append(tuple(names))

    def _as_it_is(
        self, asking: Asking, place: Instruction, made: Instruction, sent: Carried
    ) -> dict[int | None, Sequence[str]]:
        """Dim of the requested array -> the axes along which the array is already cut, as far as they are known."""
        seen = list[Instruction]()  # a loop's carry is made from itself
        while self.slots.of(made) is None and (step := self.asked.step_of(made.origin)) is not None:
            seen.append(made)
            sources = {source(given) for given in made.operands}
            sources = {one for one in sources if one.op not in _CONSTANT}
            if not self.asked.is_by_element(step) or len(sources) != 1 or not sources.isdisjoint(seen):
                break
            made = sources.pop()
        if (slot := self.slots.of(made)) is not None and slot.axes is not None:
            dims = self.asked.dims_of(self._arrays(made), asking.ask)
            return {dim: tuple(filter(None, names.split(","))) for dim, names in zip(dims, slot.axes, strict=False)}
        if sent.op != "all_gather":
            return {}
        order = axes_in_order(self.mesh, self.module.groups(place))
        return {self._gathered_as_asked(asking, place, sent): order}

    def _gathered_dim(self, place: Instruction, sent: Carried) -> int:
        """The dim of an array whose pieces are gathered; -1 if there is none, or several."""
        dims = place.dims("dimensions") if sent.op == "all_gather" else ()
        return dims[0] if len(dims) == 1 else -1

    def _arrays(self, place: Instruction) -> tuple[int, ...]:
        """An array as its numbers in `Asked`."""
        if self.slots.of(place) is not None:
            argument = self.asked.argument(place.origin)
            return () if argument is None else (argument,)
        step = self.asked.step_of(place.origin)
        return () if step is None else step.makes

    def _name(self, place: Instruction) -> str:
        """The name of an operation. XLA fuses transposes into products, and may keep only the transpose's name."""
        step = self.asked.step_of(place.origin)
        name = step.name if step is not None and step.eqn is not None else place.primitive or place.op
        name = "dot_general" if place.op == "dot" and "dot" not in name else name
        return _WORDS.get(name, name.replace("-", "_"))

    def _user(self, place: Instruction) -> Instruction | None:
        """The operation of the program that uses an array. Before it XLA may pad or cut the array, under the name of an
        argument, or of the loop that the array enters."""
        user = next(needed_by(place), None)
        for _ in range(_MOST_OPERANDS):
            if user is None or ("/" in user.origin and user.primitive != "while"):
                break
            user = next(needed_by(user), None)
        return user

    def _as_wide(self, place: Instruction, sent: Carried, index: int | None) -> str:
        """A note if 16-bit numbers are sent as float32, otherwise ""."""
        dtype = narrow_dtype(place, index) if sent.array.dtype == "float32" else ""
        return f"; sent as {dtype} on GPUs" if dtype else ""

    def _as_kept(self, place: Instruction, size: int = 0) -> str:
        """A note if ranks gather an array and keep only pieces of it, otherwise "". `size`: the number of elements of
        the whole array, if it is gathered only to be resharded."""
        times = kept_of_all(place)
        if times < 2:
            return ""
        words = f"; each rank keeps 1/{times} of what it gathers"
        if place.arrays[-1].size != size:
            return words
        return f"{words}, as XLA knows no direct way between the shardings (an involuntary full rematerialization)"

    def _as_written(self, place: Instruction, primitive: str, operand: str) -> str:
        who = "the gradient of your program has" if "transpose(" in place.origin else "your program has"
        return f"{who} {primitive.removesuffix('_invariant')} of {operand}"

    # --- what is it? ---------------------------------------------------------------------------------------------

    def _operands(self, made: Instruction, where: str) -> tuple[str, ...]:
        """The operands of an operation of the program, which XLA may have split into several instructions."""
        found: dict[str, None] = {}
        pending, seen = [made], set[Instruction]()
        while pending and len(found) < _MOST_OPERANDS:
            for one in map(source, pending.pop(0).operands):
                is_spread = one.op == "broadcast" and made.primitive == "dot_general"  # of one element
                if one in seen or (one.op in _CONSTANT and not is_spread):
                    continue
                seen.add(one)
                is_own = one.origin in ("", made.origin) or self._is_place(one, made)
                if one.op != "parameter" and (is_own or is_spread) and not is_product(one):
                    pending.append(one)
                else:
                    found[self._text(one, where)] = None
        return tuple(found)

    def _is_place(self, one: Instruction, made: Instruction) -> bool:
        """Whether JAX computes an index here, for example of a negative index, which counts from the end."""
        step, used = (self.asked.step_of(each.origin) for each in (one, made))
        if step is None or used is None or not used.name.startswith(("gather", "dynamic", "scatter")):
            return False
        return step.line == used.line and one.arrays[0].dtype.removeprefix("u").startswith(("int", "bool"))

    def _text(self, place: Instruction, where: str) -> str:
        """An array, in the reader's terms."""
        if (slot := self.slots.of(place)) is not None:
            return str(slot)
        given, step = place.operands, self.asked.step_of(place.origin)
        if place.op in _CONSTANT or (step is not None and step.name in COPIES and len(given) == 1):
            first = source(given[0]) if given else place
            return "a constant" if not given else self._text(first, where) if first != place else "what a loop carries"
        name = self._name(place)
        line = self._line(place)
        return f"the result of {name}{f' ({line})' * (line not in ('', where))}"

    def _line(self, place: Instruction) -> str:
        step = self.asked.step_of(place.origin)
        return (step.line if step is not None else "") or self.module.where(place)


_WORDS = {"select_n": "where", "add_any": "a sum of gradients", "broadcast_in_dim": "broadcasting"}
"""Names for primitives that JAX inserts."""
