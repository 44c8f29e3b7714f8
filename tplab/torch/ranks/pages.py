"""Large tensors that every rank gets whole: they are in memory once, as long as ranks only read them."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor

SHARED_FROM = 1 << 22  # bytes; up to here a copy is quick and small


class Pages:
    """A copy of a CPU tensor, and further ones that share its memory page by page until a page is written to.

    The operating system keeps track: each copy is a private mapping of one file without a name. So every write counts,
    whether torch makes it or not. Like any memory that is not torch's own, such a tensor cannot be resized.
    """

    def __init__(self, x: Tensor):
        self._dtype, self._shape, self._num_bytes = x.dtype, x.shape, x.numel() * x.itemsize
        self._strides = torch.empty_like(x, device="meta").stride()  # those of x if it is dense
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
    """A file that disappears with its last user; in memory, if the system supports that."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tplab"), "r+b")
    return tempfile.TemporaryFile()
