"""One rank's memory by kind: what each of its tensors is, followed from operation to operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self
from warnings import warn

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook

from tplab.cost.cluster import Cluster
from tplab.mesh import Mesh
from tplab.torch.private import HigherOrder, graph_task, local_of, phase, pytree, storage_id, version_of
from tplab.torch.ranks.rank import Rank
from tplab.torch.ranks.storages import Storages
from tplab.torch.ranks.watcher import Listener, listening, watcher
from tplab.trace.memory import KINDS, Ledger, Memory, RankMemory


def count_as(kind: str, tensors: Any) -> None:
    """Set the kind of memory of these tensors, in a run that counts memory by kind; elsewhere this does nothing.

        w = torch.zeros(D, F, requires_grad=True)
        count_as("parameters", w)                  # it is not an nn.Parameter

    kind      one of "parameters", "optimizer", "gradients", "gathered", "activations", "other"
    tensors   one, or a structure of them. It applies to their memory, so also to their views, until they are gone
    """
    if kind not in KINDS:
        raise ValueError(f"there is no kind {kind!r} of memory; kinds are {', '.join(KINDS)}")
    kinds = listening(KindsOfMemory)
    if kinds is not None:
        for x in pytree.tree_leaves(tensors):
            if isinstance(x, Tensor):
                kinds.mark(x, kind)


def hold(x: Tensor) -> object:
    """A token: while it exists, `x` counts as saved for a backward pass. For code that saves tensors itself."""
    kinds = listening(KindsOfMemory)
    return None if kinds is None else kinds.hold(x)


def memory_of(
    held: Sequence[RankMemory],
    mesh: Mesh,
    times: Callable[[np.ndarray], np.ndarray],
    *,
    title: str,
    clock: str,
    cluster: Cluster | None,
    in_steps: bool,
) -> Memory:
    """The memory of all ranks, as `KindsOfMemory` has followed it; `times` maps its moments to times."""
    held = [one.at_times(times(one.times)) for one in held]
    if any(one.leaves_out for one in held) and not any(one.peak for one in held):
        text = "count_memory counts 0 B, because tensors on the device meta have no memory; give device='meta' to count"
        warn(f"{text} what real ones would take", stacklevel=3)
    name = None if cluster is None else f"{cluster.name}, {cluster.kind_on(mesh.size)}"
    return Memory(mesh, held, title=title, clock=clock, unit="steps" if in_steps else "s", cluster=name)


class KindsOfMemory(Listener):
    """Follows the memory of this rank's tensors, from the program's arguments to its end; `heard` is the result.

    Each piece of memory counts once, however many views it has, from the operation that makes it until the first
    operation after it is freed. The result of a collective counts from the start of the collective, because a message
    needs room to arrive; on processes, from its first use. Tensors from outside the program also count from their first
    use, but an nn.Parameter from the start.

    optimizer     tensors in the state of a torch.optim optimizer after its step
    parameters    memory of an nn.Parameter
    gradients     memory of the `.grad` of one
                  (these three count as such from their beginning, though their kind becomes known only later)
    activations   what autograd has saved, until it frees it: tensors of the graph from their beginning, everything else
                  from the time it is saved. Also what a backward pass computes with grad mode on: recomputation
    other         everything else, and the program's arguments
    `count_as` takes precedence over all this. With `is_meta`, tensors on the device "meta" count as if they were real.
    """

    heard: RankMemory
    follows_threads = True

    def __init__(self, rank: Rank, fn: Callable[..., Any], given: Any = (), is_meta: bool = False):
        self._rank, self._given, self._is_meta = rank, given, is_meta
        self._ledger, self._leaves_out = Ledger(), False
        self._storages: Storages[_Held] = Storages()
        self._parameters: dict[int, _Parameter] = {}  # by storage: the parameter, to find its gradient
        self._saving = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> Self:
        self._ledger.open_row(self._rank.moment(), "start", "", "")
        for x in pytree.tree_leaves(self._given):
            for tensor in [*x.parameters(), *x.buffers()] if isinstance(x, nn.Module) else [x]:
                held = self._meet(tensor)
                if held is not None:
                    held.is_given = True
        self._given = None
        self._after_steps = register_optimizer_step_post_hook(self._stepped)
        self._saving.__enter__()
        watcher().add(self)
        return self

    def __exit__(self, *error: Any) -> None:
        watcher().remove(self)
        self._saving.__exit__(*error)
        self._after_steps.remove()
        self._look()
        self._ledger.open_row(self._rank.moment(), "end", "", "")
        for held in self._storages.rest():
            self._book(held)
        self._storages = Storages()
        self._parameters.clear()
        held = self._ledger.closed(begin=0)  # moments, which become times after the run
        self.heard = replace(held, leaves_out=self._leaves_out)

    def wraps(self, args: Any, kwargs: Any) -> None:
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, nn.Parameter):
                self._meet(x)

    def starts(self, func: Any, args: Any, kwargs: Any) -> float:
        return self._rank.moment()

    def ended(self, func: Any, args: Any, kwargs: Any, result: Any, note: float) -> None:
        self._look()
        self._open_row(_name(func, args), note)
        for x in pytree.tree_leaves((args, kwargs)):
            self._meet(x)
        is_again = graph_task() != -1 and torch.is_grad_enabled()
        for x in pytree.tree_leaves(result):
            self._meet(x, "activations" if is_again else "other")

    def begins(self) -> int:
        return len(self._ledger)

    def met(self, call: Any, x: Tensor, y: Tensor, note: int | None) -> None:
        """Count the result of a collective, starting with the row in which it began."""
        self._look()
        self._open_row(call.op)
        held = self._meet(y)
        if held is not None and note is not None and note < held.born == len(self._ledger) - 1:
            held.born, held.kinds = note, [(note, held.kinds[0][1])]
        if held is not None:
            held.was_sent = call.op == "receive"

    def mark(self, x: Tensor, kind: str) -> None:
        """Count the memory of `x` as `kind` from its beginning, whatever else is found."""
        held = self._meet(x)
        if held is not None:
            held.kinds, held.is_marked = [(held.born, kind)], True
            if kind == "parameters":
                self._parameters[held.place] = _Parameter(x, held)

    def hold(self, x: Tensor) -> object:
        """A token: while it exists, `x` is saved for a backward pass."""
        held = self._meet(x)
        if held is None or held.is_given or not held.can_be("activations"):
            return None
        is_new = x.grad_fn is not None and len(held.kinds) == 1 and not held.was_sent
        held.becomes("activations", held.came if is_new else len(self._ledger) - 1)
        return _Token(held, self._ledger)

    # --- following memory ----------------------------------------------------------------------------------------

    def _open_row(self, op: str, moment: float | None = None) -> None:
        rank = self._rank
        self._ledger.open_row(rank.moment() if moment is None else moment, op, rank.written(rank.lines.here()), phase())

    def _look(self) -> None:
        """Record what has been freed, and find new gradients."""
        for held in self._storages.gone():
            self._book(held)
            parameter = self._parameters.get(held.place)
            if parameter is not None and parameter.held is held:
                del self._parameters[held.place]
        for known in [known for known in self._parameters.values() if known.has_changed()]:
            storage, parameter = known.storage(), known.parameter()
            if storage is not None and storage.nbytes() != known.held.num_bytes:
                self._resize(known.held, storage.nbytes())
            gradient = None if parameter is None else parameter.grad
            if gradient is not None:
                known.gradient = weakref.ref(gradient)
                held = self._meet(gradient)
                if held is not None:
                    held.was("gradients")

    def _resize(self, held: _Held, num_bytes: int) -> None:
        """Follow a resize: FSDP2 frees and restores whole parameters by resizing their memory."""
        self._book(held)
        held.num_bytes, held.born = num_bytes, len(self._ledger)
        held.kinds = [(held.born, held.kinds[-1][1])]

    def _meet(self, x: Any, kind: str = "other") -> _Held | None:
        """What is known about the memory of `x`; None if it has none that counts."""
        if not isinstance(x, Tensor):
            return None
        local = local_of(x)
        if local.layout is not torch.strided:
            return None
        if local.device.type == "meta" and not self._is_meta:
            self._leaves_out = True
            return None
        storage = local.untyped_storage()
        held = self._storages.get(storage)
        is_parameter = isinstance(x, nn.Parameter)
        if held is None:
            born = 0 if is_parameter else max(len(self._ledger) - 1, 0)
            held = _Held(storage, born, kind)
            self._storages.add(storage, held)
        if is_parameter and held.place not in self._parameters:
            self._parameters[held.place] = _Parameter(x, held)
            held.was("parameters")
        return held

    def _book(self, held: _Held) -> None:
        self._ledger.book(held.num_bytes, held.kinds, len(self._ledger))

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if listening(KindsOfMemory) is not self:  # it belongs to another rank
            return
        for state in optimizer.state.values():
            for x in pytree.tree_leaves(state):
                held = self._meet(x)
                if held is not None:
                    held.was("optimizer")

    # --- what autograd saves -------------------------------------------------------------------------------------

    def _pack(self, x: Tensor) -> tuple[Tensor, int, object]:
        kept = x if x.is_leaf else x.detach()  # with its own output, the graph would keep itself alive
        return kept, version_of(x), self.hold(x)

    def _unpack(self, saved: tuple[Tensor, int, object]) -> Tensor:
        x, version, _ = saved
        if version_of(x) != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{list(x.shape)} is at version {version_of(x)}; expected version {version} instead"
            )
        return x


_GOES_BEFORE = ("other", "activations", "gradients", "parameters", "optimizer")
"""In ascending order of precedence, for memory that would be of two kinds."""


class _Held:
    """A piece of memory.

    born       the row of the ledger in which its existence begins
    came       the same, except for a message in flight: the row in which its contents arrive
    kinds      (row, kind): its kind from that row on
    is_marked  whether `count_as` has set its kind
    is_given   whether it came with the arguments of the program
    was_sent   whether it is a message from one rank, which no graph has made: it may wait for its forward pass
    """

    __slots__ = (
        "born", "came", "is_given", "is_marked", "kinds", "num_bytes", "num_saved", "place", "storage", "was_sent",
    )  # fmt: skip

    def __init__(self, storage: torch.UntypedStorage, born: int, kind: str):
        self.storage, self.place, self.num_bytes = weakref.ref(storage), storage_id(storage), storage.nbytes()
        self.born = self.came = born
        self.kinds = [(born, kind)]
        self.is_marked = self.is_given = self.was_sent = False
        self.num_saved = 0

    def can_be(self, kind: str) -> bool:
        return not self.is_marked and _GOES_BEFORE.index(self.kinds[-1][1]) <= _GOES_BEFORE.index(kind)

    def was(self, kind: str) -> None:
        """Set its kind from its beginning."""
        if self.kinds[-1][1] != kind and self.can_be(kind):
            self.kinds = [(self.born, kind)]

    def becomes(self, kind: str, row: int) -> None:
        """Set its kind from this row on."""
        if row <= self.born:
            self.kinds = [(self.born, kind)]
        elif self.kinds[-1][1] != kind:
            self.kinds.append((max(row, self.kinds[-1][0]), kind))


class _Parameter:
    """A parameter, its memory, and its last known gradient. Every parameter is checked after every operation, since
    nothing reports the assignment of a gradient: so the check is brief."""

    __slots__ = ("gradient", "held", "parameter", "storage")

    def __init__(self, parameter: Tensor, held: _Held):
        self.parameter, self.storage, self.held = weakref.ref(parameter), held.storage, held
        self.gradient: Callable[[], Tensor | None] = _nothing

    def has_changed(self) -> bool:
        """Whether its memory has another size, or it has another gradient."""
        storage, parameter = self.storage(), self.parameter()
        if storage is not None and storage.nbytes() != self.held.num_bytes:
            return True
        gradient = None if parameter is None else parameter.grad
        return gradient is not None and gradient is not self.gradient()


def _nothing() -> None:
    return None


class _Token:
    """Marks a piece of memory as saved, until the last of its tokens is gone."""

    __slots__ = ("held", "ledger")

    def __init__(self, held: _Held, ledger: Ledger):
        self.held, self.ledger = held, ledger
        held.num_saved += 1

    def __del__(self) -> None:
        held = self.held
        held.num_saved -= 1
        if not held.num_saved and held.kinds[-1][1] == "activations" and not held.is_marked:
            held.becomes("other", len(self.ledger))


def _name(func: Any, args: Any) -> str:
    """The name of an operation. An operation that only marks a region for torch's profiler has the region's name."""
    name = func.name() if isinstance(func, HigherOrder) else func.overloadpacket.__name__
    if not name.startswith("_record_function"):
        return name
    return str(args[0]).rpartition("#")[2] if "enter" in name else ""
