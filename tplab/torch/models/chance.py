"""Random draws in the forward pass of a `transformers` model that is sharded: dropout masks, and layers to skip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tplab.mesh import Axis
from tplab.torch.layers.draws import next_generator
from tplab.torch.layers.dropout import dropout

DRAWS = (F.dropout, F.scaled_dot_product_attention, torch.rand)
"""The functions that models draw with: masks, also inside attention, and for LayerDrop one number per layer."""


class Chance(TorchFunctionMode):
    """Makes a model draw the same on all ranks outside the parallel regions, where every rank has the same tensors.

    data_axis   along which ranks have different data, and draw different numbers

    From a column's entrance to a row's exit, activations are sharded, and `is_inside`: each rank's generator draws.
    """

    def __init__(self, data_axis: Axis | None):
        super().__init__()
        self.data_axis, self.is_inside, self.depth = data_axis, False, 0

    def watch(self, model: nn.Module, names: list[str]) -> None:
        """Be active while these modules or any around them compute, also when a checkpoint computes them again."""
        parts = [name.split(".") for name in names]
        for name in sorted({".".join(one[:end]) for one in parts for end in range(len(one) + 1)}):
            model.get_submodule(name).register_forward_pre_hook(self._begin)
            model.get_submodule(name).register_forward_hook(self._end, always_call=True)

    def _begin(self, module: nn.Module, args: Any) -> None:
        if not self.depth:
            self.is_inside = False
            self.__enter__()
        self.depth += 1

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        self.depth -= 1
        if not self.depth:
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in DRAWS or self.is_inside:
            return func(*args, **kwargs)
        if func is F.dropout:
            return self._drop(*args, **kwargs)
        if func is F.scaled_dot_product_attention and not _dropout_of(*args, **kwargs):
            return func(*args, **kwargs)
        with torch.random.fork_rng():
            torch.manual_seed(next_generator(self.data_axis).initial_seed())
            return func(*args, **kwargs)

    def _drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        y = dropout(x, p, axis=self.data_axis) if training else x
        return x.copy_(y) if inplace else y


def _dropout_of(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, p: float = 0.0, *_: Any, **kwargs: Any) -> float:
    return kwargs.get("dropout_p", p)
