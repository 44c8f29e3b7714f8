"""Softmaxes of a model: their inputs, and whether rows of attention weights still add up to 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tplab.torch.checking.side import to_numpy

MOST_SOFTMAXES = 32


class Softmaxes(NamedTuple):
    """The input of each softmax of a model; and what rows of attention weights add up to, if not to 1."""

    scores: list[np.ndarray]
    row_sum: int


@torch.no_grad()
def softmaxes(model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Softmaxes:
    with _Watch() as watch:
        model(*inputs, **kwargs)
    return Softmaxes(watch.scores, watch.row_sum)


class _Watch(TorchFunctionMode):
    """Notes the inputs of softmaxes, and whether anything is multiplied by a softmax's weights whose rows add up to
    2, 3, .. instead of 1."""

    SOFTMAXES = {torch.softmax, F.softmax, Tensor.softmax}
    PRODUCTS = {torch.matmul, torch.bmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[np.ndarray] = []
        self.row_sum = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if len(self.scores) < MOST_SOFTMAXES:
            if func in self.SOFTMAXES:
                self.scores.append(to_numpy(args[0] if args else kwargs["input"]))
            elif func is F.scaled_dot_product_attention:
                self.scores.append(to_numpy(_scores(*args, **kwargs)))
        for x in args if func in self.PRODUCTS and not self.row_sum else ():
            if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 and x.numel() and bool((x >= 0).all()):
                sums = x.sum(-1)
                count = round(float(sums.flatten()[0]))
                if count > 1 and bool(((sums - count).abs() < 1e-3 * count).all()) and x.shape[-1] > 1:
                    self.row_sum = count
        return func(*args, **kwargs)


def _scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The input of the softmax inside torch's scaled_dot_product_attention."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    found = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).tril()
    if attn_mask is None:
        return found
    return found.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else found + attn_mask
