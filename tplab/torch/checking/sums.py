"""The same program with its sums in another order: the change shows how much rounding can change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tplab.torch.private import DispatchMode

aten = torch.ops.aten


class OtherSums(DispatchMode):
    """A mode in which matmuls add up their products in `parts` parts, each of which is rounded to the tensors' dtype,
    as if that many ranks shared the work."""

    def __init__(self, parts: int):
        super().__init__()
        self.parts = parts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: operations on its local tensors come here again
        if func is aten.mm.default or func is aten.bmm.default:
            return self._product(func, *args)
        if func is aten.addmm.default and not kwargs:
            return args[0] + self._product(aten.mm.default, *args[1:])
        if func is aten.sum.default and args[0].is_floating_point() and args[0].numel() > self.parts:
            return sum(func(part, **kwargs) for part in reversed(args[0].reshape(-1).tensor_split(self.parts)))
        return func(*args, **kwargs)

    def _product(self, func: Any, a: Tensor, b: Tensor) -> Tensor:
        """a [.., N, K]   b [.., K, M]   ->   [.., N, M], the sum over K in parts, the last part first."""
        if not a.is_floating_point() or a.shape[-1] < 2:
            return func(a, b)
        pairs = zip(a.tensor_split(self.parts, -1), b.tensor_split(self.parts, -2))
        products = [func(left, right) for left, right in pairs if left.shape[-1]]
        found = products[-1]
        for product in reversed(products[:-1]):
            found = found + product
        return found
