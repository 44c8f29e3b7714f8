"""What one rank has done, as far as types need it: its steps, and what tells its values from those of other ranks."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.checking.steps import Frame, Step

Key = tuple[Any, ...]
"""What tells a value from all others of a rank, and is the same for that of another rank."""


class Gradient(NamedTuple):
    """A parameter and its gradient, at a line where an optimizer takes it; not `is_used`: it is there at the end."""

    name: str
    parameter: int
    gradient: int
    stack: tuple[Frame, ...]
    is_used: bool = True


class Log:
    """What one rank has done.

    steps       in order; their values have numbers
    keys        of each value; digests: of its numbers, by key
    others      statements that assign something else than a tensor
    arguments, results   (name, value)
    gradients   those that an optimizer was given, and those that are left at the end
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.keys: dict[int, Key] = {}
        self.digests: dict[Key, int] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.others: set[Frame] = set()
        self.arguments: list[tuple[str, int]] = []
        self.results: list[tuple[str, int]] = []
        self.gradients: list[Gradient] = []


def digest_of(x: Tensor) -> int | None:
    """A number that is the same for tensors with the same bits, and hardly ever for others."""
    if x.device.type == "meta" or x.layout is not torch.strided:
        return None
    if is_wrapper(type(x)) or (x.numel() and not x.untyped_storage().nbytes()):
        return None  # it has no memory, or has given it back, as FSDP does with gathered weights
    plain = x.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    # a copy, as memory that NumPy has seen cannot be resized, which FSDP does
    return zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().data) if plain.numel() else 0


def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class hold others, as DTensors do, and have no memory of their own."""
    return hasattr(kind, "__tensor_flatten__")
