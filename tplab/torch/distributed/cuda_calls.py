"""Calls of torch that mention a GPU, for a rank whose GPU is the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tplab.torch.private import parse_to

CPU = torch.device("cpu")
"""The result of torch.device("cuda", ...) on a rank. As an object it differs from the program's own CPU device."""


def is_torchs(frame: FrameType) -> bool:
    """Whether this is torch's own code, or ours."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "tplab")


def is_cuda(device: Any) -> bool:
    """Whether a program means a GPU: "cuda", "cuda:1", torch.device("cuda") or what it was mapped to, or 1."""
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    if isinstance(device, torch.device):
        return device is CPU or device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


class CudaCalls(TorchFunctionMode):
    """Sees every call of torch in the thread of a rank."""

    def __init__(self, note: Callable[[], None]):
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self._note, func, args, kwargs)
        if kwargs:
            if "device" in kwargs and is_cuda(kwargs["device"]):
                _note_unless_known(self._note, kwargs["device"])
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
                self._note()
        return func(*args, **kwargs)


def _note_unless_known(note: Callable[[], None], device: Any) -> None:
    """Note the device, unless it comes from torch.device("cuda"), which has noted it."""
    if device is not CPU:
        note()


def _device(note: Callable[[], None], func: Any, args: Any, kwargs: Any) -> torch.device:
    device = args[0] if args else kwargs.get("device", kwargs.get("type"))
    if not is_cuda(device):
        return func(*args, **kwargs)
    _note_unless_known(note, device)
    return CPU


def _parse(note: Callable[[], None], func: Any, args: Any, kwargs: Any) -> Any:
    """How Module.to parses its arguments, before it moves one tensor after another."""
    device = args[0] if args else kwargs.get("device")
    if not is_cuda(device):
        return func(*args, **kwargs)
    _note_unless_known(note, device)
    return func(CPU, *args[1:], **kwargs) if args else func(**{**kwargs, "device": CPU})


def _to(note: Callable[[], None], func: Any, args: Any, kwargs: Any) -> Any:
    x, *rest = args
    device = rest[0] if rest else kwargs.get("device")
    to_cuda = is_cuda(device)
    if not to_cuda and not (isinstance(device, torch.device) or device == "cpu"):
        return func(*args, **kwargs)
    if to_cuda:
        _note_unless_known(note, device)
        if rest:
            rest[0] = CPU
        else:
            kwargs = {**kwargs, "device": CPU}
    # positions are (device, dtype, non_blocking, copy) or (device, non_blocking, copy)
    is_said = "copy" in kwargs or len(rest) > 2
    return func(x, *rest, **kwargs) if is_said else func(x, *rest, **kwargs, copy=_is_moved(x, to_cuda))


def _cuda(note: Callable[[], None], func: Any, args: Any, kwargs: Any) -> Tensor:
    note()
    layout = {name: value for name, value in kwargs.items() if name == "memory_format"}
    return args[0].to(CPU, copy=_is_moved(args[0], True), **layout)


def _cpu(note: Callable[[], None], func: Any, args: Any, kwargs: Any) -> Tensor:
    return args[0].to(CPU, copy=_is_moved(args[0], False), **kwargs)


def _is_moved(x: Tensor, to_cuda: bool) -> bool:
    """Whether `x` would move to another device, and so to other memory.

    It may already be on that device: then a copy only costs memory. A parameter must keep its identity, so it is not
    copied to the device where it most likely is. torch's own code is careful about sharing memory.
    """
    frame = sys._getframe(3)  # the program called a tensor's method, which called the mode, which called this
    is_parameter = to_cuda and x.is_leaf and x.requires_grad
    return not is_parameter and not is_torchs(frame)


def _type(note: Callable[[], None], func: Any, args: Any, kwargs: Any) -> Any:
    """x.type("torch.cuda.FloatTensor")"""
    x, *rest = args
    if rest and isinstance(rest[0], str) and rest[0].startswith("torch.cuda."):
        note()
        rest[0] = rest[0].replace(".cuda", "")
    return func(x, *rest, **kwargs)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.device: _device,
    parse_to: _parse,
    Tensor.to: _to,
    Tensor.cuda: _cuda,
    Tensor.cpu: _cpu,
    Tensor.type: _type,
    Tensor.pin_memory: lambda note, func, args, kwargs: args[0],
}
