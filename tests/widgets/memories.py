"""Memory of made-up runs, for tests of its drawings."""

from __future__ import annotations

import numpy as np

from tplab import Mesh
from tplab.trace.memory import KINDS, Ledger, Memory, RankMemory


def held(rows: list[tuple[float, dict[str, int]]], where: str = "cell 1, line 2") -> RankMemory:
    """The memory of a rank: (time, kind -> bytes) of every row."""
    ledger = Ledger()
    for number, (time, _) in enumerate(rows):
        ledger.open_row(time, f"op {number}", where, "forward")
    for number, (_, kinds) in enumerate(rows):
        for kind, num_bytes in kinds.items():
            ledger.book(num_bytes, [(number, kind)], number + 1)
    return ledger.closed()


def a_step(states: int) -> RankMemory:
    """Parameters, activations that come and go, gradients, an optimizer."""
    kept = {"parameters": 400}
    rows = [(0.0, kept), (1.0, kept | {"activations": 100}), (2.0, kept | {"activations": 200, "other": 50})]
    rows += [(3.0, kept | {"activations": 100, "gradients": 400}), (4.0, kept | {"gradients": 400})]
    return held([*rows, (5.0, kept | {"gradients": 400, "optimizer": states}), (6.0, kept | {"optimizer": states})])


def two_ranks(states: int = 800, unit: str = "s", title: str = "step") -> Memory:
    cluster = "h100" if unit == "s" else None
    return Memory(Mesh(dp=2), [a_step(states), a_step(states // 2)], title=title, unit=unit, cluster=cluster)


def at_random(num_rows: int, seed: int, pace: float = 1.0) -> RankMemory:
    draw = np.random.default_rng(seed)
    times = np.cumsum(draw.exponential(pace, num_rows) * draw.integers(0, 2, num_rows))
    return held([(t, {kind: int(n) for kind, n in zip(KINDS, draw.integers(0, 1000, len(KINDS)))}) for t in times])
