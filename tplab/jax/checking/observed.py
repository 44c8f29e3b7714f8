"""What the devices of a mesh have of a value: the same, pieces of it, or parts of a sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

Axes = tuple[str, ...]


class Observed(NamedTuple):
    """What devices have of a value.

    cut      the axes over which each of its dims is divided
    partial  the axes over which the devices' values are to be added
    scale    what they make then, divided by the value: in the backward pass of a mean of local means, their number
    only     the axis, and the place along it, of the devices that alone have the value
    """

    cut: tuple[Axes, ...]
    partial: Axes
    scale: int = 1
    only: tuple[str, int] | None = None


def observed(x: Any, whole: Any, axes: Mapping[str, int], tolerance: float) -> list[Observed] | None:
    """All types with which x, whose first dims are the axes of a mesh, is `whole`. None where shapes cannot tell."""
    if x.ndim != len(axes) + whole.ndim:
        return None
    local = x.shape[len(axes) :]
    axes = {name: size for name, size in axes.items() if size > 1}
    x = x.reshape([*axes.values(), *local])
    found, is_known = list[Observed](), False
    is_float = x.dtype.kind == "f"
    want, got = whole.astype(np.float64), x.astype(np.float64)
    slack = tolerance * max(float(np.abs(want).max(initial=0)), float(np.abs(got).max(initial=0)) if is_float else 0)
    for cut in cuts(local, whole.shape, axes):
        is_known = True
        divided = [name for entry in cut for name in entry]
        free = [name for name in axes if name not in divided]
        for partial in (some for n in range(len(free) + 1) for some in combinations(free, n)):
            if x.dtype.kind == "b" and partial:
                continue
            total = got.sum(tuple(i for i, name in enumerate(axes) if name in partial), keepdims=True)
            pieces = _assembled(total, cut, axes)
            scales = {prod(axes[n] for n in some) for k in range(3) for some in combinations([*divided, *partial], k)}
            for scale in sorted(scales) if is_float else [1]:
                if pieces.shape[len(axes) :] == whole.shape and _near(pieces, scale * want, slack * scale):
                    found.append(Observed(cut, partial, scale))
                    break
            if found and not found[-1].partial:
                break
    if not found and is_known and is_float and local == whole.shape:
        for place, (name, size) in enumerate(axes.items()):
            ranks = [k for k in range(size) if _near(np.take(got, k, place), want, slack)]
            if len(ranks) == 1 and np.abs(want).max(initial=0) > 0:
                found.append(Observed(((),) * whole.ndim, (), 1, (name, ranks[0])))
    return found if is_known else None


def _near(got: np.ndarray, want: np.ndarray, slack: float) -> bool:
    with np.errstate(invalid="ignore"):
        return bool((np.abs(got - want) <= slack).all())


def cuts(local: Sequence[int], whole: Sequence[int], axes: Mapping[str, int]) -> Iterator[tuple[Axes, ...]]:
    """All ways to cut a shape into pieces of another one."""
    choices = []
    for size, full in zip(local, whole):
        if not size or full % size:
            return
        groups = [some for n in range(len(axes) + 1) for some in permutations(axes, n)]
        choices.append([some for some in groups if prod(axes[n] for n in some) == full // size])
    for cut in product(*choices):
        names = [name for entry in cut for name in entry]
        if len(names) == len(set(names)):
            yield cut


def _assembled(x: np.ndarray, cut: Sequence[Axes], axes: Mapping[str, int]) -> np.ndarray:
    """Pieces put together: axes over which they are divided keep a dim of one."""
    names, n = list(axes), len(axes)
    order = [i for i, name in enumerate(names) if not any(name in entry for entry in cut)]
    kept, sizes = len(order), []
    for dim, entry in enumerate(cut):
        order += [*(names.index(name) for name in entry), n + dim]
        sizes.append(x.shape[n + dim] * prod(axes[name] for name in entry))
    return x.transpose(order).reshape([*x.transpose(order).shape[:kept], *[1] * (n - kept), *sizes])
