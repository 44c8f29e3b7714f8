"""Tensors that are not contiguous, as gloo takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from tplab.errors import ShapeError
from tplab.torch.private import no_dispatch
from tplab.torch.ranks.rank import current_rank_or_none


def in_memory(op: str, x: Tensor, elementwise: bool = False) -> Tensor:
    """x as gloo reads and writes it in this collective: as many elements as it has, as its memory has them, whatever
    its strides say. Where that may be another order than the program's, it is a warning.

    elementwise   whether the order makes no difference, as long as it is the same on all ranks
    Raises ShapeError where memory ends before.
    """
    if x.layout is not torch.strided or x.is_contiguous():
        return x
    rank, strides = current_rank_or_none(), torch.empty(x.shape, device="meta").stride()
    about = f"{op}: the elements of a tensor {list(x.shape)} with strides {x.stride()} are not in the order of memory"
    if (x.storage_offset() + x.numel()) * x.element_size() > x.untyped_storage().nbytes():
        raise ShapeError(f"{about}, which ends before the last one; pass x.contiguous()")
    if rank is not None and not (elementwise and _fills_its_memory(x)):
        rank.lines.warning(f"{about}. gloo takes them as they are there, nccl refuses them; pass x.contiguous()")()
    with no_dispatch():
        return x.detach().as_strided(x.shape, strides)


def check_contiguous(op: str, x: Tensor) -> None:
    """Raise ValueError for a tensor that gloo refuses."""
    if x.layout is torch.strided and not x.is_contiguous():
        raise ValueError(
            f"{op}: a tensor {list(x.shape)} with strides {x.stride()} is not contiguous, and gloo refuses it; send "
            "x.contiguous(), and receive into a contiguous tensor"
        )


def _fills_its_memory(x: Tensor) -> bool:
    """Whether its elements are all that is between its first and its last one."""
    expected = 1
    for size, stride in sorted(zip(x.shape, x.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
