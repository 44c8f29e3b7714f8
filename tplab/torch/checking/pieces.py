"""Tensors of a script as arrays, with their offset in the whole if the script gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tplab.checking.recording import Piece, some_of
from tplab.torch.private import local_of, pytree, start_of, transform, untransformed, without_transforms
from tplab.torch.ranks.values import dtype_name


def array_of(x: Tensor) -> np.ndarray:
    """Return a copy of this rank's part of a tensor. NumPy has no bfloat16, so that becomes float32, without a loss."""
    if transform() is not None:
        with without_transforms():
            return _as_array(untransformed(x))
    return _as_array(x)


def _as_array(x: Tensor) -> np.ndarray:
    x = dense(local_of(x).detach()).to("cpu")
    if x.dtype in (torch.bfloat16, torch.float16):
        x = x.float()
    return x.contiguous().clone().numpy()


def is_there(x: Tensor) -> bool:
    """Return whether the tensor has its memory: FSDP frees that of gathered parameters."""
    x = local_of(x)
    if x.is_meta or x.layout is not torch.strided or not x.numel():
        return not x.is_meta
    last = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.untyped_storage().nbytes() >= (last + 1) * x.element_size()


def dense(x: Tensor) -> Tensor:
    """Return the tensor itself, unless it is sparse."""
    return x if x.layout is torch.strided else x.to_dense()


def piece_of(x: Tensor, once: Callable[[Tensor], np.ndarray]) -> Piece:
    shape, start = _place(x)
    return Piece(once(x), dtype_name(x.dtype), shape, start)


def put_piece(x: Tensor, whole: Tensor) -> None:
    """Fill this rank's part of a tensor from the whole, if the script gives its offset, as a DTensor does."""
    mine, (_, start) = local_of(x), _place(x)
    for dim, first in enumerate(start or ()):
        whole = whole.narrow(dim, first, mine.shape[dim])
    mine.copy_(whole)


def _place(x: Tensor) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the whole's shape and the offset in it, of a DTensor."""
    if not hasattr(x, "_local_tensor") or not hasattr(x, "placements"):
        return None, None
    return tuple(x.shape), start_of(x)


def reduced(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient with its parameter's placements: DTensor adds up partial ones only for the optimizer."""
    if is_reduced(gradient, parameter):
        return gradient
    return gradient.detach().redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def is_reduced(gradient: Tensor, parameter: Tensor) -> bool:
    wanted = getattr(parameter, "placements", None)
    return wanted is None or getattr(gradient, "placements", wanted) == wanted


def sampled(gradient: Tensor) -> np.ndarray:
    """Return a few elements of this rank's part of a gradient."""
    x = dense(local_of(gradient).detach()).reshape(-1)
    return x[torch.from_numpy(some_of(x.numel())).to(x.device)].double().cpu().numpy()


def nudged(x: Any, seed: int = 0) -> Any:
    """Return a tensor with each element one unit in its last place larger or smaller, at random. Return anything but a
    floating-point tensor unchanged, and DTensors."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or hasattr(x, "_local_tensor"):
        return x
    signs = torch.randint(2, x.shape, generator=torch.Generator().manual_seed(x.numel() + seed)).to(x.device) * 2 - 1
    return (x.detach().double() * (1 + torch.finfo(x.dtype).eps * signs.double())).to(x.dtype)


def data_in(args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Return the data that a model is called with, by place or name: tensors that do not need a gradient."""
    pairs, _ = pytree.tree_flatten_with_path((args, kwargs))
    return {_name(path): x for path, x in pairs if _is_data(x)}


def is_stateless(module: nn.Module) -> bool:
    """Return whether a module only changes data, such as a crop or a normalisation of images."""
    return next(chain(module.parameters(), module.buffers()), None) is None


def has_no_samples(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Return whether a module's inputs are not samples: it is stateless, compares results of a model, or continues with
    them and with data that are the same for all samples, such as positions."""
    takes_results = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves((args, kwargs)))
    alike = (len(x) > 1 and bool((x == x[0]).all()) for x in data_in(args, kwargs).values())
    return is_stateless(module) or (takes_results and (next(module.parameters(), None) is None or all(alike)))


def replaced(args: Any, kwargs: Any, data: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Return the arguments with other data."""
    pairs, spec = pytree.tree_flatten_with_path((args, kwargs))
    return pytree.tree_unflatten([data[_name(path)] if _is_data(x) else x for path, x in pairs], spec)


def _is_data(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.requires_grad and x.dim() > 0 and not x.is_meta


def _name(path: Sequence[Any]) -> str:
    return ".".join(str(getattr(key, "idx", getattr(key, "key", key))) for key in path[1:])
