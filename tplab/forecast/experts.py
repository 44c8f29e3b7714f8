"""How long the experts of a layer take in one fused kernel, and DeepEP's messages inside a node, as measured.

    experts    start + (weights^p + FLOPs^p)^(1/p) + rows + tokens + experts
               the weights of every expert that any token chose are read once; an expert's rows are computed in tiles of
               64; rows [2H + 3F] are written and read between its matmuls, tokens [H] before and after; and there is a
               cost per expert
    messages   start + T H (own + copies copy) + turns (turn + H copies each)
               a token goes once to each other rank that holds any of its experts, with "low_latency" once for each
               expert. Tokens take turns on some multiprocessors: "normal" has 20, "low_latency" one for each expert, or
               for several if there are many experts. So it is slow with 8 experts

Each kernel's constants were fitted to tables (`python -m benchmarks.fit.experts`); docs/forecast.md has their errors.
Training steps use other kernels, so these times are not used for them.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tplab.cost import Cluster, find
from tplab.errors import ShapeError, one_of
from tplab.experts import Routing, expected_copies
from tplab.sharding import share

CONSTANTS = Path(__file__).parent / "measured" / "experts.json"
TILE = 64
DRAWS = 6


class Work(NamedTuple):
    """The work of the fullest rank: numbers of weights and of FLOPs, features of rows and of tokens, and experts."""

    weights: Any
    flops: Any
    rows: Any
    tokens: Any
    experts: Any


class Fused(NamedTuple):
    """A kernel: s to start; weights and FLOPs per s, and the exponent of their soft maximum; s per feature of a row and
    of a token, and per expert."""

    start: float
    weights: float
    flops: float
    sharpness: float
    row: float
    token: float
    expert: float

    def seconds(self, work: Work) -> Any:
        both, p = (work.weights / self.weights, work.flops / self.flops), 1 + self.sharpness
        longest = np.maximum(*both)
        matmuls = longest * ((both[0] / longest) ** p + (both[1] / longest) ** p) ** (1 / p)
        return self.start + matmuls + work.rows * self.row + work.tokens * self.token + work.experts * self.expert


class Messages(NamedTuple):
    """Messages one way: s to start; s per feature of a token, and of each copy of it; s for a turn, and per feature of
    each copy in a turn."""

    start: float
    own: float
    copy: float
    turn: float
    each: float

    def seconds(self, tokens: Any, hidden: Any, copies: Any, lanes: Any) -> Any:
        turns = np.ceil(tokens / lanes)
        sent = tokens * hidden * (self.own + copies * self.copy)
        return self.start + sent + turns * (self.turn + hidden * copies * self.each)


def experts_seconds(
    cluster: str | Cluster,
    tokens: int,
    hidden: int,
    ffn: int,
    routing: Routing,
    *,
    ep: int = 1,
    skew: float = 0.0,
    dtype: str = "bfloat16",
    kernel: str | None = None,
) -> float:
    """Seconds of the gated MLPs of the experts on one rank, forward.

    tokens   of all ranks that share the experts      hidden, ffn   H, and F, the features of each expert here
    ep       how many ranks share the experts; the time is that of the rank with the most rows
    skew     0: tokens choose all experts equally often; otherwise their popularity is drawn from a power law with this
             exponent, above 0 (1.01 and 1.2 were measured)
    dtype    "bfloat16", "fp8", "fp8_block" or "nvfp4"
    kernel   None: the first that was measured on the chip in this dtype
    Raises ValueError for what was not measured, ShapeError for no tokens and for experts that ranks cannot share.
    """
    if skew < 0:
        raise ValueError(f"skew is {skew}; it is 0, where all experts are chosen equally often, or more")
    found = _measured("fused", cluster, dtype)
    name = kernel or next(iter(found))
    one_of("kernel", name, tuple(found))
    return float(Fused(*found[name]).seconds(work_of(tokens, hidden, ffn, routing, ep, skew)))


def message_seconds(
    cluster: str | Cluster, tokens: int, hidden: int, routing: Routing, kernel: str = "normal"
) -> tuple[float, float]:
    """Seconds of DeepEP's dispatch and of its combine between the 8 ranks of a node, each with this many tokens.

    kernel   "normal", or "low_latency" for few tokens
    Raises ValueError for what was not measured, and ShapeError if there are no tokens.
    """
    _check_tokens(tokens)
    ways, given = _measured("messages", cluster, kernel), (tokens, hidden, *sent(cluster, routing, kernel))
    dispatch, combine = (float(Messages(*ways[way]).seconds(*given)) for way in ("dispatch", "combine"))
    return dispatch, combine


def sent(cluster: str | Cluster, routing: Routing, kernel: str) -> tuple[float, int]:
    """(how often a token is sent to other ranks of a node, how many multiprocessors send)."""
    if kernel == "normal":
        return expected_copies(routing, 8) * 7 / 8, 20
    kernels = (found := find(cluster)).chip.kernels
    if kernels is None:
        raise ValueError(f"{found.name} does not say how many multiprocessors a chip has; take a measured cluster")
    return routing.top_k * 7 / 8, -(-routing.experts // -(-routing.experts // kernels.multiprocessors))


@lru_cache(maxsize=1 << 14)
def fullest(tokens: int, routing: Routing, ep: int, skew: float) -> float:
    """The rows of the fullest of `ep` ranks as a multiple of the mean, averaged over several draws."""
    if not skew or ep == 1:
        return 1.0
    rows = np.mean([loads.sum() for loads in _loads(tokens, routing, ep, skew)])
    return float(rows * ep / (tokens * routing.top_k))


@lru_cache(maxsize=1 << 14)
def work_of(tokens: int, hidden: int, ffn: int, routing: Routing, ep: int, skew: float) -> Work:
    """The work of the fullest of `ep` ranks, averaged over several draws."""
    _check_tokens(tokens)
    each = [(np.count_nonzero(x), x.sum(), (-(-x // TILE) * TILE).sum()) for x in _loads(tokens, routing, ep, skew)]
    chosen, rows, padded = np.mean(each, axis=0)
    weights = 3 * hidden * ffn
    return Work(chosen * weights, 2 * padded * weights, rows * (2 * hidden + 3 * ffn), tokens * hidden, chosen)


def _check_tokens(tokens: int) -> None:
    if tokens < 1:
        raise ShapeError(f"there are {tokens} tokens; there must be one or more")


def _loads(tokens: int, routing: Routing, ep: int, skew: float) -> list[np.ndarray]:
    """How many rows each expert of the fullest rank gets; with a skew, in several draws."""
    experts, total = routing.experts, tokens * routing.top_k
    here = share(experts, ep, "the number of experts is", axis="ep", least=1)
    if not skew:
        loads = total // experts + (np.arange(experts) * (total % experts) % experts < total % experts)
        return [max(loads.reshape(ep, here), key=np.sum)]
    found, power = list[np.ndarray](), (1 - skew) or 1e-6
    low, high = (1.0, 0.8 * tokens) if total > experts else (0.01, 2.0)
    for draw in range(DRAWS):
        u = np.random.default_rng([draw, experts]).random(experts)
        wanted = ((high**power - low**power) * u + low**power) ** (1 / power) if high > low else np.ones(experts)
        loads = np.minimum(np.round(wanted / wanted.sum() * total), tokens).astype(int)
        order, place = np.argsort(-wanted), 0
        while (lacking := total - loads.sum()) and place < 8 * experts:  # rows lost to rounding, the most popular first
            expert = order[place % experts]
            loads[expert] = np.clip(loads[expert] + np.sign(lacking), 0, tokens)
            place += 1
        found.append(max(loads.reshape(ep, here), key=np.sum))
    return found


@cache
def constants() -> dict[str, Any]:
    """The constants written by `python -m benchmarks.fit.experts --write`."""
    return json.loads(CONSTANTS.read_text(encoding="utf-8"))


def _measured(what: str, cluster: str | Cluster, kind: str) -> dict[str, list[float]]:
    chip = find(cluster).chip.name.split()[0]
    known = constants()[what].get(chip, {})
    if kind not in known:
        there = "; ".join(f"{chip}: {', '.join(kinds)}" for chip, kinds in constants()[what].items())
        raise ValueError(f"no {what} kernels were measured on {chip} with {kind!r}; there are {there}")
    return known[kind]
