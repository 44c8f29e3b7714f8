"""The clock compared with the chip: operations, a block and a training step, measured and modelled.

Each row is [what, measured, eager, forecast, data sheet, on meta], in seconds:

    measured     a CUDA graph of the operation, replayed without Python. Backward passes are measured eagerly
    eager        launched from Python
    forecast, data sheet     the modelled clock's time of the same program with its tensors on the device
    on meta      the forecast again, with tensors that have no numbers; None if it is not needed

The operands of one row stay the same, so that small ones stay in the chip's cache, as in most published tables.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.device.check import Figures, NotRun, Place, Task, Wrong
from benchmarks.device.modelled import Clusters, modelled
from benchmarks.device.models import Block, Mixture, SmallGPT, trained
from benchmarks.device.timer import eager_seconds, kernel_seconds
from tplab import cost

Row = list[Any]
Rows = Iterator[Callable[[], Row]]
SHAPES = (  # n, k
    (1024, 1024), (2048, 2048), (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192),
    (8192, 28672), (128256, 4096), (12288, 12288), (5120, 13824), (3000, 5000),
)  # fmt: skip
HEIGHTS = (1, 16, 128, 1024, 8192)
SOME = ((128, 4096, 4096), (1024, 4096, 4096), (4096, 4096, 4096), (8192, 4096, 14336), (8192, 28672, 4096),
        (8192, 8192, 8192), (4096, 12288, 12288), (1024, 2048, 2048))  # fmt: skip
"""m, n, k of the other dtypes."""


def tasks(place: Place) -> Iterator[Task]:
    rows = {
        "matmul, bfloat16": (_matmuls(place, torch.bfloat16), 28),
        "flash attention, forward": (_attention(place, "FLASH_ATTENTION", False), 18),
        "flash attention, backward": (_attention(place, "FLASH_ATTENTION", True), 22),
        "whole models, forward and backward": (_models(place), 40),
        "experts, forward and backward": (_experts(place), 20),
        "memory and elementwise": (_others(place), 20),
        "launch": (_launches(place), 12),
        "matmul, float8": (_float8(place), 10),
        "matmul, float32": (_matmuls(place, torch.float32), 12),
        "matmul, float16": (_matmuls(place, torch.float16), 10),
        "cudnn attention, forward": (_attention(place, "CUDNN_ATTENTION", False), 15),
        "cudnn attention, backward": (_attention(place, "CUDNN_ATTENTION", True), 18),
    }
    for what, (made, seconds) in rows.items():
        yield Task(what, partial(_table, made, seconds), seconds + 25)


def _table(rows: Rows, seconds: float) -> Figures:
    """The rows that can be measured in this many seconds."""
    began, found, errors, left_out = time.monotonic(), list[Row](), list[str](), 0
    clusters = Clusters.here()
    for row in rows:
        if time.monotonic() - began > seconds:
            left_out += 1
            continue
        try:
            found.append(row())
        except Exception as error:
            errors.append(traceback.format_exc())
            if isinstance(error, NotRun) or "CUDA error" in str(error):
                raise
    figures = {"forecast": clusters.forecast, "sheet": clusters.sheet, "rows": found}
    figures |= {"left_out": left_out} if left_out else {}
    if errors:
        raise Wrong(f"{len(errors)} rows could not be measured, the first one because of\n{errors[0]}", figures)
    return figures


def _row(what: str, program: Callable[..., Any], args: Sequence[Any], place: Place, meta: bool = True) -> Row:
    """A row of a program that has no backward pass."""
    with torch.no_grad():
        measured, eager = (
            kernel_seconds(lambda: program(*args), place.device),
            eager_seconds(lambda: program(*args), place.device),
        )
    clusters = Clusters.here()
    says = [modelled(program, args, cluster, place.device).both for cluster in clusters]
    bare = modelled(program, args, clusters.forecast, "meta").both if meta else None
    return [what, measured, eager, *says, bare]


def _drawn(place: Place, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=place.device, dtype=dtype)


# --- matmuls ----------------------------------------------------------------------------------------------------------


def _sizes(place: Place, dtype: torch.dtype) -> Sequence[tuple[int, int, int]]:
    if place.quick:
        return ((16, 32, 64), (64, 64, 64))
    if dtype is torch.bfloat16:
        return [(m, n, k) for m in HEIGHTS for n, k in SHAPES]
    return SOME


def _matmuls(place: Place, dtype: torch.dtype) -> Rows:
    """Matmuls of x [m, k] and w [n, k], as in a linear layer."""
    for m, n, k in _sizes(place, dtype):

        def row(m: int = m, n: int = n, k: int = k) -> Row:
            x, w = _drawn(place, m, k, dtype=dtype), _drawn(place, n, k, dtype=dtype)
            with torch.no_grad():
                measured, eager = (
                    seconds(partial(F.linear, x, w), place.device) for seconds in (kernel_seconds, eager_seconds)
                )
            return [f"{m} x {n} x {k}", measured, eager, *_says(m, n, k, dtype), None]

        yield row


def _says(m: int, n: int, k: int, dtype: torch.dtype) -> list[float]:
    name = str(dtype).removeprefix("torch.")
    return [cost.find(cluster).chip.matmul_seconds(m, n, k, name) for cluster in Clusters.here()]


def _float8(place: Place) -> Rows:
    """Matmuls with one scale per matrix, and outputs in bfloat16."""
    for m, n, k in _sizes(place, torch.float8_e4m3fn):

        def row(m: int = m, n: int = n, k: int = k) -> Row:
            place.need_gpu()
            x, w = (_drawn(place, *shape).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
            one = torch.ones((), device=place.device)
            work = partial(torch._scaled_mm, x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
            measured, eager = (seconds(work, place.device) for seconds in (kernel_seconds, eager_seconds))
            return [f"{m} x {n} x {k}", measured, eager, *_says(m, n, k, torch.float8_e4m3fn), None]

        yield row


# --- attention --------------------------------------------------------------------------------------------------------


def _attention(place: Place, kernel: str, backward: bool) -> Rows:
    """Causal, in bfloat16, with 16,384 tokens in all and 2,048 features; the last has 32,768 tokens."""
    sizes = [(2048, 8), (4096, 4), (8192, 2), (16384, 1), (32768, 1)]
    for width in (64, 128):
        for length, batch in [(64, 1)] if place.quick else sizes:

            def row(width: int = width, length: int = length, batch: int = batch) -> Row:
                if place.device != "cuda" and kernel != "FLASH_ATTENTION":
                    place.need_gpu()
                shape = (batch, 2048 // width, length, width)
                q, k, v, do = (_drawn(place, *shape) for _ in range(4))
                name = f"{batch} x {length} tokens, {2048 // width} heads of {width}"
                if not backward:
                    return _row(name, partial(_attend, kernel), (q, k, v), place)
                leaves = [x.requires_grad_() for x in (q, k, v)]
                o = _attend(kernel, *leaves)
                measured = eager_seconds(lambda: torch.autograd.grad(o, leaves, do, retain_graph=True), place.device)
                clusters = Clusters.here()
                args = (*leaves, do)
                says = [modelled(partial(_both, kernel), args, cluster, place.device).backward for cluster in clusters]
                bare = modelled(partial(_both, kernel), args, clusters.forecast, "meta").backward
                return [name, measured, measured, *says, bare]

            yield row


def _attend(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    is_chosen = q.device.type == "cuda" or (q.device.type == "meta" and kernel == "CUDNN_ATTENTION")
    with sdpa_kernel(getattr(SDPBackend, kernel)) if is_chosen else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _both(kernel: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(_attend(kernel, q, k, v), (q, k, v), do)


# --- everything else --------------------------------------------------------------------------------------------------


def _others(place: Place) -> Rows:
    n, d, words = (64, 32, 100) if place.quick else (16384, 4096, 50304)
    x, y = _drawn(place, n, d), _drawn(place, n, d)
    wide = _drawn(place, n // 4, words, dtype=torch.float32)
    ids = torch.randint(words, (n,), device=place.device)
    table = _drawn(place, words, d)
    weight, bias = _drawn(place, d), _drawn(place, d)
    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "add": (torch.add, (x, y)),
        "add, float32": (torch.add, (x.float(), y.float())),
        "gelu": (partial(F.gelu, approximate="tanh"), (x,)),
        "silu times another": (lambda a, b: F.silu(a) * b, (x, y)),
        "layer norm": (lambda a, w, b: F.layer_norm(a, (d,), w, b), (x, weight, bias)),
        "rms norm": (lambda a, w: F.rms_norm(a, (d,), w), (x, weight)),
        "softmax": (lambda a: a.softmax(-1), (x,)),
        "dropout": (lambda a: F.dropout(a, 0.1), (x,)),
        "to float32": (lambda a: a.float(), (x,)),
        "transposed copy": (lambda a: a.t().contiguous(), (x,)),
        "sum of rows": (lambda a: a.sum(-1), (x,)),
        "sum of columns": (lambda a: a.sum(0), (x,)),
        "embedding": (F.embedding, (ids, table)),
        "cross entropy, float32": (F.cross_entropy, (wide, ids[: n // 4])),
        "add, 1 MiB": (torch.add, (x.flatten()[: 1 << 19], y.flatten()[: 1 << 19])),
    }
    for what, (program, args) in programs.items():
        yield partial(_row, what, program, args, place)


def _launches(place: Place) -> Rows:
    """Operations with almost no work: the cost of a kernel, and of Python before it."""
    x, w = _drawn(place, 8, 64), _drawn(place, 64, 64)
    leaf = _drawn(place, 8, 64).requires_grad_()
    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "add of 512 numbers": (torch.add, (x, x)),
        "matmul of 8 x 64 x 64": (F.linear, (x, w)),
        "layer norm of 512 numbers": (lambda a: F.layer_norm(a, (64,)), (x,)),
        "ten adds, one after another": (_ten_adds, (x,)),
    }
    for what, (program, args) in programs.items():
        yield partial(_row, what, program, args, place)

    def with_backward() -> Row:
        def program(a: Tensor) -> Tensor:
            return torch.autograd.grad(_ten_adds(a).sum(), a)[0]

        eager = eager_seconds(lambda: program(leaf), place.device)
        says = [modelled(program, (leaf,), cluster, place.device).both for cluster in Clusters.here()]
        return ["ten adds and a sum, forward and backward", eager, eager, *says, None]

    yield with_backward


def _ten_adds(x: Tensor) -> Tensor:
    for _ in range(10):
        x = x + 1
    return x


def _models(place: Place) -> Rows:
    """Forward and backward passes. `measured` is a CUDA graph of both if torch can capture it, or else eager."""
    some = {
        "block, 4,096 tokens of 4,096 features": lambda: (Block(4096, 32), (1, 4096, 4096)),
        "block, 8 x 2,048 tokens of 2,048 features": lambda: (Block(2048, 16), (8, 2048, 2048)),
        "block, 16 x 1,024 tokens of 768 features": lambda: (Block(768, 12), (16, 1024, 768)),
        "GPT of 124 million parameters, 8 x 1,024 tokens": lambda: (SmallGPT(50304, 768, 12, 12), (8, 1024)),
        "GPT of 124 million parameters, 1 x 256 tokens": lambda: (SmallGPT(50304, 768, 12, 12), (1, 256)),
    }
    tiny = {
        "block": lambda: (Block(32, 2), (1, 16, 32)),
        "GPT": lambda: (SmallGPT(64, 32, 2, 2), (1, 16)),
    }
    for what, make in (tiny if place.quick else some).items():
        yield partial(_model_row, what, make, place)


def _experts(place: Place) -> Rows:
    """Layers of experts with equal loads: of Mixtral, of Qwen3-30B, and one of 32 ranks' part of DeepSeek-V3."""
    some = {
        "Mixtral: 4,096 tokens, 2 of 8 experts": (4096, 14336, 8, 2, 4096),
        "Qwen3-30B: 4,096 tokens, 8 of 128 experts": (2048, 768, 128, 8, 4096),
        "Qwen3-30B: 16,384 tokens, 8 of 128 experts": (2048, 768, 128, 8, 16384),
        "DeepSeek-V3: 8 experts, 4,096 rows": (7168, 2048, 8, 1, 4096),
        "DeepSeek-V3: 8 experts, 32,768 rows": (7168, 2048, 8, 1, 32768),
    }
    for what, sizes in {"experts": (32, 16, 4, 2, 64)}.items() if place.quick else some.items():
        yield partial(_model_row, what, lambda sizes=sizes: (Mixture(*sizes), (sizes[-1], sizes[0])), place)


def _model_row(what: str, make: Callable[[], tuple[torch.nn.Module, tuple[int, ...]]], place: Place) -> Row:
    with torch.device(place.device):
        model, shape = make()
        is_ids = isinstance(model, SmallGPT)
        x = torch.randint(64, shape) if is_ids else torch.randn(shape, dtype=torch.bfloat16)
    model.to(torch.bfloat16)
    work = partial(trained, model, x)
    eager = eager_seconds(work, place.device)
    try:
        measured = kernel_seconds(work, place.device)
    except RuntimeError as error:
        if "out of memory" in str(error):
            raise
        torch.cuda.synchronize()
        what, measured = f"{what} (not captured: {str(error)[:60]})", eager
    model.zero_grad(set_to_none=True)
    clusters = Clusters.here()
    says = [modelled(trained, (model, x), cluster, place.device).both for cluster in clusters]
    bare = modelled(trained, (model, x), clusters.forecast, "meta").both
    return [what, measured, eager, *says, bare]
