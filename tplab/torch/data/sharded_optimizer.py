"""An optimizer whose states are sharded: ZeRO's first two stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tplab.data.gradients import BUCKET_BYTES, Gradient, buckets_of
from tplab.data.pieces import OPS, check_copies, data_axes
from tplab.errors import one_of
from tplab.mesh import Axis
from tplab.torch.comm.collectives import Handle, axis_size
from tplab.torch.data.parameters import Owner, note_owner
from tplab.torch.data.pieces import (
    Gather,
    Reduce,
    gather_rows,
    held_in,
    held_of,
    message_of,
    pieces_of,
    reduce_rows,
    reduced_row,
    row_of,
    wholes_in,
)
from tplab.torch.layers.parameters import cuts_of
from tplab.torch.private import storage_id
from tplab.torch.ranks.rank import this_rank
from tplab.torch.watching.memory import count_as

Params = Iterable[Tensor] | Iterable[dict[str, Any]]
"""The arguments of torch's optimizers: parameters, or groups of them with options."""


class ShardedOptimizer(Optimizer):
    """One of torch's optimizers, over this rank's pieces of the parameters.

    Use it like any other: `step()`, `zero_grad()`, `param_groups`, `state_dict()`, a learning rate scheduler. Its
    parameters are the pieces [n], in the given groups and order, and so are its states.

    reduce_gradients()   the first part of `step`: afterwards each piece's `.grad` is this rank's part of the reduced
                         gradient, so that you can clip or inspect it, until `step` frees it. Call it once before each
                         step, on all ranks
    num_bytes()          what this rank keeps: (parameters, gradients, optimizer)
    """

    def __init__(self, make: Callable[[Any], Optimizer], params: Params, about: About):
        groups, seen = _groups(make, params), set[Tensor]()
        self.about, self.buckets = about, list[Bucket]()
        for group in groups:
            group["params"] = [p for p in dict.fromkeys(group["params"]) if p.requires_grad and p not in seen]
            seen.update(group["params"])
            made: dict[Tensor, nn.Parameter] = {}
            if (axis := group.pop("axis", None)) is not None:
                check_copies(this_rank().mesh, about.axis, axis, about.replicate_axis)
            for bucket in _buckets(group["params"], about, axis or about.axis):
                self.buckets.append(bucket)
                made.update(zip(bucket.parameters, bucket.shards))
            _check_cuts(group["params"], axis or about.axis, about.replicate_axis)
            group["params"] = [made[p] for p in group["params"]]
        self._wholes = seen  # kept alive here, not by the buckets
        self.inner = make(groups)
        self._is_reduced = self._has_all = False
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self._has_all = True
        self._share()

    def _share(self) -> None:
        """Share the inner optimizer's own attributes: a scheduler that changes one changes both."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError for parameters that come later: all are cut when the optimizer is made."""
        if self._has_all:
            raise RuntimeError(
                f"add_param_group: {len(self.param_groups)} groups were cut over the ranks when this optimizer was "
                "made, and nothing would cut or send the parameters of another; make a new optimizer of all groups"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Give each piece its part of the gradient, combined over the ranks; the whole gradient is freed."""
        for bucket in self.buckets:
            bucket.reduce()
            bucket.hand_over()
        self._is_reduced = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Reduce the gradients, step this rank's pieces, and gather the parameters. The gradients are freed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._is_reduced:
            self.reduce_gradients()
        for bucket in self.buckets:
            bucket.follow()
        self.inner.step()
        self.inner.zero_grad()  # model.zero_grad() does not reach the pieces
        self._is_reduced = False
        for bucket in self.buckets:
            bucket.gather()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients of the parameters and of the pieces."""
        self.inner.zero_grad(set_to_none)
        self._is_reduced = False
        for bucket in self.buckets:
            bucket.forget()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: states have the shapes of its pieces. "master" has the pieces that are copies of the
        parameters, under the same numbers as "state"."""
        copies = {piece for bucket in self.buckets for piece, _ in bucket.copies()}
        master = {number: piece.detach() for number, piece in enumerate(self._pieces()) if piece in copies}
        return self.inner.state_dict() | ({"master": master} if master else {})

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on this rank. Missing copies are made from the parameters: load those
        first."""
        self.inner.load_state_dict(state_dict)
        self._share()
        numbers = {piece: number for number, piece in enumerate(self._pieces())}
        master = state_dict.get("master", {})
        for bucket in self.buckets:
            for piece, held in bucket.copies():
                piece.copy_(master.get(numbers[piece], held))

    def _pieces(self) -> Iterable[Tensor]:
        """The pieces, in the order in which states are numbered."""
        return (piece for group in self.param_groups for piece in group["params"])

    def num_bytes(self) -> tuple[int, int, int]:
        """What this rank keeps, in bytes of real tensors: parameters, gradients, optimizer."""
        gradients = [p.grad for p in self._wholes] + [bucket.row for bucket in self.buckets]
        copies = [piece for bucket in self.buckets for piece, _ in bucket.copies()]
        states = [x for state in self.inner.state.values() for x in state.values() if isinstance(x, Tensor) and x.dim()]
        kinds: tuple[Iterable[Tensor | None], ...] = self._wholes, gradients, [*copies, *states]
        return tuple(sum(x.nbytes for x in kind if x is not None) for kind in kinds)  # type: ignore[return-value]


@dataclass(frozen=True)
class About:
    """How pieces are made and what they send: the options of `shard_optimizer` and `shard_gradients`."""

    axis: Axis
    op: str
    replicate_axis: Axis | None
    master_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    bucket_bytes: float | None
    is_reduced: bool
    gather: Gather | None
    reduce: Reduce | None

    def __post_init__(self) -> None:
        data_axes(this_rank().mesh, self.axis, self.replicate_axis)
        one_of("op", self.op, OPS)


class Bucket(Owner):
    """Some parameters of one dtype whose gradients, and later whose values, travel in one message.

    axis     along which ranks hold copies of them: `about.axis`, or a part of it
    shards   this rank's piece of each: memory of the parameter itself, or a copy in the master dtype
    row      this rank's part of the reduced gradient, until the optimizer gets it; None if there is none yet

    It does not keep the parameters alive, because their hooks may keep the bucket: see `_Leaving` in `shard_gradients`.
    """

    def __init__(self, parameters: Sequence[Tensor], about: About, axis: Axis):
        self._parameters, self.about, self.axis = [ref(p) for p in parameters], about, axis
        self.pieces, self.index = pieces_of(parameters, axis)
        self.dtype = parameters[0].dtype
        master = about.master_dtype or self.dtype
        held = held_of(self.pieces, self.index, parameters)
        self.shards = [nn.Parameter(piece if piece.dtype == master else piece.to(master)) for piece in held]
        for parameter, shard in zip(parameters, self.shards):
            note_owner(parameter, shard, self, axis)
        count_as("optimizer", [piece for piece, _ in self.copies()])
        self.row: Tensor | None = None
        self._handle: Handle | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """Its parameters: all of them, while the optimizer exists."""
        return [parameter for held in self._parameters if (parameter := held()) is not None]

    @property
    def has_taken(self) -> bool:
        return self.row is not None or self._handle is not None

    @property
    def takes_whole(self) -> bool:
        return self.about.is_reduced

    def begin(self) -> None:
        """Start combining the gradients over the ranks, and free them. A parameter that is gone counts as zeros."""
        grads = [getattr(held(), "grad", None) for held in self._parameters]
        about, dtype = self.about, self.about.reduce_dtype or self.dtype
        message = message_of(self.pieces, grads, self.shards[0], dtype)
        count_as("gradients", message)
        self._let_go()
        self._handle = (about.reduce or reduce_rows)(message, self.axis, about.op)

    def end(self) -> None:
        """Wait for what `begin` started, and add this rank's part to its row."""
        if self._handle is not None:
            row = reduced_row(self._handle, self.about.replicate_axis, self.about.op)
            if self.about.op == "mean" and self.axis != self.about.axis:  # ranks that hold other pieces count too
                row = row * (axis_size(self.axis) / axis_size(self.about.axis))
            self.row = row if self.row is None else self.row + row
            count_as("gradients", self.row)
            self._handle = None

    def reduce(self) -> None:
        """Combine the gradients; if they have already been combined, take this rank's part."""
        if not self.about.is_reduced:
            self.begin()
            self.end()
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.row = row_of(self.pieces, held_of(self.pieces, self.index, grads), self.dtype)
        count_as("gradients", self.row)
        self._let_go()

    def hand_over(self) -> None:
        """Give the pieces their gradients, in their own dtype."""
        assert self.row is not None
        for shard, grad in zip(self.shards, held_in(self.pieces, self.index, self.row)):
            grad = grad.to(shard.dtype)
            shard.grad = grad if shard.grad is None else shard.grad + grad
        self.row = None

    def follow(self) -> None:
        """Take what the program has written to the parameters; other elements keep the bits of their master copy."""
        for piece, held in self.copies():
            written = held != piece.to(held.dtype)
            piece.copy_(torch.where(written, held.to(piece.dtype), piece))

    def gather(self) -> None:
        """Give every rank the pieces of all others, in the parameters' own dtype."""
        row = row_of(self.pieces, self.shards, self.dtype)
        message = (self.about.gather or gather_rows)(row, self.axis).read()
        wholes = wholes_in(self.pieces, message)
        count_as("gathered", [message, *wholes])
        for parameter, whole in zip(self.parameters, wholes):
            parameter.copy_(whole)

    def copies(self) -> Iterable[tuple[Tensor, Tensor]]:
        """The pieces that have their own memory, each with the corresponding part of its parameter."""
        held = held_of(self.pieces, self.index, self.parameters)
        for piece, own, parameter in zip(self.shards, held, self.parameters):
            if storage_id(piece.untyped_storage()) != storage_id(parameter.untyped_storage()):
                yield piece, own

    def forget(self) -> None:
        self.row = self._handle = None
        self._let_go()

    def _let_go(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _groups(make: Any, params: Params) -> list[dict[str, Any]]:
    _check_kind(make, callable(make))
    _check_kind(params, isinstance(params, Iterable) and not isinstance(params, Tensor))
    listed: list[Any] = list(params)
    if not listed:
        raise ValueError("there are no parameters to share; give model.parameters(), or groups of them")
    groups = [dict(group) for group in listed] if isinstance(listed[0], Mapping) else [{"params": listed}]
    for group in groups:
        given = group["params"]
        group["params"] = [given] if isinstance(given, Tensor) else list(given)
        for parameter in group["params"]:
            _check_kind(parameter, isinstance(parameter, Tensor))
    return groups


def _check_kind(given: Any, is_right: bool) -> None:
    if not is_right:
        raise TypeError(
            "a sharded optimizer takes an optimizer class, and parameters or groups of them, as in "
            f"shard_optimizer(torch.optim.Adam, model.parameters()); it was given an object of type "
            f"{type(given).__name__}"
        )


def _check_cuts(parameters: Sequence[Tensor], axis: Axis, replicate_axis: Axis | None) -> None:
    """Raise ValueError if ranks that would share a parameter hold different pieces of it, as of experts."""
    mesh = this_rank().mesh
    names = [name for axes in (axis, replicate_axis) if axes for name in mesh.names(axes) if mesh.axis_size(name) > 1]
    for parameter in parameters:
        if cut := [name for name in names if name in cuts_of(parameter)]:
            raise ValueError(
                f"a parameter {tuple(parameter.shape)} is cut along {cut[0]!r}: its ranks hold different pieces, not "
                'copies; give such parameters a group of their own, {"params": [...], "axis": the axes of their copies}'
            )


def _buckets(parameters: Sequence[Tensor], about: About, axis: Axis) -> Iterable[Bucket]:
    """Buckets from the last parameter to the first, in the order in which the backward pass reaches them."""
    gradients = [Gradient(p.numel(), p.element_size(), (p.dtype, p.device)) for p in parameters]
    for bucket in buckets_of(gradients, about.bucket_bytes):
        yield Bucket([parameters[index] for index in bucket.indices], about, axis)


# --- stage 1 ----------------------------------------------------------------------------------------------------------


def shard_optimizer(
    optimizer: Callable[[Any], Optimizer],
    params: Params,
    axis: Axis = "dp",
    *,
    op: str = "mean",
    replicate_axis: Axis | None = None,
    master_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    bucket_bytes: float | None = BUCKET_BYTES,
    is_reduced: bool = False,
    gather: Gather | None = None,
    reduce: Reduce | None = None,
) -> ShardedOptimizer:
    """Divide the states of an optimizer over the R ranks of `axis`, which hold copies of the model (ZeRO stage 1).

        optimizer = shard_optimizer(partial(torch.optim.AdamW, lr=1e-3), model.parameters(), "dp")
        model.loss(x, y).backward()        # each rank's own gradient, from its own part of the batch
        optimizer.step()

    `step` combines the gradients, so that each rank gets its piece [ceil(n/R)] of each parameter's gradient [n]; it
    steps the pieces; and it gathers them, so that every rank has the whole parameters again.

    optimizer       makes the optimizer of a rank's pieces: a class of torch.optim, or a function. Its update of an
                    element may depend only on that element, as in SGD, Adam or AdamW: it never sees a whole matrix
    params          as for the optimizer: model.parameters(), or groups with options. Frozen parameters are left out; a
                    tied one counts once. A parameter without a gradient is stepped with zeros. For experts that are cut
                    along some of the axes, a group's own "axis" names the others, whose ranks hold copies; then `axis`
                    names all axes, and replicate_axis none
    op              how gradients are combined: "mean" or "sum"
    replicate_axis  the axis along which pieces have copies: gradients are combined along it too
    master_dtype    the dtype of the pieces: float32 keeps an exact copy of bfloat16 parameters
    reduce_dtype    the dtype in which gradients travel; by default, their own
    bucket_bytes    the most that travels in one message; None: each parameter by itself
    is_reduced      whether the gradients have already been combined (`average_gradients`, `data_parallel`): then
                    nothing is sent for them
    gather, reduce  how to send: functions as in `tplab.torch.data.pieces`, or None for all_gather and reduce_scatter

    states    4 + 12/R bytes per parameter with Adam and master_dtype=float32, where R copies take 16
    sent      reduce_scatter and all_gather: 2(R-1)/R of the parameters by each rank, the same as an all_reduce of the
              gradients. With is_reduced, that all_reduce comes first, and it is 3(R-1)/R in total
    Rajbhandari et al. 2020, section 5.1.
    """
    about = About(axis, op, replicate_axis, master_dtype, reduce_dtype, bucket_bytes, is_reduced, gather, reduce)
    return ShardedOptimizer(optimizer, params, about)
