"""What a matmul computes, and what it reads and writes."""

from __future__ import annotations

import re


def matmul_flops(m: int, k: int, n: int, batch: int = 1) -> int:
    """[m, k] @ [k, n] takes 2 m k n: a multiplication and an addition for each of m k n terms; times `batch`."""
    return 2 * batch * m * k * n


def matmul_bytes(m: int, k: int, n: int, itemsize: int, batch: int = 1) -> int:
    """What [m, k] @ [k, n] reads and writes if each number moves once: (m k + k n + m n) * itemsize."""
    return batch * (m * k + k * n + m * n) * itemsize


def itemsize(dtype: str) -> float:
    """Bytes of one element: "bfloat16" -> 2, "float8_e4m3fn" -> 1, "int4" -> 0.5."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 1  # bool
