"""Attention over a sequence that ranks share, on CUDA's kernels, compared with the plain equations in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tplab.torch as tt
from benchmarks.device.check import Figures, Place, Task, Wrong
from tplab import Mesh, P
from tplab.sequence import TokenLayout

SCHEMES = {"ring": tt.ring_attention, "gather": tt.gather_attention, "head": tt.head_attention}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"causal": False},
    "window": {"window": 50},
    "documents": {"documents": (100, 28, 64)},
}
LENGTH = 192
"""Tokens, divisible by twice 1, 2, 3, 4 and 8 ranks."""
SPEC = P(None, None, "cp")


def tasks(place: Place) -> Iterator[Task]:
    dtypes = (torch.float32,) if place.quick else (torch.bfloat16, torch.float32, torch.float16, torch.float64)
    for dtype in dtypes:
        for name in ("ring",) if place.quick else SCHEMES:
            yield Task(f"{name}, {str(dtype).removeprefix('torch.')}", partial(compared, place, name, dtype), 110)
    yield Task("a long sequence, 16,384 tokens on 4 ranks", partial(long, place))


def compared(place: Place, name: str, dtype: torch.dtype) -> Figures:
    """All masks, grouped queries, heads of 64 and 128, on 1 to 8 ranks: o, dq, dk and dv."""
    most: dict[str, float] = {}
    wrong: list[str] = []
    tolerance = (6 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps  # wide sums cancel; narrow ones are wide
    for size in (2, 3) if place.quick else (1, 2, 3, 4, 8):
        for mask, about in MASKS.items():
            for groups, width in ((8, 64), (24, 128)) if name == "head" else ((2, 64), (24, 128)):
                layout = TokenLayout("zigzag", LENGTH, size)
                if name == "head" and groups % size:
                    continue
                xs = [_drawn(heads, width, dtype, seed) for seed, heads in enumerate((24, groups, groups, 24))]
                pieces = [layout.arrange(x, 2) for x in xs]
                program = partial(_derived, SCHEMES[name], about)
                specs: dict[str, Any] = {"in_specs": (SPEC,) * 4, "out_specs": (SPEC,) * 4}
                found = tt.run(program, Mesh(cp=size), *pieces, **specs, device=place.device, keep_values=0).value
                want = [layout.arrange(x, 2) for x in _plain(about, *(x.to(place.device) for x in xs))]
                for what, ours, theirs in zip(("o", "dq", "dk", "dv"), found, want, strict=True):
                    off = float((ours.double() - theirs).abs().max() / theirs.abs().max())
                    most[what] = max(most.get(what, 0.0), off)
                    if not off <= tolerance:
                        wrong.append(f"{what} on {size} ranks, {mask}, {groups} groups of {width}: {off:.2g}")
    figures: Figures = {f"{what} off by": off for what, off in most.items()}
    if wrong:
        raise Wrong(f"{len(wrong)} are off by more than {tolerance:.2g}:\n" + "\n".join(wrong[:12]), figures)
    return figures


def _drawn(heads: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(2, heads, LENGTH, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _derived(attention: Any, about: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = attention(*leaves, "cp", layout="zigzag", **about)
    return (o.detach(), *torch.autograd.grad(o, leaves, do))


def _plain(about: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    """softmax(q k^T / sqrt(d)) v and its derivatives in float64, with a mask of all pairs."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    columns = torch.arange(LENGTH, device=q.device)
    rows = columns[:, None]
    seen = columns <= rows if about.get("causal", True) else (columns >= 0).expand(LENGTH, -1)
    if (window := about.get("window")) is not None:
        seen = seen & (columns > rows - window)
    if sizes := about.get("documents"):
        document = torch.tensor(np.repeat(np.arange(len(sizes)), sizes), device=q.device)
        seen = seen & (document[rows] == document)
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ keys.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    o = scores.softmax(-1) @ values
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())]


def long(place: Place) -> Figures:
    """Compare with torch's own attention over the whole sequence, in the same dtype."""
    length = 256 if place.quick else 16384
    dtype = torch.bfloat16 if place.device == "cuda" else torch.float32
    layout = TokenLayout("zigzag", length, 4)
    xs = [torch.randn(1, heads, length, 128, device=place.device, dtype=dtype) for heads in (8, 2, 2, 8)]
    q, k, v = (x.clone().requires_grad_() for x in xs[:3])
    keys, values = (x.repeat_interleave(4, 1) for x in (k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True)
    want = [o.detach(), *torch.autograd.grad(o, (q, k, v), xs[3])]
    specs: dict[str, Any] = {"in_specs": (SPEC,) * 4, "out_specs": (SPEC,) * 4}
    pieces = [layout.arrange(x, 2) for x in xs]
    program = partial(_derived, tt.ring_attention, {})
    found = tt.run(program, Mesh(cp=4), *pieces, **specs, device=place.device, keep_values=0).value
    figures: Figures = {}
    for what, ours, theirs in zip(("o", "dq", "dk", "dv"), found, want, strict=True):
        theirs = layout.arrange(theirs, 2)
        figures[f"{what} off by"] = float(((ours - theirs).abs().max() / theirs.abs().max()).float())
    if not max(figures.values()) <= 8 * torch.finfo(dtype).eps:
        raise Wrong("off by more than 8 roundings", figures)
    return figures
