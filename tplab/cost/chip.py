"""A chip: what one rank computes on, and how long its operations take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import MappingProxyType

from tplab.cost.attention import attention_flops, attention_numbers
from tplab.cost.kernels import Kernels, itemsize, matmul_bytes, matmul_flops
from tplab.cost.link import check
from tplab.errors import ClusterError


@dataclass(frozen=True)
class Chip:
    """The processor of one rank.

    flops              FLOP/s by dtype name: {"bfloat16": 989e12, ...}. Dense peaks, without structured sparsity
    memory_bandwidth   B/s between the chip and its main memory
    memory             B of main memory
    launch             s of overhead before every operation starts, however small it is
    source             where the figures come from
    kernels            the measured share of these peaks that its kernels reach; None: the peaks themselves
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)  # a mapping has no hash; equality still compares it
    memory_bandwidth: float
    memory: float
    launch: float = 0.0
    source: str = ""
    kernels: Kernels | None = None

    def __post_init__(self):
        what = f"chip {self.name!r}"
        if not isinstance(self.flops, Mapping) or not self.flops:
            raise ClusterError(f"{what}: flops is {self.flops!r}; give one dtype at least, as {{'float32': 1e12}}")
        for dtype, rate in self.flops.items():
            check(what, f"flops[{dtype!r}]", rate)
        check(what, "memory_bandwidth", self.memory_bandwidth)
        check(what, "memory", self.memory)
        check(what, "launch", self.launch, zero=True)
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def __reduce__(self):  # a mapping proxy cannot be pickled, and chips travel to other processes
        values = [getattr(self, f.name) for f in fields(self)]
        return Chip, tuple(dict(value) if isinstance(value, Mapping) else value for value in values)

    def peak(self, dtype: str) -> float:
        """FLOP/s for `dtype`. A dtype that is not listed runs at the slowest rate listed."""
        rate = self.flops.get(dtype)
        return min(self.flops.values()) if rate is None else rate

    @property
    def fuses_attention(self) -> bool:
        """Whether attention is one kernel that stores no scores, as on every chip that multiplies 16-bit numbers."""
        return not self.flops.keys().isdisjoint(("bfloat16", "float16"))

    def seconds(self, flops: float, bytes: float, dtype: str = "float32") -> float:
        """The roofline: launch + max(flops / peak(dtype), bytes / memory_bandwidth); with measured rates instead of
        peaks where they are known."""
        if self.kernels is not None:
            return self.kernels.seconds(flops, bytes, self.peak(dtype), self.memory_bandwidth)
        return self.launch + max(flops / self.peak(dtype), bytes / self.memory_bandwidth)

    def matmul_seconds(self, m: int, n: int, k: int, dtype: str = "bfloat16", batch: int = 1) -> float:
        """[m, k] @ [k, n], `batch` times in one operation: 2 m n k FLOPs, and each number read or written once.

        A roofline for a data sheet; tiles and waves if the chip's kernels have been measured.
        """
        if self.kernels is not None:
            return _tiled(self, m, n, k, dtype, batch)
        num_bytes = matmul_bytes(m, k, n, 1, batch) * itemsize(dtype)
        return self.seconds(matmul_flops(m, k, n, batch), num_bytes, dtype)

    def attention_seconds(
        self,
        batch: int,
        heads: int,
        q_len: int,
        k_len: int,
        head_dim: int,
        dtype: str = "bfloat16",
        causal: bool = False,
        backward: bool = False,
        *,
        kv_heads: int | None = None,
        kernel: str | None = None,
    ) -> float:
        """Fused attention, one pass: q [batch, heads, q_len, head_dim], k and v [batch, kv_heads, k_len, head_dim].

        A roofline at peak rates or, if the chip's kernels have been measured, the rate of `kernel`. None: the chip's
        newest. In 8 bit they were measured no faster than in 16.
        """
        shape = batch, heads, q_len, k_len, head_dim
        num_bytes = attention_numbers(*shape, kv_heads or heads, backward) * itemsize(dtype)
        if self.kernels is None:
            return float(self.seconds(attention_flops(*shape, causal, backward), num_bytes, dtype))
        peak = self.peak("bfloat16" if itemsize(dtype) < 2 else dtype)
        found = self.kernels.attention_of(kernel, self.name)
        computing = found.seconds(*shape, peak, self.kernels.multiprocessors, causal=causal, backward=backward)
        return float(max(computing, self.seconds(0, num_bytes)))


@lru_cache(maxsize=4096)
def _tiled(chip: Chip, m: int, n: int, k: int, dtype: str, batch: int) -> float:
    assert chip.kernels is not None
    rates = chip.peak(dtype), chip.memory_bandwidth
    return float(chip.kernels.matmul_seconds(m, n, k, itemsize(dtype), *rates, batch))
