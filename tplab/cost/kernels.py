"""How long the kernels of a GPU take, as measured: matmuls in tiles and waves, and the memory bandwidth reached.

A matmul [m, k] @ [k, n] is cut into tiles of C, and k into `split` parts, one for each group of tiles. A tile is the
work of one multiprocessor, and a wave is one tile on each multiprocessor:

    waves   = ceil(ceil(m / tile_m) ceil(n / tile_n) split / multiprocessors)
    tile    = finish tile_m tile_n + ceil(k / split / 64) step
    step    = the longer of   2 * 64 tile_m tile_n / (share of the peak, per multiprocessor)
                              64 (tile_m + tile_n) elements / the rate at which tiles are loaded
    memory  = bytes / (share of the bandwidth); a left matrix that fits into the cache counts RESIDENT of its bytes
    seconds = START + the longer of (waves tile, memory) + (split > 1: SPLIT + partial sums, written and read)

The model takes the fastest of all tiles and splits, as cuBLAS tries to do. "The longer of" is a soft maximum,
(a^4 + b^4)^(1/4), because two limits that are close hinder each other.

Products of 8-bit numbers are written in 16 bit. `benchmarks.fit.chips` fits the constants for each kind of GPU, and for
16-bit and 8-bit dtypes. An A100 and an H100 have the same START and SPLIT, and all GPUs have the same RESIDENT.

Sources. NVIDIA, "Matrix Multiplication Background User's Guide": tiles, waves and their quantisation; tile shapes and
split-k as in CUTLASS.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tplab.cost.attention import Attention
from tplab.errors import ClusterError

_TILES = ((64, 64), (128, 64), (64, 128), (128, 128), (64, 256), (256, 64), (128, 256), (256, 128))
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_WAYS = np.array([(*tile, split) for tile, split in product(_TILES, _SPLITS)], float).T
_DEPTH = 128
"""Bytes along k that one step processes: 64 elements of bfloat16."""
_CACHED = 0.8
"""A matrix of up to this share of the cache stays in it."""


class Tiles(NamedTuple):
    """The matmuls of one kind of GPU, in 16 bit or in 8.

    flops    share of the peak in FLOP/s that the steps of a tile reach
    load     B/s at which a multiprocessor loads tiles
    finish   s for writing a tile, per element of it
    start    s from the start of a kernel to its end, if it has nothing to do
    split    s for adding up the results of the parts of k
    """

    flops: float
    load: float
    finish: float
    start: float
    split: float


@dataclass(frozen=True, slots=True)
class Kernels:
    """The measured kernels of one kind of GPU.

    wide              its matmuls in 16 bit, used for wider dtypes too
    narrow            its matmuls in 8 bit; None: not measured, and those in 16 bit are used
    bandwidth         share of the memory bandwidth
    multiprocessors   their number (data sheet)
    cache             B of the cache that they share (data sheet)
    resident          share of the bytes of a left matrix in the cache that still counts
    attention         its kernels for fused attention, the newest last
    """

    wide: Tiles
    narrow: Tiles | None
    bandwidth: float
    multiprocessors: int
    cache: float
    resident: float
    attention: tuple[Attention, ...] = ()

    def attention_of(self, name: str | None, chip: str) -> Attention:
        """The attention kernels of this generation; None: the newest."""
        found = [kernel for kernel in self.attention if name in (None, kernel.name)]
        if not found:
            known = " and ".join(repr(kernel.name) for kernel in self.attention) or "none"
            raise ClusterError(f"no kernel of attention named {name!r} was measured on {chip}; there is {known}")
        return found[-1]

    def seconds(self, flops: float, num_bytes: float, peak: float, bandwidth: float) -> float:
        """Anything but a matmul: elementwise work, a normalisation, fused attention."""
        return self.wide.start + max(flops / (peak * self.wide.flops), num_bytes / (bandwidth * self.bandwidth))

    def matmul_seconds(
        self, m: Any, n: Any, k: Any, itemsize: float, peak: float, bandwidth: float, batch: int = 1
    ) -> Any:
        """One matmul; with arrays of m, n and k, an array of seconds."""
        m, n, k = (np.asarray(size, float)[..., None] for size in (m, n, k))
        tile_m, tile_n, split = _WAYS
        of = self.narrow if itemsize <= 1 and self.narrow else self.wide
        rate = peak * of.flops / self.multiprocessors
        depth = _DEPTH / itemsize
        step = _longer(2 * depth * tile_m * tile_n / rate, _DEPTH * (tile_m + tile_n) / of.load)
        tile = of.finish * tile_m * tile_n + np.ceil(k / split / depth) * step
        tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n) * split * batch
        left = m * k * batch
        left = np.where(left * itemsize < _CACHED * self.cache, left * self.resident, left)
        moved = (left + k * n * batch) * itemsize + m * n * batch * max(itemsize, 2)
        memory = moved / (bandwidth * self.bandwidth)
        sums = np.where(split > 1, of.split + 4 * batch * m * n * split / bandwidth, 0.0)
        seconds = of.start + _longer(np.ceil(tiles / self.multiprocessors) * tile, memory) + sums
        return seconds.min(axis=-1)


def _longer(a: Any, b: Any) -> Any:
    return (a**4 + b**4) ** 0.25


# --- what a matmul computes -------------------------------------------------------------------------------------------


def matmul_flops(m: int, k: int, n: int, batch: int = 1) -> int:
    """[m, k] @ [k, n] takes 2 m k n: a multiplication and an addition for each of m k n terms; times `batch`."""
    return 2 * batch * m * k * n


def matmul_bytes(m: int, k: int, n: int, itemsize: int, batch: int = 1) -> int:
    """Bytes that [m, k] @ [k, n] reads and writes if each number moves once: (m k + k n + m n) * itemsize."""
    return batch * (m * k + k * n + m * n) * itemsize


def itemsize(dtype: str) -> float:
    """Bytes of one element: "bfloat16" -> 2, "float8_e4m3fn" -> 1, "int4" -> 0.5."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 1  # bool
