"""Large tensors that every rank gets whole: in memory once, as far as ranks only read them."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor

SHARED_FROM = 1 << 22  # bytes; up to here a copy is quick, and takes little


class Pages:
    """A copy of a CPU tensor, and further ones that share its memory page by page until somebody writes to a page.

    The operating system keeps account: each of them is a private mapping of one file without a name. So every write
    counts, whoever makes it, torch or not. As other memory that is not torch's own, such a tensor cannot be resized.
    """

    def __init__(self, x: Tensor):
        self._dtype, self._shape, self._num_bytes = x.dtype, x.shape, x.numel() * x.itemsize
        self._strides = torch.empty_like(x, device="meta").stride()  # those of x where it is dense
        self._file = _file_without_name()
        os.truncate(self._file.fileno(), self._num_bytes)
        self._tensor(mmap.ACCESS_WRITE).copy_(x)

    def __del__(self) -> None:
        self._file.close()  # each mapping has its own hold on the file

    def copy(self) -> Tensor:
        return self._tensor(mmap.ACCESS_COPY)

    def _tensor(self, access: int) -> Tensor:
        mapping = mmap.mmap(self._file.fileno(), self._num_bytes, access=access)
        memory = torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=self._dtype, device="cpu").set_(memory, 0, self._shape, self._strides)


def _file_without_name():
    """A file that is gone with the last that has it open; in memory, where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tplab"), "r+b")
    return tempfile.TemporaryFile()
