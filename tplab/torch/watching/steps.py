"""Torch operations as steps: what each does to the dims of its operands, and in which of them it is linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tplab.checking.steps import Dims, How, Step
from tplab.torch.ranks.meter import tensors_in, traits_of

Operands = Sequence[tuple[int, Tensor]]
"""The tensors that an operation reads, each with its position among the arguments."""


def steps_of(func: Any, args: Any, kwargs: Any, operands: Operands, result: Tensor, place: int) -> list[Step]:
    """The steps of an operation that make `result`, which has this position among all that it returns.

    Each step but the first takes the result of the one before it, followed by its own inputs: positions in `operands`.
    """
    name = func.overloadpacket.__name__
    plain = name.rstrip("_") if not name.startswith("__") else name
    if not operands:
        is_zero = plain in ("zeros", "zeros_like", "new_zeros", "zero") or (
            plain in ("fill", "full", "full_like", "new_full") and 0 in args[1:3]
        )
        return [Step(plain, "made", shape=tuple(result.shape), is_zero=is_zero)]
    make = _Made(plain, args, operands, result, place)
    if plain in _RULES:
        return _RULES[plain](make)
    if torch.Tag.pointwise in func.tags or traits_of(func).is_copy:
        return make.pointwise()
    return [make.step("unknown")]


def operands_of(func: Any, args: Any, kwargs: dict[str, Any]) -> list[tuple[int, Tensor]]:
    """The tensors that an operation reads."""
    unread = traits_of(func).unread
    found = [(place, x) for place, arg in enumerate(args) if place not in unread for x in tensors_in(arg)]
    return found + [(-1, x) for key, arg in kwargs.items() if key not in unread for x in tensors_in(arg)]


def _called(name: str) -> str:
    """The common name of an ATen operation: "_softmax" and "native_batch_norm" are softmax and batch_norm."""
    for ending in ("_forward", "_legit", "_with_update"):
        name = name.removesuffix(ending)
    return name.lstrip("_").removeprefix("native_")


class _Made:
    """An operation, its operands and its result, with the means to describe them as steps."""

    def __init__(self, name: str, args: Any, operands: Operands, result: Tensor, place: int):
        self.name, self.args, self.operands, self.result, self.place = name, args, operands, result, place

    def arg(self, place: int, default: Any = None) -> Any:
        return self.args[place] if place < len(self.args) else default

    def dim(self, place: int, of: Tensor | None = None, default: int = 0) -> int:
        ndim = self.x.dim() if of is None else of.dim()
        return int(self.arg(place, default)) % max(ndim, 1)

    @property
    def x(self) -> Tensor:
        return self.operands[0][1]

    def step(self, how: How, *dims: Dims, takes: Sequence[int] | None = None, **about: Any) -> Step:
        """A step that takes all operands, or those at these positions in `operands`."""
        takes = range(len(self.operands)) if takes is None else takes
        shapes = tuple(tuple(self.operands[index][1].shape) for index in takes)
        about = {"shape": tuple(self.result.shape)} | about
        called = "square" if self.name == "pow" and self.arg(1) == 2 else _called(self.name)
        return Step(called, how, tuple(takes), shapes=shapes, dims=dims, **about)

    def right(self, x: Tensor) -> Dims:
        """The dims of an operand that is broadcast to the result."""
        return tuple(place if place >= 0 else None for place in range(self.result.dim() - x.dim(), self.result.dim()))

    def pointwise(self) -> list[Step]:
        how: How = "other"
        name = self.name
        if self.result.dtype is torch.bool:
            how = "unknown"
        elif name in _LINEAR:
            how = "linear"
        elif name == "mul":
            how = "product"
        elif name == "div" or name.endswith("_backward"):
            how = "first"
        others = [arg for arg in self.args[1:2] if name in ("mul", "div", "add", "sub", "rsub")]
        numbers = [one for one in others if not isinstance(one, Tensor) or (one.numel() == 1 < self.result.numel())]
        dims = [self.right(x) for _, x in self.operands]
        adds = name in ("add", "sub", "rsub") and any(not isinstance(one, Tensor) and one != 0 for one in numbers)
        return [self.step(how, *dims, factor=name in ("mul", "div") and bool(numbers), adds=adds)]


def _kept(make: _Made, gone: Callable[[int], bool], **about: Any) -> list[Step]:
    """A step that keeps the dims in their order, except those that are gone."""
    left = iter(range(make.result.dim()))
    return [make.step("linear", tuple(None if gone(dim) else next(left, None) for dim in range(make.x.dim())), **about)]


def _product(make: _Made) -> list[Step]:
    """a @ b, or bias + a @ b as two steps."""
    dims, same = _PRODUCTS[make.name], tuple(range(make.result.dim()))
    if len(make.operands) == len(dims):
        return [make.step("product", *dims, over="sum")]
    first = make.step("product", *dims, takes=(1, 2), over="sum")
    return [first, make.step("linear", same, make.right(make.x), takes=(0,))]


_ROWS, _BATCHES = ((0, None), (None, 1)), ((0, 1, None), (0, None, 2))
_PRODUCTS: dict[str, tuple[Dims, Dims]] = {
    "mm": _ROWS, "addmm": _ROWS, "bmm": _BATCHES, "baddbmm": _BATCHES, "mv": ((0, None), (None,)),
    "dot": ((None,), (None,)),
}  # fmt: skip


def _permuted(make: _Made) -> list[Step]:
    ndim = make.x.dim()
    order = list(range(ndim))
    if make.name == "permute":
        order = [dim % ndim for dim in make.args[1]]
    elif ndim > 1:
        a, b = (make.dim(1), make.dim(2)) if make.name == "transpose" else (0, 1)
        order[a], order[b] = order[b], order[a]
    return [make.step("linear", tuple(order.index(dim) for dim in range(ndim)))]


def _unsqueezed(make: _Made) -> list[Step]:
    at = make.dim(1, make.result)
    return [make.step("linear", tuple(dim + (dim >= at) for dim in range(make.x.dim())))]


def _squeezed(make: _Made) -> list[Step]:
    given, ndim = make.arg(1), make.x.dim()
    dims = range(ndim) if given is None else [d % max(ndim, 1) for d in (given if isinstance(given, list) else [given])]
    return _kept(make, lambda dim: dim in dims and make.x.shape[dim] == 1)


def _selected(make: _Made) -> list[Step]:
    at = make.dim(1)
    return _kept(make, lambda dim: dim == at)


def _sliced(make: _Made) -> list[Step]:
    same = make.x.dim() == make.result.dim()
    changed = [dim for dim in range(make.x.dim()) if same and make.x.shape[dim] != make.result.shape[dim]]
    dims = tuple(None if dim in changed or not same else dim for dim in range(make.x.dim()))
    return [make.step("linear", dims, narrows=changed[0] if len(changed) == 1 else None)]


def _split(make: _Made) -> list[Step]:
    """Each part has some of every rank's piece, as do q, k and v of a fused product."""
    if make.name == "unbind":
        return _selected(make)
    at = make.dim(2)
    return [make.step("linear", tuple(range(make.x.dim())), narrows=at)]


def _joined(make: _Made) -> list[Step]:
    at = make.dim(1, make.result) if make.name == "stack" else make.result.dim()
    return [make.step("linear", *[tuple(d + (d >= at) for d in range(x.dim())) for _, x in make.operands])]


def _reduced(how: How, over: str) -> Callable[[_Made], list[Step]]:
    def steps(make: _Made) -> list[Step]:
        x, place = make.x, 2 if make.name == "linalg_vector_norm" else 1
        given = make.arg(place)
        ndim = max(x.dim(), 1)
        is_all = given is None or given == [] or not isinstance(given, int | list | tuple)
        dims = [given] if isinstance(given, int) else list(given or ())
        gone = range(ndim) if is_all else {dim % ndim for dim in dims}
        keeps = x.dim() == make.result.dim()
        left = iter(range(make.result.dim()))
        to = tuple(None if dim in gone else (dim if keeps else next(left, None)) for dim in range(x.dim()))
        return [make.step(how, to, takes=(0,), over=over)]

    return steps


def _softmax(make: _Made) -> list[Step]:
    return [make.step("other", tuple(range(make.x.dim())), mixes=(make.dim(1),))]


def _norm(make: _Made) -> list[Step]:
    last = make.x.dim() - len(make.args[1])
    if make.place:
        dims = tuple(dim if dim < last else None for dim in range(make.x.dim()))
        return [make.step("other", dims, takes=(0,))]
    dims = [tuple(range(make.x.dim())), *(make.right(x) for _, x in make.operands[1:])]
    return [make.step("other", *dims, mixes=tuple(range(last, make.x.dim())))]


def _batch_norm(make: _Made) -> list[Step]:
    """x [B, C, ...]. In training, the statistics are over all dims but C; otherwise they are given, as running ones."""
    flags = [arg for arg in make.args if isinstance(arg, bool)]
    trains = flags[0] if flags else make.name == "_batch_norm_with_update"
    if make.place:
        return [make.step("other", tuple(0 if dim == 1 else None for dim in range(make.x.dim())), takes=(0,))]
    wide = [tuple(range(make.x.dim())), *((1,) for _ in make.operands[1:])]
    mixes = tuple(dim for dim in range(make.x.dim()) if dim != 1) if trains else ()
    return [make.step("other", *wide, mixes=mixes)]


def _norm_backward(make: _Made) -> list[Step]:
    """For x: like x. For weight and bias: sums over all dims before theirs."""
    if not make.place:
        return [make.step("first", *(make.right(x) for _, x in make.operands))]
    before = make.x.dim() - make.result.dim()
    dims = tuple(dim - before if dim >= before else None for dim in range(make.x.dim()))
    takes = [index for index, (_, x) in enumerate(make.operands) if x.dim() == make.x.dim()]
    return [make.step("first", *[dims] * len(takes), takes=takes, over="sum")]


def _embedding(make: _Made) -> list[Step]:
    last = make.result.dim() - 1
    return [make.step("first", (None, last), tuple(range(last)))]


def _embedding_backward(make: _Made) -> list[Step]:
    grad, index = (x for _, x in make.operands[:2])
    return [make.step("first", (*(None,) * (grad.dim() - 1), 1), (None,) * index.dim(), takes=(0, 1), over="sum")]


def _gathered(make: _Made) -> list[Step]:
    at = make.dim(1)
    dims = tuple(dim if dim != at else None for dim in range(make.x.dim()))
    return [make.step("first", dims, tuple(range(make.result.dim())), takes=(0, 1))]


_REDUCTIONS = ("none", "mean", "sum")


def _nll(make: _Made) -> list[Step]:
    """The scores of the targets, then their mean."""
    x, how = make.x, _REDUCTIONS[make.arg(3, 1)]
    picked = (0, None) if x.dim() == 2 else (None,)
    own = (0,) if x.dim() == 2 else ()
    one = make.step("first", picked, own, takes=(0, 1), shape=tuple(x.shape[:1]) if own else ())
    if how == "none":
        return [one]
    return [one, make.step("linear", tuple(None for _ in own), takes=(), over="sum" if make.place else how)]


def _distance(make: _Made) -> list[Step]:
    """A function of each element of two tensors, then its mean."""
    x, how = make.x, _REDUCTIONS[make.arg(2, 1)]
    shape = torch.broadcast_shapes(x.shape, make.operands[1][1].shape)
    wide = [tuple(range(len(shape) - one.dim(), len(shape))) for _, one in make.operands[:2]]
    one = make.step("other", *wide, takes=(0, 1), shape=tuple(shape))
    return [one] if how == "none" else [one, make.step("linear", (None,) * len(shape), takes=(), over=how)]


def _attention(make: _Made) -> list[Step]:
    """q, k and v [B, H, S, E]: batch and heads stay; the positions of the result are those of q, and E is that of v."""
    if make.place:
        return [make.step("other", (0, 1, 2, None), (0, 1, None, None), takes=(0, 1))]
    return [make.step("other", (0, 1, 2, None), (0, 1, None, None), (0, 1, None, 3), takes=(0, 1, 2))]


def _attention_backward(make: _Made) -> list[Step]:
    dims = [tuple(dim if dim < 2 else None for dim in range(x.dim())) for _, x in make.operands]
    return [make.step("first", *dims)]


def _where(make: _Made) -> list[Step]:
    numbers = [arg for arg in make.args[1:] if not isinstance(arg, Tensor)]
    dims = [make.right(x) for _, x in make.operands]
    if make.name == "masked_fill":
        return [make.step("product", *dims[:2], takes=(0, 1), adds=any(one != 0 for one in numbers))]
    first = make.step("product", *dims[:2], takes=(0, 1))
    return [first, make.step("linear", tuple(range(make.result.dim())), *dims[2:], takes=range(2, len(dims)))]


def _grown(make: _Made) -> list[Step]:
    """The gradient of the tensor that a slice, or an element of a dim, was taken from."""
    at = make.dim(2, make.result)
    if make.name == "select_backward":
        return [make.step("linear", tuple(dim + (dim >= at) for dim in range(make.x.dim())))]
    return [make.step("linear", tuple(None if dim == at else dim for dim in range(make.x.dim())))]


def _reshape(make: _Made) -> list[Step]:
    return [make.step("reshape")]


def _right(make: _Made) -> list[Step]:
    return [make.step("linear", make.right(make.x), takes=(0,))]


_LINEAR = {
    "add", "sub", "rsub", "neg", "clone", "copy", "_to_copy", "detach", "alias", "lift_fresh", "contiguous", "tril",
    "triu", "flip", "roll", "positive", "expand_as",
}  # fmt: skip

_RULES: dict[str, Callable[[_Made], list[Step]]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten"), _reshape),
    **dict.fromkeys(("t", "transpose", "permute", "numpy_T"), _permuted),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unsafe_split", "unbind", "tensor_split"), _split),
    **dict.fromkeys(("slice", "narrow", "constant_pad_nd"), _sliced),
    **dict.fromkeys(("cat", "stack", "concatenate"), _joined),
    **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "var_mean", "prod", "logsumexp",
                     "linalg_vector_norm", "norm"), _reduced("other", "other")),
    **dict.fromkeys(("_softmax", "_log_softmax", "softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _norm),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update",
                     "_batch_norm_no_update"), _batch_norm),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _norm_backward),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), _distance),
    **dict.fromkeys(("where", "masked_fill"), _where),
    **dict.fromkeys(("slice_backward", "select_backward"), _grown),
    **dict.fromkeys(("clone", "detach", "alias", "lift_fresh", "expand", "_to_copy", "copy"), _right),
    **dict.fromkeys(_PRODUCTS, _product),
    "unsqueeze": _unsqueezed, "squeeze": _squeezed, "select": _selected,
    "sum": _reduced("linear", "sum"), "mean": _reduced("linear", "mean"),
    "embedding": _embedding, "embedding_dense_backward": _embedding_backward, "gather": _gathered,
    "nll_loss_forward": _nll,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}  # fmt: skip
