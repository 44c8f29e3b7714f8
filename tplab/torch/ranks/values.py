"""What a trace keeps of a tensor: the name of its dtype, and its values if it is small."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from tplab.torch.ranks.outcomes import BITS, WITHOUT_KERNELS
from tplab.trace.event import VALUES_UP_TO


class Values:
    """Keeps the values of small tensors for a trace: of `left` more of them."""

    def __init__(self, left: int):
        self.left = left

    def of(self, x: Tensor) -> np.ndarray | None:
        if x.numel() > VALUES_UP_TO or self.left <= 0:
            return None
        self.left -= 1
        return values_of(x)


def values_of(x: Tensor) -> np.ndarray | None:
    """The values of a small tensor, for the trace. A dtype that NumPy lacks is converted to one that holds it. None for
    a meta tensor."""
    if x.is_meta:
        return None
    x = x.detach().cpu().resolve_conj().resolve_neg()
    if x.dtype in WITHOUT_KERNELS:
        x = x.view(BITS[x.itemsize])
    elif x.dtype is torch.complex32:
        x = x.to(torch.complex64)
    elif x.dtype is torch.bfloat16 or (x.dtype.is_floating_point and x.dtype.itemsize == 1):
        x = x.float()
    return np.array(x.numpy())


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")
