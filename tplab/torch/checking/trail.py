"""Records the operations of one step of a rank, their values, and the gradients that come back to them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from tplab.checking.source import returned
from tplab.checking.trail import READS, Op, Trail
from tplab.torch.checking.names import Names, address_of
from tplab.torch.checking.origins import compares, is_in_place, node_of, times
from tplab.torch.checking.pieces import array_of, is_there
from tplab.torch.private import graph_task, transform
from tplab.torch.ranks.meter import tensors_in
from tplab.torch.ranks.program import is_program
from tplab.torch.ranks.rank import this_rank

_KEY = "tplab operation"
_SILENT = {"__get__", "size", "dim", "numel", "__len__", "stride", "is_floating_point", "backward", "empty",
           "empty_like", "new_empty"}  # fmt: skip
"""Functions that only query a tensor, or make one without values."""


class Recorder:
    """Records torch's calls as long as `is_on()` is true.

    names   of the rank's parameters
    put     the results to put in place, by the key of an operation; and inputs, by its key and a place
    """

    def __init__(self, names: Names, is_on: Callable[[], bool], put: Mapping[Any, Tensor] | None = None):
        self._put = put or {}
        self.trail = Trail()
        self._names, self._is_on = names, is_on
        self._made, self._at = dict[int, int](), dict[int, int]()  # by id, and by address
        self._kept: list[Any] = []  # so that their ids are not reused
        self._turns: Counter[tuple[str, str]] = Counter()
        self._inside: list[Op] = []

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[..., Any]) -> Any:
        """Record a call of a function of torch, which `run(func, args, kwargs)` runs."""
        name = getattr(func, "__name__", "")
        is_hidden = bool(self._inside) and not self._inside[-1].returned
        if name in _SILENT or is_hidden or not self._is_on() or graph_task() != -1 or transform() is not None:
            found = run(func, args, kwargs)
            if name == "__get__" and isinstance(found, Tensor) and id(args[0]) in self._made:  # such as x.T
                self._made.setdefault(id(found), self._made[id(args[0])])
                self._kept.append(found)
            return found
        op = self._begin(name, args, kwargs)
        args = tuple(self._put[op.key, at].to(x) if (op.key, at) in self._put else x for at, x in enumerate(args))
        found = run(func, args, kwargs)
        if name in READS:
            if is_there(args[0]):
                op.values.append(array_of(args[0]))
                self.trail.ops.append(op)
            return found
        placed = self._placed(op, args[0] if name == "__setitem__" else found)
        self._note(op, placed)
        return found if name == "__setitem__" else placed

    def _placed(self, op: Op, found: Any, place: int = 0) -> Any:
        """Return the result of an operation, or the one to put in its place, with the original gradient."""
        if isinstance(found, tuple):
            return type(found)(self._placed(op, x, place) for place, x in enumerate(found))
        if (gradient := self._put.get((op.key, "back", place))) is not None and found.requires_grad:
            found.register_hook(lambda x: gradient.to(x))
        if (value := self._put.get((op.key, ~place) if place else op.key)) is None:
            return found
        value = value.to(found)
        if is_in_place(op.key[1]):
            with torch.no_grad():
                return found.copy_(value)
        return found + (value - found).detach() if found.is_floating_point() else value

    def apply(self, function: Any, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Record an autograd function of the program or a library. The operations inside the program's own are
        recorded, too: they made its results."""
        if self._inside or not self._is_on() or graph_task() != -1 or transform() is not None:
            return call()
        op = self._begin(function.__name__, args, kwargs)
        op.is_function = True
        op.returned = line_of_return(function)
        self._inside.append(op)
        try:
            found = call()
        finally:
            self._inside.pop()
        made = (self._made.get(id(x), -1) for x in tensors_in(found))
        op.inputs += [number for number in made if number >= 0 and number not in op.inputs]
        found = self._placed(op, found)
        self._note(op, found)
        return found

    def begin_with(self, data: Iterable[Tensor]) -> None:
        """Forget how these inputs of the model, or targets of a loss, were made."""
        for x in data:
            self._made.pop(id(x), None)

    def send(self, line: str) -> None:
        """Note a collective."""
        if graph_task() != -1:
            if self._running is not None:
                self._running.sent_back.append(line)
        elif self._inside:
            self._inside[-1].sent.append(line)

    def combine(self, name: str, put: Any, into: Sequence[Tensor]) -> None:
        """Record a finished collective outside of autograd functions, which has written its results into tensors."""
        if not (self._inside or not self._is_on() or graph_task() != -1 or transform() is not None):
            op = self._begin(f"{name}_", (put,), {})
            op.inputs = op.inputs or [self._at[at] for x in tensors_in(put) if (at := address_of(x)) in self._at]
            op.sent.append(op.line)
            self._note(op, [self._placed(op, x, place) for place, x in enumerate(into)], is_hooked=False)

    def begin_backward(self, loss: Any) -> None:
        if isinstance(loss, Tensor) and self._is_on() and self.trail.end < 0:
            self.trail.end = self._of(loss)

    def close(self) -> None:
        """Replace the ids of leaves by the names of parameters, and release tensors."""
        for op in self.trail.ops:
            op.passed = [
                (self._names.known(int(to.removeprefix("leaf "))) if isinstance(to, str) else to, x)
                for to, x in op.passed
            ]
        self._made.clear()
        self._kept.clear()

    # --- forward -----------------------------------------------------------------------------------------------------

    def _begin(self, name: str, args: Any, kwargs: Any) -> Op:
        lines = [line for _, line in this_rank().lines.chain()] or [""]
        turn = self._turns[lines[0], name]
        self._turns[lines[0], name] += 1
        given = [self._of(x) for x in tensors_in((args, tuple(kwargs.values())))]
        made = [number for number in given if number >= 0]
        op = Op((lines[0], name, turn), lines, made, [], times=times(name, args), compares=compares(name, args))
        for place, x in enumerate(args):
            if isinstance(x, Tensor) and not x.requires_grad and x.dim() and is_there(x):
                number = self._of(x)
                op.given[place] = array_of(x), self.trail.ops[number].line if number >= 0 else ""
        return op

    def _note(self, op: Op, found: Any, is_hooked: bool = True) -> None:
        """Record the results of an operation, and their gradients if `is_hooked`."""
        results = list(tensors_in(found))
        if not results or not all(map(is_there, results)):
            return
        number = len(self.trail.ops)
        self.trail.ops.append(op)
        for place, x in enumerate(results):
            with DisableTorchFunction():
                op.values.append(array_of(x))
            self._made[id(x)] = self._at[address_of(x)] = number
            self._kept.append(x)
            if is_hooked and node_of(x) is not None:
                self._hook(x, op, number, place)

    def _of(self, x: Tensor) -> int:
        """Return the number of the operation that has made a tensor; -1 if none was seen."""
        if id(x) in self._made:
            return self._made[id(x)]
        node = node_of(x)
        return -1 if node is None else node.metadata.get(_KEY, -1)

    # --- backward ----------------------------------------------------------------------------------------------------

    _running: Op | None = None

    def _hook(self, x: Tensor, op: Op, number: int, place: int) -> None:
        """Record the gradient of a result when it arrives, and those that the operation passes on."""
        last: Any = x.grad_fn
        output = x.output_nr
        if last.metadata.get(_KEY, number) == number:
            last.register_prehook(lambda gradients: self._arrive(op, place, gradients[output]))
        waiting = [last]
        while waiting:
            node = waiting.pop()
            if _KEY in node.metadata:
                continue
            node.metadata[_KEY] = number
            targets = list[Any]()
            for other, _ in node.next_functions:
                leaf = getattr(other, "variable", None)
                targets.append(other if leaf is None else self._name(leaf))
                if other is not None and leaf is None and _KEY not in other.metadata:
                    waiting.append(other)
            self._kept.append(node)
            node.register_hook(self._passes(op, number, targets))

    def _passes(self, op: Op, number: int, targets: list[Any]) -> Callable[..., None]:
        def passed(given: tuple[Tensor | None, ...], _: Any) -> None:
            self._running = None
            for x, target in zip(given, targets):
                to = target if target is None or isinstance(target, str) else target.metadata.get(_KEY)
                if x is not None and to is not None and to != number:
                    op.passed.append((to, array_of(x)))

        return passed

    def _arrive(self, op: Op, place: int, gradient: Tensor | None) -> None:
        self._running = op
        if gradient is not None:
            op.arrived[place] = array_of(gradient)

    def _name(self, leaf: Tensor) -> str:
        self._kept.append(leaf)
        return f"leaf {id(leaf)}"


def line_of_return(function: Any) -> str:
    """Return the line at which the backward pass of an autograd function returns, if that is the program's."""
    backward = inspect.unwrap(function.backward).__code__
    return returned(backward.co_filename, backward.co_firstlineno) if is_program(backward.co_filename) else ""
