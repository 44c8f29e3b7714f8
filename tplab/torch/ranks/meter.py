"""Follows a rank's tensor operations: what each one costs, and which ranks' data is in its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain, zip_longest
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from tplab.cost.attention import FusedAttention
from tplab.torch.private import base_of
from tplab.torch.ranks.attention import flex_attention_of
from tplab.torch.ranks.rank import Rank, this_rank
from tplab.torch.ranks.watcher import Listener, watcher

aten = torch.ops.aten


def mark_sum(total: Tensor, *operands: Tensor) -> Tensor:
    """Label `total`, which this rank has computed from `operands`, as a meter would. Returns `total`."""
    rank = this_rank()
    label = rank.labels.joined(operands, rank.rank)
    if label is not None and rank.labels.get(total) != label:
        rank.labels.set(total, label)
        if label.chunk >= 0 and all(rank.labels.get(x) is not label for x in operands):
            rank.added_to("add", total, label)
    return total


FOLLOWED = 5000
"""How many operations of a rank are followed only to know whose data their results hold: far more than a picture shows,
and few enough not to slow a long program down."""


class Cost(NamedTuple):
    """One tensor operation: FLOPs, bytes read and written, the output; for a matmul its (m, n, k, batch), and for fused
    attention its sizes, as `Cluster.compute_seconds` takes them."""

    op: str
    flops: int
    num_bytes: int
    output: Tensor
    matmul: tuple[int, int, int, int] | None = None
    attention: FusedAttention | None = None


class Meter(Listener):
    """Follows the operations of a rank while it is open.

    `on_cost` is called with the cost of each operation that moves data (views and allocations are free). Labels pass
    from operands to results: a result of received data keeps the first received operand's chunk. Its contributors are
    those of all operands, and this rank too if any operand is its own data. A tensor that is overwritten, or only
    provides a shape, is not an operand.

    num_left   how many more operations it follows if it follows them only for labels
    """

    def __init__(self, rank: Rank, on_cost: Callable[[Cost], None] | None):
        self.rank, self.on_cost = rank, on_cost
        self.is_open = False
        self.num_left = FOLLOWED

    def open(self) -> None:
        self.is_open = True
        watcher().add(self)

    def close(self) -> None:
        self.is_open, self.on_cost = False, None
        watcher().remove(self)

    def takes_whole(self, func: Any, args: Any) -> bool:
        """`flex_attention` is one kernel on a GPU's clock. Elsewhere it is its parts, like other such operations."""
        return self.on_cost is not None and self._attention(func, args) is not None

    def _attention(self, func: Any, args: Any) -> FusedAttention | None:
        return flex_attention_of(func.name(), args) if self.rank.fuses_attention else None

    def ended(self, func: Any, args: Any, kwargs: Any, result: Any, note: Any) -> None:
        if self.on_cost is None:
            self.num_left -= 1
            if self.num_left < 0:
                return
        rank, is_plain = self.rank, hasattr(func, "overloadpacket")
        kernel = None if is_plain else self._attention(func, args)
        traits = traits_of(func) if kernel is None else _KERNEL
        inputs = list(tensors_in(traits.read(args, kwargs)))
        outputs = list(tensors_in(result))
        if traits.writes and len(inputs) > 1 and inputs[0] is args[0]:  # y.addmm_(piece, w) is about the piece
            inputs = [*inputs[1:], inputs[0]]
        label = rank.labels.joined(inputs, rank.rank)
        is_sum = label is not None and label.chunk >= 0 and all(rank.labels.get(x) is not label for x in inputs)
        for output in outputs:
            if label is not None:
                has_part = bool(label.part) and output.numel() == inputs[0].numel()
                rank.labels.set(output, label if has_part or not label.part else label._replace(part=()))
                if is_sum and self.on_cost is None:
                    rank.added_to(func.overloadpacket.__name__, output, label)
            elif traits.writes:
                rank.labels.drop(output)
            if traits.writes and (whole := base_of(output)) is not None:  # part of `whole` has been written to
                joined = rank.labels.joined((whole, output), rank.rank)
                if joined is not None:
                    rank.labels.set(whole, joined)
        if self.on_cost is None or not outputs or traits.is_free:
            return
        if kernel is None:
            self.on_cost(_cost(func, traits, inputs, outputs, args, kwargs, result))
        else:
            num_bytes = sum(x.nbytes for x in (*inputs, *outputs))
            self.on_cost(Cost(func.name(), kernel.flops, num_bytes, outputs[0], attention=kernel))


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


# --- what kind of operation it is ------------------------------------------------------------------------------------


class _Traits(NamedTuple):
    """What an operation's name and schema say about it.

    is_free       whether it moves no data: it returns a view of its operand, or uninitialised memory
    is_copy       whether it computes nothing
    picks         whether it reads no more of its first operand than it returns
    writes        whether it writes to an argument
    unread        arguments that are overwritten or only provide a shape: by position and by name
    """

    is_free: bool
    is_copy: bool
    picks: bool
    writes: bool
    unread: frozenset[int | str]

    def read(self, args: Any, kwargs: dict[str, Any]) -> list[Any]:
        """The arguments that are read."""
        if not self.unread:
            return [*args, *kwargs.values()]
        return [value for name, value in chain(enumerate(args), kwargs.items()) if name not in self.unread]


_KERNEL = _Traits(False, False, False, False, frozenset())
"""An operation that takes functions, as one kernel that reads all its arguments."""
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "_unsafe_view"}
_FILLS = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "set_"}
_COPIES = {"clone", "copy", "copy_", "cat", "_to_copy", "stack", "fill", "fill_", "zero_", "repeat", "constant_pad_nd",
           "zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
           "new_full", "slice_backward", "select_backward", "flip", "roll", "tril", "triu"}  # fmt: skip
_PICKS = {"index", "index_select", "gather", "embedding", "take"}


@cache
def traits_of(func: Any) -> _Traits:
    schema, name = func._schema, func.overloadpacket.__name__
    is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
    written = [(place, arg) for place, arg in enumerate(schema.arguments) if arg.alias_info and arg.alias_info.is_write]
    unread = {key for place, arg in written if arg.is_out or name in _FILLS for key in (place, arg.name)}
    if name.endswith("_like") or name.startswith("new_"):
        unread |= {0, "self"}
    return _Traits(
        is_free=is_view or name in _ALLOCATIONS,
        is_copy=name in _COPIES or name in _PICKS,
        picks=name in _PICKS,
        writes=bool(written),
        unread=frozenset(unread),
    )


# --- what it costs ---------------------------------------------------------------------------------------------------


def _cost(
    func: Any, traits: _Traits, inputs: list[Tensor], outputs: list[Tensor], args: Any, kwargs: Any, result: Any
) -> Cost:
    packet = func.overloadpacket
    count, parts = flop_registry.get(_COUNTED_AS.get(packet, packet)), [*_dense((*inputs, *outputs))]
    attention, matmul = _attention(packet, args, kwargs), _matmul(packet, args, outputs)
    if attention is not None:
        flops = attention.flops
    elif packet.__name__ in _GROUPED:  # each element of one operand is used as often as if there were one group
        flops = 2 * _GROUPED[packet.__name__] * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1]
        flops *= args[0].shape[0] if args[0].dim() == args[1].dim() == 3 else 1
    elif count is not None:
        flops = int(count(*args, **kwargs, out_val=result))
    elif packet in _VECTORS:  # a multiplication and an addition for each element of the larger operand
        flops = 2 * max(x.numel() for x in inputs)
    elif traits.is_copy:
        flops = 0
    else:  # one operation for each element of the larger side: elementwise, or a reduction
        flops = max((x.numel() for x in parts), default=0)
    num_bytes = sum(x.nbytes for x in parts)
    if traits.picks and len(parts) == len(inputs) + len(outputs):
        num_bytes += min(0, outputs[0].nbytes - inputs[0].nbytes)
    elif packet in _SCORES:  # one score per row is read, or one number per row is written into zeros
        scores, target = args[_SCORES[packet] : _SCORES[packet] + 2]
        flops = target.numel()
        num_bytes += flops * scores.itemsize - scores.nbytes
    elif packet in _PUTS:
        is_sum = "add" in packet.__name__ or (len(args) > 3 and args[3] is True)
        touched = _num_put(packet, args)
        flops = touched if is_sum else 0
        read = [min(x.nbytes, touched * x.itemsize) if x is args[_PUTS[packet]] else x.nbytes for x in inputs[:-1]]
        num_bytes = sum(read) + (1 + is_sum) * touched * args[0].itemsize
    return Cost(packet.__name__, flops, num_bytes, outputs[0], matmul, attention)


def _dense(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors; of sparse ones, their indices and values."""
    for x in tensors:
        if x.layout is torch.strided:
            yield x
        else:
            yield from (getattr(x, name)() for name in _PARTS.get(x.layout, ()))


def _num_put(packet: Any, args: Any) -> int:
    """The number of elements that an indexed write stores."""
    whole, values = args[0], args[_PUTS[packet]]
    if _PUTS[packet] == 3:  # per index: a row in `index_`, an element in `scatter_`
        return args[2].numel() if packet in (aten.scatter_, aten.scatter_add_) else values.numel()
    indices = [x for x in args[1] if x is not None]
    if any(x.dtype is torch.bool for x in indices):  # as many as are true, which depends on the data
        return values.numel()
    kept = [size for size, x in zip_longest(whole.shape, args[1]) if x is None]
    return prod((*torch.broadcast_shapes(*(x.shape for x in indices)), *kept))


def _matmul(packet: Any, args: Any, outputs: list[Tensor]) -> tuple[int, int, int, int] | None:
    """[batch, m, k] @ [batch, k, n] as (m, n, k, batch). Groups count as equally large."""
    if packet.__name__ in _GROUPED:
        times, (a, b) = _GROUPED[packet.__name__], args[:2]
        groups = next((x.shape[0] for x in (a, b, outputs[0]) if x.dim() == 3), 1)
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        shared = {(2, 3): (-(-m // groups), n, k), (3, 2): (m, -(-n // groups), k), (2, 2): (m, n, -(-k // groups))}
        return (*shared.get((a.dim(), b.dim()), (m, n, k)), groups * times)
    first = _LEFT_OPERAND.get(packet)
    if first is None or len(args) < first + 2:
        return None
    left, right = args[first : first + 2]
    return left.shape[-2], right.shape[-1], left.shape[-1], left.shape[0] if left.dim() == 3 else 1


def _attention(packet: Any, args: Any, kwargs: dict[str, Any]) -> FusedAttention | None:
    """Its sizes. The two products take as long as if queries and values both had their average width."""
    place, first = _IS_CAUSAL.get(packet, (0, 0))
    if not place:
        return None
    q, k, v = args[first : first + 3]
    is_causal = args[place] if len(args) > place else kwargs.get("is_causal", False)
    (batch, heads, q_len, width), k_len = q.shape, k.shape[2]
    return FusedAttention(batch, heads, q_len, k_len, (width + v.shape[3]) // 2, is_causal, first == 1)


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
_LEFT_OPERAND = {
    aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.addmm_: 1, aten.baddbmm: 1, aten.baddbmm_: 1,
}  # fmt: skip
"""Matmuls, and the position of their left operand among the arguments."""
_GROUPED = {
    "_grouped_mm": 1, "_scaled_grouped_mm": 1, "grouped_mm_fallback": 1, "grouped_mm_fallback_backward": 2,
}  # fmt: skip
"""Grouped matmuls, in which groups of rows, columns or summands have a matrix each, as for experts: how many products
each one computes. The last two are those of transformers, where torch has none."""


_PUTS = {
    aten.index_put_: 2, aten._index_put_impl_: 2, aten.index_add_: 3, aten.index_copy_: 3, aten.scatter_: 3,
    aten.scatter_add_: 3,
}  # fmt: skip
"""Operations that write part of their first argument, and the position of the values among the arguments."""
_SCORES = {
    aten.nll_loss_forward: 0, aten.nll_loss2d_forward: 0, aten.nll_loss_backward: 1, aten.nll_loss2d_backward: 1,
}  # fmt: skip
"""Losses that read only the scores of targets, and the position of the scores among the arguments."""
_VECTORS = {aten.mv, aten.addmv, aten.dot, aten.vdot}
_COUNTED_AS = {
    aten.addmm_: aten.addmm,
    aten.baddbmm_: aten.baddbmm,
}
_IS_CAUSAL = {
    aten._scaled_dot_product_flash_attention: (4, 0),
    aten._scaled_dot_product_flash_attention_backward: (11, 1),
    aten._scaled_dot_product_flash_attention_for_cpu: (4, 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (7, 1),
    aten._scaled_dot_product_efficient_attention: (6, 0),
    aten._scaled_dot_product_efficient_attention_backward: (11, 1),
    aten._scaled_dot_product_cudnn_attention: (6, 0),
    aten._scaled_dot_product_cudnn_attention_backward: (14, 1),
}
"""Attention: the position of `is_causal` among the arguments, and that of the query, which the key follows."""
