"""An exercise of lab 07: write a dropout whose masks depend on a key and on the rank's position."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, product
from typing import Any

import numpy as np

from tplab.exercises.damage import Untouched
from tplab.exercises.dropout import EACH, corner, is_off
from tplab.exercises.verdict import Verdict, check, refuse, right, run_on
from tplab.mesh import Mesh
from tplab.widgets.matrices import Panel

MESHES = (Mesh(tp=4), Mesh(tp=3), Mesh(dp=2, tp=2), Mesh(tp=1))
MANY = Mesh(tp=130)
"""Enough ranks that seeds such as 100 * key + index collide."""

_AXES = {1: (None, "tp"), 2: (None, "tp", "dp", ("dp", "tp"))}  # by the number of axes of the mesh
_KEYS, _P = (0, 1, 2, 3), 0.25
_FEW = Mesh(tp=12), (*range(30), 100, 1000, 10_000), (8, 16)
_Masks = dict[tuple[Any, int], list[np.ndarray]]  # (axis, key) -> each rank's result divided by x


@check("drop", not_with=("dropout",), libraries=("tplab",))
def check_drop(fn: Callable[..., Any]) -> Verdict:
    """Check that `fn(x, p, key, axis)`, in torch, is a dropout whose mask depends on the key and the rank along `axis`.

    x any shape   p the fraction that is dropped   key an integer, the same on every rank   axis as in tplab's dropout
    """
    panels: list[Panel] = []
    with _hashed(fn) as texts:
        for mesh in MESHES:
            masks, harm = _drawn(fn, mesh)
            _look(masks, mesh)
            if harm:
                refuse(f", on {mesh}: the masks are right, but {harm}")
            panels = panels or [corner(f"rank {rank}", mask) for rank, mask in enumerate(masks["tp", 0])]
        for mesh, keys, shape in (_FEW, (MANY, (0, 1, 2), (6, 16))):
            _look_at_keys(_many(fn, mesh, keys, shape), (None, "tp"), mesh, apart="tp")
    if texts:
        refuse(
            f": it draws the right masks here, but it takes `hash` of the text {texts[0]!r}, which is another number "
            "in every Python process.\nOn a cluster each rank is a process, and the ranks would not agree. The rank's "
            "index is a number: use that alone."
        )
    text = f" is right on {', '.join(map(str, MESHES))}.\nNo two draws share a mask on up to {MANY.size} ranks."
    return right(f"{text} Here are its masks inside, on {MESHES[0]}.", panels)


@contextmanager
def _hashed(fn: Callable[..., Any]) -> Iterator[list[str]]:
    """Collect the strings whose `hash` the learner's code takes inside."""
    found: list[str] = []
    theirs, original = getattr(fn, "__globals__", None), builtins.hash

    def noting(value: Any, /) -> int:
        if sys._getframe(1).f_globals is theirs:
            found.extend(_texts(value))
        return original(value)

    builtins.hash = noting
    try:
        yield found
    finally:
        builtins.hash = original


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | frozenset):
        for part in value:
            yield from _texts(part)


# --- drawing ---------------------------------------------------------------------------------------------------------


def _drawn(fn: Callable[..., Any], mesh: Mesh) -> tuple[_Masks, str]:
    """Each rank's masks for every axis and key, and the damage. Before each draw, the ranks' own generators differ."""
    import torch

    from tplab.torch import axis_index

    calls = [(axis, key) for axis in _AXES[len(mesh.shape)] for key in _KEYS]

    def program() -> tuple[list[Any], str]:
        results, harm = [], ""
        for axis, key in calls:
            torch.manual_seed(0)
            torch.rand(axis_index(mesh.axis_names))
            x = torch.randn(32, 16, generator=torch.Generator().manual_seed(key)) + 10
            before, whole = Untouched({"x": x}), x.clone()
            y = fn(x, _P, key, axis)
            if not isinstance(y, torch.Tensor):
                found = "None; is a `return` missing?" if y is None else f"an object of type {type(y).__name__}"
                raise TypeError(f"it must return a tensor, and it returned {found}")
            harm = harm or before.damage()
            results.append((y.detach() / whole if y.shape == x.shape else y.detach()).numpy())
        return results, harm or _of_other_kinds(fn)

    out = run_on(mesh, program)
    masks = {call: [results[place] for results, _ in out.per_rank] for place, call in enumerate(calls)}
    harm = next((harm for _, harm in out.per_rank if harm), "")
    if not harm and (num_bytes := out.trace.bytes_sent()):
        harm = f"the ranks send {num_bytes:,} bytes. Ranks that share a key can agree on a mask without any message."
    return masks, harm


def _of_other_kinds(fn: Callable[..., Any]) -> str:
    """The fault in a draw for x of another shape and another p, or of its gradient, in words; "" if there is none."""
    import torch

    x = torch.full((20, 3, 40), 2.0, requires_grad=True)
    y = fn(x, 0.5, 7, None)
    if y.shape != x.shape:
        return f"for x of shape {list(x.shape)} the result has shape {list(y.shape)}."
    if not torch.isin(y.detach(), torch.tensor([0.0, 4.0])).all() or is_off(
        float((y == 0).float().mean()), x.numel(), 0.5
    ):
        return "with p = 0.5 it does not drop half of the numbers and double the others."
    if not y.requires_grad:
        return "no gradient reaches x: something cuts the result off, such as `detach()`, `.data` or `no_grad`."
    (dx,) = torch.autograd.grad(y.sum(), x)
    if not torch.allclose(dx, y.detach() / 2):
        return "the gradient of x is not right: where a number is dropped it is 0, and elsewhere 1 / (1 - p)."
    return ""


def _many(fn: Callable[..., Any], mesh: Mesh, keys: tuple[int, ...], shape: tuple[int, int]) -> _Masks:
    """Each rank's masks for many keys, or on many ranks."""
    import torch

    calls = [*product((None, "tp"), keys)]
    per_rank = run_on(mesh, lambda: [fn(torch.ones(shape), 0.5, key, axis).detach() for axis, key in calls]).per_rank
    return {call: [results[place].numpy() for results in per_rank] for place, call in enumerate(calls)}


# --- what is wrong ---------------------------------------------------------------------------------------------------


def _look(masks: _Masks, mesh: Mesh) -> None:
    """Refuse masks that are wrong, the most basic first."""
    first = masks[None, 0][0]
    if first.shape != (32, 16):
        refuse(f", on {mesh}: the result has shape {list(first.shape)}, but x has [32, 16].")
    shown = [corner("rank 0", first)]
    if not all((np.isclose(mask, 1 / (1 - _P)) | (mask == 0)).all() for drawn in masks.values() for mask in drawn):
        text = f"with p = {_P}, every number of x must become 0 or x / {1 - _P}. The table shows y / x."
        refuse(f", on {mesh}: {text}", shown)
    together = [("row", first[:1]), ("column", first[:, :1])]
    if alike := next((which for which, one in together if ((first == 0) == (one == 0)).all()), ""):
        refuse(f", on {mesh}: every {alike} of a mask is the same.\n{EACH}", shown)
    different = {mask.tobytes(): mask for drawn in masks.values() for mask in drawn}.values()  # copies add nothing
    share = float(np.mean([mask == 0 for mask in different]))
    if is_off(share, first.size * len(different), _P):
        refuse(f", on {mesh}: with p = {_P}, {share:.0%} of the numbers are dropped.", shown)
    if len({int((mask == 0).sum()) for drawn in masks.values() for mask in drawn}) == 1:
        refuse(f", on {mesh}: every mask drops the same number of entries.\n{EACH}", shown)
    for (axis, _), drawn in masks.items():
        _look_at_ranks(axis, drawn, mesh)
    _look_at_keys(masks, _AXES[len(mesh.shape)], mesh)


def _look_at_ranks(axis: Any, drawn: list[np.ndarray], mesh: Mesh) -> None:
    """Refuse different masks at the same position along the axis, and equal masks at different positions."""
    for one, other in combinations(mesh.ranks, 2):
        is_equal = bool(((drawn[one] != 0) == (drawn[other] != 0)).all())
        if is_equal == (axis is None or mesh.index(one, axis) == mesh.index(other, axis)):
            continue
        if is_equal:
            hint = f"ranks {one} and {other} draw the same mask with axis={axis!r}, but they hold different data."
        else:
            hint = (
                f"ranks {one} and {other} draw different masks with axis={axis!r}, but they hold the same data.\n"
                f"Make a new generator from the key{'' if axis is None else f' and the index along {axis!r}'} alone in "
                "each call.\nOthers differ: torch's own, one made from the rank, and one that is kept between calls."
            )
        refuse(f", on {mesh}: {hint}", [corner(f"rank {rank}", drawn[rank]) for rank in (one, other)])


def _look_at_keys(masks: _Masks, axes: Sequence[Any], mesh: Mesh, apart: Any = None) -> None:
    """Refuse equal masks of draws with different keys, even on different ranks and along different axes. Along the axis
    `apart`, all ranks are at different positions, so their masks must also differ with the same key."""
    orders = [[axis] for axis in axes] + [list(axes)]
    for order in orders:
        known: dict[bytes, tuple[Any, int, int]] = {}
        for key, axis in product(sorted({key for _, key in masks}), order):
            for rank, mask in enumerate(masks[axis, key]):
                other_axis, other_key, other = known.setdefault((mask != 0).tobytes(), (axis, key, rank))
                if other_key == key and not (axis == other_axis == apart and rank != other and apart):
                    continue
                if axis != other_axis:
                    hint = (
                        f"rank {rank} draws the same mask with key {key} and axis={axis!r} as rank {other} with key "
                        f"{other_key} and axis={other_axis!r}."
                    )
                elif rank == other:
                    hint = (
                        f"keys {other_key} and {key} give the same mask.\nDoes the seed depend on the key? torch's "
                        "generator looks only at the low 32 bits of a seed."
                    )
                else:
                    hint = (
                        f"with axis={axis!r}, rank {rank} draws the same mask with key {key} as rank {other} with key "
                        f"{other_key}.\nTwo different pairs of key and index must never give the same mask."
                    )
                panels = [corner(f"key {other_key}, rank {other}", masks[other_axis, other_key][other])]
                refuse(f", on {mesh}: {hint}", [*panels, corner(f"key {key}, rank {rank}", mask)])
