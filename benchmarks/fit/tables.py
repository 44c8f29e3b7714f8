"""Measured kernels to which constants are fitted. The package itself does not need these rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from tplab.cost.measured import read, source_of

ROWS = Path(__file__).parent / "rows"


class Matmul(NamedTuple):
    """[m, k] @ [k, n] in bfloat16, or in FP8 after the left matrix was converted from bfloat16."""

    m: int
    n: int
    k: int
    seconds: float


class Prompt(NamedTuple):
    """Causal attention in bfloat16 of `batch` prompts; their keys and values are also written to a cache."""

    gpu: str
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    seconds: float


@cache
def matmuls(gpu: str, bits: int = 16) -> tuple[Matmul, ...]:
    """The rows of `gpu`: "a100", "h100" or "b200"; in 8 bit only the last two."""
    rows = read(ROWS / (f"matmul_{gpu}.csv" if bits == 16 else f"matmul_{gpu}_8bit.csv"))
    return tuple(Matmul(int(r["m"]), int(r["n"]), int(r["k"]), float(r["us"]) / 1e6) for r in rows)


@cache
def prompts(gpu: str) -> tuple[Prompt, ...]:
    """The rows of `gpu`: "h100" or "b200"."""
    sizes = ("batch", "tokens", "heads", "kv_heads", "head_dim")
    rows = [row for row in read(ROWS / "attention.csv") if row["gpu"] == gpu]
    return tuple(Prompt._make((gpu, *(int(row[name]) for name in sizes), float(row["us"]) / 1e6)) for row in rows)


def source(name: str) -> str:
    """The source of a table: "matmul_a100", "attention"."""
    return source_of(ROWS / f"{name}.csv")
