"""Fits the kernels of attention to measured prompts, and those of 2023 to one pair of rows per GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks.fit.least import Array, least, rounded, summary, third
from benchmarks.fit.tables import Prompt, prompts
from tplab.cost.attention import AGAIN, Attention
from tplab.cost.data_sheets import A100, B200, H100
from tplab.cost.fabric import Error
from tplab.cost.measured import MULTIPROCESSORS, constants, ring_attention

CHIPS = {"b200": B200, "h100": H100}
TILES = {"b200": 256, "h100": 128}
"""Queries that a multiprocessor computes at a time: one pair of warp groups with 64 each, or two tiles of 128."""
_OWN = ("share", "narrow", "start", "written")
_BEGIN = {"share": 0.65, "narrow": 0.75, "start": 1.2e-5, "written": 0.2}
_EXTRA = 450.0
Fitted = tuple[Attention, float]
"""(the kernel, the share of the memory bandwidth with which keys and values are written to a cache). Training writes
none, so the latter is not part of a forecast."""


def fit_attention(rows: Mapping[str, Sequence[Prompt]]) -> dict[str, Fitted]:
    """The constants of each kind of GPU, and `extra`, which they share."""
    kinds = sorted(rows)
    begin = np.log([*([_BEGIN[name] for name in _OWN] * len(kinds)), _EXTRA])
    backward = backward_share()

    def made(theta: Array) -> dict[str, Fitted]:
        values, width = np.exp(theta).tolist(), len(_OWN)
        found = {}
        for place, kind in enumerate(kinds):
            own = dict(zip(_OWN, values[place * width :]))
            written = own.pop("written")
            found[kind] = Attention("flash3", **own, backward=backward, extra=values[-1], tile=TILES[kind]), written
        return found

    def residuals(theta: Array) -> Array:
        return np.concatenate([np.log(1 + attention_errors(rows[kind], of)) for kind, of in made(theta).items()])

    shares = [place for place, name in enumerate(_OWN * len(kinds)) if name != "start"]
    return made(least(residuals, begin, 0.05, shares=shares)[1])


def attention_errors(rows: Sequence[Prompt], fitted: Fitted) -> Array:
    """predicted / measured - 1, for each row of one kind of GPU."""
    kernel, written = fitted
    gpu = rows[0].gpu
    batch, tokens, heads, kv_heads, width, seconds = np.array([row[1:] for row in rows], float).T
    peak, multiprocessors = CHIPS[gpu].peak("bfloat16"), MULTIPROCESSORS[gpu][0]
    found = np.empty(len(rows))
    for one in set(width.tolist()):
        of = width == one
        shape = batch[of], heads[of], tokens[of], tokens[of], int(one)
        found[of] = kernel.seconds(*shape, peak, multiprocessors, causal=True, backward=False)
    keys = 2 * 2 * batch * tokens * kv_heads * width
    return (found + keys / (written * CHIPS[gpu].memory_bandwidth)) / seconds - 1


def stored(kind: str) -> Fitted:
    """The constants in the package."""
    return Attention(**constants()["attention"][kind][-1]), constants()["written"][kind]


def hold_out() -> dict[str, Error]:
    """The errors on rows that were held out, a third at a time."""
    off: dict[str, list[float]] = {kind: [] for kind in CHIPS}
    for part in range(3):
        is_out = {kind: [third(i, 0) == part for i in range(len(prompts(kind)))] for kind in CHIPS}
        seen = {kind: [row for row, out in zip(prompts(kind), is_out[kind]) if not out] for kind in CHIPS}
        fitted = fit_attention(seen)
        for kind in CHIPS:
            left_out = [row for row, out in zip(prompts(kind), is_out[kind]) if out]
            off[kind] += attention_errors(left_out, fitted[kind]).tolist()
    return {kind: summary(errors) for kind, errors in off.items()}


# ------------------------------------------------------------------------------------------------- kernels of 2023

# zhuzilin's rows: one sequence of 65,536 tokens, 32 heads of 128, an eighth of its causal attention.
_FLOPS = 4 * 128 * 32 * 65536 * 65537 / 2 / 8
_OF_2023 = {"A100": ("a100", A100), "H800": ("h100", H100)}
"""The GPUs of these rows. An H800 computes as an H100 does."""


def _ideal(gpu: str) -> tuple[float, float]:
    """The seconds of these FLOPs without a ring, forward and backward."""
    of = {row.passes: row.ideal for row in ring_attention() if (row.api, row.gpu) == ("batch", gpu)}
    return of["fwd"], of["fwd+bwd"] - of["fwd"]


def reached(gpu: str) -> float:
    """The share of the peak that these rows reach forward."""
    return _FLOPS / _ideal(gpu)[0] / _OF_2023[gpu][1].peak("bfloat16")


def backward_share() -> float:
    """The FLOP/s reached backward relative to those reached forward: the mean of both GPUs. No such rows of newer
    kernels are published, so these use it too."""
    return float(np.mean([AGAIN * there / back for there, back in map(_ideal, _OF_2023)]))


def of_2023(newest: Attention) -> dict[str, Attention]:
    """FlashAttention 2: the share is fitted, and constants that long sequences do not show are those of `newest`."""
    found = {}
    for gpu, (kind, _) in _OF_2023.items():
        share = reached(gpu) * (1 + 2 * newest.extra / 65536)
        found[kind] = replace(newest, name="flash2", share=share)
    return found


def found_all() -> dict[str, Any]:
    """All constants for the file: each GPU's kernels, the newest last."""
    fitted = fit_attention({kind: prompts(kind) for kind in CHIPS})
    old = of_2023(fitted["h100"][0])
    kernels = {"a100": [old["a100"]], "h100": [old["h100"], fitted["h100"][0]], "b200": [fitted["b200"][0]]}
    return {
        "attention": {kind: [_written(kernel) for kernel in of] for kind, of in kernels.items()},
        "written": {kind: rounded(written) for kind, (_, written) in fitted.items()},
    }


def _written(kernel: Attention) -> dict[str, Any]:
    return {name: rounded(value) if isinstance(value, float) else value for name, value in asdict(kernel).items()}
