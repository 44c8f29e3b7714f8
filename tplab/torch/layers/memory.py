"""What autograd keeps from the forward to the backward pass, and how to keep less under sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tplab.cost.activations import SavedTensor, SavedTensors
from tplab.torch.comm.autograd import do
from tplab.torch.private import base_of, saved_hooks
from tplab.torch.ranks.rank import Call


def saved_tensors(fn: Callable[..., Any], *args: Any) -> SavedTensors:
    """What fn(*args) keeps for its backward pass: each piece of memory once, without nn.Parameters.

        saved_tensors(model, ids).bytes      # inside a rank's program: what this rank keeps

    This runs the forward pass, then frees what it kept.
    """
    kept: dict[int, tuple[SavedTensor, Tensor]] = {}

    def pack(x: Tensor) -> Tensor:
        storage, alone = x.untyped_storage(), x.detach()  # with its own output, the graph would keep itself alive
        if not isinstance(_whole(x), nn.Parameter):
            about = SavedTensor(tuple(x.shape), str(x.dtype).removeprefix("torch."), storage.nbytes(), _made_by(x))
            kept.setdefault(storage.data_ptr(), (about, alone))  # with x, so that no other tensor reuses its memory
        return alone

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
        fn(*args)
    return SavedTensors(about for about, _ in kept.values())


def gather_again(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, but of each result of `all_gather` inside it only this rank's piece is kept for the backward pass.

    Sequence parallelism gathers the inputs of attention and of the MLP. Kept whole, they are the only two tensors of a
    layer that are not divided by the number of ranks R. Gathered again for the backward pass, they are divided too.

    forward   as fn
    backward  as of fn, after one more all_gather for each of the forward pass: (R-1)/R of the whole
    Korthikanti et al. 2022, section 4.2.2.
    """

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        pieces: dict[Any, _Regathered] = {}

        def find(x: Tensor, outer: Hooks) -> tuple[_Regathered, int, int] | None:
            whole = _whole(x)
            exchange = getattr(whole.grad_fn, "exchange", None)
            if exchange is None or exchange.call.op != "all_gather" or not whole.is_contiguous():
                return None
            if exchange not in pieces:
                pieces[exchange] = _Regathered(exchange.call, exchange.sizes, whole.detach(), outer)
            return pieces[exchange], 0, int(x.storage_offset() - whole.storage_offset())

        with made_again(find):
            return fn(*args, **kwargs)

    return wrapped


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What autograd calls to save a tensor, and to have it back."""


class Again:
    """Tensors that are not kept for the backward pass: made again when they are first needed there, and freed after
    their last use. `num_kept` counts how often autograd would have saved one of them."""

    num_kept = num_served = 0
    wholes: list[Tensor] | None = None

    def make(self) -> list[Tensor]:
        raise NotImplementedError

    def again(self) -> list[Tensor]:
        if self.wholes is None:
            with torch.no_grad():
                self.wholes = self.make()
        wholes = self.wholes
        self.num_served += 1
        if self.num_served % self.num_kept == 0:
            self.wholes = None
        return wholes


class _Kept(NamedTuple):
    """What is kept of a tensor, or of a view of it, that can be made again: its place among what `source` makes."""

    source: Again
    place: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def made_again(find: Callable[[Tensor, Hooks], tuple[Again, int, int] | None]) -> saved_tensors_hooks:
    """Hooks under which autograd keeps only how tensors are used that can be made again.

    find   (a tensor, outer hooks) -> what makes it again, its place among what this makes, and where it begins there.
           Only the innermost hooks are called: these pass on to the outer ones
    """
    outer: Hooks = saved_hooks(True) or (lambda x: x, lambda x: x)

    def pack(x: Tensor) -> Any:
        found = find(x, outer)
        if found is None:
            return outer[0](x)
        source, place, offset = found
        source.num_kept += 1
        return _Kept(source, place, x.shape, x.stride(), offset)

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, _Kept):
            return kept.source.again()[kept.place].as_strided(kept.shape, kept.stride, kept.offset)
        return outer[1](kept)

    return saved_tensors_hooks(pack, unpack)


class _Regathered(Again):
    """This rank's piece of a gathered tensor."""

    def __init__(self, call: Call, sizes: tuple[int, ...], whole: Tensor, outer: Hooks):
        (dim,), index = call.params, call.place.index
        piece = whole.narrow(dim, sum(sizes[:index]), sizes[index]).clone(memory_format=torch.contiguous_format)
        self.call, self.kept, self.unpack = call, outer[0](piece), outer[1]

    def make(self) -> list[Tensor]:
        return [do(self.call, self.unpack(self.kept)).contiguous()]


def _whole(x: Tensor) -> Tensor:
    """The tensor that x is a view of, or x itself."""
    base = base_of(x)
    return x if base is None else base


_VIEWS = ("View", "UnsafeView", "Transpose", "T", "Permute", "Unsqueeze", "Squeeze", "Expand", "Reshape", "Varying")


def _made_by(x: Tensor) -> str:
    """The operation that computed x, by its name in the graph."""
    node = x.grad_fn
    if node is None:
        return "input" if x.requires_grad else "what has no gradient"
    while True:
        exchange = getattr(node, "exchange", None)
        name = exchange.call.op if exchange else type(node).__name__.split("Backward")[0].lstrip("_")
        if name == "AccumulateGrad":
            return "input"
        following = node.next_functions
        if name not in _VIEWS or not following or following[0][0] is None:
            return name
        node = following[0][0]
