"""Dropout whose masks agree where ranks hold the same tensor, and differ where they do not."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from tplab.mesh import Axis
from tplab.torch.layers.draws import next_generator
from tplab.torch.ranks.rank import this_rank


def dropout(x: Tensor, p: float, *, axis: Axis | None = None) -> Tensor:
    """Each element of x set to zero with probability p, the others divided by 1 - p.

    axis   along which ranks hold different data and draw different masks; along the other axes they draw the same one.
           None: x is the same on every rank, outside the parallel regions, and stays so.
           "tp": x is sharded over tp, inside a region or under sequence parallelism.
           ("dp", "tp"), or "dp" outside the regions: with data parallelism, where each rank has its own batch
    backward  dx = dy times the same mask; nothing is sent

    The mask is drawn from the seed of the run and the number of the draw, not from torch's generator: that is each
    rank's own, and after row-parallel layers a mask per rank would make copies differ. So `torch.manual_seed` does not
    reproduce a mask; the seed of `run` does. torch.utils.checkpoint gets the same mask again. Ranks that must agree
    have to call dropout the same number of times. For evaluation leave it out, or pass p=0.
    """
    if has_torch_function_unary(x):  # for check_parallel
        return handle_torch_function(dropout, (x,), x, p, axis=axis)
    if not 0 <= p < 1:
        raise ValueError(f"p is {p}; it is the share that is dropped, from 0 up to, but not including, 1")
    if axis is not None:
        this_rank().place(axis)
    if p == 0:
        return x
    kept = torch.rand(x.shape, generator=next_generator(axis, x.device), device=x.device) >= p
    return x * kept / (1 - p)
